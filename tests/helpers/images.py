"""Tiny models of image-text types, and rows with unequal numbers and sizes of images for them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from hf_axonn.topology.grid import Grid


VOCABULARY, IMAGE, VIDEO, LENGTH = 131, 130, 129, 14
TEXT = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=42, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64,
)  # fmt: skip
MROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]})
QWEN = dict(depth=2, num_heads=4, patch_size=2, temporal_patch_size=2, spatial_merge_size=2, in_channels=3)
FOUND = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=128, vision_end_token_id=127)
SIGLIP = dict(image_size=8, patch_size=2, num_hidden_layers=2, intermediate_size=22)
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_vl": dict(
        text_config=TEXT | MROPE | dict(num_hidden_layers=2),  # features are added behind the last one, too
        vision_config=QWEN
        | dict(hidden_size=32, intermediate_size=22, out_hidden_size=32, num_position_embeddings=16)
        | dict(deepstack_visual_indexes=[0, 1]),
        **FOUND,
    ),
    "qwen3_vl_moe": dict(
        text_config=TEXT | MROPE | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=22),
        vision_config=QWEN
        | dict(hidden_size=32, intermediate_size=22, out_hidden_size=32, num_position_embeddings=16)
        | dict(deepstack_visual_indexes=[0, 1]),
        **FOUND,
    ),
    "qwen2_5_vl": dict(
        text_config=TEXT | MROPE,
        vision_config=QWEN
        | dict(hidden_size=32, intermediate_size=22, out_hidden_size=32, fullatt_block_indexes=[1], window_size=8),
        **FOUND,
    ),
    "qwen2_vl": dict(
        text_config=TEXT | MROPE,
        vision_config=QWEN | dict(embed_dim=32, hidden_size=32, mlp_ratio=1),
        **FOUND,
    ),
    "gemma3": dict(
        text_config=TEXT | dict(sliding_window=5, layer_types=["sliding_attention"] * 2 + ["full_attention"]),
        vision_config=SIGLIP
        | dict(model_type="siglip_vision_model", hidden_size=24, num_attention_heads=3, vision_use_head=False),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=128,
        eoi_token_index=127,
    ),
    "smolvlm": dict(
        text_config=TEXT | dict(model_type="llama"),
        vision_config=SIGLIP | dict(hidden_size=20, num_attention_heads=2),
        image_token_id=IMAGE,
    ),
    "idefics3": dict(
        text_config=TEXT | dict(model_type="llama"),
        vision_config=SIGLIP | dict(hidden_size=20, num_attention_heads=2),
        image_token_id=IMAGE,
    ),
}
TYPES = tuple(CONFIGS)
CONFIGS["llava"] = dict(  # of the types that run Linear by Linear
    text_config=TEXT | dict(model_type="llama"),
    vision_config=SIGLIP
    | dict(model_type="clip_vision_model", hidden_size=24, num_attention_heads=3, projection_dim=24, patch_size=4),
    image_token_index=IMAGE,
    image_seq_length=4,
)
# Grids (height, width) of patches of the images of each row; two patches a side make one token.
UNEQUAL = (((4, 4), (2, 4)), (), ((2, 2),), ((4, 2),))
ON_FIRST_HALF = (((4, 4),), ((2, 4),), (), ())
Sizes = Sequence[Sequence[tuple[int, int]]]
Batch = dict[str, Tensor]


def tiny_model(model_type: str, *, seed: int = 0, **changes: Any) -> nn.Module:
    """Make a random float64 model in training mode; norms, biases and projectors are random too."""
    torch.manual_seed(seed)
    model = untrained_model(model_type, **changes).double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() <= 1 or not parameter.any():
                parameter += 0.3 * noise
    return model.train()


def untrained_model(model_type: str, **changes: Any) -> nn.Module:
    """Make a model as its class does."""
    config = CONFIG_MAPPING[model_type](**CONFIGS[model_type] | changes)
    return AutoModelForImageTextToText.from_config(config, experts_implementation="eager")


def has_grids(model_type: str) -> bool:
    """Return whether images of a type have sizes of their own."""
    return model_type.startswith("qwen")


def sample(model_type: str, row: int, sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return a row [14] as a processor makes it, its images, and their grids of patches."""
    generator = torch.Generator().manual_seed(row)
    images, ids = [], [5 + row]
    for height, width in sizes:
        if has_grids(model_type):
            images.append(torch.randn(height * width, 3 * 2 * 2 * 2, generator=generator, dtype=torch.float64))
            tokens = height * width // 4
        else:
            images.append(torch.randn(3, 8, 8, generator=generator, dtype=torch.float64))
            tokens = 4
        ids += [128, *[IMAGE] * tokens, 127]
    text = LENGTH - len(ids) - row % 2
    ids += torch.randint(3, 120, (text,), generator=generator).tolist()
    found = torch.zeros(LENGTH, dtype=torch.long)
    found[: len(ids)] = torch.tensor(ids)
    mask = torch.arange(LENGTH) < len(ids)
    kinds = (found == IMAGE).long()
    labels = found.masked_fill((found == IMAGE) | ~mask, -100)
    texts = {"input_ids": found, "attention_mask": mask.long(), "labels": labels}
    if has_grids(model_type):
        texts["mm_token_type_ids"] = kinds
    elif model_type == "gemma3":
        texts["token_type_ids"] = kinds
    return {"texts": texts, "images": images, "sizes": sizes}


def collate(model_type: str, samples: Sequence[dict[str, Any]]) -> Batch:
    """Return a batch as a processor would make it of these rows alone."""
    batch = {name: torch.stack([each["texts"][name] for each in samples]) for name in samples[0]["texts"]}
    images = [image for each in samples for image in each["images"]]
    if not images:
        return batch
    if has_grids(model_type):
        batch["image_grid_thw"] = torch.tensor([[1, *size] for each in samples for size in each["sizes"]])
        batch["pixel_values"] = torch.cat(images)
    elif model_type in ("gemma3", "llava"):
        batch["pixel_values"] = torch.stack(images)
    else:  # filled up with empty images
        most = max(len(each["images"]) for each in samples)
        filled = [[*each["images"], *[torch.zeros_like(images[0])] * (most - len(each["images"]))] for each in samples]
        batch["pixel_values"] = torch.stack([torch.stack(row) for row in filled])
    return batch


def tiny_batch(model_type: str, sizes: Sizes = UNEQUAL, *, rows: slice = slice(None)) -> Batch:
    """Return some of the rows whose images have these grids of patches: ids [B, 14] and pixels."""
    return collate(model_type, [sample(model_type, row, images) for row, images in enumerate(sizes)][rows])


def own_rows(model_type: str, sizes: Sizes, _batch: object, grid: Grid, rank: int) -> Batch:
    """Return the rows of a rank, as its own processor would make a batch of them."""
    index, rows = grid.place(rank).index("data", "rows"), len(sizes) // grid.dp_size
    return tiny_batch(model_type, sizes, rows=slice(index * rows, (index + 1) * rows))


def cut_by(model_type: str, sizes: Sizes):
    """Return `own_rows` of these, for `equality.Case`."""
    return functools.partial(own_rows, model_type, sizes)
