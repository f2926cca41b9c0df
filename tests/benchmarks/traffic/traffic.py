"""Traffic side by side: what each rank sends for a decoder layer and for a training step, ours and the others.

    python -m tests.benchmarks.traffic.traffic [--out docs/results/traffic.md]

Ours is counted: real training steps of small models on 4 gloo ranks, on every grid and in both layouts of the residual
stream. The second step of a model of 4 layers, less that of one of 2 layers, halved, is one decoder layer. The others
are the equations of forms.py. Prints plain tables and the claims, and ends with exit code 1 if a claim does
not hold.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from hf_axonn import AxonnConfig, Grid, __version__, parallelize, sync_gradients
from hf_axonn.architectures.plan import plan_for
from hf_axonn.planner.dense import DenseShape
from hf_axonn.planner.step import Step
from hf_axonn.planner.traffic.ledger import Ledger, LedgerKey, Volume
from hf_axonn.planner.traffic.volumes import layer_volumes, volumes
from tests.benchmarks.traffic.forms import all_reduce_form, megatron
from tests.helpers.ranks import all_grids, run_ranks
from tests.helpers.traffic_counter import count_traffic


WORLD = 4
LAYERS = 4
# Collectives of a step of AxoNN's automatic mode, 4 layers, row=2, column=2, as peers.py --axonn counts them: 10 for
# each of 29 Linears and one for each of 10 replicated gradients.
AXONN_CALLS = 300
STEP = Step(rows=4, seq=32, compute_bytes=4)
GATED = DenseShape(layers=LAYERS, hidden=96, heads=16, intermediate=256, vocab=256)
PLAIN = replace(
    GATED, intermediate=384, gated=False, layer_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True, tied=True
)
MODELS = {
    "llama, 16 kv heads, gated MLP": ("llama", GATED),
    "llama, 8 kv heads, gated MLP": ("llama", replace(GATED, kv_heads=8)),
    "starcoder2, 16 kv heads, plain MLP": ("starcoder2", PLAIN),
}
FALLBACKS = {
    "nothing": {},
    "2 kv heads: k and v gathered over (x, y)": {"kv_heads": 2},
    "1 kv head": {"kv_heads": 1},
    "18 heads: attention repeated over y": {"heads": 18, "hidden": 108},
    "9 heads, 3 kv: attention repeated over (x, y)": {"heads": 9, "kv_heads": 3, "hidden": 108},
    "q, k, v packed: gathered over (x, y)": {"packed_qkv": True},
    "gate and up packed: gathered over (x, y)": {"packed_mlp": True},
}


def build(kind: str, shape: DenseShape, layers: int) -> torch.nn.Module:
    """A random model of this shape."""
    config = AutoConfig.for_model(
        kind,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv,
        vocab_size=shape.vocab,
        max_position_embeddings=STEP.seq,
        tie_word_embeddings=shape.tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config).train()


def layouts_on(grid: Grid) -> tuple[str, ...]:
    """At y = 1 the layouts are one."""
    return ("token", "feature") if grid.y > 1 else ("token",)


def is_counted(name: str) -> bool:
    """Whether the engine cuts this architecture by blocks; else the numbers of ours are those of volumes.py."""
    return plan_for(build(*MODELS[name], 1)).reason is None


def count_step(kind: str, shape: DenseShape, grid: Grid, layout: str, layers: int) -> dict[LedgerKey, Volume]:
    """Count the collectives of this rank in the second step: the first has yet to learn what to gather ahead."""
    config = AxonnConfig(grid=grid, layout=layout if grid.y > 1 else "auto")
    model, _ = parallelize(build(kind, shape, layers), grid, config=config)
    ids = torch.arange(STEP.rows * STEP.seq).view(STEP.rows, STEP.seq) % shape.vocab
    for _ in range(2):
        model.zero_grad()
        with count_traffic(grid) as counter:
            model(input_ids=ids, labels=ids).loss.backward()
            with counter.during("gradients"):
                sync_gradients(model)
    return counter.ledger.entries


def count_steps() -> dict[tuple, dict[LedgerKey, Volume]]:
    """Return the counts of a step by (model, grid, layout, layers). Runs on every rank."""
    found = {}
    for name, grid in itertools.product(MODELS, all_grids(WORLD)):
        kind, shape = MODELS[name]
        counted = is_counted(name)
        for layout, layers in itertools.product(layouts_on(grid), (LAYERS // 2, LAYERS)):
            found[name, grid, layout, layers] = (
                count_step(kind, shape, grid, layout, layers)
                if counted
                else volumes(replace(shape, layers=layers), grid, STEP, layout=layout).entries
            )
    return found


def ledger_of(grid: Grid, entries: dict[LedgerKey, Volume]) -> Ledger:
    ledger = Ledger(grid)
    ledger.entries = dict(entries)
    return ledger


def layer_counted(counts: dict, name: str, grid: Grid, layout: str) -> Ledger:
    """What one decoder layer adds to forward and backward."""
    many, few = (counts[name, grid, layout, layers] for layers in (LAYERS, LAYERS // 2))
    ledger, layers = Ledger(grid), LAYERS - LAYERS // 2
    for key, volume in many.items():
        before = few.get(key, Volume(0, 0))
        calls, payload = volume.calls - before.calls, volume.payload - before.payload
        if key.phase != "gradients":
            ledger.add(key.phase, key.kind, key.axes, payload // layers, calls // layers)
    return ledger


def norm_bytes(shape: DenseShape, grid: Grid, layout: str, step: Step = STEP) -> Fraction:
    """Bytes of a layer's norms: those of the layer less those of one without norms."""
    without = layer_volumes(replace(shape, norms_per_layer=0), grid, step, layout=layout)
    return layer_volumes(shape, grid, step, layout=layout).bytes_sent() - without.bytes_sent()


