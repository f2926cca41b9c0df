"""Ask the model again: is it the one whose fingerprint a bundle has, and does it answer some samples as told?

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
from hf_axonn_eval.bundle.checks import Check, listed
from hf_axonn_eval.bundle.consistency import HALF
from hf_axonn_eval.bundle.numbers import summary_file
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.data.tokenizer_identity import tokenizer_identity
from hf_axonn_eval.extraction.extract import extract
from hf_axonn_eval.extraction.load_model import load_model, start_distributed
from hf_axonn_eval.extraction.scoring import BOUNDS, near_tie_below
from hf_axonn_eval.extraction.weights_on_disk import fingerprint
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_eval.metrics.discoverability import Sampler


DECODED = ("free_running_accuracy", "longest_run", "edit_distance", "rouge1", "rouge2", "rougeL")
ZLIB = 0.1  # relative: other builds of zlib make other lengths


@dataclass(frozen=True, kw_only=True)
class Again:
    """What should be asked again.

    Args:
        model: directory of the model.
        grid: as of `load_model`.
        tokenizer: as of `load_model`.
        trust_remote_code: as of `load_model`.
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
    """What came of one sample: in words what contradicts, and whether its `exact_match`, or what it was decoded to
    after a miss, is undecided.
    """

    wrong: list[str]
    undecided: bool
    decoded_otherwise: bool


