"""Exposed communication: seconds of a decoder layer that overlaps do not hide, and all seconds of the layer.

A layer has groups of weights that are multiplied together, g = (q, k, v), (o), (up and gate), (down); C = compute, A =
gather over z, R = reduction over z, X = reduction of dI over x or y. With the three overlaps (docs/algorithm.md) what
is left is

    OAG   A of the next group - min(A, C of this one), in forward, in the recomputation and in backward
    ORS   in backward R of the group before shares that window: with one communicator over z A waits for R, with two
          (the engine on GPUs) they share the link and R may last into the window after, see `_backward_apart`
    OAR   X - min(X, C of this group's dW)

Tokens travel to experts beside the groups of shared experts: what is left is their seconds less those of the groups.
What hides them hides nothing over z.

The engine gathers a layer ahead, so that all groups of a layer are one window there (`layer_ahead`).

All other collectives over x and y count in full. Without an overlap its collectives count in full. Where the machine's
`overlap` is below 1, only that share of what could be hidden is. Layers of a kind are taken to follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hf_axonn.planner.shapes import LayerShape
from hf_axonn.planner.time.compute import Compute, Group
from hf_axonn.planner.time.layer_traffic import LayerSeconds, LayerTraffic
from hf_axonn.planner.time.links import Links


@dataclass(frozen=True, kw_only=True)
class Overlaps:
    """Overlaps that are on.

    Args:
        all_gather, reduce_scatter, all_reduce: the three overlaps.
        checkpointing: whether layers run again.
        share: share of a collective that the machine can hide.
        apart: whether gathers and reductions over z have a communicator each.
        layer_ahead: whether the gathers of a layer have all of the layer before to arrive, as in the engine, or each
            the group before.
    """

    all_gather: bool
    reduce_scatter: bool
    all_reduce: bool
    checkpointing: bool
    share: float
    apart: bool = False
    layer_ahead: bool = False


class Exposed(NamedTuple):
    """Seconds of one layer that nothing hides: over z in forward, over z in backward, over x and y; the compute of
    backward behind which nothing over z travels; the seconds of communication that are hidden; and the parts of
    forward_z and of xy that belong to the first forward pass."""

    forward_z: float
    backward_z: float
    xy: float
    slack: float
    hidden: float
    first_z: float
    first_xy: float


def exposed_seconds(overlaps: Overlaps, layer: LayerSeconds, once: tuple[int, ...], groups: list[Group]) -> Exposed:
    """Seconds of a layer's communication that nothing hides.

    Args:
        overlaps: those that are on.
        layer: seconds of its collectives.
        once: groups that backward does not gather once more after recomputation.
        groups: seconds of its computation.
    """
    gathers, reduces = layer.gathers, layer.reduces
    forward = [group.forward + group.after_forward for group in groups]
    backward = [group.input_gradient + group.weight_gradient + group.after_backward for group in groups]
    runs_again = overlaps.checkpointing and layer.gathers_again and not layer.kept
    share = overlaps.share
    reductions = [
        share * min(seconds, group.weight_gradient) if overlaps.all_reduce else 0.0
        for seconds, group in zip(layer.hidden, groups, strict=True)
    ]
    # Weight gradients that hide a reduction, or come later (pipelines), hide no tokens.
    busy = reductions if overlaps.all_reduce else [group.weight_gradient for group in groups]
    sent = returned = 0.0
    for tokens in layer.dispatches:
        sent += _hide_tokens(share, sum(tokens.sent), forward, tokens.groups, [0.0] * len(groups))
        returned += _hide_tokens(share, sum(tokens.returned), backward, tokens.groups, busy)
    again = gathers  # of backward
    if layer.kept:
        again = [0.0] * len(groups)
    elif runs_again:  # what recomputation has gathered and keeps
        again = [0.0 if index in once else seconds for index, seconds in enumerate(gathers)]
    travels = sum(gathers) + sum(reduces) + (sum(gathers) if runs_again else 0.0)
    if overlaps.layer_ahead:  # all groups of the layer are one window
        lists = (gathers, reduces, again, forward, backward)
        gathers, reduces, again, forward, backward = ([sum(seconds)] for seconds in lists)
    beside = share if overlaps.all_gather else 0.0
    following = gathers[1:] + gathers[:1]  # travels beside the compute of the group before
    first_z = sum(travel - beside * min(travel, room) for travel, room in zip(following, forward, strict=True))
    forward_z = first_z + (first_z if runs_again else 0.0)  # a recomputed layer gathers once more, in the same order
    # Backward goes from the last group to the first: while group g computes, the weights of g - 1 come and the
    # gradients of g + 1 leave.
    count = len(forward)
    windows = [(again[index - 1], reduces[(index + 1) % count], backward[index]) for index in reversed(range(count))]
    if overlaps.apart and overlaps.all_gather and overlaps.reduce_scatter:
        backward_z, slack = _backward_apart(windows)
    else:
        backward_z = slack = 0.0
        for gather, reduce, room in windows:
            travel = (gather if overlaps.all_gather else 0.0) + (reduce if overlaps.reduce_scatter else 0.0)
            hidden = share * min(travel, room)
            backward_z += gather + reduce - hidden
            slack += max(0.0, room - travel)
    beside_xy = (2 if overlaps.checkpointing else 1) * sent + returned + sum(reductions)
    exposed_xy = layer.forward + layer.backward + sum(layer.hidden) - beside_xy
    hidden = max(0.0, travels + sum(again) - forward_z - backward_z) + beside_xy
    return Exposed(forward_z, backward_z, exposed_xy, slack, hidden, first_z, layer.forward - sent)


def _hide_tokens(share: float, travel: float, rooms: list[float], groups: range, busy: list[float]) -> float:
    """Return the seconds of `travel` that hide behind groups, and take them off their `rooms`, parts of which are
    busy."""
    free = {index: rooms[index] - busy[index] for index in groups}
    hidden = share * min(travel, sum(free.values()))
    for index, room in free.items():
        rooms[index] -= hidden * room / sum(free.values()) if hidden else 0.0
    return hidden


def hide_averages(overlaps: Overlaps, averages: float, slack: float) -> float:
    """Seconds of the averages over data that hide behind the last backward pass, of which `slack` has nothing beside
    it. AxoNN averages after that pass: sync_gradients waits for one all-reduce a parameter."""
    early = overlaps.all_gather and overlaps.reduce_scatter and overlaps.layer_ahead
    return overlaps.share * min(averages, slack) if early else 0.0


def _backward_apart(windows: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Seconds of a layer's backward that wait for something over z, and those in which nothing travels over z, where
    gathers and reductions have a communicator each.

    At the start of a window a gather and a reduction are launched; reductions run in turn. While both communicators
    have work each has half of the link. The window ends when its computation is over, the gather has arrived, and of
    the reductions only the last is under way (`ReductionQueue`, of depth 2). Layers of a kind follow each other: the
    second one counts, which begins with what the first has left.

    Args:
        windows: of each group in the order of backward: gather, reduction, computation.
    """
    left = exposed_z = slack = 0.0
    for _ in range(2):
        exposed_z = slack = 0.0
        for gather, reduce, room in windows:
            arrived = gather + min(gather, left + reduce)
            earlier_gone = left + min(left, gather)
            length = max(room, arrived, earlier_gone)
            exposed_z += length - room
            slack += max(0.0, length - gather - left - reduce)
            left = max(0.0, left + reduce - (length - gather))
    return exposed_z, slack


class LayerTime(NamedTuple):
    """Seconds of a layer and micro-batch, forward and backward.

    parts: by parts of a step (`Prediction.seconds`); forward: all of the first forward pass; weight_gradient: products
    of weight gradients; first_z: part of forward that waits for a gather; slack, hidden: as `Exposed`.
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
    """Seconds of a layer: what it computes, and what overlaps leave of its communication.

    Args:
        layer, travels: the layer, and its traffic.
        compute, overlaps, links: of the grid.
    """
    passes = 2 if overlaps.checkpointing else 1
    groups = compute.groups(layer)
    left = exposed_seconds(overlaps, travels.seconds(links), travels.once, groups)
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
