"""Texts that models learn from: files and samples of runs, by class, without repeats and without contradictions.

A sample is the bottom k by a hash, so it does not depend on parts, order or partitioning. Texts are told apart by their
SHA-256, which also says which part of the split a text belongs to: equal texts never lie on both sides.
"""

import hashlib
import heapq
import io
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from pipeline.engine.spark import dataframe_from_tasks, run_tasks
from pipeline.engine.stage import Split
from pipeline.models import ModelsConfig, add_model
from pipeline.sources.config import SourceConfig
from pipeline.sources.splits import HashedStream, find_splits, open_stream
from schemas.config import Section, location
from schemas.errors import ConfigError, ContractError
from schemas.ids import file_sha256, is_in_share, shuffle_key
from schemas.manifest import open_table
from schemas.storage import Store

# A sample of a run's clean texts: the bottom k by a hash of doc_id, the same at any partitioning.
#
# The rows are counted first; then each part hands over those whose hash falls below a share that holds k of them almost
# surely, and k are kept. Parts are read by Spark where there is a session, else one after the other.

TABLE = "clean"
TEXTS_AT_ONCE = 512
SAMPLE = pa.schema([("key", pa.int64()), ("doc_id", pa.binary()), ("text", pa.string())])
SPARK_SCHEMA = "key long, doc_id binary, text string"


