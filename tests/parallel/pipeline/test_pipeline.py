"""Pipelines against one process, in float64: losses, gradients, steps of AdamW, and any use of the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import stage
from transformers import AutoConfig, AutoModelForCausalLM

from hf_axonn import Grid, parallelize, sync_gradients
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.collectives import observe
from hf_axonn.distributed.watchdog.progress import PROGRESS
from hf_axonn.engine.dtensors import local
from tests.helpers.equality import copied, rows_of
from tests.helpers.float64 import Float64, relative_errors
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


BOUND = 1e-10
LAYERS = 4
SIZES = dict(vocab_size=131, hidden_size=24, intermediate_size=20, num_attention_heads=6, head_dim=4, pad_token_id=0)
GRIDS = {
    2: [Grid(pipe=2)],
    4: [Grid(pipe=4), Grid(pipe=2, x=2), Grid(pipe=2, y=2), Grid(pipe=2, z=2), Grid(pipe=2, data=2)],
    8: [Grid(pipe=2, y=2, x=2), Grid(pipe=2, data=2, z=2), Grid(pipe=4, x=2), Grid(pipe=2, z=2, y=2)],
}
SCHEDULES = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe"},
    {"schedule": "interleaved", "stages_per_rank": 2},
    {"schedule": "zero_bubble"},
    {"schedule": "zero_bubble", "stages_per_rank": 2},
]


PACKED = ", packed"
OPTIONS = {
    "opt": dict(dropout=0.0, ffn_dim=40, word_embed_proj_dim=48),
    "bloom": dict(attention="eager"),
    "gptj": dict(attention="eager", rotary_dim=4),
}


def make(kind: str) -> nn.Module:
    """The same numbers each time."""
    if kind.endswith(PACKED):
        model = make(kind.removesuffix(PACKED))
        model.config.use_cache = False  # with which Transformers parts documents
        return model
    if kind == "gpt2":
        return tiny_model(kind, num_hidden_layers=LAYERS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train()
    if kind in ("gemma2", "mixtral"):
        torch.manual_seed(0)
        more = {"mixtral": dict(num_local_experts=3, num_experts_per_tok=2), "gemma2": dict(sliding_window=4)}[kind]
        config = AutoConfig.for_model(kind, num_key_value_heads=2, num_hidden_layers=LAYERS, **SIZES, **more)
        experts = {"experts_implementation": "eager"} if kind == "mixtral" else {}
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", **experts).double().train()
    return tiny_model(kind, num_hidden_layers=LAYERS, **OPTIONS.get(kind, {})).train()


def make_batch(kind: str, rows: int) -> dict[str, Tensor]:
    """Rows with padding, or with two documents each, of other lengths in every row."""
    batch = tiny_batch(rows, 7)
    if kind.endswith(PACKED):
        del batch["attention_mask"]
        places = torch.arange(7, device=batch["input_ids"].device).expand(rows, 7)
        second = 1 + torch.arange(rows, device=places.device).unsqueeze(1) % 6
        batch["position_ids"] = torch.where(places < second, places, places - second)
    return batch


def logits_loss(model: nn.Module, batch: dict[str, Tensor], kept: Tensor) -> Tensor:
    """The same loss of a script that computes it from the logits."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    targets = batch["labels"][:, 1:].reshape(-1)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum") / kept


def train(model: nn.Module, number: int, losses_of: Callable[[int], Iterable[Tensor]]) -> dict:
    """Make steps of AdamW on this rank's shards; return losses, gradients of the first step, and parameters.

    Args:
        losses_of: the losses of a step by its index, whose gradients it has added.
    """
    axonn = getattr(model, "axonn", None)
    own = [nn.Parameter(local(whole).detach()) for whole in model.parameters()] if axonn else list(model.parameters())
    optimizer = torch.optim.AdamW(own, lr=1e-2, fused=False)
    losses, gradients = [], {}
    for step in range(number):
        with Float64():
            losses += [loss.detach() for loss in losses_of(step)]
        sync_gradients(model)
        if not gradients:
            gradients = {name: copied(item.grad) for name, item in model.named_parameters() if item.grad is not None}
        for parameter, shard in zip(model.parameters(), own, strict=True):
            if axonn:
                shard.grad = None if parameter.grad is None else local(parameter.grad)
        optimizer.step()
        model.zero_grad()
    parameters = {name: copied(item) for name, item in model.named_parameters()}
    return {"losses": torch.stack(losses), "gradients": gradients, "parameters": parameters}


