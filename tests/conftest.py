"""What all tests share: the device that ranks compute on, hypothesis without a clock, a small heap to collect."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import hypothesis
import pytest

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


@pytest.fixture
def device() -> Iterator[devices.Devices]:
    """CPUs, or with HF_AXONN_TEST_DEVICE=cuda GPUs: `run_ranks` starts its ranks there, and models lie there."""
    with devices.used(devices.chosen()) as found:
        yield found


# Files of few and long tests. Begun last, the longest would run alone while the other workers have nothing to do.
LONG = ("tests/end_to_end", "tests/trainer", "tests/launch", "tests/parallel/adapters")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m on_device`, which `make test-gpu` selects, are the tests that ask for the fixture. Long files come first."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    for item in items:
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.on_device)


def pytest_collection_finish() -> None:
    """Whatever has been imported stays: Trainer collects garbage several times a run, and would look at all of it."""
    gc.collect()
    gc.freeze()
