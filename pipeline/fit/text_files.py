"""Files of texts to learn from: JSON lines, Parquet and plain text, compressed or not, hashed while they are read."""

import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from pipeline.engine.stage import Split
from pipeline.sources.config import SourceConfig
from pipeline.sources.splits import find_splits
from pipeline.sources.stream import HashedStream, open_stream
from schemas.config import Section
from schemas.errors import ConfigError, ContractError

KINDS = {
    "lines": re.compile(r"\.(?:jsonl|ndjson|json)(?:\.(?:gz|zst|bz2))?$", re.IGNORECASE),
    "parquet": re.compile(r"\.(?:parquet|pq)$", re.IGNORECASE),
    "text": re.compile(r"\.(?:txt|md|text)(?:\.(?:gz|zst|bz2))?$", re.IGNORECASE),
}
SUFFIXES = ".jsonl, .ndjson, .json, .txt, .text, .md (each also with .gz, .zst or .bz2) or .parquet"
ROWS_AT_ONCE = 256

Labelled = tuple[str, str | None]
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
                    raise ConfigError(f"{self._where}: promised {suffixes}, found {split.uri}; rename or convert it")
                found.append((kind, split))
        return found

    def texts(self, paths: tuple[str, ...], labelled: bool = False) -> Iterator[Labelled]:
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
                raise ContractError(
                    f"{self._where}: promised texts in {split.uri}, found {error}; repair it"
                ) from error
            finally:
                stream.close()
            self.inputs.append({"name": split.name, "bytes": size, "sha256": sha256})

    def _usable(self, value: dict[str, Any], labelled: bool) -> Labelled | None:
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
                f"{self._where}: promised the columns {', '.join(wanted)}, found {', '.join(file.schema_arrow.names)} "
                f"in {split.uri}; set text_field and label_field"
            )
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=wanted):
            yield from batch.to_pylist()


def _decompressed(stream: HashedStream, name: str) -> io.BufferedReader:
    suffix = name.rpartition(".")[2].lower()
    codec = {"gz": "gzip", "zst": "zstd", "bz2": "bz2"}.get(suffix)
    inner = pa.PythonFile(stream, mode="r")
    return io.BufferedReader(pa.CompressedInputStream(inner, codec) if codec else inner)
