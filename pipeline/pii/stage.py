"""The pii stage: detects personal data by pattern, checksum and name recognition, and replaces it.

It searches only the candidate windows of a text (`candidates`), runs the recognizers of the configured types on them
(`types`, `phones`, `names`), and resolves overlaps deterministically. No detected value is stored anywhere.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.engine.stage import Drop, PerDocument, Row, RowFunction
from pipeline.pii.candidates import (
    ESCAPES,
    FAMILIES,
    NEAR_BEFORE,
    candidate_windows,
    fold,
    join_windows,
    unescape,
    without_emphasis,
)
from pipeline.pii.names import EVERY_LANGUAGE, NO_NAMES, NameFinder, Names, is_covered
from pipeline.pii.phones import find_phones
from pipeline.pii.replacement import BY_TYPE, KEYED, MAX_PLACEHOLDER, Form, Replacement
from pipeline.pii.secrets import SECRETS
from pipeline.pii.types import DEFAULT_TYPES, TYPE_NAMES, LoadedRecognizer, load_recognizers
from schemas.config import Section, location, suggest_name
from schemas.key_file import read_key

Span = tuple[int, int, str, float]
"""(start, end, type, score) of a value in a text."""
PHONE_FIELD = re.compile("phone|tel|mobil|fax", re.IGNORECASE)
"""Names of fields whose numbers may be phone numbers."""
COLUMNS = ("text", "title", "url", "licence")
"""Columns of a row in which personal data is replaced, besides the fields in `meta`."""
NAMED_COLUMNS = ("title", "text", "meta")
"""Columns in which names are recognized; they are replaced in every column."""
NAMES_KEPT = "_names_kept"
"""Field of a row: True if models are set, but none for its language, so that its names were kept."""
REPLACED_SPANS = "_personal_data"
"""Field of a row: its rows of the table `personal_data`, if `pii.audit` asks for them."""
NER, KEY = "ner.", "key"
"""Prefix of the names of the stage's models, before a language, and the name of the key file among them."""
_BETWEEN_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[\W_]+")
_RANK = {name: index for index, name in enumerate(TYPE_NAMES)}


class PiiConfig(Section):
    """The section `[pii]` of a recipe: the types of personal data, what replaces them, and limits for documents."""

    types: tuple[str, ...] = DEFAULT_TYPES
    """Types to replace. The default has every type but `secret`, keys and passwords in source code, and those without
    check digits: `br_cnpj`, `coordinates`, `mac`, `passport`, `uk_driving_licence`, `us_driver_license`, `username` and
    `vehicle_plate`."""
    ner_models: dict[str, str] = location({})
    """Name in the model store, or path, of the spaCy pipeline that recognizes names, by language, such as
    `{ en = "ner-en", "*" = "ner-multi" }`; `*` is for all other languages. Without a model for its language, a document
    keeps its names, and is counted."""
    ner_types: tuple[Literal["person", "location", "organisation"], ...] = Field(("person",), min_length=1)
    """Types of names to replace."""
    ner_windows: int = Field(16, ge=1)
    """Maximum number of windows in which names are recognized, for each 4,000 characters of a document; the best
    candidates are read first."""
    ner_whole_texts: bool = False
    """True to recognize names in whole texts, which takes ten times as long."""
    replacement: Form = "type"
    """What replaces a value: "type", such as `<EMAIL>`; "text", the text in `placeholder`; "pseudonym", such as
    `<EMAIL_bdkopamcfhel>`, the same for every occurrence of a value; or "surrogate", a value that no one has."""
    placeholder: str | None = Field(None, min_length=1, max_length=MAX_PLACEHOLDER)
    """With replacement = "text": what replaces every value, such as `[PII_REDACTED]`."""
    key_file: str | None = location(None)
    """With replacement = "pseudonym" or "surrogate": path of a secret key: at least 32 random bytes, or 64 hexadecimal
    digits, as `openssl rand -hex 32` prints them. A passphrase is refused. The key is not stored; a commitment to it is
    recorded, which is a keyed digest that does not help to guess it."""
    max_share: float | None = Field(None, ge=0, lt=1)
    """Maximum share of a document's characters that are personal data, 0..1; None = no limit."""
    max_values: int | None = Field(None, ge=0)
    """Maximum number of values in a document, with those in its title, URL and fields; None = no limit."""
    audit: bool = False
    """True to write the table `personal_data`, with type and place of every replacement, without values."""

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

    @field_validator("ner_models")
    @classmethod
    def _languages(cls, models: dict[str, str]) -> dict[str, str]:
        wrong = [repr(key) for key in models if key != EVERY_LANGUAGE and not re.fullmatch("[a-z]{2,3}", key)]
        if wrong:
            raise ValueError(
                f"expected codes of languages, such as en, or *, got {', '.join(wrong)}. Correct pii.ner_models."
            )
        return models

    @field_validator("placeholder")
    @classmethod
    def _printable(cls, placeholder: str | None) -> str | None:
        if placeholder is not None and not placeholder.isprintable():
            raise ValueError(f"expected printable characters, got {placeholder!r}. Correct pii.placeholder.")
        return placeholder

    @model_validator(mode="after")
    def _used(self) -> "PiiConfig":
        unused = {*self.model_fields_set} & {"ner_types", "ner_windows", "ner_whole_texts"}
        if unused and not self.ner_models:
            name = min(unused)
            raise ValueError(
                f"{name}: expected pii.ner_models to be set too, got no model. Set pii.ner_models, or remove "
                f"pii.{name}."
            )
        if self.ner_whole_texts and "ner_windows" in self.model_fields_set:
            raise ValueError(
                "ner_windows: expected windows to be read, got ner_whole_texts = true. Remove pii.ner_windows or "
                "pii.ner_whole_texts."
            )
        for name, is_set, forms in (
            ("placeholder", self.placeholder is not None, ("text",)),
            ("key_file", self.key_file is not None, tuple(sorted(KEYED))),
        ):
            wanted = " or ".join(f'"{form}"' for form in forms)
            if is_set and self.replacement not in forms:
                raise ValueError(
                    f'{name}: expected pii.replacement = {wanted}, got "{self.replacement}". Remove pii.{name}, or '
                    "set pii.replacement."
                )
            if not is_set and self.replacement in forms:
                raise ValueError(
                    f'{name}: expected a value for replacement = "{self.replacement}", got none. Set pii.{name}.'
                )
        return self


