"""`penstock derive-profiles`: derives stop words and limits by language from clean reference text, as FineWeb-2 does.

Stop words are frequent words that occur in most documents. A limit is a percentile of a signal in clean documents plus
a margin, and never stricter than the published limit. Published limits on word length are first scaled by the
language's median. Everything is computed from exact counts, so neither partitioning nor order changes the result.
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
from pipeline.engine.part import TaskResult
from pipeline.engine.rules import FINE, columns_of, count_bins, is_minimum, languages_of, limit_of, quantile, values_of
from pipeline.engine.spark import run_tasks
from pipeline.engine.stage import EVERY, Check, Row, Split
from pipeline.engine.step import add_figures
from pipeline.quality.config import QualityConfig
from pipeline.quality.rules import Dialect
from pipeline.quality.stage import QUALITY
from pipeline.sources.config import SourceConfig
from pipeline.sources.splits import find_splits
from pipeline.text.profiles import LanguageProfile, render_profiles
from pipeline.text.spacy_tokens import UNSPACED_LANGUAGES, splitter_of
from schemas.config import Section
from schemas.errors import ConfigError
from schemas.manifest import TableVersion, current_tables, open_table
from schemas.storage import Store, resolve_uri
from schemas.tables import DOCUMENTS

# Exact counts over reference text, one task for each file or part of a run; their results can be summed in any order. A
# word with a given share of all text has at least this share in one of the parts. So each task lists the frequent words
# of its own text, and only their union is counted in all text: no task and no driver holds a whole vocabulary.

CANDIDATE_SHARE = 0.001
"""Minimum share of the words of one task for a word to be counted in all text."""
ROWS_AT_ONCE = 256
NUM_RANKS = 4
"""For each number of distinct stop words up to this one, the documents that contain as many are counted."""
Words = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class CountTask:
    """The documents of one JSON lines file, or of one part of a run, in which a task counts words and signals."""

    source: Split | Part
    quality: QualityConfig
    sources: tuple[str, ...] = ()
    """The sources of the run to count; empty: all."""
    words: Words = field(default_factory=dict)
    """The words to count by language, the one in the most documents first."""


def read_texts(task: CountTask) -> Iterator[tuple[str, str]]:
    """Yield (language, text) of every document of a task. Raises ConfigError if a line of a file is invalid."""
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
    """Yield the words of a text that may be stop words: words that consist of lower-case letters only."""
    split = splitter_of(language)
    return (word for piece in text.split() for word in split(piece) if _may_be_stop_word(word))


@lru_cache(maxsize=1 << 16)
def _may_be_stop_word(word: str) -> bool:
    return word == word.lower() and all(unicodedata.category(char)[0] in "LM" for char in word)


def frequent_words(task: CountTask, retried: bool) -> TaskResult:
    """Return, for each language in the task's text, the numbers of documents and words, and the frequent words.

    A word is frequent if it makes up at least CANDIDATE_SHARE of the words of its language.
    """
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


def word_counts(task: CountTask, retried: bool) -> TaskResult:
    """Return, by language, how often each word in `task.words` occurs and how many documents contain it."""
    counted = {language: frozenset(words) for language, words in task.words.items()}
    counts: dict[str, Counter[str]] = {language: Counter() for language in counted}
    holding: dict[str, Counter[str]] = {language: Counter() for language in counted}
    rows = 0
    for language, text in read_texts(task):
        rows += 1
        if language in counted:
            occurrences = Counter(word for word in words_of(text, language) if word in counted[language])
            counts[language].update(occurrences)
            holding[language].update(occurrences.keys())
    return {"rows": rows, "counts": counts, "holding": holding}


def word_ranks(task: CountTask, retried: bool) -> TaskResult:
    """Return the number of documents for each language, n (1..NUM_RANKS) and n-th smallest rank of a document's words.

    The rank of a word is its position, from 1, in the language's list in `task.words`. A document with fewer than n
    listed words gets the length of the list plus 1 instead.
    """
    ranks = {language: {word: rank for rank, word in enumerate(words, 1)} for language, words in task.words.items()}
    tallies: dict[str, list[Counter[str]]] = {language: [Counter() for _ in range(NUM_RANKS)] for language in ranks}
    rows = 0
    for language, text in read_texts(task):
        rows += 1
        if language in ranks:
            # A document has n of the first r listed words exactly if the n-th smallest rank of its words is at most r.
            last = len(ranks[language]) + 1
            own = sorted({ranks[language].get(word, last) for word in words_of(text, language)})[:NUM_RANKS]
            for counts, rank in zip(tallies[language], [*own, *[last] * NUM_RANKS]):
                counts[str(rank)] += 1
    return {"rows": rows, "ranks": {lang: {str(n): c for n, c in enumerate(best, 1)} for lang, best in tallies.items()}}


def signal_histograms(task: CountTask, retried: bool) -> TaskResult:
    """Return a histogram of each signal that a rule limits, by the rule's setting and by language.

    Signals of a run are read from its tables. Signals of a file are measured.
    """
    checks = QUALITY.checks(task.quality, {}, {})
    histograms: Any = {}
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
            histograms = add_figures(histograms, {check.setting: named})
    return {"rows": sum(documents.values()), "documents": documents, "histograms": histograms}


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


# The script of words, determined by the Unicode names of their letters.

SCRIPTS = {
    "LATIN": "Latn", "CYRILLIC": "Cyrl", "GREEK": "Grek", "ARABIC": "Arab", "HEBREW": "Hebr", "DEVANAGARI": "Deva",
    "CJK": "Hani", "HIRAGANA": "Jpan", "KATAKANA": "Jpan", "HANGUL": "Kore", "THAI": "Thai", "LAO": "Laoo",
    "KHMER": "Khmr", "MYANMAR": "Mymr", "TIBETAN": "Tibt", "BENGALI": "Beng", "GUJARATI": "Gujr", "GURMUKHI": "Guru",
    "TAMIL": "Taml", "TELUGU": "Telu", "KANNADA": "Knda", "MALAYALAM": "Mlym", "SINHALA": "Sinh", "ARMENIAN": "Armn",
    "GEORGIAN": "Geor", "ETHIOPIC": "Ethi", "THAANA": "Thaa", "MONGOLIAN": "Mong", "ORIYA": "Orya",
}  # fmt: skip
"""First word of a letter's Unicode name → ISO 15924 code of the script."""


