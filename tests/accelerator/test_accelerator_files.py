"""save_state and load_state from grid to grid, and whole models in the ordinary format."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, load_checkpoint_in_model, set_seed
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from hf_axonn import Grid
from hf_axonn.checkpoint.manifest import MANIFEST
from hf_axonn.checkpoint.save import SaveError
from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import collate, new_accelerator, token_data


STEPS, SAVED_AT = 3, 2  # micro-batches are two a step, and the save is in the middle of an epoch
GRIDS = {
    2: [Grid(x=2), Grid(z=2), Grid(data=2), Grid(y=2)],
    4: [Grid(z=2, x=2), Grid(data=2, y=2)],
}


class Counter:
    """Something that a script registers for checkpointing."""

    def __init__(self) -> None:
        self.seen = self.states = 0
        self.average = torch.zeros(2)

    def state_dict(self) -> dict:
        self.states += 1
        return {"seen": self.seen, "average": self.average, "nested": [1, "two", None]}

    def load_state_dict(self, state: dict) -> None:
        assert state["nested"] == [1, "two", None]
        self.seen, self.average = state["seen"], state["average"]


class Run:
    """A script: everything prepared, and trained from where it stands."""

    def __init__(self, grid: Grid | None, **options) -> None:
        set_seed(0)
        self.accelerator = new_accelerator(grid, gradient_accumulation_steps=2, **options)
        self.samples = grid.dp_size if grid else 1
        model = tiny_model("llama", num_hidden_layers=1).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / self.samples))
        loader = DataLoader(token_data(64, seed=2), batch_size=4 // self.samples, collate_fn=collate)
        self.model, self.optimizer, self.rates, self.loader = self.accelerator.prepare(model, optimizer, rates, loader)
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, *, until: int) -> list[float]:
        """Losses of the micro-batches from where the counter stands to `2 * until`."""
        losses = []
        loader = self.accelerator.skip_first_batches(self.loader, self.counter.seen)
        with Float64():
            for batch in loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch, num_items_in_batch=50).loss * self.samples
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.optimizer.step()
                    self.rates.step()
                    self.optimizer.zero_grad()
                losses.append(self.accelerator.gather(loss.detach()).mean().item())
                self.counter.seen += 1
                self.counter.average += losses[-1]
                if self.counter.seen == 2 * until:
                    break
        return losses

    def results(self, losses: list[float]) -> dict:
        values = {name: value.detach() for name, value in self.model.named_parameters()}
        return {
            "losses": losses,
            "rate": self.rates.get_last_lr(),
            "seen": [self.counter.seen, *self.counter.average.tolist(), self.accelerator.step],
            "parameters": {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in values.items()},
        }


def unbroken(grid: Grid | None) -> dict:
    run = Run(grid)
    run.train(until=SAVED_AT)
    return run.results(run.train(until=STEPS))


def save(grid: Grid | None, folder: Path) -> None:
    run = Run(grid)
    run.train(until=SAVED_AT)
    assert run.accelerator.save_state(str(folder)) == (str(folder) if grid else folder)


def as_fsdp2(stock: Path, target: Path) -> None:
    """The same state in the folders that stock accelerate writes with FSDP2's SHARDED_STATE_DICT."""
    shutil.copytree(stock, target)
    weights, state = load_file(target / "model.safetensors"), torch.load(target / "optimizer.bin")
    names = [name for name, _ in tiny_model("llama", num_hidden_layers=1).named_parameters()]
    for group in state["param_groups"]:
        group["params"] = [names[place] for place in group["params"]]
    state["state"] = {names[place]: moments for place, moments in state["state"].items()}
    dcp.save({"model": weights}, checkpoint_id=target / "pytorch_model_fsdp_0", no_dist=True)
    dcp.save({"optimizer": state}, checkpoint_id=target / "optimizer_0", no_dist=True)
    for name in ("model.safetensors", "optimizer.bin"):
        (target / name).unlink()


def resume(grid: Grid | None, folder: Path) -> dict:
    run = Run(grid)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.zero_()
    run.accelerator.load_state(str(folder))
    assert run.counter.seen == 2 * SAVED_AT
    return run.results(run.train(until=STEPS))


