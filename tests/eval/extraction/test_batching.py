"""Batches of about the same length, units of batches, and as many rows as memory allows."""

import functools
import logging
from types import SimpleNamespace

import psutil
import pytest
import torch

from hf_axonn_eval.extraction import batching
from hf_axonn_eval.extraction.batching import (
    decoded_rows,
    even_rows,
    fitting_batch_size,
    halving,
    in_passes,
    plan_batches,
    plan_units,
    smaller,
)
from hf_axonn_eval.extraction.work_split import WorkSplit
from tests.helpers.eval_support import tiny_llama


def model_on(device: str, dtype: torch.dtype = torch.float32, **config):
    """What the planning looks at of a model: where it is, the dtype of its weights, its sizes."""
    parameter = SimpleNamespace(device=torch.device(device), dtype=dtype, element_size=lambda: dtype.itemsize)
    text = SimpleNamespace(**config)
    return SimpleNamespace(parameters=lambda: iter([parameter]), config=SimpleNamespace(get_text_config=lambda: text))


def test_equal_lengths_fill_batches_in_their_order():
    assert plan_batches([(3, 2)] * 5, 2, padding=False) == [[0, 1], [2, 3], [4]]
    assert plan_batches([(3, 2)] * 5, 1, padding=True) == [[0], [1], [2], [3], [4]]
    assert plan_batches([], 2, padding=True) == []


def test_long_ones_come_first_and_suffixes_decide_between_equal_ones():
    lengths = [(3, 2), (9, 1), (4, 1), (8, 2), (3, 2)]
    assert plan_batches(lengths, 9, padding=False) == [[3], [1], [0, 4], [2]]


@pytest.mark.parametrize(
    ("shorter", "together"),
    [
        ((60, 10), True),  # of 80 columns 10 are padding: an eighth; of 8 places a longer suffix adds a quarter
        ((59, 10), False),  # 11 columns
        ((62, 8), True),
        ((61, 8), False),
        ((70, 6), True),  # 2 of 8 places: a quarter
        ((71, 5), False),  # 3 places
        ((65, 11), False),  # 3 places more
        ((72, 8), True),
    ],
)
def test_one_column_in_eight_and_one_place_in_four_may_be_padding(shorter, together):
    assert plan_batches([(72, 8), shorter], 2, padding=True) == ([[0, 1]] if together else [[0], [1]])
    assert plan_batches([(72, 8), shorter], 2, padding=False) == ([[0, 1]] if shorter == (72, 8) else [[0], [1]])


def test_padding_is_measured_from_the_longest_of_the_batch():
    # each is close to the one before, but the fourth is not close to the first, and begins a batch of its own
    assert plan_batches([(72, 8), (67, 8), (62, 8), (57, 8), (52, 8)], 9, padding=True) == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("batches", "shares", "units"),
    [
        (16, 1, [8, 8]),
        (17, 1, [6, 6, 5]),
        (7, 1, [7]),
        (16, 4, [4] * 4),
        (16, 2, [8, 8]),
        (15, 2, [8, 7]),
        (9, 2, [5, 4]),
        (3, 2, [2, 1]),
        (40, 2, [7, 7, 7, 7, 6, 6]),
        (2, 3, [1, 1]),
        (0, 2, []),
    ],
)
def test_units_are_about_equal_and_as_many_for_each_rank(batches, shares, units):
    planned = plan_units(range(batches), shares)
    assert [len(unit) for unit in planned] == units
    assert [batch for unit in planned for batch in unit] == list(range(batches))


