"""Calls of `penstock takedown`, and readers of runs for its tests."""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.verbs.takedown import takedown_command
from schemas.manifest import MANIFEST_NAME, open_table, read_run
from schemas.storage import Store
from schemas.takedown import Certificate, read_certificate
from schemas.tokens import Dataset, open_dataset

DEFAULTS: dict[str, Any] = {name: [] for name in ("domain", "url", "doc", "near")}
FLAGS = ("compact", "keep_old", "drop_old", "dry_run", "with_copies", "prove", "no_derived", "remake_exports")
FLAGS += ("erase_replaced",)
DEFAULTS |= dict.fromkeys(FLAGS, False) | {"check": None, "docs": None}


def take_down(folder: Path | str, **arguments: Any) -> int:
    """Run `penstock takedown` with these arguments; returns its exit code."""
    return takedown_command(Namespace(run=str(folder), **(DEFAULTS | arguments)))


def certificates(folder: Path) -> list[Certificate]:
    """Return all certificates of a run, by id."""
    names = sorted(path.stem for path in (folder / "takedowns").glob("*.json") if path.stem != "pending")
    return [read_certificate(Store(str(folder)), name) for name in names]


def documents_of(dataset: Dataset) -> list[dict[str, Any]]:
    """Return every document of the shards with its stream, its first token in it, and its tokens."""
    documents = []
    for stream, shards in dataset.streams.items():
        begin = 0
        for shard in shards:
            with dataset.folder.open_input(shard.docs_path) as file:
                rows = pa.ipc.open_file(file).read_all().to_pylist()
            tokens = tokens_of(dataset, shard.path)
            for row in rows:
                own = tokens[row["token_offset"] : row["token_offset"] + row["num_tokens"]]
                documents.append(row | {"stream": stream, "start": begin + row["token_offset"], "tokens": own})
            begin += shard.num_tokens
    return documents


def tokens_of(dataset: Dataset, path: str) -> list[int]:
    """Return the tokens of a shard."""
    with dataset.folder.open_input(path) as file:
        table = pa.ipc.open_file(file).read_all()
    return [token for tokens in table.column("tokens").to_pylist() for token in tokens]


def rows_of(folder: Path, table: str) -> list[dict[str, Any]]:
    """Return the rows of all parts of a table."""
    store, manifest = open_table(Store(str(folder)), table)
    return [row for path in manifest.paths_of() for row in pq.read_table(store.path(path)).to_pylist()]


def spans_of(documents: Sequence[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Return documents as spans of their streams, as a replay does."""
    return [(row["stream"], row["start"], row["num_tokens"]) for row in documents]


def opened(folder: Path) -> Dataset:
    """Open the dataset of a run folder."""
    return open_dataset(Store(str(folder)))


def all_bytes(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of a run."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def forge(folder: Path, key: str, change: Any, table: str = "tokens") -> None:
    """Change the bytes of a file and everything that names its digest, as a forger would.

    `change` maps the old bytes to the new ones.
    """
    import hashlib

    store, manifest = open_table(Store(str(folder)), table)
    version = read_run(Store(str(folder))).tables[table]
    path = Path(store.path(manifest.paths[key]))
    data = change(path.read_bytes())
    path.write_bytes(data)
    raw = manifest.model_dump(mode="json")
    old = next(entry for entry in raw["content"]["files"] if entry["key"] == key)
    before = old["sha256"]
    old["sha256"] = hashlib.sha256(data).hexdigest()
    raw["run"].get("blocks", {}).pop(key, None)
    path = folder / table / version / MANIFEST_NAME
    path.write_text(json.dumps(raw))
    after = open_table(Store(str(folder)), table)[1].digest
    for name in (folder / "takedowns").glob("*.json"):
        text = name.read_text().replace(before, old["sha256"]).replace(manifest.digest, after)
        name.write_bytes(Certificate.model_validate_json(text).sealed().to_bytes())
