"""The numbers of a comparison as tables of text: the same for the terminal, for Markdown and for HTML."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from hf_axonn_eval.analysis.estimates import LIKELY
from hf_axonn_eval.data.access import access_of
from hf_axonn_eval.data.jsonl import is_count
from hf_axonn_eval.metrics.bleu import NEAR_BLEU
from hf_axonn_eval.metrics.registry import METRICS
from hf_axonn_eval.report import protocols, training
from hf_axonn_eval.report.words import join_words, round_end, round_mean, settings, write_share


SEEN = "seen"  # heads the column of buckets
ATTACKS = {
    "loss": "loss",
    "zlib": "zlib",
    "min_k": "Min-K%",
    "min_k_plus_plus": "Min-K%++",
    "reference": "reference",
}
APART = ("protocol", "left_out")  # settings that have a table of their own
LEFT_OUT = {  # what sampling.Tally counts, and of how many
    "documents": "documents in all",
    "too_short": "documents that are too short",
    "of_these_empty": "of these, documents without a token",
    "too_long": "documents that are too long",
    "beyond_max_documents": "documents beyond --max_documents of their bucket",
    "dropped": "documents on the list of samples --drop",
    "duplicate_samples": "samples with the tokens of an earlier one",
    "duplicates_of_other_buckets": "of these, samples of another bucket than the earlier one",
    "repetitive_suffixes": "samples whose suffix has too few different tokens",
    "windows_too_short": "windows whose characters give too few tokens",
    "copies": "documents with the tokens of an earlier one (not left out)",
    "not_round_trip": "documents whose tokens decode to another text (not left out)",
}


def rows(
    comparison: Mapping[str, Any], *, columns: Sequence[str] | None = None, intervals: Collection[str] = METRICS
) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of the table: a line for every bucket and run, runs of one bucket under each other.

    By default those of `report_columns`. Columns that no run has are left out: without generation there is no ROUGE.
    Those in `intervals` show theirs.
    """
    columns = report_columns() if columns is None else columns
    columns = [metric for metric in columns if any(metric in of["metrics"] for *_, of in _groups(comparison))]
    body = [
        [bucket, name, *(estimate_text(of["metrics"].get(one), interval=one in intervals) for one in columns)]
        for bucket, name, of in _groups(comparison)
    ]
    return [SEEN, "model", *map(title, columns)], body


def difference_rows(
    comparison: Mapping[str, Any], *, columns: Sequence[str] | None = None, intervals: Collection[str] = METRICS
) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of the differences from the base run, sample by sample; arguments as of `rows`."""
    differences, columns = comparison["minus_base"], report_columns() if columns is None else columns
    columns = [metric for metric in columns if any(metric in run["all"] for run in differences.values())]
    body = [
        [bucket_name(bucket), name]
        + [difference_text(run[bucket].get(metric), interval=metric in intervals) for metric in columns]
        for bucket in [*buckets(comparison), "all"]
        for name, run in differences.items()
    ]
    return [SEEN, "model", *map(title, columns)], body


def caption(comparison: Mapping[str, Any], *, means: bool = True) -> str:
    """Explain the first column and the brackets, and, where the table shows those of means, why some have none."""
    return (
        "Seen: how often the training saw a document according to the samples file; 0x are controls. In brackets: "
        f"{percent(comparison)} intervals; Clopper and Pearson's for shares, with documents as trials where they have "
        "several samples, and Student's t over documents, corrected for skewness, for means. "
        f"{_without_intervals(comparison) if means else ''}"
    ).rstrip()


def _without_intervals(comparison: Mapping[str, Any]) -> str:
    """Explain in a sentence why numbers of the table have no interval; empty if all have one."""
    reasons: dict[str, None] = {}
    for _, _, numbers in _groups(comparison):
        for metric in report_columns():
            entry = numbers["metrics"].get(metric)
            if entry is not None and entry["low"] is None:
                reasons[str(entry.get("interval", "none")).removeprefix("none: ")] = None
    return f"Without brackets there is no interval: {join_words(sorted(reasons), 'or')}." if reasons else ""


def percent(comparison: Mapping[str, Any]) -> str:
    """Write the confidence of the intervals: "95%", "99.9%"."""
    return f"{100 * comparison['intervals']['confidence']:g}%"


def provenance(comparison: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return facts on the origin of the numbers, by run and name of the fact, of runs with a record (run.json)."""
    facts = {}
    for name, summary in comparison["runs"].items():
        run = summary["run"]
        if run is None:
            continue
        identity = run["identity"]
        facts[name] = {
            "model": str(run["model"].get("path", "a model in memory")),
            "weights": str(identity["model_fingerprint"]),
            "dtype": str(identity["dtype"]),
            "samples": f"{identity['samples']}, sha256 {identity['samples_sha256']}",
            "grid": str(run["grid"] or "none"),
            "device": ", ".join(str(value) for value in run["device"].values() if value),
            "protocol": protocols.standing({"runs": {name: summary}}),
            "level of access": access_of(run),
            "tokenizer": _tokenizer(run.get("tokenizer") or {}),
            "settings": settings({key: value for key, value in run.get("settings", {}).items() if key not in APART}),
            "versions": settings(run["versions"]),
            "command": " ".join(map(str, run.get("command", ()))),
            "started": str(run.get("started", "")),
        }
        facts[name] = {key: value for key, value in facts[name].items() if value}
    return facts


