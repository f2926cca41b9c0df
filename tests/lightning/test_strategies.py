"""Training over a grid with Lightning's Trainer and Fabric: what one process computes, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import hf_axonn
from hf_axonn import AxonnStrategy, Grid, SaveError
from hf_axonn.checkpoint.manifest import check_complete
from hf_axonn.engine.dtensors import local, whole
from hf_axonn.engine.host_weights import HostWeight
from tests.helpers.float64 import Float64
from tests.helpers.launching import TORCHRUN, assert_quiet, run
from tests.helpers.models import tiny_model
from tests.helpers.ranks import refused, run_ranks
from tests.lightning.runs import Loop, Module, every_epoch, fit, loaders, trainer_of


CLOSE = dict(rtol=0, atol=1e-10)
BY_HAND = dict(accumulate_grad_batches=1, gradient_clip_val=None)  # Lightning does neither in manual optimization
FIRST, LAST = "epoch=0.ckpt", "epoch=1.ckpt"


class Manual(Module):
    """The same steps, by hand: the loss of each micro-batch is halved, as the Trainer does."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward(loss / 2)
        if batch_idx % 2 == 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.lr_schedulers().step()

    def on_before_optimizer_step(self, optimizer):
        pass  # gradients are clipped already


def _offloaded(folder: Path, grid: Grid) -> None:
    """Every bit with weights and moments in host memory is as without, from a checkpoint of the other kind, too."""
    found, counts = [], []
    for offload, ckpt_path in (("none", None), ("optimizer", None), ("optimizer", folder / "none" / FIRST)):
        strategy, place = AxonnStrategy(grid, offload=offload), folder / offload
        module = Module(dtype=torch.float32)
        with mock.patch.object(HostWeight, "take", autospec=True, side_effect=HostWeight.take) as taken:
            trainer = trainer_of(place, grid, every_epoch(place), strategy=strategy, precision="bf16-mixed")
            found.append(fit(trainer, module, grid, ckpt_path))
        counts.append(taken.call_count)
    without, moved, resumed = found
    assert moved["losses"] == without["losses"] and moved["validated"] == without["validated"]
    assert resumed["losses"] == without["losses"][-len(resumed["losses"]) :]
    for name, weight in without["weights"].items():
        assert torch.equal(moved["weights"][name], weight) and torch.equal(resumed["weights"][name], weight)
    assert counts[0] == 0 < counts[2] < counts[1]


@pytest.mark.slow
def test_weights_in_host_memory_train_as_on_the_device(tmp_path: Path) -> None:
    run_ranks(_offloaded, 2, tmp_path, Grid(z=2))


def fabric_truth(value: float | None = None) -> dict[str, Any]:
    loop = Loop(None)
    for _ in range(2 if value is None else 1):
        loop.epoch(value=value)
    return loop.outcome()


