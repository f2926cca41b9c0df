"""Image-text models on grids equal one process: loss, every gradient, norm, and parameters after some steps.

    python -m tests.parallel.test_images [TYPES [GRIDS]]     prints the table of docs/architectures.md

Rows have unequal numbers and sizes of images, and in a second batch only those of the first half of the ranks of z.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForImageTextToText

from hf_axonn import export_hf, from_pretrained, parallelize, save_sharded
from hf_axonn.architectures.plan import plan_for
from hf_axonn.certificate.float64 import without_noise
from hf_axonn.config import AxonnConfig
from hf_axonn.parallel.batch_check import _Sum
from hf_axonn.topology.grid import Grid
from tests.helpers import images
from tests.helpers.adapting import adapt
from tests.helpers.equality import Case, Outcome, compare, exact, too_large
from tests.helpers.float64 import checkpointed
from tests.helpers.ranks import refused, run_ranks


BOUND = 1e-10
GRIDS = {"x2": Grid(x=2), "y2": Grid(y=2), "z2": Grid(z=2), "data2": Grid(data=2)}
GRIDS |= {"x2y2": Grid(x=2, y=2), "x2z2": Grid(x=2, z=2), "y2z2": Grid(y=2, z=2)}
DIVIDED = {"z2c2": Grid(z=2, context=2), "z4c2": Grid(z=4, context=2), "z2x2c2": Grid(z=2, x=2, context=2)}
DIVIDED |= {"z2y2c2": Grid(z=2, y=2, context=2)}
BATCHES = {"unequal": images.UNEQUAL, "on first half": images.ON_FIRST_HALF}
NEW = {"max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
Changed = Callable[[nn.Module], nn.Module]


def case(model_type: str, rows: str, change: Changed = lambda model: model, *, steps: int = 2, **options) -> Case:
    """A comparison of one type on some rows, `change` being what is done to the model before it is sharded."""
    sizes = BATCHES[rows]
    make = functools.partial(_make, model_type, change)
    batches, cut = [images.tiny_batch(model_type, sizes)], images.cut_by(model_type, sizes)
    return Case(f"{model_type} {rows}", make, batches, steps=steps, cut=cut, **options)


def _make(model_type: str, change: Changed) -> nn.Module:
    return change(images.tiny_model(model_type))


def run(cases: list[Case], grids: list[Grid]) -> list[str]:
    """Return what differs from one process, in all cases on all grids, in one launch."""
    with_truth = [(each, each.truth()) for each in cases]
    return too_large(run_ranks(compare, grids[0].size, with_truth, grids)[0], BOUND)


def test_images_on_some_ranks_and_on_none():
    assert run([case("qwen3_vl", "on first half")], [GRIDS["x2z2"], GRIDS["x2y2"], DIVIDED["z4c2"]]) == []


@pytest.mark.slow
@pytest.mark.parametrize("model_type", images.TYPES)
def test_every_type_on_every_grid(model_type):
    compared = [case(model_type, rows, steps=3) for rows in BATCHES]
    for size in (2, 4):
        assert run(compared, [grid for grid in GRIDS.values() if grid.size == size]) == []


@pytest.mark.slow
@pytest.mark.parametrize("model_type", images.TYPES)
def test_every_type_where_context_divides_its_rows(model_type):
    keys = functools.partial(AxonnConfig, context_attention="keys")
    compared = [case(model_type, rows, steps=3) for rows in BATCHES]
    compared.append(case(model_type, "unequal", config=lambda grid: keys(grid=grid)))
    compared[-1].name += " keys"
    for size in (2, 4):
        assert run(compared, [grid for grid in DIVIDED.values() if grid.size == size]) == []


def loss_of_router(model: nn.Module, batch: images.Batch, _dp_size: int) -> torch.Tensor:
    """The model's own loss with the auxiliary one of its routers, which counts no position behind the end of a row."""
    return model(**batch, output_router_logits=True).loss


def loss_of_base(model: nn.Module, batch: images.Batch, _dp_size: int) -> torch.Tensor:
    """A loss of one's own on what the model without its head returns."""
    return (model.model(**_prompt(batch)).last_hidden_state[:, ::3] ** 2).sum()


