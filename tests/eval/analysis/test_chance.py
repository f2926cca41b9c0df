"""The comparison of a model's loss with that of guessing evenly among all tokens."""

from math import log

import pytest

from hf_axonn_eval.analysis.chance import against_chance, chance_of


@pytest.mark.parametrize(
    ("record", "size"),
    [
        ({"vocabulary": 100, "tokenizer": {"size": 90}}, 100),
        ({"vocabulary": None, "tokenizer": {"size": 90}}, 90),
        ({"tokenizer": None}, None),
        ({"vocabulary": "many"}, None),
        (None, None),
    ],
)
def test_the_vocabulary_is_that_of_the_model_or_else_of_the_tokenizer(record, size):
    found = chance_of({"metrics": {"nll": {"mean": 2.0}}}, record)
    assert found == (None if size is None else {"nll": 2.0, "chance_nll": log(size), "no_better": False})


def test_a_loss_of_chance_is_no_better():
    assert against_chance(log(7), 7)["no_better"] and not against_chance(log(7) - 1e-9, 7)["no_better"]
    assert against_chance(None, 7) is None and chance_of({"metrics": {}}, {"vocabulary": 7}) is None
