"""The goldfish loss: which labels a model never learns (Hans et al., arXiv 2406.10209).

A model that is never told one token in k of a passage cannot recite the passage: at each of those positions it has
to guess. `goldfish_mask` says which labels these are; nothing else about training changes. Everything here is a pure
function of its tensors. No communication, no global random state, and whole-number arithmetic only (but for the
reference's table, which is always drawn on the CPU), so that a mask is the same on every device.

    strategy     label t is dropped when                                         same passage, same mask?
    hash-table   table[product of tokens t-h+1 .. t] < 1/k   (the reference)     yes
    hash         hash of tokens t-h .. t-1 < 1/k             (the paper)         yes
    static       t = 1, 1+k, 1+2k ...                                            only at the same place in a document
    random       a coin keyed by (seed, step, sample, t) falls so                no: the baseline that does not protect

h is `context_width`. Labels are Hugging Face's: not shifted, label t sits where token t does and is predicted from
the tokens before it. t counts from the start of the document, and a hashed window stays inside its document, so that
a passage is masked alike however it is packed.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hf_axonn.losses.causal_lm import IGNORE_INDEX


STRATEGIES = ("hash-table", "hash", "static", "random")

TABLE_SIZE = 1_000_003
TABLE_SEED = 2_971_215_073

_GAMMA = -0x61C8864680B583EB  # 2**64 / golden ratio, made odd, as a signed number: SplitMix64's stride


def goldfish_mask(
    input_ids: Tensor,
    labels: Tensor | None = None,
    document_ids: Tensor | None = None,
    *,
    strategy: str = "hash-table",
    k: int = 4,
    context_width: int = 13,
    hash_labels: bool = False,
    seed: int = 0,
    step: int = 0,
    sample_ids: Tensor | None = None,
) -> Tensor:
    """Choose the labels that are left out of the loss, about one in `k`.

    Args:
        input_ids: [B, S] integers. What the hashes read, prompts included.
        labels: [B, S] not shifted; where they are -100 nothing is dropped, because nothing is learnt. None: all count.
        document_ids: [B, S] integers, a new document starts where the number changes (`find_document_ids`).
            None: each row is one document.
        strategy: one of `STRATEGIES`. "hash-table" equals the reference implementation, bit for bit, where labels
            are input_ids, or with `hash_labels`, and a row is one document.
        k: one token in k is dropped, at least 2.
        context_width: h, tokens in a hashed window. The first h labels of a document are never dropped by a hash.
        hash_labels: whether the hashes read the labels in place of input_ids, -1 where they are -100, as in the
            reference implementation.
        seed: of "random" only, like the next two.
        step: optimizer step, so that each pass over a sample draws anew.
        sample_ids: [B] integers that tell the samples of a step apart. None: the row numbers.
    Returns:
        [B, S] bool on the device of input_ids; True: this label is dropped. The first label of a document, which has
        nothing to be predicted from, is never True.
    Raises:
        ValueError: an option is out of range, or shapes differ.
    Source: arXiv 2406.10209, section 3; "hash-table" as in the authors' released training code.
    """
    check_options(strategy=strategy, k=k, context_width=context_width)
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids have shape {tuple(input_ids.shape)}; a goldfish mask needs [batch, sequence].")
    for name, tensor in (("labels", labels), ("document_ids", document_ids)):
        if tensor is not None and tensor.shape != input_ids.shape:
            raise ValueError(
                f"{name} have shape {tuple(tensor.shape)} but input_ids {tuple(input_ids.shape)}: they must be the "
                "same, with labels not yet shifted."
            )
    if sample_ids is not None and sample_ids.shape != input_ids.shape[:1]:
        raise ValueError(f"sample_ids have shape {tuple(sample_ids.shape)}: one number a row, [{len(input_ids)}].")

    tokens = input_ids.long()
    if hash_labels and labels is not None:
        tokens = labels.long().masked_fill(labels == IGNORE_INDEX, -1)
    place = positions_in_document(input_ids, document_ids)
    if strategy == "static":
        mask = (place - 1) % k == 0
    elif strategy == "random":
        mask = _coins(tokens, k, seed, step, sample_ids) & (place >= 1)
    else:
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        if tokens.shape[1] > context_width:
            hashed = _hash_table if strategy == "hash-table" else _hash
            mask[:, context_width:] = hashed(tokens, k, context_width)
        mask &= place >= context_width
    return mask if labels is None else mask & (labels != IGNORE_INDEX)


def check_options(*, strategy: str, k: int, context_width: int) -> None:
    """Refuse options that no mask can be made from.

    Raises:
        ValueError: unknown strategy, k below 2, context_width below 1, or not whole numbers.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"goldfish strategy {strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}.")
    if isinstance(k, bool) or not isinstance(k, int) or k < 2:
        raise ValueError(
            f"goldfish k is {k!r}: one label in k is dropped, so k is a whole number of at least 2 (1 would drop all)."
        )
    if isinstance(context_width, bool) or not isinstance(context_width, int) or context_width < 1:
        raise ValueError(
            f"goldfish context_width is {context_width!r}: the number of tokens hashed is a whole number of at least "
            "1 (the paper takes 13)."
        )


