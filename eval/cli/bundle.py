"""The commands `bundle` and `verify`: numbers for an auditor, and what the auditor makes of them."""

import argparse
import os
from pathlib import Path

from hf_axonn_eval.cli.common import at_least_one, command, read_grid, run_name, say, share


def add(commands) -> None:
    """Say what the commands take."""
    add = command(commands, "bundle", "pack the numbers of runs for an auditor, without texts; sign them", run_bundle)
    add(
        "runs",
        nargs="+",
        reads="run",
        metavar="RUN",
        help="outputs of `extract`, DIR or NAME=DIR, all of the same samples",
    )
    add("--samples", required=True, reads="samples", metavar="FILE", help="what the runs were asked")
    add("--output", required=True, writes="bundle", metavar="FILE", help="the bundle, a tar")
    add(
        "--key",
        required=True,
        reads="key",
        metavar="FILE",
        help="secret of the hashes, which stays with you; made if not there",
    )
    add("--sign", metavar="SSH_KEY", help="sign the bundle: ssh-keygen writes a .sig beside it")
    add("--base", metavar="NAME", help="run that the others are compared with (default: base, or the first)")
    add("--lengths", type=at_least_one, nargs="+", default=(), metavar="N", help="also verbatim for suffixes cut to N")
    add("--confidence", type=share, metavar="P", help="of the intervals (default: as in the runs)")
    add("--document_ids", action="store_true", help="show ids of documents and samples, in place of keyed hashes")

    add = command(commands, "verify", "check a bundle: exit code 1 if anything in it contradicts", run_verify)
    add("bundle", reads="bundle", metavar="BUNDLE", help="what `bundle` wrote; its signature is looked for beside it")
    add("--signers", metavar="FILE", help="allowed signers, as of `ssh-keygen -Y verify`")
    add("--samples", reads="samples", metavar="FILE", help="the samples, to check that they are the ones; needs --key")
    add("--key", reads="key", metavar="FILE", help="the owner's key")
    add(
        "--model",
        reads="model",
        metavar="DIR",
        help="the model, to check its fingerprint and ask it again; needs --samples, --key",
    )
    add("--tokenizer", reads="tokenizer", metavar="DIR", help="if it is not beside the model")
    add("--grid", metavar="SIZES", help="data=1,z=2,y=1,x=2 (default: axonn_config of accelerate launch, else none)")
    add("--again", type=at_least_one, default=32, metavar="N", help="samples that the model is asked (default 32)")
    add("--trust_remote_code", action="store_true", help="execute code that comes with the model")
    add("--output", writes="checks", metavar="FILE", help="also write what came out, as JSON")


def run_bundle(arguments: argparse.Namespace) -> None:
    """Write the bundle, and sign it if asked."""
    from hf_axonn_eval.bundle.keys import make_key, read_key
    from hf_axonn_eval.bundle.pack import write_bundle
    from hf_axonn_eval.bundle.signature import sign, signature_file

    runs = _named(arguments.runs)
    key_is_new = not os.path.lexists(arguments.key)
    key = make_key(arguments.key) if key_is_new else read_key(arguments.key)
    try:
        write_bundle(
            runs,
            arguments.samples,
            arguments.output,
            key=key,
            base=arguments.base,
            lengths=arguments.lengths,
            confidence=arguments.confidence,
            document_ids=arguments.document_ids,
        )
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
        again = Again(
            model=arguments.model,
            grid=read_grid(arguments.grid),
            tokenizer=arguments.tokenizer,
            trust_remote_code=arguments.trust_remote_code,
            most=arguments.again,
        )
    checks = verify_bundle(
        arguments.bundle,
        signers=arguments.signers,
        samples=arguments.samples,
        key=read_key(arguments.key) if arguments.key is not None else None,
        again=again,
    )
    if not is_rank_zero():
        return 0
    for table in terminal_checks(checks):
        Console().print(table)
    if arguments.output is not None:
        write_json(
            Path(arguments.output), {"checks": [vars(check) for check in checks], "exit_code": exit_code(checks)}
        )
        say(arguments.output)
    return exit_code(checks)


def _named(words: list[str]) -> dict[str, str]:
    """Runs by name: NAME=DIR, or DIR by its own name."""
    runs: dict[str, str] = {}
    for word in words:
        name, equals, directory = word.partition("=")
        if not equals or "/" in name:
            name, directory = run_name(word), word
        if not name or not directory or name in runs:
            raise ValueError(f"runs are DIR or NAME=DIR, each name once, not {' '.join(words)}.")
        runs[name] = directory
    return runs