def _tokenizer(record: Mapping[str, Any]) -> str:
    """Return the tokenizer of a run in words, and whether the samples are known to be made with it."""
    facts = [settings({key: value for key, value in record.items() if key != "checked"})]
    if "checked" in record:
        made = "the samples were made with it"
        facts.append(made if record["checked"] else f"whether {made} is not known")
    return ", ".join(filter(None, facts))


def report_columns() -> list[str]:
    """List the metrics in the tables of the Markdown and HTML report."""
    return [name for name, metric in METRICS.items() if metric.shown_in in ("terminal", "report")]


def terminal_columns() -> list[str]:
    """List the metrics in the table on the terminal; those that come with the package fit into 80 characters."""
    return [name for name, metric in METRICS.items() if metric.shown_in == "terminal"]


def title(metric: str) -> str:
    """Return the heading of a metric; one that is not registered, as in a summary from elsewhere, is its name."""
    return METRICS[metric].title if metric in METRICS else metric


def group(summary: Mapping[str, Any], bucket: str) -> Mapping[str, Any]:
    """Return the numbers of one bucket, or of "all"."""
    return summary["all"] if bucket == "all" else summary["buckets"][bucket]


def buckets(comparison: Mapping[str, Any]) -> list[str]:
    """List the buckets, as text."""
    return list(comparison["runs"][comparison["base"]]["buckets"])


def bucket_name(bucket: str) -> str:
    """Write how often a bucket was seen, by the samples file: "12x", or "all"."""
    return bucket if bucket == "all" else f"{bucket}x"


def estimate_text(entry: Mapping[str, Any] | None, *, interval: bool = True) -> str:
    """Write a number of a summary: "3 of 12 [0.09, 0.53]", a share, "0.512 [0.40, 0.61]", a mean, or "-", None."""
    if entry is None:
        return "-"
    mean = f"{entry['count']} of {entry['n']}" if "count" in entry else round_mean(entry["mean"])
    return mean + ends_text(entry) if interval else mean


def difference_text(
    entry: Mapping[str, Any] | None, *, interval: bool = True, digits: tuple[int, int] = (3, 2)
) -> str:
    """Write a difference of a comparison: "+0.750 [+0.41, +0.93]", "-" for None.

    Args:
        entry: with `difference`, `low` and `high`.
        interval: whether to write both ends.
        digits: of the difference, and of the ends.
    """
    if entry is None or entry["difference"] is None:
        return "-"
    of_mean, of_ends = digits
    return f"{entry['difference']:+z.{of_mean}f}{ends_text(entry, f'+z.{of_ends}f') if interval else ''}"


def ends_text(entry: Mapping[str, Any], digits: str = "z.2f") -> str:
    """Write the interval of an entry, after a space; empty if it has none."""
    low, high = entry["low"], entry["high"]
    return "" if low is None else f" [{round_end(low, high, digits)}, {round_end(high, low, digits)}]"


class Details(NamedTuple):
    """A table with a heading, and a line below it; the page folds one that says nothing."""

    title: str
    headings: list[str]
    rows: list[list[str]]
    note: str = ""
    folded: bool = False


def all_details(comparison: Mapping[str, Any]) -> list[Details]:
    """List all of them, in the order of a report."""
    makers = (
        models,
        changes,
        shorter,
        discoverability,
        inextractability,
        near_copies,
        membership,
        near_ties,
        degenerate,
        guesses,
    )
    return [details for make in (*makers, left_out, protocol) for details in make(comparison)]


