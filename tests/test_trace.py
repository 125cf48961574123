"""Tests of the trace: what a step was made of, and which steps saw a document, agree in both directions."""

import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_dataset import make_tiny_dataset
from tiny_stages import batches_of, staged

from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train import trace
from train.config.train import TrainConfig
from train.data.batches import Batches
from train.data.packing import write_packing
from train.data.skips import STAGE_BITS, SkipList, append_to_skip_list, read_skip_list
from train.rows import IGNORED
from train.trace import Appearance, Trace, documents_of_step, print_documents, print_steps, steps_of_url

SECOND = 1 << STAGE_BITS
SKIP = SkipList((0, 17, 18, 77, SECOND + 2, SECOND + 3))
STREAM = staged([{"tokens": 64 * 7 * 13}, {"seq_len": 128, "global_batch": 3}], steps=40)
CASES = {
    "one stage": TrainConfig(seq_len=64, steps=25),
    "stages": STREAM,
    "shorter rows": staged([{"tokens": 256 * 5, "seq_len": 256, "global_batch": 1}, {"seq_len": 32}], steps=60),
    "best_fit": staged([{"tokens": 64 * 7 * 9}, {"global_batch": 5}], packing="best_fit", steps=30),
    "mlm": STREAM.model_copy(update={"objective": "mlm"}),
}


