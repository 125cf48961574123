"""The pii stage: detects personal data by pattern and checksum and replaces it by typed placeholders.

It searches only the candidate windows of a text (`candidates`), runs the recognizers of the configured types on them
(`types`, `phones`), and resolves overlaps deterministically. No detected value is stored anywhere.
"""

import json
import re
import tempfile
import zipfile
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import field_validator, model_validator

from pipeline.engine.stage import PerDocument, Row, RowFunction
from pipeline.pii.candidates import FAMILIES, candidate_windows, fold, join_windows
from pipeline.pii.phones import find_phones
from pipeline.pii.types import DEFAULT_TYPES, TYPE_NAMES, LoadedRecognizer, load_recognizers
from schemas.config import Section, location, suggest_name
from schemas.errors import ConfigError

Span = tuple[int, int, str, float]
"""(start, end, type, score) of a value in a text."""
PHONE_FIELD = re.compile("phone|tel|mobil|fax", re.IGNORECASE)
"""Names of fields whose numbers may be phone numbers."""
_RANK = {name: index for index, name in enumerate(TYPE_NAMES)}
NER_CHARS = 100_000
"""Maximum length of text that a spaCy pipeline processes at once [characters]; its memory grows with this length."""
NER_SCORE = 0.4
"""Score of a name. It is below the score of every pattern, so that an e-mail or IP address inside a name counts as an
address."""


