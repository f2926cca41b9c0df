"""Numbers of parameters: of the whole model, as on one process, whatever this rank holds.

A DTensor counts its global numbers. What it does not know: a weight of 4 bits is a matrix of bytes, and over pipe a
rank has the parameters of its own stages only. Callbacks ask on rank 0 alone, so what other stages have is noted where
all ranks are (`Pipeline.update_counts`), and nothing here communicates.
"""

from __future__ import annotations

from typing import cast

from torch import nn

from hf_axonn.engine.four_bit import elements_of
from hf_axonn.engine.stage_tensors import Counted
from hf_axonn.engine.state import ParallelState, is_parallelized


def own_counts(model: nn.Module) -> dict[str, Counted]:
    """Return what this rank has of a model, by name."""
    # A stand-in (parallel/pipeline/stand_ins.py) has a weight only where the head shares it with the embedding.
    embeddings = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or getattr(module, "elsewhere", False)
    }
    found = {}
    for name, each in model.named_parameters():
        nbytes = each.numel() * each.element_size()
        found[name] = Counted(elements_of(each), nbytes, each.requires_grad, name in embeddings, is_buffer=False)
    for name, buffer in model.named_buffers():
        nbytes = buffer.numel() * buffer.element_size()
        found[name] = Counted(buffer.numel(), nbytes, trains=False, embeds=False, is_buffer=True)
    return found


def whole_counts(model: nn.Module) -> list[Counted]:
    """Return what a model has on all stages; also of one that is not over a grid, or holds one that is."""
    # A PeftModel has the attributes of what it holds.
    states = dict.fromkeys(cast(ParallelState, each.axonn) for each in model.modules() if is_parallelized(each))
    return [*own_counts(model).values(), *(each for state in states for each in state.elsewhere.values())]


def num_parameters(model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Same as the method of Transformers' models, for the whole model. No communication."""
    return sum(
        each.elements
        for each in whole_counts(model)
        if not each.is_buffer and (each.trains or not only_trainable) and not (each.embeds and exclude_embeddings)
    )


def get_memory_footprint(model: nn.Module, return_buffers: bool = True) -> int:
    """Same as the method of Transformers' models: bytes of the whole model, of which a rank has a part. No
    communication."""
    return sum(each.nbytes for each in whole_counts(model) if return_buffers or not each.is_buffer)
