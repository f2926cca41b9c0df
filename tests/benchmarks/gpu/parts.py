"""The parts in their order, what tells most first: which commands each one runs on a machine, for how long at most."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tests.benchmarks.gpu.jobs import RESULT, Job, Part
from tests.benchmarks.gpu.packing import NAMES
from tests.benchmarks.gpu.settings import (
    MODELS,
    ONE_RANK,
    STATE_BYTES,
    Settings,
    grids,
    overlap_grids,
    parameters,
)
from tests.benchmarks.gpu.train import COMPILED, LORA
from tests.benchmarks.peers.contenders import PEERS, parse_grid
from tests.helpers import ROOT
from tests.helpers.launching import TORCHRUN


WORK = ("-m", "tests.benchmarks.gpu.work")
# A file of the suite and not all of them, to see that it runs.
SMOKE_FILE = "tests/engine/test_gather_cache.py"
ON_DEVICE = re.compile(r"usefixtures\(\"device\"\)|^def test_\w+\(.*\bdevice\b", re.MULTILINE)
TELLING = ("end_to_end/test_equivalence", "engine", "layers", "losses", "parallel")
NOT_COMPILED = (
    "torch.compile fails on Transformers' tensor parallelism (torch 2.13, transformers 5.23): one of its autograd "
    "functions keeps a DeviceMesh for backward, which AOTAutograd does not save"
)
NO_PEER = "needs two GPUs or more; there is one, and NCCL refuses two ranks on it"
NO_COMPILER = "torch.compile finds no compiler here (Triton, and a C compiler)"
NO_PIPE = "gloo, which moves tensors between ranks that share a GPU, sends no CUDA tensors from rank to rank"


def make_parts(settings: Settings) -> list[Part]:
    """All parts. Each is below 10 minutes, and what one GPU runs below 30 together."""
    jobs = _Jobs(settings)
    parts = [
        Part(
            "start", "One rank, in bfloat16", 90, jobs.start,
            "Nothing else can work before this does: see `hf-axonn env` for the versions of torch and the driver.",
        ),
        Part(
            "axes", "Every axis in float64", 180, jobs.axes,
            "The line names grid, model and tensor. `HF_AXONN_TEST_DEVICE=cuda python -m pytest -x "
            "tests/end_to_end/test_equivalence.py` has more. Other bits with `CUDA_LAUNCH_BLOCKING=1`: a race.",
        ),
        Part(
            "training", "Training: stock, the engine, DDP, FSDP2, native TP", 300, jobs.training,
            "Out of memory is a result, not an error: run with a lower --sequence to compare all. An error of "
            "torch.compile alone leaves the line of the same name without it.",
        ),
        Part(
            "lora", "LoRA on a frozen base", 180, jobs.lora,
            "Out of memory is a result, as in training.",
        ),
        Part(
            "checks", "Host reads and errors of memory", 180, jobs.checks,
            "A wait costs time and no correctness: see where the line is. What the sanitizer names is an error.",
        ),
        Part(
            "packing", "Packed documents", 150, jobs.packing,
            "`leak`: documents see each other. `error` alone: the kernel rounds otherwise, or misreads bounds.",
        ),
        Part(
            "host", "Host time of a layer", 90, jobs.host,
            "Runs on the processor alone: if it fails, `make test` fails too.",
        ),
        Part(
            "extraction", "Extraction of training data", 120, jobs.extraction,
            "`the figures differ`: two ways of decoding disagree, which float32 should not; look for TF32 settings.",
        ),
        Part(
            "links", "Links and products", 60, jobs.links,
            "Without it there are no predictions, and utilisation is a share of the advertised peak only. If it hangs,"
            " GPUs do not reach each other: try `NCCL_P2P_DISABLE=1`, and compare `nvidia-smi topo -m`.",
        ),
        Part(
            "grids", "Training: grids of hf_axonn", 420, jobs.grids,
            "The log names the rank, the step and the collective. `CUDA_LAUNCH_BLOCKING=1` shows the line of a device "
            "error, `TORCH_NCCL_BLOCKING_WAIT=1` that of a collective. Out of memory: as in training.",
        ),
        Part(
            "overlap", "Overlaps, switched off one by one", 300, jobs.overlap,
            "As of the grids. A switch that is faster when off: compare `overlap` in the machine file of links.",
        ),
        Part(
            "equality", "Equality with one process", 360, jobs.equality,
            "Run the file by itself: `HF_AXONN_TEST_DEVICE=cuda python -m pytest FILE -x`. Where ranks hang, set "
            "`NCCL_DEBUG=INFO`; where all files fail, see `hf-axonn env` for versions of torch and driver.",
            together=1 if settings.smoke else 4,
        ),
        Part(
            "tuning", "Kernel tuner", 60, jobs.tuning,
            "A kernel that is missing for one operand layout shows here first; training does not need the tuner.",
        ),
    ]  # fmt: skip
    return [replace(part, limit=part.limit * settings.patience) for part in parts]


def test_files() -> tuple[list[str], list[str]]:
    """The files of tests that ask for the fixture `device`, the most telling first, and of those marked gpu."""
    files = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted(ROOT.glob("tests/**/test_*.py"))
        if "benchmarks" not in path.parts
    }

    def place(file: str) -> int:
        return next((i for i, name in enumerate(TELLING) if file.startswith(f"tests/{name}")), len(TELLING))

    chosen = [file for file, text in files.items() if ON_DEVICE.search(text)]
    return sorted(chosen, key=place), [file for file, text in files.items() if "\n@pytest.mark.gpu\n" in text]


class _Jobs:
    """The jobs of each part on a machine."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.shape = MODELS[settings.model][0]

    def _single(self, name: str, what: str, *arguments: str, limit: float) -> Job:
        smoke = ("--smoke",) if self.settings.smoke else ()
        return Job(name, (*WORK, what, *smoke, *arguments, "--result", RESULT), limit * self.settings.patience)

    def start(self) -> Iterator[Job]:
        """One rank of torch's own backend."""
        yield self._single("one rank", "start", *self._small(), limit=90)

    def axes(self) -> Iterator[Job]:
        """Grids against one process."""
        yield self._single("grids", "axes", limit=180)
        if self.settings.machine.count == 1:
            yield Job("pipe", (), left_out=NO_PIPE)

    def training(self) -> Iterator[Job]:
        """Stock, our layers without other ranks, and what people would use instead on several GPUs."""
        yield self._train("plain", ranks=1)
        yield self._train(ONE_RANK, ranks=1)
        yield self._compiled("plain", ranks=1)
        for name in PEERS:
            yield self._train(name, ranks=self.settings.ranks)
            yield self._compiled(name, ranks=self.settings.ranks)

    def lora(self) -> Iterator[Job]:
        """Adapters on frozen weights, stock and with our layers."""
        rows, model = "2" if self.settings.smoke else "1", self.settings.frozen_model
        sizes = ("--model", model, "--rows", rows, "--sequence", str(self._sequence(model)))
        for name in ("plain", ONE_RANK):
            yield self._run(LORA + name, 1, LORA + name, *sizes, limit=120)

    def checks(self) -> Iterator[Job]:
        """Steps that are watched."""
        yield self._single("host reads", "reads", *self._small(), limit=60)
        sanitizer = self.settings.machine.sanitizer
        memcheck = self._single("memcheck", "memcheck", "--sanitizer", sanitizer, limit=120)
        yield memcheck if sanitizer else Job("memcheck", (), left_out="there is no compute-sanitizer on the PATH")

    def packing(self) -> Iterator[Job]:
        """Each kind of attention."""
        model = "tiny" if self.settings.smoke else "four layers"
        for attention in NAMES:
            job = self._single(attention, "packing", "--attention", attention, "--model", model, limit=90)
            if attention == "varlen" and self.settings.machine.kind == "cpu":
                job = Job(attention, (), left_out="torch's varlen attention has kernels for GPUs only")
            if attention == "flex" and not (self.settings.machine.compiler or self.settings.smoke):
                job = Job(attention, (), left_out=NO_COMPILER)
            yield job

    def links(self) -> Iterator[Job]:
        """`hf-axonn bench-links` on all ranks."""
        seconds = "1" if self.settings.smoke else "15" if self.settings.ranks == 1 else "40"
        command = ("-m", "hf_axonn", "bench-links", "--seconds", seconds, "--output", RESULT)
        yield self._launch("bench-links", self.settings.ranks, *command, limit=60, torchrun=True)

    def grids(self) -> Iterator[Job]:
        """Our grids."""
        names = grids(self.settings.ranks)
        if not names:
            yield Job("grids", (), left_out=NO_PEER)
        for name in names:
            yield self._train(name, ranks=self.settings.ranks)

    def overlap(self) -> Iterator[Job]:
        """Each switch off on a grid where it hides something, and all of them; `grids` has them on."""
        switches = overlap_grids(self.settings.ranks)
        if not switches:
            yield Job("overlap", (), left_out=NO_PEER)
        for switch, name in switches.items():
            yield self._train(name, ranks=self.settings.ranks, without=(switch,))
        for name in dict.fromkeys(name for name in switches.values() if list(switches.values()).count(name) == 3):
            yield self._train(name, ranks=self.settings.ranks, without=tuple(switches))

    def equality(self) -> Iterator[Job]:
        """The files of tests that ask for the fixture `device`."""
        files, gpu = ([SMOKE_FILE], []) if self.settings.smoke else test_files()
        for file in files:
            yield self._single(file.removeprefix("tests/"), "equality", "--file", file, limit=300)
        for file in gpu:
            name = f"{file.removeprefix('tests/')}, marked gpu"
            yield self._single(name, "equality", "--file", file, "--gpu", limit=120)

    def tuning(self) -> Iterator[Job]:
        """Operand layouts of a layer's products."""
        yield self._single("layouts", "tuning", limit=60)

    def host(self) -> Iterator[Job]:
        """Processor time of a layer."""
        yield self._single("host time", "host", limit=90)

    def extraction(self) -> Iterator[Job]:
        """`hf_axonn_eval` beside `generate`, of a shape that one GPU holds."""
        model = self.settings.model if self.settings.smoke else "SmolLM2-135M"
        yield self._single(model, "extraction", "--model", model, limit=120)

    def _small(self) -> tuple[str, ...]:
        """Sizes of what is not timed."""
        return () if self.settings.smoke else ("--model", "SmolLM2-135M", "--sequence", "512")

    def _sequence(self, model: str) -> int:
        return self.settings.sequence if model == self.settings.model else MODELS[model][2]

    def _compiled(self, name: str, *, ranks: int) -> Job:
        compiled = self._train(name + COMPILED, ranks=ranks)
        if self.settings.machine.compiler or compiled.left_out:
            return compiled
        return Job(compiled.name, (), left_out=NO_COMPILER)

    def _train(self, name: str, *, ranks: int, without: tuple[str, ...] = ()) -> Job:
        title = name + (" without " + ", ".join(without) if without else "")
        plain = name.removesuffix(COMPILED)
        if plain in PEERS and ranks == 1:
            return Job(title, (), left_out=NO_PEER)
        if name == f"native TP{COMPILED}":
            return Job(title, (), left_out=NOT_COMPILED)
        if why := self._too_large(plain, ranks):
            return Job(title, (), left_out=why)
        settings = self.settings
        command = ["--model", settings.model, "--rows", str(settings.rows), "--sequence", str(settings.sequence)]
        command += ["--checkpointing"] if settings.checkpointing else []
        command += ["--without", *without] if without else []
        command += ["--backend", "aot_eager"] if settings.smoke else []  # else minutes
        return self._run(title, ranks, name, *command, limit=150)

    def _too_large(self, name: str, ranks: int) -> str:
        """Return why its states alone cannot lie on a GPU, or nothing."""
        parts = {"plain": 1, ONE_RANK: 1, "DDP": 1, "FSDP2": ranks, "native TP": ranks}
        if name not in parts:
            grid = parse_grid(name)
            parts[name] = grid.z * grid.y * grid.x
        states, memory = STATE_BYTES * parameters(self.shape) / parts[name], self.settings.machine.memory
        if states <= memory:
            return ""
        return (
            f"does not fit: {states / 2**30:.1f} GiB of weights, gradients and moments on each rank, of "
            f"{memory / 2**30:.1f} GiB"
        )

    def _run(self, title: str, ranks: int, name: str, *arguments: str, limit: float) -> Job:
        command = ("-m", "tests.benchmarks.gpu.train", "--contender", name, *arguments, "--result", RESULT)
        return self._launch(title, ranks, *command, limit=limit)

    def _launch(self, name: str, ranks: int, *command: str, limit: float, torchrun: bool = False) -> Job:
        launcher = (*TORCHRUN, "--nproc-per-node", str(ranks)) if torchrun or ranks > 1 else ()
        return Job(name, (*launcher, *command), limit * self.settings.patience)
