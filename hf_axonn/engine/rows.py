"""Rows of a batch whose positions are divided over context, and the ways between whole rows and a rank's positions.

    whole   [B, S, ...]   what every rank of context is given, and gives back
    own     [B, L, ...]   L = 2 * ceil(S / (2 * context)) positions in a row. What lies behind the end of the row only
                          fills it up, and counts nowhere
    one stripe    rank i has the positions from i * L on
    two stripes   the row is dealt in 2 * context stripes of L / 2, of which rank i has i and 2 * context - 1 - i: a
                  position that sees those before it costs as much as there are, and so all ranks work alike

What a rank computes of its own positions is a part of a sum over context, as a partial result is over x or y.
Gradients are averaged over z, and with it over context, so the gradient of a part is multiplied by context once: where
the loss is summed, and where whole rows are gathered that all ranks then use alike (`scale_gradient`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_axonn.distributed.collectives import all_gather, all_reduce, all_to_all, exchange_rows, gather_replicated
from hf_axonn.distributed.mesh import GridMesh
from hf_axonn.engine.activation_layouts import pad_dim
from hf_axonn.engine.documents import starts_in_flash_attention
from hf_axonn.engine.dtensors import scale_gradient


@dataclass(frozen=True)
class Rows:
    """The rows of a batch that is passing through the model, and the positions of this rank.

    Args:
        mesh: whose context divides the positions.
        batch: B.
        length: S, positions of a whole row.
        position_ids: [1 or B, S], of whole rows.
        attention_mask: as the model was given it: of whole rows, or None.
        numbered: whether the caller has given `position_ids`.
        documents: whether masks tell documents apart by them, as in a pass without a cache.
        striped: whether a rank has two stripes of a row, and not one.
        divided: whether the code that runs has this rank's positions; else whole rows, as around the decoder of a
            model that puts images into them.
    """

    mesh: GridMesh
    batch: int
    length: int
    position_ids: Tensor
    attention_mask: Tensor | None = None
    numbered: bool = False
    documents: bool = False
    striped: bool = False
    divided: bool = True

    @property
    def parts(self) -> int:
        """Ranks that share the positions."""
        return self.mesh.size("context")

    @property
    def own_length(self) -> int:
        """L, positions of each rank."""
        return self.mesh.grid.positions(self.length)

    @property
    def stripe(self) -> int:
        """Positions of a stripe."""
        return self.own_length // 2 if self.striped else self.own_length

    @property
    def starts(self) -> list[int]:
        """Positions in the row at which the stripes of this rank begin, ascending."""
        index = self.mesh.index("context")
        stripes = (index, 2 * self.parts - 1 - index) if self.striped else (index,)
        return [stripe * self.stripe for stripe in stripes]

    @cached_property
    def document_starts(self) -> list[int]:
        """Places at which flash attention begins the documents of the first row (`starts_in_flash_attention`). Waits
        for the device."""
        return starts_in_flash_attention(self.position_ids[:1])

    @property
    def filled(self) -> int:
        """Positions of all ranks that lie behind the end of the row."""
        return self.own_length * self.parts - self.length

    def take(self, whole: Tensor, fill: int = 0) -> Tensor:
        """[B, S, ...] -> this rank's positions [B, L, ...]; behind the end of the row stands `fill`."""
        stripes = [whole[:, start : start + self.stripe] for start in self.starts]
        # Where the row ends in a stripe, those that follow have nothing of it.
        if missing := self.own_length - sum(each.shape[1] for each in stripes):
            stripes.append(whole.new_full((len(whole), missing, *whole.shape[2:]), fill))
        return torch.cat(stripes, dim=1) if len(stripes) > 1 else stripes[0]

    def take_mask(self, mask: Tensor | None = None) -> Tensor:
        """[B, S], or None for a mask that keeps all tokens -> this rank's part of the attention mask, [B, L]."""
        return self.take(torch.ones_like(self.position_ids).expand(self.batch, -1) if mask is None else mask)

    def is_own(self, tensor: Tensor) -> bool:
        """Return whether a tensor is [B, L, ...] of this rank's positions, and not of whole rows."""
        return tensor.shape[:2] == (self.batch, self.own_length)

    def gather(self, own: Tensor) -> Tensor:
        """[B, L, ...] -> whole rows [B, S, ...], which all ranks of context use alike. All-gather over context.

        Backward: this rank's positions of the gradient, times context.
        """
        return self._in_rows(self._blocks(own))

    def last(self, keep: int) -> int:
        """Return how many of its last positions each rank computes where only the last `keep` of a row are wanted:
        those behind the end of the row with them where they lie in one stripe, or else all."""
        return keep + self.filled if keep + self.filled <= self.stripe else self.own_length

    def gather_last(self, own: Tensor, keep: int) -> Tensor:
        """[B, last(keep), ...] -> the last `keep` positions of whole rows. All-gather over context, as `gather`."""
        if self.last(keep) == self.own_length:
            return self.gather(own)[:, -keep:]
        return self._blocks(own)[0 if self.striped else -1, :, :keep]

    def join(self, own: Tensor) -> Tensor:
        """[B, L, ...] -> whole rows [B, S, ...], of which each rank of context goes on with its own positions.
        All-gather over context; backward: the reduce-scatter of what each rank has for all positions."""
        return self._in_rows(all_gather(own.contiguous(), self.mesh.group("context")))

    def to_heads(self, blocks: Tensor) -> Tensor:
        """[context, B, L, F], what each rank of context needs of this one's positions -> whole rows [B, S, F] of what
        this rank needs. All-to-all over context, both ways."""
        return self._in_rows(all_to_all(blocks.contiguous(), self.mesh.group("context")))

    def to_positions(self, whole: Tensor) -> Tensor:
        """[B, S, F] of whole rows, other features on each rank of context -> this rank's positions of the features of
        all, [B, L, context * F]. All-to-all over context, both ways."""
        arrived = all_to_all(self._deal(whole), self.mesh.group("context"))
        return arrived.movedim(0, -2).flatten(-2)

    def with_reach(self, own: Tensor, reach: int) -> list[Tensor]:
        """[B, L, ...] -> of each stripe the `reach` positions before it and its own, [B, reach + stripe, ...]; of the
        first stripe of the row its own alone. For two stripes a rank; reach is at most a stripe.

        An exchange over context of the ends of stripes, which go to the ranks before and behind this one; backward:
        the same the other way.
        """
        index, last = self.mesh.index("context"), self.parts - 1
        first, second = own.split(self.stripe, dim=1)
        ends = [each[:, -reach:].movedim(1, 0) for each in (first, second)]
        # Stripe i is before one of the next rank, and stripe 2 * context - 1 - i before one of the previous rank.
        neighbours = {index - 1: ends[1], index + 1: ends[0]}
        sent = {rank: end for rank, end in neighbours.items() if 0 <= rank <= last}
        sizes = [reach if rank in sent else 0 for rank in range(self.parts)]
        rows = torch.cat([sent[rank] for rank in sorted(sent)])
        arrived = exchange_rows(rows, sizes, sizes, self.mesh.group("context")).split(reach)
        before = dict(zip(sorted(sent), arrived, strict=True))
        if index == last:  # its two stripes follow one another
            before[last + 1] = ends[0]
        return [
            torch.cat([before[rank].movedim(0, 1), own], dim=1) if rank in before else own
            for rank, own in ((index - 1, first), (index + 1, second))
        ]

    def sum(self, own: Tensor) -> Tensor:
        """Sum of what each rank has computed of its own positions. All-reduce over context; backward: times
        context."""
        return all_reduce(scale_gradient(own, self.parts), self.mesh.group("context"))

    def _blocks(self, own: Tensor) -> Tensor:
        """[B, L, ...] -> [context, B, L, ...], which all ranks use alike; all-gather, backward as `gather`."""
        return gather_replicated(scale_gradient(own.contiguous(), self.parts), self.mesh.group("context"))

    def _in_rows(self, blocks: Tensor) -> Tensor:
        """[context, B, L, ...] -> whole rows [B, S, ...]. No communication."""
        if self.striped:
            first, second = blocks.unflatten(2, (2, self.stripe)).unbind(2)
            blocks = torch.cat([first, second.flip(0)])
        return blocks.movedim(0, 1).flatten(1, 2).narrow(1, 0, self.length)

    def _deal(self, whole: Tensor) -> Tensor:
        """Whole rows [B, S, ...] -> the positions of each rank [context, B, L, ...], zeros behind the end of the row.
        The inverse of `_in_rows`; no communication."""
        filled = pad_dim(whole, 1, self.length + self.filled)
        if not self.striped:
            return filled.unflatten(1, (self.parts, self.own_length)).movedim(1, 0).contiguous()
        first, second = filled.unflatten(1, (2, self.parts, self.stripe)).unbind(1)
        return torch.cat([first, second.flip(1)], dim=2).movedim(1, 0).contiguous()
