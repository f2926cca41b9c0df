"""Lightning over a grid: the strategies `AxonnStrategy` of its Trainer and `AxonnFabricStrategy` of its Fabric."""

from importlib.util import find_spec


if find_spec("lightning") is None:
    raise ModuleNotFoundError(
        "hf_axonn's strategies need Lightning, which is not installed: pip install 'hf_axonn[lightning]'",
        name="lightning",
    )
