"""Volumes by arithmetic: the rules of the ledger, the formulas of docs/algorithm.md, and numbers checked by hand."""

import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pytest

from hf_axonn.planner.dense import DenseShape
from hf_axonn.planner.step import Step
from hf_axonn.planner.traffic.ledger import Ledger, LedgerKey, Volume, sent_bytes
from hf_axonn.planner.traffic.volumes import BUCKET_BYTES, buckets, layer_volumes, volumes
from hf_axonn.topology.grid import Grid


LLAMA = DenseShape(layers=4, hidden=96, heads=16, kv_heads=8, intermediate=160, vocab=256)
PLAIN = DenseShape(layers=4, hidden=96, heads=16, intermediate=384, vocab=256, gated=False)
STEP = Step(rows=4, seq=32)
GRIDS = [Grid(x=2), Grid(y=2), Grid(x=2, y=2), Grid(x=4, y=2), Grid(x=2, y=4), Grid(data=2, z=2, y=2, x=2)]


@pytest.mark.parametrize(
    ("kind", "sent"), [("all_gather", 300), ("reduce_scatter", 300), ("all_reduce", 150), ("all_to_all", 75)]
)
def test_bytes_that_each_of_four_ranks_sends_for_a_payload_of_100(kind, sent):
    assert sent_bytes(kind, 4, 100) == sent


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    for ranks in (2, 3, 8):
        halves = sent_bytes("reduce_scatter", ranks, 7) + sent_bytes("all_gather", ranks, 7)
        assert sent_bytes("all_reduce", ranks, 7 * ranks) == halves


def test_a_ledger_adds_up_by_phase_kind_and_long_axes():
    ledger = Ledger(Grid(data=2, x=3))
    ledger.add("forward", "all_reduce", ("x", "y"), 30)
    ledger.add("forward", "all_reduce", ("x",), 60, 2)
    ledger.add("forward", "all_gather", ("y", "z"), 99)  # one rank: nothing travels
    ledger.add("gradients", "all_reduce", ("x", "data"), 12)
    assert ledger.entries == {
        LedgerKey("forward", "all_reduce", ("x",)): Volume(3, 90),
        LedgerKey("gradients", "all_reduce", ("data", "x")): Volume(1, 12),
    }
    assert ledger.calls() == 4 and ledger.calls(axes=("x",)) == 3
    assert ledger.bytes_sent(phase="forward") == 120 and ledger.bytes_sent(phase="gradients") == 20
    double = Ledger(ledger.grid)
    double.include(ledger, times=2)
    assert double.calls() == 8 and double.bytes_sent() == 2 * ledger.bytes_sent() == 280
    assert len(ledger.lines()) == 3 and "data+x" in ledger.lines()[-1]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("kv_heads", [16, 8])
def test_a_layer_sends_what_design_says(grid, kv_heads):
    """docs/algorithm.md: in units of T*H/x * (y-1)/y on y: 20 + 4g + 8/y for a 4H MLP; of T*H/y * (x-1)/x on x: 8."""
    shape = DenseShape(layers=1, hidden=96, heads=16, kv_heads=kv_heads, intermediate=384, vocab=9, gated=False)
    share = Fraction(kv_heads, 16)
    unit = Fraction(STEP.rows * STEP.seq * 96 * STEP.compute_bytes)
    for layout, all_to_alls in (("token", Fraction(8, grid.y)), ("feature", 0)):
        ledger = layer_volumes(shape, grid, STEP, layout=layout)
        statistics = ledger.bytes_sent(kind="all_reduce")
        on_y = unit / grid.x * Fraction(grid.y - 1, grid.y) * (20 + 4 * share + all_to_alls)
        on_x = unit / grid.y * Fraction(grid.x - 1, grid.x) * 8
        assert ledger.bytes_sent(axes=("y",)) - statistics == on_y
        assert ledger.bytes_sent(axes=("x",)) == on_x
        assert (statistics > 0) == (layout == "feature" and grid.y > 1)


def test_parts_of_z_have_names_where_they_are_not_all_of_it():
    for grid, rows, context in (
        (Grid(z=4, context=2), "rows", "context"),
        (Grid(z=4, context=4), None, "z"),
        (Grid(z=4), "z", None),
    ):
        ledger = Ledger(grid)
        ledger.add("forward", "all_reduce", ("data", "rows"), 8)
        ledger.add("forward", "all_to_all", ("context",), 8)
        ledger.add("forward", "all_gather", ("rows", "context"), 8)
        kinds = (("all_reduce", rows), ("all_to_all", context), ("all_gather", "z"))
        assert list(ledger.entries) == [LedgerKey("forward", kind, (axis,)) for kind, axis in kinds if axis]
        assert ledger.bytes_sent(kind="all_gather") == 3 * 8


