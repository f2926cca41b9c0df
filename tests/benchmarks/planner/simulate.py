"""One rank of a grid of thousands: the real engine's training step, without the other ranks and without values.

    python -m tests.benchmarks.planner.simulate                         the models of CASES
    python -m tests.benchmarks.planner.simulate --case llama-405b --grid data=2,z=64,y=8,x=16 --rank 77
    python -m tests.benchmarks.planner.simulate --groups 1024 8192 32768     and what building the process groups takes

The model is built, sharded and trained for two steps by the code that trains on GPUs. Tensors are fake (sizes and
dtypes, no values), the process group is torch's `fake` backend, in which collectives return at once. Everything that
is counted is then what a rank would hold and send: parameters, gradients, what forward saves, peaks, and each
collective. It has to be what the planner says of the same step (planner/traffic/volumes.py to the call and byte,
planner/memory.py exactly for parameters and within TOLERANCE for peaks): exit code 1 where it is not.

What a fake run cannot know: values. See `NoValues`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import platform
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import ceil
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from hf_axonn import Grid, __version__, parallelize
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.collectives import exchange
from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.engine.gradient_sync import syncing
from hf_axonn.layers import moe
from hf_axonn.layers.moe import Experts
from hf_axonn.layers.token_routes import Routes
from hf_axonn.planner.dense import GPT_POSITIONS, GPT_VOCAB, GPTS
from hf_axonn.planner.experts import expected_rows, place_experts
from hf_axonn.planner.memory import memory
from hf_axonn.planner.shapes import ModelShape
from hf_axonn.planner.step import Step
from hf_axonn.planner.traffic import volumes as arithmetic
from hf_axonn.planner.traffic.ledger import Ledger
from hf_axonn.planner.traffic.volumes import volumes
from hf_axonn.profiling.read_shape import shape_of
from hf_axonn.topology.experts import Rows
from tests.benchmarks.checkpoint.big_load import LLAMA_405B, read_grid
from tests.benchmarks.planner.groups_cost import groups_table
from tests.benchmarks.planner.meter import Meter, local, nbytes
from tests.helpers import fake_collectives  # noqa: F401
from tests.helpers.devices import few_foreign_on_gpus
from tests.helpers.traffic_counter import count_traffic


TOLERANCE = 0.1  # of a peak
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model and a grid for it, with the batch of one (data, z) position. `lora`: rank of the adapters of every
    Linear of the layers, which alone are trained then; `experts`: gather or move; `attention`: context_attention."""

    config: PreTrainedConfig
    grid: Grid
    rows: int
    seq: int
    checkpointing: bool = True
    bf16: bool = True
    lora: int = 0
    experts: str = "gather"
    attention: str = "auto"

    @cached_property
    def shape(self) -> ModelShape:
        """The model as the planner reads its config, as it is sharded on the grid."""
        return place_experts(shape_of(self.config.to_dict()), self.grid, self.experts)

    @property
    def own_tokens(self) -> int:
        """Tokens of a rank."""
        return self.step.padded_tokens(self.grid) // (self.grid.x * self.grid.y)

    @property
    def rows_to_each(self) -> int:
        """Rows that a rank sends to each rank of its experts, where routers choose all alike."""
        if not any(experts.moves for experts in self.shape.experts):
            return 0
        others = self.grid.z * self.grid.x * self.grid.y - 1
        return ceil(self.own_tokens * expected_rows(self.shape.experts[0], self.grid, 0).received / others)

    @property
    def step(self) -> Step:
        """bf16 on fp32 weights, as `mixed_precision: bf16` trains; or all in fp32."""
        size = 2 if self.bf16 else 4
        return Step(
            rows=self.rows,
            seq=self.seq,
            compute_bytes=size,
            checkpointing=self.checkpointing,
            lora=self.lora,
            counted=True,
            context_attention=self.attention,
        )


def gpt(name: str) -> PreTrainedConfig:
    """A GPT of AxoNN's paper as Transformers' Starcoder2: its Linears, biases and norms, but rotary positions."""
    layers, hidden, heads = GPTS[name]
    return Starcoder2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=4 * hidden,
        vocab_size=GPT_VOCAB,
        max_position_embeddings=GPT_POSITIONS,
        sliding_window=None,
    )


QWEN3_30B = Qwen3MoeConfig(
    vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
    head_dim=128, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
    norm_topk_prob=True, max_position_embeddings=40960,
)  # fmt: skip
CASES = {
    "llama-405b": Case(LlamaConfig(**LLAMA_405B), Grid(data=4, z=64, y=8, x=8), rows=1, seq=8192),
    "deepseek-v3": Case(DeepseekV3Config(), Grid(data=4, z=64, y=8, x=8), rows=1, seq=4096),
    "deepseek-v3-move": Case(DeepseekV3Config(), Grid(data=8, z=128, x=2), rows=3, seq=4096, experts="move"),
    "qwen3-30b-a3b": Case(QWEN3_30B, Grid(z=64), rows=8, seq=4096),
    "qwen3-30b-a3b-move": Case(QWEN3_30B, Grid(z=64), rows=8, seq=4096, experts="move"),
    "gpt-80b": Case(gpt("gpt-80b"), Grid(data=64, z=64, y=2, x=2), rows=1, seq=2048),
}


