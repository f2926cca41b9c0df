"""The job of the processes: the model, the rows, the settings of training. Travels as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import yaml

from hf_axonn.certificate.launch_plan import MOST_ACCUMULATION, LaunchPlan
from hf_axonn.certificate.rows import Row, make_rows


MOST_BATCH = 2
RATES = {"sgd": 0.1}
RATE = 1e-3  # of Adam, which divides a rounded gradient by its size: errors of parameters grow with the rate
WITNESS = "sgd"
FLOAT64 = "float64"
# Of the launch file, not of the script.
BELONG_TO_FILE = ("deepspeed", "fsdp", "fsdp_config", "parallelism_config")
# How often and where something is written; all of it goes to the folder of the certificate, or is omitted.
WRITING = (
    "output_dir logging_dir logging_steps logging_strategy logging_first_step save_steps save_strategy eval_steps "
    "eval_strategy eval_on_start eval_delay report_to run_name push_to_hub hub_model_id hub_token hub_strategy "
    "hub_revision hub_private_repo hub_always_push save_total_limit save_only_model load_best_model_at_end "
    "metric_for_best_model greater_is_better resume_from_checkpoint do_train do_eval do_predict disable_tqdm "
    "log_level log_level_replica max_steps num_train_epochs use_cpu dataloader_num_workers dataloader_pin_memory "
    "dataloader_prefetch_factor dataloader_persistent_workers trackio_space_id project per_device_eval_batch_size "
    "eval_accumulation_steps prediction_loss_only ddp_timeout torch_empty_cache_steps save_safetensors"
).split()
# What a script says to its model and its rows, beside TrainingArguments.
OF_SCRIPTS = ("peft", "packing", "distributed_config")
# What is switched off, and why.
OFF = {
    **dict.fromkeys(("bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32"), "it is compared in float64"),
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), "nothing is compiled"),
    "use_liger_kernel": "its kernels are no float64",
    "neftune_noise_alpha": "noise is drawn by the shape of a batch",
    "auto_find_batch_size": "the batch is fixed",
}


@dataclass
class Job:
    """One comparison.

    Args:
        folder: of the certificate; everything is written there.
        ranks, positions: processes, and how many of them see different samples.
        fsdp, loading: see LaunchPlan.
        zero: whether DeepSpeed runs it.
        norms, saves: whether many processes say the norm of gradients, and whether `save_model` writes weights there.
        steps: optimizer steps.
        batch, accumulation: rows of a micro-batch of one rank, and micro-batches of a step.
        vocabulary: from which rows are drawn.
        trainer: arguments for TrainingArguments, of the user.
        seed: of weights and rows.
        cases: what is run: "trainer", "resumed" (a Trainer that goes on), "loop" or "script", and the optimizer.
        script: path and arguments of the user's script, which is run in place of the other cases; empty: none.
        layers: how many the script's model has at least.
        peft: fields of a LoraConfig; empty: all weights are trained.
        packing: whether the rows of a micro-batch are put into one, without padding.
        failed: cases that do not run under the launch file, and what the framework said.
        notes: what is done otherwise than the user's files say.
        dtype: in which the ranks compute: float64, or fp32, or mixed precision in bf16; one process has float64.
        code: the model whose own code is run; empty: none.
    """

    folder: str
    ranks: int
    positions: int
    steps: int
    vocabulary: int
    fsdp: bool = False
    zero: bool = False
    norms: bool = True
    saves: bool = True
    loading: dict[str, Any] = field(default_factory=dict)
    batch: int = MOST_BATCH
    accumulation: int = 1
    trainer: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    cases: list[tuple[str, str]] = field(default_factory=list)
    script: list[str] = field(default_factory=list)
    layers: int = 2
    peft: dict[str, Any] = field(default_factory=dict)
    packing: bool = False
    failed: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    dtype: str = FLOAT64
    code: str = ""

    @property
    def divides(self) -> bool:
        """True if Accelerate divides the model, which it does not do on CPUs of itself."""
        return self.fsdp or bool(self.loading)

    @property
    def numbers(self) -> torch.dtype:
        """The dtype whose numbers both sides begin with: DeepSpeed's parameters in bf16 begin as bf16."""
        if self.dtype == FLOAT64:
            return torch.float64
        return torch.bfloat16 if self.zero and self.dtype == "bf16" else torch.float32

    @property
    def model(self) -> Path:
        """The directory of the small model."""
        return Path(self.folder) / "model"

    @property
    def saved_at(self) -> int:
        """The step after which a Trainer saves what the resumed one goes on from; 0: there is none.

        Two steps are left where there are as many, as samples of the last one may count twice, which hides the rest.
        """
        return max(1, self.steps - 2) if any(path == "resumed" for path, _ in self.cases) else 0

    @property
    def loaders(self) -> dict[str, Any]:
        """Options of Accelerate's loaders, in a Trainer and so in the loop: split_batches and so on."""
        from transformers.trainer_pt_utils import AcceleratorConfig

        given = self.trainer.get("accelerator_config") or {}
        made = AcceleratorConfig.from_json_file(given) if isinstance(given, str) else AcceleratorConfig(**given)
        return {name: getattr(made, name) for name in ("split_batches", "dispatch_batches", "even_batches")}

    @property
    def uneven(self) -> bool:
        """True if the epoch may have an uneven end: without even_batches some ranks would have a batch more."""
        return bool(self.loaders["even_batches"])

    def batch_of(self, parallel: bool) -> int:
        """Return the rows of a loader's batch: one process has those of all positions, and so has a split batch."""
        return self.batch * (1 if parallel and not self.loaders["split_batches"] else self.positions)

    @property
    def rows(self) -> list[Row]:
        """The rows of an epoch: full steps, and in the last one a micro-batch that some positions get little of."""
        whole = self.batch * self.positions
        last = max(1, whole // 2 - 1) if self.uneven else whole
        return make_rows((self.steps * self.accumulation - 1) * whole + last, self.vocabulary, self.seed + 2)

    @property
    def evaluation_rows(self) -> list[Row]:
        """The rows of the evaluation, with an uneven end, too."""
        return make_rows(2 * self.batch * self.positions + self.uneven, self.vocabulary, self.seed + 3)

    def rate(self, optimizer: str) -> float:
        """Return the user's learning rate, else one with which a step is well above the rounding of the parameters."""
        return float(self.trainer.get("learning_rate", RATES.get(optimizer, RATE)))

    def save(self) -> Path:
        """Write job.json into the folder."""
        path = Path(self.folder) / "job.json"
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: Path | str) -> Job:
        """Read what `save` wrote."""
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**{**values, "cases": [tuple(case) for case in values["cases"]]})


