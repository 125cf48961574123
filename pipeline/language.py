"""Language of a document: the most probable label of a fastText model, its probability, and which languages stay.

Whether a page is mixed is told by excerpts evenly spread over the whole text: what share of them is in the document's
language, and which language most others are in.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from pipeline.engine.stage import EVERY, Check, Cutoffs, Drop, PerDocument, Row, RowFunction
from schemas.config import Section, decision, location, suggest_name
from schemas.errors import ConfigError

MODEL = "language"
LABEL_PREFIX = "__label__"


class LanguageConfig(Section):
    """The section `[language]` of a recipe."""

    model: str = location("lid.176.ftz")
    """Name in the model store, or path, of a fastText model whose labels are language codes."""
    languages: tuple[str, ...] = ("en",)
    """Languages that stay, by the model's codes; empty: all."""
    min_score: float = Field(0.65, ge=0, le=1)
    """Probability of the language from which a document stays; 0.65 is FineWeb's (arXiv 2406.17557)."""
    max_chars: int = Field(4_000, ge=1)
    """How much of a text is looked at [code points]. On 3,320 real pages 4,000 give the same language as the whole text
    wherever that reaches min_score, in two thirds of the time."""
    excerpts: int = Field(12, ge=0)
    """Excerpts of the whole text that tell a mixed page; as many again between them where not all agree; 0: none."""
    excerpt_chars: int = Field(60, ge=20)
    """Length of an excerpt [code points]; a text of less than two is not measured."""
    min_excerpt_score: float = Field(0.65, ge=0, le=1)
    """Probability from which the language of an excerpt counts; others are left out of the shares."""
    min_second_share: float = Field(0.1, ge=0, le=1)
    """Share of the excerpts from which another language is named as the second; two of them are the least."""
    min_language_share: float | None = decision(None, ge=0, le=1)
    """Share of the excerpts in the document's language from which it stays; absent: mixed pages stay."""

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "LanguageConfig":
        if self.excerpts == 1:
            raise ValueError("excerpts: expected 0 or at least 2, got 1. One excerpt cannot disagree with another.")
        if self.min_language_share is not None and not self.excerpts:
            raise ValueError("min_language_share would be ignored: nothing is measured with excerpts = 0")
        return self


def make_language(config: LanguageConfig, models: Mapping[str, str]) -> RowFunction:
    """The function that adds language and language_score to a row and compares them with the settings.

    Raises ConfigError if the model cannot be read or does not know one of the languages.
    """
    model = load_model(models[MODEL])
    wanted = frozenset(config.languages)
    _check_languages(wanted, model, config.model)

    def language(row: Row) -> Drop | None:
        code, score = predict(model, row["text"][: config.max_chars])
        row["language"], row["language_score"] = code, score
        row["language_share"] = row["second_language"] = None
        if wanted and code not in wanted:
            return Drop("language_not_wanted", score)
        row["language_share"], row["second_language"] = mixture(model, row["text"], code, config)
        if not score >= config.min_score:  # a broken model answers NaN
            return Drop("language_uncertain", score, config.min_score)
        return None

    return language


def mixture(model: Any, text: str, language: str, config: LanguageConfig) -> tuple[float | None, str | None]:
    """The share of a text's excerpts that are in its language, as a float32 holds it, and the second language, if any.

    Both are None for a text too short to compare, or where no excerpt's language is sure.
    """
    count = min(config.excerpts, len(text) // config.excerpt_chars)
    if count < 2:
        return None, None
    flat = text.replace("\n", " ")
    step = (len(text) - config.excerpt_chars) / (count - 1)
    found = Counter(_sure_languages(model, flat, [int(i * step) for i in range(count)], config))
    if found.total() > found[language]:  # on 4 % of 1,346 real pages; a second look, so that chance decides less
        found.update(_sure_languages(model, flat, [int((i + 0.5) * step) for i in range(count - 1)], config))
    total, own = found.total(), found.pop(language, 0)
    if not total:
        return None, None
    second, excerpts = max(found.items(), key=lambda item: (item[1], item[0]), default=("", 0))
    mixed = excerpts >= 2 and excerpts / total >= config.min_second_share
    return float(np.float32(own / total)), second if mixed else None


def _sure_languages(model: Any, text: str, starts: Sequence[int], config: LanguageConfig) -> list[str]:
    labels, scores = model.predict([text[start : start + config.excerpt_chars] for start in starts])
    sure = config.min_excerpt_score
    return [label[0].removeprefix(LABEL_PREFIX) for label, score in zip(labels, scores) if score[0] >= sure]


def checks(config: LanguageConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> Sequence[Check]:
    """The check of the share, if it is asked for."""
    if config.min_language_share is None:
        return ()
    limits = {EVERY: config.min_language_share}
    return (Check("language_mixed", "language_share", "min_language_share", limits),)


def load_model(path: str) -> Any:
    """The fastText model in a file. Raises ConfigError if the file does not hold one."""
    import fasttext

    try:
        return fasttext.load_model(path)
    except ValueError as error:
        raise ConfigError(f"language.model: expected a fastText model, got {error}. Give another file.") from error


def predict(model: Any, text: str) -> tuple[str, float]:
    """The most probable language of a text and its probability in 0..1, as a float32 holds it."""
    labels, scores = model.predict([text.replace("\n", " ")])  # a bare string fails on numpy 2
    return labels[0][0].removeprefix(LABEL_PREFIX), float(np.float32(min(scores[0][0], 1.0)))


def _check_languages(wanted: Iterable[str], model: Any, name: str) -> None:
    known = {label.removeprefix(LABEL_PREFIX) for label in model.get_labels()}
    wrong = [f"{code!r}{suggest_name(code, known)}" for code in sorted(wanted) if code not in known]
    if wrong:
        raise ConfigError(
            f"language.languages: expected codes that {name} knows, got {', '.join(wrong)}. Correct them."
        )


def _models(config: LanguageConfig) -> dict[str, str]:
    return {MODEL: config.model}


LANGUAGE = PerDocument(
    name="language",
    version=2,
    config=LanguageConfig,
    reads=("text",),
    adds=("language", "language_score", "language_share", "second_language"),
    reasons={
        "language_not_wanted": "the most probable language is not one of languages; the value is its probability",
        "language_uncertain": "the most probable language is less probable than min_score",
    },
    make=make_language,
    models=_models,
    ends=True,
    verdicts={"language_mixed": "too few excerpts are in the document's language"},
    checks=checks,
)
