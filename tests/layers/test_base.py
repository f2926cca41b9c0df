"""What the sharded layers share."""

import copy
import inspect

import pytest
from torch import nn

from hf_axonn.layers.base import PatchedForward, innermost, patch_forward, patch_innermost, replaced


def test_replaced_entries_come_back_and_new_ones_go():
    entries = {"kept": 1, "changed": 2}
    with pytest.raises(KeyError), replaced(entries, {"changed": 3, "new": 4}):
        assert entries == {"kept": 1, "changed": 3, "new": 4}
        raise KeyError
    assert entries == {"kept": 1, "changed": 2}


class Named(nn.Module):
    def forward(self, text: str, times: int = 1) -> str:
        return text * times


def quoted(mark: str):
    return lambda original, *args, **kwargs: f"{mark}{original(*args, **kwargs)}{mark}"


def test_patches_run_from_the_last_to_the_first():
    module = Named()
    own = module.forward
    patch_forward(module, quoted("1"))
    patch_forward(module, quoted("2"))
    assert module("a", times=2) == "21aa12"
    assert innermost(module) == own and inspect.signature(module.forward) == inspect.signature(own)
    patch_innermost(module, quoted("0"))
    assert module("a") == "210a012" and innermost(module) == own


def test_patches_go_around_another_method():
    module = Named()
    patch_forward(module, quoted("1"))
    patch_forward(module, quoted("2"))
    assert isinstance(module.forward, PatchedForward)
    assert module.forward.around(str.upper)("a") == "21A12" and module("a") == "21a12"


def test_a_copy_of_a_patched_module_calls_its_own_method():
    module = Named()
    patch_forward(module, quoted("1"))
    other = copy.deepcopy(module)
    assert other("a") == "1a1" and innermost(other).__self__ is other
