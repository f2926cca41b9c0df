"""training_scripts/kubernetes: the manifest by its schema, and what each of its pods would run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from hf_axonn.checkpoint.manifest import read_manifest
from hf_axonn.cli.main import main as hf_axonn_main
from hf_axonn.launch import launch_file
from hf_axonn.launch.command import prepare, read_launch_file
from hf_axonn.topology.grid import Grid
from hf_axonn_scripts import finetune
from tests.helpers import ROOT
from tests.helpers.eval_support import documents, tiny_llama, topics_tokenizer


CONFIG_MAP, JOB = yaml.safe_load_all((ROOT / "training_scripts" / "kubernetes" / "pytorchjob.yaml").read_text())
SCHEMA = json.loads((ROOT / "tests" / "end_to_end" / "pytorchjob.schema.json").read_text())
REPLICAS = JOB["spec"]["pytorchReplicaSpecs"]
(CONTAINER,) = REPLICAS["Master"]["template"]["spec"]["containers"]
VOLUMES = {volume["name"]: volume for volume in REPLICAS["Master"]["template"]["spec"]["volumes"]}
MOUNTS = {mount["mountPath"]: VOLUMES[mount["name"]] for mount in CONTAINER["volumeMounts"]}
NODES = sum(replica["replicas"] for replica in REPLICAS.values())
LAUNCH_FILE = "/etc/hf-axonn/axonn.yaml"


def of_the_operator(node: int, address: str = "hf-axonn-master-0", port: int = 23456) -> dict[str, str]:
    """What the operator adds to the environment of a pod's containers."""
    its = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "RANK": str(node), "WORLD_SIZE": str(NODES)}
    its |= {"PET_MASTER_ADDR": address, "PET_MASTER_PORT": str(port), "PET_NODE_RANK": str(node)}
    return its | {"PET_NNODES": str(NODES), "PET_NPROC_PER_NODE": "auto", "PYTHONUNBUFFERED": "1"}


def command(environment: dict[str, str], **others: object) -> list[str]:
    """What a pod runs: variables in place of their names, as Kubernetes does; `others` in place of the files."""
    words = [*CONTAINER["command"], *CONTAINER["args"]]
    words = [re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], word) for word in words]
    words[words.index("--config") + 1] = str(others.pop("config"))
    for option, value in others.items():
        (place,) = [place for place, word in enumerate(words) if word.startswith(f"--{option}=")]
        words[place] = f"--{option}={value}"
    return words


def test_the_manifest_meets_the_schema():
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.check_schema(SCHEMA)
    validator.validate(JOB)


def test_files_that_the_command_names_are_mounted():
    folder, _, name = LAUNCH_FILE.rpartition("/")
    assert MOUNTS[folder]["configMap"]["name"] == CONFIG_MAP["metadata"]["name"] and [*CONFIG_MAP["data"]] == [name]
    words = CONTAINER["args"]
    assert words[words.index("--config") + 1] == LAUNCH_FILE
    files = [word.partition("=")[2] for word in words if re.match("--(model|data|output_dir)=", word)]
    assert len(files) == 3 and all(file.startswith("/data/") for file in files) and "/data" in MOUNTS


@pytest.mark.parametrize("node", range(NODES))
def test_each_pod_launches_its_part_of_the_grid(node, tmp_path, monkeypatch):
    """The words of the manifest go through `hf-axonn finetune`, our reader of launch files and accelerate's parser."""
    from accelerate.commands.launch import launch_command_parser

    (text,) = CONFIG_MAP["data"].values()
    (tmp_path / "axonn.yaml").write_text(text)
    executed = []

    def execv(program, words):
        executed.append(words)
        raise SystemExit

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(launch_file, "gpu_count", lambda: CONTAINER["resources"]["limits"]["nvidia.com/gpu"])
    environment = of_the_operator(node)
    program, *words = command(environment, config=tmp_path / "axonn.yaml")
    assert program == "hf-axonn"
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {**os.environ, **environment})
        with pytest.raises(SystemExit):
            hf_axonn_main(words)
        (launched,) = executed
        assert launched[1:3] == ["-m", "hf_axonn.launch"]
        args = launch_command_parser().parse_args(prepare(launched[3:]))
    assert (args.machine_rank, args.main_process_ip, args.main_process_port) == (node, "hf-axonn-master-0", 23456)
    assert args.module and args.training_script == "hf_axonn" and args.training_script_args[0] == "finetune"
    for_accelerate = read_launch_file(Path(args.config_file))
    launch = launch_file.resolve(yaml.safe_load(text), {"main_process_ip": "a", "main_process_port": "1"})
    processes = NODES * CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert for_accelerate["num_machines"] == NODES and for_accelerate["same_network"] is True
    assert for_accelerate["num_processes"] == launch.config.grid.size == processes
    _, _, training = finetune.parse([*args.training_script_args[1:], "--use_cpu", "--report_to", "none"])
    assert training.resume_from_checkpoint == "last" and training.save_strategy == "steps"


@pytest.mark.slow
def test_the_pods_train_on_cpus(tmp_path):
    """The commands of both pods, with the operator's variables, on a grid of two CPU processes."""
    tiny_llama().save_pretrained(tmp_path / "model")
    topics_tokenizer().save_pretrained(tmp_path / "model")
    texts = [json.dumps({"text": document["text"][:1500]}) + "\n" for document in documents()]
    (tmp_path / "documents.jsonl").write_text("".join(texts))
    (text,) = CONFIG_MAP["data"].values()
    small = {"num_processes": NODES, "use_cpu": True, "mixed_precision": "no", "axonn_config": {"grid": {"x": NODES}}}
    (tmp_path / "axonn.yaml").write_text(yaml.safe_dump(yaml.safe_load(text) | small))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pods = []
    for node in range(NODES):
        environment = of_the_operator(node, "127.0.0.1", port)
        names = {"config": "axonn.yaml", "model": "model", "data": "documents.jsonl", "output_dir": "out"}
        names = {name: tmp_path / file for name, file in names.items()}
        _, *words = command(environment, **names, sequence_length=48, save_steps=2)
        environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
        words += ["--max_steps", "2", "--report_to", "none"]
        pods.append(subprocess.Popen([sys.executable, "-m", "hf_axonn", *words], env=os.environ | environment))
    try:
        assert [pod.wait(timeout=240) for pod in pods] == [0] * NODES
    finally:
        for pod in pods:
            pod.kill()
    assert read_manifest(tmp_path / "out" / "checkpoint-2").grid == Grid(x=NODES)