def assert_equal(ours: dict, truth: dict, case: object) -> None:
    for numbers in ("losses", "rate", "seen"):
        assert ours[numbers] == pytest.approx(truth[numbers], rel=1e-6 if numbers == "seen" else 1e-10), (
            case,
            numbers,
        )
    for name, value in ours["parameters"].items():
        difference = float((value - truth["parameters"][name]).abs().max())
        assert difference < 1e-10, (case, name, difference)


@pytest.fixture(scope="module")
def truth() -> dict:
    return unbroken(None)


def _save(folder: Path, grids: list[Grid]) -> None:
    for grid in grids:
        save(grid, folder / str(grid))


def _save_and_resume(folder: Path, grids: list[Grid], truth: dict, left_out: set[str]) -> None:
    """In one launch, in which DTensor thinks about every operation once."""
    _save(folder, grids)
    dist.barrier()
    _resume(folder, grids, truth, left_out)


def _resume(folder: Path, grids: list[Grid], truth: dict, left_out: set[str]) -> None:
    """Those of another number of ranks, and one of the same; each on the next grid of this number."""
    left_out = left_out | {str(grid) for grid in grids[1:]}
    for number, name in enumerate(sorted({path.name for path in folder.iterdir()} - left_out)):
        grid = grids[number % len(grids)]
        assert_equal(resume(grid, folder / name), truth, (name, grid))


STOCK, FSDP2 = "one process of stock accelerate", "FSDP2 of stock accelerate"


# Quick, each state of stock accelerate goes on on one number of ranks, and that of one grid on the other number.
@pytest.mark.parametrize(
    ("two", "not_on_four", "not_on_two"),
    [
        (GRIDS[2][2:3], {STOCK}, {FSDP2, str(Grid(data=2)), str(Grid(data=2, y=2))}),
        pytest.param(GRIDS[2], set(), set(), marks=pytest.mark.slow),
    ],
    ids=["some", "every"],
)
def test_a_state_goes_from_any_grid_to_any_other(truth, tmp_path, two, not_on_four, not_on_two):
    save(None, tmp_path / STOCK)
    as_fsdp2(tmp_path / STOCK, tmp_path / FSDP2)
    run_ranks(_save, 2, tmp_path, two)
    run_ranks(_save_and_resume, 4, tmp_path, GRIDS[4], truth, not_on_four)
    saved = json.loads((tmp_path / str(Grid(z=2, x=2)) / MANIFEST).read_text())["files"]
    assert {"accelerator.json", "custom_checkpoint_0.pkl", "scheduler.bin", "random_states_3.pkl"} <= saved.keys()
    state = json.loads((tmp_path / str(Grid(z=2, x=2)) / "accelerator.json").read_text())
    assert state.keys() == {"step", "models", "schedulers", "objects", "positions", "order"}  # 0.1.0 has no order
    run_ranks(_resume, 2, tmp_path, two, truth, not_on_two)
    for name in (str(Grid(z=2, x=2)), str(Grid(data=2))):
        assert_equal(resume(Grid(), tmp_path / name), truth, (name, "one process"))
    assert_equal(resume(Grid(), tmp_path / STOCK), truth, "stock")
    with pytest.raises(FileNotFoundError):  # stock accelerate does not know the format, and says so
        resume(None, tmp_path / str(Grid(data=2)))


def _same_bits(folder: Path, grid: Grid) -> None:
    """On the same grid, with dropout and shuffling, a resumed run has the bits of the unbroken one."""

    def losses_of(run: Run, batches) -> list[float]:
        return [run.accelerator.gather(run.model(**batch).loss.detach()).sum().item() for batch in list(batches)]

    unbroken: list[float] = []
    for stage in ("unbroken", "resumed"):
        run = Run(grid)
        for module in run.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3
        shuffled = DataLoader(token_data(16, seed=1), batch_size=2, collate_fn=collate, shuffle=True)
        shuffled = run.accelerator.prepare(shuffled)
        if stage == "resumed":
            run.accelerator.load_state(str(folder))
            rest = losses_of(run, run.accelerator.skip_first_batches(shuffled, 2))
            assert rest == unbroken
            continue
        iterator = iter(shuffled)
        losses_of(run, [next(iterator), next(iterator)])
        run.accelerator.save_state(str(folder))
        unbroken = losses_of(run, iterator)
        assert len(set(unbroken)) == len(unbroken) > 1


