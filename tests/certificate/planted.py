"""Errors that a framework might make, put into the ranks of a certificate's run; the product knows nothing of them.

`worker JOB` is run in a fork (`runs.py`), after one of these functions has replaced something in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hf_axonn.certificate import worker
from hf_axonn.engine.dtensors import local
from hf_axonn.engine.state import parallel_state
from hf_axonn.layers import moe, token_routes
from hf_axonn.layers.moe import MovingExperts
from hf_axonn.losses.vocab_parallel import ShardedCausalLMLoss
from hf_axonn.parallel import context_parallel


def forgotten_average() -> None:
    """Every rank of DistributedDataParallel goes on with its own gradients."""
    made = DistributedDataParallel.__init__

    def keep(_state, bucket):  # torch looks at annotations, which are texts here
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def make(self, *args, **kwargs) -> None:
        made(self, *args, **kwargs)
        self.register_comm_hook(None, keep)

    DistributedDataParallel.__init__ = make


def scaled_loss() -> None:
    """Trainer's loss is multiplied by the number of processes."""
    stock = transformers.Trainer.compute_loss

    def scaled(self, *args, **kwargs):
        found = stock(self, *args, **kwargs)
        return (found[0] * 2, *found[1:]) if isinstance(found, tuple) else found * 2

    transformers.Trainer.compute_loss = scaled


def duplicated_sample() -> None:
    """Rank 1 has its second row of a batch twice, and not its first one."""
    stock = worker.collate
    if dist.get_rank() == 1:
        worker.collate = lambda rows: stock([rows[-1], *rows[1:]])


def duplicated_index() -> None:
    """The loader that Accelerate has made for rank 1 gives the last row of a batch twice, and not its first one."""
    stock = BatchSamplerShard.__iter__
    if dist.get_rank() == 1:
        BatchSamplerShard.__iter__ = lambda self: ([batch[-1], *batch[1:]] for batch in stock(self))


def unclipped_rank() -> None:
    """Rank 1 computes the norm, and leaves its gradients as they are."""
    stock = Accelerator.clip_grad_norm_
    if dist.get_rank() == 1:
        Accelerator.clip_grad_norm_ = lambda self, parameters, *_, **__: stock(self, parameters, float("inf"))


def dropped_bias() -> None:
    """The bias of the first attention's products has no gradient."""
    stock = transformers.Trainer.training_step

    def step(self, model, *args, **kwargs):
        loss = stock(self, model, *args, **kwargs)
        for name, parameter in model.named_parameters():
            if name.endswith("h.0.attn.c_attn.bias"):
                parameter.grad = None
        return loss

    transformers.Trainer.training_step = step


def means_of_means() -> None:
    """Trainer divides by the tokens of a rank, and not by those of all."""
    stock = transformers.Trainer._get_num_items_in_batch

    def own(self, *args, **kwargs):
        self.args.average_tokens_across_devices = False
        try:
            return stock(self, *args, **kwargs)
        finally:
            self.args.average_tokens_across_devices = True

    transformers.Trainer._get_num_items_in_batch = own


def unprepared_loader() -> None:
    """Trainer's loader of training is not given to Accelerate."""
    stock = transformers.Trainer._get_dataloader

    def bare(self, *args, is_training=False, **kwargs):
        made = stock(self, *args, is_training=is_training, **kwargs)
        if not is_training:
            return made
        return torch.utils.data.DataLoader(self.train_dataset, self._train_batch_size, collate_fn=self.data_collator)

    transformers.Trainer._get_dataloader = bare


def _of_inputs(change) -> None:
    """Rank 1 computes its losses of other inputs than its loader has given."""
    stock = transformers.Trainer.compute_loss

    def changed(self, model, inputs, *args, **kwargs):
        return stock(self, model, change(dict(inputs)), *args, **kwargs)

    if dist.get_rank() == 1:
        transformers.Trainer.compute_loss = changed


def labels_of_one_rank() -> None:
    """Rank 1 learns to predict the second token after each."""
    _of_inputs(lambda inputs: {**inputs, "labels": inputs["labels"].roll(1, 1)})


def positions_of_one_rank() -> None:
    """Rank 1 counts positions from 1."""

    def shifted(inputs):
        places = torch.arange(1, inputs["input_ids"].shape[1] + 1).expand_as(inputs["input_ids"])
        return {**inputs, "position_ids": places}

    _of_inputs(shifted)


def _of_gradients(change) -> None:
    """Something happens to the model's gradients after each backward pass of Trainer."""
    stock = transformers.Trainer.training_step

    def step(self, model, *args, **kwargs):
        loss = stock(self, model, *args, **kwargs)
        change(self, model)
        return loss

    transformers.Trainer.training_step = step


