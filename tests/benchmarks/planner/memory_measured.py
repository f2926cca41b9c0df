"""Memory of a rank, predicted and measured: real ranks on gloo train the 55M Llama of peers.py on several grids.

    python -m tests.benchmarks.planner.memory_measured --output FILE                  grids of 4 and of 8 ranks
    python -m tests.benchmarks.planner.memory_measured --ranks 4 --size tiny
    python -m tests.benchmarks.planner.memory_measured --ranks 4 --size mixture  a mixture (latent: DeepSeek's)

Measured is what meter.py counts: every storage from the operation that makes it until its last tensor is gone, weights
and AdamW's moments besides, at the worst moment of the second step, on the rank that holds most. (Of a mixture it is
the mean of the ranks: an untrained router spreads tokens unevenly, which a prediction cannot know.) It leaves out
what no tensor holds (buffers of gloo and of the kernels, what an allocator wastes), as the model does. Exit code 1:
an error above TOLERANCE. The simulated ranks of simulate.py are counted in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig  # noqa: E402

from hf_axonn import Grid, __version__, parallelize  # noqa: E402
from hf_axonn.config import AxonnConfig  # noqa: E402
from hf_axonn.planner.memory import memory  # noqa: E402
from tests.benchmarks.peers.peers import model_config  # noqa: E402
from tests.benchmarks.planner.simulate import TOLERANCE, Case, train  # noqa: E402


SEQ, ROWS = 128, 8  # tokens a row, rows of all (data, z) positions together
GRIDS = {
    4: [Grid(data=4), Grid(z=4), Grid(x=4), Grid(y=4), Grid(data=2, z=2), Grid(z=2, x=2), Grid(y=2, x=2)],
    8: [Grid(data=2, z=2, x=2), Grid(z=2, y=2, x=2), Grid(data=2, y=2, x=2), Grid(z=4, x=2)],
}
MIB = 2**20


_SIZES = dict(
    hidden_size=512, num_hidden_layers=3, num_attention_heads=8, vocab_size=8192, max_position_embeddings=SEQ
)
MIXTURES = {
    "mixture": MixtralConfig(
        **_SIZES, num_key_value_heads=4, intermediate_size=1024, num_local_experts=8, num_experts_per_tok=2
    ),
    # Values as wide as queries: torch's attention on CPUs keeps whole squares where they are not.
    "latent": DeepseekV3Config(
        **_SIZES, num_key_value_heads=8, intermediate_size=1536, moe_intermediate_size=256, n_routed_experts=16,
        num_experts_per_tok=4, n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=256, kv_lora_rank=128,
        qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=96,
    ),
}  # fmt: skip


def cases(ranks: int, size: str) -> list[Case]:
    """What is measured on so many ranks: each grid in fp32, and in bf16 on fp32 weights with checkpointing."""
    config = MIXTURES.get(size) or model_config(size, sequence=SEQ)
    return [
        Case(config, grid, rows=ROWS // grid.dp_size, seq=SEQ, checkpointing=bf16, bf16=bf16)
        for grid in GRIDS[ranks]
        for bf16 in (False, True)
    ]


def predicted(case: Case) -> float:
    """Bytes of the rank that holds most, on gloo."""
    return memory(case.shape, case.grid, case.step, layout=case.shape.layout(case.grid), gloo=True).total


def peak(case: Case) -> int:
    """Bytes that this rank of the initialized world holds at the worst moment of its second step."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(case.config, dtype=torch.float32).train()
    model, _ = parallelize(model, case.grid, config=AxonnConfig(grid=case.grid, experts=case.experts))
    ids = torch.randint(case.config.vocab_size, (case.rows, case.seq))
    return train(model, case, ids, torch.tensor(case.rows * case.seq * case.grid.dp_size)).peak


def _rank(rank: int, work: Sequence[Case], folder: str) -> None:
    torch.set_num_threads(1)
    size = work[0].grid.size
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    found = [peak(case) for case in work]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(work: Sequence[Case], *, mean: bool = False) -> list[float]:
    """`peak` of each case, which are all of one number of ranks: the largest of all ranks, or their mean."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (work, folder), nprocs=work[0].grid.size, start_method="fork")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(work[0].grid.size)]
    return [(statistics.mean if mean else max)(of_ranks) for of_ranks in zip(*found, strict=True)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", choices=GRIDS, default=list(GRIDS))
    parser.add_argument("--size", choices=("60m", "tiny", *MIXTURES), default="60m", help="the model")
    parser.add_argument("--output", type=Path, help="write the table to this file too")
    options = parser.parse_args(arguments)
    what = f"the {options.size} {'model' if options.size in MIXTURES else 'Llama of peers.py'}"
    lines = [
        "# Memory of a rank: predicted and measured",
        "",
        f"`python -m tests.benchmarks.planner.memory_measured`: {what}, {ROWS} rows of {SEQ} tokens, "
        f"AdamW, gloo. hf_axonn {__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}.",
        "",
        "| ranks | grid | step | predicted MiB | measured MiB | error |",
        "| --: | --- | --- | --: | --: | --: |",
    ]
    worst = 0.0
    for ranks in options.ranks:
        work = cases(ranks, options.size)
        for case, found in zip(work, measured(work, mean=options.size in MIXTURES), strict=True):
            said = predicted(case)
            worst = max(worst, abs(said / found - 1))
            step = "bf16, checkpointing" if case.bf16 else "fp32, all kept"
            lines.append(
                f"| {ranks} | {case.grid} | {step} | {said / MIB:.1f} | {found / MIB:.1f} | {said / found - 1:+.1%} |"
            )
    lines += ["", f"The largest error is {worst:.1%}; at most {TOLERANCE:.0%} is asked for."]
    print("\n".join(lines))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
