"""DeepSpeed: the keys of a launch file that are certified, and its engine on CPUs."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any


INSTALLED_AS = "deepspeed"
FILE = "deepspeed_config_file"
# Of the section of a launch file.
STEPS, CLIPPING = "gradient_accumulation_steps", "gradient_clipping"
OF_SECTION = ("zero_stage", STEPS, CLIPPING, "zero3_init_flag", "zero3_save_16bit_model", FILE)
OFFLOAD = ("offload_optimizer_device", "offload_param_device")
OF_NVME = ("offload_optimizer_nvme_path", "offload_param_nvme_path")
OF_MACHINES = [
    f"deepspeed_{name}" for name in ("multinode_launcher", "hostfile", "exclusion_filter", "inclusion_filter")
]
# Of a file of DeepSpeed's own.
BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu")
OURS = ("optimizer", "scheduler")  # the certificate's own are in their place
DTYPES = ("fp16", "bf16")
OF_FILE = (
    f"{STEPS} {CLIPPING} prescale_gradients gradient_predivide_factor steps_per_print wall_clock_breakdown "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
).split()
# Not round_robin_gradients, where DeepSpeed's own map of the parts is that of another order.
OF_ZERO = (
    "stage overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions "
    "allgather_bucket_size use_multi_rank_bucket_allreduce sub_group_size "
    "ignore_unused_parameters load_from_fp32_weights stage3_prefetch_bucket_size stage3_max_live_parameters "
    "stage3_max_reuse_distance stage3_param_persistence_threshold stage3_model_persistence_threshold "
    "stage3_gather_16bit_weights_on_model_save"
).split()


@dataclass(frozen=True)
class Zero:
    """The settings of a launch file of DeepSpeed.

    Args:
        stage: of ZeRO.
        section: the `deepspeed_config` that is launched.
        trainer: TrainingArguments that a script has to have, as the file says the same.
        saves: whether `save_model` writes the model's weights.
    """

    stage: int
    section: dict[str, Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    saves: bool = True

    @property
    def in_file(self) -> bool:
        """True if the settings are in a file of DeepSpeed's own, which then has the dtype, too."""
        return FILE in self.section


def read_zero(section: Mapping[str, Any], dtype: str, notes: list[str], most: int) -> Zero:
    """Read the section `deepspeed_config` of a launch file, with at most `most` micro-batches a step.

    Raises:
        ValueError: something in it cannot be certified, the dtype is float64, or DeepSpeed is not installed.
    """
    kept = {key: value for key, value in section.items() if key not in (*OF_MACHINES, *OF_NVME)}
    for key in OFFLOAD:
        if str(kept.pop(key, None) or "none") != "none":
            raise ValueError(f"{key} is {section[key]}: runs with offloading cannot be certified yet: write none.")
    for key in kept:
        if key not in OF_SECTION:
            raise ValueError(f"deepspeed_config: {key} cannot be certified yet: omit it.")
    file = _read_file(kept[FILE], dtype, notes) if kept.get(FILE) else None
    values = kept if file is None else {**file, **_read_stage(file["zero_optimization"])}
    try:
        stage = int(values.get("zero_stage", 2 if file is None else 0))
    except (TypeError, ValueError):
        stage = -1
    if stage not in range(4):
        raise ValueError(f"zero_stage is {values.get('zero_stage')}: write 0, 1, 2 or 3.")
    _check_dtype(stage, dtype)
    if find_spec(INSTALLED_AS) is None:
        raise ValueError("DeepSpeed is not installed: pip install deepspeed (it needs g++ on CPUs).")
    trainer: dict[str, Any] = {}
    if values.get(STEPS) not in (None, "auto"):
        trainer[STEPS] = min(int(values[STEPS]), most)
        if int(values[STEPS]) > most:
            notes.append(f"{STEPS} is {most} and not {values[STEPS]}.")
        (kept if file is None else file)[STEPS] = trainer[STEPS]
    if values.get(CLIPPING) not in (None, "auto"):
        trainer["max_grad_norm"] = float(values[CLIPPING])
    saves = stage < 3 or str(values.get("zero3_save_16bit_model", False)).lower() == "true"
    if not saves:
        notes.append("nothing that is saved is compared: save_model writes no weights without zero3_save_16bit_model.")
    if stage == 0:
        notes.append("no norm is compared: DeepSpeed's engine says none without ZeRO.")
    if file is not None:
        kept[FILE] = base64.urlsafe_b64encode(json.dumps(file).encode()).decode()  # as Accelerate takes it, too
    return Zero(stage, kept, trainer, saves)


def _read_stage(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the section zero_optimization that a launch file has too, by their names there."""
    names = {"zero_stage": "stage", "zero3_save_16bit_model": "stage3_gather_16bit_weights_on_model_save"}
    return {name: section[key] for name, key in names.items() if key in section}


def _check_dtype(stage: int, dtype: str) -> None:
    if dtype == "float64":
        raise ValueError(
            "DeepSpeed averages gradients and keeps parameters in float32 at most: certify it with --dtype fp32 (and "
            "with --model: a --script is compared in float64 only)."
        )
    if dtype == "bf16" and stage == 0:
        raise ValueError(
            "DeepSpeed in bf16 without ZeRO keeps its fp32 parameters where they are not read: certify it with "
            "--dtype fp32, or write zero_stage: 1."
        )


def _read_file(path: str, dtype: str, notes: list[str]) -> dict[str, Any]:
    """Read a file of DeepSpeed's own, with the batches and the dtype of the certificate.

    Raises:
        ValueError: it cannot be read, or something in it cannot be certified.
    """
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ValueError(f"{FILE}: {path} cannot be read: {problem}") from None
    if not isinstance(given, dict) or not isinstance(given.get("zero_optimization"), dict):
        raise ValueError(f"{FILE}: {path} has no section zero_optimization.")
    zero = dict(given["zero_optimization"])
    for key in ("offload_optimizer", "offload_param"):
        if str((zero.pop(key, None) or {}).get("device") or "none") != "none":
            raise ValueError(f"{FILE}: {key}: runs with offloading cannot be certified yet: omit it.")
    for key in given:
        if key not in (*OF_FILE, *BATCHES, *OURS, *DTYPES, "zero_optimization"):
            raise ValueError(f"{FILE}: {key} cannot be certified yet: omit it.")
    for key in zero:
        if key not in OF_ZERO:
            raise ValueError(f"{FILE}: zero_optimization: {key} cannot be certified yet: omit it.")
    away = [key for key in OURS if key in given]
    if away:
        notes.append(f"without {' and '.join(away)} of {path}: the runs have their own.")
    kept = {key: given[key] for key in OF_FILE if key in given}
    if dtype == "bf16":
        kept["bf16"] = {"enabled": True}
    return {**kept, **dict.fromkeys(BATCHES, "auto"), "zero_optimization": zero}


def on_cpus() -> None:
    """Let DeepSpeed and Accelerate run on the CPUs of this process: Accelerate's own switch turns DeepSpeed off."""
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def before_steps(engine: Any, call: Callable[[], None]) -> None:
    """Let an engine call something before each step, which comes within `backward`: gradients are averaged then, and
    not clipped yet."""
    stock = engine.step

    def step(*args: Any, **kwargs: Any) -> Any:
        call()
        return stock(*args, **kwargs)

    engine.step = step
