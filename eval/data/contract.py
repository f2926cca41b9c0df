"""Lines of a published protocol, and the check of a run against them.

A protocol is a file, published/NAME.toml. Each of its lines says what was published and where that is written, and how
it is checked here:

sampling     settings of `Sampling`; met if the samples were cut with these
extract      arguments of `extract`; met if the run was made with these
require      what must be found in the samples or in the run, by the names in CHECKS
differs      what this package does in place of it: never met
unchecked    why it cannot be checked: what happened in training, say; `sampling` beside it is what is done here

A run is "as published" if every line that can be checked is met. Some facts are known when the samples are cut, some
when a model is asked, and some when it has answered; a line whose facts are not known yet is "open".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hf_axonn_eval.data.windows import Sampling


MET, DEVIATION, UNCHECKED, OPEN = "met", "deviation", "not checked", "open"
BY_RESULTS = ("eos_generated",)  # facts that are known when all samples are answered

Facts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a protocol.

    Args:
        what: its subject, such as "suffix".
        published: what was done, in words.
        source: where that is written: section of a paper, path in a repository at a commit.
        ours: metrics of this package that are the published number.
        sampling, extract, require, differs, unchecked: how it is checked; see above.
    Raises:
        ValueError: it does not say how it is checked, or in ways that exclude each other.
    """

    what: str
    published: str
    source: str
    ours: Sequence[str] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    extract: Mapping[str, Any] = field(default_factory=dict)
    require: Mapping[str, Any] = field(default_factory=dict)
    differs: str | None = None
    unchecked: str | None = None

    def __post_init__(self) -> None:
        checked = bool(self.extract or self.require or self.sampling and self.unchecked is None)
        if checked + (self.differs is not None) + (self.unchecked is not None) != 1:
            raise ValueError(
                f"line {self.what!r} must have sampling, extract and require, or differs, or unchecked, and no two of "
                "these three."
            )
        unknown = [name for name in self.require if name not in CHECKS]
        if unknown:
            raise ValueError(f"line {self.what!r} requires {unknown[0]!r}; there are {', '.join(CHECKS)}.")

    def check(self, facts: Facts) -> dict[str, str]:
        """Return the line as records keep it: `line`, `published`, `state` and, where that is not met, `here`."""
        state, here = self._judge(facts)
        entry = {"line": self.what, "published": self.published, "state": state}
        return entry | ({"here": here} if here else {})

    def _judge(self, facts: Facts) -> tuple[str, str]:
        if self.differs is not None:
            return DEVIATION, self.differs
        if self.unchecked is not None:
            return UNCHECKED, self.unchecked
        findings = [_compare_sampling(self.sampling, facts)] if self.sampling else []
        findings += [_compare_extract(self.extract, facts)] if self.extract else []
        findings += [_require(name, expected, facts) for name, expected in self.require.items()]
        for state in (DEVIATION, UNCHECKED, OPEN):
            reasons = [here for found, here in findings if found == state]
            if reasons:
                return state, "; ".join(dict.fromkeys(reasons))
        return MET, ""


def list_changes(
    settings: Mapping[str, Any], published: Mapping[str, Any], lines: Sequence[Line]
) -> list[dict[str, str]]:
    """Return a line, as records keep it, for each setting that is not the published one and that no line checks."""
    named = {name for line in lines if line.unchecked is None for name in line.sampling}
    return [
        {"line": f"setting {name}", "published": _short(published[name]), "state": DEVIATION, "here": _short(value)}
        for name, value in settings.items()
        if name in published and name not in named and value != published[name]
    ]


