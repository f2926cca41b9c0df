"""The collectives of real training steps, counted, are those of planner/traffic/volumes.py, to the call and byte."""

from __future__ import annotations

import contextlib
import functools
import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from hf_axonn import parallelize
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.collectives import start_all_gather
from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.engine import gradient_sync as gradients
from hf_axonn.engine import host_moments
from hf_axonn.engine.gradient_sync import sync_gradients, syncing
from hf_axonn.losses import head_chunks
from hf_axonn.planner.dense import DenseShape
from hf_axonn.planner.memory import MOMENT_BUCKET
from hf_axonn.planner.shapes import ModelShape, gathers_keys
from hf_axonn.planner.step import Step
from hf_axonn.planner.traffic import volumes as arithmetic
from hf_axonn.planner.traffic.ledger import Ledger, LedgerKey, Volume
from hf_axonn.planner.traffic.volumes import volumes
from hf_axonn.profiling.trace import trace_shape
from hf_axonn.topology.grid import Grid
from tests.benchmarks.planner.simulate import world
from tests.helpers.equality import rows_of
from tests.helpers.four_bit import WIDE, quantized_model
from tests.helpers.models import tiny_batch, tiny_config, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.traffic_counter import count_traffic


LLAMA = DenseShape(layers=2, hidden=48, heads=12, kv_heads=6, head_dim=4, intermediate=40, vocab=131)
SMOLLM2 = replace(LLAMA, hidden=36, heads=9, kv_heads=3, tied=True)
FOUR_BITS = DenseShape(layers=2, hidden=256, heads=8, kv_heads=4, head_dim=32, intermediate=256, vocab=131)
ROWS, SEQ = 8, 7


@dataclass
class Case:
    """A tiny model with the numbers that describe it, and how it is trained."""

    kind: str
    shape: ModelShape
    step: dict = field(default_factory=dict)
    changes: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)
    autocast: bool = False
    ahead: bool = False  # gradients are averaged while the last backward pass is under way

    @property
    def four_bit(self) -> bool:
        return "base" in self.step


CASES = {
    "kv heads that some grids do not divide": Case("llama", LLAMA, {"micro_batches": 2}),
    "as many kv heads, checkpointing": Case(
        "llama", replace(LLAMA, kv_heads=12), {"checkpointing": True}, {"num_key_value_heads": 12}, ahead=True
    ),
    "checkpointing, a third gather": Case(
        "llama", LLAMA, {"checkpointing": True, "keep_gathered": "none"}, config={"keep_gathered": "none"}
    ),
    "9 heads, tied": Case("smollm2", SMOLLM2),
    "biases, bfloat16": Case("qwen2", replace(LLAMA, qkv_bias=True), {"compute_bytes": 2}, autocast=True),
    "norms of heads, kept weights": Case(
        "qwen3", replace(LLAMA, qk_norm=True), {"keep_gathered": 1, "counted": True}, config={"keep_gathered": 1}
    ),
    "windows": Case("mistral", replace(LLAMA, windows=(3, 3)), {"counted": True}, {"sliding_window": 3}),
    "LoRA": Case("llama", LLAMA, {"lora": 3, "micro_batches": 2}),
    "LoRA, checkpointing": Case("llama", LLAMA, {"lora": 3, "checkpointing": True}),
    "LoRA on 4 bits": Case("llama", FOUR_BITS, {"lora": 3, "base": "4bit"}, WIDE),
    "LoRA on 4 bits, double, checkpointing": Case(
        "llama", FOUR_BITS, {"lora": 3, "base": "4bit-double", "checkpointing": True}, WIDE
    ),
}
GRIDS = {
    2: [Grid(x=2), Grid(y=2), Grid(z=2), Grid(data=2)],
    4: [Grid(x=2, y=2), Grid(x=4), Grid(y=4), Grid(z=2, x=2), Grid(data=2, z=2), Grid(data=2, y=2)],
    8: [Grid(z=2, y=2, x=2)],
}
DIVIDED = [
    Grid(z=2, context=2),
    Grid(z=4, context=2),
    Grid(z=2, x=2, context=2),
    Grid(z=2, y=2, context=2),
    Grid(z=4, context=4),
    Grid(z=4, x=2, context=2),
]


