"""The tables `documents` and `text` of a run written from given texts, without a crawl and without Spark.

Only the signature stage of the documents pass runs, so what is measured afterwards is deduplication. Identities and
manifests are made by the functions of a run: `penstock stage dedup` finds complete tables and continues with them.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.recipe import recipe_sections
from pipeline.engine.part import PartOutput, PartResult, PartTarget, TableTarget, write_part
from pipeline.engine.stage import Split
from pipeline.engine.step import combine_parts
from pipeline.minhash.stage import SIGNATURE
from pipeline.prepare import prepare, step_identity
from pipeline.run import Run, commit
from pipeline.sources.provenance import domain_of
from pipeline.stages import MEASURED, SOURCE
from pipeline.steps.documents import TextConfig, write_row
from schemas.config import Recipe, build_recipe
from schemas.ids import doc_id
from schemas.manifest import TableVersion, read_manifest, read_run, write_run
from schemas.storage import Store
from schemas.tables import DOCUMENTS, TEXT
from tests.support.step_run import gathered

TABLES = ("documents", "text")
DATE = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Text:
    """One document to be written."""

    url: str
    text: str
    language: str = "en"


@dataclass(frozen=True)
class WriteTask:
    """One part to write: `texts(split number)` are its documents."""

    split: Split
    recipe: Recipe
    folders: Mapping[str, Store]
    texts: Callable[[int], Iterable[Text]]


def recipe_of(folder: Path, num_splits: int, settings: Mapping[str, Mapping[str, Any]]) -> Recipe:
    """The recipe of a run over `num_splits` inputs that name their texts and do not hold them."""
    inputs = folder / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    for number in range(num_splits):
        path = inputs / f"corpus-{number:05d}.jsonl"
        if not path.exists():
            path.write_text(json.dumps({"split": number}) + "\n")
    given = {"source": {"paths": [f"{inputs}/*.jsonl"]}, "language": {"languages": []}}
    return build_recipe({**given, **settings}, recipe_sections(), "x")


def write_documents(folder: Path, recipe: Recipe, texts: Callable[[int], Iterable[Text]], processes: int = 1) -> float:
    """Write and commit both tables of the run in `folder` unless they stand; returns CPU seconds of signatures."""
    prepared = prepare(recipe, "documents")
    step, store = prepared.steps[0], Store(str(folder))
    run = Run(**vars(prepared), spark=None, folder=store, partitions=None)
    version = f"v-{step_identity(run, step, {})[:12]}"
    folders = {name: store.child(f"{name}/{version}") for name in TABLES}
    state = read_run(store)
    if state.tables.get("documents") == version:
        return 0.0
    tasks = [WriteTask(split, recipe, folders, texts) for split in prepared.splits]
    started, clock = datetime.now(UTC), time.monotonic()
    if processes == 1:
        answers = [write_signed(task) for task in tasks]
    else:
        with ProcessPoolExecutor(processes) as pool:
            answers = list(pool.map(write_signed, tasks))
    built = combine_parts(gathered([result for result, _ in answers]), TABLES)
    timing = {"started": started.isoformat(timespec="seconds"), "wall_seconds": round(time.monotonic() - clock, 3)}
    for name in reversed(TABLES):
        commit(run, step, folders[name], (name, built[name], {}, timing))
    tables = state.tables | dict.fromkeys(TABLES, version)
    write_run(store, state.model_copy(update={"tables": tables, "recipe": recipe.to_json()}))
    return sum(seconds for _, seconds in answers)


def write_signed(task: WriteTask) -> tuple[PartResult, float]:
    """Sign and write one part; returns its result and the CPU seconds of the signatures."""
    split = task.split
    sign = SIGNATURE.make(task.recipe.of_source(split.source)[SIGNATURE.name], {})
    spent = 0.0

    def fill(output: PartOutput) -> None:
        nonlocal spent
        for row in rows_of(task):
            clock = time.process_time()
            sign(row)
            spent += time.process_time() - clock
            write_row(row, output, TextConfig())
        output.source = {"name": split.name, "bytes": split.size, "sha256": "0" * 64}

    tables = {
        "documents": TableTarget(task.folders["documents"], DOCUMENTS),
        "text": TableTarget(task.folders["text"], TEXT, "text"),
    }
    reasons = [(stage.name, stage.reasons) for stage in (SOURCE, *MEASURED)]
    return write_part(PartTarget(split.ordinal, tables, reasons), fill), spent


def rows_of(task: WriteTask) -> Iterator[dict[str, Any]]:
    """The rows of one part, as extraction and the language gate would leave them."""
    split = task.split
    for position, given in enumerate(task.texts(split.ordinal)):
        size = len(given.text.encode("utf-8", "surrogatepass"))
        yield {
            "doc_id": doc_id(split.source, split.name, position),
            **{"source": split.source, "split": split.name, "offset": position, "length": size, "record_type": "row"},
            **{"url": given.url, "domain": domain_of(given.url), "date": DATE, "language": given.language},
            **{"num_chars": len(given.text), "body_chars": len(given.text), "num_bytes": size, "text": given.text},
            **{"_body": given.text, "_words": None},
        }


def table_of(folder: Path, name: str) -> TableVersion:
    """A committed table of the run in `folder`."""
    store = Store(str(folder))
    found = store.child(f"{name}/{read_run(store).tables[name]}")
    return TableVersion(found, read_manifest(found))


def columns_of(folder: Path, name: str, columns: Sequence[str]) -> pa.Table:
    """These columns of a committed table as one Arrow table, part by part in order."""
    table = table_of(folder, name)
    parts = []
    for path in table.manifest.paths_of():
        with table.folder.open_input(path) as stream:
            parts.append(pq.read_table(stream, columns=list(columns)))
    return pa.concat_tables(parts)
