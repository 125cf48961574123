"""The job that derives language profiles: stop words and limits from clean reference text, as FineWeb-2 does.

Stop words are frequent words that most documents hold. A limit is a percentile of what clean documents measure, with a
margin, and never stricter than the published one; limits on the length of words are first scaled by the language's
median. All is read off exact counts, so that neither partitions nor order change the file.
Source: Penedo et al. 2025 (FineWeb-2), arXiv 2506.20920, on filtering thresholds and stop words by language.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pydantic import Field, model_validator

from pipeline.engine.histogram import FINE, quantile
from pipeline.engine.parts import parts_of
from pipeline.engine.rules import is_minimum, limit_of
from pipeline.engine.spark import run_tasks
from pipeline.engine.stage import EVERY, Check
from pipeline.engine.step import Answer, add_figures
from pipeline.quality.config import QualityConfig
from pipeline.quality.decide import QUALITY
from pipeline.quality.rules import Dialect
from pipeline.sources.config import SourceConfig
from pipeline.sources.splits import find_splits
from pipeline.text.counting import BEST, CountTask, frequent_words, signal_histograms, word_counts, word_ranks
from pipeline.text.profiles import Profile, render_profiles
from pipeline.text.scripts import script_of
from pipeline.text.spacy_tokens import UNSPACED_LANGUAGES
from schemas.config import Section
from schemas.errors import ConfigError
from schemas.manifest import Table, open_table
from schemas.storage import Store
from schemas.tables import DOCUMENTS

ENGLISH = "en"
SPARE = 2
"""By how many stop words clean documents must exceed the limit [words]."""
AS_PUBLISHED = ("min_words", "max_words", "min_stop_words", "max_lorem_ipsum", "max_curly_brackets")
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
            raise ValueError("promised either reference, files of text, or run, a run folder; give one of them")
        if self.sources and not self.run:
            raise ValueError("sources would be ignored: files of text have none")
        if self.max_stop_words < self.min_stop_words:
            raise ValueError(f"max_stop_words: promised at least min_stop_words, found {self.max_stop_words}")
        return self


@dataclass(frozen=True)
class StopWords:
    """The stop words of a language, most frequent first, and how many of them a document must have."""

    words: tuple[str, ...]
    wanted: int


def derive_profiles(config: DeriveConfig, out: str, spark: Any = None) -> Mapping[str, Profile]:
    """The profiles of every language with enough text, written to the TOML file `out`.

    `spark` is the session whose workers count; without one they are counted here. Raises ConfigError, ContractError.
    """
    tasks = _tasks(config)
    found = _counted(spark, frequent_words, tasks, "frequent words")
    chosen = {lang: words for lang, words in found["candidates"].items() if _wanted(lang, found["documents"], config)}
    if not chosen:
        there = dict(sorted(found["documents"].items()))
        raise ConfigError(
            f"derive: promised languages with {config.min_documents} documents, found {there}; "
            "give more text or lower derive.min_documents"
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
        profiles[lang] = Profile(lang, scripts[lang], frozenset(stop.words), dict(sorted(limits.items())))
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
    tables = {name: Table(*open_table(run, name)) for name in ("documents", "text")}
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
    holding = (number for number in range(least, len(words) + 1) if _within(ranks[str(BEST)], number) >= enough)
    number = next(holding, least)
    held = max((int(n) for n, ranked in ranks.items() if _within(ranked, number) >= enough), default=0)
    return StopWords(tuple(words[:number]), max(0, held - SPARE))


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
    return check.setting not in AS_PUBLISHED


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
