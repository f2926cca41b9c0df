"""`hf-axonn doctor`: look at a launch file, and at a model beside it, before a node-hour is spent.

    hf-axonn doctor --config axonn.yaml
    hf-axonn doctor --config axonn.yaml --model DIR --batch 4 --seq 2048 --gpu-memory 80

One process, no GPU, no weights: the model is built on the meta device and parallelized in a world whose other ranks
are not there, by the same code that a launch runs. So what is said about sharding and about bytes between steps is
what will be; the memory of a step is the estimate of planner/memory.py.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from hf_axonn.compat.own_code import add_own_code_option, register_code
from hf_axonn.compat.versions import NEEDED, OPTIONAL, bounds, check_versions, outside, requirements
from hf_axonn.config import AxonnConfig
from hf_axonn.launch.command import read_launch_file, write_temporary
from hf_axonn.launch.launch_file import SECTION, Launch, check_spelling, resolve
from hf_axonn.planner.expert_bytes import ExpertBytes, compare_bytes
from hf_axonn.planner.experts import place_experts
from hf_axonn.planner.from_settings import DTYPE_BYTES, SEQUENCE, too_long
from hf_axonn.planner.machine import known_machines, load_machine
from hf_axonn.planner.memory import RESERVE, Memory, low_bit_bytes, memory, moment_bytes
from hf_axonn.planner.shapes import ModelShape
from hf_axonn.planner.stages import divide_model, memory_of_ranks
from hf_axonn.planner.step import OPTIMIZERS, Step
from hf_axonn.profiling.read_shape import shape_of
from hf_axonn.topology.grid import Grid
from hf_axonn.topology.weight_kind import WeightKind


FINE, WARNED, REFUSED = 0, 1, 2
GIB = 2**30
WEIGHT_DTYPES = ("bfloat16", "float32")
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt"}
# Options of the memory of a model beside those without a default.
USUAL = {"accumulation": 1, "weights": "float32", "optimizer": "adamw"}
UNEVEN = 1.1  # a rank with a tenth more than its share is worth a word


@dataclass
class Findings:
    """Facts, and warnings that are worth a look."""

    facts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the lines that are printed."""
        verdict = f"{len(self.warnings)} warning(s)" if self.warnings else "nothing to mend"
        return [*self.facts, *(f"warning: {text}" for text in self.warnings), f"doctor: {verdict}"]


def add_doctor(commands) -> None:
    """Register `doctor` with the subparsers of main.py."""
    parser = commands.add_parser(
        "doctor",
        help="check a launch file against a model before it is launched",
        epilog="Exit code: 0 nothing to mend, 1 there are warnings (it would start), 2 the launch would be refused.",
    )
    parser.add_argument("--config", required=True, help="the launch file, with a section axonn_config")
    parser.add_argument("--model", help="a model's directory, its config.json, or its name on the hub")
    add_own_code_option(parser)
    parser.add_argument("--batch", type=int, help="rows of a micro-batch, per_device_train_batch_size")
    parser.add_argument("--seq", type=int, help=f"tokens of a row; by default {SEQUENCE}, or what the model allows")
    parser.add_argument("--accumulation", type=int, default=USUAL["accumulation"], help="micro-batches of a step")
    parser.add_argument("--weights", choices=WEIGHT_DTYPES, default=USUAL["weights"], help="dtype of trained weights")
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default=USUAL["optimizer"],
        help="adamw_8bit: bitsandbytes' AdamW, as Trainer's optim; muon: torch's, for the layers' matrices",
    )
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing is on")
    parser.add_argument("--gpu-memory", type=float, help="memory of a device in GiB (2**30 bytes)")
    parser.add_argument(
        "--machine", help=f"take it from a machine file: {', '.join(known_machines())}, or a JSON file"
    )


