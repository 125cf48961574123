"""Document ids, canonical JSON and digests: the identifiers that pipeline and trainer share.

The functions depend only on their arguments, so two machines compute the same identifiers from the same inputs.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

DOC_ID_BYTES = 16


def doc_id(source: str, split: str, position: int, part: int = 0) -> bytes:
    """Return the id of a document: the first 16 bytes of a SHA-256 over its source, split, position and part.

    `position` is a byte offset or row number; `part` numbers the records that start at the same position.
    """
    key = f"{source}\x1f{split}\x1f{position}\x1f{part}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(key).digest()[:DOC_ID_BYTES]


def shuffle_key(seed: int, identifier: bytes) -> int:
    """Return a uniform integer in [0, 2^63), by which documents are shuffled."""
    digest = hashlib.blake2b(identifier, digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") >> 1  # 63 bits fit a signed long of Spark


def is_in_share(key: int, share: float) -> bool:
    """Return True if a `shuffle_key` is in the lowest `share` (0 to 1) of [0, 2^63)."""
    return key < int(share * (1 << 63))


def canonical_json(value: Any) -> bytes:
    """Return the canonical bytes of a JSON value: sorted keys, no spaces, UTF-8. Raises ValueError if it holds NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_of(value: Any) -> str:
    """Return the SHA-256 (hex) of a JSON value's canonical form."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 (hex) of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
