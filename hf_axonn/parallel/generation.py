"""`generate` of a sharded model: ranks that share samples stop at the same token, and nobody waits for who is done."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from hf_axonn.compat.transformers import is_static_cache, never_compile_in_generate, reads_clock
from hf_axonn.parallel.sharded_model import ShardedModel, sharded_model


# Settings of a GenerationConfig that a grid cannot have, and why.
_OTHER_DRAFTS = "Pass an assistant_model that is whole on each rank, or prompt_lookup_num_tokens"
REFUSED = {
    "assistant_early_exit": f"the last layer, which it leaves out, puts the parts of ranks together. {_OTHER_DRAFTS}",
    "use_mtp": f"its drafts were not compared with one process. {_OTHER_DRAFTS}",
    "speculation_type": f"its drafts were not compared with one process. {_OTHER_DRAFTS}",
    "compile_config": "a graph cannot hold the collectives of a grid. Omit it",
}


def install_generate(state: ShardedModel, model: nn.Module) -> None:
    """Replace `generate` of a model that x, y or z divides. No communication."""
    if state.grid_mesh.size("z", "x", "y") > 1 and hasattr(model, "generate"):
        never_compile_in_generate(model)
        model.generate = functools.partial(_generate, state, model, model.generate)


def _generate(state: ShardedModel, model: Any, original: Callable, /, *args, **kwargs):
    """Generate on all ranks until the longest row is done, with a cache: every forward uses weights gathered over z.

    The weights are gathered once for the call. Memory: those of a model on the same grid with z = 1.

    Raises:
        ValueError: one of `REFUSED`, or `max_time` where ranks share samples; ranks would make unequal numbers of
            passes, and tokens travel to experts on other ranks of z; the model that drafts tokens is sharded over z.
    """
    settings = (kwargs.get("generation_config") or (args[1] if len(args) > 1 else None), model.generation_config)

    def value_of(name: str):
        choices = (kwargs.get(name), *(getattr(given, name, None) for given in settings))
        return next((choice for choice in choices if choice is not None), None)

    for name, why in REFUSED.items():
        if value_of(name):
            raise ValueError(f"generate with {name} is not supported over the grid {state.grid}: {why}.")
    timed = value_of("max_time") is not None or reads_clock(kwargs.get("stopping_criteria"))
    if state.grid_mesh.size("x", "y") > 1 and timed:
        raise ValueError(
            f"generate with max_time over the grid {state.grid}: each rank has a clock of its own, and one would stop "
            "while those that share its samples wait for it. Set max_new_tokens."
        )
    cache = state.context.gather_cache
    if state.grid.z == 1 or (cache.everything and not state.travels_over_z):  # token_healing generates within
        return original(*args, **kwargs)
    assistant = sharded_model(drafter) if (drafter := kwargs.get("assistant_model")) is not None else None
    if assistant is not None and assistant.grid.z > 1:
        raise ValueError(
            f"assistant_model is sharded over z={assistant.grid.z}: ranks whose rows have ended draft no more, and "
            "the others would wait for its weights. Load it without a grid, whole on each rank."
        )
    alone = {
        "use_cache=False": value_of("use_cache") is False,
        "cache_implementation=static": is_static_cache(
            value_of("cache_implementation"), kwargs.get("past_key_values")
        ),
        "assistant_model": drafter is not None,
        "prompt_lookup_num_tokens": value_of("prompt_lookup_num_tokens") is not None,
    }
    reason = next((name for name, given in alone.items() if given), None)
    if reason is None:
        kwargs.setdefault("synced_gpus", True)
    # Here a rank makes more passes for a token, or for a longer prompt, than others do.
    more = {
        "guidance_scale": value_of("guidance_scale") not in (None, 1),
        "prefill_chunk_size": value_of("prefill_chunk_size") is not None,
        "token_healing": bool(value_of("token_healing")),
    }
    reason = reason or next((name for name, given in more.items() if given), None)
    if reason is not None and state.travels_over_z:
        raise ValueError(
            f"generate({reason}) over z={state.grid.z} with experts: move: a rank whose rows have ended would "
            "stop, and the others wait for its experts. Use a dynamic cache without drafts, guidance, chunks and "
            "healing, or write experts: gather."
        )
    # In the ways of `alone` Transformers fails for a rank that is done and continues: without a cache it lengthens the
    # mask, not the tokens, and drafts and static caches have no room. The first forward uses every weight, so none is
    # gathered later and a rank may stop by itself.
    with cache.keep_everything():
        return original(*args, **kwargs)