def run_doctor(options: argparse.Namespace) -> int:
    """`hf-axonn doctor`; returns the exit code.

    Raises:
        ValueError: the launch would be refused, or an option is out of range.
    """
    for name in ("batch", "seq", "accumulation", "gpu_memory"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} is {value}: give a number above 0.")
    given = [name for name in ("batch", "seq", "checkpointing", "gpu_memory", "machine") if getattr(options, name)]
    given += [name for name, usual in USUAL.items() if getattr(options, name) != usual]
    if given and options.model is None:
        raise ValueError(f"--{given[0].replace('_', '-')} goes with --model: without one no memory is counted.")
    if options.gpu_memory and options.machine:
        raise ValueError(f"--gpu-memory stands in place of --machine {options.machine}: leave one of them out.")
    if options.trust_remote_code:
        register_code(options.model)
    findings = Findings()
    examine_versions(findings)
    launch = examine_launch(options.config, findings)
    if options.model is not None:
        examine_model(launch, options, findings)
    for line in findings.lines():
        print(line)
    return WARNED if findings.warnings else FINE


def examine_versions(findings: Findings) -> None:
    """Look at the releases of other libraries here, which a launch will look at, too.

    Raises:
        ValueError: it would refuse one.
    """
    check_versions()
    for item in requirements(*NEEDED, *OPTIONAL):
        if release := outside(item):
            findings.warnings.append(
                f"{item.name} {release} is not proven, {bounds(item)} is: "
                + ("results may be wrong." if item.name in NEEDED else "a grid refuses what uses it.")
            )


def examine_launch(path: str, findings: Findings) -> Launch:
    """Check a launch file as `accelerate launch` will, on a machine that may have no GPU.

    Raises:
        ValueError: it would be refused.
    """
    settings = read_launch_file(Path(path))
    check_spelling(path, settings)
    if SECTION not in settings:
        raise ValueError(f"{path} has no section {SECTION}: accelerate would launch it without a grid.")
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        launch = resolve(settings, {}, gpus=1)  # those here say nothing of where it is to run
        load_config_from_file(write_temporary(launch.settings))
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from None
    grid, machine_count = launch.config.grid, launch.settings["num_machines"]
    on_each = grid.size // machine_count
    findings.facts.append(f"grid {grid}: {grid.size} rank(s), {on_each} on each of {machine_count} machine(s)")
    inner = grid.x * grid.y
    if machine_count > 1 and on_each % inner:
        findings.warnings.append(
            f"x * y = {inner} does not divide the {on_each} ranks of a machine, so x and y, which communicate within "
            f"every layer, cross machines: let x * y divide {on_each}, and give the rest to z or data."
        )
    if grid.y > 1 and grid.x == 1:
        findings.warnings.append(
            f"y is {grid.y} and x is 1: y carries about three times the traffic of x, so write x: {grid.y} and y: 1."
        )
    return launch


def examine_model(launch: Launch, options: argparse.Namespace, findings: Findings) -> None:
    """Parallelize the model without values, and report what is not sharded, uneven or too large.

    Raises:
        ValueError: there is no such model, or it cannot be parallelized.
    """
    import torch

    from hf_axonn.checkpoint.model_config import read_config
    from hf_axonn.compat.torch import fake_world
    from hf_axonn.engine.state import parallel_state
    from hf_axonn.parallel.documents import describe_large_mask
    from hf_axonn.parallel.parallelize import parallelize

    config = read_config(options.model)
    _examine_folder(Path(options.model), findings)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    options.seq = options.seq or min(SEQUENCE, longest or SEQUENCE)
    if long := too_long(options.seq, longest):
        findings.warnings.append(f"{long}: take a shorter --seq.")
    grid = launch.config.grid
    dtype = getattr(torch, options.weights)
    with torch.device("meta"):
        model = _empty_model(config, dtype)
    layout = "token"
    findings.facts.append(
        f"model {config.model_type}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters"
    )
    if grid.size > 1:
        matrices = {
            name
            for name, module in model.named_modules()
            if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        }
        with fake_world(grid.size):
            model, report = parallelize(model, grid, config=launch.config)
            findings.facts.append(f"sharding: {str(report).removeprefix(f'grid {report.grid}: ')}")  # named above
            _examine_report(report, matrices, findings)
            _examine_shards(model, grid, findings)
            state = parallel_state(model)
            layout = "feature" if state is not None and state.features > 0 else "token"
    if options.batch is not None:
        _examine_batch(grid, options, findings)
        # Over context masks are made for a range at a time; and small ones are no concern.
        if grid.context == 1 and (mask := describe_large_mask(model, options.batch, options.seq)):
            findings.facts.append(f"packing: {mask}")
    _examine_memory(launch, options, config.to_dict(), model, layout, findings)


