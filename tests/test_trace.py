"""Tests of the trace: what a step was made of, and which steps saw a document, agree in both directions."""

from pathlib import Path

import pytest
import tiny_dataset
from tiny_dataset import make_tiny_dataset

from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from schemas.tokens import open_dataset
from train.config import PlanConfig, TrainConfig
from train.data import open_batches
from train.plan import make_plan, read_plan, write_plan
from train.skips import append_to_skip_list, read_skip_list
from train.trace import Appearance, documents_of_step, print_documents, print_steps, steps_of_url

SKIPPED = (0, 17, 18, 77)


def all_rows(run: Store) -> list[dict]:
    """The document index of every shard, with stream."""
    dataset = open_dataset(run)
    rows = []
    for stream, shards in dataset.streams.items():
        for shard in shards:
            with tiny_dataset.pa.ipc.open_file(dataset.folder.path(shard.docs_path)) as reader:
                rows += [row | {"stream": stream} for row in reader.read_all().to_pylist()]
    return rows


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A planned run of almost two epochs, with skipped samples, shards of several record batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_dataset, "BATCH_DOCUMENTS", 4)
        run = make_tiny_dataset(tmp_path_factory.mktemp("run"), {"web": 40, "books": 12}, shard_tokens=1500)
    append_to_skip_list(run, "skip.txt", list(SKIPPED), "test")
    train = TrainConfig(seq_len=64, global_batch=7, steps=25, skip_file="skip.txt")
    write_plan(run, make_plan(open_dataset(run), PlanConfig(), train))
    return run


@pytest.fixture(scope="module")
def by_step(run: Store) -> dict[int, list[Appearance]]:
    return {step: documents_of_step(run, step) for step in range(1, 26)}


def test_the_parts_of_a_row_are_the_tokens_the_trainer_reads(run: Store, by_step: dict[int, list[Appearance]]) -> None:
    dataset, plan = open_dataset(run), read_plan(run)
    batches = open_batches(dataset, plan.train_config, 7, read_skip_list(run, "skip.txt"))
    documents = {}
    for shards in dataset.streams.values():
        for shard in shards:
            with tiny_dataset.pa.ipc.open_file(dataset.folder.path(shard.path)) as reader:
                documents |= {row["doc_id"].hex(): row["tokens"] for row in reader.read_all().to_pylist()}
    for step, parts in by_step.items():
        batch, samples = batches.batch(step - 1).tolist(), batches.samples(step - 1)
        for row in range(7):
            mine = [part for part in parts if part.row == row]
            tokens = [token for part in mine for token in documents[part.doc_id][part.doc_start : part.doc_stop]]
            assert tokens == batch[row]
            assert [part.row_start for part in mine] == [0, *(part.row_stop for part in mine[:-1])]
            assert {part.sample for part in mine} == {samples.index[row]}
    assert {part.sample for parts in by_step.values() for part in parts}.isdisjoint(SKIPPED)


def test_round_trip_for_every_document(run: Store, by_step: dict[int, list[Appearance]]) -> None:
    rows = all_rows(run)
    forwards = {(part.step, part.row, part.doc_id): part for parts in by_step.values() for part in parts}
    backwards = {}
    for url in {row["url"] for row in rows}:
        for document in steps_of_url(run, url):
            assert document.url == url
            backwards |= {(part.step, part.row, part.doc_id): part for part in document.appearances}
            order = [(part.step, part.row) for part in document.appearances]
            assert order == sorted(order)
    assert backwards == forwards
    assert max(part.epoch for part in forwards.values()) == 1


def test_provenance_is_that_of_the_document_index(run: Store, by_step: dict[int, list[Appearance]]) -> None:
    rows = {row["doc_id"].hex(): row for row in all_rows(run)}
    for part in by_step[3]:
        row = rows[part.doc_id]
        assert (part.url, part.split, part.offset, part.length) == (
            row["url"],
            row["split"],
            row["offset"],
            row["length"],
        )
        assert part.source == row["source"]


def test_a_url_with_two_documents_and_a_heldout_one(run: Store) -> None:
    rows = all_rows(run)
    urls = [row["url"] for row in rows]
    shared = next(url for url in urls if urls.count(url) == 2)
    assert {found.doc_id for found in steps_of_url(run, shared)} == {
        r["doc_id"].hex() for r in rows if r["url"] == shared
    }
    held = next(row for row in rows if row["stream"] == "web/heldout" and urls.count(row["url"]) == 1)
    (found,) = steps_of_url(run, held["url"])
    assert (found.stream, found.appearances) == ("web/heldout", [])
    assert "in no step of the plan" in print_steps([found])


@pytest.mark.parametrize("url", ["http://www.site1.co.uk/none", "http://[broken", "no url", "http://1.2.3.4./x"])
def test_an_unknown_url_gives_nothing(run: Store, url: str) -> None:
    assert steps_of_url(run, url) == []
    assert "no document has this URL" in print_steps([])


@pytest.mark.parametrize("step", [0, 26])
def test_steps_outside_the_plan_are_refused(run: Store, step: int) -> None:
    with pytest.raises(ConfigError, match=f"promised 1 to 25, the steps of the plan, found {step}"):
        documents_of_step(run, step)


def test_a_source_that_is_left_out_is_in_no_step(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path, {"web": 20, "books": 10})
    train = TrainConfig(seq_len=64, weights={"web": 1, "books": 0})
    write_plan(run, make_plan(open_dataset(run), PlanConfig(), train))
    assert {part.source for part in documents_of_step(run, 1)} == {"web"}
    books = [row["url"] for row in all_rows(run) if row["stream"] == "books/train"]
    assert all(not found.appearances for url in books for found in steps_of_url(run, url))


def test_a_plan_with_another_order_is_refused(run: Store, tmp_path: Path) -> None:
    other = make_tiny_dataset(tmp_path, {"web": 20})
    plan = make_plan(open_dataset(other), PlanConfig(), TrainConfig(seq_len=64))
    write_plan(other, plan.model_copy(update={"order": "0" * 64}))
    with pytest.raises(
        ContractError, match=f"order 000000000000, this version orders the samples as {plan.order[:12]}"
    ):
        documents_of_step(other, 1)


def test_printed_tables_show_places_and_no_control_characters(run: Store, by_step: dict[int, list[Appearance]]) -> None:
    part = by_step[2][0]
    text = print_documents([part.__class__(**(part.__dict__ | {"url": "http://x/\x1b[31m\n"}))])
    assert "http://x/\ufffd[31m\ufffd" in text
    assert "\x1b" not in text
    assert f"{part.split}@{part.offset}+{part.length}" in text
    printed = print_steps(steps_of_url(run, part.url))
    assert f"[{part.doc_start}, {part.doc_stop})" in printed
    assert part.doc_id[:12] in printed
