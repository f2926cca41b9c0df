"""NgramStopping: its score against loops, and that it ends training when the score is high."""

from __future__ import annotations

import pytest

from hf_axonn_eval import NgramStopping, Sample
from hf_axonn_eval.extraction import ngram_stopping
from hf_axonn_eval.extraction.ngram_stopping import SCORE, ngram_overlap
from tests.helpers.training import make_trainer, token_data


def probe(bucket: int = 1) -> list[Sample]:
    rows = [row["input_ids"] for row in token_data(4, seed=0)]
    return [
        Sample(
            sample_id=str(at), document_id=str(at), bucket=bucket * (at % 2), offset=0, prefix=ids[:6], suffix=ids[6:]
        )
        for at, ids in enumerate(rows)
    ]


def test_the_score_is_a_share_of_ngrams_wherever_they_are():
    suffix = [1, 2, 3, 4, 5, 1, 2]
    assert ngram_overlap(suffix, suffix) == 1 and ngram_overlap(suffix, [9] * 7) == 0
    # Of the six pairs 12, 23, 34, 45, 51, 12 the continuation has 12 (twice in the suffix), 34 and 45.
    assert ngram_overlap(suffix, [9, 1, 2, 9, 3, 4, 5], (2,)) == pytest.approx(4 / 6)
    assert ngram_overlap(suffix, [9, 1, 2, 9, 3, 4, 5], (2, 3)) == pytest.approx((4 / 6 + 1 / 5) / 2)
    assert ngram_overlap([1, 2], [1, 2]) == 0 and ngram_overlap([1, 2], [1, 2], (2, 3)) == 1


def test_training_ends_when_the_score_is_reached(tmp_path, monkeypatch):
    scores = iter([0.1] * 2 + [0.3] * 2)  # of the two samples that are trained on, at each measurement
    monkeypatch.setattr(ngram_stopping, "ngram_overlap", lambda *_: next(scores))
    trainer = make_trainer(tmp_path, None, max_steps=6, save_strategy="no", eval_strategy="no")
    trainer.add_callback(NgramStopping(trainer, probe(), every=1, threshold=0.2))
    trainer.train()
    logged = [entry[SCORE] for entry in trainer.state.log_history if SCORE in entry]
    assert logged == pytest.approx([0.1, 0.3]) and trainer.state.global_step == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [({"threshold": 0}, "threshold is 0"), ({"lengths": ()}, "at least one"), ({"lengths": (0,)}, "at least 1")],
)
def test_wrong_arguments_are_refused(tmp_path, options, message):
    trainer = make_trainer(tmp_path, None, max_steps=1)
    with pytest.raises(ValueError, match=message):
        NgramStopping(trainer, probe(), **options)
    with pytest.raises(ValueError, match="no sample is trained on"):
        NgramStopping(trainer, probe(bucket=0))
