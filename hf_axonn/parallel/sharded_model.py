"""A parallelized model: its layout on the grid, and what `parallelize` and later steps have installed on its modules.

It hangs on the model as `model.axonn`. Each attribute is set in the constructor or by the one method that is named
beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast
from weakref import WeakSet

from torch import nn

from hf_axonn.architectures.plan import BlockPlan, ShardingPlan
from hf_axonn.compat.attention import finds_attention_function
from hf_axonn.config import AxonnConfig
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.linears import is_stacked
from hf_axonn.engine.report import Report
from hf_axonn.engine.state import ParallelState, parallel_state
from hf_axonn.layers.base import Reader, Reading
from hf_axonn.layers.block import Block
from hf_axonn.layers.computed_ahead import ComputedAhead
from hf_axonn.layers.moe import is_experts
from hf_axonn.parallel.batch_check import BatchCheck
from hf_axonn.parallel.pipeline.pipeline import Pipeline
from hf_axonn.parallel.region import Region
from hf_axonn.topology.heads import Heads


class ShardedModel(ParallelState):
    """The modules of one model on the grid.

    Args:
        model: without PEFT's wrapper around it.
        others: as of `ParallelState`.

    Attributes:
        layers: the decoder layers (`take_plan`).
        full_sequence: names of the modules that get the full sequence (`take_plan`).
        attention_axes: the axes that divide the heads of each attention in the layers (`take_plan`).
        attention_rounds: how many times attention goes through these heads: once for each expert of a token where its
            projections are experts (`take_plan`).
        blocks: entry of a block -> its Block (`add_block`).
        readings: the methods that use parameters of other modules (`add_reading`).
        ahead: mixture -> what is computed while tokens travel to its experts (`add_ahead`).
        regions: module -> its compiled code (`add_regions`); empty if eager.
        pipeline: the stages of a model that is divided over pipe (`set_pipeline`); None of others.
        check_batch: compares what a pass is given over the ranks that share samples.
    """

    def __init__(
        self,
        mesh: GridMesh,
        config: AxonnConfig,
        model: nn.Module,
        *,
        report: Report,
        features: int = 0,
        copies_first: bool = False,
        names: Sequence[str] = (),
    ) -> None:
        super().__init__(mesh, config, report=report, features=features, copies_first=copies_first, names=names)
        self.layers: list[nn.Module] = []
        self.full_sequence: set[str] = set()
        self.attention_axes: list[tuple[str, ...]] = []
        self.attention_rounds = 1
        self.blocks: dict[nn.Module, Block] = {}
        self.readings: list[Reading] = []
        self.ahead: dict[nn.Module, ComputedAhead] = {}
        self.regions: Mapping[nn.Module, Region] = {}
        self.pipeline: Pipeline | None = None
        self.check_batch = BatchCheck(mesh, model)
        self._work_axes: dict[str, tuple[str, ...]] = {}
        self._exchanging: Mapping[str, Heads] = {}
        self._installers: dict[nn.Module, list[Callable[[nn.Module], object]] | None] = {}
        self._adapted: WeakSet[nn.Module] = WeakSet()

    def take_plan(self, model: nn.Module, plan: ShardingPlan, exchanging: Mapping[str, Heads]) -> None:
        """Note the decoder layers of a plan, and on which axes ranks do different work inside of which modules.

        Args:
            exchanging: entries of mixers that exchange positions for heads, with the division over (x, y, context).
        """
        self._exchanging = exchanging
        self.layers = [model.get_submodule(name) for name in plan.layers]
        self.full_sequence = set(plan.full_sequence)
        axes: dict[str, tuple[str, ...]] = {name: ("x", "y") for name in (*plan.layers, *(plan.final or ()))}
        axes |= {name: () for name in plan.full_sequence}
        axes |= {name: ("x", "y") for name, module in model.named_modules() if is_experts(module)}
        for block in plan.all_blocks:
            heads = self.heads_of(block)
            axes[block.entry] = heads.axes if heads else ("x", "y")
            axes |= {name: () for name in block.latent}
            if is_stacked(model.get_submodule(block.row)):
                self.attention_rounds = cast(int, model.get_submodule(block.entry).top_k)
        attentions = {block.entry for block in plan.blocks if block.is_attention and not block.cross}
        attentions |= {name for name in plan.full_sequence if finds_attention_function(model.get_submodule(name))}
        self.attention_axes = [axes[name] for name, _ in model.named_modules() if name in attentions]
        self._work_axes = axes

    def check_new(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse trained parameters that came into decoder layers after the model was sharded, over x and y. No
        communication.

        Raises:
            ValueError: ranks of x and y use one on tokens of their own, and each has another part of its gradient.
        """
        if self.grid_mesh.size("x", "y") == 1:
            return
        new = set(map(id, parameters))
        for index, layer in enumerate(self.layers):
            for name, module in layer.named_modules():
                if module not in self.sharded_layers and any(id(own) in new for own in module._parameters.values()):
                    raise ValueError(
                        f"decoder layer {index} has a new {type(module).__name__} {name} with trained parameters, "
                        f"since the model was sharded over {self.grid}: each rank of x and y uses it on its own "
                        "tokens, and has another part of its gradients. Put it in before hf_axonn.parallelize, or "
                        "freeze it (requires_grad_(False)); adapters come by PEFT."
                    )

    def heads_of(self, block: BlockPlan) -> Heads | None:
        """Return how the heads of attention or of a mixer are divided; None where there are none."""
        return Heads.divide(block.query, block.kv, self.grid_mesh) if block.query else None

    def heads_within(self, block: BlockPlan) -> Heads | None:
        """Return how heads are divided where the block's own code runs: over context too where positions are exchanged
        for heads, or channels."""
        return self._exchanging.get(block.entry) or self.heads_of(block)

    def exchanges(self, block: BlockPlan) -> bool:
        """Return whether a mixer exchanges positions for heads."""
        return block.entry in self._exchanging

    def axes(self, name: str) -> tuple[str, ...]:
        """Return on which of (x, y) ranks do different work inside of the module of this name: the axes of the
        innermost module around it that has some; none where there is no such module."""
        parts = name.split(".")
        around = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((self._work_axes[outer] for outer in around if outer in self._work_axes), ())

    def install(self, module: nn.Module, *installers: Callable[[nn.Module], object]) -> None:
        """Install sharded layers on a module, and remember how for its copies."""
        for install in installers:
            install(module)
        remembered = self._installers.setdefault(module, [])
        if remembered is not None:
            remembered += installers

    def install_copies_by(self, module: nn.Module, installer: Callable[[nn.Module], object]) -> None:
        """Let copies of a module that has its sharded layer get theirs from this installer."""
        self._installers[module] = [installer]

    def refuse_copies(self, *modules: nn.Module) -> None:
        """Note modules that cannot be copied."""
        self._installers |= dict.fromkeys(modules)

    def can_copy(self, module: nn.Module) -> bool:
        """Return whether a copy of the module can have sharded layers of its own."""
        return self._installers.get(module, ()) is not None

    def install_copy(self, original: nn.Module, copy: nn.Module) -> None:
        """Install the sharded layers of a module on a copy of it."""
        for install in self._installers.get(original) or ():
            install(copy)

    def claim(self, module: nn.Module) -> bool:
        """Note that a module of PEFT gets its sharded layers now; False if it has them already."""
        new = module not in self._adapted
        self._adapted.add(module)
        return new

    def add_block(self, entry: nn.Module, block: Block) -> None:
        """Note the way in to a block, which is installed on its entry."""
        self.blocks[entry] = block

    def add_reading(self, reader: Reader) -> None:
        """Let a method that uses parameters of other modules see them as plain tensors."""
        self.readings.append(Reading(self, reader))

    def add_ahead(self, mixture: nn.Module, ahead: ComputedAhead) -> None:
        """Note what is computed while tokens travel to the experts of a mixture."""
        self.ahead[mixture] = ahead

    def add_regions(self, regions: Mapping[nn.Module, Region]) -> None:
        """Note the compiled code of modules."""
        self.regions = regions

    def set_pipeline(self, pipeline: Pipeline) -> None:
        """Note the pipeline of a model that is divided into stages."""
        self.pipeline = pipeline


def sharded_model(model: object) -> ShardedModel | None:
    """Return the `parallel_state` of a model with all that is installed on its modules; None for a plain model."""
    return cast("ShardedModel | None", parallel_state(model))
