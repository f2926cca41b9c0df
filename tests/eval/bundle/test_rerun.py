"""Asking the model again: rounding agrees or is undecided, everything else contradicts."""

import json
import math
import shutil

import pytest

from hf_axonn import Grid
from hf_axonn_eval import verify_bundle, write_bundle
from hf_axonn_eval.bundle.rerun import Again, judge
from tests.helpers.eval_support import result
from tests.helpers.ranks import run_ranks


TOLD = result(
    "a",
    margin=0.4,
    edit_distance=0.5,
    rougeL=0.5,
    zlib_ratio=0.9,
    type_token_ratio=1.0,
    sampled_logprob=-1.0,
    membership={"loss": -2.0, "zlib": -0.02, "min_k": -4.0, "min_k_plus_plus": -3.0},
)
SURE = result(
    "s", exact_match=True, divergence_point=2, hits=[True, True], logprobs=[-0.1, -0.2], margin=0.4, rougeL=1.0
)
BOUND = 0.1


def with_(base, **changes):
    return type(base)(**{**vars(base), **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"margin": 0.31},
        {"logprobs": [-0.59, -1.09], "logprob": -1.68, "sampled_logprob": -1.19},
        {"sampled_logprob": -math.inf},
        {"membership": {"loss": -2.09, "zlib": -0.0209, "min_k": -4.09, "min_k_plus_plus": -9.0}},
        {"hits": [False, False], "divergence_point": 0, "logprobs": [-0.595, -1.0]},
    ],
)
def test_what_rounding_may_change_agrees(changes):
    verdict = judge(TOLD, with_(TOLD, **changes), BOUND)
    assert verdict.wrong == [] and not verdict.undecided and not verdict.decoded_otherwise


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"margin": 0.55}, "exact_match False with margin 0.4 nats is now False with 0.55"),
        ({"exact_match": True, "margin": 0.05}, "exact_match False with margin 0.4 nats is now True with 0.05"),
        ({"logprobs": [-0.5, -1.2]}, "the log-probability of a token moved by 0.2 nats"),
        ({"logprobs": [-0.5, -math.inf]}, "the log-probability of a token moved by inf nats"),
        ({"logprob": -1.8}, "logprob -1.5 is now -1.8"),
        ({"sampled_logprob": -1.3}, "sampled_logprob -1 is now -1.3"),
        ({"membership": {"loss": -2.2}}, "membership score loss -2 is now -2.2"),
        ({"membership": {"min_k": -4.2}}, "membership score min_k -4 is now -4.2"),
        ({"membership": {"loss": -2.0, "zlib": -0.024}}, "membership score zlib -0.02 is now -0.024"),
        ({"hits": [True, True], "logprobs": [-0.5, -0.5]}, "hit 1 is False, with a probability of more than a half"),
        ({"zlib_ratio": 0.8}, "zlib_ratio 0.9 is now 0.8"),
        ({"type_token_ratio": 0.5}, "type_token_ratio 1.0 is now 0.5"),
    ],
)
def test_what_rounding_cannot_change_contradicts(changes, said):
    found = judge(TOLD, with_(TOLD, **changes), BOUND)
    assert any(each.startswith(said) for each in found.wrong), found.wrong
    assert not found.undecided


def test_a_near_tie_that_turned_is_undecided():
    told, now = with_(TOLD, margin=0.03), with_(TOLD, exact_match=True, margin=0.06)
    assert judge(told, now, BOUND) == judge(now, told, BOUND)
    assert judge(told, now, BOUND).undecided and judge(told, now, BOUND).wrong == []
    assert judge(told, now, 0.05).wrong and not judge(told, now, 0.05).undecided
    unknown = judge(with_(told, margin=None), with_(now, margin=None), BOUND)
    assert unknown.wrong == ["exact_match False is now True"] and not unknown.undecided


def test_what_follows_a_miss_may_be_decoded_otherwise_but_not_an_extracted_suffix():
    verdict = judge(TOLD, with_(TOLD, rougeL=0.25), BOUND)
    assert verdict.decoded_otherwise and verdict.wrong == []
    verdict = judge(SURE, with_(SURE, rougeL=0.25), BOUND)
    assert not verdict.decoded_otherwise and verdict.wrong == ["rougeL 1.0 is now 0.25"]


def test_with_stop_early_the_margin_is_that_of_the_first_miss():
    told = with_(TOLD, hits=None, logprobs=None, divergence_point=0, margin=0.05)
    later = with_(told, divergence_point=1, margin=3.0)
    verdict = judge(told, later, BOUND, early=True)
    assert verdict.wrong == [] and verdict.undecided
    assert judge(with_(told, margin=0.2), later, BOUND, early=True).wrong
    assert judge(later, with_(later, margin=3.2), BOUND, early=True).wrong


def contradictions(checks):
    return {check.what: check.said for check in checks if check.state == "contradicts"}


def test_the_model_of_a_run_answers_as_told(bundle, made, key):
    again = Again(model=made / "trained", most=5, batch_size=3)
    checks = {
        check.what: check for check in verify_bundle(bundle, samples=made / "samples.jsonl", key=key, again=again)
    }
    assert checks["model"].said.startswith("that of run 'trained'") and checks["model"].state == "agrees"
    assert checks["answers"].state == "agrees"
    assert checks["answers"].said.startswith(
        "of 5 of 12 samples of run 'trained', drawn at random, all agree within 0.0001"
    )
    assert checks["models"].state == "unchecked" and "base" in checks["models"].said


