"""Blocks of pages for the step `templates`: lines with keys, and the number of pages of a host that have each.

A block is a line that has letters and does not look like code. Its key is the hash of the host, then the hash of the
line's normal form, so that the keys of a host sort together. Only keys and counts leave the worker.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import pyarrow as pa

from pipeline.dedup.keep_order import nodes, rows_of_bytes
from pipeline.dedup.repeats.keys import (
    NO_ORDER,
    PLACES_AT_ONCE,
    Bools,
    KeyOccurrences,
    KnownRepeats,
    tallies,
    tally,
)
from pipeline.dedup.repeats.units import line_spans, normal_forms, scoped
from pipeline.engine.parquet import TEXTS_AT_ONCE, Part, read_measured
from pipeline.engine.spark import TALLIES
from pipeline.text.words import Codes, Ints, word_key, word_keys
from schemas.urls import url_key, web_host

URL, TEXT, LINE = "url", "text", "template"
"""Kinds that are part of the keys of URLs, texts and lines."""
HOST_BYTES, BLOCK_BYTES = 8, 16
"""Length of the key of a host, and of a block, which begins with that of its host [bytes]."""
HOSTS_AT_ONCE = 1 << 12
"""Number of hosts whose keys are cached."""
FENCE = "```"
CODE = re.compile(r"[;{}\\]\s*+$|\(\)\s*+:?\s*+$|^\s*(?:#include\b|//|/\*|import \w|from [\w.]+ import )")
"""Lines that look like code. Pages about programming share such lines, which are content."""


def host_number(url: str | None) -> np.uint64 | None:
    """Return the key of the host of a page; None if it has no web URL, so that it belongs to no host."""
    host = web_host(url) if url else None
    return None if host is None else _host_key(host)


@lru_cache(maxsize=HOSTS_AT_ONCE)
def _host_key(host: str) -> np.uint64:
    # Names of hosts are chosen by strangers. With a hash that can be inverted, the pages of one host would count for
    # another one, and their lines would be cut there.
    return _number(host.encode("utf-8", "surrogatepass"))


def _number(data: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(word_key(data), "little"))


@dataclass(frozen=True, slots=True)
class HostBlocks:
    """The blocks of a page, in the order of the text."""

    keys: Codes
    """Key of each block within its host, (blocks,)."""
    starts: Ints
    """Start of each block, (blocks,) [code points]."""
    ends: Ints
    """End of each block, without its line end, (blocks,) [code points]."""
    forms: tuple[str, ...]
    """Normal form of each block."""


def blocks_of(text: str) -> HostBlocks:
    """Return the lines of a text that have letters, are outside of fenced code and do not look like code."""
    spans = line_spans(text)
    lines = [text[start:end] for start, end in spans.tolist()]
    forms = normal_forms(lines)
    is_fenced = False
    chosen: list[int] = []
    for number, (line, form) in enumerate(zip(lines, forms)):
        if line.lstrip().startswith(FENCE):
            is_fenced = not is_fenced
        elif not is_fenced and form.strip("0 ") and not CODE.search(line):
            chosen.append(number)
    kept = tuple(forms[number] for number in chosen)
    keys = scoped(word_keys(kept), LINE, np.uint64(0))
    return HostBlocks(keys, spans[chosen, 0], spans[chosen, 1], kept)


def begins_title(blocks: HostBlocks, title: str | None) -> Bools:
    """Return True for each block with which the title of its page begins: the heading of the page (blocks,)."""
    (form,) = normal_forms([title or ""])
    return np.fromiter((form.startswith(own) for own in blocks.forms), bool, len(blocks.forms))


# Counts (TALLIES) of one part: pages of each host, pages with the same URL or text, and pages of each block.


def pages_of_hosts(part: Part) -> Iterator[pa.RecordBatch]:
    """Yield the number of pages (TALLIES) of each host in one part, copies included."""
    pages = PageTallies(part.ordinal)
    for batch in read_measured(part, {"documents": ["url"]}):
        for host in map(host_number, batch.column("url").to_pylist()):
            if host is not None:
                yield from pages.add(np.array([[host]]), True)
    yield from pages.rest()


def addresses_and_texts(part: Part, hosts: Codes) -> Iterator[pa.RecordBatch]:
    """Yield the number of pages (TALLIES) with the same URL, and with the same text, for the pages of some hosts.

    `first` is the page with the smallest doc_id. `hosts` are the sorted hashes of the hosts.
    """

    def places() -> Iterator[KeyOccurrences]:
        for batch in read_measured(part, {"documents": ["url", "text_digest"]}):
            orders = nodes(batch.column("doc_id"), part.ordinal)
            for order, url, text in zip(orders, *(batch.column(name).to_pylist() for name in ("url", "text_digest"))):
                host = host_number(url)
                if host is not None and is_among(hosts, host):
                    yield KeyOccurrences(order, copy_keys(url, text, host), np.zeros(2, np.int64))

    yield from tallies(places(), part.ordinal)


def copy_keys(url: str, text_digest: bytes, host: np.uint64) -> Codes:
    """Return the keys of a page's URL and text (2, 1); pages of one host that share one of them are copies."""
    # Host and digest are hashed together: for a sum of the two, a pair with a given value can be searched from two
    # lists, which takes the square root of the time.
    owner = host.tobytes()
    keys = (_number(kind.encode() + owner + digest) for kind, digest in ((URL, url_key(url)), (TEXT, text_digest)))
    return np.fromiter(keys, np.uint64, 2)[:, None]


