"""Mixers whose heads or channels can be divided: what their parts are, by kinds and not by model types.

    Mamba 2       one projection makes z, x, B, C and dt; heads of x, groups of which share B and C
    delta net     q, k, v, a gate and two numbers a head; a head of q and k goes with several of v
    Kimi's        the same with a decay of each feature, which is made of a narrow latent, as the gate may be
    short conv    one projection makes B, C and x; every channel by itself
    Mamba 1       one projection makes x and z; dt, B and C are made of the x of all channels, or of those of a head

A kind is known by the modules and parameters that a mixer has, and by sizes that explain their shapes. Its own code
then runs on random numbers, for all heads and for those of some ranks: what arrives at its last projection has to be
the same. No communication, no change to the model.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_axonn.architectures.norm_probe import gated_norm_kind
from hf_axonn.architectures.trials import EXACT, Wide, close, isolate, replace_forwards
from hf_axonn.compat.bitsandbytes import is_four_bit
from hf_axonn.engine.linears import is_linear, linear_size
from hf_axonn.layers.base import replaced
from hf_axonn.layers.head_exchange import take_heads
from hf_axonn.layers.mixer import GatedNormKind
from hf_axonn.topology.grid import Grid, GridPosition, divisors
from hf_axonn.topology.heads import Heads, feature_ranges, own_count


Parts = dict[str, tuple[int, tuple[str, ...]]]  # name -> dim, and what it consists of (topology/heads.py)


@dataclass(frozen=True)
class MixerParts:
    """The parts of a mixer; names are relative to it.

    Attributes:
        columns, row: its projections, and what their outputs consist of (topology/heads.py).
        query, kv: numbers of heads, and of groups of them; 0 where channels belong to no head.
        attributes: of the mixer, which hold a number of the full model -> what it counts.
        parameters: parameters and buffers of which a rank uses a part -> the dim, and what it consists of.
        linears: Linears beside the projections; `parameters` has their weights.
        sums: those of them that every rank gives its own channels, and whose output all channels read.
        norm: the norm over the features of all heads before the row layer, if any.
        gate: what that norm computes.
        direct: whether the code projects its input as it is, where no mask is given.
        masks: whether it multiplies it by its mask before, where one is given; None where it does something else.
    """

    columns: dict[str, tuple[str, ...]]
    row: str
    query: int = 0
    kv: int = 0
    attributes: dict[str, str] = field(default_factory=dict)
    parameters: Parts = field(default_factory=dict)
    linears: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    norm: str = ""
    gate: GatedNormKind | None = None
    direct: bool = True
    masks: bool | None = None

    @property
    def heads_or_channels(self) -> tuple[str, ...]:
        """Return what the input of the row layer consists of."""
        return ("query",) if self.query else ("own",)


CHUNK = 4  # tokens of a chunk of a scan in a trial
TOKENS = 6
_TRIED: dict[tuple, MixerParts | str] = {}  # what trials have found out, by class, parts and shapes


def mixer_parts(module: nn.Module) -> MixerParts | None:
    """Return the parts of a module that looks like a mixer, untried."""
    for kind in (_mamba2, _delta_net, _delta_attention, _short_conv, _mamba1, _mamba1_of_heads):
        with contextlib.suppress(AttributeError, ZeroDivisionError):
            parts = kind(module)
            if parts is not None and _explains(module, parts):
                counts = {name: kind for name, kind in parts.attributes.items() if hasattr(*_place(module, name))}
                return replace(parts, attributes=counts)
    return None


def divide_mixer(module: nn.Module) -> MixerParts | str:
    """Return the parts of a mixer whose code runs on some of its heads or channels; else why it cannot be divided."""
    parts = mixer_parts(module)
    if parts is None:
        return "not known as a block"
    if parts.norm:
        size = linear_size(module.get_submodule(parts.row))[1]
        parts = replace(parts, gate=gated_norm_kind(module.get_submodule(parts.norm), size))
        if parts.gate is None or parts.gate.width % (size // parts.query):
            return f"its {parts.norm} is no RMSNorm of groups of heads with a gate"
    look = (type(module), str(parts), tuple((name, each.shape) for name, each in _tensors(module, parts)))
    if look not in _TRIED:
        _TRIED[look] = _try(module, parts)
    return _TRIED[look]


def _mamba2(mixer: Any) -> MixerParts | None:
    if not _has(mixer, "in_proj conv1d out_proj A_log D dt_bias"):
        return None
    heads, groups = mixer.num_heads, mixer.n_groups
    inner, channels = linear_size(mixer.out_proj)[1], len(mixer.conv1d.weight)
    width, state = inner // heads, (channels - inner) // (2 * groups)
    mixed = (f"query:{width}", f"kv:{state}", f"kv:{state}")
    every: Parts = {name: (0, ("query",)) for name in ("A_log", "D", "dt_bias")}
    if "mup_vector" in mixer._buffers:
        every["mup_vector"] = (2, (f"query:{width}", *mixed, "query:1"))
    counts = {"num_heads": "query", "intermediate_size": "query", "n_groups": "kv", "conv_dim": ",".join(mixed)}
    return MixerParts(
        columns={"in_proj": (f"query:{width}", *mixed, "query:1")},
        row="out_proj",
        query=heads,
        kv=groups,
        attributes=counts,
        parameters=every | _conv("conv1d", mixer.conv1d, mixed),
        norm="norm" if any(True for _ in mixer.norm.parameters()) else "",
    )


def _delta_net(mixer: Any) -> MixerParts | None:
    if not _has(mixer, "conv1d A_log dt_bias"):
        return None
    values, keys, of_key, of_value = mixer.num_v_heads, mixer.num_k_heads, mixer.head_k_dim, mixer.head_v_dim
    mixed = (f"kv:{of_key}", f"kv:{of_key}", f"query:{of_value}")
    row, query = "out_proj", values
    columns: dict[str, tuple[str, ...]]
    if _has(mixer, "in_proj_qkvz in_proj_ba"):  # what goes with a head of keys stands side by side
        query = keys
        columns = {"in_proj_qkvz": ("query",), "in_proj_ba": ("query",)}
        mixed = (f"query:{of_key}", f"query:{of_key}", f"query:{values // keys * of_value}")
    elif _has(mixer, "in_proj_qkv in_proj_z in_proj_b in_proj_a"):
        columns = {"in_proj_qkv": mixed} | {f"in_proj_{name}": ("query",) for name in "zba"}
    elif _has(mixer, "q_proj k_proj v_proj a_proj b_proj g_proj o_proj"):
        row = "o_proj"
        columns = {f"{name}_proj": ("kv",) if name in "qk" else ("query",) for name in "qkvabg"}
    else:
        return None
    counts = {"num_v_heads": "query", "value_dim": "query", "num_k_heads": "kv", "key_dim": "kv"}
    every: Parts = {name: (0, ("query",)) for name in ("A_log", "dt_bias")}
    return MixerParts(columns, row, query, keys, counts, every | _conv("conv1d", mixer.conv1d, mixed))


def _delta_attention(mixer: Any) -> MixerParts | None:
    if not _has(mixer, "q_proj k_proj v_proj b_proj o_proj conv1d forget_gate.A_log forget_gate.dt_bias"):
        return None
    heads, inner = mixer.num_heads, []
    columns: dict[str, tuple[str, ...]] = {f"{name}_proj": ("query",) for name in "qkvb"}
    every = _conv("conv1d", mixer.conv1d, 3 * (f"query:{mixer.head_dim}",))
    every["forget_gate.A_log"] = (list(mixer.forget_gate.A_log.shape).index(heads), ("query",))
    every["forget_gate.dt_bias"] = (0, ("query",))
    for made in ("forget_gate.f", "g"):
        if _has(mixer, f"{made}_proj"):
            columns[f"{made}_proj"] = ("query",)
        else:  # down to a latent, which every rank has in full, and up to its heads
            columns[f"{made}_a_proj"] = ("all",)
            inner.append(f"{made}_b_proj")
            parameters = mixer.get_submodule(inner[-1]).named_parameters()
            every |= {f"{inner[-1]}.{name}": (0, ("query",)) for name, _ in parameters}
    counts = {"num_heads": "query", "qkv_dim": "query", "forget_gate.num_heads": "query"}
    return MixerParts(columns, "o_proj", heads, heads, counts, every, linears=tuple(inner))


def _short_conv(mixer: Any) -> MixerParts | None:
    if not _has(mixer, "in_proj conv out_proj"):
        return None
    return MixerParts({"in_proj": ("own", "own", "own")}, "out_proj", parameters=_conv("conv", mixer.conv, ("own",)))


def _mamba1(mixer: Any) -> MixerParts | None:
    if not _has(mixer, "in_proj conv1d x_proj dt_proj out_proj A_log D") or mixer.x_proj.bias is not None:
        return None
    every: Parts = {name: (0, ("own",)) for name in ("A_log", "D", "dt_proj.weight", "dt_proj.bias")}
    every |= {"x_proj.weight": (1, ("own",))} | _conv("conv1d", mixer.conv1d, ("own",))
    inner = ("x_proj", "dt_proj")
    return MixerParts({"in_proj": ("own", "own")}, "out_proj", parameters=every, linears=inner, sums=("x_proj",))


def _mamba1_of_heads(mixer: Any) -> MixerParts | None:
    own = "x_proj_weight dt_proj_weight dt_proj_bias A_log D"
    if not _has(mixer, f"in_proj conv1d out_proj {own}"):
        return None
    heads = mixer.n_mamba_heads
    every: Parts = {name: (0, ("query",)) for name in own.split()}
    every |= _conv("conv1d", mixer.conv1d, ("query",))
    return MixerParts({"in_proj": ("query",)}, "out_proj", heads, heads, {"n_mamba_heads": "query"}, every)


def _has(module: nn.Module, names: str) -> bool:
    places = (_place(module, name) for name in names.split())
    return all(isinstance(getattr(owner, name, None), (nn.Module, nn.Parameter)) for owner, name in places)


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module inside of another that has what "a.b.c" names, and "c"."""
    owner, _, child = name.rpartition(".")
    return module.get_submodule(owner), child


