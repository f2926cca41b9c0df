"""Pure functions: how close is what the model said to what it was trained on.

Two kinds. Teacher-forced ones look at `hits`, one bool per suffix token: "given the true tokens before it, was this
token the model's first choice?". Free-running ones compare the ids or the text of a greedy continuation with the
suffix. docs/evaluation.md gives the formulas and the sources.
"""

from collections.abc import Sequence

from hf_axonn_eval.metrics.rouge import rouge as rouge


NEAR_VERBATIM = 0.10  # edits per suffix token; the bound of the Gemma 3 report


def exact_match(prediction: Sequence[int], reference: Sequence[int]) -> bool:
    """Whether the ids are the same, all of them."""
    return list(prediction) == list(reference)


def token_accuracy(hits: Sequence[bool]) -> float:
    """Share of suffix tokens that are the first choice, given the true tokens before them (teacher-forced)."""
    _check_some(hits)
    return sum(map(bool, hits)) / len(hits)


def free_running_accuracy(prediction: Sequence[int], reference: Sequence[int]) -> float:
    """Share of positions at which a greedy continuation holds the true token (Pythia's memorization score).

    Raises:
        ValueError: the lengths differ.
    """
    if len(prediction) != len(reference):
        raise ValueError(f"the continuation has {len(prediction)} tokens and the suffix {len(reference)}.")
    return token_accuracy([mine == true for mine, true in zip(prediction, reference, strict=True)])


def divergence_point(hits: Sequence[bool]) -> int:
    """Number of tokens before the first one that is wrong; len(hits) if none is.

    It is the same for teacher forcing and for greedy decoding: up to the first miss both see the same tokens.
    """
    return next((position for position, hit in enumerate(hits) if not hit), len(hits))


def extraction_strength(hits: Sequence[bool]) -> float:
    """1 - k / |y|, k the smallest number of shown suffix tokens after which every further one is the first choice.

    1 for a suffix that is extracted from its prefix alone, 0 if not even the last token is right.
    """
    _check_some(hits)
    shown = len(hits)
    while shown > 0 and hits[shown - 1]:
        shown -= 1
    return 1 - shown / len(hits)


def longest_common_run(prediction: Sequence[int], reference: Sequence[int]) -> int:
    """Length of the longest run of ids that occurs, unbroken, in both; the places may differ.

    For each place of the prediction an integer holds in its bits where in the reference the same run begins. Runs of
    length 1, 2, 4, ... come by joining two of half the length; then the longest is put together from the longest down.
    So the time is about n log n integer operations, also where a few ids repeat for ever.
    """
    if prediction == reference:
        return len(reference)
    places: dict[int, int] = {}
    for place, token in enumerate(reference):
        places[token] = places.get(token, 0) | 1 << place
    longest, levels = 1, []
    begins = {place: places[token] for place, token in enumerate(prediction) if token in places}
    while begins:
        levels.append((longest, begins))
        begins, longest = _joined(begins, begins, longest), 2 * longest
    if not levels:
        return 0
    longest, begins = levels.pop()
    for length, shorter in reversed(levels):
        extended = _joined(begins, shorter, longest)
        if extended:
            begins, longest = extended, longest + length
    return longest


def _joined(first: dict[int, int], second: dict[int, int], length: int) -> dict[int, int]:
    """Where a run of `first`, which is `length` long, is followed by one of `second`, in both texts."""
    joined = {}
    for place, begins in first.items():
        follows = second.get(place + length)
        if follows and (begins := begins & follows >> length):
            joined[place] = begins
    return joined


def edit_distance(prediction: Sequence[int], reference: Sequence[int]) -> float:
    """Levenshtein distance over ids, divided by the length of the reference.

    Raises:
        ValueError: the reference is empty.
    """
    _check_some(reference)
    from rapidfuzz.distance import Levenshtein

    return Levenshtein.distance(list(prediction), list(reference)) / len(reference)


def near_verbatim(distance: float) -> bool:
    """Whether an `edit_distance` counts as near-verbatim: at most NEAR_VERBATIM."""
    return distance <= NEAR_VERBATIM


def _check_some(tokens: Sequence) -> None:
    if len(tokens) == 0:
        raise ValueError("a suffix without tokens has no score.")
