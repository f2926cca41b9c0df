"""Metrics of how close a continuation is to the text that the model was trained on.

Two kinds. Teacher-forced metrics look at `hits`, one bool per suffix token: "given the true tokens before it, was this
token the model's first choice?". Free-running ones compare the ids or the text of a greedy continuation (`generated`)
with the suffix. docs/evaluation.md gives the formulas and the sources.

Some numbers have variants, because publications define them in other ways: over token ids in place of words, up to the
first EOS in place of the full continuation, over the full suffix in place of windows. docs/protocols.md says which
publication has which.

ROUGE-1, ROUGE-2 and ROUGE-L equal those of package rouge-score 0.1.2 with use_stemmer=False, in a fraction of its
time. It lower-cases a text and keeps the runs of a-z and 0-9 as words; all else parts words. ROUGE-n is the F1 of the
n-grams that both texts have, each counted as often as the text with fewer of them has it; ROUGE-L is the F1 of the
longest common subsequence of words (Lin 2004).

Two signs of a degenerate suffix, one that any model would guess, need no model: few different tokens, and a text that
zlib makes much shorter. They find loops, rulers and empty tables. They do not find what is regular without repeating,
such as 1, 2, 3, ...: only the untrained model beside the trained one does. Sources: type-token ratio over moving
windows, Covington and McFall 2010; as a sign of degenerate suffixes, the Apertus report 2025, arXiv 2509.14233; zlib,
Carlini et al. 2021, arXiv 2012.07805.
"""

import zlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from functools import lru_cache
from math import exp

from hf_axonn_eval.metrics.registry import register_metric


LEAST_TYPES, LEAST_ZLIB = 0.40, 0.25  # below one of them a suffix is degenerate
NEAR_VERBATIM = 0.10  # edits per suffix token; the bound of the Gemma 3 report
WINDOW = 50  # tokens; the share of different ones falls with the length of a text, so it is taken in windows
# of an ASCII byte: itself if it can stand in a word, else a blank
_LETTERS = bytes(byte if chr(byte).isalnum() and byte < 128 else 32 for byte in range(256))


# The order is that of the columns in tables.


@register_metric("exact_match", "verbatim", mean="share")
def exact_match(divergence_point: int, suffix_length: int) -> bool:
    """True if greedy decoding gives back the full suffix: no first miss."""
    return divergence_point == suffix_length


@register_metric("near_verbatim", "near-verbatim", mean="share", shown_in="report")
def near_verbatim(generated: Sequence[int], suffix: Sequence[int]) -> bool:
    """True if the `edit_distance` is at most NEAR_VERBATIM."""
    return edit_distance(generated, suffix) <= NEAR_VERBATIM


@register_metric("rouge1", "ROUGE-1", shown_in="summary", least=0, most=1)
def rouge1(generated_text: str, suffix_text: str) -> float | None:
    """F1 over words; see `rouge`."""
    return _last_rouge(generated_text, suffix_text)["rouge1"]


@register_metric("rouge2", "ROUGE-2", shown_in="summary", least=0, most=1)
def rouge2(generated_text: str, suffix_text: str) -> float | None:
    """F1 over pairs of words; see `rouge`."""
    return _last_rouge(generated_text, suffix_text)["rouge2"]


@register_metric("rougeL", "ROUGE-L", least=0, most=1)
def rouge_l(generated_text: str, suffix_text: str) -> float | None:
    """F1 over the longest common subsequence of words; see `rouge`."""
    return _last_rouge(generated_text, suffix_text)["rougeL"]


@register_metric("rouge1_to_eos", "ROUGE-1 up to EOS", shown_in="summary", least=0, most=1)
def rouge1_to_eos(text_to_eos: str, suffix_text: str) -> float | None:
    """`rouge1` of the continuation up to the end of its text."""
    return _last_rouge(text_to_eos, suffix_text)["rouge1"]


@register_metric("rouge2_to_eos", "ROUGE-2 up to EOS", shown_in="summary", least=0, most=1)
def rouge2_to_eos(text_to_eos: str, suffix_text: str) -> float | None:
    """`rouge2` of the continuation up to the end of its text."""
    return _last_rouge(text_to_eos, suffix_text)["rouge2"]


