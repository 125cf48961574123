"""The settings of the source stage: the input files, their format, and the conditions for a page."""

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pipeline.sources.code.config import CodeConfig
from pipeline.sources.common_crawl.columns import INDEX_SCHEMA
from pipeline.sources.fields import TextParts, parse_text
from pipeline.sources.format_config import (
    BooksConfig,
    CsvConfig,
    FormatConfig,
    GutenbergConfig,
    HfConfig,
    MediaWikiConfig,
    RedditConfig,
    StackExchangeConfig,
)
from pipeline.sources.papers.config import ArxivConfig, UnarxiveConfig
from schemas.config import Section, execution
from schemas.errors import ConfigError
from schemas.expressions import parse_expression

AUTO = "auto"
"""The value of `source.format` that leaves the choice to the suffix of each file."""
READER_VERSIONS = {"code": 4}
"""Version of the reader of a format, by its name; 1 if it is not listed. It rises with a change of what documents of
this format contain, so that only tables with such documents are built anew. Version 2 of `code` keeps empty lines;
version 3 counts hexadecimal bytes once in files that write them as 0x.. and as \\x.. ; version 4 recognizes more
licences and charsets."""


OWN_SECTIONS = frozenset(
    (
        *("extract", "language", "quality", "decontaminate", "toxicity", "links", "rights", "perplexity"),
        *("classifier", "importance", "paragraphs", "pii", "signature"),
    )
)
"""Sections that a source may set for its documents alone; the others concern all documents together. Of some sections,
a source may have only the settings `OWN_FIELDS`."""


OF_CRAWL = frozenset(("kind", "files", "share", "where", "access", "max_unreadable", "connections", "mirror"))
"""Settings that only a source with `crawl` has."""
MIN_PART_BYTES = 1 << 20
CRAWL_NAME = re.compile(r"CC-(?:MAIN-20\d\d-(?:0[1-9]|[1-4]\d|5[0-3])|NEWS-20\d\d-(?:0[1-9]|1[0-2]))")


