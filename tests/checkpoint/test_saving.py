"""A save is complete or it is not there: ranks killed at any point, full disks, and saves in the background."""

from __future__ import annotations

import copy
import errno
import functools
import os
import random
import re
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from hf_axonn import (
    GoldfishConfig,
    GoldfishTrainer,
    Grid,
    finish_saves,
    load_sharded,
    parallelize,
    save_sharded,
    sync_gradients,
)
from hf_axonn.checkpoint import save as saving
from hf_axonn.checkpoint import shard_files
from hf_axonn.checkpoint.commit import recover
from hf_axonn.checkpoint.manifest import MANIFEST, STAGE, check_complete, is_sharded_checkpoint
from hf_axonn.checkpoint.save import Save, SaveError
from hf_axonn.checkpoint.sharded import add_model, begin_save
from hf_axonn.cli.main import main
from hf_axonn.distributed.collectives import barrier, world_rank
from hf_axonn.trainer.saving import checkpoints_in, tidy
from tests.helpers.crashes import die_at, run_to_the_end, values_of
from tests.helpers.equality import full
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


GRID = Grid(z=2)
OLD, NEW = 1.0, 2.0  # every weight of a checkpoint has one of these values
MODEL = tiny_model("smollm2", dtype=torch.float32, num_hidden_layers=1)  # before the ranks are forked


def filled(value: float):
    """The model on the grid with one value everywhere, and an optimizer that has stepped."""
    model, _ = parallelize(MODEL, GRID)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model, optimizer


def save_value(value: float, directory: Path, background: bool = False) -> None:
    model, optimizer = filled(value)
    save_sharded(model, directory, optimizer=optimizer, async_save=background)
    finish_saves()
    barrier()


def save_and_die(directory: Path, background: bool, victim: int, point: int, delay: float | None) -> None:
    """Save NEW; rank `victim` dies at its file operation number `point`, or some seconds after the beginning."""
    model, optimizer = filled(NEW)
    barrier()
    if world_rank() == victim:
        if delay is None:
            die_at(point)
        else:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    save_sharded(model, directory, optimizer=optimizer, async_save=background)
    finish_saves()
    barrier()


def count_operations(directory: Path, background: bool, counts) -> None:
    model, optimizer = filled(NEW)
    barrier()
    count = die_at(-1)
    save_sharded(model, directory, optimizer=optimizer, async_save=background)
    finish_saves()
    counts[world_rank()] = count[0]
    barrier()


def value_in(directory: Path) -> float:
    """The one value of all weights of a checkpoint, which also its optimizer is of."""
    values = {float(value) for tensor in values_of(directory).values() for value in tensor.unique()}
    assert len(values) == 1, f"a mixture of two saves: {values}"
    return values.pop()


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    """A folder with the checkpoint that was there before."""
    folder = tmp_path_factory.mktemp("old")
    run_ranks(save_value, 2, OLD, folder / "checkpoint-1")
    assert value_in(folder / "checkpoint-1") == OLD
    return folder


SCENARIOS = [("checkpoint-1", False), ("checkpoint-2", False), ("checkpoint-1", True), ("checkpoint-2", True)]


def kill_points(folder: Path, old: Path, name: str, background: bool) -> list[tuple[int, int]]:
    """Every (rank, file operation) of a save."""
    counts = torch.multiprocessing.get_context("fork").Array("i", 2)
    shutil.copytree(old, folder)
    assert run_to_the_end(count_operations, 2, folder / name, background, counts) == [0, 0]
    return [(rank, point) for rank in range(2) for point in range(counts[rank])]


@pytest.fixture(scope="module")
def points_of(old, tmp_path_factory) -> Callable[[str, bool], list[tuple[int, int]]]:
    """`kill_points` of a save beside or over the old checkpoint, each counted once."""

    @functools.cache
    def points(name: str, background: bool) -> list[tuple[int, int]]:
        return kill_points(tmp_path_factory.mktemp("count") / "run", old, name, background)

    return points


def kill(folder: Path, old: Path, name: str, background: bool, victim: int, point: int) -> float:
    shutil.copytree(old, folder)
    codes = run_to_the_end(save_and_die, 2, folder / name, background, victim, point, None)
    assert -signal.SIGKILL in codes
    return survives(folder, name)


