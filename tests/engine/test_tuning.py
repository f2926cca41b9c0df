"""Kernel tuning: every layout is the same product, all ranks choose as rank 0 does, a checkpoint keeps the choice."""

import dataclasses
import json
import logging
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_axonn import parallelize
from hf_axonn.checkpoint.commit import write_manifest
from hf_axonn.checkpoint.export import export_hf
from hf_axonn.checkpoint.manifest import check_complete
from hf_axonn.checkpoint.shard_files import checksum_of
from hf_axonn.checkpoint.sharded import LAYOUTS, load_sharded, save_sharded
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.collectives import broadcast_text, world_rank
from hf_axonn.engine import matmul_tuning as tuning
from hf_axonn.engine.gradient_sync import sync_gradients
from hf_axonn.engine.matmul_tuning import AS_IS, STEPS, Key, MatmulTuner, Sample
from hf_axonn.topology.grid import Grid
from tests.helpers.equality import Case, compare, full, rows_of, too_large
from tests.helpers.launching import forked
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks


def test_tokens_count_as_equal_up_to_a_power_of_two():
    def key(which, m, k, n, **changes):
        return Key.from_operands(
            which, torch.empty(m, n), torch.empty(m, k), torch.empty(k, n), accumulate=False, **changes
        )

    assert key("forward", 65, 10, 12) == key("forward", 128, 10, 12) == Key(
        "forward", 128, 12, 10, "NN", "float32", "cpu", False
    )  # fmt: skip
    assert key("forward", 64, 10, 12).m == 64 and key("forward", 1, 10, 12).m == 1
    assert key("dweight", 10, 65, 12) == key("dweight", 10, 100, 12) != key("dinput", 10, 65, 12)
    assert key("dweight", 10, 65, 12)[1:4] == (10, 12, 128)


def test_a_product_that_is_written_in_float32_is_another():
    out, a, b = torch.empty(2, 4), torch.empty(2, 3).bfloat16(), torch.empty(3, 4).bfloat16()
    names = [Key.from_operands("dweight", each, a, b, accumulate=False).dtype for each in (out.bfloat16(), out)]
    assert names == ["bfloat16", "bfloat16 to float32"]
    assert [each.dtype for each in Sample.take(out, a, b).make()] == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_what_is_timed():
    key = Key("forward", 8, 8, 8, "NT", "float32", "cpu", False)
    assert key.layouts() == [AS_IS, "NN", "TN", "TT", "NN swapped", "NT swapped", "TN swapped", "TT swapped"]
    assert key._replace(accumulate=True).layouts() == [AS_IS, "NN", "TN", "TT"]


def test_where_it_never_pays_nothing_is_looked_up(monkeypatch):
    a, b, out = torch.ones(2, 3), torch.ones(3, 4), torch.empty(2, 4)
    asked = []
    original = Key.from_operands
    monkeypatch.setattr(Key, "from_operands", lambda *args, **kwargs: asked.append(args) or original(*args, **kwargs))
    tuner = MatmulTuner()
    tuner("forward", out, a, b)
    tuner("forward", out[:0], a[:0], b)  # an empty one is not counted
    assert len(asked) == 1 and sum(tuner.counts.values()) == 1 and len(tuner.time_layouts()) == 1
    done = MatmulTuner()
    done.adopt(json.dumps({"version": 1, "steps": STEPS, "choices": []}), same_grid=True)
    done("forward", out.zero_(), a, b)
    assert len(asked) == 1 and torch.equal(out, a @ b)
    key = original("forward", out, a, b, accumulate=False)
    done.adopt(json.dumps({"version": 1, "steps": 0, "choices": [{**key._asdict(), "layout": "TT"}]}), same_grid=False)
    done("forward", out.zero_(), a, b)
    assert len(asked) == 2 and torch.equal(out, a @ b) and not done.counts


