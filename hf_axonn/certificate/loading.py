"""The small model of a job, as each side loads it: whole or divided by Transformers, with adapters where asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_axonn.certificate.job import Job
from hf_axonn.certificate.recording import Record


EXACT: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}
ADAPTERS = "adapters"  # a folder beside the record of a script's run
LORA = "lora_"
STD = 0.1  # of the adapters' weights: B is zero otherwise, and the gradient of A with it


def dividing_options(job: Job) -> dict[str, Any]:
    """Return the options of `from_pretrained` on many processes."""
    if not job.loading:
        return {}
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig.from_dict(job.loading)}


def load_model(job: Job, *, parallel: bool, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Load the model, on all processes as a script does.

    Args:
        job: what is run.
        parallel: whether Transformers divides it, where the job says so.
        dtype: of its parameters.
    """
    options = EXACT | {"dtype": dtype} | (dividing_options(job) if parallel else {})
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(job.model, **options)
    if job.packing:
        model.config.use_cache = False  # with a cache, Transformers does not look for the rows in a packed one
    return add_adapters(model, job) if job.peft else model


def save_adapters(model: nn.Module, folder: Path) -> None:
    """Write what adapters a script has put on its model, if any, for `script_model`."""
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    for config in configs.values():
        config.save_pretrained(str(folder / ADAPTERS))


def script_model(record: Record) -> nn.Module:
    """Load the small model of a script's run once more, by the name of its folder: class and number; with adapters.

    Raises:
        KeyError: its class is none of Transformers.
    """
    import transformers

    folder = record.facts["models"][0]
    name = Path(folder).name.rpartition("-")[0]
    kind = getattr(transformers, name, None)
    if kind is None:
        raise KeyError(name)
    model: nn.Module = kind.from_pretrained(folder, **EXACT)
    if (record.folder / ADAPTERS).is_dir():
        from peft import PeftConfig, get_peft_model

        config = PeftConfig.from_pretrained(str(record.folder / ADAPTERS))
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


def add_adapters(model: PreTrainedModel, job: Job) -> nn.Module:
    """Add LoRA with the user's fields, without dropout, and with weights from the seed in both of its matrices."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", **{**job.peft, "lora_dropout": 0.0})
    adapters = get_peft_model(model, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(job.seed + 4)
    with torch.no_grad():
        for name, parameter in adapters.named_parameters():
            if LORA in name:
                parameter.copy_(STD * torch.randn(parameter.shape, generator=generator, dtype=job.numbers))
    return adapters


def load_saved(job: Job, folder: Path) -> nn.Module:
    """Load what `save_model` wrote: a model, or adapters beside the model that they were made for."""
    if not job.peft:
        saved: nn.Module = AutoModelForCausalLM.from_pretrained(folder, **EXACT)
        return saved
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(job.model, **EXACT)
    return PeftModel.from_pretrained(base, str(folder), autocast_adapter_dtype=False)
