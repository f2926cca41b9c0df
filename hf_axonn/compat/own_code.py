"""Models that come with code of their own, which runs only where `--trust-remote-code` lets it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


class OwnCodeError(ValueError):
    """A model comes with code of its own, which has not been let in."""


def add_own_code_option(parser: argparse.ArgumentParser) -> None:
    """Add `--trust-remote-code` to a command, which calls `register_code` where it is given."""
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with the model")


def refuse_own_code(name: str, problem: Exception | None = None) -> None:
    """Refuse a model whose own code would have to run, and has not been let in by `register_code`.

    Args:
        name: of the model.
        problem: what `AutoConfig` raised with `trust_remote_code=False`; None where code is known to be missing.
    Raises:
        OwnCodeError: it is that.
    """
    if problem is None or "trust_remote_code" in str(problem):
        raise OwnCodeError(
            f"{name} comes with code of its own: read it, and give --trust-remote-code (in Python "
            "trust_remote_code=True), which runs it."
        ) from None


def register_code(name: str | None) -> None:
    """Run the code that comes with a model, and let the Auto classes of this process know its configuration and its
    causal language model, as `trust_remote_code=True` would.

    Args:
        name: a directory with a config.json, such a file, or a name on the Hub; None where --model is missing.
    Raises:
        ValueError: no code comes with it, or it cannot be imported.
        OSError: there is no such model.
    """
    if name is None:
        raise ValueError("--trust-remote-code goes with --model, whose code it runs.")

    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    folder = str(Path(name).parent) if Path(name).is_file() else name
    places = PreTrainedConfig.get_config_dict(folder)[0].get("auto_map") or {}
    if not {"AutoConfig", "AutoModelForCausalLM"} <= places.keys():
        raise ValueError(
            f"--trust-remote-code: {name} comes with no code of its own, as auto_map of its config.json does not name "
            "AutoConfig and AutoModelForCausalLM: omit the option."
        )
    try:
        config: Any = get_class_from_dynamic_module(places["AutoConfig"], folder)
        kind = get_class_from_dynamic_module(places["AutoModelForCausalLM"], folder)
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, kind, exist_ok=True)
    except Exception as problem:  # whatever the code does
        what = f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"
        raise ValueError(f"the code that comes with {name} does not run ({what}).") from problem
