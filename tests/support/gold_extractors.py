"""The extractors that the bench compares: those of the pipeline, and libraries where they are installed."""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import get_args

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree

import penstock
from pipeline.extract.extract import ExtractConfig
from tests.support.gold_pages import NUM_FOLDS, GoldPage

Extract = Callable[[GoldPage], str]
"""Returns the main text of a page. It must not read the answer: `text`, `with_` and `without`."""
Load = Callable[[], Extract]
"""Imports what an extractor needs and returns it. Raises ImportError if a library is not installed."""


def by_stage(name: str) -> Load:
    """The stage `extract` with an extractor of the pipeline, as shipped."""
    return lambda: lambda page: penstock.extract(page.html, extractor=name).text


def by_fold(make: Callable[[int], Callable[[str], str]]) -> Load:
    """An extractor that is trained on these pages: `make(fold)` returns one that has not seen any page of the fold.

    The extractor gets the page as decoded text and returns its main text. Each fold's is made once.
    """

    def load() -> Extract:
        of_fold = cache(make)
        return lambda page: of_fold(page.fold)(page.html)

    return load


def _trafilatura_without_comments() -> Extract:
    import trafilatura

    return lambda page: trafilatura.extract(page.html, include_comments=False) or ""


def _resiliparse_as_it_comes() -> Extract:
    return lambda page: extract_plain_text(HTMLTree.parse(page.html), main_content=True)


def _whole_page() -> Extract:
    # Some forums hold all their posts in the element `noscript`.
    return lambda page: extract_plain_text(
        HTMLTree.parse(page.html), main_content=False, alt_texts=False, noscript=True
    )


def _text_of(html: str) -> str:
    return extract_plain_text(HTMLTree.parse(html), main_content=False, alt_texts=False)


def _readability() -> Extract:
    from readability import Document

    return lambda page: _text_of(Document(page.html).summary(html_partial=True))


STOP_LISTS = {
    **{"ar": "Arabic", "bg": "Bulgarian", "da": "Danish", "de": "German", "el": "Greek", "en": "English"},
    **{"es": "Spanish", "fr": "French", "id": "Indonesian", "it": "Italian", "ko": "Korean", "la": "Latin"},
    **{"lt": "Lithuanian", "lv": "Latvian", "no": "Norwegian_Bokmal", "pl": "Polish", "pt": "Portuguese"},
    **{"ru": "Russian", "sv": "Swedish", "tr": "Turkish"},
}
"""Language → its list in jusText."""


def _justext() -> Extract:
    import justext

    def extract(page: GoldPage) -> str:
        name = STOP_LISTS.get(page.language or "")
        # Without a list, no share of stop words is required: the setting that its documentation gives for this case.
        limits = {} if name else {"stopwords_low": 0.0, "stopwords_high": 0.0}
        stop_list = justext.get_stoplist(name) if name else frozenset()
        paragraphs = justext.justext(page.html, stop_list, **limits)
        return "\n".join(paragraph.text for paragraph in paragraphs if not paragraph.is_boilerplate)

    return extract


def _boilerpy() -> Extract:
    from boilerpy3.extractors import ArticleExtractor

    extractor = ArticleExtractor(raise_on_failure=False)
    return lambda page: extractor.get_content(page.html)


def _newspaper() -> Extract:
    from newspaper import Article
    from newspaper.languages import get_available_languages

    languages = frozenset(get_available_languages())

    def extract(page: GoldPage) -> str:
        language = page.language if page.language in languages else "en"
        article = Article("http://page.invalid/", language=language, fetch_images=False)
        article.download(input_html=page.html)
        article.parse()
        return article.text

    return extract


def _goose() -> Extract:
    from goose3 import Goose, text

    classes = {
        **{"ar": text.StopWordsArabic, "ja": text.StopWordsJapanese},
        **{"ko": text.StopWordsKorean, "zh": text.StopWordsChinese},
    }

    @cache
    def of_language(code: str) -> Goose:
        words = {"stopwords_class": classes[code]} if code in classes else {}
        return Goose({"enable_image_fetching": False, "strict": False, "target_language": code, **words})

    return lambda page: of_language(page.language or "en").extract(raw_html=page.html).cleaned_text


def _gne() -> Extract:
    from gne import GeneralNewsExtractor
    from gne.exceptions import NoContentException

    extractor = GeneralNewsExtractor()

    def extract(page: GoldPage) -> str:
        try:
            return extractor.extract(page.html)["content"]
        except NoContentException:
            return ""

    return extract


OF_PIPELINE: tuple[str, ...] = get_args(ExtractConfig.model_fields["extractor"].annotation)
FOLDS = Path(__file__).parents[2] / "build" / "main_text"
"""Folder of the models that `make fit-main-text` fits, one for each fold on the pages of the other four."""


def _penstock(fold: int) -> Callable[[str], str]:
    model = str(FOLDS / f"fold-{fold}.npz")
    return lambda html: penstock.extract(html, extractor="penstock", model=model).text


def _penstock_by_fold() -> Extract:
    if not all((FOLDS / f"fold-{fold}.npz").exists() for fold in range(NUM_FOLDS)):
        raise ImportError(f"no models of the folds in {FOLDS}: run `make fit-main-text`")
    return by_fold(_penstock)()


CROSS_VALIDATED: Mapping[str, Load] = {"penstock": _penstock_by_fold}
"""Extractors of the pipeline that are trained on these pages, by name, made with `by_fold`. They replace the shipped
extractor of the name, which is measured as `NAME (shipped)`. That one has seen the pages, so only its time is valid."""
LIBRARIES: Mapping[str, tuple[str, Load]] = {
    "trafilatura, no comments": ("trafilatura", _trafilatura_without_comments),
    "resiliparse library": ("Resiliparse", _resiliparse_as_it_comes),
    "readability-lxml": ("readability-lxml", _readability),
    "jusText": ("jusText", _justext),
    "boilerpy3": ("boilerpy3", _boilerpy),
    "newspaper4k": ("newspaper4k", _newspaper),
    "goose3": ("goose3", _goose),
    "gne": ("gne", _gne),
    "whole page": ("Resiliparse", _whole_page),
}
"""Other extractors: name → the distribution that it needs, and its function. "whole page" extracts all text. Those that
need to know the language (jusText, newspaper4k, goose3) get that of the answer, which is an advantage."""


def loaders() -> dict[str, Load]:
    """Every extractor by name: those of the pipeline, as its settings name them, and the libraries."""
    named = {name: by_stage(name) for name in OF_PIPELINE}
    shipped = {f"{name} (shipped)": named[name] for name in CROSS_VALIDATED}
    return {**named, **CROSS_VALIDATED, **shipped, **{name: load for name, (_, load) in LIBRARIES.items()}}


def label_of(name: str) -> str:
    """The name of an extractor with the version of its library."""
    try:
        return f"{name} {version(LIBRARIES[name][0])}" if name in LIBRARIES else name
    except PackageNotFoundError:
        return name
