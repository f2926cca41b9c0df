"""The owner's key, and keyed hashes: with key and text they prove that the text is the one that was meant, and without
the key they tell nothing, however short the text.
"""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path


BYTES = 32
KEYED = "hmac-sha256:"  # begins every keyed hash
_PURPOSE = "hf-axonn-eval bundle 1"


class Key:
    """A secret that hashes are made with.

    Args:
        secret: BYTES random bytes.
    Raises:
        ValueError: another number of bytes.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) != BYTES:
            raise ValueError(f"a key has {BYTES} bytes, not {len(secret)}.")
        self._secret = secret

    def hash(self, kind: str, content: str | Sequence[Sequence[int]]) -> str:
        """Return HMAC-SHA256 of some content; the same content of another kind has another one.

        Source: RFC 2104 and FIPS 180-4, over the JSON of purpose, kind and content.
        """
        message = json.dumps([_PURPOSE, kind, content], separators=(",", ":")).encode()
        return KEYED + hmac.new(self._secret, message, hashlib.sha256).hexdigest()

    @property
    def name(self) -> str:
        """Name that tells this key from others, and nothing of the secret."""
        return self.hash("key", "")


def make_key(path: str | os.PathLike[str]) -> Key:
    """Make a random key in a new file that only its owner can read.

    Raises:
        FileExistsError: the file is there.
    """
    secret = secrets.token_bytes(BYTES)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as file:
        os.fchmod(descriptor, 0o600)  # whatever the umask
        file.write(secret.hex() + "\n")
    return Key(secret)


def read_key(path: str | os.PathLike[str]) -> Key:
    """Read the key in a file.

    Raises:
        ValueError: there is none, or others than its owner can read it.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file.")
    mode = path.stat().st_mode & 0o777
    if os.name == "posix" and mode & 0o077:
        raise ValueError(
            f"{path} can be read by others than its owner (mode {mode:o}), and who has the key can test guesses of "
            f"the texts: chmod 600 {path}."
        )
    try:
        return Key(bytes.fromhex(path.read_text(encoding="ascii").strip()))
    except ValueError:
        raise ValueError(f"{path} is not a key: it must hold {2 * BYTES} hexadecimal digits.") from None
