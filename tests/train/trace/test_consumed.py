"""Tests of what a run consumed: sums by hand, and against a count of every input of every step."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from schemas.consumption import Consumption, sums
from schemas.errors import ContractError
from schemas.storage import Store
from schemas.takedown import REMOVED_ID
from schemas.tokens import Dataset, open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_stages import stages_of
from tests.train.trace.test_trace import CASES, SKIP
from train.config.train import TrainConfig
from train.data.document_index import read_table
from train.data.order import SampleOrder, make_order
from train.data.packing import open_packings, write_packing
from train.data.stages import NO_SKIPS, SkipList
from train.trace.consumed import Spans, consumption_of, count_tokens, order_until, read_spans


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_tiny_dataset(tmp_path_factory.mktemp("run"), {"web": 40, "books": 12}, shard_tokens=1500)


def order_of(run: Store, config: TrainConfig, skip: SkipList) -> SampleOrder:
    dataset = open_dataset(run)
    write_packing(run, dataset, config)
    packings = open_packings(run, dataset, config)
    steps = config.steps or 25
    return make_order(dataset, config, stages_of(dataset, config, steps=steps, packings=packings), skip, packings)


def counted(dataset: Dataset, order: SampleOrder, step: int) -> Counter[tuple[str, str]]:
    """Tokens by source and domain, from the pieces of the samples of each step, one token at a time."""
    read: dict[str, Counter[int]] = {source: Counter() for source in order.sources}
    for number in range(step):
        samples = order.samples(number)
        pieces = samples.pieces
        for row, start, length in zip(pieces.row, pieces.start, pieces.length, strict=True):
            read[order.sources[int(samples.source[row])]].update(range(int(start), int(start + length)))
    found: Counter[tuple[str, str]] = Counter()
    for source, positions in read.items():
        begin = 0
        for shard in dataset.streams[f"{source}/train"]:
            for row in read_table(dataset.folder, shard.docs_path).to_pylist():
                first = begin + row["token_offset"]
                found[source, row["domain"]] += sum(positions[i] for i in range(first, first + row["num_tokens"]))
            begin += shard.num_tokens
    return +found


def domains_of(consumed: Consumption) -> dict[tuple[str, str], int]:
    return {(source, domain): tokens for source, domain, tokens in consumed.domains.ranked()}


@pytest.mark.parametrize("skip", [NO_SKIPS, SKIP], ids=["no skips", "skips"])
@pytest.mark.parametrize("case", [*CASES])
@pytest.mark.parametrize("part", [0.05, 0.6, 1.0])
def test_domains_have_the_tokens_that_the_steps_read(run: Store, case: str, skip: SkipList, part: float) -> None:
    config, dataset = CASES[case], open_dataset(run)
    order = order_of(run, config, skip if config.stages else SkipList(tuple(i for i in skip.indices if i < 1000)))
    step = max(1, round(order.stages[-1].end * part))
    consumed = Consumption(step, dataset.digest)
    count_tokens(consumed, dataset, order_until(order, step))
    expected = counted(dataset, order, step)
    assert domains_of(consumed) == expected
    assert consumed.tokens == sum(expected.values()) > 0
    assert consumed.removed == 0


def test_several_epochs_are_counted(run: Store) -> None:
    config, dataset = TrainConfig(seq_len=64, steps=60), open_dataset(run)
    order = order_of(run, config, NO_SKIPS)
    assert max(order.epochs().values()) > 2
    consumed = Consumption(60, dataset.digest)
    count_tokens(consumed, dataset, order)
    assert consumed.tokens == 60 * 8 * 64
    assert domains_of(consumed) == counted(dataset, order, 60)


def test_without_a_checkpoint_each_training_document_counts_once(run: Store) -> None:
    dataset = open_dataset(run)
    consumed = consumption_of(run, dataset)
    assert consumed.step is None
    assert consumed.sources == dict(sorted(dataset.num_tokens().items()))
    assert sum(consumed.documents.values()) == 36 + 11
    assert sums(consumed.months, 1) == {"2026-01": consumed.tokens}
    assert sums(consumed.languages, 1, ["books"]) == {"en": dataset.num_tokens()["books"]}


def test_spans_by_hand() -> None:
    # Tokens 0..9 twice, 5..9 once more, and 8 is skipped once: 10 tokens of weight 2, 5 of weight 1, -1.
    spans = Spans(np.array([0, 5, 8]), np.array([10, 5, 1]), np.array([2, 1, -1]))
    begin, end = np.array([0, 4, 8, 9, 10]), np.array([10, 6, 9, 9, 12])
    assert spans.tokens_between(begin, end).tolist() == [24, 5, 2, 0, 0]


def test_spans_of_a_shard_by_hand(run: Store) -> None:
    """One step of one row of 64 tokens reads 64 tokens of one source, in one or two spans."""
    dataset = open_dataset(run)
    order = order_until(order_of(run, TrainConfig(seq_len=64, steps=25), NO_SKIPS), 1)
    tokens = dataset.num_tokens()
    lengths = [int(read_spans(order, source, 0, tokens[source]).length.sum()) for source in order.sources]
    assert sum(lengths) == 8 * 64


def test_removed_documents_are_counted_apart(run: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first document of each index is as a takedown leaves it."""
    sizes: list[int] = []

    def with_removed(*arguments: Any) -> pa.Table:
        table = read_table(*arguments)
        sizes.append(table.column("num_tokens")[0].as_py())
        ids = [REMOVED_ID, *table.column("doc_id").to_pylist()[1:]]
        return table.set_column(0, "doc_id", pa.array(ids, table.schema.field("doc_id").type))

    monkeypatch.setattr("train.trace.consumed.read_table", with_removed)
    dataset = open_dataset(run)
    consumed = consumption_of(run, dataset)
    assert (consumed.step, consumed.removed) == (None, 0)  # what was removed before training was never read
    assert consumed.tokens == sum(dataset.num_tokens().values()) - sum(sizes)
    order = order_of(run, TrainConfig(seq_len=64, steps=60), NO_SKIPS)
    read = Consumption(60, dataset.digest)
    count_tokens(read, dataset, order)
    assert read.removed > 0
    assert read.tokens == 60 * 8 * 64
    assert read.domains.totals().tokens == read.tokens - read.removed


def test_a_checkpoint_without_its_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_tiny_dataset(tmp_path / "run", {"web": 20})
    checkpoint = SimpleNamespace(name="train/checkpoints/step-000004", step=4)
    monkeypatch.setattr("train.trace.consumed.list_checkpoints", lambda _: [checkpoint])
    with pytest.raises(ContractError, match=r"expected a plan for dataset .*, got none. Name the dataset"):
        consumption_of(run, open_dataset(run))
