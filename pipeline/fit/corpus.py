"""Training corpora: texts from runs and files by class, without texts that are repeated or in two classes; manifests.

A sample is the k texts with the lowest hashes, so it does not depend on parts, order or partitioning. Texts are
identified by their SHA-256. It also decides if a text is for training or held out, so equal texts are never in both.
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
from schemas.older_tables import read_batches
from schemas.storage import CheckedPath, Store

# A sample of a run's clean texts: the k documents with the lowest hashes of doc_id, the same at any partitioning.
#
# The rows are counted first. Then each part returns its documents with a hash below a bound, which is chosen so that
# almost surely at least k documents are returned, and the k lowest are kept. Spark reads the parts if there is a
# session; otherwise they are read in sequence.

TABLE = "clean"
TEXTS_AT_ONCE = 512
"""Number of rows that are read at once from `clean`."""
SAMPLE = pa.schema([("key", pa.int64()), ("doc_id", pa.binary()), ("text", pa.string())])
SPARK_SCHEMA = "key long, doc_id binary, text string"


@dataclass(frozen=True)
class RunSampleTask:
    """A part of the table `clean`, and the selection of the documents to read from the part."""

    folder: Store
    path: CheckedPath
    sources: tuple[str, ...]
    languages: tuple[str, ...]
    seed: int
    share: float = 1.0
    """Only documents whose hash is in this lowest share of the hash range are returned; 1 = all documents."""

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Yield the given columns of the kept documents of the selected sources and languages."""
        names = [*columns, "source", "language", "drop_stage"]
        with self.folder.open_input(self.path) as stream:
            for batch in read_batches(pq.ParquetFile(stream), "clean", names, TEXTS_AT_ONCE):
                selected = pc.is_null(batch.column("drop_stage"))
                for name, values in (("source", self.sources), ("language", self.languages)):
                    if values:
                        selected = pc.and_(selected, pc.is_in(batch.column(name), value_set=pa.array(values)))
                yield batch.filter(selected).select(columns)


@dataclass(frozen=True)
class RunSample:
    """A sample of the texts of a run, and the size and digest of the run's table `clean`."""

    texts: list[tuple[int, str]]
    """(hash of the doc_id, text), by ascending hash."""
    identity: Mapping[str, Any]
    """Size [bytes] and digest of the table."""


