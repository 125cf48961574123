"""Document ids as a user types them: 32 hex digits, or the first 12 or more, which are looked up in a run.

Commands print ids of documents with 12 digits, so each command that reads an id accepts as many.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from schemas.arrow_files import ArrowFile
from schemas.errors import ConfigError
from schemas.ids import DOC_ID_BYTES
from schemas.manifest import open_table, read_run
from schemas.older_tables import read_batches
from schemas.storage import Store
from schemas.tokens import open_dataset
from schemas.versions import DATASET

ID_DIGITS = 2 * DOC_ID_BYTES
MIN_ID_DIGITS = 12
ID_HELP = f"the first {MIN_ID_DIGITS} or more of an id's {ID_DIGITS} hex digits"
DIGITS = re.compile(rf"[0-9a-fA-F]{{{MIN_ID_DIGITS},{ID_DIGITS}}}")
SHOWN_CANDIDATES = 10
"""Maximum number of ids that an error lists for an ambiguous beginning."""
ROWS_AT_ONCE = 1 << 16


def resolve_doc_ids(run: Store, options: Mapping[str, str]) -> list[str]:
    """Return the whole ids (32 hex digits) of documents of a run, in the order of `options`.

    `options` has an id, or its first 12 or more digits, and the option that named it. A whole id is not looked up.
    Raises ConfigError if a text is no id, or is the beginning of no document's id or of several.
    """
    wrong = [f"{option} {text!r}" for text, option in options.items() if not DIGITS.fullmatch(text)]
    if wrong:
        raise ConfigError(
            f"{wrong[0].partition(' ')[0]}: expected a document id of {MIN_ID_DIGITS} to {ID_DIGITS} hex digits, got "
            f"{', '.join(text.partition(' ')[2] for text in wrong)}. Copy the id from `penstock show`."
        )
    short = [text.lower() for text in options if len(text) < ID_DIGITS]
    found = _ids_with(run, short) if short else {}
    return [_only(run, option, text.lower(), found) for text, option in options.items()]


def _only(run: Store, option: str, text: str, found: Mapping[str, Sequence[str]]) -> str:
    if len(text) == ID_DIGITS:
        return text
    if len(found[text]) == 1:
        return found[text][0]
    if not found[text]:
        raise ConfigError(
            f"{option} {text}: expected the beginning of a document id of {run.uri}, got no document with it. Copy the "
            "id from `penstock show`."
        )
    shown = ", ".join(found[text][:SHOWN_CANDIDATES])
    more = f" and {len(found[text]) - SHOWN_CANDIDATES} more" if len(found[text]) > SHOWN_CANDIDATES else ""
    raise ConfigError(
        f"{option} {text}: expected the beginning of one document id, got that of {len(found[text])}: {shown}{more}. "
        "Give more digits."
    )


def _ids_with(run: Store, beginnings: Sequence[str]) -> dict[str, list[str]]:
    """Return the sorted ids (hex) of the run's documents that begin with each of `beginnings` (hex)."""
    heads = pa.array(sorted({bytes.fromhex(text[:MIN_ID_DIGITS]) for text in beginnings}), pa.binary())
    near: set[str] = set()
    for ids in _doc_ids(run):
        plain = ids.cast(pa.binary())
        is_near = pc.is_in(pc.binary_slice(plain, 0, MIN_ID_DIGITS // 2), heads)
        near.update(identifier.hex() for identifier in plain.filter(is_near).to_pylist())
    return {text: sorted(identifier for identifier in near if identifier.startswith(text)) for text in beginnings}


def _doc_ids(run: Store) -> Iterator[pa.Array | pa.ChunkedArray]:
    """Yield the ids of all documents of a run in batches, from `documents`, or else from the dataset."""
    tables = read_run(run).tables
    if "documents" in tables:
        folder, manifest = open_table(run, "documents", even_replaced=True)
        for path in manifest.paths_of():
            with folder.open_input(path) as stream:
                for batch in read_batches(pq.ParquetFile(stream), "documents", ["doc_id"], ROWS_AT_ONCE):
                    yield batch.column(0)
    elif DATASET in tables:
        dataset = open_dataset(run, even_replaced=True)
        for shard in (shard for shards in dataset.streams.values() for shard in shards):
            with dataset.folder.open_input(shard.docs_path) as stream:
                yield ArrowFile(stream, f"{dataset.folder.uri}/{shard.docs_path}").read_all().column("doc_id")