@pytest.mark.parametrize("grid", [GRIDS[4][0], pytest.param(GRIDS[4][1], marks=pytest.mark.slow)], ids=str)
def test_a_resumed_run_has_the_same_bits(tmp_path, grid):
    run_ranks(_same_bits, 4, tmp_path / "state", grid)


def _schedules(folder: Path, saving: bool, rates: dict[str, list[float]]) -> None:
    """Schedules of both kinds go on at the pace of the global step, whatever data * z."""
    grids = [Grid(x=2), Grid(z=2)] if saving else [Grid(data=2), Grid(y=2)]
    for index, grid in enumerate(grids):
        accelerator = new_accelerator(grid)
        samples = grid.dp_size
        seen = {}
        for name in rates:
            accelerator.free_memory()
            model = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            schedule = schedule_of(name, optimizer, samples)
            model, optimizer, prepared = accelerator.prepare(model, optimizer, schedule)
            if not saving:
                accelerator.load_state(str(folder / f"{name}-{index}"))
            seen[name] = []
            for _ in range(5):
                seen[name] += prepared.get_last_lr()
                optimizer.step()
                prepared.step()
            if saving:
                accelerator.save_state(str(folder / f"{name}-{index}"))
        for name, ours in seen.items():
            assert ours == pytest.approx(rates[name][:5] if saving else rates[name][5:], rel=1e-9), (grid, name)


def schedule_of(name: str, optimizer: torch.optim.Optimizer, samples: int):
    """A schedule as a script makes it: its length counts the batches of one position."""
    if name == "lambda":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (20 * samples))
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20 * samples)


def test_schedules_go_on_at_the_same_pace(tmp_path):
    rates = {"lambda": [], "cosine": []}
    for name in rates:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        schedule = schedule_of(name, optimizer, 1)
        for _ in range(10):
            rates[name] += schedule.get_last_lr()
            optimizer.step()
            schedule.step()
    run_ranks(_schedules, 2, tmp_path, True, rates)
    run_ranks(_schedules, 2, tmp_path, False, rates)


class Dangerous:
    """What is not a tensor nor a plain value."""


class Careless(Counter):
    def state_dict(self) -> dict:
        return {"danger": Dangerous()}


def _refusals(folder: Path) -> None:
    first = torch.distributed.get_rank() == 0
    run = Run(Grid(z=2))
    good = folder / "good"
    run.accelerator.save_state(str(good))

    # What is registered must be plain, and then the state that was there stands.
    run.accelerator.register_for_checkpointing(Careless())
    with pytest.raises(SaveError, match="state_dict.. of Careless cannot be saved"):
        run.accelerator.save_state(str(good))
    with pytest.raises(ValueError, match="holds 1 registered objects, but this run has 2"):
        run.accelerator.load_state(str(good))
    run = Run(Grid(z=2))
    run.accelerator.load_state(str(good))

    run.accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(run.optimizer.optimizer))
    with pytest.raises(ValueError, match="holds 1 schedulers, but this run has 2"):
        run.accelerator.load_state(str(good))
    run.accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="holds 1 models, but this run has 2"):
        run.accelerator.load_state(str(good))
    run = Run(Grid(z=2))
    run.accelerator.prepare(torch.optim.SGD(run.model.parameters(), lr=1.0))
    with pytest.raises(ValueError, match="SGD trains 1 of the 1 prepared models, and another one trains that"):
        run.accelerator.save_state(str(folder / "two"))
    assert not (folder / "two").exists()
    with pytest.raises(ValueError, match="given to accelerator.prepare"):
        new_accelerator(Grid(z=2)).save_state(str(folder / "nothing"))

    run = Run(Grid(z=2))
    for name, message in {
        "missing": "is missing",
        "changed": "custom_checkpoint_0.pkl has other content",
        "outside": "may lie outside|does not fit it",
        "elsewhere": "was not written by accelerator.save_state|does not fit",
    }.items():
        if first:
            spoil(good, folder / name, name)
        torch.distributed.barrier()
        with pytest.raises(ValueError, match=message):
            run.accelerator.load_state(str(folder / name))
    with pytest.raises(ValueError, match="holds no state of accelerator.save_state"):
        run.accelerator.load_state(str(folder))
    with pytest.raises(ValueError, match="input_dir"):
        run.accelerator.load_state()
    with pytest.raises(ValueError, match="output_dir"):
        run.accelerator.save_state()


