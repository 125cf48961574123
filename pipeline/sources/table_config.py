"""The settings of CSV files and of dataset folders: `[source.csv]` and `[source.hf]`."""

import codecs

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from pipeline.sources.format_config import FormatConfig

MARKS = '\n\r,;\t|"'
"""Characters that must be single ASCII bytes in the charset of a CSV file."""


class CsvConfig(FormatConfig):
    """The section `[source.csv]`: how CSV files are written."""

    delimiter: str | None = Field(None, min_length=1, max_length=1)
    """Character between two fields. None: a tab in files that are named .tsv or .tab, else a comma."""
    quote: str = Field('"', max_length=1)
    """Character around fields that contain delimiters or line ends; twice in a row it stands for itself. Empty: fields
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
