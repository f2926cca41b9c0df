"""Attention implementations over a grid: Transformers' flash attention and torch's varlen attention by a stub of the
kernels, and flex attention.

Eager attention and sdpa are those of nearly all other tests.
"""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import pytest
import torch

from hf_axonn import Grid, parallelize
from hf_axonn.config import AxonnConfig
from tests.benchmarks.gpu import packing
from tests.end_to_end.test_equivalence import packed, without_cache
from tests.helpers.equality import Case, compare, full, too_large
from tests.helpers.flash_stub import flash_attention, flash_attn_varlen_func
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.parallel.test_context_keys import config_of, with_way
from tests.parallel.test_context_parallel import BOUND, GEMMA, TWO


pytestmark = pytest.mark.usefixtures("device")


OTHERS = ("flash_attention_3", "kernels-community/flash-attn3")


def with_flash(kind, implementation, **changes):
    model = tiny_model(kind, **changes)
    model.config._attn_implementation_internal = implementation
    return model


def flash_cases(implementation="flash_attention_2"):
    """Cases on one process, and the same by flash attention on a grid: whole rows, windows, soft caps, packed rows."""
    window = dict(sliding_window=5)
    row = {name: value[:1] for name, value in packed().items()}
    kinds = [("llama", {}, tiny_batch(2, 13), None), ("mistral", window, tiny_batch(2, 13), None)]
    kinds += [("llama", {}, row, without_cache), ("mistral", dict(sliding_window=2), row, without_cache)]
    kinds += [
        (
            "gemma2",
            GEMMA | {"sliding_window": 3, "attn_logit_softcapping": 2.0, "attention": "eager"},
            tiny_batch(2, 13),
            None,
        )
    ]
    for kind, changes, batch, before in kinds:
        batch.pop("attention_mask", None)
        case = Case(f"{kind} {list(batch)}", functools.partial(tiny_model, kind, **changes), [batch])
        case = dataclasses.replace(case, before=before or case.before)
        made = functools.partial(with_flash, kind, implementation, **changes)
        yield dataclasses.replace(case, make=made, config=config_of), case.truth()


def padded(left):
    """Rows of 2 to 4 tokens among 13, so that no row has a token in some stripes."""
    batch = tiny_batch(3, 13)
    place = torch.arange(13).flip(0) if left else torch.arange(13)
    batch["attention_mask"] = (place < torch.tensor([[2], [4], [3]])).long()
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def flash_cases_over_context():
    """Cases as above of padding, and of positions that skip numbers, which begin no document in flash attention."""
    skipping = {name: value[:1] for name, value in packed().items()}
    skipping["position_ids"] = torch.tensor([[0, 1, 2, 20, 21, 22, 23]])
    cases = [Case(f"padding, left={left}", functools.partial(tiny_model, "llama"), [padded(left)]) for left in (0, 1)]
    cases.append(Case("positions that skip", functools.partial(tiny_model, "llama"), [skipping]))
    for case in cases:
        truth = case.truth()  # with a cache, beside which sdpa begins none either
        made = functools.partial(with_flash, "llama", "flash_attention_2")
        for way in ("heads", "keys"):
            yield with_way(dataclasses.replace(case, make=made, before=without_cache), way), truth


def compare_flash(cases, grids, implementation="flash_attention_2"):
    with flash_attention(implementation):
        return compare(cases, grids)


def compare_flex(grids):
    """Largest difference of logits on each grid, and over context in both ways; neither compiled nor with a backward
    pass, which CPUs do not have."""
    make = functools.partial(tiny_model, "mistral", attention="flex_attention", dtype=torch.float32, sliding_window=5)
    batch, found = tiny_batch(2, 13), {}
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        truth = make().eval()(**batch).logits
        ways = [(grid, way) for grid in grids for way in (("heads", "keys") if grid.context > 1 else ("auto",))]
        for grid, way in ways:
            model, _ = parallelize(make().eval(), config=AxonnConfig(grid=grid, context_attention=way))
            difference = (full(model(**batch).logits) - truth).abs().max()
            found[f"{grid} {way}"] = (difference / truth.abs().max()).item()
    return found


def varlen_case():
    """A packed row by sdpa on one process, and the same by torch's varlen attention on a grid."""
    row = packing.make_batch(tiny_batch(1, 13)["input_ids"], (3, 6, 4))
    case = Case("varlen", functools.partial(tiny_model, "llama"), [row], cut=lambda batch, *_: batch)
    made = functools.partial(with_flash, "llama", packing.NAMES["varlen"])
    return dataclasses.replace(case, make=made), case.truth()


def _varlen(query, key, value, *ends_and_lengths, window_size):
    assert window_size == (-1, 0)
    return flash_attn_varlen_func(query, key, value, *ends_and_lengths, causal=True)


def compare_varlen(case, grids):
    with mock.patch.object(packing.torch_varlen, "varlen_attn", _varlen):
        return compare([case], grids)


def compare_all(cases, varlen, grids, over_context):
    flash = compare_flash(cases, grids) | compare_flash(over_context, TWO)
    return flash, compare_varlen(varlen, [grid for grid in grids if grid.context == 1]), compare_flex(grids)


def test_flash_varlen_and_flex_attention_equal_one_process():
    """Transformers' own function runs over context and over the other axes, on batches of one row or of two."""
    cases, over_context = list(flash_cases()), list(flash_cases_over_context())
    grids = [*TWO, Grid(x=2), Grid(y=2)]
    table, varlen, flex = run_ranks(compare_all, 2, cases, varlen_case(), grids, over_context)[0]
    assert len(table) == 3 * len(cases) + len(over_context) and not too_large(table, BOUND)
    assert len(varlen) == 2 and not too_large(varlen, BOUND)
    assert len(flex) == 4 and max(flex.values()) < 1e-6, flex


@pytest.mark.slow
@pytest.mark.parametrize("implementation", OTHERS)
def test_flash_attention_3_and_kernels_of_the_hub_are_called_as_flash_attention_2(implementation):
    cases = list(flash_cases(implementation))
    table = run_ranks(compare_flash, 2, cases, [*TWO, Grid(x=2)], implementation)[0]
    assert len(table) == 2 * len(cases) and not too_large(table, BOUND)


@pytest.mark.slow
def test_flash_attention_on_four_ranks():
    cases = list(flash_cases())
    table = run_ranks(compare_flash, 4, cases, [Grid(z=4, context=4), Grid(x=2, y=2)])[0]
    assert not too_large(table, BOUND)
    of_two_rows = [case for case in cases if case[0].batches[0]["input_ids"].shape[0] == 2]
    assert not too_large(run_ranks(compare_flash, 4, of_two_rows, [Grid(z=2, x=2)])[0], BOUND)
