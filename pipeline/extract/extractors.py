"""The extractors: functions from a decoded page to its main text and what it declares about itself.

`penstock` scores the blocks of the page and asks for a second opinion where it is not sure. The others are libraries
and the whole visible text. The result depends on the page alone, not on the pages before it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLParserException, HTMLTree

from pipeline.extract.assemble import assemble
from pipeline.extract.features import PageFacts, Text
from pipeline.extract.inline import TextForm
from pipeline.extract.main_text import SHIPPED_MODEL, ScoredBlocks, load_model, parse_page, score_blocks
from pipeline.extract.metadata import PageMetadata, read_metadata
from pipeline.extract.page_limits import first_tags
from pipeline.extract.second_opinion import (
    DEFAULTS,
    LibrarySettings,
    Opinion,
    SecondOpinion,
    SecondOpinionError,
    error_name,
    library_text,
)
from schemas.ids import is_in_share, shuffle_key

Name = Literal["penstock", "resiliparse", "trafilatura", "all"]

MIN_VISIBLE_WORDS = 150
"""Number of visible words from which a page must not have an empty or very short text."""
SHORT_SHARE = 0.03
"""Share of the visible words below which a main text is very short."""
MIN_PRODUCT_F1 = 0.8
"""Expected F1 below which a page that declares a product is unsure. Such pages show much text that is not about the
product (reviews, offers, menus), and trafilatura keeps less of it."""
CAUSES = ("empty", "short", "unsure", "error")
"""Why a page gets a second opinion: no text, SHORT_SHARE of many visible words, a low expected F1, or an error while
its blocks were scored."""


class ExtractorError(Exception):
    """The extraction library failed on a page; the message is the library's."""

    def __init__(
        self,
        message: str,
        second_opinion: str | None = None,
        opinion_cpu: float | None = None,
        isolated: str | None = None,
        errors: tuple[str, ...] = (),
    ):
        """`second_opinion`, `opinion_cpu` and `errors` are those of an Extraction.

        `isolated`: why a library in a process of its own gave no text, as a SecondOpinionError says it.
        """
        super().__init__(message)
        self.second_opinion, self.opinion_cpu, self.isolated = second_opinion, opinion_cpu, isolated
        self.errors = errors


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
    opinion_cpu: float | None = None
    """CPU time of the second opinion [s]; None = it was not asked for."""
    is_cut: bool = False
    """True if the page has more than MAX_TAGS tags, so that the text is from the first ones only."""
    errors: tuple[str, ...] = ()
    """Errors of extractors on the page, such as `trafilatura/ValueError`."""


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
    max_second_opinions: float = 1.0
    isolated: bool = False
    """True to run trafilatura in a process of its own, with the limits of second opinions."""


def make_extractor(name: Name, options: Options) -> Extractor:
    """Return the extractor with this name."""
    if name == "penstock":
        return _Penstock(options)
    text_of_tree = {"resiliparse": by_resiliparse, "all": by_all}.get(name)
    settings = _library_settings(options)._replace(favor_precision=options.favor_precision)
    opinion = SecondOpinion(settings) if options.isolated and text_of_tree is None else None

    def extract(page: DecodedPage) -> Extraction:
        metadata = cpu = None
        try:
            tree = HTMLTree.parse(page.html)
            if options.metadata:
                metadata = read_metadata(tree, page.url, page.fetched, page.html)
            title = metadata.title if metadata is not None else tree.title
            if text_of_tree is not None:
                text = text_of_tree(tree)
            elif opinion is not None:
                text, cpu = opinion(page.html, page.url)
            else:
                text = by_trafilatura(page.html, page.url, settings)
        except (HTMLParserException, UnicodeError) as error:
            raise ExtractorError(str(error), errors=(f"{name}/{error_name(error)}",)) from error
        except SecondOpinionError as error:
            errors = _errors_of(error)
            raise ExtractorError(error.cause, None, error.cpu_seconds, error.cause, errors) from error
        return Extraction(text, title, metadata, name, opinion_cpu=cpu)

    return extract


