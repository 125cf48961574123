"""A step of a run: its declaration, the context that its `build` function receives, and the tables that it returns.

A `build` function only writes part files. `pipeline/run.py` skips complete steps and writes manifests.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, TypeVar

from pipeline.engine.failures import FailureCounts
from pipeline.engine.finished_parts import FinishedPart, FinishedParts
from pipeline.engine.model_files import ModelFile, State
from pipeline.engine.parquet import WrittenFile
from pipeline.engine.part import RANGE, PartResults, WrittenPart
from pipeline.engine.stage import PerDocument, Relation, Source, Split
from schemas.config import SEPARATOR, Recipe, own_key
from schemas.ids import digest_of
from schemas.manifest import Counts, FileEntry, Manifest, TableVersion, part_key
from schemas.storage import Store

Stage = Source | PerDocument | Relation
N = TypeVar("N", bound=Mapping[str, Any])
P = TypeVar("P")
MADE_WITH = ("stages", "config", "models")
"""The fields of a manifest's content that follow from a recipe."""


@dataclass(frozen=True)
class Model:
    """A model file on the driver and its SHA-256."""

    path: str
    sha256: str
    """What manifests record: the SHA-256 of the file, or the commitment to a secret key."""
    shipped: bool = True
    """True if the file is copied to the workers. A model that only another process reads, or from which another file
    was compiled, is not."""
    state: State = ()
    """State of the file when its SHA-256 was computed."""
    is_secret: bool = False
    """True if `sha256` is a commitment."""

    @property
    def file(self) -> ModelFile:
        """The file as tasks compare it."""
        return ModelFile(self.path, self.state, None if self.is_secret else self.sha256)


@dataclass(frozen=True)
class PartSources:
    """The source of each part of a run with several sources. The parts are numbered source by source."""

    firsts: tuple[int, ...]
    """Number of the first part of each source, in ascending order."""
    names: tuple[str, ...]

    def __getitem__(self, part: int) -> str:
        return self.names[bisect_right(self.firsts, part) - 1]


@dataclass(frozen=True)
class StepContext:
    """Everything that the `build` function of a step may use."""

    spark: Any
    """The SparkSession; steps only pass it to functions of `engine/`."""
    recipe: Recipe
    stages: tuple[Stage, ...]
    """The stages of the step, in order."""
    folders: Mapping[str, Store]
    """The folder of each table that the step writes."""
    inputs: Mapping[str, TableVersion]
    """The tables that the step reads, by name."""
    splits: Sequence[Split]
    models: Mapping[str, Mapping[str, Model]]
    """The models of the step's stages, by stage and name."""
    partitions: int | None
    """Maximum number of Spark tasks that process parts; None: it follows the cores."""
    stages_by_source: Mapping[str, tuple[Stage, ...]] = field(default_factory=dict)
    """The stages of the step for each source, if there are several sources."""
    only: frozenset[int] | None = None
    """The numbers of the parts to build if some of a committed table are damaged; None = all parts."""
    finished: FinishedParts | None = None
    """The parts that earlier versions of the step's tables have; None = every part is built in a version of its own."""

    def of_source(self, source: str) -> "StepContext":
        """Return the same context with the settings, stages and models of one source."""
        if source not in self.stages_by_source:
            return self
        own = self.recipe.of_source(source)
        return replace(
            self,
            recipe=own,
            stages=self.stages_by_source[source],
            models=models_of_source(self.models, own),
            stages_by_source={},
        )

    def by_source(self) -> "dict[str, StepContext]":
        """Return the context of each source. All documents of a part are of one source."""
        return {source: self.of_source(source) for source in self.recipe.sources}

    def by_part(self, parts: Sequence[P]) -> "list[tuple[P, StepContext]]":
        """Return each of the run's parts, in order, with its context."""
        sources, contexts = self.part_sources, self.by_source()
        return [(part, self if sources is None else contexts[sources[at]]) for at, part in enumerate(parts)]

    @property
    def per_document(self) -> tuple[PerDocument, ...]:
        """The per-document stages of the step, in order."""
        return tuple(stage for stage in self.stages if isinstance(stage, PerDocument))

    @property
    def part_sources(self) -> PartSources | None:
        """The source of each part; None if the recipe has one source."""
        if not self.recipe.has_several_sources:
            return None
        firsts = {split.source: split.ordinal for split in reversed(self.splits)}
        return PartSources(tuple(sorted(firsts.values())), tuple(sorted(firsts, key=firsts.__getitem__)))

    def finished_part(self, made_from: Any, source: str | None = None) -> FinishedPart | None:
        """Return where the result of a part is stored for later versions; None = only in this one.

        See `FinishedParts.part`.
        """
        return None if self.finished is None else self.finished.part(made_from, source)

    def finished_parts(self, also_from: Any = None) -> list[FinishedPart | None]:
        """Return the same for each part of a step, in order, that reads the same part of each of its tables.

        `also_from`: JSON values that identify what else all parts read.
        """
        made_with = {name: digest_of(made_with_of(table.manifest)) for name, table in self.inputs.items()}
        return [
            self.finished_part(
                [
                    *((name, made_with[name], table.manifest.paths[key].sha256) for name, table in self.inputs.items()),
                    also_from,
                ]
            )
            for key in map(part_key, range(len(self.inputs["documents"].manifest.content.files)))
        ]

    def model_paths(self) -> dict[str, dict[str, str]]:
        """Return the paths of the shipped models by stage and name, for the stages' `make` functions."""
        return {
            stage: {name: model.file for name, model in models.items() if model.shipped}
            for stage, models in self.models.items()
        }


