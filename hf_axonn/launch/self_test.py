"""Test of `accelerate test` for a launch file with `axonn_config`: does the grid work on these processes?

    accelerate test --config_file axonn.yaml
    accelerate launch --config axonn.yaml -m hf_axonn.launch.self_test      the same

A bare Accelerator, as a script has it: its data loaders, operations, and some steps of a small model, which are
compared with the same steps on one process. Any part that is wrong ends the run with exit code 1.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from hf_axonn.parallel.parallelize import parallelize
from hf_axonn.plugin import AxonnPlugin


STEPS = 3
TOKENS, VOCABULARY = 16, 64
# Bounds of a loss's relative error to that of one process in float32: rounding, and that of 8 or 11 bits.
BOUNDS = {"no": 1e-3, "bf16": 5e-2, "fp16": 5e-2}


def main() -> None:
    """Run all parts. Collective over the world.

    Raises:
        RuntimeError: a part is wrong; the message says which, and what came out.
    """
    accelerator = Accelerator()
    plugin = accelerator.parallelism_config
    if not isinstance(plugin, AxonnPlugin):
        raise RuntimeError("no grid: start it by accelerate launch with a file that has axonn_config.")
    state = PartialState()
    accelerator.print(f"grid {plugin.grid}: {state.num_processes} process(es), {state.backend}, {state.device.type}")
    check_loader(accelerator)
    accelerator.print("data loaders: every row once, and the same rows on the ranks of x and y")
    check_operations(accelerator)
    accelerator.print("gather and reduce: each rank with rows of its own once")
    losses = check_training(accelerator, plugin)
    accelerator.print(f"training: {', '.join(f'{loss:.4f}' for loss in losses)}, as on one process")
    accelerator.end_training()


def check(right: bool, what: str) -> None:
    """Raise RuntimeError if a part is wrong."""
    if not right:
        raise RuntimeError(f"the grid does not work on these processes: {what}")


def check_loader(accelerator: Accelerator) -> None:
    """Check the rows that a prepared loader gives, over all ranks. Collective over the world."""
    positions = accelerator.num_processes
    rows: Any = [{"row": row} for row in range(4 * positions + 1)]
    counted, own = [], []
    for batch in accelerator.prepare(DataLoader(rows, batch_size=2, shuffle=True)):
        own += batch["row"].tolist()
        counted += accelerator.gather_for_metrics(batch)["row"].tolist()
    check(sorted(counted) == list(range(len(rows))), f"of {len(rows)} rows the loaders gave {sorted(counted)}.")
    here = accelerator.process_index
    for position, other in gather_object([(here, own)]):
        check((other == own) == (position == here), f"ranks {here} and {position} of data * z got {own} and {other}.")


def check_operations(accelerator: Accelerator) -> None:
    """Check gather and reduce. Collective over the world."""
    position, positions = accelerator.process_index, accelerator.num_processes
    own = torch.tensor([float(position)], device=accelerator.device)
    gathered = accelerator.gather(own).tolist()
    check(gathered == list(range(positions)), f"gather gave {gathered}.")
    total = accelerator.reduce(own, "sum").item()
    check(total == sum(range(positions)), f"reduce gave {total}.")


def check_training(accelerator: Accelerator, plugin: AxonnPlugin) -> list[float]:
    """Losses of a small model's first steps on the grid. Collective over the world."""
    positions = accelerator.num_processes
    steps = STEPS if accelerator.mixed_precision != "fp16" else 1  # after it the scaler may have left one out
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, VOCABULARY, (steps * positions, TOKENS), generator=generator)
    expected = []
    model, optimizer = new_model(accelerator.device)
    for ids in rows.to(accelerator.device).split(positions):
        loss = model(input_ids=ids, labels=ids).loss
        expected.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model, _ = new_model(accelerator.device)
    model, _ = parallelize(model, plugin.grid, config=plugin.config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    each: Any = list(rows)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(each, batch_size=1))
    found = []
    for ids in loader:
        loss = model(input_ids=ids, labels=ids).loss
        found.append(accelerator.gather(loss.detach().float().reshape(1)).mean().item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    bound = BOUNDS[accelerator.mixed_precision]
    close = len(found) == len(expected) and all(
        abs(here - there) <= bound * there for here, there in zip(found, expected, strict=True)
    )
    check(close, f"the losses are {found}, on one process {expected}.")
    return found


def new_model(device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    """A small Llama with the same weights on every rank, and its optimizer."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=TOKENS, **sizes))
    model = model.to(device).train()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


if __name__ == "__main__":
    main()
