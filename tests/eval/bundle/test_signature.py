"""Signatures: whose they are, of which bytes, and for what."""

import shutil
import subprocess

import pytest

from hf_axonn_eval.bundle import signature as module
from hf_axonn_eval.bundle.signature import check_signature, sign, signature_file


@pytest.fixture
def signed(tmp_path, ssh):
    path = tmp_path / "bundle.tar"
    path.write_bytes(b"content")
    assert sign(path, ssh / "owner") == signature_file(path) == tmp_path / "bundle.tar.sig"
    return path


def test_a_signature_of_an_allowed_signer_agrees(signed, ssh):
    check = check_signature(signed, ssh / "signers")
    assert check.state == "agrees" and check.said.startswith("by owner@example.org, ED25519 key SHA256:")


def test_without_signers_it_is_intact_but_of_an_unknown(signed):
    check = check_signature(signed, None)
    assert check.state == "unchecked" and "by whom is unknown: ED25519 key SHA256:" in check.said
    assert check.needs == "the owner's public key: --signers FILE"


def test_other_bytes_contradict_with_and_without_signers(signed, ssh):
    signed.write_bytes(b"Content")
    for signers in (None, ssh / "signers"):
        check = check_signature(signed, signers)
        assert check.state == "contradicts" and "bundle.tar.sig is not of this bundle" in check.said


def test_the_signature_of_another_bundle_contradicts(signed, ssh):
    other = signed.with_name("other.tar")
    other.write_bytes(b"other")
    shutil.copy(sign(other, ssh / "owner"), signature_file(signed))
    assert check_signature(signed, ssh / "signers").state == "contradicts"


def test_a_signature_for_another_purpose_contradicts_and_says_so(signed, ssh):
    command = ["ssh-keygen", "-q", "-Y", "sign", "-n", "git", "-f", str(ssh / "owner")]
    with open(signed, "rb") as content, open(signature_file(signed), "wb") as output:
        subprocess.run(command, stdin=content, stdout=output, stderr=subprocess.DEVNULL, check=True)
    check = check_signature(signed, ssh / "signers")
    assert check.state == "contradicts" and "namespace does not match" in check.said


def test_a_signer_for_other_purposes_contradicts(signed, ssh, tmp_path):
    text = (ssh / "signers").read_text().replace("hf-axonn-eval", "git")
    (tmp_path / "signers").write_text(text)
    check = check_signature(signed, tmp_path / "signers")
    assert check.state == "contradicts" and "ED25519 key SHA256:" in check.said


def test_an_expired_key_contradicts_and_says_so(signed, ssh):
    check = check_signature(signed, ssh / "expired")
    assert check.state == "contradicts" and "is not among the signers in expired" in check.said
    assert "key has expired" in check.said


def test_a_key_of_someone_else_contradicts_and_is_named(signed, ssh):
    check = check_signature(signed, ssh / "others")
    assert check.state == "contradicts" and "is not among the signers in others" in check.said
    sign(signed, ssh / "other")
    check = check_signature(signed, ssh / "signers")
    assert check.state == "contradicts" and "is not among the signers in signers" in check.said


def test_no_signature_is_told_and_contradicts_where_signers_are_named(signed, ssh):
    signature_file(signed).unlink()
    check = check_signature(signed, None)
    assert check.state == "unchecked" and "NOT SIGNED" in check.said
    check = check_signature(signed, ssh / "signers")
    assert check.state == "contradicts" and "NOT SIGNED" in check.said


def test_what_is_no_signature_contradicts(signed):
    signature_file(signed).write_text("of the owner, truly\n")
    assert check_signature(signed, None).state == "contradicts"


def test_what_cannot_be_done_is_an_error(signed, ssh, monkeypatch):
    with pytest.raises(ValueError, match="absent is not a file: name an SSH key"):
        sign(signed, ssh / "absent")
    with pytest.raises(ValueError, match="ssh-keygen did not sign with .*signers"):
        sign(signed, ssh / "signers")
    with pytest.raises(ValueError, match="absent is not a file"):
        check_signature(signed, ssh / "absent")


def test_without_ssh_keygen_it_says_what_to_install(tmp_path, monkeypatch):
    def absent(command, **options):
        raise FileNotFoundError(2, "No such file", command[0])

    monkeypatch.setattr(module.subprocess, "run", absent)
    for name in ("bundle.tar", "bundle.tar.sig", "key"):
        (tmp_path / name).write_text("x")
    for use in (
        lambda: sign(tmp_path / "bundle.tar", tmp_path / "key"),
        lambda: check_signature(tmp_path / "bundle.tar", None),
    ):
        with pytest.raises(ValueError, match="no ssh-keygen here: install OpenSSH"):
            use()
    (tmp_path / "bundle.tar.sig").unlink()
    assert check_signature(tmp_path / "bundle.tar", None).state == "unchecked"
