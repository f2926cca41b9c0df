"""Every operand layout is the same product, and only a steady gain is chosen."""

import pytest
import torch

from hf_axonn.engine import matmul_tuning
from hf_axonn.engine.matmul_tuning import (
    AS_IS,
    OPERAND_LAYOUTS,
    Sample,
    fastest,
    gpu_seconds,
    measure,
    multiply_as,
    order_of,
)
from tests.helpers.operators import Operators


def matrices(order: str, m: int, n: int) -> torch.Tensor:
    """A random [m, n] whose rows (N), columns (T) or neither (S) are contiguous."""
    wide = torch.randn(m, 2 * n, dtype=torch.float64)
    return {"N": wide[:, :n], "T": torch.randn(n, m + 3, dtype=torch.float64)[:, :m].t(), "S": wide[:, ::2]}[order]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("orders", ["NN", "NT", "TN", "TT", "SN", "TS"])
def test_every_layout_is_the_same_product(orders, accumulate):
    torch.manual_seed(0)
    a, b = matrices(orders[0], 5, 7), matrices(orders[1], 7, 4)
    first = torch.randn(5, 3, 4, dtype=torch.float64)
    for layout in OPERAND_LAYOUTS:
        out = first.clone()  # written where it lies, between others
        multiply_as(layout, out[:, 1], a, b, accumulate=accumulate)
        expected = first.clone()
        expected[:, 1] = a @ b + (first[:, 1] if accumulate else 0)
        torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("layout", OPERAND_LAYOUTS)
def test_only_products_of_two_dtypes_are_another_operator(layout):
    """CUDA has it; of the CPU's tensors `meta` ones say as well which operator is called."""
    a, b = (
        torch.empty(5, 7, dtype=torch.bfloat16, device="meta"),
        torch.empty(7, 4, dtype=torch.bfloat16, device="meta"),
    )
    for dtype, operator in ((torch.bfloat16, "mm.out"), (torch.float32, "mm.dtype_out")):
        out = torch.empty(5, 4, dtype=dtype, device="meta")
        with Operators() as called:
            multiply_as(layout, out, a, b)
        assert [name for name in called.names if name.startswith("mm")] == [operator]


def test_a_copy_is_made_only_of_an_operand_in_the_other_order(monkeypatch):
    torch.manual_seed(0)
    a, b = matrices("N", 5, 7), matrices("T", 7, 4)
    given = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, y, **out: given.append((x, y)) or multiply(x, y, **out))
    out = torch.empty(5, 4, dtype=torch.float64)
    for layout in ("NT", "NN", "TT", "TT swapped"):
        multiply_as(layout, out, a, b)
    same = [(x.data_ptr() == a.data_ptr(), y.data_ptr() == b.data_ptr()) for x, y in given[:3]]
    assert same == [(True, True), (True, False), (False, True)]
    assert [(order_of(x), order_of(y)) for x, y in given[:3]] == [("N", "T"), ("N", "N"), ("T", "T")]
    assert [each.shape for each in given[3]] == [(4, 7), (7, 5)] and given[3][0].data_ptr() == b.data_ptr()


def test_only_a_steady_gain_counts():
    assert fastest({AS_IS: [1.0], "NN": [0.96]}) == AS_IS
    assert fastest({AS_IS: [1.0], "NN": [0.94], "TT": [0.5]}) == "TT"
    assert fastest({AS_IS: [0.0]}) == AS_IS
    # A lucky round more or less does not decide: one of ten may be lost, not two, and none of nine.
    assert fastest({AS_IS: [1.0] * 10, "NN": [0.5] * 9 + [2.0]}) == "NN"
    assert fastest({AS_IS: [1.0] * 10, "NN": [0.5] * 8 + [2.0] * 2}) == AS_IS
    assert fastest({AS_IS: [1.0] * 9, "NN": [0.5] * 8 + [2.0]}) == AS_IS
    assert fastest({AS_IS: [1.0] * 9, "NN": [0.5] * 8}) == AS_IS  # it was given up
    # As other work comes and goes, rounds are compared each with its own.
    assert fastest({AS_IS: [1.0, 3.0, 1.0], "NN": [0.9, 2.7, 0.9]}) == "NN"


def test_times_are_measured_on_operands_of_the_same_strides_and_leave_random_numbers_alone():
    out, a, b = torch.empty(30, 2, 20)[:, 1], torch.empty(16, 64)[:, :30].t(), torch.empty(16, 20)
    sample = Sample.take(out, a, b)
    made = sample.make()
    assert [(each.shape, each.stride()) for each in made] == [(each.shape, each.stride()) for each in (out, a, b)]
    before = torch.get_rng_state()
    trials = measure(sample, [AS_IS, "NN"], accumulate=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert 1 <= len(trials[AS_IS]) <= 20 and 1 <= len(trials["NN"]) <= 20
    assert all(0 < seconds < 10 for taken in trials.values() for seconds in taken)


def test_a_layout_that_cannot_win_is_given_up(monkeypatch):
    seconds = {AS_IS: 0.002, "NN": 0.00198, "TT": 0.001}
    monkeypatch.setattr(matmul_tuning, "cpu_seconds", lambda work: seconds[work.args[0]])
    sample = Sample.take(torch.empty(2, 2), torch.empty(2, 2), torch.empty(2, 2))
    trials = measure(sample, list(seconds), accumulate=False)
    assert {layout: set(taken) for layout, taken in trials.items()} == {
        layout: {its} for layout, its in seconds.items()
    }
    assert (len(trials[AS_IS]), len(trials["NN"]), len(trials["TT"])) == (20, 3, 20)
    assert fastest(trials) == "TT"
    seconds["TT"] = 0.00199
    trials = measure(sample, list(seconds), accumulate=False)
    assert {len(taken) for taken in trials.values()} == {3} and fastest(trials) == AS_IS  # none is left to compare


def test_times_of_a_gpu_are_those_between_two_events(monkeypatch):
    log = []

    class Event:
        def __init__(self, *, enable_timing: bool):
            assert enable_timing

        def record(self):
            log.append(self)

        def synchronize(self):
            assert log == [log[0], "work", self]

        def elapsed_time(self, end):
            assert log == [self, "work", end]
            return 2.5  # ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert gpu_seconds(lambda: log.append("work")) == 2.5e-3


def test_without_memory_a_shape_stays_as_it_is(monkeypatch, caplog):
    def refuse(layout, *args, **kwargs):
        if layout != AS_IS:
            raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(matmul_tuning, "multiply_as", refuse)
    sample = Sample.take(torch.empty(2, 2), torch.empty(2, 2), torch.empty(2, 2))
    assert fastest(measure(sample, [AS_IS, "NN"], accumulate=False)) == AS_IS
    assert "out of memory" in caplog.text
