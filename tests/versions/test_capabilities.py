"""What this package does, each once and on two ranks: the tests that every release in the ranges of setup.cfg passes.

`make test-versions` runs them in an environment for each combination of releases (environments.py), and its table is
docs/versions.md. They are short, and rely on the full suite for everything that does not depend on a release.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from hf_axonn import Grid, from_pretrained, parallelize, save_sharded
from hf_axonn.compat import versions
from hf_axonn.engine.gradient_sync import sync_gradients
from hf_axonn.engine.host_weights import host_weight_of
from hf_axonn.parallel.compiled import compile_regions
from hf_axonn_eval import extract
from tests.accelerator import test_accelerator_files as states
from tests.accelerator import test_accelerator_training as loops
from tests.engine import test_host_weights as host_weights
from tests.helpers.adapting import Adapted, adapt, adapted_model
from tests.helpers.chats import ExactLogProbs, fine_tune
from tests.helpers.equality import Case, compare, exact, full, too_large
from tests.helpers.eval_support import LEARNT, samples, topics_tokenizer, trained_llama
from tests.helpers.float64 import checkpointed, relative_errors
from tests.helpers.launching import assert_quiet, launch
from tests.helpers.models import tiny_batch, tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import train, worst_difference
from tests.parallel import test_from_pretrained as loads
from tests.parallel.pipeline import test_pipeline as pipelines


GRIDS = [Grid(x=2), Grid(y=2), Grid(z=2), Grid(data=2)]
X, Z = Grid(x=2), Grid(z=2)
EQUAL = 1e-10
RESUMED = 1e-9  # six AdamW steps carry what two orders of summation differ by


def test_these_releases_are_in_the_ranges():
    assert versions.refusal(*versions.NEEDED, *versions.OPTIONAL) == ""


def test_load(tmp_path):
    """Ordinary files, tied or not, and experts that are stored one by one; then the shards of another grid."""
    for kind in ("qwen3", "smollm2", "mixtral"):
        tiny_model(kind, dtype=torch.float32).save_pretrained(tmp_path / kind)
    run_ranks(_load, 2, tmp_path)


def _load(folder: Path) -> None:
    for kind in ("qwen3", "smollm2", "mixtral"):
        plain = AutoModelForCausalLM.from_pretrained(folder / kind)
        for source, grid in ((kind, X), (f"{kind}-shards", Z)):
            model = from_pretrained(folder / source, grid=grid)
            assert "distributed_config" not in vars(model.config)
            for name, parameter in plain.named_parameters():
                assert torch.equal(full(model.get_parameter(name)), parameter), (source, grid, name)
            if source == kind:
                save_sharded(model, folder / f"{kind}-shards")
        again = AutoModelForCausalLM.from_pretrained(folder / f"{kind}-shards")
        assert all(torch.equal(again.get_parameter(name), its) for name, its in plain.named_parameters()), kind


def test_load_what_a_converter_turns(tmp_path):
    loads.test_experts_that_a_checkpoint_transposes(tmp_path)


def test_loss_and_gradients_equal_one_process():
    first = Case("llama", lambda: tiny_model("llama"))
    others = [
        Case("experts", lambda: tiny_model("mixtral", experts_implementation="eager")),
        Case(
            "checkpointed", lambda: tiny_model("smollm2"), steps=2, before=lambda it: checkpointed(it, reentrant=False)
        ),
        Case("reentrant", lambda: tiny_model("smollm2"), steps=2, before=lambda it: checkpointed(it, reentrant=True)),
    ]
    assert_equal_on_grids([first], others)


def assert_equal_on_grids(everywhere: list[Case], on_two: list[Case], *more: Callable[[], None]) -> None:
    """The first on every grid of two ranks, the others where layers are divided and where weights are; then `more`."""
    pairs = [
        ([(case, case.truth()) for case in cases], grids) for cases, grids in ((everywhere, GRIDS), (on_two, [X, Z]))
    ]
    table = run_ranks(_compared, 2, pairs, more)[0]
    assert len(table) == len(GRIDS) * len(everywhere) + 2 * len(on_two)
    assert not too_large(table, EQUAL)


def _compared(pairs: list, more: tuple[Callable[[], None], ...]) -> dict:
    for function in more:
        function()
    return {key: errors for cases, grids in pairs for key, errors in compare(cases, grids).items()}


def test_pipelines_equal_one_process():
    """Under every schedule, two of them with two stages a rank, and with the receive buffers of few micro-batches."""
    cases = [("smollm2", Grid(pipe=2), schedule, False) for schedule in pipelines.SCHEDULES]
    pipelines.check(2, [*cases, ("gpt2", Grid(pipe=2), {}, True)])
    pipelines.test_receive_buffers_are_of_the_micro_batches_under_way()


def test_compiled_and_checkpointed():
    """By regions, which a checkpoint has to run compiled when it runs them again."""
    truth = _step(tiny_model("llama", dtype=torch.float32).train())
    run_ranks(_compiled, 2, truth)


def _step(model) -> dict[str, torch.Tensor]:
    model(**tiny_batch(4, 7)).loss.backward()
    sync_gradients(model)
    return {name: its.grad.clone() for name, its in model.named_parameters()}


def _compiled(truth: dict[str, torch.Tensor]) -> None:
    from torch._dynamo.utils import counters

    model, _ = parallelize(tiny_model("llama", dtype=torch.float32).train(), X)
    model.gradient_checkpointing_enable()
    torch.compiler.reset()
    counters.clear()
    compile_regions(model.axonn, model, backend="eager")
    errors = relative_errors(_step(model), truth)
    assert max(errors.values()) < 1e-4, errors
    assert counters["stats"]["unique_graphs"] > 0 and not counters["recompile_limit"]


def test_generate_writes_what_one_process_writes():
    model = tiny_model("llama").eval()
    model.lm_head.weight.data.mul_(5)  # far from even probabilities
    run_ranks(_generate, 2, {beams: _written(model, beams) for beams in (1, 2)})


def _written(model, beams: int) -> torch.Tensor:
    ids = torch.tensor([[0, 5, 9], [7, 8, 4]])
    with torch.no_grad(), exact():
        return model.generate(
            ids, attention_mask=(ids != 0).long(), do_sample=False, num_beams=beams, max_new_tokens=5, pad_token_id=0
        )


def _generate(truth: dict[int, torch.Tensor]) -> None:
    for grid in (X, Z):
        model = tiny_model("llama").eval()
        model.lm_head.weight.data.mul_(5)
        model, _ = parallelize(model, grid)
        for beams, expected in truth.items():
            assert torch.equal(_written(model, beams), expected), (grid, beams)


def test_trainer_resumes_on_another_grid_and_on_one_process(tmp_path):
    truth = train(tmp_path / "truth")
    run_ranks(_trainer, 2, tmp_path, truth)
    history = train(tmp_path / "one", resume=tmp_path / "z" / "checkpoint-3")
    assert worst_difference(history[:-1], truth[:-1]) < RESUMED
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "x" / "checkpoint-6", dtype=torch.float64)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "truth" / "checkpoint-6", dtype=torch.float64)
    errors = relative_errors(saved.state_dict(), expected.state_dict())
    assert max(errors.values()) < 1e-8, errors


def _trainer(folder: Path, truth: list[dict]) -> None:
    for grid, output, resume in ((Z, "z", None), (X, "x", folder / "z" / "checkpoint-3")):
        history = train(folder / output, grid, resume=resume)
        end = -1 if resume else None  # the last entry of a run sums up its own steps only
        assert worst_difference(history[:end], truth[:end]) < RESUMED, (grid, history, truth)


def test_trainer_counts_labels_that_x_does_not_divide(tmp_path):
    """The stock Trainer, whose loss is over the labels of a step, which it counts over all ranks."""
    truth = train(tmp_path / "truth", stock=True, max_steps=2, eval_strategy="no", save_strategy="no")
    run_ranks(_stock, 2, tmp_path, truth)


def _stock(folder: Path, truth: list[dict]) -> None:
    for grid in (X,):
        history = train(folder / str(grid), grid, stock=True, max_steps=2, eval_strategy="no", save_strategy="no")
        assert worst_difference(history, truth) < EQUAL, (grid, history, truth)


def test_accelerate_loop_equals_one_process():
    run_ranks(_loop, 2, loops.loop(None))


def _loop(truth: dict) -> None:
    for grid, order in ((X, "together"), (Grid(data=2), "optimizer first")):
        loops.assert_equal(loops.loop(grid, order=order), truth, (grid, order))


def test_accelerate_state_goes_to_another_grid_and_to_one_process(tmp_path):
    truth = states.unbroken(None)
    run_ranks(_state, 2, tmp_path, truth)
    states.assert_equal(states.resume(Grid(), tmp_path / "state"), truth, "one process")


def _state(folder: Path, truth: dict) -> None:
    states.save(Grid(data=2), folder / "state")
    states.assert_equal(states.resume(X, folder / "state"), truth, X)


def test_weights_in_host_memory_are_as_on_the_device_bit_by_bit(tmp_path):
    run_ranks(_offloaded, 2, tmp_path)


def _offloaded(folder: Path) -> None:
    if any(host_weight_of(parameter) for parameter in host_weights.Run(X).parameters().values()):
        host_weights.check(folder)
    else:  # they stay on the device
        assert Version(torch.__version__) < Version("2.13")
        host_weights.check_torch(X)


SCRIPT = """
import torch
from accelerate import Accelerator