def _conv(name: str, conv: nn.Module, channels: tuple[str, ...]) -> Parts:
    """The parameters of a convolution of each channel along the row."""
    if not isinstance(conv, nn.Conv1d) or conv.groups != conv.in_channels or conv.groups != conv.out_channels:
        raise AttributeError("it mixes channels")
    return {f"{name}.{child}": (0, channels) for child, each in conv._parameters.items() if each is not None}


def _explains(module: nn.Module, parts: MixerParts) -> bool:
    """Return whether the sizes of a kind explain the shapes of a module, which has no other Linears."""
    linears = {name: each for name, each in module.named_modules() if is_linear(each)}
    if linears.keys() != {*parts.columns, parts.row, *parts.linears}:
        return False
    if any(is_four_bit(linears[name]) for name in parts.linears):  # whose weights cannot be taken apart
        return False
    if linear_size(linears[parts.row])[1] % max(parts.query, 1) or parts.query % max(parts.kv, 1):
        return False
    here = Grid().place(0)
    heads = Heads.divide(parts.query, parts.kv, here) if parts.query else None
    sizes = [(linear_size(linears[name])[0], segments) for name, segments in parts.columns.items()]
    tensors = dict(_tensors(module, parts))
    sizes += [(tensors[name].shape[dim], segments) for name, (dim, segments) in parts.parameters.items()]
    try:
        for size, segments in sizes:
            feature_ranges(size, segments, heads, here)
    except ValueError:
        return False
    return True


