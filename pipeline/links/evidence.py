"""The index of link evidence: for each URL and each domain, how many others link to it, and the highest score.

The index is built once from tables of links and memory-mapped by every worker; a look-up is a binary search. Links are
first distributed over files by their keys, so that memory holds one of BUCKETS parts of them; the part of a domain that
very many link to is larger. A key is 8 bytes, so two
of a thousand million URLs share one with a probability of 3 %. Source of the idea: Radford et al. 2019 (WebText),
section 2.1, pages that Reddit submissions of at least 3 points link to.
"""

import hashlib
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.links.config import LinksConfig
from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from schemas.tables import field as column
from schemas.urls import url_key

FILE = "evidence"
"""Name of the index among the stage's files."""
BUCKETS = 256
NO_SCORE = -(1 << 31)
NOT_ENDORSED = r"(?:^|[\s,])(?:nofollow|ugc|sponsored)(?:$|[\s,])"
"""Pattern of values of `rel` with which a page marks a link that it does not vouch for. Source: HTML, link types;
Google Search Central, qualify outbound links."""
NEEDED = ("url_key", "domain", "from_url", "from_domain", "rel", "score")
_LINK = np.dtype([("key", "<u8"), ("origin", "<u8"), ("score", "<i4")])
_INDEX = pa.schema(
    [
        column("key", pa.uint64(), "first 8 bytes of the key of a URL or of the SHA-256 of a domain"),
        column("linked_from", pa.int32(), "others that link to it", "pages or domains"),
        column("score", pa.int32(), f"highest score; {NO_SCORE}: none of the links has one", "votes"),
    ]
)
"""Batches 0..BUCKETS-1 are of URLs, the next BUCKETS are of domains; a batch has the keys of a range, sorted."""
Array = npt.NDArray[Any]


class Evidence(NamedTuple):
    """How many others link to a URL or a domain, and the highest score of those links that have one."""

    linked_from: int
    score: int | None


