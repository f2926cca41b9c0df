"""Scripts of other projects, unmodified, over grids: the numbers that they print, beside those of stock Accelerate.

    OMP_NUM_THREADS=1 python -m tests.end_to_end.other_scripts ACCELERATE PEFT LANGUAGE_MODELING [--only NAME ...]

ACCELERATE and PEFT are checkouts of their repositories, LANGUAGE_MODELING is the folder
examples/pytorch/language-modeling of that of Transformers; TRL's script is that of the installed package. A grid is
compared with stock Accelerate on data * z processes: each rank of x and y has the samples of one of them. Models and
data are those of stand_ins.py. It prints the table of docs/accelerate.md and exits with 1 if a number differs by more
than 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import trl

from hf_axonn import Grid
from tests.end_to_end.stand_ins import DECODER, make_stand_ins
from tests.helpers.launching import TORCHRUN, Ended, launch, run


GRIDS = [Grid(data=2), Grid(x=2), Grid(z=2), Grid(y=2), Grid(z=2, x=2)]
TOLERANCE = 1e-4
KILLED = -9
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])")
# How a run that raised tells why: the watchdog's line, or the last line of a traceback.
CAUSE = re.compile(r"^(?:hf_axonn: the run ends: .* raised .*?: )?(\w*Error: .+)$", re.MULTILINE)
SFT = f"--model_name_or_path {DECODER} --dataset_name trl-lib/Capybara --use_cpu --bf16 false --max_length 64 "
SFT += "--max_steps 4 --logging_steps 1 --eval_strategy steps --eval_steps 2 --save_steps 4 --learning_rate 1e-3 "
SFT += "--per_device_train_batch_size 4 --report_to none --output_dir sft"

CLM = f"--model_name_or_path {DECODER} --dataset_name Salesforce/wikitext --dataset_config_name wikitext-2-v1 "
CLM += "--block_size 32 --per_device_train_batch_size 4 --num_train_epochs 2 --learning_rate 1e-3 --seed 1 "
CLM += "--output_dir clm"


@dataclass(frozen=True)
class Script:
    """A script with its arguments.

    Attributes:
        log: a file with Trainer's log, which prints four digits only.
        compared: how many of its numbers are.
    """

    name: str
    path: Path
    arguments: str
    log: str = ""
    compared: int | None = None


def scripts(accelerate: Path, peft: Path, language_modeling: Path) -> list[Script]:
    """The rows of the table: of Accelerate all that need no further package, and no engine but its own."""
    features = {
        "gradient_accumulation_for_autoregressive_models": "--gradient_accumulation_steps 2",
        "gradient_accumulation": "--gradient_accumulation_steps 2",
        "automatic_gradient_accumulation": "",
        "checkpointing": "--checkpointing_steps epoch --output_dir states",
        "cross_validation": "--num_folds 2",
        "ddp_comm_hook": "",
        "early_stopping": "",
        "local_sgd": "--local_sgd_steps 4",
        "memory": "",
        "multi_process_metrics": "",
        "profiler": "--output_trace_dir traces",
        "tracking": "--with_tracking --project_dir logs",
    }
    by_feature = accelerate / "examples" / "by_feature"
    # Its second fold is shuffled otherwise: on a grid loaders do not move torch's global generator, which stock
    # accelerate draws from again in between.
    compared = {"cross_validation": 9}
    found = [
        Script(name, by_feature / f"{name}.py", f"--cpu {arguments}", compared=compared.get(name))
        for name, arguments in features.items()
    ]
    sft, log = Path(trl.__file__).parent / "scripts" / "sft.py", "sft/checkpoint-4/trainer_state.json"
    found.append(Script("TRL sft", sft, SFT, log))
    found.append(Script("TRL sft, LoRA", sft, f"{SFT} --use_peft --lora_dropout 0", log))
    train, lora = peft / "examples" / "sft" / "train.py", "--use_peft_lora True --lora_dropout 0"
    found.append(Script("PEFT sft", train, f"{SFT} {lora}", log))
    trainer = "--do_train --do_eval --use_cpu --report_to none --logging_steps 8"
    found.append(Script("run_clm", language_modeling / "run_clm.py", f"{CLM} {trainer}", "clm/trainer_state.json"))
    return [*found, Script("run_clm_no_trainer", language_modeling / "run_clm_no_trainer.py", CLM)]


def numbers(folder: Path, script: Script, ended: Ended) -> list[float]:
    """What a run says of its training, without times."""
    if script.log:
        rows = json.loads((folder / script.log).read_text())["log_history"]
        timed = ("runtime", "per_second")
        return [value for row in rows for key, value in row.items() if not key.endswith(timed)]
    lines = re.findall(r"^(?:.* - INFO - __main__ - \[RANK 0\] )?((?:epoch|Average).*)$", ended.output, re.MULTILINE)
    return [float(number) for line in lines for number in NUMBER.findall(line)]


def start(folder: Path, script: Script, grid: Grid | None, processes: int = 1) -> list[float] | str:
    """The numbers of a script over a grid, or of stock Accelerate on some processes; or why it ended."""
    (folder / script.log).unlink(missing_ok=True) if script.log else None
    command = [script.path, *shlex.split(script.arguments)]
    if grid is not None:
        ended = launch(folder, grid, *command, timeout=900)
    else:
        for _ in range(3):  # stock Accelerate on two processes has hung at its end, when all was saved
            ended = run(folder, *([*TORCHRUN, "--nproc-per-node", processes] if processes > 1 else []), *command)
            if ended.code != KILLED:
                break
    if ended.code == 0:
        return numbers(folder, script, ended)
    causes = CAUSE.findall(ended.output)
    return causes[0] if causes else f"code {ended.code}: {ended.output[-1000:]}"


def compare(found: list[float] | str, stock: list[float] | str, compared: int | None) -> tuple[bool, str]:
    """Whether a run is well, and its cell: the largest difference, relative to the stock number."""
    if isinstance(found, str):
        refused = found.startswith(("ValueError: ", "RuntimeError: "))  # whether it is a sentence, its reader sees
        return refused, found if refused else f"FAILS: {found}"
    if isinstance(stock, str) or len(found) != len(stock) or not stock:
        return False, f"FAILS: {len(found)} numbers, stock: {stock if isinstance(stock, str) else len(stock)}"
    pairs = list(zip(found, stock, strict=True))[:compared]
    worst = max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)
    return worst <= TOLERANCE, f"{'' if worst <= TOLERANCE else 'FAILS: '}{worst:.0e}" if worst else "equal"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("accelerate", type=Path)
    parser.add_argument("peft", type=Path)
    parser.add_argument("language_modeling", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="names of rows")
    arguments = parser.parse_args()
    os.environ.update(ACCELERATE_USE_CPU="true", HF_DATASETS_OFFLINE="1", HF_EVALUATE_OFFLINE="1")
    refusals: list[str] = []
    well = True
    print("| script | numbers | " + " | ".join(map(str, GRIDS)) + " |")
    print("| --- | --: |" + " --- |" * len(GRIDS), flush=True)
    folders = (arguments.accelerate, arguments.peft, arguments.language_modeling)
    for script in scripts(*(folder.resolve() for folder in folders)):
        if arguments.only and script.name not in arguments.only:
            continue
        cells = []
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            make_stand_ins(folder)
            stock = {processes: start(folder, script, None, processes) for processes in (1, 2)}
            for grid in GRIDS:
                fine, cell = compare(start(folder, script, grid), stock[grid.dp_size], script.compared)
                well &= fine
                if fine and "Error: " in cell:
                    if cell not in refusals:
                        refusals.append(cell)
                    cell = f"refused ({refusals.index(cell) + 1})"
                cells.append(cell)
        size = len(stock[1][: script.compared]) if isinstance(stock[1], list) else f"FAILS: {stock[1]}"
        print(f"| {script.name} | {size} | " + " | ".join(cells) + " |", flush=True)
    print()
    for index, refusal in enumerate(refusals, start=1):
        print(f"{index}. {refusal}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
