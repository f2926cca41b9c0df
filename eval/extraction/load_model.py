"""Load what is to be measured: an HF model, or a sharded checkpoint, on one process or on a grid."""

import contextlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_axonn.compat.own_code import refuse_own_code
from hf_axonn_eval.extraction import weights_on_disk as weights
from hf_axonn_eval.extraction.work_split import WorkSplit


DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in eval mode, its tokenizer, and what identifies it in the record of a run."""

    model: Any
    tokenizer: Any
    record: dict[str, Any]


def load_model(
    path: str | os.PathLike,
    *,
    grid=None,
    tokenizer: str | os.PathLike | None = None,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    check_tokenizer: Callable[[Any], object] | None = None,
) -> LoadedModel:
    """Load a causal LM and its tokenizer.

    Args:
        path: an HF directory, the sharded checkpoint of a training run, a directory with a PEFT adapter, or a name on
            the hub.
        grid: an `hf_axonn.Grid` over which to shard the model; each rank then reads only its own slices. None, or a
            grid of size 1: the full model on every process.
        tokenizer: where the tokenizer is, if not at `path`.
        dtype: "auto" for that of the checkpoint, or one of DTYPES.
        attn_implementation: as for `AutoModelForCausalLM.from_pretrained`.
        trust_remote_code: whether to execute code that comes with the model.
        revision: branch, tag or commit of a name on the hub, and of its tokenizer if that has the same name. The
            record has the commit that was loaded, whether a revision was named or not.
        check_tokenizer: called with the tokenizer before any weight is read; it raises ValueError, on every rank
            alike, if the tokenizer is the wrong one.
    Raises:
        ValueError: nothing there, weights missing, a grid that is not the number of processes, no tokenizer, a
            revision of a directory, code of its own that may not run, or a training record that its model card
            contradicts. On every rank alike.
    Collectives: over the world; with a grid, those of `hf_axonn.from_pretrained`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, but it must be one of {', '.join(DTYPES)}.")
    start_distributed()
    work_split = WorkSplit.for_model(None)
    if grid is not None:
        grid.check(work_split.world_size)
    directory = _directory(path)
    if revision is not None and directory is not None:
        raise ValueError(f"{path} is a directory, which has no revisions: leave revision=... (--revision) out.")
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    hub: dict[str, Any] = {}
    loaded_from, exact = directory, None
    if directory is None:
        loaded_from, commit, adapter = work_split.on_rank_zero(lambda: _on_hub(path, revision))
        hub = {"revision": revision, "commit": commit}
        exact = commit or revision  # a branch may move while files are loaded one after the other
        # the revision of an adapter is none of its base model
        options |= {"adapter_kwargs": {"revision": exact}} if adapter else {"revision": exact}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    of_model = tokenizer is None or str(tokenizer) == str(path)
    loaded_tokenizer = load_tokenizer(
        tokenizer or path, trust_remote_code=trust_remote_code, revision=exact if of_model else None
    )
    if check_tokenizer is not None:
        check_tokenizer(loaded_tokenizer)
    try:
        # before loading: shards that are missing would be read as noise, on a grid by every rank its own
        if directory is not None and weights.is_sharded(directory):
            work_split.on_rank_zero(lambda: weights.check_complete(directory, _shapes(directory, trust_remote_code)))
        model = _on_grid(path, grid, options) if grid is not None and grid.size > 1 else _on_one_process(path, options)
    except ValueError as error:
        refuse_own_code(str(path), error)
        raise
    model.eval()
    return LoadedModel(
        model=model,
        tokenizer=loaded_tokenizer,
        record={
            "path": str(path),
            **hub,
            "fingerprint": weights.fingerprint(loaded_from, work_split),
            **_base_record(loaded_from, work_split),
            "architecture": type(model).__name__,
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "attn_implementation": getattr(model.config, "_attn_implementation", None),
            "tokenizer": str(tokenizer or path),
            "training": work_split.on_rank_zero(lambda: _training_record(path, directory, exact)),
        },
    )


def load_tokenizer(path: str | os.PathLike, *, trust_remote_code: bool = False, revision: str | None = None):
    """Load the tokenizer of a directory, or of a name on the hub, there of a branch, tag or commit if one is named.

    Raises:
        ValueError: there is none, it is damaged, or it comes with code of its own, which may not run.
    """
    from transformers import AutoTokenizer

    try:
        options = {} if revision is None else {"revision": revision}
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # noqa: BLE001 - that of the library tokenizers has no class of its own
        refuse_own_code(str(path), error)
        raise ValueError(
            f"no tokenizer at {path}; name its directory with tokenizer=... (--tokenizer). {error}"
        ) from error


