"""Documents in a batch: which tokens belong to which, and batches whose documents do not see each other.

Several documents may stand in one row of a batch (packing, padding-free collators). Collators say so in `position_ids`
that start again, in `seq_idx`, in `cu_seq_lens_q`, or in an `attention_mask` that numbers documents.
`find_document_ids` is the only reader of these fields: the goldfish hash, token counts and certificates ask it.
Attention in Transformers reads `position_ids` alone, and only without an `attention_mask` and without a cache.
`separate_documents` brings a batch into that form: over a grid in every forward pass, on one process in
`GoldfishTrainer`.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_axonn.compat.messages import get_logger
from hf_axonn.compat.peft import without_peft
from hf_axonn.compat.transformers import masks_read_positions, text_config
from hf_axonn.distributed.collectives import world_rank


logger = get_logger(__name__)

DOCUMENT_KEYS = ("position_ids", "seq_idx", "attention_mask", "cu_seq_lens_q")
# Kinds of layers in which a token sees others only through an attention mask; the others carry a state along the row.
MASKED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
TOKENWISE_LAYERS = {"mlp", "moe"}  # those in which it sees itself alone


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
            add(starts_of(document_ids_from_position_ids(tensor) if tensor is position_ids else tensor))
    if cu_seq_lens_q is not None and rows == 1:
        flags = torch.zeros(1, length + 1, dtype=torch.bool, device=cu_seq_lens_q.device)
        flags[0, cu_seq_lens_q.long().clamp(0, length)] = True
        add(flags[:, :length])
    return None if starts is None else starts.long().cumsum(dim=1)


def document_fields(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a batch that `find_document_ids` takes, by their names."""
    return {name: batch[name] for name in DOCUMENT_KEYS if isinstance(batch.get(name), Tensor)}


def document_ids_from_position_ids(position_ids: Tensor) -> Tensor:
    """Number the documents of packed rows by where their positions stop counting up by one.

    Transformers cuts its attention masks by the same rule.

    Args:
        position_ids: [B, S] integers.
    Returns:
        [B, S] int64, 0 for the first document of a row.
    """
    return (position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1).long().cumsum(dim=1)


