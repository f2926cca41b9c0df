"""What is held and how much of it: resident state, saved activations, buffers of gathers and reductions, the loss.

The formulas are those of docs/algorithm.md, section Memory.
"""

from __future__ import annotations

import collections
import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_axonn import parallelize
from hf_axonn.compat.replaced import replace_attributes
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed import collectives
from hf_axonn.engine import gathering, matmul3d
from hf_axonn.engine.gradient_sync import sync_gradients
from hf_axonn.engine.overlap import GatheredInput
from hf_axonn.losses import head_chunks
from hf_axonn.topology.grid import Grid
from tests.helpers.equality import rows_of
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import all_grids, run_ranks


def piece(size, parts, index):
    """Elements of a dim that part `index` holds: ceil(size / parts) each, until none is left."""
    each = -(-size // parts)
    return max(0, min(each, size - index * each))


def resident_elements(model, grid, here):
    """What a rank holds of each parameter of a plain model: two-dimensional ones are cut, the others are whole."""
    count = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2:
            count += parameter.numel()
            continue
        rows, cols = parameter.shape
        if "embed" in name or "head" in name:
            rows = piece(piece(rows, grid.y, here["y"]), grid.x, here["x"])
        else:
            row_layer = "o_proj" in name or "down_proj" in name
            row_axis, col_axis = ("y", "x") if row_layer else ("x", "y")
            rows = piece(rows, getattr(grid, row_axis), here[row_axis])
            cols = piece(cols, getattr(grid, col_axis), here[col_axis])
        count += piece(rows, grid.z, here["z"]) * cols
    return count


def held_bytes(tensors: list[Tensor]) -> int:
    """Bytes of what tensors keep alive, which may be more than themselves; what they share counts once."""
    storages = [(its.to_local() if isinstance(its, DTensor) else its).untyped_storage() for its in tensors]
    return sum({held.data_ptr(): held.nbytes() for held in storages}.values())


SIZES = {
    "that nothing divides": {},
    "that the grid divides": dict(vocab_size=128, intermediate_size=32, num_key_value_heads=4, num_attention_heads=4),
}


def resident(sizes, grids):
    plain = tiny_model("llama", **sizes)
    whole = sum(parameter.numel() for parameter in plain.parameters())
    small = sum(parameter.numel() for parameter in plain.parameters() if parameter.dim() == 1)
    found = []
    for grid in grids:
        model, _ = parallelize(tiny_model("llama", **sizes), grid)
        here = grid.coordinates(dist.get_rank())
        # fused: one operation for DTensor to plan, on every grid anew
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model.train()(**rows_of(tiny_batch(4, 7, vocab=120), grid, dist.get_rank())).loss.backward()
        sync_gradients(model)
        optimizer.step()
        expected = resident_elements(plain, grid, here)
        if sizes:
            assert expected == (whole - small) // (grid.x * grid.y * grid.z) + small, grid
        with torch.no_grad():
            kinds = [list(model.parameters()), [parameter.grad for parameter in model.parameters()]]
            kinds += [[state[name] for state in optimizer.state.values()] for name in ("exp_avg", "exp_avg_sq")]
            for tensors in kinds:
                assert held_bytes(tensors) == 8 * expected, grid
        total = torch.tensor(expected - small)
        dist.all_reduce(total)
        found.append(int(total) == (whole - small) * grid.data)  # nothing is held twice, nothing is padded
    return found


# Every axis, beside another one, in the last two; all grids of four are in the slow set.
SOME = [Grid(y=2, x=2), Grid(z=2, x=2), Grid(data=2, y=2)]


@pytest.mark.parametrize(
    ("sizes", "grids"),
    [
        pytest.param(SIZES["that nothing divides"], SOME[1:], id="that nothing divides, some"),
        *(pytest.param(sizes, all_grids(4), id=name, marks=pytest.mark.slow) for name, sizes in SIZES.items()),
    ],
)
def test_parameters_gradients_and_optimizer_state_are_divided_by_the_grid(sizes, grids):
    for found in run_ranks(resident, 4, sizes, grids):
        assert len(found) == len(grids) and all(found)


def saved_elements(model, batch):
    """Elements that autograd keeps for backward, besides parameters. Each storage counts once, as a whole."""
    own = set()
    for parameter in model.parameters():
        local = parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter
        own.add(local.untyped_storage().data_ptr())
    seen = {}

    def pack(tensor):
        held = tensor.untyped_storage()
        if tensor.is_floating_point() and held.data_ptr() not in own:
            seen[held.data_ptr()] = (tensor, held.nbytes() // tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch).loss
    del loss
    return sum(size for _, size in seen.values())


ROWS, SEQ, HIDDEN, INNER, HEADS, WIDTH = 2, 8, 48, 40, 12, 4


def of_one_layer(grid, layout="auto"):
    """The elements that a second layer adds to what is saved, with as many kv heads as query heads."""
    counts = []
    for layers in (1, 2):
        changes = dict(num_hidden_layers=layers, num_key_value_heads=HEADS)
        model = tiny_model("llama", dtype=torch.float32, **changes).train()
        if grid is not None:
            parallelize(model, grid, config=AxonnConfig(grid=grid, layout=layout))
        batch = tiny_batch(ROWS * (grid.dp_size if grid else 1), SEQ)
        del batch["attention_mask"]
        counts.append(saved_elements(model, rows_of(batch, grid, dist.get_rank()) if grid else batch))
    return counts[1] - counts[0]


def layer_formula(y, x, *, feature=False):
    """docs/algorithm.md, Memory: what one layer saves, in elements; the second number is that of gathered inputs."""
    tokens, attention = ROWS * SEQ, HEADS * WIDTH
    norms = (2 if feature else 4) * tokens * HIDDEN // (x * y)
    heads = 4 * tokens * attention // (x * y)
    inner = 3 * tokens * INNER // (x * y)
    inputs = 2 * tokens * HIDDEN // y + tokens * INNER // x + (tokens * attention // x if y > 1 else 0)
    small = 2 * tokens // (x if feature else x * y) + tokens * HEADS // (x * y)
    return norms + heads + inner + small + inputs, inputs


def saved(layouts):
    return {(grid, layout): of_one_layer(grid, layout) for grid, layout in layouts}


@pytest.mark.parametrize(
    "grids", [SOME[:2], pytest.param(all_grids(4), marks=pytest.mark.slow)], ids=["some", "all of four"]
)
def test_a_layer_saves_what_the_formula_says(grids):
    one = of_one_layer(None)
    assert one == layer_formula(1, 1)[0]
    layouts = [(grid, "token") for grid in grids]
    layouts += [(grid, "feature") for grid in grids if grid.y > 1]
    for found in run_ranks(saved, 4, layouts):
        for (grid, layout), count in found.items():
            expected, inputs = layer_formula(grid.y, grid.x, feature=layout == "feature")
            assert count == expected, (grid, layout)
            assert count <= one / (grid.x * grid.y) + inputs + 2 * ROWS * SEQ, (grid, layout)


class Groups:
    """Which groups of weights have full-sized buffers: what was gathered of them, or their gradients, not yet reduced.

    A group is what one product gathers or reduces; it lives as long as one of its storages.
    """

    def __init__(self, expected):
        self.expected = expected
        self.alive = collections.Counter()
        self.most = 0

    def hold(self, group, tensors):
        for held in {id(held): held for held in (tensor.untyped_storage() for tensor in tensors)}.values():
            self.alive[group] += 1
            weakref.finalize(held, self.drop, group)
        self.most = max(self.most, self.settled(self.expected))

    def settled(self, expected):
        """How many are alive. Gloo's thread lets go of a collective's tensors a moment after it is done."""
        end = time.monotonic() + 60
        while len(self.alive) > expected and time.monotonic() < end:
            time.sleep(0.01)
        return len(self.alive)

    def drop(self, group):
        self.alive[group] -= 1
        if not self.alive[group]:
            del self.alive[group]


def count_groups(model, grid, expected):
    """The most groups that have buffers at one time, of gathered weights and of gradients, in a few steps."""
    gathered, gradients = map(Groups, expected)
    start_gathers, blocks_of = gathering.start_all_gathers, gathering.Gathering.blocks
    one_gradient, start_reductions = matmul3d.weight_gradient, matmul3d.start_reduce_scatters
    start_reduction = collectives.start_reduce_scatter
    made = {}

    def start_all_gathers(*args):
        started = start_gathers(*args)
        for pending in started:
            results = [each._result for each in pending._result]
            made[results[0].untyped_storage().data_ptr()] = group = object()
            gathered.hold(group, results)
        return started

    def blocks(self, arrived):
        found = blocks_of(self, arrived)
        gathered.hold(made[arrived[0].untyped_storage().data_ptr()], found)
        return found

    def weight_gradient(*args):
        result = one_gradient(*args)
        # The weights of one group come one after the other; they end in one reduction.
        made.setdefault("gradients", object())
        gradients.hold(made["gradients"], [result])
        return result

    def start_reduce_scatters(*args):
        made["reduced"] = made.pop("gradients", object())
        try:
            return start_reductions(*args)
        finally:
            del made["reduced"]

    def start_reduce_scatter(blocks, group):
        if "reduced" in made:  # else of activations
            gradients.hold(made["reduced"], [blocks])
        return start_reduction(blocks, group)

    noting = {
        (gathering, "start_all_gathers"): start_all_gathers,
        (gathering.Gathering, "blocks"): blocks,
        (matmul3d, "weight_gradient"): weight_gradient,
        (matmul3d, "start_reduce_scatters"): start_reduce_scatters,
        (collectives, "start_reduce_scatter"): start_reduce_scatter,
        (collectives, "ALONE_BYTES"): 0,  # else gloo joins small ones into one buffer
    }
    with replace_attributes(noting):
        for seed in range(3):
            model(**rows_of(tiny_batch(4, 7, seed=seed), grid, dist.get_rank())).loss.backward()
    assert not gathered.settled(0) and not gradients.settled(0)
    return gathered.most, gradients.most


def groups_at_a_time(grids, prefetch, *gathered):
    for grid in grids:
        for reentrant in (None, False, True):
            most = gathered[reentrant is not None], 2
            config = AxonnConfig(grid=grid, prefetch=prefetch)
            model, _ = parallelize(tiny_model("llama", num_hidden_layers=4), grid, config=config)
            if reentrant is not None:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            assert count_groups(model.train(), grid, most) == most, (grid, reentrant)


@pytest.mark.parametrize(
    ("world", "grids"),
    [(2, [Grid(z=2)]), pytest.param(4, [Grid(z=2, x=2), Grid(z=2, y=2), Grid(z=4)], marks=pytest.mark.slow)],
    ids=["z", "others"],
)
@pytest.mark.parametrize(("prefetch", "gathered"), [(1, (2, 5)), ("layer", (8, 8))], ids=["groups", "layers"])
def test_two_bundles_have_buffers_at_a_time(world, grids, prefetch, gathered):
    """Of a layer's four groups; of gradients there are two groups. A layer that runs again keeps its four until
    backward has used them."""
    run_ranks(groups_at_a_time, world, grids, prefetch, *gathered)


def abandoned(grid):
    """How many inputs of products are alive after each of some forward passes whose graphs nobody went through."""
    model, _ = parallelize(tiny_model("llama"), grid)
    found = []
    for _ in range(3):
        model.train()(**rows_of(tiny_batch(4, 7), grid, dist.get_rank()))
        for _ in range(200):  # a thread of gloo may hold the last message for a moment, on a machine that is busy
            gc.collect()
            alive = sum(isinstance(each, GatheredInput) for each in gc.get_objects())
            if not alive:
                break
            time.sleep(0.05)
        found.append(alive)
    return found


def test_a_graph_that_nobody_goes_through_is_let_go():
    for found in run_ranks(abandoned, 2, Grid(x=2)):
        assert found == [0, 0, 0]


class Peak(TorchDispatchMode):
    """Bytes of the storages that were made inside and are alive; `most` is the largest that this has been."""

    def __init__(self):
        super().__init__()
        self.live = self.most = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id(held.untyped_storage()) for held in tree_leaves((args, kwargs)) if isinstance(held, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                held = tensor.untyped_storage()
                if id(held) not in given and held not in self.known:
                    self.known.add(held)
                    self.live += held.nbytes()
                    weakref.finalize(held, self._forget, held.nbytes())
        self.most = max(self.most, self.live)
        return result

    def _forget(self, nbytes):
        self.live -= nbytes


def test_the_peak_is_that_of_the_storages():
    with Peak() as peak:
        first = torch.zeros(1000)
        view = first.view(10, 100)[2:]
        second = view + 1
        del first, view
        third = torch.ones(10)
    assert peak.most == 4000 + 3200 and peak.live == 3200 + 40
    del second, third
    assert peak.live == 0


VOCABULARY, CHUNK = 2048, 2**14


def loss_peak(grid, dtype, *, capped):
    """Bytes that head and loss need at most besides their results, in chunks of float32 logits; and the chunks."""
    head_chunks.CHUNK_LOGITS = CHUNK
    model, _ = parallelize(tiny_model("llama", num_hidden_layers=1, vocab_size=VOCABULARY, dtype=dtype), grid)
    batch = rows_of(tiny_batch(8, 24, vocab=VOCABULARY), grid, dist.get_rank())
    logits = model.train()(**batch).logits
    if capped:
        logits = torch.tanh(logits / 5.0) * 5.0
    weight = torch.empty(VOCABULARY // (grid.x * grid.y), HIDDEN, device="meta")
    results = 4 * weight.numel() + logits.hidden.nbytes
    if grid.z > 1:
        results += weight.numel() * dtype.itemsize  # the gathered weight
    with Peak() as peak:
        model.loss_function(logits, batch["labels"])
    chunks = batch["labels"].numel() * weight.shape[0] / CHUNK
    return (peak.most - results) / (4 * CHUNK), chunks


def peaks_of_the_loss(cases):
    return {(grid, dtype, capped): loss_peak(grid, dtype, capped=capped) for grid, dtype, capped in cases}


PEAKS = [
    (grid, dtype, capped)
    for grid in (Grid(x=2), Grid(y=2), Grid(z=2), Grid(data=2))
    for dtype, capped in (
        (torch.float32, False),
        (torch.bfloat16, True),
        (torch.float32, True),
        (torch.bfloat16, False),
    )
]


@pytest.mark.parametrize(
    "cases",
    # Quick is one of each grid's four, another one on each.
    [PEAKS[::5], pytest.param(PEAKS, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_head_and_loss_hold_less_than_two_chunks_of_logits(cases):
    for found in run_ranks(peaks_of_the_loss, 2, cases):
        assert len(found) == len(cases)
        for case, (peak, chunks) in found.items():
            assert 1 / 3 < peak < 2 and chunks >= 6, (case, peak, chunks)


def saved_with_and_without_weights(grid):
    """Bytes that a forward pass saves, with every weight of the layers' Linears trained and with none; their inputs
    that nothing else saves; and the gradient of the embedding of both."""
    found, gradients = [], []
    for trained in (True, False):
        model = tiny_model("llama").train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained or "proj" not in name)
        model, _ = parallelize(model, grid)
        batch = rows_of(tiny_batch(8, 7), grid, dist.get_rank())
        storages = {}

        def keep(tensor, storages=storages):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(**batch).loss
        found.append(sum(storage.nbytes() for storage in storages.values()))
        loss.backward()
        sync_gradients(model)
        gradients.append(model.get_input_embeddings().weight.grad.to_local())
    config, tokens = model.config, batch["input_ids"].numel()
    inputs = 2 * config.hidden_size // grid.y + config.intermediate_size // (grid.x * grid.y)
    return found, config.num_hidden_layers * tokens * inputs * loss.element_size(), gradients


def frozen_on(grids):
    return [saved_with_and_without_weights(grid) for grid in grids]


def test_frozen_weights_save_no_input():
    """Nothing multiplies it in backward; what is before them gets the same gradient."""
    for rows in run_ranks(frozen_on, 2, [Grid(z=2), Grid(x=2), Grid(y=2)]):
        for (trained, frozen), inputs, (with_weights, without) in rows:
            assert 0 < frozen <= trained - inputs
            torch.testing.assert_close(with_weights, without, rtol=0, atol=0)
