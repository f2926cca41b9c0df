"""Rows whose positions are divided over context while keys and values are gathered: equal to one process.

The cases are those of test_context_parallel.py, where heads are divided.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_axonn import parallelize
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.collectives import observe
from hf_axonn.layers import attention_chunks
from hf_axonn.topology.grid import Grid
from tests.end_to_end.test_equivalence import SITUATIONS, without_cache
from tests.helpers.equality import Case, exact
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import refused, run_ranks
from tests.layers.test_moe import moe
from tests.parallel.test_context_parallel import FAMILIES, FOUR, GEMMA, HERE, QUICK, TWO, errors, of_model


pytestmark = pytest.mark.usefixtures("device")


def config_of(grid, way="keys"):
    return AxonnConfig(grid=grid, context_attention=way if grid.context > 1 else "auto")


def with_way(case, way="keys"):
    """The same case with one of the two ways of attention."""

    def config(grid):
        return dataclasses.replace(case.config(grid) or AxonnConfig(grid=grid), context_attention=way)

    return dataclasses.replace(case, name=f"{case.name}, {way}", config=config)


# Of the situations, also those with a head count that context does not divide, where auto takes keys.
EVERY = [with_way(case) for case in HERE] + [case for case in SITUATIONS if "smollm2" in case.name]


def test_situations_on_two_ranks():
    quick = [with_way(case) for case in HERE if case.name in QUICK]
    assert not errors([*quick, next(case for case in EVERY if case.name == "packed rows, smollm2")], TWO)


def test_kinds_of_attention_on_two_ranks():
    assert not errors([with_way(case) for case in FAMILIES], TWO)


@pytest.mark.slow
def test_context_beside_each_other_axis():
    assert not errors([with_way(of_model("llama", steps=3))], FOUR)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [*FOUR, Grid(data=2, z=2, context=2)], ids=str)
def test_every_situation(grid):
    assert not errors(EVERY, [grid])


@pytest.mark.slow
def test_kinds_of_attention_beside_each_other_axis():
    assert not errors([with_way(case) for case in FAMILIES], FOUR)


def windowed(length):
    """Cases whose windows reach into the stripe before: by sdpa, of packed rows, and by eager attention."""
    batch, documents = tiny_batch(4, length), tiny_batch(4, length)
    starts = torch.arange(length).where(torch.arange(length) < 6, torch.arange(length) - 6)
    documents["position_ids"] = starts.expand(4, -1)
    for each in (batch, documents):
        del each["attention_mask"]
    window = GEMMA | {"sliding_window": 3}
    yield Case("window", functools.partial(tiny_model, "mistral", sliding_window=3), [batch])
    yield Case("packed", functools.partial(tiny_model, "mistral", sliding_window=3), [documents], before=without_cache)
    yield Case("sinks", functools.partial(moe, "gpt_oss", sliding_window=2), [batch])
    eager = functools.partial(tiny_model, "gemma2", attention="eager", **window)
    yield Case("eager", eager, [documents], before=without_cache)


def exchanged(grid, case):
    """Bytes over context of a step, by kind of collective."""
    model, _ = parallelize(case.make().train(), grid, config=config_of(grid))
    found, group = Counter(), model.axonn.mesh.group("context")
    with observe(lambda kind, payload, of: found.update({kind: payload}) if of is group else None):
        model(**case.batches[0]).loss.backward()
    return found


def test_a_window_gets_the_ends_of_stripes_alone(monkeypatch):
    grid, cases = TWO[0], list(windowed(15))
    assert not errors([with_way(case) for case in cases], [grid])
    in_chunks(monkeypatch)
    assert not errors([with_way(case) for case in cases], [grid])
    found = run_ranks(exchanged, 2, grid, cases[0])
    # Two layers, two positions of 4 rows to the other rank: k and v of 6 heads of 4 features.
    assert [each["exchange"] for each in found] == [2 * 2 * 2 * 4 * (6 + 6) * 4 * 8] * 2


@pytest.mark.slow
def test_windows_on_four_ranks():
    assert not errors([with_way(case) for case in windowed(16)], FOUR)


def in_chunks(monkeypatch):
    """Let attention come in chunks of a few queries, which are computed again in float64."""
    monkeypatch.setattr(attention_chunks, "LARGEST", 700)
    again = functools.partial(checkpoint, context_fn=lambda: (contextlib.nullcontext(), exact()))
    monkeypatch.setattr(attention_chunks, "checkpoint", again)


@pytest.mark.parametrize("way", ["heads", "keys"])
def test_chunks_of_queries(monkeypatch, way):
    """Chunks have a mask of documents for sdpa, windows and soft caps, sinks, and two kinds of checkpoints."""
    in_chunks(monkeypatch)
    chosen = {"packed rows", "sliding window, eager", "reentrant checkpointing, two shapes", "left padding"}
    cases = [case for case in HERE if case.name in chosen]
    cases += [case for case in FAMILIES if case.name in ("gemma2", "gpt_oss", "deepseek_v3")]
    assert len(cases) == 7
    assert not errors([with_way(case, way) for case in cases], TWO)


def traffic_of(grid):
    """Collectives over context of a step, by kind."""
    model, report = parallelize(tiny_model("llama").train(), grid, config=config_of(grid))
    found, group = [], model.axonn.mesh.group("context")
    with observe(lambda kind, payload, of: found.append((kind, payload)) if of is group else None):
        model(**tiny_batch(2, 8)).loss.backward()
    return found, report


def test_a_layer_gathers_its_keys_and_values_once():
    """Two layers of two rows, 4 positions a rank: k and v of 6 heads of 4 features together."""
    for found, report in run_ranks(traffic_of, 2, Grid(z=2, context=2)):
        keys = 2 * 4 * (6 + 6) * 4 * 8
        assert found.count(("all_gather", keys)) == found.count(("reduce_scatter", keys)) == 2
        assert not [kind for kind, _ in found if kind == "all_to_all"]
        assert "2 attentions gather keys and values (as configured)" in str(report)


def ways():
    """The report says so where context does not divide the heads."""
    grid = TWO[0]
    model = functools.partial(tiny_model, "llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=36)
    _, report = parallelize(model(), grid)
    heads = refused(parallelize, model(), grid, config=config_of(grid, "heads"))
    bidirectional = tiny_model("llama")
    bidirectional.config.is_causal = False
    return str(report), heads


def test_heads_that_context_does_not_divide_stay_together():
    for report, message in run_ranks(ways, 2):
        assert "2 attentions gather keys and values (9 of its 9 heads are on a rank of (x, y), which" in report
        assert "context_attention is heads" in message and "9 of its 9 heads" in message