class EvidenceIndex:
    """A memory-mapped index of evidence."""

    def __init__(self, path: str):
        file = pa.ipc.open_file(pa.memory_map(path))
        if file.num_record_batches != 2 * BUCKETS:
            raise ContractError(
                f"{path}: expected an index of {2 * BUCKETS} batches, got {file.num_record_batches}. Delete the file, "
                "then run `penstock run` again."
            )
        batches = [file.get_batch(number) for number in range(file.num_record_batches)]
        self._columns = [[values.to_numpy() for values in batch.columns] for batch in batches]
        self.of_domain = lru_cache(1 << 16)(self._of_domain)

    def of_url(self, url: str) -> Evidence:
        """Return the evidence of a URL; URLs of one canonical form have the same."""
        return self._look_up(int.from_bytes(url_key(url)[:8]), 0)

    def _of_domain(self, domain: str) -> Evidence:
        return self._look_up(_key_of(domain), BUCKETS)

    def _look_up(self, key: int, first: int) -> Evidence:
        keys, linked_from, scores = self._columns[first + key // ((1 << 64) // BUCKETS)]
        place = int(np.searchsorted(keys, np.uint64(key)))
        if place == len(keys) or int(keys[place]) != key:
            return Evidence(0, None)
        score = int(scores[place])
        return Evidence(int(linked_from[place]), None if score == NO_SCORE else score)


def build_evidence(config: LinksConfig, paths: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return {FILE: path of the index of the tables of links}; build it unless `folder` already contains it.

    The result is empty without tables. Raises ConfigError for a file that is no table of links.
    """
    if not paths:
        return {}
    target = Path(folder) / "link_evidence.arrow"
    if not target.exists():
        partial = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.partial")
        try:
            with tempfile.TemporaryDirectory(dir=folder) as buckets:
                for path in paths.values():
                    _distribute(path, config, Path(buckets))
                with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, _INDEX) as writer:
                    for kind in ("url", "domain"):
                        for bucket in range(BUCKETS):
                            writer.write_batch(_batch_of(Path(buckets) / f"{kind}-{bucket}"))
            Store(folder).sync(partial.name)
            Store(folder).move(partial.name, target.name)
        finally:
            partial.unlink(missing_ok=True)
    return {FILE: str(target)}


def _distribute(path: str, config: LinksConfig, folder: Path) -> None:
    """Append the links of a table that count as evidence to the files of their buckets."""
    for batch in _batches(path):
        links = batch.filter(_counts(batch, config))
        scores = pc.fill_null(links["score"], NO_SCORE).to_numpy()
        urls = np.array([int.from_bytes(key[:8]) for key in links["url_key"].to_pylist()], np.uint64)
        pages, domains, origins = (_keys(links[name]) for name in ("from_url", "domain", "from_domain"))
        for kind, keys, others in (("url", urls, pages), ("domain", domains, origins)):
            records = np.empty(len(keys), _LINK)
            records["key"], records["origin"], records["score"] = keys, others, scores
            buckets = (keys // np.uint64((1 << 64) // BUCKETS)).astype(np.int64)
            for bucket in np.unique(buckets).tolist():
                with (folder / f"{kind}-{bucket}").open("ab") as file:  # 512 open files are too many on some systems
                    file.write(records[buckets == bucket].tobytes())


def _batches(path: str) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(path) as file:
            if missing := [name for name in NEEDED if name not in file.schema_arrow.names]:
                raise ConfigError(
                    f"links.tables: expected the columns {', '.join(NEEDED)}, got {path} without {', '.join(missing)}. "
                    "Write the table with `penstock links`."
                )
            yield from file.iter_batches(columns=list(NEEDED))
    except (OSError, pa.ArrowException) as error:
        problem = str(error).rstrip(".")
        raise ConfigError(
            f"links.tables: expected a table of links, got {path}: {problem}. Write the table with `penstock links`."
        ) from error


def _counts(batch: pa.RecordBatch, config: LinksConfig) -> pa.Array:
    """Return a mask of the links that are evidence."""
    counts = pc.fill_null(pc.not_equal(batch["domain"], batch["from_domain"]), True)
    if config.min_score is not None:
        counts = pc.and_(counts, pc.fill_null(pc.greater_equal(batch["score"], config.min_score), True))
    if not config.nofollow:
        marked = pc.match_substring_regex(batch["rel"], NOT_ENDORSED, ignore_case=True)
        counts = pc.and_(counts, pc.invert(pc.fill_null(marked, False)))
    return counts


def _keys(texts: pa.Array) -> npt.NDArray[np.uint64]:
    """Return the key of each text; a missing one counts as the empty text."""
    encoded = pc.fill_null(texts, "").dictionary_encode()
    places: npt.NDArray[np.int32] = encoded.indices.to_numpy()
    return np.array([_key_of(text) for text in encoded.dictionary.to_pylist()], np.uint64)[places]


def _key_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8])


def _batch_of(path: Path) -> pa.RecordBatch:
    """Return the batch of the index with the links in a file; the file may be missing."""
    links = np.fromfile(path, _LINK) if path.exists() else np.empty(0, _LINK)
    links = links[np.lexsort((links["origin"], links["key"]))]
    firsts = np.flatnonzero(_differs(links["key"]))
    is_other = _differs(links["key"]) | _differs(links["origin"])
    numbers = np.add.reduceat(is_other.astype(np.int32), firsts) if len(firsts) else np.empty(0, np.int32)
    scores = np.maximum.reduceat(links["score"], firsts) if len(firsts) else np.empty(0, np.int32)
    columns = (links["key"][firsts], numbers.astype(np.int32), scores)
    return pa.RecordBatch.from_arrays([pa.array(values) for values in columns], schema=_INDEX)


def _differs(values: Array) -> npt.NDArray[np.bool_]:
    """Return a mask of the values that differ from the value before them; the first one does."""
    differs = np.ones(len(values), bool)
    differs[1:] = values[1:] != values[:-1]
    return differs