@dataclass(frozen=True)
class RunSampleTask:
    """One part of the clean table, and which of its documents are wanted."""

    folder: Store
    path: str
    sources: tuple[str, ...]
    languages: tuple[str, ...]
    seed: int
    share: float = 1.0
    """Documents whose key lies in this lowest share of all keys are handed over."""

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The wanted documents that were kept, with these columns."""
        names = [*columns, "source", "language", "drop_stage"]
        with self.folder.open_input(self.path) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(batch_size=TEXTS_AT_ONCE, columns=names):
                wanted = pc.is_null(batch.column("drop_stage"))
                for name, values in (("source", self.sources), ("language", self.languages)):
                    if values:
                        wanted = pc.and_(wanted, pc.is_in(batch.column(name), value_set=pa.array(values)))
                yield batch.filter(wanted).select(columns)


@dataclass(frozen=True)
class RunSample:
    """Texts in the order of their keys, and the table they were taken from."""

    texts: list[tuple[int, str]]
    identity: Mapping[str, Any]
    """Size [bytes] and dataset digest of the table."""


def sample_run(spark: Any, run: str, task: tuple[tuple[str, ...], tuple[str, ...], int], size: int) -> RunSample:
    """The `size` documents of the lowest keys, given (sources, languages, seed); all if there are fewer.

    Raises ContractError if the run has no clean table, or none of its documents is wanted.
    """
    folder, manifest = open_table(Store(run), TABLE)
    sources, languages, seed = task
    tasks = [RunSampleTask(folder, path, sources, languages, seed) for path in manifest.paths_of()]
    total = sum(_answers(spark, tasks))
    if not total:
        raise ContractError(
            f"{run}: expected kept documents of sources {list(sources) or 'all'} and languages "
            f"{list(languages) or 'all'}, got none. See `penstock report`."
        )
    share = (size + 6 * size**0.5 + 10) / total
    while True:
        rows = sorted(_rows(spark, [replace(task, share=min(1.0, share)) for task in tasks]))
        if len(rows) >= size or share >= 1.0:
            break
        share *= 2
    num_bytes = sum(entry.bytes for entry in manifest.content.files)
    texts = [(key, text) for key, _, text in rows[:size]]
    return RunSample(texts, {"bytes": num_bytes, "sha256": manifest.digest})


def count_part(task: RunSampleTask, retried: bool) -> dict[str, Any]:
    """How many documents of a part are wanted."""
    return {"rows": sum(batch.num_rows for batch in task.batches(["doc_id"]))}


def rows_of_part(task: RunSampleTask) -> Iterator[pa.RecordBatch]:
    """The documents of a part whose key falls into the share."""
    for batch in task.batches(["doc_id", "text"]):
        keys = [shuffle_key(task.seed, doc_id) for doc_id in batch.column("doc_id").to_pylist()]
        taken = pa.array(np.array([is_in_share(key, task.share) for key in keys], bool))
        columns = [pa.array(keys, pa.int64()), batch.column("doc_id").cast(pa.binary()), batch.column("text")]
        yield pa.RecordBatch.from_arrays(columns, schema=SAMPLE).filter(taken)


def _answers(spark: Any, tasks: list[RunSampleTask]) -> list[int]:
    if spark is None:
        return [count_part(task, False)["rows"] for task in tasks]
    return [answer["rows"] for answer in run_tasks(spark, count_part, tasks, "sample", None)]


def _rows(spark: Any, tasks: list[RunSampleTask]) -> Iterator[tuple[int, bytes, str]]:
    if spark is None:
        batches = [batch for task in tasks for batch in rows_of_part(task)]
        table = pa.Table.from_batches(batches, SAMPLE)
    else:
        table = dataframe_from_tasks(spark, rows_of_part, tasks, SPARK_SCHEMA).toArrow()
    return zip(*(table.column(name).to_pylist() for name in SAMPLE.names))


# Files of texts to learn from: JSON lines, Parquet and plain text, compressed or not, hashed while they are read.

KINDS = {
    "lines": re.compile(r"\.(?:jsonl|ndjson|json)(?:\.(?:gz|zst|bz2))?$", re.IGNORECASE),
    "parquet": re.compile(r"\.(?:parquet|pq)$", re.IGNORECASE),
    "text": re.compile(r"\.(?:txt|md|text)(?:\.(?:gz|zst|bz2))?$", re.IGNORECASE),
}
SUFFIXES = ".jsonl, .ndjson, .json, .txt, .text, .md (each also with .gz, .zst or .bz2) or .parquet"
ROWS_AT_ONCE = 256

LabeledText = tuple[str, str | None]
"""(text, label as JSON writes it without quotes; None where no label is asked for)."""


class Reading(Section):
    """How files of texts are read."""

    text_field: str = "text"
    """Field of a JSON line, or column of a Parquet file, that holds the text."""
    label_field: str = "label"
    """Field or column that holds the label in labelled files."""
    good_labels: tuple[str, ...] = Field(("1", "true", "good"), min_length=1)
    """Labels of the good class, as JSON writes them without quotes; every other label is the bad class."""


class TextFiles:
    """The texts of files one after the other; remembers what it has read and what it could not use."""

    def __init__(self, reading: Reading, where: str):
        self._reading, self._where = reading, where
        self.inputs: list[dict[str, Any]] = []
        """Name, size [bytes] and SHA-256 of every file read to its end."""
        self.left_out: Counter[str] = Counter()

    def find(self, paths: tuple[str, ...], labelled: bool) -> list[tuple[str, Split]]:
        """The files with their kinds. Raises ConfigError if a path matches nothing or has another suffix."""
        found = []
        for path in paths:
            try:
                splits = find_splits(SourceConfig.model_validate({"paths": (path,), "format": "jsonl"}))
            except ConfigError as error:
                raise ConfigError(str(error).replace("source.paths", self._where)) from error
            for split in splits:
                kind = next((kind for kind, suffix in KINDS.items() if suffix.search(split.name)), None)
                if kind is None or (labelled and kind == "text"):
                    suffixes = "JSON lines or Parquet, which can hold labels" if labelled else f"a file {SUFFIXES}"
                    raise ConfigError(f"{self._where}: expected {suffixes}, got {split.uri}. Rename or convert it.")
                found.append((kind, split))
        return found

    def texts(self, paths: tuple[str, ...], labelled: bool = False) -> Iterator[LabeledText]:
        """Every usable text, in the order of the files and in theirs. Raises ContractError if a file breaks off."""
        readers = {"lines": self._lines, "parquet": self._parquet, "text": self._text}
        for kind, split in self.find(paths, labelled):
            stream = open_stream(split)
            # held here until the end: it closes the stream when it goes
            content = stream if kind == "parquet" else _decompressed(stream, split.name)
            try:
                for value in readers[kind](content, split, labelled):
                    found = self._usable(value, labelled)
                    if found is not None:
                        yield found
                sha256, size = stream.finish()
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise ContractError(f"{self._where}: expected texts in {split.uri}, got {error}. Repair it.") from error
            finally:
                stream.close()
            self.inputs.append({"name": split.name, "bytes": size, "sha256": sha256})

    def _usable(self, value: dict[str, Any], labelled: bool) -> LabeledText | None:
        text, label = value.get(self._reading.text_field), value.get(self._reading.label_field)
        if not isinstance(text, str):
            self.left_out["no_text"] += 1
        elif labelled and label is None:
            self.left_out["no_label"] += 1
        else:
            return text, (label if isinstance(label, str) else json.dumps(label)) if labelled else None
        return None

    def _lines(self, content: Any, split: Split, labelled: bool) -> Iterator[dict[str, Any]]:
        for line in content:
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                yield value
            else:
                self.left_out["bad_line"] += 1

    def _text(self, content: Any, split: Split, labelled: bool) -> Iterator[dict[str, Any]]:
        yield {self._reading.text_field: content.read().decode("utf-8-sig", "replace")}

    def _parquet(self, content: Any, split: Split, labelled: bool) -> Iterator[dict[str, Any]]:
        wanted = [self._reading.text_field, *([self._reading.label_field] if labelled else [])]
        file = pq.ParquetFile(content)
        missing = [name for name in wanted if name not in file.schema_arrow.names]
        if missing:
            raise ConfigError(
                f"{self._where}: expected the columns {', '.join(wanted)}, got {', '.join(file.schema_arrow.names)} "
                f"in {split.uri}. Set text_field and label_field."
            )
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=wanted):
            yield from batch.to_pylist()


def _decompressed(stream: HashedStream, name: str) -> io.BufferedReader:
    suffix = name.rpartition(".")[2].lower()
    codec = {"gz": "gzip", "zst": "zstd", "bz2": "bz2"}.get(suffix)
    inner = pa.PythonFile(stream, mode="r")
    return io.BufferedReader(pa.CompressedInputStream(inner, codec) if codec else inner)


GOOD, BAD = "good", "bad"
ID_BYTES = 16


class Corpus(Section):
    """Texts of one kind: files, or the kept documents of a run, or both."""

    files: tuple[str, ...] = location(())
    """JSON lines and Parquet files, whose `text_field` is read, and text files, each one document; `*`, `?`, `[…]` and
    `**` are patterns."""
    run: str | None = location(None)
    """Run folder whose clean documents are sampled."""
    sources: tuple[str, ...] = ()
    """Sources of that run; empty: all."""
    languages: tuple[str, ...] = ()
    """Languages of that run; empty: all."""
    max_documents: int = Field(50_000, ge=1)
    """Largest number of documents; of more, those with the lowest hashes. A linear classifier takes 28 kB of memory for
    each of 4 kB (measured on 16,000): 3 GB for two corpora of this size."""

    @model_validator(mode="after")
    def _used(self) -> "Corpus":
        if (self.sources or self.languages) and self.run is None:
            raise ValueError(
                "sources and languages choose documents of a run and would be ignored without one; set run"
            )
        return self

    @property
    def given(self) -> bool:
        """Whether it names any text."""
        return bool(self.files) or self.run is not None


class TrainingText(NamedTuple):
    """One document to learn from."""

    key: int
    """Its place in the order that samples are taken in."""
    digest: bytes
    """First 16 bytes of the SHA-256 of its UTF-8."""
    text: str


@dataclass
class Gathered:
    """Texts by class, what they were read from, and how many were left out and why."""

    texts: dict[str, list[TrainingText]]
    inputs: list[dict[str, Any]] = field(default_factory=list)
    """Class, name, size [bytes] and SHA-256 of every file; of a run, of its clean table."""
    left_out: Counter[str] = field(default_factory=Counter)


def digest_of_text(text: str) -> bytes:
    """The first 16 bytes of the SHA-256 of the text's UTF-8."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:ID_BYTES]


