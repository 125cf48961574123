"""A takedown that is killed at any write or deletion: the old or the new version is current; a rerun finishes it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from pipeline.takedown.commit import PendingTakedown, read_pending
from pipeline.takedown.rewrite import new_version
from schemas.errors import ConfigError, ContractError
from schemas.manifest import open_table, read_run, write_run
from schemas.storage import Store
from schemas.tables import TABLES
from schemas.takedown import PENDING_NAME, REMOVED_ID, resolve_version
from tests.support.report_run import identifier, make_run
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import all_bytes, certificates, documents_of, opened, take_down
from train.data.verify import verify_dataset


class Killed(BaseException):
    """Ends the process."""


@contextmanager
def killed(after: int) -> Iterator[list[str]]:
    """Kill the process before its `after`-th change of the run (0 = the first); yields the changes it made."""
    made: list[str] = []

    def counted(act):
        def acting(store: Store, name: str, *rest):
            if len(made) == after:
                raise Killed
            made.append(f"{act.__name__} {name}")
            return act(store, name, *rest)

        return acting

    changes = ("write_atomic", "open_output", "delete")
    with mock.patch.multiple(Store, **{name: counted(getattr(Store, name)) for name in changes}):
        yield made


def prepare(folder: Path) -> bytes:
    """Write a dataset; returns the document to take down."""
    make_tiny_dataset(folder, {"web": 30, "books": 10})
    return documents_of(opened(folder))[8]["doc_id"]


def current_version(folder: Path, document: bytes) -> str:
    """Check that the current version is complete; returns `old` or `new`."""
    dataset = opened(folder)
    (folder / "train").mkdir(exist_ok=True)
    verify_dataset(Store(str(folder)), dataset)
    ids = [row["doc_id"] for row in documents_of(dataset)]
    assert (document in ids) != (REMOVED_ID in ids)
    return "old" if document in ids else "new"


def num_changes(folder: Path) -> int:
    """Return the number of changes of a whole takedown."""
    document = prepare(folder)
    with killed(10**6) as made:
        assert take_down(folder, doc=[document.hex()]) == 0
    return len(made)


def test_killed_anywhere_one_version_is_current_and_a_rerun_finishes(tmp_path: Path) -> None:
    number = num_changes(tmp_path / "whole")
    assert number > 15
    expected = {name: data for name, data in all_bytes(tmp_path / "whole").items() if "takedowns" not in name}
    seen = []
    for after in range(number):
        folder = tmp_path / str(after)
        document = prepare(folder)
        with killed(after), pytest.raises(Killed):
            take_down(folder, doc=[document.hex()])
        seen.append(current_version(folder, document))
        if read_pending(Store(str(folder))) is not None:
            with pytest.raises(
                ContractError, match=r"got one that was interrupted\. Finish it with `penstock takedown "
            ):
                resolve_version(Store(str(folder)), "tokens", "v-0000000071a9")
        assert take_down(folder, doc=[document.hex()]) == 0
        assert current_version(folder, document) == "new"
        assert read_pending(Store(str(folder))) is None
        assert take_down(folder, check=f"takedowns/{certificates(folder)[0].id}.json") == 0
        # The attempt leaves no other files; names differ between attempts.
        names = [name for name in all_bytes(folder) if "takedowns" not in name and not name.startswith("train/")]
        assert len(names) == len(expected)
    assert seen == sorted(seen, reverse=True)  # old, old, …, new
    assert {*seen} == {"old", "new"}


def test_killed_twice_and_finished_by_another_request(tmp_path: Path, capsys) -> None:
    document = prepare(tmp_path)
    other = documents_of(opened(tmp_path))[20]["doc_id"]
    for after in (5, 2):
        with killed(after), pytest.raises(Killed):
            take_down(tmp_path, doc=[document.hex()])
    assert take_down(tmp_path, doc=[other.hex()]) == 0
    assert "was interrupted; it is completed first" in capsys.readouterr().out
    assert len(certificates(tmp_path)) == 2
    left = [row["doc_id"] for row in documents_of(opened(tmp_path))]
    assert document not in left
    assert other not in left
    assert left.count(REMOVED_ID) == 2


def test_without_a_request_an_interrupted_takedown_is_finished(tmp_path: Path) -> None:
    document = prepare(tmp_path)
    with killed(9), pytest.raises(Killed):
        take_down(tmp_path, doc=[document.hex()])
    with pytest.raises(ConfigError, match=r"expected no unfinished takedown, got .* Finish it with `penstock takedown"):
        take_down(tmp_path, dry_run=True)
    with pytest.raises(ConfigError, match="expected no unfinished takedown"):
        take_down(tmp_path, drop_old=True)
    assert take_down(tmp_path) == 0
    assert current_version(tmp_path, document) == "new"


def test_a_whole_run_killed_between_its_tables(tmp_path: Path) -> None:
    make_run(tmp_path / "run", until="clean")
    run = Store(str(tmp_path / "run"))
    old = read_run(run).tables
    for after in (0, 4, 11, 17, 21):
        with killed(after), pytest.raises(Killed):
            take_down(tmp_path / "run", doc=[identifier(34).hex()])
        assert read_run(run).tables == old
        assert all(open_table(run, name)[1] for name in old)
    assert take_down(tmp_path / "run", doc=[identifier(34).hex()]) == 0
    assert take_down(tmp_path / "run", check=f"takedowns/{certificates(tmp_path / 'run')[0].id}.json") == 0


def test_a_killed_takedown_writes_again_only_the_files_that_are_not_complete(tmp_path: Path) -> None:
    def documents(folder: Path) -> list[str]:
        make_tiny_dataset(folder, {"web": 60, "books": 20})
        return [row["doc_id"].hex() for row in documents_of(opened(folder))[::6]]

    chosen = documents(tmp_path / "whole")
    with killed(10**6) as made:
        assert take_down(tmp_path / "whole", doc=chosen) == 0
    num_files = sum(change.startswith("open_output") for change in made)
    assert num_files > 6
    seen = set()
    for after in range(4, len(made), 9):
        folder = tmp_path / str(after)
        chosen = documents(folder)
        with killed(after), pytest.raises(Killed):
            take_down(folder, doc=chosen)
        if open_dataset_version(folder) != "v-0000000071a9":
            break
        complete = {
            written["path"]
            for name in folder.glob("tokens/*/parts/part-*.json")
            for written in json.loads(name.read_bytes())["files"].values()
        }
        with killed(10**6) as made_again:
            assert take_down(folder) == 0
        assert sum(change.startswith("open_output") for change in made_again) == num_files - len(complete)
        manifest = opened(folder).manifest
        assert complete <= {*manifest.paths.values()}
        assert manifest.digest == opened(tmp_path / "whole").manifest.digest
        assert [c.documents for c in certificates(folder)] == [c.documents for c in certificates(tmp_path / "whole")]
        seen.add(len(complete))
    assert 0 in seen
    assert len(seen) > 2  # kills at which some files were complete and others were not


def open_dataset_version(folder: Path) -> str:
    """The folder name of the current version of the dataset."""
    return read_run(Store(str(folder))).tables["tokens"]


def test_tables_that_changed_meanwhile_are_rejected(tmp_path: Path) -> None:
    document = prepare(tmp_path)
    with killed(9), pytest.raises(Killed):
        take_down(tmp_path, doc=[document.hex()])
    run = Store(str(tmp_path))
    state = read_run(run)
    certificates_before = (tmp_path / PENDING_NAME).read_bytes()
    write_run(run, state.model_copy(update={"tables": state.tables | {"tokens": "v-0000000007e4"}}))
    with pytest.raises(
        ContractError, match=r"expected the certificate of takedown \w+, got no file .*\. Copy it from the run"
    ):
        take_down(tmp_path, doc=[document.hex()])
    assert (tmp_path / PENDING_NAME).read_bytes() == certificates_before
    write_run(run, state)
    assert take_down(tmp_path, doc=[document.hex()]) == 0


def test_an_invalid_intent_is_rejected(tmp_path: Path) -> None:
    document = prepare(tmp_path)
    Store(str(tmp_path)).write_atomic(PENDING_NAME, b'{"id": 1}')
    with pytest.raises(ContractError, match="expected a valid record of an unfinished takedown, got"):
        take_down(tmp_path, doc=[document.hex()])


@pytest.mark.parametrize("identifier_", ["../../outside/evil", "0123456789ag", "0123456789a", ""])
def test_the_id_of_a_foreign_takedown_is_no_path(tmp_path: Path, identifier_: str) -> None:
    """The id is in the names of files and folders that a takedown writes."""
    folder = tmp_path / "run"
    document = prepare(folder)
    with killed(2), pytest.raises(Killed):
        take_down(folder, doc=[document.hex()])
    pending = json.loads((folder / PENDING_NAME).read_text())
    (folder / PENDING_NAME).write_text(json.dumps(pending | {"id": identifier_}))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ContractError, match="expected a valid record of an unfinished takedown"):
        take_down(folder)
    assert sorted(tmp_path.rglob("*")) == before


def test_no_file_is_deleted_through_a_link_in_place_of_a_version(tmp_path: Path) -> None:
    folder, theirs = tmp_path / "run", tmp_path / "theirs"
    document = prepare(folder)
    theirs.mkdir()
    (theirs / "precious.txt").write_text("precious")
    pending = begun(folder, document)
    table = next(name for name in TABLES if name in pending.tables)
    (folder / table / new_version(pending.id, table, pending.tables[table])).symlink_to(theirs)
    with pytest.raises(ContractError, match="got a symbolic link to"):
        take_down(folder)
    assert [path.name for path in theirs.iterdir()] == ["precious.txt"]


def begun(folder: Path, document: bytes) -> PendingTakedown:
    """Kill a takedown after its first write; returns its record."""
    with killed(1), pytest.raises(Killed):
        take_down(folder, doc=[document.hex()])
    pending = read_pending(Store(str(folder)))
    assert pending is not None
    return pending


@pytest.mark.parametrize("keep_old", [False, True])
def test_only_what_no_version_names_is_deleted(tmp_path: Path, keep_old: bool) -> None:
    """After a takedown, versions name files in folders whose manifest it has deleted."""
    run = tmp_path / "run"
    first = prepare(run)
    assert take_down(run, doc=[first.hex()]) == 0
    current = read_run(Store(str(run))).tables["tokens"]
    assert [path for path in run.glob("tokens/v-*/*/*") if path.relative_to(run).parts[1] != current]
    second = documents_of(opened(run))[20]["doc_id"]
    unfinished, inner = run / "tokens/v-0123456789ab/web/00000.tokens", run / "tokens/inner"
    unfinished.parent.mkdir(parents=True)
    unfinished.write_bytes(b"tokens of an interrupted step")
    make_tiny_dataset(inner, {"web": 3})
    before = all_bytes(inner)
    assert take_down(run, doc=[second.hex()], keep_old=keep_old) == 0
    assert not unfinished.exists()
    assert all_bytes(inner) == before
    assert current_version(run, second) == "new"
    assert first not in [row["doc_id"] for row in documents_of(opened(run))]
