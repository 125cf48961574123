"""Spikes: the loss of each document, the samples to skip to exclude a document, and runs that rewind and quarantine."""

import contextlib
import json
import math
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from pipeline.lineage.training import read_lineage
from schemas.errors import ContractError
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support import poisoned_runs, tiny_runs
from tests.support.poisoned_runs import POISON, STEPS, WATCHING, make_run
from tests.support.tiny_dataset import make_tiny_dataset, tiny_documents
from tests.support.tiny_runs import assert_same_bits, computed, copied, events, metrics, notes, state_at, trained
from tests.train.trace.test_trace import CASES, STREAM, opened, tokens_of
from train.config.train import GuardConfig
from train.data.rows import IGNORED
from train.data.stages import NO_SKIPS, STAGE_BITS, append_to_skip_list, read_skip_list
from train.monitor.events import EVENTS_NAME, Spike, SpikeDocument
from train.monitor.quarantine import QUARANTINE_NAME, quarantine, read_quarantine
from train.pretrain.log import TrainingLog, describe_spike
from train.pretrain.spikes import exclude_spike, samples_to_skip
from train.pretrain.step import Learner
from train.trace import Trace, open_trace

dist = pytest.mark.dist
DDP = "layout.data=ddp"
"""The layout of runs that are compared with no other one: its steps take two thirds of the time of sharded ones."""
OBJECTIVES = CASES | {
    "span": STREAM.model_copy(update={"objective": "span", "document_mask": False}),
}

