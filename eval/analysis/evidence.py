"""Tests of the hypothesis that a model reproduces what it is said to have seen more often than chance gives.

The question is one for each model: of the samples that were seen at least once according to the samples file, are more
reproduced verbatim than of the controls, and than by the base model? A document is one trial throughout.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.stats import fisher_exact

from hf_axonn_eval.analysis.estimates import estimates
from hf_axonn_eval.analysis.intervals import mcnemar, number_documents, sign_test
from hf_axonn_eval.analysis.table import Table


METRIC = "exact_match"
_TESTS = ("against_controls", "against_base")
UNEQUAL = 1.1  # times as many samples a document: those with more have more chances of one that is reproduced


def evidence(tables: Mapping[str, Table], base: str, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Compute shares of what was reproduced verbatim, and test them against the controls and the base run.

    Args:
        tables: of each run, the same samples in the same order.
        base: name of the base run.
        options: `confidence`.
    Returns:
        By run

        - `seen`, `controls`: an estimate of the share that was reproduced, and how many `documents`; None without
          such samples;
        - `against_controls`: Fisher's exact test over documents, of which any sample was reproduced: `seen` and
          `controls`, each [reproduced, all]. It holds if documents of both are alike but for the training. None
          without controls, or where documents have unequal numbers of samples on the two sides;
        - `against_base`: what `mcnemar` returns, of the samples that were seen; None of the base run.

        A test has `p` (two-sided), `upwards`, whether more came back, and `smallest_p`, the least that so many
        documents can give: 0.125 by McNemar's of 4 documents, whatever came back. `p_holm` and `smallest_p_holm` are
        corrected for all tests in here; the latter as if each of them gave its least.
        `more` says whether a test finds that more came back, with p_holm of at most 1 - confidence; None without any
        test.
    """
    found = {name: _test_run(table, None if name == base else tables[base], options) for name, table in tables.items()}
    by_run = {name: [entry[test] for test in _TESTS if entry[test]] for name, entry in found.items()}
    tests = [test for some in by_run.values() for test in some]
    holm(tests)
    holm(tests, "smallest_p")
    alpha = 1 - options["confidence"] + 1e-12
    for name, some in by_run.items():
        found[name]["more"] = any(test["upwards"] and test["p_holm"] <= alpha for test in some) if some else None
    return found


def holm(tests: list[dict[str, Any]], name: str = "p") -> None:
    """Add p by Holm's correction: with those of at most 5% called changes, the chance of any false one is at most 5%.

    Args:
        tests: each gets an entry `name` + "_holm".
        name: of the entry that is corrected.

    Source: Holm 1979, A simple sequentially rejective multiple test procedure.
    """
    largest = 0.0
    for place, test in enumerate(sorted(tests, key=lambda test: test[name])):
        largest = max(largest, min(1.0, (len(tests) - place) * test[name]))
        test[f"{name}_holm"] = largest


def _test_run(table: Table, base: Table | None, options: Mapping[str, Any]) -> dict[str, Any]:
    sides = {"seen": table.buckets != 0, "controls": table.buckets == 0}
    found: dict[str, Any] = {name: _share(table.rows(side), options) for name, side in sides.items()}
    found |= dict.fromkeys(_TESTS)
    if found["seen"] is None:
        return found
    if found["controls"] is not None:
        found["against_controls"] = _fisher(*(table.rows(side) for side in sides.values()))
    if base is not None:
        seen = sides["seen"]
        after, before = (each.columns[METRIC][seen] == 1 for each in (table, base))
        test = mcnemar(after, before, table.rows(seen).documents)
        smallest = sign_test(found["seen"]["documents"], 0)
        upwards = test["documents_gained"] > test["documents_lost"]
        found["against_base"] = {**test, "upwards": upwards, "smallest_p": smallest}
    return found


def _share(table: Table, options: Mapping[str, Any]) -> dict[str, Any] | None:
    if not len(table):
        return None
    shares = {METRIC: table.columns[METRIC]}
    [entry] = estimates(shares, {}, table.documents, options).values()
    return {**entry, "documents": len(set(table.documents))}


def _fisher(seen: Table, controls: Table) -> dict[str, Any] | None:
    """Run Fisher's exact test of documents; None where those of one side have more samples each."""
    samples = [len(side) / len(set(side.documents)) for side in (seen, controls)]
    if max(samples) > UNEQUAL * min(samples):
        return None
    counts = []
    for side in (seen, controls):
        index, count = number_documents(side.documents)
        yes = np.bincount(index, weights=side.columns[METRIC], minlength=count) > 0
        counts.append([int(yes.sum()), count])
    (more, all_seen), (fewer, all_controls) = counts
    table = [[more, all_seen - more], [fewer, all_controls - fewer]]
    return {
        "seen": counts[0],
        "controls": counts[1],
        "upwards": more * all_controls > fewer * all_seen,
        "p": min(1.0, float(fisher_exact(table).pvalue)),
        "smallest_p": min(1.0, float(fisher_exact([[all_seen, 0], [0, all_controls]]).pvalue)),
    }
