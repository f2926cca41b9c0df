"""The configuration of a model that a command is given, read without running code that comes with the model."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from hf_axonn.checkpoint.adapter_files import adapter_base
from hf_axonn.compat.own_code import refuse_own_code


def read_config(name: str, *, more: str = "") -> PreTrainedConfig:
    """Read the configuration of a model: a directory with a config.json, such a file, or a name on the Hub.

    Args:
        more: what else the caller takes, for the message.
    Raises:
        ValueError: there is none, it is damaged, or code that comes with the model would have to run.
    """
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{name} has no config.json{_instead(path)}.")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as problem:
        refuse_own_code(name, problem)
        raise ValueError(
            f"{name} is no model: give a directory with a config.json, such a file, {more}or a name on the Hub "
            f"({str(problem).partition(chr(10))[0]})."
        ) from None
    return config


def _instead(folder: Path) -> str:
    """Say what a folder without config.json holds, and what to give instead; nothing if it is not known."""
    if (folder / "adapter_config.json").is_file():
        base = adapter_base(folder)
        return f", it holds an adapter: give its base model{f', {base}' if base else ''}"
    if any(folder.glob("*.gguf")):
        return ", it holds GGUF files, which have their configuration inside: give the config.json of the model"
    inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
    return f": give one of those inside it, {', '.join(inside)}" if inside else ""