def test_timing_ends_when_its_time_is_up(monkeypatch):
    now = iter([0.0, 0.0, 59.0, 61.0])
    monkeypatch.setattr(tuning.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(tuning, "measure", lambda sample, layouts, *, accumulate: {AS_IS: [1.0]})
    tuner = MatmulTuner()
    for n in (3, 4, 5):
        tuner("forward", torch.empty(2, n), torch.ones(2, 6), torch.ones(6, n))
    assert [key.n for key in tuner.time_layouts(60.0)] == [3, 4]


def test_choices_are_written_and_read():
    tuner = MatmulTuner()
    tuner.choices = {Key("dinput", 8, 9, 10, "NN", "bfloat16", "cuda", True): "TN"}
    tuner.steps = 2
    same, other = MatmulTuner(), MatmulTuner()
    same.adopt(tuner.to_json(), same_grid=True)
    other.adopt(tuner.to_json(), same_grid=False)
    assert same.choices == other.choices == tuner.choices
    assert (same.steps, other.steps) == (2, 0)


def test_the_summary_says_what_a_step_gains():
    tuner = MatmulTuner()
    tuner.steps = 2
    slow, same = (Key("forward", 8, 9, n, "NN", "float32", "cpu", False) for n in (10, 11))
    tuner.counts = {slow: 2, same: 1}
    trials = {slow: {AS_IS: [0.003, 0.001, 0.002], "TN": [0.001]}, same: {AS_IS: [0.004], "TN": [0.009]}}
    text = tuner._summary(trials, {slow: "TN", same: AS_IS}, 0.5)
    assert text == (
        "kernel tuning after step 2: 1 of 2 matmul shapes are faster in another operand layout: matmuls of a step "
        "8.0 ms -> 6.0 ms, 25.0% less; timing took 0.50 s"
    )
    assert "none of 2 matmul shapes" in tuner._summary(trials, {slow: AS_IS, same: AS_IS}, 0.5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 1, "steps": 1}',
        '{"steps": 1, "choices": []}',
        '{"version": 2, "steps": 1, "choices": []}',
        '{"version": 1, "steps": 1, "choices": 3}',
        '{"version": 1, "steps": 1, "choices": ["NN"]}',
        '{"version": 1, "steps": 1, "choices": [{"layout": "XX"}]}',
        '{"version": 1, "steps": 1, "choices": [{"layout": "NN"}]}',
    ],
)
def test_a_broken_file_is_refused(text):
    with pytest.raises(ValueError, match="these are not matmul layouts of ours"):
        MatmulTuner().adopt(text, same_grid=True)


def made_up(sample: Sample, layouts: list[str], *, accumulate: bool) -> dict[str, list[float]]:
    """Times that let every layout win for some shape. Other ranks would choose otherwise, but are not asked."""
    assert dist.get_rank() == 0
    winner = layouts[zlib.crc32(repr(sample.sizes).encode()) % len(layouts)]
    return {layout: [0.5 if layout == winner else 1.0] for layout in layouts}


def tuned(grid: Grid) -> AxonnConfig:
    return AxonnConfig(grid=grid, tune_matmuls=True)


CASES = [
    Case(
        "accumulated", lambda: tiny_model("qwen3"), [tiny_batch(8, 7), tiny_batch(8, 5, seed=5)], steps=4, config=tuned
    ),
]


def equality(cases, grids):
    """The errors of each case on each grid, and the choices and the use of each model."""
    tuning.measure = made_up  # a forked rank's own
    models: list[nn.Module] = []
    for case, _ in cases:
        case.before = models.append
    used: set[str] = set()
    multiply = tuning.multiply_as

    def watch(layout, *args, **kwargs):
        used.add(layout)
        return multiply(layout, *args, **kwargs)

    tuning.multiply_as = watch
    table = compare(cases, grids)
    return table, [(model.axonn.tuner.choices, model.axonn.tuner.steps) for model in models], used


