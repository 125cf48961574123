"""Names of persons, places and organisations, found by spaCy pipelines: one for each language of the documents.

A pipeline reads the windows that `name_windows` chooses, or whole texts. What it finds counts at every place where the
document has the same words, in the title and the fields too, and a person's last name counts alone.
"""

import re
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

from pipeline.pii.matching import import_presidio
from pipeline.pii.name_text import as_usually_written, even_lines, even_text
from pipeline.pii.name_windows import CASED, MAX_CANDIDATE_CHARS, MAX_SEARCHED, THINGS, find_windows, small_words_of
from schemas.errors import ConfigError

ENTITY_OF: Mapping[str, str] = {"person": "PERSON", "location": "LOCATION", "organisation": "ORGANIZATION"}
"""Type of a name → presidio's name of the entity."""
NAME_TYPES = tuple(ENTITY_OF)
EVERY_LANGUAGE = "*"
"""Key of the model for the languages that have none of their own."""
READ_CHARS = 100_000
"""Maximum length of text that a spaCy pipeline reads at once [characters]; its memory grows with this length."""
WINDOWS_CHARS = 4_000
"""Length of text for which the maximum number of windows is set [characters]. With one maximum for documents of any
length, 33 % of the names of pages of 8,700 characters were found."""
NAME_SCORE = 0.4
"""Score of a name. It is below the score of every pattern, so that an e-mail or IP address inside a name counts as an
address."""
MAX_NAMES = 1_000
"""Maximum number of distinct names of a document; later ones are not replaced."""
MIN_LAST_NAME = 3
"""Minimum length of a last name that counts alone [characters]."""
_WORD = regex.compile(rf"[{CASED}\p{{Nd}}\p{{Nl}}]++")
_ASCII_WORD = re.compile("[^\\W_]++", re.ASCII)

NameSpan = tuple[int, int, str, float]
"""(start, end, type, score) of a name in a text."""


def is_covered(language: str | None, models: Iterable[str]) -> bool:
    """Return True if one of the models, given by their languages, reads documents of this language."""
    return not {language, EVERY_LANGUAGE}.isdisjoint(models)


@dataclass(frozen=True)
class Names:
    """The names of a document by their text, with their types."""

    types: Mapping[str, str]

    def find(self, text: str) -> list[NameSpan]:
        """Return the places of the names in a text. Places may overlap.

        Blanks of any kind, or a line break, may be between the words of a name.
        """
        if not self.types:
            return []
        even = even_text(text)
        spans = self._find(even.text)
        return [(even.origin(start), even.origin(end - 1) + 1, kind, score) for start, end, kind, score in spans]

    def _find(self, text: str) -> list[NameSpan]:
        lengths: dict[str, set[int]] = {}
        words = _ASCII_WORD if text.isascii() else _WORD
        spans: list[NameSpan] = []
        for name, kind in self.types.items():
            if first := _WORD.match(name):
                lengths.setdefault(first[0], set()).add(len(name))
            elif name[0].isalpha():  # Words of scripts without capitals are often not separated.
                spans += [(at.start(), at.end(), kind, NAME_SCORE) for at in re.finditer(re.escape(name), text)]
        for word in words.finditer(text):
            for length in lengths.get(word[0], ()):
                end = word.start() + length
                named = self.types.get(text[word.start() : end]) if end <= len(text) else None
                if named is not None and not _WORD.match(text, end):
                    spans.append((word.start(), end, named, NAME_SCORE))
        return spans


NO_NAMES = Names({})


class NameFinder:
    """The pipelines of a recipe, loaded once, by language."""

    def __init__(self, paths: Mapping[str, str], types: Sequence[str], windows: int | None):
        """`paths` has the file of a pipeline by language.

        `windows`: maximum number in each WINDOWS_CHARS characters of a document; None: whole texts are read.
        Raises ConfigError if a file contains no pipeline that recognizes names.
        """
        self._windows, self._persons_only = windows, set(types) == {"person"}
        loaded = {path: load_pipeline(path) for path in sorted(set(paths.values()))}
        self._pipelines = {language: loaded[path] for language, path in paths.items()}
        self._labels = labels_of(types)

    def names_of(self, texts: Sequence[str], language: str | None) -> Names:
        """Return the names in the texts of one document; empty if no model reads its language."""
        pipeline = self._pipelines.get(language or "") or self._pipelines.get(EVERY_LANGUAGE)
        text = even_lines("\n".join(filter(None, texts)))
        if pipeline is None or not text:
            return NO_NAMES
        small, text = small_words_of(text), as_usually_written(text)
        types: dict[str, str] = {}
        for document in self._read(pipeline, text, small):
            for entity in document.ents:
                kind = self._labels.get(entity.label_)
                if kind is not None and len(types) < MAX_NAMES:
                    types |= dict.fromkeys(_parts_of(entity.text), kind)
        return Names(_with_forms(types, small))

    def _read(self, pipeline: Any, text: str, small_words: frozenset[str]) -> Iterator[Any]:
        """Yield what a pipeline makes of a text, or of its windows."""
        if self._windows is None:
            yield from map(pipeline, _pieces(text, READ_CHARS))
            return
        for piece in _pieces(text, MAX_SEARCHED):
            most = self._windows * max(1, round(len(piece) / WINDOWS_CHARS))
            windows = find_windows(piece, most, self._persons_only, small_words)
            yield from read_together(pipeline, windows.texts)


