"""Schedules of torch.distributed.pipelining, by private names. Checked with torch 2.11 to 2.15."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from hf_axonn.compat.replaced import replace_attributes


def pipeline_schedule(
    name: str,
    stages: Sequence[tuple[torch.nn.Module, tuple[int, tuple, tuple]]],
    total: int,
    micro_batches: int,
    device: torch.device,
    group: ProcessGroup,
    weight_gradients: Callable[[], Callable[[], None]],
    begins: Callable[[str, int, int], None],
) -> Any:
    """Make a schedule of torch.distributed.pipelining over this rank's stages, whose last one returns a loss.

    Args:
        name: one of config.SCHEDULES.
        stages: (module, (index, tensors that it gets, tensors that it gives)), of which only the metadata counts.
        total: the number of all stages.
        weight_gradients: called after a backward pass of zero_bubble; gives what computes what that has left.
        begins: called before each pass with its kind, the index of the stage and the micro-batch.
    """
    from torch.distributed import pipelining

    def announce(method: Callable[..., Any], kind: str, index: int) -> Callable[..., Any]:
        def call(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            begins(kind, index, micro_batch)
            return method(micro_batch, *args, **kwargs)

        return call

    def loss_of(output: torch.Tensor, _: None) -> torch.Tensor:
        return output

    made = [
        pipelining.PipelineStage(
            module,
            index,
            total,
            device,
            input_args=given,
            output_args=handed,
            group=group,
            dw_builder=weight_gradients if name == "zero_bubble" else None,
        )
        for module, (index, given, handed) in stages
    ]
    for stage in made:
        _receive_on_demand(stage)
        for method in ("forward", "backward", "backward_weight"):
            original = getattr(stage, f"{method}_one_chunk")
            setattr(stage, f"{method}_one_chunk", announce(original, method, stage.stage_index))
    classes: dict[str, Any] = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    }
    single = name in ("gpipe", "1f1b")
    schedule = classes[name](made[0] if single else made, micro_batches, loss_fn=loss_of, scale_grads=False)
    schedule.of_grid = made
    return schedule


def _receive_on_demand(stage: Any) -> None:
    """Let a stage have receive buffers for the micro-batches under way only. torch before 2.15 makes those of all
    micro-batches when a schedule runs first, and keeps them, with the gradients of what was received."""
    from torch.distributed.pipelining import stage as stages

    if hasattr(stages._RecvInfo, "allocate_buffer"):
        return
    tables = {"get_fwd_recv_ops": stage.args_recv_info, "get_bwd_recv_ops": stage.grad_recv_info}
    emptied = False

    def move(table: dict, micro_batch: int, device: torch.device | str) -> None:
        for info in table.get(micro_batch, ()):
            buffer = getattr(info, "buffer", None)  # what the whole model is given comes through none
            if buffer is not None and buffer.device.type != torch.device(device).type:
                info.buffer = torch.empty_like(buffer, device=device).requires_grad_(buffer.requires_grad)

    def release(micro_batch: int) -> None:
        for table in tables.values():
            move(table, micro_batch, "meta")

    def with_room(method: Callable[[int], Any], table: dict) -> Callable[[int], Any]:
        def call(micro_batch: int) -> Any:
            nonlocal emptied
            if not emptied:
                emptied = True
                for each in range(stage.chunks):
                    release(each)
            move(table, micro_batch, stage.device)
            return method(micro_batch)

        return call

    for name, table in tables.items():
        setattr(stage, name, with_room(getattr(stage, name), table))
    backward = stage.backward_one_chunk

    def backward_and_release(micro_batch: int, *args: Any, **kwargs: Any) -> None:
        backward(micro_batch, *args, **kwargs)
        release(micro_batch)  # what is sent on of it is held by `bwd_cache`

    stage.backward_one_chunk = backward_and_release


class _Messages(list[torch.distributed.Work]):
    """Messages under way, with what they send and receive, until the wait. A schedule lets go of what it has sent once
    a backward pass has used it, which may be before it waits."""

    def __init__(self, works: Sequence[torch.distributed.Work], tensors: list[torch.Tensor]) -> None:
        super().__init__(works)
        self.tensors = tensors


def run_schedule(
    schedule: Any, micro_batches: int, waiting: Callable[[], contextlib.AbstractContextManager]
) -> list[torch.Tensor]:
    """Run it; modules are called with `micro_batch`. Returns the losses where the last stage is.

    Args:
        waiting: what stands around waits for messages of other stages.
    """
    from torch.distributed.pipelining import schedules

    begin, wait = schedules._batch_p2p, schedules._wait_batch_p2p

    def begin_and_hold(ops: list[torch.distributed.P2POp], desc: str | None = None) -> _Messages:
        return _Messages(begin(ops, desc), [op.tensor for op in ops])

    def wait_inside(work: list[torch.distributed.Work]) -> None:
        with waiting():
            wait(work)
        if isinstance(work, _Messages):
            work.tensors.clear()

    losses: list[torch.Tensor] = []
    for stage in schedule.of_grid:
        stage.clear_runtime_states()
        stage.has_backward = True
    calls = [{"micro_batch": number} for number in range(micro_batches)]
    with replace_attributes({(schedules, "_batch_p2p"): begin_and_hold, (schedules, "_wait_batch_p2p"): wait_inside}):
        schedule._step_microbatches([()] * micro_batches, calls, [None] * micro_batches, losses, return_outputs=False)
    return losses
