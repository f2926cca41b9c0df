"""Two tables of docs/certificates.md: right set-ups, which must not be called different, and planted errors.

    python -m tests.certificate.tables            both, as Markdown; with words, the rows whose names begin with one

Everything is run in forks of this process, in which the libraries are imported already.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from hf_axonn.certificate.certify import prepare, prepare_script
from hf_axonn.certificate.compare import CaseResult
from hf_axonn.certificate.report import exit_code, verdict
from tests.certificate.runs import SCRIPTS, certified, many_processes, one_process, plan_of


FSDP = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
}
DDP: dict[str, Any] = {}
FSDP2 = {"distributed_type": "FSDP", "fsdp_config": FSDP}
SPLIT = {"accelerator_config": {"split_batches": True}}
TWICE = {"gradient_accumulation_steps": 2}
STEPS = 3
DOCUMENTED = {"even_batches": "end of the epoch", "their means over tokens": "means of means"}
OF_SCRIPT = 2  # steps


def over(**axes: int) -> dict[str, Any]:
    """The launch file of a grid."""
    return {"axonn_config": {"grid": axes}}


@dataclass(frozen=True)
class Setup:
    """A right set-up.

    Args:
        name: in the table.
        trainer: arguments of a Trainer and of the loop beside it; not of a script.
        settings: of the launch file.
        script: a key of `WAYS` in options_script.py, or "sft" or "dpo" of TRL; empty: no script.
        model: its type.
        cases: the kinds of runs; empty: all.
    """

    name: str
    trainer: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    script: str = ""
    model: str = "gpt2"
    cases: tuple[str, ...] = ()


def of_script(name: str, settings: dict[str, Any] | None = None, model: str = "gpt2") -> Setup:
    """The set-up of a script."""
    return Setup(name, settings=settings or DDP, script=name, model=model)


KINDS = {"llama": "LlamaForCausalLM"}  # TRL's scripts ask for it
TRAINER = ("trainer",)
BOTH = ("trainer", "loop")
RIGHT = (
    Setup("the defaults, resumed"),
    Setup("accumulation of 2, max_grad_norm 0.5", {**TWICE, "max_grad_norm": 0.5}),
    Setup(
        "cosine, warm-up, weight decay, no clipping",
        {"lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.1, "max_grad_norm": 0.0},
        cases=TRAINER,
    ),
    Setup("split_batches, resumed", SPLIT),
    Setup("split_batches, FSDP2", SPLIT, FSDP2, cases=BOTH),
    Setup("split_batches, hf_axonn z=2", SPLIT, over(z=2), cases=BOTH),
    Setup("dispatch_batches", {"accelerator_config": {"dispatch_batches": True}}, cases=BOTH),
    Setup("even_batches: false", {"accelerator_config": {"even_batches": False}}, cases=BOTH),
    Setup("use_seedable_sampler: false", {"accelerator_config": {"use_seedable_sampler": False}}, cases=TRAINER),
    Setup("dataloader_drop_last", {"dataloader_drop_last": True}, cases=TRAINER),
    Setup("label_smoothing_factor", {"label_smoothing_factor": 0.1}, cases=TRAINER),
    Setup(
        "label_smoothing_factor, accumulation, hf_axonn x=2",
        {"label_smoothing_factor": 0.1, **TWICE},
        over(x=2),
        cases=TRAINER,
    ),
    Setup(
        "group_by_length, accumulation, resumed",
        {"train_sampling_strategy": "group_by_length", **TWICE},
        cases=("trainer", "resumed"),
    ),
    Setup("group_by_length, split_batches", {"train_sampling_strategy": "group_by_length", **SPLIT}, cases=TRAINER),
    Setup("batch_rebalance, accumulation", {"train_sampling_strategy": "batch_rebalance", **TWICE}, cases=TRAINER),
    Setup("adafactor", {"optim": "adafactor"}, cases=TRAINER),
    Setup("adafactor, hf_axonn z=2", {"optim": "adafactor"}, over(z=2), cases=TRAINER),
    Setup("rmsprop", {"optim": "rmsprop"}, cases=TRAINER),
    Setup(
        "average_tokens_across_devices: false, resumed",
        {"average_tokens_across_devices": False},
        cases=("trainer", "resumed"),
    ),
    Setup("gradient_checkpointing", {"gradient_checkpointing": True}, cases=TRAINER),
    Setup("LoRA", {"peft": {"r": 4, "target_modules": "all-linear"}}, model="llama", cases=TRAINER),
    Setup("packing", {"packing": True}, model="llama", cases=BOTH),
    of_script("split_batches"),
    of_script("split_batches", over(z=2)),
    of_script("split_batches of an earlier loader"),
    of_script("split and dispatch"),
    of_script("sync_each_batch"),
    of_script("loss.backward"),
    of_script("loss.backward", over(z=2)),
    of_script("clipping by torch"),
    of_script("accumulation by hand"),
    of_script("ids for labels"),
    of_script("frozen embeddings"),
    of_script("LoRA of its own"),
    of_script("a scheduler of its own"),
    of_script("a schedule times num_processes"),
    of_script("a schedule times num_processes", over(z=2)),
    of_script("BatchSampler"),
    of_script("IterableDataset"),
    of_script("items that draw"),
    of_script("masked language model", model="bert"),
    of_script("masked language model", over(z=2), model="bert"),
    of_script("Trainer, masked with a seed", model="modernbert"),
    of_script("Trainer, masked and streamed", model="modernbert"),
    of_script("Trainer, BERT, means of ranks", model="bert"),
    of_script("Trainer, label_smoothing_factor"),
    of_script("Trainer, label_smoothing_factor, end of the epoch"),
    of_script("Trainer, group_by_length"),
    of_script("Trainer, adafactor"),
    of_script("Trainer, compute_loss_func"),
    of_script("Trainer, flattened rows"),
    of_script("sft", model="llama"),
    of_script("dpo", model="llama"),
    of_script("dpo", over(x=2), model="llama"),
)


@dataclass(frozen=True)
class Planted:
    """An error, and how it is to be found.

    Args:
        name: of a function of planted.py.
        kind: what differs first, in which step.
        said: in the cause.
        what: in the table.
    """

    name: str
    kind: str
    step: int
    said: str
    what: str


PLANTED = (
    Planted("scaled_loss", "loss", 1, "times 2 (the number of ranks", "Trainer's loss times the number of ranks"),
    Planted("forgotten_average", "gradient", 1, "nothing is averaged over the ranks", "gradients are not averaged"),
    Planted(
        "means_of_means", "loss", 1, "the mean over the ranks of their means over tokens", "tokens of a rank only"
    ),
    Planted("clipped_before_averaging", "gradient", 1, "are clipped at 0.5 on each rank", "clipping before averaging"),
    Planted("unclipped_rank", "parameter", 1, "rank 1 does not clip in step 1", "a rank does not clip"),
    Planted("kept_gradient", "gradient", 2, "not set to zero (zero_grad)", "`zero_grad` is left out"),
    Planted("left_out_micro_batch", "loss", 1, "without micro-batch 1 of rank(s) 1", "a micro-batch is left out"),
    Planted("labels_of_one_rank", "loss", 1, "the loss of rank 1 (micro-batch 1, 2) is not that", "labels of a rank"),
    Planted("positions_of_one_rank", "loss", 1, "the loss of rank 1 (micro-batch 1, 2)", "`position_ids` of a rank"),
    Planted("duplicated_sample", "samples", 1, "were seen by no rank; samples", "a row twice in place of another"),
    Planted(
        "unprepared_loader", "samples", 1, "loader that Accelerator.prepare was not given", "a loader not prepared"
    ),
    Planted("dropped_bias", "gradient", 1, "h.0.attn.c_attn.bias missing", "a bias has no gradient"),
    Planted(
        "scaled_gradient", "gradient", 1, "wpe.weight times 2 (the number of", "one gradient summed, not averaged"
    ),
    Planted("rounded_average", "gradient", 1, "as if they were rounded on their way", "gradients averaged in bf16"),
    Planted(
        "other_rate_of_a_rank", "parameter", 1, "its learning rate were 0.2 and not 0.1", "a rank's learning rate"
    ),
    Planted("step_left_out", "parameter", 1, "rank 1 makes no step 1", "a rank makes no step"),
    Planted(
        "other_weights_of_a_rank", "start", 0, "rank(s) 1 begin with other weights", "weights of a rank at the start"
    ),
    Planted("saved_too_early", "samples", 3, "are the weights after step 0", "`save_model` writes older weights"),
)


def write_inputs(folder: Path) -> None:
    """Models that are too large to be trained here, and TRL's datasets, in a folder."""
    from tests.helpers.chats import chat_tokenizer, chats

    for kind in ("gpt2", "llama", "bert", "modernbert"):
        AutoConfig.for_model(kind, architectures=[KINDS.get(kind, "")]).save_pretrained(folder / kind)
    chat_tokenizer().save_pretrained(folder / "llama")
    rows = [dict(row) for row in chats(40, 1)]
    for name in ("sft", "dpo"):
        (folder / name).mkdir()
        of = rows if name == "sft" else [_preferred(row) for row in rows]
        (folder / name / "train.jsonl").write_text("\n".join(map(json.dumps, of)))