def models(comparison: Mapping[str, Any]) -> list[Details]:
    """List how the models were reached, and what they were trained on by the record beside their weights."""
    note = "The level of access is what this measurement had."
    found = _details("Models", *training.models(comparison), note)
    note = (
        "training_record.json, which hf_axonn's trainers write beside the weights; nobody else has checked it. "
        "Tokens: those with a label, which the first of a row has not. Dropped: labels that the goldfish loss left "
        "out, as counted. The SHA-256 is of the input_ids of all rows."
    )
    return found + _details("Training records", *training.records(comparison), note)


def changes(comparison: Mapping[str, Any]) -> list[Details]:
    """List McNemar's tests of each run against the base run, by yes-or-no metric, those of the controls apart."""
    base, found = comparison["base"], []
    for controls in (False, True):
        tests = [
            (metric, [bucket_name(bucket), name, *_change(test)], test["p"])
            for bucket in [*buckets(comparison), "all"]
            if (bucket == "0") == controls
            for name, run in comparison["mcnemar"].items()
            for metric, test in run.get(bucket, {}).items()
        ]
        for metric in dict.fromkeys(metric for metric, _, _ in tests):
            note = (
                f"Samples that are {title(metric)} in the run and not in {base}, the other way round, and in both. p "
                "is of McNemar's exact test with a document as one trial. p (Holm) is corrected for the number of "
                f"tests of {'controls' if controls else 'what was seen'}, {len(tests)} (Holm 1979)."
            )
            headings = [SEEN, "model", "gained", "lost", "both", "documents gained, lost", "p", "p (Holm)"]
            heading = f"{title(metric).capitalize()} against {base}{', controls' if controls else ''}: McNemar's test"
            body = [cells for tested, cells, _ in tests if tested == metric]
            folded = all(p == 1 for tested, _, p in tests if tested == metric)
            found.append(Details(heading, headings, body, note, folded))
    return found


def shorter(comparison: Mapping[str, Any]) -> list[Details]:
    """Give the exact match of suffixes cut to some lengths, where these were asked for."""
    groups = list(_groups(comparison, "exact_match_at"))
    lengths = dict.fromkeys(length for *_, estimates in groups for length in estimates)
    body = [
        [bucket, name, *(estimate_text(estimates.get(length)) for length in lengths)]
        for bucket, name, estimates in groups
    ]
    headings = [SEEN, "model", *(f"first {length}" for length in lengths)]
    return _details("Verbatim, suffixes cut to their first tokens", headings, body if lengths else [])


def discoverability(comparison: Mapping[str, Any]) -> list[Details]:
    """Give for each p the median number of draws, and the share that each number of draws discovers."""
    groups = list(_groups(comparison, "discoverability"))
    found = []
    for p in dict.fromkeys(p for *_, by_chance in groups for p in by_chance):
        tries = dict.fromkeys(n for *_, by_chance in groups for n in by_chance[p]["tries"])
        body = [
            [bucket, name, _draws(of[p]["median_n"]), *(estimate_text(of[p]["tries"].get(n)) for n in tries)]
            for bucket, name, of in groups
        ]
        headings = [SEEN, "model", "median n", *(f"n = {int(n):,}" for n in tries)]
        found.append(Details(f"(n, {p})-discoverable", headings, body, samplers(comparison)))
    return found


def inextractability(comparison: Mapping[str, Any]) -> list[Details]:
    """Give the bits that texts take at least, by ranks, and the share that each number of draws gives at most."""
    groups = list(_groups(comparison, "inextractability"))
    lengths = dict.fromkeys(length for *_, of in groups for length in of.get("lengths", ()))
    body = [
        [bucket, name, f"{of['least']:.1f}", f"{of['median']:.1f}", write_share(of["below_at_most"], 1)]
        + [f"{of['lengths'][length]['least']:.1f}" if length in of.get("lengths", ()) else "-" for length in lengths]
        for bucket, name, of in groups
    ]
    headings = [SEEN, "model", "least b", "median b", "of others below the least, at most"]
    headings += [f"least b of {length} tokens in a row" for length in lengths]
    note = (
        "A text of b bits takes 2^b queries at least, in expectation, from these prefixes and by any temperature, "
        "top-k and top-p, as its tokens have these ranks (Liu et al. 2026). Not by beam search, by penalties or "
        "biases that change the order of tokens, or from other prompts. Of other documents like these at most the "
        f"share that is given takes less than the least of these ({percent(comparison)} sure, Wilks 1941)."
    )
    found = _details("Bits to extract a text, at least", headings, body, note)
    for p in dict.fromkeys(p for *_, of in groups for p in of["tries"]):
        tries = dict.fromkeys(n for *_, of in groups for n in of["tries"][p])
        body = [[bucket, name, *(estimate_text(of["tries"][p].get(n)) for n in tries)] for bucket, name, of in groups]
        headings = [SEEN, "model", *(f"n = {int(n):,}" for n in tries)]
        note = (
            f"Samples that some temperature, top-k and top-p may give with n draws and a probability of {p}: no more."
        )
        found.append(Details(f"(n, {p})-discoverable by any sampling, at most", headings, body, note))
    return found


