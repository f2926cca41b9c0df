"""The way to the attention function of one module leaves other modules of its file alone."""

from __future__ import annotations

import torch

from hf_axonn.compat.attention import route_attention
from tests.helpers.models import tiny_model


def called(module):
    hidden = torch.randn(2, 5, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angles = torch.ones(1, 5, 4, dtype=torch.float64), torch.zeros(1, 5, 4, dtype=torch.float64)
    return module(hidden, position_embeddings=angles, attention_mask=None)[0]


def test_only_the_routed_module_takes_the_route_and_leaves_the_graph():
    routed, other = (tiny_model("llama").model.layers[0].self_attn for _ in range(2))
    truth, seen = called(other), []

    def route(function, module, *args, **options):
        seen.append(module)
        return function(module, *args, **options)

    route_attention(routed, route)
    assert torch.equal(called(routed), truth) and seen == [routed]
    compiled = torch.compile(other, backend="eager", fullgraph=True)
    torch.testing.assert_close(called(compiled), truth)
    assert torch.equal(called(torch.compile(routed, backend="eager")), truth)
    assert seen == [routed, routed]
