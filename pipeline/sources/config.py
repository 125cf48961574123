"""The settings of the source stage: the input files, their format, and the conditions for a page."""

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pipeline.sources.code.config import CodeConfig
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

AUTO = "auto"
"""The value of `source.format` that leaves the choice to the suffix of each file."""
READER_VERSIONS = {"code": 3}
"""Version of the reader of a format, by its name; 1 if it is not listed. It rises with a change of what documents of
this format contain, so that only tables with such documents are built anew. Version 2 of `code` keeps empty lines;
version 3 counts hexadecimal bytes once in files that write them as 0x.. and as \\x.. ."""


OWN_SECTIONS = frozenset(
    (
        *("extract", "language", "quality", "decontaminate", "toxicity", "links", "perplexity"),
        *("classifier", "importance", "paragraphs", "pii", "signature"),
    )
)
"""Sections that a source may set for its documents alone; the others concern all documents together. Of some sections,
a source may have only the settings `OWN_FIELDS`."""


class SourceConfig(Section):
    """The section `[source]` of a recipe: the input files, their format, and which records are pages.

    A recipe may have several, each a table `[[source]]` with a name of its own. `[source.SECTION]` after a table sets
    what differs for its documents, such as `[source.quality]`.
    """

    own_sections = OWN_SECTIONS

    REPLACES: ClassVar = {"text": {"text_field"}, "text_field": {"text"}}

    name: str = Field("web", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the source. It is hashed into every doc_id, and it names the folder of the source's token shards."""
    snapshot: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,23}$")
    """Name of the crawl that the files belong to; names must sort in the order of the crawls. If it is not set, a crawl
    name such as CC-MAIN-2024-10 is read from the file's name, if there is one."""
    paths: tuple[str, ...] = execution((), validate_default=True)
    """Input files: local paths or URIs that pyarrow.fs supports (s3://, gs://, hdfs://), with `*`, `?`, `[…]` and `**`.
    A manifest records inputs by name and digest, so their location does not change the result."""
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
    """Field or column with the date of a row: ISO 8601, a year, or seconds since 1970. None: rows have no date."""
    licence_field: str | None = None
    """Field or column with the licence of a row. None: it is unknown."""
    title: Literal["column", "first_line"] = "column"
    """Where the title of a document is stored. "column": only in the column `title`; "first_line": also as the first
    line of its text, unless the text begins with it."""
    max_page_bytes: int = Field(16 << 20, ge=1)
    """Maximum size of a page after HTTP decoding, or of a row's text [bytes]."""
    max_record_bytes: int = Field(32 << 20, ge=1 << 10)
    """Maximum size of a record before HTTP decoding, or of a line [bytes]; larger ones are dropped without loading."""
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
        unused = (self.formats().keys() | {"text", "title_field"}) - self.model_fields_set
        unused |= {"title"} if self.title == "column" else set()
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

    @field_validator("paths")
    @classmethod
    def _required(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise PydanticCustomError(
                "required", "expected at least one file, got none. Set source.paths, for example to crawl/*.warc.gz."
            )
        return value

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