class LowestHashSample:
    """The texts of the lowest keys among all that are offered, each text once."""

    def __init__(self, size: int, left_out: Counter[str]):
        self._size, self._left_out = size, left_out
        self._heap: list[tuple[int, bytes, str]] = []
        self._held: set[bytes] = set()

    def offer(self, key: int, text: str) -> None:
        """Take a text in if it is new and among the lowest so far."""
        digest = digest_of_text(text)
        if digest in self._held:
            self._left_out["repeated"] += 1
            return
        self._held.add(digest)
        heapq.heappush(self._heap, (-key, digest, text))
        if len(self._heap) > self._size:
            self._held.discard(heapq.heappop(self._heap)[1])
            self._left_out["beyond_sample"] += 1

    def offer_by_hash(self, text: str, seed: int) -> None:
        """Offer a text whose key is a hash of itself; one without words is left out."""
        if text.split():
            self.offer(shuffle_key(seed, digest_of_text(text)), text)
        else:
            self._left_out["empty"] += 1

    def texts(self) -> list[TrainingText]:
        """The texts in the order of their keys."""
        return [
            TrainingText(-key, digest, text) for key, digest, text in sorted(self._heap, key=lambda t: (-t[0], t[1]))
        ]


def gather_corpora(
    corpora: Mapping[str, Corpus], labelled: tuple[str, ...], reading: Reading, seed: int, spark: Any = None
) -> Gathered:
    """The texts of every corpus, by its name; those of labelled files go to GOOD and BAD.

    Texts that two corpora have are in none of them. Raises ConfigError if files are not found or not of a kind that can
    be read, ContractError if they break off or a run has no such documents.
    """
    found = Gathered({})
    samples = {name: LowestHashSample(corpus.max_documents, found.left_out) for name, corpus in corpora.items()}
    for name, corpus in corpora.items():
        files = TextFiles(reading, f"{name}.files")
        for text, _ in files.texts(corpus.files):
            samples[name].offer_by_hash(text, seed)
        _account(found, name, files)
        if corpus.run is not None:
            taken = sample_run(spark, corpus.run, (corpus.sources, corpus.languages, seed), corpus.max_documents)
            for key, text in taken.texts:
                samples[name].offer(key, text)
            found.inputs.append({"class": name, "name": "clean", **taken.identity})
    files = TextFiles(reading, "labelled")
    for text, label in files.texts(labelled, labelled=True):
        samples[GOOD if label in reading.good_labels else BAD].offer_by_hash(text, seed)
    _account(found, "labelled", files)
    found.texts = {name: sample.texts() for name, sample in samples.items()}
    _leave_out_contradictions(found)
    return found