def pages_of_blocks(part: Part, hosts: Codes, copies: KnownRepeats) -> Iterator[pa.RecordBatch]:
    """Yield the number of pages (TALLIES) of some hosts, and of each of their blocks, in one part.

    A page counts unless `copies` has another page with its URL or text before it. A block of a page that does not count
    has a row, too, because the block may be cut there. `hosts` are the sorted hashes of the hosts.
    """
    own, of_host = PageTallies(part.ordinal), PageTallies(part.ordinal)
    columns = {"documents": ["url", "text_digest"], "text": ["text"]}
    for batch in read_measured(part, columns, TEXTS_AT_ONCE):
        for row in batch.to_pylist():
            host = host_number(row["url"])
            if host is None or not is_among(hosts, host):
                continue
            keys = copy_keys(row["url"], row["text_digest"], host)
            is_counted = not copies.is_repeat(keys, np.zeros(2, np.int64), row["doc_id"]).any()
            lines = np.unique(blocks_of(row["text"]).keys)
            yield from of_host.add(np.array([[host]]), is_counted)
            yield from own.add(np.stack([np.full(len(lines), host), lines], axis=1), is_counted)
    yield from of_host.rest()
    yield from own.rest()


def is_among(hosts: Codes, host: np.uint64) -> bool:
    """Return True if the sorted numbers `hosts` contain `host`."""
    place = int(np.searchsorted(hosts, host))
    return place < len(hosts) and bool(hosts[place] == host)


@dataclass
class PageTallies:
    """Counts pages by key, a bounded number of keys at a time, so that a task's memory does not grow with its part."""

    part: int
    at_once: int = PLACES_AT_ONCE
    """Keys of pages that are counted together."""
    _held: Mapping[bool, list[KeyOccurrences]] = field(default_factory=lambda: {True: [], False: []})
    _size: int = 0

    def add(self, keys: Codes, is_counted: bool) -> Iterator[pa.RecordBatch]:
        """Count a page with distinct `keys` (keys, 1 or 2) as 1, or as 0 if it is not counted; yield full batches."""
        if len(keys):
            self._held[is_counted].append(KeyOccurrences(NO_ORDER, keys, np.zeros(len(keys), np.int64)))
            self._size += len(keys)
        if self._size >= self.at_once:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield the counts (TALLIES) of the pages since the last batch. `first` is null."""
        for is_counted, held in self._held.items():
            if held:
                rows = tally(held, self.part)
                counts = rows.column("count") if is_counted else pa.array(np.zeros(rows.num_rows, np.int64))
                nothing = pa.nulls(rows.num_rows, pa.binary())
                columns = [rows.column("key"), rows.column("part"), counts, nothing]
                yield pa.RecordBatch.from_arrays(columns, schema=TALLIES)
                held.clear()
        self._size = 0


# The counts of the run, returned to a part that has the keys.


class PageCounts:
    """The number of pages of the hosts of a part, and of their blocks, in the whole run."""

    def __init__(self, batches: Iterable[pa.RecordBatch]):
        """`batches` are rows (key, total) of hosts and of blocks; a key may occur more than once with one total."""
        hosts: dict[int, int] = {}
        keys, totals = [np.zeros((0, 2), np.uint64)], [np.zeros(0, np.int64)]
        for batch in batches:
            numbers = batch.column("total").to_numpy()
            sizes = pa.compute.binary_length(batch.column("key")).to_numpy()
            for key, total in zip(
                key_numbers(batch, sizes == HOST_BYTES, 1)[:, 0].tolist(), numbers[sizes == HOST_BYTES]
            ):
                hosts[key] = int(total)
            keys.append(key_numbers(batch, sizes == BLOCK_BYTES, 2))
            totals.append(numbers[sizes == BLOCK_BYTES])
        self._hosts = hosts
        all_keys, all_totals = np.concatenate(keys), np.concatenate(totals)
        ranking = np.lexsort(all_keys.T[::-1])
        self._of_host, self._lines = (np.ascontiguousarray(column) for column in all_keys[ranking].T)
        self._totals = all_totals[ranking]

    def of_host(self, host: np.uint64) -> int:
        """Return the number of pages of a host; 0 if the host was not counted."""
        return self._hosts.get(int(host), 0)

    def of_blocks(self, host: np.uint64, blocks: HostBlocks) -> Ints:
        """Return the number of pages of the host with each block (blocks,); 0 for a block with too few pages."""
        low, high = np.searchsorted(self._of_host, host, "left"), np.searchsorted(self._of_host, host, "right")
        lines, totals = self._lines[low:high], self._totals[low:high]
        if not len(lines):
            return np.zeros(len(blocks.keys), np.int64)
        places = np.minimum(np.searchsorted(lines, blocks.keys), len(lines) - 1)
        return np.where(lines[places] == blocks.keys, totals[places], 0)


def key_numbers(batch: pa.RecordBatch, chosen: Bools, numbers: int) -> Codes:
    """Return the keys of the chosen rows, each as 64-bit numbers (rows, numbers)."""
    keys = batch.column("key").filter(pa.array(chosen))
    return rows_of_bytes(keys, 8 * numbers).copy().view(">u8").astype(np.uint64)
