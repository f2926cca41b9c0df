"""Public names, each from the module that defines it: `lazy_names` of compat/facade.py reads these lines, too."""

from hf_axonn.checkpoint.adapter_files import adapter_base as adapter_base
from hf_axonn.checkpoint.export import export_hf as export_hf
from hf_axonn.checkpoint.save import SaveError as SaveError
from hf_axonn.checkpoint.save import finish_saves as finish_saves
from hf_axonn.checkpoint.sharded import load_sharded as load_sharded
from hf_axonn.checkpoint.sharded import save_sharded as save_sharded
from hf_axonn.config import AxonnConfig as AxonnConfig
from hf_axonn.engine.gradient_sync import sync_gradients as sync_gradients
from hf_axonn.engine.state import parallel_state as parallel_state
from hf_axonn.goldfish.collator import GoldfishCollator as GoldfishCollator
from hf_axonn.goldfish.config import GoldfishConfig as GoldfishConfig
from hf_axonn.goldfish.mask import goldfish_mask as goldfish_mask
from hf_axonn.goldfish.sft import GoldfishSFTConfig as GoldfishSFTConfig
from hf_axonn.goldfish.sft import GoldfishSFTTrainer as GoldfishSFTTrainer
from hf_axonn.goldfish.strategy import LossStrategy as LossStrategy
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

__version__: str