def positions_in_document(input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """Count tokens from the start of each document: [B, S] int64, 0 at the first token."""
    steps = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
    if document_ids is None:
        return steps
    starts = torch.where(_starts(document_ids), steps, 0)
    return steps - starts.cummax(dim=1).values


def document_ids_from_position_ids(position_ids: Tensor) -> Tensor:
    """Number the documents of packed rows by where their positions stop counting up by one.

    Transformers cuts its attention masks by the same rule.

    Args:
        position_ids: [B, S] integers.
    Returns:
        [B, S] int64, 0 for the first document of a row.
    """
    return (position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1).long().cumsum(dim=1)


def find_document_ids(
    input_ids: Tensor,
    *,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor | None:
    """Number the documents of a batch from whatever its collator says about them.

    A document starts wherever any of the arguments says that one does. Those that are None, or of another shape than
    [1 or B, S], say nothing (a 4-d attention mask, the 3-d positions of images).

    Args:
        input_ids: [B, S], read only for its shape and device.
        position_ids: a document starts where they do not count up by one.
        seq_idx: numbers of documents: one starts where the number changes.
        attention_mask: the same: 0 and 1 part padding from text, larger numbers name packed documents.
        cu_seq_lens_q: [documents + 1] bounds of the documents in a batch of one row.
    Returns:
        [B, S] int64, or None where nothing was said.
    """
    rows, length = input_ids.shape
    starts = None

    def add(found: Tensor) -> None:
        nonlocal starts
        found = found.to(input_ids.device).expand(rows, length)
        starts = found if starts is None else starts | found

    for tensor in (position_ids, seq_idx, attention_mask):
        if tensor is not None and tensor.dim() == 2 and tensor.shape[0] in (1, rows) and tensor.shape[1] == length:
            add(_starts(document_ids_from_position_ids(tensor) if tensor is position_ids else tensor))
    if cu_seq_lens_q is not None and rows == 1:
        flags = torch.zeros(1, length + 1, dtype=torch.bool, device=cu_seq_lens_q.device)
        flags[0, cu_seq_lens_q.long().clamp(0, length)] = True
        add(flags[:, :length])
    return None if starts is None else starts.long().cumsum(dim=1)


def count_unprotected(
    labels: Tensor, document_ids: Tensor | None = None, *, context_width: int
) -> tuple[Tensor, Tensor]:
    """Count the documents too short for a hash to drop anything from: no label at place h or later.

    Args:
        labels: [B, S] not shifted, -100 where nothing is learnt. Documents without labels (padding) do not count.
        document_ids: [B, S], None: each row is one document.
        context_width: h.
    Returns:
        (unprotected, all) documents, 0-d int64 on the device of labels, so that counting never waits for the device.
    """
    place = positions_in_document(labels, document_ids)
    document = (place == 0).flatten().cumsum(0) - 1
    learnt = ((labels != IGNORE_INDEX) & (place >= 1)).flatten()
    reached = learnt & (place.flatten() >= context_width)
    targets, late = (
        torch.zeros(labels.numel(), dtype=torch.int64, device=labels.device).index_add_(0, document, flags.long())
        for flags in (learnt, reached)
    )
    counted = targets > 0
    return (counted & (late == 0)).sum(), counted.sum()


def _starts(document_ids: Tensor) -> Tensor:
    """True at the first token of each document; the first token of a row is one."""
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return starts


def _hash_table(tokens: Tensor, k: int, width: int) -> Tensor:
    """The reference's hash: [B, S - h] for t = h .. S-1. The window ends at and includes token t."""
    products = tokens[:, 1:].unfold(1, width, 1).prod(dim=-1)  # int64, wraps around on every device
    return _table(tokens.device)[products % TABLE_SIZE] < 1 / k


@lru_cache(maxsize=16)
def _table(device: torch.device) -> Tensor:
    """[TABLE_SIZE] uniform float32. Drawn on the CPU, where the same seed gives the same numbers, then moved."""
    generator = torch.Generator(device="cpu").manual_seed(TABLE_SEED)
    return torch.rand(TABLE_SIZE, generator=generator, dtype=torch.float32, device="cpu").to(device)


def _hash(tokens: Tensor, k: int, width: int) -> Tensor:
    """The paper's hash: [B, S - h] for t = h .. S-1. The window is the h tokens before t, and their order counts."""
    length = tokens.shape[1]
    state = torch.zeros_like(tokens[:, width:])
    for back in range(width, 0, -1):
        state = _mix((state ^ tokens[:, width - back : length - back]) + _GAMMA)
    return _one_in(k, state)


def _coins(tokens: Tensor, k: int, seed: int, step: int, sample_ids: Tensor | None) -> Tensor:
    """[B, S] independent coins: row b is the SplitMix64 stream of the key (seed, step, sample_ids[b])."""
    rows, length = tokens.shape
    samples = torch.arange(rows, device=tokens.device) if sample_ids is None else sample_ids.to(tokens.device).long()
    key = torch.zeros_like(samples)
    for part in (_signed(seed), _signed(step), samples):
        key = _mix((key ^ part) + _GAMMA)
    places = torch.arange(1, length + 1, device=tokens.device)
    return _one_in(k, _mix(key[:, None] + places * _GAMMA))


def _one_in(k: int, hashed: Tensor) -> Tensor:
    """True for one value in k of evenly spread 64-bit numbers."""
    return _shift(hashed, 1) < (1 << 63) // k


def _mix(value: Tensor) -> Tensor:
    """Spread every bit of an int64 over all of them, one to one. Source: SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value ^ _shift(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift right without sign: torch's own shift of an int64 repeats the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
