"""The section axonn_config: what is accepted, and that every refusal says what to write instead."""

import json
import os
import re
import subprocess
import sys

import pytest

from hf_axonn.config import AxonnConfig, Overlap
from hf_axonn.topology.grid import Grid


GRID = {"data": 1, "z": 2, "y": 1, "x": 2}


def test_a_full_section_and_its_defaults():
    section = {"grid": GRID, "overlap": {"all_gather": False}, "reduce_dtype": "bfloat16", "tune_matmuls": True}
    assert AxonnConfig.from_mapping(section, num_processes=4) == AxonnConfig(
        grid=Grid(z=2, x=2), overlap=Overlap(all_gather=False), reduce_dtype="bfloat16", tune_matmuls=True
    )
    assert AxonnConfig.from_mapping({"grid": {"x": 3}}) == AxonnConfig(grid=Grid(x=3))
    for keep in ("none", "all", 0, 12):
        assert AxonnConfig.from_mapping({"grid": GRID, "keep_gathered": keep}).keep_gathered == keep
    for ahead in ("layer", 1, 2**28):
        assert AxonnConfig.from_mapping({"grid": GRID, "prefetch": ahead}).prefetch == ahead


def test_json_in_the_environment_reads_back_as_the_same():
    config = AxonnConfig(
        grid=Grid(data=2, y=3),
        overlap=Overlap(all_reduce=False),
        reduce_dtype="float64",
        keep_gathered=3,
        prefetch=2**28,
        context_attention="keys",
        async_save=True,
        save_failure="continue",
        order=("x", "y", "z", "data"),
    )
    assert AxonnConfig.from_env({"AXONN_CONFIG": config.to_json()}) == config
    assert json.loads(config.to_json())["grid"] == {"data": 2, "z": 1, "y": 3, "x": 1}


def test_no_variable_means_no_config():
    assert AxonnConfig.from_env({}) is None
    assert AxonnConfig.from_env({"AXONN_CONFIG": ""}) is None