def start_distributed() -> None:
    """Join the processes that accelerate launch or torchrun started; nothing happens in a single process."""
    import torch.distributed as dist

    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        import torch
        from accelerate import PartialState

        # gloo's set-up does not wait for all: without this, a rank that ends with an error of its own while another is
        # still joining makes that one end with gloo's
        PartialState(cpu=not torch.cuda.is_available()).wait_for_everyone()


def _training_record(path: str | os.PathLike, directory: Path | None, revision: str | None) -> dict[str, Any] | None:
    """Read the training record beside the weights, or that of the model card; None without one, or with a damaged one,
    which a warning names.

    Raises:
        ValueError: both are there, and contradict each other.
    """
    from hf_axonn.goldfish.card import FILES, find_record

    if directory is None:
        from transformers.utils.hub import cached_file

        options = {} if revision is None else {"revision": revision}
        for name in FILES:
            with contextlib.suppress(OSError):
                found = cached_file(str(path), name, _raise_exceptions_for_missing_entries=False, **options)
                directory = directory if found is None else Path(found).parent
    return None if directory is None else find_record(directory)


def _directory(path: str | os.PathLike) -> Path | None:
    """Return the local directory, or None for a name on the hub.

    Raises:
        ValueError: there is no such directory, or it holds no model.
    """
    directory = Path(path)
    if not directory.is_dir():
        if directory.is_absolute() or directory.exists() or str(path).startswith(".") or str(path).count("/") > 1:
            raise ValueError(f"{path} is not a directory.")
        return None
    if not any((directory / name).is_file() for name in ("config.json", "adapter_config.json")):
        inside = sorted(entry.parent.name for entry in directory.glob("*/config.json"))
        remedy = f" Name one of those inside it: {', '.join(inside)}." if inside else ""
        raise ValueError(f"{path} holds no model: there is no config.json.{remedy}")
    return directory


def _shapes(directory: Path, trust_remote_code: bool) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Return names and full shape of every weight, from the configuration alone."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: (tuple(names[id(weight)]), tuple(weight.shape)) for name, weight in model.named_parameters()}


def _on_one_process(path: str | os.PathLike, options: dict[str, Any]):
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process reads all shards
            model, report = AutoModelForCausalLM.from_pretrained(
                path, use_safetensors=True, output_loading_info=True, **options
            )
    except (SafetensorError, ImportError) as error:  # damaged weights; a package that an option needs
        raise ValueError(f"{path} cannot be loaded: {error}") from error
    if report["missing_keys"] or report["mismatched_keys"]:
        raise ValueError(
            f"{path} lacks weights of its own model, which would be random: missing {sorted(report['missing_keys'])}, "
            f"of the wrong shape {sorted(map(str, report['mismatched_keys']))}."
        )
    if torch.cuda.is_available():
        model.to(torch.device("cuda", torch.cuda.current_device()))
    return model


def _on_grid(path: str | os.PathLike, grid, options: dict[str, Any]):
    import hf_axonn

    return hf_axonn.from_pretrained(path, grid=grid, **options)


def _base_record(directory: Path, work_split: WorkSplit) -> dict[str, Any]:
    """Return the base model of an adapter and its fingerprint; nothing for other models."""
    from hf_axonn import adapter_base

    def base_and_directory() -> tuple[str, Path] | None:
        base = adapter_base(directory)
        return (base, Path(base) if Path(base).is_dir() else _on_hub(base)[0]) if base is not None else None

    found = work_split.on_rank_zero(base_and_directory)
    if found is None:
        return {}
    return {"base": found[0], "base_fingerprint": weights.fingerprint(found[1], work_split)}


def _on_hub(name: str | os.PathLike, revision: str | None = None) -> tuple[Path, str | None, bool]:
    """Find a model of the hub: its directory in the cache, the commit (None if unknown), and whether it is an adapter.

    Raises:
        ValueError: there is no such model, or no such revision of it.
    """
    from transformers.utils.hub import cached_file, extract_commit_hash

    options = {} if revision is None else {"revision": revision}
    for file in ("config.json", "adapter_config.json"):
        try:
            found = cached_file(str(name), file, _raise_exceptions_for_missing_entries=False, **options)
        except OSError as error:
            of = "" if revision is None else f" at revision {revision!r}"
            raise ValueError(f"{name}{of} cannot be had: {error}") from error
        if found is not None:
            return Path(found).parent, extract_commit_hash(found, None), file == "adapter_config.json"
    raise ValueError(f"{name} holds no model: there is no config.json.")
