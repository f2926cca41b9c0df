"""Keys and values as numbers that say where they are from: 100 times the row, and the column."""

from types import SimpleNamespace

import pytest
import torch

from hf_axonn_eval.extraction.kv_cache import Columns, Row, can_be_kept, empty_cache, is_filled, join_rows, rows_of
from tests.helpers.eval_families import FAMILIES, family


def numbered(rows: int, begin: int, end: int, *, layer: int = 0) -> torch.Tensor:
    """[rows, 2 heads, columns, 1]; the second head and other layers are told by fractions."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(begin, end), indexing="ij")
    first = (100 * row + column + 0.25 * layer)[:, None, :, None]
    return torch.cat([first, first + 0.5], dim=1)


def cache_of(rows: int, columns: int, *, layers: int = 2):
    cache = empty_cache()
    for layer in range(layers):
        cache.update(numbered(rows, 0, columns, layer=layer), -numbered(rows, 0, columns, layer=layer), layer)
    return cache


def held(cache, layer: int = 0, *, row=slice(None), last: int = 99) -> list:
    """The last keys of the first head; the values must be minus these, and the second head half a number further."""
    some = cache.layers[layer]
    keys, values = (kind[row, :, : some.columns][..., -last:, :] for kind in (some.keys, some.values))
    keys, values = (kind.reshape(-1, 2, *kind.shape[-2:]) for kind in (keys, values))
    assert torch.equal(keys, -values) and torch.equal(keys[:, 1], keys[:, 0] + 0.5)
    return keys[:, 0, :, 0].tolist()


def test_columns_are_written_behind_each_other():
    columns = Columns()
    assert columns.get_seq_length() == 0
    for begin, end in ((0, 3), (3, 4), (4, 5), (5, 30), (30, 31)):
        keys, values = columns.update(numbered(2, begin, end), -numbered(2, begin, end))
        assert torch.equal(keys, numbered(2, 0, end)) and torch.equal(values, -keys)
        assert columns.get_seq_length() == end
    assert keys.dtype == columns.dtype and columns.device == keys.device


def test_a_full_layer_grows_by_more_than_it_needs():
    """Else all columns would be copied for each token."""
    columns = Columns()
    columns.update(numbered(1, 0, 3), -numbered(1, 0, 3))
    places = set()
    for column in range(3, 20):
        columns.update(numbered(1, column, column + 1), -numbered(1, column, column + 1))
        places.add((columns.keys.data_ptr(), columns.values.data_ptr()))
    assert len(places) == 1


def test_room_that_is_there_is_used():
    taken = rows_of(cache_of(2, 3), [0, 1], room=2)
    before = taken.layers[0].keys.data_ptr()
    assert taken.layers[0].keys.shape[-2] == 5 and taken.get_seq_length() == 3
    taken.update(numbered(2, 3, 5), -numbered(2, 3, 5), 0)
    assert taken.layers[0].keys.data_ptr() == before and held(taken) == [[*range(5)], [*range(100, 105)]]


def test_rows_are_taken_in_the_order_that_is_asked_for():
    cache = cache_of(3, 4)
    taken = rows_of(cache, [2, 0])
    assert held(taken) == [[200, 201, 202, 203], [0, 1, 2, 3]]
    assert held(taken, 1) == [[200.25, 201.25, 202.25, 203.25], [0.25, 1.25, 2.25, 3.25]]
    taken.layers[0].keys.zero_()
    assert held(cache)[0] == [0, 1, 2, 3], "a copy"


def test_rows_of_several_caches_end_in_the_same_column(monkeypatch):
    # memory that is not written to may hold anything
    nan = lambda tensor, shape: tensor.new_full(shape, torch.nan)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", nan)
    one, other = cache_of(3, 6), cache_of(2, 9)
    rows = [Row(one, 2, 1, 4), Row(other, 1, 0, 2), Row(one, 0, 2, 3), Row(one, 1, 0, 3)]
    cache = join_rows(rows, room=3)
    assert cache.get_seq_length() == 4 and cache.layers[0].keys.shape == (4, 2, 7, 1)
    for row, wanted in enumerate(([201, 202, 203, 204], [100, 101], [2, 3, 4], [100, 101, 102])):
        assert held(cache, row=row, last=len(wanted)) == [wanted]
        assert held(cache, 1, row=row, last=len(wanted)) == [[number + 0.25 for number in wanted]]
    for layer in cache.layers:
        filled = torch.cat([layer.keys, layer.values])[..., : layer.columns, :]
        assert filled.isfinite().all(), "what is masked is still added, times 0"


def test_a_pass_has_filled_a_cache_where_all_layers_hold_the_same_columns():
    assert is_filled(cache_of(2, 3), 2) and not is_filled(cache_of(2, 3), 3)
    assert not is_filled(empty_cache(), 0) and not is_filled(empty_cache(), 1)
    uneven = cache_of(2, 3)
    uneven.update(numbered(2, 3, 4), -numbered(2, 3, 4), 1)
    assert not is_filled(uneven, 2)
    fewer = cache_of(2, 3)
    fewer.layers[1].values = fewer.layers[1].values[:1]
    assert not is_filled(fewer, 2)
    none = cache_of(2, 3, layers=1)
    none.layers[0].columns = 0
    assert not is_filled(none, 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_which_models_keep_a_column_a_token(name):
    assert can_be_kept(family(name)) == (name != "mamba")


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, True),
        ({"layer_types": ["full_attention", "full_attention"]}, True),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}, True),
        ({"layer_types": ["chunked_attention", "full_attention"]}, False),
        ({"attention_chunk_size": 8}, False),
        ({"is_encoder_decoder": True}, False),
    ],
)
def test_a_cache_that_is_not_one_column_a_token_is_not_kept(monkeypatch, changes, kept):
    model = family("llama")
    for name, given in changes.items():
        monkeypatch.setattr(model.config, name, given, raising=False)
    assert can_be_kept(model) == kept


def test_a_cache_that_begins_with_a_prompt_of_its_own_is_not_kept():
    prompted = family("llama")
    prompted.active_peft_config = SimpleNamespace(is_prompt_learning=True)
    assert not can_be_kept(prompted)
    prompted.active_peft_config = SimpleNamespace(is_prompt_learning=False)
    assert can_be_kept(prompted)