def script_of(words: Iterable[str]) -> str:
    """Return the ISO 15924 code of the most frequent script in the words.

    `Jpan` if any word has kana. `Zyyy` if the script is unknown.
    """
    names = [unicodedata.name(char, "").partition(" ")[0].partition("-")[0] for word in words for char in word]
    scripts = Counter(SCRIPTS[name] for name in names if name in SCRIPTS)
    return "Jpan" if "Jpan" in scripts else max(scripts, key=lambda code: (scripts[code], code), default="Zyyy")


ENGLISH = "en"
STOP_WORD_MARGIN = 2
"""Number by which min_stop_words is below the number of stop words that clean documents contain [words]."""
FIXED_SETTINGS = ("min_words", "max_words", "min_stop_words", "max_lorem_ipsum", "max_curly_brackets")
"""Settings whose limits are not derived from a percentile."""
WORD_LENGTH, NGRAMS = "_word_length", "gram"
"""Suffixes of the settings on word length and on n-grams."""
Histograms = Mapping[str, Mapping[str, int]]
"""Number of documents by bin of a signal, by the setting that limits the signal."""


class DeriveConfig(Section):
    """The section `[derive]`: the reference text from which profiles are derived, and how strict their limits are."""

    reference: tuple[str, ...] = ()
    """Files of reference text, as paths or patterns, plain or compressed. Each line is a JSON object with the strings
    `text` and `lang`."""
    run: str | None = None
    """Run folder whose documents are the reference text instead of files; limits are derived from stored signals."""
    sources: tuple[str, ...] = ()
    """The sources of the run whose documents are clean enough; empty: all."""
    dialect: Dialect = "datatrove"
    """The dialect of `[quality]` whose signals are measured, and than whose limits no derived limit is stricter."""
    min_documents: int = Field(30, ge=1)
    """Minimum number of documents of a language; a language with fewer gets no profile."""
    tail: float = Field(0.005, gt=0, lt=0.5)
    """Share of a language's clean documents that a limit without its margin would drop; it sets the percentile. If a
    language has too few documents for it, the percentile of all languages of its script, or of all languages, is used
    if it is looser."""
    margin: float = Field(0.25, ge=0, lt=1)
    """Distance of a limit from the percentile, as a share of the percentile, or of 1 minus the percentile if this is
    less."""
    english_word_length: float = Field(4.58, gt=0)
    """Mean word length of the median English document, to which the published limits apply [code points]; measured on
    the 511 English documents of the reference text of the built-in profiles."""
    min_stop_word_share: float = Field(0.008, gt=0, lt=1)
    """Words with at least this share of all words of a language are stop words, within the next two limits."""
    min_stop_words: int = Field(8, ge=2)
    """Minimum number of stop words of a language; Gopher has eight for English."""
    max_stop_words: int = Field(30, ge=2)
    """Maximum number of stop words of a language. Stop words are added up to this number until all but `tail` of the
    documents contain four of them."""
    leave_out: tuple[str, ...] = (ENGLISH,)
    """Languages that get no profile: the published rules were made for English."""

    @model_validator(mode="after")
    def _one_reference(self) -> "DeriveConfig":
        if bool(self.reference) == bool(self.run):
            got = "both" if self.run else "neither"
            raise ValueError(f"expected either derive.reference or derive.run, got {got}. Set exactly one of the two.")
        if self.sources and not self.run:
            raise ValueError("sources: expected derive.run to be set too, got no run. Remove derive.sources.")
        if self.max_stop_words < self.min_stop_words:
            raise ValueError(
                f"max_stop_words: expected at least min_stop_words ({self.min_stop_words}), got {self.max_stop_words}. "
                "Raise derive.max_stop_words."
            )
        return self