def positions_in_document(input_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """Count tokens from the start of each document: [B, S] int64, 0 at the first token."""
    steps = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
    if document_ids is None:
        return steps
    starts = torch.where(starts_of(document_ids), steps, 0)
    return steps - starts.cummax(dim=1).values


def starts_of(document_ids: Tensor) -> Tensor:
    """Return True at the first token of each document; the first token of a row is one."""
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return starts


def starts_in_flash_attention(position_ids: Tensor, documents: Sequence[int] = ()) -> list[int]:
    """Return where Transformers' flash attention begins the documents of a row: at each least position. Waits for the
    device.

    Args:
        position_ids: [1, S].
        documents: places at which they do begin, where that is known.
    Raises:
        ValueError: it begins none at the first token, and would leave that out; or others than `documents`.
    """
    least = position_ids.min()
    starts: list[int] = (position_ids[0] == least).nonzero().flatten().tolist()
    if starts[0] or (documents and starts != [*documents]):
        raise ValueError(
            f"flash attention begins a document at each position {int(least)}, the least of its row, and so at the "
            f"tokens {_some(starts)} of a row whose documents begin at {_some(documents or [0])}: let the positions "
            "of every document begin with the same number, or use attn_implementation='sdpa'."
        )
    return starts


def _some(places: Sequence[int]) -> str:
    return ", ".join(map(str, places[:4])) + (" ..." if len(places) > 4 else "")


def separate_documents(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch in which packed documents do not see each other; a batch without any as it is.

    With packed documents the copy has `position_ids` that start again at each of them, `use_cache=False` and no
    `attention_mask`: padding becomes a document of its own. A batch with `past_key_values`, or with a mask that is
    not one number a token, was prepared by the caller and stays as it is. So does one whose `position_ids` skip
    numbers and never start again (training for longer contexts). Labels are not touched. No communication. Waits for
    the device where the batch has another of `DOCUMENT_KEYS` than the mask; whether masks number documents is read in
    the first batch of a model alone.

    A model that mixes documents in any case (`why_documents_mix`) is named in a warning, once.

    Args:
        model: a Transformers model, with or without PEFT around it.
        batch: keyword arguments of its forward, `input_ids` or `inputs_embeds` among them.
    Raises:
        ValueError: packed documents with `use_cache=True`; with flash attention several packed rows, or documents that
            it does not tell apart (`starts_in_flash_attention`).
    """
    tokens = _tokens(batch)
    fields, mask = document_fields(batch), batch.get("attention_mask")
    if tokens is None or not fields or batch.get("past_key_values") is not None:
        return batch
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == tokens.shape):
        return batch
    base = without_peft(model)
    if mask is not None and len(fields) == 1 and not _masks_number_documents(base, mask):
        return batch
    if not _is_packed(tokens, fields, mask):
        return batch
    if reason := why_documents_mix(model):
        _warn_once(type(base).__name__, reason)
    if _why_attention_mixes(model):
        return batch
    _refuse_mixing_options(base, batch, rows=len(tokens))
    documents = find_document_ids(tokens, **fields)
    assert documents is not None  # there are fields
    separated = {name: value for name, value in batch.items() if name != "attention_mask"}
    separated["position_ids"] = _restarting(fields.get("position_ids"), documents, mask)
    if "flash" in _attention_of(base):
        starts_in_flash_attention(separated["position_ids"], starts_of(documents).nonzero()[:, 1].tolist())
    if _accepts(base, "use_cache"):
        separated["use_cache"] = False
    return separated


def why_documents_mix(model: nn.Module) -> str:
    """Return why documents in one row of this model see each other whatever its batch says; empty if they do not.

    Read from the code of the model's classes and from its configuration. tests/architectures/test_survey.py compares
    it with what all causal LM types of Transformers do.
    """
    if reason := _why_attention_mixes(model):
        return reason
    base = without_peft(model)
    kinds = getattr(text_config(base), "layer_types", None) or () if hasattr(base, "config") else ()
    if carrying := sorted(set(kinds) - MASKED_LAYERS - TOKENWISE_LAYERS):
        return (
            f"its layers of type {', '.join(carrying)} carry a state along the row, except with kernels that read "
            "seq_idx or cu_seq_lens_q"
        )
    return ""


def _why_attention_mixes(model: nn.Module) -> str:
    base = without_peft(model)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "PEFT ignores position_ids beside a learned prompt"
    if "position_ids" not in inspect.signature(base.forward).parameters:
        return "its forward takes no position_ids"
    if not masks_read_positions(base):
        return "it does not pass position_ids to its attention masks"
    return ""


def _tokens(batch: Mapping[str, Any]) -> Tensor | None:
    """Return a [B, S] tensor of the size of the batch, None where there is none."""
    ids, embeds = batch.get("input_ids"), batch.get("inputs_embeds")
    if isinstance(ids, Tensor):
        return ids if ids.dim() == 2 else None
    return embeds[..., 0] if isinstance(embeds, Tensor) and embeds.dim() == 3 else None


def _masks_number_documents(model: nn.Module, mask: Tensor) -> bool:
    """Return whether the masks of a model's batches number documents, as that of its first batch does or does not."""
    if model not in _numbering:
        _numbering[model] = not bool((mask <= 1).all())
    return _numbering[model]


_numbering: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def _is_packed(tokens: Tensor, fields: dict[str, Tensor], mask: Tensor | None) -> bool:
    """Return whether a row has tokens of two documents; padding between or around text is none. Waits for the
    device."""
    positions = fields.get("position_ids")
    if positions is not None and positions.dim() == 2:  # numbers that are skipped begin no document here
        again = torch.zeros_like(positions, dtype=torch.bool)
        again[:, 1:] = (positions[:, 1:] < positions[:, :-1]) | (positions[:, 1:] == 0)
        fields = fields | {"position_ids": positions_in_document(positions, again.cumsum(dim=1))}
    if mask is None:
        documents = find_document_ids(tokens, **fields)
        return documents is not None and bool((documents[:, -1] != documents[:, 0]).any())
    documents = find_document_ids(tokens, **fields | {"attention_mask": mask.clamp(min=1)})
    assert documents is not None  # the mask numbers them
    padding = mask.to(documents.device) == 0
    first = documents.masked_fill(padding, tokens.shape[1] + 1).amin(dim=1)
    last = documents.masked_fill(padding, 0).amax(dim=1)
    return bool((last > first).any())


def _restarting(position_ids: Tensor | None, documents: Tensor, mask: Tensor | None) -> Tensor:
    """Return the given positions in rows where they start again with every document, elsewhere others that do; of
    padding always others, as what stands there begins a document in flash attention, or none."""
    made = positions_in_document(documents, documents)
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] != documents.shape[1]:
        return made
    given = position_ids.to(documents.device).expand_as(documents)
    if mask is not None:
        given = torch.where(mask.to(documents.device) == 0, made, given)
    right = (starts_of(document_ids_from_position_ids(given)) == starts_of(documents)).all(dim=1, keepdim=True)
    return torch.where(right, given, made)


def _refuse_mixing_options(model: nn.Module, batch: Mapping[str, Any], *, rows: int) -> None:
    if batch.get("use_cache"):
        raise ValueError(
            "a batch with several documents in a row was given with use_cache=True, with which Transformers lets the "
            "documents see each other: omit use_cache."
        )
    attention = _attention_of(model)
    if "flash" in attention and rows > 1:
        raise ValueError(
            f"a batch has {rows} rows with several documents in a row, and {attention} separates the documents of one "
            "row only: use batches of one row, longer ones instead of more, or attn_implementation='sdpa'."
        )


def _attention_of(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "_attn_implementation", ""))


def _accepts(model: nn.Module, name: str) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


@functools.cache
def _warn_once(model: str, reason: str) -> None:
    if world_rank() == 0:
        logger.warning(
            f"Documents in one row of a batch see each other in {model}: {reason}. To keep them apart, train without "
            "packing, one document in a row."
        )
