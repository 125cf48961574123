"""The language stage: predicts each document's language by a fastText model and drops languages not in the recipe.

To detect pages in more than one language, it also classifies short excerpts, one in each of equal parts of the text. It
stores the share of excerpts in the document's language, and the most frequent other language.

With `language.early`, it also drops pages before their extraction, by excerpts of what is between their tags.
"""

import hashlib
import html
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from pipeline.engine.stage import EVERY, Check, Cutoffs, Drop, PerDocument, Row, RowFunction
from pipeline.extract import native
from pipeline.extract.charset import DECODED, PLAIN_TEXT, decode
from pipeline.text import fasttext_model
from pipeline.text.fasttext_model import FastTextModel, readable
from schemas.config import Section, decision, location, suggest_name
from schemas.errors import ConfigError

MODEL = "language"
LABEL_PREFIX = "__label__"
NOT_WANTED = "language_not_wanted"
"""Reason of a drop: the recipe wants other languages."""
EARLY = "_dropped_early"
"""Field of a row: True if the page was dropped before its extraction."""
EARLY_EXCERPTS, EARLY_CHARS = 4, 300
"""Number and length of the excerpts of a page that is classified before its extraction [code points]."""
EARLY_LABELS = 5
"""Number of the most probable languages of an excerpt that are looked at."""
MIN_EARLY_SCORE = 0.2
"""A page is extracted if the wanted languages have this probability together in one of its excerpts. If English is
wanted, the limit drops 95 % of 1,982 real pages in other languages, and 1 of 1,818 that would be kept; with the 12
languages of the recipe `web`, 73 % of 472 and none of 3,236; with one of 29 other languages, 99 % and 2 of 1,518."""

_HIDDEN = ("head", "noscript", "script", "select", "style", "svg", "template", "textarea", "title")
"""Elements whose content is left out."""
_END_OF_NAME = r"(?![a-z0-9-])"
_MARKUP = re.compile(
    r"<!--.*?(?:-->|\Z)"
    rf"|<({'|'.join(_HIDDEN)}){_END_OF_NAME}.*?(?:</\1{_END_OF_NAME}[^>]*+(?:>|\Z)|\Z)"
    r"|<(?:/?[a-z]|[!?])[^>]*+(?:>|\Z)",
    re.IGNORECASE | re.DOTALL | re.ASCII,
)
"""A comment, a hidden element or a tag. One that is not closed extends to the end of the page."""


class LanguageConfig(Section):
    """The section `[language]` of a recipe: the languages to keep, and how the language of a text is determined."""

    model: str = location("lid.176.ftz")
    """Name in the model store, or path, of a fastText model whose labels are `__label__` and a language code."""
    languages: tuple[str, ...] = ("en",)
    """Codes of the languages to keep, as the model names them; an empty list keeps all languages."""
    min_score: float = Field(0.65, ge=0, le=1)
    """Minimum probability of the language; 0.65 is FineWeb's (arXiv 2406.17557)."""
    max_chars: int = Field(4_000, ge=1)
    """Maximum number of code points, from the start of the text, that are classified. On 3,320 real pages, 4,000 gave
    the same language as the whole text for every page whose whole text reaches min_score, in two thirds of the time."""
    excerpts: int = Field(12, ge=0)
    """Number of excerpts that are classified to detect a page in several languages; 0 turns this off. If an excerpt is
    not in the document's language, further excerpts between the first ones are classified."""
    excerpt_chars: int = Field(60, ge=20)
    """Length of an excerpt [code points]; a text shorter than two excerpts is not measured."""
    min_excerpt_score: float = Field(0.65, ge=0, le=1)
    """Minimum probability of an excerpt's language; excerpts below it are not counted."""
    min_second_share: float = Field(0.1, ge=0, le=1)
    """Minimum share of the excerpts that must be in another language before it is stored as second_language; at least
    two excerpts must be."""
    min_language_share: float | None = decision(None, ge=0, le=1)
    """Minimum share of the excerpts in the document's language; if it is not set, pages in several languages are kept.
    """
    early: bool = False
    """True to drop pages in other languages before their extraction, which takes most of the time of a page. Such a
    page has no text, title or metadata in the tables, and its language is that of the text between its tags, menus
    included."""

    def content(self) -> dict[str, Any]:
        """Return the fields that change what is measured, as JSON values; `early` only if it is set.

        Tables that were built before it existed stay valid.
        """
        return {name: value for name, value in super().content().items() if name != "early" or value}

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "LanguageConfig":
        if self.excerpts == 1:
            raise ValueError("excerpts: expected 0 or at least 2, got 1. Set language.excerpts to 0 or 2.")
        idle = sorted({"excerpt_chars", "min_excerpt_score", "min_second_share"} & self.model_fields_set)
        if idle and not self.excerpts:
            raise ValueError(
                f"{', '.join(idle)}: expected language.excerpts of at least 2, got 0, which classifies none. "
                f"Set language.excerpts, or remove {', '.join(f'language.{name}' for name in idle)}."
            )
        if self.min_language_share is not None and not self.excerpts:
            raise ValueError(
                "min_language_share: expected language.excerpts of at least 2, got 0. Set language.excerpts to 12."
            )
        if self.early and not self.languages:
            raise ValueError(
                "early: expected languages to keep, got none, so that no page is in another one. Set "
                "language.languages, or remove language.early."
            )
        return self


