"""The n-gram trainer on Spark: distributed interpolated modified Kneser-Ney smoothing, from text files to an ARPA file.

text -> chunks -> vocabulary -> ids -> [shuffle by suffix] counts -> discounts -> [shuffle by context] context sums
-> [shuffle back] probabilities -> sections -> one file. Data between the shuffles is in scratch files; only their names
and sizes reach the driver. Words are Spark rows. N-grams are shuffled as messages, which are arrays that numpy sorts.
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
from pipeline.perplexity.kneser_ney import worker
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

# The phases of the training as Spark jobs.
#
# Spark removes repeated words, sorts them and joins them to ids. N-grams are shuffled as messages: arrays of ids that
# one worker sorts and another merges. Results are in scratch files, so no job repeats an earlier one.

NumberedFile = tuple[int, str]
"""(number, file) of a part or a chunk."""


def word_frame(spark: SparkSession, folder: Store, chunks: Sequence[TaskResult]) -> DataFrame:
    """Return a DataFrame (chunk, number, word) with the distinct words of every chunk.

    `number` is the number that replaces the word in the chunk.
    """

    def read(task: NumberedFile) -> Iterator[pa.RecordBatch]:
        return worker.chunk_words(folder, *task)

    tasks = list(enumerate(chunk["words"] for chunk in chunks))
    return dataframe_from_tasks(spark, read, tasks, "chunk int, number int, word binary")


def vocabulary_files(folder: Store, words: DataFrame, limits: Sequence[ByteRange], partitions: int) -> list[TaskResult]:
    """Write the vocabulary files, in the order of word ids; return the name and the word counts of each file.

    Allowed words come before all other words, and each group is sorted by bytes. `limits` are the byte ranges of the
    file that lists the allowed words. If `limits` is empty, all words are allowed.
    """
    distinct = words.select("word").distinct()
    if not limits:
        listed = distinct.withColumn("outside", F.lit(False))
    else:
        allowed = dataframe_from_tasks(words.sparkSession, worker.allowed_words, limits, "word binary").distinct()
        listed = distinct.join(allowed.withColumn("known", F.lit(True)), "word", "left")
        listed = listed.withColumn("outside", F.col("known").isNull())
    # Spark chooses from a sample which words are in which file; this choice does not affect the ids.
    columns = ["outside", "word"]
    ordered = listed.select(columns).repartitionByRange(partitions, *columns).sortWithinPartitions(*columns)
    return run_partitions(ordered, lambda _, batches: worker.write_vocabulary(folder, batches))


def encode_chunks(
    plan: EstimationPlan, words: DataFrame, chunks: Sequence[TaskResult]
) -> tuple[list[NumberedFile], EstimationPlan]:
    """Write the word ids of each chunk to a file.

    Return the (number, file) of each chunk, and the plan, completed with the bounds of the parts.
    """

    def read(task: tuple[str, int]) -> Iterator[pa.RecordBatch]:
        return worker.word_ids(plan.folder, *task)

    ids = dataframe_from_tasks(words.sparkSession, read, plan.vocabulary, "word binary, id long")
    numbers = words.join(ids, "word").select("chunk", "number", "id")
    # A row for the sentence end keeps every chunk non-empty: Spark omits partitions of a join that have no rows.
    ends = words.sparkSession.range(len(chunks)).select(F.col("id").cast("int"), F.lit(0), F.lit(EOS).cast("long"))
    placed = numbers.union(ends).repartitionById(len(chunks), F.col("chunk"))
    lines = [chunk["line"] for chunk in chunks]

    def encode(number: int, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        return worker.encode_chunk(plan, lines[number], batches)

    answers = check_complete(run_partitions(placed, encode), len(chunks))
    bounds = part_bounds((answer["sample"] for answer in answers), plan.partitions)
    return list(enumerate(answer["path"] for answer in answers)), replace(plan, bounds=bounds)


def count_ngrams(spark: SparkSession, plan: EstimationPlan, lines: Sequence[NumberedFile]) -> list[TaskResult]:
    """Count the n-grams of all chunks and write one file per part; return the results of `merge_counts` by part."""

    def count(task: NumberedFile) -> Iterator[pa.RecordBatch]:
        return worker.count_chunk(plan, *task)

    messages = shuffle_by_target(dataframe_from_tasks(spark, count, lines, MESSAGE_DDL), plan.partitions)
    return check_complete(
        run_partitions(messages, lambda _, batches: worker.merge_counts(plan, batches)), plan.partitions
    )


def write_sections(
    spark: SparkSession, plan: EstimationPlan, smoothing: Smoothing, answers: Sequence[TaskResult]
) -> list[TaskResult]:
    """Write the ARPA lines of each part; return the names and line counts of each part's files."""
    # Contexts are shuffled to their hash buckets and summed there. The sums are shuffled back to the parts.
    grams = list(enumerate(answer["path"] for answer in answers))

    def send(task: NumberedFile) -> Iterator[pa.RecordBatch]:
        return worker.send_contexts(plan, *task)

    def answer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return worker.sum_bucket_contexts(plan, smoothing, task_context().partitionId(), batches)

    def finish(number: int, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        return worker.write_part_sections(plan, smoothing, grams[number][1], number, batches)

    contexts = shuffle_by_target(
        dataframe_from_tasks(spark, send, grams, MESSAGE_DDL), max(1, plan.order - 1) * plan.partitions
    )
    sums = shuffle_by_target(contexts.mapInArrow(answer, MESSAGE_DDL), plan.partitions)
    return check_complete(run_partitions(sums, finish), plan.partitions)


def check_complete(answers: list[TaskResult], number: int) -> list[TaskResult]:
    """Raise ContractError unless `answers` has the results of `number` partitions. Return `answers`."""
    if len(answers) != number:
        raise ContractError(
            f"train_lm: expected the results of {number} partitions, got {len(answers)}. Run `penstock train-lm` again."
        )
    return answers


def shuffle_by_target(letters: DataFrame, number: int) -> DataFrame:
    """Shuffle messages to `number` partitions, by the target that each row names."""
    return letters.repartitionById(number, F.col("target"))


# The training as a whole.

TOKENS_PER_PART = 2_000_000
"""Number of words per part, if the setting `partitions` is None."""


@dataclass(frozen=True)
class LmReport:
    """The result of the n-gram training: the ARPA file, its counts and discounts, and the time of each phase."""

    arpa: str
    """Path of the ARPA file. Its settings and digests are in the file of the same name with `.json` appended."""
    sha256: str
    """SHA-256 of the ARPA file."""
    tokens: int
    """Number of words, without sentence ends."""
    sentences: int
    counts: list[int]
    """Number of ARPA lines of each order."""
    pruned: list[int]
    """Number of pruned n-grams of each order."""
    discounts: list[list[float]]
    """Discounts of adjusted counts 1, 2 and 3+ of each order."""
    fallbacks: dict[int, str]
    """Orders that use `discount_fallback`, each with the reason why the closed form fails."""
    seconds: dict[str, float]
    """Wall time of each phase [s]."""


def train_lm(spark: SparkSession, config: TrainLmConfig, out: str) -> LmReport:
    """Train an n-gram model on the files of `train_lm.input`, and write the ARPA file `out` and `out`.json.

    Raises ConfigError if a path does not exist, ContractError if the text is empty or too small to estimate discounts.
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
    """Train an n-gram model on the column `sentences` of a DataFrame, and write the same files as `train_lm`.

    The column has strings or binary values; nulls are skipped. `inputs` maps the names of the inputs to their digests,
    for `out`.json.
    """
    if config.input:
        raise ConfigError(
            f"train_lm.input: expected no files in addition to a DataFrame, got {config.input}. Remove train_lm.input."
        )
    text = lines.select(F.col("sentences").cast("binary").alias("sentences"))

    def write(folder: Store) -> list[TaskResult]:
        def chunk(_: int, batches: Iterator[pa.RecordBatch]) -> TaskResult:
            return worker.write_chunks((batch.column(0) for batch in batches), folder, config)

        return run_partitions(text, chunk)

    return _Training(spark, config, out).run(write, inputs)


def _chunk_range(folder: Store, config: TrainLmConfig, part: ByteRange, retried: bool) -> TaskResult:
    return worker.write_chunks(read_lines(part), folder, config)


def _digest(part: ByteRange, retried: bool) -> TaskResult:
    return {"sha256": sha256_of(part.uri)}


class _Training:
    """An n-gram training in progress: its settings, its folders, and the wall time of each phase so far."""

    def __init__(self, spark: SparkSession, config: TrainLmConfig, out: str):
        head, slash, self.name = out.rpartition("/")
        if not self.name:
            raise ConfigError(f"train_lm: expected the path of a file, got {out!r}. Append a file name to --out.")
        self.limits = [] if config.limit_vocab is None else find_ranges([config.limit_vocab], "limit_vocab")
        self.folder = Store((head or "/") if slash else ".")
        self.scratch = self.folder.child(unique_name(f"{self.name}.scratch", "d"))
        self.spark, self.config, self.out = spark, config, out
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def done(self, step: str) -> None:
        """Record the wall time of the phase that has just ended."""
        now = time.perf_counter()
        self.seconds[step] = round(now - self._since, 2)
        self._since = now

    def run(self, write: Callable[[Store], list[TaskResult]], inputs: Mapping[str, str]) -> LmReport:
        """Train a model on the chunks that `write` writes. Write the ARPA file and the file `out`.json."""
        try:
            report = self._model([chunk for answer in write(self.scratch) for chunk in answer["chunks"]], inputs)
        finally:
            if self.scratch.exists(""):
                self.scratch.delete_folder()
        self._write_manifest(report, inputs)
        return report

    def _model(self, chunks: list[TaskResult], inputs: Mapping[str, str]) -> LmReport:
        spark, config = self.spark, self.config
        tokens, sentences = (sum(chunk[key] for chunk in chunks) for key in ("tokens", "sentences"))
        if not sentences:
            raise ContractError(
                f"train_lm: expected sentences, got none in {', '.join(inputs)}. Set train_lm.input to files with text."
            )
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
        num_lines = [sum(section[order]["lines"] for section in sections) for order in range(config.order)]
        if num_lines != smoothing.lines():
            raise ContractError(
                f"train_lm: expected {smoothing.lines()} ARPA lines for orders 1, 2, ..., got {num_lines}. "
                "Run `penstock train-lm` again."
            )
        paths = [[section[order]["path"] for section in sections] for order in range(config.order)]
        digest = write_arpa(self.scratch, paths, num_lines, self.folder, self.name)
        self.done("file")
        pruned = [tally.number - tally.kept for tally in smoothing.tallies]
        discounts = [[item.d1, item.d2, item.d3_plus] for item in smoothing.discounts]
        return LmReport(
            self.out, digest, tokens, sentences, num_lines, pruned, discounts, smoothing.fallbacks, self.seconds
        )

    def _write_manifest(self, report: LmReport, inputs: Mapping[str, str]) -> None:
        """Write `out`.json, without times and output paths: equal models have equal JSON files."""
        figures = asdict(report)
        content = {
            "settings": self.config.content(),
            "inputs": dict(sorted(inputs.items())),
            "limit_vocab": {part.name: sha256_of(part.uri) for part in self.limits if part.start == 0},
            **{key: figures[key] for key in ("tokens", "sentences", "counts", "pruned", "discounts", "fallbacks")},
            "sha256": report.sha256,
        }
        self.folder.write_atomic(f"{self.name}.json", json.dumps(content, indent=1).encode() + b"\n")
