"""What tests/end_to_end/test_fake_cuda.py runs on fake CUDA tensors: `python -m ... NAME NAME`, a line of JSON each.

A name is a type of model, or `type-situation`, with a situation of SITUATIONS, or `-situation` if that needs no model.
Models are trained for two steps, of which the first makes what is made once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter, defaultdict
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from hf_axonn import Grid, parallelize
from hf_axonn.compat.torch import version_of
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed import collectives, gloo
from hf_axonn.engine import host_moments
from hf_axonn.engine.dtensors import local, local_of, whole
from hf_axonn.engine.gradient_sync import syncing
from hf_axonn.engine.host_weights import host_weight_of
from hf_axonn.goldfish import mask
from hf_axonn.goldfish.table import TABLE_SIZE
from hf_axonn.layers import moe
from hf_axonn.parallel import batch_check
from tests.helpers.adapting import adapt
from tests.helpers.fake_cuda import HostReads, current_stream, fake_gpu, pretend, stream
from tests.helpers.flash_stub import flash_attention
from tests.helpers.models import tiny_config
from tests.helpers.operators import Operators


GRID = Grid(data=2, z=2, y=2, x=2)
PIPED = Grid(pipe=2, z=2, y=2, x=2)
DIVIDED_ROWS = Grid(data=4, z=2, x=2, context=2)
ROWS, SEQ = 4, 16
# Two on each rank of GRID.
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 16)
EXPERTS |= dict(num_experts_per_tok=2, moe_intermediate_size=24)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)
# One layer where layers are alike; `plain` and `stage` have two.
SIZES = {
    "llama": dict(num_hidden_layers=1),
    "gpt2": dict(n_embd=48, n_head=12, num_hidden_layers=1, n_inner=40, n_positions=64),
    "deepseek_v3": LATENT | dict(n_group=2, topk_group=1, num_key_value_heads=12, first_k_dense_replace=1),
}


def make_fake(kind: str, **changes):
    known = AutoConfig.for_model(kind)
    sizes = {name: value for name, value in EXPERTS.items() if hasattr(known, name)} | SIZES.get(kind, {})
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(tiny_config(kind, **sizes | dict(use_cache=False) | changes)).train()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.zeros(ROWS, SEQ, dtype=torch.int64, device="cuda")
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)


def train(model, reads: HostReads, fault=lambda: None) -> None:
    """Two steps of a bare loop."""
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    count = torch.ones((), dtype=torch.int64, device="cuda")
    for before in ("first ", ""):
        with reads.phase(f"{before}forward"), torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch(), num_items_in_batch=count).loss
            fault()
        with reads.phase(f"{before}backward"), syncing(model):
            loss.backward()
        with reads.phase(f"{before}clip"):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert (norm.full_tensor() if isinstance(norm, DTensor) else norm).is_cuda
        with reads.phase(f"{before}step"):
            optimizer.step()
            optimizer.zero_grad()


def plain(kind: str, reads: HostReads) -> None:
    train(parallelize(make_fake(kind, num_hidden_layers=2), GRID)[0], reads)


def stage(kind: str, reads: HostReads, schedule: str = "1f1b") -> None:
    config = AxonnConfig(grid=PIPED, schedule=schedule)
    model, _ = parallelize(make_fake(kind, num_hidden_layers=2), PIPED, config=config)
    train(model, reads)


def zero_bubble(kind: str, reads: HostReads) -> None:
    stage(kind, reads, "zero_bubble")


def context(kind: str, reads: HostReads, way: str = "heads") -> None:
    """Rows of a length that context does not divide."""
    config = AxonnConfig(grid=DIVIDED_ROWS, context_attention=way)
    model, _ = parallelize(make_fake(kind), config=config)
    with mock.patch.object(sys.modules[__name__], "SEQ", SEQ - 1):
        train(model, reads)


def keys(kind: str, reads: HostReads) -> None:
    context(kind, reads, "keys")


def flash(kind: str, reads: HostReads) -> None:
    """Flash attention, which takes half precision alone, over heads and over context in both ways."""
    with flash_attention():
        for grid, way in ((GRID, "auto"), (DIVIDED_ROWS, "heads"), (DIVIDED_ROWS, "keys")):
            model = make_fake(kind)
            model.config._attn_implementation_internal = "flash_attention_2"
            config = AxonnConfig(grid=grid, context_attention=way)
            train(parallelize(model, config=config)[0], reads)


def products(kind: str, reads: HostReads) -> None:
    """Gradients of weights are written in float32, all of them, and no gradient is made wider after its product."""
    model, _ = parallelize(make_fake(kind), GRID)
    with torch.autocast("cuda", torch.bfloat16), Operators() as forward:
        loss = model(**batch()).loss
    head = forward.results_of("mm.dtype_out")
    assert head and sum(len(part) for part in head) == model.axonn.sharded_layers[model.lm_head].layouts[0].out_size
    with Operators() as backward:
        loss.backward()
    made = head + backward.results_of("mm.dtype_out")
    assert {each.dtype for each in made} == {torch.float32} and made[0].is_cuda
    # GRID: y is 2, so each product of a column or row layer is two.
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(backward.results_of("mm.dtype_out")) == 2 * (len(linears) - 1)
    assert {each.dtype for each in backward.results_of("mm.out")} == {torch.bfloat16}


def reentrant(kind: str, reads: HostReads, use_reentrant: bool = True) -> None:
    model, _ = parallelize(make_fake(kind), GRID)
    model.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
    train(model, reads)


def checkpointed(kind: str, reads: HostReads) -> None:
    reentrant(kind, reads, use_reentrant=False)


def gather(kind: str, reads: HostReads, **sizes) -> None:
    """Experts that are gathered over z."""
    model, _ = parallelize(make_fake(kind, **sizes), config=AxonnConfig(grid=GRID, experts="gather"))
    train(model, reads)


def many_foreign(kind: str, reads: HostReads) -> None:
    """So many pairs of other ranks' experts that they are not taken along."""
    with mock.patch.object(moe, "FOREIGN_BYTES", 0):
        gather(kind, reads)


