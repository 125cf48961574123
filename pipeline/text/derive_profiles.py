"""The job that derives language profiles: stop words and limits from clean reference text, as FineWeb-2 does.

Stop words are frequent words that most documents hold. A limit is a percentile of what clean documents measure, with a
margin, and never stricter than the published one; limits on the length of words are first scaled by the language's
median. All is read off exact counts, so that neither partitions nor order change the file.
Source: Penedo et al. 2025 (FineWeb-2), arXiv 2506.20920, on filtering thresholds and stop words by language.
"""

import io
import json
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from pipeline.engine.parquet import TEXTS_AT_ONCE, Part, apply_cuts, parts_of, read_measured
from pipeline.engine.rules import FINE, columns_of, count_bins, is_minimum, languages_of, limit_of, quantile, values_of
from pipeline.engine.spark import run_tasks
from pipeline.engine.stage import EVERY, Check, Row, Split
from pipeline.engine.step import Answer, add_figures
from pipeline.quality.config import QualityConfig
from pipeline.quality.rules import Dialect
from pipeline.quality.stage import QUALITY
from pipeline.sources.config import SourceConfig
from pipeline.sources.splits import find_splits
from pipeline.text.profiles import LanguageProfile, render_profiles
from pipeline.text.spacy_tokens import UNSPACED_LANGUAGES, splitter_of
from schemas.config import Section
from schemas.errors import ConfigError
from schemas.manifest import TableVersion, open_table
from schemas.storage import Store, resolve_uri
from schemas.tables import DOCUMENTS

# Exact counts over reference text, one task for each file or part of a run; answers add up in any order.
#
# A word that makes up a share of all text makes up at least that share of some part of it. So each part names its own
# frequent words, and only their union is counted everywhere: no task and no driver holds a vocabulary.

CANDIDATE_SHARE = 0.001
"""Share of a part's words from which one of them is counted everywhere."""
ROWS_AT_ONCE = 256
NUM_RANKS = 4
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


def read_texts(task: CountTask) -> Iterator[tuple[str, str]]:
    """(language, text) of every document of a task. Raises ConfigError for a line that is not one."""
    if isinstance(task.source, Part):
        yield from _stored_texts(task.source, task.sources)
        return
    fs, path = resolve_uri(task.source.uri)
    with fs.open_input_stream(path, compression="detect") as stream:
        for number, line in enumerate(io.BufferedReader(stream), 1):
            try:
                entry = json.loads(line)
                language, text = entry["lang"], entry["text"]
            except (ValueError, KeyError, TypeError):
                language = text = None
            if not isinstance(language, str) or not isinstance(text, str):
                raise ConfigError(
                    f"derive.reference {task.source.name}, line {number}: expected an object with the strings `lang` "
                    f"and `text`, got {line[:60]!r}. Correct the file."
                )
            yield language, text


