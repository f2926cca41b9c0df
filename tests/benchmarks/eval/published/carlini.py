"""Carlini et al. 2022 on a small model, by the words of its README; a script of the decoding was not published.

    python -m tests.benchmarks.eval.published.carlini CHECKOUT

google-research/google-research, lm_memorization/README.md: prompts of p = 50, 100, ... 450 tokens of sequences of 500;
"All generations were produced by repeatedly choosing the most likely token predicted by the model until the generation
was 50 tokens long." Done with `generate` of Transformers, an EOS banned. CHECKOUT is not read: build_dataset.py only
collects sequences of the Pile.
"""

import torch

from tests.benchmarks.eval.published.common import arguments, digest, versions, write
from tests.eval.published import inputs


LENGTH, SUFFIX, PREFIXES = 500, 50, range(50, 451, 50)


def main() -> None:
    """Ask with every length of prefix and write what came back."""
    options = arguments(__doc__)
    rows = [
        {"document": document["id"], "prefix": prefix, **asked(document["input_ids"][:LENGTH], prefix)}
        for document in inputs.long_documents()
        for prefix in PREFIXES
    ]
    head = {
        "repository": "google-research/google-research",
        "commit": "c300f8d8e4c47e583e203d64bf42e5d0e74552ff",
        "files": ["lm_memorization/README.md"],
        "stands_in": ["everything: the README's words, with `generate` of Transformers"],
        "command": "python -m tests.benchmarks.eval.published.carlini CHECKOUT",
        **versions(),
    }
    write(options.output, "carlini50", head, {key: [row[key] for row in rows] for key in rows[0]})


def asked(sequence: list[int], prefix: int) -> dict:
    """The 50 likeliest tokens after the `prefix` tokens that come before the last 50 of a sequence."""
    prompt, suffix = sequence[LENGTH - SUFFIX - prefix : LENGTH - SUFFIX], sequence[LENGTH - SUFFIX :]
    found = inputs.model().generate(
        torch.tensor([prompt]),
        do_sample=False,
        min_new_tokens=SUFFIX,
        max_new_tokens=SUFFIX,
        pad_token_id=inputs.tokenizer().eos_token_id,
    )
    generated = found[0, prefix:].tolist()
    return {"window": digest([*prompt, *suffix]), "generated": digest(generated), "exact": generated == suffix}


if __name__ == "__main__":
    main()