# ------------------------------------------------------------------------------------------------- whose loss is whose


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run whose documents each repeat one word of their own, so that a target identifies its document."""
    numbers = iter(range(1000))

    def documents(source: str, number: int, contract: Any, seed: int, suffix: str) -> Iterator[dict[str, Any]]:
        for row in tiny_documents(source, number, contract, seed, suffix):
            word = len(contract.reserved) + next(numbers)
            yield row | {"tokens": [row["tokens"][0], *[word] * (row["num_tokens"] - 2), row["tokens"][-1]]}

    sources = {"web": 40, "books": 12}
    return make_tiny_dataset(tmp_path_factory.mktemp("constant"), sources, shard_tokens=1500, documents=documents)


@pytest.mark.parametrize("case", OBJECTIVES)
def test_every_loss_belongs_to_the_document_of_what_is_predicted(constant: Store, case: str) -> None:
    config, dataset = OBJECTIVES[case], open_dataset(constant)
    batches, trace = opened(constant, config)
    documents, contract = tokens_of(dataset), dataset.tokenizer
    words, seen = {tokens[1]: doc_id for doc_id, tokens in documents.items()}, set()
    sentinels = {contract.reserved[f"sentinel_{i}"] for i in range(100)}
    for step in range(1, trace.num_steps + 1):
        parts, rows = trace.documents_of_step(step), batches.batch(step - 1)
        places = [(part.row, part.piece, part.row_start, part.row_stop) for part in parts]
        groups = batches.groups(step - 1, range(len(rows)), places)
        assert groups.shape == rows.targets_BT.shape
        # Any rows of a step have the groups that they have among all.
        assert groups[2:4].equal(batches.groups(step - 1, range(2, min(4, len(rows))), places))
        for row, (line, targets) in enumerate(zip(groups.tolist(), rows.targets_BT.tolist(), strict=True)):
            actual: dict[int, list[int]] = {}
            for place, (group, target) in enumerate(zip(line, targets, strict=True)):
                if target == IGNORED:
                    continue
                assert parts[group].row == row
                if target in sentinels:
                    assert group == line[place + 1 if place + 1 < len(line) else place - 1]
                    continue
                if target in words:
                    assert parts[group].doc_id == words[target]
                actual.setdefault(group, []).append(target)
            for group, targets_of in actual.items():
                part = parts[group]
                whole = documents[part.doc_id][part.doc_start : part.doc_stop]
                if config.objective == "causal":
                    first = any(part.row_start == item.row_start for item in _first_of_pieces(parts, row))
                    assert targets_of == (whole[1:] if first else whole)
                else:
                    assert len(targets_of) <= len(whole)
                seen.add((part.doc_id, config.objective))
    assert len({doc_id for doc_id, _ in seen}) > 30


def _first_of_pieces(parts: list[Any], row: int) -> list[Any]:
    own = [part for part in parts if part.row == row]
    return [part for i, part in enumerate(own) if i == 0 or own[i - 1].piece != part.piece]


# ----------------------------------------------------------------------------------------- never to see them again


@pytest.mark.parametrize("case", CASES)
def test_what_is_skipped_is_all_that_holds_a_document_and_no_more(constant: Store, case: str) -> None:
    trace = opened(constant, CASES[case])[1]
    after, number = trace.num_steps // 3, 0
    for doc_id in list(tokens_of(open_dataset(constant)))[::5]:
        identifier = bytes.fromhex(doc_id)
        known = trace.steps_of_document(identifier)[0].appearances
        samples = samples_to_skip(trace, [doc_id], [], after)
        assert {part.sample for part in known if part.step > after and part.sample >> STAGE_BITS == 0} <= set(samples)
        skipping = trace.skipping(samples)
        assert skipping.samples_with([identifier], after) == []
        before = [part for part in known if part.step <= after]
        assert skipping.steps_of_document(identifier)[0].appearances == before
        # Each is needed: without any one of the last stage, that one is seen again.
        last = [sample for sample in samples if sample >> STAGE_BITS == samples[-1] >> STAGE_BITS]
        for sample in last[-3:]:
            rest = [item for item in samples if item != sample]
            assert trace.skipping(rest).samples_with([identifier], after) == [sample]
        number += len(samples)
    assert number > 5


def test_what_moves_up_is_looked_at_again(constant: Store) -> None:
    trace = opened(constant, CASES["one stage"])[1]
    doc_ids = list(tokens_of(open_dataset(constant)))
    once = [trace.samples_with([bytes.fromhex(doc_id)], 0) for doc_id in doc_ids]
    actual = [samples_to_skip(trace, [doc_id], [], 0) for doc_id in doc_ids]
    assert any(len(samples) > len(first) > 0 for samples, first in zip(actual, once, strict=True))
    assert all(samples[: len(first)] == first for samples, first in zip(actual, once, strict=True))


def test_samples_that_are_skipped_anyway_come_first_and_count_once(constant: Store) -> None:
    trace = opened(constant, CASES["one stage"])[1]
    first = trace.documents_of_step(5)[0]
    doc_id = first.doc_id
    batch = sorted({part.sample for part in trace.documents_of_step(first.step)})
    samples = samples_to_skip(trace, [doc_id], batch, first.step - 1)
    assert samples[: len(batch)] == batch
    assert len(set(samples)) == len(samples) > len(batch)


def test_documents_that_most_samples_hold_cannot_be_kept_out(constant: Store) -> None:
    trace, doc_ids = opened(constant, CASES["one stage"])[1], list(tokens_of(open_dataset(constant)))
    assert samples_to_skip(trace, [], [5], 0) == [5]
    assert samples_to_skip(trace, ["ab" * 16], [], 0) == []  # of another dataset
    message = (
        rf"expected {len(doc_ids)} quarantined document\(s\) in a minority of the samples, got them in most of the 35 "
    )
    with pytest.raises(ContractError, match=message):
        samples_to_skip(trace, doc_ids, [], trace.num_steps - 5)
    assert trace.num_samples(trace.num_steps - 5) == 35
    assert trace.num_samples(trace.num_steps) == 0


def test_a_later_spike_brings_no_earlier_culprit_back(constant: Store) -> None:
    batches, trace = opened(constant, CASES["one stage"], NO_SKIPS)
    guard = GuardConfig(spike_sigmas=6.0, on_spike="rewind", quarantine=True)
    settings = SimpleNamespace(train=CASES["one stage"].model_copy(update={"skip_file": "bad.txt"}), guard=guard)
    plan = SimpleNamespace(settings=settings, stages=batches.order.stages)
    setup: Any = SimpleNamespace(run=constant, dataset=open_dataset(constant), plan=plan, settings=settings)
    came_back = 0
    for step in range(2, trace.num_steps - 12, 2):
        constant.write_atomic("train/bad.txt", b"")
        constant.delete(QUARANTINE_NAME)
        suspect = trace.documents_of_step(step)[0]
        blamed = SpikeDocument.model_validate(suspect).model_copy(update={"loss": 9.0, "targets": 9, "level": 8.0})
        first = exclude_spike(setup, step, step - 1, [blamed], 1)
        assert [line.doc_id for line in first.documents] == [suspect.doc_id]
        second = exclude_spike(setup, trace.num_steps - 5, trace.num_steps - 9, [], 2)
        assert second.documents == ()
        now = trace.skipping([*first.samples, *second.samples])
        identifier = bytes.fromhex(suspect.doc_id)
        assert now.samples_with([identifier], step - 1) == []
        batch = list(second.samples)[:7]
        came_back += bool(trace.skipping([*first.samples, *batch]).samples_with([identifier], step - 1))
        assert len(read_skip_list(constant, "bad.txt").indices) == len(first.samples) + len(second.samples)
    assert came_back


# ------------------------------------------------------------------------------------------------------------ reported


def test_a_url_stays_in_the_line_of_its_spike() -> None:
    names = ("sample", "row", "piece", "epoch", "doc_start", "doc_stop", "row_start", "row_stop", "offset", "length")
    values = dict.fromkeys(SpikeDocument.model_fields.keys() & {*names}, 0)
    url, more = "http://a.example/\nstep 9", {"doc_id": "ab", "source": "web", "split": "s", "loss": 9.0, "targets": 3}
    document = SpikeDocument.model_validate(values | more | {"url": url})
    band = {"mean": 1.0, "deviation": 1.0, "limit": 2.0, "grad_norm": 1.0, "grad_limit": None}
    text = describe_spike(Spike(step=4, left=("loss",), loss=9.0, documents=(document,), **band))
    assert text.endswith(r"the worst http://a.example/\nstep 9 (web: loss 9.0000 of 3 tokens)")


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The poisoned run of two ranks, in which nothing is watched; tests must not change it."""
    return trained(make_run(tmp_path_factory.mktemp("unwatched") / "run"), 2)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The poisoned run of two ranks that is watched, and what its first rank printed; tests must not change it."""
    run = make_run(tmp_path_factory.mktemp("reported") / "run", WATCHING | {"spike_sigmas": 6.0})
    results = tiny_runs.train(run, 2)
    assert [item.code for item in results] == [0, 0]
    return run, results[0].out


def trace_of(run: Path) -> Trace:
    return open_trace(Store(str(run)))


@dist
def test_a_reported_spike_lists_the_poison_first_and_changes_nothing(
    unwatched: Path, reported: tuple[Path, str]
) -> None:
    run, out = reported
    assert computed(run) == computed(unwatched)
    state, other = state_at(run, STEPS), state_at(unwatched, STEPS)
    assert [name for name in other if not state[name].equal(other[name])] == []
    spikes = events(run, "spike")
    assert [(event.step, event.left) for event in spikes] == [(16, ("gradient",)), (30, ("gradient",))]
    for event in spikes:
        record = metrics(run)[event.step - 1]
        norms = [item.grad_norm for item in metrics(run)[event.step - 9 : event.step - 1]]
        if event.step == 16:  # no spike in the window of the first
            mean = math.fsum(norms) / 8
            deviation = math.sqrt(math.fsum((norm - mean) ** 2 for norm in norms) / 7)
            assert (event.mean, event.deviation) == pytest.approx((mean, deviation))
            assert event.limit == pytest.approx(mean + 5 * deviation)
        assert (event.grad_norm, event.loss, event.grad_limit) == (record.grad_norm, record.loss, event.limit)
        # Together the documents are the step.
        assert sum(item.targets for item in event.documents) == record.tokens == 160
        total = sum((item.loss or 0.0) * item.targets for item in event.documents)
        assert total / 160 == pytest.approx(record.loss, rel=1e-6)
        worst = event.documents[0]
        assert (worst.doc_id, worst.targets) == (POISON.hex(), 31)
        excesses = [item.excess for item in event.documents if item.excess is not None]
        assert excesses == sorted(excesses, reverse=True)
        parts = {(part.row, part.doc_id, part.doc_start) for part in trace_of(run).documents_of_step(event.step)}
        assert {(item.row, item.doc_id, item.doc_start) for item in event.documents} == parts
        printed = (
            f"gradient norm {event.grad_norm:.4g} is above {event.limit:.4g}; its batch holds {len(parts)} parts of"
        )
        shown = f"the worst {worst.url} (web: loss {worst.loss:.4f} of 31 tokens), "
        ends = f": `penstock trace {run} --step {event.step}` shows all, with their losses in {EVENTS_NAME}"
        line = next(line for line in out.splitlines() if line.startswith(f"step {event.step}: "))
        assert printed in line
        assert shown in line
        assert line.endswith(ends)
    # The excess by hand: all documents of web are English, and have the same level, about that of the steps before.
    worst = spikes[0].documents[0]
    assert worst.excess == pytest.approx((worst.loss - worst.level) * math.sqrt(31 / 63))
    (level,) = {item.level for item in spikes[0].documents if item.source == "web" and item.targets}
    assert level == worst.level == pytest.approx(metrics(run)[14].losses["web"], rel=0.2)
    assert {item.language for item in spikes[0].documents} == {"en"}
    assert not (run / QUARANTINE_NAME).exists()
    assert not (run / "train/skips.txt").exists()


@dist
@pytest.mark.parametrize(
    "overrides",
    [
        ("layout.pipeline=2", "layout.micro_batch=1"),
        pytest.param(("layout.tensor=2",), marks=pytest.mark.slow),
        pytest.param(("layout.context=2",), marks=pytest.mark.slow),
        pytest.param(("layout.data=zero1", "layout.micro_batch=1"), marks=pytest.mark.slow),
        pytest.param(("layout.context=2", "layout.context_by=keys"), marks=pytest.mark.slow),
        pytest.param(("layout.pipeline=2", "layout.data=zero2", "layout.micro_batch=1"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_every_layout_finds_the_same_documents(unwatched: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = make_run(tmp_path / "run", WATCHING, plan={"num_layers": 2})
    reference = trained(copied(run, tmp_path / "reference"), 1, "train.steps=17")
    trained(run, 2, *overrides, "train.steps=17")
    (event,), (other,) = events(run, "spike"), events(reference, "spike")
    assert [(item.row, item.doc_id, item.targets) for item in event.documents] == [
        (item.row, item.doc_id, item.targets) for item in other.documents
    ]
    pairs = [(item.loss, two.loss) for item, two in zip(event.documents, other.documents, strict=True) if two.targets]
    # Fifteen updates at a high rate carry the rounding of each layout along; test_own_losses has equal weights.
    assert max(abs(item / two - 1) for item, two in pairs) <= 1e-5
    for actual, results in ((event, metrics(run)[15]), (other, metrics(reference)[15])):
        assert sum((item.loss or 0) * item.targets for item in actual.documents) / 160 == pytest.approx(
            results.loss, rel=1e-6
        )


@contextlib.contextmanager
def measuring_nothing() -> Iterator[None]:
    """Measuring single documents must not be called."""
    with mock.patch.object(Learner, "measure_groups", side_effect=AssertionError("measured without a spike")):
        yield


@dist
def test_without_a_spike_nothing_is_measured_or_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", WATCHING | {"quarantine": True, "on_spike": "rewind"}, poisoned=False)
    trained(run, 2, DDP, during=[(measuring_nothing, ())])
    assert events(run, "spike") == []
    assert not (run / QUARANTINE_NAME).exists()
    assert not (run / "train/skips.txt").exists()
    run = make_run(tmp_path / "poisoned", WATCHING)
    with pytest.raises(AssertionError, match="measured without a spike"):
        trained(run, 1, during=[(measuring_nothing, ())])


# --------------------------------------------------------------------------------------------------------- quarantined

QUARANTINING = WATCHING | {"quarantine": True, "on_spike": "rewind"}


@pytest.fixture(scope="module")
def quarantined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The poisoned run of two ranks, rewound and without the poison; tests must not change it."""
    return trained(make_run(tmp_path_factory.mktemp("quarantined") / "run", QUARANTINING), 2)


