"""Tests of the trace: what a step was made of, and which steps saw a document, agree in both directions."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError, ContractError
from schemas.ids import shuffle_key
from schemas.storage import Store
from schemas.takedown import REMOVED_ID
from schemas.tokens import Dataset, open_dataset
from tests.support import tiny_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_stages import batches_of, staged
from train.config.layout import LayoutConfig
from train.config.train import TrainConfig
from train.data.batches import Batches
from train.data.document_index import IndexFile
from train.data.packing import write_packing
from train.data.rows import IGNORED
from train.data.stages import STAGE_BITS, SkipList, append_to_skip_list, read_skip_list
from train.trace import Appearance, Trace, documents_of_step, steps_of_url
from train.trace import trace as trace_step
from train.trace.answer import print_documents, print_steps
from train.trace.layouts import StepLayout
from train.trace.trace import exposure_of

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
                more = length - int(pieces.length[which][0])
                assert more == (0 if not causal or pieces.closed[which][0] else 1)
                stop = first + length - more
                assert tokens[: length - more] == inputs[row][first:stop]
                if more:
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
    assert print_steps([found]).splitlines() == [print_steps([found])]


@pytest.mark.parametrize("url", ["http://www.site1.co.uk/none", "http://[broken", "no url", "http://1.2.3.4./x"])
def test_an_unknown_url_gives_nothing(run: Store, url: str) -> None:
    assert opened(run, CASES["one stage"])[1].steps_of_url(url) == []
    assert "no document of the dataset has this URL" in print_steps([])


@pytest.mark.parametrize("changed", [{"shard": 99}, {"shard": -1}, {"stream": "other/train"}])
def test_an_index_by_url_that_names_no_shard_is_refused(
    run: Store, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    """As a stranger's dataset may have, with fitted digests."""
    traced, url = opened(run, CASES["one stage"])[1], all_rows(run)[0]["url"]
    read = IndexFile.rows_between

    def wrong(*arguments: Any) -> Iterator[tuple[pa.RecordBatch, int, int]]:
        for batch, first, stop in read(*arguments):
            rows = [row | changed for row in batch.to_pylist()]
            yield pa.RecordBatch.from_pylist(rows, schema=batch.schema) if "shard" in rows[0] else batch, first, stop

    monkeypatch.setattr(IndexFile, "rows_between", wrong)
    with pytest.raises(ContractError, match="expected shards of the dataset in the index by URL, got shard"):
        traced.steps_of_url(url)


@pytest.mark.parametrize("step", [0, 26])
def test_steps_outside_the_plan_are_refused(run: Store, step: int) -> None:
    with pytest.raises(ConfigError, match=f"expected 1 to 25, the steps of the plan, got {step}"):
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
    monkeypatch.setattr(trace_step, "read_plan", lambda run, dataset: plan)
    found = documents_of_step(run, 20)
    assert found == traced.documents_of_step(20)
    assert steps_of_url(run, found[0].url) == traced.steps_of_url(found[0].url)
    plan.order = "0" * 64
    with pytest.raises(ContractError, match=f"sample order with digest 000000000000, got {batches.order.digest[:12]}"):
        documents_of_step(run, 1)


def test_printed_tables_show_places_and_no_control_characters(run: Store) -> None:
    traced = opened(run, CASES["one stage"])[1]
    part = traced.documents_of_step(2)[0]
    text = print_documents([replace(part, url="http://x/\x1b[31m\n")])
    assert "http://x/\\x1b[31m\\n" in text
    assert "\x1b" not in text
    assert f"{part.split}@{part.offset}+{part.length}" in text
    printed = print_steps(traced.steps_of_url(part.url))
    assert f"[{part.doc_start}, {part.doc_stop})" in printed
    assert part.doc_id[:12] in printed


# ----------------------------------------------------------------------------------- by id, by host, by part of a batch


