"""The matrix product of engine/matmul3d.py on its own, against a dense one."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from hf_axonn import parallelize
from hf_axonn.compat.torch import fake_world
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.engine.activation_layouts import bounds, ceil_div, pad_dim
from hf_axonn.engine.matmul3d import (
    Product,
    gathered_weight,
    input_gradient,
    list_matrices,
    multiply,
    multiply_packed,
    weight_gradient,
)
from hf_axonn.engine.state import ParallelState
from hf_axonn.engine.weight_layout import weight_layout
from hf_axonn.parallel.install import shard_parameters
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.weight_kind import WeightKind
from tests.helpers.devices import rank_device, seeded
from tests.helpers.operators import Operators, widen_on_cpu
from tests.helpers.ranks import all_grids, run_ranks


pytestmark = pytest.mark.usefixtures("device")


SIZES = [(6, 10, 14), (5, 7, 3), (3, 1, 1), (4, 2, 5)]  # M, K, N: all different, some smaller than an axis


@pytest.mark.parametrize("in_blocks", [1, 3])
@pytest.mark.parametrize("out_blocks", [1, 2])
def test_blocked_products_are_einsums(in_blocks, out_blocks):
    torch.manual_seed(0)
    input_ = torch.randn(in_blocks, 5, 4, dtype=torch.float64)
    weights = [torch.randn(out_blocks, size, in_blocks, 4, dtype=torch.float64) for size in (3, 2)]
    expected = [torch.einsum("ptk,qnpk->qtn", input_, weight) for weight in weights]
    outputs = multiply(input_, weights)
    if out_blocks > 1:
        assert len(outputs) == 1  # one reduction serves all
        outputs = outputs[0].split([3, 2], dim=2)
    for output, its in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, its)
    products = [lambda rows, bias, matrix=matrix: rows @ matrix.t() for matrix in list_matrices(weights)]
    packed = multiply_packed(input_, products, out_blocks)
    assert len(packed) == (1 if out_blocks > 1 else 2)
    torch.testing.assert_close(torch.cat(packed, dim=-1), torch.cat(expected, dim=-1))
    grads = [torch.randn_like(output) for output in expected]
    terms = [torch.einsum("qtn,qnpk->ptk", grad, weight) for grad, weight in zip(grads, weights, strict=True)]
    torch.testing.assert_close(input_gradient(grads, weights), sum(terms))
    for grad in grads:
        torch.testing.assert_close(weight_gradient(grad, input_), torch.einsum("qtn,ptk->qnpk", grad, input_))
    if in_blocks == out_blocks == 1:
        matrices = [weight[0, :, 0] for weight in weights]
        assert all(map(torch.equal, multiply(input_[0], matrices), [output[0] for output in outputs]))
        assert torch.equal(input_gradient([grad[0] for grad in grads], matrices), input_gradient(grads, weights)[0])
        assert torch.equal(weight_gradient(grads[0][0], input_[0]), weight_gradient(grads[0], input_)[0, :, 0])


def dense(tokens, k, n, samples):
    """Inputs and output gradients of every samples rank, a weight, and what one process makes of them."""
    generator = seeded(tokens * 100 + k * 10 + n)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs, weight, grads = random(samples, tokens, k), random(n, k), random(samples, tokens, n)
    return inputs, weight, grads


def axis_slice(size, mesh, axis):
    return slice(*bounds(size, mesh.size(axis), mesh.index(axis)))


def check_product(grid, tokens, k, n, kind):
    """`column` and `row`: the caller's part, reductions and the shards they make, is done with plain slices here."""
    mesh = grid_mesh(grid, rank_device().type)
    state = ParallelState(mesh, AxonnConfig(grid=grid, reduce_dtype="float64"))
    inputs, weight, grads = dense(tokens, k, n, grid.dp_size)
    linear = nn.Linear(k, n, bias=False, dtype=torch.float64)
    linear.weight.data = weight.clone()
    shard_parameters(linear, {id(linear.weight): kind}, state)
    cut = weight_layout(kind, n, k, mesh)
    state.context.begin_forward(state.weights)
    product = Product(state, [state.weight_of(linear)], [cut])
    sample = mesh.index("data", "z")
    in_axis, out_axis = ("x", "y") if kind == WeightKind.ROW else ("y", "x")
    cols, rows = axis_slice(k, mesh, in_axis), axis_slice(n, mesh, out_axis)
    mine = pad_dim(inputs[sample][:, cols], 1, cut.in_blocks * cut.in_size)
    blocks = mine.view(tokens, cut.in_blocks, cut.in_size).transpose(0, 1).clone().requires_grad_()
    (output,) = product.run(blocks)
    assert output.dim() == (2 if cut.in_blocks > cut.out_blocks == 1 else 3)
    output = output.view(cut.out_blocks, tokens, cut.out_size)
    # output: a partial sum over in_axis of the features on out_axis, blocked and padded
    partial = inputs[sample][:, cols] @ weight[rows, cols].T
    expected = pad_dim(partial, 1, cut.out_blocks * cut.out_size)
    expected = expected.view(tokens, cut.out_blocks, cut.out_size).transpose(0, 1)
    torch.testing.assert_close(output, expected)
    given = pad_dim(grads[sample][:, rows], 1, cut.out_blocks * cut.out_size)
    output.backward(given.view(tokens, cut.out_blocks, cut.out_size).transpose(0, 1).contiguous())
    dinput = pad_dim(grads[sample][:, rows] @ weight[rows, cols], 1, cut.in_blocks * cut.in_size)
    dinput = dinput.view(tokens, cut.in_blocks, cut.in_size).transpose(0, 1)
    torch.testing.assert_close(blocks.grad, dinput)
    # dW: averaged over z; the average over data is sync_gradients'
    same_data = [mesh.index("data") * grid.z + z for z in range(grid.z)]
    mean = sum(grads[other].T @ inputs[other] for other in same_data) / grid.z
    shard = mean[rows, cols]
    shard = shard[slice(*bounds(len(shard), grid.z, mesh.index("z")))]
    torch.testing.assert_close(linear.weight.grad.to_local(), shard)
    torch.testing.assert_close(linear.weight.grad.shape, linear.weight.shape)


