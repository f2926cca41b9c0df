"""Ask a model that a server holds for its training data, and keep the answers where `extract` keeps them.

One request a sample gives what the teacher-forced pass gives; a second one, for a sample that is not extracted,
decodes from the first miss on. Requests are under way side by side, and what came back is written before more are
sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from hf_axonn.compat.messages import get_logger
from hf_axonn_eval.analysis.chance import against_chance
from hf_axonn_eval.analysis.intervals import check_confidence
from hf_axonn_eval.analysis.summary import summarize
from hf_axonn_eval.data.jsonl import is_count
from hf_axonn_eval.data.protocols import check_protocol
from hf_axonn_eval.data.results import RunDirectory, SampleResult, read_record
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.data.tokenizer_identity import check_ids
from hf_axonn_eval.extraction.extract import look_through, tokenizer_record_of, warn_of_chance
from hf_axonn_eval.extraction.prefix_matching import match_choices
from hf_axonn_eval.extraction.run_record import identity_of, this_start
from hf_axonn_eval.extraction.runner import eos_ids, result_of
from hf_axonn_eval.extraction.scoring import BOUNDS, Score
from hf_axonn_eval.metrics.discoverability import Sampler
from hf_axonn_eval.served.backend import UNKNOWN_SCORES, Backend, alternatives_needed, score_of


logger = get_logger(__name__)

REQUESTS = 8  # under way at once, unless another number is given
_BOUND = max(BOUNDS.values())  # the server does not say what it computes in
_CHECKED = 16  # tokens of the first sample that the server is asked about before all else


def extract_served(
    backend: Backend,
    tokenizer: Any,
    samples: Iterable[Sample],
    *,
    output: str | os.PathLike[str],
    requests: int = REQUESTS,
    generate: bool = True,
    sampler: Sampler | None = None,
    membership: bool = False,
    guesses: bool = False,
    protocol: dict[str, Any] | None = None,
    left_out: dict[str, int] | None = None,
    confidence: float = 0.95,
    progress: bool = True,
) -> Sequence[SampleResult]:
    """Measure every sample.

    The results have the fields of `extract`, with the same meaning. What the server leaves open is None: membership
    scores that need the full distribution, and `sampled_logprob` of a sample where more tokens than are known may
    equal the k-th most likely one. The weights cannot be read, so run.json says that there is no fingerprint; a run
    goes on only if the server still gives the first sample the log-probabilities that were kept.

    Args:
        backend: which answers.
        tokenizer: of the model, for texts; the server's must give the same ids, where it says so.
        samples: as for `extract`.
        output: directory for the run; one that was stopped goes on from there.
        requests: how many are under way at once.
        generate: whether to decode from the first miss on.
        sampler: as for `extract`; top-p and a temperature only together with a top_k.
        membership: whether to compute membership scores, those that log-probabilities give.
        guesses: as for `extract`; one more request for each sample that is not extracted.
        protocol: as for `extract`.
        left_out: as for `extract`.
        confidence: of the intervals in summary.json.
        progress: show a progress bar.
    Returns:
        One result a sample, in the order of the samples, read from the file as they are asked for.
    Raises:
        ValueError: as `extract`; a server that gives too few log-probabilities for the sampler, another tokenizer,
            too short a window, an answer that is none, or no answer.
    """
    samples = samples if isinstance(samples, Sequence) else list(samples)
    if not is_count(requests, least=1):
        raise ValueError(f"requests is {requests!r}, but it must be at least 1.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("a server is asked by one process: run extract without accelerate launch.")
    if guesses and not generate:
        raise ValueError("guesses are greedy continuations: they need generate=True (no --no_generation).")
    check_confidence(confidence)
    order, lengths, largest_id = look_through(samples)
    check_ids(tokenizer, largest_id)
    window, longest = backend.record["max_tokens"], max(map(sum, lengths))
    if window is not None and longest + 1 > window:  # the server decodes one token after what it scores
        raise ValueError(
            f"a sample has {longest} tokens, and the server takes {window - 1} and one more that it decodes "
            "(max_model_len): use shorter prefixes and suffixes, or start it with a longer --max-model-len."
        )
    least, better = alternatives_needed(sampler)
    first = samples[0]
    alternatives = backend.check([*first.prefix, *first.suffix][:_CHECKED], least=least, better=better)
    tokenizer_record = {
        **tokenizer_record_of(tokenizer, samples),
        "server_checked": _same_ids(backend, tokenizer, first),
    }

    asker = _Asker(
        backend=backend,
        tokenizer=tokenizer,
        generate=generate,
        sampler=sampler,
        membership=membership,
        guesses=guesses,
        known=alternatives,
    )
    directory = RunDirectory(output)
    record = _record(
        backend,
        tokenizer_record,
        identity=identity_of(samples, generate=generate, sampler=sampler, membership=membership, guesses=guesses),
        settings={
            "requests": requests,
            "alternatives": alternatives,
            "decoding": "greedy, no stop, no penalties",
            "sampler": vars(sampler) if sampler is not None else None,
            "near_tie_below": _BOUND,
            "membership_unknown": list(UNKNOWN_SCORES) if membership else None,
            "protocol": check_protocol(protocol, asker.facts()),
            "left_out": left_out,
            "confidence": confidence,
        },
    )
    finished = directory.begin(record)
    done = {order[result.sample_id] for result in finished}
    if finished:
        _check_unchanged(asker, samples[order[finished[0].sample_id]], finished[0])
    left = (sample for place, sample in enumerate(samples) if place not in done)
    with tqdm(
        total=len(samples), initial=len(done), unit="sample", dynamic_ncols=True, disable=None if progress else True
    ) as bar:
        for measured in asker.all(left, requests):
            directory.append(measured)
            bar.update(len(measured))

    results = directory.results(order)
    summary = summarize(results, record=read_record(directory.path), confidence=confidence)
    unknown = sum(result.sampled_logprob is None for result in results) if sampler is not None else 0
    if unknown:
        logger.warning(
            "of %d of %d samples the probability under %s is unknown: all %d log-probabilities that the server gives "
            "from the top_k-th on are equal somewhere. Start it with a larger --max-logprobs.",
            unknown,
            len(results),
            sampler.text if sampler is not None else "",
            alternatives,
        )
    vocabulary = len(tokenizer)  # without the padding of the model's, which the server does not tell
    chance = against_chance(summary["all"]["metrics"].get("nll", {}).get("mean"), vocabulary)
    warn_of_chance(chance, vocabulary)
    directory.finish({**summary, "chance": chance, "sampled_unknown": unknown})
    return results


@dataclass(frozen=True, kw_only=True)
class _Asker:
    """Samples to the server, results back; `known` is the number of alternatives."""

    backend: Backend
    tokenizer: Any
    generate: bool
    sampler: Sampler | None
    membership: bool
    guesses: bool
    known: int

    def facts(self) -> dict[str, Any]:
        """As `Runner.facts`; what the server computes in, and what family the model is of, it does not say."""
        return {
            "dtype": None,
            "family": None,
            "generate": self.generate,
            "sampler": vars(self.sampler) if self.sampler is not None else None,
            "stop_early": False,
            "guesses": self.guesses,
            "eos": list(eos_ids(None, self.tokenizer)),
        }

    def one(self, sample: Sample) -> SampleResult:
        """The result of one sample: one request, or up to three."""
        score = self._score(sample, full=self.membership)
        continuation, guessed = None, None
        if self.generate:
            continuation = match_choices(score.choices, sample.suffix, score.leads).known
            missing = len(sample.suffix) - len(continuation)
            if missing:
                continuation += self.backend.generate([*sample.prefix, *continuation], missing)
            if self.guesses:
                same = continuation == list(sample.suffix)
                guess = score if same else self._score(replace(sample, suffix=tuple(continuation)), full=False)
                guessed = sum(guess.logprobs)
        return result_of(
            sample,
            score,
            continuation,
            self.tokenizer,
            bound=_BOUND,
            eos=eos_ids(None, self.tokenizer),
            generated_logprob=guessed,
        )

    def logprobs(self, sample: Sample) -> list[float]:
        """Of the suffix, in nats: one request."""
        return self._score(sample, full=False).logprobs

    def _score(self, sample: Sample, *, full: bool) -> Score:
        tokens = [*sample.prefix, *sample.suffix]
        return score_of(
            sample,
            self.backend.score(tokens, last=len(tokens) - 1 if full else len(sample.suffix), alternatives=self.known),
            sampler=self.sampler,
            alternatives=self.known,
            tokenizer=self.tokenizer if full else None,
        )

    def all(self, samples: Iterator[Sample], requests: int) -> Iterator[list[SampleResult]]:
        """Yield results as they come, in any order.

        After an error no more samples are sent; what was under way and came back is yielded before it is raised.
        """
        failed: BaseException | None = None
        with ThreadPoolExecutor(requests, thread_name_prefix="served") as pool:
            under_way: set[Future[SampleResult]] = set()
            try:
                while True:
                    while failed is None and len(under_way) < 2 * requests and (sample := next(samples, None)):
                        under_way.add(pool.submit(self.one, sample))
                    if not under_way:
                        break
                    came, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                    errors = [error for future in came if (error := future.exception()) is not None]
                    if errors and failed is None:
                        failed = errors[0]
                        self.backend.stop()
                        for future in list(under_way):
                            if future.cancel():
                                under_way.remove(future)
                    if measured := [future.result() for future in came if future.exception() is None]:
                        yield measured
            finally:
                if under_way:  # whoever read the results has stopped
                    self.backend.stop()
                    pool.shutdown(wait=False, cancel_futures=True)
        if failed is not None:
            raise failed


def _record(
    backend: Backend, tokenizer_record: dict[str, Any], *, identity: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """The content of run.json."""
    served = dict(backend.record)
    no_fingerprint = f"unknown: {served['name']} as {served['base_url']} serves it; a server does not show its weights"
    start = this_start()
    if served["server"] is not None:
        start["versions"]["server"] = served["server"]
    return {
        "identity": {
            **identity,
            "served": {key: value for key, value in served.items() if key != "max_tokens"},
            "model_fingerprint": no_fingerprint,
            "base_fingerprint": None,
            "dtype": "unknown: the server's",
            "attn_implementation": None,
            "tokenizer_sha256": tokenizer_record["sha256"],
        },
        "access": "log-probabilities and texts of a server",
        "model": {"path": f"{served['name']} at {served['base_url']}", "fingerprint": no_fingerprint, **served},
        "tokenizer": tokenizer_record,
        "settings": settings,
        "precision": None,
        "processes": 1,
        "grid": None,
        "device": {"type": "a server's"},
        **start,
    }


def _same_ids(backend: Backend, tokenizer: Any, sample: Sample) -> bool:
    """Whether the server's tokenizer gives the ids of the one here; not, if it does not say.

    Raises:
        ValueError: it gives others.
    """
    text = tokenizer.decode([*sample.prefix, *sample.suffix], skip_special_tokens=True)
    theirs = backend.encode(text)
    if theirs is None:
        return False
    mine = tokenizer.encode(text, add_special_tokens=False)
    if mine != theirs:
        place = next((at for at, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None)
        place = min(len(mine), len(theirs)) if place is None else place
        raise ValueError(
            f"the server's tokenizer is another one: of the text of sample {sample.sample_id!r} it makes "
            f"{len(theirs)} ids and the tokenizer here ({getattr(tokenizer, 'name_or_path', '')}) {len(mine)}, which "
            f"differ from place {place} on ({mine[place : place + 3]} here, {theirs[place : place + 3]} there). The "
            "samples' ids are other words to the model: name its tokenizer with --tokenizer, and write the samples "
            "with that one."
        )
    return True


def _check_unchanged(asker: _Asker, sample: Sample, kept: SampleResult) -> None:
    """Raise unless the server still says of a sample what it said when the run began.

    Raises:
        ValueError: a log-probability is further away than batches or rounding in 16 bits move it.
    """
    pairs = zip(asker.logprobs(sample), kept.logprobs or (), strict=True)
    away = max((abs(one - other) for one, other in pairs if one != other), default=0.0)  # -inf may equal -inf
    if away > _BOUND:
        raise ValueError(
            f"the server gives sample {sample.sample_id!r} a log-probability that is {away:.3g} nats from the one "
            f"that was kept (at most {_BOUND} is rounding): it serves another model now. Name another output "
            "directory."
        )
