"""A takedown from a real run of the demo crawl: every table, the index for later snapshots, the report, a rerun."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from jobs.cli import main as penstock
from pipeline.engine.finished_parts import FOLDER
from pipeline.engine.step import Step
from pipeline.report.facts import collect_facts
from pipeline.report.funnel import checks
from pipeline.report.page import write_report
from pipeline.run import Run, commit
from pipeline.takedown.certificate import check_certificate
from schemas.errors import ContractError
from schemas.manifest import current_tables, open_table, read_run
from schemas.storage import Store
from tests.support.tiny_dataset import flip_byte
from tests.support.tiny_takedown import certificates, documents_of, opened, rows_of, take_down

pytestmark = pytest.mark.spark

SETTINGS = ["dedup.write_index=true", 'dedup.keep=["snapshot","source_rank","longest","earliest"]']


@pytest.fixture(scope="module")
def run(run_at, finished, tmp_path_factory) -> Store:
    """The run with an index, before anything is taken down; only its steps from dedup on differ from the shared run."""
    folder = tmp_path_factory.mktemp("run") / "run"
    shutil.copytree(finished.root, folder)
    return run_at(2, SETTINGS, folder)


def test_a_real_run_loses_documents_from_every_table(run: Store, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.root, folder)
    store = Store(str(folder))
    stand = [*current_tables(store)]
    clusters = {row["doc_id"]: row["cluster"] for row in rows_of(folder, "clusters")}
    kept = {row["doc_id"] for row in documents_of(opened(folder))}
    sizes = {one: sum(cluster == one for cluster in clusters.values()) for one in set(clusters.values())}
    near = next(one for one in kept if sizes[clusters[one]] > 2)
    gone = {one for one, cluster in clusters.items() if cluster == clusters[near]}
    old = read_run(store).tables
    assert take_down(folder, near=[near.hex()]) == 0
    certificate = certificates(folder)[0]
    assert (len(certificate.documents), certificate.copies_left) == (len(gone), 0)
    assert {*old} == {*certificate.tables}
    assert certificate.tables["index"].rows > 0
    assert any(one.text for one in certificate.documents)
    assert any(one.tokens for one in certificate.documents)
    for table in ("verdicts", "clusters", "dedup", "clean"):
        assert not gone & {row["doc_id"] for row in rows_of(folder, table)}
    assert not gone & {row["doc_id"] for row in documents_of(opened(folder))}
    assert take_down(folder, check=f"takedowns/{certificate.id}.json") == 0
    assert [check.claim for check in checks(collect_facts(store)) if not check.holds] == []
    assert [*current_tables(store)] == stand
    assert near.hex() not in Path(write_report(store, None)).read_text()
    content = open_table(store, "tokenizer")[1].content
    assert certificate.tokenizer is not None
    assert certificate.tokenizer.read == certificate.tables["clean"].before
    assert certificate.tokenizer.sha256 == content.figures["contract"]["sha256"]


def test_a_rerun_brings_nothing_back(run: Store, run_at, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.root, folder)
    store = Store(str(folder))
    gone = documents_of(opened(folder))[7]["doc_id"]
    assert take_down(folder, doc=[gone.hex()]) == 0
    after = read_run(store).tables
    run_at(2, SETTINGS, folder)
    assert read_run(store).tables == after
    with pytest.raises(ContractError, match="documents: expected unchanged settings after the takedowns"):
        run_at(2, [*SETTINGS, 'language.languages=["de"]'], folder)
    run_at(2, [*SETTINGS, "tokens.seed=5"], folder)  # a later step reads the current tables
    left = {row["doc_id"] for row in documents_of(opened(folder))}
    assert gone not in left
    assert len(left) == len({row["doc_id"] for row in documents_of(opened(Path(run.root)))}) - 1


def test_a_rerun_completes_if_near_copies_of_a_removed_document_are_left(run: Store, run_at, tmp_path: Path) -> None:
    """The table `clusters` is not made again, and names removed documents as those that others were joined with."""
    folder = tmp_path / "run"
    shutil.copytree(run.root, folder)
    leaders = {row["leader"] for row in rows_of(folder, "clusters")} - {None}
    assert take_down(folder, doc=sorted(leader.hex() for leader in leaders)) == 0
    run_at(2, [*SETTINGS, "quality.min_words=60"], folder)
    assert {*read_run(Store(str(folder))).tables} == {*read_run(run).tables}
    (certificate,) = certificates(folder)
    checked = check_certificate(Store(str(folder)), certificate)
    assert (checked.problems, len([note for note in checked.notes if "has other settings" in note]) > 1) == ([], True)
    figures = open_table(Store(str(folder)), "audit")[1].content.figures
    assert figures["not_compared"]["without_text"] > 0
    assert figures["precision"]["joined"]["not_compared"] > 0
    assert not leaders & {row["doc_id"] for row in documents_of(opened(folder))}


GERMAN = 'language.languages=["de"]'


@pytest.mark.parametrize("keep_old", [False, True])
def test_versions_of_other_settings_bring_nothing_back(run: Store, run_at, tmp_path: Path, keep_old: bool) -> None:
    """The folder has versions of `dedup` and later tables of two settings, and of `documents` of two languages."""
    folder = tmp_path / "run"
    shutil.copytree(run.root, folder)
    run_at(2, [*SETTINGS, GERMAN], folder, until="documents")
    run_at(2, SETTINGS, folder)
    gone = documents_of(opened(folder))[7]["doc_id"]
    assert take_down(folder, doc=[gone.hex()], keep_old=keep_old) == 0
    with pytest.raises(ContractError, match="documents: expected unchanged settings after the takedowns"):
        run_at(2, [*SETTINGS, GERMAN], folder)
    run_at(2, [], folder)  # the settings with which the tables of the shared run were made
    for table in ("verdicts", "clusters", "dedup", "clean"):
        assert gone not in {row["doc_id"] for row in rows_of(folder, table)}
    assert gone not in {row["doc_id"] for row in documents_of(opened(folder))}


def test_tables_of_another_run_bring_nothing_back(finished: Store, run_at, tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(finished.root, folder)
    gone = documents_of(opened(folder))[7]["doc_id"]
    tables = json.loads((folder / "run.json").read_text())
    for name in ("tokens", "tokenizer"):  # the run has not come so far
        shutil.rmtree(folder / name)
        del tables["tables"][name]
    (folder / "run.json").write_text(json.dumps(tables))
    assert take_down(folder, doc=[gone.hex()]) == 0
    run_at(2, [], folder, reuse=(finished,))
    assert gone not in {row["doc_id"] for row in documents_of(opened(folder))}
    run_at(2, [GERMAN], other, until="documents")
    with pytest.raises(ContractError, match="expected a table without the documents that takedown"):
        run_at(2, [GERMAN], folder, reuse=(Store(str(other)),), until="documents")


@contextmanager
def stopped_before_commit(step: str) -> Iterator[None]:
    """Interrupt a run when it has written all parts of a step, and no manifest of it."""

    def stop(run: Run, written: Step, *rest: Any) -> None:
        if written.name == step:
            raise KeyboardInterrupt
        commit(run, written, *rest)

    with mock.patch("pipeline.run.commit", stop), pytest.raises(KeyboardInterrupt):
        yield


def gone_everywhere(folder: Path, gone: bytes) -> bool:
    """Return True if no document, text or token of a removed document is in the current tables of its later steps."""
    later = ("verdicts", "clusters", "dedup", "clean")
    rows = {row["doc_id"] for table in later for row in rows_of(folder, table)}
    return gone not in rows | {row["doc_id"] for row in documents_of(opened(folder))}


@pytest.mark.parametrize("keep_old", [False, True])
@pytest.mark.parametrize("step", ["clean", "tokens"])
def test_parts_of_an_interrupted_step_bring_nothing_back(
    run: Store, run_at, tmp_path: Path, step: str, keep_old: bool
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.root, folder)
    changed = [*SETTINGS, 'pii.types=["email"]' if step == "clean" else "tokens.seed=5"]
    gone = documents_of(opened(folder))[7]["doc_id"]
    with stopped_before_commit(step):
        run_at(2, changed, folder)
    results = (f"{step}/*/parts/part-*.json", f"{FOLDER}/{step}/*.json")
    assert [path for pattern in results for path in folder.glob(pattern)]
    assert take_down(folder, doc=[gone.hex()], keep_old=keep_old) == 0
    assert [path for pattern in results for path in folder.glob(pattern)] == []
    run_at(2, changed, folder)
    assert gone_everywhere(folder, gone)


@pytest.mark.parametrize("step", ["clusters", "clean"])
def test_parts_of_a_run_on_the_tables_of_another_bring_nothing_back(
    finished: Store, run_at, tmp_path: Path, step: str
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(finished.root, first)
    changed = ['pii.types=["email"]' if step == "clean" else "dedup.threshold=0.6"]
    gone = documents_of(opened(first))[7]["doc_id"]
    with stopped_before_commit(step):
        run_at(2, changed, second, reuse=(Store(str(first)),))
    assert take_down(first, doc=[gone.hex()]) == 0
    run_at(2, changed, second, reuse=(Store(str(first)),))
    assert gone_everywhere(second, gone)


def test_tables_made_from_those_of_another_run_before_its_takedown_are_not_used(
    finished: Store, run_at, tmp_path: Path
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    shutil.copytree(finished.root, first)
    changed = ['pii.types=["email"]']
    run_at(2, changed, second, reuse=(Store(str(first)),))
    gone = documents_of(opened(second))[7]["doc_id"]
    assert take_down(first, doc=[gone.hex()]) == 0
    run_at(2, [*changed, "tokens.seed=5"], third, reuse=(Store(str(second)),))
    assert gone_everywhere(third, gone)
    with pytest.raises(
        ContractError, match="expected a version without the documents that a takedown removed"
    ) as error:
        run_at(2, changed, second)
    shutil.rmtree(str(error.value).partition(": ")[0])
    run_at(2, changed, second)
    assert gone_everywhere(second, gone)


def test_a_repair_names_the_takedown_that_has_rewritten_a_damaged_file(
    run: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so before it builds anything."""
    folder = tmp_path / "run"
    shutil.copytree(run.root, folder)
    gone = documents_of(opened(folder))[7]["doc_id"]
    assert take_down(folder, doc=[gone.hex()]) == 0
    (certificate,) = certificates(folder)
    table, manifest = open_table(Store(str(folder)), "text")
    (change,) = certificate.tables["text"].rewritten
    path = manifest.paths[change.key]
    flip_byte(table.path(path))
    before = read_run(Store(str(folder))).tables
    assert penstock(["repair", str(folder)]) == 2
    assert (
        f"{table.uri}/{path}: expected a file that its step can build again, got one from which takedown "
        f"{certificate.id} has removed documents. Restore it from a backup that is newer than the takedown."
        in capsys.readouterr().err
    )
    assert read_run(Store(str(folder))).tables == before
    flip_byte(table.path(path))
    assert penstock(["repair", str(folder), "--dry-run"]) == 0
