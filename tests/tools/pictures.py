"""The pictures of docs/pictures, drawn from the code's own numbers.

    python -m tests.tools.pictures       writes them anew (`make picture`)

grid         who sits where: `Grid.coordinates`, `Grid.ranks_along`
weights      which rank holds which rectangle of a weight: `slices_at`
rows         which rank holds which positions of a row, and which heads in attention: `Rows.take`, `Heads`
layer        what a decoder layer's forward pass holds and sends: recorded from the engine, on one simulated rank
overlap      a layer's forward and backward pass with and without the overlaps: the planner's seconds
goldfish     which tokens of two texts with a common passage are left out of the loss: `goldfish_mask`
intervals    the interval of a share, for few and for many documents: `clopper_pearson`
packages     who imports whom: the graph of package_graph.py
monitoring   what tensorboard has of a run with MonitorCallback: monitoring.json, of tests/benchmarks/monitoring.py

Each is an SVG file with colours for light and for dark pages: by the system's setting, or by `data-theme` of the page
that it stands in.
"""

from __future__ import annotations

import html
import itertools
import json
import sys
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_axonn import AxonnConfig, Grid, goldfish_mask, parallelize
from hf_axonn.distributed.collectives import observe
from hf_axonn.distributed.mesh import GridMesh, grid_mesh
from hf_axonn.engine.rows import Rows
from hf_axonn.planner.candidate import Candidate
from hf_axonn.planner.dense import load_shape
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import load_machine
from hf_axonn.planner.time.compute import Group
from hf_axonn.planner.time.layer_traffic import LayerSeconds
from hf_axonn.planner.time.links import Links
from hf_axonn.topology.grid import AXES, WEIGHT_AXES, GridPosition
from hf_axonn.topology.heads import Heads
from hf_axonn.topology.local_slices import slices_at
from hf_axonn.topology.weight_kind import SHARDED_DIMS, WeightKind
from hf_axonn_eval import clopper_pearson
from tests.benchmarks.planner.simulate import NoValues, faked, values_are_read, world
from tests.helpers import ROOT
from tests.tools.package_graph import FOLDERS, folder_of, imports, layers, reduced, short


FOLDER = ROOT / "docs" / "pictures"
WIDTH = 720
# name -> colour on a light page, on a dark one. Those of the axes are told apart by the colour-blind, too.
COLOURS = {
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#9198a1"),
    "line": ("#c8d1da", "#3d444d"),
    "box": ("#f0f3f6", "#21262d"),
    "y": ("#b35900", "#f0a04b"),
    "x": ("#0960ca", "#6cb2ff"),
    "z": ("#18793a", "#4cc66a"),
    "data": ("#8039c8", "#c79bff"),
    "work": ("#59636e", "#9198a1"),
}


def style() -> str:
    """The style sheet of every picture."""
    light, dark = ("".join(f"--{name}:{both[place]};" for name, both in COLOURS.items()) for place in (0, 1))
    rules = [
        f"svg.drawn{{{light}font-family:system-ui,sans-serif;font-size:14px}}",
        f"@media (prefers-color-scheme:dark){{svg.drawn{{{dark}}}}}",
        f"[data-theme=light] svg.drawn{{{light}}}",
        f"[data-theme=dark] svg.drawn{{{dark}}}",
        ".drawn text{fill:var(--ink)}.drawn .small{font-size:12px;fill:var(--soft)}.drawn .bold{font-weight:600}",
        ".drawn .frame{fill:none;stroke:var(--line)}.drawn .plain{fill:var(--box);stroke:var(--line)}",
        ".drawn path{fill:none;stroke:var(--soft);stroke-width:1.3}",
    ]
    for name in COLOURS:
        rules.append(f".drawn .{name}{{fill:var(--{name});fill-opacity:.22;stroke:var(--{name})}}")
        rules.append(f".drawn text.t-{name}{{fill:var(--{name})}}.drawn path.t-{name}{{stroke:var(--{name})}}")
    return "".join(rules)