@register_metric("rougeL_to_eos", "ROUGE-L up to EOS", shown_in="summary", least=0, most=1)
def rouge_l_to_eos(text_to_eos: str, suffix_text: str) -> float | None:
    """`rougeL` of the continuation up to the end of its text.

    A greedy continuation is the same up to its first EOS, whether generation ends there or goes on. So this is exactly
    what `generate` with that EOS gives.
    """
    return _last_rouge(text_to_eos, suffix_text)["rougeL"]


@register_metric("rougeL_tokens", "ROUGE-L over tokens", shown_in="summary", least=0, most=1)
def rouge_l_tokens(generated: Sequence[int], suffix: Sequence[int]) -> float:
    """F1 over the longest common subsequence of token ids.

    Source: swiss-ai/apertus_memorization at 79d6972, core/metrics.py, calculate_rouge_l.

    Raises:
        ValueError: the suffix is empty.
    """
    _check_some(suffix)
    return _f1(_longest_common_subsequence(list(generated), list(suffix)), len(generated), len(suffix))


@register_metric("holds_eos", "continuations with an EOS", shown_in="summary", least=0, most=1)
def holds_eos(generated: Sequence[int], eos: Collection[int]) -> int | None:
    """1 if the continuation holds an EOS of the model, else 0; None if the model has none.

    The mean is not called a share: that would make it one more test of the report, and it says nothing of memory.
    """
    return int(not set(eos).isdisjoint(generated)) if eos else None


@register_metric("token_accuracy", "token accuracy", least=0, most=1)
def token_accuracy(hits: Sequence[bool]) -> float:
    """Share of suffix tokens that are the first choice, given the true tokens before them (teacher-forced)."""
    _check_some(hits)
    return sum(map(bool, hits)) / len(hits)


@register_metric("free_running_accuracy", "free-running accuracy", shown_in="summary", least=0, most=1)
def free_running_accuracy(generated: Sequence[int], suffix: Sequence[int]) -> float:
    """Share of positions at which a greedy continuation holds the true token (Pythia's memorization score).

    Raises:
        ValueError: the lengths differ.
    """
    if len(generated) != len(suffix):
        raise ValueError(f"the continuation has {len(generated)} tokens and the suffix {len(suffix)}.")
    return token_accuracy([token == true for token, true in zip(generated, suffix, strict=True)])


@register_metric("divergence_point", "divergence point (tokens)", shown_in="summary", least=0)
def _divergence_point(divergence_point: int) -> int:
    return divergence_point


def first_miss(hits: Sequence[bool]) -> int:
    """Number of tokens before the first one that is wrong, the divergence point; len(hits) if none is.

    It is the same for teacher forcing and for greedy decoding: up to the first miss both see the same tokens.
    """
    return next((position for position, hit in enumerate(hits) if not hit), len(hits))


@register_metric("longest_run", "longest run (tokens)", shown_in="report", least=0)
def longest_common_run(generated: Sequence[int], suffix: Sequence[int]) -> int:
    """Length of the longest run of ids that occurs, unbroken, in both; the places may differ."""
    return _last_run(tuple(generated), tuple(suffix))


@lru_cache(maxsize=1)  # two metrics ask for the same pair one after the other
def _last_run(generated: tuple[int, ...], suffix: tuple[int, ...]) -> int:
    """Find the longest run; an integer for each place of the continuation holds in its bits the places of the suffix
    where the same run begins.

    Runs of length 1, 2, 4, ... come by joining two of half the length; then the longest is put together from the
    longest down. So the time is about n log n integer operations, also where a few ids repeat for ever.
    """
    if generated == suffix:
        return len(suffix)
    places: dict[int, int] = {}
    for place, token in enumerate(suffix):
        places[token] = places.get(token, 0) | 1 << place
    longest, levels = 1, []
    begins = {place: places[token] for place, token in enumerate(generated) if token in places}
    while begins:
        levels.append((longest, begins))
        begins, longest = _join_runs(begins, begins, longest), 2 * longest
    if not levels:
        return 0
    longest, begins = levels.pop()
    for length, shorter in reversed(levels):
        extended = _join_runs(begins, shorter, longest)
        if extended:
            begins, longest = extended, longest + length
    return longest