@pytest.fixture(scope="module")
def truth(tmp_path_factory) -> dict[str, Any]:
    """Of one process and plain Lightning: the Trainer's checkpoints, and what came of each run."""
    folder = tmp_path_factory.mktemp("one")
    trained = fit(trainer_of(folder, None, every_epoch(folder)), Module(), None)
    return {
        "folder": folder,
        "trained": trained,
        "fabric": fabric_truth(),
        "by value": fabric_truth(value=0.01),
    }


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any], *, last: bool = False) -> None:
    """The whole run, or its second half only."""
    for name in ("losses", "grads", "norms"):
        if name in theirs:
            expected = theirs[name][len(theirs[name]) // 2 :] if last else theirs[name]
            torch.testing.assert_close(ours[name], expected, **CLOSE)
    torch.testing.assert_close(ours["weights"], theirs["weights"], **CLOSE)
    if "logged" in theirs:
        torch.testing.assert_close(ours["logged"], theirs["logged"], **CLOSE)
        assert (ours["step"], ours["scale"]) == (theirs["step"], theirs["scale"]) == (4, 2.0)
        # Each of 8 * 12 labels counts once, though ranks of x and y share them.
        assert ours["validated"] == ([96.0] if last else [96.0, 96.0])


def train_and_resume(first: Grid, second: Grid, folder: Path, truth: dict[str, Any]) -> None:
    """Trainer and Fabric on one grid, from there on another one, and there from what one process has saved."""
    trained = truth["trained"]
    trainer = trainer_of(folder, first, every_epoch(folder))
    module = Module()
    assert_equal(fit(trainer, module, first), trained)
    assert all(isinstance(parameter, DTensor) for parameter in module.model.parameters())
    assert trainer.checkpoint_callback.best_model_path == str(folder / FIRST)
    whole = trainer.strategy.full_state_dict()
    if trainer.is_global_zero:
        torch.testing.assert_close({**trained["weights"]}, _inner(whole), **CLOSE)
    for source in (folder, truth["folder"]):
        resumed = Module(seed=3)  # another model, until the checkpoint is read
        outcome = fit(trainer_of(folder, second, every_epoch(folder / "resumed")), resumed, second, source / FIRST)
        assert_equal(outcome, trained, last=True)
    loop = Loop(first)
    loop.epoch()
    loop.fabric.save(folder / "fabric", loop.state)
    loop.epoch()
    assert_equal(loop.outcome(), truth["fabric"])
    other = Loop(second, seed=3)
    assert other.fabric.load(folder / "fabric", other.state) == {}
    assert other.state["epoch"] == 1
    other.epoch()
    assert_equal(other.outcome(), truth["fabric"], last=True)
    assert "no 'model'; it has 'epoch', 'net', 'optimizer', 'rates'" in refused(
        other.fabric.load, folder / "fabric", {"model": other.model}
    )
    assert "needs the model to fill" in refused(other.fabric.load, folder / "fabric")
    assert "has 0 model(s)" in refused(other.fabric.save, folder / "no", {"optimizer": other.optimizer})


def _inner(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in state.items() if name != "scale"}


def on_two_ranks(folder: Path, truth: dict[str, Any]) -> None:
    grid = Grid(z=2)
    train_and_resume(Grid(x=2), grid, folder, truth)
    loop = Loop(grid)
    loop.epoch(value=0.01)
    assert_equal(loop.outcome(), truth["by value"])
    manual = trainer_of(folder, grid, **BY_HAND)
    ours = fit(manual, Manual(), grid)
    torch.testing.assert_close(ours["weights"], truth["trained"]["weights"], **CLOSE)
    module = Module()
    evaluation = trainer_of(folder, grid)
    with Float64():
        evaluation.validate(module, loaders(grid)[1], ckpt_path=folder / LAST, verbose=False)
    torch.testing.assert_close(
        float(evaluation.callback_metrics["val_loss"]), truth["trained"]["logged"]["val_loss"], **CLOSE
    )
    gathered = evaluation.strategy.all_gather(torch.tensor([torch.distributed.get_rank()]))
    assert gathered.tolist() == [[0], [1]]
    weights = [fit(trainer_of(folder, grid, max_epochs=1), kind(), grid)["weights"] for kind in (WithSgd, WithOwn)]
    torch.testing.assert_close(*weights, **CLOSE)
    refusals(folder, grid, module)


class WithSgd(Module):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnSgd(torch.optim.Optimizer):
    """A class that does not step on shards, and whose closure runs inside of its step, behind the hooks of steps."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=group["lr"])
        return loss


class WithOwn(Module):
    def configure_optimizers(self):
        return OwnSgd(self.parameters(), dict(lr=0.1))


class Two(Manual):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=1), torch.optim.SGD(self.parameters(), lr=1)]


class Unsavable(Module):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = Grid()


def refusals(folder: Path, grid: Grid, sharded: Module) -> None:
    assert "returned 2 optimizers" in refused(fit, trainer_of(folder, grid, **BY_HAND), Two(), grid)
    assert "the model was sharded with" in refused(
        fit, trainer_of(folder, grid, strategy=AxonnStrategy(grid, prefetch=1)), sharded, grid
    )
    assert "needs weights of torch.bfloat16" in refused(
        fit, trainer_of(folder, grid, precision="bf16-true"), sharded, grid
    )
    with pytest.raises(SaveError, match="cannot be saved"):
        fit(trainer_of(folder, grid, every_epoch(folder / "unsavable")), Unsavable(), grid)
    if torch.distributed.get_rank() == 0:
        (folder / LAST / "lightning.pt").write_bytes(b"")
    torch.distributed.barrier()
    assert "lightning.pt has 0 bytes" in refused(fit, trainer_of(folder, grid), Module(), grid, folder / LAST)


def test_two_ranks_train_and_resume_as_one_process(tmp_path, truth):
    run_ranks(on_two_ranks, 2, tmp_path, truth)
    on_one_process(tmp_path, truth)


def on_one_process(folder: Path, truth: dict[str, Any]) -> None:
    """What a grid has saved, without one."""
    outcome = fit(trainer_of(folder, Grid(), every_epoch(folder / "one")), Module(seed=3), Grid(), folder / FIRST)
    assert_equal(outcome, truth["trained"], last=True)
    assert (folder / "one" / LAST).is_file()  # Lightning's own format
    loop = Loop(Grid(), seed=3)
    loop.fabric.load(folder / "fabric", loop.state)
    loop.epoch()
    assert_equal(loop.outcome(), truth["fabric"], last=True)
    model = AutoModelForCausalLM.from_pretrained(folder / "fabric")
    assert set(dict(model.named_parameters())) == set(truth["fabric"]["weights"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, second",
    [
        (Grid(z=2, x=2), Grid(data=2, x=2)),
        (Grid(data=2, y=2), Grid(z=2, x=2)),
    ],
    ids=str,
)
def test_four_ranks_train_and_resume_as_one_process(first, second, tmp_path, truth):
    run_ranks(train_and_resume, 4, first, second, tmp_path, truth)
    on_one_process(tmp_path, truth)


@pytest.mark.slow
@pytest.mark.usefixtures("way")
def test_rows_that_are_cut_train_and_resume_as_one_process(tmp_path, truth):
    run_ranks(train_and_resume, 4, Grid(z=4, context=2), Grid(z=2, x=2, context=2), tmp_path, truth)
    on_one_process(tmp_path, truth)


PLANTED = 2  # the step whose gradients overflow, on one rank


class Scaled(Module):
    """fp16, with an infinite gradient in one step, of which one rank alone has the element; notes the scales."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32, num_hidden_layers=1)
        self.scales: list[float] = []

    def on_after_backward(self):
        if len(self.scales) == 2 * PLANTED + 1 and self.trainer.global_rank == self.trainer.world_size - 1:
            local(self.model.model.layers[0].mlp.up_proj.weight.grad).view(-1)[-1] = float("inf")
        self.scales.append(float(self.trainer.precision_plugin.scaler.get_scale()))

    def on_before_optimizer_step(self, optimizer):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit_scaled(grid: Grid | None, folder: Path) -> dict[str, Any]:
    module = Scaled()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    trainer = trainer_of(folder, grid, precision=None, plugins=[plugin])
    train, val = loaders(grid)
    trainer.fit(module, train, val)
    weights = {name: whole(parameter).detach() for name, parameter in module.model.named_parameters()}
    return {"scales": module.scales, "weights": weights}


def on_ranks_with_a_scaler(folder: Path, truth: dict[str, Any]) -> None:
    for grid in (Grid(x=2), Grid(z=2)):
        ours = fit_scaled(grid, folder)
        assert ours["scales"] == truth["scales"] == [1024.0] * 6 + [512.0] * 2
        torch.testing.assert_close(ours["weights"], truth["weights"], rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_fp16_scales_and_skips_as_one_process(tmp_path):
    """Lightning ignores fp16 on CPUs, so the plugin is what it makes on a GPU."""
    run_ranks(on_ranks_with_a_scaler, 2, tmp_path, fit_scaled(None, tmp_path))


class FromDirectory(Module):
    """Reads its slices in configure_model, as large models do."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory, self.model = directory, None

    def configure_model(self):
        if self.model is None:
            grid, config = (getattr(self.trainer.strategy, name, None) for name in ("grid", "config"))
            self.model = hf_axonn.from_pretrained(
                str(self.directory), grid=grid or Grid(), config=config, dtype=self.wanted
            ).train()

    @property
    def wanted(self) -> torch.dtype:
        return {"bf16-true": torch.bfloat16, "64-true": torch.float64}[self.trainer.precision]


class WithLora(Module):
    def __init__(self, seed: int = 0) -> None:
        from peft import LoraConfig, get_peft_model

        super().__init__(seed)
        torch.manual_seed(7)
        config = LoraConfig(
            r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        self.model = get_peft_model(self.model, config).double()

    def on_before_optimizer_step(self, optimizer):
        pass


def on_four_ranks(folder: Path, read: dict[str, Any], lora: dict[str, Any]) -> None:
    grid = Grid(z=2, x=2)
    assert_equal(fit(trainer_of(folder, grid), FromDirectory(folder / "initial"), grid), read)
    half = FromDirectory(folder / "initial")
    losses = fit(trainer_of(folder, grid, precision="bf16-true", max_epochs=4), half, grid)["losses"]
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.bfloat16}
    assert losses[-1] < losses[0]
    mixed = Module(dtype=torch.float32)
    losses = fit(trainer_of(folder, grid, precision="bf16-mixed", max_epochs=4), mixed, grid)["losses"]
    assert {parameter.dtype for parameter in mixed.model.parameters()} == {torch.float32}
    assert losses[-1] < losses[0]
    assert_lora(grid, folder, lora)
    callbacks(grid, folder)


def assert_lora(grid: Grid, folder: Path, lora: dict[str, Any]) -> None:
    ours = fit(trainer_of(folder, grid, every_epoch(folder / "lora")), WithLora(), grid)
    torch.testing.assert_close(ours["losses"], lora["losses"], **CLOSE)
    torch.testing.assert_close(ours["weights"], lora["weights"], **CLOSE)
    resumed = fit(trainer_of(folder, Grid(data=2, x=2)), WithLora(), Grid(data=2, x=2), folder / "lora" / FIRST)
    torch.testing.assert_close(resumed["weights"], lora["weights"], **CLOSE)


def callbacks(grid: Grid, folder: Path) -> None:
    """Checkpoints written behind the training, of which old ones are removed; and an end before the last epoch."""
    place = folder / "callbacks"
    saving = ModelCheckpoint(place, monitor="val_loss", mode="max", save_top_k=1, save_last="link", filename="{epoch}")
    stopping = EarlyStopping("val_loss", patience=1)  # the loss rises
    trainer = trainer_of(folder, grid, saving, stopping, max_epochs=6, strategy=AxonnStrategy(grid, async_save=True))
    fit(trainer, Module(), grid)
    assert trainer.current_epoch == 2, trainer.current_epoch
    assert sorted(path.name for path in place.iterdir()) == [LAST, "last.ckpt"]
    check_complete(place / LAST)
    check_complete(place / "last.ckpt")
    again = trainer_of(folder, grid, EarlyStopping("val_loss", patience=1), max_epochs=6)
    fit(again, Module(seed=3), grid, ckpt_path=place / "last.ckpt")
    assert again.current_epoch == 3  # it went on with the patience that was left, of which a new one has more
    trainer.save_checkpoint(folder / "weights", weights_only=True)
    hf_axonn.finish_saves()
    assert "no optimizer state" in refused(fit, trainer_of(folder, grid), Module(), grid, folder / "weights")


@pytest.mark.slow
def test_four_ranks_with_what_people_use(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "initial")
    read = fit(trainer_of(tmp_path, None), FromDirectory(tmp_path / "initial"), None)
    lora = fit(trainer_of(tmp_path, None), WithLora(), None)
    run_ranks(on_four_ranks, 4, tmp_path, read, lora, timeout=500)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    assert not any(name.startswith("model.model") for name in written.state_dict())
    hf_axonn.export_hf(tmp_path / "weights", tmp_path / "ordinary")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "ordinary")
    torch.testing.assert_close(exported.state_dict(), written.state_dict())


SCRIPT = """
import lightning as L, sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from hf_axonn import AxonnStrategy

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(LlamaConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=64))
    def training_step(self, batch, index):
        return self.model(input_ids=batch, labels=batch).loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(strategy=AxonnStrategy(x=2), devices=2, accelerator="cpu", max_steps=2, logger=False,
                        enable_progress_bar=False, enable_checkpointing=False)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randint(64, (8, 8)), batch_size=4))
    trainer.save_checkpoint("out")
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", [[], [*TORCHRUN, "--nproc-per-node=2"]], ids=["lightning", "torchrun"])
def test_a_script_starts_its_ranks(command, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert_quiet(run(tmp_path, *command, "script.py", linger=20))
    assert check_complete(tmp_path / "out").grid == Grid(x=2)