def _examine_folder(folder: Path, findings: Findings) -> None:
    """Look for the weights and the tokenizer of a directory; of a config.json alone neither is asked for."""
    from hf_axonn.checkpoint.manifest import WEIGHTS, is_sharded_checkpoint

    if not folder.is_dir():
        return
    files = {path.name for path in folder.iterdir()}
    weights = {name for name in files if WEIGHTS.fullmatch(name)}
    missing = {
        shard
        for index in weights
        if index.endswith(".json")
        for shard in _read(folder / index).get("weight_map", {}).values()
        if shard not in files
    }
    problems = {name: why for name in sorted(weights) if (why := _problem_of(folder / name))}
    if problems:
        first = next(iter(problems))
        findings.warnings.append(
            f"{len(problems)} file(s) of weights are damaged, {first} first ({problems[first]}): copy or download "
            "them again; of a git clone, git lfs pull."
        )
    if missing:
        findings.warnings.append(
            f"{folder} lacks {len(missing)} file(s) of weights that its index names, {min(missing)} first: it cannot "
            "be loaded."
        )
    elif not weights and not is_sharded_checkpoint(folder):
        findings.warnings.append(
            f"{folder} has no weights, so from_pretrained cannot load it: give {folder / 'config.json'} if they are "
            "to be random."
        )
    elif not files & TOKENIZER_FILES:
        findings.facts.append(f"note: {folder} has no tokenizer: a script takes it from somewhere else.")


def _problem_of(path: Path) -> str:
    """Say why a safetensors file cannot be loaded, by its header and size alone; nothing of others."""
    from safetensors import SafetensorError, safe_open

    if path.suffix != ".safetensors":
        return ""
    try:
        with safe_open(path, framework="pt"):
            return ""
    except (OSError, SafetensorError) as problem:
        return str(problem)


