"""What all tests share: the device that ranks compute on, hypothesis without a clock, a small heap to collect."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import accelerate.utils.imports
import hypothesis
import pytest
import torch

from tests.helpers import devices


# A loaded machine is slow, and that is no failure. Fixtures of a function are folders and patches, which an example
# may find as another left them.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("tests")


# Every Accelerator and data loader asks which packages there are, and each time their metadata would be parsed.
accelerate.utils.imports._is_package_available = functools.cache(accelerate.utils.imports._is_package_available)


# For a device that this build of torch does not have, each `torch.manual_seed` would note the whole stack, as text.
for _device in (torch.cuda, torch.xpu, torch.mtia):
    if not _device._is_compiled():
        _device.manual_seed_all = lambda seed: None


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from this process, except with `-m gpu`, and let autograd start no threads for them.

    It starts them at the first backward pass, one for each device, and forks of a process that has them cannot go
    backward. A build for CUDA finds devices also without GPUs, once FakeTensorMode has been used.
    """
    if re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        return
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
    with mock.patch.dict(os.environ, hidden):
        torch.ones((), requires_grad=True).backward()
    if devices.chosen().kind == "cpu":
        os.environ.update(hidden)  # commands that tests start would load models onto a GPU


# Packages that the extra `test` has beyond `test-gpu`, and the files that import them; `make rehearsal` runs without.
FILES_OF = {
    "gguf": ("checkpoint/test_gguf_files.py",),
    "grimp": ("benchmarks/test_monitoring.py", "repository/test_architecture.py", "repository/test_site.py"),
    "jsonschema": ("end_to_end/test_kubernetes.py",),
    "lightning": ("accelerator/test_plugin.py", "lightning"),
    "lion_pytorch": ("trainer/test_optimizers.py",),
    "nbformat": ("launch/test_notebooks.py",),
}
LEFT_OUT = {package: files for package, files in FILES_OF.items() if importlib.util.find_spec(package) is None}
collect_ignore = [file for files in LEFT_OUT.values() for file in files]  # read by pytest


UNPATCHED = "a server forks the ranks on GPUs, and they would not see what this test patches"


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[devices.Devices]:
    """CPUs, or with HF_AXONN_TEST_DEVICE=cuda GPUs: `run_ranks` starts its ranks there, and models lie there."""
    if devices.chosen().kind != "cpu" and "monkeypatch" in request.fixturenames:
        pytest.skip(UNPATCHED)
    with devices.used(devices.chosen()) as found:
        yield found


@pytest.fixture(params=["auto", pytest.param("keys", marks=pytest.mark.slow)])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each way in which attention sees whole rows over context, whatever the test configures."""
    import hf_axonn.parallel.parallelize as decisions

    if request.param == "auto":
        yield "auto"
        return
    if devices.chosen().kind != "cpu":
        pytest.skip(UNPATCHED)

    def choose_rows(model, plan, config, adapted):
        return choose(model, plan, dataclasses.replace(config, context_attention=request.param), adapted)

    choose = decisions.choose_rows
    with mock.patch.object(decisions, "choose_rows", choose_rows):
        yield request.param


# Files of few and long tests. Begun last, the longest would run alone while the other workers have nothing to do.
LONG = ("tests/end_to_end", "tests/trainer", "tests/launch", "tests/parallel/adapters")


# Long tests of which others run every branch (tests/tools/lines_by_test.py): slow where ranks compute on CPUs.
COVERED = Path(__file__).parent / "tools/covered.txt"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`-m on_device`, which `make test-gpu` selects, are the tests that ask for the fixture. Long files come first."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    on_gpu, is_found_anew = os.environ.get("HF_AXONN_TEST_DEVICE"), config.getoption("lines", None)
    covered = set() if on_gpu or is_found_anew else set(COVERED.read_text().splitlines())
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.on_device)
        if item.nodeid in covered:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Whatever has been imported stays: Trainer collects garbage several times a run, and would look at all of it."""
    gc.collect()
    gc.freeze()


SECONDS = ("elapsed", "processor")
_by_file: dict[str, list[float]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note what a test took of the clock and of the processor, with the processes that it started and waited for."""
    item.user_properties.append(("began", (time.monotonic(), _processor_seconds())))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        began = dict(item.user_properties).pop("began")
        taken = [now - then for now, then in zip((time.monotonic(), _processor_seconds()), began, strict=True)]
        report.user_properties = [(SECONDS[0], taken[0]), (SECONDS[1], taken[1])]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        taken = dict(report.user_properties)
        total = _by_file.setdefault(report.nodeid.partition("::")[0], [0.0, 0.0])
        for i, name in enumerate(SECONDS):
            total[i] += taken[name]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which files were left out, and which take longest, of a run of many."""
    for package, files in LEFT_OUT.items():
        terminalreporter.line(f"left out, since {package} is not installed: {', '.join(files)}")
    if len(_by_file) < 20:
        return
    terminalreporter.section("processor seconds and seconds by file")
    files = sorted(_by_file.items(), key=lambda file: -file[1][1])
    for name, (elapsed, processor) in files[:40]:
        terminalreporter.line(f"{processor:7.1f} {elapsed:7.1f}  {name}")
    elapsed, processor = (sum(times) for times in zip(*_by_file.values(), strict=True))
    terminalreporter.line(f"{processor:7.1f} {elapsed:7.1f}  all {len(files)} files")


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
