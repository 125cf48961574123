"""Secret keys in files: how they are read and checked, and the commitment to a key that manifests hold."""

import hashlib
import hmac
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from schemas.errors import ConfigError

MIN_KEY_BYTES, MAX_KEY_BYTES = 32, 4096
"""Minimum length of a key, and maximum length of its file [bytes]."""
MIN_DIFFERENT = 20
"""Minimum number of different bytes in a key, and of different steps between neighbouring bytes. Of 32 random bytes,
30 are different on average; fewer than 20 with a probability below 1e-8."""
MAX_PRINTABLE = 0.875
"""Maximum share of printable ASCII characters in a key that is not UTF-8, such as a passphrase in Latin-1. Of 32 random
bytes, more than 28 are printable with a probability below 1e-8."""
_PRINTABLE = frozenset((*range(32, 127), 9, 10, 13))
_HEX = re.compile(rb"(?:[0-9a-f]{2})+|(?:[0-9A-F]{2})+")
_FIX = "Name a new file with the output of `openssl rand -hex 32`."


def read_key(path: str) -> bytes:
    """Return the key in a file: at least 32 random bytes, or twice as many hexadecimal digits that stand for them.

    White space around digits is no part of the key. Raises ConfigError if the key is too short, is a text such as a
    passphrase, or follows a pattern; the error does not show the key.
    """
    try:
        with Path(path).expanduser().open("rb") as stream:
            content = stream.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"key file {path}: expected a file that can be read, got {error.strerror}. Correct the path."
        ) from error
    digits = content.strip()
    is_hex = _HEX.fullmatch(digits) is not None
    key = bytes.fromhex(digits.decode()) if is_hex else content
    if weakness := _weakness(key, len(content)):
        written = "hexadecimal digits that stand for " if is_hex else ""
        raise ConfigError(
            f"key file {path}: expected at least {MIN_KEY_BYTES} random bytes, or {2 * MIN_KEY_BYTES} hexadecimal "
            f"digits, got {written}{weakness}. {_FIX}"
        )
    return key


def commitment(key: bytes, purpose: str) -> str:
    """Return a digest (hex) by which the owner of a key can later prove that a purpose used it.

    The digest of a random key reveals nothing about the key, and digests for two purposes cannot be related without it.
    """
    return hmac.new(key, f"penstock commitment {purpose}".encode(), hashlib.sha256).hexdigest()


def _weakness(key: bytes, num_bytes: int) -> str | None:
    """Return why a key from a file with this many bytes can be guessed; None if it may be random."""
    if num_bytes > MAX_KEY_BYTES:
        return f"a file of more than {MAX_KEY_BYTES} bytes"
    if len(key) < MIN_KEY_BYTES:
        return f"{len(key)} bytes"
    if _is_text(key):
        return "a text"
    if _num_different(key) < MIN_DIFFERENT or key in (key + key)[1:-1]:
        return f"{len(key)} bytes that follow a pattern"
    return None


def _is_text(key: bytes) -> bool:
    """Return True if a key is UTF-8, as 32 random bytes are with a probability of 1e-8, or mostly ASCII."""
    try:
        key.decode()
    except UnicodeDecodeError:
        return sum(byte in _PRINTABLE for byte in key) > MAX_PRINTABLE * len(key)
    return True


def _num_different(key: Sequence[int]) -> int:
    """Return the number of different bytes, or of different steps between neighbours if these are fewer."""
    steps = {(after - before) % 256 for before, after in pairwise(key)}
    return min(len({*key}), len(steps))
