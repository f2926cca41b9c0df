"""The keys and values of a teacher-forced pass, kept so that decoding need not compute them again.

A layer holds `[B, heads, columns, head_dim]`; all layers keep all columns, those with a sliding window too (their mask
is made from the distance of columns), so a row can be cut off after any token. Models whose layers keep anything else
(a recurrent state, keys shared among layers, chunks) are not cut: they are asked with `generate`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from hf_axonn_eval.extraction.scoring import CACHE_NAMES, core, has_prompt, parameters_of


_SPARE = 16  # columns by which a full layer grows


class Columns(DynamicLayer):
    """Keys and values of one layer, written in place: the layer of Transformers copies all of them for each token."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.columns = 0

    def hold(self, keys: Tensor, values: Tensor, columns: int) -> None:
        """Take over tensors [B, heads, room, head_dim] of which the first `columns` are filled."""
        self.keys, self.values, self.columns = keys, values, columns
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Add columns; returns all keys and values so far."""
        if not self.is_initialized:
            self.hold(key_states, value_states, key_states.shape[-2])
            return self.keys, self.values
        end = self.columns + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            self.keys, self.values = (
                _with_room(some, self.columns, end + _SPARE) for some in (self.keys, self.values)
            )
        self.keys[..., self.columns : end, :] = key_states
        self.values[..., self.columns : end, :] = value_states
        self.columns = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def get_seq_length(self) -> int:
        """Columns that are filled."""
        return self.columns


@dataclass(frozen=True)
class Row:
    """Some columns of one row of a cache: `length` tokens from column `start` on."""

    cache: Cache
    row: int
    start: int
    length: int


def empty_cache() -> Cache:
    """Make a cache for one forward pass, and for those that follow it."""
    return Cache(layer_class_to_replicate=Columns)


def can_be_kept(model) -> bool:
    """Return whether every layer of the model keeps keys and values, one column a token, and nothing else."""
    config = core(model).config.get_text_config()
    accepted = parameters_of(model)
    if accepted.isdisjoint(CACHE_NAMES) or not {"position_ids", "use_cache"} <= accepted:
        return False
    if config.is_encoder_decoder or has_prompt(model):
        return False
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()) or hasattr(config, "attention_chunk_size"):
        return False
    layers = DynamicCache(config=config).layers
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    return plain and len(layers) in (0, config.num_hidden_layers)


def is_filled(cache: Cache, rows: int) -> bool:
    """Return whether a pass over `rows` rows left the same number of columns in every layer."""
    return bool(cache.layers) and all(
        layer.columns == cache.layers[0].columns > 0 and layer.keys.shape[0] == len(layer.values) == rows
        for layer in cache.layers
    )


def rows_of(cache: Cache, rows: Sequence[int], *, room: int = 0) -> Cache:
    """Copy some rows, with room for more columns."""
    taken = Cache(layers=[Columns() for _ in cache.layers])
    for layer, into in zip(cache.layers, taken.layers, strict=True):
        index = torch.tensor(rows, dtype=torch.long, device=layer.keys.device)
        kinds = [some.index_select(0, index)[..., : layer.columns, :] for some in (layer.keys, layer.values)]
        into.hold(*(_with_room(some, layer.columns, layer.columns + room) for some in kinds), layer.columns)
    return taken


def join_rows(rows: Sequence[Row], room: int) -> Cache:
    """Make a cache of these rows, all ending in the same column, with room for `room` more.

    Columns before a row's first are masked, so they may hold anything but NaN, which times 0 would be NaN.
    """
    width = max(row.length for row in rows)
    device = rows[0].cache.layers[0].keys.device
    alike: dict[tuple[int, int], list[int]] = {}  # rows that end in the same column of a cache are copied together
    for place, row in enumerate(rows):
        alike.setdefault((id(row.cache), row.start + row.length), []).append(place)
    copies = []
    for (_, end), places in alike.items():
        wide = max(rows[place].length for place in places)
        index = [torch.tensor(some, device=device) for some in (places, [rows[place].row for place in places])]
        copies.append((rows[places[0]].cache, *index, end - wide, end))
    cache = Cache(layers=[Columns() for _ in rows[0].cache.layers])
    for number, layer in enumerate(cache.layers):
        kinds = []
        for kind in ("keys", "values"):
            like = getattr(rows[0].cache.layers[number], kind)
            tensor = like.new_empty((len(rows), like.shape[1], width + room, like.shape[3]))
            for source, into, chosen, start, end in copies:
                some = getattr(source.layers[number], kind).index_select(0, chosen)[..., start:end, :]
                tensor[..., : width - (end - start), :].index_fill_(0, into, 0)
                tensor[..., width - (end - start) : width, :].index_copy_(0, into, some)
            kinds.append(tensor)
        layer.hold(*kinds, width)
    return cache


def _with_room(tensor: Tensor, columns: int, room: int) -> Tensor:
    larger = tensor.new_empty((*tensor.shape[:-2], room, tensor.shape[-1]))
    larger[..., :columns, :] = tensor[..., :columns, :]
    return larger
