"""GGUF files: dequantized once to safetensors, of which ranks can read their own slices.

The blocks of a GGUF file are laid out for another order of rows than the model's, and dequantizing is slow, so that it
is not done by every rank, nor again in the next run. The result lies beside the Hugging Face cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

from hf_axonn.compat.messages import get_logger


logger = get_logger(__name__)

# Options of from_pretrained that say where a file is found.
WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def cache_directory() -> Path:
    """Return the directory of converted models: HF_HOME/hf_axonn/gguf."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "hf_axonn" / "gguf"


def convert_once(name_or_path: str, gguf_file: str, *, auto_class: Any, dtype: Any, **where: Any) -> Path:
    """Return the directory of a GGUF model as safetensors, made by the first process; the others wait for it.

    The one that converts holds the full model in memory for a while. A file that has changed, another dtype or
    another release of Transformers is converted anew. No communication: ranks of a node, or of a cluster with a shared
    file system, meet at a lock.

    Args:
        name_or_path, gguf_file: as `from_pretrained` takes them.
        auto_class: the class whose `from_pretrained` reads it.
        dtype: of the weights; None and "auto": that of the file, float32 if it is quantized.
        where: from WHERE.
    Raises:
        OSError: there is no such file, or no room for the result.
        ValueError: an architecture that Transformers does not read from GGUF.
    """
    import transformers
    from transformers.utils.hub import cached_file

    where = {key: value for key, value in where.items() if value is not None}
    found = gguf_file if os.path.isfile(gguf_file) else cached_file(str(name_or_path), gguf_file, **where)
    if found is None:
        raise OSError(f"{name_or_path} has no file {gguf_file}: name one of its GGUF files.")
    file = Path(found).resolve()
    stat = file.stat()
    facts = (file, stat.st_size, stat.st_mtime_ns, str(dtype), auto_class.__name__, transformers.__version__)
    key = hashlib.sha256(repr(tuple(map(str, facts))).encode()).hexdigest()[:16]
    directory = cache_directory() / f"{Path(gguf_file).stem}-{key}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{directory}.lock"):
        if not directory.is_dir():
            logger.warning("converting %s to safetensors, once: later runs read %s", file, directory)
            _convert(file, directory, auto_class, dtype)
    return directory


def _convert(file: Path, directory: Path, auto_class: Any, dtype: Any) -> None:
    """Write the directory, which is there only when it is complete."""
    from transformers import GgufConfig

    made = Path(tempfile.mkdtemp(prefix=f"{directory.name}-", dir=directory.parent))
    try:
        options = {} if dtype is None else {"dtype": dtype}
        model = auto_class.from_pretrained(
            str(file.parent), gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), **options
        )
        model.should_save_on_this_rank = lambda *_: True  # among several processes rank 0 alone would write
        model.save_pretrained(made)
        os.chmod(made, 0o755)  # mkdtemp's own is for one user
        try:
            os.rename(made, directory)
        except OSError:
            if not directory.is_dir():  # else a node that the lock does not reach was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
