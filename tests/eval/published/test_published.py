"""hf_axonn_eval beside the authors' code: the numbers that it left on the same inputs (README.md says how).

Log-probabilities agree to CLOSE nats of a suffix where both computed in float64, to ROUNDED where the authors' code
computed in float32. What was drawn is compared with the probability: a count of draws is not less likely than
UNLIKELY.
"""

import copy
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from scipy.stats import binomtest

from hf_axonn_eval import Sample, Sampler, Sampling, build_samples, document_nll, extract, protocol
from hf_axonn_eval.analysis.guesses import recall_at_errors
from hf_axonn_eval.metrics.inextractability import easiest_window
from tests.benchmarks.eval.published import inextractability
from tests.benchmarks.eval.published.common import digest
from tests.eval.published import inputs


CLOSE, ROUNDED = 1e-6, 2e-3
UNLIKELY = 1e-5
METRIC = "inextractability"  # of a paper that has no protocol
PUBLISHED = sorted(path.stem for path in Path(__file__).parent.glob("*.json"))


@functools.cache
def outputs(name: str) -> dict:
    """What the authors' code gave, once it is sure that it was given the model that is here."""
    held = json.loads((Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8"))
    inputs.check_model(held["about"]["model"])
    return held["outputs"]


def window(sample: Sample) -> str:
    return digest((*sample.prefix, *sample.suffix))


def windows(samples: Sequence[Sample]) -> list[str]:
    return [window(sample) for sample in samples]


def measured(samples: Sequence[Sample], *, model=None, generate: bool = True, **settings) -> list:
    model = inputs.model() if model is None else model
    return list(
        extract(model, inputs.tokenizer(), samples, generate=generate, batch_size=16, progress=False, **settings)
    )


def in_order(samples: Sequence[Sample], asked: Sequence[str]) -> list[Sample]:
    """The samples in the order in which the authors asked them."""
    by_window = {window(sample): sample for sample in samples}
    return [by_window[one] for one in asked]


def as_likely(count: int, draws: int, chance: float) -> bool:
    return binomtest(count, draws, min(max(chance, 0.0), 1.0)).pvalue > UNLIKELY


def sampler(name: str) -> Sampler:
    return Sampler(**protocol(name).extract["sampler"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_was_run_is_said(name):
    held = json.loads((Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8"))
    about = held["about"]
    assert len(about["commit"]) == 40 and about["files"] and about["stands_in"] and about["versions"]["torch"]
    if name == METRIC:
        return
    assert protocol(held["protocol"]).name == name
    code = protocol(name).code
    assert not code or code == f"{about['repository']}@{about['commit']}"


def test_the_weights_are_those_of_the_published_runs():
    assert inputs.digest_of_weights(inputs.model()) == inputs.WEIGHTS_SHA256


@pytest.mark.slow
def test_training_gives_the_weights_again():
    """A processor of another kind rounds a few of them to their neighbours."""
    kept, trained = inputs.model().state_dict(), inputs.train().state_dict()
    others = sum(int((kept[name] != trained[name]).sum()) for name in kept)
    assert others <= 0.01 * sum(weight.numel() for weight in kept.values())


# apertus: swiss-ai/apertus_memorization


@functools.cache
def apertus_samples() -> list[Sample]:
    """As the protocol cuts, with the repetitive ones, which the authors leave out after they were asked."""
    sampling = protocol("apertus", min_type_token_ratio=None).sampling
    return build_samples(inputs.long_documents(), tokenizer=inputs.tokenizer(), sampling=sampling)


def test_apertus_asks_the_same_windows():
    assert sorted(windows(apertus_samples())) == sorted(outputs("apertus")["greedy"]["window"])


def test_apertus_leaves_out_the_same_repetitive_suffixes():
    greedy = outputs("apertus")["greedy"]
    kept = [one for one, low in zip(greedy["window"], greedy["low_ttr"], strict=True) if not low]
    assert 0 < len(kept) < len(greedy["window"])
    ours = build_samples(inputs.long_documents(), tokenizer=inputs.tokenizer(), sampling=protocol("apertus").sampling)
    assert sorted(windows(ours)) == sorted(kept)


def test_apertus_drops_the_same_contaminations():
    theirs = [
        name.replace("Stage_1", "v1").replace("Stage_2", "v2") for name in outputs("apertus")["known_contaminations"]
    ]
    assert sorted(protocol("apertus").drop) == sorted(theirs)


@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.slow)])
def test_apertus_decodes_and_scores_the_same(every):
    """A part of the windows. Where ours has an EOS, which vLLM bans, its text is not compared."""
    greedy = outputs("apertus")["greedy"]
    places = sorted({*range(0, len(greedy["window"]), every), greedy["exact"].index(True)})
    asked = in_order(apertus_samples(), greedy["window"])
    compared = 0
    for place, result in zip(places, measured([asked[place] for place in places]), strict=True):
        assert result.exact_match == greedy["exact"][place]
        assert result.metric("suffix_types") == pytest.approx(greedy["ttr"][place], abs=1e-12)
        if result.metric("holds_eos"):
            continue
        compared += 1
        assert digest(result.generated) == greedy["generated"][place], result.sample_id
        assert result.metric("rougeL_tokens") == pytest.approx(greedy["rouge_l"][place], abs=1e-12)
        assert result.metric("lccs") == pytest.approx(greedy["lccs"][place], abs=1e-12)
    assert compared > len(places) // 2


def test_apertus_draws_as_likely_as_the_probability_says():
    nucleus = outputs("apertus")["nucleus"]
    settings = {"prefix_length": 50, "suffix_length": 50, "offset": sorted(set(nucleus["offset"]))}
    sampling = protocol("apertus", **settings, prefix_buckets=None, min_type_token_ratio=None).sampling
    samples = build_samples(inputs.long_documents(), tokenizer=inputs.tokenizer(), sampling=sampling)
    asked = in_order(samples, nucleus["window"])
    chances = [
        math.exp(result.sampled_logprob) for result in measured(asked, generate=False, sampler=sampler("apertus"))
    ]
    assert sum(0.02 < chance < 0.98 for chance in chances) >= 3
    for chance, count, name in zip(chances, nucleus["exact"], nucleus["document"], strict=True):
        assert as_likely(count, nucleus["draws"], chance), f"{name}: {count} of {nucleus['draws']}, q = {chance:.4f}"


# cooper100: pasta41/book-extraction-science


COOPER = {
    "ours": (True, {}),
    "ours-pythia": (False, {}),
    "ours-no-bos": (False, {"bos": "tokenizer", "add_special_tokens": False}),
}


@functools.cache
def cooper_samples(run: str) -> list[Sample]:
    bos, changed = COOPER[run]
    book = [{"id": "book", "bucket": 1, "text": inputs.book()}]
    return build_samples(book, tokenizer=inputs.tokenizer(bos=bos), sampling=protocol("cooper100", **changed).sampling)


@pytest.mark.parametrize("run", COOPER)
def test_cooper_asks_the_same_windows(run):
    theirs = outputs("cooper100")["runs"][run]
    ours = cooper_samples(run)
    assert windows(ours) == theirs["windows"]
    starts = [int(sample.sample_id.removeprefix("book@").removesuffix("c")) for sample in ours]
    assert starts == theirs["starts"]
    assert max(after - before for before, after in zip(starts, starts[1:], strict=False)) > 10  # some are left out


@pytest.mark.parametrize("run", COOPER)
def test_cooper_gives_the_same_probabilities(run):
    theirs = outputs("cooper100")["runs"][run]
    model = copy.deepcopy(inputs.model()).float()
    results = measured(cooper_samples(run), model=model, generate=False, sampler=sampler("cooper100"))
    assert len({result.sampled_logprob for result in results}) > 50
    for result, top, first, full in zip(results, theirs["k_40"], theirs["k_1"], theirs["k_512"], strict=True):
        assert result.logprob == pytest.approx(full, abs=ROUNDED)
        assert result.sampled_logprob == pytest.approx(-math.inf if top is None else top, abs=ROUNDED)
        assert result.exact_match == (first is not None)


# goldfish and sc24: ahans30/goldfish-loss, eval/data_extraction.py


@functools.cache
def page_samples(name: str) -> list[Sample]:
    return build_samples(inputs.pages(), tokenizer=inputs.tokenizer(), sampling=protocol(name).sampling)


@pytest.mark.parametrize("name", ["goldfish", "sc24"])
def test_goldfish_asks_the_same_windows(name):
    theirs = outputs(name)["float64"]
    assert [sample.document_id for sample in page_samples(name)] == theirs["documents"]
    assert [digest(sample.suffix) for sample in page_samples(name)] == theirs["suffix"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("goldfish", "float64"),
        ("sc24", "float64"),
        ("goldfish", "bfloat16"),
        pytest.param("sc24", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_goldfish_decodes_and_scores_the_same(name, dtype):
    """In bfloat16 the samples that rounding may decide are not compared."""
    theirs = outputs(name)[dtype]
    model = copy.deepcopy(inputs.model()).to(getattr(torch, dtype))
    results = measured(page_samples(name), model=model)
    sure = [place for place, result in enumerate(results) if dtype == "float64" or not result.near_tie]
    assert len(sure) >= len(results) // 2
    eos = inputs.tokenizer().eos_token_id
    for place in sure:
        result, generated = results[place], theirs["generated"][place]
        assert result.exact_match == theirs["exact"][place]
        if dtype == "float64":
            until = result.generated.index(eos) + 1 if eos in result.generated else len(result.generated)
            assert result.generated[:until] == generated
            for ours, key in (("rouge1_to_eos", "rouge1"), ("rouge2_to_eos", "rouge2"), ("rougeL_to_eos", "rougeL")):
                assert result.metric(ours) == pytest.approx(theirs[key][place], abs=1e-12)
    if dtype == "float64":
        assert sum(result.exact_match for result in results) / len(results) == theirs["means"]["exact_match_rate"]
        assert any(len(generated) < 50 for generated in theirs["generated"])  # one ends early


# carlini50: the README of google-research/google-research, lm_memorization


def test_carlini_asks_and_decodes_the_same():
    theirs = outputs("carlini50")
    samples = build_samples(
        inputs.long_documents(), tokenizer=inputs.tokenizer(), sampling=protocol("carlini50").sampling
    )
    assert sorted(windows(samples)) == sorted(theirs["window"])
    results = measured(in_order(samples, theirs["window"]))
    assert [result.exact_match for result in results] == theirs["exact"]
    assert 0 < sum(theirs["exact"]) < len(results)
    for result, generated in zip(results, theirs["generated"], strict=True):
        assert result.metric("holds_eos") or digest(result.generated) == generated


# lm-extraction-benchmark: google-research/lm-extraction-benchmark


def example_samples() -> list[Sample]:
    documents = [{"id": str(n), "bucket": 1, "input_ids": ids} for n, ids in enumerate(inputs.examples())]
    return build_samples(
        documents, tokenizer=inputs.tokenizer(), sampling=protocol("lm-extraction-benchmark").sampling
    )


def test_the_benchmark_asks_the_same_examples():
    assert windows(example_samples()) == outputs("lm-extraction-benchmark")["examples"]


def test_the_benchmark_draws_as_likely_as_the_probability_says():
    theirs = outputs("lm-extraction-benchmark")
    results = measured(
        example_samples(), generate=False, sampler=Sampler(temperature=1.0, top_k=theirs["top_k"], top_p=None)
    )
    chances = [math.exp(result.sampled_logprob) for result in results]
    assert sum(0.02 < chance < 0.98 for chance in chances) >= 30
    for place, (chance, count) in enumerate(zip(chances, theirs["exact_draws"], strict=True)):
        assert as_likely(count, theirs["draws"], chance), f"example {place}: {count}, q = {chance:.4f}"
    expected, spread = sum(chances) * theirs["draws"], math.sqrt(sum(q * (1 - q) for q in chances) * theirs["draws"])
    assert abs(sum(theirs["exact_draws"]) - expected) < 4 * spread


def test_the_benchmark_orders_guesses_by_a_loss_that_is_one_token_early():
    """Of the last token of the prefix and all of the suffix but its last one: computed in float32 from float64."""
    samples = [
        Sample(
            sample_id=some.sample_id,
            document_id=some.document_id,
            bucket=1,
            offset=0,
            prefix=some.prefix[:-1],
            suffix=(some.prefix[-1], *some.suffix[:-1]),
        )
        for some in example_samples()
    ]
    drawn = [loss is not None for loss in outputs("lm-extraction-benchmark")["loss_of_the_true_suffix"]]
    theirs = [loss for loss in outputs("lm-extraction-benchmark")["loss_of_the_true_suffix"] if loss is not None]
    asked = [sample for sample, known in zip(samples, drawn, strict=True) if known]
    ours = [-result.logprob / result.suffix_length for result in measured(asked, generate=False)]
    assert ours == pytest.approx(theirs, abs=1e-5) and len(ours) > 100


@pytest.mark.parametrize("guesses", ["guess1", "guess10", "guess100"])
def test_the_benchmark_counts_recall_at_errors_the_same(guesses):
    theirs = outputs("lm-extraction-benchmark")[guesses]
    losses, right = ([0.0] * len(theirs["order"]) for _ in range(2))
    for rank, (example, correct) in enumerate(zip(theirs["order"], theirs["correct"], strict=True)):
        losses[example], right[example] = rank, correct
    found = set()
    for errors in (1, 2, 5, 10, 20, 50, 100):
        reached = [part for part, bad in zip(theirs["recall"], theirs["errors"], strict=True) if bad < errors]
        found.add(recall_at_errors(losses, right, errors))
        assert recall_at_errors(losses, right, errors) == pytest.approx(max(reached, default=0.0), abs=1e-12)
    assert len(found) > 3
    of_1000 = float(
        theirs["printed"].removeprefix("Recall at 100 errors ")
    )  # the script divides by its 1,000 examples
    assert recall_at_errors(losses, right) * len(right) / 1000 == pytest.approx(of_1000, abs=1e-12)


# hubble: allegro-lab/hubble, in lm-evaluation-harness


@functools.cache
def passage_samples() -> dict[tuple[str, int], Sample]:
    samples = build_samples(
        inputs.passages(), tokenizer=inputs.tokenizer(bos=False), sampling=protocol("hubble").sampling
    )
    return {(sample.document_id, len(sample.prefix)): sample for sample in samples}


def test_hubble_scores_the_same_where_the_prefix_has_the_same_tokens():
    """The protocol says what differs: the prefix is decoded and tokenized again, the generation may be longer."""
    theirs = outputs("hubble")
    results = {
        (result.document_id, result.prefix_length): result for result in measured(list(passage_samples().values()))
    }
    compared = exact = 0
    for prefix in (25, 50, 75, 100):
        rows = theirs[f"p{prefix}"]
        for place, document in enumerate(theirs["documents"]):
            result = results[document, prefix]
            same = digest(passage_samples()[document, prefix].prefix) == rows["prefix"][place]
            # the suffix has the EOS that ends a passage besides
            assert result.suffix_length - 1 == rows["suffix_tokens"][place]
            if not same or not result.metric("holds_eos"):
                continue
            compared += 1
            exact += result.exact_match
            assert result.exact_match == bool(rows["exact_match_tokens"][place]), result.sample_id
            assert result.metric("rougeL_to_eos") == pytest.approx(rows["rougeL_f1"][place], abs=1e-12)
    assert compared >= 6 and 0 < exact


def test_hubble_has_the_same_loss_of_passages():
    """Of every token after a BOS, which the harness puts before a passage."""
    bos = inputs.tokenizer().bos_token_id
    for passage, theirs in zip(inputs.passages(), outputs("hubble")["loglikelihood_rolling"], strict=True):
        ids = inputs.tokenizer(bos=False)(passage["text"])["input_ids"]
        assert document_nll(inputs.model(), [[bos, *ids]]).nll == pytest.approx(-theirs, abs=CLOSE * len(ids))


def test_inextractability_is_that_of_the_authors_code():
    """Every text is one suffix after its first token: the code scores all tokens but the first, and all windows."""
    held, tokenizer = outputs(METRIC), inputs.tokenizer()
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in inextractability.texts_asked()]
    assert [digest(ids) for ids in texts] == held["texts"]
    documents = [{"id": f"{place}", "bucket": 1, "input_ids": ids} for place, ids in enumerate(texts)]
    results = measured(build_samples(documents, sampling=Sampling(kind="rest", prefix_length=1)), generate=False)
    for length in inextractability.LENGTHS:
        for threshold in inextractability.THRESHOLDS:
            options = {"logprobs": None, "threshold": None}
            found = []
            for one in results:
                if threshold < len(tokenizer):
                    options = {"logprobs": one.logprobs, "threshold": threshold}
                found.append(easiest_window(one.ranks, length, **options))
            key = f"cost {length} {threshold}"
            assert [one.bits for one in found] == pytest.approx(held[f"{key} bits"], abs=CLOSE), key
            assert [[one.begin + 1, one.begin + length] for one in found] == held[f"{key} spans"], key
            least = min(range(len(found)), key=lambda place: found[place].bits)
            bits, p_star, worst, *span = held[key]
            assert (least, [found[least].begin + 1, found[least].begin + length]) == (worst, span)
            assert found[least].bits == pytest.approx(bits, abs=CLOSE) and 2 ** -found[least].bits == pytest.approx(
                p_star
            )
        windows = [one.ranks[at : at + length] for one in results for at in range(len(one.ranks) - length + 1)]
        greedy = sum(set(ranks) == {1} for ranks in windows)
        assert [greedy / len(windows), greedy, len(windows)] == held[f"greedy {length}"]
    assert max(held["cost 150 512 bits"]) > 10, "some take many queries"