def left_out_micro_batch() -> None:
    """The first micro-batch of rank 1 in each step is not counted."""
    stock = transformers.Trainer.compute_loss
    seen = []

    def counted(self, *args, **kwargs):
        loss = stock(self, *args, **kwargs)
        seen.append(loss)
        return loss if len(seen) % self.args.gradient_accumulation_steps == 0 or isinstance(loss, tuple) else loss * 0

    if dist.get_rank() == 1:
        transformers.Trainer.compute_loss = counted


def kept_gradient() -> None:
    """Nothing sets gradients to zero after a step."""
    transformers.GPT2LMHeadModel.zero_grad = lambda self, *_, **__: None
    DistributedDataParallel.zero_grad = lambda self, *_, **__: None
    AcceleratedOptimizer.zero_grad = lambda self, *_, **__: None


def scaled_gradient() -> None:
    """The gradient of the embeddings is added up over the ranks and not averaged."""

    def double(trainer, model):
        if trainer.accelerator.sync_gradients:
            model.module.transformer.wpe.weight.grad.mul_(2)

    _of_gradients(double)


def clipped_before_averaging() -> None:
    """Every rank clips its own gradients, then they are averaged."""
    stock = transformers.Trainer.training_step

    def step(self, model, *args, **kwargs):
        with model.no_sync():
            loss = stock(self, model, *args, **kwargs)
        if self.accelerator.sync_gradients:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        return loss

    transformers.Trainer.training_step = step


def rounded_average() -> None:
    """DistributedDataParallel averages gradients in bf16."""
    made = DistributedDataParallel.__init__

    def average(_state, bucket):  # torch looks at annotations, which are texts here
        short = bucket.buffer().bfloat16()
        dist.all_reduce(short)
        future = torch.futures.Future()
        future.set_result(bucket.buffer().copy_(short / dist.get_world_size()))
        return future

    def make(self, *args, **kwargs) -> None:
        made(self, *args, **kwargs)
        self.register_comm_hook(None, average)

    DistributedDataParallel.__init__ = make


def norm_of_some_gradients() -> None:
    """Gradients are clipped by the norm of every second one."""
    stock = Accelerator.clip_grad_norm_
    Accelerator.clip_grad_norm_ = lambda self, parameters, *args: stock(self, [*parameters][::2], *args)


def schedule_that_moves_twice() -> None:
    """A schedule moves on twice in a step."""
    stock = AcceleratedScheduler.step
    AcceleratedScheduler.step = lambda self, *args, **options: [stock(self, *args, **options) for _ in range(2)]


def optimizer_that_stands_still() -> None:
    """Optimizers that Accelerate has prepared make no step."""
    AcceleratedOptimizer.step = lambda self, *_: None


def other_rate_of_a_rank() -> None:
    """Rank 1 steps with twice the learning rate."""
    stock = torch.optim.SGD.step

    def step(self, *args, **kwargs):
        for group in self.param_groups:
            group["lr"] *= 2
        try:
            return stock(self, *args, **kwargs)
        finally:
            for group in self.param_groups:
                group["lr"] /= 2

    if dist.get_rank() == 1:
        torch.optim.SGD.step = step


def step_left_out() -> None:
    """Rank 1 makes no step of its optimizer."""
    if dist.get_rank() == 1:
        torch.optim.SGD.step = lambda self, *_, **__: None


def other_weights_of_a_rank() -> None:
    """Rank 1 begins with other weights, after DistributedDataParallel has made them the same."""
    made = DistributedDataParallel.__init__

    def make(self, *args, **kwargs) -> None:
        made(self, *args, **kwargs)
        with torch.no_grad():
            next(self.parameters()).mul_(1.01)

    if dist.get_rank() == 1:
        DistributedDataParallel.__init__ = make


def saved_too_early() -> None:
    """`save_model` writes the weights with which training began."""
    begin, write = transformers.Trainer.train, transformers.Trainer.save_model
    kept = {}

    def train(self, *args, **kwargs):
        kept.update({name: value.clone() for name, value in self.model.state_dict().items()})
        return begin(self, *args, **kwargs)

    def save(self, *args, **kwargs):
        self.accelerator.unwrap_model(self.model).load_state_dict(kept)
        return write(self, *args, **kwargs)

    transformers.Trainer.train, transformers.Trainer.save_model = train, save


def unreduced_by_deepspeed() -> None:
    """Every rank of ZeRO goes on with its own gradients; only numbers, as the norm, are added up."""
    from deepspeed import comm

    for name in ("all_reduce", "reduce"):
        stock = getattr(comm, name)

        def kept(tensor, *args, stock=stock, **kwargs):
            return stock(tensor, *args, **kwargs) if tensor.numel() == 1 else None

        setattr(comm, name, kept)


