"""The documents pass without Spark: a retry in a child gives the same bytes, a record that kills it is named."""

import gzip
import multiprocessing
import os
import random
import signal
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.recipe import read_recipe
from pipeline.demo_crawl.build import build_demo_crawl
from pipeline.engine import guard, isolation
from pipeline.engine.isolation import Sandbox
from pipeline.engine.stage import Drop
from pipeline.engine.worker import run_rows
from pipeline.extract import extract as extract_stage
from pipeline.extract import extractors
from pipeline.extract.blocks import MAX_TAGS
from pipeline.extract.page_limits import MAX_OPTIONS
from pipeline.models import ModelsConfig, ensure_model
from pipeline.sources.config import SourceConfig
from pipeline.sources.splits import find_splits
from pipeline.stages import MEASURED, SOURCE
from pipeline.steps import documents
from pipeline.steps.documents import PLAIN_NAME, DocumentsTask, documents_part
from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from tests.support.paths import ROOT
from tests.support.tiny_archive import record

pytestmark = pytest.mark.slow
RECIPE = ROOT / "jobs" / "recipes" / "demo.toml"


@pytest.fixture(scope="module")
def crawl(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("crawl")
    build_demo_crawl(folder, pages=100, seed=5)
    return folder


def make_task(crawl: Path, out: Path, *overrides: str) -> DocumentsTask:
    recipe = read_recipe(str(RECIPE), [f'source.paths=["{crawl}/*.warc.gz"]', *overrides])
    try:
        models = {
            stage.name: {
                name: str(ensure_model(p, ModelsConfig()).path) for name, p in stage.models(recipe[stage.name]).items()
            }
            for stage in MEASURED
        }
    except ConfigError as error:
        pytest.skip(str(error))
    split = find_splits(recipe.section("source", SourceConfig))[0]
    return DocumentsTask((split,), SOURCE, MEASURED, recipe, models, Store(f"{out}/documents"), Store(f"{out}/text"))


def test_a_retry_in_a_child_gives_the_same_bytes_and_a_finished_part_is_not_done_again(crawl, tmp_path):
    first = documents_part(make_task(crawl, tmp_path / "a"), False)
    retried = documents_part(make_task(crawl, tmp_path / "b"), True)
    for table in ("documents", "text"):
        assert first.files[table].sha256 == retried.files[table].sha256
    assert first.counts == retried.counts
    assert documents_part(make_task(crawl, tmp_path / "a"), False) == first


def test_a_child_that_is_killed_from_outside_while_a_retried_part_runs_changes_no_byte(crawl, tmp_path, monkeypatch):
    monkeypatch.setattr(isolation, "PAUSE_SECONDS", 0.01)
    first = documents_part(make_task(crawl, tmp_path / "a"), False)
    stop, moments, killed = threading.Event(), random.Random(3), []

    def kill_at_random() -> None:
        while not stop.wait(moments.uniform(0.1, 1.5)) and len(killed) < isolation.MAX_SIGNALS - 1:
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGKILL)
                killed.append(child.pid)

    killer = threading.Thread(target=kill_at_random)
    killer.start()
    try:
        retried = documents_part(make_task(crawl, tmp_path / "b"), True)
    finally:
        stop.set()
        killer.join()
    assert retried.ends["signal"] > 0
    for table in ("documents", "text"):
        assert first.files[table].sha256 == retried.files[table].sha256
    assert retried.counts.dropped["extract/crashed"] == 0


def test_a_page_that_kills_its_worker_is_the_only_one_dropped_and_the_only_one_isolated(crawl, tmp_path, monkeypatch):
    whole = documents_part(make_task(crawl, tmp_path / "whole"), False)
    page = pq.read_table(tmp_path / "whole/documents" / whole.files["documents"].path).to_pylist()[20]["doc_id"]
    stages, here = documents.document_stages, []

    def deadly(*arguments):
        measure = stages(*arguments)

        def call(row):
            if row["doc_id"] == page:
                os.kill(os.getpid(), signal.SIGABRT)
            here.append(os.getpid())
            return measure(row)

        return call

    monkeypatch.setattr(documents, "document_stages", deadly)
    worker = multiprocessing.get_context("fork").Process(
        target=documents_part, args=(make_task(crawl, tmp_path / "noted"), False)
    )
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGABRT
    monkeypatch.setattr(guard, "WAIT_SECONDS", 120)  # this machine may be busy
    noted = documents_part(make_task(crawl, tmp_path / "noted"), True)
    monkeypatch.setattr(guard, "WAIT_SECONDS", 0)
    assert {*here} == {os.getpid()}
    assert noted.ends == {"worker": 1, "died": 2}
    isolated = documents_part(make_task(crawl, tmp_path / "isolated"), True)
    for table in ("documents", "text"):
        assert noted.files[table].sha256 == isolated.files[table].sha256
    assert noted.counts == isolated.counts
    assert noted.counts.dropped["extract/crashed"] == 1
    rows = pq.read_table(tmp_path / "noted/documents" / noted.files["documents"].path).to_pylist()
    assert [row["doc_id"] for row in rows if row["drop_rule"] == "crashed"] == [page]