@dataclass
class Drawing:
    """An SVG picture that is made part by part. Lengths are pixels where it is WIDTH wide.

    Args:
        title: what it shows, for those who do not see it.
        height: can be set later.
    """

    title: str
    height: float = 0
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, kind: str = "plain") -> None:
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        where = f'x="{x:g}" y="{y:g}"' + (f' class="{kind}"' if kind else "")
        self.parts.append(f'<text {where} text-anchor="{anchor}">{html.escape(text)}</text>')

    def path(self, along: str, kind: str = "") -> None:
        self.parts.append(f'<path d="{along}"' + (f' class="{kind}"' if kind else "") + "/>")

    def arrow(self, x: float, top: float, bottom: float, kind: str = "") -> None:
        """Downwards."""
        self.path(f"M{x:g} {top:g}V{bottom:g}m-4 -6l4 6l4 -6", kind)

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawn" viewBox="0 0 {WIDTH} {self.height:g}" role="img">'
        )
        title = html.escape(self.title)
        return "\n".join([head, f"<title>{title}</title>", f"<style>{style()}</style>", *self.parts, "</svg>", ""])


def grid_picture() -> Drawing:
    """The ranks of a grid by their coordinates, and the groups of rank 0."""
    grid = Grid(data=2, z=2, y=2, x=2)
    drawing = Drawing(f"The {grid.size} ranks of the grid {grid} and, in colours, the groups that rank 0 is in.")
    cell, left, top = 74, 40, 36
    of_rank_0 = {rank: axis for axis in AXES for rank in grid.ranks_along((axis,), 0) if rank}
    panel_width, panel_height = grid.y * cell + 44, grid.x * cell + 62
    for rank in range(grid.size):
        here = grid.coordinates(rank)
        panel_x, panel_y = left + here["z"] * panel_width, top + here["data"] * panel_height
        if here["x"] == here["y"] == 0:
            drawing.text(panel_x, panel_y - 10, f"data={here['data']}  z={here['z']}", "bold")
            drawing.text(panel_x + grid.y * cell / 2, panel_y + grid.x * cell + 17, "y", "small", "middle")
            drawing.text(panel_x - 12, panel_y + grid.x * cell / 2, "x", "small", "middle")
        kind = "ink" if rank == 0 else of_rank_0.get(rank, "plain")
        drawing.box(panel_x + here["y"] * cell, panel_y + here["x"] * cell, cell, cell, kind)
        middle = panel_x + (here["y"] + 0.5) * cell, panel_y + (here["x"] + 0.5) * cell + 5
        drawing.text(*middle, str(rank), "bold" if rank == 0 or rank in of_rank_0 else "", "middle")
    words = {
        "y": ("divide the input features", "of a column layer"),
        "x": ("divide the output features", "of a column layer"),
        "z": ("divide each of these weight blocks;", "other samples"),
        "data": ("hold the same weights;", "other samples"),
    }
    x, y = left + 2 * panel_width + 12, top + 4
    drawing.text(x, y + 8, "Groups of rank 0", "bold")
    for axis, lines in words.items():
        y += 56
        ranks = ", ".join(map(str, grid.ranks_along((axis,), 0)))
        drawing.box(x, y - 22, 14, 14, axis)
        drawing.text(x + 24, y - 10, f"{axis}: ranks {ranks}", "bold")
        for line in lines:
            y += 16
            drawing.text(x + 24, y - 8, line, "small")
        y -= 16
    drawing.height = top + 2 * panel_height - 20
    return drawing


