"""Runs of Lightning's Trainer and Fabric on a tiny model, the same on one process and on any grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import SumMetric

from hf_axonn import AxonnFabricStrategy, AxonnStrategy, Grid
from hf_axonn.engine.dtensors import whole
from tests.helpers.float64 import Float64
from tests.helpers.models import tiny_model


ROWS, GLOBAL_BATCH = 16, 4


def rows(number: int = ROWS, seed: int = 5) -> list[dict[str, torch.Tensor]]:
    """Rows with equal numbers of labels: as under DistributedDataParallel a step is a mean of the ranks' means."""
    ids = torch.randint(3, 131, (number, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids]


class Module(L.LightningModule):
    """A causal LM, AdamW with a schedule; notes losses, gradients before they are clipped, and what was logged."""

    def __init__(self, seed: int = 0, kind: str = "llama", **changes: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = tiny_model(kind, seed=seed, **changes).train()
        self.kept = SumMetric()
        self.register_buffer("scale", torch.tensor([2.0 + seed]))
        self.losses: list[float] = []
        self.validated: list[float] = []
        self.grads: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("val_loss", loss, sync_dist=True)
        self.kept.update(float((batch["labels"] >= 0).sum()))

    def on_validation_epoch_end(self):
        self.validated.append(float(self.kept.compute()))
        self.kept.reset()

    def on_before_optimizer_step(self, optimizer):
        named = self.model.named_parameters()
        self.grads.append({name: whole(parameter.grad).clone() for name, parameter in named})

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}


def trainer_of(folder: Path, grid: Grid | None, *callbacks: Any, strategy: Any = None, **options: Any) -> L.Trainer:
    """A Trainer in float64 on one process of plain Lightning (grid None) or on a grid."""
    chosen = strategy or ("auto" if grid is None else AxonnStrategy(grid))
    settings = dict(precision="64-true", max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
    devices = 1 if grid is None else grid.size
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=chosen,
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        **settings | quiet | options,
    )


def loaders(grid: Grid | None) -> tuple[DataLoader, DataLoader]:
    """For training and validation; Lightning divides the rows among data-parallel ranks."""
    size = GLOBAL_BATCH // (grid.dp_size if grid else 1)
    # Lightning shuffles what it divides for training; one process gets the same order by the same sampler.
    sampler = None if grid else DistributedSampler(rows(), num_replicas=1, rank=0, shuffle=True)
    return DataLoader(rows(), batch_size=size, sampler=sampler), DataLoader(rows(8, seed=6), batch_size=size)


def every_epoch(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{epoch}", monitor="val_loss", save_top_k=-1)


def fit(trainer: L.Trainer, module: Module, grid: Grid | None, ckpt_path: Path | None = None) -> dict[str, Any]:
    """Train, and say what came of it, with full tensors."""
    train, val = loaders(grid)
    with Float64():
        trainer.fit(module, train, val, ckpt_path=ckpt_path)
    return {
        "losses": module.losses,
        "grads": module.grads,
        "weights": {name: whole(parameter).detach().clone() for name, parameter in module.model.named_parameters()},
        "validated": module.validated,
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "step": trainer.global_step,
        "scale": float(module.scale),
    }


def fabric_of(grid: Grid | None, **options: Any) -> L.Fabric:
    """A Fabric on one process of plain Lightning (grid None) or on a grid."""
    strategy = "auto" if grid is None else AxonnFabricStrategy(grid)
    fabric = L.Fabric(accelerator="cpu", devices=1 if grid is None else grid.size, strategy=strategy, **options)
    fabric.launch()
    return fabric


class Loop:
    """A script of Fabric: two micro-batches a step, clipped, on whole epochs."""

    def __init__(self, grid: Grid | None, seed: int = 0, **options: Any) -> None:
        self.fabric = fabric_of(grid, **options)
        model = tiny_model("llama", seed=seed).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.rates = torch.optim.lr_scheduler.LambdaLR(self.optimizer.optimizer, lambda step: 1 / (1 + step))
        size = GLOBAL_BATCH // (grid.dp_size if grid else 1)
        self.loader = self.fabric.setup_dataloaders(DataLoader(rows(), batch_size=size))
        self.state = {"net": self.model, "optimizer": self.optimizer, "rates": self.rates, "epoch": 0}
        self.losses: list[float] = []
        self.norms: list[float] = []

    def epoch(self, *, value: float | None = None) -> None:
        with Float64():
            for index, batch in enumerate(self.loader):
                last = index % 2 == 1
                with self.fabric.no_backward_sync(self.model, enabled=not last):
                    loss = self.model(**batch).loss
                    self.fabric.backward(loss / 2)
                self.losses.append(float(self.fabric.all_reduce(loss.detach().clone())))
                if last:
                    if value is None:
                        norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
                        self.norms.append(float(norm))
                    else:
                        self.fabric.clip_gradients(self.model, self.optimizer, clip_val=value)
                    self.optimizer.step()
                    self.rates.step()
                    self.optimizer.zero_grad()
        self.state["epoch"] += 1

    def outcome(self) -> dict[str, Any]:
        named = self.model.module.named_parameters()
        weights = {name: whole(parameter).detach().clone() for name, parameter in named}
        return {"losses": self.losses, "norms": self.norms, "weights": weights}