class PiiConfig(Section):
    """The section `[pii]` of a recipe: the types of personal data to replace."""

    types: tuple[str, ...] = DEFAULT_TYPES
    """Types to replace, each by its placeholder, such as `<EMAIL>`. The default has every type but `secret`, keys and
    passwords in source code, and those without check digits: `br_cnpj`, `coordinates`, `mac`, `passport`,
    `uk_driving_licence`, `us_driver_license`, `username` and `vehicle_plate`."""
    ner_model: str | None = location(None)
    """Path of a spaCy pipeline that recognizes names, as one wheel or zip file; None keeps names."""
    ner_labels: dict[str, str] = dict.fromkeys(("PERSON", "PER"), "person")
    """Type of personal data by entity label of the spaCy pipeline; entities with other labels are kept."""

    @field_validator("types")
    @classmethod
    def _known(cls, types: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [f"{name!r}{suggest_name(name, TYPE_NAMES)}" for name in types if name not in TYPE_NAMES]
        if wrong:
            raise ValueError(
                f"expected types of personal data, got {', '.join(wrong)}. Set pii.types to some of "
                f"{', '.join(TYPE_NAMES)}."
            )
        return types

    @model_validator(mode="after")
    def _used(self) -> "PiiConfig":
        if self.ner_model is None and "ner_labels" in self.model_fields_set:
            raise ValueError(
                "ner_labels: expected pii.ner_model to be set too, got no model. Set pii.ner_model, or remove "
                "pii.ner_labels."
            )
        return self


class Redactor:
    """Finds and replaces personal data in texts, with recognizers that are loaded once."""

    def __init__(self, types: tuple[str, ...] = DEFAULT_TYPES, find_names: Callable[[str], list[Span]] | None = None):
        self._families: dict[str, list[LoadedRecognizer]] = {}
        for loaded in load_recognizers(types):
            self._families.setdefault(loaded.kind.family, []).append(loaded)
        self._phones = "phone" in types
        self._find_names = find_names

    def redact(self, text: str, language: str | None = None) -> tuple[str, dict[str, int]]:
        """Return the text with all personal data replaced by placeholders, and the number of replacements by type."""
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
        """Return the spans of the personal data to replace, in order and without overlaps."""
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
        if self._phones and seen.get("digits", True):  # The default applies if no other type searched for digits.
            spans += [(start, end, "phone", score) for start, end, score in find_phones(text, folded, language)]
        if self._find_names:
            spans += self._find_names(text)
        return without_overlaps(spans)


def _whole(folded: str, start: int, end: int) -> bool:
    """Return True if folded[start:end] is not part of a longer number or word."""
    # A recognizer sees only a window of the text, so it cannot test this at the ends of the window.
    return not any(
        (left.isdigit() and right.isdigit()) or (left.isalpha() and right.isalpha())
        for left, right in ((folded[start - 1 : start], folded[start]), (folded[end - 1], folded[end : end + 1]))
    )


def without_overlaps(spans: list[Span]) -> list[Span]:
    """Remove overlapping spans of personal data; return the remaining spans sorted by start.

    Of two spans that overlap, the span with the higher score is kept. If the scores are equal, the longer span is kept.
    If the lengths are equal too, the earlier span is kept.
    """
    chosen: list[Span] = []
    for span in sorted(spans, key=lambda s: (-s[3], s[0] - s[1], s[0], _RANK.get(s[2], len(_RANK)), s[2])):
        index = bisect_left(chosen, span)
        before, after = chosen[max(0, index - 1) : index], chosen[index : index + 1]
        if (not before or before[0][1] <= span[0]) and (not after or span[1] <= after[0][0]):
            insort(chosen, span)
    return chosen


def load_name_finder(path: str, labels: Mapping[str, str]) -> Callable[[str], list[Span]]:
    """Load the spaCy pipeline in a wheel or zip file, and return a function that finds entities with these labels.

    Raises ConfigError if the file contains no pipeline.
    """
    import spacy

    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
        configs = sorted(Path(folder).rglob("config.cfg"), key=lambda file: (len(file.parts), file))
        if not configs:
            raise ConfigError(
                f"pii.ner_model: expected a spaCy pipeline, got no config.cfg in {path}. "
                "Set pii.ner_model to the wheel of a spaCy pipeline."
            )
        pipeline = spacy.load(configs[0].parent)

    def find_names(text: str) -> list[Span]:
        spans: list[Span] = []
        for start in range(0, len(text), NER_CHARS):
            for entity in pipeline(text[start : start + NER_CHARS]).ents:
                if entity.label_ in labels:
                    spans.append((start + entity.start_char, start + entity.end_char, labels[entity.label_], NER_SCORE))
        return spans

    return find_names


def make_pii(config: PiiConfig, models: Mapping[str, str]) -> RowFunction:
    """Load the recognizers and return the function that replaces personal data in a row.

    Personal data is replaced in text, title, URL and licence, and in the names and values of the fields in `meta`.
    """
    # The pipeline is loaded before presidio, whose import hides torch, because the pipeline may require torch.
    find_names = load_name_finder(models["ner"], config.ner_labels) if config.ner_model else None
    redactor = Redactor(config.types, find_names)

    def replace(row: Row) -> None:
        counts: Counter[str] = Counter()
        for column in ("text", "title", "url", "licence"):
            if row.get(column):
                row[column], replaced = redactor.redact(row[column], row["language"])
                counts.update(replaced)
        if row.get("meta"):
            row["meta"] = redact_json(row["meta"], lambda text: redactor.redact(text, row["language"]), counts)
        row["pii_counts"] = dict(sorted(counts.items()))
        row["num_chars"], row["num_bytes"] = len(row["text"]), len(row["text"].encode())

    return replace


def redact_json(text: str, redact: Callable[[str], tuple[str, dict[str, int]]], counts: Counter[str]) -> str:
    """Return the JSON text with personal data replaced in all names, texts and numbers; `counts` is increased by type.

    A number that is personal data becomes a text. Digits alone can be a time or a count, so a number is a phone number
    only in a field with such a name. If two names of an object become equal, the later one gets a number.
    """

    def replaced(value: str) -> str:
        safe, found = redact(value)
        counts.update(found)
        return safe

    def walk(value: Any, field: str) -> Any:
        if isinstance(value, str):
            return replaced(value)
        if isinstance(value, list):
            return [walk(item, field) for item in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            written = json.dumps(value)
            _, found = redact(written)
            is_personal = found and ({*found} != {"phone"} or PHONE_FIELD.search(field) is not None)
            return replaced(written) if is_personal else value
        if not isinstance(value, dict):
            return value
        safe: dict[str, Any] = {}
        for name, item in value.items():
            own = plain = replaced(name)
            number = 1
            while own in safe:
                number += 1
                own = f"{plain} {number}"
            safe[own] = walk(item, name)
        return safe

    return json.dumps(walk(json.loads(text), ""), ensure_ascii=False, separators=(",", ":"))


def model_files(config: PiiConfig) -> dict[str, str]:
    """Return {"ner": path of the spaCy pipeline}; empty if pii.ner_model is not set."""
    return {"ner": config.ner_model} if config.ner_model else {}


PII = PerDocument(
    name="pii",
    version=4,
    config=PiiConfig,
    reads=("text", "title", "url", "licence", "meta", "language"),
    adds=("text", "title", "url", "licence", "meta", "pii_counts", "num_chars", "num_bytes"),
    reasons={},
    make=make_pii,
    models=model_files,
    ends=False,
)