@pytest.mark.parametrize("case", CASES)
def test_every_document_is_found_by_its_id_in_the_steps_that_name_it(run: Store, case: str) -> None:
    traced = opened(run, CASES[case])[1]
    forwards: dict[str, list[Appearance]] = {}
    for step in range(1, traced.num_steps + 1):
        for part in traced.documents_of_step(step):
            forwards.setdefault(part.doc_id, []).append(part)
    for row in all_rows(run):
        (found,) = traced.steps_of_document(row["doc_id"])
        assert (found.stream, found.num_tokens, found.url) == (row["stream"], row["num_tokens"], row["url"])
        assert found.appearances == forwards.pop(row["doc_id"].hex(), [])
    assert forwards == {}
    assert traced.steps_of_document(b"\1" * 16) == []


@pytest.mark.parametrize("form", ["http://www.site3.co.uk/web/3?q=1", "https://site3.co.uk/web/3?q=1"])
def test_a_page_is_found_by_another_form_of_its_url(run: Store, form: str) -> None:
    traced = opened(run, CASES["one stage"])[1]
    assert [found.url for found in traced.steps_of_url(form)] == ["http://www.site3.co.uk/web/3?q=1"]


def test_a_domain_has_all_documents_of_its_hosts_and_no_others(run: Store) -> None:
    traced, rows = opened(run, CASES["one stage"])[1], all_rows(run)
    for domain in ("site1.co.uk", "site2.co.uk"):
        found = [document.doc_id for document in traced.steps_of_domain(domain)]
        assert len(found) > 4
        assert sorted(found) == sorted(row["doc_id"].hex() for row in rows if row["domain"] == domain)
    for none in ("site1.co.u", "ite1.co.uk", "uk", "nowhere.site1.co.uk", "site9.co.uk"):
        assert list(traced.steps_of_domain(none)) == []


def test_a_domain_that_is_in_no_list_of_suffixes_has_the_hosts_of_all_index_files(run: Store) -> None:
    """Each host below such a domain is a registrable domain of its own, so the index spreads them over its files."""
    traced, rows = opened(run, CASES["one stage"])[1], all_rows(run)
    found = [document.doc_id for document in traced.steps_of_domain("co.uk")]
    assert sorted(found) == sorted(row["doc_id"].hex() for row in rows)
    assert len(traced.documents._buckets) == len(open_dataset(run).by_url) == 4


@pytest.mark.parametrize("host", ["site1.co.uk", "www.site1.co.uk"])
def test_the_index_files_of_a_registrable_domain_suffice(run: Store, host: str) -> None:
    traced = opened(run, CASES["one stage"])[1]
    assert len(list(traced.steps_of_domain(host))) > 4
    names = (host, "site1.co.uk", "co.uk", "uk", "")
    assert {*traced.documents._buckets} == {shuffle_key(0, name.encode()) % 4 for name in names}
    assert len(traced.documents._buckets) < 4


@pytest.mark.parametrize("case", ["stages", "best_fit"])
def test_the_rows_of_a_part_of_a_batch(run: Store, case: str) -> None:
    traced = opened(run, CASES[case])[1]
    whole = traced.documents_of_step(4)
    for rows in (range(2, 5), range(0, 1), range(6, 7), range(3, 3)):
        assert traced.documents_of_step(4, rows) == [part for part in whole if part.row in rows]


def rewrite(run: Store, dataset: Dataset, number: int, removed: set[int]) -> set[str]:
    """Put the id of what was taken down over some rows of a shard's index; returns their ids."""
    path = dataset.folder.path(dataset.streams["web/train"][number].docs_path)
    with tiny_dataset.pa.ipc.open_file(path) as reader:
        table = reader.read_all()
    rows = table.to_pylist()
    gone = {row["doc_id"].hex() for place, row in enumerate(rows) if place in removed}
    rows = [row | {"doc_id": REMOVED_ID, "url": None} if i in removed else row for i, row in enumerate(rows)]
    with tiny_dataset.pa.OSFile(path, "wb") as sink, tiny_dataset.pa.ipc.new_file(sink, table.schema) as writer:
        for start in range(0, len(rows), 4):
            writer.write_batch(tiny_dataset.pa.RecordBatch.from_pylist(rows[start : start + 4], table.schema))
    return gone


