"""Results as columns."""

import math

import numpy as np
import pytest

from hf_axonn_eval.analysis.table import Table
from hf_axonn_eval.metrics.registry import value
from tests.helpers.eval_support import result


def test_a_column_holds_nan_where_a_sample_has_nothing():
    table = Table.read(
        iter(
            [
                result("a", bucket=6),
                result("b", rougeL=0.25, membership={"loss": -2.0}),
                result("c", bucket=6, near_verbatim=True, membership={"zlib": -0.1}),
            ]
        )
    )
    assert (table.ids, table.documents, table.buckets.tolist()) == (["a", "b", "c"], ["a", "b", "c"], [6, 0, 6])
    np.testing.assert_equal(table.column("rougeL"), [math.nan, 0.25, math.nan])
    np.testing.assert_equal(table.column("near_verbatim"), [math.nan, math.nan, 1.0])
    np.testing.assert_equal(table.column("membership.zlib"), [math.nan, math.nan, -0.1])
    assert np.isnan(table.column("rouge2")).all()
    assert {name: chosen.tolist() for name, chosen in table.groups().items()} == {
        "0": [False, True, False], "6": [True, False, True], "all": [True] * 3,
    }  # fmt: skip


def test_rows_are_chosen_by_place_or_by_truth():
    table = Table.read([result(name, divergence_point=place) for place, name in enumerate("abcd")])
    assert table.rows(np.array([3, 1])).ids == ["d", "b"]
    assert table.rows(np.array([True, False, False, True])).columns["divergence_point"].tolist() == [0, 3]
    assert table.with_column("membership.mine", np.ones(4)).rows(np.array([2])).columns["membership.mine"] == [1]


def test_values_that_are_computed_from_others():
    one = result("a", logprob=math.log(0.25), suffix_length=2, sampled_logprob=-math.inf)
    assert value(one, "nll") == pytest.approx(-math.log(0.25) / 2)
    assert value(one, "probability") == pytest.approx(0.25)
    assert value(one, "sampled_probability") == 0
    assert value(one, "exact_match") == 0.0 and value(one, "rouge1") is None


def test_draws_needed_are_a_column_for_each_p():
    table = Table.read(
        [result("a"), result("b", sampled_logprob=math.log(0.1)), result("c", sampled_logprob=-math.inf)]
    )
    np.testing.assert_equal(table.column("n_needed.0.5"), [math.nan, 7, math.inf])
    np.testing.assert_equal(table.column("n_needed.0.9"), [math.nan, 22, math.inf])