def made_with_of(manifest: Manifest) -> dict[str, Any]:
    """Return the stages, settings and models with which a table was made, as JSON values."""
    return manifest.content.model_dump(mode="json", include={*MADE_WITH})


def models_of_source(models: Mapping[str, N], recipe: Recipe) -> dict[str, N]:
    """Return the models of the stages for the documents of one source; `recipe` is that of the source.

    A stage that the source has for itself has no model of the run, also if the source gives it none.
    """
    prefix = own_key(recipe.sources[0], "")
    shared = {stage: named for stage, named in models.items() if SEPARATOR not in stage and stage not in recipe.own}
    return shared | {stage[len(prefix) :]: named for stage, named in models.items() if stage.startswith(prefix)}


@dataclass
class TableResult:
    """What a step returns about one table that it wrote: files, row counts and other values for the manifest."""

    files: list[FileEntry] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)
    blocks: dict[str, str] = field(default_factory=dict)
    counts: Counts = field(default_factory=lambda: Counts(rows_in=0, rows_kept=0))
    figures: dict[str, Any] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    failures: FailureCounts = field(default_factory=FailureCounts)
    """The errors that stages raised on documents."""
    notes: dict[str, Any] = field(default_factory=dict)
    sources: list[Mapping[str, Any]] = field(default_factory=list)
    """Name, size and SHA-256 of every input file from outside the run."""
    parts: list[WrittenPart] = field(default_factory=list)
    """The parts of the first table of a step."""

    def add_file(self, written: WrittenFile) -> None:
        """Add a finished file to the table."""
        self.files.append(FileEntry(key=written.key, rows=written.rows, bytes=written.bytes, sha256=written.sha256))
        self.paths[written.key] = written.path
        if written.blocks:
            self.blocks[written.key] = written.blocks

    def count_rows(self) -> None:
        """Set the row counts of a table without verdicts: all rows of its files are kept."""
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
    """One step of a run: the tables it reads, the tables it writes, and the stages that determine the content."""

    writes: tuple[str, ...]
    stages: tuple[Stage, ...]
    reads: tuple[str, ...]
    """Names of tables of the run. If the recipe does not use the step that writes a table, the table is left out."""
    build: Callable[[StepContext], dict[str, TableResult]]
    settings: Literal["content", "decision", "all"] = "content"
    """Which settings change what this step writes: "decision", those only compared with measured values, "content", or
    "all" of them."""
    uses: Callable[[Recipe], bool] = _always
    """Returns True if the recipe of a source uses the step."""
    external_inputs: Callable[[Recipe, Sequence[Split]], dict[str, TableVersion]] = _nothing_external
    """Returns the tables of other runs that the step reads. It is called before Spark starts, and raises ConfigError if
    the step cannot use one of them."""
    optional_inputs: Callable[[Recipe], tuple[str, ...]] = _no_tables
    """Returns the names of further tables of the run that the step reads with these settings."""

    def is_used(self, recipe: Recipe) -> bool:
        """Return True if the recipe uses the step for any source."""
        return any(self.uses(own) for own in recipe.by_source().values())

    def inputs(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the names of all tables of the run that the step reads with this recipe."""
        return (*self.reads, *self.optional_inputs(recipe))

    @property
    def name(self) -> str:
        """The name of the step: the name of its first table."""
        return self.writes[0]


BY_SOURCE = "by_source"
"""Figure of a table that drops documents, in a run with several sources: the counts of each source."""


def combine_parts(results: PartResults, tables: Sequence[str], by_source: bool = False) -> dict[str, TableResult]:
    """Combine the results of all parts into one result for each table.

    The result of the first table has the sum of the parts' counts, and in `notes` the CPU time by stage, how often a
    process ended on a record, and the counts of transfers. For the other tables, only rows are counted. With
    `by_source`, in a run with several sources, the figure BY_SOURCE of the first table has the counts, and the numbers
    of code points, by source.
    """
    built = {table: TableResult() for table in tables}
    first = built[tables[0]]
    for part in results.parts:
        for table in tables:
            built[table].add_file(part.files[table])
    first.sources, first.parts = input_entries(results.parts), results.parts
    first.counts, first.figures, first.failures = results.counts, results.figures, results.failures
    first.cpu_seconds = results.cpu_seconds
    if by_source and results.by_source:
        first.figures = {**first.figures, BY_SOURCE: results.by_source}
    if results.cpu:
        first.notes["cpu"] = {
            stage: {"seconds": round(spent["seconds"], 3), "rows": spent["rows"]}
            for stage, spent in results.cpu.items()
        }
    if results.ends:
        first.notes["ended_processes"] = dict(sorted(results.ends.items()))
    if results.transfers:
        first.notes["transfers"] = dict(sorted(results.transfers.items()))
    for table in tables[1:]:
        built[table].count_rows()
    return built


def input_entries(parts: Sequence[WrittenPart]) -> list[Mapping[str, Any]]:
    """Return the entries of a manifest for the input files of parts: one for each file, whose ranges it lists.

    Unless every file has exactly one part, each entry has the number of its first one.
    """
    sources = [(number, source) for number, part in enumerate(parts) for source in part.sources]
    is_numbered = any(len(part.sources) > 1 for part in parts) or any(RANGE in source for _, source in sources)
    entries: list[Mapping[str, Any]] = []
    for _, group in groupby(sources, key=lambda each: (each[1]["name"], RANGE in each[1])):
        for number, source in _whole_files([*group]):
            entries.append({**source, "part": number} if is_numbered else source)
    return entries


def _whole_files(sources: Sequence[tuple[int, Mapping[str, Any]]]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the entries of one file. Those of its ranges become one, with the digest of their digests."""
    number, source = sources[0]
    if RANGE not in source:
        return [*sources]
    ranges = [{**each[RANGE], "bytes": each["bytes"], "sha256": each["sha256"]} for _, each in sources]
    digest = hashlib.sha256(b"".join(bytes.fromhex(each["sha256"]) for each in ranges)).hexdigest()
    size = sum(each["bytes"] for each in ranges)
    return [(number, {"name": source["name"], "bytes": size, "sha256": digest, "ranges": ranges})]


def add_figures(left: Any, right: Any) -> Any:
    """Return the sum of two numbers. Nested mappings of numbers are added key by key."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        keys = sorted({*left, *right})
        return {
            k: add_figures(left[k], right[k]) if k in left and k in right else left.get(k, right.get(k)) for k in keys
        }
    return left + right
