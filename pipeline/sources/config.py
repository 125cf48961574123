"""The settings of the source stage: the input files, their format, and the conditions for a page."""

from typing import Any

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from schemas.config import Section, execution

AUTO = "auto"
"""The value of `source.format` that leaves the choice to the suffix of each file."""


class SourceConfig(Section):
    """The section `[source]` of a recipe."""

    name: str = Field("web", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the source; part of every doc_id, and the folder of its token shards."""
    snapshot: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,23}$")
    """Name of the crawl that the files belong to; names must sort in the order of the crawls. None: the crawl name in
    the file's own name, such as CC-MAIN-2024-10, if there is one."""
    paths: tuple[str, ...] = execution((), validate_default=True)
    """Files: local paths or URIs that pyarrow.fs supports (s3://, gs://, hdfs://), with `*`, `?`, `[…]` and `**`.
    A manifest records inputs by name and digest, so their location changes no result."""
    format: str = AUTO
    """Format of the files, a name in `formats.FORMATS`; `auto` uses the suffix. `warc` covers WARC, WET, WAT and ARC,
    compressed or not."""
    text_field: str = "text"
    """Field of a JSON line, or column of a Parquet file, that holds the text."""
    url_field: str = "url"
    """Field or column that holds the URL, if there is one."""
    id_field: str = "id"
    """Field or column that replaces the URL of a row without one."""
    max_page_bytes: int = Field(16 << 20, ge=1)
    """Maximum size of a page after HTTP decoding, or of a row's text [bytes]."""
    max_record_bytes: int = Field(32 << 20, ge=1 << 10)
    """Maximum size of a record in memory, as stored in the archive [bytes]; a larger record is dropped."""
    http_statuses: tuple[int, ...] = Field((200,), min_length=1)
    """HTTP status codes of responses that are kept as pages."""
    mime_types: tuple[str, ...] = Field(("text/html", "application/xhtml+xml"), min_length=1)
    """Media types of pages, in lower case. A response without one is a page if its first bytes look like HTML. Other
    types, such as text/plain, are passed to the extractor unchanged."""
    drop_truncated: bool = False
    """True to drop a record that its crawler truncated (`WARC-Truncated`); the rest of it is often long enough."""
    verify_digests: bool = False
    """True to compare blocks with their WARC digests. Off by default: gzip members have their own CRC."""

    @field_validator("paths", mode="before")
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("paths")
    @classmethod
    def _required(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise PydanticCustomError(
                "required", "expected at least one file, got none. Set source.paths, for example to crawl/*.warc.gz."
            )
        return value

    @field_validator("mime_types")
    @classmethod
    def _lower_case(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [mime for mime in value if mime != mime.strip().lower() or ";" in mime]:
            raise PydanticCustomError(
                "mime",
                "expected media types in lower case without parameters, got {wrong}. Correct source.mime_types.",
                {"wrong": wrong},
            )
        return value