@pytest.mark.parametrize(
    ("world", "grids"),
    [
        (2, [Grid(x=2), Grid(y=2), Grid(z=2)]),
        pytest.param(4, [Grid(y=2, x=2), Grid(data=2, z=2)], marks=pytest.mark.slow),
    ],
)
def test_a_grid_with_tuned_matmuls_equals_one_process(world, grids):
    results = run_ranks(equality, world, [(case, case.truth()) for case in CASES], grids)
    for table, tuners, _ in results:
        assert not too_large(table, 1e-10)
        assert tuners == results[0][1]
        assert all(steps == STEPS for _, steps in tuners)
        assert all(set(choices.values()) - {AS_IS} for choices, _ in tuners)
    chosen = {layout for choices, _ in results[0][1] for layout in choices.values()}
    assert chosen == results[0][2]
    assert {key.which for choices, _ in results[0][1] for key in choices} == {"forward", "dinput", "dweight"}
    if world == 2:
        assert chosen == set(tuning.OPERAND_LAYOUTS)


def uneven(grid: Grid):
    """Ranks of other samples have other numbers of tokens, and evaluate between steps as often as they like."""
    tuning.measure = made_up
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("hf_axonn.engine.matmul_tuning").addHandler(handler)
    model, _ = parallelize(tiny_model("qwen3"), grid, config=tuned(grid))
    here = grid.coordinates(dist.get_rank())["data"]
    model.train()
    texts = [broadcast_text(f"{dist.get_rank()} \u00e9" * 3, torch.device("cpu"))]
    counts = []
    for step in range(STEPS + 1):
        for _ in range(here):  # each rank of data is a model of its own until gradients meet
            model.eval()
            with torch.no_grad():
                model(input_ids=torch.ones(3, 40, dtype=torch.int64))
            model.train()
        batch = tiny_batch(2, 8 * (1 + 3 * here) + 16 * step)
        model(**batch).loss.backward()
        sync_gradients(model)
        counts.append(len(model.axonn.tuner.choices))
        model.zero_grad()
    return model.axonn.tuner.choices, counts, messages, texts


def test_ranks_with_other_shapes_choose_alike_and_do_not_wait():
    results = run_ranks(uneven, 4, Grid(data=2, x=2), timeout=120)
    choices, counts, messages, texts = results[0]
    for its_choices, its_counts, its_messages, its_texts in results:
        assert its_choices == choices and its_counts == counts and its_texts == texts
        assert its_messages == messages if its_messages else True
    assert texts == ["0 \u00e90 \u00e90 \u00e9"]
    assert [bool(messages) for _, _, messages, _ in results] == [True, False, False, False]
    # 16 tokens at first, then 48 and 80: two more shapes of each, and none that only other ranks have met.
    assert counts[0] < counts[1] < counts[2] == counts[3]
    assert max(key.m for key in choices if key.which == "forward") == 128
    assert len(messages) == STEPS
    assert all("kernel tuning after step" in line and "timing took" in line for line in messages)
    assert "% less" in messages[0] and " ms -> " in messages[0]


def no_gain(grid: Grid):
    """Really timed; on sizes as small as these nothing can be said of which is faster, but all must agree."""
    model, _ = parallelize(tiny_model("qwen3"), grid, config=tuned(grid))
    batch = rows_of(tiny_batch(8, 7), grid, dist.get_rank())
    losses = []
    for _ in range(2):
        loss = model.train()(**batch).loss
        loss.backward()
        sync_gradients(model)
        model.zero_grad()
        losses.append(float(loss))
    return model.axonn.tuner.choices, losses


def test_real_timings():
    results = run_ranks(no_gain, 2, Grid(x=2))
    assert results[0] == results[1]
    choices, losses = results[0]
    assert choices and losses[0] == pytest.approx(losses[1], rel=1e-5)


