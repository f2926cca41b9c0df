"""For every model type of Transformers: does the planner take it, and does the engine send what the planner says?

    python -m tests.benchmarks.traffic.models --output FILE        all types, tiny and random, 4 minutes on one core
    python -m tests.benchmarks.traffic.models mixtral jamba        some

A type is built tiny (tiny_configs.py), its shape is found on the meta device, and one rank of a grid trains two steps
in bf16 autocast on torch's `fake` process group, in which collectives return at once and leave what was there. The
collectives of the second step have to be those of planner/traffic/volumes.py, each kind, axis and byte, with
checkpointing and without. Exit code 1: they differ for a type of which the planner notes nothing.
"""

from __future__ import annotations

import argparse
import logging
import platform
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from hf_axonn import Grid, __version__, parallelize
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.mesh import grid_mesh
from hf_axonn.planner.shapes import ModelShape
from hf_axonn.planner.traffic.ledger import Ledger
from hf_axonn.planner.traffic.volumes import volumes
from hf_axonn.profiling.trace import trace_shape
from tests.benchmarks.architectures.tiny_configs import MODEL_TYPES, tiny_config
from tests.benchmarks.checkpoint.big_load import read_grid
from tests.benchmarks.planner.simulate import Case, train, world


ROWS, SEQ = 2, 12
GRID = Grid(z=2, y=2, x=2)


@dataclass
class Found:
    """What came out for a type.

    Args:
        verdict: equal, differs, not run, refused.
        why: the note of the planner, or what kept it or the step from being done.
    """

    verdict: str
    why: str = ""


def shape_of(config: transformers.PreTrainedConfig) -> ModelShape:
    """The planner's shape of a config's model."""
    with torch.device("meta"):
        return trace_shape(AutoModelForCausalLM.from_config(config))


def counted(config: transformers.PreTrainedConfig, grid: Grid, **settings: Any) -> tuple[Case, Ledger]:
    """The collectives of rank 0 of a grid in its second step, and what it trained. Tensors are real, ranks are not."""
    case = Case(config, grid, rows=ROWS, seq=SEQ, **settings)
    torch.manual_seed(0)
    with world(grid, 0):
        assert grid_mesh(grid, "cpu").storage_mesh is not None
        # The kernel for many experts asks for widths that tiny models do not have.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager").train()
        setting = AxonnConfig(grid=grid, experts=case.experts, context_attention=case.attention)
        model, _ = parallelize(model, grid, config=setting)
        ids = torch.randint(2, config.get_text_config(decoder=True).vocab_size, (ROWS, SEQ))
        return case, train(model, case, ids, torch.ones((), dtype=torch.int64)).ledger


def differences(
    config: transformers.PreTrainedConfig, shape: ModelShape, grid: Grid, attention: str = "auto"
) -> list[str]:
    """List where the engine sends other bytes than the planner predicts."""
    lines = []
    for checkpointing in (False, True):
        case, ledger = counted(config, grid, checkpointing=checkpointing, attention=attention)
        sent, predicted = ledger.entries, volumes(shape, grid, case.step, layout=shape.layout(grid)).entries
        lines += [
            f"{'checkpointing, ' * checkpointing}{key.phase} {key.kind} over {'+'.join(key.axes)}: "
            f"counted {sent.get(key)}, predicted {predicted.get(key)}"
            for key in sorted({*sent, *predicted})
            if sent.get(key) != predicted.get(key)
        ]
    return lines


def look(kind: str, grid: Grid) -> Found:
    """One type."""
    try:
        config = tiny_config(kind)
        shape = shape_of(config)
    except Exception as error:  # a class that cannot be built is no matter of ours
        return Found("refused", str(error).splitlines()[0] if str(error) else type(error).__name__)
    try:
        wrong = differences(config, shape, grid)
    except Exception as error:
        return Found("not run", f"{type(error).__name__}: {error}".splitlines()[0])
    return Found("differs" if wrong else "equal", "; ".join(shape.notes) or "; ".join(wrong))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=MODEL_TYPES, metavar="TYPE", help="model types (all)")
    parser.add_argument("--grid", type=read_grid, default=GRID, help="as data=1,z=2,y=2,x=2")
    parser.add_argument("--output", type=Path, help="write the table to this file too")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {kind: look(kind, options.grid) for kind in options.kinds}
    counts = Counter(answer.verdict for answer in found.values())
    lines = [
        "# Traffic of every model type: said and sent",
        "",
        f"`python -m tests.benchmarks.traffic.models`: tiny models on {options.grid}, {ROWS} rows of {SEQ} tokens, "
        f"bf16 on fp32 weights. hf_axonn {__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}.",
        "",
        f"{len(found)} types: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) + ".",
        "",
        "- **equal**: every collective of a step is the one that is predicted, to the call and byte, with",
        "  checkpointing and without.",
        "- **differs**: some are not; what the planner notes of the model says why.",
        "- **refused**: the planner gives the reason. **not run**: the class does not train as it is, or not so.",
        "",
        "| type | | |",
        "| --- | --- | --- |",
        *(f"| {kind} | {answer.verdict} | {answer.why[:200].replace('|', '/')} |" for kind, answer in found.items()),
    ]
    print("\n".join(lines))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")
    return int(any(answer.verdict == "differs" and "counted" in answer.why for answer in found.values()))


if __name__ == "__main__":
    sys.exit(main())
