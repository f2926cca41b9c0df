"""The memory of head and loss in gpu.py: Transformers' own, and in chunks as the engine does it.

The engine leaves a model on a grid of one rank alone, so it is installed here by hand. What is counted is what head
and loss need besides their results, the gradients of the head's weight and of the hidden states. Promised: less than
two chunks of float32 logits, for any vocabulary and number of tokens.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_axonn import Grid
from hf_axonn.compat.peft import without_peft
from hf_axonn.config import AxonnConfig
from hf_axonn.losses import head_chunks as engine_loss
from hf_axonn.parallel import parallelize


SMOKE_CHUNK = 2**12  # several chunks also on tiny sizes


def peak_bytes(work: Callable[[], object], device: torch.device) -> tuple[object, int]:
    """What `work` returns, and the memory allocated at most while it ran beyond what was allocated before.

    0 on a CPU, of which torch keeps no count.
    """
    gc.collect()
    if device.type != "cuda":
        return work(), 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


def engine_on_one_rank(model: nn.Module) -> nn.Module:
    """The engine's sharded layers and loss on a model that is not sharded. Needs torch.distributed with one rank."""
    inner, config = without_peft(model), AxonnConfig(grid=Grid())
    parallelize._apply(inner, parallelize._plan(inner, config), config, next(model.parameters()).device.type)
    return model


def loss_table(shapes: dict[str, dict], args: argparse.Namespace) -> tuple[str, bool]:
    """The table, and whether the promise is kept (always on a CPU)."""
    chunk = engine_loss.CHUNK_LOGITS
    if args.smoke:
        engine_loss.CHUNK_LOGITS = SMOKE_CHUNK
    promised = 2 * engine_loss.CHUNK_LOGITS * 4
    lines = [
        f"## Head and loss: {args.rows} rows of {args.sequence} tokens; promised: {promised / 2**30:.2f} GiB\n",
        "| model | Transformers, GiB | in chunks, GiB | difference of the losses |",
        "|---|---:|---:|---:|",
    ]
    kept = True
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if args.device.type == "cuda" else "gloo", init_method=f"file://{folder}/one", rank=0, world_size=1
        )
        try:
            for name, shape in shapes.items():
                config = LlamaConfig(**{**shape, "num_hidden_layers": 1}, max_position_embeddings=args.sequence)
                ids = torch.randint(
                    config.vocab_size,
                    (args.rows, args.sequence),
                    generator=torch.Generator().manual_seed(0),
                ).to(args.device)
                (stock, of_stock), (chunked, of_chunks) = _stock(config, ids), _chunked(config, ids)
                kept = kept and of_chunks <= promised
                difference = abs(stock - chunked)
                lines.append(f"| {name} | {of_stock / 2**30:.2f} | {of_chunks / 2**30:.2f} | {difference:.1e} |")
        finally:
            dist.destroy_process_group()
            engine_loss.CHUNK_LOGITS = chunk
    return "\n".join(lines) + "\n", kept


def _model(config: LlamaConfig, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(device).train()


def _results_bytes(config: LlamaConfig, ids: Tensor) -> int:
    """The gradients of the head's weight in float32, and of the hidden states in bfloat16."""
    return 4 * config.vocab_size * config.hidden_size + 2 * ids.numel() * config.hidden_size


def _stock(config: LlamaConfig, ids: Tensor) -> tuple[float, int]:
    model = _model(config, ids.device)
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden = model.model(ids).last_hidden_state.detach().to(torch.bfloat16).requires_grad_()

        def head_and_loss() -> Tensor:
            loss = model.loss_function(model.lm_head(hidden), ids, config.vocab_size)
            loss.backward()
            return loss.detach()

        loss, peak = peak_bytes(head_and_loss, ids.device)
    return float(loss), peak - _results_bytes(config, ids) if peak else 0


def _chunked(config: LlamaConfig, ids: Tensor) -> tuple[float, int]:
    model = engine_on_one_rank(_model(config, ids.device))
    with torch.autocast(ids.device.type, torch.bfloat16):
        deferred = model(ids, labels=ids).logits  # not formed yet: the loss below takes the head's weight from it
        # Gradients are formed in the forward pass of the loss.
        loss, peak = peak_bytes(lambda: model.loss_function(deferred, ids, config.vocab_size), ids.device)
    return float(loss.detach()), peak - _results_bytes(config, ids) if peak else 0
