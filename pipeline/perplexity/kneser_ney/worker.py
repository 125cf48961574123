"""The functions that a worker runs in each phase of the n-gram training, on plain values, scratch files and messages.

A message holds arrays and is shuffled by its target partition. Functions that Spark maps over tasks yield messages;
functions that write a part return a report for the driver: file names, sizes and sums.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.perplexity.kneser_ney.arpa import (
    Lexicon,
    Messages,
    gram_texts,
    join_messages,
    message_grams,
    message_rows,
    read_columns,
    read_grams,
    write_columns,
    write_grams,
    write_section,
)
from pipeline.perplexity.kneser_ney.config import TrainLmConfig
from pipeline.perplexity.kneser_ney.estimate import (
    FIRST_WORD,
    ContextSums,
    CountsOfCounts,
    EstimationPlan,
    Flags,
    Floats,
    Smoothing,
    backoff_weights,
    combine_counts,
    contexts_by_bucket,
    interpolate_probabilities,
    kept_ngrams,
    ngrams_by_order,
    owner_keys,
    owner_parts,
    sum_contexts,
    windows,
)
from pipeline.perplexity.kneser_ney.read_text import ByteRange, make_chunks, read_lines, split_words
from schemas.storage import Store

Answer = dict[str, Any]
"""The report of a worker to the driver, which can be written as JSON."""
SAMPLES = 64
"""Number of n-grams that are sampled from each chunk to choose the bounds of parts."""
WORD_ROWS = 1 << 16
"""Words in a batch that Spark gets."""


def write_chunks(lines: Iterable[pa.Array], folder: Store, config: TrainLmConfig) -> Answer:
    """Write sentences to files in chunks. Each chunk has its own numbering of words.

    Returns `chunks` (file names, number of sentences and number of words of each chunk) and `rows` (number of all
    sentences).
    """
    answer: Answer = {"chunks": [], "rows": 0}
    for chunk in make_chunks(lines, config.chunk_tokens, config.reserved_words):
        sentences = int((chunk.line == 0).sum())
        answer["chunks"].append(
            {
                "words": write_columns(folder, "words", {"word": chunk.words}),
                "line": write_columns(folder, "line", {"number": chunk.line}),
                "sentences": sentences,
                "tokens": len(chunk.line) - sentences,
            }
        )
        answer["rows"] += sentences
    return answer


def chunk_words(folder: Store, number: int, path: str) -> Iterator[pa.RecordBatch]:
    """Yield rows (chunk, number, word) with the distinct words of a chunk.

    `number` is the number that replaces the word in the chunk.
    """
    words = read_columns(folder, path)["word"].combine_chunks()
    for start in range(0, len(words), WORD_ROWS):
        rows = words[start : start + WORD_ROWS]
        numbers = pa.array(np.arange(start + 1, start + 1 + len(rows), dtype=np.int32))
        chunk = pa.array(np.full(len(rows), number, np.int32))
        yield pa.RecordBatch.from_arrays([chunk, numbers, rows], ["chunk", "number", "word"])


def allowed_words(part: ByteRange) -> Iterator[pa.RecordBatch]:
    """Yield the words of one byte range of a `limit_vocab` file, with repetitions."""
    for lines in read_lines(part):
        yield pa.RecordBatch.from_arrays([split_words(lines).flatten()], ["word"])


def write_vocabulary(folder: Store, batches: Iterator[pa.RecordBatch]) -> Answer:
    """Write the words of sorted rows (outside, word) to one vocabulary file.

    `outside` is True for a word that `limit_vocab` does not list. Returns the name of the file (`path`), the number of
    words (`words`), and the number of words that are not outside (`allowed`).
    """
    words, outside = [pa.array([], pa.binary())], 0
    for batch in batches:
        words.append(batch.column("word"))
        outside += int(np.count_nonzero(batch.column("outside").to_numpy(zero_copy_only=False)))
    merged = pa.concat_arrays(words)
    path = write_columns(folder, "vocabulary", {"word": merged})
    return {"path": path, "words": len(merged), "allowed": len(merged) - outside}


def word_ids(folder: Store, path: str, first: int) -> Iterator[pa.RecordBatch]:
    """Yield the words of a vocabulary file with their ids: rows (word, id)."""
    words = read_columns(folder, path)["word"].combine_chunks()
    for start in range(0, len(words), WORD_ROWS):
        rows = words[start : start + WORD_ROWS]
        ids = pa.array(np.arange(first + start, first + start + len(rows), dtype=np.int64))
        yield pa.RecordBatch.from_arrays([rows, ids], ["word", "id"])


def encode_chunk(plan: EstimationPlan, path: str, batches: Iterator[pa.RecordBatch]) -> Answer:
    """Write the text of a chunk as word ids. `batches` has rows (number of a word in the chunk, id of the word).

    Returns the name of the file (`path`) and the owner keys of some of the chunk's n-grams (`sample`).
    """
    pairs = [(batch.column("number").to_numpy(), batch.column("id").to_numpy()) for batch in batches]
    numbers = read_columns(plan.folder, path)["number"].to_numpy()
    ids = np.zeros(sum(len(number) for number, _ in pairs), np.uint32)
    for number, identifier in pairs:
        ids[number] = identifier
    line = ids[numbers]
    keys = np.sort(owner_keys(windows(line, min(plan.order, 2))))
    sample = keys[np.linspace(0, len(keys) - 1, SAMPLES).astype(np.int64)] if len(keys) else keys
    return {"path": write_columns(plan.folder, "ids", {"id": line}), "sample": sample.tolist()}


def count_chunk(plan: EstimationPlan, number: int, path: str) -> Iterator[pa.RecordBatch]:
    """Yield messages with the n-grams of a chunk and their counts.

    Each message is for the part that owns its n-grams.
    """
    grams = windows(read_columns(plan.folder, path)["id"].to_numpy(), plan.order)
    grams, counts = combine_counts(grams, np.ones(grams.shape[1], np.int64), plan.bits)
    cuts = np.searchsorted(owner_parts(grams, plan.bounds), np.arange(plan.partitions + 1))
    for target, (start, end) in enumerate(pairwise(cuts)):
        yield from message_rows(target, number, plan.order, grams[:, start:end], counts[start:end])


def merge_counts(plan: EstimationPlan, batches: Iterator[pa.RecordBatch]) -> Answer:
    """Sum the counts of a part's n-grams over all messages to the part, and write the n-grams to a file.

    Returns the name of the file (`path`), the counts of counts of each order (`tallies`), and the counts of words that
    several parts share (`shared`).
    """
    arrays = [message_grams(payload, plan.order) for payload in join_messages(batches).values()]
    grams = np.concatenate([np.zeros((plan.order, 0), np.uint32), *(pair[0] for pair in arrays)], axis=1)
    counts = np.concatenate([np.zeros(0, np.int64), *(pair[1] for pair in arrays)])
    del arrays
    grams, counts = combine_counts(grams, counts, plan.bits)
    path = write_grams(plan.folder, "grams", grams, counts)
    orders = ngrams_by_order(grams, counts)
    shared = np.isin(orders[0].grams[0], plan.shared())
    rows = zip(*(column[shared].tolist() for column in (orders[0].grams[0], orders[0].counts, orders[0].raw)))
    unshared = orders[0].where(~shared)
    tallies = [CountsOfCounts.of(level.counts, plan.kept(level)) for level in [unshared, *orders[1:]]]
    return {"path": path, "tallies": [vars(tally) for tally in tallies], "shared": list(rows), "rows": len(counts)}


def send_contexts(plan: EstimationPlan, number: int, path: str) -> Iterator[pa.RecordBatch]:
    """Yield messages with the contexts of a part's n-grams and the n-grams' adjusted counts.

    Each message has the contexts of one order in one hash bucket.
    """
    for order, level in enumerate(ngrams_by_order(*read_grams(plan.folder, path)), 1):
        if order == 1:
            continue
        for bucket, (contexts, counts) in enumerate(contexts_by_bucket(level, plan.kept(level), plan.partitions)):
            yield from message_rows((order - 2) * plan.partitions + bucket, number, order, contexts, counts)


def sum_bucket_contexts(
    plan: EstimationPlan, smoothing: Smoothing, number: int, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Sum the counts of each context in one hash bucket; yield messages with the results.

    A part that sent a context receives the sums of the context. The part that has the context as an n-gram receives the
    context's back-off share.
    """
    messages = join_messages(batches)
    if not messages:
        return
    bucket, order = number % plan.partitions, number // plan.partitions + 2
    contexts = [message_grams(payload, order - 1) for payload in messages.values()]
    totals = sum_contexts(contexts, smoothing.discounts[order - 1], plan.bits, plan.bounds)
    for (_, source), sums in zip(messages, totals.sums):
        yield from message_rows(source, bucket, order, sums.mass, sums.freed)
    cuts = np.searchsorted(totals.parts, np.arange(plan.partitions + 1))
    for target, (start, end) in enumerate(pairwise(cuts)):
        yield from message_rows(target, bucket, 1 - order, totals.freed[start:end])


