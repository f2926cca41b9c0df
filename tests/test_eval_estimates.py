"""The right interval for each number of a group."""

import numpy as np
import pytest
from eval_support import result

from hf_axonn_eval.estimates import estimates, membership
from hf_axonn_eval.stats import bootstrap, wilson
from hf_axonn_eval.table import Table


OPTIONS = {"confidence": 0.9, "resamples": 300, "seed": 2}


def test_the_kind_of_interval_follows_the_documents():
    shares = {
        "alone": np.array([1, np.nan, 0, np.nan, 1, np.nan]),
        "several": np.array([1, 0, 0, 0, 1, 1.0]),
        "none": np.zeros(6),
        "every": np.ones(6),
        "missing": np.full(6, np.nan),
    }
    means = {"length": np.array([1, 2, 3, 4, 5, 6.0]), "of one": np.array([1, 2, *[np.nan] * 4])}
    documents = list("aabbcc")
    found = estimates(shares, means, documents, OPTIONS)
    assert list(found) == ["alone", "several", "none", "every", "length", "of one"]
    kinds = {name: entry["interval"] for name, entry in found.items()}
    assert kinds == {
        "alone": "wilson", "several": "bootstrap", "none": "wilson", "every": "wilson",
        "length": "bootstrap", "of one": "none: a single document",
    }  # fmt: skip
    ends = {name: (entry["low"], entry["high"]) for name, entry in found.items()}
    assert ends["alone"] == wilson(2, 3, confidence=0.9)
    assert (ends["none"], ends["every"]) == (wilson(0, 3, confidence=0.9), wilson(3, 3, confidence=0.9))
    assert ends["length"] == pytest.approx(bootstrap(means["length"], documents, **OPTIONS))
    assert ends["several"] == pytest.approx(bootstrap(shares["several"], documents, **OPTIONS))
    assert ends["of one"] == (None, None)
    assert found["several"]["count"] == 3 and "count" not in found["length"]


def test_a_very_large_attack_is_bootstrapped_with_fewer_draws(monkeypatch):
    monkeypatch.setattr("hf_axonn_eval.estimates._LARGEST_ATTACK", 2500)
    table = Table.of([result(str(i), bucket=i % 2, membership={"loss": float(i * i % 7)}) for i in range(10)])
    assert membership(table, table.buckets == 1, {**OPTIONS, "resamples": 1000})["loss"]["resamples"] == 250
    assert membership(table, table.buckets == 1, OPTIONS)["loss"]["resamples"] == 250
    assert membership(table, table.buckets == 1, {**OPTIONS, "resamples": 150})["loss"]["resamples"] == 150
    assert membership(table, table.buckets == 5, OPTIONS) == {}
