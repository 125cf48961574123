"""Figures of the index by id: its share of the step `tokens`, and the time and memory of a proof.

    python -m bench.membership [--documents 100000] [--leaves 1000000]

The step encodes synthetic documents with a tokenizer of whole words, which is faster than those of real runs, so the
share of the index is an upper bound. CPU seconds are those of this process and all processes below it, with Spark's.
A proof is made by `penstock prove` in a process of its own; the dataset has an index of random leaves.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from jobs.recipe import recipe_sections
from jobs.spark_session import SparkConfig, open_session
from pipeline.engine.parquet import PartWriter
from pipeline.engine.step import StepContext
from pipeline.membership.index import TOP, index_bits, membership_figures, write_index_file
from pipeline.membership.tree import Subtree, value_of
from pipeline.stages import steps_for
from pipeline.tokens import dataset as step
from schemas.config import build_recipe
from schemas.ids import shuffle_key
from schemas.manifest import FileEntry, TableVersion, make_manifest, open_table, write_manifest
from schemas.storage import Store
from schemas.tables import CLEAN
from schemas.tokens import BY_ID
from tests.support.tiny_dataset import make_tiny_dataset

PARTS, WORDS, ROUNDS, PROOFS = 8, 400, 3, 9
ROWS_AT_ONCE = 1 << 16
PROVE = """
import resource, sys, time
from jobs.cli import main
started = time.perf_counter()
code = main(sys.argv[1:])
print(time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(code)
"""
"""The program of a proof; it prints its time without the start of Python [s] and its memory [KiB]."""
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Return the CPU time of this process and all below it, ended ones that were waited for included."""
    parents: dict[int, tuple[int, float]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            parents[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15])) / TICKS
    total = 0.0
    for process, (_, seconds) in parents.items():
        above = process
        while above in parents and above != os.getpid():
            above = parents[above][0]
        total += seconds if above == os.getpid() else 0.0
    return total


def write_clean(run: Store, documents: int, words: list[str]) -> TableVersion:
    """Write a table `clean` of random texts of 1 to 2 * WORDS - 1 words."""
    folder, chance, files = run.child("clean/v-0000000071a9"), random.Random(0), []
    for part in range(PARTS):
        with PartWriter(folder, f"part-{part:05d}", CLEAN, size_column="text") as writer:
            for number in range(part, documents, PARTS):
                text = " ".join(chance.choices(words, k=chance.randrange(1, 2 * WORDS)))
                identifier = chance.randbytes(16)
                row = dict.fromkeys(CLEAN.names) | {"doc_id": identifier, "cluster": identifier, "source": "web"}
                row |= {"split": "a.warc.gz", "offset": number, "length": 1, "url": f"https://a{number}.example/"}
                row |= {"domain": f"a{number % 5000}.example", "language": "en", "weight": 1, "text": text}
                writer.add(row | {"num_chars": len(text), "num_bytes": len(text)})
        files.append(writer.written)
    content = {"table": "clean", "stages": {}, "config": {}, "inputs": [], "figures": {}}
    content["files"] = [{name: getattr(own, name) for name in ("key", "rows", "bytes", "sha256")} for own in files]
    content["counts"] = {"rows_in": documents, "rows_kept": documents}
    how: dict[str, Any] = {"paths": {own.key: own.path for own in files}, "started": "2026-01-01T00:00:00Z"}
    how |= {"wall_seconds": 0.0, "cpu_seconds": 0.0, "code_version": "bench"}
    return TableVersion(folder, make_manifest(content, how, "clean"))


def bench_step(documents: int) -> None:
    """Print the CPU time of the step `tokens` for each document, and the parts of it that the index takes."""
    with tempfile.TemporaryDirectory() as folder:
        run = make_tiny_dataset(Path(folder) / "run", {"web": 1}, vocab_size=4096, index_bits=None)
        vocabulary = run.read_json("tokenizer/v-0000000071a9/tokenizer.json")["model"]["vocab"]
        clean = write_clean(run, documents, [word for word in vocabulary if "<" not in word])
        inputs = {"clean": clean, "tokenizer": TableVersion(*open_table(run, "tokenizer"))}
        model = run.path("tokenizer/v-0000000071a9/tokenizer.json")
        settings = {"source": {"paths": ["none"]}, "tokenizer": {"model": model, "allow_lossy": True}}
        recipe = build_recipe(settings, recipe_sections(), "bench")
        (tokens,) = [each for each in steps_for(recipe) if each.name == "tokens"]
        spark = open_session(SparkConfig(), "bench_membership")
        for number in range(ROUNDS):
            folders = {"tokens": run.child(f"tokens/v-00000000000{number}")}
            before, index = cpu_seconds(), CountedIndex()
            with patch.object(step, "write_by_id", index.write):
                built = tokens.build(StepContext(spark, recipe, tokens.stages, folders, inputs, (), {}, None))
            total, values = cpu_seconds() - before, seconds_of_values(documents)
            size = sum(map(sum, built["tokens"].figures["streams"].values())) / documents
            each = {"step": total, "index": index.seconds, "values": values}
            shown = ", ".join(f"{name} {1e6 * seconds / documents:.1f} us" for name, seconds in each.items())
            ratio = total / (total - index.seconds - values)
            print(
                f"{documents:,} documents of {size:.0f} tokens: {shown} a document; {ratio:.3f} times the step before"
            )
        spark.stop()


