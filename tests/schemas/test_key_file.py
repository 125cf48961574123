"""Key files: keys that are read, weak ones that are refused without being shown, and the commitment to a key."""

import hashlib
import hmac
import random
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from schemas.key_file import MAX_KEY_BYTES, MIN_KEY_BYTES, commitment, read_key

KEY = hashlib.sha256(b"a key of this test").digest()


def written(folder: Path, content: bytes) -> str:
    """The path of a file with this content."""
    (folder / "key").write_bytes(content)
    return str(folder / "key")


@pytest.mark.parametrize(
    "content", [KEY, KEY.hex().encode(), f"{KEY.hex()}\n".encode(), f" {KEY.hex().upper()}\r\n".encode()]
)
def test_the_same_key_in_each_form(tmp_path: Path, content: bytes) -> None:
    assert read_key(written(tmp_path, content)) == KEY


def test_white_space_is_part_of_a_key_of_bytes(tmp_path: Path) -> None:
    assert read_key(written(tmp_path, KEY + b"\n")) == KEY + b"\n"


def test_random_keys_are_read(tmp_path: Path) -> None:
    draw = random.Random(1)
    for _ in range(500):
        key = draw.randbytes(MIN_KEY_BYTES)
        assert read_key(written(tmp_path, key.hex().encode() + b"\n")) == key
        assert read_key(written(tmp_path, key)) == key


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"", "got 0 bytes"),
        (KEY[:-1], "got 31 bytes"),
        (KEY[:-1].hex().encode(), "got hexadecimal digits that stand for 31 bytes"),
        (b"correct horse battery staple, and several more words", "got a text"),
        ("Ein sehr langer Satz, den sich jemand für dieses Archiv gemerkt hat".encode(), "got a text"),
        ("Ein sehr langer Satz, den sich jemand für dieses Archiv gemerkt hat".encode("latin-1"), "got a text"),
        (b"correct horse battery staple, and several more words".hex().encode(), "that stand for a text"),
        (KEY.hex().encode()[:-1], "got a text"),
        ("correct horse battery staple".encode("utf-16"), "bytes that follow a pattern"),
        (b"\xff" * 64, "got 64 bytes that follow a pattern"),
        (bytes(range(128, 192)), "got 64 bytes that follow a pattern"),
        (b"d\xe9adbeef" * 8, "got 64 bytes that follow a pattern"),
        (KEY * 2, "got 64 bytes that follow a pattern"),
        (b"f0e1d2c3" * 8, "that stand for 32 bytes that follow a pattern"),
        (random.Random(2).randbytes(MAX_KEY_BYTES + 1), "got a file of more than 4096 bytes"),
    ],
)
def test_a_weak_key_is_refused_without_being_shown(tmp_path: Path, content: bytes, got: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError) as error:
        read_key(path)
    message = str(error.value)
    assert message.startswith(f"key file {path}: expected at least 32 random bytes, or 64 hexadecimal digits, got ")
    assert got in message
    assert message.endswith("Name a new file with the output of `openssl rand -hex 32`.")
    if content:
        assert content.decode("latin-1") not in message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"got No such file or directory\. Correct the path\."):
        read_key(str(tmp_path / "none"))


def test_the_commitment_is_keyed_and_separate_for_each_purpose() -> None:
    expected = hmac.new(KEY, b"penstock commitment pii.key", hashlib.sha256).hexdigest()
    assert commitment(KEY, "pii.key") == expected
    assert commitment(KEY, "plant") != expected
    assert commitment(KEY[::-1], "pii.key") != expected
    assert hashlib.sha256(KEY).hexdigest() != expected