def _stored_texts(part: Part, sources: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    columns = {"documents": ["source", "language"], "text": ["text", "cuts"]}
    for batch in read_measured(part, columns, TEXTS_AT_ONCE):
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
    for language, text in read_texts(task):
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
    for language, text in read_texts(task):
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
    found: dict[str, list[Counter[str]]] = {language: [Counter() for _ in range(NUM_RANKS)] for language in ranks}
    rows = 0
    for language, text in read_texts(task):
        rows += 1
        if language in ranks:
            last = len(ranks[language]) + 1
            own = sorted({ranks[language].get(word, last) for word in words_of(text, language)})[:NUM_RANKS]
            for counts, rank in zip(found[language], [*own, *[last] * NUM_RANKS]):
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
    for batch in read_measured(part, {"documents": list(dict.fromkeys([*columns_of(checks), "source"]))}):
        yield batch.filter(pc.is_in(batch.column("source"), pa.array(sources))) if sources else batch


def _measured(task: CountTask, checks: Sequence[Check]) -> Iterator[pa.RecordBatch]:
    schema = pa.schema([DOCUMENTS.field(name) for name in columns_of(checks)])
    measure = QUALITY.make(task.quality, {})

    def row_of(language: str, text: str) -> Row:
        row: Row = {"language": language, "text": text, "num_chars": len(text)}
        measure(row)
        row["body_chars"] = len(row["_body"])
        return {name: row.get(name) for name in schema.names}

    documents = read_texts(task)
    while rows := [row_of(language, text) for language, text in islice(documents, ROWS_AT_ONCE)]:
        yield pa.RecordBatch.from_pylist(rows, schema)


# The writing that words are in, by the Unicode names of their letters.

SCRIPTS = {
    "LATIN": "Latn", "CYRILLIC": "Cyrl", "GREEK": "Grek", "ARABIC": "Arab", "HEBREW": "Hebr", "DEVANAGARI": "Deva",
    "CJK": "Hani", "HIRAGANA": "Jpan", "KATAKANA": "Jpan", "HANGUL": "Kore", "THAI": "Thai", "LAO": "Laoo",
    "KHMER": "Khmr", "MYANMAR": "Mymr", "TIBETAN": "Tibt", "BENGALI": "Beng", "GUJARATI": "Gujr", "GURMUKHI": "Guru",
    "TAMIL": "Taml", "TELUGU": "Telu", "KANNADA": "Knda", "MALAYALAM": "Mlym", "SINHALA": "Sinh", "ARMENIAN": "Armn",
    "GEORGIAN": "Geor", "ETHIOPIC": "Ethi", "THAANA": "Thaa", "MONGOLIAN": "Mong", "ORIYA": "Orya",
}  # fmt: skip
"""First word of a letter's Unicode name → ISO 15924 code of the writing."""


def script_of(words: Iterable[str]) -> str:
    """The ISO 15924 code of the writing of most letters; kana alone tell Japanese, `Zyyy` stands for no letters."""
    names = [unicodedata.name(char, "").partition(" ")[0].partition("-")[0] for word in words for char in word]
    scripts = Counter(SCRIPTS[name] for name in names if name in SCRIPTS)
    return "Jpan" if "Jpan" in scripts else max(scripts, key=lambda code: (scripts[code], code), default="Zyyy")


ENGLISH = "en"
STOP_WORD_MARGIN = 2
"""By how many stop words clean documents must exceed the limit [words]."""
FIXED_SETTINGS = ("min_words", "max_words", "min_stop_words", "max_lorem_ipsum", "max_curly_brackets")
"""Settings whose limits no percentile moves: length of a document, stop words, what it holds besides words."""
WORD_LENGTH, NGRAMS = "_word_length", "gram"
"""How settings on the length of words and on their n-grams end."""
Histograms = Mapping[str, Mapping[str, int]]
"""Documents by the bin of what they measure, by setting."""


class DeriveConfig(Section):
    """The section `[derive]`: what the profiles are derived from, and how tight they are."""

    reference: tuple[str, ...] = ()
    """Files of JSON lines, objects with the strings `text` and `lang`; paths or patterns, plain or compressed."""
    run: str | None = None
    """Run folder whose measured documents are the reference, in place of files: limits from its stored signals alone,
    stop words from its text."""
    sources: tuple[str, ...] = ()
    """Of a run, the sources that are clean enough; empty: all."""
    dialect: Dialect = "datatrove"
    """Whose signals and published limits."""
    min_documents: int = Field(30, ge=1)
    """Documents that a language must have to get a profile."""
    tail: float = Field(0.005, gt=0, lt=0.5)
    """Share of a language's clean documents that may lie beyond a limit before its margin. A language with too few
    documents to tell also has the room that those of its script together need, or all where these are few too."""
    margin: float = Field(0.25, ge=0, lt=1)
    """How much room beyond that percentile, as a share of it, or of what it leaves to 1 where that is less."""
    english_word_length: float = Field(4.58, gt=0)
    """Mean word length of the median English document, which the published limits go with [code points]; measured on
    the 511 English documents of the reference text that the built-in profiles come from."""
    min_stop_word_share: float = Field(0.008, gt=0, lt=1)
    """There are as many stop words as words that make up this share of all."""
    min_stop_words: int = Field(8, ge=2)
    """The least number of stop words [words]; Gopher has eight."""
    max_stop_words: int = Field(30, ge=2)
    """The greatest, for languages in which fewer do not bring four of them into all but `tail` of the documents."""
    leave_out: tuple[str, ...] = (ENGLISH,)
    """Languages that get no limits: the published rules were made for English."""

    @model_validator(mode="after")
    def _one_reference(self) -> "DeriveConfig":
        if bool(self.reference) == bool(self.run):
            raise ValueError("expected either reference, files of text, or run, a run folder. Give one of them.")
        if self.sources and not self.run:
            raise ValueError("sources would be ignored: files of text have none")
        if self.max_stop_words < self.min_stop_words:
            raise ValueError(f"max_stop_words: expected at least min_stop_words, got {self.max_stop_words}")
        return self


@dataclass(frozen=True)
class StopWords:
    """The stop words of a language, most frequent first, and how many of them a document must have."""

    words: tuple[str, ...]
    wanted: int


def derive_profiles(config: DeriveConfig, out: str, spark: Any = None) -> Mapping[str, LanguageProfile]:
    """The profiles of every language with enough text, written to the TOML file `out`.

    `spark` is the session whose workers count; without one they are counted here. Raises ConfigError, ContractError.
    """
    tasks = _tasks(config)
    found = _counted(spark, frequent_words, tasks, "frequent words")
    chosen = {lang: words for lang, words in found["candidates"].items() if _wanted(lang, found["documents"], config)}
    if not chosen:
        there = dict(sorted(found["documents"].items()))
        raise ConfigError(
            f"derive: expected languages with {config.min_documents} documents, got {there}. "
            "Give more text or lower derive.min_documents."
        )
    counted = _counted(spark, word_counts, _asking(tasks, chosen), "word counts")
    counts, holding = counted["counts"], counted["holding"]
    ranked = {lang: _ranked(counts[lang], holding[lang], config.max_stop_words) for lang in sorted(chosen)}
    ranks = _counted(spark, word_ranks, _asking(tasks, ranked), "word ranks")
    histograms = _counted(spark, signal_histograms, tasks, "signals")["histograms"]
    checks = QUALITY.checks(tasks[0].quality, {}, {})
    scripts = {lang: script_of(words) for lang, words in ranked.items()}
    profiles = {}
    for lang, words in ranked.items():
        least = config.min_stop_word_share * found["totals"][lang]
        frequent = sum(count >= least for count in counts[lang].values())
        stop = stop_words_of(words, frequent, ranks["ranks"][lang], config)
        own = {name: by_language.get(lang, {}) for name, by_language in histograms.items()}
        peers = _together(histograms, _peers(lang, scripts, found["documents"], config))
        limits = limits_of(lang, checks, own, peers, config) | {"min_stop_words": float(stop.wanted)}
        profiles[lang] = LanguageProfile(lang, scripts[lang], frozenset(stop.words), dict(sorted(limits.items())))
        ranked[lang] = stop.words
    text = render_profiles(profiles, ranked, found["documents"], _how(config))
    folder, _, name = out.rpartition("/")
    Store(folder or ".").write_atomic(name, text.encode())
    return profiles


def _how(config: DeriveConfig) -> str:
    names = ("dialect", "min_documents", "tail", "margin", "min_stop_word_share")
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)


