"""Modules that mixtures call after their experts with an input that was there before, by their source."""

from __future__ import annotations

import pytest
from torch import nn
from transformers.models.aria.modeling_aria import AriaTextMoELayer
from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeSparseMoeBlock
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.granitemoeshared.modeling_granitemoeshared import GraniteMoeSharedMoE
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from hf_axonn.architectures.shared_experts import find_computed_ahead


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("experts", "gate", "shared", "other", "third"):
            setattr(self, name, nn.Identity())

    def forward(self, hidden, scale=1.0):
        residual = hidden
        self.other(hidden)
        hidden = hidden.view(-1, 4)
        routed = self.experts(hidden, self.gate(hidden))
        if scale > 1:
            routed = routed + self.shared(residual)
        kept = residual
        routed = routed + self.third(hidden) * self.experts.scale
        return self.gate(kept.detach()), self.other(kept, scale), self.other(routed), self.missing(hidden)


class Changed(Mixture):
    def forward(self, hidden):
        residual, hidden = hidden, hidden + 1
        routed = self.experts(hidden)
        hidden += routed
        return self.shared(hidden) + self.third(residual)


class Expression(Mixture):
    forward = lambda self, hidden: self.experts(hidden) + self.shared(hidden)  # noqa: E731


def test_calls_after_experts_of_what_was_there_before_are_found():
    assert find_computed_ahead(Mixture(), "experts") == {"shared": True, "third": False}
    assert find_computed_ahead(Mixture(), "routed") == {}
    assert find_computed_ahead(Changed(), "experts") == {}
    assert find_computed_ahead(Expression(), "experts") == {}
    assert find_computed_ahead(nn.Sequential(nn.Identity()), "0") == {}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (DeepseekV3MoE, {"shared_experts": True}),
        (NemotronHMoE, {"shared_experts": True}),  # its experts get latents
        (Cohere2MoeSparseMoeBlock, {"shared_experts": False}),
        (Qwen2MoeSparseMoeBlock, {"shared_expert_gate": False}),  # the shared expert is called first
        (AriaTextMoELayer, {}),  # the input is made in the call
        (GraniteMoeSharedMoE, {}),  # it is outside of the mixture
    ],
)
def test_mixtures_of_transformers(kind, expected):
    mixture = kind.__new__(kind)
    nn.Module.__init__(mixture)
    mixture.experts = mixture.shared_experts = mixture.shared_expert = mixture.shared_expert_gate = nn.Identity()
    assert find_computed_ahead(mixture, "experts") == expected