def make_language(config: LanguageConfig, models: Mapping[str, str]) -> RowFunction:
    """Return the function that adds the stage's columns to a row, and drops rows of unwanted or uncertain language.

    Raises ConfigError if the model cannot be read, or has no label for one of the languages to keep.
    """
    model = load_model(models[MODEL])
    kept = frozenset(config.languages)
    _check_languages(kept, model, config.model)

    def language(row: Row) -> Drop | None:
        code, score = predict(model, row["text"][: config.max_chars])
        row["language"], row["language_score"] = code, score
        row["language_share"] = row["second_language"] = None
        if kept and code not in kept:
            return Drop(NOT_WANTED, score)
        row["language_share"], row["second_language"] = mixture(model, row["text"], code, config)
        if not score >= config.min_score:  # A broken model returns NaN.
            return Drop("language_uncertain", score, config.min_score)
        return None

    return language


def make_early_language(config: LanguageConfig, models: Mapping[str, str]) -> RowFunction:
    """Return the function that drops a page whose visible text has no excerpt in a wanted language.

    A row that has a text already, and a page with less than an excerpt of visible text, pass. Raises ConfigError as
    `make_language` does.
    """
    model = load_model(models[MODEL])
    kept = frozenset(config.languages)
    _check_languages(kept, model, config.model)

    def early_language(row: Row) -> Drop | None:
        if row["text"] is not None:
            return None
        page = decode(row["_payload"], row["_http_charset"])
        text = page.text if row.get("mime") == PLAIN_TEXT else text_between_tags(page.text)
        scores = [_most_probable(model, excerpt) for excerpt in early_excerpts(text)]
        if not scores or any(sum(score[code] for code in kept & score.keys()) >= MIN_EARLY_SCORE for score in scores):
            row[DECODED] = page
            return None
        row["charset"], row["charset_from"], row[EARLY] = page.charset, page.origin, True
        totals: Counter[str] = Counter()
        for score in scores:
            totals.update(score)
        code, total = max(totals.items(), key=lambda item: (item[1], item[0]))
        row["language"], row["language_score"] = code, float(np.float32(min(total / len(scores), 1.0)))
        return Drop(NOT_WANTED, row["language_score"])

    return early_language


