"""When is the first choice of a model no choice at all: the bound below which rounding decides.

Greedy decoding takes the largest logit. Another batch, grid or device adds the same numbers in another order, so two
logits that are closer than the difference this makes may change places, and with them the answer for the sample.
"""

import torch


# Nats. What another order of adding changed in the gap between two logits (docs/evaluation.md), with room to spare.
# Weights in fewer bits are computed with in one of these: the widest bound.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.0625, torch.bfloat16: 0.5}


def undecided_below(model) -> float:
    """The bound for a model, in nats: that of the dtype of its weights, and twice that where a grid splits sums.

    On a grid with y > 1 or x > 1 sums over features are made of parts that are rounded before they are added.
    """
    bound = BOUNDS.get(next(model.parameters()).dtype, max(BOUNDS.values()))
    parallel = getattr(model, "axonn", None)
    return 2 * bound if parallel is not None and parallel.grid.y * parallel.grid.x > 1 else bound
