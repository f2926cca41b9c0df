"""`hf-axonn doctor`: what it says of launch files and models, against what a launch does."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
import torch.distributed as dist
import yaml
from bitsandbytes.optim import AdamW8bit
from transformers import AutoModelForCausalLM, BartConfig

from hf_axonn import Grid, parallelize
from hf_axonn.cli.main import main
from hf_axonn.compat.torch import fake_world
from hf_axonn.planner.dense import load_shape
from hf_axonn.planner.memory import memory
from hf_axonn.planner.step import Step
from tests.helpers.equality import full
from tests.helpers.models import tiny_config, tiny_model
from tests.helpers.ranks import run_ranks


def write(folder, model=None, *, processes=4, **section):
    """A launch file, and the config of a model beside it."""
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "num_processes": processes,
        "mixed_precision": "bf16",
        "use_cpu": False,
        "axonn_config": {"grid": {"x": 4}, **section},
    }
    settings.update(settings["axonn_config"].pop("settings", {}))
    (folder / "axonn.yaml").write_text(yaml.safe_dump(settings))
    if model is not None:
        model.save_pretrained(folder)
    return [
        "doctor",
        "--config",
        str(folder / "axonn.yaml"),
        *(["--model", str(folder / "config.json")] if model else []),
    ]


def even_llama(**changes):
    sizes = dict(vocab_size=128, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=12)
    return tiny_config("llama", **{**sizes, **changes})


def test_moments_in_host_memory_are_counted_there(tmp_path, capsys):
    printed = []
    for offload in ("none", "optimizer"):
        command = write(tmp_path, even_llama(), grid={"z": 2, "x": 2}, offload=offload)
        assert main([*command, "--batch", "2", "--seq", "64"]) == 0
        printed.append(capsys.readouterr().out)
    pattern = r"memory of rank 0: ([\d.]+) (KiB|MiB) "
    number, unit = re.search(pattern + "parameters, gradients and AdamW's moments, ", printed[0]).groups()
    host, of_host = re.search(
        f"host {pattern}AdamW's moments and float32 weights; memory of rank 0: .* moments in use, ", printed[1]
    ).groups()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(even_llama())
    linears = [module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)]
    states = float(number) * 1024 ** (unit == "MiB") * 1024
    # Printed with two digits.
    assert float(host) * 1024 ** (of_host == "MiB") * 1024 == pytest.approx(states / 2 + 4 * sum(linears) // 4, 0.04)
    command = write(tmp_path, even_llama(), grid={"x": 4}, offload="optimizer", settings={"mixed_precision": "no"})
    assert main(command) == 0
    assert re.search(f"host {pattern}AdamW's moments; ", capsys.readouterr().out)


def test_moments_in_8_bits_are_counted_as_the_optimizer_has_them(tmp_path, capsys):
    """Moments as bitsandbytes makes them for the shards of rank 0, with embeddings in 32 bits."""
    config = even_llama(hidden_size=256, intermediate_size=512)
    for grid, ranks in (({"z": 2, "x": 2}, 4), ({"x": 1}, 1)):
        command = write(tmp_path, config, processes=ranks, grid=grid)
        assert main([*command, "--optimizer", "adamw_8bit"]) == 0
        printed = capsys.readouterr().out
        number = float(re.search(r"moments \(([\d.]+) MiB, in 8 bits but for embeddings", printed).group(1))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        parameters = dict(model.named_parameters())
        sizes = {name: each.numel() // (ranks if each.dim() > 1 else 1) for name, each in parameters.items()}
        low = AdamW8bit([torch.nn.Parameter(torch.ones(size)) for name, size in sizes.items() if "embed" not in name])
        for parameter in low.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        low.step()
        kept = sum(
            value.nbytes
            for entries in low.state.values()
            for name, value in entries.items()
            if name.startswith(("state", "absmax"))
        )
        assert number * 2**20 == pytest.approx(kept + 8 * sizes["model.embed_tokens.weight"], 0.02)


def test_moments_of_muon_are_counted_as_torch_keeps_them(tmp_path, capsys):
    config = even_llama()
    assert main([*write(tmp_path, config, grid={"z": 2, "x": 2}), "--optimizer", "muon"]) == 0
    printed = capsys.readouterr().out
    number = float(re.search(r"moments \(([\d.]+) KiB, of the layers' matrices Muon's one\)", printed).group(1))
    model = AutoModelForCausalLM.from_config(config)
    of_layers = [each for each in model.model.layers.parameters() if each.dim() == 2]
    others = [each for each in model.parameters() if all(each is not one for one in of_layers)]
    kept = 0
    for kind, parameters in ((torch.optim.Muon, of_layers), (torch.optim.AdamW, others)):
        optimizer = kind(parameters)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for parameter, entries in optimizer.state.items():
            moments = sum(value.nbytes for value in entries.values() if value.shape == parameter.shape)
            kept += moments // (4 if parameter.dim() > 1 else 1)
    assert number == pytest.approx(kept / 2**10, abs=0.0051)  # printed with two decimals


def test_a_launch_and_a_model_with_nothing_to_mend(tmp_path, capsys):
    command = write(tmp_path, even_llama(), grid={"z": 2, "x": 2})
    assert main([*command, "--batch", "2", "--seq", "64", "--accumulation", "3", "--gpu-memory", "1"]) == 0
    printed = capsys.readouterr().out
    assert "grid data=1,z=2,y=1,x=2: 4 rank(s), 4 on each of 1 machine(s)" in printed
    assert "2 decoder layers sharded as 4 blocks" in printed
    assert "batch: 12 rows and 768 tokens a step" in printed and "64 tokens of one on each rank" in printed
    assert printed.splitlines()[-1] == "doctor: nothing to mend"
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("section", "message"),
    (
        ({"grid": {"x": 3}}, "data \\* z \\* y \\* x = 1 \\* 1 \\* 1 \\* 3 = 3, but 4 process"),
        ({"grid": {"x": 4}, "overlaps": {}}, "unknown key 'overlaps'.*did you mean overlap"),
        ({"settings": {"mixed_precision": "fp8"}}, "'fp8', which is not supported"),
        ({"settings": {"fsdp_config": {"fsdp_version": 2}}}, "fsdp_config cannot stand beside"),
        ({"settings": {"num_procs": 4}}, "num_procs"),
        ({"settings": {"num_machines": 3}}, "write a multiple of 3"),
        ({"settings": {"axonn_config": None}}, "axonn_config is None"),
    ),
)
def test_what_a_launch_would_refuse(tmp_path, capsys, section, message):
    assert main(write(tmp_path, **section)) == 2
    assert re.search(message, capsys.readouterr().err)


def test_files_and_options_that_cannot_be(tmp_path, capsys):
    command = write(tmp_path, even_llama())
    for changed, message in (
        ([*command, "--batch", "0"], "--batch is 0"),
        ([*command, "--gpu-memory", "nan"], "--gpu-memory is nan"),
        ([*command[:3], "--gpu-memory", "80"], "--gpu-memory goes with --model"),
        ([*command[:3], "--optimizer", "muon"], "--optimizer goes with --model"),
        ([*command, "--gpu-memory", "80", "--machine", "frontier"], "--gpu-memory stands in place of --machine front"),
        (["doctor", "--config", str(tmp_path / "other.yaml")], "cannot be read"),
        ([*command[:3], "--model", str(tmp_path / "nothing")], "is no model"),
        ([*command, "--machine", "nowhere"], "nowhere"),
    ):
        assert main(changed) == 2
        assert message in capsys.readouterr().err
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(command) == 2
    assert "quantized weights cannot be sharded" in capsys.readouterr().err


def warnings_of(capsys, command) -> str:
    assert main(command) == 1
    printed = capsys.readouterr().out
    assert f"doctor: {printed.count('warning: ')} warning(s)" in printed
    return "\n".join(line for line in printed.splitlines() if line.startswith("warning: "))


def test_every_reason_to_look_again(tmp_path, capsys):
    uneven = write(tmp_path, tiny_config("llama", vocab_size=9, intermediate_size=9), grid={"x": 8}, processes=8)
    found = warnings_of(capsys, [*uneven, "--batch", "1", "--seq", "13"])
    assert "13 tokens are not divisible by x * y = 8: 3 pad tokens are added" in found
    assert "the shards of weights are uneven" in found
    assert "some ranks have no part of them" in found and "model.embed_tokens.weight first" in found
    assert "heads: " in found and "12" in found
    few = warnings_of(capsys, [*uneven, "--batch", "1", "--seq", "3"])
    assert "3 tokens for x * y = 8 ranks" in few

    small = write(
        tmp_path,
        even_llama(),
        grid={"y": 4},
        settings={"num_machines": 2, "main_process_ip": "10.0.0.1", "main_process_port": 29500},
    )
    found = warnings_of(capsys, [*small, "--gpu-memory", "0.0001"])
    assert "y is 4 and x is 1" in found and "x * y = 4 does not divide the 2 ranks of a machine" in found
    assert "do not fit into" in found and "--checkpointing" in found


def test_tied_weights_are_counted_once(tmp_path, capsys):
    count = 128 * 48  # of the embedding and the head
    for tied in (True, False):
        assert main(write(tmp_path, even_llama(tie_word_embeddings=tied), grid={"z": 2, "x": 2})) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.endswith("  vocabulary"))
        assert line.split() == [
            "sharded",
            "2",
            "modules",
            f"{count if tied else 2 * count:,}",
            "parameters",
            "vocabulary",
        ]


def test_rows_are_as_long_as_the_window_allows(tmp_path, capsys):
    command = write(tmp_path, even_llama(max_position_embeddings=512), grid={"z": 2, "x": 2})
    assert main(command) == 0
    assert "1 row(s) of 512 tokens" in capsys.readouterr().out
    longer = "sequences of 2,048 tokens are longer than the 512 that the config allows"
    assert longer in warnings_of(capsys, [*command, "--seq", "2048"])
    assert main(write(tmp_path, even_llama(max_position_embeddings=4096), grid={"z": 2, "x": 2})) == 0
    assert "1 row(s) of 2048 tokens" in capsys.readouterr().out


def test_a_folder_holds_weights_and_says_what_it_lacks(tmp_path, capsys):
    command = write(tmp_path, even_llama(), grid={"z": 2, "x": 2})
    folder = tmp_path / "model"
    command[-1] = str(folder)
    model = AutoModelForCausalLM.from_config(even_llama())
    model.config.save_pretrained(folder)
    without = warnings_of(capsys, command)
    assert (
        f"{folder} has no weights" in without and f"give {folder / 'config.json'} if they are to be random" in without
    )
    model.save_pretrained(folder, max_shard_size="20KB")
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "nothing to mend" in printed and f"note: {folder} has no tokenizer" in printed
    (folder / "tokenizer.json").touch()
    assert main(command) == 0 and "has no tokenizer" not in capsys.readouterr().out
    shards = sorted(folder.glob("model-*.safetensors"))
    for content in (shards[1].read_bytes()[:-1], b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"):
        shards[1].write_bytes(content)
        assert f"1 file(s) of weights are damaged, {shards[1].name} first" in warnings_of(capsys, command)
    shards[1].unlink()
    assert f"lacks 1 file(s) of weights that its index names, {shards[1].name} first" in warnings_of(capsys, command)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "adapter_config.json",
            '{"base_model_name_or_path": "some/base"}',
            "it holds an adapter: give its base model, some/base",
        ),
        ("model.gguf", "", "it holds GGUF files"),
        ("checkpoint-7/config.json", "{}", "give one of those inside it, checkpoint-7"),
        ("config.json", '{"model_type": "no_such_type"}', "no_such_type"),
        ("config.json", "{", "is no model"),
    ],
)
def test_folders_that_are_no_model_say_what_to_give(tmp_path, capsys, file, content, message):
    command = write(tmp_path, grid={"x": 2}, processes=2)
    path = tmp_path / "model" / file
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert main([*command, "--model", str(tmp_path / "model")]) == 2
    told = capsys.readouterr().err
    assert message in told and len(told.splitlines()) == 1


def test_of_a_pipeline_the_first_rank_holds_its_stages_and_what_is_in_flight(tmp_path, capsys):
    found = {}
    for grid in ({"x": 2, "z": 2}, {"x": 2, "pipe": 2}):
        command = write(tmp_path, even_llama(num_hidden_layers=8), grid=grid)
        main([*command, "--batch", "16", "--seq", "1024", "--accumulation", "8", "--weights", "float32"])
        printed = capsys.readouterr().out
        found["pipe" in grid] = float(re.search(r"([\d.]+) [GM]iB saved activations", printed)[1])
    assert "grid data=1,pipe=2,z=1,y=1,x=2" in printed
    # Half of the layers, for two micro-batches.
    assert found[True] == pytest.approx(found[False], rel=0.1)


def test_of_a_pipeline_the_rank_that_needs_most_has_to_fit(tmp_path, capsys):
    """The last rank has the head and the loss, and stages are those of the launch file."""
    sizes = dict(vocab_size=4096, num_hidden_layers=8, max_position_embeddings=512)
    command = write(tmp_path, even_llama(**sizes), processes=2, grid={"pipe": 2}, stage_layers=[6, 2])
    command += ["--batch", "2", "--seq", "512", "--checkpointing"]
    assert main(command) == 0
    first, last = map(float, re.findall(r"about ([\d.]+) MiB at the worst moment", capsys.readouterr().out))
    assert last > 2 * first
    assert main([*command, "--gpu-memory", str(1.5 * first / 1024)]) == 1
    assert f"about {last:.2f} MiB do not fit" in capsys.readouterr().out
    main(write(tmp_path, even_llama(**sizes), processes=2, grid={"pipe": 2}, stage_layers=[2, 6]) + command[5:])
    assert last < max(map(float, re.findall(r"about ([\d.]+) MiB at the worst moment", capsys.readouterr().out)))


def test_gradients_stay_while_micro_batches_add_up(tmp_path, capsys):
    """The doctor counts them as a plan of the same step does."""
    printed = []
    command = write(tmp_path, even_llama(), grid={"z": 4})
    for count in ("1", "4"):
        assert main([*command, "--batch", "64", "--seq", "64", "--accumulation", count]) == 0
        printed.append(float(re.search(r"about ([\d.]+) MiB at the worst", capsys.readouterr().out)[1]))
    shape = load_shape(str(tmp_path / "config.json"))
    step = Step(rows=64, seq=64, micro_batches=4)
    # Printed with two digits.
    assert printed[0] < printed[1] == pytest.approx(memory(shape, Grid(z=4), step).total / 2**20, abs=0.01)


def test_float16_of_a_launch_on_gpus_is_not_refused_where_there_are_none(tmp_path, capsys):
    settings = {"mixed_precision": "fp16"}
    assert main(write(tmp_path, settings=settings)) == 0
    assert main(write(tmp_path, settings={**settings, "use_cpu": True})) == 2
    assert "ignores on CPUs" in capsys.readouterr().err


def test_ranks_of_context_hold_their_positions_of_a_row(tmp_path, capsys):
    found = {}
    for context in (1, 2, 4):
        config = even_llama(max_position_embeddings=1024)
        command = write(tmp_path, config, grid={"z": 4, "context": context})
        assert main([*command, "--batch", str(context), "--seq", "1024"]) == 0
        printed = capsys.readouterr().out
        found[context] = float(re.search(r"([\d.]+) [GM]iB saved activations", printed)[1])
        assert "batch: 4 rows and 4,096 tokens a step" in printed and "1,024 tokens of one on each rank" in printed
        rows = f"rows: each of {context} ranks of context holds {1024 // context:,} of a row's 1,024 positions\n"
        assert (rows in printed) == (context > 1)
    # As many tokens; attention's output is there before and after its exchange.
    assert found[1] < found[2] == found[4] == pytest.approx(found[1], rel=0.2)
    assert main([*command, "--batch", "1", "--seq", "1022"]) == 1
    printed = capsys.readouterr().out
    assert "1022 positions are not divisible by 2 * context = 8: 2 pad positions are added to each row." in printed
    assert "attentions exchange heads for positions" in printed


def test_the_mask_of_long_packed_rows_is_named(tmp_path, capsys):
    command = [*write(tmp_path, even_llama(max_position_embeddings=20_000)), "--batch", "1", "--seq"]
    assert main([*command, "16384"]) == 0
    assert "packing: " not in capsys.readouterr().out
    assert main([*command, "20000"]) == 0
    line = (
        "packing: sdpa attends in 1 packed row(s) of 20,000 tokens with a mask of 381.5 MiB; flash_attention_2 needs"
    )
    assert line in capsys.readouterr().out


def test_linear_by_linear_and_types_that_the_formula_does_not_know(tmp_path, capsys):
    config = tiny_config("unlisted", num_attention_heads=3, num_key_value_heads=3, hidden_size=24, head_dim=8)
    assert main(write(tmp_path, config, grid={"x": 2}, processes=2)) == 1
    printed = capsys.readouterr().out
    assert "sharded one by one, model.layers.0.self_attn.q_proj first" in printed
    assert "MiB at the worst moment of a step" in printed and "note: it is sharded Linear by Linear" in printed
    config = BartConfig(d_model=24, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=8, vocab_size=64)
    assert main(write(tmp_path, config, grid={"x": 2}, processes=2)) in (0, 1)
    assert "the rest of a step is not known" in capsys.readouterr().out


def real_elements(grid: Grid) -> tuple[list[str], int]:
    model, report = parallelize(tiny_model("qwen3"), grid)
    return str(report).splitlines(), sum(parameter.to_local().numel() for parameter in model.parameters())


def test_it_says_what_a_launch_does(tmp_path, capsys):
    """The report of a real launch, and what rank 0 holds there."""
    grid = Grid(z=2, y=2)
    ((first, *lines), elements), *_ = run_ranks(real_elements, 4, grid)
    assert main(write(tmp_path, tiny_config("qwen3"), grid={"z": 2, "y": 2})) in (0, 1)
    printed = capsys.readouterr().out
    assert all(line in printed for line in lines)
    assert first.startswith("grid data=1,z=2,y=2,x=1: ") and f"sharding: {first.partition(': ')[2]}\n" in printed
    assert [line.split()[0] for line in printed.splitlines()].count("grid") == 1
    assert f"memory of rank 0: {16 * elements / 2**20:.2f} MiB" in printed


def gathered(model, grid: Grid) -> dict:
    model, _ = parallelize(model, grid)
    return {name: full(parameter.detach() * 2) / 2 for name, parameter in model.named_parameters()}


def test_what_is_launched_from_the_same_process_later_does_not_see_its_groups():
    """As in a notebook, which forks its ranks. DTensor remembers results by the ranks of a mesh, not by its groups."""
    model = AutoModelForCausalLM.from_config(even_llama())
    names = [name for name, _ in model.named_parameters()]
    with fake_world(4):
        whole, _ = parallelize(copy.deepcopy(model), Grid(y=2, x=2))
        for parameter in whole.parameters():
            parameter.detach() * 2
    true = dict(model.named_parameters())
    for found in run_ranks(gathered, 4, model, Grid(y=2, x=2)):
        assert list(found) == names
        assert all(torch.equal(found[name], true[name]) for name in names)


def test_the_bytes_of_both_ways_of_experts_are_compared(tmp_path, capsys):
    sizes = dict(num_experts=4, num_experts_per_tok=4, moe_intermediate_size=20, decoder_sparse_step=1)
    command = write(tmp_path, tiny_config("qwen3_moe", mlp_only_layers=[], **sizes), grid={"z": 4})
    for rows, fewer in (("1", "move"), ("200", "gather")):
        assert main([*command, "--batch", rows, "--seq", "8"]) in (0, 1)
        printed = capsys.readouterr().out
        (line,) = [line for line in printed.splitlines() if line.startswith("experts: a rank sends")]
        tokens = int(re.search(r"which sends fewer from ([\d,]+) tokens of a rank on", line)[1].replace(",", ""))
        assert (8 * int(rows) >= tokens) == (fewer == "gather")
        assert line.endswith("compare experts: gather, or let hf-axonn plan choose by time") == (fewer == "gather")
        assert f"from {tokens:,} tokens of a rank and micro-batch on gather sends fewer bytes" in printed
    command = write(tmp_path, even_llama(), grid={"z": 4})
    assert main([*command, "--batch", "1", "--seq", "8"]) in (0, 1)
    assert "experts" not in capsys.readouterr().out
