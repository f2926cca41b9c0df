"""Stand-ins for modules of another stage: a model's own forward runs on every stage.

So each stage computes its own rotary embeddings, positions and masks, which no pipeline plan of Transformers names,
and no modelling code is copied. Hidden states that are not read are zeros that hold no memory.

    embedding   zeros [B, S, H]
    layer       what it got; the last one before a stage's layers (`Arrival`) gives what the stage before has sent, the
                first one after them (`Departure`) takes what is sent to the next and returns zeros
    norm        what it got
    head        zeros [B, S, 1]
"""

from __future__ import annotations

import dis
import inspect
import itertools
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from hf_axonn.layers.base import split_hidden_states


if TYPE_CHECKING:
    from hf_axonn.engine.state import ParallelState


def zeros(*shape: int, like: Tensor) -> Tensor:
    """Zeros in the memory of one number."""
    return like.new_zeros(()).expand(shape)


class Outline:
    """Shape and dtype of a weight of another stage, for scripts that look at these. No tensor of the meta device:
    torch multiplies a matrix on a CPU by one to arbitrary numbers."""

    def __init__(self, weight: Tensor) -> None:
        self.shape, self.dtype = weight.shape, weight.dtype

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{name} of a weight of shape {list(self.shape)}, which over a grid with pipe another rank has: call the "
            "model, or use a grid without pipe."
        )


class ElsewhereEmbedding(nn.Module):
    """An embedding of another stage. Ids [B, S] -> zeros [B, S, H].

    Args:
        original: the embedding.
        shared: whether the head of this stage has its weight, too.
    """

    elsewhere = True  # so that it, and its weight, is not taken for a module of this stage

    def __init__(self, original: nn.Embedding, *, shared: bool = False) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = original.num_embeddings, original.embedding_dim
        self.dtype = original.weight.dtype
        # A parameter under its name, so that it is saved and loaded as in the whole model.
        self.weight: Tensor | Outline = original.weight if shared else Outline(original.weight)

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        like = torch.empty((), dtype=self.dtype, device=ids.device)
        return zeros(*ids.shape, self.embedding_dim, like=like)


class ElsewhereWrapper(nn.Module):
    """An adapter around the embedding of another stage: the weight has its name with the adapter here, too. PEFT takes
    it off as it does an adapter."""

    elsewhere = True

    def __init__(self, base_layer: ElsewhereEmbedding) -> None:
        super().__init__()
        self.base_layer = base_layer

    @property
    def weight(self) -> Tensor | Outline:
        return self.base_layer.weight

    def get_base_layer(self) -> ElsewhereEmbedding:
        return self.base_layer

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = self.base_layer(ids)
        return result


def returns_tuple(module: nn.Module) -> bool:
    """Return whether the code of a module's forward ends in a tuple, as layers do whose model reads `outputs[0]`."""
    code = [instruction.opname for instruction in dis.get_instructions(inspect.unwrap(type(module).forward))]
    return ("BUILD_TUPLE", "RETURN_VALUE") in itertools.pairwise(code)


class ElsewhereLayer(nn.Module):
    """A layer or norm of another stage: returns what it got, in a tuple where the original returns one.

    Args:
        original: whose attributes of plain kinds models read from their layers, such as `attention_type`.
    """

    elsewhere = True

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._in_tuple = returns_tuple(original)
        for name, value in vars(original).items():
            if isinstance(value, bool | int | float | str) and name not in ("training", "gradient_checkpointing"):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        hidden = self._pass_on(split_hidden_states(args, kwargs)[0])
        return (hidden,) if self._in_tuple else hidden

    def _pass_on(self, hidden: Tensor) -> Tensor:
        return hidden


class Arrival(ElsewhereLayer):
    """The layer before a stage's first. [B, S, H], of which only the shape counts -> what the stage before has sent,
    in the layout of the residual stream."""

    def __init__(self, original: nn.Module, state: ParallelState) -> None:
        super().__init__(original)
        self._context = state.context
        self._state = state

    def _pass_on(self, hidden: Tensor) -> Tensor:
        stage = self._context.stage
        assert stage is not None and stage.received is not None
        tokens = self._state.tokens_of(hidden)
        stage.arrive(tokens)
        self._context.enter_layers(tokens)
        return stage.received


class Departure(ElsewhereLayer):
    """The layer after a stage's last: takes the residual stream for the next stage. -> zeros [B, S, H]."""

    def __init__(self, original: nn.Module, state: ParallelState) -> None:
        super().__init__(original)
        self._context = state.context

    def _pass_on(self, hidden: Tensor) -> Tensor:
        tokens, stage = self._context.tokens, self._context.stage
        assert tokens is not None and stage is not None
        stage.depart(hidden, tokens)
        self._context.leave_layers()
        return zeros(tokens.batch, tokens.seq, tokens.features or hidden.shape[-1], like=hidden)


class ElsewhereHead(nn.Module):
    """The head of the last stage. [B, S, H] -> zeros [B, S, 1]."""

    elsewhere = True

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = original.weight.shape
        self.weight = Outline(original.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return zeros(*hidden.shape[:-1], 1, like=hidden)