@pytest.mark.parametrize("inner", [{}, {"x": 2}, {"y": 2}, {"y": 2, "x": 2}], ids=str)
@pytest.mark.parametrize("kv_heads", [16, 8, 2])
@pytest.mark.parametrize(("z", "context"), [(4, 2), (4, 4), (8, 4)])
def test_context_sends_heads_of_whole_rows_and_back(z, context, kv_heads, inner):
    """Beside what as many tokens of whole rows send: two all-to-alls a layer and pass, and two for the loss."""
    shape = replace(LLAMA, kv_heads=kv_heads)
    grid, whole = Grid(z=z, context=context, **inner), Grid(z=z, **inner)
    parts = grid.x * grid.y
    query, kv = 16 // parts, max(1, kv_heads // parts)
    kv = kv if kv % context == 0 else context  # powers of two: repeated until each rank has one
    queries, values = 6 * (query + 2 * kv), 6 * query  # features of q, k, v together, and of attention's output
    for checkpointing in (False, True):
        step = Step(rows=4, seq=30 if context == 2 else 29, checkpointing=checkpointing)
        tokens = 4 * (16 if context == 2 else 8)
        assert step.tokens(grid) == tokens
        found = volumes(shape, grid, replace(step, counted=True))
        expected = Ledger(grid)
        expected.include(volumes(shape, whole, replace(step, rows=1, seq=tokens, counted=True)))
        both = tokens * (queries + values) * step.compute_bytes
        for phase, passes in (("forward", 1), ("backward", 2 if checkpointing else 1)):
            expected.add(phase, "all_to_all", ("context",), 4 * passes * both, 4 * passes * 2)
        expected.add("forward", "all_reduce", ("context",), 4)
        expected.add("forward", "all_gather", ("context",), tokens * 4)
        assert found.entries == expected.entries
        rows = Ledger(grid)
        rows.include(found)
        rows.add("forward", "all_reduce", ("data", "rows"), 8)  # kept tokens, which are counted of whole rows
        assert volumes(shape, grid, step).entries == rows.entries


