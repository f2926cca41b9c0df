"""Files and arguments that make no sense: a ValueError or an exit code with a message, never anything from our depths.

Values are near to right ones, so that they get far. The same ones are tried in every run; AXONN_FUZZ=2000 tries as
many others.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from hf_axonn import AxonnConfig, AxonnPlugin, Grid, parallelize, save_sharded
from hf_axonn.checkpoint.manifest import MANIFEST, Manifest, _checksum, check_complete
from hf_axonn.cli.main import main as hf_axonn_cli
from hf_axonn.config import CONTEXT_ATTENTION, LAYOUTS, REDUCE_DTYPES
from hf_axonn.launch.command import prepare_or_exit
from hf_axonn.launch.launch_file import resolve
from hf_axonn.topology.experts import EXPERTS
from hf_axonn.topology.grid import AXES
from hf_axonn_eval.__main__ import main as eval_cli
from hf_axonn_eval.data.samples import Sample, read_samples, write_samples
from tests.helpers.fuzzing import fuzz
from tests.helpers.ranks import run_ranks


FUZZ, FILES = fuzz(80), fuzz(30)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "no", "bf16", "fp16", "MULTI_GPU", "MULTI_CPU", "NO", "none", "all", "x", "", "0", "2"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def mostly(strategy: st.SearchStrategy) -> st.SearchStrategy:
    """What belongs there, and sometimes anything."""
    return st.one_of(strategy, strategy, strategy, VALUES)


SIZES = mostly(st.dictionaries(st.sampled_from(["data", "z", "y", "x", "w"]), mostly(st.integers(0, 4)), max_size=4))
SECTION = st.fixed_dictionaries(
    {"grid": SIZES},
    optional={
        "overlap": mostly(st.dictionaries(st.sampled_from(["all_gather", "all_reduce", "x"]), mostly(st.booleans()))),
        "reduce_dtype": mostly(st.sampled_from(REDUCE_DTYPES)),
        "residual_dtype": mostly(st.sampled_from(["model", "bfloat16"])),
        "keep_gathered": mostly(st.sampled_from(["none", "all", "recomputed", 0, 3, -1])),
        "tune_matmuls": mostly(st.booleans()),
        "layout": mostly(st.sampled_from(LAYOUTS)),
        "experts": mostly(st.sampled_from(EXPERTS)),
        "context_attention": mostly(st.sampled_from(CONTEXT_ATTENTION)),
        "async_save": mostly(st.booleans()),
        "save_failure": mostly(st.sampled_from(["stop", "continue"])),
        "order": mostly(st.permutations(["data", "z", "y", "x"])),
        "more": VALUES,
    },
)
PLAN = st.fixed_dictionaries(
    {
        "model": mostly(st.just("gpt-5b")),
        "machine": mostly(st.just("dgx-h100")),
        "batch_tokens": mostly(st.sampled_from([8192, "1M", "1e400", 10**30])),
        "seq": mostly(st.sampled_from([2048, 7])),
    },
    optional={"checkpointing": mostly(st.booleans()), "weights": mostly(st.just("bf16")), "more": VALUES},
)
PLANNED = st.tuples(SECTION, mostly(PLAN)).map(lambda both: both[0] | {"grid": "auto", "plan": both[1]})
LAUNCH_FILE = st.fixed_dictionaries(
    {"axonn_config": st.one_of(mostly(SECTION), PLANNED), "num_processes": mostly(st.sampled_from([1, 2, 4]))},
    optional={
        "compute_environment": mostly(st.just("LOCAL_MACHINE")),
        "distributed_type": mostly(st.sampled_from(["MULTI_GPU", "MULTI_CPU"])),
        "num_machines": mostly(st.sampled_from([1, 2])),
        "machine_rank": mostly(st.sampled_from([0, 1])),
        "main_process_ip": SCALARS,
        "main_process_port": SCALARS,
        "mixed_precision": mostly(st.sampled_from(["no", "bf16"])),
        "use_cpu": mostly(st.just(True)),
        "dynamo_config": VALUES,
        "fsdp_config": VALUES,
        "fp16": SCALARS,
    },
)
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


def planned(**changes) -> dict:
    """A launch file whose grid is to be planned."""
    plan = {"model": "gpt-5b", "machine": "dgx-h100", "batch_tokens": 8192, "seq": 2048}
    return {"axonn_config": {"grid": "auto", "plan": plan | changes}, "num_processes": 4}


@FUZZ
@given(settings_=LAUNCH_FILE)
@example(settings_=planned(weights=[1]))
@example(settings_=planned(batch_tokens=10**30))
@example(settings_=planned(model="x" * 400))
@example(settings_=planned(machine="x" * 400))
def test_launch_files(settings_):
    with contextlib.suppress(ValueError):
        launch = resolve(settings_, {})
        assert launch.config.grid.size == launch.settings["num_processes"]
        assert AxonnConfig.from_env(launch.environment) == launch.config


@pytest.fixture
def clean_environment(monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())


@FILES
@given(
    content=st.one_of(
        st.binary(max_size=60), st.text(max_size=60).map(str.encode), LAUNCH_FILE.map(yaml.safe_dump).map(str.encode)
    )
)
@example(content=b"[" * 20_000)
@example(content=b"axonn_config: " + b"{a: " * 5_000)
@example(content=f"{LAUGHS}axonn_config: *a9\n".encode())
@example(content=f"{LAUGHS}num_processes: *a9\naxonn_config: {{grid: {{x: 2}}}}\n".encode())
@example(content=b"axonn_config: &a {grid: *a}\nnum_processes: 2")
@example(content=b"? [1, 2]\n: 3\n")
@example(content=b"axonn_config: !!python/object/apply:os.system [false]\n")
@example(content=b"axonn_config: {grid: {x: 1e400}}\nnum_processes: 2")
@example(content=b"axonn_config: {grid: {x: " + b"9" * 5000 + b"}}\nnum_processes: 2")
def test_launch_files_as_bytes(tmp_path, clean_environment, content):
    path = tmp_path / "axonn.yaml"
    path.write_bytes(content)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            first = prepare_or_exit(["--config", str(path), "script.py"])[0]
    except SystemExit as exit_:
        assert exit_.code == 2 and "nothing was started" in errors.getvalue()
        assert len(errors.getvalue()) < 10_000
    else:
        given_to_accelerate = Path(first.partition("=")[2])
        if given_to_accelerate != path:
            given_to_accelerate.unlink()


@FUZZ
@given(text=st.one_of(st.text(max_size=40), SECTION.map(json.dumps), VALUES.map(json.dumps)))
@example(text="[" * 100_000)
@example(text='{"grid": {"x": ' + "9" * 5000 + "}}")
def test_the_variable_of_the_launcher(text):
    with contextlib.suppress(ValueError):
        config = AxonnConfig.from_env({"AXONN_CONFIG": text})
        assert config is None or AxonnConfig.from_env({"AXONN_CONFIG": config.to_json()}) == config


@FUZZ
@given(
    sizes=SIZES,
    options=st.dictionaries(
        st.sampled_from(sorted(set(inspect.signature(AxonnPlugin).parameters) - {"grid"})), VALUES
    ),
)
def test_plugin_arguments(sizes, options):
    with contextlib.suppress(ValueError):
        grid = (
            Grid(**{axis: size for axis, size in sizes.items() if axis in AXES}) if isinstance(sizes, dict) else sizes
        )
        plugin = AxonnPlugin(grid=grid, **options)
        assert plugin.config.grid == plugin.grid


def _save(folder: str) -> None:
    from tests.helpers.models import tiny_model

    model, _ = parallelize(tiny_model("llama", num_hidden_layers=1), Grid(x=2))
    save_sharded(model, folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A complete checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("checkpoint") / "whole"
    run_ranks(_save, 2, str(folder))
    check_complete(folder)
    return folder


def _changed(body, path: list[int], value):
    """A JSON value with one place, found by following `path`, replaced."""
    if not path or not isinstance(body, (dict, list)) or not body:
        return value
    keys = sorted(body) if isinstance(body, dict) else range(len(body))
    key = keys[path[0] % len(keys)]
    copied = body.copy()
    copied[key] = _changed(body[key], path[1:], value)
    return copied


@FILES
@given(
    path=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    value=st.one_of(VALUES, st.sampled_from(["../x", "/etc/passwd", "F32", 2**70, [], {}, [1, 2, 3], {"x": 10**9}])),
    sealed=st.booleans(),
)
def test_manifests(tmp_path, checkpoint, path, value, sealed):
    """One place is changed; sealed: by somebody who knows how to write the checksum."""
    body = json.loads((checkpoint / MANIFEST).read_text())
    body.pop("checksum")
    changed = _changed(body, path, value)
    if sealed:
        changed["checksum"] = _checksum(changed)
    folder = tmp_path / "changed"
    folder.mkdir(exist_ok=True)
    for file in checkpoint.iterdir():
        if file.is_file() and file.name != MANIFEST and not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / MANIFEST).write_text(json.dumps(changed))
    with contextlib.suppress(ValueError):
        check_complete(folder)
        assert sealed
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert hf_axonn_cli(["verify", str(folder)]) in (0, 1, 2)
        output = tmp_path / "plain"
        if hf_axonn_cli(["convert", str(folder), str(output)]) == 0:
            for file in output.iterdir():
                file.unlink()
            output.rmdir()
        else:
            assert not output.exists() or not any(output.iterdir()), "a broken model directory is left"


@FUZZ
@given(text=st.one_of(st.text(max_size=60), VALUES.map(json.dumps)))
@example(text="[" * 100_000)
@example(text='{"version": 2, "checksum": NaN}')
def test_texts_that_are_no_manifests(text):
    with pytest.raises(ValueError):
        Manifest.from_json(text)


SAMPLE = {"sample_id": "a@0", "document_id": "a", "bucket": 1, "offset": 0, "prefix": [1, 2], "suffix": [3]}
LINE = st.one_of(
    st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=2), VALUES).map(
        lambda change: _changed(SAMPLE, *change)
    ),
    VALUES,
    st.just(SAMPLE),
).map(json.dumps)


@FILES
@given(content=st.one_of(st.binary(max_size=60), st.lists(LINE, max_size=3).map("\n".join).map(str.encode)))
@example(content=b"[" * 100_000)
@example(content=b'{"sample_id": ' + b"9" * 5000 + b"}")
@example(content=b"\xff\xfe")
def test_sample_files(tmp_path, content):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(content)
    try:
        samples = read_samples(path)
    except ValueError as error:
        assert str(path) in str(error)
    else:
        assert samples and all(isinstance(sample, Sample) for sample in samples)
        write_samples(samples, tmp_path / "again.jsonl")
        assert read_samples(tmp_path / "again.jsonl") == samples


@FILES
@given(content=st.binary(max_size=60) | st.lists(VALUES.map(json.dumps), max_size=3).map("\n".join).map(str.encode))
def test_document_files(tmp_path, content):
    path = tmp_path / "documents.jsonl"
    path.write_bytes(content)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        command = ["samples", "--documents", str(path), "--tokenizer", str(tmp_path / "none"), "--output", str(path)]
        assert eval_cli(command) == 2
    assert errors.getvalue().startswith("error: ")


def test_a_manifest_that_was_not_changed_is_taken(checkpoint):
    body = json.loads((checkpoint / MANIFEST).read_text())
    body.pop("checksum")
    assert Manifest.from_json(json.dumps(body | {"checksum": _checksum(body)})) == check_complete(checkpoint)
