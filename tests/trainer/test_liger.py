"""`use_liger_kernel` over a grid: the kernels of each token are Liger's, everything else is as without it.

The kernels need a GPU, or Triton's interpreter. Without either, what puts forwards inside of the sharded layers is
compared with forwards of PyTorch, and the rest is refused.

    pip install --no-deps liger-kernel triton
    TRITON_INTERPRET=1 python -m pytest tests/trainer/test_liger.py      the slow tests, and in float32
    make test-gpu                                                        in float32, on GPUs
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import trainer as transformers_trainer

from hf_axonn import Grid
from hf_axonn.layers.base import innermost, moved_inside
from hf_axonn.trainer import liger
from tests.helpers.chats import ExactLogProbs, make_sft
from tests.helpers.devices import rank_device, seeded
from tests.helpers.equality import Case, Outcome, compare, too_large
from tests.helpers.float64 import checkpointed, relative_errors
from tests.helpers.liger_kernels import interpret, why_not
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.preferences import fit, lora, make_dpo, make_groups, make_kto, make_reward, write_preferences
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer, train, worst_difference


BOUND = 1e-10


def interpreted(test):
    """A test of Liger's kernels by Triton's interpreter, which is slow."""
    for mark in (pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.skipif(bool(why_not()), reason=why_not())):
        test = mark(test)
    return test


# Without Liger: forwards in PyTorch, put on modules as Liger puts its own.


def _own_mlp(self, x):
    return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)) * 1.25


def _own_norm(self, hidden):
    return F.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)


def put_forwards(model: nn.Module, called: Counter) -> None:
    """Forwards that are not those of the classes, on every MLP and norm: twice, as a second `train` does."""
    for _ in range(2):
        with moved_inside(model):
            for name, module in model.named_modules():
                forward = {"mlp": _own_mlp, "norm": _own_norm}.get("norm" if "norm" in name else name.split(".")[-1])
                if forward is not None:
                    module.forward = types.MethodType(_counting(forward, name, called), module)


def _counting(forward, name: str, called: Counter):
    @functools.wraps(forward)
    def counting(self, x):
        called[name.split(".")[-1]] += 1
        return forward(self, x)

    return counting


def _case(called: Counter) -> Case:
    return Case("own", functools.partial(tiny_model, "qwen3"), before=functools.partial(put_forwards, called=called))


def _inside(truth: Outcome) -> None:
    called: Counter = Counter()
    for grid in (Grid(x=2), Grid(y=2), Grid(z=2)):
        assert not too_large(compare([(_case(called), truth)], [grid]), BOUND)
        own = {"mlp", "norm", "q_norm", "k_norm"}  # with y those of the residual stream are layers/norms.py's
        assert set(called) == (own if grid.y > 1 else own | {"input_layernorm", "post_attention_layernorm"})
        called.clear()


def test_forwards_go_inside_of_what_shards_their_modules():
    called: Counter = Counter()
    truth = _case(called).truth()
    assert called["mlp"] == 2
    run_ranks(_inside, 2, truth)


def test_a_module_that_nothing_shards_just_gets_the_forward():
    model = tiny_model("llama")
    with moved_inside(model):
        model.model.norm.forward = types.MethodType(_own_norm, model.model.norm)
    assert innermost(model.model.norm).__func__ is _own_norm
    assert "forward" not in vars(model.model.layers[0].mlp)


# What is refused, and what is turned off.


def test_losses_and_experts_are_off_and_refused_where_they_are_asked_for():
    llama, mixtral = tiny_model("llama"), tiny_model("mixtral")
    off = dict.fromkeys(liger.LOSSES, False)
    assert liger._settings(llama, None) == off
    assert liger._settings(llama, {"rope": False, "cross_entropy": False}) == {"rope": False, **off}
    assert liger._settings(mixtral, {"rms_norm": True}) == {"rms_norm": True, "swiglu": False, **off}
    for name in liger.LOSSES:
        with pytest.raises(ValueError, match=rf"'{name}': True.* a head that is sharded over a grid: omit it"):
            liger._settings(llama, {name: True})
    with pytest.raises(ValueError, match="'swiglu': True.* experts that are sharded"):
        liger._settings(mixtral, {"swiglu": True})


def test_models_that_nobody_has_compared_and_other_activations_are_refused():
    with pytest.raises(ValueError, match="a model of type gpt2 .* compared .* llama"):
        liger._settings(tiny_model("gpt2"), None)
    gelu = tiny_model("llama", hidden_act="gelu")
    with pytest.raises(ValueError, match="swiglu computes silu, but this model has gelu: set .*'swiglu': False"):
        liger._settings(gelu, None)
    assert not liger._settings(gelu, {"swiglu": False})["swiglu"]


@pytest.mark.parametrize(
    ("found", "interpreter", "dynamo", "message"),
    [
        (False, "1", "NO", r"liger-kernel is not installed: pip install 'hf_axonn\[liger\]'"),
        (False, "0", "NO", "its kernels are Triton's, which need a GPU: omit it on CPUs"),
        (True, "1", "INDUCTOR", "it has not been compared with torch.compile"),
    ],
)
def test_what_is_missing_is_named(monkeypatch, found, interpreter, dynamo, message):
    monkeypatch.setattr("transformers.utils.import_utils.is_liger_kernel_available", lambda: found)
    monkeypatch.setenv("TRITON_INTERPRET", interpreter)
    args = types.SimpleNamespace(device=torch.device("cpu"), liger_kernel_config=None)
    with pytest.raises(ValueError, match=f"^use_liger_kernel is not supported over this grid .*z=2.*: {message}"):
        liger.check(args, dynamo, tiny_model("llama"), Grid(z=2))


def test_the_goldfish_loss_turns_liger_s_losses_off(tmp_path):
    trainer = make_trainer(tmp_path, None, use_liger_kernel=True, liger_kernel_config={"rope": False})
    assert trainer.args.liger_kernel_config == {"rope": False, **dict.fromkeys(liger.LOSSES, False)}
    with pytest.raises(ValueError, match="'cross_entropy': True.* the goldfish loss"):
        make_trainer(tmp_path, None, use_liger_kernel=True, liger_kernel_config={"cross_entropy": True})


# With Liger.


def apply(model: nn.Module) -> None:
    """What Trainer does when training starts; a plain model is asked for what a grid takes by itself."""
    off = dict.fromkeys(liger.LOSSES, False) | ({} if liger.MODELS[model.config.model_type] else {"swiglu": False})
    transformers_trainer.apply_liger_kernel(model, off)


_EXPERTS = dict(experts_implementation="eager", num_experts_per_tok=2)
KINDS = {name: {} for name in liger.MODELS} | {
    "gemma2": dict(attention="eager", sliding_window=4),
    "mixtral": _EXPERTS | dict(num_local_experts=3),
    "qwen3_moe": _EXPERTS | dict(num_experts=3, moe_intermediate_size=20),
}
MAIN = ("llama", "qwen3", "gemma2", "mixtral", "llama, recomputed")
MLP = {"swiglu": "_swiglu_forward_kernel", "geglu": "_geglu_tanh_forward_kernel"}


def _recomputed(model: nn.Module) -> None:
    apply(model)
    checkpointed(model, reentrant=False)


def _cases(kinds: tuple[str, ...]) -> list[Case]:
    """`kind`, or `kind, recomputed`. Liger's code has 1 / H in float32, which is exact for this H: in the feature
    layout norms are ours."""
    cases = []
    for name in kinds:
        kind, _, recomputed = name.partition(", ")
        sizes = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=4, head_dim=8)
        make = functools.partial(tiny_model, kind, **sizes, **KINDS[kind])
        cases.append(Case(name, make, [tiny_batch(4, 6)], before=_recomputed if recomputed else apply))
    return cases


def _truths(kinds: tuple[str, ...]) -> list[Outcome]:
    interpret(wide=True)
    return [case.truth() for case in _cases(kinds)]


def _equal(kinds: tuple[str, ...], truths: list[Outcome], grids: list[Grid]) -> dict:
    launched = interpret(wide=True)
    table = {}
    for case, truth in zip(_cases(kinds), truths, strict=True):
        for grid in grids:
            launched.clear()
            table |= compare([(case, truth)], [grid])
            wanted = {"_triton_rope", MLP.get(liger.MODELS[case.name.partition(",")[0]])} - {None}
            if grid.y == 1:
                wanted |= {"_rms_norm_forward_kernel", "_rms_norm_backward_kernel"}
            assert wanted <= set(launched), (case.name, grid, launched)
    return table


@interpreted
def test_every_model_equals_one_process_with_the_same_kernels():
    kinds = tuple(KINDS)
    (truths,) = run_ranks(_truths, 1, kinds, timeout=600)
    for table in run_ranks(_equal, 4, kinds, truths, [Grid(z=2, x=2)], timeout=1200):
        assert not too_large(table, BOUND)


@interpreted
def test_on_more_grids():
    (truths,) = run_ranks(_truths, 1, MAIN, timeout=600)
    for table in run_ranks(_equal, 2, MAIN, truths, [Grid(x=2), Grid(z=2), Grid(y=2)], timeout=1200):
        assert not too_large(table, BOUND)


FLOAT32 = ("llama", "gemma2")
ORDERS = 8  # of the rows of a batch, on one process
MARGIN = 2.0  # the grid is one more order: it may be worse than the worst of eight, but not much


def _float32(kind: str, rows: list[int]) -> Case:
    batch = {name: value[rows] for name, value in tiny_batch(8, 6).items()}
    make = functools.partial(tiny_model, kind, dtype=torch.float32, **KINDS[kind])
    return Case(kind, make, [batch], before=apply, context=contextlib.nullcontext)


def _in_orders(truths: list[Outcome]) -> list[list[float]]:
    if rank_device().type == "cpu":
        interpret(wide=False)
    errors = []
    for kind, truth in zip(FLOAT32, truths, strict=True):
        orders = [torch.randperm(8, generator=seeded(order)).tolist() for order in range(ORDERS)]
        runs = [_float32(kind, rows).truth() for rows in orders]
        errors.append([max(relative_errors(its.gradients, truth.gradients).values()) for its in runs])
    return errors


def _on_grid(truths: list[Outcome], grid: Grid) -> list[float]:
    launched = interpret(wide=False) if rank_device().type == "cpu" else None
    runs = [_float32(kind, list(range(8))).on_grid(grid) for kind in FLOAT32]
    assert launched is None or launched["_rms_norm_backward_kernel"]
    pairs = zip(runs, truths, strict=True)
    return [max(relative_errors(ours.gradients, truth.gradients).values()) for ours, truth in pairs]


def test_in_float32_a_grid_is_as_near_to_float64_as_one_process(device):
    """The kernels as they are, against float64 without them; on GPUs by `make test-gpu`."""
    if device.kind == "cpu" and why_not():
        pytest.skip(why_not())
    pytest.importorskip("liger_kernel")
    truths = [Case(kind, functools.partial(tiny_model, kind, **KINDS[kind]), [tiny_batch(8, 6)]) for kind in FLOAT32]
    truths = [case.truth() for case in truths]
    (spread,) = run_ranks(_in_orders, 1, truths, timeout=600)
    for grid in (Grid(z=2), Grid(x=2)):
        for rank in run_ranks(_on_grid, 2, truths, grid, timeout=600):
            for error, orders in zip(rank, spread, strict=True):
                assert error <= MARGIN * max(orders), (grid, error, orders)


# The trainers.


SHORT = dict(max_steps=1, logging_steps=1)
TRAINERS = {
    "Trainer": dict(stock=True, eval_steps=1, save_strategy="no"),
    "GoldfishTrainer": dict(eval_steps=1, save_strategy="no"),
    "SFTTrainer": dict(make=make_sft, goldfish=False),
    "GoldfishSFTTrainer": dict(make=make_sft, packing=True, evaluate=True, peft_config=lora()),
    "DPOTrainer": dict(make=make_dpo, reference=True, evaluate=True),
    "KTOTrainer": dict(make=make_kto, loss_type="apo_zero_unpaired"),
    "RewardTrainer": dict(make=make_reward),
    "GRPOTrainer": dict(make=make_groups, num_generations=8),
    "RLOOTrainer": dict(make=make_groups, kind="RLOO"),
}
FLOOR = 1e-3  # a reward or a mean logit may be next to 0


def _run(folder: Path, output: Path, grid: Grid | None, name: str) -> list[dict]:
    options = SHORT | dict(use_liger_kernel=True) | TRAINERS[name]
    if grid is None:  # which has them unless they are turned off
        options["liger_kernel_config"] = dict.fromkeys(liger.LOSSES, False)
    make = options.pop("make", None)
    if make is None:
        history = train(output, grid, kind="llama", **options)
        # The stock `eval_loss` is a mean over batches, which are cut differently on one process.
        return [
            {key: its for key, its in entry.items() if key != "eval_loss" or "stock" not in options}
            for entry in history
        ]
    return fit(make, *(() if make is make_sft else (folder,)), output, grid, **options)[0]


def _on_one(folder: Path, names: tuple[str, ...]) -> dict[str, list[dict]]:
    import trl.trainer.utils

    interpret(wide=True)
    with mock.patch.object(trl.trainer.utils, "_ChunkedLogProbFunction", ExactLogProbs):
        return {name: _run(folder, folder / "one", None, name) for name in names}


def _as_on_one(folder: Path, truths: dict[str, list[dict]], grid: Grid) -> None:
    launched = interpret(wide=True)
    for name, truth in truths.items():
        launched.clear()
        history = _run(folder, folder / "grid", grid, name)
        assert {"_triton_rope", "_swiglu_backward_kernel", "_rms_norm_backward_kernel"} <= set(launched), name
        assert worst_difference(history, truth, FLOOR) < BOUND, (name, grid, history, truth)


@interpreted
@pytest.mark.parametrize("names", [list(TRAINERS)[:4], list(TRAINERS)[4:]], ids=["losses", "preferences"])
def test_every_trainer_equals_one_process_with_the_same_kernels(tmp_path, names):
    write_preferences(tmp_path)
    (truths,) = run_ranks(_on_one, 1, tmp_path, names, timeout=1200)
    run_ranks(_as_on_one, 4, tmp_path, truths, Grid(z=2, x=2), timeout=1800)


@interpreted
def test_stages_of_a_pipeline(tmp_path):
    names = ["Trainer", "GoldfishTrainer"]
    (truths,) = run_ranks(_on_one, 1, tmp_path, names, timeout=600)
    run_ranks(_stages, 2, tmp_path, truths, timeout=1200)


def _stages(folder: Path, truths: dict[str, list[dict]]) -> None:
    launched = interpret(wide=True)
    for name, truth in truths.items():
        history = _run(folder, folder / "grid", Grid(pipe=2), name)
        assert {"_triton_rope", "_swiglu_backward_kernel", "_rms_norm_backward_kernel"} <= set(launched), name
        assert worst_difference(history, truth) < BOUND, (name, history, truth)
