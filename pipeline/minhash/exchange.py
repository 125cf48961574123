"""Exchange of LSH indexes with users of the library datasketch, for the families `fast` and `datasketch`.

`build_lsh` makes an index of the library from a run's stored signatures, and `read_band_keys` computes our band keys
from an index of the library. Signatures of the family `fast` can be compared with each other, but not with those that
the library computes from text. An index of this family can therefore only be queried with signatures of the same
settings.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.minhash.bands import Signatures, as_matrix, band_keys
from pipeline.minhash.config import SignatureConfig
from pipeline.minhash.stage import value_type
from pipeline.text.words import Codes
from schemas.errors import ConfigError

EXCHANGED = ("fast", "datasketch")
"""Signature families whose values an index of datasketch can hold."""


def _check_family(config: SignatureConfig) -> None:
    if config.family not in EXCHANGED:
        raise ConfigError(
            f"signature.family: expected {' or '.join(map(repr, EXCHANGED))} for an exchange with datasketch, got "
            f"{config.family!r}, whose values are not 32-bit MinHash values. Set signature.family='datasketch'."
        )


def to_minhash(values: Signatures, config: SignatureConfig) -> Any:
    """Return one signature (permutations,) as a `datasketch.LeanMinHash`, a MinHash that stores no permutations.

    Raises ConfigError for a signature family whose values the library cannot hold.
    """
    from datasketch import LeanMinHash  # not at the top: the import takes 0.8 s

    _check_family(config)
    scheme = config.datasketch_scheme if config.family == "datasketch" else "affine32"
    return LeanMinHash(seed=config.seed, hashvalues=values, scheme=scheme)


def build_lsh(batches: Iterable[pa.RecordBatch], config: SignatureConfig, bands: int, rows: int) -> Any:
    """Return a `datasketch.MinHashLSH` of documents, each under its doc_id, with these numbers of bands and rows.

    The batches have the columns `doc_id` and `signature` of the table `documents`. Documents without a signature are
    left out. Raises ConfigError if the library cannot hold values of this signature family, or rejects `bands` and
    `rows`.
    """
    from datasketch import MinHashLSH

    _check_family(config)
    if bands < 2 or bands * rows > config.permutations:
        raise ConfigError(
            f"datasketch index: expected at least 2 bands and at most {config.permutations} values "
            f"(bands x rows), got {bands} x {rows}. Pass bands and rows to build_lsh that are within these limits."
        )
    index = MinHashLSH(num_perm=config.permutations, params=(bands, rows))
    for batch in batches:
        signed = batch.filter(batch.column("signature").is_valid())
        matrix = as_matrix(signed.column("signature").to_pylist(), value_type(config)) if signed.num_rows else ()
        for doc_id, values in zip(signed.column("doc_id").to_pylist(), matrix):
            index.insert(doc_id, to_minhash(values, config))
    return index


def read_band_keys(index: Any) -> tuple[list[Any], Codes]:
    """Return the document keys in a `datasketch.MinHashLSH`, and the band keys of each document (documents, bands).

    Raises ConfigError if the index stores hashes in place of signature values.
    """
    if index.hashfunc is not None:
        raise ConfigError(
            "datasketch index: expected bands stored as signature values, got an index with a hashfunc. "
            "Build the MinHashLSH without the argument hashfunc."
        )
    names = list(index.keys.keys())
    if not names:
        return [], np.zeros((0, index.b), np.uint64)
    stored = [b"".join(index.keys.get(name)) for name in names]
    value = f">u{len(stored[0]) // (index.b * index.r)}"  # uint32, or uint64 for the scheme `legacy`
    return names, band_keys(as_matrix(stored, value), index.b, index.r)
