"""Modules beside experts that need no token that travels, by the source of the mixture."""

from __future__ import annotations

import pytest
from torch import nn
from transformers.models.aria.modeling_aria import AriaTextMoELayer
from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeSparseMoeBlock
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeSparseMoeBlock
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer
from transformers.models.granitemoeshared.modeling_granitemoeshared import GraniteMoeSharedDecoderLayer
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Moe
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from hf_axonn.architectures.shared_experts import find_beside
from hf_axonn.layers.computed_ahead import Beside


GEMMA_4 = ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm_1")
BEFORE, OF_MIXTURE, OF_EXPERTS = Beside.BEFORE, Beside.OF_MIXTURE, Beside.OF_EXPERTS


def mlp() -> nn.Module:
    return nn.Sequential(nn.Identity())


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("experts", "gate", "shared", "other", "third", "expert_mlp"):
            setattr(self, name, mlp())
        self.norm = nn.Identity()

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


class Branches(Mixture):
    def forward(self, hidden):
        if self.scale:
            self.experts(hidden)
            same = hidden
        else:
            hidden = same = self.experts(hidden)
        other = self.other(hidden)
        if self.scale:
            same = hidden
        else:
            other += self.shared(same)
        return other + self.third(same)


class First(Mixture):
    """Calls modules before its experts: one whose result waits, one that is used, two that make more than one thing,
    and one that is no module of modules."""

    def forward(self, hidden):
        shared = self.shared(hidden.detach()) if self.scale else None
        shared = self.shared(hidden)
        first, second = self.third(hidden)
        used = self.other(hidden)
        norm = self.norm(hidden)
        routed = self.experts(hidden, used)
        return routed + shared + first + norm


class Chained(Mixture):
    """Calls modules before its experts of which one gets the result of the other; a result in between is used again,
    where it is computed at the latest, and one goes through something that is no module."""

    def forward(self, hidden):
        shared = self.norm(hidden.reshape(-1, 4))
        shared = self.shared(shared)
        shared = self.gate(shared)
        other = self.other(hidden)
        third = self.third(other)
        other = other + 1
        odd = self.expert_mlp(hidden)
        odd = self.helper(odd)
        return self.experts(hidden) + shared + other + third + odd


class Views(Mixture):
    def forward(self, hidden):
        shape = hidden.shape
        hidden = hidden.view(-1, 4)
        routed = self.experts(hidden).view(shape)
        return routed + self.shared(hidden.view(shape)) + self.other(routed.view(shape)) + self.third(hidden.t())


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixture, self.dense, self.before, self.first = Mixture(), mlp(), mlp(), mlp()

    def forward(self, hidden):
        residual = hidden
        hidden = hidden.detach()
        before = self.before(hidden)
        routed = self.mixture(hidden)
        return routed + self.dense(hidden) + before + self.first(residual)


class Expression(Mixture):
    forward = lambda self, hidden: self.experts(hidden) + self.shared(hidden)  # noqa: E731


def test_calls_after_experts_of_what_was_there_before_are_found():
    assert find_beside(Mixture(), "experts") == {"": {"shared": OF_MIXTURE, "third": OF_EXPERTS}}
    for mixture, experts in [
        (Mixture(), "routed"),
        (Changed(), "experts"),
        (Expression(), "experts"),
        (nn.Sequential(nn.Identity()), "0"),
    ]:
        assert find_beside(mixture, experts) == {"": {}}


def test_branches_are_read_apart():
    """The input of the mixture is that of the experts in one branch, and their result in the other."""
    assert find_beside(Branches(), "experts") == {"": {}}


def test_calls_before_experts_whose_results_wait_are_found():
    assert find_beside(First(), "experts") == {"": {"shared": BEFORE}}


def test_calls_before_experts_of_results_that_wait_wait_too():
    found = find_beside(Chained(), "experts")
    assert found == {"": dict.fromkeys(("norm", "shared", "gate", "other", "third"), BEFORE)}


def test_a_view_after_experts_is_taken_for_the_input_of_the_mixture():
    assert find_beside(Views(), "experts") == {"": {"shared": OF_MIXTURE}}


def test_the_module_around_a_mixture_is_read_too():
    found = find_beside(nn.ModuleDict({"layer": Around()}), "layer.mixture.experts")
    assert found == {"layer.mixture": {"shared": OF_MIXTURE, "third": OF_EXPERTS}, "layer": {"dense": OF_EXPERTS}}
    assert list(found) == ["layer.mixture", "layer"]


@pytest.mark.parametrize(
    ("kind", "experts", "expected"),
    [
        (DeepseekV3MoE, "experts", {"shared_experts": OF_MIXTURE}),
        (NemotronHMoE, "experts", {"shared_experts": OF_MIXTURE}),  # its experts get latents
        (Cohere2MoeSparseMoeBlock, "experts", {"shared_experts": OF_EXPERTS}),
        (Qwen2MoeSparseMoeBlock, "experts", {"shared_expert": BEFORE, "shared_expert_gate": OF_EXPERTS}),
        (Ernie4_5_MoeSparseMoeBlock, "experts", {"shared_experts": BEFORE}),
        (HunYuanMoEV1Moe, "experts", {"shared_mlp": BEFORE}),
        (AriaTextMoELayer, "experts", {"shared_experts": OF_MIXTURE}),  # a view is made in the call
        (GraniteMoeSharedDecoderLayer, "block_sparse_moe", {"shared_mlp": OF_EXPERTS}),
        (Gemma4TextDecoderLayer, "experts", dict.fromkeys(GEMMA_4, BEFORE)),
    ],
)
def test_mixtures_of_transformers(kind, experts, expected):
    mixture = kind.__new__(kind)
    nn.Module.__init__(mixture)
    for name in ("shared_expert_gate", "post_feedforward_layernorm_2", *GEMMA_4):
        setattr(mixture, name, nn.Identity())
    for name in (experts, "shared_experts", "shared_expert", "shared_mlp", "mlp"):
        setattr(mixture, name, mlp())
    assert find_beside(mixture, experts) == {"": expected}
