"""Exact counts over reference text, one task for each file or part of a run; answers add up in any order.

A word that makes up a share of all text makes up at least that share of some part of it. So each part names its own
frequent words, and only their union is counted everywhere: no task and no driver holds a vocabulary.
"""

import io
import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.engine.histogram import FINE, count_bins
from pipeline.engine.parts import TEXTS_AT_ONCE, Part, apply_cuts, measured
from pipeline.engine.rules import columns_of, languages_of, values_of
from pipeline.engine.stage import Check, Row, Split
from pipeline.engine.step import Answer, add_figures
from pipeline.quality.config import QualityConfig
from pipeline.quality.decide import QUALITY
from pipeline.text.spacy_tokens import splitter_of
from schemas.errors import ConfigError
from schemas.storage import resolve
from schemas.tables import DOCUMENTS

CANDIDATE_SHARE = 0.001
"""Share of a part's words from which one of them is counted everywhere."""
ROWS_AT_ONCE = 256
BEST = 4
"""How many of a document's stop words are ranked."""
Words = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class CountTask:
    """A file of JSON lines or a part of a run, and what to count in it."""

    source: Split | Part
    quality: QualityConfig
    sources: tuple[str, ...] = ()
    """Of a run, the sources that count; empty: all."""
    words: Words = field(default_factory=dict)
    """Words by language, in the order of their ranks."""


def texts(task: CountTask) -> Iterator[tuple[str, str]]:
    """(language, text) of every document of a task. Raises ConfigError for a line that is not one."""
    if isinstance(task.source, Part):
        yield from _stored_texts(task.source, task.sources)
        return
    fs, path = resolve(task.source.uri)
    with fs.open_input_stream(path, compression="detect") as stream:
        for number, line in enumerate(io.BufferedReader(stream), 1):
            try:
                entry = json.loads(line)
                language, text = entry["lang"], entry["text"]
            except (ValueError, KeyError, TypeError):
                language = text = None
            if not isinstance(language, str) or not isinstance(text, str):
                raise ConfigError(
                    f"derive.reference {task.source.name}, line {number}: promised an object with the strings `lang` "
                    f"and `text`, found {line[:60]!r}; correct the file"
                )
            yield language, text


def _stored_texts(part: Part, sources: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    columns = {"documents": ["source", "language"], "text": ["text", "cuts"]}
    for batch in measured(part, columns, TEXTS_AT_ONCE):
        for row in batch.to_pylist():
            if row["text"] is not None and (not sources or row["source"] in sources):
                yield row["language"], apply_cuts(row["text"], row["cuts"])


def words_of(text: str, language: str) -> Iterator[str]:
    """The words of a text that may be stop words: letters in lower case, no digit, no mark."""
    split = splitter_of(language)
    return (word for piece in text.split() for word in split(piece) if _may_be_stop_word(word))


@lru_cache(maxsize=1 << 16)
def _may_be_stop_word(word: str) -> bool:
    return word == word.lower() and all(unicodedata.category(char)[0] in "LM" for char in word)


def frequent_words(task: CountTask, retried: bool) -> Answer:
    """Each language's documents and words, and the words that make up CANDIDATE_SHARE of those of this task."""
    documents: Counter[str] = Counter()
    counts: dict[str, Counter[str]] = {}
    for language, text in texts(task):
        documents[language] += 1
        counts.setdefault(language, Counter()).update(words_of(text, language))
    totals = {language: count.total() for language, count in counts.items()}
    candidates = {
        language: {word: 0 for word, number in count.items() if number >= CANDIDATE_SHARE * totals[language]}
        for language, count in counts.items()
    }
    return {"rows": documents.total(), "documents": documents, "totals": totals, "candidates": candidates}


def word_counts(task: CountTask, retried: bool) -> Answer:
    """How often each of the task's words occurs and in how many documents, by language."""
    wanted = {language: frozenset(words) for language, words in task.words.items()}
    counts: dict[str, Counter[str]] = {language: Counter() for language in wanted}
    holding: dict[str, Counter[str]] = {language: Counter() for language in wanted}
    rows = 0
    for language, text in texts(task):
        rows += 1
        if language in wanted:
            found = Counter(word for word in words_of(text, language) if word in wanted[language])
            counts[language].update(found)
            holding[language].update(found.keys())
    return {"rows": rows, "counts": counts, "holding": holding}


def word_ranks(task: CountTask, retried: bool) -> Answer:
    """By language and n up to BEST, how many documents have the n-th best rank of their words at each rank from 1 on.

    A document has two of the first r words exactly if its second best rank is at most r; past the last: it has not.
    """
    ranks = {language: {word: rank for rank, word in enumerate(words, 1)} for language, words in task.words.items()}
    found: dict[str, list[Counter[str]]] = {language: [Counter() for _ in range(BEST)] for language in ranks}
    rows = 0
    for language, text in texts(task):
        rows += 1
        if language in ranks:
            last = len(ranks[language]) + 1
            own = sorted({ranks[language].get(word, last) for word in words_of(text, language)})[:BEST]
            for counts, rank in zip(found[language], [*own, *[last] * BEST]):
                counts[str(rank)] += 1
    return {"rows": rows, "ranks": {lang: {str(n): c for n, c in enumerate(best, 1)} for lang, best in found.items()}}


def signal_histograms(task: CountTask, retried: bool) -> Answer:
    """Exact histograms of what each rule compares, by setting and language; of a run, from its stored columns alone."""
    checks = QUALITY.checks(task.quality, {}, {})
    found: Any = {}
    documents: Any = {}
    part = task.source if isinstance(task.source, Part) else None
    for batch in _stored(part, task.sources, checks) if part else _measured(task, checks):
        numbers, languages = languages_of(batch)
        counted = np.bincount(numbers, minlength=len(languages)).tolist()
        documents = add_figures(documents, dict(zip(languages, counted)))
        for check in checks:
            values = values_of(check, batch)
            bins = {name: count_bins(values[numbers == number], FINE) for number, name in enumerate(languages)}
            named = {name: {str(key): count for key, count in counts.items()} for name, counts in bins.items()}
            found = add_figures(found, {check.setting: named})
    return {"rows": sum(documents.values()), "documents": documents, "histograms": found}


def _stored(part: Part, sources: tuple[str, ...], checks: Sequence[Check]) -> Iterator[pa.RecordBatch]:
    for batch in measured(part, {"documents": list(dict.fromkeys([*columns_of(checks), "source"]))}):
        yield batch.filter(pc.is_in(batch.column("source"), pa.array(sources))) if sources else batch


def _measured(task: CountTask, checks: Sequence[Check]) -> Iterator[pa.RecordBatch]:
    schema = pa.schema([DOCUMENTS.field(name) for name in columns_of(checks)])
    measure = QUALITY.make(task.quality, {})

    def row_of(language: str, text: str) -> Row:
        row: Row = {"language": language, "text": text, "num_chars": len(text)}
        measure(row)
        row["body_chars"] = len(row["_body"])
        return {name: row.get(name) for name in schema.names}

    documents = texts(task)
    while rows := [row_of(language, text) for language, text in islice(documents, ROWS_AT_ONCE)]:
        yield pa.RecordBatch.from_pylist(rows, schema)