@pytest.mark.parametrize("text", ["x=2", "[1]", '{"grid": {"x": 0}}', '{"grid": {"x": 2}, "extra": 1}'])
def test_a_wrong_variable_is_named(text):
    with pytest.raises(ValueError, match=r"environment variable AXONN_CONFIG cannot be used: .+ by hand it looks"):
        AxonnConfig.from_env({"AXONN_CONFIG": text})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("4", "axonn_config is '4', but it holds keys: write grid: {data: 1, z: 2, y: 1, x: 2} under it."),
        (None, "axonn_config is None"),
        ({}, "axonn_config has no grid: write"),
        ({"x": 2, "z": 2}, "axonn_config.z is out of place: sizes stand under grid"),
        (
            {"gird": GRID},
            "unknown key 'gird'; it may hold grid, overlap, reduce_dtype, residual_dtype, keep_gathered, ",
        ),
        ({"gird": GRID}, ": did you mean grid?"),
        ({"grid": GRID, "zzz": 1}, "axonn_config has an unknown key 'zzz'; it may hold grid, overlap, "),
        ({"grid": GRID, "zzz": 1}, ": remove it."),
        ({"grid": "auto"}, "axonn_config.grid is auto, which only the launcher can resolve"),
        ({"grid": [1, 2, 1, 2]}, "axonn_config.grid is [1, 2, 1, 2], but it maps axes to sizes: write grid:"),
        ({"grid": 4}, "axonn_config.grid is 4, but it maps"),
        (
            {"grid": {"dat": 2}},
            "axonn_config.grid has an unknown key 'dat'; it may hold data, pipe, z, y, x, context: did you mean data?",
        ),
        ({"grid": {"x": 2.5}}, "axonn_config: grid axis x is 2.5, but"),
        ({"grid": {"x": 2.0}}, "grid axis x is 2.0, but"),
        ({"grid": {"y": -2}}, "grid axis y is -2, but"),
        ({"grid": {"z": 0}}, "grid axis z is 0, but"),
        ({"grid": {"data": True}}, "grid axis data is True, but"),
        ({"grid": {"x": "2"}}, "grid axis x is '2', but"),
        ({"grid": {"x": None}}, "grid axis x is None, but"),
        (
            {"grid": GRID, "overlap": True},
            "axonn_config.overlap is True, but it holds switches: write overlap: {all_gather:",
        ),
        ({"grid": GRID, "overlap": {"gather": True}}, "axonn_config.overlap has an unknown key 'gather'"),
        (
            {"grid": GRID, "overlap": {"all_gather": "yes"}},
            "overlap.all_gather is 'yes', but it is a switch: write true",
        ),
        ({"grid": GRID, "overlap": {"all_gather": 1}}, "overlap.all_gather is 1, but"),
        (
            {"grid": GRID, "reduce_dtype": "float16"},
            "reduce_dtype is 'float16', but it is one of float32, bfloat16, float64.",
        ),
        ({"grid": GRID, "reduce_dtype": None}, "reduce_dtype is None, but"),
        *(
            (
                {"grid": GRID, "keep_gathered": wrong},
                f"keep_gathered is {wrong!r}, but it is none, recomputed, all, or a number",
            )
            for wrong in (True, None, -1, 1.5, "some", "2", [])
        ),
        *(
            ({"grid": GRID, "prefetch": wrong}, f"prefetch is {wrong!r}, but it is layer, or a number")
            for wrong in (True, None, 0, -1, 1.5, "two", [])
        ),
        ({"grid": GRID, "async_save": 1}, "async_save is 1, but it is a switch: write true or false."),
        ({"grid": GRID, "save_failure": "retry"}, "save_failure is 'retry', but it is one of stop, continue."),
        ({"grid": GRID, "tune_matmuls": "auto"}, "tune_matmuls is 'auto', but it is a switch: write true or false."),
    ],
)
def test_wrong_sections(section, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        AxonnConfig.from_mapping(section, num_processes=4)


def test_a_product_that_is_not_the_number_of_processes_names_both_remedies():
    with pytest.raises(ValueError) as error:
        AxonnConfig.from_mapping({"grid": {"z": 2, "x": 4}}, num_processes=4)
    assert "num_processes: 8" in str(error.value)
    assert "product is 4" in str(error.value)


def test_values_given_in_code_are_checked_too():
    with pytest.raises(ValueError, match="grid is 4, but it is a Grid"):
        AxonnConfig(grid=4)
    with pytest.raises(ValueError, match="reduce_dtype is 'int8'"):
        AxonnConfig(grid=Grid(), reduce_dtype="int8")


def test_settings_that_a_grid_does_not_read_are_named_with_the_reason():
    options = {"schedule": "interleaved", "stages_per_rank": 2, "stage_layers": [1, 2], "context_attention": "keys"}
    assert AxonnConfig(grid=Grid(x=2), keep_gathered=0, prefetch=7, **options).idle_settings() == [
        "context_attention=keys (context is 1)", "schedule=interleaved (pipe is 1)", "stages_per_rank=2 (pipe is 1)",
        "stage_layers=(1, 2) (pipe is 1)", "keep_gathered=0 (z is 1)", "prefetch=7 (z is 1)",
    ]  # fmt: skip
    assert not AxonnConfig(grid=Grid(x=2), keep_gathered="recomputed", prefetch="layer").idle_settings()
    read = dict(options, stage_layers=[1] * 4, keep_gathered=0, prefetch=7)
    assert not AxonnConfig(grid=Grid(pipe=2, z=2, context=2), **read).idle_settings()


def test_the_code_and_the_launch_file_are_joined(monkeypatch):
    monkeypatch.setenv("AXONN_CONFIG", AxonnConfig(grid=Grid(z=2, x=2), keep_gathered=3).to_json())
    launched = AxonnConfig.from_env()
    assert AxonnConfig.with_launch(None, "call") == launched
    assert AxonnConfig.with_launch(AxonnConfig(grid=Grid(z=2, x=2)), "call") == launched
    given = AxonnConfig(grid=Grid(z=2, x=2), keep_gathered=3, layout="token")
    assert AxonnConfig.with_launch(given, "call") == given
    monkeypatch.delenv("AXONN_CONFIG")
    assert AxonnConfig.with_launch(given, "call") is given
    with pytest.raises(ValueError, match=r"call\(\) without a grid takes it from the launch file, but AXONN"):
        AxonnConfig.with_launch(None, "call")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (AxonnConfig(grid=Grid(z=2, x=2)), "grid has two values. axonn.yaml: z=2; code, call: z=2, x=2. Leave grid"),
        (AxonnConfig(grid=Grid()), "axonn.yaml: z=2; code, call: one rank."),
        (AxonnConfig(grid=Grid(z=2), prefetch=1), "prefetch has two values. axonn.yaml: 2; code, call: 1."),
    ],
)
def test_the_code_and_the_launch_file_differ(given, message, monkeypatch):
    monkeypatch.setenv("AXONN_CONFIG", AxonnConfig(grid=Grid(z=2), prefetch=2).to_json())
    monkeypatch.setenv("AXONN_LAUNCH_FILE", "axonn.yaml")
    with pytest.raises(ValueError, match=re.escape(message)):
        AxonnConfig.with_launch(given, "call")


def test_of_several_ranks_one_prints_the_difference():
    code = """
import sys
from hf_axonn.config import AxonnConfig, Grid
stock = sys.excepthook
sys.excepthook = lambda *error: stock(*error)  # torch.distributed has one of its own
AxonnConfig.with_launch(AxonnConfig(grid=Grid(x=2)), "call")
"""
    printed = {}
    for rank in ("0", "1"):
        environment = {**os.environ, "AXONN_CONFIG": '{"grid": {"z": 2}}', "AXONN_LAUNCH_FILE": "a.yaml", "RANK": rank}
        ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert ended.returncode == 1
        printed[rank] = ended.stderr
    assert "a.yaml: z=2; code, call: x=2" in printed["0"] and not printed["1"]