def check_gathered(grid, n, k):
    """An embedding's way: the block itself, and its gradient scattered again."""
    mesh = grid_mesh(grid, rank_device().type)
    state = ParallelState(mesh, AxonnConfig(grid=grid, reduce_dtype="float64"))
    table = nn.Embedding(n, k, dtype=torch.float64)
    table.weight.data = torch.arange(float(n * k), dtype=torch.float64).view(n, k)
    whole = table.weight.data.clone()
    shard_parameters(table, {id(table.weight): WeightKind.VOCABULARY}, state)
    cut = weight_layout(WeightKind.VOCABULARY, n, k, mesh)
    state.context.begin_forward(state.weights)
    block = gathered_weight(Product(state, [state.weight_of(table)], [cut]))
    y_rows = whole[slice(*bounds(n, grid.y, mesh.index("y")))]
    rows = y_rows[slice(*bounds(len(y_rows), grid.x, mesh.index("x")))]
    assert block.shape[0] == ceil_div(ceil_div(n, grid.y), grid.x)
    torch.testing.assert_close(block[: len(rows)], rows)
    factor = 1.0 + mesh.index("z")
    (block[: len(rows)] * factor).sum().backward()
    mean = sum(1.0 + z for z in range(grid.z)) / grid.z
    assert torch.all(table.weight.grad.to_local() == mean) and table.weight.grad.to_local().shape[1] == k


