"""The step that builds the table `tokenizer`: a model that it trains or that the recipe names, with its contract.

A clean document is in the training sample if its hash, as a share of the largest hash, is below sample_bytes / total
bytes. The sample is sorted by this hash, so it does not depend on how the text is divided into parts. Only the sample
is read by the Spark driver. Documents with a planted identifier are not in it: a tokenizer that was trained on
identifiers would encode them in fewer tokens than their controls, also after a takedown.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.engine.materialize import FrameStore
from pipeline.engine.parquet import FileWriter
from pipeline.engine.part import SCRATCH
from pipeline.engine.progress import doing
from pipeline.engine.results import MAX_UNADDED
from pipeline.engine.spark import dataframe_from_tasks
from pipeline.engine.stage import Relation
from pipeline.engine.step import StepContext, TableResult
from pipeline.tokens.tokenizer import (
    MIN_COVERAGE,
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
from schemas.planted import PLANTED
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


TOKENIZER = Relation(name="tokenizer", version=2, config=TokenizerConfig, models=given_model)
SAMPLE_SEED = 7
SAMPLE = pa.schema([pa.field("key", pa.int64()), pa.field("doc_id", pa.binary()), pa.field("text", pa.string())])
SAMPLE_DDL = "key long, doc_id binary, text string"
SAMPLE_FILE_BYTES = 64 << 20
"""Size of the text in a file of the sample, if there are many parts."""


@dataclass(frozen=True)
class TokenizerSampleTask:
    """One part of `clean` to sample, and the share of its documents."""

    clean: Store
    path: CheckedPath
    share: float


def build_tokenizer(build: StepContext) -> dict[str, TableResult]:
    """Write the tokenizer's model file; return {"tokenizer": result of the table}.

    The result's `figures` contain the tokenizer contract: vocabulary size, special tokens and SHA-256.
    """
    config = build.recipe.section("tokenizer", TokenizerConfig)
    folder, started = build.folders["tokenizer"], time.process_time()
    built, scratch = TableResult(), FrameStore(build.spark, folder.child(SCRATCH))
    if config.model is None:
        texts = sample_texts(build, config, built, scratch)
        doing("train the tokenizer")
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
    scratch.clear()
    for path in sorted({*folder.walk()} - {writer.written.path}):  # models of killed attempts
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
            "lowered_coverage": fitting.share,
            "characters_as_bytes": fitting.num_lost,
            "ids_needed": error.num_needed,
        }
        if fitting.share >= MIN_COVERAGE:
            return train_tokenizer(texts, config.model_copy(update={"character_coverage": fitting.share}))
        return train_tokenizer(texts, config.model_copy(update={"character_coverage": 1.0}), fitting.rare)


class ModelWriter(FileWriter):
    """Writes the bytes of a model file unchanged."""

    def write(self, data: bytes) -> None:
        """Append bytes to the file."""
        self._sink.write(data)

    def _finish(self) -> None:
        self._sink.flush()

    def _drop(self) -> None:
        """Do nothing: a discarded file has no format writer to close."""


def sample_texts(build: StepContext, config: TokenizerConfig, built: TableResult, scratch: FrameStore) -> list[str]:
    """Return the sampled texts of `clean`, sorted by a hash of doc_id.

    The numbers of documents and bytes of the sample are stored in `built`. Raises ContractError if all documents are
    dropped or empty.
    """
    clean = build.inputs["clean"]
    total = sum(clean.manifest.content.figures.get("kept_bytes", {}).values())
    if not total:
        raise ContractError(
            f"tokenizer: expected clean text, got none in {clean.manifest.content.counts.rows_kept} kept documents. "
            "Run `penstock report` to see which rules dropped the others, then loosen those rules."
        )
    share = min(1.0, config.sample_bytes / total)
    tasks = [TokenizerSampleTask(clean.folder, path, share) for path in clean.manifest.paths_of()]
    doing("sample texts")
    frame = dataframe_from_tasks(build.spark, sample_of_part, tasks, SAMPLE_DDL)
    if len(tasks) > MAX_UNADDED:  # the driver opens few files, however many parts there are
        frame = frame.repartition(max(1, config.sample_bytes // SAMPLE_FILE_BYTES), "key")
    kept = scratch.keep("sample", frame)
    columns = [[value for batch in kept.batches() for value in batch.column(name).to_pylist()] for name in SAMPLE.names]
    rows = sorted(zip(*columns), key=lambda row: row[:2])
    built.counts = Counts(rows_in=len(rows), rows_kept=len(rows))
    built.figures = {"sample_documents": len(rows), "sample_bytes": sum(len(row[2].encode()) for row in rows)}
    return [row[2] for row in rows]


def sample_of_part(task: TokenizerSampleTask) -> Iterator[pa.RecordBatch]:
    """Yield the sampled documents (SAMPLE) of one part of `clean`."""
    with task.clean.open_input(task.path) as stream:
        for batch in read_batches(pq.ParquetFile(stream), "clean", ["doc_id", "text", "drop_stage", PLANTED], 1024):
            kept = batch.filter(batch.column("drop_stage").is_null())
            kept = kept.filter(pc.equal(pc.fill_null(kept.column(PLANTED), 0), 0))
            ids = kept.column("doc_id").to_pylist()
            keys = [shuffle_key(SAMPLE_SEED, doc_id) for doc_id in ids]
            chosen = pa.array([is_in_share(key, task.share) for key in keys], pa.bool_())
            columns = [pa.array(keys, pa.int64()), pa.array(ids, pa.binary()), kept.column("text")]
            yield pa.RecordBatch.from_arrays(columns, schema=SAMPLE).filter(chosen)
