"""tests/benchmarks/: the scripts run on tiny sizes, and their arithmetic is right. What they measure is in
docs/results/."""

import subprocess
import sys

import pytest
import torch

from tests.benchmarks.kernels import gpu
from tests.benchmarks.peers import contenders, peers, ranks, report
from tests.helpers import ROOT


def run(*command, **options):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=400, cwd=ROOT, **options)


@pytest.mark.slow
def test_all_contenders_train_the_same_model(tmp_path):
    """Exit code 0 says that the losses agree."""
    report = tmp_path / "peers.md"
    sizes = "--size tiny --sequence 32 --rounds 2 --ranks 2".split()
    done = run("-m", "tests.benchmarks.peers.peers", *sizes, "--output", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.split("|")[1].strip() for line in report.read_text().splitlines() if line.startswith("| ")]
    grids = ["data=2", "z=2", "y=2", "x=2"]
    traffic = names.index("contender", 1)
    assert sorted(names[1:traffic]) == sorted(["plain", *contenders.FLOORS, *contenders.PEERS, *grids])
    assert sorted(names[traffic + 1 :]) == sorted(grids)
    assert "at most the allowed" in report.read_text()


@pytest.mark.slow
def test_stages_train_the_same_model_as_torchs_own(tmp_path):
    report = tmp_path / "peers.md"
    sizes = "--size tiny --sequence 32 --rounds 1 --ranks 4".split()
    contenders = ["--others", "plain", "FSDP2 in 2 stages", "--grids", "pipe=2,data=2", "pipe=2,x=2"]
    done = run("-m", "tests.benchmarks.peers.peers", *sizes, *contenders, "--output", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"| {name} |" in report.read_text() for name in ("FSDP2 in 2 stages", "data=2 pipe=2", "pipe=2 x=2"))


@pytest.mark.slow
def test_both_ways_of_experts_train_the_same_mixture_as_transformers_own(tmp_path):
    report = tmp_path / "peers.md"
    sizes = "--size tiny-mixture --sequence 32 --rounds 1 --ranks 4".split()
    contenders = ["--others", "DDP", "native EP", "--grids", "z=4 experts move", "z=4 experts gather"]
    done = run("-m", "tests.benchmarks.peers.peers", *sizes, *contenders, "--output", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"| {name} |" in report.read_text() for name in ("native EP", "z=4 experts move", "z=4 experts gather"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grids", "x=3"], "3, but 2 process(es)"),
        (["--grids", "w=2"], "--grids"),
        (["--others", "Megatron"], "there are plain"),
        (["--rows", "3"], "--rows is 3, which DDP cannot divide among 2 ranks"),
    ],
)
def test_wrong_arguments_are_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        peers.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def turn(seconds, *, loss=1.0, others=0.0):
    return ranks.Turn(seconds, 2 * seconds, [loss], 2**20, others)


def test_ratios_are_taken_within_a_round_and_the_first_does_not_count():
    slow_then_fast = [9.0, 4.0, 2.0, 1.0]
    runs = [
        {
            "DDP": [turn(seconds) for seconds in slow_then_fast],
            "x=2": [turn(seconds / 2) for seconds in (1.0, *slow_then_fast[1:])],
        }
    ]
    assert report.speed_ratios(runs, "x=2", "DDP") == [2.0, 2.0, 2.0]
    (row,) = (line for line in report.table(runs, 100).splitlines() if line.startswith("| x=2"))
    assert row == "| x=2 | 100 | 2.00 | 1 | 3 of 3 | 2.00 (2.00-2.00) |"


def test_only_quiet_rounds_count_where_there_are_enough():
    quiet = [(2.0, 0.05)] * 5
    for noisy, expected in (([(50.0, 0.9)] * 3, [2.0] * 5), ([], [2.0] * 5)):
        theirs = [turn(seconds, others=others) for seconds, others in [(1.0, 0.0), *quiet, *noisy]]
        runs = [{"DDP": theirs, "z=2": [turn(1.0) for _ in theirs]}]
        assert report.speed_ratios(runs, "z=2", "DDP") == expected
    few = [turn(2.0, others=others) for others in (0.0, 0.0, 0.9, 0.9)]
    runs = [{"DDP": few, "z=2": [turn(1.0) for _ in few]}]
    assert report.speed_ratios(runs, "z=2", "DDP") == [2.0] * 3


def test_losses_that_differ_are_seen_but_not_those_of_the_floors():
    heats = [
        {"plain": [turn(1.0, loss=2.0)], "floor width": [turn(1.0, loss=9.0)]},
        {"x=2": [turn(1.0, loss=2.5)]},
    ]
    assert report.loss_difference(heats) == 0.25
    assert report.loss_difference(heats[:1]) == 0.0


@pytest.mark.parametrize("longer", [0, 1])
def test_losses_of_a_heat_that_time_ended_are_compared_as_far_as_they_go(longer):
    heats = [{"x=2": [turn(1.0, loss=2.0)]}, {"x=2": [turn(1.0, loss=2.0)], "z=2": [turn(1.0, loss=2.0)]}]
    for turns in heats[longer].values():
        turns.append(turn(1.0, loss=3.0))
    assert report.loss_difference(heats) == 0.0
    heats[1]["z=2"][-1].losses[:] = [3.6]
    assert report.loss_difference(heats) == pytest.approx(0.8 if longer == 0 else 0.2)


def test_floors_divide_the_work():
    config = contenders.narrow(peers.model_config("tiny", sequence=32), 2)
    assert (config.num_attention_heads, config.intermediate_size, config.vocab_size) == (2, 48, 256)
    assert (config.hidden_size, config.head_dim) == (64, 16)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, width, bias=False) for width in (3, 5, 8, 16)))
    shares = [contenders._own_share(model, rank, 2) for rank in range(2)]
    assert [sum(map(torch.numel, share)) for share in shares] == [128, 128]


def test_a_batch_is_real_text_in_order():
    batches = peers.text_batches(512, 2, 32)
    assert batches.shape[1:] == (2, 32) and len(batches) > 1000
    assert len(batches[0].unique()) > 20 and int(batches.max()) < 512


@pytest.mark.slow
def test_the_profile_names_what_the_time_goes_to():
    sizes = "--size tiny --steps 2 --ranks 2 --top 5".split()
    done = run("-m", "tests.benchmarks.peers.profile", *sizes, "x=2")
    assert done.returncode == 0, done.stderr
    (head,) = (line for line in done.stdout.splitlines() if line.startswith("x=2: "))
    assert "matmul" in head and "communication" in head


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path):
    report = tmp_path / "gpu.md"
    done = run("-m", "tests.benchmarks.kernels.gpu", "--smoke", "--output", str(report))
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in report.read_text().splitlines() if line.startswith("| ")]
    names = [
        "Trainer",
        "Trainer, compiled",
        "Trainer, grid of one rank",
        "GoldfishTrainer",
        "GoldfishTrainer, compiled",
    ]
    assert rows == ["contender", *names, "model", "tiny"]


def test_the_gpu_benchmark_says_that_it_needs_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "needs a GPU" in capsys.readouterr().err