def weights_picture() -> Drawing:
    """The rectangle of each rank, of a column weight and of the row weight that follows it."""
    grid = Grid(z=2, y=2, x=2)
    hidden, inner = 4096, 14336
    drawing = Drawing(f"Which rank of the grid {grid} holds which rectangle of the MLP's weights of Llama 3 8B.")
    sizes = [getattr(grid, axis) for axis in WEIGHT_AXES]
    weights = ((WeightKind.COLUMN, "gate, up", (inner, hidden)), (WeightKind.ROW, "down", (hidden, inner)))
    left, top = 64, 70
    for kind, name, shape in weights:
        across, down = "yx" if kind == WeightKind.COLUMN else "xy"
        rows, cols = shape
        # An elongated weight is drawn less so, that its names can be read.
        wide, high = (190.0, 300.0) if rows > cols else (320.0, 220.0)
        drawing.text(left, top - 42, f"{name}: a {kind} layer", "bold")
        drawing.text(left, top - 24, f"weight [{rows}, {cols}]", "small")
        drawing.text(left + wide / 2, top - 6, f"in features over {across}", f"small t-{across}", "middle")
        drawing.path(f"M{left - 14} {top}V{top + high:g}", f"t-{down}")
        turned = f"translate({left - 22:g} {top + high / 2:g}) rotate(-90)"
        said = f"out features over {down}"
        drawing.parts.append(f'<text class="small t-{down}" text-anchor="middle" transform="{turned}">{said}</text>')
        for rank in range(grid.size):
            here = grid.coordinates(rank)
            place = slices_at(shape, SHARDED_DIMS[kind], sizes, [here[axis] for axis in WEIGHT_AXES])
            y, x = (span.start / full for span, full in zip(place, shape, strict=True))
            height, width = ((span.stop - span.start) / full for span, full in zip(place, shape, strict=True))
            drawing.box(left + x * wide, top + y * high, width * wide, height * high, "plain" if here["z"] else "z")
            middle = left + (x + width / 2) * wide
            drawing.text(middle, top + (y + height / 2) * high - 3, f"rank {rank}", "", "middle")
            drawing.text(middle, top + (y + height / 2) * high + 13, f"z={here['z']}", "small", "middle")
        local = [span.stop - span.start for span in place]
        drawing.text(left, top + high + 20, f"each rank stores [{local[0]}, {local[1]}]", "small")
        left += wide + 86
    drawing.height = top + 300 + 34
    return drawing


ROW_LENGTH, ROW_HEADS, ROW_GRID = 14, 8, Grid(z=4, x=2, context=4)
ROW_CELL = 36.0
CONTEXT_COLOURS = ("y", "x", "z", "data")  # by the index on context


def own_positions(rank: int, striped: bool) -> list[int]:
    """Positions that a rank holds outside of attention; -1 behind the end of the row."""
    here = GridPosition(ROW_GRID, ROW_GRID.coordinates(rank))
    whole = torch.arange(ROW_LENGTH).unsqueeze(0)
    rows = Rows(cast(GridMesh, here), 1, ROW_LENGTH, whole, striped=striped)
    return list(rows.take(whole, fill=-1)[0].tolist())