def make_job(
    folder: Path,
    plan: LaunchPlan,
    *,
    steps: int,
    vocabulary: int,
    trainer: Mapping[str, Any],
    seed: int = 0,
    dtype: str = FLOAT64,
) -> Job:
    """Make the job of a launch file and of a user's TrainingArguments.

    Raises:
        ValueError: an argument is unknown, out of range, or belongs into the launch file.
    """
    notes = list(plan.notes)
    zero = plan.zero
    kept = _arguments({**(zero.trainer if zero is not None else {}), **trainer}, notes, dtype)
    batch = min(int(kept.pop("per_device_train_batch_size", MOST_BATCH)), MOST_BATCH)
    given = int(kept.pop("gradient_accumulation_steps", 1))
    accumulation = min(given, MOST_ACCUMULATION)
    if accumulation < given:
        notes.append(f"gradient_accumulation_steps is {accumulation} and not {given}.")
    other = str(kept.pop("optim", "adamw_torch"))
    optimizers = [WITNESS, *([other] if other != WITNESS else [])]
    resumed = [("resumed", optimizers[-1])] if steps > 1 else []
    loops = [("loop", name) for name in (WITNESS, "adamw_torch")]
    if dtype != FLOAT64:  # Adam makes full steps of gradients that are rounding alone
        optimizers, resumed, loops = [WITNESS], [], [("loop", WITNESS)]
        others = f"Adam's are compared in {FLOAT64}" if zero is None else "none is with Adam, and none is resumed"
        notes.append(f"in {dtype} the runs are those with SGD: {others}.")
    peft, packing, of_trainer = (kept.pop(name, None) for name in OF_SCRIPTS)
    if plan.loading and resumed:
        resumed = []
        notes.append("no run is resumed: Trainer saves no optimizer of a model that from_pretrained has divided.")
    if of_trainer:
        loops = []
        notes.append("no loop is run: Accelerate takes no model that distributed_config has divided.")
    return Job(
        folder=str(folder),
        **_read_plan(plan),
        zero=zero is not None,
        norms=zero is None or zero.stage > 0,
        saves=zero is None or zero.saves,
        steps=steps,
        vocabulary=vocabulary,
        batch=batch,
        accumulation=accumulation,
        trainer=kept,
        seed=seed,
        cases=[*(("trainer", name) for name in optimizers), *resumed, *loops],
        peft=peft or {},
        packing=bool(packing),
        notes=notes,
        dtype=dtype,
    )


