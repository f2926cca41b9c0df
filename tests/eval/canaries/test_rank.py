"""Exposure: high for a secret a model was trained on, that of chance for one it was not, the same on several ranks."""

import json
import math

import pytest
import torch

from hf_axonn_eval import make_canaries, rank_canaries
from hf_axonn_eval.__main__ import main
from hf_axonn_eval.canaries.rank import (
    CanaryRank,
    _count_shared,
    _fit,
    _fitted_exposure,
    exposure_by_insertions,
    ranking_record,
)
from hf_axonn_eval.cli.canaries import _show
from tests.helpers.eval_support import result, tiny_llama, topics_tokenizer
from tests.helpers.ranks import run_ranks


FORMAT = "the secret word is {letters:6}"


@pytest.fixture(scope="module")
def canaries():
    return make_canaries(FORMAT, insertions=(0, 3, 30), each=6, candidates=255, seed=1)


def taught(canaries):
    """A tiny model trained on all canaries as often as they say, in a few epochs."""
    model = tiny_llama().train()
    tokenizer = topics_tokenizer()
    texts = [tokenizer(some.text, add_special_tokens=False)["input_ids"] for some in canaries.canaries]
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    labels = ids.masked_fill(mask == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for step in range(30):
        rows = [place for place, some in enumerate(canaries.canaries) if step % 30 < some.insertions]
        model(input_ids=ids[rows], attention_mask=mask[rows], labels=labels[rows]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def test_a_secret_that_was_learnt_is_exposed_and_others_are_not(canaries):
    model = taught(canaries)
    ranked = rank_canaries(model, topics_tokenizer(), canaries, batch_size=64, progress=False)
    exposed = exposure_by_insertions(ranked)
    assert list(exposed) == [0, 3, 30]
    assert exposed[30]["first"] == 6 and exposed[30]["least_exposure"] == 8.0  # log2 of 255 + 1
    # a rank drawn at random gives 1.44 bits on average, with a standard deviation of 1.44: 0.59 for the mean of six
    assert exposed[0]["mean_exposure"] < 1.44 + 5 * 0.59 and exposed[0]["first"] == 0
    # the fit goes on beyond the rank, up to all texts of the format
    assert all(8 < some.fitted_exposure <= 6 * math.log2(26) for some in ranked if some.insertions == 30)
    record = ranking_record(ranked, canaries, {"fingerprint": "f"})
    assert record["highest_exposure"] == 8.0 and not record["exact"] and record["by_insertions"]["30"]["first"] == 6
    assert json.loads(json.dumps(record)) == record


def test_a_model_that_has_seen_none_gives_chance():
    drawn = make_canaries(FORMAT, insertions=(1,), each=40, candidates=400, seed=2)
    ranked = rank_canaries(tiny_llama(), topics_tokenizer(), drawn, batch_size=64, progress=False)
    mean = exposure_by_insertions(ranked)[1]["mean_exposure"]
    assert abs(mean - 1 / math.log(2)) < 4 * 1.44 / math.sqrt(40)


def test_the_log_probability_is_that_of_the_text_after_what_all_begin_with(canaries):
    model, tokenizer = tiny_llama(), topics_tokenizer()
    for special in (False, True):
        ranked = rank_canaries(model, tokenizer, canaries, add_special_tokens=special, batch_size=64, progress=False)
        texts = [*(some.text for some in canaries.canaries), *canaries.candidates]
        lists = [tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts]
        totals = []
        for ids in lists:
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
            totals.append(logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum().item())
        others = totals[len(ranked) :]
        assert [some.rank for some in ranked] == [
            1 + sum(other >= total for other in others) for total in totals[: len(ranked)]
        ]
        gaps = [some.nll + total for some, total in zip(ranked, totals, strict=False)]
        assert max(gaps) - min(gaps) < 1e-4  # all leave out the same beginning


def test_a_text_that_begins_with_its_secret_needs_a_token_before_it():
    drawn = make_canaries("{letters:6} is the word", insertions=(1,), each=2, candidates=50)
    with pytest.raises(ValueError, match="begin the format with words, or the texts with a BOS"):
        rank_canaries(tiny_llama(), topics_tokenizer(), drawn, progress=False)
    ranked = rank_canaries(tiny_llama(), topics_tokenizer(), drawn, add_special_tokens=True, progress=False)
    assert len(ranked) == 2


def _on_each_rank(canaries):
    return rank_canaries(tiny_llama(), topics_tokenizer(), canaries, batch_size=16, progress=False)


def test_two_processes_give_what_one_gives():
    drawn = make_canaries(FORMAT, insertions=(0, 1), each=2, candidates=40)
    alone = _on_each_rank(drawn)
    zero, one = run_ranks(_on_each_rank, 2, drawn)
    assert one == [] and [some.rank for some in zero] == [some.rank for some in alone]
    assert [some.nll for some in zero] == pytest.approx([some.nll for some in alone], rel=1e-5)


def test_the_two_commands(tmp_path, capsys):
    tiny_llama().save_pretrained(tmp_path / "model")
    topics_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"id": "a", "text": "words"}\n' * 3)
    asked = ["--format", FORMAT, "--insertions", "0", "2", "--each", "3", "--candidates", "60", "--seed", "5"]
    files = ["--documents", str(tmp_path / "train.jsonl"), "--output", str(tmp_path / "canaries")]
    assert main(["canaries", "make", *asked, *files]) == 0
    reported = capsys.readouterr().out
    assert (
        "6 lines added" in reported
        and "6 canaries and 60 candidates, a random sample of the 308915776 texts" in reported
    )
    lines = (tmp_path / "canaries" / "documents.jsonl").read_text().splitlines()
    assert len(lines) == 9 and sum("canary" in line for line in lines) == 6
    output = tmp_path / "ranks" / "base.json"
    files = ["--canaries", str(tmp_path / "canaries"), "--model", str(tmp_path / "model"), "--output", str(output)]
    assert main(["canaries", "rank", *files]) == 0
    reported = capsys.readouterr().out
    assert "exposure in bits, at most 5.93" in reported and str(output) in reported.replace("\n", "")
    record = json.loads(output.read_text())
    assert [some["insertions"] for some in record["canaries"]] == [0, 0, 0, 2, 2, 2]
    assert record["model"]["path"] == str(tmp_path / "model")
    assert main(["canaries", "rank", "--canaries", str(tmp_path), *files[2:]]) == 2
    assert "holds no canaries.json" in capsys.readouterr().err
    assert main(["canaries", "make", "--format", "plain", "--output", str(tmp_path / "none")]) == 2
    assert "needs one or more fields" in capsys.readouterr().err and not (tmp_path / "none").exists()


def ranked_canary(name: str, insertions: int, place: int, exposure: float) -> CanaryRank:
    return CanaryRank(canary_id=name, text=name, insertions=insertions, nll=1.0, rank=place, exposure=exposure)


def test_exposure_by_insertions_by_hand():
    ranked = [
        ranked_canary("a", 9, 1, 4.0), ranked_canary("b", 0, 2, 3.0), ranked_canary("c", 9, 1, 4.0),
        ranked_canary("d", 9, 4, 2.0),
    ]  # fmt: skip
    reported = exposure_by_insertions(ranked)
    assert list(reported) == [0, 9]
    assert reported[9] == {
        "canaries": 3, "first": 2, "mean_exposure": pytest.approx(10 / 3), "least_exposure": 2.0, "most_exposure": 4.0,
    }  # fmt: skip
    assert reported[0]["first"] == 0 and reported[0]["mean_exposure"] == 3.0


def test_what_all_texts_begin_with():
    for tokens, shared in (
        ([[1, 2, 3], [1, 2, 4]], 2),
        ([[1, 2], [1, 2, 4]], 1),  # each keeps a token after it
        ([[1, 2, 3], [1, 2, 3]], 2),
        ([[1, 2, 3], [2, 2, 3]], 0),
        ([[1], [1, 2]], 0),
        ([[], [1, 2]], 0),
        ([[1, 2, 3, 4], [1, 5, 3, 4], [1, 2, 3, 4]], 1),
    ):
        assert _count_shared(tokens) == shared, tokens


def test_where_a_fit_says_something():
    drawn = make_canaries("{digits:9}", insertions=(1,), candidates=100)
    spread = [-2.005 - place / 100 for place in range(100)]
    # the skew is zero to rounding, and the shape of the fit is as its cube root
    fit, refused = _fit(spread, drawn)
    assert refused is None and 0 < fit.p < 1
    assert _fitted_exposure(-2.5, fit, drawn) == pytest.approx(1, abs=1e-4), "half of them are likelier"
    far, _ = _fit([-1000.0 - place for place in range(100)], drawn)
    assert _fitted_exposure(-1e-9, far, drawn) == math.log2(10**9), "no more than there are"
    for wrong in (-math.inf, math.nan):
        assert _fitted_exposure(wrong, fit, drawn) is None
    for others, why in (
        (spread[:99], "99 candidates are too few"),
        ([-2.1] * 100, "equally likely"),
        ([*spread, -math.inf], "not finite"),
        ([*spread, math.nan], "not finite"),
        ([-(2.0**place) for place in range(100)], "skewness of -"),
    ):
        fit, refused = _fit(others, drawn)
        assert fit is None and why in refused and _fitted_exposure(-2.5, fit, drawn) is None
    assert _fit(spread, make_canaries("{digits:2}", insertions=(1,), candidates=100)) == (None, None), "exact ranks"


def test_a_fit_that_is_none_is_marked(canaries, capsys, monkeypatch):
    """Candidates with more skewness than a skew-normal has: no exposure is made up, and the output says why."""
    logprobs = [0.0] * len(canaries.canaries) + [-(1.1**place) for place in range(len(canaries.candidates))]
    results = [result(str(place), logprob=logprob) for place, logprob in enumerate(logprobs)]
    monkeypatch.setattr("hf_axonn_eval.extraction.extract.extract", lambda *given, **options: results)
    ranked = rank_canaries(None, topics_tokenizer(), canaries)
    assert all(some.fitted_exposure is some.fit_p is None and "skewness" in some.fit_refused for some in ranked)
    record = ranking_record(ranked, canaries, {})
    assert "skewness" in record["canaries"][0]["fit_refused"] and ranked[0].exposure == 8.0
    _show(record)
    assert "no fitted exposure: the log-probabilities of the candidates have a skewness" in capsys.readouterr().out
    for p, said in ((0.04, True), (0.06, False)):
        _show({**record, "canaries": [{"fit_refused": None, "fit_p": p}]})
        assert ("not skew-normal (Kolmogorov-Smirnov, p = 0.04)" in capsys.readouterr().out) == said
