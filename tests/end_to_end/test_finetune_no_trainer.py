"""training_scripts/finetune_no_trainer.py, alone and on a grid; slow: as a user starts it, by `accelerate launch`.

The quick test starts it in forks of this process. A quick launch, of another script, is in test_end_to_end.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_axonn import Grid
from tests.helpers import ROOT
from tests.helpers.eval_support import documents, tiny_llama, topics_tokenizer
from tests.helpers.event_files import scalars
from tests.helpers.launching import Ended, assert_quiet, forked, launch


SCRIPT = ROOT / "training_scripts" / "finetune_no_trainer.py"
STEPS = 5
# float32 on both sides: rounding of 6e-8 grows to a few 1e-6 in some AdamW steps at this rate.
TOLERANCE = 1e-4


def inputs(folder: Path) -> None:
    """A tiny model with its tokenizer, and documents of one row each, all of one length."""
    tiny_llama().save_pretrained(folder / "model")
    tokenizer = topics_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    words = [tokenizer(document["text"], add_special_tokens=False)["input_ids"] for document in documents()]
    rows = [{"input_ids": [0, *its[start : start + 31]]} for its in words for start in (0, 31, 62, 93)]
    rows = [row for row in rows if len(row["input_ids"]) == 32][: 8 * STEPS]
    assert len(rows) == 8 * STEPS
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(folder: Path, output: str, rows: int, *more: str) -> list[str]:
    """8 rows a step, of which each position takes `rows`."""
    settings = dict(
        model=folder / "model",
        data=folder / "rows.jsonl",
        output_dir=folder / output,
        sequence_length=32,
        batch_size=rows,
        learning_rate=1e-3,
        save_every=3,
        log_with="tensorboard",
    )
    return [str(SCRIPT), *(f"--{name}={value}" for name, value in settings.items()), *more]


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every scalar in the one event file of a folder, which tensorboard would show."""
    (path,) = (path for path in folder.rglob("events.out.tfevents.*") if path.parent.name == "finetune")
    return scalars(path.parent)


def printed(ended: Ended) -> list[str]:
    return [line for line in ended.output.splitlines() if line.startswith("step ")]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> tuple[Path, dict, list[str]]:
    """Its folder, what it logged, and what it printed."""
    folder = tmp_path_factory.mktemp("loop")
    inputs(folder)
    ended = forked(folder, None, *arguments(folder, "one", 8))
    assert_quiet(ended)
    return folder, logged(folder / "one"), printed(ended)


@pytest.mark.parametrize(
    ("grid", "start"),
    [
        (Grid(z=2), forked),
        pytest.param(Grid(z=2), launch, marks=pytest.mark.slow),
        pytest.param(Grid(data=2, y=2), launch, marks=pytest.mark.slow),
    ],
    ids=lambda its: getattr(its, "__name__", str(its)),
)
def test_it_logs_once_what_one_process_logs_and_ends_quietly(one_process, grid, start):
    folder, truth, lines = one_process
    output = f"{start.__name__}-on-{grid}"
    ended = start(folder, grid, *arguments(folder, output, 8 // grid.dp_size))
    assert_quiet(ended)  # it ends its process group by `end_training`
    found = logged(folder / output)
    assert found.keys() == truth.keys() == {"loss", "rate"}
    for name, values in truth.items():
        assert [step for step, _ in found[name]] == [step for step, _ in values] == list(range(1, STEPS + 1))
        differences = [abs(own - true) for (_, own), (_, true) in zip(found[name], values, strict=True)]
        assert max(differences) < TOLERANCE, (name, differences)
    assert truth["loss"][-1][1] < truth["loss"][0][1]
    assert len(printed(ended)) == len(lines) == STEPS, "printed by the main process alone"
    state = folder / output / "checkpoints" / "checkpoint_0" / "axonn_checkpoint.json"
    assert state.is_file() and (folder / output / "model.safetensors").is_file()


@pytest.mark.slow
def test_it_goes_on_on_another_grid(one_process):
    """From the state of step 3, here of the whole run: only the steps after it are done again."""
    folder, truth, _ = one_process
    assert_quiet(launch(folder, Grid(z=2), *arguments(folder, "moved", 4)))
    (folder / "moved" / "finetune").rename(folder / "moved" / "before")
    ended = launch(folder, Grid(data=2, x=2), *arguments(folder, "moved", 4, "--resume"))
    assert_quiet(ended)
    again = logged(folder / "moved")["loss"]
    assert [step for step, _ in again] == [4, 5]
    assert max(abs(own - true) for (_, own), (_, true) in zip(again, truth["loss"][3:], strict=True)) < TOLERANCE
