"""Tasks for EleutherAI's lm-evaluation-harness, made of the study's held-out texts: nothing is fetched.

    held_out_rolling.yaml, .jsonl    full texts, read in windows: bits per byte, perplexity of words and bytes
    held_out_endings.yaml, .jsonl    the last words of a sentence among those of three others; 25% by chance

The harness writes and scores the questions by its own rules; only the texts come from here. `lm_eval --tasks
held_out_rolling --include_path .` in their directory asks the same of any model.

Source: lm_eval/api/task.py (`construct_requests`, `process_results`), lm_eval/models/huggingface.py
(`loglikelihood_rolling`, `_encode_pair`) and lm_eval/utils.py (`get_rolling_token_windows`) of lm_eval 0.4.13.
"""

import contextlib
import importlib.util
import io
import json
import logging
import os
import random
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


ROLLING, ENDINGS = "held_out_rolling", "held_out_endings"
CHOICES = 4
ENDING = 8  # words of each choice
LONGEST = 80  # characters of a choice: no addresses
CONTEXT = 32  # words before them, at most
MOST_QUESTIONS = 400  # the standard error of an accuracy of 50% is then 2.5%
FEWEST_QUESTIONS = 20
_ALIKE = 12  # endings of like length, of which the wrong choices are drawn
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[\"'(\u201c]?[A-Z])")
_BLANK_LINE = re.compile(r"\n\s*\n")
_METRICS = {
    ROLLING: ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    ENDINGS: ("acc", "acc_norm"),
}


@dataclass(frozen=True, kw_only=True)
class HarnessAnswers:
    """Answers of one model.

    Attributes:
        rolling: by document its log-likelihood in nats, and the words and bytes that the harness counts.
        endings: of each question the document, whether the true ending is the likeliest, and whether it is by
            log-likelihood per character.
        left_out: why there are no questions; None where there are.
        reported: by task and metric the number that the harness itself gives.
    """

    rolling: Mapping[str, tuple[float, int, int]]
    endings: Sequence[tuple[str, bool, bool]]
    left_out: str | None = None
    reported: Mapping[str, Mapping[str, float]]