def made(folder: Path) -> Store:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_dataset, "BATCH_DOCUMENTS", 4)
        return make_tiny_dataset(folder, {"web": 40, "books": 12}, shard_tokens=1500)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run of several shards of several record batches."""
    return made(tmp_path_factory.mktemp("run"))


def all_rows(run: Store) -> list[dict[str, Any]]:
    """The document index of every shard, with stream."""
    dataset = open_dataset(run)
    rows = []
    for stream, shards in dataset.streams.items():
        for shard in shards:
            with tiny_dataset.pa.ipc.open_file(dataset.folder.path(shard.docs_path)) as reader:
                rows += [row | {"stream": stream} for row in reader.read_all().to_pylist()]
    return rows


def tokens_of(dataset: Dataset) -> dict[str, list[int]]:
    """The tokens of every document."""
    documents = {}
    for shards in dataset.streams.values():
        for shard in shards:
            with tiny_dataset.pa.ipc.open_file(dataset.folder.path(shard.path)) as reader:
                documents |= {row["doc_id"].hex(): row["tokens"] for row in reader.read_all().to_pylist()}
    return documents


def opened(run: Store, config: TrainConfig, skip: SkipList = SKIP) -> tuple[Batches, Trace]:
    """Batches and trace under these settings; samples of stages that do not exist are not skipped."""
    last = max(1, len(config.stages)) << STAGE_BITS
    skip = SkipList(tuple(index for index in skip.indices if index < last))
    write_packing(run, open_dataset(run), config)
    batches = batches_of(open_dataset(run), config, 7, skip, run)
    return batches, Trace(open_dataset(run), batches.order, config.objective == "causal")


@pytest.mark.parametrize("case", CASES)
def test_the_parts_of_a_row_are_the_tokens_the_trainer_reads(run: Store, case: str) -> None:
    batches, traced = opened(run, CASES[case])
    documents, causal = tokens_of(open_dataset(run)), CASES[case].objective == "causal"
    plain = batches_of(
        open_dataset(run), CASES[case].model_copy(update={"objective": "causal"}), 7, batches.order.skip, run
    )
    for step in range(1, traced.num_steps + 1):
        parts, samples, rows = traced.documents_of_step(step), batches.samples(step - 1), plain.batch(step - 1)
        inputs, targets = rows.inputs_BT.tolist(), rows.targets_BT.tolist()
        for row in range(len(samples.index)):
            mine = [part for part in parts if part.row == row]
            assert {part.sample for part in mine} == {int(samples.index[row])}
            for number in {part.piece for part in mine}:
                own = [part for part in mine if part.piece == number]
                tokens = [token for part in own for token in documents[part.doc_id][part.doc_start : part.doc_stop]]
                first, length = own[0].row_start, own[-1].row_stop - own[0].row_start
                assert [part.row_start for part in own] == [first, *(part.row_stop for part in own[:-1])]
                pieces = samples.pieces
                which = (pieces.row == row) & (pieces.column == first)
                behind = length - int(pieces.length[which][0])
                assert behind == (0 if not causal or pieces.closed[which][0] else 1)
                stop = first + length - behind
                assert tokens[: length - behind] == inputs[row][first:stop]
                if behind:
                    assert tokens[-1] == targets[row][stop - 1]
                elif causal:
                    assert targets[row][stop - 1] == IGNORED
            covered = {place for part in mine for place in range(part.row_start, part.row_stop)}
            filled = int(samples.pieces.length[samples.pieces.row == row].sum())
            assert set(range(filled)) <= covered <= set(range(filled + 1))
    skipped = {part.sample for step in range(traced.num_steps) for part in traced.documents_of_step(step + 1)}
    assert skipped.isdisjoint(batches.order.skip.indices)


def round_trip(run: Store, traced: Trace) -> list[Appearance]:
    """Every appearance, once both directions have been seen to agree."""
    forwards = [part for step in range(traced.num_steps) for part in traced.documents_of_step(step + 1)]
    backwards = []
    for url in {row["url"] for row in all_rows(run)}:
        for document in traced.steps_of_url(url):
            assert document.url == url
            order = [(part.step, part.row, part.piece) for part in document.appearances]
            assert order == sorted(order)
            backwards += document.appearances
    key = lambda part: (part.step, part.row, part.piece, part.row_start)  # noqa: E731
    assert sorted(backwards, key=key) == sorted(forwards, key=key)
    return forwards


@pytest.mark.parametrize("case", CASES)
def test_round_trip_for_every_document(run: Store, case: str) -> None:
    parts = round_trip(run, opened(run, CASES[case])[1])
    assert max(part.epoch for part in parts) >= 1
    assert (max(part.piece for part in parts) > 0) == (case not in ("one stage", "shorter rows"))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_round_trip_under_any_stages(data: st.DataObject) -> None:
    packing = data.draw(st.sampled_from(["stream", "stream", "best_fit"]))
    stages, lengths = [], [64] if packing == "best_fit" else [32, 64, 128, 256]
    for _ in range(data.draw(st.integers(1, 4))):
        length, batch = data.draw(st.sampled_from(lengths)), data.draw(st.integers(1, 9))
        web = data.draw(st.integers(0, 5))
        weights = {"web": web, "books": data.draw(st.integers(0 if web else 1, 3))}
        tokens = length * batch * data.draw(st.integers(1, 9))
        stages.append({"seq_len": length, "global_batch": batch, "weights": weights, "tokens": tokens})
    indices = st.tuples(st.integers(0, len(stages) - 1), st.integers(0, 30))
    skip = SkipList(tuple((stage << STAGE_BITS) + i for stage, i in data.draw(st.lists(indices, max_size=4))))
    with tempfile.TemporaryDirectory() as folder:
        run = made(Path(folder))
        round_trip(run, opened(run, staged(stages, packing=packing, seed=data.draw(st.integers(0, 9))), skip)[1])


def test_provenance_is_that_of_the_document_index(run: Store) -> None:
    rows = {row["doc_id"].hex(): row for row in all_rows(run)}
    for part in opened(run, CASES["stages"])[1].documents_of_step(3):
        row = rows[part.doc_id]
        assert (part.url, part.split, part.offset, part.length, part.source) == tuple(
            row[name] for name in ("url", "split", "offset", "length", "source")
        )


def test_a_url_with_two_documents_and_a_heldout_one(run: Store) -> None:
    traced, rows = opened(run, CASES["one stage"])[1], all_rows(run)
    urls = [row["url"] for row in rows]
    shared = next(url for url in urls if urls.count(url) == 2)
    assert {found.doc_id for found in traced.steps_of_url(shared)} == {
        row["doc_id"].hex() for row in rows if row["url"] == shared
    }
    held = next(row for row in rows if row["stream"] == "web/heldout" and urls.count(row["url"]) == 1)
    (found,) = traced.steps_of_url(held["url"])
    assert (found.stream, found.appearances) == ("web/heldout", [])
    assert "in no step of the plan" in print_steps([found])


@pytest.mark.parametrize("url", ["http://www.site1.co.uk/none", "http://[broken", "no url", "http://1.2.3.4./x"])
def test_an_unknown_url_gives_nothing(run: Store, url: str) -> None:
    assert opened(run, CASES["one stage"])[1].steps_of_url(url) == []
    assert "no document has this URL" in print_steps([])


@pytest.mark.parametrize("step", [0, 26])
def test_steps_outside_the_plan_are_refused(run: Store, step: int) -> None:
    with pytest.raises(ConfigError, match=f"promised 1 to 25, the steps of the plan, found {step}"):
        opened(run, CASES["one stage"])[1].documents_of_step(step)


def test_a_source_that_is_left_out_is_in_no_step(run: Store) -> None:
    traced = opened(run, TrainConfig(seq_len=64, weights={"web": 1, "books": 0}, steps=9))[1]
    assert {part.source for part in traced.documents_of_step(1)} == {"web"}
    books = [row["url"] for row in all_rows(run) if row["stream"] == "books/train"]
    assert all(not found.appearances for url in books for found in traced.steps_of_url(url))


@pytest.mark.parametrize("case", ["stages", "best_fit"])
def test_a_run_is_traced_by_its_plan(run: Store, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    append_to_skip_list(run, f"{case}.txt", [3, SECOND], "test")
    config = CASES[case].model_copy(update={"skip_file": f"{case}.txt"})
    batches, traced = opened(run, config, read_skip_list(run, f"{case}.txt"))
    plan = SimpleNamespace(
        settings=SimpleNamespace(train=config), stages=batches.order.stages, order=batches.order.digest
    )
    monkeypatch.setattr(trace, "read_plan", lambda run, dataset: plan)
    found = documents_of_step(run, 20)
    assert found == traced.documents_of_step(20)
    assert steps_of_url(run, found[0].url) == traced.steps_of_url(found[0].url)
    plan.order = "0" * 64
    with pytest.raises(
        ContractError, match=f"order 000000000000, this version orders the samples as {batches.order.digest[:12]}"
    ):
        documents_of_step(run, 1)


def test_printed_tables_show_places_and_no_control_characters(run: Store) -> None:
    traced = opened(run, CASES["one stage"])[1]
    part = traced.documents_of_step(2)[0]
    text = print_documents([replace(part, url="http://x/\x1b[31m\n")])
    assert "http://x/\ufffd[31m\ufffd" in text
    assert "\x1b" not in text
    assert f"{part.split}@{part.offset}+{part.length}" in text
    printed = print_steps(traced.steps_of_url(part.url))
    assert f"[{part.doc_start}, {part.doc_stop})" in printed
    assert part.doc_id[:12] in printed
