"""The owner's key: who can read it, and what hashes tell."""

import hashlib
import hmac
import json

import pytest

from hf_axonn_eval.bundle.keys import Key, make_key, read_key


def test_a_new_key_is_random_is_the_owners_alone_and_replaces_none(tmp_path):
    first, second = make_key(tmp_path / "keys" / "first"), make_key(tmp_path / "second")
    assert first.name != second.name and read_key(tmp_path / "keys" / "first").name == first.name
    assert (tmp_path / "second").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        make_key(tmp_path / "second")
    assert read_key(tmp_path / "second").name == second.name


def test_hashes_are_hmac_sha256_of_purpose_kind_and_content():
    key = Key(bytes(range(32)))
    message = json.dumps(["hf-axonn-eval bundle 1", "tokens", [[1, 2], [3]]], separators=(",", ":")).encode()
    expected = hmac.new(bytes(range(32)), message, hashlib.sha256).hexdigest()
    assert key.hash("tokens", [[1, 2], [3]]) == f"hmac-sha256:{expected}"
    others = {key.hash("tokens", [[1], [2, 3]]), key.hash("sample", "a"), key.hash("document", "a")}
    others |= {key.hash("sample", "b"), Key(bytes(32)).hash("sample", "a")}
    assert len(others) == 5


def test_a_key_that_others_can_read_or_that_is_none_is_refused(tmp_path):
    file = tmp_path / "key"
    make_key(file)
    file.chmod(0o640)
    with pytest.raises(ValueError, match=r"\(mode 640\).*chmod 600"):
        read_key(file)
    file.chmod(0o600)
    for text in ("", "00" * 31, "zz" * 32):
        file.write_text(text)
        with pytest.raises(ValueError, match="must hold 64 hexadecimal digits"):
            read_key(file)
    with pytest.raises(ValueError, match="absent is not a file"):
        read_key(tmp_path / "absent")
    with pytest.raises(ValueError, match="32 bytes, not 3"):
        Key(b"abc")
