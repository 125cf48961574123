"""The steps of the n-gram trainer as Spark jobs: what is shuffled, by what, and what little comes back to the driver.

Words are rows of the JVM: distinct, sorted and joined to ids there. N-grams travel as letters, arrays of ids that a
worker has sorted and another merges. Between jobs everything lies in scratch files, so no job repeats an earlier one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.engine.spark import Answer, answers_of_partitions, frame_of_tasks, task_context
from pipeline.perplexity.kneser_ney import worker as parts
from pipeline.perplexity.kneser_ney.estimate import EOS
from pipeline.perplexity.kneser_ney.plan import Plan, Smoothing, bounds_of
from pipeline.perplexity.kneser_ney.read_text import Range
from pipeline.perplexity.kneser_ney.scratch import LETTER_DDL
from schemas.errors import ContractError
from schemas.storage import Store

Numbered = tuple[int, str]
"""A part or chunk and its file."""


def word_frame(spark: SparkSession, folder: Store, chunks: Sequence[Answer]) -> DataFrame:
    """The distinct words of every chunk, with their numbers there: (chunk, number, word)."""

    def read(task: Numbered) -> Iterator[pa.RecordBatch]:
        return parts.chunk_words(folder, *task)

    tasks = list(enumerate(chunk["words"] for chunk in chunks))
    return frame_of_tasks(spark, read, tasks, "chunk int, number int, word binary")


def vocabulary_files(folder: Store, words: DataFrame, limits: Sequence[Range], partitions: int) -> list[Answer]:
    """Write the vocabulary in the order of ids: words that may stay before others, then by their bytes.

    All words may stay if there are no `limits`, files that list those that may. Where Spark's sampled ranges cut that
    order into files changes no id.
    """
    distinct = words.select("word").distinct()
    if not limits:
        listed = distinct.withColumn("outside", F.lit(False))
    else:
        allowed = frame_of_tasks(words.sparkSession, parts.listed_words, limits, "word binary").distinct()
        listed = distinct.join(allowed.withColumn("known", F.lit(True)), "word", "left")
        listed = listed.withColumn("outside", F.col("known").isNull())
    columns = ["outside", "word"]
    ordered = listed.select(columns).repartitionByRange(partitions, *columns).sortWithinPartitions(*columns)
    return answers_of_partitions(ordered, lambda _, batches: parts.write_vocabulary(folder, batches))


def encoded(plan: Plan, words: DataFrame, chunks: Sequence[Answer]) -> tuple[list[Numbered], Plan]:
    """The chunks rewritten with the ids of words, and the plan with the bounds of its parts, from samples of them."""

    def read(task: tuple[str, int]) -> Iterator[pa.RecordBatch]:
        return parts.word_ids(plan.folder, *task)

    ids = frame_of_tasks(words.sparkSession, read, plan.vocabulary, "word binary, id long")
    numbers = words.join(ids, "word").select("chunk", "number", "id")
    # Every chunk has a sentence end, so none is empty: Spark leaves out the partitions of a join without rows.
    ends = words.sparkSession.range(len(chunks)).select(F.col("id").cast("int"), F.lit(0), F.lit(EOS).cast("long"))
    placed = numbers.union(ends).repartitionById(len(chunks), F.col("chunk"))
    lines = [chunk["line"] for chunk in chunks]

    def encode(number: int, batches: Iterator[pa.RecordBatch]) -> Answer:
        return parts.encode_chunk(plan, lines[number], batches)

    answers = complete(answers_of_partitions(placed, encode), len(chunks))
    bounds = bounds_of((answer["sample"] for answer in answers), plan.partitions)
    return list(enumerate(answer["path"] for answer in answers)), replace(plan, bounds=bounds)


def counted(spark: SparkSession, plan: Plan, lines: Sequence[Numbered]) -> list[Answer]:
    """What each part reports of its n-grams, which it has written."""

    def count(task: Numbered) -> Iterator[pa.RecordBatch]:
        return parts.count_chunk(plan, *task)

    letters = mailed(frame_of_tasks(spark, count, lines, LETTER_DDL), plan.partitions)
    return complete(
        answers_of_partitions(letters, lambda _, batches: parts.merge_counts(plan, batches)), plan.partitions
    )


def finished(spark: SparkSession, plan: Plan, smoothing: Smoothing, answers: Sequence[Answer]) -> list[Answer]:
    """The sections that each part has written, after its contexts went to their buckets and came back as sums."""

    grams = list(enumerate(answer["path"] for answer in answers))

    def send(task: Numbered) -> Iterator[pa.RecordBatch]:
        return parts.send_contexts(plan, *task)

    def answer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return parts.answer_contexts(plan, smoothing, task_context().partitionId(), batches)

    def finish(number: int, batches: Iterator[pa.RecordBatch]) -> Answer:
        return parts.finish_part(plan, smoothing, grams[number][1], number, batches)

    asked = mailed(frame_of_tasks(spark, send, grams, LETTER_DDL), max(1, plan.order - 1) * plan.partitions)
    answered = mailed(asked.mapInArrow(answer, LETTER_DDL), plan.partitions)
    return complete(answers_of_partitions(answered, finish), plan.partitions)


def complete(answers: list[Answer], number: int) -> list[Answer]:
    """The answers themselves. Raises ContractError if a part has given none."""
    if len(answers) != number:
        raise ContractError(f"train_lm: promised {number} parts, found {len(answers)} answers; run it again")
    return answers


def mailed(letters: DataFrame, number: int) -> DataFrame:
    """Letters in the partition of their target."""
    return letters.repartitionById(number, F.col("target"))
