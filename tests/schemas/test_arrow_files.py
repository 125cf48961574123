"""Arrow files of a run: values that are not valid are an error before anything reads them."""

import struct
from pathlib import Path

import pyarrow as pa
import pytest

from schemas.arrow_files import ArrowFile
from schemas.errors import ContractError


def write(path: Path, far: int = 0) -> Path:
    """Write two record batches of texts; the last offset of the second one leads `far` bytes too far."""
    urls = [pa.array(["a.example", "b.example"]), pa.array(["c.example/long", "d"])]
    with pa.ipc.new_file(str(path), pa.schema({"url": pa.string()})) as file:
        for own in urls:
            file.write_batch(pa.RecordBatch.from_arrays([own], ["url"]))
    offsets = struct.pack("<3i", 0, 14, 15)
    data = path.read_bytes()
    assert data.count(offsets) == 1
    path.write_bytes(data.replace(offsets, struct.pack("<3i", 0, 14, 15 + far)))
    return path


def test_valid_files_are_read(tmp_path: Path) -> None:
    file = ArrowFile(str(write(tmp_path / "a.arrow")))
    assert file.read_all().column("url").to_pylist() == ["a.example", "b.example", "c.example/long", "d"]
    assert (file.num_record_batches, file.schema.names) == (2, ["url"])


@pytest.mark.parametrize("far", [3_000, 1 << 29, -40])
def test_offsets_out_of_the_buffer_are_an_error(tmp_path: Path, far: int) -> None:
    path = str(write(tmp_path / "a.arrow", far))
    assert ArrowFile(path).get_batch(0).num_rows == 2
    with pytest.raises(pa.ArrowInvalid):
        ArrowFile(path).get_batch(1)
    with pytest.raises(ContractError, match=r"index: expected a readable Arrow file, got an error: .* from a backup\."):
        ArrowFile(path, "index").read_all()