def _read_plan(plan: LaunchPlan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in ("ranks", "positions", "fsdp", "loading")}


def make_script_job(folder: Path, plan: LaunchPlan, *, steps: int, script: Sequence[str]) -> Job:
    """Make the job of a launch file and of a user's script with its arguments.

    Raises:
        ValueError: there is no such script.
    """
    path = Path(script[0]) if script else Path()
    if not path.is_file():
        raise ValueError(f"--script: {path} is no file: give a script, with its arguments in the same quotes.")
    return Job(
        folder=str(folder),
        **_read_plan(plan),
        steps=steps,
        vocabulary=0,
        cases=[("script", path.name)],
        script=[str(path.resolve()), *script[1:]],
        layers=max(2, plan.stages),
        notes=list(plan.notes),
    )


def read_arguments(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file of TrainingArguments.

    Raises:
        ValueError: it cannot be read, or holds no arguments.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except OSError as error:
        raise ValueError(f"--trainer-args: {path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"--trainer-args: {path} is neither YAML nor JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--trainer-args: {path} holds no arguments: write max_grad_norm: 1.0 and so on.")
    return {str(name): value for name, value in values.items()}


def _arguments(given: Mapping[str, Any], notes: list[str], dtype: str = FLOAT64) -> dict[str, Any]:
    """Return what is left of a user's TrainingArguments."""
    from transformers import TrainingArguments

    known = {item.name for item in fields(TrainingArguments)}
    kept = {}
    ours = {name: given[name] for name in OF_SCRIPTS if name in given}
    _check_lora(ours.get("peft"))
    for name, value in given.items():
        if name in OF_SCRIPTS:
            continue
        if name not in known and name not in WRITING:
            near = get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else "remove it."
            raise ValueError(f"--trainer-args: TrainingArguments has no argument {name!r}: {remedy}")
        if name in BELONG_TO_FILE and value:
            raise ValueError(f"--trainer-args: {name} is said in the launch file: write it there, and omit it.")
        if name in OFF:
            why = f"the dtype is {dtype}" if dtype != FLOAT64 and OFF[name] == OFF["bf16"] else OFF[name]
            if value and name != dtype:
                notes.append(f"{name} is off: {why}.")
        elif name not in (*WRITING, *BELONG_TO_FILE):
            kept[name] = value
    try:
        TrainingArguments(output_dir="unused", use_cpu=True, report_to="none", **kept)
    except (TypeError, ValueError, ImportError) as problem:
        raise ValueError(f"--trainer-args: {problem}") from None
    return {**kept, **ours}


def _check_lora(given: Any) -> None:
    """Raise ValueError for what is no LoraConfig."""
    if not given:
        return
    try:
        from peft import LoraConfig
    except ImportError:
        raise ValueError("--trainer-args: peft is not installed: pip install peft.") from None
    try:
        LoraConfig(task_type="CAUSAL_LM", **given)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"--trainer-args: peft: {problem}") from None
