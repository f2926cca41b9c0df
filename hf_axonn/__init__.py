"""AxoNN's four-dimensional parallel training, and the goldfish loss, for people who write Hugging Face code.

Importing this package imports no library: torch loads it in every process through the entry point that makes
`accelerate launch --config axonn.yaml` work, so each public name (`__init__.pyi`) is imported when it is first used.
"""

from hf_axonn.compat.facade import lazy_names


__version__ = "0.2.0"
__getattr__, __dir__ = lazy_names(globals())