class NoValues(TorchDispatchMode):
    """Answers for fake tensors what only values could tell.

    A number of a tensor that this rank made of a list is what it put there (as if all ranks had said the same), any
    other number is 1. Every number is nonzero. Of truth values one in `parts` is true, in each place alike: tokens
    spread evenly over the experts of `parts` ranks.
    """

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self._lists: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            values = self._lists.get(args[0].untyped_storage())
            return 1 if values is None else values[args[0].storage_offset()]
        if func is torch.ops.aten.nonzero.default:
            found = args[0].numel() // (self.parts if args[0].dtype == torch.bool else 1)
            return args[0].new_empty((found, args[0].dim()), dtype=torch.int64)
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.sum.dim_IntList and args[0].dtype == torch.bool:
            self._lists[result.untyped_storage()] = [args[0].numel() // result.numel() // self.parts] * result.numel()
        if func is torch.ops.aten.lift_fresh.default and args[0].dim():
            with no_dispatch():
                self._lists[result.untyped_storage()] = args[0].flatten().tolist()
        return result


@dataclass
class Outcome:
    """What a simulated rank did in its second step, in bytes.

    Args:
        ledger: its collectives.
        parameters, gradients, moments: of the optimizer's step.
        saved: made by forward and there after it.
        forward, backward: the most that was there beside parameters and moments.
        seconds: what the simulation took.
    """

    ledger: Ledger
    parameters: int
    gradients: int
    moments: int
    saved: int
    forward: int
    backward: int
    seconds: float

    @property
    def peak(self) -> int:
        """The most that was there at all; the fused AdamW needs nothing besides."""
        return self.parameters + self.moments + max(self.forward, self.backward, self.gradients)


def values_are_read():
    """Transformers does not ask fake tensors whether rows are packed, and makes a mask of [B, 1, S, S] to be safe.
    A run with values makes none."""
    return mock.patch("transformers.masking_utils.is_tracing", lambda *_: False)


def attention_as_on_gpus():
    """There attention whose values have other features than its keys has a kernel that keeps no scores, as all has."""
    on_cpus = torch.nn.functional.scaled_dot_product_attention

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if query.shape[-1] == value.shape[-1]:
            return on_cpus(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        assert attn_mask is None and not enable_gqa
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        return kernel(query, key, value, None, True, dropout_p, is_causal, scale=scale)[0]

    return mock.patch("torch.nn.functional.scaled_dot_product_attention", attention)


def experts_as_on_gpus():
    """There they take the pairs of other ranks along, where these are few."""
    return mock.patch.object(Experts, "_few_foreign", few_foreign_on_gpus)


def even_routing(case: Case) -> contextlib.AbstractContextManager:
    """Let tokens travel to experts as if routers chose all alike: as many to each rank, rounded up."""
    ranks = case.grid.z * case.grid.x * case.grid.y

    def find_routes(choices: Tensor, owners: Tensor, group: dist.ProcessGroup) -> Routes:
        tokens, chosen = choices.shape
        exchange(choices.new_zeros(ranks, 1 + chosen), group)
        return Routes(
            choices=choices,
            tokens=choices.new_zeros(case.rows_to_each * ranks),
            rows=choices.new_zeros(tokens, min(chosen, ranks)),
            sent=[case.rows_to_each] * ranks,
            received=[case.rows_to_each] * ranks,
            pairs=[tokens] * chosen,
        )

    return mock.patch.object(moe, "find_routes", find_routes)


def rounded_rows(case: Case) -> contextlib.AbstractContextManager:
    """Let the planner reckon with the rows of `even_routing`, rounded as there."""
    others = Fraction((case.grid.z * case.grid.x * case.grid.y - 1) * case.rows_to_each, case.own_tokens)
    return mock.patch.object(arithmetic, "expected_rows", lambda *_: Rows(others, others))


@contextlib.contextmanager
def world(grid: Grid, rank: int) -> Iterator[None]:
    """A world of the grid's size in which only this rank exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def faked(model: nn.Module) -> None:
    """Give a model on the meta device fake tensors on the CPU, parameters that are shared once. No communication."""
    made: dict[int, nn.Parameter] = {}

    def fake(tensor: Tensor) -> Tensor:
        piece = torch.empty_like(local(tensor), device="cpu")
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            piece = DTensor.from_local(
                piece, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        return piece

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(fake(parameter.detach()), parameter.requires_grad)
                    made[id(parameter)].__dict__.update(parameter.__dict__)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer)


def simulate(case: Case, rank: int = 0) -> Outcome:
    """Two training steps of one rank; the first has yet to learn what to gather ahead."""
    begin = time.monotonic()
    with world(case.grid, rank):
        mesh = grid_mesh(case.grid, "cpu")
        assert mesh.storage_mesh is not None and mesh.sample_mesh is not None  # made of real tensors
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(case.config, dtype=torch.float32).train()
            if case.lora:
                model.enable_input_require_grads()
                model = get_peft_model(model, LoraConfig(r=case.lora, target_modules="all-linear"))
        model, _ = parallelize(model, case.grid, config=AxonnConfig(grid=case.grid, experts=case.experts))
        parts = case.grid.x * case.grid.y
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            NoValues(parts),
            values_are_read(),
            attention_as_on_gpus(),
            experts_as_on_gpus(),
            even_routing(case),
        ):
            faked(model)
            ids = torch.zeros(case.rows, case.seq, dtype=torch.int64)
            count = torch.ones((), dtype=torch.int64)
            outcome = train(model, case, ids, count)
    outcome.seconds = time.monotonic() - begin
    return outcome


def train(model: nn.Module, case: Case, ids: Tensor, count: Tensor) -> Outcome:
    """Two steps of this rank with AdamW on ids [rows, seq], of which `count` are to be learnt in the world.

    Real ranks are measured by it too (memory_measured.py). Collectives: those of the two steps.
    """
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        outcome = _step(model, case, ids, count)
        optimizer.step()
        state = [value for moments in optimizer.state.values() for name, value in moments.items() if name != "step"]
        outcome.moments = nbytes(state)
        optimizer.zero_grad()
    return outcome


def _step(model: nn.Module, case: Case, ids: Tensor, count: Tensor) -> Outcome:
    with Meter(model.parameters()) as meter, count_traffic(case.grid) as counter:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=count).loss
        saved, forward = meter.live, meter.most
        meter.begin()
        with counter.during("gradients"), syncing(model):
            loss.backward()
        return Outcome(
            ledger=counter.ledger,
            parameters=nbytes(model.parameters()),
            gradients=nbytes(weight.grad for weight in model.parameters() if weight.grad is not None),
            moments=0,
            saved=saved,
            forward=forward,
            backward=meter.most,
            seconds=0.0,
        )


def compare(case: Case, outcome: Outcome, rank: int = 0) -> tuple[list[str], bool]:
    """What the planner says beside what was counted, as Markdown, and whether they agree."""
    layout = case.shape.layout(case.grid)
    with rounded_rows(case):
        predicted = volumes(case.shape, case.grid, case.step, layout=layout, rank=rank)
    needed = memory(case.shape, case.grid, case.step, layout=layout)
    trained, size = needed.trained, case.step.param_bytes  # of adapters, too, that is float32
    same = outcome.ledger.entries == predicted.entries
    exact = {
        "parameters": (needed.parameters * size, outcome.parameters),
        "gradients": (trained * size, outcome.gradients),
        "AdamW's moments": (2 * trained * size, outcome.moments),
    }
    near = {
        "saved by forward": (needed.activations + needed.head, outcome.saved),
        "at the worst moment": (needed.total, outcome.peak),
    }
    agree = same and (rank != 0 or all(first == second for first, second in exact.values()))
    agree = agree and abs(needed.total / outcome.peak - 1) <= TOLERANCE
    lines = [
        f"{case.shape.parameters() / 1e9:.1f} billion parameters on {case.grid.size:,} ranks ({case.grid}), rank "
        f"{rank}: {case.rows} row(s) of {case.seq:,} tokens, bf16 on fp32 weights, checkpointing "
        f"{'on' if case.checkpointing else 'off'}; simulated in {outcome.seconds:.0f} s.",
        "",
        f"Collectives of a step: {outcome.ledger.calls():,} counted, {predicted.calls():,} predicted; "
        f"{'the same, each kind, axis and byte' if same else 'NOT THE SAME'}.",
        "",
        "```",
        *outcome.ledger.lines(),
        "```",
        "",
        "| GiB of the rank | predicted | simulated | error |",
        "| --- | --: | --: | --: |",
    ]
    for name, (first, second) in (exact | near).items():
        lines.append(f"| {name} | {first / GIB:.3f} | {second / GIB:.3f} | {first / second - 1:+.1%} |")
    return [*lines, ""], agree


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, nargs="*", default=list(CASES), help="models (all)")
    parser.add_argument("--grid", type=read_grid, help="another grid for them, as data=2,z=64,y=8,x=16")
    parser.add_argument("--rank", type=int, default=0, help="which rank (0, which holds most)")
    parser.add_argument("--groups", type=int, nargs="+", default=[], help="ranks for which groups are timed too")
    parser.add_argument("--output", type=Path, help="write the report to this file too")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    lines = [
        "# A rank of thousands, simulated",
        "",
        f"`python -m tests.benchmarks.planner.simulate`: hf_axonn {__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}, one CPU core.",
        "",
    ]
    agree = True
    for name in options.case:
        case = CASES[name] if options.grid is None else replace(CASES[name], grid=options.grid)
        found, agrees = compare(case, simulate(case, options.rank), options.rank)
        lines += [f"## {name}", "", *found]
        agree = agree and agrees
    if options.groups:
        lines += ["## Process groups", "", *groups_table(options.groups)]
    print("\n".join(lines))
    if options.output:
        options.output.write_text("\n".join(lines).rstrip() + "\n")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
