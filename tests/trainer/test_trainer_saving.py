"""What a Trainer on a grid leaves on disk, whatever happens while it saves, and from what it goes on."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch

from hf_axonn import AxonnPlugin, Grid
from hf_axonn.checkpoint import run_folder
from hf_axonn.checkpoint.manifest import MANIFEST, STAGE, check_complete
from hf_axonn.checkpoint.save import SaveError
from hf_axonn.checkpoint.sharded import load_sharded
from hf_axonn.distributed.collectives import world_rank
from hf_axonn.trainer.saving import rotate
from tests.helpers.crashes import die_at, run_to_the_end
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer, numbers, worst_difference


GRID = Grid(z=2)
SLOW = pytest.mark.slow
MODEL = tiny_model("smollm2", dtype=torch.float32, num_hidden_layers=1)  # before the ranks are forked


def run(output: Path, *, resume: bool | str | None = None, plugin: dict | None = None, **options):
    """Four steps of stock Trainer in float32, saved at each; options that are not told are of training.py."""
    settings = dict(max_steps=4, save_steps=1, eval_strategy="no", eval_steps=None, **options)
    trainer = make_trainer(
        output,
        GRID,
        model=copy.deepcopy(MODEL),
        stock=True,
        parallelism_config=AxonnPlugin(grid=GRID, **(plugin or {})),
        **settings,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer) -> list[dict]:
    return [entry for entry in numbers(trainer.state.log_history) if "grad_norm" in entry]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "checkpoint" in path.name)


def unbroken(folder: Path) -> list[dict]:
    return losses(run(folder))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, list[dict]]:
    """The folder of a run of four steps, and what it logged."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_ranks(unbroken, 2, folder)[0]


def test_a_checkpoint_has_all_that_a_resume_needs(whole):
    folder, _ = whole
    assert names(folder) == [f"checkpoint-{step}" for step in range(1, 5)]
    manifest = check_complete(folder / "checkpoint-4")
    needed = {"trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth", "training_args.bin"}
    assert needed | {"config.json", "optimizer/values.json"} < set(manifest.files)
    found = {path.relative_to(folder / "checkpoint-4").as_posix() for path in (folder / "checkpoint-4").rglob("*")}
    assert found - {"optimizer"} == {*manifest.files, MANIFEST}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def copied(whole, folder: Path, *, without: tuple[int, ...] = ()) -> tuple[Path, list[dict]]:
    shutil.copytree(whole[0], folder, ignore=lambda _, names: [f"checkpoint-{step}" for step in without])
    return folder, whole[1]


class Warnings(logging.Handler):
    """Collects what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def resumed(folder: Path) -> tuple[list[dict], list[str], str]:
    """Resume as far as it goes; the log, what was warned of, and from what checkpoint it went on."""
    warned = Warnings()
    logging.getLogger("hf_axonn").addHandler(warned)
    started = []
    from hf_axonn.trainer import resume as trainer_resume

    load = trainer_resume.load_model

    def noted(model, path, manifest) -> None:
        started.append(Path(path).name)
        load(model, path, manifest)

    trainer_resume.load_model = noted
    try:
        trainer = run(folder, resume=True)
    finally:
        trainer_resume.load_model = load
        logging.getLogger("hf_axonn").removeHandler(warned)
    return losses(trainer), warned.texts, started[0]


def test_the_newest_complete_checkpoint_is_taken_and_the_broken_are_named(whole, tmp_path):
    """Four: its state is flipped. Three: a rank's random state is missing. Beside them lies what a crash left."""
    folder, history = copied(whole, tmp_path / "run")
    flip(folder / "checkpoint-4" / "trainer_state.json")
    (folder / "checkpoint-3" / "rng_state_1.pth").unlink()
    (folder / f".checkpoint-5{STAGE}").mkdir()
    (folder / f".checkpoint-5{STAGE}" / "half").write_bytes(b"1" * 100)
    (first, warned, start), (_, silent, other) = run_ranks(resumed, 2, folder)
    assert start == other == "checkpoint-2" and not any("skipped" in text for text in silent)
    assert worst_difference(first, history) == 0, "resume gives the bits of the unbroken run"
    text = "\n".join(warned)
    assert "checkpoint-4 is a damaged checkpoint: trainer_state.json has other content" in text
    assert "checkpoint-3 is a damaged checkpoint: rng_state_1.pth is missing" in text
    assert f".checkpoint-5{STAGE} is what an interrupted run left" in text and not list(folder.glob(".check*"))
    check_complete(folder / "checkpoint-4")  # saved anew