def steps_from(model, optimizer, grid: Grid, steps: range):
    for step in steps:
        batch = rows_of(tiny_batch(8, 7, seed=step), grid, dist.get_rank())
        model.train()(**batch).loss.backward()
        sync_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def start(grid: Grid, *, tune: bool = True):
    config = AxonnConfig(grid=grid, tune_matmuls=tune)
    model, _ = parallelize(tiny_model("qwen3", dtype=torch.float32), grid, config=config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def resume(grid: Grid, folder: str):
    """The parameters of a run of 5 steps, and of one that was saved after 2 and went on; what the latter timed."""
    tuning.measure = made_up
    model, optimizer = start(grid)
    steps_from(model, optimizer, grid, range(2))
    save_sharded(model, folder, optimizer=optimizer)
    whole = steps_from(model, optimizer, grid, range(2, 5))
    asked = []

    def otherwise(sample, layouts, *, accumulate):
        asked.append(layouts)
        return {layout: [0.5 if layout == layouts[-1] else 1.0] for layout in layouts}

    tuning.measure = otherwise
    again, optimizer = start(grid)
    load_sharded(again, folder, optimizer=optimizer)
    parts = steps_from(again, optimizer, grid, range(2, 5))
    equal_bits = all(torch.equal(whole[name], parts[name]) for name in whole)
    same_choices = again.axonn.tuner.choices == model.axonn.tuner.choices

    off, optimizer = start(grid, tune=False)
    load_sharded(off, folder, optimizer=optimizer)
    other, _ = start(Grid(y=2))
    load_sharded(other, folder)
    loaded = (off.axonn.tuner, other.axonn.tuner.steps, other.axonn.tuner.choices == model.axonn.tuner.choices)

    refusal = ""
    dist.barrier()
    if world_rank() == 0:
        manifest = check_complete(folder)
        Path(folder, LAYOUTS).write_text("{")
        files = {**manifest.files, LAYOUTS: checksum_of(Path(folder, LAYOUTS))}
        write_manifest(Path(folder), dataclasses.replace(manifest, files=files))
    dist.barrier()
    try:
        load_sharded(other, folder)
    except ValueError as problem:
        refusal = str(problem)
    dist.barrier()
    # A later save without tuning leaves no layouts of an earlier one.
    save_sharded(off, folder)
    return equal_bits, same_choices, asked, loaded, refusal, LAYOUTS in check_complete(folder).files


def test_a_checkpoint_keeps_the_choice(tmp_path):
    for equal_bits, same_choices, asked, loaded, refusal, left in run_ranks(resume, 2, Grid(x=2), str(tmp_path)):
        assert equal_bits and same_choices and not asked
        assert loaded == (None, 0, True)
        assert LAYOUTS in refusal and "not matmul layouts" in refusal and "tune_matmuls" in refusal
        assert not left


def save_tuned(grid: Grid, folder: str):
    tuning.measure = made_up
    model, optimizer = start(grid)
    steps_from(model, optimizer, grid, range(1))
    save_sharded(model, folder)


def test_an_export_has_no_layouts(tmp_path):
    run_ranks(save_tuned, 2, Grid(z=2), str(tmp_path / "sharded"))
    assert (tmp_path / "sharded" / LAYOUTS).is_file()
    export_hf(tmp_path / "sharded", tmp_path / "whole")
    assert (tmp_path / "whole" / "config.json").is_file()
    assert not (tmp_path / "whole" / LAYOUTS).exists()


def test_the_benchmark_writes_its_table(tmp_path):
    script = "tests.benchmarks.kernels.tuning"
    output = tmp_path / "tuning.md"
    options = ["--tokens", 8, "--models", "SmolLM2-135M", "--dtypes", "float32", "--output", output]
    done = forked(tmp_path, None, "-m", script, *options)
    assert done.code == 0, done.output
    text = output.read_text()
    assert text in done.output
    rows = [line for line in text.splitlines() if line.startswith("| SmolLM2-135M | float32 |")]
    assert [row.split(" | ")[2:4] for row in rows[:6]] == [
        [grid, which] for grid in ("1, 1", "2, 2") for which in ("forward", "dinput", "dweight")
    ]
