"""The functions of the flash_attn package without their kernels: they check what a kernel would, and attend in torch.

    with flash_attention():                     Transformers finds flash_attn in this process
        model.config._attn_implementation_internal = "flash_attention_2"

Flash attention 3 and kernels of the Hub have no dropout among their arguments. A kernel's name is made known as
Transformers does that when it has loaded one.

On a CPU they take float64, so that a grid can be compared with one process. On fake CUDA tensors, which have no
values, the output has the right shape and depends on all inputs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import modeling_flash_attention_utils as utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


WIDEST = 256  # features of a head


@contextlib.contextmanager
def flash_attention(name: str = "flash_attention_2") -> Iterator[None]:
    """Let Transformers' implementation of this name call the functions of this file."""
    usual = name == "flash_attention_2"
    of_rows, of_documents = (
        each if usual else _without_dropout(each) for each in (flash_attn_func, flash_attn_varlen_func)
    )
    loaded = dict(
        _loaded_implementation=name,
        _flash_fn=of_rows,
        _flash_varlen_fn=of_documents,
        _flash_with_kvcache_fn=None,
        _pad_fn=utils._pad_input,
        _unpad_fn=utils._unpad_input,
        _process_flash_kwargs_fn=utils._lazy_define_process_function(of_documents),
        _process_with_kvcache_kwargs_fn=dict,
    )
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(name, flash_attention_forward)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    with mock.patch.multiple(utils, **loaded):
        yield


def _without_dropout(function: Callable) -> Callable:
    """The same function with a signature that has no dropout_p, and that refuses one."""
    signature = inspect.signature(function)
    others = [each for name, each in signature.parameters.items() if name not in ("dropout_p", "options")]

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Tensor:
        assert "dropout_p" not in options
        return function(*args, **options)

    call.__signature__ = signature.replace(parameters=others)
    return call


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attend in rows that are one document each: [B, S, heads, features]."""
    assert q.dim() == 4 and q.shape[0] == k.shape[0]
    _check(q, k, v)
    rows, lengths = q.shape[0], (q.shape[1], k.shape[1])
    ends = [torch.arange(rows + 1, dtype=torch.int32, device=q.device) * length for length in lengths]
    flat = (each.flatten(0, 1) for each in (q, k, v))
    return flash_attn_varlen_func(*flat, *ends, *lengths, **options).view(q.shape)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """Attend in documents that stand one after another: [tokens, heads, features], the i-th from cu_seqlens[i] on."""
    assert q.dim() == 3 and dropout_p == 0.0
    _check(q, k, v)
    for ends in (cu_seqlens_q, cu_seqlens_k):
        assert ends.dtype == torch.int32 and ends.dim() == 1 and ends.is_contiguous() and ends.device == q.device
    assert len(cu_seqlens_q) == len(cu_seqlens_k) > 1
    if isinstance(q, FakeTensor):
        return _depends_on_all(q, k, v)
    assert len(q), "no queries, no grid of a kernel"
    if max_seqlen_q == 1 and q.shape[1] != k.shape[1]:  # heads become queries there: Dao-AILab/flash-attention#1537
        assert len(q) == len(cu_seqlens_q) - 1, cu_seqlens_q
    for ends, longest, tensor in ((cu_seqlens_q, max_seqlen_q, q), (cu_seqlens_k, max_seqlen_k, k)):
        assert ends[0] == 0 and ends[-1] == len(tensor) and (ends.diff() >= 0).all(), ends
        assert int(longest) == ends.diff().max(), (longest, ends)
    documents = [
        _attend(q[first:last], k[start:stop], v[start:stop], softmax_scale, causal, window_size, softcap)
        for (first, last), (start, stop) in zip(
            itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True
        )
    ]
    return torch.cat(documents)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what a kernel refuses."""
    assert k.shape == v.shape
    assert q.shape[-1] == k.shape[-1] <= WIDEST and q.shape[-2] % k.shape[-2] == 0
    assert q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    assert all(tensor.stride(-1) == 1 for tensor in (q, k, v))
    if q.is_cuda:
        assert q.dtype in (torch.float16, torch.bfloat16), q.dtype


def _depends_on_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q * (k.sum() + v.sum())


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> Tensor:
    """Attend in one document, where the last query sees the last key. q [S, heads, features], k and v [T, ...]."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    scores = torch.einsum("shd,thd->hst", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(len(k)) - (torch.arange(len(q))[:, None] + len(k) - len(q))  # positions from query to key
    left, right = (math.inf if side < 0 else side for side in window)
    seen = (ahead <= (0 if causal else right)) & (-ahead <= left)
    return torch.einsum("hst,thd->shd", scores.masked_fill(~seen, -math.inf).softmax(dim=-1), v)
