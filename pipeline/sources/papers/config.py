"""The settings of the formats of scientific papers: `[source.arxiv]` and `[source.unarxive]`."""

from typing import Literal

from pydantic import Field

from pipeline.sources.format_config import FormatConfig


class ArxivConfig(FormatConfig):
    """The section `[source.arxiv]`: what becomes the text of a paper that is given as TeX source."""

    citations: Literal["remove", "keep"] = "remove"
    """"keep" writes the keys of citations and references in brackets, such as `[knuth84]`."""
    floats: Literal["captions", "all", "none"] = "captions"
    """What is written of figures and tables: their captions, all of their text with ` | ` between the cells of a table,
    or nothing."""
    headings: Literal["text", "markdown"] = "text"
    """"markdown" marks section titles by `#`."""
    max_tex_bytes: int = Field(default=8 << 20, ge=1 << 10)
    """Maximum size of the TeX files of a paper together, and of the source that is joined from them [bytes]. Figures do
    not count. The TeX source of most papers has less than 200 kB."""


class UnarxiveConfig(FormatConfig):
    """The section `[source.unarxive]`: what becomes the text of a paper of the data set unarXive."""

    citations: Literal["remove", "keep"] = "remove"
    """"keep" writes the raw text of a citation, if the paper has it, or its id, in brackets."""
    captions: bool = True
    """False to leave out the captions of figures and tables, which are written at the end of the text."""
    headings: Literal["text", "markdown"] = "text"
    """"markdown" marks section titles by `#`."""
