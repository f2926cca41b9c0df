"""The equality of docs/numerics.md: a model on a grid against the same model on one process, by the same few lines.

`fit` trains either; `on_grid` parallelizes a copy, gives it this rank's rows and returns the relative errors of its
losses, its gradients, their clipped norm and the parameters after several steps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_axonn import parallelize
from hf_axonn.architectures.parameter_reads import find_readers
from hf_axonn.compat.torch import like_dtensor, placement_of, shard_in
from hf_axonn.config import AxonnConfig
from hf_axonn.engine.gradient_sync import sync_gradients
from hf_axonn.engine.state import parallel_state
from hf_axonn.topology.grid import Grid
from tests.helpers.devices import rank_device
from tests.helpers.float64 import Float64, not_nan, relative_errors
from tests.helpers.models import tiny_batch


Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch, int], Tensor]


@dataclass
class Outcome:
    """What a run of `fit` left: the loss of each micro-batch, gradients of the first step, norms, final parameters.

    On a grid the gradients and parameters are DTensors; `relative_errors` compares each rank's shards.
    """

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norms: list[Tensor] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def full(tensor: Tensor) -> Tensor:
    """The whole of a DTensor; collective where it is sharded."""
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


@torch.no_grad()
def copied(tensor: Tensor) -> Tensor:
    """A copy outside of the graph; of a DTensor one of this rank's shard, for which nothing is planned."""
    if isinstance(tensor, DTensor):
        return like_dtensor(shard_in(tensor).clone(), placement_of(tensor))
    return tensor.detach().clone()


@torch.no_grad()
def local(parameter: nn.Parameter) -> nn.Parameter:
    """This rank's shard, in the same memory; a plain parameter as it is."""
    return nn.Parameter(parameter.to_local()) if isinstance(parameter, DTensor) else parameter


def model_loss(model: nn.Module, batch: Batch, dp_size: int) -> Tensor:
    """The model's own loss. With num_items_in_batch a rank's loss is its share, which averaging divides once more."""
    loss = model(**batch).loss
    return loss * dp_size if "num_items_in_batch" in batch else loss