def sample_run(spark: Any, run: str, task: tuple[tuple[str, ...], tuple[str, ...], int], size: int) -> RunSample:
    """Return a sample of a run's kept documents: the `size` documents with the lowest hashes, or all if fewer.

    `task` is (sources, languages, seed). Empty sources or languages select all. Raises ContractError if the run has no
    table `clean`, or if no document is selected.
    """
    folder, manifest = open_table(Store(run), TABLE)
    sources, languages, seed = task
    tasks = [RunSampleTask(folder, path, sources, languages, seed) for path in manifest.paths_of()]
    total = sum(_counts(spark, tasks))
    if not total:
        raise ContractError(
            f"{run}: expected kept documents of sources {list(sources) or 'all'} and languages "
            f"{list(languages) or 'all'}, got none. Run `penstock report` to see the sources and languages of "
            "the run, then correct the settings `sources` and `languages`."
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
    """Return the number of selected documents in a part of `clean`."""
    return {"rows": sum(batch.num_rows for batch in task.batches(["doc_id"]))}


def rows_of_part(task: RunSampleTask) -> Iterator[pa.RecordBatch]:
    """Yield (hash, doc_id, text) of the documents that `task` selects and whose hash is within `task.share`."""
    for batch in task.batches(["doc_id", "text"]):
        keys = [shuffle_key(task.seed, doc_id) for doc_id in batch.column("doc_id").to_pylist()]
        is_sampled = pa.array(np.array([is_in_share(key, task.share) for key in keys], bool))
        columns = [pa.array(keys, pa.int64()), batch.column("doc_id").cast(pa.binary()), batch.column("text")]
        yield pa.RecordBatch.from_arrays(columns, schema=SAMPLE).filter(is_sampled)


def _counts(spark: Any, tasks: list[RunSampleTask]) -> list[int]:
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


# Text files of training corpora: JSON lines, Parquet and plain text, compressed or not, hashed while they are read.

KINDS = {
    "lines": re.compile(r"\.(?:jsonl|ndjson|json)(?:\.(?:gz|zst|bz2))?$", re.IGNORECASE),
    "parquet": re.compile(r"\.(?:parquet|pq)$", re.IGNORECASE),
    "text": re.compile(r"\.(?:txt|md|text)(?:\.(?:gz|zst|bz2))?$", re.IGNORECASE),
}
SUFFIXES = ".jsonl, .ndjson, .json, .txt, .text, .md (each also with .gz, .zst or .bz2) or .parquet"
ROWS_AT_ONCE = 256
"""Number of rows that are read at once from a Parquet file."""

LabeledText = tuple[str, str | None]
"""(text, label); the label is the JSON of its value without quotes, or None in files without labels."""


class Reading(Section):
    """The names of fields in text files, and the labels of the good class."""

    text_field: str = "text"
    """Field of a JSON line, or column of a Parquet file, that holds the text."""
    label_field: str = "label"
    """Field or column that holds the label in labeled files."""
    good_labels: tuple[str, ...] = Field(("1", "true", "good"), min_length=1)
    """Labels of the good class, as JSON without quotes; texts with any other label are of the bad class."""


class TextFiles:
    """Reads the texts of files, records the digest of each file, and counts rows that cannot be used."""

    def __init__(self, reading: Reading, where: str):
        self._reading, self._where = reading, where
        self.inputs: list[dict[str, Any]] = []
        """Name, size [bytes] and SHA-256 of every file that has been read completely."""
        self.left_out: Counter[str] = Counter()
        """Number of unusable rows by reason."""

    def find(self, paths: tuple[str, ...], labelled: bool) -> list[tuple[str, Split]]:
        """Return (kind, file) for every file that the paths match; the kind is a key of KINDS.

        Raises ConfigError if a path matches nothing, if a file's suffix is not supported, or if `labelled` is true and
        the file is plain text, which cannot hold labels.
        """
        files = []
        for path in paths:
            try:
                splits = find_splits(SourceConfig.model_validate({"paths": (path,), "format": "jsonl"}))
            except ConfigError as error:
                raise ConfigError(str(error).replace("source.paths", self._where)) from error
            for split in splits:
                kind = next((kind for kind, suffix in KINDS.items() if suffix.search(split.name)), None)
                if kind is None or (labelled and kind == "text"):
                    suffixes = "JSON lines or Parquet, which can hold labels" if labelled else f"a suffix of {SUFFIXES}"
                    fix = "Convert the file to JSON lines."
                    raise ConfigError(f"{self._where}: expected {suffixes}, got {split.uri}. {fix}")
                files.append((kind, split))
        return files

    def texts(self, paths: tuple[str, ...], labelled: bool = False) -> Iterator[LabeledText]:
        """Yield the text and label of every usable row of the files that the paths match.

        The label is None unless `labelled` is True. Raises ContractError if a file is corrupt.
        """
        readers = {"lines": self._lines, "parquet": self._parquet, "text": self._text}
        for kind, split in self.find(paths, labelled):
            stream = open_stream(split)
            # Keep a reference until the end: it closes the stream when it is freed.
            content = stream if kind == "parquet" else _decompressed(stream, split.name)
            try:
                for value in readers[kind](content, split, labelled):
                    text = self._usable(value, labelled)
                    if text is not None:
                        yield text
                sha256, size = stream.finish()
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise ContractError(
                    f"{self._where}: expected {split.uri} to be readable, got an error: {error}. "
                    "Replace the file by an intact copy."
                ) from error
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
        columns = [self._reading.text_field, *([self._reading.label_field] if labelled else [])]
        file = pq.ParquetFile(content)
        missing = [name for name in columns if name not in file.schema_arrow.names]
        if missing:
            raise ConfigError(
                f"{self._where}: expected the columns {', '.join(columns)}, got {', '.join(file.schema_arrow.names)} "
                f"in {split.uri}. Set reading.{'text_field' if missing[0] == columns[0] else 'label_field'} to a "
                "column of the file."
            )
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
            yield from batch.to_pylist()


def _decompressed(stream: HashedStream, name: str) -> io.BufferedReader:
    suffix = name.rpartition(".")[2].lower()
    codec = {"gz": "gzip", "zst": "zstd", "bz2": "bz2"}.get(suffix)
    inner = pa.PythonFile(stream, mode="r")
    return io.BufferedReader(pa.CompressedInputStream(inner, codec) if codec else inner)


# Corpora: the texts of each class, each text once.

GOOD, BAD = "good", "bad"
ID_BYTES = 16
"""Length of a text's digest [bytes]."""


class Corpus(Section):
    """Texts of one class: files, kept documents of a run, or both."""

    files: tuple[str, ...] = location(())
    """JSON lines and Parquet files, whose `reading.text_field` is read, and text files of one document each. The
    patterns `*`, `?`, `[…]` and `**` are supported."""
    run: str | None = location(None)
    """Run folder from whose table `clean` documents are sampled."""
    sources: tuple[str, ...] = ()
    """Sources of the run to sample from; empty = all."""
    languages: tuple[str, ...] = ()
    """Languages of the run to sample from; empty = all."""
    max_documents: int = Field(50_000, ge=1)
    """Maximum number of documents. If there are more, those with the lowest hashes are used. Training a linear
    classifier takes 28 kB of memory per document of 4 kB (measured on 16,000): 3 GB for two corpora of this size."""

    @model_validator(mode="after")
    def _used(self) -> "Corpus":
        if (self.sources or self.languages) and self.run is None:
            raise ValueError(
                "sources, languages: expected `run` to be set, too, got no `run`. "
                "Set `run`, or remove `sources` and `languages`."
            )
        return self

    @property
    def given(self) -> bool:
        """True if the corpus names files or a run."""
        return bool(self.files) or self.run is not None


class TrainingText(NamedTuple):
    """A training document: its text and two hashes."""

    key: int
    """Hash by which samples are ordered."""
    digest: bytes
    """First 16 bytes of the SHA-256 of the text in UTF-8."""
    text: str


@dataclass
class Gathered:
    """The training texts by class, the inputs that they come from, and the counts of skipped texts."""

    texts: dict[str, list[TrainingText]]
    inputs: list[dict[str, Any]] = field(default_factory=list)
    """Class, name, size [bytes] and SHA-256 of every file, and of the table `clean` of every run."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of skipped texts by reason."""


def digest_of_text(text: str) -> bytes:
    """Return the first 16 bytes of the SHA-256 of the text in UTF-8."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:ID_BYTES]


class LowestHashSample:
    """Collects distinct texts with their hashes and keeps the `size` texts with the lowest hashes."""

    def __init__(self, size: int, left_out: Counter[str]):
        self._size, self._left_out = size, left_out
        self._heap: list[tuple[int, bytes, str]] = []
        self._held: set[bytes] = set()

    def offer(self, key: int, text: str) -> None:
        """Add a text with the hash `key` if the text is new and `key` is among the `size` lowest hashes so far."""
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
        """Compute the hash of a text and offer the text; a text of whitespace alone is skipped."""
        if text.split():
            self.offer(shuffle_key(seed, digest_of_text(text)), text)
        else:
            self._left_out["empty"] += 1

    def texts(self) -> list[TrainingText]:
        """Return the texts that were kept, by ascending hash."""
        return [
            TrainingText(-key, digest, text) for key, digest, text in sorted(self._heap, key=lambda t: (-t[0], t[1]))
        ]


def gather_corpora(
    corpora: Mapping[str, Corpus], labelled: tuple[str, ...], reading: Reading, seed: int, spark: Any = None
) -> Gathered:
    """Return the texts of each corpus.

    The texts of labeled files are added to GOOD or BAD by their labels. A text in two corpora is removed from both.
    Raises ConfigError if a file does not exist or has an unknown suffix. Raises ContractError if a file is corrupt, or
    if a corpus selects no document of its run.
    """
    gathered = Gathered({})
    samples = {name: LowestHashSample(corpus.max_documents, gathered.left_out) for name, corpus in corpora.items()}
    for name, corpus in corpora.items():
        files = TextFiles(reading, f"{name}.files")
        for text, _ in files.texts(corpus.files):
            samples[name].offer_by_hash(text, seed)
        _record(gathered, name, files)
        if corpus.run is not None:
            selection = corpus.sources, corpus.languages, seed
            run_sample = sample_run(spark, corpus.run, selection, corpus.max_documents)
            for key, text in run_sample.texts:
                samples[name].offer(key, text)
            gathered.inputs.append({"class": name, "name": "clean", **run_sample.identity})
    files = TextFiles(reading, "labelled")
    for text, label in files.texts(labelled, labelled=True):
        samples[GOOD if label in reading.good_labels else BAD].offer_by_hash(text, seed)
    _record(gathered, "labelled", files)
    gathered.texts = {name: sample.texts() for name, sample in samples.items()}
    _remove_contradictions(gathered)
    return gathered


def _record(gathered: Gathered, name: str, files: TextFiles) -> None:
    gathered.inputs += [{"class": name, **entry} for entry in files.inputs]
    gathered.left_out += files.left_out


def _remove_contradictions(gathered: Gathered) -> None:
    counts = Counter(text.digest for texts in gathered.texts.values() for text in texts)
    shared = {digest for digest, count in counts.items() if count > 1}
    for name, texts in gathered.texts.items():
        gathered.texts[name] = [text for text in texts if text.digest not in shared]
        gathered.left_out["contradictory"] += len(texts) - len(gathered.texts[name])


# The manifest of a trained model: its file, inputs, settings and metrics, and when it was trained.

FORMAT_VERSION = 1


class Clock:
    """Measures how long a training takes, from the creation of this object."""

    def __init__(self) -> None:
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self._start = time.monotonic()

    def seconds(self) -> float:
        """Return the time from the creation of this object until now [s]."""
        return round(time.monotonic() - self._start, 3)


def commit_model(path: Path, content: dict[str, Any], clock: Clock, models: ModelsConfig | None) -> dict[str, Any]:
    """Write the manifest of the model at `path` to `<stem>.json` next to the model, and return the manifest.

    `content` must depend only on inputs and settings. With `models`, the model is also added to that model store.
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
