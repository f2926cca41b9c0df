"""Models with PEFT's adapters for tests: put into the model before it is sharded or after, the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_axonn import parallelize
from hf_axonn.topology.grid import Grid
from tests.helpers.equality import Case, mean_over_world, rows_of
from tests.helpers.models import tiny_model


ONE_OF_EACH = [Grid(y=2, x=2), Grid(z=2, x=2), Grid(data=2, y=2)]
# 6 query heads divide by x = 2 and not by x * y = 4; 3 kv heads do not divide by x = 2 either.
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}


@contextlib.contextmanager
def drawing(seed):
    """Draw other numbers on every rank: what others than rank 0 draw for new adapters must not count."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed + (dist.get_rank() if dist.is_initialized() else 0))
        yield


def adapt(model, **options):
    """`model` with adapters whose B is random, because the zeros of a new one would hide the gradient of A."""
    options = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    with drawing(7):
        return get_peft_model(model, LoraConfig(init_lora_weights=False, **options))


def adapted_model(kind, sizes=(), **options):
    return adapt(tiny_model(kind, **dict(sizes)), **options)


def two_adapters(model):
    """The second of two adapters is trained, the first is neither used nor trained."""
    model = adapt(model)
    with drawing(8):
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    model.set_adapter("second")
    return model


@dataclass
class Adapted(Case):
    """A case whose model is `adapter(base())`, on the grid also with the adapters put into the sharded base."""

    base: Callable[[], nn.Module] | None = None
    adapter: Callable[[nn.Module], nn.Module] = adapt
    make: Callable[[], nn.Module] = field(init=False)
    after: bool = False

    def __post_init__(self):
        self.make = lambda: self.adapter(self.base())

    def on_grid(self, grid):
        if not self.after:
            return super().on_grid(grid)
        base, report = parallelize(self.base(), grid)
        count = len(report.entries)
        model = self.adapter(base).train()
        self.before(model)
        assert {entry.kind for entry in report.entries[count:]} >= {"adapter"}
        with self.context():
            mine = [rows_of(batch, grid, dist.get_rank()) for batch in self.batches]
            ours = self.fit(model, mine, dp_size=grid.dp_size)
        ours.losses = [mean_over_world(loss) for loss in ours.losses]
        return ours
