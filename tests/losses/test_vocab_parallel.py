"""Cross-entropy on sharded logits: equal to the plain loss however many chunks it takes, with and without counts."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

import hf_axonn.losses.head_chunks
from hf_axonn import Grid, parallelize, sync_gradients
from hf_axonn.layers.vocabulary import DeferredLogits
from hf_axonn.losses.causal_lm import CausalLMLoss
from hf_axonn.losses.head_chunks import _add_product
from hf_axonn.losses.vocab_parallel import ShardedCausalLMLoss
from tests.helpers.devices import seeded
from tests.helpers.equality import mean_over_world, rows_of
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.operators import Operators, widen_on_cpu
from tests.helpers.ranks import all_grids, run_ranks


pytestmark = pytest.mark.usefixtures("device")


# Of one layer: what is tested comes after it.
small_model = functools.partial(tiny_model, num_hidden_layers=1)
GRIDS = [Grid(x=4), Grid(y=2, x=2), Grid(z=2, y=2), Grid(data=2, x=2)]
# Quick is the one with parts of the vocabulary and with other samples on other ranks.
SOME_AND_OTHERS = pytest.mark.parametrize(
    "grids", [GRIDS[2:3], pytest.param([*GRIDS[:2], GRIDS[3]], marks=pytest.mark.slow)], ids=["z and y", "others"]
)


def _share(batch: dict[str, torch.Tensor], grid: Grid, model) -> dict[str, torch.Tensor]:
    rows = len(batch["input_ids"]) // grid.dp_size
    place = model.axonn.coordinates
    first = (place["data"] * grid.z + place["z"]) * rows
    return {name: value[first : first + rows] for name, value in batch.items()}


def _equal(each: list[tuple[bool, int, list[Grid]]]) -> None:
    for head_bias, limit, grids in each:
        _equal_on(grids, head_bias, limit)


def _equal_on(grids: list[Grid], head_bias: bool, limit: int) -> None:
    batch = tiny_batch(4, 9)
    truth = small_model("llama").train()
    if head_bias:
        _add_bias(truth)
    with Float64():
        expected = truth(**batch, num_items_in_batch=17).loss
        expected.backward()
    grads = {name: parameter.grad for name, parameter in truth.named_parameters()}
    hf_axonn.losses.head_chunks.CHUNK_LOGITS = limit
    for grid in grids:
        model = small_model("llama").train()
        if head_bias:
            _add_bias(model)
        model, _ = parallelize(model, grid)
        assert isinstance(model.loss_function, ShardedCausalLMLoss)
        with Float64():
            output = model(**_share(batch, grid, model), num_items_in_batch=17)
            assert isinstance(output.logits, DeferredLogits)
            (output.loss * grid.dp_size).backward()
        sync_gradients(model)
        ours = {name: parameter.grad for name, parameter in model.named_parameters()}
        errors = relative_errors(ours, grads)
        assert max(errors.values()) < 1e-10, (grid, head_bias, limit, max(errors, key=errors.get))


def _add_bias(model) -> None:
    generator = seeded(9)
    bias = torch.randn(model.lm_head.out_features, generator=generator, dtype=torch.float64)
    model.lm_head.bias = torch.nn.Parameter(bias)


# One token of each rank at a time, a few, all: the last chunk is shorter than the others.
LIMITS = (1, 600, 2**26)


@pytest.mark.parametrize(
    "each",
    [
        [(False, 1, GRIDS[1:2]), (False, 2**26, GRIDS[3:]), (True, 600, GRIDS[1:3])],
        pytest.param(
            [(head_bias, limit, GRIDS) for head_bias in (False, True) for limit in LIMITS], marks=pytest.mark.slow
        ),
    ],
    ids=["some", "every"],
)
def test_chunks_of_any_size_give_the_same_gradients(each):
    run_ranks(_equal, 4, each)


def _contract() -> None:
    grid = Grid(y=2, x=2)
    batch = tiny_batch(2, 7)
    truth = small_model("llama")
    model, _ = parallelize(small_model("llama"), grid)
    with Float64():
        plain = truth.train()(**batch)
        deferred = model.train()(**batch)
        torch.testing.assert_close(deferred.loss, plain.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(deferred.logits.full(), plain.logits, rtol=1e-10, atol=1e-12)
        # What is done with logits that are not formed is done with the whole of them.
        assert deferred.logits.shape == plain.logits.shape and deferred.logits.dtype == torch.float64
        assert torch.equal(deferred.logits.argmax(-1), plain.logits.argmax(-1))
        torch.testing.assert_close(deferred.logits[:, 2:] * 2, plain.logits[:, 2:] * 2, rtol=1e-10, atol=1e-12)
        capped = torch.tanh(deferred.logits.float() / 3) * 3
        torch.testing.assert_close(capped.full(), torch.tanh(plain.logits / 3) * 3, rtol=1e-10, atol=1e-12)
        # Without labels, in evaluation, or with logits_to_keep: whole logits, as from any model.
        for mode, inputs in (("train", {}), ("eval", {"labels": batch["labels"]}), ("train", {"logits_to_keep": 2})):
            getattr(model, mode)(), getattr(truth, mode)()
            given = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], **inputs}
            torch.testing.assert_close(model(**given).logits, truth(**given).logits, rtol=1e-10, atol=1e-12)
        # What every token costs is what the plain loss says, and the same on all ranks.
        losses = []
        for which in (model.train(), truth.train()):
            loss = which.loss_function if which is model else CausalLMLoss()
            which.loss_function = loss
            with loss.capture() as rows:
                which(**batch)
            losses.append(rows[0])
        torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-12)
        # No label at all: zero, with zero gradients, and no nan.
        nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
        loss = model(**nothing).loss
        with pytest.raises(RuntimeError, match="create_graph=True"):
            loss.backward(create_graph=True)
        loss.backward()
        assert loss == 0
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
        assert all((parameter.grad.to_local() == 0).all() for parameter in model.parameters())


def _smoothed() -> None:
    """Sum, gradients and what a caller sees of labels smoothed by Transformers' own function."""
    from transformers.trainer_pt_utils import LabelSmoother

    batch = tiny_batch(4, 7)
    hf_axonn.losses.head_chunks.CHUNK_LOGITS = 600
    capped = {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 4, "attention": "eager"}
    for kind, changes, grid in (("smollm2", {}, Grid(y=2, x=2)), ("gemma2", capped, Grid(z=2, x=2))):
        truth = small_model(kind, **changes).train()
        with Float64():
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            expected = LabelSmoother(0.2)(truth(**inputs), batch["labels"], shift_labels=True, num_items_in_batch=5)
            expected.backward()
        model, _ = parallelize(small_model(kind, **changes), grid)
        loss = model.train().loss_function
        own = _share(batch, grid, model)
        with Float64(), loss.smooth_labels(0.2), loss.watch(own["labels"]):
            output = model(**own, num_items_in_batch=5)
            (output.loss * grid.dp_size).backward()
        sync_gradients(model)
        assert loss.calls == 1 and not loss.record.pop()["all_count"] and isinstance(output.logits, DeferredLogits)
        ours = mean_over_world(output.loss.detach() * grid.dp_size)
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-12, atol=0)
        own = {name: its.grad for name, its in model.named_parameters() if its.grad is not None}
        true = {name: its.grad for name, its in truth.named_parameters() if its.grad is not None}
        assert max(relative_errors(own, true).values()) < 1e-10, (kind, grid)
        # Of logits that are whole, too.
        with Float64():
            plain = truth(**inputs).logits.detach()
        with Float64(), loss.smooth_labels(0.2):
            whole = loss(plain, batch["labels"], num_items_in_batch=5)
        torch.testing.assert_close(whole, expected.detach(), rtol=1e-12, atol=0)