accelerator = Accelerator()
assert type(accelerator).__name__ == "GridAccelerator", type(accelerator)
loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8), batch_size=4, shuffle=True))
seen = sorted(torch.cat([accelerator.gather(batch) for batch in loader]).tolist())
assert seen == list(range(8)), seen
open(f"seen-{torch.distributed.get_rank()}", "w").close()
"""


def test_accelerate_launch_gives_a_script_the_grid(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert_quiet(launch(tmp_path, X, tmp_path / "script.py"))
    assert {path.name for path in tmp_path.glob("seen-*")} == {"seen-0", "seen-1"}


def test_lora_equals_one_process_and_is_saved(tmp_path):
    """With adapters put in before and after the model is sharded."""
    dora = functools.partial(adapt, use_dora=True, target_modules=["q_proj", "down_proj"])
    others = [
        Adapted("after", base=lambda: tiny_model("qwen3"), after=True),
        Adapted("dora", base=lambda: tiny_model("llama"), adapter=dora),
    ]
    saved = functools.partial(_save_adapters, tmp_path / "adapters")
    assert_equal_on_grids([Adapted("before", base=lambda: tiny_model("llama"))], others, saved)
    read = PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "adapters").state_dict()
    for name, value in adapted_model("llama").state_dict().items():
        torch.testing.assert_close(read[name].to(value.dtype), value, rtol=1e-6, atol=1e-7)


def _save_adapters(folder: Path) -> None:
    """Then read on another grid, through PEFT, by a model that has others."""
    model, _ = parallelize(adapted_model("llama"), X)
    model.save_pretrained(folder)
    again, _ = parallelize(adapted_model("llama", r=3, lora_alpha=5), Z)
    again.load_adapter(folder, "second")
    for name, value in again.named_parameters():
        if ".second." in name:
            torch.testing.assert_close(
                full(value).double(), full(model.get_parameter(name.replace(".second.", ".default.")))
            )


SFT = {
    "packed, goldfish and LoRA": dict(
        packing=True,
        peft_config=LoraConfig(
            r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
        ),
    ),
    "padded": dict(goldfish=False),
}


def test_sft_equals_one_process(tmp_path, monkeypatch):
    import trl.trainer.utils as utils

    with monkeypatch.context() as patch:
        patch.setattr(utils, "_ChunkedLogProbFunction", ExactLogProbs)
        truths = {name: fine_tune(tmp_path / name, None, max_steps=2, **SFT[name]) for name in SFT}
    run_ranks(_sft, 2, tmp_path, truths)


def _sft(folder: Path, truths: dict) -> None:
    for (name, expected), grid in zip(truths.items(), (X, Z), strict=True):
        found = fine_tune(folder / f"{name} on {grid}", grid, max_steps=2, **SFT[name])
        assert worst_difference(found[0], expected[0]) < EQUAL, (name, grid, found[0], expected[0])
        for ours, theirs in zip(found[1:], expected[1:], strict=True):
            errors = relative_errors(ours, theirs)
            assert errors and max(errors.values()) < EQUAL, (name, grid, errors)


def test_extraction_equals_one_process():
    truth = extract(trained_llama(), topics_tokenizer(), samples(), progress=False)
    assert sum(result.exact_match for result in truth) == LEARNT
    run_ranks(_extraction, 2, truth)


def _extraction(truth: list) -> None:
    for grid in (X, Z):
        model, _ = parallelize(trained_llama(), grid)
        found = extract(model, topics_tokenizer(), samples(), progress=False)
        if torch.distributed.get_rank() == 0:
            for ours, theirs in zip(found, truth, strict=True):
                assert (ours.sample_id, ours.hits, ours.generated) == (theirs.sample_id, theirs.hits, theirs.generated)
                assert ours.logprob == pytest.approx(theirs.logprob, rel=1e-4)
