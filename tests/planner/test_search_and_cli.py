"""The planner, `hf-axonn plan` and `grid: auto`."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import huggingface_hub
import pytest
import yaml
from transformers import AutoConfig

from hf_axonn.cli.main import main
from hf_axonn.cli.plan_report import sizes
from hf_axonn.config import AxonnConfig
from hf_axonn.launch.launch_file import resolve
from hf_axonn.planner import from_settings
from hf_axonn.planner.dense import DenseShape, load_shape
from hf_axonn.planner.from_settings import choose_batch, number, resolve_auto
from hf_axonn.planner.job import Job
from hf_axonn.planner.machine import FOLDER, load_machine, peak_tflops
from hf_axonn.planner.predict import predict
from hf_axonn.planner.search import alternatives, divisors, factorizations, grids, other_order, plan, sweep
from hf_axonn.planner.settings import EXACT, GAIN, ROUNDING, as_text, keep_weights
from hf_axonn.profiling.read_shape import read_shape, shape_of
from hf_axonn.topology.axis_order import ORDER, trim_order
from hf_axonn.topology.grid import Grid
from tests.helpers import ROOT
from tests.helpers.calls import calls_of
from tests.helpers.models import tiny_config


JOB = Job(shape=load_shape("gpt-5b"), machine=load_machine("perlmutter"), sequences=512, seq=2048)
COMMAND = "plan --model gpt-5b --machine perlmutter --batch-tokens 1M --seq 2048".split()


def test_all_factorizations():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert sorted(factorizations(4, 2)) == [(1, 4), (2, 2), (4, 1)]
    # Ordered products of four powers of two: 15 twos in 4 boxes.
    assert len(set(grids(32768))) == math.comb(18, 3) == 816
    assert all(grid.size == 24 for grid in grids(24)) and len(set(grids(24))) == math.comb(6, 3) * 4


def test_a_plan_ranks_what_fits_and_says_why_the_rest_does_not():
    found = plan(JOB, 64)
    times = [entry.total for entry in found.ranked]
    assert times == sorted(times) and found.best.total == min(times)
    assert len(found.ranked) + len(found.too_big) + len(found.impossible) == len(grids(64))
    assert all(entry.fits for entry in found.ranked) and not any(entry.fits for entry in found.too_big)
    capacity = 0.9 * JOB.machine.memory
    assert found.too_big and min(entry.memory.total for entry in found.too_big) > capacity
    assert max(entry.memory.total for entry in found.ranked) <= capacity
    impossible = plan(replace(JOB, sequences=16), 64).impossible
    assert impossible and all("not divisible by data * z" in why for _, why in impossible)


def test_fewest_micro_batches_that_fit_are_taken():
    grid = Grid(data=4, z=4)
    entry = predict(JOB, grid)
    assert entry.micro_batches > 1 and entry.fits
    assert not predict(replace(JOB, micro_batches=entry.micro_batches // 2), grid).fits
    with pytest.raises(ValueError, match="do not make 5 micro-batches"):
        predict(replace(JOB, micro_batches=5), grid)
    with pytest.raises(ValueError, match="512 sequences are not divisible by data . z = 1024"):
        predict(JOB, Grid(data=1024))


def test_what_fits_nowhere_is_said_with_numbers():
    found = plan(replace(JOB, shape=load_shape("gpt-640b")), 8)
    assert not found.ranked
    with pytest.raises(ValueError, match="no grid of 8 GPUs fits: the smallest, .* of 40 GiB"):
        _ = found.best
    with pytest.raises(ValueError, match="no grid of 7 GPUs is possible"):
        _ = plan(replace(JOB, sequences=1, seq=1), 7).best
    with pytest.raises(ValueError, match="gpus is 0"):
        plan(JOB, 0)


@pytest.mark.parametrize(
    ("gpus", "most"),  # 1.29 and 2.8 million when this was written
    [(2048, 1_600_000), pytest.param(32768, 3_500_000, marks=pytest.mark.slow)],
)
def test_all_grids_are_ranked_with_little_work(gpus, most):
    """Those of 32,768 GPUs under a second on one core (docs/planning.md); here counted in calls of Python, which no
    load changes."""
    job = Job(shape=load_shape("gpt-320b"), machine=load_machine("frontier"), sequences=8192, seq=2048)
    plan(job, 64)  # imports, tables
    calls, found = calls_of(plan, job, gpus)
    assert len(found.ranked) + len(found.too_big) > 0.86 * len(grids(gpus))
    assert calls < most


def test_another_order_of_axes_is_never_slower_and_is_found():
    entry = predict(replace(JOB, machine=load_machine("frontier")), Grid(data=8, z=8))
    better = other_order(entry)
    assert better.total <= entry.total and sorted(better.order) == ["data", "pipe", "x", "y", "z"]
    assert better.total == predict(entry.job, entry.grid, order=better.order).total
    # With y = x = 1 z is a ring inside a node (135 GB/s); with data inside of it, one between nodes (5 GB/s).
    inside = predict(entry.job, entry.grid, order=("data", "z", "x", "y"))
    assert inside.traffic["z"] > entry.traffic["z"]


# z is better off inside of the nodes where it carries most.
ORDERED = replace(JOB, shape=load_shape("gpt-40b"), sequences=2048, checkpointing=False)


def test_the_first_places_get_the_order_that_is_fastest_for_them(capsys):
    plain, free = plan(ORDERED, 256, order=ORDER), plan(ORDERED, 256)
    assert {entry.order for entry in plain.ranked} == {ORDER}
    assert free.best.order != ORDER and free.best.total < 0.99 * plain.best.total
    totals = [entry.total for entry in free.ranked[:10]]
    assert totals == sorted(totals) and {entry.grid for entry in free.ranked} == {each.grid for each in plain.ranked}
    command = "plan --model gpt-40b --machine perlmutter --gpus 256 --batch-tokens 4.2M --seq 2048".split()
    assert main([*command, "--no-checkpointing"]) == 0
    pasted = capsys.readouterr().out.partition("axonn_config:\n")[2]
    assert f"  order: [{', '.join(trim_order(free.best.order, free.best.grid))}]" in pasted
    auto = {
        "grid": "auto",
        "plan": AUTO | {"model": "gpt-40b", "machine": "perlmutter", "batch_tokens": "4.2M", "checkpointing": False},
    }
    section, notes = resolve_auto(auto, 256, mixed_precision="bf16")
    config = AxonnConfig.from_mapping(section)
    assert (config.grid, config.order) == (free.best.grid, free.best.order)
    assert f"with its axes in the order {', '.join(trim_order(free.best.order, free.best.grid))}" in notes[0]
    section, _ = resolve_auto(auto | {"order": list(ORDER)}, 256, mixed_precision="bf16")
    assert AxonnConfig.from_mapping(section) == AxonnConfig(grid=plain.best.grid)


def test_the_first_place_is_checked_against_wrong_numbers():
    found = plan(JOB, 64)
    answers = dict(alternatives(found))
    assert set(answers) == {f"{what} 20% {how}" for what in ("links", "products") for how in ("slower", "faster")}
    assert answers["links 20% slower"].total >= found.best.total >= answers["products 20% faster"].total


LONG = Job(
    shape=DenseShape(layers=32, hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocab=128256),
    machine=load_machine("dgx-h100"),
    sequences=8,
    seq=65536,
    checkpointing=False,
)


def test_rows_are_divided_where_whole_ones_are_too_few_or_too_long():
    """Rows that fit a GPU stay whole: of the same z a larger context sends more for the same work."""
    whole, free = plan(LONG, 16, contexts=[1]), plan(LONG, 16)
    assert {entry.grid.context for entry in whole.ranked} == {1} and free.best.grid.context > 1
    assert free.best.total < whole.best.total
    assert len(free.ranked) + len(free.too_big) + len(free.impossible) == len(grids(16))
    assert {replace(entry.grid, context=1) for entry in free.ranked} > {entry.grid for entry in whole.ranked}
    kept = {entry.grid: entry.total for entry in free.ranked}
    assert all(kept[entry.grid] == entry.total for entry in whole.ranked)
    for divided in (plan(LONG, 16, contexts=[size]) for size in (2, 4)):
        assert divided.ranked and {entry.grid.context for entry in divided.ranked} <= {2, 4}
        for entry in divided.ranked:
            assert entry.total >= kept.get(replace(entry.grid, context=1), 0)
    assert free.impossible and all(grid.data > 8 for grid, _ in free.impossible)


def test_context_is_where_the_model_allows_it():
    entry = predict(LONG, Grid(z=16, context=16))
    assert entry.candidate.step.rows * entry.micro_batches == 8 and entry.fits
    unknown = replace(LONG.shape, divides_rows=False)
    for changes, grid, message in (
        (
            {"context_attention": "heads"},
            Grid(z=16, x=4, context=16),
            "8 query heads of a rank of .x, y. are not divisible by context = 16",
        ),
        ({}, Grid(data=4, z=16, context=4), "8 sequences are not divisible by data . z / context = 16"),
        ({"seq": 8, "sequences": 1}, Grid(z=8, x=4, context=8), "has fewer tokens than x . y = 4"),
        (
            {"seq": 8, "sequences": 1},
            Grid(z=16, context=16),
            "context = 16 is more than the 8 positions",
        ),
        ({"shape": unknown}, Grid(z=16, context=16), "it is not known that the rows of this model can be divided"),
    ):
        with pytest.raises(ValueError, match=message):
            predict(replace(LONG, **changes), grid)
    assert {entry.grid.context for entry in plan(replace(LONG, shape=unknown), 16).ranked} == {1}
    keys = predict(LONG, Grid(z=16, x=4, context=16))
    assert keys.job.context_attention == "auto" and keys.fits, "keys are gathered where heads do not divide"


def test_the_command_divides_rows(capsys, tmp_path):
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = f"plan --model {tmp_path} --machine dgx-h100 --gpus 16 --batch-sequences 8 --seq 65536".split()
    assert main(command) == 0
    printed = capsys.readouterr().out
    best = plan(LONG, 16, free=EXACT).best
    size = best.grid.context
    assert size > 1 and f", {65536 // size:,} positions of each on a rank, attention by heads\n" in printed
    head, first = (line for line in printed.splitlines() if line.startswith(("     data", "  1 ")))
    assert (
        head.split()[:4] == ["data", "z", "y", "x"] and head.split()[4] == "context" and first.split()[5] == str(size)
    )
    assert "only one of the published runs divides the positions" in printed
    pasted = yaml.safe_load(printed[printed.index("axonn_config:") :])["axonn_config"]
    assert AxonnConfig.from_mapping(pasted).grid == best.grid
    assert main([*command, "--json", "--top", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["ranked"][0]["grid"] == best.grid.as_dict()
    assert main([*command, "--context", "1"]) == 0
    assert "context" not in capsys.readouterr().out


def test_sweeps_are_strong_or_weak():
    strong, weak = sweep(JOB, [64, 128, 256]), sweep(JOB, [64, 128, 256], weak=True)
    assert [found.job.sequences for found in strong] == [512] * 3
    assert [found.job.sequences for found in weak] == [512, 1024, 2048]
    steps = [found.best.total for found in strong]
    assert steps == sorted(steps, reverse=True)
    assert weak[2].best.flops >= strong[2].best.flops


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("16.8M", 16_800_000), ("4k", 4000), ("1B", 10**9), (7, 7), ("1e3", 1000)]
)
def test_numbers_with_suffixes(text, value):
    assert number(text) == value


@pytest.mark.parametrize("text", ["", "M", "many", "0", "-3", True, "inf", "nan", "2.5", "1.0005k", 2048.5])
def test_what_is_no_number(text):
    with pytest.raises(ValueError, match="is not a number"):
        number(text)


@pytest.mark.parametrize(
    ("tokens", "seq", "gpus", "sequences", "note"),
    [
        (16_800_000, 2048, 8192, 8192, ""),
        (4_000_000, 4096, 64, 1024, "4,000,000 tokens are 976.6 sequences of 4,096: planned for 1,024, +4.9%"),
        (4_000_000, 4096, 96, 960, "4,000,000 tokens are 976.6 sequences of 4,096: planned for 960, -1.7%"),
        (1_000_000, 2048, 64, 512, "1,000,000 tokens are 488.3 sequences of 2,048: planned for 512, +4.9%"),
        (100 * 2048 + 1000, 2048, 64, 96, "205,800 tokens are 100.5 sequences of 2,048: planned for 96, -4.5%"),
        (2048 * 100, 2048, 4, 100, ""),
        (977 * 4096, 4096, 64, 977, "977 sequences divide among few grids of 64 GPUs: 1,024 among more"),
        (2048 * 3, 2048, 64, 3, ""),
        (2000, 2048, 64, 1, "2,000 tokens are 1.0 sequences of 2,048: planned for 1, +2.4%"),
    ],
)
def test_a_batch_becomes_sequences_that_divide_well(tokens, seq, gpus, sequences, note):
    assert choose_batch(tokens, seq, gpus) == (sequences, note)


def test_ordinary_batches_lose_nothing():
    """4M tokens of 4,096 on 64 H100 took 131 s a step as 977 sequences, on y=8, x=8."""
    job = replace(JOB, shape=load_shape("gpt-10b"), machine=load_machine("dgx-h100"), seq=4096)
    given, even = (
        plan(replace(job, sequences=count), 64).best for count in (choose_batch(4_000_000, 4096, 64)[0], 1024)
    )
    assert given.total == even.total
    assert plan(replace(job, sequences=977), 64).best.total > 5 * even.total


def test_less_than_a_sequence_is_no_batch(capsys):
    assert main("plan --model gpt-5b --machine perlmutter --batch-tokens 96 --seq 2048 --gpus 4".split()) == 2
    assert "a batch of 96 tokens is less than one sequence of 2,048 tokens." in capsys.readouterr().err
    assert main("plan --model gpt-5b --machine perlmutter --batch-tokens 4M --seq 4096 --gpus 64".split()) == 0
    assert "note: 4,000,000 tokens are 976.6 sequences" in capsys.readouterr().err


def test_the_command_prints_a_table_and_what_to_paste(capsys):
    assert main([*COMMAND, "--gpus", "64", "--top", "3"]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line[:4].strip() in ("1", "2", "3")]
    best = plan(replace(JOB, sequences=512), 64, free=EXACT).best
    assert len(rows) == 3 and rows[0].split()[1:5] == [str(size) for size in best.grid.as_dict().values()]
    assert f"that fit: {sizes(best.grid)}\n" in printed and "too close to call" in printed
    pasted = yaml.safe_load(printed[printed.index("axonn_config:") :])["axonn_config"]
    config = AxonnConfig.from_mapping(pasted)
    assert config.grid == best.grid and config.keep_gathered == best.job.keep_gathered
    checkpointing = "true" if best.job.checkpointing else "false"
    assert printed.endswith(f"gradient_checkpointing {checkpointing}\n")
    few = "plan --model gpt-5b --machine perlmutter --batch-sequences 24 --seq 2048 --gpus 64".split()
    assert main([*few, "--context", "1"]) == 0
    assert "left out, for instance z=16" in capsys.readouterr().out
    assert main(few) == 0
    assert "left out, for instance data=16" in capsys.readouterr().out


def test_the_command_prints_json_and_pictures(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, of the extra `eval`")
    picture = tmp_path / "plan.png"
    assert main([*COMMAND, "--gpus", "16", "--json", "--plot", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["ranked"][0]
    assert first["step_seconds"] == pytest.approx(sum(first["seconds"].values()))
    held, (layer,) = first["memory_bytes"], first["layer_seconds"]
    assert held["parameters"] == held["gradients"] == held["optimizer"] / 2 > 0 and first["fits"]
    assert held["optimizer"] * 2 < held["total"] < sum(held.values()) - held["total"]
    assert len(layer["gathers"]) == len(layer["reduces"]) == len(layer["hidden"]) == 4
    assert found["fit"] + found["do_not_fit"] + found["impossible"] == len(grids(16))
    curve = tmp_path / "sweep.svg"
    assert main([*COMMAND, "--sweep", "16..64", "--plot", str(curve)]) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if "z=" in line]) == 3
    assert picture.read_bytes()[:4] == b"\x89PNG" and "<svg" in curve.read_text()
    assert main([*COMMAND, "--gpus", "16", "--plot", str(tmp_path / "no" / "where.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_batch_is_given_in_tokens_or_in_sequences(capsys):
    command = "plan --model gpt-5b --machine perlmutter --gpus 16 --seq 2048 --json".split()
    found = []
    for more in (["--batch-tokens", str(512 * 2048)], ["--batch-sequences", "512"], ["--batch-sequences", "512"]):
        more += ["--activations", "fp32"] if len(found) == 2 else []
        assert main([*command, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] and found[1]["sequences"] == 512
    assert found[2]["ranked"][0]["step_seconds"] > found[1]["ranked"][0]["step_seconds"]


def test_the_manual_shows_what_is_printed(capsys):
    manual = (ROOT / "docs" / "planning.md").read_text()
    commands = [line for line in manual.splitlines() if line.startswith("hf-axonn plan --model gpt-80b")]
    assert len(commands) == 2
    for command in commands:
        assert main(command.split()[1:]) == 0
        assert capsys.readouterr().out.strip() in manual


def test_long_sequences_and_repeated_attention_are_told(capsys, tmp_path):
    """Of a million tokens the config allows 4,096, and 2 heads do not divide among 8 ranks."""
    config = {
        "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = f"plan --model {tmp_path} --machine dgx-h100 --gpus 8 --batch-sequences 1".split()
    assert main([*command, "--seq", "65536"]) == 0
    assert "context: 8}" in (printed := capsys.readouterr().out) and "attention on gathered keys and values" in printed
    command += ["--context", "1"]
    assert main([*command, "--seq", "1000000"]) == 0
    printed = capsys.readouterr().out
    assert "sequences of 1,000,000 tokens are longer than the 4,096 that the config allows" in printed
    assert "ranks of x and y compute the same attention, as the heads" in printed
    assert "1 sequence of 1,000,000 tokens a step" in printed and "1 micro-batch of 1 sequence;" not in printed
    assert main([*command, "--seq", "4096"]) == 0
    assert "max_position_embeddings" not in capsys.readouterr().out


def test_a_model_may_be_named_as_on_the_hub(monkeypatch, tmp_path):
    sizes = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config = AutoConfig.for_model("mixtral", **sizes, intermediate_size=64, vocab_size=64)
    config.save_pretrained(tmp_path)
    found = {("some/model", "config.json"): str(tmp_path / "config.json")}
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *names: found[names])
    assert read_shape("some/model") == shape_of(config.to_dict())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="some/model is no model: its config.json has no model_type"):
        read_shape("some/model")

    def missing(name, _):
        raise OSError(f"{name} is not on the hub\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", missing)
    with pytest.raises(ValueError, match="another/model is no model: another/model is not on the hub$"):
        read_shape("another/model")
    with pytest.raises(ValueError, match="there is no model 'nothing'"):
        read_shape("nothing")


def test_adapters_are_planned(capsys):
    """13B in bf16: all of it does not fit one GPU, adapters do."""
    command = "plan --model gpt-10b --machine dgx-h100 --gpus 1 --batch-sequences 4 --seq 2048 --weights bf16".split()
    assert main(command) == 1
    assert main([*command, "--lora", "16"]) == 0
    printed = capsys.readouterr().out
    assert "a step, LoRA of rank 16, weights bf16\n" in printed and "one GPU\n" in printed


def test_a_base_of_4_bits_is_planned(capsys):
    """In fp32 the frozen base of 20B does not fit one GPU, in 4 bits it does."""
    command = "plan --model gpt-20b --machine dgx-h100 --gpus 1 --batch-sequences 4 --seq 2048 --lora 16".split()
    assert main(command) == 1
    assert main([*command, "--base", "4bit"]) == 0
    assert "LoRA of rank 16 on 4 bits\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match="base is '4bit', whose weights cannot be trained"):
        replace(JOB, base="4bit")
    with pytest.raises(ValueError, match="base is '2bit', but it is one of full, 4bit, 4bit-double"):
        replace(JOB, lora=8, base="2bit")


def test_free_settings_are_chosen_and_fixed_ones_kept():
    """Every grid has the fastest of its settings, by trying all of them; what is fixed stays."""
    job = replace(JOB, sequences=512)
    found = plan(job, 64, free=EXACT)
    for entry in found.ranked[:3]:
        choices = [
            predict(replace(job, checkpointing=flag, keep_gathered=keep), entry.grid, order=entry.order)
            for flag in (True, False)
            for keep in ("recomputed", "all", entry.job.kept_layers)
        ]
        assert entry.total <= min(choice.total for choice in choices if choice.fits) * (1 + GAIN)
    kept = plan(job, 64, free=[name for name in EXACT if name != "checkpointing"])
    assert all(entry.job.checkpointing for entry in kept.ranked) and found.best.total < 0.9 * kept.best.total
    assert not found.best.job.checkpointing
    # Dtypes that round differently only where they may be chosen.
    assert all(entry.job.reduce_bytes == 4 and entry.job.residual_bytes is None for entry in found.ranked)
    rounded = plan(job, 64, free=(*EXACT, *ROUNDING))
    assert rounded.best.total < found.best.total and rounded.best.job.residual_bytes == 2
    assert as_text(rounded.best.job)["residual_dtype"] == "bf16"
    assert as_text(replace(job, param_bytes=2))["residual_dtype"] == "model"  # of bf16 weights it is that anyhow


def test_weights_are_kept_where_they_fit_and_help():
    """Links so slow that gathers are exposed: as many layers keep theirs as fit, and one more would not."""
    slow = replace(load_machine("perlmutter").scale(bandwidth=0.05), memory=20 * 2**30)
    job = replace(JOB, machine=slow, sequences=512)
    entry = predict(job, Grid(z=64))
    found = keep_weights(entry, ("keep_gathered",))
    count = found.job.kept_layers
    assert 0 < count < job.shape.depth and found.fits and found.total < (1 - GAIN) * entry.total
    assert not predict(replace(found.job, keep_gathered=count + 1), found.grid).fits
    roomy = replace(job, machine=replace(slow, memory=2**40))
    assert keep_weights(predict(roomy, Grid(z=64)), EXACT).job.keep_gathered == "all"
    assert keep_weights(entry, ("checkpointing",)) is entry  # fixed
    assert (
        keep_weights(predict(job, Grid(data=4, x=16)), EXACT).job.keep_gathered == "recomputed"
    )  # nothing is gathered


def test_the_answer_counts_days_and_overlaps(capsys):
    assert main([*COMMAND, "--gpus", "64", "--tokens", "2T", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["ranked"][0]
    assert main([*COMMAND, "--gpus", "64", "--tokens", "2T", "--overlap"]) == 0
    printed = capsys.readouterr().out
    days = 2e12 / best["tokens_per_second"] / 86400
    assert f"2T tokens: {days:,.1f} days, {days * 24 * 64:,.0f} GPU hours" in printed
    overlaps = [line for line in printed.splitlines() if line.startswith(("  none", "  + O"))]
    seconds = [float(line[60:].split(" s")[0]) for line in overlaps]
    assert len(seconds) == 4 and seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(best["step_seconds"], abs=1e-3) and seconds[0] > seconds[-1]
    low, high = best["step_seconds_interval"]
    assert low < best["step_seconds"] <= high


def test_costs_are_those_of_the_step_and_its_interval(capsys):
    command = [*COMMAND, "--gpus", "64", "--price", "2.5"]
    assert main([*command, "--json", "--top", "2"]) == 0
    first, second = json.loads(capsys.readouterr().out)["ranked"]
    for entry in (first, second):
        cost = entry["cost"]
        hours = 64 * 1e9 / entry["tokens_per_second"] / 3600
        assert cost["tokens"] == 10**9 and cost["gpu_hours"] == pytest.approx(hours)
        assert cost["days"] == pytest.approx(hours / 64 / 24)
        assert cost["money"] == pytest.approx(2.5 * hours) and cost["price"] == 2.5
        for name in ("gpu_hours", "money"):
            relative = [end / cost[name] for end in cost[f"{name}_interval"]]
            assert relative == pytest.approx([end / entry["step_seconds"] for end in entry["step_seconds_interval"]])
    assert main(command) == 0
    amount = r"[\d.]+ {} \([\d.]+ to [\d.]+\)"
    amounts = f"1B tokens: [0-9.]+ hours, {amount.format('GPU hours')}, {amount.format('at 2.5 a GPU hour')}"
    assert re.search(amounts, capsys.readouterr().out)
    assert main([*COMMAND, "--sweep", "64..128", "--tokens", "2T", "--price", "2"]) == 0
    assert capsys.readouterr().out.count("at 2 a GPU hour") == 2
    assert main([*COMMAND, "--gpus", "64"]) == 0
    assert "GPU hours" in (printed := capsys.readouterr().out) and "a GPU hour " not in printed


def test_sequences_are_as_long_as_the_window_allows(tmp_path, capsys):
    for window, seq in ((512, 512), (4096, 2048)):
        tiny_config("llama", max_position_embeddings=window).save_pretrained(tmp_path)
        command = ["plan", "--model", str(tmp_path), "--machine", "dgx-h100", "--gpus", "8", "--batch-sequences", "8"]
        assert main(command) == 0
        assert f"8 sequences of {seq:,} tokens a step" in capsys.readouterr().out
    section = {"grid": "auto", "plan": {**AUTO, "model": str(tmp_path), "seq": 8192}}
    _, notes = resolve_auto(section, 4, mixed_precision="bf16", read=read_shape)
    assert (
        "sequences of 8,192 tokens are longer than the 4,096 that the config allows (max_position_embeddings)."
        in notes
    )


def test_options_without_effect_are_refused(capsys):
    assert main([*COMMAND, "--sweep", "1..8", "--overlap"]) == 2
    assert "leave one of them out" in capsys.readouterr().err


@pytest.mark.parametrize("axis", ["--pipe", "--context"])
def test_sizes_that_divide_nothing(axis, capsys):
    assert main([*COMMAND, "--gpus", "64", axis, "3"]) == 1
    expected = "no grid of 64 GPUs is possible: no size of pipe or context to plan with divides 64."
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--gpus is missing"),
        (["--sweep", "512"], "--sweep is '512'"),
        (["--sweep", "8..2"], "--sweep is '8..2'"),
        (["--sweep", "8..16", "--gpus", "8"], "--sweep stands in place of --gpus"),
        (["--gpus", "8", "--weak"], "--weak goes with --sweep"),
        (["--sweep", "8..16", "--top", "3"], "--sweep shows the fastest grid of each number of GPUs: leave --top"),
        (
            ["--gpus", "8", "--free", "reduce_dtype", "--reduce-dtype", "fp32"],
            "--free reduce_dtype lets the plan choose what --fix reduce_dtype= sets",
        ),
        (["--gpus", "8", "--top", "0"], "--top is 0"),
        (["--gpus", "8", "--fix", "checkpoint=on"], "did you mean checkpointing?"),
        (["--gpus", "8", "--fix", "checkpointing=yes"], "checkpointing is on, off."),
        (["--gpus", "8", "--fix", "keep_gathered=some"], "keep_gathered is recomputed, none, all, a number."),
        (["--gpus", "8", "--fix", "micro_batches"], "micro_batches is a number."),
        (
            ["--gpus", "8", "--fix", "checkpointing=on", "--no-checkpointing"],
            "checkpointing has a value already, leave one",
        ),
        (["--gpus", "8", "--fix", "stages_per_rank=2"], "--fix stages_per_rank is of a pipeline: give --pipe"),
        (["--gpus", "8", "--fix", "experts=move"], "--fix experts is of a mixture of experts, and this model has"),
        (["--gpus", "8", "--json", "--overlap"], "--json says nothing of --overlap"),
        (["--gpus", "8", "--lora", "8", "--pipe", "2"], "--pipe is not planned with --lora"),
        (["--gpus", "8", "--context", "some"], "--context is 'some': write sizes such as 1,2,4,8, or any."),
        (["--gpus", "8", "--base", "4bit"], "--base 4bit goes with --lora RANK"),
        (["--gpus", "8", "--attention", "flash9"], "no speed of the attention kernel 'flash9'"),
        (["--gpus", "8", "--machine", "nowhere"], "there is no machine 'nowhere'"),
        (["--gpus", "8", "--model", "nothing"], "there is no model 'nothing'"),
    ],
)
def test_wrong_commands_end_with_2_and_a_message(more, message, capsys):
    assert main([*COMMAND, *more]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "message"), [("0", "'0' is not a number of at least 1."), ("few", "'few' is not a number such as 4096")]
)
def test_an_option_that_is_no_number_is_told_what_a_number_is(gpus, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*COMMAND, "--gpus", gpus])
    assert ended.value.code == 2 and f"argument --gpus: {message}" in capsys.readouterr().err


def test_what_seconds_leave_out_is_in_every_form_of_a_plan(capsys, tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 128, "vocab_size": 1000}))
    sentence = "products in float32 are taken to be as fast as"
    for more in (["--gpus", "1"], ["--gpus", "1", "--json"], ["--sweep", "1..2"]):
        assert main([*COMMAND, "--model", str(tmp_path), "--activations", "fp32", *more]) == 0
        printed = capsys.readouterr().out
        assert sentence in printed and ("0.21 million parameters" in printed) == ("--json" not in more)
        assert not re.search(r" 0(\.0)?(%| of | TFLOP| +[\d.]+ +100)", printed)
    assert main([*COMMAND, "--gpus", "64", "--seq", "8192"]) == 0
    assert "8,192 tokens are longer than the 2,048 that the config allows" in capsys.readouterr().out


def test_a_model_that_fits_nowhere_ends_with_1(capsys):
    assert main([*COMMAND, "--model", "gpt-640b", "--gpus", "4"]) == 1
    printed = capsys.readouterr().out
    assert "no grid of 4 GPUs fits: the smallest" in printed and printed.count("smallest") == 1


AUTO = {"model": "gpt-5b", "machine": "perlmutter", "batch_tokens": "1M", "seq": 2048}


def test_grid_auto_is_resolved_at_the_launch(tmp_path):
    settings = {
        "num_processes": 64,
        "mixed_precision": "bf16",
        "distributed_type": "MULTI_GPU",
        "use_cpu": True,
        "axonn_config": {"grid": "auto", "plan": AUTO, "reduce_dtype": "bfloat16"},
    }
    launch = resolve(settings, {})
    job = replace(JOB, sequences=512, reduce_bytes=2)
    assert launch.config.grid == plan(job, 64, free=("keep_gathered",)).best.grid
    assert launch.config.reduce_dtype == "bfloat16"
    assert AxonnConfig.from_env(launch.environment) == launch.config
    assert any(f"grid: auto is {launch.config.grid}" in note for note in launch.notes)
    assert any(note.startswith("second is data=") for note in launch.notes)
    assert "1,000,000 tokens are 488.3 sequences of 2,048: planned for 512, +4.9%." in launch.notes
    assert "planned as if every 4 neighbours were a node of perlmutter, not 64." in launch.notes
    settings |= {"num_machines": 16, "main_process_ip": "here", "main_process_port": 1}
    assert not any("planned as if" in note for note in resolve(settings, {}).notes)


def test_grid_auto_runs_no_code_that_comes_with_a_model(tmp_path):
    own = {"model_type": "of_own_making", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    settings = {"num_processes": 8, "distributed_type": "MULTI_GPU", "use_cpu": True}
    settings["axonn_config"] = {"grid": "auto", "plan": AUTO | {"model": str(tmp_path)}}
    message = "axonn_config.plan: .* of its own, which a launcher does not run: write the grid .* --trust-remote-code"
    with pytest.raises(ValueError, match=message):
        resolve(settings, {})


def test_grid_auto_keeps_gathered_weights_where_that_helps(tmp_path):
    file = tmp_path / "slow.json"
    machine = json.loads((FOLDER / "perlmutter.json").read_text())
    file.write_text(json.dumps(machine | {"inter_gbs": 4}))
    section = {"grid": "auto", "plan": AUTO | {"machine": str(file)}}
    resolved, notes = resolve_auto(section, 64, mixed_precision="bf16")
    best = plan(replace(JOB, machine=load_machine(str(file))), 64, free=("keep_gathered",)).best
    assert resolved["keep_gathered"] == best.job.keep_gathered != "recomputed"
    assert f", keep_gathered {best.job.keep_gathered}, " in notes[0]
    fixed, _ = resolve_auto(section | {"keep_gathered": "none"}, 64, mixed_precision="bf16")
    assert fixed["keep_gathered"] == "none"


def test_grid_auto_takes_a_pipeline_where_the_file_asks_for_one():
    slow = replace(JOB, shape=load_shape("gpt-40b"), sequences=512)
    plans = AUTO | {"model": "gpt-40b", "pipe": [2, 4]}
    section, notes = resolve_auto({"grid": "auto", "plan": plans}, 64, mixed_precision="bf16")
    best = plan(slow, 64, free=("keep_gathered",), pipes=[2, 4]).best
    config = AxonnConfig.from_mapping(section)
    assert config.grid == best.grid and config.grid.pipe in (2, 4)
    assert (config.schedule, config.stages_per_rank) == (best.job.pipeline, best.job.stages_per_rank)
    assert list(config.stage_layers) == [len(layers) for layers in best.pipelined.stages.layers]
    assert f"micro-batches: {best.micro_batches}." in notes[0]
    asked = {"grid": "auto", "plan": plans, "schedule": "zero_bubble", "stages_per_rank": 1}
    section, _ = resolve_auto(asked, 64, mixed_precision="bf16")
    assert (section["schedule"], section["stages_per_rank"]) == ("zero_bubble", 1)


def test_grid_auto_plans_no_pipeline_in_fp16_which_a_launch_refuses(monkeypatch):
    def stop(*_, pipes, **__):
        raise ValueError(f"pipes {pipes}")

    monkeypatch.setattr(from_settings, "plan", stop)
    for given, precision, pipes in (
        ("any", "fp16", [1]),
        ([1, 4], "fp16", [1]),
        (4, "fp16", [4]),
        ("any", "no", None),
    ):
        with pytest.raises(ValueError, match=re.escape(f"pipes {pipes}")):
            resolve_auto({"grid": "auto", "plan": AUTO | {"pipe": given}}, 2, mixed_precision=precision)


def test_grid_auto_divides_rows_where_there_are_few():
    settings = AUTO | {"batch_tokens": 4 * 2048 * 16, "seq": 2048 * 16}
    section, notes = resolve_auto({"grid": "auto", "plan": settings}, 64, mixed_precision="bf16")
    best = plan(replace(JOB, sequences=4, seq=2048 * 16), 64, free=("keep_gathered",)).best
    assert AxonnConfig.from_mapping(section).grid == best.grid and best.grid.context > 1
    assert notes[0].startswith(f"grid: auto is {best.grid}, ") and f"context={best.grid.context}" in notes[0]
    section, _ = resolve_auto({"grid": "auto", "plan": settings | {"context": 1}}, 64, mixed_precision="bf16")
    assert AxonnConfig.from_mapping(section).grid.context == 1


def test_grid_auto_divides_rows_as_the_launch_will():
    """3 does not divide the 32 heads of gpt-5b, so that a launch with context_attention: heads refuses it."""
    auto = {"grid": "auto", "plan": AUTO | {"batch_tokens": 65536, "seq": 8192, "context": [3]}}
    section, _ = resolve_auto(auto, 24, mixed_precision="bf16")
    assert section["grid"]["context"] == 3
    with pytest.raises(ValueError, match="heads of a rank of .x, y. are not divisible by context = 3"):
        resolve_auto(auto | {"context_attention": "heads"}, 24, mixed_precision="bf16")


def test_a_residual_dtype_is_planned_where_a_launch_takes_it():
    small, free = replace(JOB, sequences=16), ("residual_dtype",)
    assert plan(small, 4, free=free).best.job.residual_bytes == 2
    for changes, gpus in (({}, 1), ({"shape": replace(small.shape, loose=True)}, 4), ({"compute_bytes": 4}, 4)):
        job = replace(small, **changes)
        job = replace(job, machine=replace(job.machine, memory=2**40))
        assert {entry.job.residual_bytes for entry in plan(job, gpus, free=free).ranked} == {None}
        with pytest.raises(ValueError, match=r"residual_dtype is bf16.*[:,] leave (that setting|one of them) out\.$"):
            assert plan(replace(job, residual_bytes=2), gpus).best


def test_grid_auto_counts_the_moments_that_there_will_be():
    """Two GPUs of 40 GB have no room for gpt-5b with AdamW's moments, but for what each of the others keeps."""
    auto = {"grid": "auto", "plan": AUTO}
    with pytest.raises(ValueError, match="no grid of 2 GPUs fits"):
        resolve_auto(auto, 2, mixed_precision="bf16")
    section, notes = resolve_auto(auto | {"offload": "optimizer"}, 2, mixed_precision="bf16")
    assert AxonnConfig.from_mapping(section) == AxonnConfig(grid=Grid(data=2), offload="optimizer")
    assert "copies of moments and weights from and to host memory are not in the seconds." in notes
    for kind, untimed in (("adamw_8bit", 0), ("muon", 1)):
        section, notes = resolve_auto(auto | {"plan": AUTO | {"optimizer": kind}}, 2, mixed_precision="bf16")
        assert AxonnConfig.from_mapping(section).grid == Grid(z=2)
        assert sum("orthogonalize matrices is not in the seconds" in note for note in notes) == untimed


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"grid": "auto"}, "there is no plan that says for what"),
        ({"grid": {"x": 2}, "plan": AUTO}, "write grid: auto beside it, or remove it"),
        ({"grid": "auto", "plan": {**AUTO, "modle": 1}}, "unknown key 'modle'.* did you mean model?"),
        ({"grid": "auto", "plan": {"model": "gpt-5b"}}, "plan has no machine, batch_tokens, seq"),
        ({"grid": "auto", "plan": {**AUTO, "seq": "long"}}, "'long' is not a number"),
        ({"grid": "auto", "plan": {**AUTO, "machine": "here"}}, "there is no machine 'here'"),
        ({"grid": "auto", "plan": {**AUTO, "weights": "fp8"}}, "weights is 'fp8'"),
        ({"grid": "auto", "plan": {**AUTO, "pipe": "two"}}, "pipe is 'two': write sizes"),
        ({"grid": "auto", "plan": {**AUTO, "context": "two"}}, "context is 'two': write sizes"),
        ({"grid": "auto", "plan": {**AUTO, "checkpointing": 1}}, "checkpointing is 1"),
        ({"grid": "auto", "plan": {**AUTO, "optimizer": "lion"}}, "optimizer is 'lion', but it is one of adamw, "),
        (
            {"grid": "auto", "offload": "optimizer", "plan": {**AUTO, "optimizer": "muon"}},
            "offload: optimizer is not possible with muon",
        ),
        ({"grid": "auto", "plan": {**AUTO, "model": "gpt-640b"}}, "no grid of 2 GPUs fits"),
        ({"grid": "auto", "plan": AUTO, "stages_per_rank": "2"}, "stages_per_rank is '2', but it is a whole number"),
        (
            {"grid": "auto", "plan": AUTO, "keep_gathered": [1]},
            r"keep_gathered is \[1\], but it is a word or a number",
        ),
        ({"grid": "auto", "plan": AUTO, "stage_layers": [12, 12]}, "stage_layers lists the stages of one grid"),
    ],
)
def test_a_wrong_auto_grid_is_refused_before_a_process_starts(section, message):
    with pytest.raises(ValueError, match=message):
        resolve_auto(section, 2, mixed_precision="bf16")


def test_sizes_are_left_alone():
    section = {"grid": {"x": 2}, "tune_matmuls": True}
    assert resolve_auto(section, 2, mixed_precision="no") == (section, [])


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("AMD Instinct MI250X", 191.5),
        ("NVIDIA Tesla K80", None),
    ],
)
def test_the_peak_is_that_of_the_name(name, peak):
    assert peak_tflops(name) == peak