def harness_version() -> str | None:
    """Return the version of lm_eval; None where it is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        return None
    from importlib.metadata import version

    return version("lm_eval")


def questions(documents: Iterable[Mapping[str, str]], *, seed: int = 0) -> list[dict[str, Any]]:
    """Make questions for the end of a sentence.

    The context is what stands before the last words of a sentence, from its own paragraph. The wrong choices are the
    last words of sentences elsewhere, as many words and about as many characters long, so that neither length nor form
    tells the true one: in other documents of the same kind, or of any kind, or in the same one, where there are not
    enough.

    Args:
        documents: with `id` and `text`; the part of the id before a slash is the kind.
        seed: draws the questions, the wrong choices and the place of the true one.
    Returns:
        In the order of the texts at most MOST_QUESTIONS, with `id` (of the document), `context`, `choices` and
        `answer`, the place of the true one; none where the texts have fewer than FEWEST_QUESTIONS.
    """
    found: list[tuple[str, str, str]] = []
    endings: set[str] = set()
    for document in documents:
        for context, ending in _endings(document["text"]):
            if ending not in endings:
                endings.add(ending)
                found.append((document["id"], context, ending))
    if len(found) < FEWEST_QUESTIONS:
        return []
    draw = random.Random(seed)
    places = sorted(draw.sample(range(len(found)), min(MOST_QUESTIONS, len(found))))
    made = []
    for place in places:
        name, context, true = found[place]
        others = [(other, ending) for other, _, ending in found if ending != true]
        elsewhere = [one for one in others if one[0] != name]
        of_kind = [one for one in elsewhere if _kind(one[0]) == _kind(name)]
        enough = next((some for some in (of_kind, elsewhere) if len(some) >= _ALIKE), others)
        alike = sorted((ending for _, ending in enough), key=lambda ending: abs(len(ending) - len(true)))[:_ALIKE]
        choices = draw.sample(alike, CHOICES - 1)
        answer = draw.randrange(CHOICES)
        choices.insert(answer, true)
        made.append({"id": name, "context": context, "choices": choices, "answer": answer})
    return made


def write_tasks(documents: Sequence[Mapping[str, str]], directory: Path) -> list[Path]:
    """Write the tasks; several processes may write the same ones at the same time.

    Args:
        documents: with `id` and `text`; the held-out texts.
        directory: for the files; it is made if it is not there.
    Returns:
        Every file of the tasks. Texts with fewer than FEWEST_QUESTIONS sentences make no task of endings.
    Raises:
        ValueError: there is no text.
    """
    texts = [{"id": document["id"], "text": document["text"]} for document in documents if document["text"].strip()]
    if not texts:
        raise ValueError("there is no held-out text, of which tasks could be made")
    rows = {ROLLING: texts, ENDINGS: questions(texts)}
    written = []
    directory.mkdir(parents=True, exist_ok=True)
    for task, lines in rows.items():
        files = directory / f"{task}.jsonl", directory / f"{task}.yaml"
        if lines:
            contents = "".join(json.dumps(line) + "\n" for line in lines), _yaml(task)
            written += [_put(file, content) for file, content in zip(files, contents, strict=True)]
        else:  # of other texts
            for file in files:
                file.unlink(missing_ok=True)
    return written


class Harness:
    """The tasks, read once, for any number of models.

    Args:
        directory: with the files of `write_tasks`.
    """

    def __init__(self, directory: Path) -> None:
        from lm_eval.tasks import TaskManager

        there = [task for task in (ROLLING, ENDINGS) if (directory / f"{task}.yaml").exists()]
        with _quiet(), tempfile.TemporaryDirectory() as cache:
            configs = [_config(directory, task, Path(cache)) for task in there]
            self._tasks = TaskManager(include_defaults=False).load(configs)["tasks"]
        lines = (directory / f"{ENDINGS}.jsonl").read_text(encoding="utf-8").splitlines() if ENDINGS in there else []
        self._choices = [choice for line in lines for choice in json.loads(line)["choices"]]

    def ask(self, model: Any, tokenizer: Any, *, length: int, batch_size: int) -> HarnessAnswers:
        """Ask one model on this process.

        Args:
            model: a causal LM in eval mode.
            tokenizer: of the model. Its BOS, or else EOS, stands before each text of the rolling task, as the first
                token of a text has no probability without one before it.
            length: tokens that the model reads at once; longer texts are cut into windows, and of a longer question
                the beginning is left out.
            batch_size: windows in a forward pass.
        Raises:
            ValueError: the tokenizer has neither BOS nor EOS.
        """
        from lm_eval.evaluator import evaluate
        from lm_eval.models.huggingface import HFLM

        first = first_token(tokenizer)
        left_out = self._left_out(tokenizer, length)
        chosen = {task: about for task, about in self._tasks.items() if left_out is None or task != ENDINGS}
        with _quiet():
            harness = HFLM(
                pretrained=model,
                tokenizer=tokenizer,
                max_length=length,
                batch_size=batch_size,
                add_bos_token=False,
                prefix_token_id=first,
            )
            given = evaluate(
                lm=harness, task_dict={"tasks": chosen, "groups": {}}, bootstrap_iters=0, log_samples=True
            )
        samples, results = given["samples"], given["results"]
        return HarnessAnswers(
            rolling={
                one["doc"]["id"]: (one["bits_per_byte"][0], one["word_perplexity"][1], one["bits_per_byte"][1])
                for one in samples[ROLLING]
            },
            endings=[(one["doc"]["id"], one["acc"] == 1, one["acc_norm"] == 1) for one in samples.get(ENDINGS, ())],
            left_out=left_out,
            reported={
                task: {metric: results[task][f"{metric},none"] for metric in _METRICS[task]} for task in samples
            },
        )

    def _left_out(self, tokenizer: Any, length: int) -> str | None:
        if ENDINGS not in self._tasks:
            return f"the held-out texts have fewer than {FEWEST_QUESTIONS} long sentences"
        encoded = tokenizer([f" {choice}" for choice in self._choices], add_special_tokens=False, verbose=False)
        longest = max(map(len, encoded["input_ids"]))
        # the harness asks for room for the choice; it takes what is left for the context
        return f"an ending has {longest} tokens, and windows have {length}" if longest > length else None


def first_token(tokenizer: Any) -> int:
    """Return the id of the token before a text that has none before it: BOS, or else EOS.

    Raises:
        ValueError: the tokenizer has neither.
    """
    for first in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if first is not None:
            return int(first)
    raise ValueError(
        "the tokenizer has neither a BOS nor an EOS token, and one of them stands before every text of the tasks: "
        "give it one, or leave the tasks out (evaluation: {tasks: false})"
    )


def _kind(name: str) -> str:
    return name.partition("/")[0] if "/" in name else ""


def _endings(text: str) -> Iterator[tuple[str, str]]:
    """Yield the context and the last words of each sentence that is long enough."""
    for paragraph in _BLANK_LINE.split(text):
        before: list[str] = []
        for sentence in _SENTENCE.split(paragraph):
            words = sentence.split()
            ending = " ".join(words[-ENDING:])
            if len(words) >= 2 * ENDING and ending.endswith((".", "!", "?")) and len(ending) <= LONGEST:
                yield " ".join([*before, *words[:-ENDING]][-CONTEXT:]), ending
            before += words


def _yaml(task: str) -> str:
    about: dict[str, Any] = {
        "tag": "held_out",
        "task": task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{task}.jsonl"}},  # looked up in the current directory
        "test_split": "test",
        "num_fewshot": 0,
    }
    if task == ROLLING:
        about |= {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"}
        kinds = {"word_perplexity": "weighted_perplexity", "byte_perplexity": "weighted_perplexity"}
        kinds["bits_per_byte"] = "bits_per_byte"
    else:
        about |= {"output_type": "multiple_choice", "doc_to_text": "context", "doc_to_choice": "choices"}
        about |= {"doc_to_target": "answer", "target_delimiter": " "}
        kinds = {"acc": "mean", "acc_norm": "mean"}
    better = task == ENDINGS
    about["metric_list"] = [
        {"metric": metric, "aggregation": kind, "higher_is_better": better} for metric, kind in kinds.items()
    ]
    about["metadata"] = {"version": 1.0}
    return yaml.safe_dump(about, sort_keys=False)


def _config(directory: Path, task: str, cache: Path) -> dict[str, Any]:
    """Return the task with its data where they are; the library datasets writes its own files to `cache`."""
    config = yaml.safe_load((directory / f"{task}.yaml").read_text(encoding="utf-8"))
    files = {
        split: str((directory / name).resolve()) for split, name in config["dataset_kwargs"]["data_files"].items()
    }
    return {**config, "dataset_kwargs": {"data_files": files, "cache_dir": str(cache), "keep_in_memory": True}}


def _put(path: Path, content: str) -> Path:
    if not path.exists() or path.read_text(encoding="utf-8") != content:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    return path


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness's progress bars, one for each batch, and its notes on each model."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