# What a case has of its own is in what this axis does; of z, on which weights lie, most cases. The others on two ranks
# are in the slow set, with double quantization for that on 4 bits, which is the same with less in it.
OFTEN = {
    Grid(z=2): [name for name in CASES if name not in ("windows", "LoRA", "LoRA on 4 bits")],
    Grid(x=2): ("kv heads that some grids do not divide", "9 heads, tied", "LoRA, checkpointing"),
    Grid(y=2): (
        "as many kv heads, checkpointing",
        "biases, bfloat16",
        "LoRA",
        "LoRA on 4 bits, double, checkpointing",
    ),
    Grid(data=2): ("as many kv heads, checkpointing", "norms of heads, kept weights"),
    Grid(z=2, y=2, x=2): ("kv heads that some grids do not divide",),
}


def cases_on(grid: Grid) -> list[tuple[str, Case]]:
    few = ("LoRA on 4 bits",) if grid.size == 2 else ()
    return [item for item in CASES.items() if item[0] not in few][: None if grid.size <= 4 else 2]


def layouts_on(grid: Grid) -> tuple[str, ...]:
    return ("auto",) if grid.y == 1 else ("token", "feature")


def counted(case: Case, grid: Grid, layout: str) -> Ledger:
    """The second optimizer step of a model on a grid: the first has yet to learn what to gather ahead."""
    if case.four_bit:
        double = case.step["base"] == "4bit-double"
        model = quantized_model(case.kind, dtype=torch.float32, double=double, **case.changes).train()
    else:
        model = tiny_model(case.kind, dtype=torch.float32, **case.changes).train()
    if case.step.get("lora"):
        # As PEFT does for checkpointing: then all layers are alike, the first one, too, has a gradient of its input.
        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=case.step["lora"], target_modules="all-linear"))
    model, _ = parallelize(model, grid, config=AxonnConfig(grid=grid, layout=layout, **case.config))
    if case.step.get("checkpointing"):
        model.gradient_checkpointing_enable()
    batch = rows_of(tiny_batch(ROWS, SEQ), grid, dist.get_rank())
    if case.step.get("counted"):
        batch["num_items_in_batch"] = torch.tensor(40)
    micro_batches = case.step.get("micro_batches", 1)
    for _ in range(2):
        model.zero_grad()
        with count_traffic(grid) as counter:
            for index in range(micro_batches):
                with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    value = model(**batch).loss
                with contextlib.ExitStack() as stack:
                    if case.ahead and index == micro_batches - 1:
                        stack.enter_context(counter.during("gradients"))
                        stack.enter_context(syncing(model))
                    value.backward()
            if not case.ahead:
                with counter.during("gradients"):
                    sync_gradients(model)
    return counter.ledger