class _Penstock:
    """The extractor `penstock`: scored blocks, else a second opinion, else all that the page shows."""

    def __init__(self, options: Options):
        self.options = options
        self.model = load_model(options.model or SHIPPED_MODEL)
        self.second_opinion = _second_opinion(_library_settings(options))

    def __call__(self, page: DecodedPage) -> Extraction:
        """Return the main text of a page.

        Raises ExtractorError if the parser refuses the page, or if its blocks cannot be scored and there is no second
        opinion either.
        """
        html = first_tags(page.html)
        try:
            parsed = parse_page(html, page.url, page.fetched)
        except (HTMLParserException, UnicodeError) as error:
            raise ExtractorError(str(error), errors=(f"penstock/{error_name(error)}",)) from error
        metadata = parsed.metadata if self.options.metadata else None
        title = metadata.title if metadata is not None else parsed.facts.title or None
        scored: ScoredBlocks | None = None
        failure: Exception | None = None
        cause: str | None = "error"
        errors: tuple[str, ...] = ()
        text, expected = "", None
        try:
            scored = score_blocks(parsed.blocks, parsed.facts, self.model)
            kept, expected = scored.kept().tolist(), scored.expected_f1()
            text = assemble(parsed.blocks, kept, self.options.form, page.url)
            cause = self._cause(scored, kept, text, expected < self._least_f1(parsed.facts))
        except Exception as error:  # of any kind: the page gets a second opinion, and the manifest counts it
            failure, errors = error, (f"penstock/{error_name(error)}",)
        is_cut = html is not page.html or parsed.blocks.is_cut
        if cause is None:
            return Extraction(text, title, metadata, "penstock", expected, is_cut=is_cut)
        try:
            other, opinion_cpu = self._ask(page, cause)
            cause = cause if other else f"{cause}: empty"
        except SecondOpinionError as error:
            other, cause, opinion_cpu = "", f"{cause}: {error.cause}", error.cpu_seconds
            errors += _errors_of(error)
        if other:
            return Extraction(other, title, metadata, "trafilatura", expected, cause, opinion_cpu, errors=errors)
        if failure is not None:
            raise ExtractorError(type(failure).__name__, cause, opinion_cpu, errors=errors) from failure
        extracted_by = "penstock"
        if not text and scored is not None:
            text = assemble(parsed.blocks, scored.best(MIN_VISIBLE_WORDS).tolist(), self.options.form, page.url)
        if not text and num_words(visible := visible_text(page.html)) >= MIN_VISIBLE_WORDS:
            text, extracted_by, is_cut = visible, "all", False
        return Extraction(text, title, metadata, extracted_by, expected, cause, opinion_cpu, is_cut, errors)

    def _least_f1(self, facts: PageFacts) -> float:
        """Return the expected F1 below which the text of a page is unsure."""
        least = self.options.min_expected_f1
        return max(least, MIN_PRODUCT_F1) if least and "Product" in facts.types else least

    def _cause(self, scored: ScoredBlocks, kept: list[int], text: str, is_unsure: bool) -> str | None:
        """Return why the page should get a second opinion (CAUSES), None if it need not."""
        visible = float(scored.words.sum())
        if not text:
            return "empty"
        if visible >= MIN_VISIBLE_WORDS and float(scored.words[kept].sum()) < SHORT_SHARE * visible:
            return "short"
        return "unsure" if is_unsure else None

    def _ask(self, page: DecodedPage, cause: str) -> Opinion:
        """Return the second opinion. Raises SecondOpinionError if there is none."""
        if cause == "unsure" and not _is_chosen(page.html, self.options.max_second_opinions):
            raise SecondOpinionError("limit")
        return self.second_opinion(page.html, page.url)


@lru_cache
def _second_opinion(settings: LibrarySettings) -> SecondOpinion:
    """Return the process with these settings, which all extractors of a worker share."""
    return SecondOpinion(settings)


def _library_settings(options: Options) -> LibrarySettings:
    """Return the settings of trafilatura for a text in the form of the recipe."""
    form = options.form
    return LibrarySettings(markdown=form.markdown, links=form.links, images=form.images)


def _errors_of(error: SecondOpinionError) -> tuple[str, ...]:
    return () if error.error is None else (f"trafilatura/{error.error}",)


def _is_chosen(html: str, share: float) -> bool:
    """Return True for a share of all pages, by a hash of the page alone: a count would depend on the pages before."""
    return is_in_share(shuffle_key(0, html.encode("utf-8", "surrogatepass")), share)


def visible_text(html: str) -> str:
    """Return the whole visible text of a decoded page; empty if the parser refuses the page."""
    try:
        return by_all(HTMLTree.parse(html)).strip()
    except (HTMLParserException, UnicodeError):
        return ""


def num_words(text: str) -> int:
    """Return the number of words of a text; each ideograph is a word."""
    return int(Text([text]).words[0]) if text else 0


def by_resiliparse(tree: HTMLTree) -> str:
    """Return the main text of a parsed page by resiliparse, without link targets and alternative texts of images."""
    text: str = extract_plain_text(tree, main_content=True, alt_texts=False, links=False)
    return text


def by_all(tree: HTMLTree) -> str:
    """Return the visible text of a parsed page, with that of `<noscript>`, which holds the posts of some forums."""
    text: str = extract_plain_text(tree, main_content=False, alt_texts=False, links=False, noscript=True)
    return text


def by_trafilatura(page: str, url: str | None = None, settings: LibrarySettings = DEFAULTS) -> str:
    """Return what `library_text` returns. Raises ExtractorError if trafilatura fails."""
    try:
        return library_text(page, url, settings)
    except Exception as error:
        raise ExtractorError(str(error), errors=(f"trafilatura/{error_name(error)}",)) from error
