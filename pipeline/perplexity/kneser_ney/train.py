"""The n-gram trainer on Spark: counts, adjusted counts, discounts, interpolation and back-off, distributed; ARPA out.

text -> chunks -> vocabulary -> ids -> [shuffle by suffix] counts -> discounts -> [shuffle by context] sums of contexts
-> [shuffle back] probabilities -> sections -> one file. Between the shuffles everything lies in scratch files, whose
names and sizes alone reach the driver. Words and contexts are JVM rows and arrays of ids: a shuffle carries arrays,
which numpy sorts, so no n-gram is ever a row of its own.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.engine.parquet import unique_name
from pipeline.engine.part import TaskResult
from pipeline.engine.spark import dataframe_from_tasks, run_partitions, run_tasks, task_context
from pipeline.perplexity.kneser_ney import worker as parts
from pipeline.perplexity.kneser_ney.arpa import MESSAGE_DDL, write_arpa
from pipeline.perplexity.kneser_ney.config import TrainLmConfig
from pipeline.perplexity.kneser_ney.estimate import (
    EOS,
    EstimationPlan,
    Smoothing,
    make_plan,
    make_smoothing,
    part_bounds,
)
from pipeline.perplexity.kneser_ney.read_text import ByteRange, find_ranges, read_lines, sha256_of
from schemas.errors import ConfigError, ContractError
from schemas.storage import Store

# The steps of the n-gram trainer as Spark jobs: what is shuffled, by what, and what little comes back to the driver.
#
# Words are rows of the JVM: distinct, sorted and joined to ids there. N-grams travel as letters, arrays of ids that a
# worker has sorted and another merges. Between jobs everything lies in scratch files, so no job repeats an earlier one.

NumberedFile = tuple[int, str]
"""A part or chunk and its file."""


def word_frame(spark: SparkSession, folder: Store, chunks: Sequence[TaskResult]) -> DataFrame:
    """The distinct words of every chunk, with their numbers there: (chunk, number, word)."""

    def read(task: NumberedFile) -> Iterator[pa.RecordBatch]:
        return parts.chunk_words(folder, *task)

    tasks = list(enumerate(chunk["words"] for chunk in chunks))
    return dataframe_from_tasks(spark, read, tasks, "chunk int, number int, word binary")


def vocabulary_files(folder: Store, words: DataFrame, limits: Sequence[ByteRange], partitions: int) -> list[TaskResult]:
    """Write the vocabulary in the order of ids: words that may stay before others, then by their bytes.

    All words may stay if there are no `limits`, files that list those that may. Where Spark's sampled ranges cut that
    order into files changes no id.
    """
    distinct = words.select("word").distinct()
    if not limits:
        listed = distinct.withColumn("outside", F.lit(False))
    else:
        allowed = dataframe_from_tasks(words.sparkSession, parts.allowed_words, limits, "word binary").distinct()
        listed = distinct.join(allowed.withColumn("known", F.lit(True)), "word", "left")
        listed = listed.withColumn("outside", F.col("known").isNull())
    columns = ["outside", "word"]
    ordered = listed.select(columns).repartitionByRange(partitions, *columns).sortWithinPartitions(*columns)
    return run_partitions(ordered, lambda _, batches: parts.write_vocabulary(folder, batches))


def encode_chunks(
    plan: EstimationPlan, words: DataFrame, chunks: Sequence[TaskResult]
) -> tuple[list[NumberedFile], EstimationPlan]:
    """The chunks rewritten with the ids of words, and the plan with the bounds of its parts, from samples of them."""

    def read(task: tuple[str, int]) -> Iterator[pa.RecordBatch]:
        return parts.word_ids(plan.folder, *task)

    ids = dataframe_from_tasks(words.sparkSession, read, plan.vocabulary, "word binary, id long")
    numbers = words.join(ids, "word").select("chunk", "number", "id")
    # Every chunk has a sentence end, so none is empty: Spark leaves out the partitions of a join without rows.
    ends = words.sparkSession.range(len(chunks)).select(F.col("id").cast("int"), F.lit(0), F.lit(EOS).cast("long"))
    placed = numbers.union(ends).repartitionById(len(chunks), F.col("chunk"))
    lines = [chunk["line"] for chunk in chunks]

    def encode(number: int, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        return parts.encode_chunk(plan, lines[number], batches)

    answers = check_complete(run_partitions(placed, encode), len(chunks))
    bounds = part_bounds((answer["sample"] for answer in answers), plan.partitions)
    return list(enumerate(answer["path"] for answer in answers)), replace(plan, bounds=bounds)


def count_ngrams(spark: SparkSession, plan: EstimationPlan, lines: Sequence[NumberedFile]) -> list[TaskResult]:
    """What each part reports of its n-grams, which it has written."""

    def count(task: NumberedFile) -> Iterator[pa.RecordBatch]:
        return parts.count_chunk(plan, *task)

    letters = shuffle_by_target(dataframe_from_tasks(spark, count, lines, MESSAGE_DDL), plan.partitions)
    return check_complete(
        run_partitions(letters, lambda _, batches: parts.merge_counts(plan, batches)), plan.partitions
    )


def write_sections(
    spark: SparkSession, plan: EstimationPlan, smoothing: Smoothing, answers: Sequence[TaskResult]
) -> list[TaskResult]:
    """The sections that each part has written, after its contexts went to their buckets and came back as sums."""

    grams = list(enumerate(answer["path"] for answer in answers))

    def send(task: NumberedFile) -> Iterator[pa.RecordBatch]:
        return parts.send_contexts(plan, *task)

    def answer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return parts.sum_bucket_contexts(plan, smoothing, task_context().partitionId(), batches)

    def finish(number: int, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        return parts.write_part_sections(plan, smoothing, grams[number][1], number, batches)

    asked = shuffle_by_target(
        dataframe_from_tasks(spark, send, grams, MESSAGE_DDL), max(1, plan.order - 1) * plan.partitions
    )
    answered = shuffle_by_target(asked.mapInArrow(answer, MESSAGE_DDL), plan.partitions)
    return check_complete(run_partitions(answered, finish), plan.partitions)


def check_complete(answers: list[TaskResult], number: int) -> list[TaskResult]:
    """The answers themselves. Raises ContractError if a part has given none."""
    if len(answers) != number:
        raise ContractError(f"train_lm: expected {number} parts, got {len(answers)} answers. Run it again.")
    return answers


def shuffle_by_target(letters: DataFrame, number: int) -> DataFrame:
    """Letters in the partition of their target."""
    return letters.repartitionById(number, F.col("target"))


TOKENS_PER_PART = 2_000_000


@dataclass(frozen=True)
class LmReport:
    """What was trained."""

    arpa: str
    """Path of the model; its settings and digests lie beside it, with `.json` behind the name."""
    sha256: str
    tokens: int
    """Words without sentence ends."""
    sentences: int
    counts: list[int]
    """Lines of the model for each order."""
    pruned: list[int]
    """N-grams left out, for each order."""
    discounts: list[list[float]]
    """Of adjusted counts 1, 2 and 3+, for each order."""
    fallbacks: dict[int, str]
    """Orders whose discounts are those of the settings, with the reason."""
    seconds: dict[str, float]
    """Wall time of each step [s]."""


def train_lm(spark: SparkSession, config: TrainLmConfig, out: str) -> LmReport:
    """Train on the files of the settings and write the ARPA file `out` and `out`.json.

    Raises ConfigError if a path is wrong, ContractError if the text allows no model.
    """
    training = _Training(spark, config, out)
    ranges = find_ranges(config.input)

    def write(folder: Store) -> list[TaskResult]:
        return run_tasks(spark, partial(_chunk_range, folder, config), ranges, "text", None)

    files = [part for part in ranges if part.start == 0]
    digests = run_tasks(spark, _digest, files, "digests", None)
    return training.run(write, {part.name: answer["sha256"] for part, answer in zip(files, digests)})


def train_lm_on_frame(
    spark: SparkSession, lines: DataFrame, inputs: Mapping[str, str], config: TrainLmConfig, out: str
) -> LmReport:
    """Train on the column `sentences` (string or binary, nulls left out) of a DataFrame, otherwise as `train_lm`.

    `inputs` says what the lines are, name -> digest, and goes into the file beside the model.
    """
    if config.input:
        raise ConfigError(f"train_lm.input: expected to be read, got {config.input} and a DataFrame. Leave one out.")
    text = lines.select(F.col("sentences").cast("binary").alias("sentences"))

    def write(folder: Store) -> list[TaskResult]:
        def chunk(_: int, batches: Iterator[pa.RecordBatch]) -> TaskResult:
            return parts.write_chunks((batch.column(0) for batch in batches), folder, config)

        return run_partitions(text, chunk)

    return _Training(spark, config, out).run(write, inputs)


def _chunk_range(folder: Store, config: TrainLmConfig, part: ByteRange, retried: bool) -> TaskResult:
    return parts.write_chunks(read_lines(part), folder, config)


def _digest(part: ByteRange, retried: bool) -> TaskResult:
    return {"sha256": sha256_of(part.uri)}


class _Training:
    """One training: its settings, where it writes, and how long its steps take."""

    def __init__(self, spark: SparkSession, config: TrainLmConfig, out: str):
        head, slash, self.name = out.rpartition("/")
        if not self.name:
            raise ConfigError(f"train_lm: expected the path of a file, got {out!r}. Name the file.")
        self.limits = [] if config.limit_vocab is None else find_ranges([config.limit_vocab], "limit_vocab")
        self.folder = Store((head or "/") if slash else ".")
        self.scratch = self.folder.child(unique_name(f"{self.name}.scratch", "d"))
        self.spark, self.config, self.out = spark, config, out
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def done(self, step: str) -> None:
        """Note the time since the last step ended."""
        now = time.perf_counter()
        self.seconds[step] = round(now - self._since, 2)
        self._since = now

    def run(self, write: Callable[[Store], list[TaskResult]], inputs: Mapping[str, str]) -> LmReport:
        """Train on the chunks that `write` makes of the text."""
        try:
            report = self._model([chunk for answer in write(self.scratch) for chunk in answer["chunks"]], inputs)
        finally:
            if self.scratch.exists(""):
                self.scratch.fs.delete_dir(self.scratch.root)
        self._write_manifest(report, inputs)
        return report

    def _model(self, chunks: list[TaskResult], inputs: Mapping[str, str]) -> LmReport:
        spark, config = self.spark, self.config
        tokens, sentences = (sum(chunk[key] for chunk in chunks) for key in ("tokens", "sentences"))
        if not sentences:
            raise ContractError(f"train_lm: expected sentences, got none in {', '.join(inputs)}. Give other text.")
        self.done("text")
        cores = spark.sparkContext.defaultParallelism
        number = config.partitions or max(cores, -(-tokens // TOKENS_PER_PART))
        words = word_frame(spark, self.scratch, chunks)
        vocabulary = vocabulary_files(self.scratch, words, self.limits, number)
        plan = make_plan(config, self.scratch, vocabulary, number)
        self.done("vocabulary")
        lines, plan = encode_chunks(plan, words, chunks)
        self.done("ids")
        counts = count_ngrams(spark, plan, lines)
        smoothing = make_smoothing(config, plan, counts)
        self.done("counts")
        sections = [answer["sections"] for answer in write_sections(spark, plan, smoothing, counts)]
        self.done("probabilities")
        found = [sum(section[order]["lines"] for section in sections) for order in range(config.order)]
        if found != smoothing.lines():
            raise ContractError(f"train_lm: expected {smoothing.lines()} lines by order, got {found}. Run it again.")
        paths = [[section[order]["path"] for section in sections] for order in range(config.order)]
        digest = write_arpa(self.scratch, paths, found, self.folder, self.name)
        self.done("file")
        pruned = [tally.number - tally.kept for tally in smoothing.tallies]
        discounts = [[item.one, item.two, item.more] for item in smoothing.discounts]
        return LmReport(
            self.out, digest, tokens, sentences, found, pruned, discounts, smoothing.fallbacks, self.seconds
        )

    def _write_manifest(self, report: LmReport, inputs: Mapping[str, str]) -> None:
        """The file beside the model; it says nothing of this run, so equal models have equal ones."""
        known = asdict(report)
        content = {
            "settings": self.config.content(),
            "inputs": dict(sorted(inputs.items())),
            "limit_vocab": {part.name: sha256_of(part.uri) for part in self.limits if part.start == 0},
            **{key: known[key] for key in ("tokens", "sentences", "counts", "pruned", "discounts", "fallbacks")},
            "sha256": report.sha256,
        }
        self.folder.write_atomic(f"{self.name}.json", json.dumps(content, indent=1).encode() + b"\n")
