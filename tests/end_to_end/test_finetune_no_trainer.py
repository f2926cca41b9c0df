"""training_scripts/finetune_no_trainer.py, alone and on a grid; slow: as a user starts it, by `accelerate launch`.

The quick test starts it in forks of this process. A quick launch, of another script, is in test_end_to_end.py.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_axonn import Grid
from hf_axonn.compat.accelerate import forget_state
from hf_axonn_scripts import finetune_no_trainer
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


def test_a_schedule_ends_with_the_last_step_of_uneven_accumulation(one_process):
    """Five batches an epoch, two in a step: each epoch ends with a step of one batch, and rates fall to 0."""
    folder, _, _ = one_process
    ended = forked(folder, None, *arguments(folder, "uneven", 8, "--accumulation=2", "--epochs=2"))
    assert_quiet(ended)
    assert "steps      6; epochs 2" in ended.output
    rates = [rate for _, rate in logged(folder / "uneven")["rate"]]
    assert len(rates) == 6 and rates == sorted(rates, reverse=True) and rates[-1] == pytest.approx(0, abs=1e-12)


def adapt(folder: Path, name: str, file: str, change: dict) -> Path:
    """Copy the model with changes in a file, which may be new."""
    path = Path(shutil.copytree(folder / "model", folder / name), file)
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **change}))
    return path


def refusal(capsys, folder: Path, *more: str) -> str:
    """The sentence that a run ends with, which has read no weights."""
    forget_state()
    with pytest.raises(SystemExit) as stopped:
        finetune_no_trainer.main([*arguments(folder, "refused", 8)[1:], *more])
    assert stopped.value.code == 2
    name = Path(sys.argv[0]).name
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith(name)]
    return line


def test_what_cannot_be_trained_is_a_sentence_before_weights_are_read(one_process, capsys, monkeypatch):
    folder, _, _ = one_process
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("reads weights"))
    adapt(folder, "adapters", "adapter_config.json", {"base_model_name_or_path": "some/base"})
    adapt(folder, "no_end", "tokenizer_config.json", {"pad_token": None, "eos_token": None})
    adapt(folder, "own", "config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}})
    adapt(folder, "few", "config.json", {"vocab_size": 20})
    for options, message in (
        (["--batch_size=0"], "batch_size is 0: give a whole number of at least 1"),
        (["--accumulation=0"], "accumulation is 0"),
        (["--epochs=0"], "epochs is 0"),
        (["--save_every=0"], "save_every is 0"),
        (["--learning_rate=-1"], "learning_rate is -1.0: give a number above 0"),
        (["--learning_rate=nan"], "learning_rate is nan"),
        (["--log_with=comet_ml"], "log_with is comet_ml, which is not installed: give one of all, "),
        (["--log_with=table"], "log_with is table"),
        (["--held_out=0.1"], "--held_out"),
        (["--sequence_length=1"], "sequence_length is 1"),
        ([f"--data={folder / 'nowhere.jsonl'}"], "nowhere.jsonl is neither a file nor a folder here"),
        (["--model=./nowhere"], "nowhere is neither a folder here, nor a model on the hub"),
        ([f"--model={folder / 'adapters'}"], "(some/base), and --lora_r of finetune.py for new ones"),
        ([f"--model={folder / 'no_end'}"], "neither a padding token nor an end of sequence"),
        ([f"--model={folder / 'own'}"], "own comes with code of its own: read it, and give --trust-remote-code"),
        ([f"--model={folder / 'few'}"], "few ends at 19"),
        ([f"--output_dir={folder / 'rows.jsonl'}"], "cannot be made"),
        ([f"--output_dir={folder / 'adapters'}"], "adapters holds adapters of another run"),
        (
            [f"--output_dir={folder / 'one'}"],
            "one holds states of an earlier run: go on with --resume, or",
        ),
    ):
        assert message in refusal(capsys, folder, *options), options
    forget_state()


@pytest.mark.slow
def test_ranks_end_with_one_sentence(one_process):
    folder, _, _ = one_process
    (folder / "lacking.jsonl").write_text('{"id": "a"}\n')
    ended = launch(folder, Grid(z=2), *arguments(folder, "lacking", 4, f"--data={folder / 'lacking.jsonl'}"))
    assert ended.code == 2 and not ended.left
    assert ended.output.count("lacking.jsonl has no column 'text': give --text_column one of id") == 1
    assert "the run ends" not in ended.output and "Traceback" not in ended.output, ended.output


def test_a_state_whose_batches_have_other_rows_is_refused_and_no_state_is_told(one_process, capsys):
    folder, _, _ = one_process
    shutil.copytree(folder / "one", folder / "changed")
    options = [f"--output_dir={folder / 'changed'}", "--resume", "--batch_size=4"]
    assert "the batches of the state have 8 rows, those of this run 4" in refusal(capsys, folder, *options)
    damaged = folder / "changed" / "checkpoints" / "checkpoint_0" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert "the weights of state 0 are damaged" in refusal(capsys, folder, *options[:-1])
    forget_state()
    torch.manual_seed(0)
    finetune_no_trainer.main([*arguments(folder, "begun", 8)[1:], "--resume"])
    assert f"{folder / 'begun'} has no state: training starts at step 0." in capsys.readouterr().out
    forget_state()