class CountedIndex:
    """The function that writes the index by id, with the CPU time that it took."""

    def __init__(self) -> None:
        self.seconds, self._write = 0.0, step.write_by_id

    def write(self, *arguments: Any, **named: Any) -> Any:
        """Write the index."""
        before = cpu_seconds()
        results = self._write(*arguments, **named)
        self.seconds += cpu_seconds() - before
        return results


def seconds_of_values(documents: int) -> float:
    """Return the time that the values of so many documents of mean length take."""
    content, started = bytes(2 * WORDS), time.process_time()
    for _ in range(documents):
        value_of("web/train", content)
    return time.process_time() - started


def leaves_of(prefix: int, bits: int, number: int) -> Iterator[pa.RecordBatch]:
    """Yield `number` random leaves, sorted, of the file `prefix`."""
    rng = np.random.default_rng(prefix)
    ids, values = (rng.integers(0, 256, (number, size), np.uint8) for size in (16, 32))
    if bits:  # at most 8
        ids[:, 0] = prefix << (8 - bits) | ids[:, 0] >> bits
    ids = ids[np.lexsort(ids.T[::-1])]
    for first in range(0, number, ROWS_AT_ONCE):
        data = [pa.py_buffer(each[first : first + ROWS_AT_ONCE].tobytes()) for each in (ids, values)]
        rows = min(ROWS_AT_ONCE, number - first)
        columns = [pa.FixedSizeBinaryArray.from_buffers(f.type, rows, [None, own]) for own, f in zip(data, BY_ID)]
        yield pa.RecordBatch.from_arrays(columns, schema=BY_ID)


def write_leaves(run: Store, leaves: int) -> None:
    """Write an index of so many leaves into the dataset of a run, and print the time."""
    place, old = open_table(run, "tokens")
    bits, raw, tops = index_bits(leaves), old.model_dump(mode="json"), []
    started = time.process_time()
    for number in range(1 << bits.file):
        part = write_index_file(place, number, leaves_of(number, bits.file, leaves >> bits.file), bits)
        written = part.files["by_id"]
        raw["content"]["files"].append({name: getattr(written, name) for name in FileEntry.model_fields})
        raw["run"]["paths"][written.key] = written.path
        tops.append(Subtree.from_json(part.figures[TOP]))
    spent = 1e6 * (time.process_time() - started) / leaves
    print(f"index of {leaves:,} leaves in {len(tops)} file(s): {spent:.1f} us a leaf")
    raw["content"]["figures"] |= membership_figures(tops)
    place.delete("manifest.json")
    write_manifest(place, make_manifest(raw["content"], raw["run"], "bench"))


def bench_proof(leaves: int) -> None:
    """Print the time and memory of `penstock prove` on a dataset whose index has so many leaves."""
    times, whole, memory = list[float](), list[float](), 0
    with tempfile.TemporaryDirectory() as folder:
        run = make_tiny_dataset(Path(folder) / "run", index_bits=None)
        write_leaves(run, leaves)
        for number in range(PROOFS):
            document = shuffle_key(number, b"document").to_bytes(8, "big").hex() * 2
            started = time.perf_counter()
            words = [sys.executable, "-c", PROVE, "prove", run.uri, "--doc", document]
            output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            whole.append(time.perf_counter() - started)
            seconds, kibibytes = output.splitlines()[-1].split()
            times.append(float(seconds))
            memory = max(memory, int(kibibytes))
    print(
        f"penstock prove: {min(times):.2f} s, median {statistics.median(times):.2f} s; with the start of Python "
        f"{min(whole):.2f} s; at most {memory / 1024:.0f} MiB"
    )


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--documents", type=int, default=100_000, help="documents of the step; 0 = do not measure it")
    parser.add_argument("--leaves", type=int, default=1_000_000, help="leaves of the index")
    arguments = parser.parse_args()
    if arguments.documents:
        bench_step(arguments.documents)
    bench_proof(arguments.leaves)


if __name__ == "__main__":
    main()
