"""Keys under which two documents may be copies: bands of a MinHash, tables of a SimHash, the digest of the text.

A key says no more than "look at these two"; what joins them is decided by `verify`. The scope is part of every key, so
documents of two scopes never meet.
"""

import math

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from pipeline.dedup.config import MINHASH_ONLY, SIMHASH_ONLY, DedupConfig
from pipeline.dedup.keep_order import rows_of_bytes
from pipeline.minhash.fast import mixed
from pipeline.minhash.optimal import optimal_bands
from pipeline.minhash.simhash import table_keys
from pipeline.minhash.stage import SignatureConfig, band_keys, value_type
from schemas.errors import ConfigError

Keys = npt.NDArray[np.int64]
DIGESTS = {"normalised": "text_digest", "raw": "raw_digest"}
DIGEST_BYTES = 16
MAX_KEYS = 1000
_EXACT = np.uint64(0x6C62272E07BB0142)
"""Sets the keys of digests apart from those of bands."""


def layout(dedup: DedupConfig, signature: SignatureConfig) -> tuple[int, int]:
    """Bands and rows of a MinHash signature. Raises ConfigError if the signature is too short for them."""
    if dedup.threshold is not None:
        return optimal_bands(dedup.threshold, signature.permutations)
    if dedup.bands * dedup.rows > signature.permutations:
        raise ConfigError(
            f"dedup.bands, dedup.rows: promised at most signature.permutations = {signature.permutations} values, "
            f"found {dedup.bands} x {dedup.rows} = {dedup.bands * dedup.rows}; lower them or raise permutations"
        )
    return dedup.bands, dedup.rows


def check_method(dedup: DedupConfig, signature: SignatureConfig) -> None:
    """Raise ConfigError if the signature is too short for the bands, or a setting is for another kind of signature."""
    is_simhash = signature.family == "simhash"
    idle = sorted(dedup.model_fields_set & (MINHASH_ONLY if is_simhash else SIMHASH_ONLY))
    if idle:
        raise ConfigError(
            f"dedup.{', dedup.'.join(idle)}: promised settings of the method, found signature.family = "
            f"{signature.family!r}, which ignores them; leave them out or choose another family"
        )
    if num_keys(dedup, signature) > MAX_KEYS:
        raise ConfigError(
            f"dedup.blocks, dedup.max_distance: promised at most {MAX_KEYS} keys a document, found "
            f"{num_keys(dedup, signature)}; take fewer blocks or a smaller distance"
        )


def num_keys(dedup: DedupConfig, signature: SignatureConfig) -> int:
    """How many keys a document has."""
    exact = int(dedup.exact != "off")
    if not dedup.near:
        return exact
    if signature.family == "simhash":
        return math.comb(dedup.blocks, dedup.max_distance) + exact
    return layout(dedup, signature)[0] + exact


def key_columns(dedup: DedupConfig) -> list[str]:
    """The stored columns of `documents` that keys and verification look at."""
    digest = [DIGESTS[dedup.exact]] if dedup.exact != "off" else []
    return [*dedup.scope, *digest, *(["signature"] if dedup.near else [])]


def near_keys(batch: pa.RecordBatch, dedup: DedupConfig, signature: SignatureConfig) -> Keys:
    """Keys that near copies are likely to share (documents, keys); no column if near copies are not looked for."""
    if not dedup.near:
        return np.zeros((batch.num_rows, 0), np.int64)
    values = signatures_of(batch, signature)
    if signature.family == "simhash":
        keys = table_keys(values[:, 0], dedup.blocks, dedup.max_distance)
    else:
        keys = band_keys(values, *layout(dedup, signature))
    return _scoped(keys, batch, dedup)


def all_keys(batch: pa.RecordBatch, dedup: DedupConfig, signature: SignatureConfig) -> Keys:
    """Every key of every document (documents, num_keys)."""
    keys = near_keys(batch, dedup, signature)
    if dedup.exact == "off":
        return keys
    digest = digests_of(batch, dedup)[:, :8].copy().view("<u8")
    return np.concatenate([keys, _scoped(mixed(digest ^ _EXACT), batch, dedup)], axis=1)


def signatures_of(batch: pa.RecordBatch, signature: SignatureConfig) -> npt.NDArray[np.unsignedinteger]:
    """The signatures of a batch as numbers (documents, values)."""
    value = np.dtype(value_type(signature))
    count = 1 if signature.family == "simhash" else signature.permutations
    return rows_of_bytes(batch.column("signature"), count * value.itemsize).view(value)


def digests_of(batch: pa.RecordBatch, dedup: DedupConfig) -> npt.NDArray[np.uint8]:
    """The digests that exact copies share (documents, 16)."""
    return rows_of_bytes(batch.column(DIGESTS[dedup.exact]), DIGEST_BYTES)


def scopes_of(batch: pa.RecordBatch, dedup: DedupConfig) -> npt.NDArray[np.uint64]:
    """A number of each document's scope (documents,): equal where the scopes are, up to 2^-64."""
    numbers = np.zeros(batch.num_rows, np.uint64)
    for column in dedup.scope:
        encoded = pc.dictionary_encode(pc.fill_null(batch.column(column), ""))
        names = [xxhash.xxh64_intdigest(f"{column}={name}".encode()) for name in encoded.dictionary.to_pylist()]
        numbers = mixed(numbers ^ np.array(names, np.uint64)[encoded.indices.to_numpy(zero_copy_only=False)])
    return numbers


def _scoped(keys: npt.NDArray[np.uint64], batch: pa.RecordBatch, dedup: DedupConfig) -> Keys:
    if dedup.scope:
        keys = mixed(keys ^ scopes_of(batch, dedup)[:, None])
    return keys.view(np.int64)


def payloads_of(batch: pa.RecordBatch, dedup: DedupConfig) -> npt.NDArray[np.uint8]:
    """What documents are compared by: digest and signature (documents, bytes)."""
    parts = [digests_of(batch, dedup)] if dedup.exact != "off" else []
    if dedup.near:
        signatures = b"".join(batch.column("signature").to_pylist())
        parts.append(np.frombuffer(signatures, np.uint8).reshape(batch.num_rows, -1))
    return np.concatenate(parts, axis=1)