def assert_kept_out(run: Path) -> None:
    """Assert by trace and rows that no batch after the checkpoint of step 15 holds the poison."""
    assert trace_of(run).steps_of_document(POISON)[0].appearances == []
    batches = tiny_runs.opened(run)
    first = poisoned_runs.sentinel_0(open_dataset(Store(str(run))))
    for step in range(STEPS):
        rows = batches.batch(step)
        assert not ((rows.inputs_BT >= first) & (rows.inputs_BT < first + 100)).any()
        assert not ((rows.targets_BT >= first) & (rows.targets_BT < first + 100)).any()


@dist
def test_the_culprit_is_quarantined_and_never_comes_back(unwatched: Path, quarantined: Path, tmp_path: Path) -> None:
    run = quarantined
    (event,) = events(run, "spike")
    (back,) = events(run, "rewound")
    assert (event.step, back.step, back.to_step, back.quarantined) == (16, 16, 15, (POISON.hex(),))
    # The samples of the step, and the two of the next pass that hold the document; before, they were in the run.
    later = [part.sample for part in trace_of(unwatched).steps_of_document(POISON)[0].appearances if part.step > 16]
    assert later == [144, 145]
    assert list(back.samples) == [*range(75, 80), *later]
    assert list(read_skip_list(Store(str(run)), "skips.txt").indices) == list(back.samples)
    lines = (run / "train/skips.txt").read_text().splitlines()
    assert lines[0] == "75  # spike in step 16, with 2 more samples of quarantined documents"
    (line,) = read_quarantine(Store(str(run)))
    worst = event.documents[0]
    assert (line.doc_id, line.url, line.source) == (POISON.hex(), worst.url, "web")
    assert (line.split, line.offset, line.length) == ("web.warc.gz", 2000, 900)
    assert (line.step, line.rewind) == (16, 1)
    # It is judged by all of its parts in the batch.
    own = [item for item in event.documents if item.doc_id == POISON.hex()]
    assert line.targets == sum(item.targets for item in own) == 33
    assert line.loss == pytest.approx(sum(item.loss * item.targets for item in own) / 33)
    assert_kept_out(run)
    # From the checkpoint on it is the run that had this skip list from its beginning.
    knowing = make_run(tmp_path / "knowing", QUARANTINING)
    append_to_skip_list(Store(str(knowing)), "skips.txt", list(back.samples), "known to be bad")
    trained(knowing, 2)
    assert events(knowing, "spike") == []
    assert computed(run) == computed(knowing)
    state, other = state_at(run, STEPS), state_at(knowing, STEPS)
    assert [name for name in other if not state[name].equal(other[name])] == []
    assert computed(run)[:15] == computed(unwatched)[:15]
    assert computed(run)[15:] != computed(unwatched)[15:]