def spoil(good: Path, target: Path, how: str) -> None:
    import shutil

    from hf_axonn.checkpoint.commit import write_manifest
    from hf_axonn.checkpoint.manifest import read_manifest
    from hf_axonn.checkpoint.shard_files import checksum_of

    shutil.copytree(good, target)
    if how == "missing":
        (target / "scheduler.bin").unlink()
    elif how == "changed":
        content = bytearray((target / "custom_checkpoint_0.pkl").read_bytes())
        content[len(content) // 2] ^= 1
        (target / "custom_checkpoint_0.pkl").write_bytes(content)
    else:
        state = json.loads((target / "accelerator.json").read_text())
        state["models"] = ["", "../good"]
        (target / "accelerator.json").write_text(json.dumps(state))
        manifest = read_manifest(target)
        files = dict(manifest.files) | {"accelerator.json": checksum_of(target / "accelerator.json")}
        if how == "elsewhere":
            (target / "accelerator.json").unlink()
            files.pop("accelerator.json")
        object.__setattr__(manifest, "files", files)
        write_manifest(target, manifest)


def test_what_cannot_be_saved_or_loaded_is_refused_on_every_rank(tmp_path):
    run_ranks(_refusals, 2, tmp_path)


def _naming(folder: Path) -> None:
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    run = Run(Grid(data=2), project_config=project)
    for count in range(4):
        run.counter.seen = count
        run.accelerator.save_state()
    torch.distributed.barrier()
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["checkpoint_2", "checkpoint_3"]
    assert run.counter.states == 4  # on every rank: it might gather what is sharded
    run.accelerator.load_state()
    assert run.counter.seen == 3
    run.accelerator.project_configuration.iteration = 3
    with pytest.raises(ValueError, match="checkpoint_3 exists already"):
        run.accelerator.save_state()

    # Hooks may write beside, and load a model themselves.
    def after(models, weights, place):
        assert len(models) == len(weights) == 1
        if run.accelerator.is_main_process:
            Path(place, "notes.txt").write_text("written by a hook")

    def before(models, place):
        assert Path(place, "notes.txt").read_text() == "written by a hook"
        models.pop()

    handles = [
        run.accelerator.register_save_state_pre_hook(after),
        run.accelerator.register_load_state_pre_hook(before),
    ]
    run.accelerator.project_configuration.automatic_checkpoint_naming = False
    run.accelerator.save_state(str(folder / "hooked"))
    with torch.no_grad():
        run.model.model.norm.weight.fill_(7)
    run.accelerator.load_state(str(folder / "hooked"))
    assert float(run.model.model.norm.weight.to_local().mean()) == 7  # the hook has taken it out
    handles[1].remove()
    run.accelerator.load_state(str(folder / "hooked"))
    assert float(run.model.model.norm.weight.to_local().mean()) != 7

    for _ in range(2):  # as where find_executable_batch_size tries once more
        run.accelerator.free_memory()
        run.accelerator.prepare(torch.nn.Linear(2, 2), DataLoader(list(range(8)), shuffle=True))
    run.accelerator.save_state(str(folder / "again"))
    assert len(json.loads((folder / "again" / "accelerator.json").read_text())["order"]) == 1
    _plain_state(folder / "plain", run, before)


def _plain_state(place: Path, run: Run, hook) -> None:
    """The hooks see a state of stock accelerate, too, and it may not hold more objects than the run."""
    run.accelerator.free_memory()
    model = run.accelerator.prepare(torch.nn.Linear(2, 2))
    if run.accelerator.is_main_process:
        place.mkdir()
        (place / "notes.txt").write_text("written by a hook")
        torch.save(run.counter.state_dict(), place / "custom_checkpoint_0.pkl")
    dist.barrier()
    handle = run.accelerator.register_load_state_pre_hook(hook)
    run.accelerator.load_state(str(place))  # without weights, of which a hook took care when it was saved
    handle.remove()
    with pytest.raises(ValueError, match="holds no state of accelerator.save_state"):
        run.accelerator.load_state(str(place))
    dist.barrier()
    if run.accelerator.is_main_process:
        save_file(
            {name: torch.full_like(value, 7) for name, value in torch.nn.Linear(2, 2).state_dict().items()},
            place / "model.safetensors",
        )
    dist.barrier()
    run.accelerator.load_state(str(place))
    assert float(model.weight.mean()) == 7
    dist.barrier()
    if run.accelerator.is_main_process:
        shutil.copy(place / "custom_checkpoint_0.pkl", place / "custom_checkpoint_1.pkl")
    dist.barrier()
    with pytest.raises(ValueError, match="holds 2 registered objects, but this run has 1"):
        run.accelerator.load_state(str(place))


def test_names_limits_and_hooks(tmp_path):
    run_ranks(_naming, 2, tmp_path)


def _several(folder: Path) -> None:
    """A model with its optimizer, one without, and a second save over the first."""
    grid = Grid(z=2)
    run = Run(grid)
    teacher = run.accelerator.prepare(tiny_model("gpt2"))
    head = torch.nn.Linear(4, 4, dtype=torch.float64)
    head, optimizer = run.accelerator.prepare(head, torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9))
    for _ in range(2):
        run.accelerator.save_state(str(folder / "several"))
    torch.distributed.barrier()
    assert len(list((folder / "several").glob("model_*"))) == 2  # those of the first save are gone
    models = [run.model, teacher, head]
    before = [{name: value.to_local().clone() for name, value in model.named_parameters()} for model in models]
    with torch.no_grad():
        for model in models:
            for value in model.parameters():
                value.zero_()
    run.accelerator.load_state(str(folder / "several"))
    for model, values in zip(models, before, strict=True):
        assert all(torch.equal(value.to_local(), values[name]) for name, value in model.named_parameters())


