"""Detached signatures by OpenSSH's `ssh-keygen -Y` (version 8.2 and later), over the bytes of the bundle."""

import os
import subprocess
from pathlib import Path

from hf_axonn_eval.bundle.checks import Check
from hf_axonn_eval.data.jsonl import replacing


NAMESPACE = "hf-axonn-eval"  # a signature for another purpose, such as a git commit, is none of a bundle
_WHAT = "signature"


def signature_file(bundle: str | os.PathLike[str]) -> Path:
    """Return the file of the signature of a bundle."""
    return Path(bundle).with_name(Path(bundle).name + ".sig")


def sign(bundle: str | os.PathLike[str], key: str | os.PathLike[str]) -> Path:
    """Sign a bundle; ssh-keygen asks for the passphrase of the key, or the agent where `key` is a public key.

    Args:
        bundle: the archive.
        key: an SSH key, as for `ssh-keygen -Y sign -f`.
    Returns:
        The file of the signature, beside the bundle.
    Raises:
        ValueError: there is no ssh-keygen, or it refuses.
    """
    if not Path(key).is_file():
        raise ValueError(f"{key} is not a file: name an SSH key, as ssh-keygen -t ed25519 makes it.")
    done = _ssh_keygen("sign", "-f", str(key), bundle=bundle)
    if done.returncode or not done.stdout:
        raise ValueError(f"ssh-keygen did not sign with {key}: {_messages(done)}")
    with replacing(signature_file(bundle)) as file:
        file.write(done.stdout)
    return signature_file(bundle)


def check_signature(bundle: str | os.PathLike[str], signers: str | os.PathLike[str] | None) -> Check:
    """Check that the signature beside a bundle is of these bytes, and by whom.

    Args:
        bundle: the archive.
        signers: the file of allowed signers (ALLOWED SIGNERS of `man ssh-keygen`); None if the key's owner is unknown.
    Raises:
        ValueError: there is no ssh-keygen, or no such file of signers.
    """
    signature = signature_file(bundle)
    if signers is not None and not Path(signers).is_file():
        raise ValueError(f"{signers} is not a file.")
    if not signature.is_file():
        if signers is not None:
            return Check(_WHAT, "contradicts", f"NOT SIGNED: there is no {signature.name} beside the bundle")
        finding = "NOT SIGNED: anyone can have written this bundle"
        return Check(_WHAT, "unchecked", finding, "a signature: bundle --sign KEY")
    intact = _ssh_keygen("check-novalidate", "-s", str(signature), bundle=bundle)
    if intact.returncode:
        return Check(_WHAT, "contradicts", f"{signature.name} is not of this bundle: {_messages(intact)}")
    by = intact.stdout.decode(errors="replace").strip().rpartition(" with ")[2]
    if signers is None:
        finding = f"of these bytes, but by whom is unknown: {by}"
        return Check(_WHAT, "unchecked", finding, "the owner's public key: --signers FILE")
    found = _ssh_keygen("find-principals", "-s", str(signature), "-f", str(signers), bundle=bundle)
    principals = found.stdout.decode(errors="replace").split()
    if found.returncode or not principals:
        finding = f"{by} is not among the signers in {Path(signers).name}: {_messages(found)}"
        return Check(_WHAT, "contradicts", finding)
    person = principals[0].split(",")[0]
    done = _ssh_keygen("verify", "-s", str(signature), "-f", str(signers), "-I", person, bundle=bundle)
    if done.returncode:
        return Check(_WHAT, "contradicts", f"{by} of {person} may not sign this: {_messages(done)}")
    return Check(_WHAT, "agrees", f"by {person}, {by}")


def _ssh_keygen(action: str, *words: str, bundle: str | os.PathLike[str]) -> subprocess.CompletedProcess[bytes]:
    namespace = () if action == "find-principals" else ("-n", NAMESPACE)
    try:
        with open(bundle, "rb") as content:
            command = ["ssh-keygen", "-Y", action, *words, *namespace]
            return subprocess.run(command, stdin=content, capture_output=True, check=False)
    except FileNotFoundError as error:
        if error.filename != "ssh-keygen":
            raise
        raise ValueError("there is no ssh-keygen here: install OpenSSH (Debian: openssh-client).") from None


def _messages(done: subprocess.CompletedProcess[bytes]) -> str:
    """Join the messages of ssh-keygen in a line."""
    lines = (done.stderr + b"\n" + done.stdout).decode(errors="replace").splitlines()
    messages = [line.strip() for line in lines if line.strip() and "Signing data on" not in line]
    return "; ".join(dict.fromkeys(messages)) or f"exit code {done.returncode}"
