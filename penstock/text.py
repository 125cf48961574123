"""What the pipeline does to one page or one text: extraction, language, quality signals, removal of personal data.

The functions run the stages of the pipeline on a single row, so their results are those of a run with the same
settings. Settings are passed by name, as in the section of the recipe that a function names. Calls from several threads
run one after another: the stages keep caches and a process of their own, which serve one text at a time.
"""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pipeline.engine.stage import Drop, PerDocument, Row, RowFunction
from pipeline.extract.extract import EXTRACT, METADATA, NEEDS_A_RUN
from pipeline.language import LANGUAGE
from pipeline.models import ModelsConfig, ensure_model
from pipeline.pii.stage import PII
from pipeline.quality.config import QualityConfig
from pipeline.quality.recipe_rules import BrokenRule, check_rules
from pipeline.quality.stage import QUALITY
from schemas.config import build_recipe
from schemas.errors import ConfigError

NOT_SIGNALS = ("text", "language", "cuts", "lines", "num_bytes")
"""Columns in a row of the quality stage that are not measurements of the text."""
CACHED = 32
"""Number of stages with different settings that stay loaded."""
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class Extracted:
    """The main text of a page."""

    text: str
    """Main text, in NFC and with `\\n` as the only line end; empty if the page was dropped."""
    title: str | None
    """Title without the name of the site, if metadata are read; else the content of the element `title`."""
    charset: str | None
    """Encoding that the page was decoded with, by its WHATWG name."""
    drop: Drop | None
    """Rule that would drop the page in a run, such as `no_text`, with value and limit; None if it is kept."""
    metadata: Mapping[str, Any]
    """What the page declares, such as `author` and `date_published`; what it does not declare is left out."""
    extracted_by: str | None
    """Extractor that the text is from; None if the page was dropped before."""
    expected_f1: float | None
    """F1 of the text that the extractor `penstock` expects, in 0..1."""


class Redacted(str):
    """A text with personal data replaced by placeholders such as `<EMAIL>`. It is a `str` with two attributes."""

    counts: Mapping[str, int]
    """Number of replacements by type, such as {"email": 1}."""

    def __new__(cls, text: str, counts: Mapping[str, int]) -> "Redacted":
        """Return the text with the numbers of replacements attached."""
        redacted = super().__new__(cls, text)
        redacted.counts = counts
        return redacted

    def __getnewargs__(self) -> tuple[str, Mapping[str, int]]:  # type: ignore[override]  # a copy of str has its text
        return self.text, self.counts

    @property
    def text(self) -> str:
        """The text as a plain `str`."""
        return str.__str__(self)


class Language(str):
    """The code of a language, such as "de". It is a `str` with further attributes."""

    score: float
    """Probability of the language, in 0..1."""
    share: float | None
    """Share of the text's excerpts that are in this language; None if the text is too short to tell."""
    second: str | None
    """Second language of a text in several languages, else None."""

    def __new__(cls, code: str, score: float, share: float | None, second: str | None) -> "Language":
        """Return the code with the measurements attached."""
        language = super().__new__(cls, code)
        language.score, language.share, language.second = score, share, second
        return language

    def __getnewargs__(self) -> tuple[str, float, float | None, str | None]:  # type: ignore[override]
        return str.__str__(self), self.score, self.share, self.second


def extract(html: str | bytes, charset: str | None = None, url: str | None = None, **settings: Any) -> Extracted:
    """Return the main text, the title and the metadata of an HTML page.

    `html`: the page as bytes, whose encoding is detected, or as decoded text. `charset`: the encoding that the HTTP
    header declares, if there is one. `url`: its address, by which relative links are resolved. `settings`: of the
    section `[extract]`, such as `extractor="trafilatura"`. Raises ConfigError for a wrong setting.
    """
    if ignored := sorted({*NEEDS_A_RUN} & settings.keys()):
        raise ConfigError(
            f"penstock.extract: expected settings of one page, got {', '.join(ignored)}, which a run uses. Remove "
            "them, and call it with extractor=NAME for each extractor."
        )
    if isinstance(html, str):
        html, charset = html.encode("utf-8", "replace"), "utf-8"
    row: Row = {"_payload": html, "_http_charset": charset, "mime": "text/html", "text": None, "url": url}
    drop = _run(EXTRACT, settings, row)
    text = row["text"] if drop is None else ""
    metadata = {name: row[name] for name in METADATA if row.get(name) is not None}
    return Extracted(
        text,
        row.get("title"),
        row.get("charset"),
        drop,
        metadata,
        row.get("extracted_by"),
        row.get("expected_f1"),
    )


