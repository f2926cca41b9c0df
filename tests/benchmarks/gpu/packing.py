"""Packed documents with one kind of attention, beside the same documents one by one: error, loss, seconds, memory.

    sdpa      torch's scaled_dot_product_attention, with a mask of all pairs of tokens
    varlen    torch.nn.attention.varlen, which takes the bounds of documents; registered here, Transformers has it not
    flex      torch's flex attention with a block mask, compiled

The engine's layers on one rank, weights and activations in bfloat16. The truth is the stock model, one document at a
time. Whether documents see each other is asked as well: a token of the first is changed, and no other may notice.
"""

from __future__ import annotations

import argparse
import inspect
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen as torch_varlen
from transformers import AttentionInterface, AttentionMaskInterface

from tests.benchmarks.gpu import train
from tests.benchmarks.kernels.gpu_loss import engine_on_one_rank


NAMES = {"sdpa": "sdpa", "varlen": "torch_varlen", "flex": "flex_attention"}  # as Transformers calls them
DOCUMENTS, FEW_DOCUMENTS = (1500, 300, 2800, 64, 1028, 2500), (10, 3, 25, 1, 9, 16)  # tokens of each
# bfloat16 has 8 bits. A token that sees another document changes by as much as it is.
ERROR, LEAK = 3e-2, 1e-3
WARMUP, TIMED = 3, 5


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as Transformers asks: [1, heads, S, D] each -> [1, S, heads, D], and no weights."""
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    repeats = query.shape[1] // key.shape[1]  # fewer heads of keys are not taken by every release
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    takes_window = "window_size" in inspect.signature(torch_varlen.varlen_attn).parameters  # torch 2.10: is_causal
    causal: dict[str, Any] = {"window_size": (-1, 0)} if takes_window else {"is_causal": True}
    bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    return torch_varlen.varlen_attn(query, key, value, *bounds, **causal)[None], None


AttentionInterface.register(NAMES["varlen"], varlen_attention)
AttentionMaskInterface.register(NAMES["varlen"], lambda *_, **__: None)


def make_batch(ids: Tensor, lengths: tuple[int, ...]) -> dict[str, Any]:
    """One row of all documents: positions that start again, and bounds as Transformers' flash attention takes them."""
    bounds = torch.tensor([0, *lengths], device=ids.device).cumsum(0).int()
    positions = torch.cat([torch.arange(length, device=ids.device) for length in lengths])[None]
    flash = dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=max(lengths), max_length_k=max(lengths))
    return dict(input_ids=ids, labels=ids, position_ids=positions, use_cache=False, **flash)


def hidden_states(model: nn.Module, **batch: Any) -> tuple[Tensor, float]:
    """The last hidden states [S, H] and the loss of one row."""
    with torch.no_grad():
        output = model(**batch, output_hidden_states=True)
    return output.hidden_states[-1][0].float(), float(output.loss)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of `options.attention`."""
    device = train.start()
    lengths = FEW_DOCUMENTS if options.smoke else DOCUMENTS
    with device:
        model = train.draw(options, torch.bfloat16).eval()
    ids = train.read_batches(model.config.vocab_size, 1, sum(lengths))[0].to(device)
    alone = [hidden_states(model, input_ids=part, labels=part)[0] for part in ids.split(lengths, dim=1)]
    truth = torch.cat(alone)

    model = engine_on_one_rank(model)
    model.set_attn_implementation(NAMES[options.attention])
    if device.type == "cpu":
        torch.compiler.set_stance("force_eager")  # inductor takes minutes there
    packed, loss = hidden_states(model, **make_batch(ids, lengths))
    changed = ids.clone()
    changed[0, 0] = (changed[0, 0] + 1) % model.config.vocab_size
    others, _ = hidden_states(model, **make_batch(changed, lengths))
    leak = (others - packed)[lengths[0] :].abs().max() / truth.abs().max()
    found = {"attention": options.attention, "tokens": sum(lengths), "documents": len(lengths), "loss": loss}
    found |= {"error": float((packed - truth).norm() / truth.norm()), "leak": float(leak)}
    found |= _timed(model.train(), make_batch(ids, lengths), device, options.attention)
    limits = {"error": ERROR, "leak": LEAK}
    failures = [
        f"{what}: {found[what]:.1e}, at most {most:.0e}" for what, most in limits.items() if not found[what] <= most
    ]
    return found | {"failures": failures}


def _timed(model: nn.Module, batch: dict[str, Any], device: torch.device, attention: str) -> dict[str, Any]:
    """Seconds of forward and backward, and the peak of memory; of flex on a CPU, which has no backward, of forward."""
    backward = device.type != "cpu" or attention != "flex"
    train.forget_peak(device)
    for step in range(WARMUP + TIMED):
        if step == WARMUP:
            train.synchronize(device)
            begin = time.perf_counter()
        with torch.set_grad_enabled(backward):
            loss = model(**batch).loss
        if backward:
            loss.backward()
            model.zero_grad()
    train.synchronize(device)
    seconds = (time.perf_counter() - begin) / TIMED
    return {"seconds": seconds, "backward": backward, "peak_bytes": train.peak_bytes(device)}
