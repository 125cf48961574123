"""A dataset whose list of shards is a mapped file, so that the ranks of a node read its manifest once and share memory.

The manifest of a large dataset names a hundred thousand shards, which take kilobytes each as objects. A leader writes
them as an Arrow file, one record batch per stream. Other ranks map this file, and make an object of a shard when it is
opened.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, overload

import pyarrow as pa

from schemas.errors import ContractError
from schemas.manifest import Manifest
from schemas.storage import CheckedPath, Store
from schemas.tokens import TRAIN, Dataset, Member, Shard, TokenizerContract

SHARDS = pa.schema(
    [
        *(pa.field(name, pa.large_string()) for name in ("path", "docs_path", "blocks")),
        *(pa.field(name, pa.binary(32)) for name in ("sha256", "docs_sha256")),
        *(pa.field(name, pa.int64()) for name in ("num_bytes", "docs_bytes", "num_tokens", "num_documents")),
    ]
)
"""The columns of the file: those of `Shard`, and the sizes of its two files."""
AT_ONCE = 256
"""Shards of which an iteration makes Python values at once."""
OF_SHARDS = ("streams", "membership_parts", "members")
"""Figures of a manifest with an entry for each shard or file."""
HEAD = b"dataset"
"""Key of the rest of the dataset in the metadata of the file's schema, as JSON."""