def said(case: Case, grid: Grid, layout: str) -> Ledger:
    """What volumes.py says of the same step, for this rank."""
    step = Step(rows=ROWS // grid.dp_size, seq=SEQ, **{"compute_bytes": 4, **case.step})
    layout = "token" if layout == "auto" else layout
    return volumes(case.shape, grid, step, layout=layout, rank=dist.get_rank())


def compare(grids: list[Grid]) -> list[tuple]:
    """(grid and layout, case, entries counted, entries said) of this rank."""
    return [
        (f"{grid} {layout}", name, counted(case, grid, layout).entries, said(case, grid, layout).entries)
        for grid in grids
        for layout in layouts_on(grid)
        for name, case in cases_on(grid)
    ]


def differing(ours: dict, expected: dict) -> dict[LedgerKey, tuple]:
    """(counted, said) by entries that are not the same."""
    return {
        key: (ours.get(key), expected.get(key)) for key in {*ours, *expected} if ours.get(key) != expected.get(key)
    }


@pytest.fixture
def small_pieces(monkeypatch):
    """Chunks and buckets so small that there are several of each."""
    for module in (head_chunks, arithmetic):
        monkeypatch.setattr(module, "CHUNK_LOGITS", 1500)
    for module in (gradients, arithmetic):
        monkeypatch.setattr(module, "BUCKET_BYTES", 20_000)


@pytest.mark.usefixtures("small_pieces")
def test_the_last_rank_issues_what_volumes_says():
    """On grids in this process, of which one rank is there."""
    for grid, names in OFTEN.items():
        for layout, name in itertools.product(layouts_on(grid), names):
            with world(grid, grid.size - 1):
                ours, expected = (of(CASES[name], grid, layout).entries for of in (counted, said))
            assert ours, f"nothing was counted on {grid}"
            wrong = differing(ours, expected)
            assert not wrong, f"{grid} {layout}, {name}: (counted, said) of {wrong}"


@pytest.mark.slow
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("ranks", GRIDS)
def test_every_rank_issues_what_volumes_says(ranks):
    for rank, rows in enumerate(run_ranks(compare, ranks, GRIDS[ranks])):
        assert len(rows) == sum(len(layouts_on(grid)) * len(cases_on(grid)) for grid in GRIDS[ranks])
        for where, case, ours, expected in rows:
            assert ours, f"nothing was counted on {where}"
            wrong = differing(ours, expected)
            assert not wrong, f"rank {rank} on {where}, {case}: (counted, said) of {wrong}"


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "grids"),
    [
        # Each grid has a case, and each case a grid.
        *((name, DIVIDED[place % 6 :: 6]) for place, name in enumerate(CASES) if not name.startswith("LoRA")),
        ("LoRA", DIVIDED[2::6]),
        *(SLOW(name, DIVIDED) for name in CASES),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} grids",
)
def test_rows_over_context_send_what_volumes_says(name, grids, monkeypatch):
    """On grids in this process, of which one rank is there: the last, which fills up a position of 7."""
    monkeypatch.setattr(head_chunks, "CHUNK_LOGITS", 1500)
    monkeypatch.setattr(arithmetic, "CHUNK_LOGITS", 1500)
    case = CASES[name]
    for grid, way in itertools.product(grids, ("heads", "keys")):
        if way == "heads" and gathers_keys(case.shape, grid, "auto"):
            way = "auto"
        setting = {"context_attention": way}
        divided = replace(case, step=case.step | setting, config=case.config | setting)
        for layout in layouts_on(grid):
            with world(grid, grid.size - 1):
                ours, expected = counted(divided, grid, layout).entries, said(divided, grid, layout).entries
            wrong = differing(ours, expected)
            assert not wrong, f"{grid} {layout} {way}: (counted, said) of {wrong}"
            exchanged = any(key.kind == "all_to_all" and "y" not in key.axes for key in ours)
            assert exchanged == (way == "heads")


def test_experts_that_are_kept_are_gathered_once_where_layers_run_again():
    with torch.device("meta"):
        shape = trace_shape(AutoModelForCausalLM.from_config(tiny_config("mixtral")))
    settings = {"keep_gathered": "all"}
    case = Case("mixtral", shape, settings | {"checkpointing": True}, config=settings | {"experts": "gather"})
    grid = Grid(z=2)
    with world(grid, 1):
        ours, expected = counted(case, grid, "auto").entries, said(case, grid, "auto").entries
        model = tiny_model("mixtral", dtype=torch.float32).train()
        model, _ = parallelize(model, grid, config=AxonnConfig(grid=grid, **case.config))
        model.gradient_checkpointing_enable()
        model(**rows_of(tiny_batch(ROWS, SEQ), grid, 1)).loss.backward()
    assert not differing(ours, expected) and LedgerKey("backward", "all_gather", ("z",)) not in ours
    assert not len(model.axonn.context.gather_cache._alive)  # what runs again is no cycle that stays


def test_sizes_of_chunks_and_buckets_are_those_of_the_engine():
    assert (arithmetic.CHUNK_LOGITS, arithmetic.BUCKET_BYTES) == (head_chunks.CHUNK_LOGITS, gradients.BUCKET_BYTES)
    assert MOMENT_BUCKET == host_moments.BUCKET_BYTES


def phases_and_axes():
    grid = Grid(z=2, x=2)
    mesh = grid_mesh(grid, "cpu")
    value = torch.ones(3, dtype=torch.float64)
    with count_traffic(grid) as outer:
        start_all_gather(value, mesh.group("x")).wait()
        with count_traffic(grid) as inner, inner.during("gradients"):
            start_all_gather(value, dist.group.WORLD).wait()
            start_all_gather(value, mesh.group("y")).wait()
    start_all_gather(value, mesh.group("z")).wait()
    return outer.ledger.entries, inner.ledger.entries


def test_a_counter_sees_what_is_issued_inside_and_nothing_else():
    (outer, inner), *_ = run_ranks(phases_and_axes, 4)
    assert inner == {LedgerKey("gradients", "all_gather", ("z", "x")): Volume(1, 24)}
    assert outer == {
        LedgerKey("forward", "all_gather", ("x",)): Volume(1, 24),
        LedgerKey("forward", "all_gather", ("z", "x")): Volume(1, 24),
    }
