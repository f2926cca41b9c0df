"""A checkpoint made by someone who means harm, with checksums that fit: nothing in it is executed."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_axonn import AxonnPlugin, Grid, export_hf, from_pretrained
from hf_axonn.checkpoint.commit import write_manifest
from hf_axonn.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from hf_axonn.checkpoint.shard_files import checksum_of
from hf_axonn.cli.main import main
from hf_axonn.distributed.collectives import barrier, world_rank
from tests.helpers.models import tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_trainer


GRID = Grid(z=2)
MODEL = tiny_model("smollm2", dtype=torch.float32, num_hidden_layers=1)
TRACE = "HARM_DONE"  # the payload makes the file that this variable of the environment names


class Payload:
    def __reduce__(self):
        return (exec, (f"import os; open(os.environ['{TRACE}'], 'w').close()",))


@pytest.fixture
def trace(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "harm"
    monkeypatch.setenv(TRACE, str(path))
    pickle.loads(pickle.dumps(Payload()))
    assert path.exists(), "the payload itself works"
    path.unlink()
    return path


def trainer(output: Path, steps: int):
    return make_trainer(
        output,
        GRID,
        model=copy.deepcopy(MODEL),
        stock=True,
        max_steps=steps,
        save_steps=1,
        eval_strategy="no",
        eval_steps=None,
        parallelism_config=AxonnPlugin(grid=GRID),
    )


def one_step(output: Path) -> None:
    trainer(output, 1).train()


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("honest")
    run_ranks(one_step, 2, folder)
    return folder / "checkpoint-1"


def sign(checkpoint: Path) -> None:
    """A manifest that fits whatever lies in the directory."""
    before = read_manifest(checkpoint)
    found = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST]
    files = {path.relative_to(checkpoint).as_posix(): checksum_of(path) for path in found}
    write_manifest(checkpoint, Manifest("evil", before.grid, files, before.tied, before.model, before.optimizer))


PICKLES = (
    "training_args.bin",
    "optimizer.pt",
    "optimizer.bin",
    "scheduler.pt",
    "scaler.pt",
    "rng_state_0.pth",
    "rng_state_1.pth",
    "rng_state.pth",
    "pytorch_model.bin",
    "adapter_model.bin",
)
REFUSED = {
    "scheduler.pt": "scheduler.pt holds more than tensors and plain values",
    "rng_state_0.pth": "rank 0: .*rng_state_0.pth does not hold a random state",
    "rng_state_1.pth": "rank 1: .*rng_state_1.pth does not hold a random state",
}


def resume_from_each(honest: Path, folder: Path) -> dict[str, str]:
    """What becomes of a resume for each file that is planted: the words of the refusal, or that it trains."""
    outcomes = {}
    for name in PICKLES:
        checkpoint = folder / name / "checkpoint-1"
        if world_rank() == 0:
            shutil.copytree(honest, checkpoint)
            torch.save(Payload(), checkpoint / name)
            sign(checkpoint)
        barrier()
        try:
            trainer(folder / name, 2).train(resume_from_checkpoint=True)
            outcomes[name] = "trained"
        except ValueError as problem:
            outcomes[name] = str(problem)
        barrier()
    return outcomes


def test_no_pickle_is_executed_by_a_resume(honest, tmp_path, trace):
    first, second = run_ranks(resume_from_each, 2, honest, tmp_path / "runs")
    assert not trace.exists()
    assert first == second, "all ranks alike"
    for name in PICKLES:
        assert re.search(REFUSED.get(name, "^trained$"), first[name]), (name, first[name])


def load_in_every_way(checkpoint: Path) -> None:
    from_pretrained(checkpoint, grid=GRID)


def test_no_code_of_a_checkpoint_is_imported(honest, tmp_path, trace, capsys):
    """auto_map in the config and in the tokenizer's, and weights as pickles beside the shards."""
    checkpoint = tmp_path / "checkpoint-1"
    shutil.copytree(honest, checkpoint)
    code = f"import os; open(os.environ['{TRACE}'], 'w').close()\nclass Evil: pass\n"
    (checkpoint / "evil.py").write_text(code)
    config = json.loads((checkpoint / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    torch.save(Payload(), checkpoint / "pytorch_model.bin")
    torch.save(Payload(), checkpoint / "training_args.bin")
    sign(checkpoint)
    assert AutoConfig.from_pretrained(checkpoint).model_type == "llama"
    AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises((ValueError, OSError, EOFError, AttributeError)):
        AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    run_ranks(load_in_every_way, 2, checkpoint)
    assert main(["verify", str(checkpoint)]) == 0
    assert main(["convert", str(checkpoint), str(tmp_path / "plain")]) == 0
    assert "code that came with the model is left out: read evil.py, and copy what" in capsys.readouterr().out
    assert not list((tmp_path / "plain").glob("*.bin")) and not (tmp_path / "plain" / "evil.py").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert not trace.exists()


def test_links_to_other_files_are_not_followed(honest, tmp_path):
    """A shard that is a link to a file elsewhere, whose checksum the author knows."""
    checkpoint = tmp_path / "checkpoint-1"
    shutil.copytree(honest, checkpoint)
    (tmp_path / "secret").write_text("secret")
    (checkpoint / "chat_template.jinja").symlink_to(tmp_path / "secret")
    sign(checkpoint)
    with pytest.raises(ValueError, match="chat_template.jinja is reached by a symbolic link"):
        export_hf(checkpoint, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_a_planted_stage_cannot_reach_outside(honest, tmp_path):
    """What looks like an interrupted save moves files: never through a link that leads out of the checkpoint."""
    from hf_axonn.checkpoint.manifest import STAGE

    checkpoint, outside = tmp_path / "checkpoint-1", tmp_path / "outside"
    shutil.copytree(honest, checkpoint)
    outside.mkdir()
    (outside / "values.json").write_text("precious")
    shutil.copytree(checkpoint, checkpoint / STAGE)
    shutil.rmtree(checkpoint / "optimizer")
    os.symlink(outside, checkpoint / "optimizer")
    with pytest.raises(ValueError, match="symbolic link"):
        export_hf(checkpoint, tmp_path / "plain")
    assert (outside / "values.json").read_text() == "precious"
