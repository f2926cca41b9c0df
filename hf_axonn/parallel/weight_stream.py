"""The weights of a sharded model as a stream of full tensors, under the names and in the shapes of `save_pretrained`.

For whoever loads them as it loads a folder of weights, such as a vLLM server (trainer/rollouts.py):

    stream = WeightStream(model)
    names = stream.names()                       or those that training changes
    stream.outline(names)                        what will come, as empty tensors; no communication
    for name, tensor in stream.tensors(names, receive=world_rank() == 0): ...       on every rank

Weights are gathered a decoder layer at a time, because that is what Transformers renames, splits and joins together
when it saves (fused experts become single ones), and what lies beside the layers a tensor at a time. So a rank that
receives holds the full weights of one layer, any other those of one tensor, and all ranks gather in one order.
Adapters are merged into the shards of a layer while it is gathered, and its weights are then what they were, to the
bit.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from hf_axonn.compat.bitsandbytes import is_four_bit
from hf_axonn.compat.peft import active_copies, without_peft, wrapped_modules
from hf_axonn.compat.transformers import as_saved
from hf_axonn.engine.dtensors import local, whole
from hf_axonn.parallel.adapters.install import without_wrappers
from hf_axonn.parallel.adapters.merge import merge_for_a_while


LAYER = re.compile(r".*?\.\d+(?=\.)")  # the beginning of a name, up to the number of the layer


class WeightStream:
    """The weights of a model, parallelized, with adapters of PEFT or without.

    Args:
        model: without pipe; a `PeftModel` around it may have been made before or after it was sharded.
    Raises:
        ValueError: weights of 4 bits, or a model of which Transformers saves weights of several layers as one tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = without_peft(model)
        self._trained: set[str] = set()
        for name, module in self.model.named_modules():
            if is_four_bit(module):
                raise ValueError(
                    f"{name} has weights of 4 bits, which cannot be sent to a server over a grid: adapters cannot be "
                    "merged into them. Load the model in bf16, or generate without a server."
                )
        whole_model = _outline(self._tensors())
        known = _shapes(as_saved(self.model, whole_model))
        if _shapes(dict(self.outline(whole_model))) != known:
            raise ValueError(
                f"{type(self.model).__name__} saves weights of several layers as one tensor, which cannot be sent a "
                "layer at a time: generate without a server."
            )

    def names(self, *, trained: bool = False) -> frozenset[str]:
        """Return the names in the model (not in a file) of all its weights, or of those that training changes.

        These are the weights that are trained or adapted now, or were in an earlier call, with all others of the
        module around them: a server may hold query, key and value as one, and reload them together or not at all.
        """
        tensors, adapters = self._tensors(), self._adapters()
        self._trained |= {name.rpartition(".")[0] for name, tensor in tensors.items() if tensor.requires_grad}
        self._trained |= set(adapters)
        if not trained:
            return frozenset(tensors)
        with without_wrappers(self.model):
            units = tuple(f"{self._unit(path)}." for path in self._trained)
        return frozenset(name for name in tensors if name.startswith(units))

    def outline(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield what `tensors` yields as tensors without values, on the meta device. No communication."""
        for part in _parts(_outline(self._tensors()), names):
            yield from as_saved(self.model, part).items()

    @torch.no_grad()
    def tensors(self, names: Collection[str], *, receive: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield names as saved and full tensors. Every rank exhausts the iterator; of `receive` False it is empty.

        Memory: the full weights of one layer with `receive`, else one full tensor; a copy of a layer's adapted shards.
        Collectives: one gather of each sharded tensor over (y, x, z); those of `merge_for_a_while`.
        """
        adapters = self._adapters()
        for part in _parts(self._tensors(), names):
            paths = {name.rpartition(".")[0] for name in part}
            layers = [layer for path in paths for layer in adapters.get(path, ())]
            gathered: dict[str, Tensor] = {}
            with merge_for_a_while(layers):
                for name, tensor in part.items():
                    full = whole(tensor).detach()
                    if receive:
                        gathered[name] = full.clone() if layers and _share_memory(full, local(tensor)) else full
                    del full
            saved = as_saved(self.model, gathered)
            gathered = {}
            for name in list(saved):
                yield name, saved.pop(name).contiguous()

    def _tensors(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by their names without PEFT, trained copies in the place of what
        they are copies of, and tied weights once, under the name that is saved."""
        with without_wrappers(self.model):
            found = self.model.state_dict(keep_vars=True)
        for path, copy in active_copies(self.model):
            found |= copy.state_dict(prefix=f"{path}.", keep_vars=True)
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        first = {id(tensor): name for name, tensor in reversed(found.items()) if name not in tied}
        return {
            name: tensor
            for name, tensor in found.items()
            if isinstance(tensor, Tensor) and first.get(id(tensor), name) == name
        }

    def _adapters(self) -> dict[str, list[nn.Module]]:
        """Return PEFT's layers by the path of the module that they adapt."""
        found: dict[str, list[nn.Module]] = {}
        for name, wrapper, _ in wrapped_modules(self.model):
            if "modules_to_save" not in wrapper._modules:
                found.setdefault(name.replace(".base_layer", ""), []).append(wrapper)
        return found

    def _unit(self, path: str) -> str:
        """Return the path of the module around that of `path`; of a module beside the layers its own."""
        around = path.rpartition(".")[0]
        has_layers = any(isinstance(module, nn.ModuleList) for module in self.model.get_submodule(around).modules())
        return path if has_layers or not around else around


def _parts(tensors: dict[str, Tensor], names: Collection[str]) -> list[dict[str, Tensor]]:
    """Return the named tensors, those of a layer together."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name in names:
            layer = LAYER.match(name)
            parts.setdefault(layer[0] if layer else name, {})[name] = tensor
    return list(parts.values())


def _outline(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()}


def _shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