def test_several_models(tmp_path):
    run_ranks(_several, 2, tmp_path)


@contextlib.contextmanager
def one_full_tensor_at_a_time():
    """Fails where a full tensor is gathered while an earlier one is alive."""
    gathered, alive = DTensor.full_tensor, []

    def full_tensor(tensor, **options):
        assert not [its for its in alive if its() is not None], "an earlier full tensor is still there"
        full = gathered(tensor, **options)
        alive.append(weakref.ref(full))
        return full

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", full_tensor)
        yield
    assert alive


def _whole_models(folder: Path, grids: list[Grid]) -> None:
    for grid, kind in zip(grids, ("llama", "gpt2"), strict=True):  # gpt2 has tied weights and Conv1D
        accelerator = new_accelerator(grid)
        model = accelerator.prepare(tiny_model(kind))
        place = folder / f"{kind}-{grid}"
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            assert {name: tuple(value.shape) for name, value in state.items()} == {
                name: tuple(value.shape) for name, value in tiny_model(kind).state_dict().items()
            }
        else:
            assert state == {}
        for shards in (model.state_dict(), {"model": model.state_dict(), "step": 3}, model.lm_head.weight):
            with pytest.raises(ValueError, match="saved as it is .* get its tensors on rank 0 with"):
                torch.save(shards, io.BytesIO())
            for safe in (False, True):
                with pytest.raises(ValueError, match="this rank has only its shard"):
                    accelerator.save(shards, place / "shards.bin", safe_serialization=safe)
        (place / "model").mkdir(exist_ok=True, parents=True)
        for older in ("model.safetensors", "model-00001-of-00099.safetensors", "mine.safetensors"):
            (place / "model" / older).touch()
        torch.distributed.barrier()
        with one_full_tensor_at_a_time():
            accelerator.save_model(model, place / "model", max_shard_size="20KB")
        assert any((place / "model").glob("*.safetensors"))  # every rank goes on when they are there
        accelerator.save(state, place / "whole.bin")  # of whole tensors
        (place / "a file").touch()
        with pytest.raises(SaveError, match="a file was not saved: rank 0: FileExistsError"):
            accelerator.save_model(model, place / "a file")
        accelerator.save_model(model, place / "one file")
        name, first = next(model.named_parameters())
        with torch.no_grad():
            first.zero_()
        load_checkpoint_in_model(model, str(place / "one file"))
        assert torch.equal(first.detach().full_tensor(), tiny_model(kind).state_dict()[name])
        accelerator.save_model(model, place / "pickled", safe_serialization=False)
        # As scripts of Accelerate's examples end, older ones of Transformers in this order.
        accelerator.end_training()
        accelerator.wait_for_everyone()
        assert accelerator.num_processes == grid.dp_size
        accelerator.unwrap_model(model).save_pretrained(
            place / "plain", is_main_process=accelerator.is_main_process, save_function=accelerator.save
        )
        accelerator.unwrap_model(model).save_pretrained(
            place / "given",
            is_main_process=accelerator.is_main_process,
            state_dict=accelerator.get_state_dict(model),
            max_shard_size="30KB",
        )
        with pytest.raises(ValueError, match="hf_axonn.save_sharded"):
            model.save_pretrained(place / "shards", distributed_checkpoint=True)


