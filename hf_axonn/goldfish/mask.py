"""The goldfish loss: which labels a model never learns (Hans et al., arXiv 2406.10209).

A model that never learns one token in k of a passage cannot recite the passage: at each of those positions it has
to guess. `goldfish_mask` says which labels these are; nothing else about training changes. Everything here is a pure
function of its tensors (but for a generator that a caller hands over). No communication, no global random state, and
what is drawn is drawn on the CPU, so that a mask is the same on every device.

    strategy        label t is dropped when                                      same passage, same mask?
    hash-table      table[product of tokens t-h+1 .. t] < 1/k   (the authors')   yes
    hash-avalanche  hash of that product < 2**32 / k            (the authors')   yes
    hash            hash of tokens t-h .. t-1 < 1/k             (the paper)      yes
    static          t = 1+s, 1+s+k, 1+s+2k ...                  (the authors')   only at the same place in a document
    random          a coin keyed by (seed, step, sample, t) falls so             no: the baseline, no protection
    seeded_random   a coin of torch's generator falls so        (the authors')   no: the baseline, no protection

h is `context_width`, s is `start_position`. Labels are Hugging Face's: not shifted, label t sits where token t does
and is predicted from the tokens before it. t counts from the start of the document, and a hashed window stays inside
its document, so that a passage is masked alike however it is packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_axonn.engine.documents import positions_in_document
from hf_axonn.goldfish import draws
from hf_axonn.goldfish.table import TABLE_SIZE, cpu_table
from hf_axonn.losses.causal_lm import IGNORE_INDEX


STRATEGIES = ("hash-table", "hash", "hash-avalanche", "static", "random", "seeded_random")
HASHES = ("hash-table", "hash", "hash-avalanche")  # a label that they drop is dropped wherever its passage is
RANDOM = ("random", "seeded_random")  # they draw anew in each step


def goldfish_mask(
    input_ids: Tensor,
    labels: Tensor | None = None,
    document_ids: Tensor | None = None,
    *,
    strategy: str = "hash-table",
    k: int = 4,
    context_width: int = 13,
    start_position: int = 0,
    hash_labels: bool = False,
    ignored_token: int = -1,
    table: Tensor | None = None,
    seed: int = 0,
    step: int = 0,
    sample_ids: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choose the labels that are left out of the loss, about one in `k`.

    The authors' strategies equal their code bit for bit where `document_ids` is None and labels are input_ids, or with
    `hash_labels`; "seeded_random" does with a `generator`. tests/goldfish/reference_masks.py is the comparison.

    Args:
        input_ids: [B, S] integers. What the hashes read, prompts included.
        labels: [B, S] not shifted; where they are -100 nothing is dropped, because nothing is learnt. None: all count.
        document_ids: [B, S] integers, a new document starts where the number changes (`hf_axonn.engine.documents`).
            None: each row is one document, whatever was packed into it, as for the authors' code and Megatron-LM's.
        strategy: one of `STRATEGIES`.
        k: one token in k is dropped, at least 2.
        context_width: h, tokens in a hashed window. The first h labels of a document are never dropped by a hash.
        start_position: s, of "static" only: predicted labels at the start of a document that are kept, at least 0.
        hash_labels: whether the hashes read the labels in place of input_ids, as in the authors' code.
        ignored_token: with `hash_labels` what the hashes read where labels are -100. -1 is the authors' code without
            a tokenizer; with one it is the id of the padding token.
        table: [1000003] float32 that "hash-table" looks up (`hf_axonn.goldfish.table.load_table`). None: the one that
            every CPU draws.
        seed: of the two random strategies only, like the next two.
        step: optimizer step, so that each pass over a sample draws anew.
        sample_ids: [B] integers that tell the samples of a step apart. None: the row numbers.
        generator: of "seeded_random" only, on the CPU: the batch is drawn from it as it stands, [B, S-1] at once, as
            the authors' code draws from torch's global one (`torch.default_generator`). None: each row is drawn from
            its seed, step and sample, so that it is the same however a step is cut into batches and among ranks.
    Returns:
        [B, S] bool on the device of input_ids; True: this label is dropped. The first label of a document, which has
        nothing to be predicted from, is never True.
    Raises:
        ValueError: an option is out of range, or shapes differ.
    Source: arXiv 2406.10209, section 3, and `apply_goldfish` in lit_gpt/utils.py of
    https://github.com/ahans30/goldfish-loss, commit 35d29f9.
    """
    check_options(strategy=strategy, k=k, context_width=context_width, start_position=start_position)
    _check_tensors(input_ids, labels, document_ids, sample_ids)
    if table is not None and (strategy != "hash-table" or table.shape != (TABLE_SIZE,)):
        raise ValueError(
            f"a table of shape {tuple(table.shape)} does not go with the goldfish strategy {strategy!r}: only "
            f"hash-table looks up a table, of shape ({TABLE_SIZE},)."
        )
    if generator is not None and strategy != "seeded_random":
        raise ValueError(f"the goldfish strategy {strategy!r} draws nothing: a generator is for seeded_random.")

    tokens = input_ids.long()
    rows, length = tokens.shape
    place = positions_in_document(input_ids, document_ids)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    if strategy == "static":
        after = place - 1 - start_position
        mask = (after >= 0) & (after % k == 0)
    elif strategy == "random":
        samples = torch.arange(rows) if sample_ids is None else sample_ids
        mask = draws.coins(samples.to(tokens.device).long(), length, k, seed, step) & (place >= 1)
    elif strategy == "seeded_random":
        samples = torch.arange(rows) if sample_ids is None else sample_ids.long()
        if length:
            coins = (
                draws.seeded_coins(samples, length - 1, k, seed, step)
                if generator is None
                else draws.draw_coins((rows, length - 1), k, generator)
            )
            mask[:, 1:] = coins.to(tokens.device)
        mask &= place >= 1
    elif length > context_width:
        if hash_labels and labels is not None:
            tokens = labels.long().masked_fill(labels == IGNORE_INDEX, ignored_token)
        if strategy == "hash-table":
            numbers = cpu_table(tokens.device) if table is None else table.to(tokens.device)
            mask[:, context_width:] = draws.by_table(tokens, k, context_width, numbers)
        else:
            hashed = draws.by_hash if strategy == "hash" else draws.by_avalanche
            mask[:, context_width:] = hashed(tokens, k, context_width)
        mask &= place >= context_width
    return mask if labels is None else mask & (labels != IGNORE_INDEX)


def check_options(*, strategy: str, k: int, context_width: int, start_position: int = 0) -> None:
    """Refuse options that no mask can be made from.

    Raises:
        ValueError: unknown strategy, k below 2, context_width below 1, start_position below 0 or of a strategy other
            than static, or not whole numbers.
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
    if isinstance(start_position, bool) or not isinstance(start_position, int) or start_position < 0:
        raise ValueError(
            f"goldfish start_position is {start_position!r}: a whole number of labels, at least 0, that static keeps "
            "at the start of a document."
        )
    if start_position and strategy != "static":
        raise ValueError(
            f"goldfish start_position is {start_position}, but {strategy} has none: only static counts from a start."
        )


def _check_tensors(
    input_ids: Tensor, labels: Tensor | None, document_ids: Tensor | None, sample_ids: Tensor | None
) -> None:
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
