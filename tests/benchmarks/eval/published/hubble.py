"""allegro-lab/hubble, hubble-lm-eval-tasks, on a small model: verbatim completion of passages and their loss.

    python -m tests.benchmarks.eval.published.hubble CHECKOUT

The tasks run in lm-evaluation-harness (package lm_eval), which hubble gives them to. Needs lm_eval.
"""

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import transformers
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from tests.benchmarks.eval.published.common import about, arguments, digest, write
from tests.eval.published import inputs


TASKS = "hubble-lm-eval-tasks/gutenberg_popular_hubble"
PREFIXES = (25, 50, 75, 100)


def main() -> None:
    """Run the tasks and write what they got and scored."""
    options = arguments(__doc__)
    names = ["gutenberg_popular_hubble", *(f"gutenberg_popular_hubble_verbatim_p{prefix}" for prefix in PREFIXES)]
    tokenizer = inputs.tokenizer(bos=False)
    tokenizer.pad_token = tokenizer.eos_token
    passages = datasets.Dataset.from_list([{"text": some["text"]} for some in inputs.passages()])
    everything = datasets.DatasetDict({"validation": passages})
    with (
        tempfile.TemporaryDirectory() as cache,
        patch.object(datasets, "load_dataset", lambda *args, **kwargs: everything),
        patch.object(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer),
    ):
        datasets.config.HF_DATASETS_CACHE = Path(cache)
        found = simple_evaluate(
            HFLM(pretrained=inputs.model(), tokenizer=tokenizer, batch_size=1, max_length=4096),
            tasks=names,
            task_manager=TaskManager(include_path=str(options.checkout / TASKS), include_defaults=False),
            bootstrap_iters=0,
            log_samples=True,
        )
    head = about(
        options.checkout,
        "allegro-lab/hubble",
        (f"{TASKS}/utils.py", *(f"{TASKS}/{name}.yaml" for name in names)),
        stands_in=(
            "the data set passages_gutenberg_popular: passages(); the tokenizer of hubble-1b: ours without a BOS",
            "lm_eval of this version in place of commit a7ca043 (hubble's README: newer ones should be compatible)",
            "float64 in place of bfloat16, batch size 1",
        ),
        packages=("lm_eval", "rouge-score", "datasets"),
    )
    outputs: dict[str, Any] = {"documents": [some["id"] for some in inputs.passages()]}
    for prefix, name in zip(PREFIXES, names[1:], strict=True):
        samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
        keys = ("exact_match_tokens", "rougeL_f1", "rougeL_precision", "rougeL_recall", "rougeL_f1_stemmed")
        outputs[f"p{prefix}"] = {
            "prefix": [digest(tokenizer(sample["arguments"][0][0])["input_ids"]) for sample in samples],
            "suffix_tokens": [sample["doc"]["suffix_len"] for sample in samples],
            "completion_tokens": [len(tokenizer(sample["filtered_resps"][0])["input_ids"]) for sample in samples],
            **{key: [float(sample[key]) for sample in samples] for key in keys},
            "means": {key: found["results"][name][f"{key},none"] for key in keys},
        }
    rolling = sorted(found["samples"][names[0]], key=lambda sample: sample["doc_id"])
    outputs["loglikelihood_rolling"] = [_number(sample["filtered_resps"][0]) for sample in rolling]
    write(options.output, "hubble", head, outputs)


def _number(value: Any) -> float:
    return float(value[0] if isinstance(value, (list, tuple)) else value)


if __name__ == "__main__":
    main()
