"""What is run, by the machine: the model by the memory of a GPU, the batch, ranks, and how long each work may be.

A machine is looked at by a process of its own (`python -m tests.benchmarks.gpu.work machine`): one that has used a GPU
keeps some of its memory, and could not fork ranks that use it.
"""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass

from transformers import LlamaConfig

from hf_axonn import Grid
from tests.benchmarks.peers.contenders import grid_name
from tests.helpers import ROOT


LLAMA_8B = dict(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336,
    vocab_size=128256,
)  # fmt: skip
LLAMA_70B = {
    **LLAMA_8B, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672,
}  # fmt: skip
# Shapes with random weights, the largest first: rows of a rank, tokens of a row, and whether layers run again in
# backward. No embedding is tied.
MODELS: dict[str, tuple[dict[str, int], int, int, bool]] = {
    "Llama-3.1-8B": (LLAMA_8B, 1, 4096, True),
    "Llama-3.2-1B": (
        {**LLAMA_8B, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192}, 2, 4096, False,
    ),
    "SmolLM2-135M": (
        dict(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
             intermediate_size=1536, vocab_size=49152), 4, 2048, False,
    ),
    "four layers": (
        {**LLAMA_8B, "hidden_size": 2048, "num_hidden_layers": 4, "intermediate_size": 8192}, 2, 512, False,
    ),
    "tiny": (
        dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
             vocab_size=512), 2, 32, True,
    ),
}  # fmt: skip
STATE_BYTES = 16  # of a parameter in training: float32 weight, gradient and AdamW's two moments
STATES = 0.35  # the part of a GPU's memory that the states of a fully sharded model may take
FROZEN = 0.30  # and the part that the frozen bfloat16 weights under LoRA may take
STEPS, COUNTED = 10, 8  # ten steps, of which the last eight count, as in the AxoNN paper
SIZES = ("smoke", "full")
# The largest relative difference of a loss from that of the first contender: bfloat16 has 8 bits, and ten steps make
# such differences grow. A wrong gradient shows as more.
LOSS_TOLERANCE = 2e-2
NOT_TIMED = ("four layers", "tiny")  # of MODELS
ONE_RANK = "one rank"  # the contender that is the engine on a grid of one


@dataclass(frozen=True)
class Machine:
    """What there is to run on.

    Args:
        kind: of device, as torch names it: cuda (also AMD's GPUs), cpu, ...
        count: accelerators; 0 on a CPU.
        name: of one of them.
        memory: bytes of one.
        compiler: whether torch.compile can build kernels here.
        sanitizer: the path of compute-sanitizer, or nothing.
        versions: of what is installed, by package.
    """

    kind: str
    count: int
    name: str
    memory: int
    compiler: bool
    sanitizer: str
    versions: dict[str, str]

    @property
    def title(self) -> str:
        """Name and number, as in "8 x NVIDIA H100"."""
        return f"{self.count} x {self.name}" if self.count > 1 else self.name


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Args:
        size: one of SIZES.
        machine: where.
        ranks: processes of a measurement over several.
        model: one of MODELS.
        rows: rows of a batch of all ranks.
        sequence: tokens of a row.
    """

    size: str
    machine: Machine
    ranks: int
    model: str
    rows: int
    sequence: int

    @property
    def smoke(self) -> bool:
        """Whether sizes are tiny, to see that everything runs."""
        return self.size == "smoke"

    @property
    def patience(self) -> int:
        """Times every limit: the smoke size is for CPUs that others may share."""
        return 6 if self.smoke else 1

    @property
    def checkpointing(self) -> bool:
        """Whether layers run again in backward."""
        return MODELS[self.model][3]

    @property
    def frozen_model(self) -> str:
        """The model whose bfloat16 weights lie frozen under LoRA: the largest that leaves room, else the smallest."""
        if self.smoke:
            return "tiny"
        names = [name for name in MODELS if name not in NOT_TIMED]
        fitting = [name for name in names if 2 * parameters(MODELS[name][0]) <= FROZEN * self.machine.memory]
        return (fitting or names[-1:])[0]

    @property
    def config(self) -> LlamaConfig:
        """The model's."""
        return llama(MODELS[self.model][0], self.sequence)


def llama(shape: dict[str, int], sequence: int) -> LlamaConfig:
    """The config of a shape."""
    return LlamaConfig(**shape, max_position_embeddings=sequence, tie_word_embeddings=False, use_cache=False)


def parameters(shape: dict[str, int]) -> int:
    """Of a model of this shape: decoder layers without biases, their norms, embedding and head."""
    hidden, layers, inner = shape["hidden_size"], shape["num_hidden_layers"], shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    return layers * layer + 2 * shape["vocab_size"] * hidden + hidden


def choose(size: str, machine: Machine, sequence: int | None = None) -> Settings:
    """The settings of a size on a machine: the largest model whose states fit with room for everything else.

    Raises:
        ValueError: no model is small enough; the message has the numbers.
    """
    ranks = machine.count or 2
    if size == "smoke":
        ranks = min(2, ranks)
        model = "tiny"
    else:
        needed = {
            name: STATE_BYTES * parameters(shape) / ranks
            for name, (shape, *_) in MODELS.items()
            if name not in NOT_TIMED
        }
        fitting = [name for name, states in needed.items() if states <= STATES * machine.memory]
        if not fitting:
            raise ValueError(
                f"a GPU has {machine.memory / 2**30:.1f} GiB; of {ranks} of them the smallest model "
                f"needs {min(needed.values()) / STATES / 2**30:.1f} GiB each: run --size smoke."
            )
        model = fitting[0]
    _, rows, tokens, _ = MODELS[model]
    return Settings(size, machine, ranks, model, rows * ranks, sequence or tokens)


def grids(ranks: int) -> list[str]:
    """The grids that are measured, by their names in contenders.py: each axis alone, and the usual pairs."""
    if ranks == 1:
        return []
    found = [Grid(x=ranks), Grid(z=ranks), Grid(data=ranks)]
    if ranks == 2:
        found.append(Grid(y=2))
    elif ranks % 2 == 0:
        half = ranks // 2
        found += [Grid(z=half, x=2), Grid(z=2, x=half), Grid(y=2, x=half)]
    return list(dict.fromkeys(grid_name(grid) for grid in found))


def overlap_grids(ranks: int) -> dict[str, str]:
    """Return one of `grids` on which a dense model has something to hide, by switch of `Overlap`; none on one rank."""
    if ranks == 1:
        return {}
    both = grid_name(Grid(z=ranks // 2, x=2)) if ranks > 2 and ranks % 2 == 0 else None
    z, x = (both or grid_name(Grid(**{axis: ranks})) for axis in ("z", "x"))
    return {"all_gather": z, "reduce_scatter": z, "all_reduce": x}


def commit() -> str:
    """The commit of the checkout that runs, with a plus sign if files differ; without git a digest of the code."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        digest = hashlib.sha256()
        for folder in ("hf_axonn", "eval", "tests/benchmarks", "tests/helpers"):
            for file in sorted((ROOT / folder).rglob("*.py")):
                digest.update(file.read_bytes())
        return f"files {digest.hexdigest()[:8]}"


def largest_ratio(losses: list[float], first: list[float]) -> float:
    """The largest relative difference; NaN counts as infinite."""
    apart = [abs(loss / other - 1) for loss, other in zip(losses, first, strict=True)]
    return max(value if value == value else float("inf") for value in apart)
