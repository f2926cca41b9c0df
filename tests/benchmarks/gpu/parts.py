"""The parts of `make gpu` in their order: which commands each one runs on a machine, and for how long at most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.gpu.jobs import RESULT, STOPPED, Job, Part, Results
from tests.benchmarks.gpu.settings import MODELS, ONE_RANK, STATE_BYTES, Settings, grids, overlap_grids, parameters
from tests.benchmarks.gpu.train import COMPILED
from tests.benchmarks.peers.contenders import PEERS, parse_grid
from tests.helpers.launching import TORCHRUN


WORK = ("-m", "tests.benchmarks.gpu.work")
# A file of the suite and not all of them, to see that it runs.
SMOKE_FILE = "tests/engine/test_gather_cache.py"
NOT_COMPILED = (
    "torch.compile fails on Transformers' tensor parallelism (torch 2.13, transformers 5.23): one of its autograd "
    "functions keeps a DeviceMesh for backward, which AOTAutograd does not save"
)
NO_PEER = "needs two GPUs or more; there is one, and NCCL refuses two ranks on it"


def make_parts(settings: Settings, results: Results) -> list[Part]:
    """All parts. Their limits add up to less than 40 minutes, and each is below 10."""
    jobs = _Jobs(settings, results)
    parts = [
        Part(
            "equality", "Equality with one process", 540, jobs.equality,
            "Run the file by itself: `HF_AXONN_TEST_DEVICE=cuda python -m pytest FILE -x`. Where ranks hang, set "
            "`NCCL_DEBUG=INFO`; where all files fail, see `hf-axonn env` for versions of torch and driver.",
        ),
        Part(
            "links", "Links and products", 150, jobs.links,
            "Without it there are no predictions, and utilisation is a share of the advertised peak only. If it hangs,"
            " GPUs do not reach each other: try `NCCL_P2P_DISABLE=1`, and compare `nvidia-smi topo -m`.",
        ),
        Part(
            "peers", "Training: stock, DDP, FSDP2, native TP", 480, jobs.peers,
            "Out of memory is a result, not an error: run with a lower --sequence to compare all. An error of "
            "torch.compile alone leaves the line of the same name without it.",
        ),
        Part(
            "grids", "Training: grids of hf_axonn", 420, jobs.grids,
            "The log names the rank, the step and the collective. `CUDA_LAUNCH_BLOCKING=1` shows the line of a device "
            "error, `TORCH_NCCL_BLOCKING_WAIT=1` that of a collective. Out of memory: as of peers.",
        ),
        Part(
            "overlap", "Overlaps, switched off one by one", 300, jobs.overlap,
            "As of the grids. A switch that is faster when off: compare `overlap` in the machine file of links.",
        ),
        Part(
            "tuning", "Kernel tuner", 120, jobs.tuning,
            "A kernel that is missing for one operand layout shows here first; training does not need the tuner.",
        ),
        Part(
            "host", "Host time of a layer", 120, jobs.host,
            "Runs on the processor alone: if it fails, `make test` fails too.",
        ),
        Part(
            "extraction", "Extraction of training data", 180, jobs.extraction,
            "`the figures differ`: two ways of decoding disagree, which float32 should not; look for TF32 settings.",
        ),
    ]  # fmt: skip
    return [replace(part, limit=part.limit * _patience(settings)) for part in parts]


def _patience(settings: Settings) -> int:
    """Times every limit: the smoke size is for CPUs that others may share."""
    return 6 if settings.smoke else 1


class _Jobs:
    """The jobs of each part on a machine, and where they lie."""

    def __init__(self, settings: Settings, results: Results) -> None:
        self.settings, self.results = settings, results
        # Named by what is in it, so that other settings are other commands.
        self.weights = results.folder / f"weights-{settings.model}-{settings.rows}x{settings.sequence}"
        self.shape = MODELS[settings.model][0]

    def _single(self, name: str, what: str, *arguments: str, limit: float, makes: Path | None = None) -> Job:
        smoke = ("--smoke",) if self.settings.smoke else ()
        command = (*WORK, what, *smoke, *arguments, "--result", RESULT)
        return Job(name, command, limit * _patience(self.settings), makes=makes)

    def equality(self) -> Iterator[Job]:
        """The files of tests of the fixture `device`."""
        files, gpu = [SMOKE_FILE], []
        if not self.settings.smoke:
            collect = self._single("collect", "collect", limit=240)
            yield collect
            found = self.results.look("equality", collect).result or {}
            files, gpu = found.get("files", []), found.get("gpu", [])
        work = [self._single(file.removeprefix("tests/"), "equality", "--file", file, limit=540) for file in files]
        for file in gpu:
            name = f"{file.removeprefix('tests/')}, marked gpu"
            work.append(self._single(name, "equality", "--file", file, "--gpu", limit=540))
        # One that was stopped may hang: those after it come first.
        yield from sorted(work, key=lambda job: self.results.look("equality", job).state == STOPPED)

    def links(self) -> Iterator[Job]:
        """`hf-axonn bench-links` on all ranks."""
        seconds = "1" if self.settings.smoke else "40"
        command = ("-m", "hf_axonn", "bench-links", "--seconds", seconds, "--output", RESULT)
        yield self._launch("bench-links", self.settings.ranks, *command, limit=150)

    def peers(self) -> Iterator[Job]:
        """What people would use instead, and on one GPU our layers without other ranks."""
        yield self._weights()
        yield from self._with_compiled("plain", ranks=1)
        yield self._train(ONE_RANK, ranks=1)
        for name in PEERS:
            yield from self._with_compiled(name, ranks=self.settings.ranks)

    def grids(self) -> Iterator[Job]:
        """Our grids."""
        names = grids(self.settings.ranks)
        yield self._weights() if names else Job("grids", (), left_out=NO_PEER)
        for name in names:
            yield self._train(name, ranks=self.settings.ranks)

    def overlap(self) -> Iterator[Job]:
        """Each switch off on a grid where it hides something, and all of them; `grids` has them on."""
        switches = overlap_grids(self.settings.ranks)
        yield self._weights() if switches else Job("overlap", (), left_out=NO_PEER)
        for switch, name in switches.items():
            yield self._train(name, ranks=self.settings.ranks, without=(switch,))
        for name in dict.fromkeys(name for name in switches.values() if list(switches.values()).count(name) == 3):
            yield self._train(name, ranks=self.settings.ranks, without=tuple(switches))

    def tuning(self) -> Iterator[Job]:
        """Operand layouts of a layer's products."""
        yield self._single("layouts", "tuning", limit=120)

    def host(self) -> Iterator[Job]:
        """Processor time of a layer."""
        yield self._single("host time", "host", limit=120)

    def extraction(self) -> Iterator[Job]:
        """`hf_axonn_eval` beside `generate`, of a shape that one GPU holds."""
        model = self.settings.model if self.settings.smoke else "SmolLM2-135M"
        yield self._single(model, "extraction", "--model", model, limit=180)

    def _weights(self) -> Job:
        """Made once for all contenders; the folder may be deleted and is made again."""
        settings = self.settings
        sizes = ("--rows", str(settings.rows), "--sequence", str(settings.sequence))
        where = ("--model", settings.model, "--folder", str(self.weights))
        return self._single("weights", "weights", *where, *sizes, limit=180, makes=self.weights)

    def _with_compiled(self, name: str, *, ranks: int) -> Iterator[Job]:
        yield self._train(name, ranks=ranks)
        compiled = self._train(name + COMPILED, ranks=ranks)
        if not (self.settings.machine.compiler or compiled.left_out):
            compiled = Job(
                compiled.name, (), left_out="torch.compile finds no compiler here (Triton, and a C compiler)"
            )
        yield compiled

    def _train(self, name: str, *, ranks: int, without: tuple[str, ...] = ()) -> Job:
        title = name + (" without " + ", ".join(without) if without else "")
        plain = name.removesuffix(COMPILED)
        if plain in PEERS and ranks == 1:
            return Job(title, (), left_out=NO_PEER)
        if name == f"native TP{COMPILED}":
            return Job(title, (), left_out=NOT_COMPILED)
        if why := self._too_large(plain, ranks):
            return Job(title, (), left_out=why)
        command = ["-m", "tests.benchmarks.gpu.train", "--contender", name, "--folder", str(self.weights)]
        command += ["--checkpointing"] if self.settings.checkpointing else []
        command += ["--without", *without] if without else []
        command += ["--backend", "aot_eager"] if self.settings.smoke else []  # else minutes
        return self._launch(title, ranks, *command, "--result", RESULT, limit=240)

    def _too_large(self, name: str, ranks: int) -> str:
        """Why its states alone cannot lie on a GPU, or nothing."""
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

    def _launch(self, name: str, ranks: int, *command: str, limit: float) -> Job:
        launch = (*TORCHRUN, "--nproc-per-node", str(ranks), *command)
        return Job(name, launch, limit * _patience(self.settings))
