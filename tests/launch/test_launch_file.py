"""What is refused in a launch file, what is mended, and what accelerate and the processes get. No processes."""

import re

import pytest
import yaml

from hf_axonn.config import AxonnConfig
from hf_axonn.launch import launch_file
from hf_axonn.launch.launch_file import check_spelling, resolve
from hf_axonn.topology.grid import Grid
from tests.helpers import ROOT


SCRIPTS = ROOT / "training_scripts"
BOTH = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with eight GPUs and eight cores, whatever this one has."""
    for variable in ("ACCELERATE_USE_CPU", "OMP_NUM_THREADS", *BOTH):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(launch_file, "gpu_count", lambda: 8)
    monkeypatch.setattr(launch_file, "has_nvidia", lambda: True)
    monkeypatch.setattr(launch_file, "core_count", lambda: 8)
    return monkeypatch


def settings(**changes):
    return {
        "distributed_type": "MULTI_GPU",
        "num_processes": 4,
        "mixed_precision": "bf16",
        "axonn_config": {"grid": {"z": 2, "x": 2}},
        **changes,
    }


def test_accelerate_gets_the_file_without_the_section():
    given = settings(num_machines=1, machine_rank=0)
    launch = resolve(given, {})
    assert launch.config.grid == Grid(z=2, x=2)
    assert launch.settings == {
        "distributed_type": "MULTI_GPU",
        "num_processes": 4,
        "num_machines": 1,
        "machine_rank": 0,
        "mixed_precision": "bf16",
        "use_cpu": False,
        "main_process_port": 0,
    }
    signals = {"PET_SIGNALS_TO_HANDLE": "SIGINT,SIGHUP,SIGQUIT"}
    assert launch.environment == {"AXONN_CONFIG": launch.config.to_json(), **BOTH, **signals}
    assert launch.notes == ("set for the GPUs: NCCL_LAUNCH_ORDER_IMPLICIT=1 CUDA_DEVICE_MAX_CONNECTIONS=32.",)
    assert "axonn_config" in given


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        ({"z": 4}, ["NCCL_LAUNCH_ORDER_IMPLICIT"]),
        ({"y": 2, "x": 2}, ["NCCL_LAUNCH_ORDER_IMPLICIT"]),
        ({"data": 4}, ["NCCL_LAUNCH_ORDER_IMPLICIT"]),
        ({"z": 2, "y": 2}, list(BOTH)),
    ],
)
def test_gpus_get_what_fits_the_grid(grid, names):
    environment = resolve(settings(axonn_config={"grid": grid}), {}).environment
    assert {name: environment[name] for name in BOTH if name in environment} == {name: BOTH[name] for name in names}


def test_what_the_user_has_set_for_gpus_counts(machine):
    machine.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    machine.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    launch = resolve(settings(), {})
    assert not BOTH.keys() & launch.environment.keys()
    (note,) = launch.notes
    assert note.startswith("CUDA_DEVICE_MAX_CONNECTIONS is 1, but z is 2") and note.endswith("Unset it.")
    assert resolve(settings(axonn_config={"grid": {"x": 4}}), {}).notes == ()


def test_without_gpus_of_nvidia_nothing_is_set(machine):
    launch = resolve(settings(use_cpu=True), {})
    assert not BOTH.keys() & launch.environment.keys() and launch.notes == ()
    machine.setattr(launch_file, "has_nvidia", lambda: False)  # AMD's
    launch = resolve(settings(), {})
    assert not BOTH.keys() & launch.environment.keys() and launch.notes == ()


@pytest.mark.parametrize("changes", [{"use_cpu": True}, {"distributed_type": "MULTI_CPU"}, {"--cpu": None}])
def test_on_cpus_every_rank_gets_its_process_and_its_share_of_cores(changes):
    options = {"cpu": None} if "--cpu" in changes else {}
    launch = resolve(settings(**{key: value for key, value in changes.items() if key != "--cpu"}), options)
    assert launch.settings["distributed_type"] == "MULTI_GPU"
    assert launch.settings["use_cpu"] is True
    assert launch.environment["ACCELERATE_USE_CPU"] == "true"
    assert launch.environment["OMP_NUM_THREADS"] == "2"


def test_threads_are_per_machine_at_least_one_and_the_users_if_given(machine):
    nodes = {"num_machines": 4, "main_process_ip": "10.0.0.1", "main_process_port": 29500}
    assert resolve(settings(use_cpu=True, **nodes), {}).environment["OMP_NUM_THREADS"] == "8"
    machine.setattr(launch_file, "core_count", lambda: 2)
    assert resolve(settings(use_cpu=True), {}).environment["OMP_NUM_THREADS"] == "1"
    options = {"num_cpu_threads_per_process": "3"}
    assert "OMP_NUM_THREADS" not in resolve(settings(use_cpu=True), options).environment
    machine.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in resolve(settings(use_cpu=True), {}).environment


def test_without_use_cpu_the_machine_decides(machine):
    assert resolve(settings(), {}).settings["use_cpu"] is False
    machine.setattr(launch_file, "gpu_count", lambda: 0)
    launch = resolve(settings(), {})
    assert launch.settings["use_cpu"] is True
    assert launch.notes == ("no GPU was found on this machine: the 4 processes run on its CPU.",)
    with pytest.raises(
        ValueError, match="use_cpu is false, but no GPU was found on this machine: write use_cpu: true"
    ):
        resolve(settings(use_cpu=False), {})
    machine.setenv("ACCELERATE_USE_CPU", "true")
    assert resolve(settings(use_cpu=False), {}).settings["use_cpu"] is True


def test_words_that_yaml_reads_as_false():
    launch = resolve(
        yaml.safe_load("{distributed_type: NO, num_processes: 1, mixed_precision: no, axonn_config: {grid: {x: 1}}}"),
        {},
    )
    assert (launch.settings["distributed_type"], launch.settings["mixed_precision"]) == ("NO", "no")


def test_the_older_key_of_fp16_counts_where_nothing_else_does(machine):
    older = settings(mixed_precision=None, fp16=True)
    launch = resolve(older, {})
    assert launch.settings["mixed_precision"] == "fp16" and "fp16" not in launch.settings
    assert resolve(settings(mixed_precision="bf16", fp16=True), {}).settings["mixed_precision"] == "bf16"
    residual = {"grid": {"x": 4}, "residual_dtype": "bfloat16"}
    resolve(settings(mixed_precision=None, fp16=True, axonn_config=residual), {"mixed_precision": "bf16"})


def test_the_command_line_holds_over_the_file():
    options = {
        "num_processes": "8",
        "num_machines": "2",
        "machine_rank": "1",
        "main_process_ip": "a",
        "mixed_precision": "no",
    }
    launch = resolve(
        settings(axonn_config={"grid": {"x": 8}}, mixed_precision="fp8", machine_rank=7, main_process_port=29500),
        options,
    )
    assert (launch.settings["num_processes"], launch.settings["num_machines"]) == (8, 2)
    assert resolve(settings(main_process_port="29500"), {}).settings["main_process_port"] == 29500
    with pytest.raises(ValueError, match="= 4, but 8"):
        resolve(settings(), {"num_processes": "8"})


@pytest.mark.parametrize("section", launch_file.REFUSED_SECTIONS)
def test_other_ways_to_split_a_model_are_refused_by_name(section):
    with pytest.raises(ValueError, match=f"^{section} cannot stand beside axonn_config"):
        resolve(settings(**{section: {"key": 1}}), {})
    resolve(settings(**{section: {}}), {})  # accelerate writes empty sections itself
    switch = launch_file.REFUSED_SECTIONS[section]
    with pytest.raises(ValueError, match=f"^--{switch} cannot stand beside axonn_config"):
        resolve(settings(), {switch: None})


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"mixed_precision": "fp8"},
            {},
            "mixed_precision is 'fp8', which is not supported yet: write bf16, fp16 or 'no'.",
        ),
        ({}, {"mixed_precision": "fp8"}, "mixed_precision is 'fp8'"),
        ({"mixed_precision": "fp16", "use_cpu": True}, {}, "accelerate ignores on CPUs: write bf16, or 'no'"),
        ({"mixed_precision": None, "fp16": True, "use_cpu": True}, {}, "mixed_precision is 'fp16', which accelerate"),
        (
            {"mixed_precision": "no", "axonn_config": {"grid": {"x": 4}, "residual_dtype": "bfloat16"}},
            {},
            "axonn_config.residual_dtype is bfloat16, but mixed_precision is 'no': write bf16",
        ),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, {}, "compute_environment is 'AMAZON_SAGEMAKER'; with"),
        (
            {"distributed_type": "FSDP"},
            {},
            "distributed_type is FSDP, which cannot stand beside axonn_config: write MULTI_GPU",
        ),
        ({"distributed_type": "MULTI_GPUS"}, {}, "distributed_type is MULTI_GPUS"),
        ({}, {"tpu": None}, "distributed_type is TPU"),
        (
            {},
            {"parallelism_config_cp_size": "2"},
            "parallelism_config has cp_size=2, which is the grid data=1,z=2,y=1,x=1,context=2, and beside it stands "
            "the grid data=1,z=2,y=1,x=2: omit one of them.",
        ),
        ({"parallelism_config": {"tp_size": 2}}, {}, "parallelism_config holds 'tp_size', but its keys are"),
        ({"parallelism_config": 2}, {}, "parallelism_config holds 2, but its keys are parallelism_config_tp_size"),
        (
            {"parallelism_config": {"parallelism_config_tp_size": 4}, "axonn_config": {"grid": "auto"}},
            {},
            "axonn_config has grid: auto, which may choose others: omit one of them.",
        ),
        ({}, {"fsdp_version": "2"}, "--fsdp_version is read by another engine and has no effect beside axonn_config"),
        ({}, {"gradient_accumulation_steps": "2"}, "--gradient_accumulation_steps is read by another engine"),
        (
            {"distributed_type": "NO"},
            {},
            "distributed_type is NO, with which accelerate starts one process, but num_proc",
        ),
        ({"use_cpu": "false"}, {}, "use_cpu is 'false', but it is a switch: write true or false."),
        ({"use_cpu": 1}, {}, "use_cpu is 1, but it is a switch"),
        ({"num_processes": None}, {}, "num_processes is missing: write the number"),
        (
            {"axonn_config": {"grid": {"pipe": 4}}, "mixed_precision": "fp16"},
            {},
            "mixed_precision is 'fp16', but pipe is 4",
        ),
        ({"num_processes": -1}, {}, "num_processes is -1, but it is a whole number of at least 1."),
        ({"num_processes": 4.5}, {}, "num_processes is 4.5, but"),
        ({"num_processes": True}, {}, "num_processes is True, but"),
        ({}, {"num_processes": "four"}, "num_processes is 'four', but"),
        ({}, {"num_machines": "3"}, "num_machines is 3: write a multiple of 3, so that every machine starts as many."),
        (
            {},
            {"num_machines": "2", "machine_rank": "2"},
            "machine_rank is 2, but with num_machines 2 ranks go from 0 to 1.",
        ),
        ({"num_machines": 2}, {}, "num_machines is 2, but main_process_ip is missing"),
        ({"num_machines": 2, "main_process_ip": "a"}, {}, "num_machines is 2, but main_process_port is missing"),
        (
            {"num_machines": 2, "main_process_ip": "a", "main_process_port": 1},
            {"max_restarts": "3"},
            "max_restarts is 3 on 2 machines, where restarted processes find the addresses of the former ones",
        ),
        ({"main_process_port": "x"}, {}, "main_process_port is 'x', but it is a whole number from 0 to 65535."),
        ({}, {"main_process_port": "70000"}, "main_process_port is '70000', but"),
        (
            {"num_machines": 2, "main_process_ip": "a", "main_process_port": "0"},
            {},
            "main_process_port is '0', but it is a whole number from 1 to 65535.",
        ),
        ({}, {"max_restarts": "-1"}, "max_restarts is '-1', but it is a whole number of at least 0."),
    ],
)
def test_what_is_refused(changes, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(settings(**changes), options)


def test_accelerates_own_sizes_are_a_grid():
    """Sizes stand in the file, or on the command line, which holds over it; accelerate gets none of them."""
    given = {"parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 1}
    given |= {"parallelism_config_cp_backend": "torch", "parallelism_config_dp_replicate_size": 1}
    changes = {"parallelism_config": given, "axonn_config": {"layout": "token"}}
    launch = resolve(settings(**changes), {"parallelism_config_dp_shard_size": "2", "use_parallelism_config": None})
    assert launch.config == AxonnConfig(grid=Grid(z=2, x=2), layout="token")
    assert "parallelism_config" not in launch.settings
    assert "parallelism_config means the grid data=1,z=2,y=1,x=2." in launch.notes
    assert "without effect over a grid: parallelism_config_cp_backend." in launch.notes
    same = resolve(
        settings(**changes | {"axonn_config": {"grid": {"x": 2, "z": 2}}}), {"parallelism_config_dp_shard_size": 2}
    )
    assert same.config.grid == launch.config.grid and "means" not in str(same.notes)
    ones = {name: 1 for name in given if name.endswith("_size")}
    assert resolve(settings(parallelism_config=ones), {}).config.grid == Grid(z=2, x=2)


def test_processes_that_are_started_again_meet_in_a_store_of_their_own():
    names = {"PET_STANDALONE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
    assert names <= resolve(settings(), {"max_restarts": "3"}).environment.keys()
    for options in ({}, {"max_restarts": "0"}):
        assert not names & resolve(settings(), options).environment.keys()


def test_data_makes_up_the_number_of_processes():
    auto = {"axonn_config": {"grid": {"data": "auto", "x": 2, "pipe": 2}}}
    for count in (4, 12):
        launch = resolve(settings(**auto), {"num_processes": str(count)})
        assert launch.config.grid == Grid(data=count // 4, x=2, pipe=2)
        assert f"data: auto is {count // 4} on {count} process(es)." in launch.notes
    for count in (2, 6):
        with pytest.raises(ValueError, match=f"data: auto, and {count} .* has 4 rank.*start a multiple of 4"):
            resolve(settings(**auto), {"num_processes": str(count)})
    with pytest.raises(ValueError, match="data: auto, which only the launcher can resolve"):
        AxonnConfig.from_mapping(auto["axonn_config"])


def test_a_misspelt_section_is_not_left_to_accelerate():
    for key in ("axon_config", "axonn-config", "axonn_cfg"):
        with pytest.raises(ValueError, match=f"file.yaml: unknown key '{key}': did you mean axonn_config?"):
            check_spelling("file.yaml", {"num_processes": 4, key: {}})
    check_spelling("file.yaml", {"num_processes": 4, "fsdp_config": {}, "dynamo_config": {}, 3: None})
    check_spelling("file.yaml", {"axonn_config": {}})


FILES = [SCRIPTS / "axonn.yaml", *sorted((SCRIPTS / "grids").glob("*.yaml"))]


@pytest.mark.parametrize("path", FILES, ids=[path.name for path in FILES])
def test_the_launch_files_of_this_repository(path):
    given = yaml.safe_load(path.read_text())
    options = {"main_process_ip": "a", "machine_rank": "1"} if given["num_machines"] > 1 else {}
    launch = resolve(given, options)
    assert launch.settings["use_cpu"] is path.name.startswith("cpu")
    if path.parent.name == "grids":  # the name tells the number of processes, and the axes in use
        kind, count, *axes = path.stem.split("_")
        assert int(count) == launch.config.grid.size
        sizes = launch.config.grid.as_dict().items()
        assert axes in ([f"{axis}{size}" for axis, size in sizes if size > 1], ["two", "machines"])


def test_there_are_launch_files():
    assert len(FILES) > 5