def activation_bytes(ledger: Ledger) -> Fraction:
    """Bytes of a layer that are not weights."""
    return ledger.bytes_sent() - ledger.bytes_sent(axes=("z",))


def layer_table(counts: dict, name: str) -> list[str]:
    """One model's decoder layer in every form, on every grid that divides it over x or y."""
    shape, how_ours = MODELS[name][1], "counted" if is_counted(name) else "volumes"
    lines = [
        f"One decoder layer of {name}: bytes of activations that each rank sends in forward and backward,",
        f"{STEP.rows * STEP.seq} tokens of float32 at each (data, z); norms aside in every number but their own and "
        "the calls",
        "",
        f"{'grid':<20} {'form':<21} {'how':<9} {'on y':>9} {'on x':>9} {'norms':>6} {'sum':>9} "
        f"{'/fused':>7} {'/layer':>7} {'calls':>6}",
    ]
    for grid in all_grids(WORLD):
        if grid.x * grid.y == 1:
            continue
        fused, single = (all_reduce_form(shape, grid, STEP, fused=value) for value in (True, False))
        forms = []
        for layout in layouts_on(grid):
            label = f"ours, {layout} layout" if grid.y > 1 else "ours"
            norms = norm_bytes(shape, grid, layout)
            forms.append((label, how_ours, layer_counted(counts, name, grid, layout), norms))
        if grid.y == grid.z == 1:
            forms.append(("Megatron TP+SP", "equation", megatron(shape, grid, STEP), Fraction(0)))
        forms.append(("fused all-reduce", "equation", fused, Fraction(0)))
        forms.append(("layer by layer", "equation", single, Fraction(0)))
        for label, how, ledger, norms in forms:
            total = activation_bytes(ledger) - norms
            lines.append(
                f"{grid!s:<20} {label:<21} {how:<9} {int(ledger.bytes_sent(axes=('y',)) - norms):>9,} "
                f"{int(ledger.bytes_sent(axes=('x',))):>9,} {int(norms):>6,} {int(total):>9,} "
                f"{float(total / activation_bytes(fused)):>7.3f} {float(total / activation_bytes(single)):>7.3f} "
                f"{ledger.calls() - ledger.calls(axes=('z',)):>6}"
            )
    return [*lines, ""]


def fallback_table() -> list[str]:
    """Layers whose heads or projections do not divide as they should."""
    grid = Grid(x=2, y=2)
    lines = [
        f"What else a layer of a gated model costs on {grid}, by volumes.py: activations in units of the fused form",
        "",
        f"{'what is not as above':<52} {'token':>7} {'feature':>8} {'calls':>6}",
    ]
    for what, changes in FALLBACKS.items():
        shape = replace(GATED, **changes)
        fused = activation_bytes(all_reduce_form(shape, grid, STEP, fused=True))
        ratios = []
        for layout in layouts_on(grid):
            ledger = layer_volumes(shape, grid, STEP, layout=layout)
            ratios.append(float((ledger.bytes_sent() - norm_bytes(shape, grid, layout)) / fused))
        lines.append(f"{what:<52} {ratios[0]:>7.3f} {ratios[1]:>8.3f} {ledger.calls():>6}")
    return [*lines, ""]


def step_table(counts: dict, name: str) -> list[str]:
    """Whole steps of ours."""
    lines = [
        f"One step of ours, {name}, {LAYERS} layers, counted: collectives and bytes that each rank sends",
        "",
        f"{'grid':<20} {'layout':<8} {'calls':>6} {'forward':>12} {'backward':>12} {'gradients':>12} {'sum':>12}",
    ]
    for grid in all_grids(WORLD):
        for layout in layouts_on(grid):
            ledger = ledger_of(grid, counts[name, grid, layout, LAYERS])
            sent = [int(ledger.bytes_sent(phase=phase)) for phase in ("forward", "backward", "gradients")]
            numbers = " ".join(f"{value:>12,}" for value in (*sent, sum(sent)))
            lines.append(f"{grid!s:<20} {layout if grid.y > 1 else '-':<8} {ledger.calls():>6} {numbers}")
    return [*lines, ""]


