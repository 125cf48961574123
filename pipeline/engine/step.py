"""What the builder of a table is given and what it gives back; versions, resume and commits live around it in `run`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.engine.stage import PerDocument, Relation, Source, Split
from schemas.config import Recipe
from schemas.manifest import Counts, FileEntry, Table, part_key
from schemas.storage import Store

Stage = Source | PerDocument | Relation
Answer = dict[str, Any]
PARTS = "parts"


@dataclass(frozen=True)
class Model:
    """A model file on the driver, by its content."""

    path: str
    sha256: str
    shipped: bool = True
    """Whether workers open it; what it was compiled from, or another process reads, stays where it is."""


@dataclass(frozen=True)
class Build:
    """Everything a builder may look at. `folders` has one folder for each table it writes."""

    spark: Any
    """The SparkSession, for builders to hand on to `lift`."""
    recipe: Recipe
    folders: Mapping[str, Store]
    inputs: Mapping[str, Table]
    splits: Sequence[Split]
    models: Mapping[str, Mapping[str, Model]]
    partitions: int | None

    def model_paths(self) -> dict[str, dict[str, str]]:
        """Model paths by stage and name, as the workers' `make` functions want them."""
        return {
            stage: {name: model.path for name, model in models.items() if model.shipped}
            for stage, models in self.models.items()
        }


@dataclass
class Built:
    """The files, books and exact figures of one written table."""

    files: list[FileEntry] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)
    counts: Counts = field(default_factory=lambda: Counts(rows_in=0, rows_kept=0))
    figures: dict[str, Any] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    sources: list[dict[str, Any]] = field(default_factory=list)
    """Name, size and SHA-256 of every outside file that was read."""

    def add_file(self, entry: Mapping[str, Any]) -> None:
        """List one written file, as `PartWriter.close` describes it."""
        self.files.append(FileEntry(key=entry["key"], rows=entry["rows"], bytes=entry["bytes"], sha256=entry["sha256"]))
        self.paths[entry["key"]] = entry["path"]


def _always(recipe: Recipe) -> bool:
    return True


def _no_more(recipe: Recipe) -> tuple[str, ...]:
    return ()


def _nothing(recipe: Recipe, splits: Sequence[Split]) -> dict[str, Table]:
    return {}


@dataclass(frozen=True)
class TableJob:
    """One step of a run: the tables it writes, the stages whose settings decide them, the tables it reads."""

    writes: tuple[str, ...]
    stages: tuple[Stage, ...]
    reads: tuple[str, ...]
    """Those that the recipe does not want are not there."""
    build: Callable[[Build], dict[str, Built]]
    settings: Literal["content", "decision"] = "content"
    """Which settings of the stages change what this step writes."""
    wanted: Callable[[Recipe], bool] = _always
    """Whether the recipe asks for the step at all."""
    outside: Callable[[Recipe, Sequence[Split]], dict[str, Table]] = _nothing
    """Tables of other runs that it reads too; raises ConfigError for what cannot serve, before anything runs."""
    asks: Callable[[Recipe], tuple[str, ...]] = _no_more
    """Tables of the run that it reads with some settings only."""

    def inputs(self, recipe: Recipe) -> tuple[str, ...]:
        """Every table of the run that it reads with these settings."""
        return (*self.reads, *self.asks(recipe))

    @property
    def name(self) -> str:
        """The step's name: its first table."""
        return self.writes[0]


def gather(answers: Sequence[Answer], tables: Sequence[str]) -> dict[str, Built]:
    """The answers of all parts as one Built per table; the books belong to the first table, figures are summed."""
    built = {table: Built() for table in tables}
    first = built[tables[0]]
    for answer in answers:
        for table in tables:
            built[table].add_file(answer["files"][table])
        counts = Counts.model_validate(answer["counts"])
        first.counts = first.counts.plus(counts)
        first.figures = add_figures(first.figures, answer["figures"]) if first.figures else answer["figures"]
        first.errors = add_figures(first.errors, answer["errors"])
        first.cpu_seconds += answer["cpu_seconds"]
        if "source" in answer:
            first.sources.append(answer["source"])
    for table in tables[1:]:
        rows = sum(entry.rows for entry in built[table].files)
        built[table].counts = Counts(rows_in=rows, rows_kept=rows)
    return built


def standing_answer(folder: Store, ordinal: int) -> Answer | None:
    """The answer of a part that an earlier, interrupted run has finished."""
    name = f"{PARTS}/{part_key(ordinal)}.json"
    return folder.read_json(name) if folder.exists(name) else None


def keep_answer(folder: Store, ordinal: int, answer: Answer, encode: Callable[[Any], bytes]) -> Answer:
    """The answer, made durable so that a resumed run need not do the part again."""
    folder.write_atomic(f"{PARTS}/{part_key(ordinal)}.json", encode(answer))
    return answer


def add_figures(left: Any, right: Any) -> Any:
    """Two figures summed: numbers add, mappings add key by key."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        keys = sorted({*left, *right})
        return {
            k: add_figures(left[k], right[k]) if k in left and k in right else left.get(k, right.get(k)) for k in keys
        }
    return left + right
