"""Liu, Evans and Xiong 2026 on a small model: extraction cost and greedy rate of all windows of some texts.

    python -m tests.benchmarks.eval.published.inextractability CHECKOUT

Emory-AIMS/Inextractability, whose package `inextractability` needs nothing but torch.
"""

import sys

from tests.benchmarks.eval.published.common import about, arguments, digest, write
from tests.eval.published import inputs


LENGTHS, THRESHOLDS = (20, 150), (20, 512)  # l, and m: the default, and all tokens of the vocabulary


def main() -> None:
    """Ask for the bits of every text at every length and threshold, and for the greedy rate."""
    options = arguments(__doc__)
    sys.path.insert(0, str(options.checkout))
    from inextractability import estimate_extraction_cost, estimate_greedy_rate

    model, tokenizer, texts = inputs.model(), inputs.tokenizer(), texts_asked()
    outputs: dict = {"texts": [digest(tokenizer.encode(text, add_special_tokens=False)) for text in texts]}
    for length in LENGTHS:
        for threshold in THRESHOLDS:
            found = estimate_extraction_cost(model, tokenizer, texts, l=length, m=threshold)
            key = f"cost {length} {threshold}"
            outputs[key] = [found["b"], found["p_star"], found["worst_seq"], *found["worst_span"]]
            outputs[f"{key} bits"] = [one["b"] for one in found["per_sequence"]]
            outputs[f"{key} spans"] = [list(one["worst_span"]) for one in found["per_sequence"]]
        rate = estimate_greedy_rate(model, tokenizer, texts, l=length)
        outputs[f"greedy {length}"] = [rate["eta"], rate["n_extractable"], rate["n_total"]]
    files = ["inextractability/core.py", "inextractability/utils.py", "inextractability/__init__.py"]
    head = about(options.checkout, "Emory-AIMS/Inextractability", files, stands_in=["texts and model: inputs.py"])
    write(options.output, "inextractability", head, outputs)


def texts_asked() -> list[str]:
    """Return texts that the model knows and texts that it does not."""
    return [document["text"][:900] for document in (*inputs.passages(), *inputs.pages()[4:6])]


if __name__ == "__main__":
    main()
