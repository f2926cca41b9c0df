"""What GPUs could do at most, by the names that torch knows them by: utilisation (MFU) is a share of that."""

from __future__ import annotations


# Dense bf16 TFLOP/s of the makers' data sheets; of several that match a name the first counts.
PEAKS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("GH200", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("MI250X", 191.5),  # a GCD, which is a GPU to torch
    ("MI300X", 1307.0),
)


def peak_tflops(name: str) -> float | None:
    """The advertised dense bf16 TFLOP/s of a GPU of this name, None if it is not known."""
    return next((peak for part, peak in PEAKS if part in name), None)
