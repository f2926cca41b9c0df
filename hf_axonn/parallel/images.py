"""Images beside text: the encoder of images by blocks, and what the ranks of a grid are given.

    rows           each rank of z has the images of its own rows; the ranks of (x, y) have the same ones
    tower          every rank of (x, y) has its full activations between blocks, heads and features are divided inside
    merge          features take the places of image tokens in the full embeddings, before the decoder divides these
    DeepStack      features that are added between decoder layers are divided as the hidden states are
    context        ranks that share rows have the same images, and encode all of them (context_parallel.py)

All ranks of z gather the weights of a tower, so one whose rows have no image encodes a blank one, whose features take
no place: its gradients are zeros. So does a rank of data where nothing beside encoder and projector is trained: the
loss of its text would have no gradient.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_axonn.architectures.plan import ShardingPlan
from hf_axonn.distributed.collectives import gather_quietly
from hf_axonn.engine.activation_layouts import Tokens, in_features, take_tokens
from hf_axonn.layers.base import patch_forward, split_hidden_states
from hf_axonn.parallel.sharded_model import ShardedModel


PIXELS = ("pixel_values", "pixel_values_videos")
AUDIO = ("input_features", "input_audio_embeds", "audio_values", "input_values")
WITH_GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # pixels [patches, values], and a grid an image
WITH_ROWS = ("idefics3", "smolvlm")  # pixels [B, images, channels, height, width]
ALONE = ("gemma3",)  # pixels [images, channels, height, width]


def install_towers(state: ShardedModel, model: nn.Module, plan: ShardingPlan) -> None:
    """Let blocks in the layers of encoders of images take and give full activations."""

    def forward(original: Callable, *args, **kwargs):
        hidden, _, _ = split_hidden_states(args, kwargs)
        with state.context.with_tokens(Tokens(1, hidden.shape[:-1].numel(), sharded=False)):
            return original(*args, **kwargs)

    for tower in plan.towers:
        for name in tower.layers:
            patch_forward(model.get_submodule(name), forward)


def install_images(state: ShardedModel, model: nn.Module) -> None:
    """Check what a model that takes text and images is given, and let its parts meet divided hidden states.

    To be installed around all else that divides a batch.
    """
    names = inspect.signature(model.forward).parameters
    if not (hasattr(model, "generate") and "input_ids" in names and any(name in names for name in (*PIXELS, *AUDIO))):
        return
    images = Images(state, model)
    patch_forward(model, images.forward)
    patch_forward(model, images.generate, method="generate")
    for module in model.modules():
        if hasattr(module, "get_placeholder_mask"):
            patch_forward(module, images.find_places, method="get_placeholder_mask")
        if hasattr(module, "inputs_merger"):
            patch_forward(module, images.merge, method="inputs_merger")
        if hasattr(module, "_deepstack_process"):
            patch_forward(module, functools.partial(_add_features, state), method="_deepstack_process")


class Images:
    """The images of a pass.

    Attributes:
        blank: whether those of the pass that is under way stand in for none.
    """

    def __init__(self, state: ShardedModel, model: nn.Module) -> None:
        self.state, self.model = state, model
        self.config: Any = getattr(model, "config", None)
        self.signature = inspect.signature(model.forward)
        self.blank = False

    def forward(self, original: Callable, *args, **kwargs):
        """Run the model, with a blank image where other ranks of z have some, or there would be nothing to train.

        Raises:
            ValueError: something is given that cannot be divided; ranks of z have other kinds of images, or ranks of
                data none and train nothing else, and no blank ones are known for the type of the model.
        Collectives: over z one all-gather of two numbers, for which the host waits; none inside of `generate`.
        """
        given = self.signature.bind_partial(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        self._refuse(given)
        every = [] if self.state.context.gather_cache.everything else self._exchange(given)
        idle = not any(every) and self._has_nothing_to_train(given)
        if idle or (any(every) and not all(every)):
            if self.config.model_type not in BLANKS:
                axis = "data" if idle else "z"
                raise ValueError(
                    f"some ranks of {axis} of the grid {self.state.grid} were given images and some were given none, "
                    f"and it is not known what a blank image is to {self.config.model_type} models: give each of "
                    f"them a row with an image, or set {axis} to 1."
                )
            self.blank = idle or not every[self.state.grid_mesh.index("z")]
        try:
            return original(*args, **(kwargs | self._blank_image(given) if self.blank else kwargs))
        finally:
            self.blank = False

    def generate(self, original: Callable, *args, **kwargs):
        """Generate.

        Raises:
            ValueError: some ranks of z have images, and some have none.
        Collectives: over z one all-gather of two numbers.
        """
        every = self._exchange(kwargs)
        if any(every) and not all(every):
            raise ValueError(
                f"generate over {self.state.grid}: some ranks of z were given images and some were given none, for "
                "whom the others would wait. Give each of them a row with an image, or none at all."
            )
        return original(*args, **kwargs)

    def find_places(self, original: Callable, *args, **kwargs):
        """Find the image tokens; there are none for a blank image."""
        if self.blank and kwargs.get("image_features") is not None:
            kwargs["image_features"] = kwargs["image_features"][:0]
        return original(*args, **kwargs)

    def merge(self, original: Callable, input_ids: Tensor, inputs_embeds: Tensor, image_hidden_states: Tensor):
        """Put features [N, H] in the places of image tokens; a blank image has none, and its features get zeros in
        backward."""
        if self.blank:
            return inputs_embeds.masked_scatter(torch.zeros_like(inputs_embeds, dtype=torch.bool), image_hidden_states)
        return original(input_ids, inputs_embeds, image_hidden_states)

    def _has_nothing_to_train(self, given: dict[str, Any]) -> bool:
        """Return whether this rank of data has neither images nor a trained parameter of text. No communication."""
        if (
            self.state.grid.data == 1
            or not torch.is_grad_enabled()
            or any(given.get(name) is not None for name in PIXELS)
        ):
            return False
        model: Any = self.model
        text = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
        trained = (parameter.requires_grad for part in text if part is not None for parameter in part.parameters())
        return any(parameter.requires_grad for parameter in self.model.parameters()) and not any(trained)

    def _refuse(self, given: dict[str, Any]) -> None:
        grid = self.state.grid
        for name in (name for name in AUDIO if given.get(name) is not None):
            raise ValueError(
                f"{name}: audio beside text is not supported over the grid {grid}: train {type(self.model).__name__} "
                "on text and images alone, or on one process."
            )
        for name in (name for name in PIXELS if given.get(name) is not None):
            if grid.context > 1 and self.config.model_type not in BLANKS:
                raise ValueError(
                    f"{name}: images are not supported over the grid {grid}: context divides rows, and where "
                    f"{self.config.model_type} models put images is unknown. Omit context, and use x, y, z and data."
                )

    def _exchange(self, given: dict[str, Any]) -> list[int]:
        """Return 1 for each rank of z that has images, and 0 for others; nothing where z is 1. See `forward`.

        Raises:
            ValueError: some of them have videos, and some have none.
        """
        mesh = self.state.grid_mesh
        if mesh.size("z") == 1:
            return []
        own = [int(given.get(name) is not None) for name in PIXELS]
        images, videos = gather_quietly(torch.tensor(own, device=mesh.device), mesh.group("z")).t().tolist()
        if any(videos) and not all(videos):
            raise ValueError(
                f"some ranks of z of the grid {self.state.grid} were given pixel_values_videos and some were not: "
                "give each of them a row with a video, or none at all."
            )
        return images

    def _blank_image(self, given: dict[str, Any]) -> dict[str, Tensor]:
        """Return the arguments of one blank image."""
        blank = BLANKS[self.config.model_type](self.config.vision_config, self.state.grid_mesh.device)
        if "mm_token_type_ids" in self.signature.parameters and given.get("mm_token_type_ids") is None:
            blank["mm_token_type_ids"] = torch.zeros_like(given["input_ids"])
        return blank


def _blank_patches(config: Any, device: torch.device) -> dict[str, Tensor]:
    side = config.spatial_merge_size
    channels = getattr(config, "in_channels", None) or config.in_chans
    values = channels * config.temporal_patch_size * config.patch_size**2
    grid = torch.tensor([[1, side, side]], device=device)
    return {"pixel_values": torch.ones(side * side, values, device=device), "image_grid_thw": grid}


def _blank_images(leading: tuple[int, ...], config: Any, device: torch.device) -> dict[str, Tensor]:
    size = config.image_size
    return {"pixel_values": torch.ones(*leading, config.num_channels, size, size, device=device)}


BLANKS: dict[str, Callable[[Any, torch.device], dict[str, Tensor]]] = {
    **dict.fromkeys(WITH_GRIDS, _blank_patches),
    **dict.fromkeys(WITH_ROWS, functools.partial(_blank_images, (1, 1))),
    **dict.fromkeys(ALONE, functools.partial(_blank_images, (1,))),
}


def _add_features(
    state: ShardedModel, _original: Callable, hidden: Tensor, places: Tensor, features: Tensor
) -> Tensor:
    """Add features [N, H] at N places [B, S] to the hidden states behind a decoder layer, in any layout.

    Features without a place are those of a blank image. Over context every rank has all features, and adds those at
    its own positions. Backward: all-gather over (x, y).
    """
    tokens, mesh, rows = state.context.tokens, state.grid_mesh, state.context.rows
    features = features.to(hidden.device, hidden.dtype)
    added = features.new_zeros(*places.shape, features.shape[-1])
    added = added.masked_scatter(places.to(hidden.device).unsqueeze(-1), features)
    added = added if rows is None else rows.take(added)
    if tokens is None or not tokens.sharded or hidden.shape == added.shape:
        return hidden + added
    layout = tokens if in_features(hidden, tokens, mesh) else replace(tokens, features=0)
    return hidden + take_tokens(added, layout, mesh)
