"""The settings of the source stage: which files are read, and what counts as a page."""

from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from schemas.config import Section, execution

Format = Literal["auto", "warc", "jsonl", "parquet"]


class SourceConfig(Section):
    """The section `[source]` of a recipe."""

    name: str = Field("web", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the source; part of every doc_id, and the folder of its token shards."""
    snapshot: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,23}$")
    """Name of the crawl that the files belong to; names sort as their crawls follow each other. None: the name such as
    CC-MAIN-2024-10 in a file's own name, where there is one."""
    paths: tuple[str, ...] = execution((), validate_default=True)
    """Files: local paths or URIs that pyarrow.fs speaks (s3://, gs://, hdfs://), with `*`, `?`, `[…]` and `**`.
    Inputs enter a manifest by name and digest, so where they lie changes no result."""
    format: Format = "auto"
    """What the files hold; `auto` goes by the suffix. `warc` covers WARC, WET, WAT and ARC, compressed or not."""
    text_field: str = "text"
    """Field of a JSON line, or column of a Parquet file, that holds the text."""
    url_field: str = "url"
    """Field or column that holds the URL, where there is one."""
    id_field: str = "id"
    """Field or column that stands in for the URL of a row that has none."""
    max_page_bytes: int = Field(16 << 20, ge=1)
    """Largest page after HTTP decoding, or text of a row [bytes]."""
    max_record_bytes: int = Field(32 << 20, ge=1 << 10)
    """Largest record that is held in memory, as it lies in the archive [bytes]; a larger one is passed over."""
    http_statuses: tuple[int, ...] = Field((200,), min_length=1)
    """HTTP status codes that are pages."""
    mime_types: tuple[str, ...] = Field(("text/html", "application/xhtml+xml"), min_length=1)
    """Media types that are pages, in lower case. A response that declares none is one if its first bytes look like
    HTML. Other types, such as text/plain, reach the extractor as they are."""
    drop_truncated: bool = False
    """Whether a record that its crawler cut short (`WARC-Truncated`) is dropped; what is left of it is often enough."""
    verify_digests: bool = False
    """Whether blocks are compared with their WARC digests. Off: gzip members carry a CRC of their own."""

    @field_validator("paths", mode="before")
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("paths")
    @classmethod
    def _required(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise PydanticCustomError("required", "is required: name at least one file, such as crawl/*.warc.gz")
        return value

    @field_validator("mime_types")
    @classmethod
    def _lower_case(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [mime for mime in value if mime != mime.strip().lower() or ";" in mime]:
            raise PydanticCustomError(
                "mime", "media types are lower case, without parameters; wrong: {wrong}", {"wrong": wrong}
            )
        return value