def steps(model: nn.Module, batch: dict[str, Tensor], *, grid: Grid | None = None, of_logits: bool = False) -> dict:
    """Two micro-batches, one after the other, into one step of AdamW, then a third alone."""
    axonn = getattr(model, "axonn", None)

    def losses_of(step: int) -> Iterator[Tensor]:
        for _ in range(2 - step):
            if of_logits:
                kept = (batch["labels"][:, 1:] != -100).sum()
                if axonn:
                    dist.all_reduce(kept, group=axonn.grid_mesh.group("data", "rows"))
                loss = logits_loss(model, batch, kept) * (grid.dp_size if grid else 1)
            else:
                loss = model(**batch).loss
            (loss / 2).backward()
            yield loss

    return train(model, 2, losses_of)


def _compare(cases: list, truths: dict, rows: int) -> list[str]:
    wrong, lines = [], 0
    for kind, grid, settings, of_logits in cases:
        config = AxonnConfig(grid=grid, **settings)
        model, _ = parallelize(make(kind), grid, config=config)
        batch = rows_of(make_batch(kind, rows), grid, dist.get_rank())
        ours, truth = steps(model, batch, grid=grid, of_logits=of_logits), truths[kind]
        losses = ours["losses"].clone()
        dist.all_reduce(losses)
        errors = {"loss": float(((losses / grid.size - truth["losses"]) / truth["losses"]).abs().max())}
        for what in ("gradients", "parameters"):
            assert ours[what], "no rank is without a stage"
            its = relative_errors(ours[what], {name: truth[what][name] for name in ours[what]})
            worst = max(its, key=its.get)
            errors[f"{what} {worst}"] = its[worst]
        wrong += [f"{kind} {grid} {settings} {what}: {error:.1e}" for what, error in errors.items() if error > BOUND]
        there = [set() for _ in range(grid.size)]
        dist.all_gather_object(there, set(ours["parameters"]))
        assert set().union(*there) == set(truth["parameters"]), "each layer has its stage, under its own name"
        lines += 1
    assert lines == len(cases)
    return wrong


def check(world: int, cases: list, rows: int = 16) -> None:
    truths = {kind: steps(make(kind), make_batch(kind, rows)) for kind in {kind for kind, *_ in cases}}
    for wrong in run_ranks(_compare, world, cases, truths, rows, timeout=600):
        assert not wrong


def test_pipe_alone() -> None:
    """Each schedule but zero bubble, which is below, with models of several kinds; tied weights lie on both ends."""
    cases = [("mixtral", SCHEDULES[1], False), ("gemma2", SCHEDULES[2], True), ("smollm2", SCHEDULES[4], False)]
    cases += [("qwen3", {"stage_layers": [1, 3]}, False)]
    check(2, [(kind, Grid(pipe=2), settings, of_logits) for kind, settings, of_logits in cases], rows=8)


@pytest.mark.slow
def test_pipe_alone_of_more_models() -> None:
    """Layers of falcon, bloom and gptj return tuples."""
    kinds = ("gpt2", "gemma2", "smollm2", "opt", "falcon", "bloom", "gptj")
    cases = [(kind, Grid(pipe=2), {}, False) for kind in kinds]
    check(2, [*cases, ("smollm2", Grid(pipe=2), {}, True)])


def test_pipe_with_other_axes() -> None:
    """Stages in the middle are those of two stages a rank in `test_pipe_alone`; four ranks of one each, and heads
    that context divides, are slow."""
    cases = [("smollm2", grid, {}, False) for grid in (Grid(pipe=2, y=2), Grid(pipe=2, data=2))]
    cases += [("gpt2", Grid(pipe=2, x=2), {}, True)]
    settings = {"schedule": "zero_bubble", "keep_gathered": "all", "context_attention": "keys"}
    cases += [("qwen3", Grid(pipe=2, z=2, context=2), settings, False)]
    check(4, cases, rows=8)


