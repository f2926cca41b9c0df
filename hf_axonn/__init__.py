"""AxoNN's four-dimensional parallel training, and the goldfish loss, for people who write Hugging Face code.

Importing this package imports nothing else: torch loads it in every process through the entry point that makes
`accelerate launch --config axonn.yaml` work, so each public name is looked up where it lives when it is first used.
"""

import sys
from importlib import import_module


__version__ = "0.1.0"

# public name -> the module of this package that defines it
_EXPORTS = {
    "AxonnConfig": "config",
    "AxonnPlugin": "plugin",
    "GoldfishConfig": "goldfish.trainer",
    "GoldfishMixin": "goldfish.trainer",
    "GoldfishSFTConfig": "goldfish.sft",
    "GoldfishSFTTrainer": "goldfish.sft",
    "GoldfishTrainer": "goldfish.trainer",
    "Grid": "topology.grid",
    "SaveError": "checkpoint.save",
    "auto_parallelize": "parallel.parallelize",
    "export_hf": "checkpoint.export",
    "finish_saves": "checkpoint.save",
    "from_pretrained": "parallel.from_pretrained",
    "goldfish_mask": "goldfish.mask",
    "notebook_launcher": "launch.notebook",
    "load_sharded": "checkpoint.sharded",
    "parallelize": "parallel.parallelize",
    "save_sharded": "checkpoint.sharded",
    "sync_gradients": "engine.gradient_sync",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    return value


def __dir__():
    return sorted({*globals(), *__all__})


class _Package(type(sys)):
    """Keeps a public name when a module has the same one.

    Importing the file parallel/parallelize.py makes Python set `hf_axonn.parallelize` to the module, whichever way it
    came to be imported; users call the function.
    """

    def __setattr__(self, name, value):
        if name in _EXPORTS and isinstance(value, type(sys)):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
