"""What the model says: log-probabilities and first choices in one teacher-forced pass, and greedy continuations.

    position      p0 p1 ... pP-1 | s0 s1 ... sS-1
    fed           p0 p1 ... pP-1   s0 s1 ... sS-2
    scored                         s0 s1 ... sS-1      the logits at the place before predict each of them

Greedy decoding gives s0 ... sS-1 if and only if each is the first choice here, so one pass answers for all samples
that are extracted, and decoding starts at the first miss for those that are not.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from hf_axonn_eval.division import Division
from hf_axonn_eval.samples import Sample


_POSITIONS_AT_ONCE = 128  # bounds the float32 copy of the logits


class Score(NamedTuple):
    """Per suffix token: log P(token | true tokens before it), in nats, and the model's first choice there."""

    logprobs: list[float]
    choices: list[int]


class DocumentNLL(NamedTuple):
    """Total negative log-likelihood in nats, and over how many tokens."""

    nll: float
    tokens: int

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens


@torch.no_grad()
def score_suffixes(model, batch: Sequence[Sample]) -> list[Score]:
    """Score the suffixes of samples that all have one prefix length and one suffix length.

    One forward pass; on a parallelized model collective over its x, y and z.

    Raises:
        ValueError: the model answers with NaN.
    """
    keep = len(batch[0].suffix)
    tokens = torch.tensor([sample.prefix + sample.suffix for sample in batch], device=_device(model))
    logits = _last_logits(model, tokens[:, :-1], keep=keep)
    logprobs, choices = score_tokens(logits, tokens[:, -keep:])
    if logprobs.isnan().any():
        raise ValueError(
            "the model's log-probabilities are not numbers (NaN). Its weights are damaged, or do not fit into the "
            "dtype: try --dtype float32."
        )
    return [Score(*score) for score in zip(logprobs.tolist(), choices.tolist(), strict=True)]


def score_tokens(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and the argmax beside it.

    Args:
        logits: [B, T, V]; float64 stays, everything else is computed in float32.
        targets: [B, T] ids.
    Returns:
        log-probabilities [B, T], in nats, and argmax ids [B, T].
    """
    logprobs, choices = [], []
    for some, wanted in zip(
        logits.split(_POSITIONS_AT_ONCE, dim=1), targets.split(_POSITIONS_AT_ONCE, dim=1), strict=True
    ):
        some = some.to(torch.promote_types(some.dtype, torch.float32))
        logprobs.append(some.gather(-1, wanted[..., None])[..., 0] - some.logsumexp(-1))
        choices.append(some.argmax(-1))
    return torch.cat(logprobs, dim=1), torch.cat(choices, dim=1)


@torch.no_grad()
def continue_greedily(model, prompts: Sequence[Sequence[int]], *, steps: int) -> list[list[int]]:
    """`steps` greedy tokens after each prompt, and nothing but the model's own first choices.

    Nothing ends a row early and nothing is penalized or suppressed, whatever the model's generation config says: the
    question is what the model holds, not how it is usually sampled. One `generate` call; on a parallelized model
    collective over its x, y and z, so all of these ranks must ask for the same number of steps.

    Args:
        prompts: token ids, of any lengths; they are padded on the left.
        steps: new tokens for every row.
    """
    from transformers import GenerationConfig

    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=_device(model))
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=tokens.device)
    config = GenerationConfig(do_sample=False, max_new_tokens=steps, pad_token_id=0)
    with _neutral_generation_config(model):
        output = model.generate(input_ids=tokens, attention_mask=mask, generation_config=config)
    return output[:, width:].tolist()


def document_nll(
    model, token_lists: Sequence[Sequence[int]], *, batch_size: int = 1, progress: bool = False
) -> DocumentNLL:
    """Loss on whole documents: the sum over all their tokens but each first one, and how many these are.

    The batches are dealt to the (data, z) coordinates; the totals come back on every rank. Collective over the world.

    Args:
        token_lists: documents in token ids, two tokens or more, not longer than the model's window.
        batch_size: documents in a forward pass; shorter ones are padded on the right.
        progress: show a progress bar on rank 0.
    Raises:
        ValueError: a document of fewer than two tokens or longer than the window, an id outside the vocabulary, or no
            document at all.
    """
    if not token_lists or min(map(len, token_lists)) < 2:
        raise ValueError("document_nll needs one or more documents of at least 2 tokens each.")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but it must be at least 1.")
    check_fits(model, longest=max(map(len, token_lists)), largest_id=max(map(max, token_lists)))
    division = Division.of(model)
    by_length = sorted(token_lists, key=len)
    batches = [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)]
    nll, tokens = 0.0, 0
    rounds = division.rounds(batches)
    with evaluating(model), torch.no_grad():
        hidden = not progress or division.rank != 0
        for batch, counts in tqdm(rounds, total=-(-len(batches) // division.count), unit="batch", disable=hidden):
            width = max(map(len, batch))
            ids = torch.tensor([list(row) + [0] * (width - len(row)) for row in batch], device=_device(model))
            lengths = torch.tensor([len(row) for row in batch], device=ids.device)
            mask = torch.arange(width, device=ids.device) < lengths[:, None]
            logits = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1].long(), use_cache=False).logits
            logprobs, _ = score_tokens(logits, ids[:, 1:])
            if counts:
                nll -= logprobs.double()[mask[:, 1:]].sum().item()
                tokens += int(mask[:, 1:].sum())
    total_nll, total_tokens = division.total([nll, tokens])
    return DocumentNLL(total_nll, int(total_tokens))


def check_fits(model, *, longest: int, largest_id: int) -> None:
    """Raise unless sequences of `longest` tokens with ids up to `largest_id` can be fed to the model.

    Raises:
        ValueError: longer than max_position_embeddings, or an id outside the vocabulary.
    """
    config = model.config.get_text_config()
    window = getattr(config, "max_position_embeddings", None)
    if window is not None and longest > window:
        raise ValueError(
            f"a sequence has {longest} tokens, but the model's window is {window} (max_position_embeddings): use "
            "shorter prefixes and suffixes, or cut the documents."
        )
    if largest_id >= config.vocab_size:
        raise ValueError(
            f"there is a token id {largest_id}, but the model's vocabulary has {config.vocab_size} entries: the ids "
            "come from another tokenizer. Build the samples with the tokenizer of this model."
        )


@contextlib.contextmanager
def evaluating(model) -> Iterator[None]:
    """The model in eval mode; afterwards in the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _last_logits(model, tokens: Tensor, *, keep: int) -> Tensor:
    """Logits [B, keep, V] at the last `keep` positions of `tokens` [B, T]; only these are computed where possible."""
    accepted = inspect.signature(_core(model).forward).parameters
    options = {"logits_to_keep": keep} if "logits_to_keep" in accepted else {}
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **options).logits
    return logits[:, -keep:]


def _core(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT wraps the model


def _device(model) -> torch.device:
    return next(model.parameters()).device


@contextlib.contextmanager
def _neutral_generation_config(model) -> Iterator[None]:
    """Take the model's own generation config away.

    `generate` fills every field that its caller left at None from it: an EOS to stop at, a penalty, a list of
    suppressed tokens. None of them can be undone from outside.
    """
    from transformers import GenerationConfig

    owners = list(dict.fromkeys([model, _core(model)]))
    kept = [owner.generation_config for owner in owners]
    for owner in owners:
        owner.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for owner, config in zip(owners, kept, strict=True):
            owner.generation_config = config
