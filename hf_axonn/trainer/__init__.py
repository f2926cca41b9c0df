"""What Transformers' Trainer needs on a grid: saving, resuming, the Hub, samplers, TRL, callbacks."""

from importlib import import_module


def __getattr__(name):
    # hf_axonn.trainer was the module of these in 0.1.0, and pickles of it (training_args.bin) name them so.
    if name in ("GoldfishConfig", "GoldfishMixin", "GoldfishTrainer"):
        return getattr(import_module("hf_axonn"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
