"""Log-probabilities, entropies and top-1 of labels from sharded logits: what autograd says on whole ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from hf_axonn import AxonnConfig, Grid, parallelize, sync_gradients
from hf_axonn.losses import head_chunks
from hf_axonn.losses.label_statistics import ALWAYS, MORE
from hf_axonn.trainer.trl import sharded_label_statistics
from tests.helpers.chats import ExactLogProbs
from tests.helpers.devices import seeded
from tests.helpers.equality import rows_of
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


pytestmark = pytest.mark.usefixtures("device")


GRIDS = [Grid(x=4), Grid(y=2, x=2), Grid(z=2, y=2), Grid(data=2, x=2), Grid(z=2, x=2)]
TEMPERATURE = 0.7
MODELS = {
    "llama": {},
    "bias": {},
    "tied": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},  # a soft cap
    "granite": {"logits_scaling": 0.5},  # a scale
    "tiny vocabulary": {"vocab_size": 5},  # less than two ids for some ranks
}


def make(name: str) -> torch.nn.Module:
    kind = name if name in ("gemma2", "granite") else "llama"
    attention = "eager" if kind == "gemma2" else "sdpa"
    model = tiny_model(kind, attention=attention, num_hidden_layers=1, **MODELS[name]).train()
    if name == "bias":
        bias = torch.arange(1.0, 1 + model.lm_head.out_features, dtype=torch.float64).sin()
        model.lm_head.bias = torch.nn.Parameter(bias)
    with torch.no_grad():
        model.lm_head.weight *= 8  # so that some labels are the most likely
    return model


def batch_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    batch = tiny_batch(4, 9, vocab=model.config.vocab_size)
    with torch.no_grad(), Float64():
        best = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.argmax(dim=-1)
    # Every other label is the most likely token.
    batch["labels"][:, 1::2] = torch.where(batch["labels"][:, 1::2] == -100, -100, best[:, :-1:2])
    return batch


def objective(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """Something whose gradient differs from token to token; a sum, so that ranks add up."""
    return (log_probs * log_probs.exp().detach() + 0.3 * entropy**2 - log_probs**3 / 50).sum()


def truth(model: torch.nn.Module, batch: dict) -> dict:
    with Float64():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        logits = logits / TEMPERATURE
        labels = batch["labels"][:, 1:]
        log_softmax = F.log_softmax(logits, dim=-1)
        mask = labels != -100
        log_probs = log_softmax.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2) * mask
        entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1) * mask
        objective(log_probs, entropy).backward()
    values = {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "mask": mask}
    values["mean_logits"] = logits.detach().mean(dim=-1) * mask
    values["log_sum_sq_probs"] = log_softmax.detach().exp().square().sum(dim=-1).log() * mask
    values["is_top1"] = (logits.argmax(dim=-1) == labels) & mask
    values["gradients"] = {name: its.grad for name, its in model.named_parameters()}
    return values


def _equal(name: str, grids: list[Grid], limits: tuple[int, ...], expected: dict, batch: dict) -> None:
    for grid in grids:
        for limit in limits:
            head_chunks.CHUNK_LOGITS = limit
            config = AxonnConfig(grid=grid, keep_gathered="all" if name == "tied" else "none")
            model, _ = parallelize(make(name), grid, config=config)
            mine = rows_of(batch, grid, dist.get_rank())
            with Float64():
                its = sharded_label_statistics(
                    model, model.forward, mine.pop("labels"), None, temperature=TEMPERATURE, more=MORE, **mine
                )
                assert not any(value.requires_grad for value in its.more.values())
                (objective(its.log_probs, its.entropy) * grid.dp_size).backward()
            sync_gradients(model)
            wanted = rows_of({key: expected[key] for key in expected if key != "gradients"}, grid, dist.get_rank())
            found = {**vars(its), **its.more}
            for key, value in wanted.items():
                torch.testing.assert_close(found[key].detach(), value, rtol=1e-10, atol=1e-11, msg=key)
            gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
            errors = relative_errors(gradients, expected["gradients"])
            assert max(errors.values()) < 1e-10, (grid, limit, max(errors, key=errors.get), max(errors.values()))


# Logits that are there at a time: of one token of each rank, of a few, of all.
ONE, FEW, ALL = 1, 600, 2**26
OTHERS = [name for name in MODELS if name != "llama"]


# Quick are the chunks of every size on one grid, and of other models two grids, which have x, y and z.
@pytest.mark.parametrize(
    ("name", "grids", "limits"),
    [
        pytest.param("llama", GRIDS, (FEW,), id="llama"),
        pytest.param("llama", GRIDS[1:2], (ONE, ALL), id="llama, chunks"),
        pytest.param("llama", [GRIDS[0], *GRIDS[2:]], (ONE, ALL), id="llama, others", marks=pytest.mark.slow),
        *(pytest.param(name, [GRIDS[0], GRIDS[2]], (FEW,), id=name) for name in OTHERS),
        *(
            pytest.param(name, [GRIDS[1], *GRIDS[3:]], (FEW,), id=f"{name}, others", marks=pytest.mark.slow)
            for name in OTHERS
        ),
    ],
)
def test_statistics_and_gradients_equal_whole_logits(name, grids, limits):
    model = make(name)
    batch = batch_of(model)
    expected = truth(model, batch)
    assert expected["is_top1"].any() and (expected["mask"] & ~expected["is_top1"]).any()
    run_ranks(_equal, 4, name, grids, limits, expected, batch)


def _corners() -> None:
    grid = Grid(y=2, x=2)
    model, _ = parallelize(tiny_model("llama", num_hidden_layers=1).train(), grid)
    batch = tiny_batch(2, 7)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    # Nothing to predict: zeros with zero gradients, and the backward pass goes through.
    nothing = torch.full_like(batch["labels"], -100)
    its = sharded_label_statistics(model, model.forward, nothing, None, **inputs)
    assert not its.mask.any() and not its.is_top1.any() and its.log_probs.abs().sum() == 0
    its.log_probs.sum().backward()
    sync_gradients(model)
    assert all((parameter.grad.to_local() == 0).all() for parameter in model.parameters())
    # All tokens equally likely: the first of them is the most likely one, as argmax says.
    with torch.no_grad():
        model.lm_head.weight.to_local().zero_()
    labels = torch.randint(0, 3, batch["labels"].shape, generator=seeded(0))
    its = sharded_label_statistics(model.eval(), model.forward, labels, None, **inputs)
    assert torch.equal(its.is_top1, labels[:, 1:] == 0) and its.is_top1.any()
    torch.testing.assert_close(its.entropy, torch.full_like(its.entropy, 131).log())
    # Labels that are shifted already have a value for each token, also of a row with one token.
    its = sharded_label_statistics(model, model.forward, None, labels, **inputs)
    assert its.mask.shape == labels.shape and its.mask.all()
    one = {key: value[:, :1] for key, value in inputs.items()}
    with torch.no_grad():
        its = sharded_label_statistics(model, model.forward, None, labels[:, :1], **one)
    assert its.log_probs.shape == (2, 1)
    # The pass itself forms no logits; the next one is as ever.
    assert model(**one).logits.shape == (2, 1, 131)


def test_corners():
    run_ranks(_corners, 4)


def test_the_reference_of_the_tests_is_what_trl_computes():
    """`ExactLogProbs` stands in for TRL's function in float64 comparisons; in float32 the two are the same."""
    from trl.kernels import ChunkedLogProbFunction

    generator = seeded(0)
    hidden, weight = torch.randn(11, 8, generator=generator), torch.randn(29, 8, generator=generator)
    targets = torch.randint(0, 29, (11,), generator=generator)
    for softcap, scale, temperature in ((None, 1.0, 1.0), (3.0, 0.7, 0.6)):
        found = []
        for function in (ChunkedLogProbFunction, ExactLogProbs):
            leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
            outputs = (*ALWAYS, *MORE)
            its = function.apply(*leaves, None, targets, temperature, 7, softcap, scale, outputs)
            (its[0] ** 2 + its[1]).sum().backward()
            found.append((*its[:-1], its[-1].float(), *(leaf.grad for leaf in leaves)))
        for theirs, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