@dataclass(frozen=True)
class Redaction:
    """A text with its personal data replaced."""

    text: str
    spans: tuple[tuple[int, int, str], ...] = ()
    """(start, end, type) of each replacement in `text` [code points]."""
    num_chars: int = 0
    """Length of the replaced values [code points]."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of replacements by type, sorted by type."""
        return dict(sorted(Counter(kind for _, _, kind in self.spans).items()))


class Redactor:
    """Finds and replaces personal data in texts, with recognizers that are loaded once."""

    def __init__(
        self,
        types: tuple[str, ...] = DEFAULT_TYPES,
        finder: NameFinder | None = None,
        replacement: Replacement = BY_TYPE,
    ):
        self._families: dict[str, list[LoadedRecognizer]] = {}
        for loaded in load_recognizers(types):
            self._families.setdefault(loaded.kind.family, []).append(loaded)
        self._phones = "phone" in types
        self._finder = finder
        self._replacement = replacement

    def names_of(self, texts: list[str], language: str | None) -> Names:
        """Return the names in the texts of a document; empty without a model for its language."""
        return self._finder.names_of(texts, language) if self._finder is not None else NO_NAMES

    def redact(self, text: str, language: str | None = None) -> tuple[str, dict[str, int]]:
        """Return the text with all personal data replaced, and the number of replacements by type."""
        redaction = self.replace(text, language, self.names_of([text], language))
        return redaction.text, redaction.counts

    def replace(self, text: str, language: str | None, names: Names = NO_NAMES, field: str = "") -> Redaction:
        """Return the text with all personal data replaced. `names` are the names of the document."""
        found = self.find(text, language, names, field)
        if not found:
            return Redaction(text)
        pieces: list[str] = []
        spans: list[tuple[int, int, str]] = []
        end = length = 0
        for start, stop, kind, _ in found:
            made = self._replacement.of(kind, text[start:stop], language)
            length += start - end
            spans.append((length, length + len(made), kind))
            pieces += [text[end:start], made]
            length, end = length + len(made), stop
        pieces.append(text[end:])
        return Redaction("".join(pieces), tuple(spans), sum(stop - start for start, stop, *_ in found))

    def find(self, text: str, language: str | None = None, names: Names = NO_NAMES, field: str = "") -> list[Span]:
        """Return the spans of the personal data to replace, in order and without overlaps.

        `field` is the name of the field that has the text as its value, such as `phone_number`; empty if there is none.
        """
        spans = self._find(text, language, names, ESCAPES)
        if field:
            before = f"{_BETWEEN_WORDS.sub(' ', field[-NEAR_BEFORE:]).strip()}: "
            named = self._find(before + text, language, names, ESCAPES)
            size = len(before)
            spans += [(start - size, end - size, kind, score) for start, end, kind, score in named if start >= size]
        return without_overlaps(spans)

    def _find(self, text: str, language: str | None, names: Names, escapes: int) -> list[Span]:
        """Return the spans of personal data in a text, and in the same text with its escapes replaced."""
        spans = self._search(text, language)
        spans += names.find(text)
        plain = unescape(text) if escapes else None
        if plain is not None:
            found = self._find(plain.text, language, names, escapes - 1)
            spans += [(plain.origin(start), plain.origin(end), kind, score) for start, end, kind, score in found]
        return spans

    def _search(self, text: str, language: str | None) -> list[Span]:
        spans: list[Span] = []
        folded = fold(text)
        plain = without_emphasis(folded)
        forms = {family: folded if family in SECRETS else plain for family in self._families}
        seen = {family: candidate_windows(form, FAMILIES[family]) for family, form in forms.items()}
        for family, members in self._families.items():
            for chunk in join_windows(forms[family], seen[family]):
                for loaded in members:
                    for begin, stop, score, alone in loaded.find(chunk.text):
                        start = chunk.origin(begin)
                        end = start + stop - begin
                        if _whole(folded, start, end) and (alone or loaded.is_named(text, start, end)):
                            spans.append((start, end, loaded.kind.name, score))
        if self._phones and seen.get("digits", True):  # The default applies if no other type searched for digits.
            spans += [(start, end, "phone", score) for start, end, score in find_phones(text, plain, language)]
        return spans


