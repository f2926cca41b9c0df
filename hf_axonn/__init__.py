"""AxoNN's four-dimensional parallel training, and the goldfish loss, for people who write Hugging Face code.

Importing this package imports nothing else: torch loads it in every process through the entry point that makes
`accelerate launch --config axonn.yaml` work, so each public name is looked up where it lives when it is first used.
"""

import functools
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING


__version__ = "0.2.0"

# public name -> the module of this package that defines it
_EXPORTS = {
    "AxonnConfig": "config",
    "AxonnFabricStrategy": "lightning.fabric",
    "AxonnPlugin": "plugin",
    "AxonnStrategy": "lightning.trainer",
    "GoldfishConfig": "goldfish.trainer",
    "GoldfishMixin": "goldfish.trainer",
    "GoldfishSFTConfig": "goldfish.sft",
    "GoldfishSFTTrainer": "goldfish.sft",
    "GoldfishTrainer": "goldfish.trainer",
    "Grid": "topology.grid",
    "Monitor": "monitoring.monitor",
    "MonitorCallback": "trainer.callbacks",
    "ProfilerCallback": "trainer.callbacks",
    "SaveError": "checkpoint.save",
    "adapter_base": "checkpoint.adapter_files",
    "auto_parallelize": "parallel.parallelize",
    "export_hf": "checkpoint.export",
    "finish_saves": "checkpoint.save",
    "from_pretrained": "parallel.from_pretrained",
    "goldfish_mask": "goldfish.mask",
    "load_sharded": "checkpoint.sharded",
    "memory_snapshots": "monitoring.memory_snapshots",
    "named_ranges": "monitoring.ranges",
    "notebook_launcher": "launch.notebook",
    "parallel_state": "engine.state",
    "parallelize": "parallel.parallelize",
    "save_sharded": "checkpoint.sharded",
    "sync_gradients": "engine.gradient_sync",
}
# modules of 0.1.0 that its documents or its pickles name -> where their contents are now
_MOVED = {
    "failures": "distributed.watchdog.watchdog",
    "gradients": "engine.gradient_sync",
    "grid": "topology.grid",
    "perf": "planner",
    "perf.models": "planner.dense",
    "perf.volumes": "planner.traffic.volumes",
    "trl": "goldfish.sft",
}
__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from hf_axonn.checkpoint.adapter_files import adapter_base as adapter_base
    from hf_axonn.checkpoint.export import export_hf as export_hf
    from hf_axonn.checkpoint.save import SaveError as SaveError
    from hf_axonn.checkpoint.save import finish_saves as finish_saves
    from hf_axonn.checkpoint.sharded import load_sharded as load_sharded
    from hf_axonn.checkpoint.sharded import save_sharded as save_sharded
    from hf_axonn.config import AxonnConfig as AxonnConfig
    from hf_axonn.engine.gradient_sync import sync_gradients as sync_gradients
    from hf_axonn.engine.state import parallel_state as parallel_state
    from hf_axonn.goldfish.mask import goldfish_mask as goldfish_mask
    from hf_axonn.goldfish.sft import GoldfishSFTConfig as GoldfishSFTConfig
    from hf_axonn.goldfish.sft import GoldfishSFTTrainer as GoldfishSFTTrainer
    from hf_axonn.goldfish.trainer import GoldfishConfig as GoldfishConfig
    from hf_axonn.goldfish.trainer import GoldfishMixin as GoldfishMixin
    from hf_axonn.goldfish.trainer import GoldfishTrainer as GoldfishTrainer
    from hf_axonn.launch.notebook import notebook_launcher as notebook_launcher
    from hf_axonn.lightning.fabric import AxonnFabricStrategy as AxonnFabricStrategy
    from hf_axonn.lightning.trainer import AxonnStrategy as AxonnStrategy
    from hf_axonn.monitoring.memory_snapshots import memory_snapshots as memory_snapshots
    from hf_axonn.monitoring.monitor import Monitor as Monitor
    from hf_axonn.monitoring.ranges import named_ranges as named_ranges
    from hf_axonn.parallel.from_pretrained import from_pretrained as from_pretrained
    from hf_axonn.parallel.parallelize import auto_parallelize as auto_parallelize
    from hf_axonn.parallel.parallelize import parallelize as parallelize
    from hf_axonn.plugin import AxonnPlugin as AxonnPlugin
    from hf_axonn.topology.grid import Grid as Grid
    from hf_axonn.trainer.callbacks import MonitorCallback as MonitorCallback
    from hf_axonn.trainer.callbacks import ProfilerCallback as ProfilerCallback
else:  # hidden from type checkers, to which it would make every name exist

    def __getattr__(name):
        if name not in _EXPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
        return value


def __dir__():
    return sorted(__all__)


class _MovedModules:
    """Finds modules of 0.1.0: each looks its names up in the module that has them now.

    Pickles of 0.1.0, such as the training_args.bin of a checkpoint, name classes by these modules.
    """

    @staticmethod
    def find_spec(fullname, path=None, target=None):
        name = fullname.removeprefix("hf_axonn.")
        if fullname == name or name not in _MOVED:
            return None
        return ModuleSpec(fullname, _MovedModules, is_package=name == "perf")

    @staticmethod
    def create_module(spec):
        return None  # an ordinary one

    @staticmethod
    def exec_module(module):
        new = f"{__name__}.{_MOVED[module.__name__.removeprefix('hf_axonn.')]}"
        module.__getattr__ = functools.partial(getattr, import_module(new))


sys.meta_path.append(_MovedModules)  # last: asked only where there is no such module
