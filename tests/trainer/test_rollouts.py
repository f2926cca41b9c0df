"""GRPO and RLOO of TRL over a grid with a vLLM server, by a stand-in for TRL's client (helpers/vllm_client.py).

That training equals one process is in test_preferences.py, what is sent for other models in test_weight_stream.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file

from hf_axonn import Grid
from hf_axonn.trainer.rollouts import check_rollouts
from tests.helpers.chats import chat_tokenizer
from tests.helpers.launching import forked
from tests.helpers.preferences import write_preferences
from tests.helpers.vllm_client import VLLMClientStub, vllm_is_there


SCRIPT = (
    "--max_steps 3 --num_generations 4 --max_completion_length 5 --learning_rate 1e-3 --beta 0.1 --report_to none "
)
SCRIPT += (
    "--use_cpu --bf16 false --save_strategy no --logging_steps 1 --disable_tqdm true --gradient_checkpointing false "
)
SCRIPT += "--reward_funcs tests.helpers.vllm_client.letters_count --use_vllm --vllm_mode server"
LORA = "--use_peft --lora_r 4 --lora_target_modules q_proj v_proj --lora_dropout 0"


@pytest.mark.parametrize("kind", ["GRPOTrainer", "RLOOTrainer"])
def test_an_engine_in_the_ranks_is_refused(kind):
    def trainer(**args):
        return type(kind, (), {"args": SimpleNamespace(**args)})()

    with pytest.raises(ValueError, match="vllm_mode='colocate' is not supported over a grid .* vllm_mode='server'"):
        check_rollouts(trainer(use_vllm=True, vllm_mode="colocate"), Grid(x=2))
    check_rollouts(trainer(use_vllm=True, vllm_mode="server"), Grid(x=2))
    check_rollouts(trainer(use_vllm=False, vllm_mode="colocate"), Grid(x=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rollouts")
    write_preferences(folder)
    chat_tokenizer().save_pretrained(folder / "speaker")
    (folder / "prompts").mkdir()
    load_from_disk(str(folder / "train")).select_columns(["prompt"]).to_json(folder / "prompts" / "train.jsonl")
    return folder


def run_script(folder: Path, grid: Grid | None, *, adapters: bool) -> tuple[list[dict], list]:
    """Run TRL's script for GRPO as it is; returns the updates and the prompts of the one rank that has a client."""
    rows = 8 // (grid.dp_size if grid else 1)
    words = [*SCRIPT.split(), *(LORA.split() if adapters else []), "--per_device_train_batch_size", rows]
    words += ["--model_name_or_path", folder / "speaker", "--dataset_name", folder / "prompts"]
    noted = folder / f"{grid} {adapters}"
    noted.mkdir()
    with vllm_is_there(), mock.patch.object(VLLMClientStub, "folder", noted):
        ended = forked(folder, grid, "-m", "trl.scripts.grpo", *words, "--output_dir", noted / "out")
    assert ended.code == 0, ended.output[-4000:]
    (file,) = noted.glob("client-*.pt")
    return torch.load(file)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
def test_trls_script_sends_a_server_the_weights_and_asks_for_each_prompt_once(folder, adapters):
    stock, questions = run_script(folder, None, adapters=adapters)
    loaded = load_file(folder / "speaker" / "model.safetensors")
    loaded = {name: tensor.float() for name, tensor in loaded.items()}  # as the script loads them
    attention = {f"model.layers.{layer}.self_attn.{each}_proj.weight" for layer in range(2) for each in "qkvo"}
    query = "model.layers.0.self_attn.q_proj.weight"
    assert (stock[-1][query] - loaded[query]).abs().max() > 1e-4
    for grid in (Grid(x=2), Grid(z=2)):
        updates, prompts = run_script(folder, grid, adapters=adapters)
        assert prompts == questions and all(len(each) == 2 for each in prompts)
        start, *later = updates
        assert start.keys() == loaded.keys() and all(torch.equal(start[name], loaded[name]) for name in loaded)
        assert len(later) == 2 and all(each.keys() == (attention if adapters else loaded.keys()) for each in later)
        for sent, known in zip(updates, stock, strict=True):
            for name, tensor in sent.items():
                assert tensor.dtype == known[name].dtype == torch.float32
                assert torch.allclose(tensor, known[name], rtol=1e-5, atol=1e-6), (grid, name)