def write_part_sections(
    plan: EstimationPlan, smoothing: Smoothing, path: str, number: int, batches: Iterator[pa.RecordBatch]
) -> Answer:
    """Write the ARPA lines of a part to one file for each order.

    Returns `sections`: the name and the line count of each file.
    """
    messages = join_messages(batches)
    orders = ngrams_by_order(*read_grams(plan.folder, path))
    unigrams, owned = smoothing.unigrams.complete(orders[0], number, plan.bounds)
    if plan.order > 1:
        orders[1] = replace(orders[1], suffix=np.searchsorted(unigrams.grams[0], orders[1].grams[0]))
    orders[0] = unigrams
    lexicon = Lexicon(plan.folder, plan.vocabulary, np.concatenate([level.grams[-1] for level in orders]))
    sections: list[Answer] = []
    keep: Flags = np.zeros(0, np.bool_)
    values: Floats = np.zeros(0)
    texts = pa.array([], pa.binary())
    for order, level in enumerate(orders, 1):
        keep, below = plan.kept(level), keep
        if order == 1:
            keep |= level.grams[0] < FIRST_WORD
            values = smoothing.unigrams.probabilities(level.grams[0], level.counts)
            texts = lexicon.words(level.grams[0, keep])
        else:
            values = interpolate_probabilities(
                level, _sums(plan, messages, order), smoothing.discounts[order - 1], values
            )
            texts = gram_texts(kept_ngrams(level, keep, below), texts, lexicon)
        is_owned = owned if order == 1 else np.ones(len(values), np.bool_)
        weights = None
        if order < plan.order:
            weights = np.ones(len(values))
            weights[is_owned] = backoff_weights(level.grams[:, is_owned], _freed(plan, messages, order))
            weights = weights[keep & is_owned]
        lines = texts if is_owned.all() else texts.filter(pa.array(is_owned[keep]))
        name = write_section(plan.folder, f"section-{order}", lines, values[keep & is_owned], weights)
        sections.append({"path": name, "lines": len(lines)})
    return {"sections": sections, "rows": sum(section["lines"] for section in sections)}


def _sums(plan: EstimationPlan, messages: Messages, order: int) -> list[ContextSums]:
    """Take the context sums of one order out of `messages`; return them by hash bucket."""
    payloads = [messages.pop((order, bucket), memoryview(b"")) for bucket in range(plan.partitions)]
    halves = [(payload[: len(payload) // 2], payload[len(payload) // 2 :]) for payload in payloads]
    return [ContextSums(np.frombuffer(mass, np.int64), np.frombuffer(freed, np.float64)) for mass, freed in halves]


def _freed(plan: EstimationPlan, messages: Messages, order: int) -> list[Floats]:
    """Take the back-off shares of contexts of `order` words out of `messages`; return them by hash bucket."""
    payloads = [messages.pop((-order, bucket), memoryview(b"")) for bucket in range(plan.partitions)]
    return [np.frombuffer(payload, np.float64) for payload in payloads]
