"""Seconds of one decoder layer and micro-batch: what it computes, and what overlaps leave of its communication."""

from __future__ import annotations

from typing import NamedTuple

from hf_axonn.planner.model.shapes import LayerShape
from hf_axonn.planner.time.compute import Compute
from hf_axonn.planner.time.exposed import Overlaps, exposed
from hf_axonn.planner.time.links import Links
from hf_axonn.planner.time.schedules import LayerTraffic


class LayerTime(NamedTuple):
    """Seconds of a layer and micro-batch, forward and backward.

    parts: by parts of a step (`Prediction.seconds`); forward: all of the first forward pass; weight_gradient: products
    of weight gradients; first_z: what of forward waits for a gather; slack, hidden: as `Exposed`.
    """

    parts: dict[str, float]
    forward: float
    weight_gradient: float
    first_z: float
    slack: float
    hidden: float


def layer_time(
    layer: LayerShape, travels: LayerTraffic, compute: Compute, overlaps: Overlaps, links: Links
) -> LayerTime:
    """The seconds of a layer.

    Args:
        layer, travels: which, and what travels for it.
        compute, overlaps, links: of the grid.
    """
    passes = 2 if overlaps.checkpointing else 1
    groups = compute.groups(layer)
    left = exposed(overlaps, travels.seconds(links), travels.once, groups)
    parts = dict.fromkeys(("gemm", "attention", "elementwise"), 0.0)
    for group in groups:
        parts["gemm"] += group.forward * passes + group.input_gradient + group.weight_gradient
        parts["attention" if group.attends else "elementwise"] += group.after_forward * passes + group.after_backward
    there, back = compute.router(layer)
    parts["elementwise"] += there * passes + back
    computed = sum(parts.values())
    forward = there + sum(group.forward + group.after_forward for group in groups)
    parts["slowdown"] = links.machine.slowdown * left.hidden
    parts["exposed x/y"] = left.xy
    parts["exposed z"] = left.forward_z + left.backward_z
    # What slows computation is taken to slow both passes alike.
    first = forward * (1 + parts["slowdown"] / computed) + left.first_z + left.first_xy
    weight_gradient = sum(group.weight_gradient for group in groups)
    return LayerTime(parts, first, weight_gradient, left.first_z, left.slack, left.hidden)
