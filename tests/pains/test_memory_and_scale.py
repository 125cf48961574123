"""Pains of memory and scale: buckets that grow too large, signatures of long texts, pages that never end."""

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock
from jobs.recipe import recipe_sections
from pipeline.dedup.config import DedupConfig
from pipeline.dedup.keys import KEYS, PAIRED, PAYLOAD_REQUEST, pairs_of_buckets, rows_of_buckets
from pipeline.dedup.verify import CARRIED, compare_pairs, make_comparison
from pipeline.engine.spark import run_tasks
from pipeline.engine.stage import CPU
from pipeline.engine.worker import FusedStages
from pipeline.extract.blocks import MAX_TAGS
from pipeline.language import LANGUAGE
from pipeline.minhash.stage import FAMILIES, SIGNATURE, SignatureConfig, shingle_hashes, signature
from pipeline.models import ModelsConfig, ensure_model
from pipeline.quality.stage import QUALITY
from schemas.config import build_recipe

MIB = 1 << 20


def order(number: int) -> bytes:
    """Return a keep order that ends with the 20 bytes of a document."""
    return number.to_bytes(24, "big")


def bucket(documents: int, rows: int = 4096) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one bucket that holds this many documents."""
    for start in range(0, documents, rows):
        numbers = range(start, min(start + rows, documents))
        yield pa.RecordBatch.from_arrays([pa.array([7] * len(numbers)), pa.array(map(order, numbers))], schema=KEYS)


def test_pairs_grow_with_the_documents_of_a_bucket_and_not_with_their_square() -> None:
    """datatrove: on twice the data with twice the tasks, the second stage of MinHash took half as long again. The first
    did not.

    https://github.com/huggingface/datatrove/issues/298

    Each document of a bucket is compared with the first one: a bucket of a million copies has a million pairs.
    """
    work = []
    for documents in (2_000, 4_000, 8_000):
        pairs = [row for batch in pairs_of_buckets(bucket(documents), 24) for row in batch.column("leader").to_pylist()]
        work.append(len(pairs))
        assert pairs.count(PAYLOAD_REQUEST) == 1
        assert len(pairs) == documents
    assert work == [2_000, 4_000, 8_000]


def test_a_bucket_that_is_larger_than_memory_is_a_stream() -> None:
    """datatrove: MinHash deduplication of 750 GB hung a machine with 1 TB of memory, which had to be rebooted.

    https://github.com/huggingface/datatrove/issues/222

    A bucket passes as batches, of which one is in memory: forty times the documents need no more.
    """
    peaks = []
    for documents in (20_000, 800_000):
        before, peak = pa.total_allocated_bytes(), 0
        for kind, _ in rows_of_buckets(0, bucket(documents), 24):
            peak = max(peak, pa.total_allocated_bytes() - before)
            assert kind in (PAIRED, "leads")
        peaks.append(peak)
    assert peaks[1] <= 1.1 * peaks[0]
    assert peaks[1] < 4 * MIB


def test_candidates_are_compared_batch_by_batch() -> None:
    """NeMo Curator: fuzzy deduplication of 8 TB ran out of memory. The advice was one bucket of hashes at a time, and
    no check of false positives, which needs a second copy of the corpus.

    https://github.com/NVIDIA-NeMo/Curator/issues/471

    Signatures of a pair are compared as they pass. One cluster of ten times the size needs no more memory.
    """
    config, peaks = SignatureConfig(), []
    payload = bytes(16) + signature("one text " * 40, "en", config)
    compare = make_comparison(DedupConfig(), config)
    for documents in (10_000, 100_000):
        before, peak, joined = pa.total_allocated_bytes(), 0, 0
        for kind, rows in compare_pairs(carried(documents, payload), compare):
            peak = max(peak, pa.total_allocated_bytes() - before)
            joined += len(rows) if kind == "joined" else 0
        assert joined == documents - 1
        peaks.append(peak)
    assert peaks[1] <= 1.1 * peaks[0]
    assert peaks[1] < 64 * MIB


def carried(documents: int, payload: bytes, rows: int = 2_000) -> Iterator[pa.RecordBatch]:
    """Yield a leader and its candidates, each with its signature, as the shuffle sorts them."""
    leader = order(0)[-20:]
    for start in range(0, documents, rows):
        numbers = range(start, min(start + rows, documents))
        nodes = [b"" if number == 0 else order(number)[-20:] for number in numbers]
        columns = [[leader] * len(nodes), nodes, [payload] * len(nodes), [bytes(8)] * len(nodes), map(order, numbers)]
        yield pa.RecordBatch.from_arrays([pa.array(column, pa.binary()) for column in columns], schema=CARRIED)


@pytest.mark.parametrize("family", ["fast", "datasketch"])
def test_the_signature_of_a_long_text_needs_a_fixed_workspace(family: str) -> None:
    """Data-Juicer: MinHash made a matrix of all shingles and all permutations: 256 MiB for a text of 131,072 shingles.

    https://github.com/datajuicer/data-juicer/issues/1034

    Shingles are permuted in blocks. The workspace for such a text is below 16 MiB, and the same for half of it.
    """
    config, peaks = SignatureConfig(family=family, permutations=256), []
    few = shingle_hashes("some words of a text", "en", config)
    FAMILIES[family].sketch(few, config)  # imports a package and draws the permutations
    for shingles in (65_536, 131_072):
        codes = np.random.default_rng(1).integers(0, 1 << 63, shingles, dtype=np.uint64).astype(few.dtype)
        tracemalloc.start()
        FAMILIES[family].sketch(codes, config)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 16 * MIB
    assert peaks[1] - peaks[0] < 4 * MIB


def test_a_page_of_a_million_rows_ends_in_a_verdict() -> None:
    """trafilatura: the extraction of a page with a table of a million rows did not end, and its time limit worked in
    the command line only.

    https://github.com/adbar/trafilatura/issues/704

    The work of a page is limited by counts before a parser sees it. The text before the table is kept, or a reason
    named.
    """
    main = "".join(
        f"<p>The harbour of town {n} has a pier, a light and a small office for its master.</p>" for n in range(9)
    )
    table = "<table>" + "<tr><td>a<td>b" * 1_000_000 + "</table>"
    assert table.count("<") > MAX_TAGS
    extracted = penstock.extract(main + table)
    assert extracted.drop is not None or "The harbour of town 8" in extracted.text
    assert len(extracted.text) < 5_000_000


def numbered() -> Callable[[int, bool], dict[str, int]]:
    """Return a task that returns its number; made here, so that it travels to the workers by value."""
    return lambda number, retried: {"rows": 1, "number": number}


@pytest.mark.spark
def test_a_step_may_have_thousands_of_parts(spark: Any) -> None:
    """datatrove: with more than 1,000 tasks, jobs were divided into several arrays of Slurm. All after the first
    failed, and one too many was never started.

    https://github.com/huggingface/datatrove/issues/238

    A step is one job of Spark for any number of parts: each of 2,500 parts answers once, in order.
    """
    answers = run_tasks(spark, numbered(), list(range(2_500)), "test", 4)
    assert [answer["number"] for answer in answers] == list(range(2_500))


def test_stages_remember_nothing_of_other_documents() -> None:
    """Data-Juicer: a deduplicator that had seen other data before kept its hash tables, so the same samples had another
    result.

    https://github.com/datajuicer/data-juicer/pull/1043

    Every stage that measures a document returns the same row, whatever the process has seen before.
    """
    recipe = build_recipe({"source": {"paths": ["x"]}}, recipe_sections(), "test")
    stages = (LANGUAGE, QUALITY, SIGNATURE)
    models = {
        stage.name: {name: str(ensure_model(place, ModelsConfig()).path) for name, place in needed.items()}
        for stage in stages
        if (needed := stage.models(recipe[stage.name]))
    }
    texts = [
        f"The {word} sat on the mat by the door, and {n} people looked at it. " * 9 for n, word in enumerate("abc")
    ]
    others = [f"Some unrelated text about cooking and {word}, which has other words. " * 9 for word in "xyzuvw"]

    def measured(before: list[str]) -> list[dict[str, object]]:
        fused = FusedStages(stages, recipe, models)
        rows = [fused({"doc_id": bytes(16), "text": text, "_body": text, "url": None}) for text in [*before, *texts]]
        values = (str, bytes, int, float)
        return [
            {name: value for name, value in row.items() if isinstance(value, values) and name != CPU}
            for row in rows[len(before) :]
        ]

    fresh = measured([])
    assert {"language", "gopher_num_words", "signature", "anchor"} <= fresh[0].keys()
    assert fresh == measured(others) == measured([*others, *reversed(texts)])