def fit(
    model: nn.Module,
    micro_batches: list[Batch],
    *,
    steps: int = 1,
    loss_of: Loss = model_loss,
    max_norm: float = 0.5,
    dp_size: int = 1,
    as_trainer: bool = False,
) -> Outcome:
    """Train for some AdamW steps, each over all micro-batches, with clipping.

    `as_trainer`: clip and step on the DTensors, all at once, as Trainer does. Otherwise the norm is summed over, and
    clipping and AdamW, which are elementwise, work on each rank's shards: DTensor plans the placement of every
    operation anew for every shape and mesh, which costs more than all of the model.
    """
    outcome = Outcome()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    updated = trained if as_trainer else [local(parameter) for parameter in trained]
    optimizer = torch.optim.AdamW(updated, lr=1e-2, weight_decay=0.1, fused=False)
    for step in range(steps):
        for batch in micro_batches:
            loss = loss_of(model, batch, dp_size)
            loss.backward()
            outcome.losses.append(loss.detach().clone())
        sync_gradients(model)
        if step == 0:
            named = model.named_parameters()
            outcome.gradients = {name: copied(its.grad) for name, its in named if its.grad is not None}
        if as_trainer:
            outcome.norms.append(full(nn.utils.clip_grad_norm_(trained, max_norm)))
        else:
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            outcome.norms.append(norm_by_shards(gradients))
            give_gradients(trained, updated)
            nn.utils.clip_grads_with_norm_(updated, max_norm, outcome.norms[-1], foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
    outcome.parameters = {name: copied(parameter) for name, parameter in model.named_parameters()}
    return outcome


@torch.no_grad()
def norm_by_shards(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients together; collective where one of them is a DTensor, over all ranks."""
    sharded = any(isinstance(gradient, DTensor) for gradient in gradients)
    total = torch.zeros((), dtype=gradients[0].dtype, device=gradients[0].device)
    for gradient in gradients:
        own = shard_in(gradient) if isinstance(gradient, DTensor) else gradient
        total += own.square().sum() / (ranks_with_the_same(gradient) if sharded else 1)
    if sharded:
        dist.all_reduce(total)
    return total.sqrt()


def ranks_with_the_same(tensor: Tensor) -> int:
    """Count the ranks that hold the same shard of a DTensor, or a tensor that is none."""
    pairs = zip(tensor.device_mesh.shape, tensor.placements, strict=True) if isinstance(tensor, DTensor) else ()
    return dist.get_world_size() // math.prod(size for size, placement in pairs if placement.is_shard())


def give_gradients(parameters: list[nn.Parameter], shards: list[nn.Parameter]) -> None:
    """Let each shard of a parameter have the gradient's shard."""
    for parameter, shard in zip(parameters, shards, strict=True):
        if isinstance(parameter, DTensor) and parameter.grad is not None:
            assert parameter.grad.placements == parameter.placements
            shard.grad = parameter.grad.to_local()


def rows_of(batch: Batch, grid: Grid, rank: int) -> Batch:
    """The rows of a global batch that `rank` is given."""
    index = grid.place(rank).index("data", "rows")
    rows = len(next(value for value in batch.values() if value.dim())) // grid.dp_size
    return {key: value[index * rows : (index + 1) * rows] if value.dim() else value for key, value in batch.items()}


def mean_over_world(value: Tensor) -> Tensor:
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@contextlib.contextmanager
def exact(dtype: torch.dtype = torch.float64) -> Iterator[None]:
    """Casts to float32 inside of Transformers are omitted where the comparison is in float64."""
    with Float64() if dtype == torch.float64 else contextlib.nullcontext():
        yield


def as_by_default(grid: Grid) -> None:
    """A `Case.config` without settings."""


def leave(model: nn.Module) -> None:
    """A `Case.before` that does nothing."""


@dataclass
class Case:
    """One comparison: how the model is made (the same bits each time), what it sees, and how many steps it takes."""

    name: str
    make: Callable[[], nn.Module]
    batches: list[Batch] = field(default_factory=lambda: [tiny_batch(8, 7)])
    steps: int = 1
    loss_of: Loss = model_loss
    config: Callable[[Grid], AxonnConfig | None] = as_by_default
    before: Callable[[nn.Module], None] = leave
    context: Callable[[], contextlib.AbstractContextManager] = exact
    as_trainer: bool = False
    cut: Callable[[Batch, Grid, int], Batch] = rows_of

    def truth(self) -> Outcome:
        """The run on one process. Called before the ranks are started, which inherit it."""
        model = self.make().train()
        find_readers(model)  # sources that each rank of each launch would read and parse for itself are known then
        self.before(model)
        with self.context():
            return self.fit(model, self.batches)

    def on_grid(self, grid: Grid) -> Outcome:
        """The run on a grid; losses are averaged over the samples, gradients and parameters are this rank's."""
        with torch.device("cpu"):  # where the truth was made
            model = self.make()
        model, _ = parallelize(model.to(rank_device()).train(), grid, config=self.config(grid))
        assert (parallel_state(model) is None) == (grid.size == 1)
        self.before(model)
        own = [self.cut(batch, grid, dist.get_rank()) for batch in self.batches]
        with self.context():
            ours = self.fit(model, own, dp_size=grid.dp_size)
        ours.losses = [mean_over_world(loss) for loss in ours.losses]
        return ours

    def fit(self, model: nn.Module, batches: list[Batch], *, dp_size: int = 1) -> Outcome:
        """`fit` as this case says."""
        options = {"steps": self.steps, "loss_of": self.loss_of, "as_trainer": self.as_trainer}
        return fit(model, batches, dp_size=dp_size, **options)

    def errors(self, grid: Grid, truth: Outcome) -> dict[str, float]:
        """This rank's largest relative error of each kind; gradients and parameters by the name of the worst."""
        ours = self.on_grid(grid)
        errors = {"loss": worst_ratio(ours.losses, truth.losses), "norm": worst_ratio(ours.norms, truth.norms)}
        for what in ("gradients", "parameters"):
            each = relative_errors(getattr(ours, what), getattr(truth, what))
            name = max(each, key=each.get)
            errors[f"{what}: {name}"] = each[name]
        return errors


def worst_ratio(ours: list[Tensor], truth: list[Tensor]) -> float:
    """Largest |difference| / |truth| of two lists of numbers."""
    assert len(ours) == len(truth) > 0
    return max(not_nan((mine - its).abs() / its.abs()) for mine, its in zip(ours, truth, strict=True))


def compare(cases: list[tuple[Case, Outcome]], grids: list[Grid]) -> dict[tuple[str, str], dict[str, float]]:
    """Errors of each case on each grid by (case, grid), the worst of all ranks; runs on every rank."""
    mine = {(case.name, str(grid)): case.errors(grid, truth) for grid in grids for case, truth in cases}
    tables: list = [None] * dist.get_world_size()
    dist.all_gather_object(tables, mine)
    of_ranks = {key: zip(*(table[key].items() for table in tables), strict=True) for key in mine}
    return {key: dict(max(errors, key=lambda error: error[1]) for errors in kinds) for key, kinds in of_ranks.items()}


def too_large(table: dict[tuple[str, str], dict[str, float]], bound: float) -> list[str]:
    """Lines about what is not equal."""
    return [
        f"{case} on {grid}: {what} {error:.2e}"
        for (case, grid), errors in table.items()
        for what, error in errors.items()
        if not error <= bound
    ]