class ShardTable(Sequence[Shard]):
    """The shards of a stream in a record batch; an object is made of a shard when it is asked for."""

    def __init__(self, stream: str, batch: pa.RecordBatch):
        self.stream, self._batch = stream, batch

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    @overload
    def __getitem__(self, index: int) -> Shard: ...

    @overload
    def __getitem__(self, index: slice) -> list[Shard]: ...

    def __getitem__(self, index: int | slice) -> Shard | list[Shard]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return self._shard(number, self._batch.slice(number, 1).to_pylist()[0])

    def __iter__(self) -> Iterator[Shard]:
        for first in range(0, len(self), AT_ONCE):
            for number, row in enumerate(self._batch.slice(first, AT_ONCE).to_pylist(), first):
                yield self._shard(number, row)

    def _shard(self, number: int, row: Mapping[str, Any]) -> Shard:
        sha256, docs_sha256 = row["sha256"].hex(), row["docs_sha256"].hex()
        return Shard(
            stream=self.stream,
            number=number,
            path=CheckedPath(row["path"], row["num_bytes"], sha256),
            docs_path=CheckedPath(row["docs_path"], row["docs_bytes"], docs_sha256),
            num_tokens=row["num_tokens"],
            num_documents=row["num_documents"],
            sha256=sha256,
            docs_sha256=docs_sha256,
            blocks=row["blocks"],
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all shards."""
        return int(self._batch.column("num_tokens").to_numpy().sum())


class ManifestWithoutFiles(Manifest):
    """A manifest whose files are left out, with the digest of the whole manifest."""

    of_whole: str
    """Digest of the manifest with its files."""

    @property
    def digest(self) -> str:
        """The identity of the version, with its files."""
        return self.of_whole


@dataclass(frozen=True)
class MappedDataset(Dataset):
    """A dataset with mapped shards, and the digest of its manifest.

    The manifest has its files on the leader of a node only, which verifies them; the other ranks read shards alone.
    """

    tables: Mapping[str, ShardTable]
    """The shards of each stream; `streams` has the same."""
    of_manifest: str
    """Digest of the manifest."""

    @property
    def digest(self) -> str:
        """The identity of the dataset, which a leader computed once."""
        return self.of_manifest

    def num_tokens(self, split: str = TRAIN) -> dict[str, int]:
        """Return the number of stored tokens of each source in one split, `train` or `heldout`."""
        suffix = f"/{split}"
        own = {name: table for name, table in self.tables.items() if name.endswith(suffix)}
        return {name.removesuffix(suffix): table.num_tokens for name, table in own.items()}


def write_mapped(dataset: Dataset, path: Path) -> None:
    """Write the file that `map_dataset` maps. Raises FileExistsError if it exists."""
    names = list(dataset.streams)
    head = {
        "streams": names,
        "digest": dataset.digest,
        "folders": [dataset.folder.address, dataset.tokenizer_folder.address],
        "tokenizer": dataset.tokenizer.model_dump(mode="json"),
        "tokenizer_path": _of_path(dataset.tokenizer_path),
        "chunk_tokens": dataset.chunk_tokens,
        "members": [
            {
                **{name: getattr(member, name) for name in ("digest", "settings")},
                "folder": member.folder.address,
                "shards": {name: [own.start, own.stop] for name, own in member.shards.items()},
                "by_url": [member.by_url.start, member.by_url.stop],
            }
            for member in dataset.members
        ],
        "manifest": _without_files(dataset.manifest),
    }
    schema = SHARDS.with_metadata({HEAD: json.dumps(head).encode()})
    with path.open("xb") as raw, pa.ipc.new_file(raw, schema) as file:
        for name in names:
            file.write_batch(pa.RecordBatch.from_pylist([_of_shard(shard) for shard in dataset.streams[name]], schema))


def map_dataset(path: Path) -> MappedDataset:
    """Return the dataset of a file that `write_mapped` wrote. The file may be removed afterwards."""
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    head = json.loads(reader.schema.metadata[HEAD])
    tables = {name: ShardTable(name, reader.get_batch(number)) for number, name in enumerate(head["streams"])}
    folder, tokenizer_folder = map(Store, head["folders"])
    return MappedDataset(
        folder=folder,
        manifest=ManifestWithoutFiles.model_validate(head["manifest"]),
        tokenizer=TokenizerContract.model_validate(head["tokenizer"]),
        tokenizer_folder=tokenizer_folder,
        tokenizer_path=CheckedPath(*head["tokenizer_path"]),
        chunk_tokens=head["chunk_tokens"],
        streams=tables,
        by_url=[],
        members=tuple(_members(head["members"])),
        tables=tables,
        of_manifest=head["digest"],
    )


def with_manifest(mapped: MappedDataset, dataset: Dataset) -> MappedDataset:
    """Return a mapped dataset with the whole manifest and the index by URL of the dataset that it was written from."""
    if mapped.of_manifest != dataset.digest:
        raise ContractError(
            f"{dataset.folder.uri}: expected dataset {mapped.of_manifest[:12]}, got {dataset.digest[:12]}, which was "
            "written meanwhile. Start the run again."
        )
    own = {field.name: getattr(dataset, field.name) for field in fields(Dataset) if field.name != "streams"}
    return replace(mapped, **own)


def _without_files(manifest: Manifest) -> dict[str, Any]:
    """Return the fields of `ManifestWithoutFiles`."""
    figures = {name: value for name, value in manifest.content.figures.items() if name not in OF_SHARDS}
    content = manifest.content.model_copy(update={"files": [], "figures": figures})
    run = manifest.run.model_copy(update={"paths": {}, "blocks": {}})
    fields_of = {"content": content.model_dump(mode="json"), "run": run.model_dump(mode="json")}
    return fields_of | {"of_whole": manifest.digest}


def _members(entries: Sequence[Mapping[str, Any]]) -> Iterator[Member]:
    for entry in entries:
        shards = {name: range(*bounds) for name, bounds in entry["shards"].items()}
        yield Member(Store(entry["folder"]), entry["digest"], entry["settings"], shards, range(*entry["by_url"]))


def _of_path(path: CheckedPath) -> tuple[str, int, str]:
    return str(path), path.num_bytes, path.sha256


def _of_shard(shard: Shard) -> dict[str, Any]:
    (path, num_bytes, sha256), (docs_path, docs_bytes, docs) = _of_path(shard.path), _of_path(shard.docs_path)
    row: dict[str, Any] = {"path": path, "docs_path": docs_path, "blocks": shard.blocks}
    row |= {"sha256": bytes.fromhex(sha256), "docs_sha256": bytes.fromhex(docs)}
    row |= {"num_bytes": num_bytes, "docs_bytes": docs_bytes}
    return row | {"num_tokens": shard.num_tokens, "num_documents": shard.num_documents}
