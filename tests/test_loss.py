"""Cross-entropy on sharded logits: equal to the plain loss however many chunks it takes, with and without counts."""

from __future__ import annotations

import pytest
import torch
from float64 import Float64, relative_errors
from models import tiny_batch, tiny_model
from ranks import run_ranks

import hf_axonn.loss
from hf_axonn import Grid, parallelize, sync_gradients
from hf_axonn.loss import ShardedCausalLMLoss
from hf_axonn.token_loss import CausalLMLoss
from hf_axonn.vocabulary import DeferredLogits


GRIDS = [Grid(x=4), Grid(y=2, x=2), Grid(z=2, y=2), Grid(data=2, x=2)]


def _share(batch: dict[str, torch.Tensor], grid: Grid, model) -> dict[str, torch.Tensor]:
    rows = len(batch["input_ids"]) // grid.samples_size
    place = model.axonn.coordinates
    first = (place["data"] * grid.z + place["z"]) * rows
    return {name: value[first : first + rows] for name, value in batch.items()}


def _equal(head_bias: bool) -> None:
    batch = tiny_batch(4, 9)
    truth = tiny_model("llama").train()
    if head_bias:
        _add_bias(truth)
    with Float64():
        expected = truth(**batch, num_items_in_batch=17).loss
        expected.backward()
    grads = {name: parameter.grad for name, parameter in truth.named_parameters()}
    for grid in GRIDS:
        # 1 token of each rank at a time, a few, all: the last chunk is shorter than the others.
        for limit in (1, 600, 2**26):
            hf_axonn.loss.CHUNK_LOGITS = limit
            model = tiny_model("llama").train()
            if head_bias:
                _add_bias(model)
            model, _ = parallelize(model, grid)
            assert isinstance(model.loss_function, ShardedCausalLMLoss)
            with Float64():
                output = model(**_share(batch, grid, model), num_items_in_batch=17)
                assert isinstance(output.logits, DeferredLogits)
                (output.loss * grid.samples_size).backward()
            sync_gradients(model)
            ours = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
            errors = relative_errors(ours, grads)
            assert max(errors.values()) < 1e-10, (grid, limit, max(errors, key=errors.get))


def _add_bias(model) -> None:
    generator = torch.Generator().manual_seed(9)
    bias = torch.randn(model.lm_head.out_features, generator=generator, dtype=torch.float64)
    model.lm_head.bias = torch.nn.Parameter(bias)


@pytest.mark.parametrize("head_bias", [False, True])
def test_chunks_of_any_size_give_the_same_gradients(head_bias):
    run_ranks(_equal, 4, head_bias)


def _contract() -> None:
    grid = Grid(y=2, x=2)
    batch = tiny_batch(2, 7)
    truth = tiny_model("llama")
    model, _ = parallelize(tiny_model("llama"), grid)
    with Float64():
        plain = truth.train()(**batch)
        deferred = model.train()(**batch)
        torch.testing.assert_close(deferred.loss, plain.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(deferred.logits.full(), plain.logits, rtol=1e-10, atol=1e-12)
        with pytest.raises(AttributeError, match="logits.full"):
            _ = deferred.logits.shape
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
        loss.backward()
        assert loss == 0
        assert all((parameter.grad.to_local() == 0).all() for parameter in model.parameters())


def test_what_a_caller_sees():
    run_ranks(_contract, 4)


def test_an_id_outside_of_the_vocabulary_is_named():
    run_ranks(_outside, 2)


def _outside() -> None:
    model, _ = parallelize(tiny_model("llama"), Grid(x=2))
    with pytest.raises(IndexError, match="131 is outside of the vocabulary of 131"):
        model(input_ids=torch.tensor([[1, 131]]))