@dataclass(frozen=True)
class StopWords:
    """The stop words of a language, and the minimum number of them that a document must contain."""

    words: tuple[str, ...]
    min_words: int


def derive_profiles(config: DeriveConfig, out: str, spark: Any = None) -> Mapping[str, LanguageProfile]:
    """Derive the profile of every language with enough text and write them to the TOML file `out`.

    `spark` is the session whose workers count words and signals; without it, this process counts. Raises ConfigError if
    no language has enough text or a file is invalid.
    """
    tasks = _tasks(config)
    frequencies = _counted(spark, frequent_words, tasks, "frequent words")
    documents, totals = frequencies["documents"], frequencies["totals"]
    chosen = {lang: words for lang, words in frequencies["candidates"].items() if _has_profile(lang, documents, config)}
    if not chosen:
        left_out = f" other than {', '.join(config.leave_out)}" if config.leave_out else ""
        raise ConfigError(
            f"derive: expected a language{left_out} with at least {config.min_documents} documents, got "
            f"{dict(sorted(documents.items()))}. Add documents to derive.reference, or lower derive.min_documents."
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
        least = config.min_stop_word_share * totals[lang]
        frequent = sum(count >= least for count in counts[lang].values())
        stop = stop_words_of(words, frequent, ranks["ranks"][lang], config)
        own = {name: by_language.get(lang, {}) for name, by_language in histograms.items()}
        peers = _together(histograms, _peers(lang, scripts, documents, config))
        limits = limits_of(lang, checks, own, peers, config) | {"min_stop_words": float(stop.min_words)}
        profiles[lang] = LanguageProfile(lang, scripts[lang], frozenset(stop.words), dict(sorted(limits.items())))
        ranked[lang] = stop.words
    text = render_profiles(profiles, ranked, documents, _settings_text(config))
    folder, _, name = out.rpartition("/")
    Store(folder or ".").write_atomic(name, text.encode())
    return profiles


def _settings_text(config: DeriveConfig) -> str:
    names = ("dialect", "min_documents", "tail", "margin", "min_stop_word_share")
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)


def _tasks(config: DeriveConfig) -> list[CountTask]:
    quality = QualityConfig(dialect=config.dialect)
    if config.run is None:
        splits = find_splits(SourceConfig.model_validate({"paths": config.reference, "format": "jsonl"}))
        return [CountTask(split, quality) for split in splits]
    run = Store(config.run)
    current = current_tables(run)
    tables = {name: TableVersion(*open_table(run, name)) for name in ("documents", "text")}
    tables |= {name: table for name, table in current.items() if name == "templates"}
    return [CountTask(part, quality, config.sources) for part in parts_of(tables)]


def _asking(tasks: Sequence[CountTask], words: Mapping[str, Iterable[str]]) -> list[CountTask]:
    by_language = {language: tuple(listed) for language, listed in words.items()}
    return [replace(task, words=by_language) for task in tasks]


def _counted(
    spark: Any, count: Callable[[CountTask, bool], TaskResult], tasks: Sequence[CountTask], label: str
) -> TaskResult:
    """Run `count` on every task, on Spark's workers if `spark` is a session, and return the sum of all counts."""
    answers = run_tasks(spark, count, tasks, label, None) if spark else [count(task, False) for task in tasks]
    total: Any = {}
    for answer in answers:
        total = add_figures(total, answer)
    return dict(total)


def _has_profile(language: str, documents: Mapping[str, int], config: DeriveConfig) -> bool:
    return language not in config.leave_out and documents[language] >= config.min_documents


def _together(histograms: Mapping[str, Histograms], languages: Sequence[str]) -> Histograms:
    """Return the histogram of each signal, summed over the languages, by the setting that limits the signal."""
    total: Any = {}
    for name, by_language in histograms.items():
        for language in languages:
            total = add_figures(total, {name: by_language.get(language, {})})
    return dict(total)