def test_smoothed_labels():
    run_ranks(_smoothed, 4)


def _few_columns() -> None:
    """Nine columns on four ranks: the last has none."""
    from transformers.trainer_pt_utils import LabelSmoother

    batch = {name: torch.where(value >= 0, value % 9, value) for name, value in tiny_batch(2, 7).items()}
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with Float64():
        stock = small_model("llama", vocab_size=9)
        expected = LabelSmoother(0.1)(stock(**inputs), batch["labels"], shift_labels=True)
    model, _ = parallelize(small_model("llama", vocab_size=9), Grid(x=4))
    with Float64(), model.train().loss_function.smooth_labels(0.1):
        loss = model(**batch).loss
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-10, atol=0)
    loss.backward()


def test_labels_are_smoothed_where_a_rank_has_no_part_of_the_vocabulary():
    run_ranks(_few_columns, 4)


def test_what_a_caller_sees():
    run_ranks(_contract, 4)


OUTSIDE = [("labels", 131), ("labels", 10**6), ("labels", -1), ("labels", -5), ("input_ids", 131), ("input_ids", -1)]


def _outside(grids) -> None:
    """In the last row. All ranks, also those of other rows, say the same; -100 among the labels is no id."""
    for grid in grids:
        model, _ = parallelize(small_model("llama").train(), grid)
        last = [rank for rank in range(grid.size) if rank >= grid.size - grid.x * grid.y]
        who = f"rank {last[0]}" if len(last) == 1 else f"ranks {last[0]} and {last[1]}"
        for name, value in [*OUTSIDE, ("labels", -100)]:
            batch = {key: tensor.clone() for key, tensor in tiny_batch(4, 7).items()}
            batch[name][3, 2] = value
            mine = rows_of(batch, grid, dist.get_rank())
            if value == -100:
                assert model(**mine).loss.isfinite()
                continue
            what = "label" if name == "labels" else "token id"
            place = [4 // grid.dp_size - 1, 2]
            with pytest.raises(ValueError) as error:
                model(**mine)
            said = f"{who} got the {what} {value} at {place}, which is outside of the vocabulary of 131."
            assert str(error.value) == said, (grid, error.value)


@pytest.mark.parametrize(
    "grids",
    [
        all_grids(2),
        [Grid(z=2, x=2), Grid(data=2, z=2)],
        pytest.param([Grid(z=2, y=2), Grid(data=2, x=2)], marks=pytest.mark.slow),
    ],
    ids=["two", "four", "others of four"],
)
def test_ids_and_labels_outside_of_the_vocabulary_are_refused_by_all_ranks(grids):
    run_ranks(_outside, grids[0].size, grids)


def _alone() -> None:
    """Ranks that generate or evaluate may be done at different times, so nothing is asked of the others."""
    model, _ = parallelize(small_model("llama").eval(), Grid(z=2))
    if dist.get_rank() == 1:
        with torch.no_grad(), pytest.raises(ValueError, match=r"rank 1 got the token id 131 at \[0, 1\]"):
            model(input_ids=torch.tensor([[1, 131]]))


def test_outside_of_training_no_other_rank_is_asked():
    run_ranks(_alone, 2, timeout=60)


def _first_label() -> None:
    """Nothing predicts it, so nothing reads it."""
    model, _ = parallelize(small_model("llama").train(), Grid(z=2))
    batch = tiny_batch(4, 7)
    batch["labels"][:, 0] = 500
    assert model(**batch).loss.isfinite()


def test_the_label_of_the_first_position_is_not_read():
    run_ranks(_first_label, 2)


def _other_shapes() -> None:
    for grid in all_grids(2):
        model, _ = parallelize(small_model("llama").train(), grid)
        for labels in (tiny_batch(4, 6)["labels"], tiny_batch(3, 7)["labels"], tiny_batch(5, 7)["labels"]):
            with pytest.raises(ValueError, match=rf"labels for {labels.numel()} tokens, but logits of \[4, 7\]"):
                model(**tiny_batch(4, 7) | {"labels": labels})


def test_labels_of_another_shape_are_refused():
    run_ranks(_other_shapes, 2)


def run_model(model, batch, **more):
    with Float64():
        output = model(**batch, **more)
        output.loss.backward()
    return output


def plain(batch, **changes):
    model = small_model("llama", **changes).train()
    loss = run_model(model, batch).loss.detach()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def check(batch, truth, grids, **changes):
    for grid in grids:
        model = parallelize(small_model("llama", **changes), grid)[0].train()
        output = run_model(model, rows_of(batch, grid, dist.get_rank()))
        sync_gradients(model)
        torch.testing.assert_close(mean_over_world(output.loss), truth[0], rtol=1e-12, atol=0)
        ours = {name: parameter.grad for name, parameter in model.named_parameters()}
        errors = relative_errors(ours, truth[1])
        assert max(errors.values()) < 1e-10, errors


@SOME_AND_OTHERS
def test_a_vocabulary_smaller_than_the_grid_leaves_ranks_without_any(grids):
    batch = tiny_batch(8, 7, vocab=5)
    changes = dict(vocab_size=5)
    run_ranks(functools.partial(check, batch, plain(batch, **changes), grids, **changes), 4)


def large_logits(grids, batch, expected):
    """Sums of exponentials must not overflow, on ranks whose part of the vocabulary has no large logit either."""
    for grid in grids:
        model = parallelize(scaled_model(), grid)[0].train()
        loss = model(**rows_of(batch, grid, dist.get_rank())).loss
        torch.testing.assert_close(mean_over_world(loss).float(), expected, rtol=1e-5, atol=0)


def scaled_model():
    model = small_model("llama", dtype=torch.float32)
    model.lm_head.weight.data *= 1e4
    return model


@SOME_AND_OTHERS
def test_large_logits_do_not_overflow(grids):
    batch = tiny_batch(8, 7)
    expected = scaled_model().train()(**batch).loss.detach()
    assert expected > 100 and torch.isfinite(expected)
    run_ranks(large_logits, 4, grids, batch, expected)


def nothing_is_kept(grids, batch):
    for grid in grids:
        model = parallelize(small_model("llama"), grid)[0].train()
        mine = rows_of(batch, grid, dist.get_rank())
        output = run_model(model, mine | {"labels": torch.full_like(mine["labels"], -100)})
        assert output.loss == 0
        assert all(parameter.grad.to_local().count_nonzero() == 0 for parameter in model.parameters())
        # kept on one rank of the samples only: the others add zero, the count is that of all
        here = grid.coordinates(dist.get_rank())
        if here["data"] == here["z"] == 0:
            labels = mine["labels"]
        else:
            labels = torch.full_like(mine["labels"], -100)
        loss = run_model(model, mine | {"labels": labels}).loss
        first = rows_of(batch, grid, 0)
        with Float64():
            expected = small_model("llama").train()(**first).loss
        torch.testing.assert_close(mean_over_world(loss), expected.detach(), rtol=1e-12, atol=0)


@SOME_AND_OTHERS
def test_ranks_that_keep_nothing(grids):
    run_ranks(nothing_is_kept, 4, grids, tiny_batch(8, 7))


def recorded(grids, batch, kept, expected):
    for grid in grids:
        model = parallelize(small_model("llama"), grid)[0].train()
        mine = rows_of(batch | {"kept": kept}, grid, dist.get_rank())
        labels, mine["labels"] = mine["labels"], mine.pop("kept")
        with model.loss_function.watch(labels):
            run_model(model, mine)
        record = model.loss_function.record.pop()
        sums = torch.tensor(list(record.values()), dtype=torch.float64)
        dist.all_reduce(sums)
        sums /= grid.y * grid.x
        torch.testing.assert_close(
            sums, torch.tensor(list(expected.values()), dtype=torch.float64), rtol=1e-12, atol=0
        )


@SOME_AND_OTHERS
def test_losses_of_kept_and_dropped_tokens_are_those_of_one_process(grids):
    batch = tiny_batch(8, 7)
    kept = batch["labels"].clone()
    kept[:, ::3] = -100
    model = small_model("llama").train()
    model.loss_function = CausalLMLoss()
    with model.loss_function.watch(batch["labels"]):
        run_model(model, batch | {"labels": kept})
    expected = model.loss_function.record.pop()
    assert expected["all_count"] > expected["kept_count"] > 0
    run_ranks(recorded, 4, grids, batch, kept, expected)


def evaluated(grids, batch, expected):
    """Without gradients a rank's loss is the mean of its own tokens, whichever way the model is called."""
    for grid in grids:
        model = parallelize(small_model("llama"), grid)[0]
        mine = rows_of(batch, grid, dist.get_rank())
        counts = (mine["labels"][:, 1:] != -100).sum()
        for training in (False, True):
            with torch.no_grad(), Float64():
                output = model.train(training)(**mine)
            assert output.logits.shape == (*mine["input_ids"].shape, 131)
            total = mean_over_world(output.loss * counts) / mean_over_world(counts)
            torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)