class SourceConfig(Section):
    """The section `[source]` of a recipe: the input files, their format, and which records are pages.

    A recipe may have several, each a table `[[source]]` with a name of its own. `[source.SECTION]` after a table sets
    what differs for its documents, such as `[source.quality]`.
    """

    own_sections = OWN_SECTIONS

    REPLACES: ClassVar = {
        "text": {"text_field"},
        "text_field": {"text"},
        "crawl": {"paths", "snapshot"},
        "paths": {"crawl", *OF_CRAWL},
        "files": {"share"},
        "share": {"files"},
    }

    name: str = Field("web", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the source. It is hashed into every doc_id, and it names the folder of the source's token shards."""
    snapshot: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,23}$")
    """Name of the crawl that the files belong to; names must sort in the order of the crawls. If it is not set, a crawl
    name such as CC-MAIN-2024-10 is read from the file's name, if there is one."""
    crawl: str | None = execution(None)
    """Name of a crawl of Common Crawl whose files are read, in place of `paths`: CC-MAIN-2024-10 (year and week) or
    CC-NEWS-2024-10 (year and month). Files are named by their paths in the bucket, wherever they are read from."""
    paths: tuple[str, ...] = execution((), validate_default=True)
    """Input files: local paths or URIs that pyarrow.fs supports (s3://, gs://, abfs://, hdfs://), with `*`, `?`, `[…]`
    and `**`. A manifest records inputs by name and digest, so their location does not change the result."""
    kind: Literal["warc", "wet"] = execution("warc")
    """Files of `crawl`: "warc", the pages as they were crawled, or "wet", the texts that Common Crawl extracted."""
    files: int | None = execution(None, ge=1)
    """Number of files of `crawl` to read: those whose paths have the smallest hashes, so that a larger number adds
    files to those of a smaller one. None: all, or those of `share`."""
    share: float | None = execution(None, gt=0, le=1)
    """Share of the files of `crawl` to read, in place of `files`: those whose paths have a hash below it."""
    where: str | None = None
    """Condition on the columns of the index of `crawl`, such as `content_languages like 'eng%'`. Only records that meet
    it are fetched and have rows. None: all records."""
    access: Literal["auto", "https", "s3"] = execution("auto")
    """How to read `crawl`: from data.commoncrawl.org by "https", or from the bucket by "s3", which needs credentials of
    AWS and the extra `penstock[s3]`. "auto": S3 if there are credentials and the region is us-east-1, else HTTPS."""
    max_unreadable: float = execution(0.0, ge=0, le=1)
    """Share of the files of `crawl` that may be unreachable, such as missing ones. Each is a gap with its cause; beyond
    the share the run stops."""
    connections: int = execution(64, ge=1)
    """Maximum number of connections of a run to the servers of `crawl`. Each task has one, so it limits the tasks that
    run at a time."""
    mirror: str = execution("")
    """Address of a copy of the bucket of `crawl`, which has its paths: https://, s3:// or any other storage, or a local
    folder. Empty: Common Crawl itself, by `access`."""
    format: str = AUTO
    """Format of the files: `warc` (WARC, WET and ARC, compressed or not), `jsonl`, `parquet` or another name in
    `formats.FORMATS`; `auto` determines it by the suffix of each file."""
    text_field: str = "text"
    """Field of a JSON line, or column of a table, that holds the text. A name such as `article.body`, here and in other
    settings of fields, is the field `body` of an object in the field `article`."""
    text: str | tuple[str, ...] | None = None
    """Fields that are joined to the text, in place of `text_field`: a list, joined by empty lines, or fields and quoted
    text joined by +, such as `title + ': ' + body`. A field without a value is left out with the text before it."""
    title_field: str | None = None
    """Field or column with the title of a row. None: rows have no title."""
    url_field: str = "url"
    """Field or column that holds the URL, if there is one."""
    id_field: str = "id"
    """Field or column whose value is used as the URL of a row that has none."""
    meta_fields: tuple[str, ...] | None = None
    """Fields or columns to store in the column `meta`, with which documents are filtered and cited. None: every field
    whose value is not stored in another column; an empty list: none."""
    max_meta_bytes: int = Field(4096, ge=0)
    """Maximum size of the fields that `meta` holds of a row [bytes of JSON]. A field that does not fit is left out, and
    the manifest counts such rows."""
    date_field: str | None = None
    """Field or column with the date of a row: ISO 8601, a year, or seconds since 1970 or thousandths, millionths or
    billionths of them. A whole number such as 2019, 201912, 20191231 or 20191231235959 is a date of the calendar. None:
    rows have no date."""
    licence_field: str | None = None
    """Field or column with the licence of a row. None: it is unknown."""
    parents_field: str | None = None
    """Field or column with the parents of a row: the documents that its text was made from, such as the original of a
    translation. One text or a list, of document ids (32 hex digits) or URLs. A takedown of a parent removes the row
    too. None: rows have no parents."""
    title: Literal["column", "first_line"] = "column"
    """Where the title of a document is stored. "column": only in the column `title`; "first_line": also as the first
    line of its text, unless the text begins with it."""
    max_page_bytes: int = Field(16 << 20, ge=1)
    """Maximum size of a page after HTTP decoding, or of a row's text [bytes]."""
    max_record_bytes: int = Field(32 << 20, ge=1 << 10, le=1 << 40)
    """Maximum size of a record before HTTP decoding, or of a line [bytes]; larger ones are dropped without loading."""
    part_bytes: int = Field(512 << 20, ge=0)
    """Size from which a file is divided into ranges of at most this size, each of which is a task and a part of its own
    [bytes as stored; at least 1 MiB]. 0: no file is divided. Formats of single archives are not; see the formats. The
    version of a table depends on the ranges and not on this number, so a run on smaller files stays as it is."""
    http_statuses: tuple[int, ...] = Field((200,), min_length=1)
    """HTTP status codes of responses that are kept as pages."""
    mime_types: tuple[str, ...] = Field(("text/html", "application/xhtml+xml"), min_length=1)
    """Media types of pages to keep, in lower case. A response without a media type is kept if its first bytes look like
    HTML. If text/plain is added, its text is used as it is."""
    drop_truncated: bool = False
    """True to drop records that the crawler truncated (`WARC-Truncated`). Off by default, because what is left of such
    a page is often long enough."""
    verify_digests: bool = False
    """True to compare records with the digests in their headers. Off by default, because gzip members have a CRC."""
    mediawiki: MediaWikiConfig = MediaWikiConfig.model_validate({})
    """Settings of the format `mediawiki`."""
    gutenberg: GutenbergConfig = GutenbergConfig.model_validate({})
    """Settings of the format `gutenberg`."""
    books: BooksConfig = BooksConfig.model_validate({})
    """Settings of the format `books`."""
    csv: CsvConfig = CsvConfig.model_validate({})
    """How CSV files are written."""
    hf: HfConfig = HfConfig.model_validate({})
    """Which files of a Hugging Face dataset folder to read."""
    stackexchange: StackExchangeConfig = StackExchangeConfig.model_validate({})
    """Which questions and answers of a Stack Exchange dump become documents."""
    reddit: RedditConfig = RedditConfig.model_validate({})
    """Which Reddit submissions become documents, and the comments that follow them."""
    arxiv: ArxivConfig = ArxivConfig.model_validate({})
    """What becomes the text of papers that are given as TeX source."""
    unarxive: UnarxiveConfig = UnarxiveConfig.model_validate({})
    """What becomes the text of papers of the data set unarXive."""
    code: CodeConfig = CodeConfig.model_validate({})
    """Which files of repositories become documents."""

    def content(self) -> dict[str, Any]:
        """Return the fields that change what is measured and written, as JSON values.

        The settings of formats, and those that were added later, are omitted unless the recipe sets them: tables that
        were built before they existed stay valid. `reader` is the version of a reader in READER_VERSIONS.
        """
        unused = (self.formats().keys() | {"text", "title_field", "parents_field"}) - self.model_fields_set
        unused |= {"title"} if self.title == "column" else set()
        unused |= {"where"} if self.where is None else set()
        unused |= {"part_bytes"}  # the ranges are part of what identifies a table
        reader = {"reader": READER_VERSIONS[self.format]} if self.format in READER_VERSIONS else {}
        content = {name: value for name, value in super().content().items() if name not in unused} | reader
        if "mediawiki" in content and not self.mediawiki.keep_redirects:
            del content["mediawiki"]["keep_redirects"]
        return content

    @classmethod
    def formats(cls) -> dict[str, type[FormatConfig]]:
        """Return the class of the settings of each format that has some, by the name of the format."""
        kinds = {name: info.annotation for name, info in cls.model_fields.items()}
        return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, FormatConfig)}

    @field_validator("paths", mode="before")
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("crawl")
    @classmethod
    def _crawl_name(cls, value: str | None) -> str | None:
        if value is not None and not CRAWL_NAME.fullmatch(value):
            raise PydanticCustomError(
                "crawl",
                "expected the name of a crawl, such as CC-MAIN-2024-10 (year and week) or CC-NEWS-2024-10 (year and "
                "month), got {value}. Correct source.crawl.",
                {"value": repr(value)},
            )
        return value

    @field_validator("paths")
    @classmethod
    def _required(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        crawl = info.data.get("crawl", "")  # a wrong name is reported on its own
        if not value and crawl is None:
            raise PydanticCustomError(
                "required",
                "expected at least one file, got none. Set source.paths, for example to crawl/*.warc.gz, or "
                "source.crawl, for example to CC-MAIN-2024-10.",
            )
        if value and crawl:
            raise PydanticCustomError(
                "either", "expected either source.paths or source.crawl, got both. Remove one of them."
            )
        return value

    @field_validator("part_bytes")
    @classmethod
    def _sensible_size(cls, value: int) -> int:
        if 0 < value < MIN_PART_BYTES:
            raise PydanticCustomError(
                "part_bytes",
                "expected 0 or at least {least} bytes, got {value}. Correct source.part_bytes.",
                {"least": MIN_PART_BYTES, "value": value},
            )
        return value

    @field_validator("where")
    @classmethod
    def _index_condition(cls, value: str | None) -> str | None:
        try:
            return None if value is None else parse_expression(value, INDEX_SCHEMA, "where").canonical
        except ConfigError as error:
            raise PydanticCustomError("where", "{error}", {"error": str(error).removeprefix("where: ")}) from None

    @model_validator(mode="after")
    def _crawl_settings(self) -> "SourceConfig":
        if problem := self._crawl_problem():
            raise PydanticCustomError("crawl_settings", "{problem}", {"problem": problem})
        return self

    def _crawl_problem(self) -> str | None:
        """Return what is wrong with the settings of `crawl` together; None if nothing is."""
        if self.crawl is None:
            useless = sorted(OF_CRAWL & self.model_fields_set)
            return (
                f"{useless[0]}: expected source.crawl with it, got none. Remove source.{useless[0]}."
                if useless
                else None
            )
        if self.files is not None and self.share is not None:
            return "share: expected either files or share, got both. Remove source.share."
        if self.snapshot is not None:
            return f"snapshot: expected none, because it is the name of the crawl, got {self.snapshot!r}. Remove it."
        if self.format not in (AUTO, "warc"):
            return f"format: expected warc with source.crawl, got {self.format!r}. Remove source.format."
        if self.mirror and self.access != "auto":
            return f"access: expected none with source.mirror, got {self.access!r}. Remove source.access."
        is_main = self.crawl.startswith("CC-MAIN")
        if self.kind == "wet" and not is_main:
            return 'kind: expected "warc" for a crawl CC-NEWS, which has no other files, got "wet". Remove source.kind.'
        if self.where is not None and (self.kind == "wet" or not is_main):
            return (
                "where: expected WARC files of a crawl CC-MAIN, which have an index, got others. Remove source.where."
            )
        return None

    def text_parts(self) -> TextParts:
        """Return the fields of the text of a row, and the quoted text between them."""
        return parse_text((self.text_field,) if self.text is None else self.text)

    @field_validator("text")
    @classmethod
    def _readable_text(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        try:
            parse_text(value if value is not None else ("text",))
        except ValueError as error:
            raise PydanticCustomError(
                "text",
                "expected fields and quoted text joined by +, or a list of fields, got {value}: {error}. Correct "
                "source.text.",
                {"value": repr(value), "error": str(error)},
            ) from None
        return value

    @model_validator(mode="after")
    def _text_is_no_meta(self) -> "SourceConfig":
        if {"text", "text_field"} <= self.model_fields_set and self.text is not None:
            raise PydanticCustomError(
                "text",
                "text: expected either text or text_field, got both. Remove source.text_field.",
            )
        paths = self.text_parts().paths
        if len(paths) == 1 and paths[0] in (self.meta_fields or ()):
            raise PydanticCustomError(
                "meta_fields",
                "meta_fields: expected fields other than text_field, got {field}. Remove it from source.meta_fields.",
                {"field": paths[0]},
            )
        return self

    @model_validator(mode="after")
    def _no_ignored_format(self) -> "SourceConfig":
        ignored = sorted(self.model_fields_set & self.formats().keys() - {self.format})
        if ignored and self.format != AUTO:
            raise PydanticCustomError(
                "ignored_format",
                "{name}: expected format = '{name}', got '{format}', which ignores these settings. Remove "
                "[source.{name}].",
                {"name": ignored[0], "format": self.format},
            )
        return self

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
