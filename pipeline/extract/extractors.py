"""The extractors: functions from a decoded page to its main text and what it declares about itself.

`penstock` scores the blocks of the page and asks for a second opinion where it is not sure. The others are libraries
and the whole visible text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal, NamedTuple

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLParserException, HTMLTree

from pipeline.extract.assemble import assemble
from pipeline.extract.inline import TextForm
from pipeline.extract.main_text import SHIPPED_MODEL, ScoredBlocks, load_model, parse_page, score_blocks
from pipeline.extract.metadata import PageMetadata, read_metadata
from pipeline.extract.page_limits import first_tags
from pipeline.extract.second_opinion import SecondOpinion, SecondOpinionError

Name = Literal["penstock", "resiliparse", "trafilatura", "all"]

MIN_VISIBLE_WORDS = 150
"""Number of visible words from which a page must not have an empty or very short text."""
SHORT_SHARE = 0.03
"""Share of the visible words below which a main text is very short."""
FIRST_PAGES = 20
"""Number of second opinions that are allowed before their share of the pages is limited."""
CAUSES = ("empty", "short", "unsure")
"""Why a page gets a second opinion: no text, SHORT_SHARE of many visible words, a low expected F1."""


class ExtractorError(Exception):
    """The extraction library failed on a page; the message is the library's."""


class DecodedPage(NamedTuple):
    """A decoded page and where it is from."""

    html: str
    url: str | None = None
    fetched: date | None = None
    """Day of the record [UTC]."""


@dataclass(frozen=True, slots=True)
class Extraction:
    """The main text of a page."""

    text: str
    title: str | None
    metadata: PageMetadata | None
    """None if metadata are not read."""
    extracted_by: str
    """The extractor that the text is from."""
    expected_f1: float | None = None
    """Estimated F1 of the text by `penstock`, in 0..1."""
    second_opinion: str | None = None
    """Why there was a second opinion (CAUSES), and after a colon why it gave no text, such as `unsure: stopped`."""


Extractor = Callable[[DecodedPage], Extraction]
"""Raises ExtractorError if a library fails on the page."""


class Options(NamedTuple):
    """What the extractors need of the section `[extract]`."""

    form: TextForm = TextForm()
    favor_precision: bool = False
    metadata: bool = False
    model: Path | None = None
    """File of the model of `penstock`; None = the shipped one."""
    min_expected_f1: float = 0.0
    max_second_opinions: float = 0.0


def make_extractor(name: Name, options: Options) -> Extractor:
    """Return the extractor with this name."""
    if name == "penstock":
        return _Penstock(options)
    text_of_tree = {"resiliparse": by_resiliparse, "all": by_all}.get(name)

    def extract(page: DecodedPage) -> Extraction:
        metadata = None
        try:
            tree = HTMLTree.parse(page.html)
            if options.metadata:
                metadata = read_metadata(tree, page.url, page.fetched, page.html)
            title = metadata.title if metadata is not None else tree.title
            if text_of_tree is not None:
                text = text_of_tree(tree)
            else:
                text = by_trafilatura(page.html, options.favor_precision)
        except (HTMLParserException, UnicodeError) as error:
            raise ExtractorError(str(error)) from error
        return Extraction(text, title, metadata, name)

    return extract


class _Penstock:
    """The extractor `penstock`, with the number of its pages, by which second opinions are limited."""

    def __init__(self, options: Options):
        self.options = options
        self.model = load_model(options.model or SHIPPED_MODEL)
        self.num_pages = self.num_opinions = 0

    def __call__(self, page: DecodedPage) -> Extraction:
        """Return the main text of a page. Raises ExtractorError if the parser refuses the page."""
        self.num_pages += 1
        try:
            parsed = parse_page(first_tags(page.html), page.url, page.fetched)
        except (HTMLParserException, UnicodeError) as error:
            raise ExtractorError(str(error)) from error
        scored = score_blocks(parsed.blocks, parsed.facts, self.model)
        kept = scored.kept().tolist()
        text = assemble(parsed.blocks, kept, self.options.form, page.url)
        expected = scored.expected_f1()
        cause = self._cause(scored, kept, text, expected)
        extracted_by = "penstock"
        if cause is not None:
            try:
                other = self._ask(page.html)
            except SecondOpinionError as error:
                cause = f"{cause}: {error}"
            else:
                if other:
                    text, extracted_by = other, "trafilatura"
        metadata = parsed.metadata if self.options.metadata else None
        title = metadata.title if metadata is not None else parsed.facts.title or None
        return Extraction(text, title, metadata, extracted_by, expected, cause)

    def _cause(self, scored: ScoredBlocks, kept: list[int], text: str, expected: float) -> str | None:
        """Return why the page should get a second opinion (CAUSES), None if it need not."""
        visible = float(scored.words.sum())
        if not text:
            return "empty"
        if visible >= MIN_VISIBLE_WORDS and float(scored.words[kept].sum()) < SHORT_SHARE * visible:
            return "short"
        return "unsure" if expected < self.options.min_expected_f1 else None

    def _ask(self, html: str) -> str:
        """Return the text of the second opinion. Raises SecondOpinionError if there is none."""
        if self.num_opinions >= FIRST_PAGES + self.options.max_second_opinions * self.num_pages:
            raise SecondOpinionError("limit")
        self.num_opinions += 1
        return _second_opinion(html)


_second_opinion = SecondOpinion()


def by_resiliparse(tree: HTMLTree) -> str:
    """Return the main text of a parsed page by resiliparse, without link targets and alternative texts of images."""
    text: str = extract_plain_text(tree, main_content=True, alt_texts=False, links=False)
    return text


def by_all(tree: HTMLTree) -> str:
    """Return the visible text of a parsed page, with that of `<noscript>`, which holds the posts of some forums."""
    text: str = extract_plain_text(tree, main_content=False, alt_texts=False, links=False, noscript=True)
    return text


def by_trafilatura(page: str, favor_precision: bool = False) -> str:
    """Return the main text of a decoded page by trafilatura, without comments.

    With `favor_precision`, text that is less certain is left out too. Raises ExtractorError if trafilatura fails.
    """
    import trafilatura

    try:
        return trafilatura.extract(page, favor_precision=favor_precision, include_comments=False) or ""
    except Exception as error:
        raise ExtractorError(str(error)) from error
