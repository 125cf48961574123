"""Identifiers: document ids, canonical JSON and the digests that join the two halves.

Everything here is a function of its arguments alone, so two machines that see the same inputs name them alike.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

DOC_ID_BYTES = 16


def doc_id(source: str, split: str, position: int, part: int = 0) -> bytes:
    """The 16-byte id of a document: SHA-256 over source, split name, byte offset or row, sub-document."""
    key = f"{source}\x1f{split}\x1f{position}\x1f{part}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(key).digest()[:DOC_ID_BYTES]


def shuffle_key(seed: int, identifier: bytes) -> int:
    """A uniform integer in [0, 2^63) that orders documents: fits Spark's signed long."""
    digest = hashlib.blake2b(identifier, digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") >> 1


def is_in_share(key: int, share: float) -> bool:
    """Whether a `shuffle_key` falls into the lowest `share` in [0, 1] of its range."""
    return key < int(share * (1 << 63))


def canonical_json(value: Any) -> bytes:
    """The one byte string of a JSON value: sorted keys, no spaces, UTF-8, no NaN. Raises ValueError on NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_of(value: Any) -> str:
    """The SHA-256 (hex) of a JSON value's canonical form."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def file_sha256(path: Path) -> str:
    """The SHA-256 (hex) of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
