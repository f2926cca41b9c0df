"""Decisions of the goldfish strategies about labels: pure functions of tokens, places and keys.

Whole numbers of 64 bits that wrap around, alike on every device, but for two comparisons of float32 numbers that the
authors' code makes. Tokens are [B, S] int64, h is the width of a window, and a hash has an answer for the labels
t = h .. S-1: [B, S - h].
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_axonn.goldfish.table import TABLE_SIZE


_GAMMA = -0x61C8864680B583EB  # 2**64 / golden ratio, made odd, as a signed number: SplitMix64's stride
_LOW_32 = (1 << 32) - 1


def by_table(tokens: Tensor, k: int, width: int, table: Tensor) -> Tensor:
    """The authors' hash: [B, S - h], whether the table's number for tokens t-h+1 .. t is below 1/k.

    Args:
        table: [TABLE_SIZE] float32.
    Source: `apply_goldfish`, strategy "hash-table", in lit_gpt/utils.py of github.com/ahans30/goldfish-loss.
    """
    return table[_products(tokens, width) % TABLE_SIZE] < 1 / k


def by_avalanche(tokens: Tensor, k: int, width: int) -> Tensor:
    """The authors' hash without a table: [B, S - h], whether 32 mixed bits of tokens t-h+1 .. t are below 2**32 / k.

    Each multiplication of Wang's hash is done twice there, first modulo 2**32 and then modulo 2**64, and its result is
    compared as a float32, which rounds it to 24 bits: both are part of the mask.

    Source: `hashint`, and `apply_goldfish` with the strategy "hash-avalanche", in lit_gpt/utils.py of
    github.com/ahans30/goldfish-loss; Thomas Wang, "Integer Hash Function", 2007, the hash of 64 bits.
    """
    state = _products(tokens, width)
    for factor, addend, shift in (((1 << 21) - 1, -1, 24), (265, 0, 14), (21, 0, 28)):
        state = ((state * factor + addend) & _LOW_32) * factor + addend
        state = state ^ _shift(state, shift)
    state = (state * ((1 << 31) + 1)) & _LOW_32
    return state.to(torch.float32) < _LOW_32 / k


def by_hash(tokens: Tensor, k: int, width: int) -> Tensor:
    """The paper's hash: [B, S - h]. The window is the h tokens before t, and their order counts.

    Source: arXiv 2406.10209, section 3, which leaves the hash open; SplitMix64's mixing (Steele, Lea and Flood, 2014).
    """
    length = tokens.shape[1]
    state = torch.zeros_like(tokens[:, width:])
    for back in range(width, 0, -1):
        state = _mix((state ^ tokens[:, width - back : length - back]) + _GAMMA)
    return _one_in(k, state)


def coins(samples: Tensor, length: int, k: int, seed: int, step: int) -> Tensor:
    """[B, length] independent coins: row b is the SplitMix64 stream of the key (seed, step, samples[b])."""
    return _one_in(k, _stream(samples, length, seed, step))


def coins_below(probability: float, samples: Tensor, length: int, seed: int, step: int) -> Tensor:
    """[B, length] independent coins of the same streams as `coins`, True with a probability below 1."""
    return _shift(_stream(samples, length, seed, step), 1) < int(probability * (1 << 63))


def seeded_coins(samples: Tensor, length: int, k: int, seed: int, step: int) -> Tensor:
    """[B, length] coins of torch's CPU generator, which row b seeds with the key (seed, step, samples[b]).

    torch takes the lower 32 bits of a seed, so of 2**32 pairs of rows one has the same coins. A shorter row has the
    first coins of a longer one.

    Returns:
        [B, length] bool on the CPU.
    """
    keys = [key % (1 << 64) for key in _keys(samples, seed, step).tolist()]
    rows = [draw_coins((length,), k, torch.Generator().manual_seed(key)) for key in keys]
    return torch.stack(rows) if rows else torch.empty(0, length, dtype=torch.bool)


def draw_coins(shape: tuple[int, ...], k: int, generator: torch.Generator) -> Tensor:
    """Coins as the authors' code draws them for its strategy "seeded_random": bool on the CPU, True for one in k.

    Source: `random_tensor == k` of `apply_goldfish` in lit_gpt/utils.py of github.com/ahans30/goldfish-loss.
    """
    return torch.randint(1, k + 1, shape, generator=generator) == k


def _products(tokens: Tensor, width: int) -> Tensor:
    """[B, S - h] int64 products of tokens t-h+1 .. t, modulo 2**64."""
    return tokens[:, 1:].unfold(1, width, 1).prod(dim=-1)


def _stream(samples: Tensor, length: int, seed: int, step: int) -> Tensor:
    """[B, length] int64: the SplitMix64 stream of each sample's key."""
    places = torch.arange(1, length + 1, device=samples.device)
    return _mix(_keys(samples, seed, step)[:, None] + places * _GAMMA)


def _keys(samples: Tensor, seed: int, step: int) -> Tensor:
    """[B] int64: one key for each seed, step and sample."""
    key = torch.zeros_like(samples)
    for part in (_to_signed(seed), _to_signed(step), samples):
        key = _mix((key ^ part) + _GAMMA)
    return key


def _one_in(k: int, hashed: Tensor) -> Tensor:
    """True for one value in k of evenly spread 64-bit numbers."""
    return _shift(hashed, 1) < (1 << 63) // k


def _mix(value: Tensor) -> Tensor:
    """Spread every bit of an int64 over all of them, one to one. Source: SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value ^ _shift(value, 30)) * _to_signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * _to_signed(0x94D049BB133111EB)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift right without sign: torch's own shift of an int64 repeats the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _to_signed(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
