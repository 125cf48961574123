"""Small archives made by hand, and a reading of any archive that checks what holds for every one."""

import hashlib
import io

from pipeline.engine.stage import Split
from pipeline.sources.config import SourceConfig
from pipeline.sources.crawl.warc import open_warc
from pipeline.sources.provenance import COLUMNS
from pipeline.sources.source import REASONS
from pipeline.sources.splits import HashedStream

CONFIG = SourceConfig(paths=("x",))
PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>page %d</p>"


def split_of(name="test.warc"):
    return Split(0, name, name, 0, "", "web", "warc")


def record(block, kind="response", length=None, end=b"\r\n\r\n", **fields):
    named = {"WARC-Type": kind, "WARC-Target-URI": "http://www.example.co.uk/a", "WARC-Date": "2024-05-18T01:58:10Z"}
    named |= {"Content-Type": "application/http", "Content-Length": len(block) if length is None else length}
    named |= {name.replace("_", "-"): value for name, value in fields.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items() if value is not None)
    return b"WARC/1.0\r\n" + lines.encode("utf-8", "surrogateescape") + b"\r\n" + block + end


def page(number, **fields):
    return record(PAGE % number, **fields)


def read(stored, config=CONFIG, name="test.warc"):
    """The rows of an archive, after checking what holds for every file."""
    stream = HashedStream(io.BytesIO(stored))
    rows = list(open_warc(split_of(name), stream, config))
    position = 0
    for row, drop in rows:
        assert set(row) == set(COLUMNS)
        assert row["offset"] == position
        position += row["length"]
        assert drop is None or drop.rule in REASONS
        assert (drop is None) == (row["_payload"] is not None or row["text"] is not None)
        assert (row["record_type"] == "gap") <= (drop is not None)
    assert position == len(stored)
    assert len({row["doc_id"] for row, _ in rows}) == len(rows)
    assert stream.finish() == (hashlib.sha256(stored).hexdigest(), len(stored))
    return rows


def verdicts(stored, config=CONFIG):
    return [(row["record_type"], drop.rule if drop else "kept") for row, drop in read(stored, config)]
