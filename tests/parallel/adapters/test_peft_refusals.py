"""What cannot be adapted, or done to an adapted model, on a grid: refused by name, alike on every rank."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from peft import (
    IA3Config,
    LNTuningConfig,
    LoKrConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from peft.utils import hotswap
from torch.distributed.tensor import DTensor

from hf_axonn import parallelize
from hf_axonn.engine.optimizer_steps import refuse_unserved
from hf_axonn.topology.grid import Grid
from tests.helpers.adapting import adapt, adapted_model
from tests.helpers.models import tiny_model, unplanned_model
from tests.helpers.ranks import run_ranks


def llama(**sizes):
    return tiny_model("llama", **sizes)


def moe():
    return tiny_model("mixtral", num_local_experts=5)


def lora(**options):
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | options)


# (model, PEFT's config, what is said if the adapter is there before, what is said if it comes after).
OTHER_METHODS = {
    "IA3": (llama, IA3Config(task_type="CAUSAL_LM"), "PEFT's ia3.Linear"),
    "LOKR": (llama, LoKrConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"), "PEFT's lokr.Linear"),
    "VERA": (llama, VeraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"), "PEFT's vera.Linear"),
    "LN_TUNING": (llama, LNTuningConfig(task_type="CAUSAL_LM"), "PEFT's ln_tuning.LNTuningLayer"),
    "PROMPT_TUNING": (
        llama,
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        "prompt_encoder.default.embedding.weight lies outside of the model",
    ),
    "PREFIX_TUNING": (
        llama,
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        "prompt_encoder.default.embedding.weight lies outside of the model",
    ),
}
KINDS_OF_LORA = {
    "trainable_token_indices": (llama, lora(trainable_token_indices=[5, 6]), "trainable_tokens.TrainableTokensLayer"),
    "alora_invocation_tokens": (llama, lora(alora_invocation_tokens=[5]), "PEFT's ALoraLinearVariant"),
    "ensure_weight_tying": (
        functools.partial(tiny_model, "smollm2"),
        lora(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True, init_lora_weights=False),
        "share their memory",
    ),
    "consists of several modules": (llama, lora(modules_to_save=["mlp"]), "model.layers.0.mlp consists of several"),
    "of a Linear": (
        llama,
        lora(target_parameters=["o_proj.weight"]),
        "the parameter weight of a Linear .target_parameters. is not supported",
    ),
    "of a Linear, no plan": (
        unplanned_model,
        lora(target_parameters=["up_proj.weight"]),
        "the parameter weight of a Linear .target_parameters. is not supported",
    ),
}
ALL = OTHER_METHODS | KINDS_OF_LORA


def unsharded(model):
    return not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _refuse():
    grid = Grid(x=2)
    for name, (make, config, before) in ALL.items():
        model = get_peft_model(make(), copy.deepcopy(config))
        with pytest.raises(ValueError, match=before):
            parallelize(model, grid)
        assert unsharded(model), name
        base, _ = parallelize(make(), grid)
        names = {parameter for parameter, _ in base.named_parameters()}
        with pytest.raises(ValueError, match=name.partition(",")[0]):
            get_peft_model(base, copy.deepcopy(config))
        if "of a Linear" not in name:  # PEFT itself finds these
            assert {parameter for parameter, _ in base.named_parameters()} == names, name


def test_other_adapters_are_refused_before_the_model_is_touched():
    run_ranks(_refuse, 2)


def _refuse_inits():
    base, _ = parallelize(llama(), Grid(x=2))
    for how in ("pissa", "olora", "mica", "pissa_niter_4"):
        with pytest.raises(ValueError, match=f"init_lora_weights='{how}' needs whole weights: adapt the model before"):
            get_peft_model(base, lora(init_lora_weights=how))
    for how in (True, "gaussian", "orthogonal"):
        model = get_peft_model(parallelize(llama(), Grid(x=2))[0], lora(init_lora_weights=how))
        assert any("lora_A" in name for name, _ in model.named_parameters())


def test_new_adapters_that_need_whole_weights_are_refused():
    run_ranks(_refuse_inits, 2)


def _refuse_on_sharded():
    model = adapt(parallelize(llama(), Grid(x=2))[0])
    ids = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(
        ValueError, match="cannot be copied with copy.deepcopy: load it a second time .* AveragedModel"
    ):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match="cannot be copied with copy.deepcopy"):
        copy.deepcopy(model.get_base_model().model.layers[0])
    with pytest.raises(ValueError, match="from 131 to 140: the vocabulary of this model is sharded already"):
        model.resize_token_embeddings(140)
    with pytest.raises(ValueError, match="from 131 to 136"):
        model.resize_token_embeddings(131, pad_to_multiple_of=8)
    assert model.resize_token_embeddings(131) is model.get_input_embeddings()
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    with pytest.raises(ValueError, match="continuous batching.* is not supported over the grid data=1,z=1,y=1,x=2"):
        model.init_continuous_batching()
    with pytest.raises(ValueError, match="adapter_names, one adapter for each row, is not supported"):
        model.eval()(input_ids=ids, adapter_names=["default", "__base__"])
    with pytest.raises(ValueError, match="add_weighted_adapter is not supported over a grid"):
        model.add_weighted_adapter(["default"], [0.5], "half")
    with pytest.raises(ValueError, match="path_initial_model_for_weight_conversion is not supported over a grid"):
        model.save_pretrained("unused", path_initial_model_for_weight_conversion="unused")
    with pytest.raises(ValueError, match="hot-swapping of adapters is not supported over a grid"):
        hotswap.hotswap_adapter_from_state_dict(model, {}, "default", model.peft_config["default"])
    with pytest.raises(ValueError, match="hot-swapping of adapters is not supported over a grid"):
        hotswap.prepare_model_for_compiled_hotswap(model, target_rank=4)


def test_what_a_sharded_model_cannot_do():
    run_ranks(_refuse_on_sharded, 2)


def test_an_adapted_plain_model_is_as_it_was():
    model = adapted_model("llama")
    parallelize(model, Grid())
    copied = copy.deepcopy(model)
    copied.resize_token_embeddings(140)
    copied.merge_and_unload()
    assert unsharded(model)


class QuantLinear(torch.nn.Linear):
    """Named as one of gptqmodel, which needs a GPU."""


def _refuse_quantized():
    for library in ("bitsandbytes.nn.modules", "gptqmodel.nn_modules.qlinear.torch"):
        QuantLinear.__module__ = library
        model = llama()
        model.model.layers[1].mlp.up_proj = QuantLinear(48, 40, bias=False)
        for its in (model, adapt(model, target_modules=["q_proj"])):
            with pytest.raises(ValueError, match="a quantized model cannot be sharded over a grid"):
                parallelize(its, Grid(x=2))
            assert unsharded(its)


def test_quantized_weights_are_refused():
    run_ranks(_refuse_quantized, 2)


class Adam8bit(torch.optim.SGD):
    """Optimizers by the module of their class: that of bitsandbytes and of torchao, which made none of these."""


def test_low_bit_optimizers_are_refused():
    parameter = torch.nn.Parameter(torch.ones(2))
    refuse_unserved(torch.optim.AdamW([parameter]))
    for library in ("bitsandbytes.optim.adam", "torchao.optim"):
        Adam8bit.__module__ = library
        with pytest.raises(ValueError, match=f"{library.split('.')[0]}'s Adam8bit is not supported over a grid"):
            refuse_unserved(Adam8bit([parameter], lr=0.1))