def test_batches_are_so_small_that_each_rank_has_as_many():
    assert even_rows(40, 32, 1) == 32
    assert even_rows(40, 32, 2) == 20
    assert even_rows(96, 32, 2) == 24
    assert even_rows(1, 32, 4) == even_rows(4, 32, 4) == 1
    for count in range(1, 200):
        rows = even_rows(count, 8, 3)
        planned = plan_units(plan_batches([(5, 5)] * count, rows, padding=False), 3)
        samples = [sum(len(batch) for unit in planned[rank::3] for batch in unit) for rank in range(3)]
        assert rows <= 8 and sum(samples) == count
        fair = -(-count // 3)
        assert max(samples) == fair if count <= 3 * 8 else max(samples) < fair + rows, count


@pytest.mark.parametrize(
    ("device", "batch_size", "longest", "rows"),
    [
        ("cpu", 1, 10, 1),
        ("cpu", 2, 10, 8),
        ("cpu", 8, 512, 32),  # 16384 tokens
        ("cpu", 8, 528, 31),
        ("cpu", 8, 819, 20),
        ("cpu", 8, 4096, 8),
        ("cuda", 8, 8192, 32),
        ("cuda", 8, 16_384, 16),
        ("cuda", 3, 10**6, 3),
        ("meta", 8, 819, 20),
    ],
)
def test_four_batches_are_decoded_together_unless_rows_are_long(device, batch_size, longest, rows):
    assert decoded_rows(model_on(device), batch_size, longest) == rows


def test_smaller_batches_hold_the_same_samples():
    assert smaller([[0, 1, 2, 3, 4], [5, 6]], 2) == [[0, 1], [2, 3], [4], [5, 6]]
    assert smaller([[0, 1], [2]], 2) == [[0, 1], [2]] and smaller([[0, 1]], 1) == [[0], [1]]


@pytest.mark.parametrize(
    ("device", "batch", "tokens", "passes"),
    [
        ("cpu", 32, 32, [32]),  # 1024 tokens
        ("cpu", 32, 33, [16, 16]),
        ("cpu", 32, 99, [8, 8, 8, 8]),
        ("cpu", 32, 57, [16, 16]),
        ("cpu", 11, 200, [4, 4, 3]),  # about as many in each, and not 5, 5 and 1
        ("cpu", 2, 1024, [1, 1]),
        ("cpu", 3, 5000, [1, 1, 1]),
        ("cpu", 1, 1, [1]),
        ("cuda", 32, 9999, [32]),
        ("meta", 32, 9999, [32]),
    ],
)
def test_on_a_cpu_a_pass_takes_a_thousand_tokens(device, batch, tokens, passes):
    planned = in_passes([[*range(batch)], [batch]], [tokens] * batch + [1], torch.device(device))
    assert [len(rows) for rows in planned] == [*passes, 1]
    assert [place for rows in planned for place in rows] == [*range(batch + 1)]


def test_the_longest_row_decides_how_many_share_a_pass():
    fed = [100] * 16 + [10] * 16 + [40] * 4
    planned = in_passes([[*range(32)], [*range(32, 36)]], fed, torch.device("cpu"))
    assert [len(rows) for rows in planned] == [8, 8, 8, 8, 4]


@pytest.mark.parametrize(
    ("device", "longest", "free", "rows"),
    [
        ("cpu", 1, 1e9, 256),  # never more than 256
        ("cpu", 16, 1e9, 256),  # 4096 tokens keep a CPU busy
        ("cpu", 17, 1e9, 128),
        ("cpu", 1024, 1e9, 4),
        ("cpu", 4096, 1e9, 1),
        ("cpu", 5000, 1e9, 1),
        ("meta", 1024, 1e9, 4),
        ("cuda", 1024, 1e9, 64),  # 65536 a GPU
        ("cpu", 16, 160, 8),  # a row takes 10, and half of what is free may be taken
        ("cpu", 16, 159, 4),
        ("cpu", 16, 20, 1),
        ("cpu", 16, 0, 1),
        ("cuda", 16, -5, 1),
    ],
)
def test_a_batch_size_is_a_power_of_two_that_fits(monkeypatch, device, longest, free, rows):
    for kind in ("cpu", "gpu"):
        wanted = "gpu" if device == "cuda" else "cpu"
        given = (free, 10) if kind == wanted else (-1, -1)
        monkeypatch.setattr(batching, f"_memory_of_{kind}", lambda model, longest, kept_logits, given=given: given)
    assert fitting_batch_size(model_on(device), WorkSplit(), longest=longest, kept_logits=1) == rows


def test_the_rank_with_the_least_memory_decides(monkeypatch):
    monkeypatch.setattr(batching, "_memory_of_cpu", lambda *sizes: (1e9, 1))
    others = SimpleNamespace(maximum=lambda value: max(value, -9))  # another rank has room for 9
    assert fitting_batch_size(model_on("cpu"), others, longest=16, kept_logits=1) == 8


SIZES = {
    "hidden_size": 10,
    "num_hidden_layers": 1,
    "intermediate_size": 20,
    "num_attention_heads": 1,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("changes", "dtype", "longest", "kept", "row"),
    [
        # keys and values of ten rows: 10 * 2 * 10 * 4 = 800; eight times 10 + 20 hidden numbers: 960; a place looks
        # at one: 4; and of 100 logits one in the dtype and two in float32: 1200
        ({}, torch.float32, 1, 1, 800 + 960 + 4 + 1200),
        ({}, torch.float32, 10, 3, 10 * (800 + 960 + 40) + 3 * 1200),
        ({"num_hidden_layers": 3}, torch.float32, 1, 1, 2400 + 960 + 4 + 1200),
        ({"num_attention_heads": 5}, torch.float32, 10, 1, 10 * (800 + 960 + 200) + 1200),
        ({}, torch.bfloat16, 1, 1, 400 + 960 + 4 + 1000),
        ({"intermediate_size": None}, torch.float32, 1, 1, 800 + 1600 + 4 + 1200),  # four times the hidden size
    ],
)
def test_what_a_row_takes_of_a_cpus_memory(monkeypatch, changes, dtype, longest, kept, row):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    model = model_on("cpu", dtype, **{**SIZES, **changes})
    assert batching._memory_of_cpu(model, longest, kept) == (1000, row)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # processes of this machine share it
    assert batching._memory_of_cpu(model, longest, kept) == (250, row)


def test_a_model_may_leave_sizes_out(monkeypatch):
    sizes = {name: size for name, size in SIZES.items() if name not in ("intermediate_size", "num_attention_heads")}
    _, row = batching._memory_of_cpu(model_on("cpu", **sizes), 10, 3)
    assert row == 10 * (800 + 1600 + 40) + 3 * 1200


@pytest.mark.parametrize(
    ("peaks", "room", "row"),
    [
        ([1500, 1700], 11_500, 6 * 200),  # a second row takes 200 more; six of them: two, and four that are decoded
        ([1807, 1810], 11_193, 6 * 100),  # hardly more: an eighth of what one took, in whole bytes
        ([1003, 1003], 11_997, 6 * 1),
    ],
)
def test_what_a_row_takes_of_a_gpus_memory_is_measured(monkeypatch, peaks, room, row):
    """The GPU is played: 10000 are free, 3000 reserved, of which 1000 are in use."""
    model, reported, fed = tiny_llama(), iter(peaks), []
    forward = model.forward

    @functools.wraps(forward)
    def noted(input_ids, **options):
        fed.append(tuple(input_ids.shape))
        return forward(input_ids=input_ids, **options)

    model.forward = noted
    for name, answer in (
        ("reset_peak_memory_stats", lambda device: None),
        ("memory_allocated", lambda device: 1000),
        ("max_memory_allocated", lambda device: next(reported)),
        ("memory_reserved", lambda device: 3000),
        ("mem_get_info", lambda device: (10_000, 99_999)),
    ):
        monkeypatch.setattr(torch.cuda, name, answer)
    assert batching._memory_of_gpu(model, 12, 5) == (room, row)
    assert fed == [(1, 12), (2, 12)]


def failing(error: BaseException, from_rows: int):
    def work(rows: int) -> str:
        if rows >= from_rows:
            raise error
        return f"{rows} rows"

    return work


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no room"),
        MemoryError(),
        RuntimeError("CUDA error: Out of Memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_where_memory_runs_out_half_is_tried(error, caplog):
    with caplog.at_level(logging.WARNING):
        assert halving(16, failing(error, 4), alone=True) == ("2 rows", 2)
    assert [record.args for record in caplog.records] == [(8,), (4,), (2,)]
    assert halving(3, failing(error, 4), alone=True) == ("3 rows", 3)
    with pytest.raises(ValueError, match="batch_size 1: use a grid over more ranks, or shorter samples"):
        halving(4, failing(error, 1), alone=True)
    with pytest.raises(ValueError, match="batch_size 9: give --batch_size 4, the run goes on"):
        halving(9, failing(error, 1), alone=False)
    with pytest.raises(ValueError, match="batch_size 1: use a grid"):
        halving(1, failing(error, 1), alone=False)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("out of memory"), KeyError("out of memory")]
)
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as raised:
        halving(4, failing(error, 1), alone=True)
    assert raised.value is error
