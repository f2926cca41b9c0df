"""Ask several models for the same samples, one after the other.

    python ask.py --samples samples.jsonl --output runs --batch_size 20 --top_k 40 base=model ordinary=checkpoint

gives runs/base and runs/ordinary, each what `hf-axonn-eval extract --model DIR --sampler temperature=1,top_k=40`
writes. One process reads each model whole, also from the shards of a grid: a model that fits is asked faster so than
over the grid that trained it, and to start Python for each takes longer than to ask.
"""

import argparse
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from hf_axonn_eval import SampleFile, Sampler, extract, load_model, read_about
from hf_axonn_eval.data.samples import counts


def main() -> None:
    """Write a run directory for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=DIR", type=_read_name)
    parser.add_argument("--samples", required=True, help="what to ask")
    parser.add_argument("--output", required=True, type=Path, help="directory for the run directories")
    parser.add_argument("--batch_size", required=True, type=int, help="samples in a forward pass")
    parser.add_argument("--top_k", required=True, type=int, help="tokens to draw from, at temperature 1")
    parser.add_argument(
        "--no_generation", action="store_true", help="score alone: whether it is verbatim, and how likely"
    )
    options = parser.parse_args()
    disable_progress_bar()
    samples = SampleFile(options.samples)
    left_out = counts(read_about(options.samples) or {})
    for name, directory in options.models:
        loaded = load_model(directory)
        extract(
            loaded.model,
            loaded.tokenizer,
            samples,
            output=options.output / name,
            model_record=loaded.record,
            batch_size=options.batch_size,
            generate=not options.no_generation,
            sampler=Sampler(temperature=1, top_k=options.top_k),
            left_out=left_out,
        )
        del loaded  # before the next one is read


def _read_name(text: str) -> tuple[str, str]:
    name, _, directory = text.partition("=")
    if not name or not directory:
        raise argparse.ArgumentTypeError(f"{text} is not like NAME=DIR")
    return name, directory


if __name__ == "__main__":
    main()
