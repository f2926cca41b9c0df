"""`GoldfishCollator`: the goldfish loss for any trainer or loop, in batches that lack the labels it drops.

    loader = DataLoader(rows, batch_size=4, collate_fn=GoldfishCollator(DataCollatorForSeq2Seq(tokenizer), k=4))

Labels that a batch does not have are in no loss and in no count, so whoever counts labels afterwards (Trainer for
`num_items_in_batch`, a model for its mean) has the right denominator. `GoldfishTrainer` drops labels by the same
function, with what it knows beside a batch: the step, and the labels as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hf_axonn.engine.documents import document_fields, find_document_ids
from hf_axonn.goldfish.mask import RANDOM, check_options, goldfish_mask
from hf_axonn.losses.causal_lm import IGNORE_INDEX


Batch = MutableMapping[str, Any]


class GoldfishCollator:
    """A collator whose batches have the labels of another's, without those that the goldfish loss drops.

    Documents that are packed into a row are hashed separately. Calling it issues no communication.

    Args:
        collator: returns a batch with `input_ids` and `labels` [B, S], not shifted, perhaps `shift_labels` too.
        strategy, k, context_width, start_position, table: as `goldfish_mask` takes them.
    Raises:
        ValueError: an option is out of range, or a random strategy; when called, a batch without input_ids or labels.
    """

    def __init__(
        self,
        collator: Callable[[Sequence[Any]], Batch],
        *,
        strategy: str = "hash-table",
        k: int = 4,
        context_width: int = 13,
        start_position: int = 0,
        table: Tensor | None = None,
    ) -> None:
        check_options(strategy=strategy, k=k, context_width=context_width, start_position=start_position)
        if strategy in RANDOM:
            raise ValueError(
                f"the goldfish strategy {strategy!r} draws for each step, which a collator does not know: take one of "
                "the others, or GoldfishTrainer."
            )
        self.collator = collator
        self.options: dict[str, Any] = {
            "strategy": strategy,
            "k": k,
            "context_width": context_width,
            "start_position": start_position,
            "table": table,
        }

    def __call__(self, examples: Sequence[Any]) -> Batch:
        """Return the batch of the other collator with -100 in the place of dropped labels."""
        batch = self.collator(examples)
        input_ids, labels = ids_and_labels(batch)
        documents = find_document_ids(input_ids, **document_fields(batch))
        return drop_labels(batch, goldfish_mask(input_ids, labels, documents, **self.options))


def ids_and_labels(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the tensors of a batch that the goldfish loss needs, [B, S] each.

    Raises:
        ValueError: one of them is missing; names what there is.
    """
    input_ids, labels = batch.get("input_ids"), batch.get("labels")
    if labels is None or input_ids is None:
        has = [name for name, value in batch.items() if value is not None]  # a collator may fill in None
        absent = " and ".join(name for name in ("input_ids", "labels") if name not in has)
        raise ValueError(
            f"a training batch has {', '.join(sorted(has))}, but no {absent}, which the goldfish loss needs: use "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False), or add labels to the data set."
        )
    return input_ids, labels


def drop_labels(batch: Batch, mask: Tensor) -> Batch:
    """Return a copy of a batch without the labels of a mask [B, S], in `shift_labels` too if there are any."""
    masked = copy.copy(batch)
    masked["labels"] = batch["labels"].masked_fill(mask, IGNORE_INDEX)
    shifted = batch.get("shift_labels")
    if shifted is not None:
        masked["shift_labels"] = shifted.masked_fill(F.pad(mask[:, 1:], (0, 1)), IGNORE_INDEX)
    return masked
