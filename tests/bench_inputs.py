"""Archives of altered pages: N times the input with no page twice, so that marginal cost can be measured.

A copy's words are rotated inside each run of text by a step that differs from copy to copy: same bytes, same language
and markup, other shingles.
"""

import gzip
import io
import re
from pathlib import Path

from fastwarc.warc import ArchiveIterator, WarcRecordType

TEXT_RUN = re.compile(rb">([^<>]{40,})<")


def altered(page: bytes, copy: int) -> bytes:
    """The page with the words of every longer run of text rotated by `copy` places and pairs swapped."""

    def shuffle(match: re.Match[bytes]) -> bytes:
        words = match.group(1).split(b" ")
        turn = (copy * 7) % len(words)
        words = words[turn:] + words[:turn]
        step = 2 + copy % 3
        for start in range(0, len(words) - step, step):
            words[start], words[start + step - 1] = words[start + step - 1], words[start]
        return b">" + b" ".join(words) + b"<"

    return TEXT_RUN.sub(shuffle, page)


def write_altered(paths: list[Path], folder: Path, copies: int) -> list[Path]:
    """Write `copies` altered copies of each archive (copy 0 is the original as it is); returns all files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for copy in range(copies):
        for path in paths:
            target = folder / f"copy{copy}-{path.name}"
            if not target.exists():
                _write_copy(path, target, copy)
            written.append(target)
    return written


def _write_copy(path: Path, target: Path, copy: int) -> None:
    if copy == 0:
        target.write_bytes(path.read_bytes())
        return
    partial = target.with_suffix(".partial")
    with open(path, "rb") as stream, open(partial, "wb") as out:
        for record in ArchiveIterator(stream, record_types=WarcRecordType.response, parse_http=True):
            http = record.http_headers
            body = altered(record.reader.read(), copy)
            lines = [f"HTTP/1.1 {http.status_line.split(' ', 1)[1]}".encode("latin-1")]
            skipped = ("content-length", "content-encoding", "transfer-encoding")
            lines += [f"{k}: {v}".encode("latin-1", "replace") for k, v in http.items() if k.lower() not in skipped]
            lines += [f"Content-Length: {len(body)}".encode(), b"", b""]
            block = b"\r\n".join(lines) + body
            url = record.headers["WARC-Target-URI"] + f"?copy={copy}"
            head = (
                f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Record-ID: {record.headers['WARC-Record-ID']}\r\n"
                f"WARC-Date: {record.headers['WARC-Date']}\r\nWARC-Target-URI: {url}\r\n"
                f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(block)}\r\n\r\n"
            )
            buffer = io.BytesIO()
            with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=6, mtime=0) as member:
                member.write(head.encode() + block + b"\r\n\r\n")
            out.write(buffer.getvalue())
    partial.rename(target)
