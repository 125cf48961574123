"""The step that builds the table `tokenizer`: a model that it trains or that the recipe names, with its contract.

A clean document is in the training sample if its hash, as a share of the largest hash, is below sample_bytes / total
bytes. The sample is sorted by this hash, so it does not depend on how the text is divided into parts. Only the sample
is collected on the Spark driver. A resumed step samples only the parts whose sample is not complete.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.engine.parquet import FileWriter
from pipeline.engine.part import PartOutput, PartResult, PartTarget, TableTarget, write_part
from pipeline.engine.progress import doing
from pipeline.engine.spark import run_parts
from pipeline.engine.stage import Relation
from pipeline.engine.step import StepContext, TableResult
from pipeline.tokens.tokenizer import (
    AlphabetTooLarge,
    Kind,
    TokenizerConfig,
    fitting_coverage,
    load_tokenizer,
    tokenizer_kind,
    train_tokenizer,
)
from schemas.errors import ContractError
from schemas.ids import is_in_share, shuffle_key
from schemas.leases import check_before_delete
from schemas.manifest import Counts, open_table
from schemas.older_tables import read_batches
from schemas.paths import check_deletable
from schemas.storage import CheckedPath, Store


def given_model(config: TokenizerConfig) -> dict[str, str]:
    """Return {"tokenizer": path of the model file}; empty if a model is to be trained.

    If `tokenizer.model` is a run folder, the file is that of its table `tokenizer`.
    """
    if config.model is None:
        return {}
    if not Path(config.model).is_dir():
        return {"tokenizer": config.model}
    folder, manifest = open_table(Store(config.model), "tokenizer")
    return {"tokenizer": folder.path(manifest.paths["model"])}


TOKENIZER = Relation(name="tokenizer", version=1, config=TokenizerConfig, models=given_model)
SAMPLE_SEED = 7
SAMPLE = pa.schema([pa.field("key", pa.int64()), pa.field("doc_id", pa.binary(16)), pa.field("text", pa.string())])


@dataclass(frozen=True)
class TokenizerSampleTask:
    """One part of `clean` to sample, the share of its documents, and the folder in which the sample is written."""

    ordinal: int
    clean: Store
    path: CheckedPath
    share: float
    folder: Store


def build_tokenizer(build: StepContext) -> dict[str, TableResult]:
    """Write the tokenizer's model file; return {"tokenizer": result of the table}.

    The result's `figures` contain the tokenizer contract: vocabulary size, special tokens and SHA-256.
    """
    config = build.recipe.section("tokenizer", TokenizerConfig)
    folder, started = build.folders["tokenizer"], time.process_time()
    built = TableResult()
    if config.model is None:
        samples = sample_files(build, config, folder)
        doing("train the tokenizer")
        texts = [*sample_texts(folder, samples, built)]
        data = train_fitting(texts, config, built)
        kind: Kind = "sentencepiece"
    else:
        model = build.models["tokenizer"]["tokenizer"]
        with open(model.path, "rb") as stream:
            data = stream.read()
        kind = tokenizer_kind(model.path)
    tokenizer = load_tokenizer(data, kind, config)
    with ModelWriter(folder, "tokenizer", "model") as writer:
        writer.write(data)
    built.add_file(replace(writer.written, key="model", rows=1))
    for path in sorted({*folder.walk()} - {writer.written.path}):  # the samples, those of killed attempts too
        check_deletable(folder, path, levels=2)
        check_before_delete(folder)
        folder.delete(path)
    built.figures = {**built.figures, "contract": tokenizer.contract.model_dump(mode="json")}
    built.cpu_seconds = time.process_time() - started
    return {"tokenizer": built}


def train_fitting(texts: Sequence[str], config: TokenizerConfig, built: TableResult) -> bytes:
    """Return a trained model, for which the rarest characters lose their ids if the vocabulary does not hold all.

    The share of characters that keep theirs, and the number of those that do not, are then stored in `built`. Raises
    ConfigError if the vocabulary size does not suit the texts, or the recipe sets `character_coverage`.
    """
    try:
        return train_tokenizer(texts, config)
    except AlphabetTooLarge as error:
        fitting = fitting_coverage(texts, config, error.num_needed)
        if "character_coverage" in config.model_fields_set or fitting is None:
            raise
        built.figures |= {
            "lowered_coverage": fitting[0],
            "characters_as_bytes": fitting[1],
            "ids_needed": error.num_needed,
        }
        return train_tokenizer(texts, config.model_copy(update={"character_coverage": fitting[0]}))


class ModelWriter(FileWriter):
    """Writes the bytes of a model file unchanged."""

    def write(self, data: bytes) -> None:
        """Append bytes to the file."""
        self._sink.write(data)

    def _finish(self) -> None:
        self._sink.flush()

    def _drop(self) -> None:
        """Do nothing: a discarded file has no format writer to close."""


def sample_files(build: StepContext, config: TokenizerConfig, folder: Store) -> list[CheckedPath]:
    """Write the sampled documents of every part of `clean` to temporary files; return the paths in order.

    Raises ContractError if all documents are dropped or empty.
    """
    clean = build.inputs["clean"]
    total = sum(clean.manifest.content.figures.get("kept_bytes", {}).values())
    if not total:
        raise ContractError(
            f"tokenizer: expected clean text, got none in {clean.manifest.content.counts.rows_kept} kept documents. "
            "Run `penstock report` to see which rules dropped the others, then loosen those rules."
        )
    share = min(1.0, config.sample_bytes / total)
    paths = clean.manifest.paths_of()
    tasks = [TokenizerSampleTask(ordinal, clean.folder, path, share, folder) for ordinal, path in enumerate(paths)]
    results = run_parts(replace(build, only=None), sample_part, tasks, "sample texts")  # a sample of all parts
    return [result.files["sample"].checked_path for result in results.parts]


def sample_texts(folder: Store, paths: Sequence[CheckedPath], built: TableResult) -> Iterator[str]:
    """Yield the sampled texts, sorted by a hash of doc_id.

    The numbers of documents and bytes of the sample are stored in `built`.
    """
    rows: list[tuple[int, bytes, str]] = []
    for path in paths:
        with folder.open_input(path) as stream:
            table = pq.read_table(stream)
        rows.extend(zip(*(table.column(name).to_pylist() for name in SAMPLE.names)))
    rows.sort(key=lambda row: row[:2])
    built.counts = Counts(rows_in=len(rows), rows_kept=len(rows))
    built.figures = {"sample_documents": len(rows), "sample_bytes": sum(len(row[2].encode()) for row in rows)}
    for row in rows:
        yield row[2]


def sample_part(task: TokenizerSampleTask, retried: bool) -> PartResult:
    """Write the sampled documents of one part of `clean` to a temporary file."""

    def fill(output: PartOutput) -> None:
        with task.clean.open_input(task.path) as stream:
            for batch in read_batches(pq.ParquetFile(stream), "clean", ["doc_id", "text", "drop_stage"], 1024):
                for row in batch.to_pylist():
                    row["key"] = shuffle_key(SAMPLE_SEED, row["doc_id"])
                    if row["drop_stage"] is None and is_in_share(row["key"], task.share):
                        output.write(row)
                        output.books.enter(row, len(row["text"]))

    return write_part(PartTarget(task.ordinal, {"sample": TableTarget(task.folder, SAMPLE, "text")}), fill)