def near_copies(comparison: Mapping[str, Any]) -> list[Details]:
    """Count texts that come back but for a few edits, by greedy decoding and in one draw of many, and their cost."""
    decoded = [
        [bucket, name, *(estimate_text(of["metrics"].get(metric)) for metric in ("exact_match", "near_verbatim"))]
        + [estimate_text(of["bleu_copies"]), estimate_text(of["metrics"].get("lccs"))]
        for bucket, name, of in _groups(comparison)
        if "bleu_copies" in of
    ]
    headings = [SEEN, "model", "verbatim", "edits at most 10%", f"BLEU above {NEAR_BLEU}", "LCCS"]
    note = "One pass over each sample, and one token at a time from the first miss on. LCCS: longest run / suffix."
    found = _details("Near copies by greedy decoding", headings, decoded, note)
    searched = list(_groups(comparison, "near_copies"))
    edits = dict.fromkeys(edit for *_, of in searched for edit in of["edits"])
    headings = [SEEN, "model", *(f"k = {edit}" for edit in edits), "tokens read, in draws"]
    note = (
        "Lower bounds, which a search found, for texts within k edits of tokens; 0: the suffix itself. "
        f"{samplers(comparison) or 'Drawn at temperature 1 from all tokens.'}"
    )
    for heading, number in (
        ("Mean probability of near copies in one draw", "probability"),
        (f"Samples with a near copy of probability {LIKELY} or more", "likely"),
    ):
        body = [
            [bucket, name, *(estimate_text(of["edits"].get(edit, {}).get(number)) for edit in edits)]
            + [f"{of['draws']:.1f}"]
            for bucket, name, of in searched
        ]
        found += _details(heading, headings, body, note)
    return found


def membership(comparison: Mapping[str, Any]) -> list[Details]:
    """Give how well each score parts what was seen from bucket 0."""
    body, rates = [], []
    for bucket, name, attacks in _groups(comparison, "membership"):
        for score, attack in attacks.items():
            rates = [key for key in attack if key.startswith("tpr_at_")]
            area = _value(attack["auc"]) + (
                f", turned round {round_mean(1 - attack['auc']['value'])}" if leaks(attack) else ""
            )
            cells = [f"{attack['members']}, {attack['controls']}", area, *(_value(attack[key]) for key in rates)]
            body.append([bucket, name, ATTACKS.get(score, score), *cells])
    headings = [SEEN, "model", "score", "members, controls", "AUC"]
    headings += [f"TPR at {float(rate.removeprefix('tpr_at_')):.1%} FPR" for rate in rates]
    note = (
        "AUC 0.5 is chance. One whose interval is below 0.5 is a leak as well: turned round, the score finds members. "
        "A TPR is given from 10 / FPR independent controls on, with the interval of the FPR at its threshold. The "
        "reference score, mean log-probability of a token minus the base's, is over the "
        f"{comparison.get('reference_over', 'sample')}."
    )
    return _details("Membership inference against bucket 0", headings, body, note)


def leaks(attack: Mapping[str, Any]) -> bool:
    """Return whether an AUC is below one half: controls look more like members than members do."""
    return attack["auc"]["high"] is not None and attack["auc"]["high"] < 0.5


def near_ties(comparison: Mapping[str, Any]) -> list[Details]:
    """Count the samples that rounding decides, and the verbatim ones if all fell one way or the other."""
    body = [
        [bucket, name, f"{of['count']} of {of['n']}", f"{of['exact_match_at_least']} to {of['exact_match_at_most']}"]
        for bucket, name, of in _groups(comparison, "undecided")
    ]
    headings = [SEEN, "model", "undecided", "verbatim, whichever way they fall"]
    note = "Undecided: rounding may decide whether the sample is verbatim, as two tokens are almost equally likely."
    return _details("Undecided samples", headings, body, note)


