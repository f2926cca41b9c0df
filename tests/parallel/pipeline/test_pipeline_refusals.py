"""What a pipeline cannot do ends with a sentence, on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hf_axonn import Grid, parallelize
from hf_axonn.config import AxonnConfig
from hf_axonn_eval.extraction.work_split import WorkSplit
from tests.benchmarks.architectures.tiny_configs import tiny_model as surveyed_model
from tests.helpers.models import tiny_batch, tiny_model, unplanned_model
from tests.helpers.ranks import refused, run_ranks


def test_settings() -> None:
    with pytest.raises(ValueError, match="schedule is 1f1b and stages_per_rank 2: write schedule: interleaved"):
        AxonnConfig(grid=Grid(pipe=2), stages_per_rank=2)
    with pytest.raises(ValueError, match="schedule is interleaved and stages_per_rank 1"):
        AxonnConfig(grid=Grid(pipe=2), schedule="interleaved")
    with pytest.raises(ValueError, match="schedule is 'gPipe', but it is one of 1f1b, gpipe"):
        AxonnConfig(grid=Grid(pipe=2), schedule="gPipe")
    with pytest.raises(ValueError, match="stages_per_rank is 0, but it is a whole number of at least 1"):
        AxonnConfig(grid=Grid(pipe=2), stages_per_rank=0)
    with pytest.raises(ValueError, match=r"stage_layers is \[2, 0\], but it lists how many layers each stage has"):
        AxonnConfig(grid=Grid(pipe=2), stage_layers=[2, 0])
    with pytest.raises(
        ValueError, match="stage_layers lists 3 stages, but there are 2: pipe=2 times stages_per_rank=1"
    ):
        AxonnConfig(grid=Grid(pipe=2), stage_layers=[2, 1, 1])
    section = {"grid": {"pipe": 2, "x": 2}, "schedule": "zero_bubble", "stage_layers": [1, 3]}
    config = AxonnConfig.from_mapping(section, num_processes=4)
    assert config.stage_layers == (1, 3)
    assert AxonnConfig.from_env({"AXONN_CONFIG": config.to_json()}) == config


def _refusals() -> dict[str, str]:
    grid, found = Grid(pipe=2), {}
    found["no plan"] = refused(parallelize, unplanned_model(), grid)
    for kind in ("gemma4_text", "zamba"):
        found[kind] = refused(parallelize, surveyed_model(kind), grid)
    found["layers"] = refused(parallelize, tiny_model("llama", num_hidden_layers=1), grid)
    listed = AxonnConfig(grid=grid, stage_layers=[1, 2])
    found["list"] = refused(parallelize, tiny_model("llama", num_hidden_layers=4), grid, config=listed)
    model, _ = parallelize(tiny_model("llama", num_hidden_layers=4).train(), grid)
    batch = tiny_batch(4, 7)
    found["token"] = refused(model, **{**batch, "input_ids": batch["input_ids"] + 200})
    found["label"] = refused(model, **{**batch, "labels": batch["labels"] + 200})
    found["generate"] = refused(model.generate, batch["input_ids"])
    found["measured"] = refused(WorkSplit.for_model, model)
    found["decoder"] = refused(model.model, batch["input_ids"])
    found["hidden"] = refused(model, **batch, output_hidden_states=True)
    # What scripts ask of a vocabulary, each rank for itself.
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert embedding.weight.shape == head.weight.shape == (embedding.num_embeddings, head.in_features) == (131, 48)
    assert model.resize_token_embeddings(131) is embedding
    found["resize"] = refused(model.resize_token_embeddings, 140)
    found["embeds"] = refused(model, inputs_embeds=torch.zeros(4, 7, 48), labels=batch["labels"])
    output = model(**batch)
    for name, use in {"logits": lambda: output.logits.log_softmax(-1), "argmax": lambda: output.logits[0]}.items():
        found[name] = refused(use)
    loss = output.loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    model.zero_grad()

    def broken(*args, **kwargs):
        raise OSError("no such kernel")

    if dist.get_rank() == 0:  # before it has sent anything
        model.model.layers[0].mlp.forward = broken
        with pytest.raises(OSError, match="no such kernel") as error:
            model(**batch)
        found["stage"] = " ".join(error.value.__notes__)
    return found


def test_refusals() -> None:
    first, _ = run_ranks(_refusals, 2, timeout=60)
    wanted = {
        "list": "stage_layers lists 1 + 2 = 3 layers, but the model has 4",
        "no plan": "pipe=2 divides the decoder layers of a model, but UnlistedForCausalLM is sharded Linear by Linear",
        "gemma4_text": "hidden states alone of the one before, but attention takes keys and values of other layers",
        "zamba": "hidden states alone of the one before, but its layers take original_hidden_states beside them",
        "layers": "1 layers cannot be divided over 2 stages",
        "token": "outside of the vocabulary of 131",
        "label": "outside of the vocabulary of 131",
        "generate": "Write the model with save_pretrained",
        "measured": "can be measured on one process or on any grid without pipe",
        "decoder": "a decoder was called without its model",
        "hidden": "output_hidden_states is not possible over a grid with pipe",
        "resize": "resize_token_embeddings from 131 to 140: the vocabulary of this model is sharded already",
        "logits": "call the model without labels",
        "argmax": "call the model without labels",
        "embeds": "inputs_embeds is not possible over a grid with pipe",
    }
    for name, text in wanted.items():
        assert text in first[name], first[name]
    assert first["stage"].startswith("in stage 0 of 2, micro-batch 0")
