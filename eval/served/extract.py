"""Ask a model that a server holds for its training data, and keep the answers where `extract` keeps them.

One request a sample gives what the teacher-forced pass gives; a second one, for a sample that is not extracted,
decodes from the first miss on. Requests are under way side by side, and the answers are written before more are sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from hf_axonn.compat.messages import get_logger
from hf_axonn_eval.data.access import TEXT, access_of_server
from hf_axonn_eval.data.jsonl import is_count
from hf_axonn_eval.data.results import SampleResult
from hf_axonn_eval.data.samples import Sample
from hf_axonn_eval.extraction.options import Options
from hf_axonn_eval.extraction.prefix_matching import match_choices
from hf_axonn_eval.extraction.recite import Recital, Written
from hf_axonn_eval.extraction.reciter import match_of
from hf_axonn_eval.extraction.run import Asker, Survey, run, survey_samples
from hf_axonn_eval.extraction.runner import eos_ids, result_of
from hf_axonn_eval.extraction.scoring import BOUNDS, Score
from hf_axonn_eval.extraction.work_split import WorkSplit
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
    **options: Any,
) -> Sequence[SampleResult]:
    """Measure every sample.

    The results have the fields of `extract`, with the same meaning. What the server leaves open is None: membership
    scores that need the full distribution, and `sampled_logprob` of a sample where more tokens than are known may
    equal the k-th most likely one. The weights cannot be read, so run.json says that there is no fingerprint; a run
    is resumed only if the server still gives the first sample the log-probabilities that were kept.

    Args:
        backend: the server.
        tokenizer: of the model, for texts; the server's must give the same ids, where it says so.
        samples: as for `extract`.
        output: directory for the run; one that was stopped is resumed.
        requests: how many are under way at once.
        options: `generate`, `sampler` (top-p and a temperature only together with a top_k), `membership` (the scores
            that log-probabilities give), `recite` (greedily, a request a step), `guesses` (one more request for each
            sample that is not extracted), `protocol`, `left_out`, `confidence` and `progress` of `extract`; not
            `stop_early` and `near_copies`.
    Returns:
        One result a sample, in the order of the samples, read from the file as they are asked for.
    Raises:
        ValueError: as `extract`; a server that gives too few log-probabilities for the sampler, another tokenizer,
            too short a window, an answer that is none, or no answer.
    """
    if not is_count(requests, least=1):
        raise ValueError(f"requests is {requests!r}, but it must be at least 1.")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("a server is asked by one process: run extract without accelerate launch.")
    recital: Recital | None = options.get("recite")
    if recital is not None and recital.beams > 1:
        raise ValueError(f"a server decodes greedily, so {recital.beams} beams are not possible: leave beams out.")
    for name in ("stop_early", "near_copies"):
        if options.get(name):
            raise ValueError(
                f"{name} does not go with a server, which scores a full suffix in one request, while a search would "
                "be hundreds of them: leave it out, or load the model here."
            )
    checked = Options(output=output, **options)
    survey = survey_samples(samples)
    window = backend.record["max_tokens"]
    if recital is not None and window is not None and min(survey.longest, recital.context) > window:
        raise ValueError(
            f"the context is {recital.context} tokens, and the server takes {window} (max_model_len): recite with "
            f"context={window}."
        )
    if (
        recital is None and window is not None and survey.longest + 1 > window
    ):  # the server decodes one token after what it scores
        raise ValueError(
            f"a sample has {survey.longest} tokens, and the server takes {window - 1} and one more that it decodes "
            "(max_model_len): use shorter prefixes and suffixes, or start it with a longer --max-model-len."
        )
    return run(_Asker(backend=backend, tokenizer=tokenizer, options=checked, requests=requests), survey)


@dataclass(kw_only=True)
class _Asker(Asker):
    """Asks a server, `requests` at a time."""

    backend: Backend
    tokenizer: Any
    options: Options
    requests: int
    work_split: WorkSplit = field(default_factory=WorkSplit)
    lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.vocabulary = len(self.tokenizer)  # without the padding of the model's, which the server does not tell
        self.eos = eos_ids(None, self.tokenizer)

    @contextmanager
    def prepare(self, survey: Survey) -> Iterator[None]:
        """Ask how many `alternatives` of a token the server gives, and whether it has the same tokenizer."""
        least, better = alternatives_needed(self.options.sampler)
        first = survey.samples[0]
        self.alternatives = 0
        self.kept, self.written = Written(self.options.output), {}
        if self.options.recite is not None:
            self.written = self.kept.read()
            self.same_ids = _same_ids(self.backend, self.tokenizer, first)
            yield
            return
        self.alternatives = self.backend.check([*first.prefix, *first.suffix][:_CHECKED], least=least, better=better)
        self.same_ids = _same_ids(self.backend, self.tokenizer, first)
        yield

    def facts(self) -> dict[str, Any]:
        unknown = dict.fromkeys(("dtype", "family"))  # the server tells neither
        return {**unknown, "eos": list(self.eos)}

    def describe(self) -> dict[str, Any]:
        served = dict(self.backend.record)
        name = f"{served['name']} as {served['base_url']} serves it"
        no_fingerprint = f"unknown: {name}; a server does not show its weights"
        return {
            "identity": {
                "served": {key: value for key, value in served.items() if key != "max_tokens"},
                "model_fingerprint": no_fingerprint,
                "base_fingerprint": None,
                "dtype": "unknown: the server's",
                "attn_implementation": None,
            },
            "access": access_of_server(self.alternatives, self.vocabulary) if self.alternatives else TEXT,
            "model": {"path": f"{served['name']} at {served['base_url']}", "fingerprint": no_fingerprint, **served},
            "tokenizer": {"server_checked": self.same_ids},
            "settings": {
                "requests": self.requests,
                "alternatives": self.alternatives or None,
                **self.options.decoding(),
                "near_tie_below": _BOUND if self.alternatives else None,
                "membership_unknown": list(UNKNOWN_SCORES) if self.options.membership else None,
            },
            "precision": None,
            "processes": 1,
            "grid": None,
            "device": {"type": "a server's"},
            "versions": {"server": served["server"]} if served["server"] is not None else {},
        }

    def check_resumed(self, sample: Sample, kept: SampleResult) -> None:
        """Raise unless the server still gives a sample the log-probabilities that were kept; a recital has none.

        Raises:
            ValueError: one is further away than batches or rounding in 16 bits move it.
        """
        if not self.alternatives:
            return
        pairs = zip(self._score(sample, full=False).logprobs, kept.logprobs or (), strict=True)
        away = max((abs(one - other) for one, other in pairs if one != other), default=0.0)  # -inf may equal -inf
        if away > _BOUND:
            raise ValueError(
                f"the server gives sample {sample.sample_id!r} a log-probability that is {away:.3g} nats from the one "
                f"that was kept (at most {_BOUND} is rounding): it serves another model now. Name another output "
                "directory."
            )

    def conclude(self, results: Sequence[SampleResult]) -> dict[str, Any]:
        """Return the number of samples whose probability under the sampler is unknown, and warn of them."""
        sampler = self.options.sampler
        unknown = sum(result.sampled_logprob is None for result in results) if sampler is not None else 0
        if unknown:
            logger.warning(
                "of %d of %d samples the probability under %s is unknown: all %d log-probabilities that the server "
                "gives from the top_k-th on are equal somewhere. Start it with a larger --max-logprobs.",
                unknown,
                len(results),
                sampler.text if sampler is not None else "",
                self.alternatives,
            )
        return {"sampled_unknown": unknown}

    def _measure_one(self, sample: Sample) -> SampleResult:
        """Measure a sample with one request, or up to three."""
        if self.options.recite is not None:
            return self._recite(sample, self.options.recite)
        score = self._score(sample, full=self.options.membership)
        continuation, guessed = None, None
        if self.options.generate:
            continuation = match_choices(score.choices, sample.suffix, score.leads).known
            missing = len(sample.suffix) - len(continuation)
            if missing:
                continuation += self.backend.generate([*sample.prefix, *continuation], missing)
            if self.options.guesses:
                same = continuation == list(sample.suffix)
                guess = score if same else self._score(replace(sample, suffix=tuple(continuation)), full=False)
                guessed = sum(guess.logprobs)
        return result_of(
            sample,
            score,
            continuation,
            self.tokenizer,
            bound=_BOUND,
            eos=self.eos,
            generated_logprob=guessed,
        )

    def _recite(self, sample: Sample, recital: Recital) -> SampleResult:
        """Let the server write a document, a request a step."""
        written = list(self.written.get(sample.sample_id, ()))
        while size := recital.next_step(sample, written):
            new = self.backend.generate(recital.prompt(sample, written), size)
            written += new
            with self.lock:
                self.kept.append([(sample.sample_id, new)])
        match = match_of(sample, written)
        return result_of(sample, match, written, self.tokenizer, bound=_BOUND, eos=self.eos)

    def _score(self, sample: Sample, *, full: bool) -> Score:
        tokens = [*sample.prefix, *sample.suffix]
        last = len(tokens) - 1 if full else len(sample.suffix)
        return score_of(
            sample,
            self.backend.score(tokens, last=last, alternatives=self.alternatives),
            sampler=self.options.sampler,
            alternatives=self.alternatives,
            tokenizer=self.tokenizer if full else None,
        )

    def measure(self, samples: Sequence[Sample], done: set[int]) -> Iterator[list[SampleResult]]:
        """Yield results as they come, in any order.

        After an error no more samples are sent; what was under way and came back is yielded before it is raised.
        """
        left = (sample for place, sample in enumerate(samples) if place not in done)
        failed: BaseException | None = None
        with ThreadPoolExecutor(self.requests, thread_name_prefix="served") as pool:
            under_way: set[Future[SampleResult]] = set()
            try:
                while True:
                    while failed is None and len(under_way) < 2 * self.requests and (sample := next(left, None)):
                        under_way.add(pool.submit(self._measure_one, sample))
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
                    if results := [future.result() for future in came if future.exception() is None]:
                        yield results
            finally:
                if under_way:  # the reader of the results has stopped
                    self.backend.stop()
                    pool.shutdown(wait=False, cancel_futures=True)
        if failed is not None:
            raise failed


def _same_ids(backend: Backend, tokenizer: Any, sample: Sample) -> bool:
    """Return whether the server's tokenizer gives the ids of the one here; False if the server does not tell.

    Raises:
        ValueError: it gives others.
    """
    text = tokenizer.decode([*sample.prefix, *sample.suffix], skip_special_tokens=True)
    theirs = backend.encode(text)
    if theirs is None:
        return False
    ids = tokenizer.encode(text, add_special_tokens=False)
    if ids != theirs:
        place = next((at for at, pair in enumerate(zip(ids, theirs, strict=False)) if pair[0] != pair[1]), None)
        place = min(len(ids), len(theirs)) if place is None else place
        raise ValueError(
            f"the server's tokenizer is another one: of the text of sample {sample.sample_id!r} it makes "
            f"{len(theirs)} ids and the tokenizer here ({getattr(tokenizer, 'name_or_path', '')}) {len(ids)}, which "
            f"differ from place {place} on ({ids[place : place + 3]} here, {theirs[place : place + 3]} there). The "
            "samples' ids are other words to the model: name its tokenizer with --tokenizer, and write the samples "
            "with that one."
        )
    return True
