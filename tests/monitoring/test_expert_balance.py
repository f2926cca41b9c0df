"""The balance of experts in logs equals counting by hand on every kind of grid; who works most is warned of."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_axonn import GoldfishConfig, GoldfishTrainer, Grid, Monitor, MonitorCallback, parallelize
from hf_axonn.compat.transformers import find_routers
from hf_axonn.config import AxonnConfig
from hf_axonn.layers.moe import is_experts
from hf_axonn.monitoring.expert_balance import ExpertBalance, Imbalance
from hf_axonn.topology.experts import own_experts
from tests.helpers.equality import exact, rows_of
from tests.helpers.event_files import scalars
from tests.helpers.float64 import checkpointed
from tests.helpers.models import DEEPSEEK, tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, token_data, training_options


SIZES = dict(experts_implementation="eager", num_experts_per_tok=2, moe_intermediate_size=21, initializer_range=0.2)
KINDS = {
    "qwen3_moe": dict(num_experts=6, decoder_sparse_step=2, mlp_only_layers=[], num_hidden_layers=4),
    "gpt_oss": dict(num_local_experts=4, intermediate_size=21, attention="eager"),
    "deepseek_v3": dict(
        n_routed_experts=6,
        **DEEPSEEK,
    ),
}
NUMBERS = ("experts/load_imbalance", "experts/rank_imbalance", "experts/router_entropy")


def mixture(kind: str, **changes) -> torch.nn.Module:
    return tiny_model(kind, **SIZES | KINDS[kind] | changes)


@contextmanager
def recorded(model: torch.nn.Module) -> Iterator[tuple[list, list]]:
    """Choices [T, K] of each layer of a plain model, and the router's logits [T, E]."""
    choices, logits, handles = [], [], []
    for module in filter(is_experts, model.modules()):
        handles.append(module.register_forward_pre_hook(lambda _, args: choices.append(args[1])))
    for module, index in find_routers(model):
        handles.append(module.register_forward_hook(partial(lambda i, _, __, output: logits.append(output[i]), index)))
    yield choices, logits
    for handle in handles:
        handle.remove()


def imbalances(
    choices: list, grid: Grid, batch: tuple[int, int], experts: int, *, move: bool = False
) -> tuple[float, float]:
    """Count token by token: the fullest expert and the fullest rank, over the means."""
    load = rank_load = 0.0
    rows, seq = batch
    own_rows, own_length = rows // grid.dp_size, grid.positions(seq)
    for layer in choices:
        counts = [0] * experts
        pairs = [0] * grid.size
        for token, chosen in enumerate(layer.tolist()):
            row, position = divmod(token, seq)
            for expert in chosen:
                counts[expert] += 1
                for rank in range(grid.size):
                    place = grid.place(rank)
                    if move:
                        has_it = place.index("data") == row // own_rows // grid.rows
                    else:
                        has_it = place.index("data", "rows") == row // own_rows
                        has_it &= place.index("context") == position // own_length
                    pairs[rank] += has_it and expert in own_experts(experts, place, over_z=move)
        load = max(load, max(counts) * experts / sum(counts))
        rank_load = max(rank_load, max(pairs) * grid.size / sum(pairs))
    return load, rank_load


def entropy(logits: list) -> float:
    every = torch.cat([torch.distributions.Categorical(logits=layer.double()).entropy() for layer in logits])
    return every.mean().item()


def one_pass(model, batch) -> None:
    with exact():
        model(**batch).loss.backward()


def expected(kind: str, batch: dict, grid: Grid, way: str = "gather") -> tuple[float, float, float]:
    model = mixture(kind).train()
    with recorded(model) as (choices, logits):
        one_pass(model, batch)
    experts = next(module.num_experts for module in filter(is_experts, model.modules()))
    return *imbalances(choices, grid, batch["input_ids"].shape, experts, move=way == "move"), entropy(logits)


def test_one_process_counts_as_a_hand_does_and_training_alone():
    batch = tiny_batch(4, 7)
    model = mixture("qwen3_moe").train()
    monitor = Monitor(model)
    one_pass(model, batch)
    with torch.no_grad():
        model.eval()(**tiny_batch(4, 9))
    found = monitor.log()
    load, _, mean = expected("qwen3_moe", batch, Grid())
    assert found["experts/load_imbalance"] == pytest.approx(load, rel=1e-6)
    assert found["experts/router_entropy"] == pytest.approx(mean, rel=1e-6)
    assert "experts/rank_imbalance" not in found, "there are no ranks"
    assert not set(NUMBERS) & set(monitor.log()), "since the last log"
    del monitor
    assert not any(module._forward_pre_hooks for module in model.modules()), "they end with the monitor"


def test_a_dense_model_has_none():
    model = tiny_model("qwen3").train()
    monitor = Monitor(model)
    one_pass(model, tiny_batch(4, 7))
    assert not any(name.startswith("experts/") for name in monitor.log())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


TWO = [Grid(x=2), Grid(data=2), Grid(z=2, context=2)]
FOUR = [Grid(z=2, x=2), Grid(z=2, y=2, context=2)]