@SOME_AND_OTHERS
def test_evaluation_loss(grids):
    batch = tiny_batch(8, 7)
    with torch.no_grad(), Float64():
        expected = small_model("llama")(**batch).loss
    run_ranks(evaluated, 4, grids, batch, expected)


def _head_gradient_errors():
    """Of dW += dlogits.T @ tokens over three chunks, in bfloat16: written as its factors are, and in float32."""
    widen_on_cpu()
    generator = seeded(0)
    chunks = [[torch.randn(20, size, generator=generator).bfloat16() for size in (12, 6)] for _ in range(3)]
    truth = sum(dlogits.double().t() @ tokens.double() for dlogits, tokens in chunks)
    errors = []
    for dtype in (torch.bfloat16, torch.float32):
        dweight = torch.zeros(12, 6)
        with Operators() as called:
            for dlogits, tokens in chunks:
                _add_product(dweight, dlogits, tokens, dtype)
        errors.append(((dweight.double() - truth).abs().max() / truth.abs().max()).item())
        made = called.results_of("new_empty.default")
        assert max(each.nbytes for each in made) <= chunks[0][0].nbytes and {each.dtype for each in made} == {dtype}
    return errors


def test_the_gradient_of_a_head_is_rounded_no_more_than_its_products():
    ((narrow, wide),) = run_ranks(_head_gradient_errors, 1)
    eps = torch.finfo(torch.bfloat16).eps
    assert wide < 1e-6 and eps / 100 < narrow < eps