def packed(model_type: str) -> Case:
    """Two documents a row, told apart by the first of four position ids, as of Qwen's own collators."""
    ids = images.tiny_batch(model_type)["input_ids"].masked_fill(images.tiny_batch(model_type)["input_ids"] > 120, 3)
    positions = torch.cat([torch.arange(5), torch.arange(images.LENGTH - 5)]).expand(4, len(ids), -1)
    batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": positions, "use_cache": False}
    make = functools.partial(_make, model_type, lambda model: model)
    return Case(f"{model_type} packed", make, [batch], cut=lambda batch, *_: batch)


@pytest.mark.slow
def test_passes_where_context_divides_rows_with_images():
    compared = [
        case("qwen3_vl_moe", "unequal", loss_of=loss_of_router),
        case("gemma3", "unequal", loss_of=loss_of_base),
        case("qwen3_vl", "on first half", loss_of=loss_of_base),
        packed("qwen3_vl"),
    ]
    assert run(compared, [DIVIDED["z2c2"]]) == []


def test_encoders_of_images_are_sharded_as_blocks():
    for model_type in images.TYPES:
        with torch.device("meta"):
            plan = plan_for(images.untrained_model(model_type))
        (tower,) = plan.towers
        assert len(tower.layers) == 2 and not tower.full_sequence, model_type
        assert [bool(block.query) for block in tower.blocks] == [True, False] * 2, model_type
        assert plan.decoder.endswith(("language_model", "text_model")), model_type
        assert len(plan.blocks) == (3 if "moe" in model_type else 2 * len(plan.layers)), model_type
        assert not plan.full_sequence, model_type
        assert f"2 layers of encoders of images as {len(tower.blocks)} blocks" in plan.summary()


@contextlib.contextmanager
def without_rounding() -> Iterator[None]:
    """AdamW makes full steps of gradients that are zero by mathematics, as those of key biases are."""
    with exact(), without_noise():
        yield


@pytest.mark.slow
def test_other_types_run_linear_by_linear():
    assert plan_for(images.untrained_model("llava")).reason.startswith("no block plan for llava models")
    every_rank = case("llava", "unequal", context=without_rounding)
    assert run([every_rank], [GRIDS["x2y2"], GRIDS["x2z2"]]) == []
    some_ranks = case("llava", "on first half", context=without_rounding)
    assert run([some_ranks], [Grid(data=2, x=2)]) == []  # none gathers weights with another that has no image
    with pytest.raises(AssertionError, match="not known what a blank image is to llava models"):
        run([some_ranks], [GRIDS["z2"]])


def as_videos(batch: images.Batch) -> images.Batch:
    """Put videos of one picture in the places of images."""
    renamed = {"pixel_values": "pixel_values_videos", "image_grid_thw": "video_grid_thw"}
    changed = {renamed.get(name, name): value for name, value in batch.items()}
    ids, kinds = batch["input_ids"], batch["mm_token_type_ids"]
    return changed | {"input_ids": ids.masked_fill(ids == images.IMAGE, images.VIDEO), "mm_token_type_ids": 2 * kinds}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_vl"])
def test_videos(model_type):
    compared = case(model_type, "unequal")
    cut = compared.cut
    compared.batches, compared.cut = [as_videos(compared.batches[0])], lambda *which: as_videos(cut(*which))
    assert run([compared], [GRIDS["x2y2"], GRIDS["x2z2"]]) == []


def freeze(model: nn.Module) -> nn.Module:
    """Train all but the encoder of images."""
    model.get_submodule(plan_for(model).towers[0].decoder).requires_grad_(False)
    return model


def freeze_text(model: nn.Module) -> nn.Module:
    """Train the encoder of images and its projector alone."""
    for part in (model.get_decoder(), model.get_output_embeddings()):
        part.requires_grad_(False)
    return model


def test_a_rank_of_data_without_images_where_text_is_frozen():
    assert run([case("smolvlm", "on first half", freeze_text)], [GRIDS["data2"]]) == []


