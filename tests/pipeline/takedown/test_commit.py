"""A takedown that is killed: at every write and deletion the old or the new version stands; a rerun ends it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from pipeline.takedown.commit import read_pending
from schemas.errors import ConfigError, ContractError
from schemas.manifest import open_table, read_run, write_run
from schemas.storage import Store
from schemas.takedown import PENDING_NAME, REMOVED_ID, resolve_version
from tests.support.report_run import identifier, make_run
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import all_bytes, certificates, documents_of, opened, take_down
from train.data.verify import verify_dataset


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed(after: int) -> Iterator[list[str]]:
    """The process is killed before its `after`-th change of the run (0 = the first); yields the changes it made."""
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
    """A dataset, and the document to take down."""
    make_tiny_dataset(folder, {"web": 30, "books": 10})
    return documents_of(opened(folder))[8]["doc_id"]


def stands(folder: Path, document: bytes) -> str:
    """Which version stands, whole: `old` or `new`."""
    dataset = opened(folder)
    (folder / "train").mkdir(exist_ok=True)
    verify_dataset(Store(str(folder)), dataset)
    ids = [row["doc_id"] for row in documents_of(dataset)]
    assert (document in ids) != (REMOVED_ID in ids)
    return "old" if document in ids else "new"


def num_changes(folder: Path) -> int:
    """How many changes a whole takedown makes."""
    document = prepare(folder)
    with killed(10**6) as made:
        assert take_down(folder, doc=[document.hex()]) == 0
    return len(made)


def test_killed_anywhere_one_version_stands_and_a_rerun_ends_it(tmp_path: Path) -> None:
    number = num_changes(tmp_path / "whole")
    assert number > 15
    expected = {name: data for name, data in all_bytes(tmp_path / "whole").items() if "takedowns" not in name}
    seen = []
    for after in range(number):
        folder = tmp_path / str(after)
        document = prepare(folder)
        with killed(after), pytest.raises(Killed):
            take_down(folder, doc=[document.hex()])
        seen.append(stands(folder, document))
        if read_pending(Store(str(folder))) is not None:
            with pytest.raises(ContractError, match="found one that was broken off; finish it"):
                resolve_version(Store(str(folder)), "tokens", "v-tiny")
        assert take_down(folder, doc=[document.hex()]) == 0
        assert stands(folder, document) == "new"
        assert read_pending(Store(str(folder))) is None
        assert take_down(folder, check=f"takedowns/{certificates(folder)[0].id}.json") == 0
        # Nothing is left of the attempt: the same files, but for the names that no two attempts share.
        found = [name for name in all_bytes(folder) if "takedowns" not in name and not name.startswith("train/")]
        assert len(found) == len(expected)
    assert seen == sorted(seen, reverse=True)  # old, old, …, new
    assert {*seen} == {"old", "new"}


def test_killed_twice_and_ended_by_another_request(tmp_path: Path, capsys) -> None:
    document = prepare(tmp_path)
    other = documents_of(opened(tmp_path))[20]["doc_id"]
    for after in (5, 2):
        with killed(after), pytest.raises(Killed):
            take_down(tmp_path, doc=[document.hex()])
    assert take_down(tmp_path, doc=[other.hex()]) == 0
    assert "was broken off; it is brought to its end first" in capsys.readouterr().out
    assert len(certificates(tmp_path)) == 2
    left = [row["doc_id"] for row in documents_of(opened(tmp_path))]
    assert document not in left
    assert other not in left
    assert left.count(REMOVED_ID) == 2


def test_without_a_request_what_was_broken_off_is_ended(tmp_path: Path) -> None:
    document = prepare(tmp_path)
    with killed(9), pytest.raises(Killed):
        take_down(tmp_path, doc=[document.hex()])
    with pytest.raises(ConfigError, match="finish that one first"):
        take_down(tmp_path, dry_run=True)
    with pytest.raises(ConfigError, match="expected no takedown under way"):
        take_down(tmp_path, drop_old=True)
    assert take_down(tmp_path) == 0
    assert stands(tmp_path, document) == "new"


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


def test_tables_that_changed_meanwhile_are_told(tmp_path: Path) -> None:
    document = prepare(tmp_path)
    with killed(9), pytest.raises(Killed):
        take_down(tmp_path, doc=[document.hex()])
    run = Store(str(tmp_path))
    state = read_run(run)
    certificates_before = (tmp_path / PENDING_NAME).read_bytes()
    write_run(run, state.model_copy(update={"tables": state.tables | {"tokens": "v-other"}}))
    with pytest.raises(ContractError, match="expected"):
        take_down(tmp_path, doc=[document.hex()])
    assert (tmp_path / PENDING_NAME).read_bytes() == certificates_before
    write_run(run, state)
    assert take_down(tmp_path, doc=[document.hex()]) == 0


def test_an_intent_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    document = prepare(tmp_path)
    Store(str(tmp_path)).write_atomic(PENDING_NAME, b'{"id": 1}')
    with pytest.raises(ContractError, match="expected a takedown under way, got"):
        take_down(tmp_path, doc=[document.hex()])