@pytest.mark.parametrize("each", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_killed_at_random_points(old, points_of, tmp_path, each):
    """Whoever is killed and wherever: the newest complete checkpoint is the old one or the new one, and whole."""
    chance, found = random.Random(7), []
    for number, (name, background) in enumerate(SCENARIOS):
        points = points_of(name, background)
        assert len(points) > 20
        for victim, point in chance.sample(points, each):
            folder = tmp_path / f"{number}-{victim}-{point}"
            found.append(kill(folder, old, name, background, victim, point))
    assert len(found) == 4 * each and set(found) == {OLD, NEW}, found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "background"), SCENARIOS)
def test_killed_at_every_file_operation(old, points_of, tmp_path, name, background):
    points = points_of(name, background)
    found = [kill(tmp_path / f"{rank}-{point}", old, name, background, rank, point) for rank, point in points]
    assert set(found) == {OLD, NEW}, found


def survives(folder: Path, name: str) -> float:
    """What a fresh process finds after the crash, as Trainer would."""
    tidy(folder)
    newest = checkpoints_in(folder)[0]
    value = value_in(newest)
    assert value == NEW or newest.name == "checkpoint-1"
    assert not list(folder.glob(".*")) and not list((folder / name).glob(f"{STAGE}/*axonn_checkpoint.json"))
    return value


