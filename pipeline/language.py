"""Language of a document: the most probable label of a fastText model, its probability, and which languages stay."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from pydantic import Field

from pipeline.stage import Drop, PerDocument, Row, RowFunction
from schemas.config import Section, location, nearest
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
        if wanted and code not in wanted:
            return Drop("language_not_wanted", score)
        if not score >= config.min_score:  # a broken model answers NaN
            return Drop("language_uncertain", score, config.min_score)
        return None

    return language


def load_model(path: str) -> Any:
    """The fastText model in a file. Raises ConfigError if the file does not hold one."""
    import fasttext

    try:
        return fasttext.load_model(path)
    except ValueError as error:
        raise ConfigError(f"language.model: promised a fastText model, found {error}; give another file") from error


def predict(model: Any, text: str) -> tuple[str, float]:
    """The most probable language of a text and its probability in 0..1, as a float32 holds it."""
    labels, scores = model.predict([text.replace("\n", " ")])  # a bare string fails on numpy 2
    return labels[0][0].removeprefix(LABEL_PREFIX), float(np.float32(min(scores[0][0], 1.0)))


def _check_languages(wanted: Iterable[str], model: Any, name: str) -> None:
    known = {label.removeprefix(LABEL_PREFIX) for label in model.get_labels()}
    wrong = [f"{code!r}{nearest(code, known)}" for code in sorted(wanted) if code not in known]
    if wrong:
        raise ConfigError(
            f"language.languages: promised codes that {name} knows, found {', '.join(wrong)}; correct them"
        )


def _models(config: LanguageConfig) -> dict[str, str]:
    return {MODEL: config.model}


LANGUAGE = PerDocument(
    name="language",
    version=1,
    config=LanguageConfig,
    reads=("text",),
    adds=("language", "language_score"),
    reasons={
        "language_not_wanted": "the most probable language is not one of languages; the value is its probability",
        "language_uncertain": "the most probable language is less probable than min_score",
    },
    make=make_language,
    models=_models,
    ends=True,
)