@pytest.mark.parametrize(
    "grids", [[Grid(z=2), Grid(y=2)], pytest.param(GRIDS[4], marks=pytest.mark.slow)], ids=["two", "four"]
)
def test_whole_models_are_ordinary_directories(tmp_path, grids):
    run_ranks(_whole_models, grids[0].size, tmp_path, grids)
    for place in tmp_path.iterdir():
        kind = place.name.split("-")[0]
        wanted = tiny_model(kind).state_dict()
        for name in ("plain", "given"):
            loaded = AutoModelForCausalLM.from_pretrained(place / name, dtype=torch.float64)
            assert all(torch.equal(loaded.state_dict()[key], value) for key, value in wanted.items()), (place, name)
        assert len(list((place / "given").glob("*.safetensors"))) > 1
        assert (place / "model" / "mine.safetensors").exists()
        for older in ("model.safetensors", "model-00001-of-00099.safetensors"):  # else read in place of the new
            assert not (place / "model" / older).exists()
        assert [path.name for path in (place / "one file").iterdir()] == ["model.safetensors"]
        for name in ("model", "one file", "pickled"):
            blank = tiny_model(kind)
            with torch.no_grad():
                for value in blank.parameters():
                    value.zero_()
            load_checkpoint_in_model(blank, str(place / name))
            blank.tie_weights()
            assert all(torch.equal(blank.state_dict()[key], value) for key, value in wanted.items()), (place, name)


def _stateful(folder: Path) -> None:
    """A stateful loader goes on where it was, and its place is not taken for one of another data * z."""
    config = DataLoaderConfiguration(use_stateful_dataloader=True)

    def prepared(grid: Grid):
        accelerator = new_accelerator(grid, dataloader_config=config)
        model = accelerator.prepare(tiny_model("llama"))
        return accelerator, model, accelerator.prepare(DataLoader(list(range(24)), batch_size=2))

    accelerator, _, loader = prepared(Grid(z=2, x=2))
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    accelerator.save_state(str(folder / "stateful"))
    wanted = [batch.tolist() for batch in iterator]
    accelerator, _, loader = prepared(Grid(data=2, y=2))
    accelerator.load_state(str(folder / "stateful"))
    assert [batch.tolist() for batch in loader] == wanted and len(wanted) == 4
    accelerator, _, loader = prepared(Grid(x=4))
    with pytest.raises(ValueError, match="saved with data . z / context = 2, .* of no use with 1"):
        accelerator.load_state(str(folder / "stateful"))


def test_stateful_loaders(tmp_path):
    pytest.importorskip("torchdata", reason="accelerate's stateful loaders need torchdata")
    run_ranks(_stateful, 4, tmp_path)