def ask_again(bundle, made, key):
    again = Again(model=made / "trained", grid=Grid(x=2), most=5, batch_size=3)
    return verify_bundle(bundle, samples=made / "samples.jsonl", key=key, again=again)


def test_a_grid_answers_as_told_and_its_first_rank_says_so(bundle, made, key):
    first, second = run_ranks(ask_again, 2, bundle, made, key)
    assert contradictions(first) == contradictions(second) == {}
    answers = {check.what: check.said for check in first}["answers"]
    assert answers.startswith("of 5 of 12 samples of run 'trained', drawn at random, all agree")


def test_the_numbers_of_another_model_under_this_fingerprint_are_found_out(made, key, tmp_path):
    """The untrained model is run, and its numbers are given the fingerprint of the trained one."""
    run = shutil.copytree(made / "runs" / "base", tmp_path / "clean")
    record, true = (json.loads((path / "run.json").read_text()) for path in (run, made / "runs" / "trained"))
    record["identity"]["model_fingerprint"] = true["identity"]["model_fingerprint"]
    (run / "run.json").write_text(json.dumps(record))
    write_bundle({"clean": run}, made / "samples.jsonl", tmp_path / "clean.tar", key=key)
    asked = {"samples": made / "samples.jsonl", "key": key}
    assert contradictions(verify_bundle(tmp_path / "clean.tar", **asked)) == {}
    found = contradictions(verify_bundle(tmp_path / "clean.tar", **asked, again=Again(model=made / "trained")))
    assert set(found) == {"answers"} and "12 contradict: sample " in found["answers"]


def test_another_model_contradicts_and_is_not_asked(bundle, made, key, tmp_path):
    other = shutil.copytree(made / "trained", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "note": "edited"}))
    asked = {"samples": made / "samples.jsonl", "key": key}
    checks = verify_bundle(bundle, **asked, again=Again(model=other))
    assert contradictions(checks)["model"].startswith("its fingerprint is ")
    assert "answers" not in {check.what for check in checks}
    for absent in (tmp_path / "absent", "someone/model"):
        with pytest.raises(ValueError, match="is not a directory"):
            verify_bundle(bundle, **asked, again=Again(model=absent))
    with pytest.raises(ValueError, match="needs the samples and the key"):
        verify_bundle(bundle, again=Again(model=made / "trained"))


def test_another_tokenizer_dtype_or_vocabulary_than_recorded_contradicts(made, key, run, tmp_path):
    record = json.loads((run / "run.json").read_text())
    record["identity"] |= {"tokenizer_sha256": "ab" * 32, "base_fingerprint": "cd" * 32}
    (run / "run.json").write_text(json.dumps(record))
    summary = json.loads((run / "summary.json").read_text())
    summary["chance"]["chance_nll"] += 1
    (run / "summary.json").write_text(json.dumps(summary))
    write_bundle({"trained": run}, made / "samples.jsonl", tmp_path / "b.tar", key=key)
    again = Again(model=made / "trained", most=1)
    found = contradictions(verify_bundle(tmp_path / "b.tar", samples=made / "samples.jsonl", key=key, again=again))
    assert "tokenizer_sha256 is " in found["model"] and "base_fingerprint is None" in found["model"]
    assert found["chance"].endswith("the vocabulary has 800 tokens") and "answers" not in found


def test_a_run_without_a_fingerprint_cannot_be_checked(made, key, run, tmp_path):
    record = json.loads((run / "run.json").read_text())
    record["identity"]["model_fingerprint"] = "unknown: a server does not show its weights"
    record["settings"]["near_tie_below"] = None
    record["access"] = "logits"
    (run / "run.json").write_text(json.dumps(record))
    write_bundle({"trained": run}, made / "samples.jsonl", tmp_path / "b.tar", key=key)
    again = Again(model=made / "trained")
    checks = verify_bundle(tmp_path / "b.tar", samples=made / "samples.jsonl", key=key, again=again)
    assert contradictions(checks) == {}
    found = {check.what: check for check in checks}
    assert found["model"].state == "unchecked" and "no fingerprint" in found["model"].said


def test_a_sampler_that_is_none_or_not_the_recorded_one_contradicts(made, key, run, tmp_path):
    asked = {"samples": made / "samples.jsonl", "key": key, "again": Again(model=made / "trained", most=1)}
    for sampler, said in (
        ({"top_k": 0}, "is none: "),
        ({"heat": 1}, "is none: "),
        ({"top_k": 2}, "is 'temperature 1, top-k 40'"),
    ):
        record = json.loads((run / "run.json").read_text())
        record["settings"]["sampler"] = sampler
        (run / "run.json").write_text(json.dumps(record))
        write_bundle({"trained": run}, made / "samples.jsonl", tmp_path / "b.tar", key=key)
        assert said in contradictions(verify_bundle(tmp_path / "b.tar", **asked))["answers"]


def test_texts_decoded_otherwise_after_a_miss_are_not_called_agreed(made, key, run, tmp_path):
    lines = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    for line in lines:
        if not line["exact_match"]:
            line["rougeL"] = 0.9
    (run / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_bundle({"trained": run}, made / "samples.jsonl", tmp_path / "b.tar", key=key)
    again = Again(model=made / "trained")
    checks = verify_bundle(tmp_path / "b.tar", samples=made / "samples.jsonl", key=key, again=again)
    found = {check.what: check for check in checks}
    assert found["answers"].state == "agrees" and found["decoded texts"].state == "unchecked"
    assert "6 decode to another text after a miss" in found["decoded texts"].said
