"""The settings of the dumps of forums: `[source.stackexchange]` and `[source.reddit]`."""

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pipeline.sources.format_config import FormatConfig


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
    submission. Every task reads all of these files, so name those of the same months as in source.paths."""
    min_comment_score: int | None = None
    """Minimum score of a comment. None: comments of every score are kept. The replies to a comment that is left out are
    left out too."""
    max_comments: int | None = Field(None, ge=1)
    """Maximum number of comments of a document. None: no limit."""
    max_comment_depth: int = Field(20, ge=1, le=500)
    """Maximum depth of a comment; 1 is an answer to the submission."""

    @model_validator(mode="after")
    def _comments_are_joined(self) -> "RedditConfig":
        ignored = sorted(self.model_fields_set & {"min_comment_score", "max_comments", "max_comment_depth"})
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