def _tasks(config: DeriveConfig) -> list[CountTask]:
    quality = QualityConfig(dialect=config.dialect)
    if config.run is None:
        splits = find_splits(SourceConfig.model_validate({"paths": config.reference, "format": "jsonl"}))
        return [CountTask(split, quality) for split in splits]
    run = Store(config.run)
    tables = {name: TableVersion(*open_table(run, name)) for name in ("documents", "text")}
    return [CountTask(part, quality, config.sources) for part in parts_of(tables)]


def _asking(tasks: Sequence[CountTask], words: Mapping[str, Iterable[str]]) -> list[CountTask]:
    asked = {language: tuple(found) for language, found in words.items()}
    return [replace(task, words=asked) for task in tasks]


def _counted(spark: Any, count: Callable[[CountTask, bool], Answer], tasks: Sequence[CountTask], label: str) -> Answer:
    """The answers of all tasks added up."""
    answers = run_tasks(spark, count, tasks, label, None) if spark else [count(task, False) for task in tasks]
    total: Any = {}
    for answer in answers:
        total = add_figures(total, answer)
    return dict(total)


def _wanted(language: str, documents: Mapping[str, int], config: DeriveConfig) -> bool:
    return language not in config.leave_out and documents[language] >= config.min_documents


def _together(histograms: Mapping[str, Histograms], languages: Sequence[str]) -> Histograms:
    """The histograms of several languages as one, by setting."""
    total: Any = {}
    for name, by_language in histograms.items():
        for language in languages:
            total = add_figures(total, {name: by_language.get(language, {})})
    return dict(total)


def _peers(language: str, scripts: Mapping[str, str], documents: Mapping[str, int], config: DeriveConfig) -> list[str]:
    """The languages whose documents tell a percentile for this one: itself if it has enough, else those of its script,
    else all."""
    circles = ([language], [peer for peer in scripts if scripts[peer] == scripts[language]], list(scripts))
    told = [circle for circle in circles if config.tail * sum(documents[peer] for peer in circle) >= 1]
    return told[0] if told else list(scripts)


