"""The declaration of the source stage: its settings, its columns, its closed list of reasons, and its reader."""

from collections.abc import Iterator

from pipeline.engine.stage import Drop, Row, Source, Split
from pipeline.sources.compression import ByteStream
from pipeline.sources.config import SourceConfig
from pipeline.sources.formats import FORMATS
from pipeline.sources.provenance import COLUMNS

__all__ = ["REASONS", "SOURCE", "SourceConfig", "open_split"]

REASONS = {
    "not_a_page": "a record of another kind: warcinfo, request, metadata, revisit, a DNS answer, an archive header",
    "http_status": "the HTTP status is not one that is kept",
    "not_html": "the media type is not one that is kept, or none is declared and the bytes do not look like HTML",
    "no_http_header": "a response that does not begin with an HTTP status line",
    "bad_http": "an HTTP header without a valid status line or an end",
    "bad_encoding": "the body is not in its transfer or content encoding",
    "page_too_large": "the decoded page or text is larger than max_page_bytes",
    "record_too_large": "the record or line as stored is larger than max_record_bytes; it was passed over",
    "empty_page": "nothing, or nothing but white space, where the page should be",
    "truncated_record": "the file ends inside the record; or the crawler cut it short and such records are not kept",
    "lying_length": "no record, gap or end of file at the declared end of the record",
    "digest_mismatch": "the block does not have the digest that its header gives",
    "bad_header": "a record whose header has no end or no length",
    "bad_gzip": "a compressed member is damaged (gzip, zstd or bzip2)",
    "unreadable_gap": "bytes that belong to no record",
    "empty_file": "the file holds no bytes, or no record and no gap",
    "bad_line": "a line that is no JSON object",
    "no_text_field": "a row without a text",
}


def open_split(split: Split, stream: ByteStream, config: SourceConfig) -> Iterator[tuple[Row, Drop | None]]:
    """Yield the rows of one file in order, each with a Drop if it cannot be a document. No content of the file raises
    an error; errors of the storage are passed on."""
    return FORMATS[split.format].open(split, stream, config)


SOURCE = Source(
    name="source",
    version=1,
    config=SourceConfig,
    adds=COLUMNS,
    reasons=REASONS,
    open=open_split,
)