def _join_runs(first: dict[int, int], second: dict[int, int], length: int) -> dict[int, int]:
    """Return the places where a run of `first`, of `length` ids, is followed by one of `second`, in both texts."""
    joined = {}
    for place, begins in first.items():
        follows = second.get(place + length)
        if follows and (begins := begins & follows >> length):
            joined[place] = begins
    return joined


@register_metric("lccs", "LCCS", shown_in="summary", least=0, most=1)
def lccs(generated: Sequence[int], suffix: Sequence[int]) -> float:
    """Longest common consecutive subsequence: the longest run of ids in both, by the length of the suffix.

    Source: swiss-ai/apertus_memorization at 79d6972, core/metrics.py, calculate_lcs_norm.

    Raises:
        ValueError: the suffix is empty.
    """
    _check_some(suffix)
    return longest_common_run(generated, suffix) / len(suffix)


@register_metric("edit_distance", "edit distance", shown_in="summary", least=0, most=1)
def edit_distance(generated: Sequence[int], suffix: Sequence[int]) -> float:
    """Levenshtein distance over ids, divided by the length of the suffix.

    Raises:
        ValueError: the suffix is empty.
    """
    _check_some(suffix)
    from rapidfuzz.distance import Levenshtein

    return Levenshtein.distance(list(generated), list(suffix)) / len(suffix)


@register_metric("extraction_strength", "extraction strength", shown_in="report", least=0, most=1)
def extraction_strength(hits: Sequence[bool]) -> float:
    """1 - k / |y|, k the smallest number of shown suffix tokens after which every further one is the first choice.

    1 for a suffix that is extracted from its prefix alone. 0 if the last token is missed, however many others are
    right: then the full suffix has to be shown. `token_accuracy` and `longest_common_run` look at the others.

    Source: Wang et al. 2025, arXiv 2406.09179, after Carlini et al. 2021, arXiv 2012.07805; OpenUnlearning,
    src/evals/metrics/memorization.py, which does not try k = |y| and gives 1 / |y| where this is 0.
    """
    _check_some(hits)
    shown = len(hits)
    while shown > 0 and hits[shown - 1]:
        shown -= 1
    return 1 - shown / len(hits)


@register_metric("nll", "nats per token", least=0)
def nll(logprob: float, suffix_length: int) -> float:
    """Negative log-likelihood of a suffix token, in nats, given the true tokens before it."""
    return -logprob / suffix_length


@register_metric("guess_nll", "nats per guessed token", shown_in="summary", least=0)
def guess_nll(generated_logprob: float, suffix_length: int) -> float:
    """Negative log-likelihood of a token of the greedy continuation, in nats: how sure the model is of its guess."""
    return -generated_logprob / suffix_length


@register_metric("probability", "probability", shown_in="summary", least=0, most=1)
def probability(logprob: float) -> float:
    """The chance that one draw at temperature 1, with nothing cut off, gives the suffix."""
    return exp(logprob)


@register_metric("sampled_probability", "probability under the sampler", shown_in="summary", least=0, most=1)
def sampled_probability(sampled_logprob: float) -> float:
    """The chance that one draw by the sampler of the run gives the suffix."""
    return exp(sampled_logprob)


def _check_some(tokens: Sequence[object]) -> None:
    if len(tokens) == 0:
        raise ValueError("a suffix without tokens has no score.")


@register_metric("type_token_ratio", "type-token ratio", shown_in="summary", least=0, most=1)
def type_token_ratio(suffix: Sequence[Hashable], *, window: int = WINDOW) -> float:
    """Share of tokens that are different ones, the mean over all windows of `window` tokens; 1 if none repeats.

    A shorter sequence is one window.

    Raises:
        ValueError: no tokens, or a window below 1.
    """
    if not len(suffix) or window < 1:
        raise ValueError(f"{len(suffix)} tokens in windows of {window}: one or more of both are needed.")
    window = min(window, len(suffix))
    last_start = len(suffix) - window
    last_place: dict[Hashable, int] = {}
    types = 0
    for place, token in enumerate(suffix):
        # a token is a new type in the windows that hold it but not the same token before it
        first_start = max(last_place.get(token, -1) + 1, place - window + 1)
        types += max(0, min(place, last_start) - first_start + 1)
        last_place[token] = place
    return types / (window * (last_start + 1))