def _weights_gathered(keep: str | int) -> list[int]:
    """Bytes of a rank's shards that are gathered over z in a step of 2 and of 4 micro-batches."""
    grid, found = Grid(pipe=2, z=2), []
    model, _ = parallelize(make("qwen3"), grid, config=AxonnConfig(grid=grid, keep_gathered=keep))
    weights = {weight.shard.nbytes for weight in model.axonn.weights}

    def count(kind: str, payload: int, group: dist.ProcessGroup) -> None:
        if kind == "all_gather" and group.size() == 2 and payload >= min(weights):
            found[-1] += payload

    for rows in (4, 4, 8):  # the first step learns the order of gathers
        found.append(0)
        with observe(count):
            model(**rows_of(tiny_batch(rows, 7), grid, dist.get_rank())).loss.backward()
        sync_gradients(model)
        model.zero_grad()
    return found[1:]


def _weights_gathered_by(keeps: list[str | int]) -> list[list[int]]:
    return [_weights_gathered(keep) for keep in keeps]


def test_kept_weights_are_gathered_once_for_all_micro_batches() -> None:
    for every, none in run_ranks(_weights_gathered_by, 4, ["all", "none"]):
        assert none[1] > 1.9 * none[0]
        assert every[0] == every[1] < none[0] / 3


def _buffers_held(schedules: list[dict]) -> list[tuple[int, int]]:
    """For each schedule (most receive buffers that this rank holds at once in 8 micro-batches, those left after)."""
    grid, found = Grid(pipe=2), []
    for settings in schedules:
        model, _ = parallelize(make("qwen3"), grid, config=AxonnConfig(grid=grid, **settings))
        pipeline, seen = model.axonn.pipeline, []

        def held(pipeline=pipeline) -> int:
            stages = [stage for schedule, _ in pipeline._schedules.values() for stage in schedule.of_grid]
            tables = [table for stage in stages for table in (stage.args_recv_info, stage.grad_recv_info)]
            buffers = [getattr(its, "buffer", None) for table in tables for infos in table.values() for its in infos]
            return sum(buffer is not None and buffer.device.type != "meta" for buffer in buffers)

        with mock.patch.object(PROGRESS, "enters", lambda *_, seen=seen, held=held: seen.append(held())):
            model(**tiny_batch(8, 7)).loss.backward()
        found.append((max(seen), held()))
    return found


def test_receive_buffers_are_of_the_micro_batches_under_way() -> None:
    first, last = run_ranks(_buffers_held, 2, SCHEDULES[:2])
    assert [left for _, left in first + last] == [0] * 4
    assert first[0][0] <= 2 and last[0][0] == 1  # 1f1b: gradients of one, and the residual stream of one, under way
    # gpipe: all forward passes come first; since torch 2.15 what was received belongs to the forward pass, no buffer
    assert last[1][0] == (1 if hasattr(stage._RecvInfo, "allocate_buffer") else 8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["smollm2", "qwen3", "gpt2", "gemma2", "mixtral"])
@pytest.mark.parametrize("world", [4, 8])
def test_every_model_on_every_grid(world: int, kind: str) -> None:
    check(world, [(kind, grid, {}, False) for grid in GRIDS[world]])


@pytest.mark.slow
@pytest.mark.parametrize("grid", [Grid(pipe=2, z=2, context=2), Grid(pipe=2, z=4, context=2)], ids=str)
def test_stages_of_packed_rows_and_of_positions_that_are_counted(grid: Grid) -> None:
    kinds = [f"{kind}{PACKED}" for kind in ("llama", "gemma2")]
    check(grid.size, [(kind, grid, {}, False) for kind in (*kinds, "opt")])


@pytest.mark.slow
@pytest.mark.parametrize("grid", [Grid(pipe=2, z=2, context=2), Grid(pipe=2, z=4, context=2)], ids=str)
def test_stages_of_rows_that_context_divides(grid: Grid) -> None:
    cases = [("qwen3", grid, schedule, False) for schedule in SCHEDULES]
    kinds, ways = ("gpt2", "gemma2", "mixtral"), ("heads", "keys")
    cases += [(kind, grid, {"context_attention": way}, kind == "gemma2") for kind in kinds for way in ways]
    check(grid.size, cases)


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 8])
def test_every_schedule_on_every_grid(world: int) -> None:
    fitting = [
        (grid, schedule)
        for grid in GRIDS[world]
        for schedule in SCHEDULES
        if schedule.get("stages_per_rank", 1) * grid.pipe <= LAYERS
    ]
    check(world, [("smollm2", grid, schedule, False) for grid, schedule in fitting])
