"""Do the work of one step of a study, in one process or on every rank of a launch.

    python -m hf_axonn_scripts.study.running.program RECIPE OUTPUT STEP
    accelerate launch --config GRID.yaml -m hf_axonn_scripts.study.running.program RECIPE OUTPUT STEP

A call that was killed continues where it was if it is made again, on the same or on another grid. It neither looks
whether the step is done nor writes its stamp: that is for work.py, which starts it.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hf_axonn.compat.arguments import Parser
from hf_axonn_scripts import is_first
from hf_axonn_scripts.study.recipe.definition import ORDINARY, Recipe
from hf_axonn_scripts.study.recipe.reader import read_recipe
from hf_axonn_scripts.study.recipe.steps import Step, steps_of, tokenizer_of


AFTER_FIRST = 1.0  # seconds: when a rank has ended, the launcher ends the others, and the first has the word


def main(argv: Sequence[str] | None = None) -> None:
    """Do the step that the command line names."""
    parser = Parser(prog="program.py", description="Do the work of one step of a study.")
    for word in ("recipe", "output", "step"):
        parser.add_argument(word)
    path, folder, name = vars(parser.parse_args(argv)).values()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        recipe, output = read_recipe(path), Path(folder).resolve()
        steps = {step.name: step for step in steps_of(recipe, output)}
        if name not in steps:
            raise ValueError(f"{path} has no step {name!r}: hf-axonn study {path} --dry-run --all lists the names")
        if steps[name].kind in ("data", "report"):
            write_files(recipe, output, steps[name])
        else:
            use_model(recipe, output, steps[name])
    except ValueError as error:
        if is_first():
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(AFTER_FIRST)
        raise SystemExit(2) from error


def write_files(recipe: Recipe, output: Path, step: Step) -> None:
    """Do a step of kind `data` or `report`, on one process."""
    if step.name == "texts":
        from hf_axonn_scripts.study.data.texts import write_texts

        write_texts(recipe, output)
    elif step.name == "tokenizer":
        from hf_axonn_scripts.study.data.texts import train_tokenizer

        train_tokenizer(recipe, output)
    elif step.kind == "data":
        from hf_axonn_scripts.study.data.passages import write_data

        write_data(recipe, output, tokenizer_of(recipe.model(step.model)) if step.model else "study")
    else:
        from hf_axonn_scripts.study.report.page import write_report

        write_report(recipe, output)


def use_model(recipe: Recipe, output: Path, step: Step) -> None:
    """Train, ask or measure a model, on every rank; print the seconds that the parts took."""
    from transformers.utils import logging

    from hf_axonn_scripts.demo import inputs
    from hf_axonn_scripts.study.findings.utility import measure
    from hf_axonn_scripts.study.training.pilot import run_pilot
    from hf_axonn_scripts.study.training.train import Work, ask_base, continue_base, train_base

    name = step.model
    assert name is not None, "a step that uses a model has one"
    logging.disable_progress_bar()
    if step.kind == "base" and recipe.model(name).config is None:
        inputs.install_model_package()
        inputs.convert_model(output / "base" / name)
        return
    work = Work(recipe, output, name)
    if step.kind == "base":
        train_base(work, step.loss or ORDINARY)
    elif step.kind == "pilot":
        run_pilot(work)
    elif step.kind == "ask":
        ask_base(work)
    elif step.run is not None:
        continue_base(work, step.run)
    else:
        measure(recipe, output, name, grid=work.grid)
        work.clock.lap("measure")
    if is_first():
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in work.clock.seconds.items())
        print(f"{step.name}: {parts}", flush=True)


if __name__ == "__main__":
    main()