def _peers(language: str, scripts: Mapping[str, str], documents: Mapping[str, int], config: DeriveConfig) -> list[str]:
    """Return the languages whose documents are used to compute the percentiles for this language.

    This is the first group with enough documents: the language alone, the languages of its script, or all languages.
    """
    circles = ([language], [peer for peer in scripts if scripts[peer] == scripts[language]], list(scripts))
    sufficient = [circle for circle in circles if config.tail * sum(documents[peer] for peer in circle) >= 1]
    return sufficient[0] if sufficient else list(scripts)


def _ranked(counts: Mapping[str, int], holding: Mapping[str, int], number: int) -> tuple[str, ...]:
    """Return the `number` words that occur in the most documents, most documents first."""
    # Occurrences only order words in equally many documents: words of one subject may be frequent in few documents.
    return tuple(sorted(counts, key=lambda word: (-holding[word], -counts[word], word))[:number])


def stop_words_of(
    words: Sequence[str], frequent: int, ranks: Mapping[str, Mapping[str, int]], config: DeriveConfig
) -> StopWords:
    """Return the stop words of a language, and the minimum number of them that a document must contain.

    `words` are the candidates. The first `frequent` candidates are always stop words. `ranks` is the result of
    `word_ranks` for the language.
    """
    documents = sum(ranks["1"].values())
    enough = documents - max(1, math.floor(config.tail * documents))  # A single document may be mislabeled.
    least = min(len(words), max(frequent, config.min_stop_words))
    # Words are added until all but a share derive.tail of the documents contain NUM_RANKS stop words.
    holding = (number for number in range(least, len(words) + 1) if _within(ranks[str(NUM_RANKS)], number) >= enough)
    number = next(holding, least)
    # The largest number of stop words that all but this share of the documents contain.
    held = max((int(n) for n, ranked in ranks.items() if _within(ranked, number) >= enough), default=0)
    return StopWords(tuple(words[:number]), max(0, held - STOP_WORD_MARGIN))


def _within(ranks: Mapping[str, int], number: int) -> int:
    return sum(count for rank, count in ranks.items() if int(rank) <= number)


def limits_of(
    language: str, checks: Sequence[Check], own: Histograms, peers: Histograms, config: DeriveConfig
) -> dict[str, float]:
    """Return the derived limits of a language, by setting.

    `own` has the signal histograms of the language, `peers` those of all languages that `_peers` returns. No limit is
    stricter than the published limit. Published limits on word length are first scaled by the language's median.
    """
    limits: dict[str, float] = {}
    for check in checks:
        counts = _bins(own, check)
        if not counts or not _is_derived(check, language):
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


def _is_derived(check: Check, language: str) -> bool:
    """Return True if the limit of a check is derived from the documents of this language."""
    # Limits on repeated text hold for every language. Only limits on word n-grams are derived, and only in languages
    # whose words a dictionary finds.
    if EVERY in check.limits:
        return check.setting.endswith(NGRAMS) and language in UNSPACED_LANGUAGES
    return check.setting not in FIXED_SETTINGS


def _bins(histograms: Histograms, check: Check) -> dict[int, int]:
    return {int(key): count for key, count in histograms.get(check.setting, {}).items()}


def _edge(check: Check, counts: Mapping[int, int], config: DeriveConfig) -> float:
    """Return the result of `_percentile`, made looser by derive.margin."""
    edge = _percentile(check, counts, config)
    room = config.margin * (min(edge, 1 - edge) if _is_share(check) and edge < 1 else edge)
    return edge - room if is_minimum(check) else edge + room


def _percentile(check: Check, counts: Mapping[int, int], config: DeriveConfig) -> float:
    """Return the limit that a share derive.tail of the documents breaks."""
    # One document can never set the limit, because its language may be wrong or its text unclean. The second document
    # reaches 1.5 / n with any rounding.
    beyond = max(config.tail, 1.5 / sum(counts.values()))
    return quantile(counts, beyond if is_minimum(check) else 1 - beyond, FINE)


def _loosest(check: Check, *limits: float) -> float:
    return min(limits) if is_minimum(check) else max(limits)


def _is_share(check: Check) -> bool:
    return (DOCUMENTS.field(check.column).metadata or {}).get(b"unit") == b"ratio"


def _rounded(limit: float, check: Check) -> float:
    """Round a limit to three decimals (to an integer for an integer signal), in the direction that is less strict."""
    scale = 1 if pa.types.is_integer(DOCUMENTS.field(check.column).type) else 1000
    steps = round(limit * scale, 6)  # A floating-point error must not round to the next step.
    return (math.floor(steps) if is_minimum(check) else math.ceil(steps)) / scale