def detect_language(text: str, **settings: Any) -> Language:
    """Return the most probable language of a text, with its probability.

    `settings`: of the section `[language]`. The model is fetched to the model store at the first call. Raises
    ConfigError for a wrong setting, or if the model can neither be found nor fetched.
    """
    row: Row = {"text": text}
    _run(LANGUAGE, {"languages": (), "min_score": 0.0} | settings, row)
    return Language(row["language"], row["language_score"], row["language_share"], row["second_language"])


def signals(text: str, language: str | None = None, **settings: Any) -> dict[str, Any]:
    """Return the quality signals of a text by name, such as `gopher_num_words`.

    `penstock settings quality` prints the families of signals; `families=[...]` chooses some. `language`: its code;
    None = detect it. `settings`: of the section `[quality]`. Signals that are not defined for the language are left
    out. Raises ConfigError for a wrong setting.
    """
    code = str(detect_language(text)) if language is None else language
    row: Row = {"text": text, "language": code}
    rules = {"rules": ()} if "families" in settings else {}  # no rule is checked here, so none needs its family
    _run(QUALITY, rules | settings, row)
    return {
        name: value
        for name, value in row.items()
        if name not in NOT_SIGNALS and not name.startswith("_") and value is not None
    }


def check(text: str, language: str | None = None, **settings: Any) -> list[BrokenRule]:
    """Return the quality rules that would drop a text, with the measured value and the limit of each.

    The rules are those of the section `[quality]`; `settings` change them, as `min_words=30` or `rules=["c4"]`.
    `language`: its code; None = detect it. Raises ConfigError for a wrong setting.
    """
    code = str(detect_language(text)) if language is None else language
    config = build_recipe({QUALITY.name: settings}, {QUALITY.name: QualityConfig}, "penstock [quality]")
    return check_rules(signals(text, code, **settings), config.section(QUALITY.name, QualityConfig), code)


def redact(text: str, language: str | None = None, **settings: Any) -> Redacted:
    """Return the text with personal data replaced by placeholders, such as `<EMAIL>`.

    `language`: code of the text's language, by which phone numbers without a country code are read; None = unknown.
    `settings`: of the section `[pii]`, such as `types=["email", "phone"]`. Raises ConfigError for a wrong setting.
    """
    row: Row = {"text": text, "title": None, "url": None, "language": language}
    _run(PII, settings, row)
    return Redacted(row["text"], row["pii_counts"])


def _run(stage: PerDocument, settings: Mapping[str, Any], row: Row) -> Drop | None:
    """Run a stage on a row, and return its drop, if any."""
    with _ONE_AT_A_TIME:
        return _stage(stage, settings)(row)


def _stage(stage: PerDocument, settings: Mapping[str, Any]) -> RowFunction:
    try:
        return _loaded(stage.name, json.dumps(settings, sort_keys=True))
    except TypeError as error:
        raise ConfigError(
            f"penstock [{stage.name}]: expected settings that a recipe can hold, got {settings} ({error}). Use "
            "numbers, texts, lists and dictionaries."
        ) from error


STAGES: Mapping[str, PerDocument] = {stage.name: stage for stage in (EXTRACT, LANGUAGE, QUALITY, PII)}


@lru_cache(CACHED)
def _loaded(name: str, settings: str) -> RowFunction:
    """Return the function of a stage, with its models loaded."""
    stage = STAGES[name]
    recipe = build_recipe({name: json.loads(settings)}, {name: stage.config}, f"penstock [{name}]")
    config = recipe[name]
    models = {model: str(ensure_model(place, ModelsConfig()).path) for model, place in stage.models(config).items()}
    return stage.make(config, models)