def _whole(folded: str, start: int, end: int) -> bool:
    """Return True if folded[start:end] is not part of a longer number or word."""
    # A recognizer sees only a window of the text, so it cannot test this at the ends of the window.
    return not any(
        (left.isdigit() and right.isdigit()) or (left.isalpha() and right.isalpha())
        for left, right in ((folded[start - 1 : start], folded[start]), (folded[end - 1], folded[end : end + 1]))
    )


def without_overlaps(spans: list[Span]) -> list[Span]:
    """Return the spans of personal data sorted by start, with one span for those that overlap.

    It covers all of them, so that no part of a value is left, and has the type of the one with the highest score. If
    the scores are equal, that is the longest; if the lengths are equal too, the earliest.
    """
    merged: list[Span] = []
    best: list[Span] = []
    for span in sorted(spans):
        if merged and span[0] < merged[-1][1]:
            best[-1] = min(best[-1], span, key=_order)
            merged[-1] = (merged[-1][0], max(merged[-1][1], span[1]), *best[-1][2:])
        else:
            merged.append(span)
            best.append(span)
    return merged


def _order(span: Span) -> tuple[float, int, int, int, str]:
    start, end, kind, score = span
    return -score, start - end, start, _RANK.get(kind, len(_RANK)), kind


def make_pii(config: PiiConfig, models: Mapping[str, str]) -> RowFunction:
    """Load the recognizers and return the function that replaces personal data in a row.

    Personal data is replaced in text, title, URL and licence, and in the names and values of the fields in `meta`. A
    document with more of it than the limits allow is dropped.
    """
    # The pipelines are loaded before presidio, whose import hides torch, because a pipeline may require torch.
    finder = name_finder(config, models) if config.ner_models else None
    key = read_key(models[KEY]) if config.key_file is not None else b""
    redactor = Redactor(config.types, finder, Replacement(config.replacement, config.placeholder or "", key))

    def replace(row: Row) -> Drop | None:
        language, num_chars = row["language"], len(row["text"])
        names = redactor.names_of([row.get(column) or "" for column in NAMED_COLUMNS], language)
        if config.ner_models and not is_covered(language, config.ner_models):
            row[NAMES_KEPT] = True
        counts: Counter[str] = Counter()
        places: list[Row] = []
        share = 0.0
        for column in COLUMNS:
            if row.get(column):
                redaction = redactor.replace(row[column], language, names)
                row[column] = redaction.text
                counts.update(redaction.counts)
                places += [_place(row, column, *span) for span in redaction.spans]
                share = redaction.num_chars / num_chars if column == "text" else share
        if row.get("meta"):
            own: Counter[str] = Counter()
            row["meta"] = redact_json(row["meta"], lambda *value: _redact_field(redactor, value, language, names), own)
            places += [_place(row, "meta", None, None, kind) for kind in sorted(own.elements())]
            counts += own
        row["pii_counts"] = dict(sorted(counts.items()))
        row["num_chars"], row["num_bytes"] = len(row["text"]), len(row["text"].encode())
        if config.audit:
            row[REPLACED_SPANS] = places
        return too_much(config, share, counts.total())

    return replace