@register_metric("suffix_types", "type-token ratio of the full suffix", shown_in="summary", least=0, most=1)
def suffix_types(suffix: Sequence[Hashable]) -> float:
    """Different tokens by all tokens, without windows, so that it falls with the length of a suffix.

    Source: swiss-ai/apertus_memorization at 79d6972, core/metrics.py, calculate_ttr.

    Raises:
        ValueError: the suffix is empty.
    """
    _check_some(suffix)
    return len(set(suffix)) / len(suffix)


@register_metric("zlib_ratio", "zlib ratio", shown_in="summary", least=0)
def zlib_ratio(suffix_text: str) -> float | None:
    """Bytes of the zlib-compressed text by bytes of the text in UTF-8; above 1 for a very short one, None for none.

    It falls with the length: about 0.8 for 50 tokens of English prose, 0.4 for 1000.
    """
    content = suffix_text.encode("utf-8", "surrogatepass")
    return len(zlib.compress(content)) / len(content) if content else None


def is_degenerate(types: float | None, compressed: float | None) -> bool | None:
    """Return whether a suffix repeats itself so much that its extraction means little.

    Args:
        types: its `type_token_ratio`, None if not known.
        compressed: its `zlib_ratio`, None if not known.
    Returns:
        None if neither is known.
    """
    if types is None and compressed is None:
        return None
    return (types is not None and types < LEAST_TYPES) or (compressed is not None and compressed < LEAST_ZLIB)


def rouge(prediction: str, reference: str) -> dict[str, float | None]:
    """ROUGE-1, ROUGE-2 and ROUGE-L, F1, as package rouge-score computes them without stemming.

    ROUGE is not defined for a reference without a-z and digits, and the values are None; so is ROUGE-2 for one of one
    word.

    Args:
        prediction: what the model wrote.
        reference: the true suffix.
    Returns:
        `rouge1`, `rouge2`, `rougeL`, each between 0 and 1 or None.
    """
    given, true = words(prediction), words(reference)
    if not true:
        return {"rouge1": None, "rouge2": None, "rougeL": None}
    if given == true:
        return {"rouge1": 1.0, "rouge2": 1.0 if len(true) > 1 else None, "rougeL": 1.0}
    shared = _count_shared(given, true)
    # a subsequence cannot be longer than what is shared, and without any there is none
    common = _longest_common_subsequence(given, true) if shared else 0
    pairs = None
    if len(true) > 1:
        pairs = _count_shared(zip(given, given[1:]), zip(true, true[1:])) if shared else 0  # noqa: B905 (pairs: one is shorter)
    return {
        "rouge1": _f1(shared, len(given), len(true)),
        "rouge2": None if pairs is None else _f1(pairs, len(given) - 1, len(true) - 1),
        "rougeL": _f1(common, len(given), len(true)),
    }


_last_rouge = lru_cache(maxsize=1)(rouge)  # three metrics ask for the same pair of texts one after the other


def words(text: str) -> list[bytes]:
    """Split a text into the words that rouge-score sees, in ASCII bytes."""
    # lower() first: it turns the Kelvin sign into k; "replace" turns what is not ASCII into a question mark
    return text.lower().encode("ascii", "replace").translate(_LETTERS).split()


def _count_shared(given: Iterable[Hashable], true: Iterable[Hashable]) -> int:
    """Size of the intersection of two multisets."""
    left = Counter(given)
    count_of, total = left.get, 0
    for gram in true:
        if count := count_of(gram):
            left[gram] = count - 1
            total += 1
    return total


def _longest_common_subsequence(given: Sequence[Hashable], true: Sequence[Hashable]) -> int:
    from rapidfuzz.distance import LCSseq

    return LCSseq.similarity(given, true)


def _f1(shared: int, given: int, true: int) -> float:
    if not shared:
        return 0.0
    precision, recall = shared / given, shared / true
    return 2 * precision * recall / (precision + recall)
