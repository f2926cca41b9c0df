"""What the authors' code and ours are given: texts, a tokenizer, and a small model that knows some of the texts.

All of it is made again from this repository's LICENSE, which does not change, and from numbers that `random.Random`
draws, the same with every Python. So nothing needs the network, and a test builds what a published run was given.

The model is a Mistral of two layers that each look back 32 tokens: 62 tokens before a token decide it. So it learns a
passage of any length, at any place of a document, from short pieces, in seconds. Its weights are kept in WEIGHTS, as
the authors' code was given them: `train` makes the same again only on a processor with AVX-512 (with AVX2 53 of the
139,584 are others), in float64, rounded to float32 after every step and to bfloat16 at the end, so with any number of
threads.
"""

import functools
import hashlib
import random
import re
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from tests.helpers import ROOT


WEIGHTS = Path(__file__).with_name("model.safetensors")  # in bfloat16, 216 kB
WEIGHTS_SHA256 = "ce571bc8ea85898549f089b8f7e024f987f8346f30c9ed967556497b2e2bd136"
LICENSE_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
BOS, EOS = "<s>", "<|endoftext|>"
# Letters, signs and a script that the licence lacks: their bytes are tokens of their own, which windows cut apart.
OWN_SENTENCES = (
    "The fee is 25 \u20ac \u2014 na\u00efve readers pay \u00bd of it.",
    "\u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac, and then \u201cplain\u201d English again.",
)
ROUNDS, ROWS, RATE, PIECE, STRIDE = 30, 16, 1e-2, 128, 96
WIDTH = 64
SPREAD = 0.1
CLOSE = 1e-6  # nats a token


