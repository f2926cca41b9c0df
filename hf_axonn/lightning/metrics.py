"""Metrics of torchmetrics over a grid: each sample counts once, though ranks of x and y share it."""

from __future__ import annotations

from torch import nn
from torchmetrics import Metric

from hf_axonn.distributed.mesh import GridMesh


def count_samples_once(module: nn.Module, mesh: GridMesh) -> None:
    """Let the metrics in a module gather from the data-parallel ranks, unless they have a group of their own. No
    communication."""
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.process_group is None:
            metric.process_group = mesh.group("data", "z")
