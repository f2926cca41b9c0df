"""Loading on one process, and what a wrong directory is told."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_axonn import Grid
from hf_axonn_eval import document_nll, extract, load_model
from hf_axonn_eval.extraction import weights_on_disk as weights
from tests.helpers.eval_support import samples, tiny_llama, topics_tokenizer, trained_llama
from tests.helpers.ranks import run_ranks


@pytest.fixture
def directory(tmp_path):
    trained_llama().save_pretrained(tmp_path / "model")
    topics_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_what_is_loaded_is_what_was_saved(directory):
    loaded = load_model(directory)
    assert not loaded.model.training and not hasattr(loaded.model, "axonn")
    expected = extract(trained_llama(), topics_tokenizer(), samples()[:3], progress=False)
    assert extract(loaded.model, loaded.tokenizer, samples()[:3], progress=False) == expected
    assert loaded.record == {
        "path": str(directory),
        "fingerprint": weights.fingerprint(directory),
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "attn_implementation": "sdpa",
        "tokenizer": str(directory),
        "training": None,
    }


def test_a_grid_of_one_process_is_a_plain_model(directory):
    loaded = load_model(directory, grid=Grid(), dtype="bfloat16", attn_implementation="eager")
    assert loaded.model.dtype == torch.bfloat16 and loaded.record["dtype"] == "bfloat16"
    assert loaded.record["attn_implementation"] == "eager"


def test_an_adapter_is_loaded_with_its_base_model(directory, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = tiny_llama()
    base.save_pretrained(tmp_path / "base")
    base = type(base).from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = load_model(tmp_path / "adapter", tokenizer=directory)
    asked = torch.tensor([samples()[0].prefix])
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(asked).logits, adapted.eval()(asked).logits)
    assert loaded.record["base"] == str(tmp_path / "base")
    assert loaded.record["base_fingerprint"] == weights.fingerprint(tmp_path / "base")
    alone = extract(loaded.model, None, samples()[:3], progress=False)
    on_grid, _ = run_ranks(ask_adapter, 2, tmp_path / "adapter", directory)
    assert [result.generated for result in on_grid] == [result.generated for result in alone]
    for one, other in zip(on_grid, alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def ask_adapter(adapter, tokenizer) -> list:
    loaded = load_model(adapter, grid=Grid(x=2), tokenizer=tokenizer)
    return extract(loaded.model, None, samples()[:3], progress=False)


def test_weights_that_are_missing_are_not_made_up(directory):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing \['model.layers.1.mlp.up_proj.weight'\]"):
        load_model(directory)


def test_pickled_weights_are_not_read(directory):
    (directory / "model.safetensors").unlink()
    torch.save(tiny_llama().state_dict(), directory / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_model(directory)


def test_wrong_places_are_named(directory, tmp_path):
    with pytest.raises(ValueError, match="absent is not a directory"):
        load_model(tmp_path / "absent")
    with pytest.raises(ValueError, match="no config.json. Name one of those inside it: model"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer at"):
        load_model(directory, tokenizer=tmp_path / "nothing")
    with pytest.raises(ValueError, match="dtype is 'fp8'"):
        load_model(directory, dtype="fp8")


def measure(directory: str, outputs: str) -> dict:
    measured = {}
    for axis in ("data", "z", "x", "y"):
        loaded = load_model(directory, grid=Grid(**{axis: 2}))
        assert loaded.model.axonn.grid == Grid(**{axis: 2})
        # the first five samples are there already, from one process without a grid
        options = {"output": f"{outputs}/{axis}", "model_record": loaded.record, "batch_size": 2, "progress": False}
        results = extract(loaded.model, loaded.tokenizer, samples()[:11], **options)
        loss = document_nll(loaded.model, [sample.prefix + sample.suffix for sample in samples()[:5]])
        measured[axis] = results, loss
    return measured


def test_on_a_grid_the_results_are_the_same(directory, tmp_path):
    alone = load_model(directory)
    expected = extract(alone.model, alone.tokenizer, samples()[:11], batch_size=2, progress=False)
    loss = document_nll(alone.model, [sample.prefix + sample.suffix for sample in samples()[:5]])
    for axis in ("data", "z", "x", "y"):
        stopped = tmp_path / axis
        options = {"output": stopped, "model_record": alone.record, "progress": False}
        extract(alone.model, alone.tokenizer, samples()[:11], **options)
        file = stopped / "results.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:5]))
    measured, _ = run_ranks(measure, 2, str(directory), str(tmp_path))
    for axis in ("data", "z", "x", "y"):
        results, loss_on_grid = measured[axis]
        assert [result.generated for result in results] == [result.generated for result in expected]
        for result, wanted in zip(results, expected, strict=True):
            assert result.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        assert loss_on_grid == (pytest.approx(loss.nll, rel=1e-5), loss.tokens)


def test_a_grid_needs_its_processes(directory):
    with pytest.raises(ValueError, match="= 4, but 1 process"):
        load_model(directory, grid=Grid(z=2, x=2))