def deviations(lines: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the lines that are not met, each as "line: published X, here Y"."""
    return [
        f"{line['line']}: published {line['published']}, here {line['here']}"
        for line in lines
        if line["state"] == DEVIATION
    ]


def close_lines(lines: Sequence[Mapping[str, str]], facts: Facts) -> list[dict[str, str]]:
    """Return the lines of a record, with those decided that the results decide.

    Args:
        lines: of `Line.check`.
        facts: those of BY_RESULTS that are known.
    """
    count = facts.get("eos_generated")
    decided = []
    for line in lines:
        line = dict(line)
        if line["state"] == OPEN and line["here"] == _WAITS and count is not None:
            line |= {"state": DEVIATION, "here": _eos(count)} if count else {"state": MET, "here": ""}
        decided.append(line)
    return decided


def _compare_sampling(expected: Mapping[str, Any], facts: Facts) -> tuple[str, str]:
    if facts.get("settings") is None:
        return UNCHECKED, "the samples do not say how they were cut"
    settings = _DEFAULTS | dict(facts["settings"])  # an earlier version knew fewer, and did as these say
    other = {name: settings.get(name) for name, value in expected.items() if settings.get(name) != _plain(value, name)}
    return (DEVIATION, _settings(other)) if other else (MET, "")


def _compare_extract(expected: Mapping[str, Any], facts: Facts) -> tuple[str, str]:
    other = {}
    for name, value in expected.items():
        if name not in facts:
            return OPEN, "until a model is asked"
        here = facts[name]
        if name == "sampler" and here is not None:
            here = {key: here.get(key) for key in _SAMPLER}
        if here != ({key: value.get(key) for key in _SAMPLER} if name == "sampler" else value):
            other[name] = here
    return (DEVIATION, _settings(other)) if other else (MET, "")


def _require(name: str, expected: Any, facts: Facts) -> tuple[str, str]:
    try:
        return CHECKS[name](expected, facts)
    except KeyError as missing:
        if missing.args[0] in (*BY_RESULTS, *OF_A_RUN):
            return OPEN, _WAITS if missing.args[0] in BY_RESULTS else "until a model is asked"
        return UNCHECKED, "the samples do not say"


def _lengths(expected: int, found: Mapping[str, int]) -> tuple[str, str]:
    if found["least"] == found["most"] == expected:
        return MET, ""
    return DEVIATION, f"{found['least']:,} to {found['most']:,} tokens"


def _documents(expected: int, facts: Facts) -> tuple[str, str]:
    other = {bucket: count for bucket, count in facts["documents_used"].items() if count != expected}
    text = ", ".join(f"{count:,} documents of bucket {bucket}" for bucket, count in other.items())
    return (DEVIATION, text) if other else (MET, "")


def _buckets(expected: Sequence[int], facts: Facts) -> tuple[str, str]:
    found = sorted(map(int, facts["documents_used"]))
    return (MET, "") if found == sorted(expected) else (DEVIATION, f"buckets {', '.join(map(str, found))}")


def _bos(expected: str, facts: Facts) -> tuple[str, str]:
    """Compare BOS tokens: `first` has one before every prefix if the tokenizer has a BOS, `none` before none."""
    has_one, count, samples = facts["has_bos"], facts["begin_with_bos"], facts["samples"]
    if count == (0 if expected == "none" or not has_one else samples):
        return MET, ""
    return DEVIATION, f"{count:,} of {samples:,} prefixes begin with a BOS"


def _bos_by_hand(families: Sequence[str], facts: Facts) -> tuple[str, str]:
    """Only for these families the BOS is put in front by hand where the tokenizer adds none."""
    if facts["tokenizer_adds_bos"] or not facts["begin_with_bos"]:
        return MET, ""
    family = facts["family"]
    if family is None:
        return UNCHECKED, "the model does not say what it is"
    return (MET, "") if family.startswith(tuple(families)) else (DEVIATION, f"a BOS by hand for {family}, too")


def _none_left_out(reasons: Sequence[str], facts: Facts) -> tuple[str, str]:
    counts = {reason: facts["left_out"][reason] for reason in reasons if facts["left_out"].get(reason)}
    return (DEVIATION, _settings(counts)) if counts else (MET, "")


def _one_document(expected: bool, facts: Facts) -> tuple[str, str]:
    """Samples with equal tokens were only looked for within a document."""
    count = facts["duplicates_of_other_documents"]
    return (DEVIATION, f"{count:,} left out that another document has") if count else (MET, "")


def _known_dropped(expected: Mapping[str, int], facts: Facts) -> tuple[str, str]:
    """All documents to drop of a version, the part of the id before the first stroke, were found."""
    found = facts["known_dropped"]
    if not any(found.values()):
        return UNCHECKED, "no document has one of these ids"
    partial = {version: count for version, count in found.items() if count and count != expected[version]}
    text = ", ".join(f"{count} of {expected[version]} of {version}" for version, count in partial.items())
    return (DEVIATION, f"dropped {text}") if partial else (MET, "")


def _dtype(expected: str | Mapping[str, Any], facts: Facts) -> tuple[str, str]:
    """A name; or `default` and by name of another dtype the families that have it."""
    dtype, family = facts["dtype"], facts["family"]
    if dtype is None or family is None:
        return UNCHECKED, "the model does not say its dtype, or what it is"
    if isinstance(expected, Mapping):
        others = (name for name, whose in expected.items() if name != "default" and family.startswith(tuple(whose)))
        expected = next(others, expected["default"])
    return (MET, "") if dtype == expected else (DEVIATION, str(dtype))


def _eos_banned(expected: bool, facts: Facts) -> tuple[str, str]:
    """No EOS is among the first choices, so it makes no difference that one could have been."""
    if facts["generate"] is False:
        return MET, ""
    if not facts["eos"]:
        return UNCHECKED, "neither the model nor its tokenizer names an EOS"
    count = facts["eos_generated"]
    return (DEVIATION, _eos(count)) if count else (MET, "")


def _eos_ends(expected: bool, facts: Facts) -> tuple[str, str]:
    """The metrics up to the EOS are those of a generation that ends there, if it is known and ends no true suffix."""
    if not facts["eos"]:
        return UNCHECKED, "neither the model nor its tokenizer names an EOS"
    count = facts["eos_within_suffix"]
    return (DEVIATION, f"{count:,} suffixes go on after an EOS") if count else (MET, "")


def _decoding(expected: bool, facts: Facts) -> tuple[str, str]:
    return (MET, "") if facts["generate"] else (DEVIATION, "nothing was decoded")


def _probabilities(expected: bool, facts: Facts) -> tuple[str, str]:
    return (DEVIATION, "no log-probabilities") if facts["stop_early"] else (MET, "")


def _eos(count: int) -> str:
    return f"{count:,} continuations hold an EOS"


def _plain(value: Any, name: str) -> Any:
    """A setting as `Sampling.settings` has it: lengths and offsets are lists."""
    several = name in ("prefix_length", "suffix_length", "offset", "prefix_buckets")
    return [value] if several and value is not None and not isinstance(value, list) else value


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{name} {_short(entry)}" for name, entry in value.items() if entry is not None) + ")"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if value is None or isinstance(value, bool):
        return {None: "none", True: "on", False: "off"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


_DEFAULTS = {field.name: _plain(field.default, field.name) for field in fields(Sampling)}
_SAMPLER = ("temperature", "top_k", "top_p")
_WAITS = "until the samples are answered"
OF_A_RUN = ("dtype", "family", "generate", "guesses", "sampler", "stop_early", "eos")
CHECKS: dict[str, Callable[[Any, Facts], tuple[str, str]]] = {
    "prefix_tokens": lambda expected, facts: _lengths(expected, facts["prefix_tokens"]),
    "suffix_tokens": lambda expected, facts: _lengths(expected, facts["suffix_tokens"]),
    "documents_of_a_bucket": _documents,
    "buckets": _buckets,
    "bos": _bos,
    "bos_by_hand": _bos_by_hand,
    "none_left_out": _none_left_out,
    "duplicates_within_documents": _one_document,
    "known_dropped": _known_dropped,
    "dtype": _dtype,
    "eos_banned": _eos_banned,
    "eos_ends": _eos_ends,
    "decoded": _decoding,
    "probabilities": _probabilities,
}
