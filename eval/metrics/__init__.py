"""The metrics: of texts, of probabilities, of membership, of exposure.

Every module of this package is imported with it, so that the metrics that it registers are known.
"""

from importlib import import_module
from pkgutil import iter_modules


for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
