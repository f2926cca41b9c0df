"""Every causal LM class of the installed Transformers, tiny and random, on every kind of grid, against one process.

    python -m tests.benchmarks.architectures.survey                             the whole survey, docs/architectures.md
    python -m tests.benchmarks.architectures.survey --types gpt2,mixtral --grids x2,x2y2z2
    python -m tests.benchmarks.architectures.survey --types gpt2 --update       its line of the page
    python -m tests.benchmarks.architectures.survey --grids z2c2                the page's section on divided rows
    python -m tests.benchmarks.architectures.survey --grids z2c2keys            the same where keys are gathered

Loss and all gradients are compared in float64. One row a model type: how it was cut and why, how many of its
parameters are divided among the ranks, and the largest relative error (tests/helpers/float64.py) over the grids. On
grids with context some types are refused, which is not wrong. The exit code is 1 if any type is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import os
import pickle
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from hf_axonn import Grid, parallelize, sync_gradients
from hf_axonn.architectures.plan import ShardingPlan, is_per_token_experts, plan_for
from hf_axonn.cli.survey import GRIDS
from hf_axonn.config import AxonnConfig
from hf_axonn.layers.moe import is_experts
from hf_axonn.parallel.context_parallel import choose_rows
from tests.benchmarks.architectures.survey_table import HEADER, Row, markdown, summary, update_page, write_page
from tests.benchmarks.architectures.tiny_configs import MODEL_TYPES, UNTRAINABLE, tiny_batch, tiny_model
from tests.helpers import ROOT
from tests.helpers.equality import exact, mean_over_world, model_loss, rows_of
from tests.helpers.float64 import relative_errors
from tests.helpers.ranks import run_ranks


OF_CONTEXT = {  # surveyed by themselves: many types are refused there
    "z2c2": AxonnConfig(grid=Grid(z=2, context=2)),
    "z2c2keys": AxonnConfig(grid=Grid(z=2, context=2), context_attention="keys"),
}
EVERY_GRID = {name: AxonnConfig(grid=grid) for name, grid in GRIDS.items()} | OF_CONTEXT
BOUND = 1e-10
TOGETHER = 24  # model types that are held at once
SECONDS_A_TYPE = 120  # on one grid; ranks that take longer wait for one another for ever


@dataclass
class Specimen:
    """One model type: its model, a global batch, and loss and gradients of one process."""

    row: Row
    model: nn.Module
    batch: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]


@dataclass
class Finding:
    """What one rank found of one type on one grid."""

    planned: bool
    part: bool
    whole: int
    how: str
    sharded: int
    replicated: int
    loss_error: float
    errors: dict[str, float]


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """`exact`, and constants that models make in the default dtype are float64 too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with exact():
            yield
    finally:
        torch.set_default_dtype(before)


def prepare(model_type: str) -> Specimen | Row:
    """The specimen of a type, or the row that says why there is none."""
    row = Row(model_type, impossible=UNTRAINABLE.get(model_type, ""))
    if row.impossible:
        return row
    try:
        model = tiny_model(model_type)
        row.class_name = type(model).__name__
        batch = tiny_batch(model)
        trained = copy.deepcopy(model)
        with in_float64():
            loss = model_loss(trained, batch, 1)
            loss.backward()
        gradients = {name: weight.grad for name, weight in trained.named_parameters() if weight.grad is not None}
        if not all(bool(grad.isfinite().all()) for grad in gradients.values()):
            raise ArithmeticError("gradients of one process are not finite")
        return Specimen(row, model, batch, loss.detach(), gradients)
    except Exception as error:  # any class may fail in a way of its own, the others go on
        row.impossible = one_line(error)
        return row


def one_line(error: BaseException | str) -> str:
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    text = re.sub(r"\s+", " ", text).strip().split(". ")[0]
    return text if len(text) <= 160 else text[:157] + "..."


