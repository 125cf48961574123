"""Archives of altered pages: N times the input with no page twice, so that marginal cost can be measured.

A copy's words are rotated inside each run of text by a step that differs from copy to copy: same bytes, same language
and markup, other shingles. Pages are written without content encoding, so that bare calls see what our reader sees, and
without those that are nested deeper than our limit, such as a planted one of the demo crawl: bare calls take minutes
for it.
"""

import gzip
import io
import re
from contextlib import closing
from itertools import islice
from pathlib import Path

from pipeline.engine.stage import Row
from pipeline.extract.extract import ExtractConfig
from pipeline.extract.nesting import nesting_problem
from pipeline.sources.config import SourceConfig
from pipeline.sources.source import SOURCE
from pipeline.sources.splits import find_splits, open_stream

TEXT_RUN = re.compile(rb">([^<>]{40,})<")


def altered(page: bytes, copy: int) -> bytes:
    """The page with the words of every longer run of text rotated and pairs swapped; copy 0 is the page itself."""

    def shuffle(match: re.Match[bytes]) -> bytes:
        words = match.group(1).split(b" ")
        turn = (copy * 7) % len(words)
        words = words[turn:] + words[:turn]
        step = 2 + copy % 3
        for start in range(0, len(words) - step, step):
            words[start], words[start + step - 1] = words[start + step - 1], words[start]
        return b">" + b" ".join(words) + b"<"

    return TEXT_RUN.sub(shuffle, page) if copy else page


def write_altered(paths: list[Path], folder: Path, copies: int, most: int | None = None) -> list[list[Path]]:
    """Write each archive's pages `copies` times, altered, at most the first `most`; returns the files of every copy."""
    folder.mkdir(parents=True, exist_ok=True)
    config = SourceConfig(paths=tuple(str(path) for path in paths))
    written = []
    for copy in range(copies):
        files = []
        for split in find_splits(config):
            target = folder / f"copy{copy}-{split.name}"
            with closing(open_stream(split)) as stream, open(target, "wb") as out:
                for row, drop in islice(SOURCE.open(split, stream, config), most):
                    if drop is None and not is_too_deep(row["_payload"]):
                        out.write(record(row, copy))
            files.append(target)
        written.append(files)
    return written


def is_too_deep(page: bytes) -> bool:
    """Return True if our reader drops a page for its nesting."""
    return nesting_problem(page, page.decode("latin-1"), ExtractConfig().max_depth) is not None


def record(row: Row, copy: int) -> bytes:
    """One gzip member with the altered page of a row."""
    body = altered(row["_payload"], copy)
    charset = f"; charset={row['_http_charset']}" if row["_http_charset"] else ""
    lines = ["HTTP/1.1 200 OK", f"Content-Type: {row['mime'] or 'text/html'}{charset}", f"Content-Length: {len(body)}"]
    block = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body
    head = (
        f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:{row['doc_id'].hex()}>\r\n"
        f"WARC-Date: {row['date']:%Y-%m-%dT%H:%M:%SZ}\r\nWARC-Target-URI: {row['url']}?copy={copy}\r\n"
        f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(block)}\r\n\r\n"
    )
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=6, mtime=0) as member:
        member.write(head.encode() + block + b"\r\n\r\n")
    return buffer.getvalue()
