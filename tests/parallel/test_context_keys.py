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
from hf_axonn.architectures.divided_rows import latent_features
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.collectives import observe
from hf_axonn.layers import attention_chunks
from hf_axonn.topology.grid import Grid
from tests.end_to_end.test_equivalence import SITUATIONS, without_cache
from tests.helpers.adapting import Adapted, adapt
from tests.helpers.equality import Case, exact
from tests.helpers.models import DEEPSEEK, tiny_batch, tiny_model
from tests.helpers.ranks import refused, run_ranks
from tests.layers.test_moe import EXPERTS, moe
from tests.parallel.test_context_parallel import (
    FAMILIES,
    FOUR,
    GEMMA,
    HERE,
    TWO,
    checkpointed_case,
    errors,
    of_model,
)


pytestmark = pytest.mark.usefixtures("device")


def config_of(grid, way="keys"):
    return AxonnConfig(grid=grid, context_attention=way if grid.context > 1 else "auto")


def with_way(case, way="keys"):
    """The same case with one of the two ways of attention."""
    config = functools.partial(config_with_way, case.config, way)
    return dataclasses.replace(case, name=f"{case.name}, {way}", config=config)


def config_with_way(config, way, grid):
    return dataclasses.replace(config(grid) or AxonnConfig(grid=grid), context_attention=way)


# Of the situations, also those with a head count that context does not divide, where auto takes keys.
EVERY = [with_way(case) for case in HERE] + [case for case in SITUATIONS if "smollm2" in case.name]


# What loss there is, and what is outside of the attention, does not see which way it takes.
OF_ATTENTION = {"left padding", "sliding window, eager", "packed rows", "reentrant checkpointing, two shapes"}
KINDS = {"mistral", "gemma2", "gpt_oss", "deepseek_v3"}


def test_situations_on_two_ranks():
    quick = [with_way(case) for case in HERE if case.name in OF_ATTENTION]
    assert len(quick) == len(OF_ATTENTION)
    assert not errors([*quick, next(case for case in EVERY if case.name == "packed rows, smollm2")], TWO)


def test_kinds_of_attention_on_two_ranks():
    quick = [with_way(case) for case in FAMILIES if case.name in KINDS]
    assert len(quick) == len(KINDS)
    assert not errors(quick, TWO)


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


def of_three_steps(case):
    """The same model for three steps of three batches: padded on the right, on the left, and of packed documents."""
    left, documents = tiny_batch(4, 7), tiny_batch(4, 11)
    left["attention_mask"] = (torch.arange(7) >= torch.arange(4)[:, None] % 3).long()
    left["labels"].masked_fill_(left["attention_mask"] == 0, -100)
    del documents["attention_mask"]
    documents["position_ids"] = torch.tensor([0, 1, 2, 3, 0, 0, 1, 2, 3, 4, 5]).repeat(4, 1)

    def before(model):
        case.before(model)
        without_cache(model)

    return dataclasses.replace(case, batches=[*case.batches, left, documents], steps=3, before=before)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["heads", "keys"])
@pytest.mark.parametrize("grid", [*TWO, *FOUR, Grid(data=2, z=2, context=2)], ids=str)
def test_three_steps_of_every_kind(grid, way):
    cases = map(of_three_steps, [of_model("llama"), *FAMILIES])
    assert not errors([with_way(case, way) for case in cases], [grid])


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
    found, group = Counter(), model.axonn.grid_mesh.group("context")
    with observe(lambda kind, payload, of: found.update({kind: payload}) if of is group else None):
        model(**case.batches[0]).loss.backward()
    return found


def test_a_window_gets_the_ends_of_stripes_alone(monkeypatch):
    grid, cases = TWO[0], list(windowed(15))
    assert not errors([with_way(case) for case in cases], [grid])
    in_chunks(monkeypatch)
    assert not errors([with_way(case) for case in cases if case.name in ("packed", "sinks")], [grid])
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


CHUNKED = {"packed rows", "reentrant checkpointing, two shapes", "gemma2", "gpt_oss", "deepseek_v3"}


@pytest.mark.parametrize(
    ("way", "chosen"),
    [
        ("keys", CHUNKED),
        *(
            pytest.param(way, CHUNKED | {"sliding window, eager", "left padding"}, marks=pytest.mark.slow)
            for way in ("heads", "keys")
        ),
    ],
    ids=["keys", "heads", "more by keys"],
)
def test_chunks_of_queries(monkeypatch, way, chosen):
    """Chunks have a mask of documents for sdpa, windows and soft caps, sinks, and two kinds of checkpoints."""
    in_chunks(monkeypatch)
    cases = [case for case in (*HERE, *FAMILIES) if case.name in chosen]
    assert len(cases) == len(chosen)
    assert not errors([with_way(case, way) for case in cases], TWO)


def traffic_of(grid, make):
    """Collectives over context of a step, by kind."""
    model, report = parallelize(make().train(), grid, config=config_of(grid))
    found, group = [], model.axonn.grid_mesh.group("context")
    with observe(lambda kind, payload, of: found.append((kind, payload)) if of is group else None):
        model(**tiny_batch(2, 8)).loss.backward()
    return found, report