def products(grids):
    for grid in grids:
        for tokens, k, n in SIZES:
            for kind in (WeightKind.COLUMN, WeightKind.ROW):
                check_product(grid, tokens, k, n, kind)
        check_gathered(grid, 7, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_autocast_casts_what_it_casts_of_torchs_own_products(dtype):
    device = rank_device()
    linear, input_ = nn.Linear(4, 3, device=device, dtype=dtype), torch.ones(2, 4, device=device, dtype=dtype)
    with torch.autocast(device.type, torch.bfloat16):
        assert ParallelState.compute_dtype(input_) == linear(input_).dtype


def test_products_on_four_ranks():
    run_ranks(products, 4, [grid for grid in all_grids(4) if grid.data == 1 or grid.z == 2])


def test_products_on_six_ranks():
    """2 x 3: an exchange of x and y cannot pass unseen."""
    run_ranks(products, 6, [Grid(y=2, x=3), Grid(y=3, x=2), Grid(z=2, y=3)])


def a_group():
    """Several weights with one input: one gather, one output for one reduction, the sum of their input gradients."""
    grid = Grid(z=2, y=2)
    mesh = grid_mesh(grid, rank_device().type)
    state = ParallelState(mesh, AxonnConfig(grid=grid, reduce_dtype="float64"))
    torch.manual_seed(0)
    linears = nn.ModuleList([nn.Linear(6, n, bias=False, dtype=torch.float64) for n in (4, 2, 5)])
    whole = [linear.weight.data.clone() for linear in linears]
    linears[1].weight.requires_grad_(False)
    shard_parameters(linears, {id(linear.weight): WeightKind.COLUMN for linear in linears}, state)
    layouts = [weight_layout(WeightKind.COLUMN, len(weight), 6, mesh) for weight in whole]
    state.context.begin_forward(state.weights)
    product = Product(state, [state.weight_of(linear) for linear in linears], layouts)
    input_ = torch.randn(1, 5, 3, dtype=torch.float64, requires_grad=True)
    (merged,) = product.run(input_)
    assert merged.shape == (2, 5, sum(layout.out_size for layout in layouts))
    merged.sum().backward()
    cols = axis_slice(6, mesh, "y")
    torch.testing.assert_close(input_.grad[0], sum(weight[:, cols].sum(0) for weight in whole).expand(5, 3))
    assert linears[1].weight.grad is None
    assert linears[0].weight.grad is not None and linears[2].weight.grad is not None
    with torch.no_grad():
        assert not product.run(input_)[0].requires_grad


def test_several_weights_are_multiplied_as_one_group():
    run_ranks(a_group, 4)


def gradients_of_bfloat16():
    """Weights travel in the compute dtype, gradients are summed in reduce_dtype and end in the dtype of the shard."""
    grid = Grid(z=4)
    mesh = grid_mesh(grid, rank_device().type)
    for reduce_dtype, expected in (("float32", 1 + 3 * 2**-9), ("bfloat16", 1.0)):
        state = ParallelState(mesh, AxonnConfig(grid=grid, reduce_dtype=reduce_dtype))
        linear = nn.Linear(1, 4, bias=False)
        linear.weight.data.fill_(1.0)
        shard_parameters(linear, {id(linear.weight): WeightKind.COLUMN}, state)
        state.context.begin_forward(state.weights)
        product = Product(state, [state.weight_of(linear)], [weight_layout(WeightKind.COLUMN, 4, 1, mesh)])
        # one large and three small terms, whose sum bfloat16 rounds to the large one
        scale = 4.0 if mesh.rank == 0 else 2**-7 * 1.0
        input_ = torch.full((1, 1, 1), scale, dtype=torch.bfloat16)
        (output,) = product.run(input_)
        assert output.dtype == torch.bfloat16
        output.sum().backward()
        gradient = linear.weight.grad.to_local()
        assert gradient.dtype == torch.float32
        assert abs(gradient.item() - expected) < (1e-6 if reduce_dtype == "float32" else 1e-2), gradient.item()
        if reduce_dtype == "float32":
            assert gradient.item() > 1


def test_gradients_are_summed_in_reduce_dtype():
    run_ranks(gradients_of_bfloat16, 4)


def weight_gradients(widens, reduce_dtype, inputs, weight, grads):
    """Largest error of a bfloat16 product's weight gradient, and how many products were written in float32, by grid.

    The truth is one product over the samples of all ranks in float64, of the same bfloat16 numbers.
    """
    if widens:
        widen_on_cpu()
    found = {}
    for grid in (Grid(z=2), Grid(y=2), Grid(x=2)):
        mesh = grid_mesh(grid, "cpu")
        state = ParallelState(mesh, AxonnConfig(grid=grid, reduce_dtype=reduce_dtype))
        assert not state.widens
        state.widens = widens
        linear = nn.Linear(weight.shape[1], len(weight), bias=False)
        linear.weight.data = weight.float().clone()
        shard_parameters(linear, {id(linear.weight): WeightKind.COLUMN}, state)
        state.context.begin_forward(state.weights)
        layout = weight_layout(WeightKind.COLUMN, *weight.shape, mesh)
        product = Product(state, [state.weight_of(linear)], [layout])
        input_, grad = inputs[mesh.index("z")], grads[mesh.index("z")]
        (output,) = product.run(input_[:, axis_slice(weight.shape[1], mesh, "y")][None])
        own = grad[:, axis_slice(len(weight), mesh, "x")].unflatten(1, (layout.out_blocks, -1))
        with Operators() as called:
            output.backward(own.transpose(0, 1).reshape(output.shape))
        shard = linear.weight.grad
        assert shard.dtype == torch.float32
        samples = range(grid.z)
        truth = sum(grads[i].double().t() @ inputs[i].double() for i in samples)
        error = (shard.full_tensor().double() * grid.z - truth).abs().max() / truth.abs().max()
        found[str(grid)] = error.item(), called.names.count("mm.dtype_out")
    return found


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_the_error_of_gradients_that_are_reduced(reduce_dtype):
    """Once rounded to bfloat16 as on one process, or not at all where the product is written in float32."""
    generator = torch.Generator().manual_seed(0)
    inputs, grads = (torch.randn(2, 30, size, generator=generator).bfloat16() for size in (6, 8))
    weight = torch.randn(8, 6, generator=generator).bfloat16()
    given = (reduce_dtype, inputs, weight, grads)
    (narrow, _), (wide, _) = (run_ranks(weight_gradients, 2, widens, *given) for widens in (False, True))
    eps = torch.finfo(torch.bfloat16).eps
    blocks = {str(Grid(z=2)): 1, str(Grid(y=2)): 2, str(Grid(x=2)): 1}
    for grid, products in blocks.items():
        error, widened = narrow[grid]
        assert eps / 100 < error < eps and widened == 0
        error, widened = wide[grid]
        if reduce_dtype == "bfloat16" and grid == str(Grid(z=2)):  # what travels in bfloat16 is made in it
            assert wide[grid] == narrow[grid]
        else:
            assert error < 1e-6 and widened == products


def test_second_derivatives_are_refused():
    """Gradients of a frozen model are in no graph: those of a penalty would be none."""
    with fake_world(2):
        model, _ = parallelize(nn.Sequential(nn.Linear(4, 4)).requires_grad_(False), Grid(z=2))
        value = torch.ones(1, 4, requires_grad=True)
        with pytest.raises(RuntimeError, match="create_graph=True"):
            torch.autograd.grad(model(value).sum(), value, create_graph=True)


def test_shares_of_gradients_are_not_returned_by_autograd_grad():
    """Refuse those of a bias, which are averaged in `.grad` only; whole gradients are returned."""
    value = torch.ones(1, 4, requires_grad=True)
    with fake_world(2):
        model, _ = parallelize(nn.Sequential(nn.Linear(4, 4)), Grid(z=2))
        with pytest.raises(RuntimeError, match=r"this rank's share .* hf_axonn.sync_gradients\(model\)"):
            torch.autograd.grad(model(value).sum(), list(model.parameters()))
        torch.autograd.grad(model(value).sum(), [value, model[0].weight])
        with torch.autograd.detect_anomaly():
            model(value).sum().backward(inputs=[model[0].bias])
            with pytest.raises(RuntimeError, match="nan values"):
                (model(value) * torch.nan).sum().backward(inputs=[model[0].weight])
        assert torch.equal(model[0].bias.grad.to_local(), torch.ones(4))
        model, _ = parallelize(nn.Sequential(nn.Linear(4, 4)), Grid(x=2))
        (gradient,) = torch.autograd.grad(model(value).sum(), model[0].bias)
        assert torch.equal(gradient.to_local(), torch.ones(4))


def test_hooks_of_parameters_stay_when_they_are_sharded():
    called = []
    plain = nn.Linear(4, 4)
    mask = plain.weight.register_hook(lambda grad: 0 * grad)
    plain.bias.register_post_accumulate_grad_hook(lambda parameter: called.append(parameter.grad))
    with fake_world(2):
        model, _ = parallelize(nn.Sequential(plain), Grid(z=2))
        for once_more in (True, False):
            model(torch.ones(1, 4)).sum().backward()
            assert (model[0].weight.grad.to_local() == 0).all() == once_more
            assert called.pop() is model[0].bias.grad
            mask.remove()


def test_a_gathered_weight_is_in_no_graph_of_an_earlier_pass():
    with fake_world(2):
        mesh = grid_mesh(Grid(data=2), "cpu")
        state, table = ParallelState(mesh, AxonnConfig(grid=mesh.grid)), nn.Embedding(6, 4)
        shard_parameters(table, {id(table.weight): WeightKind.VOCABULARY}, state)
        product = Product(state, [state.weight_of(table)], [weight_layout(WeightKind.VOCABULARY, 6, 4, mesh)])
        for trained in (True, False):
            table.weight.requires_grad_(trained)
            state.context.begin_forward(state.weights)
            assert gathered_weight(product).requires_grad == trained
            with torch.no_grad():
                table.weight.mul_(2)


@pytest.mark.parametrize("axis", ["x", "z"])
def test_backward_refuses_weights_that_were_there_for_the_forward_pass_alone(axis):
    with fake_world(2):
        model, _ = parallelize(nn.Sequential(nn.Linear(4, 4)), Grid(**{axis: 2}))
        others = {name: parameter * 1.1 for name, parameter in model.named_parameters()}
        loss = functional_call(model, others, torch.ones(1, 4, requires_grad=True)).sum()
        with pytest.raises(RuntimeError, match=r"shape \[4, 4\].* or replaced, as after torch.func.functional_call"):
            loss.backward()
