"""A step of a run: what it declares, the context that its builder is given, and the tables that it returns.

Fingerprints, resume and commits are not the builder's concern: they are in `pipeline/run.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.engine.parquet import WrittenFile
from pipeline.engine.part import PartResult
from pipeline.engine.stage import PerDocument, Relation, Source, Split
from schemas.config import Recipe
from schemas.manifest import Counts, FileEntry, TableVersion
from schemas.storage import Store

__all__ = ["Answer", "Build", "Built", "Model", "Stage", "TableJob", "add_figures", "gather"]

Stage = Source | PerDocument | Relation


@dataclass(frozen=True)
class Model:
    """A model file on the driver, identified by its content."""

    path: str
    sha256: str
    shipped: bool = True
    """Whether workers open it. A model that another file was compiled from, or that another process reads, is not
    shipped."""


@dataclass(frozen=True)
class StepContext:
    """Everything that the builder of a step may use. `folders` has one folder for each table that it writes."""

    spark: Any
    """The SparkSession, to be passed on to `engine/spark.py`."""
    recipe: Recipe
    stages: tuple[Stage, ...]
    """The stages of the step, in order."""
    folders: Mapping[str, Store]
    inputs: Mapping[str, TableVersion]
    splits: Sequence[Split]
    models: Mapping[str, Mapping[str, Model]]
    partitions: int | None

    @property
    def per_document(self) -> tuple[PerDocument, ...]:
        """The per-document stages of the step, in order."""
        return tuple(stage for stage in self.stages if isinstance(stage, PerDocument))

    def model_paths(self) -> dict[str, dict[str, str]]:
        """Return the paths of shipped models by stage and name, as the stages' `make` functions take them."""
        return {
            stage: {name: model.path for name, model in models.items() if model.shipped}
            for stage, models in self.models.items()
        }


@dataclass
class TableResult:
    """One written table: its files, its row counts and its exact figures."""

    files: list[FileEntry] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)
    counts: Counts = field(default_factory=lambda: Counts(rows_in=0, rows_kept=0))
    figures: dict[str, Any] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    sources: list[Mapping[str, Any]] = field(default_factory=list)
    """Name, size and SHA-256 of every input file from outside the run."""

    def add_file(self, written: WrittenFile) -> None:
        """List one finished file."""
        self.files.append(FileEntry(key=written.key, rows=written.rows, bytes=written.bytes, sha256=written.sha256))
        self.paths[written.key] = written.path

    def count_rows(self) -> None:
        """Count the rows of all files as rows in and rows kept, for a table without verdicts."""
        rows = sum(entry.rows for entry in self.files)
        self.counts = Counts(rows_in=rows, rows_kept=rows)


def _always(recipe: Recipe) -> bool:
    return True


def _no_tables(recipe: Recipe) -> tuple[str, ...]:
    return ()


def _nothing_external(recipe: Recipe, splits: Sequence[Split]) -> dict[str, TableVersion]:
    return {}


@dataclass(frozen=True)
class Step:
    """One step of a run: the tables it writes, the stages whose settings decide them, and the tables it reads."""

    writes: tuple[str, ...]
    stages: tuple[Stage, ...]
    reads: tuple[str, ...]
    """Tables of steps that the recipe does not use are left out."""
    build: Callable[[StepContext], dict[str, TableResult]]
    settings: Literal["content", "decision"] = "content"
    """The kind of settings that change what this step writes."""
    wanted: Callable[[Recipe], bool] = _always
    """Returns True if the recipe uses the step."""
    outside: Callable[[Recipe, Sequence[Split]], dict[str, TableVersion]] = _nothing_external
    """Returns the tables of other runs that it reads too; raises ConfigError for what it cannot use, before Spark."""
    asks: Callable[[Recipe], tuple[str, ...]] = _no_tables
    """Returns the tables of the run that it reads with some settings only."""

    def inputs(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the name of every table of the run that it reads with these settings."""
        return (*self.reads, *self.asks(recipe))

    @property
    def name(self) -> str:
        """The name of the step: that of its first table."""
        return self.writes[0]


def combine_parts(results: Sequence[PartResult], tables: Sequence[str]) -> dict[str, TableResult]:
    """Return the results of all parts as one table each; the first table has the verdict counts, figures are summed."""
    built = {table: TableResult() for table in tables}
    first = built[tables[0]]
    for result in results:
        for table in tables:
            built[table].add_file(result.files[table])
        first.counts = first.counts.plus(result.counts)
        first.figures = add_figures(first.figures, result.figures) if first.figures else dict(result.figures)
        first.errors = add_figures(first.errors, result.errors)
        first.cpu_seconds += result.cpu_seconds
        if result.source is not None:
            first.sources.append(result.source)
    for table in tables[1:]:
        built[table].count_rows()
    return built


def add_figures(left: Any, right: Any) -> Any:
    """Return the sum of two figures: numbers add, mappings add key by key."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        keys = sorted({*left, *right})
        return {
            k: add_figures(left[k], right[k]) if k in left and k in right else left.get(k, right.get(k)) for k in keys
        }
    return left + right
