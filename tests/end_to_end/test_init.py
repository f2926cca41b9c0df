"""From `hf-axonn init` to the first step: the command that it prints starts a script on the grid that it chose."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch

from hf_axonn.cli.main import main
from tests.helpers.launching import assert_quiet, run
from tests.helpers.models import tiny_model


SCRIPT = """\
import json
import torch
from accelerate import Accelerator
import hf_axonn

accelerator = Accelerator()
model = hf_axonn.from_pretrained("model", grid=hf_axonn.AxonnConfig.from_env().grid).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.load("rows"), batch_size=4 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for ids in loader:
    loss = model(input_ids=ids, labels=ids).loss
    losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
if accelerator.is_main_process:
    with open("found.json", "w") as file:
        json.dump([str(accelerator.parallelism_config.grid), losses], file)
accelerator.end_training()
"""


@pytest.mark.slow  # a quick launch, of another script, is in test_end_to_end.py
def test_a_launch_file_of_init_is_launched_as_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = tiny_model("llama").train()
    model.save_pretrained("model")
    rows = torch.randint(3, 131, (8, 12), generator=torch.Generator().manual_seed(1))
    torch.save(rows, "rows")
    Path("train.py").write_text(SCRIPT)
    command = ["init", "--yes", "--processes", "2", "--mixed-precision", "no", "--seq", "12", "--batch-tokens", "48"]
    assert main(command) == 0
    word, *words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert word == "accelerate"
    assert_quiet(run(tmp_path, Path(sys.executable).with_name(word), *words))
    grid, losses = json.loads(Path("found.json").read_text())
    assert grid == "data=1,z=2,y=1,x=1"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids, found in zip(rows.split(4), losses, strict=True):
        loss = model(input_ids=ids, labels=ids).loss
        assert abs(loss.item() - found) < 1e-5
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
