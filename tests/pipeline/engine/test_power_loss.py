"""Files are durable before something names them: single writers under the recorder of `tests/support/power_loss.py`."""

from pathlib import Path

import pytest

from tests.support.power_loss import Folder, durable, record_script

STORE = "import sys\nfrom pathlib import Path\nfrom schemas.storage import Store\nrun = Store(sys.argv[1])\n"
WRITERS = {
    "a small file in new folders": (STORE + "run.write_atomic('a/b/c.json', b'{}')", {"a/b/c.json"}),
    "a closed file": (
        STORE + "with run.open_output('a/b.arrow') as stream:\n    stream.write(b'x')\nrun.sync('a/b.arrow')",
        {"a/b.arrow"},
    ),
    "a file that is moved": (
        STORE + "run.write_atomic('a/b', b'x')\nrun.move('a/b', 'c/d')",
        {"c/d"},
    ),
    "a part of a table": (
        STORE + "import pyarrow as pa\n"
        "from pipeline.engine.parquet import PartWriter\n"
        "with PartWriter(run.child('t/v-1'), 'part-00000', pa.schema([('n', pa.int64())])) as writer:\n"
        "    writer.add({'n': 1})\n"
        "Path(run.path('name')).write_text(writer.written.path)",
        {"t/v-1/part-00000-*.parquet"},
    ),
    "a journal": (
        STORE + "from train.monitor.log_files import Journal\n"
        "journal = Journal(run, 'train/metrics.jsonl')\njournal.append(b'{}')\njournal.sync()",
        {"train/metrics.jsonl"},
    ),
    "a model of the cache": (
        STORE + "from pipeline.models import ModelEntry, _store, append_index\n"
        "from hashlib import sha256\n"
        "entry = ModelEntry(sha256(b'x').hexdigest(), 1, '', '', None, file='m.bin')\n"
        "_store(Path(run.root) / 'models/m.bin', entry, lambda stream: stream.write(b'x'))\n"
        "append_index(Path(run.root) / 'models', 'm', entry)",
        {"models/m.bin", "models/trained.jsonl"},
    ),
    "an index of evaluation sets": (
        STORE + "from pipeline.decontaminate.config import DecontaminateConfig\n"
        "from pipeline.decontaminate.index import compile_index\n"
        "path = Path(sys.argv[1]).with_name('items.jsonl')\n"
        "path.write_text('{\"text\": \"' + ' '.join(chr(97 + n % 26) * 3 for n in range(40)) + '\"}')\n"
        "config = DecontaminateConfig(evaluation_sets={'own': str(path)})\n"
        "compile_index(config, {'set_own': str(path)}, sys.argv[1])",
        {"decontamination-*.arrow"},
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_what_a_writer_has_finished_is_durable(tmp_path: Path, writer: str) -> None:
    script, names = WRITERS[writer]
    recording = record_script(script, tmp_path / "run")
    *_, (_, _, root) = recording.replay()
    files = durable(root)
    for pattern in names:
        (path,) = [name for name in files if Path(name).match(pattern)]
        content = files[path]
        assert content is not None, path
        assert content.read_bytes() == (tmp_path / "run" / path).read_bytes() != b""


CLEAR = (
    STORE
    + """
from pipeline.engine.materialize import FrameStore
for number in range(20):
    run.write_atomic(f"scratch/{number}.arrow", b"x")
    run.write_atomic(f"scratch/{number}.json", b"{}")
Path(run.path("full")).touch()
FrameStore(None, run.child("scratch")).clear()
"""
)


def test_stored_frames_that_are_deleted_leave_no_list_without_its_files(tmp_path: Path) -> None:
    """A list that outlived its files would end every later start of the step with a missing file."""
    recording = record_script(CLEAR, tmp_path / "run")
    states = 0
    for _, _, root in recording.replay():
        scratch = root.names.get("scratch")
        if "full" in root.names and isinstance(scratch, Folder):
            for changes in range(len(scratch.pending) + 1):  # the last of them is what a kill leaves
                left = scratch.after(changes)
                assert [name for name in left if name.endswith(".json") and f"{name[:-5]}.arrow" not in left] == []
                states += 1
    assert states > 40
    assert not (tmp_path / "run/scratch").exists()
