"""A stand-in for TRL's client of a vLLM server, which needs vLLM and NCCL: it notes what it is sent, and answers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch


END = 2  # of the tokenizer of tests/helpers/chats.py


class VLLMClientStub:
    """The methods of `trl.generation.vllm_client.VLLMClient` that trainers call.

    Attributes:
        folder: where each rank that has a client writes what it has noted, `client-RANK.pt`.
        updates: the tensors of each update, which come as they were announced.
        prompts: what each call of `generate` was asked.
    """

    folder: ClassVar[Path | None] = None

    def __init__(self, base_url: str | None = None, group_port: int = 51216, connection_timeout: float = 0.0) -> None:
        self.updates: list[dict[str, torch.Tensor]] = []
        self.prompts: list[list[list[int]]] = []

    def init_communicator(self, device: Any) -> None:
        """Nothing: there is no group of NCCL."""

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        """Take the tensors, which must be those announced, in their order, as vLLM's receiver takes them."""
        received: dict[str, torch.Tensor] = {}
        for (name, dtype, shape), (key, tensor) in zip(metadata, named_params, strict=True):
            assert (name, dtype, shape) == (key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            assert type(tensor.detach()) is torch.Tensor and tensor.is_contiguous()
            received[name] = tensor.detach().clone()
        self.updates.append(received)

    def reset_prefix_cache(self) -> None:
        """Nothing: there is no cache."""

    def generate(self, prompts: list[list[int]], features: None = None, n: int = 1, **sampling: Any) -> dict[str, Any]:
        """Completions that follow from a prompt and a completion's number: some end, others are cut."""
        self.prompts.append(prompts)
        if self.folder is not None:
            torch.save((self.updates, self.prompts), self.folder / f"client-{os.environ.get('RANK', '0')}.pt")
        longest = sampling["max_tokens"]
        completions = []
        for prompt in prompts:
            key = sum((place + 1) * token for place, token in enumerate(prompt))
            for number in range(n):
                length = 1 + (key + 3 * number) % longest
                letters = [6 + (key + 5 * number + 7 * place * (number + 1)) % 26 for place in range(length)]
                completions.append(letters if length == longest else [*letters, END])
        logprobs = [[[-1.5 - 0.1 * place] for place in range(len(each))] for each in completions]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}


@contextlib.contextmanager
def vllm_is_there() -> Iterator[None]:
    """Let a trainer of TRL that is made inside find vLLM, and the stand-in in the place of its client."""
    import trl.generation.vllm_generation as module

    with (
        mock.patch.object(module, "is_vllm_available", lambda *_, **__: True),
        mock.patch.object(module, "VLLMClient", VLLMClientStub),
    ):
        yield


def letters_count(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward for the script of TRL, which finds it by its path."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]