def ungathered_by_deepspeed() -> None:
    """No rank of ZeRO-1 or ZeRO-2 gets what the others have made of their parts."""
    from deepspeed.runtime.zero import stage_1_and_2

    stage_1_and_2.all_gather_dp_groups = lambda **_: None


def _deal(dealt: Callable[[int, int], Tensor]) -> None:
    """Let ranks of context number positions in the order `dealt(ranks, positions of a rank)`."""
    stock = context_parallel._rows_of

    def rows_of(*args):
        rows = stock(*args)
        order = dealt(rows.parts, rows.own_length)[: rows.length].clamp(max=rows.length - 1)
        whole, take = rows.position_ids, rows.take
        rows.__dict__["take"] = lambda tensor, fill=0: take(whole[:, order] if tensor is whole else tensor, fill)
        return rows

    context_parallel._rows_of = rows_of


def positions_in_wrong_order() -> None:
    """Ranks of context number their positions as if the parts of a row were dealt from its end."""
    _deal(lambda parts, length: torch.arange(parts * length).view(parts, length).flip(0).flatten())


def stripes_in_wrong_order() -> None:
    """Ranks of context number the second of their stripes as if these were dealt in the order of the ranks."""

    def dealt(parts: int, length: int) -> Tensor:
        first, second = torch.arange(parts * length).view(2, parts, length // 2)
        return torch.cat([first, second.flip(0)]).flatten()

    _deal(dealt)


def label_lost_at_the_cut() -> None:
    """Labels are shifted after rows are divided, so that the last position of a rank has nothing to predict."""
    stock = ShardedCausalLMLoss.weighted_nll

    def weighted_nll(self, logits, targets, weights):
        rows = self._divided_rows(logits)
        if rows is not None:
            weights = weights.clone()
            weights.view(rows.batch, -1)[:, rows.stripe - 1 :: rows.stripe] = 0
        return stock(self, logits, targets, weights)

    ShardedCausalLMLoss.weighted_nll = weighted_nll


def document_that_sees_its_neighbour() -> None:
    """Masks are made of whole rows, but without their documents."""
    stock = context_parallel._rows_of
    context_parallel._rows_of = lambda *args: replace(stock(*args), documents=False)


def lost_token() -> None:
    """Lose on the way back what the experts have made of the first token of rank 1."""
    stock = token_routes.Routes.add_up

    def add_up(self, values):
        total = stock(self, values)
        total[:1] = 0
        return total

    if dist.get_rank() == 1:
        token_routes.Routes.add_up = add_up


def weight_applied_twice() -> None:
    """The routing weights are applied where the experts are, and once more."""
    stock = MovingExperts._chosen

    def chosen(self, original, counts, choices, hidden, weights):
        return stock(self, original, counts, choices, hidden, weights * weights)

    MovingExperts._chosen = chosen


def undivided_expert_gradient() -> None:
    """The gradient of an expert, a sum over the rows of all z, is not divided by their number."""
    stock = moe.expert_layout
    moe.expert_layout = lambda *args, **kwargs: replace(stock(*args, **kwargs), summed_over=1)


def experts_mixed_over_z() -> None:
    """Gradients of experts are averaged over z, as if its ranks had the same experts."""
    stock = transformers.Trainer.training_step

    def step(self, model, *args, **kwargs):
        loss = stock(self, model, *args, **kwargs)
        group = parallel_state(model).grid_mesh.group("z")
        for name, parameter in model.named_parameters():
            if "experts" in name:
                gradient = local(parameter.grad)
                dist.all_reduce(gradient, group=group)
                gradient /= group.size()
        return loss

    transformers.Trainer.training_step = step


ERRORS = {
    function.__name__: function
    for function in (
        forgotten_average,
        scaled_loss,
        duplicated_sample,
        duplicated_index,
        unclipped_rank,
        dropped_bias,
        means_of_means,
        unprepared_loader,
        labels_of_one_rank,
        positions_of_one_rank,
        left_out_micro_batch,
        kept_gradient,
        scaled_gradient,
        clipped_before_averaging,
        rounded_average,
        norm_of_some_gradients,
        schedule_that_moves_twice,
        optimizer_that_stands_still,
        other_rate_of_a_rank,
        step_left_out,
        other_weights_of_a_rank,
        saved_too_early,
        unreduced_by_deepspeed,
        ungathered_by_deepspeed,
        positions_in_wrong_order,
        stripes_in_wrong_order,
        label_lost_at_the_cut,
        document_that_sees_its_neighbour,
        lost_token,
        weight_applied_twice,
        undivided_expert_gradient,
        experts_mixed_over_z,
    )
}