def divides_both(model: nn.Module, plan: ShardingPlan) -> bool:
    """Return whether attention or mixers, and MLPs or experts, are blocks in some layers of a plan; of Mamba, which
    has nothing but mixers, whether these are."""
    kinds = {block.is_attention or block.mixer is not None for block in plan.blocks}
    layers = [model.get_submodule(name) for name in plan.layers]
    if any(is_experts(module) or is_per_token_experts(module) for layer in layers for module in layer.modules()):
        kinds.add(False)
    return kinds == {True, False} or (
        bool(plan.blocks) and all(block.mixer for block in plan.blocks) and not plan.full_sequence
    )


def examine(specimen: Specimen, config: AxonnConfig) -> Finding:
    """Parallelize a specimen on this rank and compare; runs on every rank."""
    grid = config.grid
    plan = plan_for(specimen.model, divided_rows=grid.context > 1)
    part = plan.reason is None and not divides_both(specimen.model, plan)
    model, report = parallelize(specimen.model, config=config)
    mesh = model.axonn.grid_mesh
    with in_float64():
        loss = model_loss(model, rows_of(specimen.batch, grid, mesh.rank), grid.dp_size)
        loss.backward()
    sync_gradients(model)
    ours = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    if ours.keys() != specimen.gradients.keys():
        raise AssertionError(f"gradients of {sorted(ours.keys() ^ specimen.gradients.keys())[:3]} on one side only")
    assert all(isinstance(gradient, DTensor) for gradient in ours.values())
    sizes = {True: 0, False: 0}
    for entry in report.entries:
        sizes[entry.kind == "replicated"] += entry.parameters
    return Finding(
        planned=plan.reason is None,
        part=part,
        whole=len(plan.full_sequence),
        how=report.summary,
        sharded=sizes[False],
        replicated=sizes[True],
        loss_error=float((mean_over_world(loss) - specimen.loss).abs() / specimen.loss.abs()),
        errors=relative_errors(ours, specimen.gradients),
    )


def examine_all(specimens: list[Specimen], config: AxonnConfig, folder: str) -> None:
    """Each specimen in turn; the first failure ends the rank. Leaves a file for each finding in `folder`."""
    rank = os.environ["RANK"]
    for index, specimen in enumerate(specimens):
        with open(f"{folder}/late-{rank}", "w") as late:
            faulthandler.dump_traceback_later(SECONDS_A_TYPE, exit=True, file=late)
            Path(f"{folder}/now-{index}").touch()
            finding = examine(specimen, config)
            faulthandler.cancel_dump_traceback_later()
        with open(f"{folder}/{index}-{rank}.part", "wb") as file:
            pickle.dump(finding, file)
        os.replace(file.name, file.name.removesuffix(".part"))


def is_refused(specimen: Specimen, config: AxonnConfig) -> bool:
    """Return whether the rows of a model cannot be divided over the context of a grid; its row then has the reason."""
    try:
        plan = plan_for(specimen.model, divided_rows=config.grid.context > 1)
        choose_rows(specimen.model, plan, config)
    except ValueError as error:
        specimen.row.refused = _reason(str(error), config)
    return bool(specimen.row.refused)


def _reason(message: str, config: AxonnConfig) -> str:
    """Return the reason of a refusal, without the grid before it and the remedy after it."""
    _, _, reason = message.rpartition(f"{config.grid}: ")
    return reason.partition(". Omit context")[0].removesuffix(".")


def survey_grid(specimens: list[Specimen], name: str) -> None:
    """Fill in the rows of all specimens for one grid. One launch of ranks, and one more for each that fails."""
    compare(possible(specimens, name), name)


def possible(specimens: list[Specimen], name: str) -> list[Specimen]:
    """Return those that one grid does not refuse, which it notes of the others. Not beside a launch of ranks: planning
    tries modules, whose parameters are not themselves meanwhile."""
    return [specimen for specimen in specimens if not is_refused(specimen, EVERY_GRID[name])]