def test_a_layer_gathers_its_keys_and_values_once():
    """Two layers of two rows, 4 positions a rank: k and v of 6 heads of 4 features together."""
    for found, report in run_ranks(traffic_of, 2, Grid(z=2, context=2), functools.partial(tiny_model, "llama")):
        keys = 2 * 4 * (6 + 6) * 4 * 8
        assert found.count(("all_gather", keys)) == found.count(("reduce_scatter", keys)) == 2
        assert not [kind for kind, _ in found if kind == "all_to_all"]
        assert "2 attentions gather keys and values (as configured)" in str(report)


V3 = functools.partial(moe, "deepseek_v3")
SIZES = {name: size for name, size in DEEPSEEK.items() if name.endswith(("_dim", "_rank", "_heads"))}


def latent_cases():
    """Cases of attention that makes k and v of latents, each in another way."""
    yield of_model("deepseek_v2", n_routed_experts=4, **EXPERTS | DEEPSEEK)
    yield checkpointed_case(of_model("deepseek_v3", moe, steps=3))
    eager = of_model("deepseek_v3", moe, attention="eager", q_lora_rank=None)
    yield dataclasses.replace(eager, name="eager, q of no latent")
    yield of_model("minicpm3", **SIZES)


def test_a_layer_gathers_what_its_keys_and_values_are_made_of():
    """4 positions of two rows on a rank: a latent of 16 features and a rotary key of 4, not 12 heads of 8 and 4."""
    for found, report in run_ranks(traffic_of, 2, TWO[0], V3):
        latents = 2 * 4 * (16 + 4) * 8
        assert found.count(("all_gather", latents)) == found.count(("reduce_scatter", latents)) == 2
        assert "2 attentions gather keys and values (as configured), of which 2 make them of latents" in str(report)


def report_of(grid, make):
    return str(parallelize(make(), grid, config=config_of(grid))[1])


def test_latents_stay_where_they_are_no_gain():
    """Over y the products of latents would be summed for whole rows. Two heads have 2 * (8 + 4) features."""
    few = functools.partial(V3, num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=20)
    gathers = "2 attentions gather keys and values (as configured)"
    over_y = run_ranks(report_of, 4, Grid(z=2, y=2, context=2), V3)[0]
    assert f"{gathers}, and not their latents, which are gathered where y is 1" in over_y
    wider = run_ranks(report_of, 2, TWO[0], few)[0]
    assert gathers in wider and "latents" not in wider


def test_what_mixes_positions_is_not_made_of_latents(monkeypatch):
    attention = V3().model.layers[0].self_attn
    assert latent_features(attention, attention.kv_b_proj) == 16 + 4
    expand = type(attention).expand_kv
    monkeypatch.setattr(type(attention), "expand_kv", lambda self, latent, key: expand(self, latent.cumsum(2), key))
    assert not latent_features(attention, attention.kv_b_proj)


def without_expansion():
    model, _ = parallelize(V3().train(), TWO[0], config=config_of(TWO[0]))
    del model.model.layers[0].self_attn.expand_kv  # which gathers latents
    return refused(model, **tiny_batch(2, 8))


@pytest.mark.slow
def test_keys_of_own_positions_are_not_taken_for_those_of_whole_rows():
    for message in run_ranks(without_expansion, 2):
        assert "attends to 4 keys, and not to those of all 8 positions" in message


@pytest.mark.slow
@pytest.mark.parametrize("grid", [TWO[0], *FOUR], ids=str)
def test_latents_of_every_kind(grid):
    assert not errors([with_way(case) for case in latent_cases()], [grid])


def adapted(**options):
    return Adapted(str(options), base=V3, batches=[tiny_batch(4, 9)], adapter=functools.partial(adapt, **options))


@pytest.mark.slow
@pytest.mark.parametrize("grid", [TWO[0], FOUR[2]], ids=str)
def test_adapters_of_what_makes_latents_and_is_made_of_them(grid):
    names = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    cases = [adapted(target_modules=names), adapted(target_modules=names, use_dora=True, lora_dropout=1e-14)]
    assert not errors([with_way(case) for case in cases], [grid])


def dropped(grid):
    """What is left of the latents of whole rows that adapters get."""
    model = adapt(V3(), target_modules=["kv_b_proj"], lora_dropout=0.5)
    model, _ = parallelize(model.train(), grid, config=config_of(grid))
    found = []
    for name, module in model.named_modules():
        if name.endswith("lora_dropout.default"):
            module.register_forward_hook(lambda _module, _args, output: found.append(output.detach()))
    torch.manual_seed(5)
    model(**tiny_batch(2, 8))
    return found


@pytest.mark.slow
def test_ranks_of_context_drop_the_same_of_a_latent():
    one, other = run_ranks(dropped, 2, TWO[0])
    assert len(one) == 2 and all(each.shape == (2, 1, 8, 16) for each in one)
    assert all(map(torch.equal, one, other)) and all((each == 0).any() for each in one)


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