def rerun(
    records: Mapping[str, Mapping[str, Any]],
    results: Mapping[str, Sequence[SampleResult]],
    trees: Mapping[str, Any],
    samples: Sequence[Sample],
    asked: Mapping[str, int],
    again: Again,
) -> list[Check]:
    """Check the model's fingerprint, and ask it some samples of the run of that fingerprint.

    Args:
        records: run.json by the name of the run.
        results: likewise.
        trees: summaries by their member of the bundle.
        samples: what the runs were asked.
        asked: the place of each sample by the name that it has in the bundle.
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
    told = {name: str(record["identity"]["model_fingerprint"]) for name, record in records.items()}
    run = next((name for name in told if told[name] == found), None)
    if set(told.values()) == {UNKNOWN}:
        said = "the runs have no fingerprint: the weights could not be read, as a server does not show them"
        return [Check.unchecked("model", said, "runs of weights that can be read")]
    if run is None:
        prints = ", ".join(f"{name} {each}" for name, each in told.items())
        return [Check.contradicts("model", f"its fingerprint is {found}, those of the runs are {prints}")]
    identity = records[run]["identity"]
    loaded = load_model(
        again.model,
        grid=again.grid,
        tokenizer=again.tokenizer,
        dtype=identity["dtype"],
        attn_implementation=identity.get("attn_implementation"),
        trust_remote_code=again.trust_remote_code,
    )
    checks = [_model(run, identity, loaded)]
    others = [name for name in told if name != run]
    if others:
        need = "a verify for the model of each"
        checks.append(Check.unchecked("models", f"those of the runs {', '.join(others)}", need))
    vocabulary = loaded.model.config.get_text_config().vocab_size
    chance = (trees.get(summary_file(run)) or {}).get("chance")
    level = chance.get("chance_nll") if isinstance(chance, dict) else None
    if isinstance(level, int | float) and abs(level - math.log(vocabulary)) > 1e-6:
        checks.append(Check.contradicts("chance", f"chance_nll is {level}, the vocabulary has {vocabulary} tokens"))

    drawn = WorkSplit.for_model(None).on_rank_zero(
        lambda: secrets.SystemRandom().sample(sorted(asked), min(again.most, len(asked)))
    )
    claimed = {result.sample_id: result for result in results[run] if result.sample_id in drawn}
    drawn = [name for name in drawn if name in claimed]
    settings = records[run]["settings"].get("sampler")
    try:
        sampler = Sampler(**settings) if settings is not None else None
    except (TypeError, ValueError) as error:
        return [*checks, Check.contradicts("answers", f"the sampler of run {run!r} is none: {error}")]
    if identity.get("sampler") != (sampler.text if sampler is not None else None):
        said = f"the sampler of run {run!r} is {identity.get('sampler')!r}, but its settings {settings!r}"
        return [*checks, Check.contradicts("answers", said)]
    answers = extract(
        loaded.model,
        loaded.tokenizer,
        [samples[asked[name]] for name in drawn],
        batch_size=again.batch_size,
        generate=bool(identity.get("generate", True)),
        stop_early=bool(identity.get("stop_early")),
        sampler=sampler,
        membership=bool(identity.get("membership")),
    )
    # that of a bundle is not believed: with a wide one everything would agree
    bound = widest_bound(identity["dtype"]) if records[run]["grid"] else near_tie_below(loaded.model)
    pairs = zip(drawn, answers, strict=False)  # ranks other than 0 have no answers
    early = bool(identity.get("stop_early"))
    verdicts = {
        samples[asked[name]].sample_id: judged(claimed[name], answer, bound, early=early) for name, answer in pairs
    }
    return [*checks, *_answers(run, verdicts, len(asked), bound)]


def widest_bound(dtype: str) -> float:
    """The widest bound of near ties, in nats, that `near_tie_below` gives for weights of a dtype on any grid."""
    bounds = {str(name).removeprefix("torch."): bound for name, bound in BOUNDS.items()}
    return 2 * bounds.get(dtype, max(bounds.values()))


def _model(run: str, identity: Mapping[str, Any], loaded: Any) -> Check:
    wrong = []
    known = tokenizer_identity(loaded.tokenizer)
    pairs = {
        "base_fingerprint": loaded.record.get("base_fingerprint"),
        "dtype": loaded.record["dtype"],
        "attn_implementation": loaded.record["attn_implementation"],
        "tokenizer_sha256": known["sha256"] if known is not None else None,
    }
    for name, found in pairs.items():
        if name in identity and identity[name] != found:
            wrong.append(f"{name} is {found}, that of run {run!r} {identity[name]}")
    return Check.of("model", wrong, f"that of run {run!r}, by fingerprint, dtype, attention code and tokenizer")


def judged(told: SampleResult, found: SampleResult, bound: float, *, early: bool = False) -> Verdict:
    """Compare the answer that a bundle tells of with that of now.

    Two results of the same model and sample, computed in another order, agree in this way: the lead of each true token
    moves by at most `bound` nats, and so does its log-probability. So `exact_match` differs only where the margins
    cross 0 within it, and a hit only of a token that is not surely the first choice, or surely not. Text is compared
    exactly; a continuation only where the sample is extracted, as after a miss it may change with any rounding.

    Args:
        told: of the bundle.
        found: of now.
        bound: nats.
        early: the run had `stop_early`, whose margin is that of the first miss.
    """
    wrong = []
    undecided = told.exact_match != found.exact_match
    if told.margin is not None and found.margin is not None:
        if early and told.divergence_point != found.divergence_point:
            first = min((told, found), key=lambda result: result.divergence_point)
            undecided, apart = True, float(first.margin or 0)
        else:
            apart = abs(_lead(told) - _lead(found))
        if apart > bound:
            wrong.append(
                f"exact_match {told.exact_match} with margin {told.margin:.4g} nats is now {found.exact_match} with "
                f"{found.margin:.4g}"
            )
            undecided = False
    elif undecided:
        wrong.append(f"exact_match {told.exact_match} is now {found.exact_match}")
    if told.logprobs is not None and found.logprobs is not None:
        moved = [abs(mine - now) for mine, now in zip(told.logprobs, found.logprobs, strict=True) if mine != now]
        if moved and not max(moved) <= bound:
            wrong.append(f"the log-probability of a token moved by {max(moved):.4g} nats")
    if told.hits is not None and found.hits is not None and found.logprobs is not None:
        flipped = [place for place, hit in enumerate(told.hits) if hit != found.hits[place]]
        sure = [place for place in flipped if found.logprobs[place] > HALF + bound]
        wrong += [f"hit {place} is {told.hits[place]}, with a probability of more than a half" for place in sure]
    steps = told.suffix_length
    for name, allowed in (("sampled_logprob", bound * steps), ("logprob", bound * steps)):
        mine, now = getattr(told, name), getattr(found, name)
        finite = mine is not None and now is not None and math.isfinite(mine) and math.isfinite(now)
        if finite and abs(mine - now) > allowed:
            wrong.append(f"{name} {mine:.6g} is now {now:.6g}")
    wrong += _membership(told, found, bound)
    wrong += _differing(told, found, ("type_token_ratio",))
    if told.zlib_ratio is not None and found.zlib_ratio is not None:
        if abs(told.zlib_ratio - found.zlib_ratio) > ZLIB * found.zlib_ratio:
            wrong.append(f"zlib_ratio {told.zlib_ratio} is now {found.zlib_ratio}")
    otherwise = _differing(told, found, DECODED)
    if told.exact_match and found.exact_match:
        wrong += otherwise
        otherwise = []
    return Verdict(wrong, undecided and not wrong, bool(otherwise))


def _lead(result: SampleResult) -> float:
    """How far the sample is from being lost, or, below 0, from being extracted."""
    return float(result.margin or 0) * (1 if result.exact_match else -1)


def _membership(told: SampleResult, found: SampleResult, bound: float) -> list[str]:
    """Means of log-probabilities move by no more than these do; Min-K%++ divides by what may be small, and has no
    bound.
    """
    mine, now = told.membership or {}, found.membership or {}
    wrong = []
    for name in ("loss", "min_k", "zlib"):
        if name not in mine or name not in now:
            continue
        allowed = bound
        if name == "zlib" and now["loss"]:
            allowed = bound * abs(now["zlib"] / now["loss"]) + ZLIB * abs(now["zlib"])  # nats by bytes
        if abs(mine[name] - now[name]) > allowed:
            wrong.append(f"membership score {name} {mine[name]:.6g} is now {now[name]:.6g}")
    return wrong


def _differing(told: SampleResult, found: SampleResult, names: Sequence[str]) -> list[str]:
    pairs = ((name, getattr(told, name), getattr(found, name)) for name in names)
    return [f"{name} {mine} is now {now}" for name, mine, now in pairs if mine is not None and mine != now]


def _answers(run: str, verdicts: Mapping[str, Verdict], samples: int, bound: float) -> list[Check]:
    wrong = [f"sample {name!r}: {said}" for name, verdict in verdicts.items() for said in verdict.wrong]
    cases = sum(bool(verdict.wrong) for verdict in verdicts.values())
    undecided = sum(verdict.undecided for verdict in verdicts.values())
    otherwise = sum(verdict.decoded_otherwise for verdict in verdicts.values())
    about = f"of {len(verdicts):,} of {samples:,} samples of run {run!r}, drawn at random,"
    agreed = f"{about} all agree within {bound:g} nats, {undecided:,} of them undecided: exact_match within rounding"
    checks = [
        Check.contradicts("answers", f"{about} {cases:,} contradict: {listed(wrong)}")
        if wrong
        else Check.agrees("answers", agreed)
    ]
    if otherwise:
        said = f"{about} {otherwise:,} decode to another text after a miss: rounding may do that, and so may a forger"
        checks.append(Check.unchecked("decoded texts", said, "the device, grid, batch size and versions of the run"))
    return checks
