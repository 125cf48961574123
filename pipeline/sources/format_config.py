"""The settings of single formats, each a section `[source.FORMAT]`, such as `[source.csv]`."""

import codecs

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from schemas.config import Section

MARKS = '\n\r,;\t|"'
"""Characters that must be single ASCII bytes in the charset of a CSV file."""


class FormatConfig(Section):
    """The settings of one format, such as `[source.csv]`; only files of this format use them."""


class CsvConfig(FormatConfig):
    """The section `[source.csv]`: how CSV files are written."""

    delimiter: str | None = Field(None, min_length=1, max_length=1)
    """Character between two fields. None: a tab in files that are named .tsv, else a comma."""
    quote: str = Field('"', max_length=1)
    """Character around fields that contain delimiters or line ends; twice in a row it means itself. Empty: fields
    are not quoted."""
    escape: str | None = Field(None, min_length=1, max_length=1)
    """Character before one that has no special meaning. None: there is no such character."""
    columns: tuple[str, ...] = ()
    """Names of the columns, for files without a header row. Empty: the first row has the names."""
    charset: str = "utf-8"
    """Encoding of the files, one in which ASCII characters are single bytes. A byte order mark is left out. Bytes that
    are invalid become U+FFFD."""

    @field_validator("delimiter", "quote", "escape")
    @classmethod
    def _ascii_mark(cls, value: str | None) -> str | None:
        if value is not None and (not value.isascii() or value in ("\n", "\r", "\0")):
            raise PydanticCustomError(
                "mark",
                "expected an ASCII character that ends no line, got {value}. Correct it.",
                {"value": repr(value)},
            )
        return value

    @field_validator("charset")
    @classmethod
    def _has_ascii(cls, value: str) -> str:
        try:
            is_usable = MARKS.encode(value) == MARKS.encode("ascii") and codecs.lookup(value)._is_text_encoding
        except (LookupError, ValueError):
            is_usable = False
        if not is_usable:
            raise PydanticCustomError(
                "charset",
                "expected the name of an encoding that extends ASCII, got {value}. Convert the files to utf-8, or "
                "correct source.csv.charset.",
                {"value": repr(value)},
            )
        return value


class HfConfig(FormatConfig):
    """The section `[source.hf]`: which files of a Hugging Face dataset folder to read."""

    split: str = Field("train", min_length=1)
    """Name of the split to read, such as `train`; `all` reads every file. Files without the name of a split are in
    `train`."""
    subset: str | None = Field(None, min_length=1)
    """Folder of the subset (configuration) to read, in a dataset that has several. None: all files of the split."""


class StackExchangeConfig(FormatConfig):
    """The section `[source.stackexchange]`: which questions and answers of a dump become documents."""

    site: str | None = Field(None, pattern=r"^[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+$")
    """Host of the site, such as coffee.stackexchange.com, for the URLs of questions. None: it is in the names of the
    files or of their folders, such as `coffee.stackexchange.com.7z`."""
    min_score: int | None = None
    """Minimum score of a question. None: questions of every score are kept."""
    min_answer_score: int | None = None
    """Minimum score of an answer. None: answers of every score are kept. An accepted answer is always kept."""
    max_answers: int | None = Field(None, ge=0)
    """Maximum number of answers of a document, the best first. None: all answers are kept."""
    keep_unanswered: bool = True
    """False to drop questions that have no answer, or none of at least `min_answer_score`."""
    markdown: bool = False
    """True to write headings, emphasis, quotes and code with the marks of Markdown; False for plain text."""


class RedditConfig(FormatConfig):
    """The section `[source.reddit]`: which submissions become documents, and the comments that follow them."""

    min_score: int | None = None
    """Minimum score of a submission. None: submissions of every score are kept."""
    subreddits: tuple[str, ...] = ()
    """Names of the subreddits to keep, in any case. Empty: all."""
    excluded_subreddits: tuple[str, ...] = ()
    """Names of subreddits to drop, in any case."""
    bots: tuple[str, ...] = ("AutoModerator",)
    """Names of authors, in any case, whose submissions are dropped and whose comments are left out."""
    keep_over_18: bool = False
    """True to keep submissions that are marked as adult content."""
    keep_title_only: bool = False
    """True to keep submissions without a text: links and mere titles. Their text is the title, with comments if they
    are joined."""
    comments: tuple[str, ...] = ()
    """Files with the comments, such as RC_2015-01.zst: local paths or URIs, with wildcards. Each comment follows its
    submission. The task of a file of submissions reads all of them, except those of months before its own, such as
    RC_2014-12 for RS_2015-01."""
    comment_months: int | None = Field(None, ge=0)
    """Number of months after that of the submissions from which comments are read; 0: the same month alone. None: all.
    Until 2021, Reddit closed submissions after 6 months."""
    min_comment_score: int | None = None
    """Minimum score of a comment. None: comments of every score are kept. The replies to a comment that is left out are
    left out too."""
    max_comments: int | None = Field(None, ge=1)
    """Maximum number of comments of a document. None: no limit."""
    max_comment_depth: int = Field(20, ge=1, le=500)
    """Maximum depth of a comment; 1 is an answer to the submission."""

    @model_validator(mode="after")
    def _comments_are_joined(self) -> "RedditConfig":
        ignored = sorted(
            self.model_fields_set & {"comment_months", "min_comment_score", "max_comments", "max_comment_depth"}
        )
        if ignored and not self.comments:
            raise PydanticCustomError(
                "comments",
                "{name}: expected the files of comments in comments, got none, so that {name} is ignored. Set "
                "source.reddit.comments, or remove it.",
                {"name": ignored[0]},
            )
        return self

    @field_validator("subreddits", "excluded_subreddits", "bots")
    @classmethod
    def _without_prefix(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.removeprefix("/").removeprefix("r/").removeprefix("u/") for name in value)


class MediaWikiConfig(FormatConfig):
    """The settings of dumps of Wikipedia and other wikis that run MediaWiki."""

    namespaces: tuple[int, ...] = Field(default=(0,), min_length=1)
    """Numbers of the namespaces whose pages are kept. 0 holds the articles, 1 their talk pages, 4 pages about the wiki,
    10 the templates and 14 the categories; further ones are in the head of each dump."""
    keep_disambiguation: bool = False
    """True to keep pages that only list the meanings of a name, which are dropped by default."""
    keep_redirects: bool = False
    """True to keep pages that only lead to another one, which are dropped by default. Their text is the title of the
    page, an empty line and the title of the other page."""
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
