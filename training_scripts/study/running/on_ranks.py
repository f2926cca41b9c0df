"""What every rank of a launch does for a step of a study.

    accelerate launch --config GRID.yaml -m hf_axonn_scripts.study.running.on_ranks WHAT

where WHAT is one of

    base --recipe FILE --output DIR --model NAME [--loss LOSS]
    pilot --recipe FILE --output DIR --model NAME
    ask --recipe FILE --output DIR --model NAME
    run --recipe FILE --output DIR --model NAME --run LOSS-sSEED
    utility --recipe FILE --output DIR --model NAME

One process does without a launcher. A call that was killed goes on where it was if it is made again, on the same or on
another grid; one that is done does nothing. Each prints the seconds that its parts took.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from transformers.utils import logging

from hf_axonn_scripts.study.findings.utility import measure
from hf_axonn_scripts.study.recipe.definition import ORDINARY
from hf_axonn_scripts.study.recipe.reader import read_recipe
from hf_axonn_scripts.study.training.pilot import pilot
from hf_axonn_scripts.study.training.train import Work, ask_base, base, run


AFTER_FIRST = 1.0  # seconds: when a rank has ended, the launcher ends the others, and the first has the word


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("base", "pilot", "ask", "run", "utility"), help="what to do")
    parser.add_argument("--recipe", type=Path, required=True, help="the study")
    parser.add_argument("--output", type=Path, required=True, help="directory of the study")
    parser.add_argument("--model", required=True, help="its name in the recipe")
    parser.add_argument("--loss", default=ORDINARY, help="of a base training")
    parser.add_argument("--run", help="name of the continuation, such as k4-s0")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Does one step, on every rank."""
    options = parse(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.disable_progress_bar()
    try:
        recipe = read_recipe(options.recipe)
        if options.model not in {model.name for model in recipe.models}:
            raise ValueError(f"{options.recipe} has no model {options.model!r}")
        work = Work(recipe, options.output.resolve(), options.model)
        if options.what == "base":
            if options.loss not in recipe.losses:
                raise ValueError(f"{options.recipe} has no loss {options.loss!r}")
            base(work, options.loss)
        elif options.what == "pilot":
            pilot(work)
        elif options.what == "ask":
            ask_base(work)
        elif options.what == "utility":
            measure(recipe, work.output, options.model, grid=work.grid)
            work.clock.lap("measure")
        else:
            named = {which.name: which for which in recipe.runs if which.model == options.model}
            if options.run not in named:
                raise ValueError(f"{options.recipe} has no run {options.run!r} of {options.model}: {', '.join(named)}")
            run(work, named[options.run])
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"on_ranks.py {options.what}: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(AFTER_FIRST)
        raise SystemExit(2) from error
    if os.environ.get("RANK", "0") == "0":
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in work.clock.seconds.items())
        print(f"on_ranks.py {options.what} {options.model} {options.run or options.loss}: {parts}", flush=True)


if __name__ == "__main__":
    main()