def _preferred(row: dict[str, Any]) -> dict[str, Any]:
    (answer,) = row["completion"]
    worse = {**answer, "content": answer["content"][::-1] + "b"}
    return {"prompt": row["prompt"], "chosen": [answer], "rejected": [worse]}


def words_of(setup: Setup, folder: Path) -> list[str]:
    """The script of a set-up and its arguments; inputs are in a folder."""
    if setup.script not in ("sft", "dpo"):
        return [str(SCRIPTS / "options_script.py"), setup.script, str(folder / setup.model)]
    import trl

    script = Path(trl.__file__).parent / "scripts" / f"{setup.script}.py"
    words = f"--model_name_or_path {folder / setup.model} --dataset_name {folder / setup.script} --output_dir out"
    return [str(script), *words.split(), *"--per_device_train_batch_size 2 --max_steps 4 --learning_rate 0.01".split()]


def certify_setup(setup: Setup, folder: Path, inputs: Path) -> list[CaseResult]:
    """The results of a set-up, in a new folder."""
    folder.mkdir()
    plan = plan_of(folder, 2, **setup.settings)
    (folder / "certificate").mkdir()
    if setup.script:
        job = prepare_script(folder / "certificate", plan, words_of(setup, inputs), steps=OF_SCRIPT)
    else:
        job = prepare(folder / "certificate", plan, setup.model, steps=STEPS, trainer=setup.trainer)
        job.cases = [case for case in job.cases if not setup.cases or case[0] in setup.cases]
        job.save()
    return certified(job, plan)