def too_much(config: PiiConfig, share: float, values: int) -> Drop | None:
    """Return the drop of a document with this share and number of values of personal data; None if it is kept."""
    if config.max_share is not None and share > config.max_share:
        return Drop("personal_data_share", share, config.max_share)
    if config.max_values is not None and values > config.max_values:
        return Drop("personal_data_values", values, config.max_values)
    return None


def name_finder(config: PiiConfig, models: Mapping[str, str]) -> NameFinder:
    """Load the pipelines of the section. `models` has their files, by the names that `model_files` gives them."""
    paths = {language: models[NER + language] for language in config.ner_models}
    return NameFinder(paths, config.ner_types, None if config.ner_whole_texts else config.ner_windows)


def _place(row: Row, column: str, start: int | None, end: int | None, kind: str) -> Row:
    return {
        "doc_id": row.get("doc_id"),
        "column": column,
        "type": kind,
        "start": start,
        "end": end,
        "language": row["language"],
    }


def _redact_field(
    redactor: Redactor, value: tuple[str, str], language: str | None, names: Names
) -> tuple[str, dict[str, int]]:
    text, field = value
    redaction = redactor.replace(text, language, names, field)
    return redaction.text, redaction.counts


def redact_json(text: str, redact: Callable[[str, str], tuple[str, dict[str, int]]], counts: Counter[str]) -> str:
    """Return the JSON text with personal data replaced in all names, texts and numbers; `counts` is increased by type.

    `redact` gets a text and the name of its field. A number that is personal data becomes a text. Digits alone can be a
    time or a count, so a number is a phone number only in a field with such a name. If two names of an object become
    equal, the later one gets a number.
    """

    def replaced(value: str, field: str) -> str:
        safe, found = redact(value, field)
        counts.update(found)
        return safe

    def walk(value: Any, field: str) -> Any:
        if isinstance(value, str):
            return replaced(value, field)
        if isinstance(value, list):
            return [walk(item, field) for item in value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            written = json.dumps(value)
            _, found = redact(written, field)
            is_personal = found and ({*found} != {"phone"} or PHONE_FIELD.search(field) is not None)
            return replaced(written, field) if is_personal else value
        if not isinstance(value, dict):
            return value
        safe: dict[str, Any] = {}
        for name, item in value.items():
            own = plain = replaced(name, "")
            number = 1
            while own in safe:
                number += 1
                own = f"{plain} {number}"
            safe[own] = walk(item, name)
        return safe

    return json.dumps(walk(json.loads(text), ""), ensure_ascii=False, separators=(",", ":"))


def model_files(config: PiiConfig) -> dict[str, str]:
    """Return the files that the stage needs: spaCy pipelines as `ner.LANGUAGE`, and the key file as `key`."""
    key = {KEY: config.key_file} if config.key_file is not None else {}
    return {NER + language: model for language, model in config.ner_models.items()} | key


PII = PerDocument(
    name="pii",
    version=13,
    config=PiiConfig,
    reads=("text", "title", "url", "licence", "meta", "language"),
    adds=("text", "title", "url", "licence", "meta", "pii_counts", "num_chars", "num_bytes"),
    reasons={
        "personal_data_share": "the share of characters that are personal data is above pii.max_share",
        "personal_data_values": "the document has more values of personal data than pii.max_values",
    },
    make=make_pii,
    models=model_files,
    secrets=(KEY,),
    ends=False,
)