WAYS = [("qwen3_moe", grid, "gather") for grid in TWO]
WAYS += [("deepseek_v3", grid, "move" if grid.z > 1 else "gather") for grid in TWO]
WAYS += [("gpt_oss", TWO[0], "gather")]
WAYS_OF_FOUR = [("qwen3_moe", grid, way) for grid in FOUR for way in ("gather", "move")]


@pytest.mark.parametrize(
    ("two", "four"),
    [
        # Each axis, each model, both ways, on four ranks the rows that are filled up.
        ([WAYS[1], WAYS[5], WAYS[6]], WAYS_OF_FOUR[-1:]),
        pytest.param(WAYS, WAYS_OF_FOUR, marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_every_axis_counts_each_token_once(two, four):
    """Rows of 7 tokens, which are filled up over context, and as the only row of a rank over x."""
    batch, small = tiny_batch(4, 7), tiny_batch(2, 7)
    run_ranks(_on_grids, 2, batch, [(*way, expected(way[0], batch, *way[1:])) for way in two])
    run_ranks(_on_grids, 4, small, [(*way, expected(way[0], small, *way[1:])) for way in four])


def _on_grids(batch: dict, cases: list) -> None:
    for kind, grid, way, truth in cases:
        model, _ = parallelize(mixture(kind).train(), grid, config=AxonnConfig(grid=grid, experts=way))
        if kind == "qwen3_moe":
            checkpointed(model, reentrant=grid.x > 1)
        elif kind == "deepseek_v3" and grid.x > 1:
            model.compile(backend="eager")
        monitor = Monitor(model)
        one_pass(model, rows_of(batch, grid, dist.get_rank()))
        found = monitor.log()
        assert [found[name] for name in NUMBERS] == pytest.approx(truth, rel=1e-6), (kind, grid, way)


def trained(output, grid: Grid | None, *callbacks: TrainerCallback, **changes) -> list[dict[str, float]]:
    """Logs of a training that changes nothing."""
    options = training_options(output, grid, goldfish=True, learning_rate=0.0, weight_decay=0.0, **changes)
    trainer = GoldfishTrainer(
        model=mixture("qwen3_moe", dtype=torch.float32),
        args=GoldfishConfig(**options),
        train_dataset=token_data(12, seed=0),
        data_collator=collate,
        callbacks=[MonitorCallback(), *callbacks],
    )
    trainer.train()
    return trainer.state.log_history


def test_a_pipeline_logs_what_one_process_does(tmp_path):
    truth = trained(tmp_path / "one", None, num_train_epochs=1)
    run_ranks(_pipelines, 2, tmp_path, truth)
    (folder,) = (tmp_path / "pipe=2" / "runs").iterdir()
    assert [value for _, value in scalars(folder)["train/experts/load_imbalance"]] == pytest.approx(
        [log["experts/load_imbalance"] for log in truth[:-1]], rel=1e-6
    )


def _pipelines(folder, truth: list[dict]) -> None:
    found = trained(folder / "pipe=2", Grid(pipe=2), num_train_epochs=1, report_to="tensorboard")
    assert len(found) == len(truth) == 3
    for log, single in zip(found[:-1], truth[:-1], strict=True):
        assert log["experts/load_imbalance"] == pytest.approx(single["experts/load_imbalance"], rel=1e-6)
        assert log["experts/router_entropy"] == pytest.approx(single["experts/router_entropy"], rel=1e-6)
        assert log["experts/rank_imbalance"] == 1, "a stage is on one rank"


def test_a_rank_with_too_much_work_is_warned_of_once(caplog):
    balance = ExpertBalance(mixture("qwen3_moe"), torch.device("cpu"))
    full = Imbalance((0.0, 0.0), (6.0, 5.0), "model.layers.1.mlp.experts")
    with caplog.at_level(logging.WARNING):
        balance.warn(full, 5.0, 40)
        balance.warn(full, 4.0, 10)  # not more than four times
        for _ in range(3):
            balance.warn(full, 5.0, 20)
        assert len(caplog.records) == 1
        balance.warn(full, 5.0, 20)
        other = ExpertBalance(mixture("qwen3_moe"), torch.device("cpu"))
        other.warn(full, 5.5, 60)  # another rank has more
    (record,) = caplog.records
    assert record.getMessage() == (
        "one rank has had more than 4 times the mean work on experts for 60 steps: since the last log rank 0 has had "
        "5.0 times the mean of the ranks in model.layers.1.mlp.experts, and the others wait for it. Raise "
        "router_aux_loss_coef (with output_router_logits=True), which evens out the choices of routers, or divide "
        "the experts among fewer ranks."
    )


def test_nothing_is_read_and_nothing_travels_between_logs():
    """Counts stay tensors until `take`: on the meta device a read raises."""
    model = mixture("qwen3_moe").to("meta").train()
    model.set_experts_implementation("batched_mm")
    balance = ExpertBalance(model, torch.device("meta"))
    model(input_ids=torch.ones(2, 5, dtype=torch.int64, device="meta"))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        balance.take(None)