def test_pages_that_were_not_read_whole_and_errors_of_extractors_are_counted(tmp_path, monkeypatch):
    score = extractors.score_blocks

    def fails(blocks, *more):
        if b"broken" in blocks.html:
            raise KeyError("no such feature")
        return score(blocks, *more)

    monkeypatch.setattr(extractors, "score_blocks", fails)
    sentence = "<p>The penstock carries water from the reservoir down to the turbine, and its gate can be closed."
    pages = [
        sentence * 9,
        sentence * 9 + "<p>and" * MAX_TAGS,
        f"<select>{'<option>a' * (MAX_OPTIONS + 1)}</select>{sentence * 9}",
        f"<article>{sentence * 9} broken</article>",
    ]
    blocks = [b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + page.encode() for page in pages]
    (tmp_path / "a.warc.gz").write_bytes(b"".join(gzip.compress(record(block)) for block in blocks))
    part = documents_part(make_task(tmp_path, tmp_path / "out", 'extract.extractor="penstock"'), False)
    assert part.figures["limited_pages"] == {"tags": 1, "options": 1}
    assert part.figures["extractor_errors"] == {"penstock/KeyError": 1}
    assert part.figures["second_opinions"]["error/used"] == 1


@pytest.mark.parametrize("extractors", ["extractor='resiliparse'", "union=['resiliparse', 'all']"])
def test_pages_in_other_languages_are_dropped_before_their_extraction(tmp_path, monkeypatch, extractors):
    extracted, extract = [], extract_stage.decode

    def noted(payload, charset):
        extracted.append(payload)
        return extract(payload, charset)

    monkeypatch.setattr(extract_stage, "decode", noted)
    english = "<p>The penstock carries water from the reservoir down to the turbine, and its gate can be closed."
    german = "<p>Das Druckrohr leitet das Wasser vom Speicher zur Turbine hinab, und sein Schieber ist verschließbar."
    pages = [english * 9, german * 9, german * 2]
    blocks = [b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + page.encode() for page in pages]
    (tmp_path / "a.warc.gz").write_bytes(b"".join(gzip.compress(record(block)) for block in blocks))
    settings = (f"extract.{extractors}", "language.languages=['en']")
    rows = {}
    for early in (False, True):
        task = make_task(tmp_path, tmp_path / str(early), *settings, f"language.early={early}".lower())
        part = documents_part(task, False)
        assert part.counts.dropped["language/language_not_wanted"] == 2
        assert part.figures.get("dropped_early") == ({"de": 1} if early else None)
        rows[early] = pq.read_table(task.documents.path(part.files["documents"].path)).to_pylist()
        assert part.cpu["language"]["rows"] == 3
    assert rows[True][::2] == rows[False][::2]
    dropped = rows[True][1]
    assert (dropped["language"], dropped["drop_stage"], dropped["num_chars"]) == ("de", "language", None)
    assert dropped["drop_value"] == dropped["language_score"] > 0.9
    assert len(extracted) == 3 + 1 * (extractors[0] == "u")


def test_text_of_dropped_documents_is_kept_sampled_or_left_out(crawl, tmp_path):
    texts = {}
    for choice in ("keep", "sample", "leave_out"):
        task = make_task(
            crawl, tmp_path / choice, f"text.dropped={choice}", "text.sample_share=0.3", 'language.languages=["de"]'
        )
        files = documents_part(task, False).files
        rows = pq.read_table(task.text.path(files["text"].path)).to_pylist()
        verdict = pq.read_table(task.documents.path(files["documents"].path)).to_pylist()
        assert [row["doc_id"] for row in rows] == [row["doc_id"] for row in verdict]
        texts[choice] = [bool(r["text"]) for r, v in zip(rows, verdict) if v["drop_stage"] and v["num_chars"]]
    assert all(texts["keep"])
    assert not any(texts["leave_out"])
    assert 0 < sum(texts["sample"]) < len(texts["sample"])


def test_a_record_that_kills_the_worker_is_dropped_as_crashed_and_the_rest_is_read(monkeypatch):
    monkeypatch.setattr(isolation, "PAUSE_SECONDS", 0.01)

    def measure(row):
        if row["n"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return row | {"measured": True}

    rows = [({"n": 0}, None), ({"n": 1}, None), ({"n": 2}, Drop("empty_page")), ({"n": 3}, None)]
    sandbox = Sandbox(measure)
    found = [
        (row["n"], row.get("drop_rule"), row.get("measured")) for row in run_rows(rows, sandbox, ("source", "extract"))
    ]
    sandbox.close()
    assert found == [(0, None, True), (1, "crashed", None), (2, "empty_page", None), (3, None, True)]


def test_an_input_that_grows_while_it_is_read_is_refused(crawl, tmp_path, monkeypatch):
    task = make_task(crawl, tmp_path)
    other = tmp_path / "grown.warc.gz"
    other.write_bytes(Path(task.splits[0].uri).read_bytes() + b"\n\n")
    monkeypatch.setattr(documents, "open_stream", lambda split: _open(other))
    with pytest.raises(ContractError, match=f"expected {task.splits[0].size} bytes, got {task.splits[0].size + 2}"):
        documents_part(task, False)
    assert list((tmp_path / "documents").glob("*.parquet")) == []


def _open(path: Path):
    from pipeline.sources.splits import HashedStream

    return HashedStream(path.open("rb"))


def test_names_of_fields_that_may_be_personal_data_are_not_counted() -> None:
    plain = ["by", "dc:title", "created_at", "título", "score2024", "日付"]
    others = ["a@example.com", "of +4930901820", "+4930901820", "GB29NWBK60161331926819", "9.8.7.65", "5" * 9]
    others += ["x-2a02::1", "of/2a02::1", "http://example.com/jane", "a" * 101]
    assert [name for name in plain + others if PLAIN_NAME.fullmatch(name)] == plain