@pytest.mark.parametrize("every", [14, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_over_weights_of_another_kind(tmp_path, every):
    """A save to a directory with model.safetensors: at any moment one of the two is there, and after it one alone."""
    plain = tmp_path / "plain"
    model = copy.deepcopy(MODEL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(OLD)
    model.save_pretrained(plain / "checkpoint-1")
    points = [point for rank, point in kill_points(tmp_path / "count", plain, "checkpoint-1", False) if rank == 0]
    found = []
    for point in points[::-every]:
        directory = tmp_path / str(point) / "checkpoint-1"
        shutil.copytree(plain, directory.parent)
        run_to_the_end(save_and_die, 2, directory, False, 0, point, None)
        recover(directory)
        sharded = is_sharded_checkpoint(directory)
        assert sharded != (directory / "model.safetensors").exists(), point
        weights = values_of(directory) if sharded else load_file(directory / "model.safetensors")
        found.append({float(value) for tensor in weights.values() for value in tensor.unique()})
    assert {OLD} in found and {NEW} in found and all(value in ({OLD}, {NEW}) for value in found)
    check_complete(tmp_path / "count" / "checkpoint-1")


@pytest.mark.parametrize("times", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_killed_at_random_times(old, tmp_path, times):
    chance = random.Random(5)
    for index in range(times):
        name, folder = chance.choice(["checkpoint-1", "checkpoint-2"]), tmp_path / str(index)
        shutil.copytree(old, folder)
        where = (folder / name, chance.random() < 0.5, chance.randrange(2), -1, chance.uniform(0, 0.04))
        run_to_the_end(save_and_die, 2, *where)
        survives(folder, name)


def test_a_save_after_a_crash_needs_no_help(old, tmp_path):
    """What the crash left, in or beside the directory, is finished or removed by the next save to it."""
    for name, point in (("checkpoint-1", 12), ("checkpoint-2", 5)):
        folder = tmp_path / name
        shutil.copytree(old, folder)
        assert -signal.SIGKILL in run_to_the_end(save_and_die, 2, folder / name, False, 0, point, None)
        run_ranks(save_value, 2, 3.0, folder / name)
        assert value_in(folder / name) == 3.0 and not list(folder.glob("**/*" + STAGE))


def test_an_interrupted_commit_is_finished_by_the_next_load(old, points_of, tmp_path, capsys):
    """Killed while the files of the old checkpoint make place for those of the new one."""
    points = [point for rank, point in points_of("checkpoint-1", False) if rank == 0]
    for point in reversed(points):
        folder = tmp_path / f"at-{point}"
        shutil.copytree(old, folder)
        run_to_the_end(save_and_die, 2, folder / "checkpoint-1", False, 0, point, None)
        if (folder / "checkpoint-1" / STAGE / MANIFEST).is_file():
            break
    with pytest.raises(ValueError):
        check_complete(folder / "checkpoint-1")
    shutil.copytree(folder, tmp_path / "again")
    run_ranks(load_values, 2, folder / "checkpoint-1", NEW)
    assert value_in(folder / "checkpoint-1") == NEW
    assert main(["verify", str(tmp_path / "again" / "checkpoint-1")]) == 1
    assert "interrupted at its last step" in capsys.readouterr().out


def test_one_process_that_goes_on_there_leaves_nothing_of_it(old, tmp_path):
    folder = Path(shutil.copytree(old / "checkpoint-1", tmp_path / "out"))
    (folder / "kept.txt").touch()
    shards = [path for path in folder.iterdir() if path.name not in ("kept.txt", "config.json")]
    args = GoldfishConfig(output_dir=str(folder), use_cpu=True, report_to=[])
    GoldfishTrainer(copy.deepcopy(MODEL), args).save_model()
    assert len(shards) > 3 and not is_sharded_checkpoint(folder)
    names = {path.name for path in folder.iterdir()}
    assert names & {path.name for path in shards} <= {"generation_config.json"}
    assert names >= {"kept.txt", "config.json", "model.safetensors"}
    saved = load_file(folder / "model.safetensors")
    assert torch.equal(saved["model.norm.weight"], MODEL.model.norm.weight)


def load_values(directory: Path, value: float) -> None:
    model, optimizer = filled(7.0)
    load_sharded(model, directory, optimizer=optimizer)
    for parameter in model.parameters():
        assert (parameter.to_local() == value).all()
        assert (optimizer.state[parameter]["momentum_buffer"].to_local() == value).all()


def failing(directory: Path, background: bool) -> str:
    """Save NEW on a disk that takes no file of more than 20 kB on rank 1; the words of the error."""
    model, optimizer = filled(NEW)
    if world_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    with pytest.raises(SaveError, match="was not saved: rank 1: OSError") as failure:
        save_sharded(model, directory, optimizer=optimizer, async_save=background)
        save_sharded(model, directory.with_name("later"))  # which waits for the one in the background
    return str(failure.value)


@pytest.mark.parametrize(
    ("name", "background"),
    [
        ("checkpoint-1", False),
        ("checkpoint-2", True),
        pytest.param("checkpoint-2", False, marks=pytest.mark.slow),
        pytest.param("checkpoint-1", True, marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_the_old_one_stands(old, tmp_path, name, background):
    shutil.copytree(old, tmp_path / "run")
    first, second = run_ranks(failing, 2, tmp_path / "run" / name, background)
    assert first == second and "File too large" in first and "What was saved before stands" in first
    assert survives(tmp_path / "run", name) == OLD
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-1"]


def failing_late(directory: Path) -> str:
    """Rank 0 cannot write the manifest."""
    model, _ = filled(NEW)
    if world_rank() == 0:
        saving.write_manifest = no_space
    with pytest.raises(SaveError, match="rank 0: OSError: .*No space left"):
        save_sharded(model, directory)


def no_space(*args) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_is_full_at_the_manifest(old, tmp_path):
    shutil.copytree(old, tmp_path / "run")
    run_ranks(failing_late, 2, tmp_path / "run" / "checkpoint-1")
    assert survives(tmp_path / "run", "checkpoint-1") == OLD


def vanishing(directory: Path, background: bool) -> str:
    """Somebody removes the stage when every rank has written."""
    model, _ = filled(NEW)
    if world_rank() == 0:
        complete = Save._complete

        def bare(save: Save) -> None:
            parts = [save._part(rank) for rank in range(2)]
            while not all(part.exists() for part in parts):
                time.sleep(0.01)
            shutil.rmtree(save.stage)
            complete(save)

        Save._complete = bare
    with pytest.raises(SaveError, match="was not saved: rank 0: FileNotFoundError: .* has vanished") as failure:
        save_sharded(model, directory, async_save=background)
        finish_saves()
    return str(failure.value)


@pytest.mark.parametrize("background", [False, True])
def test_a_stage_that_vanishes_is_an_error_on_all_and_the_old_one_stands(old, tmp_path, background):
    shutil.copytree(old, tmp_path / "run")
    first, second = run_ranks(vanishing, 2, tmp_path / "run" / "checkpoint-1", background)
    assert first == second
    assert survives(tmp_path / "run", "checkpoint-1") == OLD


def vanishing_before(directory: Path) -> None:
    """Somebody removes the stage when rank 1 has written and rank 0 has not."""
    model, _ = filled(NEW)
    if world_rank() == 0:
        write = Save._write_own

        def late(save: Save) -> None:
            while not save._part(1).exists():
                time.sleep(0.01)
            shutil.rmtree(save.stage)
            write(save)

        Save._write_own = late
    with pytest.raises(SaveError, match="was not saved: rank 0: .*No such file or directory"):
        save_sharded(model, directory)


def test_a_stage_that_has_vanished_is_not_made_anew(tmp_path):
    run_ranks(vanishing_before, 2, tmp_path / "checkpoint-1")
    assert not list(tmp_path.iterdir())


def refused(directory: Path) -> str:
    model, _ = filled(NEW)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may write everywhere
    with pytest.raises(SaveError, match="was not saved: rank 0: PermissionError") as failure:
        save_sharded(model, directory)
    for each in (model, get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))):
        with pytest.raises(ValueError, match="^rank 0: PermissionError: .*checkpoint-1"):  # rank 0's, on every rank
            each.save_pretrained(directory)
    os.seteuid(user)
    return str(failure.value)


def test_a_read_only_directory_is_an_error_on_all(tmp_path):
    folder = Path(tempfile.mkdtemp())  # unlike tmp_path, others may pass through it
    try:
        folder.chmod(0o555)
        first, second = run_ranks(refused, 2, folder / "checkpoint-1")
        assert first == second and not list(folder.iterdir())
    finally:
        folder.chmod(0o755)
        folder.rmdir()


class Uploads(list):
    """The names of the files that this rank uploads, and of nothing else of the hub."""

    def create_repo(self, name: str, **_) -> SimpleNamespace:
        return SimpleNamespace(repo_id=name)

    def upload(self, folder: str, *_, **__) -> None:
        self.append(sorted(os.listdir(folder)))


def pushed() -> Uploads:
    model, _ = filled(NEW)
    found = Uploads()
    card = mock.Mock(save=lambda path: Path(path).touch())
    hub = dict(hf_api=lambda: found, create_and_tag_model_card=lambda *_, **__: card)
    with mock.patch.multiple("transformers.utils.hub", **hub):
        for each in (model, get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))):
            each._upload_modified_files = found.upload
            each.push_to_hub("someone/name")
            found.create_repo = mock.Mock(side_effect=OSError("no connection"))
            with pytest.raises(ValueError, match="^rank 0: OSError: no connection"):
                each.push_to_hub("someone/name")
            del found.create_repo
    return found


def test_what_is_pushed_is_pushed_once():
    first, second = run_ranks(pushed, 2)
    assert first == [
        ["README.md", "config.json", "generation_config.json", "model.safetensors"],
        ["README.md", "adapter_config.json", "adapter_model.safetensors"],
    ]
    assert not second


def unseen(directory: Path) -> None:
    """Rank 1 writes where rank 0 does not look."""
    model, _ = filled(NEW)
    if world_rank() == 1:
        write = saving.write_shards

        def elsewhere(path: Path, pieces):
            record = write(path, pieces)
            path.unlink()
            return record

        saving.write_shards = elsewhere
    with pytest.raises(SaveError, match="a file system that they share"):
        save_sharded(model, directory)


def test_ranks_that_share_no_disk_are_told(tmp_path):
    run_ranks(unseen, 2, tmp_path / "checkpoint-1")
    assert not list(tmp_path.iterdir())


IN_PART = {
    "nothing": r"shard-00002-model-00001-of-00001.safetensors is missing, which holds lm_head.weight\[",
    "no optimizer": "optimizer/shard-00002-model-00001-of-00001.safetensors is missing, which holds state.",
    "another dtype": "shard-00002-model-00001-of-00001.safetensors holds lm_head.weight as BF16 and not as F32",
}


def save_in_part(folder: Path) -> dict[str, str]:
    """Rank 1 leaves something out, as where a program calls only rank 0; the words of each error."""
    words = {}
    model, optimizer = filled(NEW)
    for kind in IN_PART:
        if kind == "another dtype" and world_rank() == 1:
            model.bfloat16()
        for background in (False, True):
            save = begin_save(model, folder / kind / "checkpoint-1", async_save=background)
            if world_rank() == 0 or kind != "nothing":
                left_out = world_rank() == 1 and kind == "no optimizer"
                add_model(save, model, optimizer=None if left_out else optimizer)
            with pytest.raises(SaveError, match="rank 1 did not save the same state as rank 0") as failure:
                save.close()
                finish_saves()
            words[f"{kind} {background}"] = str(failure.value)
    return words


def test_a_rank_that_saves_less_is_an_error_on_all_and_the_old_one_stands(old, tmp_path):
    for kind in IN_PART:
        shutil.copytree(old, tmp_path / kind)
    first, second = run_ranks(save_in_part, 2, tmp_path)
    assert first == second
    for case, words in first.items():
        kind = case.rpartition(" ")[0]
        assert re.search(IN_PART[kind], words), (case, words)
        assert "Every rank has to save" in words and "What was saved before stands" in words
        assert survives(tmp_path / kind, "checkpoint-1") == OLD


def _save_with_joined_reports(model, optimizer, folder: Path) -> None:
    """Save as on thousands of ranks, whose reports other ranks than rank 0 read; and one of these cannot."""
    with mock.patch.object(saving, "JOINED", 1):
        for background in (False, True):
            save_sharded(model, folder / f"joined {background}", optimizer=optimizer, async_save=background)
            finish_saves()
        report = Save._report

        def full_disk(save: Save, path: Path, content) -> None:
            if path.suffix == ".joined":
                raise OSError(errno.ENOSPC, "No space left on device")
            report(save, path, content)

        with mock.patch.object(Save, "_report", full_disk):
            for background in (False, True):
                with pytest.raises(SaveError, match="rank 1: OSError.* No space left"):
                    save_sharded(model, folder / "joined False", optimizer=optimizer, async_save=background)
                    finish_saves()
    check_complete(folder / "joined False")


def save_both_ways(folder: Path) -> None:
    model, optimizer = filled(NEW)
    save_sharded(model, folder / "foreground", optimizer=optimizer)
    _save_with_joined_reports(model, optimizer, folder)
    put, go_on = shard_files._put, threading.Event()

    def waiting(*args) -> None:
        go_on.wait()  # a save that were not in the background would wait for ever
        put(*args)

    shard_files._put = waiting
    save_sharded(model, folder / "background", optimizer=optimizer, async_save=True)
    assert not (folder / "background").exists()
    # Training goes on while the copies are written.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1.0)
    optimizer.step()
    go_on.set()
    end = time.monotonic() + 180
    while not (folder / "background").exists() and time.monotonic() < end:
        time.sleep(0.01)  # without a word between the ranks
    check_complete(folder / "background")
    barrier()
    load_sharded(model, folder / "background", optimizer=optimizer)  # waits for the save, as every load does
    finish_saves()
    assert all((parameter.to_local() == NEW).all() for parameter in model.parameters())


def test_a_save_in_the_background_is_the_same_to_the_bit(tmp_path):
    run_ranks(save_both_ways, 2, tmp_path)
    first, *others = (
        check_complete(tmp_path / name) for name in ("foreground", "background", "joined False", "joined True")
    )
    for other in others:
        assert first.files == other.files and first.model == other.model and first.save != other.save


def save_by_torch(folder: Path) -> None:
    model, _ = parallelize(tiny_model("llama"), Grid(z=2))
    for default in ({}, {"process_group": dist.group.WORLD}):
        with pytest.raises(ValueError, match="Make a group once on every rank.* process_group=group"):
            dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder / "refused", **default)
    assert not (folder / "refused").exists()
    own = folder.with_name(f"own-{dist.get_rank()}")  # without the others each writes a whole checkpoint
    dcp.async_save({"step": torch.ones(1)}, checkpoint_id=own, no_dist=True).result()
    group = dist.new_group(backend="gloo")  # not that of training, whose collectives go on
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(**tiny_batch(2, 5)).loss.backward()
        sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            saved = {name: full(value) for name, value in model.state_dict().items()}
            writing = dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder, process_group=group)
    writing.result()
    again, _ = parallelize(tiny_model("llama", seed=5), Grid(x=2))
    read = {"model": again.state_dict()}
    dcp.load(read, checkpoint_id=folder)
    assert all(torch.equal(full(value), saved[name]) for name, value in read["model"].items())
    dist.destroy_process_group(group)


def test_torch_saves_in_the_background_by_a_group_of_its_own(tmp_path):
    """As docs/reliability.md has it."""
    run_ranks(save_by_torch, 2, tmp_path / "state")


def leave_early(directory: Path) -> None:
    model, _ = filled(NEW)
    save_sharded(model, directory, async_save=True)


def test_a_process_that_ends_lets_the_last_save_finish(tmp_path):
    """No one calls finish_saves: the threads end by themselves, before the interpreter does."""
    run_ranks(leave_to_the_thread, 2, tmp_path / "checkpoint-1")
    assert value_in(tmp_path / "checkpoint-1") == NEW


def leave_to_the_thread(directory: Path) -> None:
    leave_early(directory)
    threading._shutdown()  # what the interpreter calls at its end; run_ranks ends a rank without
