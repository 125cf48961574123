"""Personal data: found by pattern and checksum, replaced by typed placeholders; no value ever leaves the text.

A redactor looks only at the windows of a text where something can stand (`candidates`), runs the recognisers of the
configured types there (`types`, `phones`), and decides overlaps the same way every time.
"""

import tempfile
import zipfile
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import field_validator, model_validator

from pipeline.engine.stage import PerDocument, Row, RowFunction
from pipeline.pii.candidates import FAMILIES, candidate_windows, fold, join_windows
from pipeline.pii.phones import find_phones
from pipeline.pii.types import TYPE_NAMES, LoadedRecognizer, load_recognizers
from schemas.config import Section, location, suggest_name
from schemas.errors import ConfigError

Span = tuple[int, int, str, float]
"""(start, end, type, score)."""
NER_CHARS = 100_000
"""A spaCy pipeline sees at most this much text at once: its memory grows with it [characters]."""
NER_SCORE = 0.4
"""Below every pattern's score: an address inside an organisation's name is still an address."""


class PiiConfig(Section):
    """Which personal data is replaced."""

    types: tuple[str, ...] = TYPE_NAMES
    """Types that are replaced, each by its placeholder such as `<EMAIL>`."""
    ner_model: str | None = location(None)
    """Path of a spaCy pipeline that finds names, as a wheel or zip file (one file, one digest); None = names stay."""
    ner_labels: dict[str, str] = dict.fromkeys(("PERSON", "PER"), "person")
    """Type by label of that pipeline; other labels are left alone."""

    @field_validator("types")
    @classmethod
    def _known(cls, types: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [f"{name!r}{suggest_name(name, TYPE_NAMES)}" for name in types if name not in TYPE_NAMES]
        if wrong:
            raise ValueError(f"no such type: {', '.join(wrong)}")
        return types

    @model_validator(mode="after")
    def _used(self) -> "PiiConfig":
        if self.ner_model is None and "ner_labels" in self.model_fields_set:
            raise ValueError("ner_labels would be ignored without ner_model")
        return self


class Redactor:
    """The recognisers of a config, loaded once per worker; its methods are pure functions of their arguments."""

    def __init__(self, types: tuple[str, ...] = TYPE_NAMES, find_names: Callable[[str], list[Span]] | None = None):
        self._families: dict[str, list[LoadedRecognizer]] = {}
        for loaded in load_recognizers(types):
            self._families.setdefault(loaded.kind.family, []).append(loaded)
        self._phones = "phone" in types
        self._find_names = find_names

    def redact(self, text: str, language: str | None = None) -> tuple[str, dict[str, int]]:
        """The text with every value replaced by its placeholder, and the number of replacements by type."""
        spans = self.find(text, language)
        if not spans:
            return text, {}
        pieces, end = [], 0
        for start, stop, name, _ in spans:
            pieces += [text[end:start], f"<{name.upper()}>"]
            end = stop
        pieces.append(text[end:])
        return "".join(pieces), dict(sorted(Counter(name for _, _, name, _ in spans).items()))

    def find(self, text: str, language: str | None = None) -> list[Span]:
        """The values that are replaced, in order, none overlapping another."""
        folded = fold(text)
        spans: list[Span] = []
        seen = {family: candidate_windows(folded, FAMILIES[family]) for family in self._families}
        for family, members in self._families.items():
            for chunk in join_windows(folded, seen[family]):
                for loaded in members:
                    for begin, stop, score, alone in loaded.find(chunk.text):
                        start = chunk.origin(begin)
                        end = start + stop - begin
                        if _whole(folded, start, end) and (alone or loaded.is_named(text, start, end)):
                            spans.append((start, end, loaded.kind.name, score))
        if self._phones and seen.get("digits", True):  # True: no other type has looked for digits
            spans += [(start, end, "phone", score) for start, end, score in find_phones(text, folded, language)]
        if self._find_names:
            spans += self._find_names(text)
        return without_overlaps(spans)


def _whole(folded: str, start: int, end: int) -> bool:
    """Whether a value is no part of a longer number or word: windows cut them, and a few patterns have no bounds."""
    return not any(
        (left.isdigit() and right.isdigit()) or (left.isalpha() and right.isalpha())
        for left, right in ((folded[start - 1 : start], folded[start]), (folded[end - 1], folded[end : end + 1]))
    )


def without_overlaps(spans: list[Span]) -> list[Span]:
    """The spans in order of position; of two that overlap the surer one stays, then the longer, then the earlier."""
    rank = {name: place for place, name in enumerate(TYPE_NAMES)}
    chosen: list[Span] = []
    for span in sorted(spans, key=lambda s: (-s[3], s[0] - s[1], s[0], rank.get(s[2], len(rank)), s[2])):
        place = bisect_left(chosen, span)
        before, behind = chosen[max(0, place - 1) : place], chosen[place : place + 1]
        if (not before or before[0][1] <= span[0]) and (not behind or span[1] <= behind[0][0]):
            insort(chosen, span)
    return chosen


def load_name_finder(path: str, labels: Mapping[str, str]) -> Callable[[str], list[Span]]:
    """A function that finds entities of the labels by the spaCy pipeline in a wheel or zip file. Raises ConfigError."""
    import spacy

    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
        found = sorted(Path(folder).rglob("config.cfg"), key=lambda file: (len(file.parts), file))
        if not found:
            raise ConfigError(f"pii.ner_model: expected a spaCy pipeline, got no config.cfg in {path}. Give its wheel.")
        pipeline = spacy.load(found[0].parent)

    def find_names(text: str) -> list[Span]:
        spans: list[Span] = []
        for start in range(0, len(text), NER_CHARS):
            for entity in pipeline(text[start : start + NER_CHARS]).ents:
                if entity.label_ in labels:
                    spans.append((start + entity.start_char, start + entity.end_char, labels[entity.label_], NER_SCORE))
        return spans

    return find_names


def make_pii(config: PiiConfig, models: Mapping[str, str]) -> RowFunction:
    """The stage's function, with its recognisers loaded."""
    # Before the recognisers, whose import hides torch, which a spaCy pipeline may want.
    find_names = load_name_finder(models["ner"], config.ner_labels) if config.ner_model else None
    redactor = Redactor(config.types, find_names)

    def replace(row: Row) -> None:
        counts: Counter[str] = Counter()
        for column in ("text", "title", "url"):
            if row[column]:
                row[column], found = redactor.redact(row[column], row["language"])
                counts.update(found)
        row["pii_counts"] = dict(sorted(counts.items()))
        row["num_chars"], row["num_bytes"] = len(row["text"]), len(row["text"].encode())

    return replace


def model_files(config: PiiConfig) -> dict[str, str]:
    """The spaCy pipeline, where one is configured."""
    return {"ner": config.ner_model} if config.ner_model else {}


PII = PerDocument(
    name="pii",
    version=2,
    config=PiiConfig,
    reads=("text", "title", "url", "language"),
    adds=("text", "title", "url", "pii_counts", "num_chars", "num_bytes"),
    reasons={},
    make=make_pii,
    models=model_files,
    ends=False,
)
