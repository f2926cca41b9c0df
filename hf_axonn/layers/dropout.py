"""Dropout masks that are keyed by who owns what.

Ranks that own different samples, tokens, features or heads must drop independently; ranks that repeat the same work
must drop the same: also ranks of context, in modules that gather whole rows. Every rank draws a seed from its global
generator, which all ranks have in the same state (Trainer and `set_seed` see to that), and mixes in its coordinates on
the axes that divide the work. A checkpointed layer draws
the same seed when it is recomputed, and a resumed run continues where the generator stood.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from collections.abc import Callable, Iterator

import torch
from torch import nn

from hf_axonn.compat.torch import is_dropout
from hf_axonn.distributed.mesh import TOKENS
from hf_axonn.engine.state import ParallelState
from hf_axonn.layers.base import patch_forward


def mix(*values: int) -> int:
    """A 63-bit number that depends on all values and their order."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextlib.contextmanager
def keyed_random(state: ParallelState, axes: tuple[str, ...], *, tokens: tuple[str, ...] = TOKENS) -> Iterator[None]:
    """Let random numbers inside differ along `tokens` and `axes`, and agree along the others. No communication.

    `tokens` are data and z, or `ROWS` where all ranks of context work on the same whole rows. Nested uses derive their
    seed from the outer one and not from the generator, which is out of step inside.
    """
    context = state.context
    outer = context.random_seed
    if outer is None:
        # On the CPU, whatever `torch.set_default_device` says: the host waits for a number of a GPU.
        seed = int(torch.randint(2**62, (), device="cpu"))
    else:
        seed = mix(outer, context.count_random())
    coordinates = [state.grid_mesh.index(axis) for axis in (*tokens, *axes)]
    device = state.grid_mesh.device
    # fork_rng puts the generators back, so that ranks are in step again afterwards.
    devices, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
    with context.with_seed(seed, 0), torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(mix(seed, *coordinates))
        yield


def install_dropout(
    state: ParallelState,
    module: nn.Module,
    axes: tuple[str, ...],
    active: Callable[[], bool],
    *,
    tokens: tuple[str, ...] = TOKENS,
) -> None:
    """Let a module's forward use `keyed_random` in training wherever `active()`."""

    def forward(original: Callable, *args, **kwargs):
        if not (module.training and active()):
            return original(*args, **kwargs)
        with keyed_random(state, axes, tokens=tokens):
            return original(*args, **kwargs)

    patch_forward(module, forward)


def dropout_names(module: nn.Module) -> list[str]:
    """Attributes of a module that hold how much is drawn in training (which may be set later).

    A probability of dropout: p, attention_dropout ...; the noise of routers to experts: jitter_noise ...
    """
    if is_dropout(module):
        return ["p"]
    values = vars(module).items()
    return [name for name, value in values if isinstance(value, float) and re.search("dropout|pdrop|jitter", name)]


def probability(module: nn.Module, *names: str) -> Callable[[], bool]:
    """Return a function: whether one of these attributes of a module is above 0 when it is called."""
    return functools.partial(_any_positive, module, names)


def _any_positive(module: nn.Module, names: tuple[str, ...]) -> bool:
    return any((getattr(module, name, 0.0) or 0.0) > 0.0 for name in names)