def _account(found: Gathered, name: str, files: TextFiles) -> None:
    found.inputs += [{"class": name, **entry} for entry in files.inputs]
    found.left_out += files.left_out


def _leave_out_contradictions(found: Gathered) -> None:
    counts = Counter(text.digest for texts in found.texts.values() for text in texts)
    shared = {digest for digest, count in counts.items() if count > 1}
    for name, texts in found.texts.items():
        found.texts[name] = [text for text in texts if text.digest not in shared]
        found.left_out["contradictory"] += len(texts) - len(found.texts[name])


# What is written beside a trained model: what it is, what it learned from, and how it came about.

FORMAT_VERSION = 1


class Clock:
    """When a job started."""

    def __init__(self) -> None:
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self._start = time.monotonic()

    def seconds(self) -> float:
        """How long ago that was [s]."""
        return round(time.monotonic() - self._start, 3)


def commit_model(path: Path, content: dict[str, Any], clock: Clock, models: ModelsConfig | None) -> dict[str, Any]:
    """Write the manifest `<stem>.json` beside the model and return it; with `models`, put the model into that store.

    `content` is a function of inputs and settings; `run` says how it came about.
    """
    model = {"file": path.name, "bytes": path.stat().st_size, "sha256": file_sha256(path)}
    manifest = {
        "content": {"format_version": FORMAT_VERSION, "model": model, **content},
        "run": {"started": clock.started, "wall_seconds": clock.seconds(), "code_version": version("penstock")},
    }
    data = json.dumps(manifest, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False).encode()
    Store(str(path.parent)).write_atomic(f"{path.stem}.json", data + b"\n")
    if models is not None:
        add_model(path, path.stem, models, f"{content['kind']} model")
    return manifest