def one_expert(kind: str, reads: HostReads) -> None:
    """On each rank of (x, y)."""
    gather(kind, reads, num_experts=GRID.x * GRID.y)


def one_moved(kind: str, reads: HostReads) -> None:
    """One expert lies on each rank, and tokens travel to it."""
    model, _ = parallelize(make_fake(kind, num_experts=GRID.z * GRID.x * GRID.y), GRID)
    train(model, reads)


def lora(kind: str, reads: HostReads) -> None:
    model, _ = parallelize(make_fake(kind), GRID)
    with torch.device("cuda"):
        model = adapt(model)
    train(model, reads)


def dropout(kind: str, reads: HostReads) -> None:
    names = [name for name in AutoConfig.for_model(kind).to_dict() if name.endswith(("dropout", "pdrop"))]
    train(parallelize(make_fake(kind, **dict.fromkeys(names, 0.1)), GRID)[0], reads)


def default_device(kind: str, reads: HostReads) -> None:
    """Under `torch.set_default_device("cuda")`, which scripts of others use."""
    with torch.device("cuda"):
        dropout(kind, reads)


def accelerate(kind: str, reads: HostReads, precision: str = "bf16", offload: str = "none"):
    from accelerate import Accelerator

    from hf_axonn import AxonnPlugin

    accelerator = Accelerator(parallelism_config=AxonnPlugin(grid=GRID, offload=offload), mixed_precision=precision)
    model = make_fake(kind)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert accelerator.device.type == "cuda"
    for before in ("first ", ""):
        with reads.phase(f"{before}forward"):
            loss = model(**batch(), num_items_in_batch=ROWS * SEQ).loss
        with reads.phase(f"{before}backward"):
            accelerator.backward(loss)
        with reads.phase(f"{before}clip"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        with reads.phase(f"{before}step"):
            optimizer.step()
            optimizer.zero_grad()
    moved = 0
    for parameter, state in optimizer.optimizer.state.items():
        host = host_weight_of(parameter)
        assert local_of(parameter).is_cuda == (host is None)
        moved += host is not None and host.values(version_of(parameter), torch.bfloat16).is_cuda
        places = {local(state[name]).device.type for name in ("exp_avg", "exp_avg_sq")}
        assert parameter.is_cuda and places == {"cuda" if offload == "none" else "cpu"}
    assert moved == (8 if offload == "optimizer" else 0)
    return model, optimizer.optimizer


def offload(kind: str, reads: HostReads) -> None:
    """Moments and float32 weights in host memory, on the device a few parameters at a time; then what reads them."""
    with mock.patch.object(host_moments, "BUCKET_BYTES", 2**12):
        model, optimizer = accelerate(kind, reads, offload="optimizer")
        optimizer.state.clear()
        assert get_optimizer_state_dict(model, optimizer)["state"]  # torch makes gradients of zeros for it
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert all(value.is_cuda and not isinstance(value, DTensor) for value in full.values())
    for parameter in model.parameters():
        assert whole(parameter).is_cuda
        with torch.no_grad():
            parameter.mul_(2)
    assert model(**batch(), num_items_in_batch=ROWS * SEQ).loss.is_cuda
    with torch.no_grad(), mock.patch("torch.is_autocast_enabled", return_value=False):  # in float32, of host memory
        assert model(**batch()).loss.is_cuda


def muon(kind: str, reads: HostReads) -> None:
    """Each matrix orthogonalized once."""
    model, _ = parallelize(make_fake(kind), GRID)
    for before in ("first ", ""):
        with syncing(model):
            model(**batch(), num_items_in_batch=ROWS * SEQ).loss.backward()
        with reads.phase(f"{before}step"):
            torch.optim.Muon([each for each in model.parameters() if each.dim() == 2]).step()


def fp16(kind: str, reads: HostReads) -> None:
    accelerate(kind, reads, "fp16")


def trainer(kind: str, reads: HostReads, goldfish: bool = False) -> None:
    """Four steps of two micro-batches; the last two, between which it logs, are in the phase `steps`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from hf_axonn import AxonnPlugin, GoldfishConfig, GoldfishTrainer, MonitorCallback
    from tests.helpers.training import collate, token_data

    class Phase(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                steps.enter_context(reads.phase("steps"))

        def on_train_end(self, *_, **__):
            steps.close()

    make, settings = (GoldfishTrainer, GoldfishConfig) if goldfish else (Trainer, TrainingArguments)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as steps:
        options = dict(output_dir=folder, max_steps=4, report_to="none", save_strategy="no", bf16=True)
        options |= dict(disable_tqdm=True, per_device_train_batch_size=ROWS, dataloader_pin_memory=False)
        options |= dict(gradient_accumulation_steps=2, logging_steps=3)
        arguments = settings(parallelism_config=AxonnPlugin(grid=GRID), **options)
        data = dict(train_dataset=token_data(256, seed=0), data_collator=collate)
        callbacks = [Phase(), *([MonitorCallback(peak_tflops=989.0)] if goldfish else [])]
        make(model=make_fake(kind), args=arguments, callbacks=callbacks, **data).train()


def goldfish(kind: str, reads: HostReads) -> None:
    """The same by GoldfishTrainer, and with a Monitor, which measures the waits of a step by events."""
    with mock.patch.object(mask, "cpu_table", lambda device: torch.rand(TABLE_SIZE, device=device)):
        trainer(kind, reads, goldfish=True)


def evaluate(kind: str, reads: HostReads, fault=lambda: None) -> None:
    model = parallelize(make_fake(kind), GRID)[0].eval()
    for before in ("first ", ""):
        with reads.phase(f"{before}forward"), torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            assert model(**batch()).loss.is_cuda
            fault()


def generate(kind: str, reads: HostReads, tokens: int = 5, **options) -> None:
    """Some tokens, the last three in the phase `three tokens`."""
    model = parallelize(make_fake(kind, use_cache=True), GRID)[0].eval()
    prompt = batch()
    del prompt["labels"]
    reads.yes = False
    asked, ask = itertools.count(1), model._has_unfinished_sequences

    def more(*args, **options) -> bool:
        written = next(asked)
        if written == tokens - 2:
            last.enter_context(reads.phase("three tokens"))
        if written > tokens:
            last.close()
        return ask(*args, **options) and written <= tokens

    with contextlib.ExitStack() as last, torch.autocast("cuda", torch.bfloat16):
        with mock.patch.object(model, "_has_unfinished_sequences", side_effect=more):
            written = model.generate(**prompt, max_new_tokens=tokens, pad_token_id=0, eos_token_id=2, **options)
    assert written.shape == (ROWS, SEQ + tokens) and written.is_cuda


def sample(kind: str, reads: HostReads) -> None:
    generate(kind, reads, do_sample=True, temperature=0.7, top_k=5, top_p=0.9)


def host_read(kind: str, reads: HostReads) -> None:
    number = torch.ones((), device="cuda")
    evaluate(kind, reads, number.item)


def two_devices(kind: str, reads: HostReads) -> None:
    on_cpu = torch.ones(3, device="cpu")
    train(parallelize(make_fake(kind), GRID)[0], reads, lambda: torch.ones(3, device="cuda") + on_cpu)


class _ReadInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        assert threading.current_thread() is not threading.main_thread(), "autograd has a thread for each GPU"
        return grad * grad.sum().item()


def one_of_each(_: str, reads: HostReads) -> None:
    """Every kind of host read, each in a phase of its own."""
    value, mask = torch.ones(8, device="cuda"), torch.ones(8, dtype=torch.bool, device="cuda")
    on_cpu = torch.ones(8)
    leaf = torch.ones(8, device="cuda", requires_grad=True)
    loss = _ReadInBackward.apply(leaf).sum()
    ways = {
        "item": lambda: value[0].item(),
        "bool": lambda: bool(mask.any()),
        "tolist": lambda: value.tolist(),
        "nonzero": lambda: value.nonzero(),
        "equal": lambda: torch.equal(value, value),
        "index of bools": lambda: value[mask],
        "assignment by bools": lambda: value.__setitem__(mask, value[:4]),
        "histogram of no range": lambda: value.histc(3),
        "to the host": lambda: value.cpu(),
        "to the device": lambda: on_cpu.to("cuda"),
        "list to the device": lambda: torch.tensor([1, 2], device="cuda"),
        "in backward": loss.backward,
    }
    for name, way in ways.items():
        with reads.phase(name):
            way()


def nothing_read(_: str, reads: HostReads) -> None:
    value, mask = torch.ones(8, device="cuda"), torch.ones(8, dtype=torch.bool, device="cuda")
    on_cpu = torch.ones(8)
    with reads.phase("nothing"):
        on_cpu.to("cuda", non_blocking=True)
        value[torch.arange(8, device="cuda")] = torch.where(mask, value, 0)
        value.masked_fill_(mask, 3.0)
        value[2:4].zero_()
        value.histc(3, min=0, max=2)
        assert on_cpu.sum().item() == 1.0 and torch.ones(3).nonzero() is not None


def refused_by_nccl(_: str, reads: HostReads) -> None:
    """Send what the `fake` backend takes and NCCL does not, and see that it is refused."""
    group, value = dist.group.WORLD, torch.ones(4, 4, device="cuda")
    ways = {
        "tensors of GPUs only": torch.ones(4, device="cpu"),
        "contiguous tensors only": value.t()[1:],
        "does not know the dtype": value.to(torch.int16),
    }
    for message, wrong in ways.items():
        with pytest.raises(AssertionError, match=message):
            collectives.reduce_(wrong, group)
    assert collectives.reduce_(value, group) is value


def large_by_gloo(_: str, reads: HostReads) -> None:
    """A block that is worth messages of its own on CPUs: gloo sends none of a GPU, but gathers them."""
    block = torch.ones(gloo.LARGE_BYTES // 4, device="cuda")
    with mock.patch.object(collectives, "backend_of", lambda *_: "gloo"), mock.patch.object(dist, "isend") as isend:
        assert collectives.start_all_gather(block, dist.group.WORLD).wait().shape == (GRID.size, len(block))
    assert not isend.called


def streams(kind: str, reads: HostReads) -> None:
    """A model that is called on a stream of its own: on which its collectives begin and are waited for. Phases of
    `reads` are pairs of streams here, and the streams of which the allocator is told."""
    found: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)

    class Work(collectives._Work):
        def __init__(self, work, kind, group, *sent):
            super().__init__(work, kind, group, *sent)
            self.begun = current_stream()

        def wait(self):
            found[f"{self.begun} to {current_stream()}"][self._kind, ""] += 1
            super().wait()

    def record_stream(message, which):
        found["recorded"][f"on {which.stream_id}", str(message.device)] += 1

    model, _ = parallelize(make_fake(kind), GRID)
    with (
        mock.patch.object(collectives, "_Work", Work),
        mock.patch.object(torch.Tensor, "record_stream", record_stream),
    ):
        for _ in range(2):
            with stream(7), torch.autocast("cuda", torch.bfloat16):
                loss = model(**batch()).loss
            with syncing(model):
                loss.backward()
            model.zero_grad()
    reads.found.clear()
    reads.found.update(found)


SITUATIONS = dict(
    context=context,
    keys=keys,
    flash=flash,
    first_stage=stage,
    last_stage=stage,
    zero_bubble=zero_bubble,
    products=products,
    reentrant=reentrant,
    checkpointed=checkpointed,
    gather=gather,
    many_foreign=many_foreign,
    one_expert=one_expert,
    one_moved=one_moved,
    lora=lora,
    dropout=dropout,
    default_device=default_device,
    accelerate=accelerate,
    offload=offload,
    muon=muon,
    fp16=fp16,
    trainer=trainer,
    goldfish=goldfish,
    evaluate=evaluate,
    generate=generate,
    sample=sample,
    host_read=host_read,
    one_of_each=one_of_each,
    nothing_read=nothing_read,
    refused_by_nccl=refused_by_nccl,
    large_by_gloo=large_by_gloo,
    streams=streams,
    two_devices=two_devices,
)
PLACES = {
    "first_stage": (PIPED, 0),
    "last_stage": (PIPED, PIPED.rank(pipe=1)),
    "zero_bubble": (PIPED, PIPED.rank(pipe=1)),
}


def main(names: list[str]) -> None:
    pretend()
    warnings.simplefilter("ignore")
    batch_check.FIRST_PASSES = 1  # of two steps the second shall be like most
    for name in names:
        kind, _, situation = name.partition("-")
        problem, found = "", {}
        try:
            with fake_gpu(*PLACES.get(situation, (GRID, 0))) as reads:
                found = reads.found
                SITUATIONS.get(situation, plain)(kind, reads)
        except Exception:
            problem = traceback.format_exc()
        lines = {phase: [[number, *key] for key, number in reads.items()] for phase, reads in found.items()}
        print(json.dumps(dict(name=name, problem=problem, found=lines)), flush=True)
    # All is said. Autograd's threads may still hold Python objects. CPython ends a thread that gives one up while the
    # interpreter ends, which C++ takes for an error at times: "terminate called without an active exception".
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
