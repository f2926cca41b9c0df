"""Scores of known tokens: log-probabilities and first choices in one teacher-forced pass.

    position      p0 p1 ... pP-1 | s0 s1 ... sS-1
    fed           p0 p1 ... pP-1   s0 s1 ... sS-2
    scored                         s0 s1 ... sS-1      the logits at the place before predict each of them

Greedy decoding gives s0 ... sS-1 if and only if each is the first choice here, so one pass answers for all samples
that are extracted, and decoding (decoding.py) starts at the first miss for those that are not. Rows of different
lengths are padded on the left, so that all suffixes end in the last column.

Greedy decoding takes the largest logit. Another batch, grid or device adds the same numbers in another order, so two
logits that are closer than the difference this makes may change places. A sample is a near tie (`near_tie_below`) if
that may decide whether it is extracted: an extracted one if somewhere another token is that close to the true one,
any other if the true token is that close to the first choice wherever it was missed.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from hf_axonn import parallel_state
from hf_axonn_eval.data.samples import Sample, tokens_of
from hf_axonn_eval.extraction.packed_weights import packed_weights
from hf_axonn_eval.extraction.shared_rows import may_share, share_rows
from hf_axonn_eval.extraction.work_split import WorkSplit
from hf_axonn_eval.metrics import membership
from hf_axonn_eval.metrics.discoverability import Sampler


# logits that are read together: on a CPU as many as its caches hold, on others few enough that float32 copies stay
# small
_LOGITS_AT_ONCE = {"cpu": 2**20}
_LOGITS_AT_ONCE_ELSEWHERE = 2**25
_STATISTICS_AT_ONCE = 2**23
_BLOCK = 256  # logits of which the largest is found first
# Nats. What another order of adding changed in the gap between two logits (docs/evaluation.md), with room to spare.
# Weights in fewer bits are computed with in one of these: the widest bound.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.0625, torch.bfloat16: 0.5}


class Score(NamedTuple):
    """Result of one pass for a sample; per suffix token: log P(token | true tokens before it) in nats, the model's
    first choice there, and the lead of the token over the best other one, in nats: below 0 where it is behind.

    `ranks` holds 1 and the number of tokens that are likelier than each, or of a server at least so many;
    `sampled_logprob` is the log-probability of the full suffix under a sampler, `membership` the scores of prefix
    and suffix; None where they were not asked for.
    """

    logprobs: list[float]
    choices: list[int]
    leads: list[float]
    sampled_logprob: float | None = None
    membership: dict[str, float] | None = None
    ranks: list[int] | None = None

    @property
    def margin(self) -> float:
        """Distance by which logits would have to move to change whether the sample is extracted.

        In nats: of an extracted sample the smallest lead, else how far the true token is behind where it is furthest.
        """
        return abs(min(self.leads))


class DocumentNLL(NamedTuple):
    """Total negative log-likelihood in nats, and over how many tokens."""

    nll: float
    tokens: int

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens


@torch.no_grad()
def score_suffixes(
    model, batch: Sequence[Sample], *, sampler: Sampler | None = None, tokenizer=None, cache=None
) -> list[Score]:
    """Score the suffixes of some samples; of those that begin one row (shared_rows.py) only the row is fed.

    One forward pass, and one more for membership scores over context; on a parallelized model collective over its x,
    y and z.

    Args:
        batch: samples; of different lengths only if `may_be_padded(model)`.
        sampler: a way of drawing; the log-probability of the suffix under it is asked for too.
        tokenizer: for the text of a sample; membership scores are asked for if it is given.
        cache: an empty cache that the pass fills; by default none is kept.
    Raises:
        ValueError: the model answers with NaN.
    """
    shared = share_rows(batch) if may_share(model) else [[place] for place in range(len(batch))]
    heads = [batch[row[0]] for row in shared]
    rows = [[*head.prefix, *head.suffix[:-1]] for head in heads]
    placed = {place: number for number, row in enumerate(shared) for place in row}
    # columns after a sample, of the longer one whose row it begins
    after = [tokens_of(heads[placed[place]]) - tokens_of(sample) for place, sample in enumerate(batch)]
    suffix = max(beyond + len(sample.suffix) for beyond, sample in zip(after, batch, strict=True))
    parallel = parallel_state(model)
    # A rank may have no room for the logits of whole rows.
    divided = tokenizer is not None and parallel is not None and parallel.grid.context > 1
    keep = max(map(len, rows)) if tokenizer is not None and not divided else suffix
    logits = last_logits(model, rows, keep=keep, cache=cache)
    targets = _right_aligned([[*head.prefix, *head.suffix][1:] for head in heads], logits.device)
    whole, targets = targets, targets[:, -keep:]
    of_suffixes = logits if keep == suffix else logits[:, -suffix:]
    of_tokens = read_logits(of_suffixes, functools.partial(_score_places, sampler), targets[:, -suffix:])
    drawn = of_tokens[4] if sampler is not None else None
    statistics: list[Any] | None = None
    if tokenizer is not None:
        found = _divided_statistics(model, rows, whole) if divided else _statistics(logits, targets)
        statistics = [kind.tolist() for kind in found]
    columns = [column.tolist() for column in of_tokens[:4]]
    scores = []
    for place, (sample, beyond) in enumerate(zip(batch, after, strict=True)):
        row, size = placed[place], len(sample.suffix)
        ofs, chosen, ahead, ranked = (_before(column[row], beyond, size) for column in columns)
        more: dict[str, Any] = {"ranks": ranked}
        if drawn is not None:
            more["sampled_logprob"] = float(_before(drawn[row], beyond, size).sum())
        if statistics is not None:  # all tokens but the first have something before them
            lists = (_before(kind[row], beyond, tokens_of(sample) - 1) for kind in statistics)
            text = tokenizer.decode([*sample.prefix, *sample.suffix])
            more["membership"] = membership.scores(*lists, text)
        scores.append(Score(ofs, chosen, ahead, **more))
    if any(logprob != logprob for score in scores for logprob in score.logprobs):
        raise ValueError(
            "the model's log-probabilities are not numbers (NaN). Its weights are damaged, or do not fit into the "
            "dtype: try --dtype float32."
        )
    return scores


def _score_places(sampler: Sampler | None, logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return what `score_tokens` does, ranks, and log-probabilities under a sampler if one is given; [B, T] each."""
    logprobs, choices, leads = score_tokens(logits, targets)
    drawn = () if sampler is None else (_sampled_logprobs(sampler, logits, targets),)
    return logprobs, choices, leads, token_ranks(logits, targets, leads), *drawn