@dist
def test_a_rewind_alone_lets_the_culprit_come_back(tmp_path: Path) -> None:
    run = trained(make_run(tmp_path / "run", WATCHING | {"on_spike": "rewind"}), 2, DDP)
    assert [event.step for event in events(run, "rewound")] == [16, 29]  # a step of samples is gone by then
    assert [event.quarantined for event in events(run, "rewound")] == [(), ()]
    assert not (run / QUARANTINE_NAME).exists()


@contextlib.contextmanager
def killed_in(name: str) -> Iterator[None]:
    """Raise at the start of an action, as if the process ended."""
    kill = RuntimeError(f"killed in {name}")
    target = mock.patch.object(TrainingLog, "rewind", side_effect=kill)
    if name != "rewind":
        target = mock.patch(f"train.pretrain.spikes.{name}", side_effect=kill)
    with target:
        yield


@dist
@pytest.mark.parametrize("name", ["quarantine", "append_to_skip_list", "rewind"])
def test_a_killed_process_is_followed(quarantined: Path, tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run", QUARANTINING)
    results = tiny_runs.train(run, 2, during=[(killed_in, (name,))])
    assert [f"killed in {name}" in item.error for item in results] == [True, True]
    assert (run / QUARANTINE_NAME).exists() == (name != "quarantine")
    assert (run / "train/skips.txt").exists() == (name == "rewind")
    if name != "quarantine":  # and half a line, as of a process that died while it wrote
        with (run / QUARANTINE_NAME).open("ab") as file:
            file.write(b'{"doc_id":"')
    trained(run, 2)
    assert_kept_out(run)
    assert [line.doc_id for line in read_quarantine(Store(str(run)))] == [POISON.hex()]
    actual = list(read_skip_list(Store(str(run)), "skips.txt").indices)
    if name == "append_to_skip_list":
        # The list of documents is followed; the other samples of their step may be used.
        assert actual == [77, 79, 144, 145]
        assert "quarantined documents" in (run / "train/skips.txt").read_text()
    else:
        assert actual == [75, 76, 77, 78, 79, 144, 145]
        assert computed(run) == computed(quarantined)
        state, other = state_at(run, STEPS), state_at(quarantined, STEPS)
        assert [name for name in other if not state[name].equal(other[name])] == []
    assert notes(run)[-1].progress.guard.rewinds == (1 if name == "quarantine" else 0)


@dist
def test_a_list_that_is_handed_on_is_kept_out_from_the_beginning(quarantined: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", QUARANTINING)
    (run / "train").mkdir()
    shutil.copy(quarantined / QUARANTINE_NAME, run / QUARANTINE_NAME)
    (line,) = read_quarantine(Store(str(run)))
    quarantine(Store(str(run)), [line.model_copy(update={"doc_id": "ab" * 16})])  # of another dataset
    trained(run, 2, DDP)
    assert_kept_out(run)
    assert list(read_skip_list(Store(str(run)), "skips.txt").indices) == [77, 79, 144, 145]
    assert events(run, "spike") == []
    # Resuming adds nothing.
    again = tiny_runs.cut_back(copied(run, tmp_path / "again"), 20)
    trained(again, 2, DDP)
    assert_same_bits(again, run)
    assert (again / "train/skips.txt").read_bytes() == (run / "train/skips.txt").read_bytes()


@dist
def test_a_run_with_a_quarantine_resumes_without_one_and_skips_the_same(tmp_path: Path) -> None:
    run = trained(make_run(tmp_path / "run", WATCHING | {"quarantine": True}), 2)
    again = trained(tiny_runs.cut_back(copied(run, tmp_path / "again"), 20), 2, "guard.quarantine=false")
    assert_same_bits(again, run)
    assert_kept_out(again)


@dist
def test_a_run_that_only_reported_resumes_with_a_quarantine(reported: tuple[Path, str], tmp_path: Path) -> None:
    run = tiny_runs.cut_back(copied(reported[0], tmp_path / "run"), 15)
    results = tiny_runs.train(run, 2, "guard.quarantine=true")
    assert [item.error for item in results] == ["", ""]
    assert "resuming from step 15, exactly" in results[0].out
    assert (
        "step 16: back to step 15, 7 samples are skipped from now on; train/quarantine.jsonl has 1 more"
        in results[0].out
    )
    assert_kept_out(run)


@dist
def test_a_spike_that_no_rewind_is_left_for_is_listed_and_quarantines_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", WATCHING | {"on_spike": "rewind", "max_rewinds": 1})
    results = tiny_runs.train(run, 2, DDP)
    assert ["got another spike" in outcome.error for outcome in results] == [True, True]
    last = events(run, "spike")[-1]
    assert (last.step, last.documents[0].doc_id) == (29, POISON.hex())
    assert last.documents[0].loss is not None
    assert json.loads((run / EVENTS_NAME).read_text().splitlines()[-1])["kind"] == "stopped"


@dist
def test_the_lineage_shows_rewind_quarantine_and_skip_list(quarantined: Path) -> None:
    run = Store(str(quarantined))
    lineage = read_lineage(run, verify=True)
    assert lineage.breaks == ()
    nodes = {node.kind: node for node in lineage.nodes}
    assert nodes["rewind"].title == "rewound from step 16 to 15"
    assert dict(nodes["rewind"].counts) == {"samples skipped": 7, "documents quarantined": 1}
    assert nodes["quarantine"].digest == run.sha256(QUARANTINE_NAME)
    assert nodes["skips"].digest == notes(quarantined)[-1].identity.skip_list
    chain = [nodes["rewind"].key, nodes["quarantine"].key, nodes["skips"].key, "train/checkpoints/step-000020"]
    assert all(pair in lineage.links for pair in pairwise(chain))