def early_excerpts(text: str) -> list[str]:
    """Return the excerpts of a page's text by which its language is predicted before extraction.

    They are in the middle of equal parts of the text; none if it is shorter than one excerpt.
    """
    count = min(EARLY_EXCERPTS, len(text) // EARLY_CHARS)
    starts = [int((number + 0.5) * len(text) / count - EARLY_CHARS / 2) for number in range(count)]
    return [html.unescape(text[start : start + EARLY_CHARS]) for start in starts]


def text_between_tags(page: str) -> str:
    """Return the text between the tags of a decoded page, with one space for each run of white space and tags.

    No parser is used. Menus and notices are part of the text, and entities are left as they are. The result is empty if
    the page has no text, or if a hidden element that has no end tag contains all of it.
    """
    if native.module is None:
        return text_between_tags_in_python(page)
    text: str = native.loaded().text_between_tags(page)
    return text


def text_between_tags_in_python(page: str) -> str:
    """Return the same as `text_between_tags`."""
    return " ".join(_MARKUP.sub(" ", page).split())


def _most_probable(model: FastTextModel, text: str) -> Counter[str]:
    """Return the probability of the most probable languages of a text, by code."""
    (found,) = model.predict([readable(" ".join(text.split()))], EARLY_LABELS)
    return Counter({label.removeprefix(LABEL_PREFIX): score for label, score in found})


def mixture(model: FastTextModel, text: str, language: str, config: LanguageConfig) -> tuple[float | None, str | None]:
    """Return the share of a text's excerpts in `language`, in float32 precision, and the second language of the text.

    The second language is None if too few excerpts are in another language. Both are None if the text is too short, or
    if no excerpt reaches min_excerpt_score.
    """
    count = min(config.excerpts, len(text) // config.excerpt_chars)
    if count < 2:
        return None, None
    flat = text.replace("\n", " ")
    starts = _excerpt_starts(text, count, config.excerpt_chars)
    counts = Counter(_sure_languages(model, flat, starts[:count], config))
    if counts.total() > counts[language]:  # True for 4 % of 1,346 real pages; more excerpts reduce the variance.
        counts.update(_sure_languages(model, flat, starts[count:], config))
    total, own = counts.total(), counts.pop(language, 0)
    if not total:
        return None, None
    second, excerpts = max(counts.items(), key=lambda item: (item[1], item[0]), default=("", 0))
    mixed = excerpts >= 2 and excerpts / total >= config.min_second_share
    return float(np.float32(own / total)), second if mixed else None


def _excerpt_starts(text: str, count: int, size: int) -> list[int]:
    """Return the starts of an excerpt of `size` characters in each of `count` equal parts of a text, then between them.

    The second ones, one fewer, are in parts that begin in the middle of the first. All places depend on every character
    of the text, so that another language cannot be written around them.
    """
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    draws = np.frombuffer(hashlib.shake_128(digest).digest(4 * (2 * count - 1)), "<u4") / (1 << 32)
    width = len(text) / count
    parts = [*range(count), *(part + 0.5 for part in range(count - 1))]
    return [int(part * width + draw * (width - size)) for part, draw in zip(parts, draws.tolist(), strict=True)]


def _sure_languages(model: FastTextModel, text: str, starts: Sequence[int], config: LanguageConfig) -> list[str]:
    found = model.predict([readable(text[start : start + config.excerpt_chars]) for start in starts], 1)
    sure = float(np.float32(config.min_excerpt_score))
    return [label.removeprefix(LABEL_PREFIX) for first in found for label, score in first if score >= sure]


def checks(config: LanguageConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> Sequence[Check]:
    """Return the check of the column `language_share`, or no check if the recipe does not set min_language_share."""
    if config.min_language_share is None:
        return ()
    limits = {EVERY: config.min_language_share}
    return (Check("language_mixed", "language_share", "min_language_share", limits),)


def load_model(path: str) -> FastTextModel:
    """Load a fastText model. Raises ConfigError if the file is not a fastText model."""
    try:
        return fasttext_model.load_model(path)
    except ValueError as error:
        raise ConfigError(
            f"language.model: expected a fastText model, got a file that cannot be loaded ({error}). "
            "Set language.model to lid.176.ftz, or to the path of another fastText model."
        ) from error


def known_languages(path: str) -> set[str]:
    """Return the codes of the languages that a model may predict."""
    return {label.removeprefix(LABEL_PREFIX) for label in load_model(path).labels()}


def predict(model: FastTextModel, text: str) -> tuple[str, float]:
    """Return the most probable language of a text and its probability in 0..1, rounded to float32.

    Without a language, as of words of which the model knows none, the code is empty and the probability 0.
    """
    (found,) = model.predict([readable(text.replace("\n", " "))], 1)
    label, score = found[0] if found else ("", 0.0)
    return label.removeprefix(LABEL_PREFIX), min(score, 1.0)


def _check_languages(codes: Iterable[str], model: FastTextModel, name: str) -> None:
    known = {label.removeprefix(LABEL_PREFIX) for label in model.labels()}
    wrong = [f"{code!r}{suggest_name(code, known)}" for code in sorted(codes) if code not in known]
    if wrong:
        raise ConfigError(
            f"language.languages: expected codes of languages that the model {name} knows, got {', '.join(wrong)}. "
            f"Set language.languages to codes such as {', '.join(sorted(known)[:3])}."
        )


def _models(config: LanguageConfig) -> dict[str, str]:
    return {MODEL: config.model}


LANGUAGE = PerDocument(
    name="language",
    version=4,
    config=LanguageConfig,
    reads=("text",),
    adds=("language", "language_score", "language_share", "second_language"),
    reasons={
        NOT_WANTED: "the most probable language is not one of languages; the value is its probability",
        "language_uncertain": "the most probable language is less probable than min_score",
    },
    make=make_language,
    models=_models,
    ends=True,
    verdicts={"language_mixed": "too few excerpts are in the document's language"},
    checks=checks,
)
