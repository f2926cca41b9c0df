"""Training steps as a GPU would see them, without one: nothing mixes devices, and the host does not wait for values.

Everything here runs in processes of tests/end_to_end/fake_cuda_steps.py, one for the quick names and one for the slow
ones, because importing costs more than a name does. See tests/helpers/fake_cuda.py for what fake CUDA tensors are.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.helpers import fake_cuda


STEPS = "tests.end_to_end.fake_cuda_steps"
# offload is by Accelerate, goldfish by a Trainer, default_device with dropout; the fault `host_read` evaluates.
QUICK = ["mixtral-zero_bubble", "llama-keys", "llama-offload", "gpt2-default_device", "llama-goldfish"]
SLOW = ["llama", "mixtral", "gpt2", "starcoder2", "gemma2", "olmo2", "phi3", "mamba", "qwen3_moe", "deepseek_v3"]
SLOW += ["llama-lora", "llama-fp16", "llama-evaluate"]
SLOW += [
    "llama-reentrant",
    "llama-checkpointed",
    "gemma2-reentrant",
    "mixtral-reentrant",
    "deepseek_v3-checkpointed",
    "starcoder2-dropout",
    "gpt2-lora",
]
SLOW += ["llama-accelerate", "mixtral-accelerate", "llama-trainer", "mixtral-trainer", "gpt2-trainer"]
SLOW += [
    "gpt2-dropout",
    "mixtral-evaluate",
    "llama-first_stage",
    "mixtral-first_stage",
    "gpt2-last_stage",
    "llama-context",
    "mixtral-context",
    "mixtral-keys",
    "gemma2-keys",
    "deepseek_v3-keys",
    "llama-flash",
    "mistral-flash",
    "gemma2-context",
    "gemma2-zero_bubble",
]
SLOW += [
    "mixtral-gather",
    "mixtral-many_foreign",
    "qwen3_moe-one_expert",
    "qwen3_moe-one_moved",
    "llama-generate",
    "qwen3_moe-generate",
    "mamba-generate",
    "qwen3_moe-sample",
    "llama-muon",
]
FAULTS = ["llama-host_read", "llama-two_devices", "-one_of_each", "-nothing_read", "-refused_by_nccl"]
ALSO = ["llama-products", "llama-streams", "-large_by_gloo"]


def named(names: list[str]) -> list:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in names]


# What the host reads in a step after the first. Lower a number when a read is gone; none may come back.
EXPERT_LAYERS = {"mixtral": 2, "qwen3_moe": 2, "deepseek_v3": 1}
MICRO_BATCHES = {"first_stage": 2, "zero_bubble": 2}
OF_EXPERTS = {
    "gather": 0,
    "many_foreign": 1,  # how many pairs of token and choice are its own
    "one_expert": 0,
}
# Transformers asks once a pass whether the mask is all ones; on three grids.
FLASH = 3
MOVED = 1  # how many tokens travel to and from each rank


def budget(name: str) -> dict[str, int]:
    """Host reads by phase: none, but for some experts and reentrant checkpoints."""
    kind, _, situation = name.partition("-")
    forward = OF_EXPERTS.get(situation, MOVED) * EXPERT_LAYERS.get(kind, 0) * MICRO_BATCHES.get(situation, 1)
    forward += FLASH * (situation == "flash")
    if situation == "muon":
        return {"step": 0}
    if situation == "evaluate":
        return {"forward": forward}
    agreed = situation == "reentrant"  # whether a gradient came twice, on some rank
    skipped = situation == "fp16"  # whether it is, which a GradScaler asks
    return {"forward": forward, "backward": int(agreed), "clip": 0, "step": int(skipped)}


# What Transformers and Accelerate read by themselves: what they do, in which file, and how often.
BY_TRAINER = {  # in two steps of two micro-batches, of which one is logged, and at the end
    ("copy to the device", "accelerate/utils/operations.py"): 12,  # a batch of three tensors that are not pinned
    ("item", "transformers/trainer.py"): 9,  # 4: whether a loss is finite; 3: what is logged; 2: operations so far
    ("copy to the device", "transformers/trainer_pt_utils.py"): 2,  # operations so far
}
BY_LOGS = {  # of two logs, what GoldfishTrainer and a Monitor add up on the device until then
    ("item", "hf_axonn/losses/causal_lm.py"): 2,
    ("item", "hf_axonn/goldfish/trainer.py"): 2,
    ("item", "hf_axonn/goldfish/recording.py"): 4,
    ("copy to the device", "hf_axonn/goldfish/recording.py"): 2,
    ("item", "hf_axonn/monitoring/monitor.py"): 2,
    ("copy to the device", "hf_axonn/monitoring/monitor.py"): 2,
}
BY_GENERATE = {  # after each of three tokens whether all rows have ended and, because z > 1, whether on all ranks
    ("item", "transformers/generation/utils.py"): 6,
    ("copy to the device", "transformers/generation/utils.py"): 3,
}
OTHERS = {
    "trainer": ("steps", BY_TRAINER),
    "goldfish": ("steps", BY_TRAINER | BY_LOGS),
    "generate": ("three tokens", BY_GENERATE),
    "sample": ("three tokens", BY_GENERATE),
}


@pytest.fixture(scope="module")
def quick() -> dict[str, dict]:
    return fake_cuda.run(STEPS, *QUICK, *FAULTS, *ALSO)


@pytest.fixture(scope="module")
def slow() -> dict[str, dict]:
    return fake_cuda.run(STEPS, *SLOW)


@pytest.fixture
def result(request, name) -> dict:
    """What the process that ran a name said of it."""
    return request.getfixturevalue("slow" if name in SLOW else "quick")[name]


def by_phase(found: dict[str, list]) -> dict[str, int]:
    return {phase: sum(number for number, _, _ in reads) for phase, reads in found.items()}


@pytest.mark.parametrize("name", named(QUICK + SLOW))
def test_a_step_runs_on_cuda_tensors(result):
    """FakeTensor raises where a tensor of the CPU meets one of the GPU, in backward on a thread of autograd."""
    assert result["problem"] == ""


WITH_OTHERS = [name for name in QUICK + SLOW if name.partition("-")[2] in OTHERS]


@pytest.mark.parametrize("name", named([name for name in QUICK + SLOW if name not in WITH_OTHERS]))
def test_the_host_reads_no_more_than_it_must(result, name):
    step = {
        phase: reads for phase, reads in result["found"].items() if phase != "start" and not phase.startswith("first ")
    }
    assert by_phase(step) == budget(name), step


@pytest.mark.parametrize("name", named(WITH_OTHERS))
def test_trainer_and_generate_read_what_is_theirs(result, name):
    """Nothing is read by us, in a step or for a token, but how many tokens travel to experts; in a log sums are."""
    kind, _, situation = name.partition("-")
    phase, theirs = OTHERS[situation]
    passes = 4 if situation == "trainer" else 3
    if sizes := MOVED * EXPERT_LAYERS.get(kind, 0) * passes:
        theirs = theirs | {("item", "hf_axonn/layers/token_routes.py"): sizes}
    found = Counter()
    for number, what, where in result["found"][phase]:
        found[what, where.partition(":")[0]] += number
    assert found == theirs, result["found"][phase]


def test_a_host_read_is_found(quick):
    found = quick["llama-host_read"]["found"]
    assert [line for line in found["forward"] if "fake_cuda_steps.py" in line[2] and "fault()" in line[2]] != []
    assert by_phase(found)["forward"] == budget("llama")["forward"] + 1


def test_each_kind_of_read_is_found_once(quick):
    assert quick["-one_of_each"]["problem"] == ""
    found = quick["-one_of_each"]["found"]
    assert len(found) == 12
    assert {phase: sum(number for number, _, _ in reads) for phase, reads in found.items()} == dict.fromkeys(found, 1)


def test_what_waits_for_nothing_is_no_read(quick):
    assert quick["-nothing_read"]["problem"] == ""
    assert by_phase(quick["-nothing_read"]["found"]) == {"nothing": 0}


@pytest.mark.parametrize("name", named(["llama", "gpt2-default_device", "gpt2-dropout", "phi3"]))
def test_the_layout_of_heads_is_not_read_back(result):
    """Where a model is made parallel, numbers go to the device and do not come back one by one."""
    assert [line for line in result["found"]["start"] if line[1] != "copy to the device"] == []


def test_gradients_of_weights_are_written_in_float32(quick):
    assert quick["llama-products"]["problem"] == ""


def test_what_nccl_refuses_is_found(quick):
    """All that is sent in a step of any name above was looked at so."""
    assert quick["-refused_by_nccl"]["problem"] == ""


def test_collectives_are_waited_for_on_their_stream(quick):
    """Autograd works on the stream of the forward pass, here 7. Who waits on another, the default one, says so."""
    assert quick["llama-streams"]["problem"] == ""
    found = {
        pair: {what: number for number, what, _ in lines} for pair, lines in quick["llama-streams"]["found"].items()
    }
    assert found.keys() == {"7 to 7", "7 to 0", "0 to 0", "recorded"}
    assert found["7 to 7"].keys() == {"all_gather", "reduce_scatter", "all_reduce", "exchange"}
    assert found["7 to 0"].keys() == found["0 to 0"].keys() == {"all_reduce"}  # averages over data; the agreement
    assert found["recorded"]["on 0"] >= found["7 to 0"]["all_reduce"] > 0


def test_gloo_sends_no_messages_of_a_gpu(quick):
    assert quick["-large_by_gloo"]["problem"] == ""


def test_a_tensor_of_the_cpu_is_found(quick):
    assert "at least two devices, cuda:0 and cpu" in quick["llama-two_devices"]["problem"]


def test_without_a_compiler(monkeypatch):
    """The tests are skipped, but not in .ci/run."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv(fake_cuda.NEEDED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="C\\+\\+ compiler"):
        fake_cuda.guard()
    monkeypatch.setenv(fake_cuda.NEEDED, "1")
    with pytest.raises(pytest.fail.Exception, match="install g\\+\\+"):
        fake_cuda.guard()