def check_claims(counts: dict) -> tuple[list[str], bool]:
    """Each claim with what contradicts it, and whether all hold."""
    claims: list[tuple[str, list[str]]] = []
    wrong = []
    for (name, grid, layout, layers), entries in counts.items():
        shape = replace(MODELS[name][1], layers=layers)
        if entries != volumes(shape, grid, STEP, layout=layout).entries:
            wrong.append(f"{name}, {layers} layers, {layout} layout on {grid}")
    steps = sum(is_counted(name) for name, *_ in counts)
    claims.append((f"all {steps} counted steps are what volumes.py says, to the call and to the byte", wrong))

    wrong = []
    for name, grid in itertools.product(MODELS, all_grids(WORLD)):
        shape, layout = MODELS[name][1], layouts_on(grid)[-1]
        ours = activation_bytes(layer_counted(counts, name, grid, layout)) - norm_bytes(shape, grid, layout)
        fused = activation_bytes(all_reduce_form(shape, grid, STEP, fused=True))
        if ours != fused:
            wrong.append(f"{name} on {grid}: {int(ours):,} bytes, fused {int(fused):,}")
    claims.append(("counted: a layer in the feature layout sends the bytes of the fused form, norms aside", wrong))

    wrong, checked, step = [], 0, replace(STEP, seq=2048)
    for shape, x, y in itertools.product((GATED, PLAIN), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)):
        shape, grid = replace(shape, hidden=2048, heads=256, intermediate=8192), Grid(x=x, y=y)
        ours = layer_volumes(shape, grid, step, layout="feature").bytes_sent()
        checked += 1
        if (
            ours - norm_bytes(shape, grid, "feature", step)
            != all_reduce_form(shape, grid, step, fused=True).bytes_sent()
        ):
            wrong.append(str(grid))
    claims.append((f"the same by arithmetic, {checked} cases of up to 256 ranks, gated and plain", wrong))

    wrong = []
    for name, grid in itertools.product(MODELS, all_grids(WORLD)):
        shape = MODELS[name][1]
        if grid.y == 1 < grid.x:
            ours = activation_bytes(layer_counted(counts, name, grid, "token"))
            ratio = float(ours / activation_bytes(all_reduce_form(shape, grid, STEP, fused=False)))
            if ratio > (0.6 if shape.gated else 0.67):
                wrong.append(f"{name} on {grid}: {ratio:.4f}")
    claims.append(("counted: where y = 1 a layer sends at most 0.6 (gated) or 0.67 (plain) of layer by layer", wrong))

    grid, name = Grid(x=2, y=2), next(iter(MODELS))
    calls = {layout: ledger_of(grid, counts[name, grid, layout, LAYERS]).calls() for layout in layouts_on(grid)}
    claim = (
        f"counted: a step of {LAYERS} layers at x=2, y=2 in the feature layout, the default for llama, issues "
        f"{calls['feature']} collectives, at most a third of AxoNN's {AXONN_CALLS} (the token layout {calls['token']})"
    )
    claims.append((claim, [f"a third is {AXONN_CALLS / 3:.1f}"] if 3 * calls["feature"] > AXONN_CALLS else []))
    lines = []
    for claim, contradictions in claims:
        lines.append(f"{'DOES NOT HOLD' if contradictions else 'holds'}: {claim}")
        lines += [f"    {line}" for line in contradictions]
    return lines, not any(contradictions for _, contradictions in claims)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a Markdown file to write as well")
    arguments = parser.parse_args()
    counts = run_ranks(count_steps, WORLD, timeout=1200)[0]
    claims, all_hold = check_claims(counts)
    lines = ["Claims", "", *claims, ""]
    for name in MODELS:
        lines += layer_table(counts, name)
    lines += fallback_table()
    lines += step_table(counts, next(iter(MODELS)))
    print("\n".join(lines))
    if arguments.out:
        versions = (
            f"hf_axonn {__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
            f"Python {platform.python_version()}, {WORLD} gloo ranks on {os.cpu_count()} {platform.machine()} cores"
        )
        command = "python -m tests.benchmarks.traffic.traffic --out docs/results/traffic.md"
        head = [
            "# Traffic",
            "",
            f"`{command}`",
            "",
            f"{versions}. Bytes and calls do not depend on the machine.",
            "",
            "```",
        ]
        arguments.out.write_text("\n".join([*head, *lines[:-1], "```", ""]))
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
