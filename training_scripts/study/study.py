"""Memorization over the size of models and the repetition of documents, with the ordinary and the goldfish loss.

    hf-axonn study cpu.yaml --dry-run
    hf-axonn study cpu.yaml --minutes 150

makes from one file, a recipe, a directed list of steps (texts and tokens, base models, a pilot, continuations that are
asked at their end, what it costs in utility, a report) and does what is missing. A step that is done is skipped, one
that was interrupted goes on, one that fails loses only those that read what it makes. The second call goes on where
the first ended.

Exit codes: 0 all is done, 1 a step failed, 2 nothing was started (the message says why), 3 --minutes ended before.
"""

import argparse
import math
import signal
import sys
from pathlib import Path

from hf_axonn.compat.arguments import Parser
from hf_axonn_scripts.demo.pipeline import Stamps
from hf_axonn_scripts.study.recipe.definition import Recipe
from hf_axonn_scripts.study.recipe.reader import read_recipe
from hf_axonn_scripts.study.recipe.steps import steps_of
from hf_axonn_scripts.study.running import local, slurm
from hf_axonn_scripts.study.running.checks import check_processes, prepare
from hf_axonn_scripts.study.running.listing import dry_run, status
from hf_axonn_scripts.study.running.work import NotReady, begin, do_step, end, fail, hold_step


RECIPES = Path(__file__).resolve().parent / "recipes"
# Options that say what to do, and those that have an effect beside each; without any, the steps are done here.
HERE = ("minutes", "only", "again")
BESIDE: dict[str, tuple[str, ...]] = {
    "plans": (),
    "dry_run": ("all",),
    "status": (),
    "step": ("begin", "end", "failed"),
    "slurm": ("only", "again", "submit", "gpus_per_node", "hours", "sbatch"),
}


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for; return the exit code."""
    options, program = parse(arguments), Path(sys.argv[0]).name
    try:
        return study(options)
    except NotReady as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1 if options.step else 2
    except (ValueError, OSError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted; the same command goes on", file=sys.stderr)
        return 130


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a file, or the name of one in training_scripts/study/recipes")
    parser.add_argument("--output", type=Path, help="directory for all files (default: runs/study/NAME)")
    parser.add_argument("--minutes", type=float, help="begin no step that is not predicted to end in this time")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="steps to do; may have * and ?")
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME", help="do these steps from the start again")
    look = parser.add_argument_group("to look")
    look.add_argument("--dry-run", action="store_true", help="print steps, FLOPs, time and disk; do nothing")
    look.add_argument("--all", action="store_true", help="with --dry-run: one line for each step")
    look.add_argument("--status", action="store_true", help="print what is done, what failed, and the time left")
    look.add_argument("--plans", nargs="+", metavar="MACHINE", help="print the planner's grids and GPU hours there")
    cluster = parser.add_argument_group("on a cluster", "docs/clusters.md has the environment")
    cluster.add_argument("--slurm", choices=slurm.SITES, help="write a batch script for each array, and submit.sh")
    cluster.add_argument("--submit", action="store_true", help="with --slurm: run submit.sh")
    cluster.add_argument("--gpus-per-node", type=int, help="with --slurm cluster: processes of a node")
    cluster.add_argument("--hours", type=float, help="with --slurm: longest time a job may ask for")
    cluster.add_argument(
        "--sbatch", nargs=argparse.REMAINDER, default=[], help="with --slurm, last: options of sbatch, such as -A NAME"
    )
    task = parser.add_argument_group("one step, as a task of an array does it")
    task.add_argument("--step", metavar="NAME", help="do this step alone, beside others that do theirs")
    task.add_argument("--begin", action="store_true", help="with --step: only mark it as begun")
    task.add_argument("--end", action="store_true", help="with --step: only mark it as done")
    task.add_argument("--failed", type=int, metavar="CODE", help="with --step: only note that it failed")
    return parser.parse_args(arguments)


def study(options: argparse.Namespace) -> int:
    """Make a study, or look at it; return the exit code."""
    check_options(options)
    recipe = read_recipe(find(options.recipe))
    output = options.output or Path("runs/study") / recipe.name
    steps = steps_of(recipe, output)
    if options.plans:
        from hf_axonn_scripts.study.recipe.planning import plans_markdown

        print(plans_markdown(recipe, options.plans))
        return 0
    if options.dry_run:
        print(dry_run(recipe, output, every=options.all))
        return 0
    if options.status:
        print(status(recipe, output))
        return 0
    if options.step:
        return one_step(recipe, output, options)
    chosen = local.choose_steps(steps, options.only)
    slurm.check_queue(output)
    if not options.slurm:
        check_processes(recipe, chosen)
    prepare(recipe, output, chosen)
    if options.again:
        print(f"to be done again: {', '.join(local.again(recipe, output, options.again))}")
    if options.slurm:
        return slurm.main(recipe, output, chosen, options)
    signal.signal(signal.SIGTERM, interrupt)
    return local.run(recipe, output, minutes=options.minutes, only=options.only)


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError where a number is out of range, or an option has no effect beside another or without one."""
    for name in ("minutes", "hours", "gpus_per_node"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{_word(name)} is {value}: give a number above 0")
    given = [
        name
        for name, value in vars(options).items()
        if name not in ("recipe", "output") and value is not None and value is not False and value != []
    ]
    chosen = [name for name in BESIDE if name in given]
    if len(chosen) > 1:
        raise ValueError(f"{_word(chosen[1])} stands in place of {_word(chosen[0])}: leave one of them out")
    for name in given:
        if name not in chosen and name not in (BESIDE[chosen[0]] if chosen else HERE):
            needed = [_word(other) for other, names in BESIDE.items() if name in names]
            beside = f"beside {_word(chosen[0])}" if chosen else f"without {' or '.join(needed)}"
            raise ValueError(f"{_word(name)} has no effect {beside}: leave it out")


def _word(name: str) -> str:
    """Return an option as it is typed."""
    return f"--{name.replace('_', '-')}"


def interrupt(*_: object) -> None:
    """End the step's program as well. Not by SIGINT, which is ignored where a shell started this in the background.

    Raises:
        KeyboardInterrupt: always.
    """
    raise KeyboardInterrupt


def find(name: str) -> Path:
    """Return the file of a recipe.

    Raises:
        ValueError: there is none of that name.
    """
    for path in (Path(name), RECIPES / name, RECIPES / f"{name}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.name for path in RECIPES.glob("*.yaml")))
    raise ValueError(f"{name} is no file and none of the recipes that come with the study: {known}")


def one_step(recipe: Recipe, output: Path, options: argparse.Namespace) -> int:
    """Do a step, or mark it as begun or done where a batch script starts its program."""
    steps = {step.name: step for step in steps_of(recipe, output)}
    if options.step not in steps:
        raise ValueError(f"no step is called {options.step}: --dry-run --all lists the names")
    stamps = Stamps(output.resolve())
    if options.begin:
        with hold_step(stamps, options.step):
            if not begin(steps[options.step], steps, stamps):
                print(f"{options.step} is done")
    elif options.end:
        end(steps[options.step], steps, stamps)
    elif options.failed is not None:
        fail(steps[options.step], stamps, f"ended with code {options.failed}")
    elif not do_step(recipe, output, options.step):
        print(f"{options.step} is done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
