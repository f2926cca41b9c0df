"""swiss-ai/apertus_memorization on a small model: what it cuts, what it decodes, and what it makes of it.

    python -m tests.benchmarks.eval.published.apertus CHECKOUT

Its `core/gutenberg_loader.py`, `core/inference.py` and `core/metrics.py` run as they are, with the offsets and prefix
lengths of its two scripts. vLLM is replaced by `generate` of Transformers with the same meaning: EOS is banned for
`min_tokens`, and one seed serves all draws of a call. Needs numba and datasets.
"""

import json
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.eval.published.common import about, arguments, digest, saved_model, write
from tests.eval.published import inputs


OFFSETS = (0, 1, 2, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)  # scripts/submit_offset_experiment.sh
PREFIXES = (50, 100, 250, 500, 1000, 2000, 3000, 4000, 5000)  # scripts/submit_prefix_length_experiment.sh
PREFIX_BUCKETS = (8, 24)  # --repetitions there
DRAWS, PREFIX, DRAWN = 400, 50, 50  # draws, tokens shown, and the tokens that a draw has to give
DRAWN_OFFSETS = (0, 16, 300)


@dataclass
class Output:
    """What vLLM says of one way of continuing a prompt."""

    token_ids: list[int]
    text: str = ""


class StandIn:
    """`vllm.LLM` as far as the authors use it; `asked` keeps the prompts of the last call."""

    def __init__(self, model: str, **settings: Any) -> None:
        named = types.SimpleNamespace
        self.model, self.asked, self.settings = inputs.model(), [], settings
        model_config = named(model=model, dtype="float64", max_model_len=8192)
        self.llm_engine = named(
            vllm_config=named(
                model_config=model_config,
                parallel_config=named(tensor_parallel_size=1),
                cache_config=named(gpu_memory_utilization=0.0, block_size=0),
                scheduler_config=named(max_num_seqs=0, max_num_batched_tokens=0),
            )
        )

    def generate(self, prompt_token_ids: list[list[int]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        """Prompts of one length, all continued in one batch."""
        self.asked = prompt_token_ids
        drawn = sampling_params.temperature > 0
        nucleus = {"temperature": sampling_params.temperature, "top_p": sampling_params.top_p, "top_k": 0}
        torch.manual_seed(getattr(sampling_params, "seed", 0))
        found = self.model.generate(
            torch.tensor(prompt_token_ids),
            do_sample=drawn,
            min_new_tokens=sampling_params.min_tokens,
            max_new_tokens=sampling_params.max_tokens,
            pad_token_id=inputs.tokenizer().eos_token_id,
            **(nucleus if drawn else {}),
        )
        suffixes = found[:, len(prompt_token_ids[0]) :].tolist()
        return [types.SimpleNamespace(outputs=[Output(suffix)]) for suffix in suffixes]


def authors_code(checkout: Path) -> tuple[Any, Any, Any]:
    """Their modules core.inference, core.gutenberg_loader and utils.exclude_noises, with the stand-in for vLLM."""
    sys.modules["vllm"] = types.SimpleNamespace(LLM=StandIn, SamplingParams=types.SimpleNamespace)
    sys.path.insert(0, str(checkout))
    from core import gutenberg_loader, inference
    from utils import exclude_noises

    return inference, gutenberg_loader, exclude_noises


def main() -> None:
    """Run both experiments greedily, count draws, and write the numbers."""
    options = arguments(__doc__)
    inference, loader, noises = authors_code(options.checkout)
    with tempfile.TemporaryDirectory() as folder:
        engine = inference.ApertusInference(str(saved_model(Path(folder) / "model")), tensor_parallel_size=1)
        rows = [row for place in configurations() for row in measured(engine, loader, Path(folder), *place)]
        draws = [row for document in inputs.long_documents() for row in counted(engine, document)]
        short = short_documents(loader, Path(folder))
    head = about(
        options.checkout,
        "swiss-ai/apertus_memorization",
        ("core/inference.py", "core/gutenberg_loader.py", "core/metrics.py", "utils/exclude_noises.py"),
        stands_in=(
            "vllm.LLM and SamplingParams: `generate` of Transformers in float64, the end of the text banned up to "
            "min_tokens, torch.manual_seed(seed) before a call; so single draws are not those of vLLM",
            "the Gutenberg data set: long_documents() as a JSON lines file, through load_gutenberg_tokens_offline",
        ),
        packages=("numba", "datasets"),
    )
    for row in rows:
        row["low_ttr"] = noises.is_low_ttr({"TTR_ref": row["ttr"]})
    greedy, nucleus = ({key: [row[key] for row in some] for key in some[0]} for some in (rows, draws))
    dropped = sorted(f"{stage}/{bucket}/{row}" for stage, bucket, row in noises.KNOWN_CONTAMINATIONS)
    outputs = {"greedy": greedy, "nucleus": {"draws": DRAWS, **nucleus}, "known_contaminations": dropped, **short}
    write(options.output, "apertus", head, outputs)


def configurations() -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Offset, prefix length and buckets of each run of `main.py`."""
    every = tuple(document["bucket"] for document in inputs.long_documents())
    yield from ((offset, 500, every) for offset in OFFSETS)
    yield from ((0, prefix, PREFIX_BUCKETS) for prefix in PREFIXES if prefix != 500)


def measured(
    engine: Any, loader: Any, folder: Path, offset: int, prefix: int, buckets: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """A row for each document: what was asked, what came back, and their metrics."""
    chosen = [document for document in inputs.long_documents() if document["bucket"] in buckets]
    lines = folder / f"{offset}-{prefix}.jsonl"
    lines.write_text("".join(json.dumps({"input_ids": some["input_ids"]}) + "\n" for some in chosen))
    sequences = loader.load_gutenberg_tokens_offline(
        str(lines), prefix, 500, offset=offset, num_proc=1, cache_dir=str(folder / "cache")
    )
    results = engine.process_dataset(list(sequences), prefix, 500, str(folder / "out.jsonl"), show_progress=False)
    for document, asked, result in zip(chosen, engine.llm.asked, results, strict=True):
        true, generated = result["true_suffix"], result["generated_suffix"]
        yield {
            "document": document["id"],
            "offset": offset,
            "prefix": prefix,
            "window": digest([*asked, *true]),
            "generated": digest(generated),
            "exact": true == generated,
            "rouge_l": result["Rouge-L"],
            "lccs": result["lcs_norm"],
            "ttr": result["TTR_ref"],
            "ttr_generated": result["TTR_gen"],
        }


def counted(engine: Any, document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """For each place how many of DRAWS draws of `nucleus` give the DRAWN tokens after the prefix."""
    for offset in DRAWN_OFFSETS:
        ids = document["input_ids"][offset : offset + PREFIX + DRAWN]
        drawn, _ = engine.generate_batch([ids[:PREFIX]] * DRAWS, DRAWN, "nucleus", temperature=1.0, top_p=0.9)
        exact = sum(some == ids[PREFIX:] for some in drawn)
        yield {
            "document": document["id"],
            "offset": offset,
            "window": digest([*engine.llm.asked[0], *ids[PREFIX:]]),
            "exact": exact,
        }


def short_documents(loader: Any, folder: Path) -> dict[str, str]:
    """What becomes of a document that is too short for an offset, beside one that is long enough."""
    lines = folder / "short.jsonl"
    ids = inputs.long_documents()[0]["input_ids"]
    lines.write_text("".join(json.dumps({"input_ids": ids[:size]}) + "\n" for size in (1200, 1600)))
    try:
        found = loader.load_gutenberg_tokens_offline(
            str(lines), 500, 500, offset=512, num_proc=1, cache_dir=str(folder / "cache")
        )
        return {"short_documents": f"{len(found)} of 2 are left"}
    except Exception as error:  # of pyarrow or datasets, whichever their versions have
        return {"short_documents": f"the code ends with {type(error).__name__}"}


if __name__ == "__main__":
    main()
