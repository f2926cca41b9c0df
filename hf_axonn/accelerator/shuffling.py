"""Order in which loaders shuffle: that of stock accelerate, and in a resumed run that of the unbroken one.

On one process stock accelerate shuffles by torch's global generator, and so does rank 0 where it reads for all. On a
grid it must not: dropout needs that one to move alike on all ranks, and alike in a resumed run. So such loaders draw
the same numbers from one that they share, which begins in the state of the global one. On several processes each
loader has a generator of its own, here as there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from accelerate.data_loader import SkipBatchSampler
from accelerate.state import GradientState
from torch import Generator
from torch.utils.data import RandomSampler

from hf_axonn.accelerator.dispatching import DispatchedBatches


class SampleOrder:
    """The order in which the loaders of an Accelerator shuffle, and what a saved state needs of it.

    Attributes:
        shared: in the place of torch's global generator.
    """

    def __init__(self) -> None:
        self.shared = Generator()
        self.shared.set_state(torch.get_rng_state())

    def adopt(self, sampler: RandomSampler, *, as_one_process: bool, resumable: bool) -> Generator:
        """Give a sampler a generator if it has none: the shared one, or its own, as accelerate on several processes.

        Torch's global generator moves alike on all ranks. If accelerate takes no other sampler in its place, it is
        `resumable`.
        """
        by_seed = sampler.generator is None and as_one_process
        if sampler.generator is None:
            sampler.generator = self.shared if by_seed else _make_generator(None)
        if resumable and type(sampler) is RandomSampler:
            sampler.__class__ = ResumableSampler
            cast(ResumableSampler, sampler).by_seed = by_seed
        return sampler.generator

    def state(self, loaders: Iterable[Any]) -> list[dict[str, Any]]:
        """Return, for JSON, each sampler's generator state now, and at the start of an open epoch."""
        open_ = [_sampler_of(loader) for loader in GradientState().dataloader_references]
        return [
            {
                "by_seed": sampler.by_seed,
                "now": _text(sampler.generator.get_state()),
                "began": _text(sampler.began) if sampler in open_ else None,
            }
            for sampler in _samplers_of(loaders)
        ]

    def resume(self, saved: list[dict[str, Any]], loaders: Iterable[Any]) -> None:
        """Continue from what `state` gave. An open epoch is the next one that begins by skipping batches.

        It keeps its order on any grid. Another number of samplers belongs to another script, and nothing is done.
        """
        samplers = _samplers_of(loaders)
        if len(saved) != len(samplers):
            return
        for sampler, record in zip(samplers, saved, strict=True):
            sampler.generator.set_state(_state(record["now"]))
            if record["began"] is not None:
                sampler.resumed = _state(record["began"]), _state(record["now"]), record["by_seed"]


class ResumableSampler(RandomSampler):
    """A RandomSampler that can begin an epoch once more.

    Attributes:
        by_seed: whether it draws a seed for each epoch, as one without a generator does.
        began: the generator's state at the start of the newest epoch.
        resumed: of an epoch that continues, `began`, the state behind it, and `by_seed`.
    """

    by_seed = False
    began: torch.Tensor | None = None
    resumed: tuple[torch.Tensor, torch.Tensor | None, bool] | None = None

    def __iter__(self) -> Iterator[int]:
        resumed, self.resumed = self.resumed, None
        if resumed is None or not _skips(GradientState().active_dataloader):
            resumed = self.generator.get_state(), None, self.by_seed
        self.began, now, by_seed = resumed
        source = self.generator
        source.set_state(self.began)
        if by_seed:
            source = _make_generator(source)
            if now is not None:  # other loaders have drawn since, and this one, for its workers, just now
                self.generator.set_state(now)
        yield from RandomSampler(self.data_source, self.replacement, self._num_samples, source)


def _make_generator(source: Generator | None) -> Generator:
    """Return a generator whose seed is drawn, as torch and accelerate do, from `source`; None: torch's global one."""
    return Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_(generator=source)))


def _skips(loader: Any) -> bool:
    batches = getattr(loader, "batch_sampler", None)
    return getattr(batches if isinstance(batches, SkipBatchSampler) else loader, "skip_batches", 0) > 0


def _samplers_of(loaders: Iterable[Any]) -> list[ResumableSampler]:
    """Return the resumable samplers of prepared loaders, each once, in the loaders' order."""
    found = dict.fromkeys(_sampler_of(loader) for loader in loaders)
    return [sampler for sampler in found if sampler is not None]


def _sampler_of(loader: Any) -> Any:
    """Return the resumable sampler of a prepared loader, which may skip batches; None if it has none."""
    dataset = getattr(loader, "dataset", None)
    found = dataset.loader if isinstance(dataset, DispatchedBatches) else loader
    while found is not None and not isinstance(found, ResumableSampler):
        inner = getattr(found, "batch_sampler", None)
        found = getattr(found, "sampler", None) if inner is None else inner
    return found


def _text(state: torch.Tensor | None) -> str | None:
    return None if state is None else bytes(state.tolist()).hex()


def _state(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
