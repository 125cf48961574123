"""The settings of the source stage: the input files, their format, and the conditions for a page."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from schemas.config import Section, execution

AUTO = "auto"
"""The value of `source.format` that leaves the choice to the suffix of each file."""


OWN_SECTIONS = frozenset(
    (
        *("extract", "language", "quality", "decontaminate", "toxicity", "perplexity", "classifier", "importance"),
        *("paragraphs", "pii"),
    )
)
"""Sections that a source may set for its documents alone; the others concern all documents together."""


class FormatConfig(Section):
    """The settings of one format, such as `[source.mediawiki]`; only files of this format use them."""


class MediaWikiConfig(FormatConfig):
    """The settings of dumps of Wikipedia and other wikis that run MediaWiki."""

    namespaces: tuple[int, ...] = Field(default=(0,), min_length=1)
    """Numbers of the namespaces whose pages are kept. 0 holds the articles, 1 their talk pages, 4 pages about the wiki,
    10 the templates and 14 the categories; further ones are in the head of each dump."""
    keep_disambiguation: bool = False
    """True to keep pages that only list the meanings of a name, which are dropped by default."""
    disambiguation_names: tuple[str, ...] = ()
    """Names of further templates and categories that mark such pages, without a namespace. The reference of formats
    lists those of 62 languages, which are known."""
    headings: bool = True
    """True to keep the headings of sections, each in a line of its own. Headings without any text below are left out.
    """
    lists: bool = True
    """True to keep the items of lists, with `- ` or their number before them."""
    tables: bool = True
    """True to keep tables, a row in each line and ` | ` between its cells. Infoboxes and navigation boxes are left out.
    """
    math: bool = True
    """True to keep formulas as LaTeX, in `$…$`, and in `$$…$$` if they have a line of their own."""


class GutenbergConfig(FormatConfig):
    """The settings of books of Project Gutenberg."""

    join_lines: bool = True
    """True to join the lines of a paragraph that were broken only for their length. Verse and tables keep their lines.
    """


class BooksConfig(FormatConfig):
    """The settings of books in EPUB files and plain text."""

    join_lines: bool = True
    """True to join the lines of a paragraph of plain text that were broken only for their length. Verse and tables keep
    their lines."""


class SourceConfig(Section):
    """The section `[source]` of a recipe: the input files, their format, and which records are pages.

    A recipe may have several, each a table `[[source]]` with a name of its own. `[source.SECTION]` after a table sets
    what differs for its documents, such as `[source.quality]`.
    """

    own_sections = OWN_SECTIONS

    name: str = Field("web", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the source. It is hashed into every doc_id, and it names the folder of the source's token shards."""
    snapshot: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,23}$")
    """Name of the crawl that the files belong to; names must sort in the order of the crawls. If it is not set, a crawl
    name such as CC-MAIN-2024-10 is read from the file's name, if there is one."""
    paths: tuple[str, ...] = execution((), validate_default=True)
    """Input files: local paths or URIs that pyarrow.fs supports (s3://, gs://, hdfs://), with `*`, `?`, `[…]` and `**`.
    A manifest records inputs by name and digest, so their location does not change the result."""
    format: str = AUTO
    """Format of the files: `warc` (WARC, WET, WAT and ARC, compressed or not), `jsonl`, `parquet` or another name in
    `formats.FORMATS`; `auto` determines it by the suffix of each file."""
    text_field: str = "text"
    """Field of a JSON line, or column of a Parquet file, that holds the text."""
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
    mediawiki: MediaWikiConfig = MediaWikiConfig()
    """Settings of the format `mediawiki`."""
    gutenberg: GutenbergConfig = GutenbergConfig()
    """Settings of the format `gutenberg`."""
    books: BooksConfig = BooksConfig()
    """Settings of the format `books`."""

    def content(self) -> dict[str, Any]:
        """Return the fields that change what is measured and written, as JSON values.

        The settings of formats, and `title`, are omitted unless the recipe sets them: tables that were built before
        they existed stay valid.
        """
        unused = self.formats().keys() - self.model_fields_set
        unused |= {"title"} if self.title == "column" else set()
        return {name: value for name, value in super().content().items() if name not in unused}

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

    @model_validator(mode="after")
    def _text_is_no_meta(self) -> "SourceConfig":
        if self.text_field in (self.meta_fields or ()):
            raise PydanticCustomError(
                "meta_fields",
                "meta_fields: expected fields other than text_field, got {field}. Remove it from source.meta_fields.",
                {"field": self.text_field},
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
