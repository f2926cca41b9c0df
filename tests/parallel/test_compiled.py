"""torch.compile by regions: the same numbers as eager, few graphs, and what is refused or left eager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.utils import counters

from hf_axonn import AxonnPlugin, Grid, parallelize
from hf_axonn.config import AxonnConfig
from hf_axonn.engine.dtensors import local
from hf_axonn.engine.gradient_sync import sync_gradients
from hf_axonn.parallel.compiled import compile_regions
from tests.helpers.adapting import adapt
from tests.helpers.equality import rows_of
from tests.helpers.models import tiny_batch, tiny_model, unplanned_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer, numbers
from tests.layers.test_computed_ahead import KINDS as SHARED
from tests.layers.test_moe import EXPERTS, KINDS
from tests.parallel.test_context_parallel import MAMBA


LENGTHS = (8, 12, 9, 21)


def sharded(grid: Grid, kind: str, *, lora: bool = False, way: str = "auto", **options) -> nn.Module:
    model = tiny_model(kind, **options)
    config = AxonnConfig(grid=grid, context_attention=way)
    model, _ = parallelize(adapt(model) if lora else model, config=config)
    return model.train()


def step(model: nn.Module, grid: Grid, seq: int, **options) -> dict[str, torch.Tensor]:
    """The loss and every gradient's shard of one batch; dropout draws the same each time."""
    torch.manual_seed(seq)
    batch = rows_of(tiny_batch(2 * grid.dp_size, seq), grid, torch.distributed.get_rank())
    loss = model(**batch, **options).loss
    loss.backward()
    sync_gradients(model)
    named = model.named_parameters()
    found = {name: local(its.grad).clone() for name, its in named if its.grad is not None}
    model.zero_grad()
    return {"loss": loss.detach()} | found


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of each tensor that is not equal bit by bit, relative to its largest number."""
    assert ours.keys() == theirs.keys()
    unequal = [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    return {name: ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in unequal}


def assert_equal_to_eager(grid: Grid, kind: str, *, options=None, checkpoint=None, but: str = "", **model) -> None:
    """Bit by bit; parameters with `but` in their names to the last digit."""
    eager, compiled = sharded(grid, kind, **model), sharded(grid, kind, **model)
    names = [name for name, _ in compiled.named_parameters()]
    torch.compiler.reset()
    compiled.compile(backend="aot_eager")
    for either in (eager, compiled) if checkpoint is not None else ():
        either.gradient_checkpointing_enable({"use_reentrant": checkpoint})
        either.enable_input_require_grads()
    counters.clear()
    found = differences(step(compiled, grid, 8, **options or {}), step(eager, grid, 8, **options or {}))
    assert all(but and but in name and error < 1e-14 for name, error in found.items()), (kind, found)
    assert counters["stats"]["unique_graphs"] > 0
    assert [name for name, _ in compiled.named_parameters()] == names
    assert not counters["recompile_limit"]


def test_a_compiled_model_is_eager_bit_by_bit_with_few_graphs():
    run_ranks(_bits_and_graphs, 2)


def _bits_and_graphs() -> None:
    """Rank 0 alone compiles, which takes long: its collectives are those of a rank that does not."""
    grid, compiles = Grid(x=2), torch.distributed.get_rank() == 0
    eager, compiled = (sharded(grid, "llama", num_hidden_layers=1) for _ in range(2))
    with pytest.raises(ValueError, match="without attention and MLP blocks"):
        parallelize(unplanned_model(), grid)[0].compile()
    torch.compiler.reset()
    counters.clear()
    if compiles:
        with pytest.raises(RuntimeError, match="Unrecognized mode"):
            compiled.compile(mode="fastest")  # what torch refuses leaves the model as it was
        # Dynamo alone, whose graphs are what is counted; what is traced for backward, too, is slow.
        compiled.compile(backend="eager")
        compiled.compile(backend="eager")  # of no effect
        with pytest.raises(ValueError, match="is compiled already, with {'backend': 'eager'}"):
            compiled.compile(backend="aot_eager")
    graphs = []
    for seq in LENGTHS:
        assert not differences(step(compiled, grid, seq, use_cache=False), step(eager, grid, seq, use_cache=False))
        graphs.append(counters["stats"]["unique_graphs"])
    compiled.eval()
    with torch.no_grad():
        batch = tiny_batch(2, 17)
        assert torch.equal(compiled(**batch).logits, eager.eval()(**batch).logits)
    assert counters["stats"]["unique_graphs"] == graphs[-1]  # without gradients nothing is compiled
    if not compiles:
        assert graphs == [0] * len(LENGTHS)
        return
    # Once for the first length, once for all others.
    assert 0 < graphs[0] < graphs[1] <= 3 * graphs[0] and set(graphs[1:]) == {graphs[1]}, graphs
    # A layer's graphs end at its attention and MLP, theirs at 4 and 3 projections, in both compilations.
    assert all("torch.compiler.disable" in reason for reason in counters["graph_break"])
    assert 9 <= sum(counters["graph_break"].values()) <= 3 * 9
    assert len(compiled.axonn._compiled) == 2 and not eager.axonn._compiled  # of the loss


def test_options_that_regions_cannot_have():
    for options, message in (
        ({"fullgraph": True}, "omit fullgraph"),
        ({"mode": "reduce-overhead"}, "CUDA graphs overwrite what backward still"),
        ({"mode": "max-autotune"}, "'max-autotune-no-cudagraphs'"),
    ):
        with pytest.raises(ValueError, match=message):
            compile_regions(None, nn.Linear(1, 1), **options)
    compile_regions(None, nn.Linear(1, 1), disable=True)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [Grid(y=2), Grid(z=2), Grid(z=2, x=2), Grid(z=2, context=2)], ids=str)
def test_grids(grid):
    run_ranks(_kinds, grid.size, grid, timeout=900)


def _kinds(grid: Grid) -> None:
    for kind in ("llama", "gpt2", "gemma"):
        assert_equal_to_eager(grid, kind)
    if grid.context > 1:
        assert_equal_to_eager(grid, "falcon")  # gathers whole rows
        assert_equal_to_eager(grid, "bamba", **MAMBA)  # mixers exchange positions for heads
        assert_equal_to_eager(grid, "llama", lora=True)
        for way in ("heads", "keys"):
            assert_equal_to_eager(grid, "llama", options={"use_cache": False}, checkpoint=False, way=way)
            assert_equal_to_eager(grid, "gemma2", attention="eager", way=way)


@pytest.mark.slow
def test_kinds_of_models_and_passes():
    run_ranks(_passes, 2, timeout=900)


def _passes() -> None:
    grid = Grid(x=2)
    assert_equal_to_eager(grid, "llama", options={"use_cache": False}, checkpoint=True)
    assert_equal_to_eager(grid, "llama", options={"use_cache": False}, checkpoint=False)
    assert_equal_to_eager(grid, "llama", lora=True)
    assert_equal_to_eager(grid, "llama", dtype=torch.bfloat16)
    assert_equal_to_eager(grid, "llama", num_hidden_layers=12)
    assert_equal_to_eager(grid, "gpt2", resid_pdrop=0.1, attn_pdrop=0.1)
    assert_equal_to_eager(grid, "mixtral", dtype=torch.bfloat16)
    assert_equal_to_eager(grid, "gemma2", attention="eager")
    # Its norms of heads add up gradients that lie in memory in another order.
    assert_equal_to_eager(grid, "qwen3", but="_norm.weight")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen2_moe", "granitemoeshared", "aria_text", "gemma4_text"])
def test_shared_experts_while_tokens_travel(kind):
    """They are called after the others, before them, or by the layer, which is compiled itself."""
    run_ranks(_shared, 2, kind, timeout=500)


def _shared(kind: str) -> None:
    sizes = EXPERTS | (KINDS | SHARED)[kind]
    # Gemma 4's two layers have heads of other sizes, so they cannot run again with each other's graphs; and gradients
    # of the first one's input are added in another order.
    but = "embed_tokens" if kind == "gemma4_text" else ""
    assert_equal_to_eager(Grid(x=2), kind, options={"use_cache": False}, checkpoint=False, but=but, **sizes)


@pytest.mark.slow
def test_a_pass_without_gradients_before_backward():
    run_ranks(_between, 2, timeout=600)


def _between() -> None:
    """A layer that runs again is compiled, as it was at first."""
    grid = Grid(x=2)
    model = sharded(grid, "llama")
    model.compile(backend="aot_eager")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = tiny_batch(2, 8)
    loss = model(**batch, use_cache=False).loss
    with torch.no_grad():
        model(**batch, use_cache=False)
    loss.backward()


@pytest.mark.slow
def test_inductor_is_eager_within_float32():
    run_ranks(_inductor, 2, timeout=600)


def _inductor() -> None:
    grid = Grid(x=2)
    eager, compiled = (sharded(grid, "llama", dtype=torch.float32) for _ in range(2))
    torch.compiler.reset()
    counters.clear()
    compiled.compile()
    found = differences(step(compiled, grid, 8), step(eager, grid, 8))
    assert found and max(found.values()) < 2e-5, found
    assert counters["stats"]["unique_graphs"] > 0 and not counters["recompile_limit"]


@pytest.mark.slow
def test_trainer_and_accelerator_compile_by_regions(tmp_path):
    run_ranks(_entrances, 2, tmp_path, timeout=600)


def _entrances(folder: Path) -> None:
    grid = Grid(x=2)
    histories = []
    for name, options in (("eager", {}), ("compiled", {"torch_compile": True, "torch_compile_backend": "aot_eager"})):
        counters.clear()
        trainer = make_trainer(folder / name, grid, max_steps=4, save_steps=4, eval_steps=4, **options)
        trainer.train()
        histories.append(numbers(trainer.state.log_history))
        assert bool(counters["stats"]["unique_graphs"]) == bool(options)
        assert not any("_orig_mod" in key for key in trainer.model.state_dict())
    assert histories[0] == histories[1]
    resumed = make_trainer(folder / "compiled", grid, max_steps=4, save_steps=4, eval_steps=4)
    resumed.train(resume_from_checkpoint=True)  # what a compiled run has saved
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, parallelism_config=AxonnPlugin(grid=grid), dynamo_backend="aot_eager")
    model = accelerator.prepare(tiny_model("llama"))
    assert model.axonn.regions and accelerator.unwrap_model(model) is model
    with pytest.raises(ValueError, match="add adapters before compile"):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