def _with_forms(types: Mapping[str, str], small_words: frozenset[str]) -> dict[str, str]:
    """Return the names with the last names of persons that are no common words, and with all of them in capitals."""
    forms: dict[str, str] = {}
    for name, kind in types.items():
        if kind == "person" and " " in name:
            first, _, last = name.rpartition(" ")
            forms |= {name.upper(): kind, f"{first} {last.upper()}": kind}
            if _is_distinctive(last, small_words):
                forms |= {last: kind, last.upper(): kind}
    forms.update(types)
    return forms


def read_together(pipeline: Any, texts: Sequence[str]) -> list[Any]:
    """Return what a pipeline makes of the windows of one document, in one call of each component.

    `pipeline.pipe` takes a third longer, because it calls a recognizer for a quarter of the windows at a time. Windows
    of several documents are never read together: a matrix product may differ in the last bit.
    """
    documents = [pipeline.make_doc(text) for text in texts]
    for _, component in pipeline.pipeline if documents else ():
        if hasattr(component, "predict"):
            component.set_annotations(documents, component.predict(documents))
        else:
            documents = [component(document) for document in documents]
    return documents


def _pieces(text: str, most: int) -> list[str]:
    """Return a text in pieces of at most `most` characters that end where a word does."""
    pieces, start = [], 0
    while len(text) - start > most:
        end = max(text.rfind("\n", start + 1, start + most), text.rfind(" ", start + 1, start + most))
        end = end if end > 0 else start + most
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _parts_of(found: str) -> list[str]:
    """Return the lines of an entity that may be a name: a letter of a script with capitals must be a capital."""
    lines = [line.strip(" \t.,;:!?\"'’“”()[]") for line in found.splitlines()]
    return [
        line for line in lines if 1 < len(line) <= MAX_CANDIDATE_CHARS and (line != line.lower() or _is_caseless(line))
    ]


def _is_caseless(name: str) -> bool:
    """Return True if a name is in a script without capitals, such as Chinese."""
    return name.lower() == name.upper() and any(map(str.isalpha, name))


def _is_distinctive(name: str, small_words: frozenset[str]) -> bool:
    """Return True if a last name is unlikely to be a common word."""
    folded = name.lower()
    return len(name) >= MIN_LAST_NAME and name[0].isupper() and folded not in small_words and folded not in THINGS


def labels_of(types: Sequence[str]) -> dict[str, str]:
    """Return the type of each label of a pipeline, by presidio's mapping of labels to entities."""
    kinds = {ENTITY_OF[kind]: kind for kind in types}
    presidio = import_presidio()
    mapping = presidio.nlp_engine.NerModelConfiguration().model_to_presidio_entity_mapping
    return {label: kinds[entity] for label, entity in mapping.items() if entity in kinds}


def load_pipeline(path: str) -> Any:
    """Return the spaCy pipeline in a wheel or zip file, without the components that its recognizer does not need."""
    import spacy

    try:
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
            configs = sorted(Path(folder).rglob("config.cfg"), key=lambda file: (len(file.parts), file))
            if not configs:
                raise ConfigError(
                    f"pii.ner_models: expected a spaCy pipeline, got no config.cfg in {path}. "
                    "Set pii.ner_models to wheels of spaCy pipelines."
                )
            pipeline = spacy.load(configs[0].parent)
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise ConfigError(
            f"pii.ner_models: expected the wheel of a spaCy pipeline, got {path}, which cannot be loaded ({error}). "
            "Set pii.ner_models to wheels of spaCy pipelines."
        ) from error
    recognizers = [name for name, part in pipeline.pipeline if "doc.ents" in pipeline.get_pipe_meta(name).assigns]
    if not recognizers:
        raise ConfigError(
            f"pii.ner_models: expected a pipeline that recognizes names, got {pipeline.pipe_names} in {path}. "
            "Set pii.ner_models to wheels of spaCy pipelines with a component `ner`."
        )
    needed = {*recognizers}
    for name in recognizers:
        needed |= _prepare(pipeline, name)
    pipeline.select_pipes(enable=[name for name in pipeline.pipe_names if name in needed])
    return pipeline


def _prepare(pipeline: Any, recognizer: str) -> set[str]:
    """Let a recognizer multiply matrices by numpy; return the components whose vectors it reads, if any."""
    names: set[str] = set()
    model = getattr(pipeline.get_pipe(recognizer), "model", None)
    for node in model.walk() if model is not None else ():
        if node.ops.name == "numpy":  # A token then takes 51 µs on one thread; with thinc's own BLIS it takes 72 µs.
            node.ops = type(node.ops)(use_blis=False)
        if node.name.endswith("listener"):
            upstream = getattr(node, "upstream_name", "")
            names |= {upstream} if upstream in pipeline.pipe_names else {*pipeline.pipe_names}
    return names
