"""What the tests of hf_axonn_eval share: a real small tokenizer, real texts, and a tiny model that knows some of them.

The texts are the Python language reference that comes with every Python (pydoc_data.topics).
"""

import copy
import functools
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_axonn_eval import SampleResult, build_samples


PREFIX, SUFFIX = 12, 12
LEARNT = 6
# Charts are written with one decimal: half of a tenth, and the rounding of what a number is compared with.
TENTH = 0.051


@functools.cache
def topics_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 800 tokens, trained on the reference."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)][:20], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@functools.cache
def documents() -> tuple[dict, ...]:
    """Twelve topics with different beginnings; the first LEARNT of them are in bucket 40, the others in bucket 0."""
    long = [name for name in sorted(topics) if len(topics[name]) > 1000]
    different = {topics[name][:12]: name for name in long}
    names = sorted(different.values())[: 2 * LEARNT]
    return tuple(
        {"id": name, "text": topics[name], "bucket": 40 if place < LEARNT else 0} for place, name in enumerate(names)
    )


@functools.cache
def samples() -> tuple:
    """One sample a document."""
    return tuple(build_samples(documents(), tokenizer=topics_tokenizer(), prefix_length=PREFIX, suffix_length=SUFFIX))


def tiny_llama(*, seed: int = 0, **sizes: int) -> LlamaForCausalLM:
    """A Llama with random weights, two layers, grouped-query attention."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 48, "intermediate_size": 96} | sizes
    config = LlamaConfig(
        vocab_size=len(topics_tokenizer()),
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        **sizes,
    )
    return LlamaForCausalLM(config).eval()


def tiny_gpt2(*, seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 with random weights: learned positions, which padding would shift if it were done wrong."""
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=len(topics_tokenizer()), n_positions=64, n_embd=48, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config).eval()


@functools.cache
def _trained_llama() -> LlamaForCausalLM:
    model = tiny_llama().train()
    known = [sample for sample in samples() if sample.bucket]
    tokens = torch.tensor([sample.prefix + sample.suffix for sample in known])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(60):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def trained_llama() -> LlamaForCausalLM:
    """A `tiny_llama` that has learnt the samples of bucket 40 by heart, and nothing else. A copy for each caller."""
    return copy.deepcopy(_trained_llama())


def result(sample_id: str, **changes) -> SampleResult:
    """A result of two tokens with plausible numbers, `changes` apart."""
    fields = {
        "sample_id": sample_id,
        "document_id": sample_id,
        "bucket": 0,
        "offset": 0,
        "prefix_length": 2,
        "suffix_length": 2,
        "exact_match": False,
        "token_accuracy": 0.5,
        "divergence_point": 1,
        "extraction_strength": 0.0,
        "logprob": -1.5,
        "logprobs": [-0.5, -1.0],
        "hits": [True, False],
    }
    return SampleResult(**{**fields, **changes})