def compare(left: list[Specimen], name: str) -> None:
    """Fill in the rows of specimens that one grid does not refuse."""
    config, size = EVERY_GRID[name], EVERY_GRID[name].grid.size
    while left:
        problem = None
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_ranks(examine_all, size, left, config, folder, timeout=SECONDS_A_TYPE * (len(left) + 1))
            except AssertionError as error:
                problem = str(error)
            done = 0
            while done < len(left) and all(Path(f"{folder}/{done}-{rank}").exists() for rank in range(size)):
                record(left[done].row, name, [_load(f"{folder}/{done}-{rank}") for rank in range(size)])
                done += 1
            if problem is None:
                assert done == len(left), "a rank ended well without its findings"
                return
            hung = any(path.stat().st_size for path in Path(folder).glob("late-*"))
        cause = "hangs" if hung and "Error" not in problem else one_line(_cause(problem))
        kind, _, message = cause.partition(": ")
        if kind == "ValueError" and re.search("divided over context|context divides", message):  # a call is refused
            left[done].row.refused = _reason(message, config)
        else:
            left[done].row.failures[name] = cause
        if os.environ.get("SURVEY_DEBUG"):
            print(left[done].row.model_type, name, problem, file=sys.stderr)
        left = left[done + 1 :]


def _load(path: str) -> Finding:
    with open(path, "rb") as file:
        return pickle.load(file)


def _cause(problem: str) -> str:
    """What the first traceback ends with, of a rank that did not only lose the others."""
    lines = [line for line in problem.splitlines() if re.match(r"\w[\w.]*(Error|Exception|Interrupt)\b", line)]
    return min(lines, key=lambda line: "gloo" in line, default=problem.strip().splitlines()[-1])


def record(row: Row, grid: str, findings: list[Finding]) -> None:
    """Put what all ranks found into the row."""
    first = findings[0]
    row.planned, row.part, row.whole, row.how = first.planned, first.part, first.whole, first.how
    row.sharded, row.replicated = first.sharded, first.replicated
    worst = {name: max(finding.errors[name] for finding in findings) for name in first.errors}
    name = max(worst, key=lambda name: (worst[name] != worst[name], worst[name]))  # a NaN is the worst
    row.errors[grid] = [(max(finding.loss_error for finding in findings), "loss"), (worst[name], name)]


def survey(types: list[str], grids: list[str], *, jobs: int = 1) -> Iterator[list[Row]]:
    """Rows of the given types, some at a time, as they are done."""
    with ThreadPoolExecutor(jobs) as pool:
        for begin in range(0, len(types), TOGETHER):
            prepared = [prepare(model_type) for model_type in types[begin : begin + TOGETHER]]
            specimens = [item for item in prepared if isinstance(item, Specimen)]
            planned = [(possible(specimens, name), name) for name in grids]  # all of them before the first launch
            for future in [pool.submit(compare, *each) for each in planned]:
                future.result()
            yield [item.row if isinstance(item, Specimen) else item for item in prepared]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default=",".join(MODEL_TYPES), help="model types, separated by commas")
    parser.add_argument("--grids", default=",".join(GRIDS), help=f"any of {','.join(EVERY_GRID)}")
    parser.add_argument(
        "--out", type=Path, help="Markdown file to write; docs/architectures.md if all types are surveyed"
    )
    parser.add_argument(
        "--update", action="store_true", help="replace the lines of the types in docs/architectures.md"
    )
    parser.add_argument("--jobs", type=int, default=1, help="grids that run at the same time")
    args = parser.parse_args()
    types, grids = args.types.split(","), args.grids.split(",")
    for wrong in [*(set(types) - set(MODEL_TYPES)), *(set(grids) - set(EVERY_GRID))]:
        parser.error(
            f"{wrong} is not a model type or grid: types are those of AutoModelForCausalLM, {', '.join(EVERY_GRID)}"
        )
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    start = time.monotonic()
    rows: list[Row] = []
    print(HEADER)
    for some in survey(types, grids, jobs=args.jobs):
        for row in some:
            print(row.line(BOUND), flush=True)
        rows += some
    seconds = time.monotonic() - start
    print(summary(rows, BOUND), f"({seconds:.0f} s)")
    if args.out:
        args.out.write_text(markdown(rows, grids, BOUND, seconds))
    elif args.update:
        update_page(ROOT / "docs/architectures.md", rows, BOUND)
    elif types == list(MODEL_TYPES) and grids in (list(GRIDS), ["z2c2"]):
        write_page(ROOT / "docs/architectures.md", rows, grids, BOUND, seconds)
    return int(any(row.verdict(BOUND) == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
