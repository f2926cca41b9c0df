"""A Llama by AxoNN's own source, which axonn_on_cpus.py has loaded: in its automatic mode and by hand.

Automatic: `auto_parallelize` makes every Linear, and every rank has samples of its own; AxoNN rearranges them around
each Linear. By hand: the Linears of attention and MLP in expert mode, as AxoNN's own modify_llama.py means it; norms,
embedding and head are replicated, and the ranks of a row share their samples.

AxoNN's row is x here, its column y, its depth z; ranks have the same coordinates in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_axonn import Grid
from tests.benchmarks.peers.axonn_on_cpus import loaded


ROW_LAYERS = ("o_proj", "down_proj")


def axonn_llama(folder: Path, grid: Grid, *, by_hand: bool) -> nn.Module:
    """The model of `folder` on this rank, divided over `grid` by AxoNN. All ranks make AxoNN's process groups.

    Raises:
        ValueError: by hand with y > 1, where norms, embedding and head would have to be written anew.
    """
    if by_hand and grid.y > 1:
        raise ValueError(f"AxoNN by hand divides attention and MLP over x, but y is {grid.y}: take a grid with y = 1.")
    axonn = loaded()
    sizes = {"G_data": grid.data, "G_intra_r": grid.x, "G_intra_c": grid.y, "G_intra_d": grid.z}
    axonn.axonn.init(**sizes, gpus_per_node=dist.get_world_size())
    config = AutoConfig.from_pretrained(folder)
    if by_hand:
        model = AutoModelForCausalLM.from_config(config)
        for name, module in list(model.model.layers.named_modules()):
            if isinstance(module, nn.Linear):
                row = name.endswith(ROW_LAYERS)
                linear = axonn.intra_layer.Linear(
                    module.in_features, module.out_features, bias=False, transpose=row, expert_mode=True
                )
                model.model.layers.set_submodule(name, linear)
    else:
        with axonn.intra_layer.auto_parallelize():
            model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(load_file(folder / "model.safetensors"))  # AxoNN's Linears take their parts
    return model


@contextmanager
def one_pass(model: nn.Module, *, by_hand: bool) -> Iterator[None]:
    """Around forward and backward: AxoNN's three overlaps, and at the end its average of the gradients."""
    layers = loaded().intra_layer
    with layers.optimize_communication(True, True, True, model):
        yield
    layers.sync_gradients(model, mean=True, expert_mode=by_hand)