@pytest.mark.slow
def test_every_type_without_images_on_a_rank_of_data_where_text_is_frozen():
    compared = [case(model_type, "on first half", freeze_text, steps=3) for model_type in images.TYPES]
    assert run(compared, [GRIDS["data2"], GRIDS["z2"]]) == []


ON_TEXT = r".*(language_model|text_model).*\.(q_proj|v_proj|o_proj|down_proj)"
WAYS: dict[str, dict] = {
    "frozen encoder": dict(change=freeze),
    "LoRA on text": dict(change=functools.partial(adapt, target_modules=ON_TEXT)),
    "LoRA on all": dict(change=adapt),
    "DoRA on all": dict(change=functools.partial(adapt, use_dora=True)),
    "checkpointing": dict(before=functools.partial(checkpointed, reentrant=False)),
    "reentrant checkpointing": dict(before=functools.partial(checkpointed, reentrant=True)),
    "LoRA, checkpointing": dict(change=adapt, before=functools.partial(checkpointed, reentrant=False)),
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_vl", "smolvlm"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_train(model_type, way):
    compared = [case(model_type, rows, **WAYS[way]) for rows in BATCHES]
    assert run(compared, [GRIDS["x2y2"], GRIDS["x2z2"], DIVIDED["z4c2"]]) == []


def _refusals(model_type: str) -> dict[str, str]:
    """Return the messages of this rank of two."""
    first = dist.get_rank() == 0
    batch = images.tiny_batch(model_type, rows=slice(0, 1))
    text = images.tiny_batch(model_type, rows=slice(1, 2))
    found = {}
    model, _ = parallelize(images.tiny_model(model_type), Grid(z=2))
    with torch.no_grad():
        found["generate"] = refused(lambda: model.generate(**_prompt(batch if first else text), **NEW))
    found["audio"] = refused(lambda: model(**batch, input_features=torch.zeros(1, 2, 3)))
    model.config.model_type = "other"
    found["unknown"] = refused(lambda: model(**(batch if first else text)))
    videos = {"pixel_values_videos": torch.zeros(1, 3)} if first else {}
    found["videos"] = refused(lambda: model(**text, **videos))
    model, _ = parallelize(images.tiny_model(model_type), Grid(x=2))
    moved = batch | {"pixel_values": batch["pixel_values"] + first * 1e-9}
    found["other pixels"] = refused(lambda: model(**moved))
    found["pipe"] = refused(lambda: parallelize(images.tiny_model(model_type), Grid(pipe=2)))
    found["llava"] = refused(lambda: parallelize(images.tiny_model("llava"), Grid(z=2, context=2)))
    model, _ = parallelize(images.tiny_model(model_type), Grid(z=2, context=2))
    found["tuple"] = refused(lambda: model(**batch, return_dict=False))
    model.config.model_type = "other"
    found["context"] = refused(lambda: model(**batch))
    return found


def _prompt(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def test_what_cannot_be_divided_is_refused_on_every_rank():
    for found in run_ranks(_refusals, 2, "gemma3"):
        assert "some ranks of z were given images and some were given none" in found["generate"]
        assert "input_features: audio beside text is not supported" in found["audio"]
        assert "what a blank image is to other models" in found["unknown"]
        assert "given pixel_values_videos and some were not" in found["videos"]
        assert "pixel_values is [2, 3, 8, 8] float64 (checksum" in found["other pixels"]
        assert "no stage encodes images (model.vision_tower): use a grid without pipe for Gemma3" in found["pipe"]
        assert "pixel_values: images are not supported" in found["context"] and "Omit context" in found["context"]
        assert "where other models put images is unknown" in found["context"]
        assert "return_dict=False of a model with images is not supported" in found["tuple"]
        assert "no block plan for llava models" in found["llava"]


def test_pixels_are_compared_by_their_bits():
    def number(**batch):
        total = _Sum(torch.device("cpu"))
        total.add(batch)
        return int(total.content)

    pixels = torch.arange(12.0).view(4, 3)
    same = number(pixel_values=pixels)
    assert same == number(pixel_values=pixels.clone())
    assert same != number(pixel_values=pixels.flip(0)) and same != number(pixel_values=pixels.flip(1))
    assert same != number(pixel_values=torch.nextafter(pixels, pixels + 1))
    assert number(pixel_values=pixels.bfloat16()) != number(pixel_values=pixels.flip(0).bfloat16())
    assert number(inputs_embeds=pixels) == number(inputs_embeds=pixels + 1)  # ranks have computed these


def _generate(model_type: str, grid: Grid, expected: torch.Tensor) -> bool:
    model, _ = parallelize(images.tiny_model(model_type).eval(), grid)
    rows = slice(0, 1) if grid.place(dist.get_rank()).index("data", "rows") == 0 else slice(2, 3)
    own = _prompt(images.tiny_batch(model_type, rows=rows if grid.dp_size > 1 else slice(0, 3, 2)))
    with torch.no_grad(), exact():
        written = model.generate(**own, **NEW)
    truth = expected if grid.dp_size == 1 else expected[slice(0, 1) if rows.start == 0 else slice(1, 2)]
    return torch.equal(written, truth)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", images.TYPES)
def test_generate(model_type):
    with torch.no_grad(), exact():
        prompt = _prompt(images.tiny_batch(model_type, rows=slice(0, 3, 2)))
        expected = images.tiny_model(model_type).eval().generate(**prompt, **NEW)
    for grid in (GRIDS["x2y2"], GRIDS["x2z2"]):
        assert all(run_ranks(_generate, 4, model_type, grid, expected))


def _save(folder: Path, model_type: str) -> None:
    """Read slices, save on one grid, read that on another, and save for everyone."""
    load = functools.partial(from_pretrained, auto_class=AutoModelForImageTextToText)
    model = load(folder / "plain", grid=GRIDS["x2z2"])
    save_sharded(model, folder / "sharded")
    again = load(folder / "sharded", grid=GRIDS["x2y2"])
    again.save_pretrained(folder / "whole")
    plain = AutoModelForImageTextToText.from_pretrained(folder / "plain")
    for loaded in (model, again):
        for name, parameter in plain.named_parameters():
            assert torch.equal(loaded.get_parameter(name).full_tensor(), parameter), name
        for name, buffer in plain.named_buffers():
            assert torch.equal(loaded.get_buffer(name), buffer), name


@pytest.mark.slow
@pytest.mark.parametrize("model_type", images.TYPES)
def test_reading_slices_saving_and_exporting(tmp_path, model_type):
    images.tiny_model(model_type).float().save_pretrained(tmp_path / "plain")
    run_ranks(_save, 4, tmp_path, model_type)
    export_hf(tmp_path / "sharded", tmp_path / "exported")
    truth = AutoModelForImageTextToText.from_pretrained(tmp_path / "plain").state_dict()
    for directory in ("whole", "exported"):
        loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path / directory, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], directory
        assert all(torch.equal(loaded.state_dict()[name], value) for name, value in truth.items()), directory


def main() -> None:
    """Print a table of types and grids, with the largest error of each."""
    types = sys.argv[1].split(",") if len(sys.argv) > 1 else list(images.TYPES)
    every = GRIDS | DIVIDED
    grids = sys.argv[2].split(",") if len(sys.argv) > 2 else [*GRIDS, "z2c2"]
    print(f"| model type | how | {' | '.join(grids)} |\n|---|---|{'--:|' * len(grids)}")
    for model_type in types:
        compared = [case(model_type, rows, steps=3) for rows in BATCHES]
        with_truth: list[tuple[Case, Outcome]] = [(each, each.truth()) for each in compared]
        errors = []
        for name in grids:
            table = run_ranks(compare, every[name].size, with_truth, [every[name]])[0]
            errors.append(max(error for each in table.values() for error in each.values()))
        how = plan_for(images.tiny_model(model_type)).summary()
        print(f"| {model_type} | {how} | {' | '.join(f'{error:.0e}' for error in errors)} |", flush=True)


if __name__ == "__main__":
    main()