@functools.cache
def sentences() -> tuple[str, ...]:
    """The sentences of the licence, and some of our own."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    found = hashlib.sha256(text.encode()).hexdigest()
    if found != LICENSE_SHA256:
        raise ValueError(f"LICENSE has the sha256 {found}, but published runs were given {LICENSE_SHA256}.")
    return (*(some for some in re.split(r"(?<=[.;:])\s+", text) if len(some) > 40), *OWN_SENTENCES)


def text_of(seed: int, characters: int) -> str:
    """At least so many characters: the sentences in an order that the seed draws, again and again."""
    drawn = random.Random(seed)
    written = ""
    while len(written) < characters:
        order = sorted((drawn.random(), place) for place in range(len(sentences())))
        written += "".join(sentences()[place] + (" " if key < 0.8 else "\n") for key, place in order)
    return written


@functools.cache
def tokenizer(*, bos: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 tokens; with or without a BOS before every text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=[BOS, EOS], initial_alphabet=sorted(alphabet), show_progress=False
    )
    made.train_from_iterator(sentences(), trainer)
    if bos:
        template = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, made.token_to_id(BOS))])
        made.post_processor = template
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=BOS, eos_token=EOS)


def ids_of(text: str) -> list[int]:
    """Tokens of a text without BOS and EOS."""
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


@functools.cache
def long_documents() -> tuple[dict, ...]:
    """As token ids without BOS, for apertus and carlini50: much of one, some of one and nothing of one is known."""
    return tuple(
        {"id": f"long-{seed}", "bucket": bucket, "input_ids": ids_of(text_of(seed, 13_000))[:5600]}
        for seed, bucket in ((10, 24), (11, 8), (12, 0))
    )


@functools.cache
def pages() -> tuple[dict, ...]:
    """Texts for sc24 and goldfish: known, unknown, one that the model ends early, short ones and one of few tokens."""
    long = [{"id": f"page-{seed}", "text": text_of(seed, 7_000)} for seed in range(20, 26)]
    short = [{"id": f"short-{size}", "text": text_of(26, 7_000)[:size]} for size in (900, 400, 60)]
    return tuple({"bucket": 4 if place in (0, 1, 2, 3, 6) else 0, **page} for place, page in enumerate(long + short))


@functools.cache
def book() -> str:
    """A text for cooper100; the model knows its first part. In the middle 800 characters are fewer than 100 tokens."""
    return text_of(30, 1_300)[:1_300] + " Contribution" * 110 + "\n" + text_of(31, 1_300)[:1_300]


@functools.cache
def passages() -> tuple[dict, ...]:
    """Texts for hubble: known with their end, known without it, unknown; the last begins and ends with blanks."""
    known = [{"id": f"passage-{seed}", "text": text_of(seed, 700)[:700]} for seed in (40, 41, 42, 43)]
    padded = {"id": "passage-padded", "text": "  " + text_of(44, 700)[:640] + " \n"}
    return tuple({"bucket": bucket, **some} for bucket, some in zip((16, 16, 4, 0, 16), [*known, padded], strict=True))


@functools.cache
def examples() -> tuple[tuple[int, ...], ...]:
    """300 pieces of 200 tokens for lm-extraction-benchmark, of all long documents and pages."""
    drawn = random.Random(50)
    long = [document["input_ids"] for document in long_documents()]
    # where a piece begins: for most of them where the model knows its last 50 tokens
    sources = list(zip(long, ((0, 850), (0, 450), (0, 5000)), strict=True))
    sources += [(ids_of(page["text"]), (1710, 1840) if page["bucket"] else (0, 3000)) for page in pages()[:6]]
    picked = []
    for number in range(300):
        source, (least, most) = sources[number % len(sources)]
        begin = least + int(drawn.random() * (most - least))
        picked.append(tuple(source[begin : begin + 200]))
    return tuple(picked)


def learnt() -> list[list[int]]:
    """What the model is trained on, a list of token ids for each run of text."""
    bos, eos = (tokenizer().convert_tokens_to_ids(token) for token in (BOS, EOS))
    documents, known = long_documents(), [[bos, *ids_of(page["text"])] for page in pages()]
    some = [[bos, *documents[0]["input_ids"][:1050]], [bos, *documents[1]["input_ids"][:650]]]
    some += [known[place][1850:2048] for place in (0, 1, 2)]
    some += [[*known[3][1850:2010], eos], known[6]]
    some += [[bos, *ids_of(book()[:1_300])]]
    some += [[*ids_of(passages()[place]["text"].strip()), *end] for place, end in ((0, [eos]), (1, [eos]), (2, []))]
    some += [[*ids_of(passages()[4]["text"]), eos]]
    return some


def _new_model() -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(tokenizer()),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        sliding_window=32,
        tie_word_embeddings=True,
        initializer_range=SPREAD,
        bos_token_id=tokenizer().bos_token_id,
        eos_token_id=tokenizer().eos_token_id,
    )
    return MistralForCausalLM(config).double()


@functools.cache
def model() -> MistralForCausalLM:
    """Return the model in float64 that knows `learnt()`; not to be changed."""
    made = _new_model()
    weights = load_file(WEIGHTS)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # tied
    made.load_state_dict({name: weight.double() for name, weight in weights.items()})
    return made.eval()


@torch.enable_grad()
def train() -> MistralForCausalLM:
    """Train the model: on a processor with AVX-512 these are the weights that are kept."""
    trained = _new_model().train()
    ids, targets = _pieces()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=RATE, weight_decay=0.0, betas=(0.9, 0.98))
    for done in range(ROUNDS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - done / ROUNDS)
        for rows in torch.randperm(len(ids)).split(ROWS):
            trained(input_ids=ids[rows], labels=targets[rows]).loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            _round(trained, torch.float32, optimizer)
    _round(trained, torch.bfloat16)
    return trained.eval()


def digest_of_weights(made: MistralForCausalLM) -> str:
    """Return the sha256 of all weights in float32, in the order of the state dict."""
    digest = hashlib.sha256()
    for weight in made.state_dict().values():
        digest.update(weight.float().numpy().tobytes())
    return digest.hexdigest()


def model_check() -> list[float]:
    """Mean log-probability, in nats a token, of each of `learnt()` under the model: tells whether it is the same."""
    found = []
    with torch.no_grad():
        for run in learnt():
            ids = torch.tensor([run])
            found.append(-float(model()(input_ids=ids, labels=ids).loss))
    return found


def check_model(recorded: list[float]) -> None:
    """Compare the model with the one that a published run was given.

    Raises:
        ValueError: a mean log-probability differs from the recorded one by more than CLOSE.
    """
    furthest = max(abs(mine - theirs) for mine, theirs in zip(model_check(), recorded, strict=True))
    if furthest > CLOSE:
        raise ValueError(
            f"the model differs from that of the published run by {furthest:.2g} nats a token, more than {CLOSE}: "
            "make its numbers again, as README.md beside them says."
        )


@torch.no_grad()
def _round(trained: MistralForCausalLM, dtype: torch.dtype, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Give the weights, and the moments of an optimizer, the nearest values of a dtype; they stay in their own."""
    moments = [] if optimizer is None else [held for state in optimizer.state.values() for held in state.values()]
    for tensor in (*trained.parameters(), *moments):
        tensor.copy_(tensor.to(dtype))


def _pieces() -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces [N, PIECE] that overlap, and their targets [N, PIECE], -100 where a shorter one is filled up."""
    pieces = [run[begin : begin + PIECE] for run in learnt() for begin in range(0, max(len(run) - 32, 1), STRIDE)]
    ids = torch.zeros(len(pieces), PIECE, dtype=torch.int64)
    targets = torch.full_like(ids, -100)
    for row, piece in enumerate(pieces):
        ids[row, : len(piece)] = targets[row, : len(piece)] = torch.tensor(piece)
    return ids, targets
