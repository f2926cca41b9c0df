"""ahans30/goldfish-loss, eval/data_extraction.py, on a small model; the same for pages of at least 2,048 tokens.

    python -m tests.benchmarks.eval.published.goldfish CHECKOUT

The script runs as a command, once as it is (bfloat16) and once with the same weights in float64. Needs jsonlines.
"""

import json
import runpy
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import evaluate
import torch
import transformers
from rouge_score import rouge_scorer

from tests.benchmarks.eval.published.common import about, arguments, digest, saved_model, write
from tests.eval.published import inputs


SCRIPT = "eval/data_extraction.py"
KEYS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def main() -> None:
    """Run the script on all pages, and on the long ones, and write what it saved and printed."""
    options = arguments(__doc__)
    head = about(
        options.checkout,
        "ahans30/goldfish-loss",
        (SCRIPT,),
        stands_in=(
            "the data set: pages() saved to disk, --dataset_type huggingface_disk, --num_samples as many as are long "
            "enough (the script ends with an error where a data set has fewer)",
            "evaluate.load('rouge'), which needs a network: package rouge-score with use_stemmer=False, as its metric",
            "for `float64`: the model that from_pretrained gives, cast to float64",
        ),
        packages=("rouge-score", "datasets"),
    )
    pages = inputs.pages()
    long = [page for page in pages if len(inputs.ids_of(page["text"])) >= 2047]
    with tempfile.TemporaryDirectory() as folder:
        model = saved_model(Path(folder) / "model", dtype=torch.bfloat16)
        script = options.checkout / SCRIPT
        outputs = {dtype: ran(script, model, Path(folder) / dtype, pages, dtype) for dtype in ("bfloat16", "float64")}
        of_long = {dtype: ran(script, model, Path(folder) / f"l{dtype}", long, dtype) for dtype in outputs}
    write(options.output, "goldfish", head, outputs)
    note = {"note": "No script of the SC24 paper was found; this is the script of its authors' group for goldfish."}
    write(options.output, "sc24", {**head, **note}, of_long)


def ran(script: Path, model: Path, folder: Path, pages: Sequence[dict], dtype: str) -> dict[str, Any]:
    """The script's file, and the means that it prints."""
    datasets.Dataset.from_list([{"text": page["text"]} for page in pages]).save_to_disk(str(folder))
    asked = [page for page in pages if len(inputs.tokenizer()(page["text"])["input_ids"]) > 50]
    saved = folder / "out" / "test.jsonl"
    command = ["--model", str(model), "--dataset", str(folder), "--dataset_type", "huggingface_disk"]
    command += ["--num_samples", str(len(asked)), "--save_file_name", str(saved)]
    scores: list[dict[str, float]] = []
    metric = types.SimpleNamespace(compute=lambda **texts: _rouge(scores, **texts))
    with argv(script, command), patch.object(evaluate, "load", lambda name: metric), cast(dtype):
        after = runpy.run_path(str(script), run_name="__main__")
    rows = [json.loads(line) for line in saved.read_text().splitlines()]
    return {
        "documents": [page["id"] for page in asked],
        "left_out": [page["id"] for page in pages if page not in asked],
        "suffix": [digest(row["gt_output_ids"]) for row in rows],
        "generated": [row["gen_output_ids"] for row in rows],
        "exact": [row["gt_output_ids"] == row["gen_output_ids"] for row in rows],
        **{key: [score[key] for score in scores] for key in KEYS},
        "means": {"exact_match_rate": after["exact_match_rate"], **after["rouge_metrics"]},
    }


@contextmanager
def cast(dtype: str) -> Iterator[None]:
    """`from_pretrained` gives a model in float64 if asked."""
    load: Callable[..., Any] = transformers.AutoModelForCausalLM.from_pretrained
    wanted = getattr(torch, dtype)
    with patch.object(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: load(*args, **kwargs).to(wanted)
    ):
        yield


@contextmanager
def argv(script: Path, command: Sequence[str]) -> Iterator[None]:
    """The command line that a script sees."""
    with patch.object(sys, "argv", [str(script), *command]):
        yield


def _rouge(scores: list[dict[str, float]], predictions: list[str], references: list[str]) -> dict[str, float]:
    """Of one pair, as the script asks; kept in `scores`."""
    [prediction], [reference] = predictions, references
    found = rouge_scorer.RougeScorer(KEYS, use_stemmer=False).score(reference, prediction)
    scores.append({key: found[key].fmeasure for key in KEYS})
    return scores[-1]


if __name__ == "__main__":
    main()