def _tensors(module: nn.Module, parts: MixerParts) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers of a mixer, but for those of its projections."""
    for name, each in itertools.chain(module.named_parameters(), module.named_buffers()):
        if name.rpartition(".")[0] not in (*parts.columns, parts.row) and each.is_floating_point():
            yield name, each


def _try(module: nn.Module, parts: MixerParts) -> MixerParts | str:
    """Return the parts with what a trial has found out about them; else why the mixer cannot be divided."""
    trial = _Trial(module, parts)
    # Few ranks, and as many as there are heads; channels are divided with padding.
    counts = divisors(parts.query)[1:] or [2, 3]
    try:
        with isolate(), Wide(), torch.no_grad(), _reference_functions(module):
            full, direct = trial.run(None)
            if not trial.ends:
                return "its code changes what its last projection returns"
            for size, last in itertools.product({counts[0], counts[-1]}, (False, True)):
                here = Grid(x=size).place(size - 1 if last else 0)
                expected = [trial.take(whole, parts.heads_or_channels, here) for whole in full]
                if not all(map(_equal, expected, trial.run(here)[0])):
                    return "its code computes something else of some of its heads"
    except Exception as error:  # whatever a class does with numbers of the full model
        return f"its code does not run on some of its heads ({type(error).__name__})"
    return replace(parts, direct=direct, masks=trial.masks())


def _equal(truth: Tensor, ours: Tensor) -> bool:
    return truth.shape == ours.shape and close(truth, ours, EXACT)


class _Trial:
    """Runs of a mixer's code on random numbers, with what a rank has of them.

    Args:
        module: the mixer, whose parameters may have no values yet.

    Attributes:
        ends: whether the last run returned what its row layer did.
        projected: what the projections got in the last run.
    """

    def __init__(self, module: nn.Module, parts: MixerParts) -> None:
        self.module, self.parts, self.ends = module, parts, False
        self.projected: list[Tensor] = []
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

        self.tensors = {name: random(*each.shape) for name, each in _tensors(module, parts)}
        linears = {name: linear_size(module.get_submodule(name)) for name in (*parts.columns, *parts.sums)}
        self.outputs = {name: random(2, TOKENS, rows) for name, (rows, _) in linears.items()}
        self.hidden = random(2, TOKENS, next(cols for _, cols in linears.values()))

    def heads(self, here: GridPosition) -> Heads | None:
        """The division of the heads at a position."""
        return Heads.divide(self.parts.query, self.parts.kv, here) if self.parts.query else None

    def take(self, full: Tensor, segments: tuple[str, ...], here: GridPosition, dim: int = -1) -> Tensor:
        """The part at a position of a tensor; all of it without segments."""
        return take_heads(full, dim, segments, self.heads(here), here) if segments else full

    def masks(self) -> bool | None:
        """Return whether the code multiplies its input by its mask before it projects it; None where a mask changes it
        otherwise."""
        if "attention_mask" not in inspect.signature(self.module.forward).parameters:
            return False
        mask = torch.ones(2, TOKENS, dtype=torch.long, device="cpu")
        mask[1, :2] = 0
        try:
            with isolate(), Wide(), torch.no_grad(), _reference_functions(self.module):
                _, direct = self.run(None, attention_mask=mask)
        except Exception:  # code that takes another mask
            return None
        masked = self.hidden * mask[:, :, None]
        return False if direct else True if all(torch.equal(masked, each) for each in self.projected) else None

    def run(self, here: GridPosition | None, **given_beside: Tensor) -> tuple[list[Tensor], bool]:
        """Return what the sums and the row layer get, at a position or of the full model, and whether every projection
        got the mixer's input itself."""
        module, parts = self.module, self.parts
        # Of the input a rank may have a part too, as y divides it; only projections may use it.
        given = self.hidden if here is None else self.hidden[..., :1]
        here = here or Grid().place(0)
        seen: list[Tensor] = []
        direct: list[bool] = []
        self.projected = []

        def project(name: str, hidden: Tensor) -> Tensor:
            direct.append(hidden is given)
            self.projected.append(hidden)
            return self.take(self.outputs[name], parts.columns[name], here)

        def note(output: Tensor, hidden: Tensor) -> Tensor:
            seen.append(hidden)
            return output

        stubs: dict[nn.Module, Callable] = {module.get_submodule(parts.row): functools.partial(note, self.hidden)}
        stubs |= {module.get_submodule(name): functools.partial(project, name) for name in parts.columns}
        stubs |= {module.get_submodule(name): functools.partial(note, self.outputs[name]) for name in parts.sums}
        if parts.norm:
            stubs[module.get_submodule(parts.norm)] = lambda hidden, gate: hidden + torch.cos(gate)
        shown: dict[str, Any] = {"chunk_size": CHUNK} if hasattr(module, "chunk_size") else {}
        for name, kind in parts.attributes.items():
            shown[name] = own_count(getattr(*_place(module, name)), kind, self.heads(here), here)
        for name, full in self.tensors.items():
            dim, segments = parts.parameters.get(name, (0, ()))
            shown[name] = self.take(full, segments, here, dim)
        with contextlib.ExitStack() as stack:
            stack.enter_context(replace_forwards(module, stubs))
            for name, value in shown.items():
                owner, child = _place(module, name)
                stack.enter_context(replaced(vars(owner), {child: value}))
            self.ends = module.forward(given, **given_beside) is self.hidden
        return seen, all(direct)


@contextlib.contextmanager
def _reference_functions(module: nn.Module) -> Iterator[None]:
    """Let the code of a mixer find Transformers' own functions, where a package of kernels, for GPUs, has taken their
    place."""
    names = inspect.unwrap(type(module).forward).__globals__
    own = {name: each for name, each in names.items() if getattr(each, "__module__", None) == names["__name__"]}
    with replaced(names, {name: each.__wrapped__ for name, each in own.items() if hasattr(each, "__wrapped__")}):
        yield
