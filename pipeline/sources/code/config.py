"""The settings of the format `code`: the section `[source.code]`."""

from typing import Any

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from pipeline.sources.code.languages import LANGUAGES
from pipeline.sources.code.licences import KNOWN_LICENCES, PERMISSIVE
from pipeline.sources.format_config import FormatConfig
from schemas.config import suggest_name

ANY_LICENCE = "any"
"""Value of `licences` with which files of every licence, known or not, are kept."""


class CodeConfig(FormatConfig):
    """The section `[source.code]`: which files of repositories become documents.

    The limits are those of StarCoder2 (Lozhkov et al. 2024, arXiv 2402.19173, section 2.1) and, for data files and
    HTML, of StarCoder (Li et al. 2023, arXiv 2305.06161, section 3.1).
    """

    licences: tuple[str, ...] = PERMISSIVE
    """SPDX ids of licences with which a file is kept; `GPL-3.0` covers `-only` and `-or-later`. One of several
    alternatives has to be listed. A file whose licence is unknown or not listed is dropped. ["any"] keeps all files."""
    languages: tuple[str, ...] | None = None
    """Programming languages to keep, such as Python. None: every language that is recognized."""
    repository_depth: int | None = Field(default=None, ge=0, le=8)
    """Number of folders at the start of a path in an archive that name its repository: 1 for `repo/…`, 2 for
    `owner/repo/…`, 0 if the archive is one repository. None: 0 if the archive has files outside of folders, else 1."""
    max_file_bytes: int = Field(default=1 << 20, ge=1 << 10)
    """Maximum size of a file [bytes]."""
    max_lines: int = Field(default=100_000, ge=1)
    """Maximum number of lines of a file."""
    max_line_chars: int = Field(default=1_000, ge=1)
    """Maximum length of a line [code points]; a hundred times as much for languages whose lines are prose or data, such
    as Markdown and JSON."""
    max_mean_line_chars: float = Field(default=100.0, gt=0)
    """Maximum mean length of the lines [code points], except in the same languages."""
    min_alphanumeric: float = Field(default=0.25, ge=0, le=1)
    """Minimum share of letters and digits in the text, 0..1. Characters outside ASCII count as letters."""
    min_alphabetic: float = Field(default=0.25, ge=0, le=1)
    """Minimum share of letters in the text, 0..1; not for assembly, in which tables of numbers are common."""
    min_visible_text: float = Field(default=0.2, ge=0, le=1)
    """Minimum share of visible text in an HTML file, 0..1, which also needs at least 100 characters of it."""
    data_chars: tuple[int, int] = (50, 5_000)
    """Least and greatest length of a JSON or YAML file [code points]."""
    min_data_alphabetic: float = Field(default=0.5, ge=0, le=1)
    """Minimum share of letters in a JSON or YAML file, 0..1."""
    vendored: bool = False
    """True to keep copies of other projects, such as files in `node_modules` or `third_party`."""
    generated: bool = False
    """True to keep files that a program wrote, by their names or a note in their first lines."""

    @field_validator("licences")
    @classmethod
    def _known_licences(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _check(value, (*KNOWN_LICENCES, ANY_LICENCE), "licences", "SPDX ids of licences")

    @field_validator("languages")
    @classmethod
    def _known_languages(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if value is None else _check(value, LANGUAGES, "languages", "programming languages")

    @field_validator("data_chars")
    @classmethod
    def _ordered(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= value[0] <= value[1]:
            raise PydanticCustomError(
                "data_chars",
                "expected two lengths in order, got {value}. Correct source.code.data_chars.",
                {"value": list(value)},
            )
        return value


def _check(value: tuple[str, ...], known: Any, field: str, what: str) -> tuple[str, ...]:
    if wrong := [f"{name!r}{suggest_name(name, tuple(known))}" for name in value if name not in known]:
        raise PydanticCustomError(
            field,
            "expected {what}, got {wrong}. Correct source.code.{field}.",
            {"what": what, "wrong": ", ".join(wrong), "field": field},
        )
    if not value:
        raise PydanticCustomError(
            field, "expected at least one name, got none. Remove source.code.{field}.", {"field": field}
        )
    return value