def _ranked(counts: Mapping[str, int], holding: Mapping[str, int], number: int) -> tuple[str, ...]:
    """Words of most documents first: a word of one subject may be frequent, but only where that is spoken of."""
    return tuple(sorted(counts, key=lambda word: (-holding[word], -counts[word], word))[:number])


def stop_words_of(
    words: Sequence[str], frequent: int, ranks: Mapping[str, Mapping[str, int]], config: DeriveConfig
) -> StopWords:
    """The first of the words: `frequent` of them, `min_stop_words` at least, and more until documents hold four.

    `ranks`: documents by their n-th best rank. A document must have two fewer than all but `tail` of them hold.
    """
    documents = sum(ranks["1"].values())
    enough = documents - max(1, math.floor(config.tail * documents))  # one may be mislabelled
    least = min(len(words), max(frequent, config.min_stop_words))
    holding = (number for number in range(least, len(words) + 1) if _within(ranks[str(NUM_RANKS)], number) >= enough)
    number = next(holding, least)
    held = max((int(n) for n, ranked in ranks.items() if _within(ranked, number) >= enough), default=0)
    return StopWords(tuple(words[:number]), max(0, held - STOP_WORD_MARGIN))


def _within(ranks: Mapping[str, int], number: int) -> int:
    return sum(count for rank, count in ranks.items() if int(rank) <= number)


def limits_of(
    language: str, checks: Sequence[Check], own: Histograms, peers: Histograms, config: DeriveConfig
) -> dict[str, float]:
    """The limits of one language by setting, from its own histograms or its peers', whichever ask for more room."""
    limits: dict[str, float] = {}
    for check in checks:
        counts = _bins(own, check)
        if not counts or not _moves(check, language):
            continue
        published = limit_of(check, ENGLISH)
        if check.setting.endswith(WORD_LENGTH):
            scaled = published * quantile(counts, 0.5, FINE) / config.english_word_length
            limit = _loosest(check, scaled, _percentile(check, counts, config))
        elif EVERY in check.limits:
            limit = _loosest(check, published, _edge(check, counts, config))
        else:
            shared = _percentile(check, _bins(peers, check), config)
            limit = _loosest(check, published, _edge(check, counts, config), shared)
        limit = _rounded(limit, check)
        if EVERY not in check.limits or limit != published:
            limits[check.setting] = limit
    return limits


def _moves(check: Check, language: str) -> bool:
    """Whether a language may ask for another limit: of rules made for English; of those for all languages, only on
    n-grams of words and where a dictionary tells the words, because repeated text is no trait of a language."""
    if EVERY in check.limits:
        return check.setting.endswith(NGRAMS) and language in UNSPACED_LANGUAGES
    return check.setting not in FIXED_SETTINGS


def _bins(histograms: Histograms, check: Check) -> dict[int, int]:
    return {int(key): count for key, count in histograms.get(check.setting, {}).items()}


def _edge(check: Check, counts: Mapping[int, int], config: DeriveConfig) -> float:
    """The percentile with the margin."""
    edge = _percentile(check, counts, config)
    room = config.margin * (min(edge, 1 - edge) if _is_share(check) and edge < 1 else edge)
    return edge - room if is_minimum(check) else edge + room


def _percentile(check: Check, counts: Mapping[int, int], config: DeriveConfig) -> float:
    """What all but `tail` of the documents measure, or all but one: it may be mislabelled or not as clean."""
    beyond = max(config.tail, 1.5 / sum(counts.values()))  # 1.5 of n is reached by the second, whatever the rounding
    return quantile(counts, beyond if is_minimum(check) else 1 - beyond, FINE)


def _loosest(check: Check, *limits: float) -> float:
    return min(limits) if is_minimum(check) else max(limits)


def _is_share(check: Check) -> bool:
    return (DOCUMENTS.field(check.column).metadata or {}).get(b"unit") == b"ratio"


def _rounded(limit: float, check: Check) -> float:
    """The limit to three digits, or to a whole number where the signal is one, never the stricter way."""
    scale = 1 if pa.types.is_integer(DOCUMENTS.field(check.column).type) else 1000
    steps = round(limit * scale, 6)  # what three digits cannot hold is no reason for the next step
    return (math.floor(steps) if is_minimum(check) else math.ceil(steps)) / scale