def own_heads(rank: int) -> range:
    """Query heads that a rank has in attention."""
    here = GridPosition(ROW_GRID, ROW_GRID.coordinates(rank))
    divided = Heads.divide(ROW_HEADS, ROW_HEADS, here)
    count, parts = divided.own_query(here), here.size("context")
    first = here.index(*divided.axes) * count + here.index("context") * (count // parts)
    return range(first, first + count // parts)


def rows_picture() -> Drawing:
    """The positions of a row outside of attention, and its heads inside."""
    drawing = Drawing(
        f"A row of {ROW_LENGTH} positions and {ROW_HEADS} heads over the grid {ROW_GRID}: with heads a rank holds "
        "some positions, and in attention all positions of some heads; with keys it holds two stripes of positions."
    )
    left, cell, y = 118.0, ROW_CELL, 30.0
    drawing.text(left, y - 10, "heads, outside of attention: every module but attention, and the loss", "bold")
    _draw_positions(drawing, left, y, striped=False)
    y += 84
    drawing.arrow(left + 2 * cell, y, y + 44)
    drawing.text(left + 2 * cell + 14, y + 18, "all-to-all over context:", "small")
    drawing.text(left + 2 * cell + 14, y + 34, "q, k and v together", "small")
    drawing.path(f"M{left + 9 * cell:g} {y + 44:g}V{y:g}m-4 6l4 -6l4 6")
    drawing.text(left + 9 * cell + 14, y + 18, "all-to-all over context:", "small")
    drawing.text(left + 9 * cell + 14, y + 34, "what attention has computed", "small")
    y += 76
    drawing.text(left, y - 12, "in attention", "bold")
    for rank in sorted(range(ROW_GRID.size), key=lambda each: own_heads(each)[0]):
        for head in own_heads(rank):
            part = ROW_GRID.coordinates(rank)["z"] % ROW_GRID.context
            drawing.text(left - 12, y + 18, f"head {head}", "small", "end")
            drawing.box(left, y, ROW_LENGTH * cell, 26, CONTEXT_COLOURS[part])
            at_x = ROW_GRID.coordinates(rank)["x"]
            label = f"rank {rank}: context={part}, x={at_x}; positions 0 to {ROW_LENGTH - 1}"
            drawing.text(left + ROW_LENGTH * cell / 2, y + 18, label, "", "middle")
            y += 26
    y += 46
    drawing.text(
        left, y - 10, "keys, everywhere: in attention k and v of all positions are gathered over context", "bold"
    )
    _draw_positions(drawing, left, y, striped=True)
    drawing.height = y + 78
    return drawing


def _draw_positions(drawing: Drawing, left: float, y: float, striped: bool) -> None:
    """Draw the positions that the ranks of each index on context hold, in the order in which they hold them."""
    ranks_of: dict[int, list[int]] = {}
    for rank in range(ROW_GRID.size):
        ranks_of.setdefault(ROW_GRID.coordinates(rank)["z"] % ROW_GRID.context, []).append(rank)
    drawing.text(left - 12, y + 22, "positions", "small", "end")
    for part, ranks in ranks_of.items():
        places = own_positions(ranks[0], striped)
        for offset, place in enumerate(places):
            x = left + (part * len(places) + offset) * ROW_CELL
            drawing.box(x, y, ROW_CELL, 34, CONTEXT_COLOURS[part] if place >= 0 else "frame")
            label, kind = (str(place), "") if place >= 0 else ("fill", "small")
            drawing.text(x + ROW_CELL / 2, y + 22, label, kind, "middle")
        middle = left + (part + 0.5) * len(places) * ROW_CELL
        drawing.text(middle, y + 52, f"ranks {', '.join(map(str, ranks))}", f"t-{CONTEXT_COLOURS[part]}", "middle")
        drawing.text(middle, y + 68, f"context={part}", "small", "middle")


@dataclass(frozen=True)
class Place:
    """Where a layer's forward pass is: a shape on this rank, and what was sent to come there."""

    name: str
    shape: tuple[int, ...]
    before: tuple[tuple[str, tuple[str, ...], int], ...]


STEPS = {
    ("", "in"): "residual stream, norm",
    ("self_attn.q_proj", "in"): "input of q, k, v",
    ("self_attn.q_proj", "out"): "q; attention on own heads",
    ("self_attn.o_proj", "out"): "residual stream, norm",
    ("mlp.gate_proj", "in"): "input of gate, up",
    ("mlp.gate_proj", "out"): "gate; activation function",
    ("mlp.down_proj", "out"): "residual stream",
}


def recorded(config: LlamaConfig, grid: Grid, tokens: int, layout: str) -> list[Place]:
    """What rank 0 holds and sends in the second decoder layer of a forward pass, in bfloat16: by the engine itself,
    on tensors without values and without the other ranks (tests/benchmarks/planner/simulate.py)."""
    found: list[Place] = []
    sent: list[tuple[str, tuple[str, ...], int]] = []

    def call(kind: str, payload: int, group: Any) -> None:
        places = [grid.coordinates(rank) for rank in dist.get_process_group_ranks(group)]
        sent.append((kind, tuple(axis for axis in AXES if len({place[axis] for place in places}) > 1), payload))

    def see(name: str, tensor: torch.Tensor) -> None:
        found.append(Place(name, tuple(tensor.shape[-2:]), tuple(sent)))
        sent.clear()

    with world(grid, 0):
        mesh = grid_mesh(grid, "cpu")
        assert mesh.storage_mesh is not None and mesh.sample_mesh is not None  # made of real tensors
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        model, _ = parallelize(model, grid, config=AxonnConfig(grid=grid, layout=layout))
        with FakeTensorMode(allow_non_fake_inputs=True), NoValues(grid.x * grid.y), values_are_read():
            faked(model)
            ids = torch.zeros(1, tokens, dtype=torch.int64)

            count = torch.ones((), dtype=torch.int64)

            def run() -> None:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(input_ids=ids, labels=ids, num_items_in_batch=count, use_cache=False).loss
                loss.backward()

            run()  # learns what to gather ahead
            _watch(model.model.layers[1], see, sent.clear)
            with observe(call):
                run()
    return found


def _watch(layer: nn.Module, see: Any, begin: Any) -> None:
    for (name, end), title in STEPS.items():
        module = layer.get_submodule(name)
        if end == "out":
            module.register_forward_hook(lambda _, given, result, title=title: see(title, result))
        else:
            if not name:
                module.register_forward_pre_hook(lambda *_: begin())
            module.register_forward_pre_hook(lambda _, given, title=title: see(title, given[0]))


def layer_picture() -> Drawing:
    """The stations of a decoder layer, and the collectives between them."""
    grid, tokens = Grid(z=2, y=2, x=2), 8192
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=3,  # of 32, which are alike
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    ways = [(layout, recorded(config, grid, tokens, layout)) for layout in ("token", "feature")]
    drawing = Drawing(f"A decoder layer of Llama 3 8B on one rank of the grid {grid}: local shapes and collectives.")
    names = {
        "all_gather": "all-gather",
        "reduce_scatter": "reduce-scatter",
        "all_to_all": "all-to-all",
        "all_reduce": "all-reduce",
    }
    bottom = 0.0
    for column, (layout, places) in enumerate(ways):
        left, y = 16 + column * 360, 62
        drawing.text(left, 20, f"{layout} layout", "bold")
        drawing.text(left, 40, f"rank 0 of {grid.size}, {tokens:,} tokens, bfloat16", "small")
        for place in places:
            over_z = sum(payload for _, axes, payload in place.before if axes == ("z",))
            others = [entry for entry in place.before if entry[1] != ("z",)]
            if place is not places[0]:
                height = max(26, 18 * len(others) + 12 + (18 if over_z else 0))
                drawing.arrow(left + 22, y, y + height)
                for line, (kind, axes, payload) in enumerate(others):
                    said = f"{names[kind]} over {', '.join(axes)}: {size_text(payload)}"
                    drawing.text(left + 38, y + 19 + 18 * line, said, f"t-{axes[-1]}")
                if over_z:
                    said = f"ahead: next layer's weights over z, {size_text(over_z)}"
                    drawing.text(left + 38, y + 19 + 18 * len(others), said, "small t-z")
                y += height
            rows, cols = place.shape
            drawing.box(left, y, 328, 34)
            drawing.text(left + 12, y + 22, place.name)
            drawing.text(left + 316, y + 22, f"[{rows}, {cols}]", "small", "end")
            y += 34
        bottom = max(bottom, y)
    drawing.height = bottom + 16
    return drawing


def size_text(payload: float) -> str:
    return f"{payload / 2**20:.0f} MiB" if payload >= 2**20 else f"{payload / 2**10:.0f} KiB"


@dataclass(frozen=True)
class Bar:
    """Something that takes time: on a lane, from a second to a second."""

    phase: str
    lane: str
    begin: float
    end: float
    name: str


MODEL, MACHINE, OVERLAP_GRID, SEQUENCES, SEQ = "gpt-20b", "perlmutter", Grid(z=8, x=4), 64, 2048


def overlap_seconds() -> tuple[LayerSeconds, list[Group]]:
    """The planner's seconds of one decoder layer: of its collectives and of what is computed."""
    shape, machine = load_shape(MODEL), load_machine(MACHINE)
    job = Job(shape=shape, machine=machine, sequences=SEQUENCES, seq=SEQ, checkpointing=False, micro_batches=1)
    candidate = Candidate(job, OVERLAP_GRID, 1)
    _, traffic, _ = candidate.traffic.layers[0]
    return traffic.seconds(Links(machine, OVERLAP_GRID)), candidate.compute.groups(shape.kinds[0][0])


def timeline(on: bool, layer: LayerSeconds, groups: list[Group]) -> list[Bar]:
    """One layer's forward pass and its backward pass, without or with the overlaps, as planner/time/exposed.py has it.

    Collectives over x that nothing hides stand in one bar at the end of each pass; over z what is sent with the
    overlaps is the next layer's, which is as long.
    """
    bars: list[Bar] = []
    now, phase = 0.0, "forward"

    def add(lane: str, seconds: float, name: str, begin: float | None = None) -> float:
        begin = now if begin is None else begin
        if seconds:
            bars.append(Bar(phase, lane, begin, begin + seconds, name))
        return begin + seconds

    if on:
        arrived = now
        for index, gather in enumerate(layer.gathers):
            arrived = add("gather", gather, GROUPS[index], arrived)
    for index, group in enumerate(groups):
        if not on:
            now = add("gather", layer.gathers[index], GROUPS[index])
        now = add("compute", group.forward + group.after_forward, GROUPS[index])
    if on:
        now = max(now, arrived)
    now = add("x", layer.forward, "")
    begin, phase = now, "backward"
    if on:
        # Gathers and reductions have a communicator each and share the links while both are under way.
        gathers, reduces = sum(layer.gathers), sum(layer.reduces)
        slower = 2 if gathers <= reduces else 1 + reduces / gathers
        arrived = gone = begin
        for index in reversed(range(len(groups))):
            arrived = add("gather", slower * layer.gathers[index], GROUPS[index], arrived)
        shared = arrived - begin
        for index in reversed(range(len(groups))):
            alone = max(0.0, layer.reduces[index] - max(0.0, begin + shared - gone) / 2)
            gone = add("reduce", (layer.reduces[index] - alone) * 2 + alone, GROUPS[index], gone)
    for index in reversed(range(len(groups))):
        group = groups[index]
        if not on:
            now = add("gather", layer.gathers[index], GROUPS[index])
        now = add("compute", group.after_backward + group.input_gradient, "dI")
        hidden = layer.hidden[index]
        if on:
            add("x", hidden, "")
            now += max(0.0, hidden - group.weight_gradient)
            now = add("compute", group.weight_gradient, "dW")
        else:
            now = add("x", hidden, "")
            now = add("compute", group.weight_gradient, "dW")
            now = add("reduce", layer.reduces[index], GROUPS[index])
    if on:
        now = max(now, arrived)
    add("x", layer.backward, "")
    return bars


GROUPS = ("qkv", "o", "up", "down")
LANES = {
    "compute": ("compute", "work"),
    "gather": ("gather over z", "z"),
    "reduce": ("reduce over z", "z"),
    "x": ("over x", "x"),
}


def overlap_picture() -> Drawing:
    """Lanes of what one rank computes and sends, above each other on one scale of time."""
    layer, groups = overlap_seconds()
    runs = {on: timeline(on, layer, groups) for on in (False, True)}
    ends = {on: max(bar.end for bar in bars) for on, bars in runs.items()}
    of = f"{MODEL.upper()} on {OVERLAP_GRID.size} GPUs of Perlmutter"
    took = {on: f"{end * 1e3:.0f} ms" for on, end in ends.items()}
    drawing = Drawing(f"One decoder layer of {of}: {took[False]} without overlaps, {took[True]} with them.")
    left, lane_height, y = 104, 30, 0.0
    scale = (WIDTH - left - 12) / ends[False]
    for on, bars in runs.items():
        y += 24
        title = "With the three overlaps" if on else "Without overlaps"
        drawing.text(8, y, f"{title}: {took[on]}", "bold")
        y += 12
        turn = left + scale * next(bar.begin for bar in bars if bar.phase == "backward")
        for lane, (name, kind) in LANES.items():
            drawing.text(8, y + 18, name, "small")
            for bar in bars:
                if bar.lane != lane:
                    continue
                width = (bar.end - bar.begin) * scale
                drawing.box(left + bar.begin * scale, y + 3, width, lane_height - 8, kind)
                if width > 6.6 * len(bar.name):
                    drawing.text(left + (bar.begin + bar.end) / 2 * scale, y + 18, bar.name, "small", "middle")
            y += lane_height
        drawing.path(f"M{turn:g} {y - 4 * lane_height:g}V{y + 6:g}")
        drawing.text(turn - 6, y + 8, "forward", "small", "end")
        drawing.text(turn + 6, y + 8, "backward", "small")
        y += 20
    drawing.height = y + 4
    return drawing


PASSAGE = "the lamp was lit at six and the wind came from the west all night"
# What stands before and after the passage.
TEXTS = (("The keeper wrote in the log that evening :", "."), ("Nobody in the village knew that", ", but it was ."))
K, CONTEXT = 4, 4


def masked_texts() -> list[list[tuple[str, bool]]]:
    """The words of each text, one token each, and whether the goldfish loss leaves it out."""
    texts = [f"{before} {PASSAGE} {after}".split() for before, after in TEXTS]
    ids = {word: index for index, word in enumerate(dict.fromkeys(itertools.chain(*texts)))}
    masks = [goldfish_mask(torch.tensor([[ids[word] for word in text]]), k=K, context_width=CONTEXT) for text in texts]
    return [[*zip(text, mask[0].tolist(), strict=True)] for text, mask in zip(texts, masks, strict=True)]


def goldfish_picture() -> Drawing:
    """Two texts with a common passage; its dropped tokens are the same in both."""
    drawing = Drawing(
        f"Tokens that the goldfish loss leaves out of two texts with a common passage, k={K}, h={CONTEXT}."
    )
    y = 14.0
    for text in masked_texts():
        x = 12.0
        for word, drop in text:
            width = 9 * len(word) + 12
            if x + width > WIDTH - 8:
                x, y = 12.0, y + 38
            drawing.box(x, y, width, 28, "y" if drop else "frame")
            drawing.text(x + width / 2, y + 19, word, "bold t-y" if drop else "", "middle")
            x += width + 6
        y += 58
    drawing.box(12, y, 14, 14, "y")
    said = f"left out of the loss: the hash of the {CONTEXT} tokens up to it chooses one in {K}"
    drawing.text(34, y + 12, said, "small")
    drawing.height = y + 24
    return drawing


SHARES = ((0, 8), (0, 12), (0, 100), (0, 1000), (4, 8), (6, 12), (50, 100), (500, 1000), (12, 12))


def intervals_picture() -> Drawing:
    """Exact 95% intervals of a share, by the number of documents."""
    drawing = Drawing("Exact 95% intervals of a share: the more documents, the shorter.")
    left, scale, y = 150, 480.0, 30.0
    for tenth in range(0, 11, 2):
        x = left + tenth / 10 * scale
        drawing.path(f"M{x:g} 26V{30 + 28 * len(SHARES):g}", "t-line")
        drawing.text(x, 18, f"{tenth / 10:.1f}", "small", "middle")
    for successes, trials in SHARES:
        found = clopper_pearson(successes, trials)
        drawing.text(left - 18, y + 19, f"{successes:,} of {trials:,}", "", "end")
        drawing.box(left + found.low * scale, y + 8, max(1.5, (found.high - found.low) * scale), 12, "x")
        drawing.box(left + successes / trials * scale - 2, y + 4, 4, 20, "ink")
        said = f"{found.low:.3f} to {found.high:.3f}"
        if found.high < 0.9:
            drawing.text(left + found.high * scale + 8, y + 19, said, "small")
        else:
            drawing.text(left + found.low * scale - 8, y + 19, said, "small", "end")
        y += 28
    drawing.height = y + 10
    return drawing


def packages_picture() -> Drawing:
    """The packages from the highest to the lowest, and an arc for each arrow of the picture in architecture.md."""
    graph = reduced(imports())
    drawing = Drawing("The packages, each of which imports only such as stand below it.")
    rows: dict[str, float] = {}
    y, left = 0.0, 270
    for root in reversed(FOLDERS):
        y += 30
        drawing.text(left - 12, y, f"{FOLDERS[root].relative_to(ROOT).as_posix()}/", "bold", "end")
        rows[root] = y - 5
        for name in layers():
            if folder_of(name) == root:
                y += 24
                drawing.text(left - 12, y, short(name), "", "end")
                rows[name] = y - 5
    for name, below in graph.items():
        for end in sorted(below, key=rows.__getitem__):
            top, bottom = rows[name], rows[end]
            reach = left + 26 + 0.62 * (bottom - top)
            kind = "t-y" if folder_of(name) == "hf_axonn" else "t-x"
            drawing.path(
                f"M{left} {top:g}C{reach:g} {top:g} {reach:g} {bottom:g} {left + 2} {bottom:g}m7 -4l-7 4l7 4", kind
            )
    drawing.height = y + 16
    return drawing


# name in the log -> title, factor, unit
CHARTS = {
    "tokens_per_second": ("tokens_per_second", 1.0, ""),
    "mfu": ("mfu", 100.0, "%"),
    "exposed_communication": ("exposed_communication", 100.0, "%"),
    "goodput": ("goodput", 100.0, "%"),
}
SPENT = {"step": "z", "data": "x", "evaluation": "data", "save": "y", "restart": "ink", "other": "work"}


def monitoring_picture() -> Drawing:
    """Numbers of a real run over its steps, and where its seconds went."""
    logged = json.loads((FOLDER / "monitoring.json").read_text(encoding="utf-8"))
    drawing = Drawing("Tokens/s, MFU, exposed communication and goodput of a run that was stopped and went on.")
    for index, (name, (title, factor, unit)) in enumerate(CHARTS.items()):
        left, top = (60.0, 420.0)[index % 2], (30.0, 190.0)[index // 2]
        drawing.text(left, top - 10, title, "bold")
        _chart(drawing, [(step, factor * value) for step, value in logged[name]], left, top, unit)
    seconds = {kind: logged[f"seconds_{kind}"][-1][1] for kind in SPENT if f"seconds_{kind}" in logged}
    whole, x, y = sum(seconds.values()), 60.0, 358.0
    drawing.text(x, y - 10, f"where {whole:.0f} seconds went", "bold")
    for place, (kind, spent) in enumerate(seconds.items()):
        drawing.box(x, y, 640 * spent / whole, 16, SPENT[kind])
        drawing.box(60 + 108 * place, y + 28, 10, 10, SPENT[kind])
        drawing.text(60 + 108 * place + 15, y + 37, f"{kind} {spent / whole:.0%}", "small")
        x += 640 * spent / whole
    drawing.height = y + 50
    return drawing


def _chart(drawing: Drawing, points: list[tuple[int, float]], left: float, top: float, unit: str) -> None:
    """A line over steps, from zero on."""
    width, height = 280, 110
    last, most = points[-1][0], max(value for _, value in points)
    places = [(left + width * step / last, top + height * (1 - value / most)) for step, value in points]
    drawing.path(f"M{left:g} {top:g}V{top + height:g}H{left + width:g}", "t-line")
    drawing.path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places), "t-x")
    drawing.text(left - 6, top + 9, f"{most:,.3g}{unit}" if most < 1000 else f"{most:,.0f}", "small", "end")
    drawing.text(left - 6, top + height, "0", "small", "end")
    drawing.text(left + width, top + height + 14, f"step {last}", "small", "end")


PICTURES = {
    "grid": grid_picture,
    "weights": weights_picture,
    "rows": rows_picture,
    "layer": layer_picture,
    "overlap": overlap_picture,
    "goldfish": goldfish_picture,
    "intervals": intervals_picture,
    "packages": packages_picture,
    "monitoring": monitoring_picture,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
    print(f"{FOLDER.relative_to(ROOT)} has {', '.join(PICTURES)}")


if __name__ == "__main__":
    sys.exit(main())