@pytest.mark.parametrize("removed", [{0}, {3}, {4}, {0, 1, 2, 3}, {4, 5, 6, 7}, {1, 4}, set(range(99))])
@pytest.mark.parametrize("shard", [0, 1])
def test_what_was_taken_down_is_in_no_answer_and_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: set[int], shard: int
) -> None:
    monkeypatch.setattr(Store, "open_input", Store.open_unchecked)  # the manifest still names the former index
    run = made(tmp_path)
    before = opened(run, CASES["one stage"])[1].documents_of_step(7)
    ids = {row["doc_id"].hex() for row in all_rows(run)}
    gone = rewrite(run, open_dataset(run), shard, removed)
    traced = opened(run, CASES["one stage"])[1]
    found = {one for one in ids if traced.steps_of_document(bytes.fromhex(one))}
    assert (found, len(gone) > 0) == (ids - gone, True)
    assert traced.documents_of_step(7) == [part for part in before if part.doc_id not in gone]


# --------------------------------------------------------------------------------------------------- ranks, checkpoints

AXES = {"pipeline": 2, "replicate": 2, "shard": 3, "context": 1, "tensor": 2}


def layout(axes: dict[str, int], micro_batch: int) -> StepLayout:
    return StepLayout(axes, LayoutConfig(micro_batch=micro_batch), "a test")


def test_ranks_count_through_the_axes_the_last_one_fastest() -> None:
    one = layout(AXES, 2)
    assert one.ranks == 24
    # rank = ((pipeline * 2 + replicate) * 3 + shard) * 2 + tensor
    assert [one.data_rank(rank) for rank in range(12)] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [one.data_rank(rank) for rank in range(12, 24)] == [one.data_rank(rank) for rank in range(12)]


def test_micro_batches_of_all_ranks_are_the_batch() -> None:
    for axes in (AXES, dict.fromkeys(AXES, 1)):
        for num_rows in (5, 12, 13, 37):
            one = layout(axes, 2)
            firsts = {one.data_rank(rank): rank for rank in range(one.ranks)}
            most = -(-num_rows // len(firsts))
            number = -(-most // 2)
            rows = [row for rank in firsts.values() for m in range(number) for row in one.rows(num_rows, rank, m)]
            assert sorted(rows) == list(range(num_rows))
            assert [row for rank in firsts.values() for row in one.rows(num_rows, rank)] == list(range(num_rows))


@pytest.mark.parametrize(
    ("rank", "micro_batch", "message"),
    [
        (24, None, "--rank: expected 0 to 23, the ranks of a test, got 24"),
        (-1, None, "--rank: expected 0 to 23, the ranks of a test, got -1"),
        (0, 3, "--micro-batch: expected 0 to 1, the micro-batches of a rank in a test, got 3"),
        (0, -1, "--micro-batch: expected 0 to 1, the micro-batches of a rank in a test, got -1"),
    ],
)
def test_ranks_and_micro_batches_that_are_not_there(rank: int, micro_batch: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(AXES, 2).rows(13, rank, micro_batch)


@pytest.mark.parametrize(
    ("steps", "checkpoints", "expected"),
    [
        ([], [0, 5], (5, None, None, 5)),
        ([3, 9], [], (None, None, None, None)),
        ([3, 9], [1, 2], (2, None, None, 2)),
        ([3, 9], [2, 3, 5, 9], (9, 3, 9, 2)),
        ([3, 9], [3, 5], (5, 3, 5, None)),
        ([1], [0, 1], (1, 1, 1, 0)),
    ],
)
def test_a_checkpoint_saw_the_steps_up_to_its_own(
    run: Store, steps: list[int], checkpoints: list[int], expected: tuple[int | None, ...]
) -> None:
    part = opened(run, CASES["one stage"])[1].documents_of_step(1)[0]
    found = exposure_of([replace(part, step=step, epoch=step // 4) for step in (*steps, *steps)], checkpoints)
    assert found.steps == tuple(steps)
    assert found.epochs == tuple(sorted({step // 4 for step in steps}))
    assert (found.trained, found.first_checkpoint, found.last_checkpoint, found.last_clean) == expected
