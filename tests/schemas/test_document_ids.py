"""Ids by their first digits: found in `documents` or in the dataset, with every candidate listed where they differ."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.document_ids import resolve_doc_ids
from schemas.errors import ConfigError
from schemas.manifest import open_table
from schemas.storage import Store
from tests.support.lineage_run import record_files
from tests.support.report_run import identifier, make_run
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import documents_of, opened


def test_a_beginning_of_several_ids_lists_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "documents")
    folder, manifest = open_table(run, "documents")
    path = folder.path(manifest.paths_of()[0])
    table = pq.read_table(path)
    own = [bytes.fromhex("ab" * 7 + f"{number:02x}" * 9) for number in range(table.num_rows)]
    pq.write_table(table.set_column(0, table.schema.field(0), pa.array(own, pa.binary(16))), path)
    record_files(run, "documents")
    with pytest.raises(ConfigError) as caught:
        resolve_doc_ids(run, {"abababababab": "--doc"})
    shown = ", ".join(identifier.hex() for identifier in own[:10])
    assert str(caught.value) == (
        f"--doc abababababab: expected the beginning of one document id, got that of {len(own)}: {shown} and "
        f"{len(own) - 10} more. Give more digits."
    )
    assert resolve_doc_ids(run, {own[3].hex()[:16]: "--doc"}) == [own[3].hex()]


def test_several_ids_keep_their_order(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "documents")
    whole = [identifier(number).hex() for number in (9, 2, 5)]
    given = {whole[0][:12]: "--doc", whole[1]: "--docs", whole[2][:20].upper(): "--near"}
    assert resolve_doc_ids(run, given) == whole
    with pytest.raises(ConfigError, match="--doc: expected a document id of 12 to 32 hex digits, got 'a', 'x'"):
        resolve_doc_ids(run, {"a": "--doc", whole[0]: "--doc", "x": "--doc"})


def test_a_dataset_without_documents_is_searched(tmp_path: Path) -> None:
    make_tiny_dataset(tmp_path, {"web": 5})
    whole = documents_of(opened(tmp_path))[3]["doc_id"].hex()
    assert resolve_doc_ids(Store(str(tmp_path)), {whole[:12]: "--doc"}) == [whole]