def _read(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ValueError(f"{path} cannot be read: {problem}") from None
    return content if isinstance(content, dict) else {}


def _empty_model(config, dtype):
    from transformers import AutoModelForCausalLM

    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("the model is quantized, and quantized weights cannot be sharded: save it dequantized.")
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _examine_report(report, matrices: set[str], findings: Findings) -> None:
    """Every reason why something is not sharded, or is sharded another way than the fast one."""
    unsharded = [entry for entry in report.not_sharded() if entry.name in matrices]
    for reason, count in Counter(entry.reason for entry in unsharded).items():
        size = sum(entry.parameters for entry in unsharded if entry.reason == reason)
        first = next(entry.name for entry in unsharded if entry.reason == reason)
        findings.warnings.append(f"not sharded: {count} module(s), {size:,} parameters, {first} first: {reason}")
    alone = [entry for entry in report.entries if entry.kind == WeightKind.LINEAR]
    if alone:
        findings.warnings.append(
            f"{len(alone)} Linear(s) are sharded one by one, {alone[0].name} first, with full activations on every "
            f"rank of x and y: {report.summary}"
        )
    explained = [
        entry for entry in report.entries if entry.reason and entry.kind in (WeightKind.COLUMN, WeightKind.ROW)
    ]
    for reason, count in Counter(entry.reason for entry in explained).items():
        findings.warnings.append(f"heads: {count} Linear(s): {reason}")


def _examine_shards(model, grid: Grid, findings: Findings) -> None:
    """Elements on rank 0, which has the longest shards; and what the last rank of x, y and z has of each weight."""
    from hf_axonn.engine.dtensors import local, local_slices

    last = grid.place(grid.size - 1)
    elements, share = 0, 0.0
    empty: list[str] = []
    for name, parameter in model.named_parameters():
        own = local(parameter).numel()
        elements += own
        sharded = own < parameter.numel()
        share += parameter.numel() / (grid.x * grid.y * grid.z if sharded else 1)
        if sharded:
            slices = local_slices(parameter.shape, parameter.placements, last)
            if any(part.start >= part.stop for part in slices):
                empty.append(name)
    if elements > UNEVEN * share:
        findings.warnings.append(
            f"the shards of weights are uneven: rank 0 holds {elements:,} parameters, {elements / share:.2f} times "
            f"its even share; sizes that x * y * z = {grid.x * grid.y * grid.z} divides are even."
        )
    if empty:
        findings.warnings.append(
            f"{len(empty)} weight(s) have fewer rows or columns than ranks, so some ranks have no part of them, "
            f"{empty[0]} first: choose smaller x, y or z."
        )


def _examine_batch(grid: Grid, options: argparse.Namespace, findings: Findings) -> None:
    positions, parts = grid.positions(options.seq), grid.x * grid.y
    tokens, rows = options.batch * positions, options.batch * grid.dp_size * options.accumulation
    findings.facts.append(
        f"batch: {rows:,} rows and {rows * options.seq:,} tokens a step = {options.batch} rows * "
        f"{grid.dp_size} data-parallel rank(s) * {options.accumulation} micro-batch(es); {tokens // parts:,} tokens "
        "of one on each rank"
    )
    if grid.context > 1:
        findings.facts.append(
            f"rows: each of {grid.context} ranks of context holds {positions:,} of a row's {options.seq:,} positions"
        )
        if filled := positions * grid.context - options.seq:
            findings.warnings.append(
                f"{options.seq} positions are not divisible by 2 * context = {2 * grid.context}: {filled} pad "
                "positions are added to each row."
            )
    if tokens < parts:
        findings.warnings.append(f"{tokens} tokens for x * y = {parts} ranks: most of them pad. Take more rows.")
    elif tokens % parts:
        findings.warnings.append(
            f"{tokens} tokens are not divisible by x * y = {parts}: {parts - tokens % parts} pad tokens are added."
        )


def _examine_memory(
    launch: Launch, options: argparse.Namespace, config: dict, model, layout: str, findings: Findings
) -> None:
    """Bytes of rank 0, and of another rank of pipe that needs more; against the memory of a device where that is
    known."""
    size = DTYPE_BYTES[options.weights]
    elements, moments = _count_moments(model, options.optimizer, size)
    moved = _count_moved(model, launch, size)
    states = elements * 2 * size - moved // 2 + moment_bytes(moments + moved, launch.config.offload)
    text = f"memory of rank 0: {_size(states)} parameters, gradients and AdamW's moments"
    if options.optimizer == "adamw_8bit":
        text += f" ({_size(moments)}, in 8 bits but for embeddings and small weights)"
    if options.optimizer == "muon":
        text += f" ({_size(moments)}, of the layers' matrices Muon's one)"
    if launch.config.offload == "optimizer":
        what = "AdamW's moments and float32 weights" if moved else "AdamW's moments"
        text = f"host memory of rank 0: {_size(moments + moved)} {what}; {text} in use"
    total: float = states
    try:
        read = shape_of(config, options.model, allow_untested=launch.config.allow_untested)
        shape = place_experts(read, launch.config.grid, launch.config.experts)
    except ValueError as problem:
        findings.facts.append(f"{text}; the rest of a step is not known: {problem}")
    else:
        step = Step(
            rows=options.batch or 1,
            seq=options.seq,
            compute_bytes=2 if launch.settings["mixed_precision"] in ("bf16", "fp16") else size,
            param_bytes=size,
            reduce_bytes=DTYPE_BYTES[launch.config.reduce_dtype],
            residual_bytes=DTYPE_BYTES.get(launch.config.residual_dtype),
            checkpointing=options.checkpointing,
            keep_gathered=launch.config.keep_gathered,
            context_attention=launch.config.context_attention,
            offload=launch.config.offload,
            optimizer=options.optimizer,
            micro_batches=options.accumulation,
        )
        parts, most = _memory_of_ranks(shape, launch.config, step, layout)
        total = parts.total - parts.states + states
        more = ", ".join(
            f"{_size(getattr(parts, name))} {what}"
            for name, what in (
                ("activations", "saved activations"),
                ("gathered", "gathered weights and their gradients"),
                ("logits", "head and loss"),
                ("buckets", "averages over data"),
            )
        )
        findings.facts.append(
            f"{text}, {more}; about {_size(total)} at the worst moment of a step ({step.rows} row(s) of "
            f"{step.seq} tokens, checkpointing {'on' if step.checkpointing else 'off'})"
        )
        if most.total > total:
            total = most.total
            findings.facts.append(
                f"memory of another rank of pipe: {_size(most.states)} parameters, gradients and moments, "
                f"{_size(most.activations)} saved activations, {_size(most.logits)} head and loss; about "
                f"{_size(total)} at the worst moment of a step"
            )
        if options.batch is not None and launch.config.grid.pipe == 1:
            findings.facts += _expert_lines(
                compare_bytes(read, launch.config.grid, step, layout=layout), launch.config
            )
        findings.facts += [f"note: {note}" for note in shape.notes]
    capacity = options.gpu_memory * GIB if options.gpu_memory else None
    if options.machine:
        capacity = load_machine(options.machine).memory
    if capacity is not None and total > (1 - RESERVE) * capacity:
        findings.warnings.append(
            f"about {_size(total)} do not fit into {_size(capacity)} with {RESERVE:.0%} left free: take "
            "a larger x * y * z, fewer rows (--batch), or activation checkpointing (--checkpointing)."
        )


def _count_moments(model, optimizer: str, size: int) -> tuple[int, int]:
    """Return the elements of parameters on this rank, and the bytes of their moments; `size`: bytes of an element."""
    from torch import nn

    from hf_axonn.engine.dtensors import local

    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    exact = {id(parameter) for module in embeddings for parameter in module.parameters()}
    head = model.get_output_embeddings()
    vocabulary = exact if head is None else exact | set(map(id, head.parameters()))
    elements = moments = 0
    for parameter in model.parameters():
        own = local(parameter).numel()
        elements += own
        if optimizer == "adamw":
            moments += 2 * own * size  # of the dtype of parameters, as torch's AdamW keeps them
        elif optimizer == "muon":
            moments += (1 if parameter.dim() == 2 and id(parameter) not in vocabulary else 2) * own * size
        else:
            moments += 8 * own if id(parameter) in exact else low_bit_bytes(own)
    return elements, moments


def _count_moved(model, launch: Launch, size: int) -> int:
    """Return the bytes of float32 weights that lie in host memory, and rounded to half of them on the device."""
    from torch.distributed.tensor import DTensor

    from hf_axonn.compat.host_dtensor import asks_class
    from hf_axonn.engine.dtensors import local
    from hf_axonn.engine.master_weights import MIXED
    from hf_axonn.engine.sharded_weight import only_multiplied
    from hf_axonn.engine.state import parallel_state

    state = parallel_state(model)
    mixed = size == 4 and launch.settings["mixed_precision"] in MIXED
    if state is None or launch.config.offload != "optimizer" or not mixed:
        return 0
    moved = [weight.parameter for weight in only_multiplied(state.weights)]
    if not (moved and isinstance(moved[0], DTensor) and asks_class(moved[0])):
        return 0
    return size * sum(local(parameter).numel() for parameter in moved)


def _expert_lines(found: ExpertBytes | None, config: AxonnConfig) -> list[str]:
    """Lines on what experts to which tokens can travel send, both ways; none where they cannot."""
    if found is None:
        return []
    fewer = "gather" if found.gather < found.move else "move"
    text = f"a rank sends {_size(found.move)} a micro-batch with experts: move, {_size(found.gather)} with gather"
    text += f", which sends fewer from {found.tokens:,} tokens of a rank on" if found.tokens is not None else ""
    if fewer != ("gather" if config.experts == "gather" else "move"):
        text += f": compare experts: {fewer}, or let hf-axonn plan choose by time"
    return [f"experts: {text}"]


def _size(count: float) -> str:
    """Bytes in the largest unit in which they are at least 0.1."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if count >= 0.1 * 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count / 2**10:.2f} KiB" if count else "0"


def _memory_of_ranks(shape: ModelShape, config: AxonnConfig, step: Step, layout: str) -> tuple[Memory, Memory]:
    """Memory of rank 0, and of the rank that needs most: over pipe the last one has the head and the loss."""
    grid = config.grid
    if grid.pipe == 1:
        return (memory(shape, grid, step, layout=layout),) * 2
    step = replace(step, micro_batches=max(step.micro_batches, grid.pipe))  # too few are filled up
    # Without attention, as in a launch, which divides the layers before it sees a row.
    stages = divide_model(shape, grid.pipe, config.stages_per_rank, 0, config.stage_layers)
    found = memory_of_ranks(stages, (config.schedule, config.stages_per_rank), grid, step, layout)
    return found[0], max(found, key=lambda needed: needed.total)
