"""The command `export`: samples as tasks of other tools."""

import argparse
import re
from pathlib import Path

from hf_axonn_eval.cli.common import command, load_tokenizer, say


_FORMATS = ("lm-eval", "open-unlearning")


def add(commands) -> None:
    """Add the command."""
    add = command(commands, "export", "samples as tasks of lm-evaluation-harness or OpenUnlearning", run)
    add("--samples", required=True)
    add("--tokenizer", required=True, help="the tokenizer of the samples, to write them as texts")
    add("--trust_remote_code")
    add("--format", required=True, choices=_FORMATS, help="the tool")
    add("--output", required=True, writes="export", help="directory for the tasks and their data")
    add("--name", metavar="NAME", help="of the tasks (default: that of the samples file)")


def run(arguments: argparse.Namespace) -> None:
    """Write tasks, their data, and export.json, which says what was left out."""
    name = re.sub(r"\W+", "_", arguments.name or Path(arguments.samples).stem, flags=re.ASCII).strip("_")
    if not name:
        raise ValueError("--name needs letters, digits or underscores: it becomes the name of a task.")
    from hf_axonn_eval.data.jsonl import write_json
    from hf_axonn_eval.data.samples import SampleFile, samples_digest, tokenizer_of
    from hf_axonn_eval.data.tokenizer_identity import check_same, tokenizer_identity
    from hf_axonn_eval.export.texts import Tally

    samples, directory = SampleFile(arguments.samples), Path(arguments.output)
    tokenizer, tally = load_tokenizer(arguments.tokenizer, arguments), Tally()
    identity = tokenizer_identity(tokenizer)
    checked = check_same(identity, tokenizer_of(samples))
    if arguments.format == "lm-eval":
        from hf_axonn_eval.export.lm_eval import MODEL_ARGUMENTS, export_lm_eval

        tasks = export_lm_eval(samples, tokenizer, directory, name=name, tally=tally)
        use = f"cd {directory} && lm_eval --include_path . --tasks {name} --model hf --model_args pretrained=MODEL,"
        use += MODEL_ARGUMENTS
    else:
        from hf_axonn_eval.export.open_unlearning import export_open_unlearning

        tasks = export_open_unlearning(samples, tokenizer, directory, name=name, tally=tally)
        use = f"in a clone, with configs and data copied into it: python src/eval.py eval={tasks[0]} task_name={name}"
    write_json(
        directory / "export.json",
        {
            "format": arguments.format,
            "tasks": tasks,
            "samples": len(samples),
            "samples_sha256": samples_digest(samples),
            "exported": tally.exported,
            "left_out": tally.left_out,
            "tokenizer": {**(identity or {}), "checked": checked},
            "use": use,
        },
    )
    say(f"{tally.exported} of {len(samples)} samples in {len(tasks)} tasks: {directory}")
    for reason, number in tally.left_out.items():
        if number:
            say(f"  left out, {reason}: {number}")
    say(f"  {use}")