def refused(folder: Path, resume: bool | str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(folder, resume=resume)


def test_nothing_is_trained_from_a_damaged_checkpoint(whole, tmp_path):
    folder, _ = copied(whole, tmp_path / "run", without=(1, 2))
    flip(folder / "checkpoint-4" / "optimizer" / "shard-00002-model-00001-of-00001.safetensors")
    run_ranks(refused, 2, folder, str(folder / "checkpoint-4"), "optimizer/shard-00002.* has other content")
    (folder / "checkpoint-3" / MANIFEST).unlink()
    run_ranks(refused, 2, folder, str(folder / "checkpoint-3"), "not a complete checkpoint")
    for wanted in (True, "last"):
        run_ranks(
            refused, 2, folder, wanted, "has no complete checkpoint to resume from; .*checkpoint-4, .*checkpoint-3"
        )
    assert names(folder) == ["checkpoint-3", "checkpoint-4"]


def refused_beside_another(folder: Path) -> str:
    with pytest.raises(ValueError, match="another run trains into .* now.*: end it first, or name another") as refusal:
        run(folder, resume="last")
    return str(refusal.value)


def test_a_second_run_in_the_folder_is_refused_and_the_stage_of_the_first_stays(tmp_path, monkeypatch):
    """The lock is another process's, and goes with it; a file system without such locks lets everyone in."""
    monkeypatch.setattr(run_folder, "HELD", 0.2)
    stage = tmp_path / f".checkpoint-3{STAGE}"
    stage.mkdir()
    with run_folder.hold_folder(tmp_path):
        first, second = run_ranks(refused_beside_another, 2, tmp_path)
        assert first == second and stage.is_dir()
    with run_folder.hold_folder(tmp_path), monkeypatch.context() as patch:
        patch.setattr(run_folder.fcntl, "flock", raise_no_locks)
        with run_folder.hold_folder(tmp_path):
            pass


def raise_no_locks(*_) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_scripts_that_look_themselves_get_the_newest_complete_one(whole, tmp_path):
    from transformers.trainer_utils import get_last_checkpoint

    folder, _ = copied(whole, tmp_path / "run")
    assert get_last_checkpoint(str(folder)) == str(folder / "checkpoint-4")
    (folder / "checkpoint-4" / "scheduler.pt").unlink()
    (folder / "checkpoint-3" / MANIFEST).unlink()
    assert get_last_checkpoint(str(folder)) == str(folder / "checkpoint-2")
    for step in (1, 2):
        (folder / f"checkpoint-{step}" / "config.json").write_text("")
    assert get_last_checkpoint(str(folder)) is None
    (tmp_path / "plain" / "checkpoint-7").mkdir(parents=True)
    assert get_last_checkpoint(str(tmp_path / "plain")) == str(tmp_path / "plain" / "checkpoint-7")


def die_in_save(folder: Path, step: int, victim: int, point: int) -> None:
    """Train, and kill one rank at a file operation of the save of a step."""
    from hf_axonn.trainer import saving as trainer_saving

    begin = trainer_saving.begin_save

    def begin_and_die(model, directory, **options):
        if directory.name == f"checkpoint-{step}" and world_rank() == victim:
            die_at(point)
        return begin(model, directory, **options)

    trainer_saving.begin_save = begin_and_die
    os.environ.update(RANK=str(world_rank()), LOCAL_RANK=str(world_rank()), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    run(folder)


@pytest.mark.parametrize(
    ("victim", "point"), [(0, 22), pytest.param(0, 6, marks=SLOW), pytest.param(1, 3, marks=SLOW)]
)
def test_a_run_that_was_killed_while_it_saved_goes_on(whole, tmp_path, victim, point):
    codes = run_to_the_end(die_in_save, 2, tmp_path, 3, victim, point)
    assert -signal.SIGKILL in codes and "checkpoint-2" in names(tmp_path)
    (history, _, start), _ = run_ranks(resumed, 2, tmp_path)
    assert start in ("checkpoint-2", "checkpoint-3") and worst_difference(history, whole[1]) == 0
    assert names(tmp_path) == [f"checkpoint-{step}" for step in range(1, 5)]


def test_the_last_good_checkpoint_is_never_removed(whole, tmp_path):
    folder, _ = copied(whole, tmp_path / "run")
    (folder / "checkpoint-4" / "config.json").unlink()
    os.utime(folder / "checkpoint-1")  # copied about, so that the times say nothing
    rotate(folder / "checkpoint-3", limit=1, best=None)
    assert names(folder) == ["checkpoint-3", "checkpoint-4"], "the newest complete one, and a broken one to look at"
    rotate(folder / "checkpoint-3", limit=1, best=None)
    assert names(folder) == ["checkpoint-3", "checkpoint-4"]


def limited(folder: Path, background: bool) -> None:
    trainer = run(folder, plugin={"async_save": background}, save_total_limit=2)
    assert trainer.state.global_step == 4


@pytest.mark.parametrize("background", [pytest.param(False, marks=SLOW), True], ids=["foreground", "background"])
def test_save_total_limit(tmp_path, background):
    run_ranks(limited, 2, tmp_path, background)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    for name in names(tmp_path):
        check_complete(tmp_path / name)


def background(folder: Path, reference: Path, history: list[dict]) -> None:
    trainer = run(folder, plugin={"async_save": True})
    assert worst_difference(losses(trainer), history) == 0
    model = trainer.model
    load_sharded(model, reference / "checkpoint-2")


def test_saving_in_the_background_leaves_the_same_files(whole, tmp_path):
    run_ranks(background, 2, tmp_path, *whole)
    for step in range(1, 5):
        ours, theirs = (check_complete(folder / f"checkpoint-{step}").files for folder in (tmp_path, whole[0]))
        assert set(ours) == set(theirs)
        different = {name for name in ours if ours[name] != theirs[name]}
        # Its settings, and the time that each step took.
        assert different <= {"training_args.bin", "trainer_state.json"}, different
    (history, _, start), _ = run_ranks(resumed, 2, tmp_path)
    assert start == "checkpoint-4"


def best_of(folder: Path, background: bool) -> None:
    """The best checkpoint may be the one that is being saved."""
    trainer = run_with_evaluation(folder, background)
    best = trainer.state.best_model_checkpoint
    assert best is not None and Path(best).is_dir()
    state = json.loads(Path(best, "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == best, "the best was the one that was being saved"
    weights = {name: value.to_local().clone() for name, value in trainer.model.named_parameters()}
    load_sharded(trainer.model, best)
    for name, value in trainer.model.named_parameters():
        assert torch.equal(value.to_local(), weights[name])


def run_with_evaluation(folder: Path, background: bool):
    trainer = make_trainer(
        folder,
        GRID,
        model=copy.deepcopy(MODEL),
        stock=True,
        max_steps=4,
        save_steps=1,
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        save_total_limit=1,
        parallelism_config=AxonnPlugin(grid=GRID, async_save=background),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("background", [pytest.param(False, marks=SLOW), True], ids=["foreground", "background"])
def test_load_best_model_at_end(tmp_path, background):
    run_ranks(best_of, 2, tmp_path, background)


def on_a_full_disk(folder: Path, reaction: str, background: bool, history: list[dict]) -> str:
    """Rank 1 can write no file of more than 20 kB from the second save on."""
    from hf_axonn.trainer import saving as trainer_saving

    begin, saves = trainer_saving.begin_save, []

    def begin_and_fill(model, directory, **options):
        saves.append(directory.name)
        if world_rank() == 1:
            most = 20_000 if directory.name in ("checkpoint-2", "checkpoint-3") else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        return begin(model, directory, **options)

    trainer_saving.begin_save = begin_and_fill
    warned = Warnings()
    logging.getLogger("hf_axonn").addHandler(warned)
    settings = {"async_save": background, "save_failure": reaction}
    if reaction == "stop":
        with pytest.raises(SaveError, match="checkpoint-2 was not saved: rank 1: OSError: .*File too large"):
            run(folder, plugin=settings)
        return ""
    trainer = run(folder, plugin=settings, save_total_limit=2)
    assert worst_difference(losses(trainer), history) == 0 and saves == [f"checkpoint-{step}" for step in range(1, 5)]
    return "\n".join(warned.texts)


@pytest.mark.parametrize("background", [pytest.param(False, marks=SLOW), True], ids=["foreground", "background"])
def test_a_full_disk_stops_training_or_not_as_configured(whole, tmp_path, background):
    run_ranks(on_a_full_disk, 2, tmp_path / "stop", "stop", background, whole[1])
    assert names(tmp_path / "stop") == ["checkpoint-1"]
    check_complete(tmp_path / "stop" / "checkpoint-1")
    text, _ = run_ranks(on_a_full_disk, 2, tmp_path / "on", "continue", background, whole[1])
    assert "checkpoint-2 was not saved" in text and "checkpoint-3 was not saved" in text and "Training goes on" in text
    assert names(tmp_path / "on") == ["checkpoint-1", "checkpoint-4"]
    for name in names(tmp_path / "on"):
        check_complete(tmp_path / "on" / name)
