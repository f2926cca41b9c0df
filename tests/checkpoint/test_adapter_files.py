"""Adapters in PEFT's files, on one process; over a grid: test_lora.py and test_peft_adapters.py."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

from hf_axonn.checkpoint.adapter_files import load_adapters, save_adapters
from tests.helpers.models import tiny_model


def adapted(*names: str, seed: int, target: str = "q_proj") -> PeftModel:
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=[target], init_lora_weights=False)
    first, *others = names
    model = get_peft_model(tiny_model("llama"), config, adapter_name=first)
    for name in others:
        model.add_adapter(name, config)
    return model


def test_every_adapter_comes_back_from_its_own_folder(tmp_path):
    names = ("default", "other")
    saved, loaded = adapted(*names, seed=1), adapted(*names, seed=2)
    save_adapters(saved, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert (tmp_path / "other" / "adapter_config.json").is_file() and not (tmp_path / "default").exists()
    load_adapters(loaded, tmp_path)
    weights = [get_peft_model_state_dict(saved, adapter_name=name) for name in names]
    assert any(not torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    for name, expected in zip(names, weights, strict=True):
        found = get_peft_model_state_dict(loaded, adapter_name=name)
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_an_adapter_of_other_modules_is_refused(tmp_path):
    save_adapters(adapted("default", seed=1), tmp_path)
    with pytest.raises(ValueError, match="holds other adapters than the model has"):
        load_adapters(adapted("default", seed=1, target="v_proj"), tmp_path)