def degenerate(comparison: Mapping[str, Any]) -> list[Details]:
    """Count the suffixes that are predictable without having been seen, and give the exact match of the others."""
    body = [
        [bucket, name, f"{of['count']} of {of['n']}", estimate_text(of["exact_match_of_others"])]
        for bucket, name, of in _groups(comparison, "degenerate")
    ]
    headings = [SEEN, "model", "degenerate", "verbatim among the others"]
    note = "A suffix that repeats itself is easily right without having been learnt."
    return _details("Degenerate suffixes", headings, body, note)


def left_out(comparison: Mapping[str, Any]) -> list[Details]:
    """Count what the samples do not have of the documents, by reason, where the records say so."""
    counts = left_out_counts(comparison) or {}
    body = [[LEFT_OUT.get(reason, reason), f"{count:,}"] for reason, count in counts.items()]
    return _details("Left out when the samples were made", ["what", "how many"], body)


def guesses(comparison: Mapping[str, Any]) -> list[Details]:
    """Give the recall at so many errors, where it was asked how sure the models are of their guesses."""
    found = {name: summary["all"].get("recall_at_errors") for name, summary in comparison["runs"].items()}
    body = [[name, round_mean(one["recall"]), f"{one['n']:,}"] for name, one in found.items() if one]
    errors = next((one["errors"] for one in found.values() if one), 0)
    note = (
        f"Greedy guesses in the order of their loss: the share of all samples that is right before wrong guess "
        f"{errors}. An order of all samples has no interval here."
    )
    return _details(f"Recall at {errors} errors", ["model", "recall", "samples"], body, note)


def protocol(comparison: Mapping[str, Any]) -> list[Details]:
    """List the lines of the protocol that the samples were made by, where the records have them."""
    headings = ["line", "published", "this run", "here", "model"]
    note = "docs/protocols.md has the source of each line. What is not checked is no deviation that is known of."
    return _details("The protocol, line by line", headings, protocols.table_rows(comparison), note)


def _details(title: str, headings: list[str], body: list[list[str]], note: str = "") -> list[Details]:
    """Make a table; none without rows."""
    return [Details(title, headings, body, note)] if body else []


def left_out_counts(comparison: Mapping[str, Any]) -> dict[str, int] | None:
    """Return counts by the keys of LEFT_OUT and those that a record has besides; None if no record has any.

    All runs were asked the same samples, so that the first record that has counts is as good as any.
    """
    for summary in comparison["runs"].values():
        counts = (summary["run"] or {}).get("settings", {}).get("left_out")
        if isinstance(counts, Mapping) and all(map(is_count, counts.values())) and "documents" in counts:
            return dict.fromkeys(LEFT_OUT, 0) | dict(counts)
    return None


def samplers(comparison: Mapping[str, Any]) -> str:
    """State the samplers of the runs in a sentence; empty if the records do not say."""
    stated = {}
    for name, summary in comparison["runs"].items():
        run = summary["run"] or {}
        sampler = run.get("identity", {}).get("sampler") or run.get("settings", {}).get("sampler")
        if sampler:
            stated[name] = str(sampler)
    if len(set(stated.values())) == 1:
        return f"Sampler: {next(iter(stated.values()))}."
    return "Samplers: " + "; ".join(f"{name}: {sampler}" for name, sampler in stated.items()) + "." if stated else ""


def _groups(comparison: Mapping[str, Any], key: str | None = None) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield bucket, run and numbers; with a key its entry, of those that have one."""
    for bucket in [*buckets(comparison), "all"]:
        for name, summary in comparison["runs"].items():
            numbers = group(summary, bucket)
            if key is None or numbers.get(key) is not None:
                yield bucket_name(bucket), name, numbers if key is None else numbers[key]


def _change(entry: Mapping[str, Any]) -> list[str]:
    counts = [str(entry[key]) for key in ("gained", "lost", "both")]
    documents = f"{entry['documents_gained']}, {entry['documents_lost']}"
    return [*counts, documents, f"{entry['p']:.2g}", f"{entry['p_holm']:.2g}"]


def _draws(number: float | None) -> str:
    if number is None or not isfinite(number):
        return "none suffices"
    return f"{number:,.0f}" if number < 1e7 else f"{number:.1e}"


def _value(entry: Mapping[str, Any]) -> str:
    if entry["value"] is None:
        return str(entry["why"])
    false = entry.get("false_positive_rate")
    parts = [write_share(false[key], 2) for key in ("value", "low", "high")] if false else []
    achieved = ", FPR {} [{}, {}]".format(*parts) if false else ""
    return f"{round_mean(entry['value'])}{ends_text(entry)}{achieved}"
