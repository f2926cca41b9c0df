"""`hf-axonn init`: a launch file for a machine, with the grid that the planner ranks first.

    hf-axonn init                                       asks, with a default for each question
    hf-axonn init --yes --model DIR --batch-tokens 1M   asks nothing: what no option says has its default

Nothing is asked where stdin is no terminal, either. The devices are those of this machine, or of the one that
--machine names. The planner knows a machine by the name of its GPUs (`gpu` in planner/machines); of one that it does
not know, and of CPUs, the grid is that of `default_grid`, and a line says so. Bad input ends with exit code 2 and a
message (main.py); a file that is there is left alone without --force.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_axonn.cli.plan_report import in_short, inline, number_of, section_lines, sizes
from hf_axonn.compat.arguments import with_reason
from hf_axonn.compat.own_code import add_own_code_option, register_code
from hf_axonn.config import PRECISIONS
from hf_axonn.launch.launch_file import core_count, gpu_count
from hf_axonn.planner.dense import GPTS
from hf_axonn.planner.from_settings import SEQUENCE, choose_batch, number, other_nodes, too_long, usual_seq
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import known_machines, load_machine, machine_of_gpus
from hf_axonn.planner.search import GridRanking, plan
from hf_axonn.planner.settings import EXACT
from hf_axonn.planner.shapes import ModelShape
from hf_axonn.profiling.read_shape import read_shape
from hf_axonn.topology.grid import Grid


PORT = 29500  # of the rendezvous of several nodes, torchrun's default
ROWS = 8  # of a rank in a step where nobody says: Trainer's per_device_train_batch_size
CPU_PROCESSES = 4  # at most, where nobody says: CPU grids are for trying
MODEL_HELP = f"a config.json, its directory, a name on the hub (org/model), or {', '.join(GPTS)}"


@dataclass(frozen=True)
class Devices:
    """The devices of a node.

    Args:
        count: GPUs, or processes that a CPU is divided among where nobody says.
        what: for people.
        machine: the planner's name of the machine, a JSON file of one, or None.
        use_cpu: of the launch file; None: whatever the machine has on which it is launched.
        bf16: whether they have bfloat16, as far as is known.
    """

    count: int
    what: str
    machine: str | None
    use_cpu: bool | None
    bf16: bool = True


def add_init(commands) -> None:
    """Register `init` with the subparsers of main.py."""
    parser = commands.add_parser(
        "init",
        help="write a launch file for this machine",
        description="Write a launch file with the grid that the planner ranks first. On a terminal it asks for what "
        "no option says.",
    )
    parser.add_argument("--model", help=f"{MODEL_HELP}; without it the grid is the default one")
    add_own_code_option(parser)
    parser.add_argument("--nodes", type=with_reason(number), help="nodes, each with as many processes; 1 by default")
    parser.add_argument(
        "--processes",
        type=with_reason(number),
        help="processes on all nodes together; by default one for each GPU, on CPUs 2 or 4",
    )
    parser.add_argument(
        "--mixed-precision", choices=PRECISIONS, help="bf16 by default on GPUs that have it, no on CPUs"
    )
    parser.add_argument(
        "--seq",
        type=with_reason(number),
        help=f"tokens of a sequence; by default {SEQUENCE}, or what the model allows",
    )
    parser.add_argument(
        "--batch-tokens",
        type=with_reason(number),
        help=f"tokens of a step, such as 1M; by default {ROWS} sequences a process",
    )
    parser.add_argument(
        "--machine",
        help=f"another machine than this one: {', '.join(known_machines())}, or a JSON file of bench-links",
    )
    parser.add_argument("--output", default="axonn.yaml", help="the file to write, axonn.yaml by default")
    parser.add_argument("--force", action="store_true", help="overwrite it where it is there")
    parser.add_argument("--yes", action="store_true", help="ask nothing")


def run_init(options: argparse.Namespace) -> int:
    """`hf-axonn init`; returns the exit code.

    Raises:
        ValueError: an option or answer is wrong, the file is there, or no grid fits.
    """
    output = Path(options.output)
    if output.exists() and not options.force:
        raise ValueError(f"{output} is there: give another --output, or --force to overwrite it.")
    if options.trust_remote_code:
        register_code(options.model)
    asks = sys.stdin.isatty() and not options.yes
    devices = named_machine(options.machine) if options.machine else this_machine()
    print(f"devices: {devices.what}")
    nodes = _answer(options.nodes, "nodes", 1, number, asks)
    processes = _answer(options.processes, "processes on all nodes", devices.count * nodes, number, asks)
    check_processes(processes, nodes, devices, named=options.machine is not None)
    model = options.model
    if devices.machine and model is None and asks:
        model = _answer(None, f"model ({MODEL_HELP})", None, _model, asks)
    usual = "no" if devices.use_cpu is not False else "bf16" if devices.bf16 else "fp16"
    precision = _answer(options.mixed_precision, "mixed precision", usual, _precision, asks)
    if devices.use_cpu and precision == "fp16":
        raise ValueError("mixed precision is fp16, which accelerate ignores on CPUs: use bf16 or no.")
    shape = read_shape(model) if devices.machine and model else None
    seq = _answer(options.seq, "tokens of a sequence", usual_seq(shape) if shape else SEQUENCE, number, asks)
    tokens = _answer(options.batch_tokens, "tokens of a step", ROWS * processes * seq, number, asks)
    batch = choose_batch(tokens, seq, processes)
    lines = [f"{batch.note}."] if batch.note else []
    if shape and devices.machine:
        found = plan_grid(shape, devices.machine, batch.sequences, seq, processes, precision)
        unlike = other_nodes(found, processes // nodes, nodes)
        lines += [*([f"{unlike}."] if unlike else []), *in_short(found)]
        long = too_long(seq, shape.max_positions)
        lines += [f"  {note}" for note in (long, *found.job.untimed) if note]
        section = section_lines(found.best)
        about = f"{model} on {number_of(processes, 'GPU')} of {found.job.machine.name}"
    else:
        grid = default_grid(processes, nodes, batch.sequences)
        section, about = ["axonn_config:", f"  grid: {inline(grid)}"], why_default(grid, devices)
        lines += [about, *([] if devices.machine else how_to_measure(processes // nodes))]
    about = f"# By hf-axonn init: {about}, for {number_of(batch.sequences, 'sequence')} of {seq:,} tokens a step."
    text = "\n".join([about, *_settings(processes, nodes, precision, devices.use_cpu), *section]) + "\n"
    try:
        with open(output, "w" if options.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"{output} is there meanwhile: give another --output, or --force.") from None
    lines += [line.removeprefix("# ") for line in section if line.startswith("#")]
    print("\n".join([*lines, f"{output} is written. Start your script with", "", *launch_lines(output, nodes)]))
    return 0


def this_machine() -> Devices:
    """The devices of the machine that this runs on. Raises ValueError if its GPUs differ."""
    count = max(0, gpu_count())
    if not count:
        cores = core_count()
        return Devices(min(CPU_PROCESSES, max(2, cores // 2 * 2)), f"no GPU, {cores} CPU core(s)", None, True)
    import torch

    names = {torch.cuda.get_device_properties(index).name for index in range(count)}
    if len(names) > 1:
        raise ValueError(
            f"the GPUs of this machine differ ({', '.join(sorted(names))}): choose some of one kind by "
            "CUDA_VISIBLE_DEVICES."
        )
    (name,) = names
    machine = machine_of_gpus(name, count)
    planned_as = f", planned as {machine}" if machine else ""
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Devices(count, f"{count} x {name}{planned_as}", machine, False, bf16)


def named_machine(name: str) -> Devices:
    """The devices of a node of a machine that the planner knows, or that a JSON file describes."""
    machine = load_machine(name)
    use_cpu = False if machine.gpu else None  # of another file the launch sees what there is
    what = f"{machine.gpus_per_node} a node of {machine.name}, {machine.description}"
    return Devices(machine.gpus_per_node, what, name, use_cpu)


def check_processes(processes: int, nodes: int, devices: Devices, *, named: bool) -> None:
    """Raise ValueError if so many processes cannot run on so many nodes."""
    if processes % nodes:
        raise ValueError(f"{processes} processes are not divisible by {nodes} nodes: every node starts as many.")
    if not devices.use_cpu and not named and processes > nodes * devices.count:
        raise ValueError(
            f"{processes} processes on {number_of(nodes, 'node')} need {processes // nodes} GPUs each, and this "
            f"machine has {devices.count}: give --nodes {math.ceil(processes / devices.count)}, or fewer --processes."
        )


def plan_grid(
    shape: ModelShape, machine: str, sequences: int, seq: int, processes: int, precision: str
) -> GridRanking:
    """Plan as `hf-axonn plan` does with its defaults.

    Raises:
        ValueError: no grid fits.
    """
    compute = 4 if precision == "no" else 2
    job = Job(
        shape=shape,
        machine=load_machine(machine),
        sequences=sequences,
        seq=seq,
        compute_bytes=compute,
        param_bytes=4,
    )
    found = plan(job, processes, free=EXACT)
    if not found.ranked:
        raise ValueError(found.why_none())
    return found


def default_grid(processes: int, nodes: int, sequences: int) -> Grid:
    """The grid for an unknown machine: nodes are copies (data), the ranks of a node divide the weights
    (z), and where there are fewer sequences than ranks, the rest divides every layer (x)."""
    data = math.gcd(nodes, sequences)
    z = math.gcd(processes // nodes, sequences // data)
    return Grid(data=data, z=z, x=processes // (data * z))


def why_default(grid: Grid, devices: Devices) -> str:
    """Say that the grid is not planned, and why."""
    why = "no model was named" if devices.machine else "the planner knows no such machine"
    return f"the default grid, {sizes(grid)}, as {why}"


def how_to_measure(local: int) -> list[str]:
    """Lines on how to plan for an unknown machine, with `local` processes on a node."""
    measure = f"torchrun --nproc-per-node {local} -m hf_axonn bench-links --output this.json"
    return [f"  to plan, measure it: {measure}", "  and repeat this with --machine this.json --model MODEL --force"]


def launch_lines(output: Path, nodes: int) -> list[str]:
    """The command that starts a script, one line for each node."""
    start = f"accelerate launch --config {shlex.quote(str(output))}"
    if nodes == 1:
        return [f"{start} train.py"]
    return [f"{start} --machine_rank {rank} --main_process_ip ADDRESS_OF_NODE_0 train.py" for rank in range(nodes)]


def _settings(processes: int, nodes: int, precision: str, use_cpu: bool | None) -> list[str]:
    """The keys of the launch file beside the section."""
    lines = [
        "compute_environment: LOCAL_MACHINE",
        "distributed_type: MULTI_GPU  # one process for each rank, on CPUs too",
        f"num_machines: {nodes}",
        *([f"main_process_port: {PORT}", "same_network: true"] if nodes > 1 else []),
        f"num_processes: {processes}",
        f"mixed_precision: '{precision}'",
    ]
    return lines if use_cpu is None else [*lines, f"use_cpu: {str(use_cpu).lower()}"]


def _model(text: str) -> str:
    read_shape(text)
    return text


def _precision(text: str) -> str:
    if text not in PRECISIONS:
        raise ValueError(f"{text!r} is none of {', '.join(PRECISIONS)}.")
    return text


def _answer(given: Any, question: str, default: Any, read: Callable[[str], Any], asks: bool) -> Any:
    """Return the value of an option; else the answer of the user, who is asked again while it is wrong; else the
    default."""
    if given is not None or not asks:
        return default if given is None else given
    while True:
        try:
            text = input(f"{question} [{'none' if default is None else default}]: ").strip()
            return read(text) if text else default
        except (EOFError, KeyboardInterrupt):
            raise ValueError("the answers ended before the questions: --yes asks nothing.") from None
        except ValueError as problem:
            print(problem)