def find_planted(folder: Path, error: Planted, job: Any, plan: Any) -> CaseResult:
    """The result of a run with an error."""
    return many_processes(job, folder, plan, error.name)


def job_of_planted(folder: Path) -> tuple[Any, Any]:
    """The job in which errors are planted, run on one process, and its plan."""
    plan = plan_of(folder, 2)
    return one_process(folder / "alone", plan, "gpt2", steps=STEPS, max_grad_norm=0.5, **TWICE), plan


def is_found(result: CaseResult) -> bool:
    """Whether an error is found where it is, and not taken for what is documented."""
    return result.first is not None and not result.documented and not result.equal


def is_named(error: Planted, result: CaseResult) -> bool:
    """Whether its cause is said."""
    first = result.first
    return first is not None and (first[0], first[1].step) == (error.kind, error.step) and error.said in result.cause


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, this process and its forks write to nowhere."""
    kept = os.dup(1), os.dup(2)
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for descriptor in (nowhere, *kept):
            os.close(descriptor)


def _row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def print_right(folder: Path, names: list[str]) -> int:
    """Print the table of right set-ups, whose inputs are in a folder; returns how many are called different."""
    _row("right set-up", "under", "verdict", "seconds")
    _row("---", "---", "---", "--:")
    wrong = 0
    for number, setup in enumerate(setup for setup in RIGHT if _chosen(names, setup.name)):
        begin = time.monotonic()
        results: list[CaseResult] = []
        try:
            with quiet():
                results = certify_setup(setup, folder / f"right{number}", folder)
            said = _short(results)
        except (AssertionError, ValueError, RuntimeError, OSError):
            said = f"FAILED: {traceback.format_exc()[-1500:]}"
        if not results or exit_code(results):
            wrong += 1
            said += "; ".join(f"{result.path}: {result.first} {result.cause}" for result in results)
        kind = f"{setup.script}.py of TRL" if setup.script in ("sft", "dpo") else setup.name
        kind = f"loop: {kind}" if kind == setup.script and "Trainer" not in kind else kind
        under = plan_of(folder, 2, **setup.settings).title.removesuffix(", 2 ranks")
        _row(kind, under, said, f"{time.monotonic() - begin:.0f}")
    return wrong


def print_planted(folder: Path, names: list[str]) -> int:
    """Print the table of planted errors; returns how many are not found or not named."""
    _row("planted error", "found in", "cause", "seconds")
    _row("---", "---", "---", "--:")
    wrong = 0
    job, plan = None, None
    for error in (error for error in PLANTED if _chosen(names, error.name)):
        with quiet():
            if job is None:
                job, plan = job_of_planted(folder)
            begin = time.monotonic()
            result = find_planted(folder / error.name, error, job, plan)
        wrong += not (is_found(result) and is_named(error, result))
        where = f"{result.first[0]}, step {result.first[1].step}" if is_found(result) and result.first else "NOT FOUND"
        cause = re.sub(r" \(the number of ranks = [^)]*\)", " (the number of ranks)", result.cause)
        _row(error.what, where, cause, f"{time.monotonic() - begin:.0f}")
    return wrong


def main(names: list[str]) -> int:
    """Print both tables; returns how many rows are not as they should be."""
    with tempfile.TemporaryDirectory() as place:
        write_inputs(Path(place))
        wrong = print_right(Path(place), names)
        print()
        return wrong + print_planted(Path(place), names)


def _short(results: list[CaseResult]) -> str:
    """A verdict with what is documented of it."""
    reasons = {
        text for result in results for cause, text in DOCUMENTED.items() if result.documented and cause in result.cause
    }
    if exit_code(results):
        return verdict(results)
    return f"equal, but for: {', '.join(sorted(reasons))}" if reasons else "equal"


def _chosen(names: list[str], name: str) -> bool:
    return not names or any(name.startswith(each) for each in names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
