"""Settings of URL rules: lists of domains and URLs, files of words, and what drops a document."""

import re
from typing import Any

from pydantic import field_validator, model_validator

from schemas.config import Section, decision, location, suggest_name

BUILT_IN = "builtin"
MAX_CATEGORIES = 63
"""Maximum number of categories: a bit each, and a bit for the allow list."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
LIMIT_OF = {
    "banned_words": "max_banned_words",
    "soft_banned_words": "max_soft_words",
    "banned_subwords": "max_banned_subwords",
}
"""The limit of each setting that names a file of words."""


class UrlsConfig(Section):
    """The section `[urls]` of a recipe: lists of domains and URLs, words in URLs, and which of them drop a document.

    Nothing is measured by default.
    """

    block_lists: dict[str, str] = location({})
    """Lists by category, such as `{ adult = "blacklists/adult" }`, in the form of UT1: a folder with the files
    `domains` and `urls`, or a tar archive of such folders. A file with a domain or URL on each line is a list too. A
    domain also matches all hosts below it. A URL has no scheme; it also matches what continues it after `/`, `?` or
    `&`."""
    allow_list: str | None = location(None)
    """A list, in the same forms, of domains and URLs that no rule of this section drops."""
    banned_words: str | None = location(None)
    """File with a word on each line, or `builtin` for a short list of adult spam. It counts as a whole word of a URL;
    `#` starts a comment line."""
    soft_banned_words: str | None = location(None)
    """File of words of which one alone drops nothing; see `max_soft_words`."""
    banned_subwords: str | None = location(None)
    """File of character sequences, each of at least 3 letters or digits, that count anywhere in a URL without its
    separators."""
    early_lists: tuple[str, ...] = ()
    """Categories of `block_lists` whose documents are dropped before their extraction, which takes most of the time of
    a page. Such a document has no text in the tables, and another limit cannot bring it back without a new pass."""
    drop_lists: tuple[str, ...] | None = decision(None)
    """Categories of `block_lists` that drop a document; None: all."""
    max_banned_words: int | None = decision(0, ge=0)
    """Maximum number of different banned words in a URL; "none" measures only."""
    max_soft_words: int | None = decision(1, ge=0)
    """Maximum number of different soft words in a URL. Default: DCLM drops from 2 on (Li et al. 2024, arXiv
    2406.11794). "none" measures only."""
    max_banned_subwords: int | None = decision(0, ge=0)
    """Maximum number of different banned sequences in a URL; "none" measures only."""

    @field_validator("block_lists")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        if wrong := sorted(name for name in value if not NAME.fullmatch(name)):
            raise ValueError(f"expected names of letters, digits, _ and -, got {', '.join(wrong)}. Rename them.")
        if len(value) > MAX_CATEGORIES:
            raise ValueError(f"expected at most {MAX_CATEGORIES} categories, got {len(value)}. Join some of the lists.")
        return value

    @model_validator(mode="after")
    def _used(self) -> "UrlsConfig":
        problems = [
            f"{field}: expected categories of urls.block_lists, got {name!r}{suggest_name(name, self.block_lists)}. "
            f"Correct urls.{field}."
            for field in ("early_lists", "drop_lists")
            for name in getattr(self, field) or ()
            if name not in self.block_lists
        ]
        problems += [
            f"{limit}: expected urls.{words} to be set, got {getattr(self, limit)} without it. Set urls.{words}."
            for words, limit in LIMIT_OF.items()
            if limit in self.model_fields_set and getattr(self, limit) is not None and getattr(self, words) is None
        ]
        for name in ("soft_banned_words", "banned_subwords"):
            if getattr(self, name) == BUILT_IN:
                problems.append(f"{name}: expected a path, got {BUILT_IN!r}, which has whole words. Set a path.")
        if problems:
            raise ValueError("\n  ".join(problems))
        return self

    def content(self) -> dict[str, Any]:
        """Return the fields that change what is measured, as JSON values; `early_lists` only if it is set.

        Tables that were built before it existed stay valid.
        """
        return {name: value for name, value in super().content().items() if name != "early_lists" or value}

    @property
    def has_lists(self) -> bool:
        """Return True if there is a table of domains and URLs to look up."""
        return bool(self.block_lists) or self.allow_list is not None