def _before(row: Any, beyond: int, size: int) -> Any:
    """Return `size` columns of a row, before the last `beyond`."""
    end = len(row) - beyond
    return row[end - size : end]


def score_tokens(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of each target, the argmax at its place, and the lead of the target.

    Args:
        logits: [B, T, V]; float64 stays, everything else is computed in float32. Unchanged at the end, but written
            to meanwhile: a copy of this size would cost as much as the computation.
        targets: [B, T] ids.
    Returns:
        log-probabilities [B, T] in nats, argmax ids [B, T], and leads [B, T]: the target's logit, or log-probability,
        minus that of the best other token.
    """
    parts = []
    for some, ids in _token_chunks(logits, targets):
        logprobs = some.gather(-1, ids)[:, 0] - some.logsumexp(-1)
        parts.append((logprobs, *_choices(some, ids)))
    logprobs, choices, leads = (torch.cat(column).view(targets.shape) for column in zip(*parts, strict=True))
    return logprobs, choices, leads


def token_ranks(logits: Tensor, targets: Tensor, leads: Tensor) -> Tensor:
    """Return the rank [B, T] of each target: 1 and the number of tokens with a larger logit.

    Only where the target is behind is there something to count. Arguments as of `score_tokens`, with its leads.
    """
    parts = []
    rows = _rows_at_once(logits)
    flat, ids, behind = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1, 1), leads.reshape(-1) < 0
    for some, of_some, missed in zip(flat.split(rows), ids.split(rows), behind.split(rows), strict=True):
        ranks = torch.ones_like(of_some[:, 0])
        missing = some[missed]
        ranks[missed] += (missing > missing.gather(-1, of_some[missed])).sum(-1)
        parts.append(ranks)
    return torch.cat(parts).view(targets.shape)


def first_choices(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return argmax ids [B, T] and leads [B, T] as `score_tokens` does, without the log-probabilities."""
    parts = [_choices(some, ids) for some, ids in _token_chunks(logits, targets)]
    choices, leads = (torch.cat(column).view(targets.shape) for column in zip(*parts, strict=True))
    return choices, leads


def _choices(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    choices = first_largest(logits)
    true = logits.gather(-1, targets)
    best_other = logits.scatter_(-1, targets, -torch.inf).amax(-1)
    logits.scatter_(-1, targets, true)
    return choices, true[:, 0] - best_other


def first_largest(logits: Tensor) -> Tensor:
    """Return the place of the largest number in the last dimension, of equal ones the first, as `generate` takes it.

    On a CPU `argmax` takes one number after the other and `amax` many at a time, so there the block with the largest
    number is found first, and the place only in this block: a quarter of the time.

    Args:
        logits: [..., V].
    Returns:
        ids [...].
    """
    size = logits.shape[-1]
    if logits.device.type != "cpu" or size < 2 * _BLOCK:
        return logits.argmax(-1)
    whole = size - size % _BLOCK
    largest = logits[..., :whole].unflatten(-1, (-1, _BLOCK)).amax(-1)
    if whole < size:
        largest = torch.cat([largest, logits[..., whole:].amax(-1, keepdim=True)], dim=-1)
    begin = largest.argmax(-1, keepdim=True) * _BLOCK
    # a last block that is short repeats its last number, which is never the first of equal ones
    inside = (begin + torch.arange(_BLOCK)).clamp_max(size - 1)
    return (begin + logits.gather(-1, inside).argmax(-1, keepdim=True))[..., 0]


def _token_chunks(logits: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits [N, V] and targets [N, 1] of the tokens that are read together."""
    rows = _rows_at_once(logits)
    chunks = zip(logits.reshape(-1, logits.shape[-1]).split(rows), targets.reshape(-1, 1).split(rows), strict=True)
    for some, ids in chunks:
        yield some.to(torch.promote_types(some.dtype, torch.float32)), ids


def _rows_at_once(logits: Tensor) -> int:
    return max(1, _LOGITS_AT_ONCE.get(logits.device.type, _LOGITS_AT_ONCE_ELSEWHERE) // logits.shape[-1])


@torch.no_grad()
def read_logits(logits: Any, function: Callable[..., tuple[Tensor, ...]], *beside: Tensor) -> tuple[Tensor, ...]:
    """Return what a function of each place by itself makes of logits [B, T, V] and of others [B, T]: [B, T] each.

    Of `logits_after` over x and y each rank reads a share of the places; collective over x and y then.
    """
    return function(logits, *beside) if isinstance(logits, Tensor) else logits.map_positions(function, *beside)


def spreads_logits(model) -> bool:
    """Return whether `logits_after` gives each rank of x and y a share of the places to read, not all of them."""
    parallel = parallel_state(model)
    if parallel is None or parallel.grid.x * parallel.grid.y == 1 or parallel.grid.context > 1:
        return False
    return parallel.has_head


def last_logits(model, rows: Sequence[Sequence[int]], *, keep: int, cache=None) -> Any:
    """Return logits [B, keep, V] at the last `keep` columns of rows of ids, padded on the left. One forward pass."""
    longest = max(map(len, rows))
    tokens = _right_aligned(rows, device_of(model))
    return logits_after(model, tokens, [longest - len(row) for row in rows], keep=keep, cache=cache)


@torch.no_grad()
def logits_after(model, tokens: Tensor, padding: Sequence[int], *, keep: int, cache=None) -> Any:
    """Return logits [B, keep, V] at the last `keep` places of `tokens`; only these are computed where the model can.

    One forward pass; on a parallelized model collective over its x, y and z. Logits that x and y divide are formed
    when they are read: by `read_logits` a share on each rank, by anything else in full on all.

    Args:
        tokens: ids [B, T], which follow what the cache holds.
        padding: how many columns at the beginning of each row, the cache's included, are no tokens.
        keep: places.
        cache: what was fed before; the pass adds to it. None: nothing, and nothing is kept.
    """
    options = _options(model, tokens, padding, cache=cache)
    if "logits_to_keep" in parameters_of(model):
        options["logits_to_keep"] = keep
    parallel = parallel_state(model) if spreads_logits(model) else None
    with parallel.context.spreading_logits() if parallel is not None else contextlib.nullcontext():
        logits = model(input_ids=tokens, **options).logits
    return logits if logits.shape[1] == keep else logits[:, -keep:]


def _options(model, tokens: Tensor, padding: Sequence[int], *, cache=None) -> dict[str, Any]:
    """Return the arguments of a forward pass beside its tokens: mask, positions and cache; as of `logits_after`."""
    before = cache.get_seq_length() if cache is not None else 0
    starts = torch.tensor(padding, device=tokens.device)[:, None]
    columns = torch.arange(before + tokens.shape[1], device=tokens.device)
    accepted = parameters_of(model)
    options: dict[str, Any] = {"use_cache": cache is not None, "attention_mask": (columns >= starts).long()}
    if cache is not None:
        options |= {name: cache for name in CACHE_NAMES if name in accepted}
    if any(padding) and "position_ids" in accepted:
        # what fills a row up on the right may lie outside the window, where models have no position
        window = getattr(core(model).config.get_text_config(), "max_position_embeddings", None)
        options["position_ids"] = (columns[before:] - starts).clamp(0, window - 1 if window is not None else None)
    return options


def document_nll(
    model, token_lists: Sequence[Sequence[int]], *, batch_size: int = 1, progress: bool = False
) -> DocumentNLL:
    """Compute the loss on full documents: the sum over all tokens but each first one, and their number.

    The batches are dealt to the (data, z) coordinates; the totals come back on every rank. Collective over the world.

    Args:
        token_lists: documents in token ids, two tokens or more, not longer than the model's window.
        batch_size: documents in a forward pass; shorter ones are padded on the right.
        progress: show a progress bar on rank 0.
    Raises:
        ValueError: a document of fewer than two tokens or longer than the window, an id outside the vocabulary, or no
            document at all.
    """
    if not token_lists or min(map(len, token_lists)) < 2:
        raise ValueError("document_nll needs one or more documents of at least 2 tokens each.")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but it must be at least 1.")
    check_fits(model, longest=max(map(len, token_lists)), largest_id=max(map(max, token_lists)))
    work_split = WorkSplit.for_model(model)
    by_length = sorted(token_lists, key=len)
    batches = [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)]
    nll, tokens = 0.0, 0
    rounds = work_split.rounds(batches)
    with evaluating(model), torch.no_grad():
        hidden = not progress or work_split.rank != 0
        for batch, counts in tqdm(rounds, total=-(-len(batches) // work_split.count), unit="batch", disable=hidden):
            width = max(map(len, batch))
            ids = torch.tensor([list(row) + [0] * (width - len(row)) for row in batch], device=device_of(model))
            lengths = torch.tensor([len(row) for row in batch], device=ids.device)
            mask = torch.arange(width, device=ids.device) < lengths[:, None]
            total = _total_nll(model, ids, mask)
            if counts:
                nll += total
                tokens += int(mask[:, 1:].sum())
    total_nll, total_tokens = work_split.total([nll, tokens])
    return DocumentNLL(total_nll, int(total_tokens))


def _total_nll(model, ids: Tensor, mask: Tensor) -> float:
    """Negative log-likelihood of rows [B, S] that are padded on the right, in nats. One forward pass."""
    parallel = parallel_state(model)
    if parallel is not None and parallel.grid.context > 1:  # a rank may have no room for the logits of whole rows
        loss = core(model).loss_function
        with loss.alone(), loss.capture() as captured:
            labels = ids.masked_fill(~mask, -100)
            model(input_ids=ids, attention_mask=mask.long(), labels=labels, use_cache=False)
        return torch.cat(captured)[:, 0].double().sum().item()
    logits = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1].long(), use_cache=False).logits
    logprobs, _, _ = score_tokens(logits, ids[:, 1:])
    return -logprobs.double()[mask[:, 1:]].sum().item()


def check_fits(model, *, longest: int, largest_id: int) -> None:
    """Raise unless sequences of `longest` tokens with ids up to `largest_id` can be fed to the model.

    Raises:
        ValueError: longer than max_position_embeddings, or an id outside the vocabulary.
    """
    config = model.config.get_text_config()
    window = getattr(config, "max_position_embeddings", None)
    if window is not None and longest > window:
        raise ValueError(
            f"a sequence has {longest} tokens, but the model's window is {window} (max_position_embeddings): use "
            "shorter prefixes and suffixes, or cut the documents."
        )
    if largest_id >= config.vocab_size:
        raise ValueError(
            f"there is a token id {largest_id}, but the model's vocabulary has {config.vocab_size} entries: the ids "
            "come from another tokenizer. Build the samples with the tokenizer of this model."
        )


@contextlib.contextmanager
def evaluating(model) -> Iterator[None]:
    """Put the model into eval mode, with `packed_weights`; afterwards it is in its mode again."""
    was_training = model.training
    model.eval()
    try:
        with packed_weights(model):
            yield
    finally:
        model.train(was_training)


def core(model):
    """Return the model itself, without the wrapper of PEFT."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


CACHE_NAMES = ("cache", "past_key_values")  # a forward's argument, since Transformers 5.24 and before


def parameters_of(model) -> frozenset[str]:
    """Return the names of the arguments of the model's forward."""
    return frozenset(inspect.signature(core(model).forward).parameters)


def may_be_padded(model) -> bool:
    """Return whether rows may be padded on the left: the model takes their positions, and padding stays finite.

    A place of padding sees nothing. Eager attention adds the smallest number of the dtype there, and takes the softmax
    in float32, where that of float64 is infinite and the result NaN.
    """
    eager = getattr(core(model).config.get_text_config(), "_attn_implementation", None) == "eager"
    overflows = eager and next(model.parameters()).dtype == torch.float64
    return "position_ids" in parameters_of(model) and not overflows and not has_prompt(model)


def has_prompt(model) -> bool:
    """Return whether a PEFT adapter puts tokens or keys before the text, which shifts positions and cache."""
    adapter = getattr(model, "active_peft_config", None)
    return bool(getattr(adapter, "is_prompt_learning", False))


def device_of(model) -> torch.device:
    """Return the device of the weights, to which tokens go."""
    return next(model.parameters()).device


def _right_aligned(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)


def _sampled_logprobs(sampler: Sampler, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability [B, T] of each target when it is drawn, some rows at a time."""
    rows = max(1, _STATISTICS_AT_ONCE // (logits.shape[-1] * logits.shape[1]))
    parts = [sampler.logprobs(*pair) for pair in zip(logits.split(rows), targets.split(rows), strict=True)]
    return torch.cat(parts).double()


def _statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return [B, T] each of `membership.token_statistics` of logits [B, T, V], some at a time."""
    rows = max(1, _STATISTICS_AT_ONCE // logits.shape[-1])
    chunks = zip(logits.flatten(0, 1).split(rows), targets.flatten().split(rows), strict=True)
    columns = zip(*(membership.token_statistics(*chunk) for chunk in chunks), strict=True)
    return tuple(torch.cat(column).view(targets.shape) for column in columns)


def _divided_statistics(model, rows: Sequence[Sequence[int]], targets: Tensor) -> tuple[Tensor, ...]:
    """Compute `_statistics` of whole rows whose positions context divides: a rank forms the logits of its own. One
    forward pass."""
    tokens, longest = _right_aligned(rows, targets.device), targets.shape[1]
    options = _options(model, tokens, [longest - len(row) for row in rows])
    if getattr(core(model).config.get_text_config(), "output_router_logits", False):
        options["output_router_logits"] = False  # ranks with other samples would wait for its loss
    with core(model).loss_function.hand_over() as handed:
        model(input_ids=tokens, labels=tokens, **options)
    logits = handed[0]
    return _statistics(logits, targets) if isinstance(logits, Tensor) else logits.map_positions(_statistics, targets)


def near_tie_below(model) -> float:
    """Return the bound for a model, in nats: that of the dtype of its weights, twice that where a grid splits sums.

    On a grid with y > 1 or x > 1 sums over features are made of parts that are rounded before they are added.
    """
    bound = BOUNDS.get(next(model.parameters()).dtype, max(BOUNDS.values()))
    parallel = parallel_state(model)
    return 2 * bound if parallel is not None and parallel.grid.y * parallel.grid.x > 1 else bound
