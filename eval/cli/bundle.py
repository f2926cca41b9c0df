"""The commands `bundle` and `verify`: pack numbers for an auditor, and check them."""

import argparse
import os
from pathlib import Path

from hf_axonn_eval.cli.common import at_least_one, command, pick, read_grid, run_name, say


def add(commands) -> None:
    """Add the two commands."""
    add = command(commands, "bundle", "pack the numbers of runs for an auditor, without texts; sign them", run_bundle)
    runs = "outputs of `extract`, DIR or NAME=DIR, all of the same samples"
    add("runs", nargs="+", reads="run", metavar="RUN", help=runs)
    add("--samples", required=True, help="what the runs were asked")
    add("--output", required=True, writes="bundle", help="the bundle, a tar")
    key = "secret of the hashes, which stays with you; made if not there"
    add("--key", required=True, reads="key", help=key)
    add("--sign", metavar="SSH_KEY", help="sign the bundle: ssh-keygen writes a .sig beside it")
    add("--base")
    add("--lengths")
    add("--confidence", default=None, help="of the intervals (default: as in the runs)")
    add("--document_ids", action="store_true", help="show ids of documents and samples, in place of keyed hashes")

    add = command(commands, "verify", "check a bundle: exit code 1 if anything in it contradicts", run_verify)
    add("bundle", reads="bundle", metavar="BUNDLE", help="what `bundle` wrote; its signature is looked for beside it")
    add("--signers", metavar="FILE", help="allowed signers, as of `ssh-keygen -Y verify`")
    add("--samples", needs=("--key",), help="the samples, to check that they are the ones; needs --key")
    add("--key", needs=("--samples",), reads="key", help="the owner's key; needs --samples")
    model = "the model, to check its fingerprint and ask it again; needs --samples, --key"
    add("--model", needs=("--samples",), help=model)
    for option in ("--tokenizer", "--grid", "--trust_remote_code"):
        add(option, needs=("--model",))
    again = "samples that the model is asked (default 32)"
    add("--again", needs=("--model",), type=at_least_one, default=32, help=again)
    add("--output", writes="checks", help="also write what came out, as JSON")


def run_bundle(arguments: argparse.Namespace) -> None:
    """Write the bundle, and sign it if asked."""
    from hf_axonn_eval.bundle.keys import make_key, read_key
    from hf_axonn_eval.bundle.pack import write_bundle
    from hf_axonn_eval.bundle.signature import sign, signature_file

    runs = _name_runs(arguments.runs)
    key_is_new = not os.path.lexists(arguments.key)
    key = make_key(arguments.key) if key_is_new else read_key(arguments.key)
    options = pick(arguments, "base", "lengths", "confidence", "document_ids")
    try:
        write_bundle(runs, arguments.samples, arguments.output, key=key, **options)
    except BaseException:
        if key_is_new:
            os.unlink(arguments.key)  # no bundle has it
        raise
    signature_file(arguments.output).unlink(missing_ok=True)  # it was of the bundle that was here before
    say(arguments.output)
    if arguments.sign is not None:
        say(sign(arguments.output, arguments.sign))
    else:
        say("NOT SIGNED: who gets this bundle cannot know whose it is. --sign SSH_KEY signs it.")
    made = "new key" if key_is_new else "key"
    say(f"{made}: {arguments.key}. Keep it: no sample can be shown without it, and who has it can test guesses.")


def run_verify(arguments: argparse.Namespace) -> int:
    """Show what was checked; 1 if anything contradicts."""
    from rich.console import Console

    from hf_axonn_eval.bundle.checks import exit_code, terminal_checks
    from hf_axonn_eval.bundle.keys import read_key
    from hf_axonn_eval.bundle.rerun import Again
    from hf_axonn_eval.bundle.verify import is_rank_zero, verify_bundle
    from hf_axonn_eval.data.jsonl import write_json

    again = None
    if arguments.model is not None:
        options = pick(arguments, "model", "tokenizer", "trust_remote_code")
        again = Again(grid=read_grid(arguments.grid), most=arguments.again, **options)
    key = read_key(arguments.key) if arguments.key is not None else None
    checks = verify_bundle(arguments.bundle, key=key, again=again, **pick(arguments, "signers", "samples"))
    if not is_rank_zero():
        return 0
    for table in terminal_checks(checks):
        Console().print(table)
    if arguments.output is not None:
        records = [check.record() for check in checks]
        write_json(Path(arguments.output), {"checks": records, "exit_code": exit_code(checks)})
        say(arguments.output)
    return exit_code(checks)


def _name_runs(words: list[str]) -> dict[str, str]:
    """Return directories of runs by name: NAME=DIR, or DIR by its own name."""
    runs: dict[str, str] = {}
    for word in words:
        name, equals, directory = word.partition("=")
        if not equals or "/" in name:
            name, directory = run_name(word), word
        if not name or not directory or name in runs:
            raise ValueError(f"runs are DIR or NAME=DIR, each name once, not {' '.join(words)}.")
        runs[name] = directory
    return runs
