"""Ask the model again: is it the one whose fingerprint a bundle has, and does it answer some samples as claimed?

Another device, grid or batch adds the same numbers in another order. So numbers agree that differ by no more than the
bound of the dtype (`BOUNDS`, docs/evaluation.md), and an `exact_match` that such a difference may turn is undecided.
"""

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_axonn_eval.bundle.anonymous import UNKNOWN
from hf_axonn_eval.bundle.checks import Check, check_cases, join_cases
from hf_axonn_eval.bundle.consistency import HALF
from hf_axonn_eval.bundle.contents import Bundle
from hf_axonn_eval.bundle.numbers import summary_file
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.data.tokenizer_identity import tokenizer_identity
from hf_axonn_eval.extraction.extract import extract
from hf_axonn_eval.extraction.load_model import LoadedModel, load_model, start_distributed
from hf_axonn_eval.extraction.scoring import BOUNDS, near_tie_below
from hf_axonn_eval.extraction.weights_on_disk import fingerprint
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_eval.metrics.discoverability import Sampler


DECODED = ("free_running_accuracy", "longest_run", "edit_distance", "rouge1", "rouge2", "rougeL")
ZLIB = 0.1  # relative: other builds of zlib make other lengths


@dataclass(frozen=True, kw_only=True)
class Again:
    """The model to ask again, and how.

    Args:
        model: directory of the model.
        grid: as of `load_model`, like `tokenizer` and `trust_remote_code`.
        most: how many samples, drawn at random.
        batch_size: as of `extract`.
    """

    model: str | os.PathLike[str]
    grid: Any = None
    tokenizer: str | os.PathLike[str] | None = None
    trust_remote_code: bool = False
    most: int = 32
    batch_size: int | str = "auto"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one sample: in words what contradicts, and whether its `exact_match`, or what it was decoded to
    after a miss, is undecided.
    """

    wrong: list[str]
    undecided: bool
    decoded_otherwise: bool


def rerun(bundle: Bundle, samples: Sequence[Sample], places: Mapping[str, int], again: Again) -> list[Check]:
    """Check the model's fingerprint, and ask it some samples of the run of that fingerprint.

    Args:
        bundle: with results.
        samples: what the runs were asked.
        places: the place of each sample by the name that it has in the bundle.
        again: the model.
    Raises:
        ValueError: there is no model, or it cannot be loaded.
    Collectives: those of `load_model` and `extract`.
    """
    directory = Path(again.model)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory: name that of the model, for one of the hub its snapshot's.")
    start_distributed()
    found = fingerprint(directory, WorkSplit.for_model(None))
    prints = {name: str(record["identity"]["model_fingerprint"]) for name, record in bundle.records.items()}
    run = next((name for name in prints if prints[name] == found), None)
    if set(prints.values()) == {UNKNOWN}:
        finding = "the runs have no fingerprint: the weights could not be read, as a server does not show them"
        return [Check("model", "unchecked", finding, "runs of weights that can be read")]
    if run is None:
        others = ", ".join(f"{name} {each}" for name, each in prints.items())
        return [Check("model", "contradicts", f"its fingerprint is {found}, those of the runs are {others}")]
    identity = bundle.records[run]["identity"]
    loaded = load_model(
        again.model,
        grid=again.grid,
        tokenizer=again.tokenizer,
        dtype=identity["dtype"],
        attn_implementation=identity.get("attn_implementation"),
        trust_remote_code=again.trust_remote_code,
    )
    checks = [_check_model(run, identity, loaded)]
    others = ", ".join(name for name in prints if name != run)
    if others:
        checks.append(Check("models", "unchecked", f"those of the runs {others}", "a verify for the model of each"))
    vocabulary = loaded.model.config.get_text_config().vocab_size
    chance = (bundle.trees.get(summary_file(run)) or {}).get("chance")
    level = chance.get("chance_nll") if isinstance(chance, dict) else None
    if isinstance(level, int | float) and abs(level - math.log(vocabulary)) > 1e-6:
        checks.append(Check("chance", "contradicts", f"chance_nll is {level}, the vocabulary has {vocabulary} tokens"))
    return [*checks, *_check_answers(run, bundle, loaded, samples, places, again)]


def _check_answers(
    run: str,
    bundle: Bundle,
    loaded: LoadedModel,
    samples: Sequence[Sample],
    places: Mapping[str, int],
    again: Again,
) -> list[Check]:
    """Ask samples that are drawn at random again, by the settings of the run."""
    record = bundle.records[run]
    identity, settings = record["identity"], record["settings"].get("sampler")
    try:
        sampler = Sampler(**settings) if settings is not None else None
    except (TypeError, ValueError) as error:
        return [Check("answers", "contradicts", f"the sampler of run {run!r} is none: {error}")]
    if identity.get("sampler") != (sampler.text if sampler is not None else None):
        finding = f"the sampler of run {run!r} is {identity.get('sampler')!r}, but its settings {settings!r}"
        return [Check("answers", "contradicts", finding)]
    if identity.get("recite"):
        finding = f"run {run!r} recites documents ({identity['recite']}), which is not done again"
        return [Check("answers", "unchecked", finding, "the same extract command")]
    drawn = WorkSplit.for_model(None).on_rank_zero(
        lambda: secrets.SystemRandom().sample(sorted(places), min(again.most, len(places)))
    )
    claimed = {result.sample_id: result for result in bundle.results[run] if result.sample_id in drawn}
    drawn = [name for name in drawn if name in claimed]
    early = bool(identity.get("stop_early"))
    answers = extract(
        loaded.model,
        loaded.tokenizer,
        [samples[places[name]] for name in drawn],
        batch_size=again.batch_size,
        generate=bool(identity.get("generate", True)),
        stop_early=early,
        sampler=sampler,
        membership=bool(identity.get("membership")),
    )
    # that of a bundle is not believed: with a wide one everything would agree
    bound = widest_bound(identity["dtype"]) if record["grid"] else near_tie_below(loaded.model)
    pairs = zip(drawn, answers, strict=False)  # ranks other than 0 have no answers
    verdicts = {
        samples[places[name]].sample_id: judge(claimed[name], answer, bound, early=early) for name, answer in pairs
    }
    wrong = [f"sample {name!r}: {case}" for name, verdict in verdicts.items() for case in verdict.wrong]
    cases = sum(bool(verdict.wrong) for verdict in verdicts.values())
    undecided = sum(verdict.undecided for verdict in verdicts.values())
    otherwise = sum(verdict.decoded_otherwise for verdict in verdicts.values())
    about = f"of {len(verdicts):,} of {len(places):,} samples of run {run!r}, drawn at random,"
    agreed = f"{about} all agree within {bound:g} nats, {undecided:,} of them undecided: exact_match within rounding"
    contradicting = f"{about} {cases:,} contradict: {join_cases(wrong)}"
    checks = [Check("answers", "contradicts", contradicting) if wrong else Check("answers", "agrees", agreed)]
    if otherwise:
        why = "rounding may do that, and so may a forger"
        finding = f"{about} {otherwise:,} decode to another text after a miss: {why}"
        needs = "the device, grid, batch size and versions of the run"
        checks.append(Check("decoded texts", "unchecked", finding, needs))
    return checks


def widest_bound(dtype: str) -> float:
    """Return the widest bound of near ties, in nats, that `near_tie_below` gives for a dtype on any grid."""
    bounds = {str(name).removeprefix("torch."): bound for name, bound in BOUNDS.items()}
    return 2 * bounds.get(dtype, max(bounds.values()))


def _check_model(run: str, identity: Mapping[str, Any], loaded: LoadedModel) -> Check:
    known = tokenizer_identity(loaded.tokenizer)
    own = {name: loaded.record.get(name) for name in ("base_fingerprint", "dtype", "attn_implementation")}
    own["tokenizer_sha256"] = known["sha256"] if known is not None else None
    wrong = [
        f"{name} is {value}, that of run {run!r} {identity[name]}"
        for name, value in own.items()
        if name in identity and identity[name] != value
    ]
    return check_cases("model", wrong, f"that of run {run!r}, by fingerprint, dtype, attention code and tokenizer")


def judge(claimed: SampleResult, found: SampleResult, bound: float, *, early: bool = False) -> Verdict:
    """Compare the answer that a bundle claims with that of now.

    Two results of the same model and sample, computed in another order, agree in this way: the lead of each true token
    moves by at most `bound` nats, and so does its log-probability. So `exact_match` differs only where the margins
    cross 0 within it, and a hit only of a token that is not surely the first choice, or surely not. Text is compared
    exactly; a continuation only where the sample is extracted, as after a miss it may change with any rounding.

    Args:
        claimed: of the bundle.
        found: of now.
        bound: nats.
        early: the run had `stop_early`, whose margin is that of the first miss.
    """
    wrong, undecided = _compare_answers(claimed, found, bound, early=early)
    if claimed.logprobs is not None and found.logprobs is not None:
        moved = [abs(one - now) for one, now in zip(claimed.logprobs, found.logprobs, strict=True) if one != now]
        if moved and not max(moved) <= bound:
            wrong.append(f"the log-probability of a token moved by {max(moved):.4g} nats")
    if claimed.hits is not None and found.hits is not None and found.logprobs is not None:
        flipped = [place for place, hit in enumerate(claimed.hits) if hit != found.hits[place]]
        sure = [place for place in flipped if found.logprobs[place] > HALF + bound]
        wrong += [f"hit {place} is {claimed.hits[place]}, with a probability of more than a half" for place in sure]
    for name in ("sampled_logprob", "logprob"):
        before, now = getattr(claimed, name), getattr(found, name)
        finite = math.isfinite((before or 0) + (now or 0))
        wrong += _compare_numbers(name, before, now, bound * claimed.suffix_length if finite else math.inf)
    before, now = claimed.membership or {}, found.membership or {}
    bounds = {"loss": bound, "min_k": bound, "zlib": bound}  # means; Min-K%++ divides by what may be small
    if now.get("loss") and "zlib" in now:
        bounds["zlib"] = bound * abs(now["zlib"] / now["loss"]) + ZLIB * abs(now["zlib"])  # nats by bytes
    for name, allowed in bounds.items():
        wrong += _compare_numbers(f"membership score {name}", before.get(name), now.get(name), allowed)
    wrong += _compare_fields(claimed, found, ("type_token_ratio",))
    wrong += _compare_numbers("zlib_ratio", claimed.zlib_ratio, found.zlib_ratio, ZLIB * (found.zlib_ratio or 0))
    otherwise = _compare_fields(claimed, found, DECODED)
    if claimed.exact_match and found.exact_match:
        wrong, otherwise = wrong + otherwise, []
    return Verdict(wrong, undecided and not wrong, bool(otherwise))


def _compare_answers(
    claimed: SampleResult, found: SampleResult, bound: float, *, early: bool
) -> tuple[list[str], bool]:
    """Compare `exact_match` and its margin: what contradicts, and if rounding may have turned it."""
    turned = claimed.exact_match != found.exact_match
    if claimed.margin is None or found.margin is None:
        return [f"exact_match {claimed.exact_match} is now {found.exact_match}"] if turned else [], turned
    if early and claimed.divergence_point != found.divergence_point:
        first = min((claimed, found), key=lambda result: result.divergence_point)
        turned, apart = True, float(first.margin or 0)
    else:
        apart = abs(_lead(claimed) - _lead(found))
    now = f"is now {found.exact_match} with {found.margin:.4g}"
    far = f"exact_match {claimed.exact_match} with margin {claimed.margin:.4g} nats {now}"
    return [far] if apart > bound else [], turned


def _lead(result: SampleResult) -> float:
    """Return the lead in nats that a sample would have to lose not to be extracted; below 0 where it is not."""
    return float(result.margin or 0) * (1 if result.exact_match else -1)


def _compare_numbers(name: str, before: float | None, now: float | None, allowed: float) -> list[str]:
    apart = before is not None and now is not None and abs(before - now) > allowed
    return [f"{name} {before:.6g} is now {now:.6g}"] if apart else []


def _compare_fields(claimed: SampleResult, found: SampleResult, names: Sequence[str]) -> list[str]:
    pairs = ((name, getattr(claimed, name), getattr(found, name)) for name in names)
    return [f"{name} {before} is now {now}" for name, before, now in pairs if before is not None and before != now]