@pytest.mark.parametrize("inner", [{}, {"x": 2}, {"y": 2}], ids=str)
@pytest.mark.parametrize("kv_heads", [16, 2])
def test_context_gathers_keys_and_values(kv_heads, inner):
    """One all-gather a layer and pass, of the kv heads of a rank as they are, and two collectives for the loss."""
    shape, grid = replace(LLAMA, kv_heads=kv_heads), Grid(z=4, context=4, **inner)
    parts = grid.x * grid.y
    step = Step(rows=4, seq=29, counted=True, context_attention="keys")
    keys = 4 * 8 * 2 * 6 * max(1, kv_heads // parts) * step.compute_bytes
    expected = Ledger(grid)
    expected.include(volumes(shape, Grid(z=4, **inner), replace(step, rows=1, seq=4 * 8)))
    expected.add("forward", "all_gather", ("context",), 4 * keys, 4)
    expected.add("backward", "reduce_scatter", ("context",), 4 * keys, 4)
    expected.add("forward", "all_reduce", ("context",), 4)
    expected.add("forward", "all_gather", ("context",), 4 * 8 * 4)
    assert volumes(shape, grid, step).entries == expected.entries
    heads = replace(step, context_attention="auto")
    assert volumes(shape, grid, heads).entries != expected.entries
    odd, others = replace(shape, heads=6, kv_heads=6), Grid(z=4, context=4)
    assert volumes(odd, others, heads).entries == volumes(odd, others, step).entries, "auto where 4 does not divide 6"


def test_a_window_exchanges_the_ends_of_stripes():
    """Two of a layer's four: 29 positions are 8 stripes of 4, and windows of 4 see 3 positions of the one before."""
    windows = (4, 4, 0, 0)
    shape, grid = replace(LLAMA, windows=windows), Grid(z=4, context=4)
    step = Step(rows=4, seq=29, counted=True, context_attention="keys")
    whole = volumes(LLAMA, grid, step)
    for rank, neighbours in enumerate((1, 2, 2, 1)):
        found = volumes(shape, grid, step, rank=rank)
        keys = 2 * 6 * LLAMA.kv_heads * step.compute_bytes
        expected = Ledger(grid)
        expected.include(volumes(shape, grid, replace(step, context_attention="heads")))
        for phase in ("forward", "backward"):
            assert found.bytes_sent(kind="exchange", axes=("z",), phase=phase) == 2 * neighbours * 3 * 4 * keys
        assert whole.bytes_sent(kind="reduce_scatter") - found.bytes_sent(kind="reduce_scatter") == 2 * 3 * 32 * keys
    assert [Grid(z=4, context=4).reach(window, 29) for window in (0, None, 1, 2, 5, 6)] == [0, 0, 0, 1, 4, 0]
    assert Grid(z=4, context=4).reach(4, 28) == 0, "the last stripe is behind the end of the row"


def test_z_moves_weights_three_times_and_x_y_divide_them():
    grid = Grid(z=4, y=2, x=2)
    ledger = layer_volumes(LLAMA, grid, STEP)
    weights = sum(weight.elements for weight in LLAMA.weights[1:8])
    block = weights // 16
    assert ledger.bytes_sent(kind="all_gather", axes=("z",), phase="forward") == 3 * block * 2
    assert ledger.bytes_sent(kind="all_gather", axes=("z",), phase="backward") == 3 * block * 2
    assert ledger.bytes_sent(kind="reduce_scatter", axes=("z",)) == 3 * block * 4


def test_checkpointing_repeats_the_forward_pass_up_to_its_last_matmul():
    grid = Grid(z=2, y=2, x=2)
    once = layer_volumes(LLAMA, grid, STEP)
    again = layer_volumes(LLAMA, grid, Step(rows=4, seq=32, checkpointing=True))
    assert again.calls(phase="forward") == once.calls(phase="forward") == 16
    # Not again: the last reduce-scatter over x and the last all-to-all over y; and backward gathers no weights.
    assert again.calls(phase="backward") - once.calls(phase="backward") == 14 - 4
    third = layer_volumes(LLAMA, grid, Step(rows=4, seq=32, checkpointing=True, keep_gathered="none"))
    assert third.calls(phase="backward") - once.calls(phase="backward") == 14


def test_micro_batches_repeat_everything_but_the_averaging_of_gradients():
    grid = Grid(data=2, z=2, y=2)
    one, three = (volumes(LLAMA, grid, Step(rows=4, seq=32, micro_batches=count)) for count in (1, 3))
    for phase in ("forward", "backward"):
        assert three.bytes_sent(phase=phase) == 3 * one.bytes_sent(phase=phase) > 0
    assert three.bytes_sent(phase="gradients") == one.bytes_sent(phase="gradients") > 0


def test_kv_heads_that_do_not_divide_are_exchanged():
    grid = Grid(y=2, x=2)
    narrow = DenseShape(layers=1, hidden=96, heads=16, kv_heads=2, intermediate=160, vocab=256)
    ledger = layer_volumes(narrow, grid, STEP)
    # k and v: 2 heads of 6 features, half a head on each rank, which another rank needs too.
    assert ledger.entries[LedgerKey("forward", "exchange", ("x", "y"))] == Volume(2, 2 * 128 * 3 * 2)
    assert ledger.entries[LedgerKey("backward", "exchange", ("x", "y"))] == Volume(2, 2 * 128 * 3 * 2)
    assert not list(layer_volumes(LLAMA, grid, STEP).chosen(axes=("x", "y")))


def test_parts_of_packed_projections_are_exchanged():
    packed = DenseShape(layers=1, hidden=96, heads=16, intermediate=160, vocab=256, packed_qkv=True, packed_mlp=True)
    ledger = layer_volumes(packed, Grid(y=2, x=2), STEP)
    # Rank 0 has 72 of the 96 features of q, and works on 24; and 80 of the 160 of gate, of which it works on 40.
    assert ledger.entries[LedgerKey("forward", "exchange", ("x", "y"))] == Volume(2, 128 * (72 - 24 + 80 - 40) * 2)


def test_ranks_differ_where_sizes_do_not_divide():
    shape = DenseShape(layers=1, hidden=20, heads=4, intermediate=13, vocab=7)
    grid = Grid(z=3, y=2, x=2)
    sent = [volumes(shape, grid, STEP, rank=rank).bytes_sent(axes=("z",)) for rank in range(grid.size)]
    assert max(sent) == sent[0] > min(sent)


def test_a_model_of_640_billion_parameters_takes_no_time():
    shape = DenseShape(layers=192, hidden=16384, heads=128, intermediate=65536, vocab=50257, gated=False)
    assert 6.1e11 < shape.parameters() < 6.3e11
    ledger = volumes(shape, Grid(data=16, z=128, y=2, x=8), Step(rows=1, seq=2048, checkpointing=True))
    assert ledger.bytes_sent(axes=("data",)) > 0
    # Each rank holds 1 / (x * y * z) of the sharded parameters, and averages them over data in float32.
    block = sum(weight.elements for weight in shape.weights) / (8 * 2 * 128)
    assert float(ledger.bytes_sent(axes=("data",))) == pytest.approx(2 * 15 / 16 * block * 4, rel=1e-3)


def test_buckets_hold_32_mib_and_do_not_divide_a_gradient():
    assert buckets([]) == 0
    assert buckets([BUCKET_BYTES, 1]) == 2
    assert buckets([3 * BUCKET_BYTES]) == 1
    assert buckets([BUCKET_BYTES // 4] * 9) == 3


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="layout is 'feat'"):
        volumes(LLAMA, Grid(y=2), STEP, layout="feat")
    with pytest.raises(ValueError, match="not on the grid"):
        volumes(LLAMA, Grid(y=2), STEP, rank=2)
    with pytest.raises(ValueError, match="5 kv heads do not divide 16"):
        DenseShape(layers=1, hidden=96, heads=16, kv_heads=5, intermediate=1, vocab=1)
    with pytest.raises(ValueError, match="layers is 0"):
        DenseShape(layers=0, hidden=96, heads=16, intermediate=1, vocab=1)


def test_no_torch_is_needed():
    code = "import sys, hf_axonn.planner.traffic.volumes; assert not {'torch', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
