"""The order of the training samples and its inverse, computed directly, over stages, weights and skips."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import ConfigError
from schemas.tokens import Dataset, open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_stages import order_of, staged, stages_of
from train.config.train import TrainConfig
from train.data.order import SampleOrder, block_counts, heldout_streams, open_streams, tokens_by_source
from train.data.permutation import ChunkOrder, StreamRows
from train.data.stages import NO_SKIPS, STAGE_BITS, SkipList, StagePlan


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Two sources of several shards, chunks of 256 tokens."""
    return open_dataset(make_tiny_dataset(tmp_path_factory.mktemp("run")))


def starts_of(order: SampleOrder, number: int) -> list[int]:
    """Return the first tokens of the first samples of a run with a single stage."""
    return order.at(0, np.arange(number)).pieces.start.tolist()


def test_proportional_weights_finish_all_sources_together(dataset: Dataset) -> None:
    order = order_of(dataset, TrainConfig(seq_len=64))
    assert order.stages[0].counts == {"books": 5, "web": 16}
    total = sum(stream.num_units // 64 for stream in order.streams)
    actual = order.at(0, np.arange(2 * total))
    assert (actual.pieces.epoch == np.repeat([0, 1], total)).all()
    for number, source in enumerate(order.streams):
        begins = actual.pieces.start[(actual.source == number) & (actual.pieces.epoch == 0)]
        assert sorted(begins.tolist()) == list(range(0, source.num_units, 64))


def test_weights_are_realised_at_every_prefix(dataset: Dataset) -> None:
    order = order_of(dataset, TrainConfig(seq_len=64, weights={"web": 0.37, "books": 0.63}))
    source = order.at(0, np.arange(1000)).source
    web = np.cumsum(source == order.sources.index("web"))
    assert np.abs(web - 0.37 * np.arange(1, 1001)).max() < 1


@pytest.mark.parametrize("skip", [(), (0, 5, 6, 41)])
def test_any_rows_are_a_slice_of_the_whole(dataset: Dataset, skip: tuple[int, ...]) -> None:
    order = order_of(dataset, TrainConfig(seq_len=64), SkipList(skip))
    whole = order.at(0, np.arange(304))
    assert whole.index[:4].tolist() == ([0, 1, 2, 3] if not skip else [1, 2, 3, 4])
    for step, rows in [(0, range(0, 1)), (3, range(2, 7)), (37, range(0, 8)), (0, range(4, 4))]:
        part, first = order.samples(step, rows), 8 * step + rows.start
        for name in ("index", "source"):
            assert getattr(part, name).tolist() == getattr(whole, name)[first : first + len(rows)].tolist()
        assert part.pieces.start.tolist() == whole.pieces.start[first : first + len(rows)].tolist()
    assert order.samples(2).index.tolist() == whole.index[16:24].tolist()


def test_skipping_moves_the_rest_up_and_changes_nothing_else(dataset: Dataset) -> None:
    plain = order_of(dataset, TrainConfig(seq_len=64))
    skipping = order_of(dataset, TrainConfig(seq_len=64), SkipList((2, 9)))
    kept = [index for index in range(102) if index not in (2, 9)]
    assert starts_of(skipping, 100) == np.array(starts_of(plain, 102))[kept].tolist()
    sample = plain.at(0, np.array([9]))
    source, start = plain.sources[sample.source[0]], int(sample.pieces.start[0])
    # Once in every epoch: the first time as sample 9, which is skipped; later ones are two earlier.
    once, *later = plain.find(source, start, start + 64)[0][1].tolist()
    assert once == 9
    assert skipping.find(source, start, start + 64)[0][1].tolist() == [number - 2 for number in later]
    assert skipping.digest == plain.digest


def test_the_order_has_its_fixed_values(dataset: Dataset) -> None:
    """After a change here existing runs can be neither resumed nor traced: raise ORDER_VERSION."""
    order = order_of(dataset, TrainConfig(seq_len=64))
    assert starts_of(order, 8) == [5376, 5440, 5504, 2048, 5568, 1024, 1088, 2112]
    assert order.digest[:16] == "eb57a0e4a2f3fbcd"


def test_digest_changes_with_every_input_of_the_order(dataset: Dataset) -> None:
    configs = [{}, {"seed": 1}, {"seq_len": 32}, {"window_shards": 1}, {"weights": {"web": 1, "books": 1}}]
    digests = [order_of(dataset, TrainConfig(**({"seq_len": 64} | config))).digest for config in configs]
    two = [staged([{"tokens": tokens}, {"seq_len": 32}]) for tokens in (5120, 10240)]
    digests += [order_of(dataset, config).digest for config in two]
    assert len(set(digests)) == len(configs) + 2
    assert order_of(dataset, TrainConfig(seq_len=64), steps=7, global_batch=3).digest == digests[0]


# ------------------------------------------------------------------------------------------------- several stages

SHARDS = {"books": [300, 0, 150], "code": [90], "web": [400, 400, 33]}
CHUNK = 32


def streams_of(seed: int = 0) -> dict[str, StreamRows]:
    return {name: StreamRows(ChunkOrder(name, shards, CHUNK, seed, 2)) for name, shards in SHARDS.items()}


@st.composite
def stage_lists(draw: Any) -> list[StagePlan]:
    """One to four stages of any lengths, batches and weights over the three sources."""
    stages: list[StagePlan] = []
    for _ in range(draw(st.integers(1, 4))):
        weights = draw(st.tuples(*[st.integers(0, 9)] * 3).filter(any))
        counts = block_counts(dict(zip(SHARDS, map(float, weights), strict=True)))
        first = stages[-1].end if stages else 0
        size = {"num_steps": draw(st.integers(1, 12)), "global_batch": draw(st.integers(1, 9))}
        length = draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
        stages.append(StagePlan(first_step=first, seq_len=length, counts=counts, **size))
    return stages


def used(order: SampleOrder, steps: int) -> list[tuple[int, int, int]]:
    """Return (source, epoch, token) of every input of the steps, row by row."""
    tokens = []
    for step in range(steps):
        samples = order.samples(step)
        pieces = samples.pieces
        parts = zip(samples.source[pieces.row], pieces.epoch, pieces.start, pieces.length, strict=True)
        tokens += [(int(s), int(e), token) for s, e, first, n in parts for token in range(first, first + n)]
    return tokens


@settings(max_examples=80, deadline=None)
@given(stage_lists(), st.integers(0, 5))
def test_every_token_once_per_epoch_whatever_the_stages(stages: list[StagePlan], seed: int) -> None:
    order = SampleOrder(streams_of(seed), stages, NO_SKIPS, seed)
    actual = used(order, stages[-1].end)
    drawn = tokens_by_source(stages)
    for number, source in enumerate(order.sources):
        mine, units = [entry[1:] for entry in actual if entry[0] == number], order.streams[number].num_units
        assert len(mine) == drawn[source]
        # No gap: in every epoch exactly the beginning of the ordered stream.
        expected = order.streams[number].pieces(np.arange(len(mine)), 1)
        assert mine == list(zip(expected.epoch.tolist(), expected.start.tolist(), strict=True))
        whole = len(mine) // units * units
        assert sorted(mine[:whole]) == [(e, token) for e in range(whole // units) for token in range(units)]
        assert len(set(mine)) == len(mine)
        assert order.epochs()[source] == len(mine) / units


@settings(max_examples=60, deadline=None)
@given(stage_lists())
def test_weights_are_realised_at_every_prefix_of_every_stage(stages: list[StagePlan]) -> None:
    order = SampleOrder(streams_of(), stages)
    for number, stage in enumerate(stages):
        source = order.at(number, np.arange(stage.num_samples)).source
        for name, count in stage.counts.items():
            taken = np.cumsum(source == order.sources.index(name))
            target = np.arange(1, len(source) + 1) * count / sum(stage.counts.values())
            assert np.abs(taken - target).max() < 1


@settings(max_examples=60, deadline=None)
@given(stage_lists(), st.data())
def test_a_skip_loses_its_sample_and_nothing_else(stages: list[StagePlan], data: st.DataObject) -> None:
    entries = st.tuples(st.integers(0, len(stages) - 1), st.integers(0, 60))
    skip = SkipList(tuple((s << STAGE_BITS) + i for s, i in data.draw(st.lists(entries, max_size=8))))
    order = SampleOrder(streams_of(), stages, skip)
    actual = used(order, stages[-1].end)
    assert len(set(actual)) == len(actual)
    lost: list[tuple[int, int, int]] = []
    for number, stage in enumerate(stages):
        samples = order.at(number, np.arange(stage.num_samples))
        assert not set(samples.index.tolist()) & set(skip.indices)
        local = samples.index - (number << STAGE_BITS)
        passed = np.setdiff1d(np.arange(local[-1] + 1), local)
        pieces = order._at(number, passed)
        parts = zip(pieces.source[pieces.pieces.row], pieces.pieces.epoch, pieces.pieces.start, pieces.pieces.length)
        lost += [(int(s), int(e), token) for s, e, first, n in parts for token in range(first, first + n)]
    # Used and skipped samples are together the beginning of every source's ordered stream.
    for number in range(len(order.sources)):
        mine = sorted(entry[1:] for entry in (*actual, *lost) if entry[0] == number)
        expected = order.streams[number].pieces(np.arange(len(mine)), 1)
        assert mine == sorted(zip(expected.epoch.tolist(), expected.start.tolist(), strict=True))


@settings(max_examples=60, deadline=None)
@given(stage_lists(), st.data())
def test_find_is_the_inverse_over_stages(stages: list[StagePlan], data: st.DataObject) -> None:
    skip = SkipList(tuple(data.draw(st.lists(st.integers(0, 40), max_size=5))))
    order = SampleOrder(streams_of(), stages, skip)
    which = data.draw(st.integers(0, len(order.sources) - 1))
    start = data.draw(st.integers(0, order.streams[which].num_units - 1))
    stop = start + data.draw(st.integers(1, 70))
    for number, (stage, taken) in enumerate(order.find(order.sources[which], start, stop)):
        samples = order.at(number, np.arange(stages[number].num_samples))
        pieces = samples.pieces
        hit = (pieces.start < stop) & (pieces.start + pieces.length > start) & (samples.source[pieces.row] == which)
        assert (stage, taken.tolist()) == (number, np.unique(pieces.row[hit]).tolist())


@settings(max_examples=40, deadline=None)
@given(stage_lists(), st.data())
def test_the_rows_of_a_step_do_not_depend_on_the_split(stages: list[StagePlan], data: st.DataObject) -> None:
    order = SampleOrder(streams_of(), stages)
    step = data.draw(st.integers(0, stages[-1].end - 1))
    batch = order.stage_of(step).global_batch
    cut = data.draw(st.integers(0, batch))
    whole, parts = order.samples(step), [order.samples(step, range(0, cut)), order.samples(step, range(cut, batch))]
    for name in ("index", "source"):
        assert np.concatenate([getattr(part, name) for part in parts]).tolist() == getattr(whole, name).tolist()
    for name in ("column", "epoch", "start", "length"):
        joined = np.concatenate([getattr(part.pieces, name) for part in parts])
        assert joined.tolist() == getattr(whole.pieces, name).tolist()


def test_steps_have_their_stage(dataset: Dataset) -> None:
    order = order_of(dataset, staged([{"tokens": 64 * 8 * 3}, {"seq_len": 32, "global_batch": 5, "tokens": 320}]))
    assert [order.place(step) for step in (0, 2, 3, 4, 9)] == [(0, 0), (0, 2), (1, 0), (1, 1), (1, 6)]
    assert [len(order.samples(step).index) for step in (2, 3)] == [8, 5]
    assert order.samples(3).index.tolist() == [(1 << STAGE_BITS) + i for i in range(5)]
    assert order.samples(3).seq_len == 32
    with pytest.raises(ValueError, match="expected contiguous rows of a global batch of 5, got range"):
        order.samples(4, range(0, 6))


def test_a_skip_of_a_stage_that_does_not_exist_is_rejected(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"stages 0 to 0, got one of stage 2 .* Remove the lines"):
        order_of(dataset, TrainConfig(seq_len=64), SkipList((3, (2 << STAGE_BITS) + 1)))


def test_epochs_add_up_over_stages(dataset: Dataset) -> None:
    tokens = open_streams(dataset, TrainConfig(seq_len=64))["books"].num_units
    each = {"tokens": tokens, "weights": {"books": 1, "web": 0}}
    order = order_of(dataset, staged([each, each | {"seq_len": 256, "global_batch": 1}, each]), global_batch=1)
    assert order.epochs() == {"books": 3.0}
    assert tokens_by_source(order.stages) == {"books": 3 * tokens}


# ------------------------------------------------------------------------------------------------ rejected settings


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"seq_len": 96}, r"train.seq_len: .* chunk_tokens 256, got 96\. Set train.seq_len to one of .*64, 128, 256"),
        (
            {"stages": [{"tokens": 999}, {"seq_len": 512}]},
            r"train.stages\[1\].seq_len: expected a divisor .*256, got 512",
        ),
        ({"weights": {"web": 1, "boks": 1}}, r"'boks' is no source \(did you mean 'books'\?\); 'books' is not named"),
        ({"weights": {"web": 1}}, r"'books' is not named \(0 excludes it\)"),
        ({"stages": [{"weights": {"web": 1}}]}, r"train.stages\[0\].weights: .* 'books' is not named"),
    ],
)
def test_settings_that_do_not_fit_the_dataset_are_rejected(dataset: Dataset, config: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        order_of(dataset, TrainConfig(**({"seq_len": 64} | config)))


def test_a_source_without_one_chunk_is_rejected_unless_excluded(tmp_path: Path) -> None:
    dataset = open_dataset(make_tiny_dataset(tmp_path, {"web": 12, "memo": 2}, chunk_tokens=1024))
    tokens = dataset.num_tokens()["memo"]
    assert 0 < tokens < 1025
    with pytest.raises(
        ConfigError,
        match=rf"at least 1025 training tokens .* got memo has {tokens} tokens\. Set the source's weight to 0",
    ):
        order_of(dataset, TrainConfig(seq_len=64))
    assert order_of(dataset, TrainConfig(seq_len=64, weights={"web": 1, "memo": 0})).sources == ("web",)
    only = staged([{"tokens": 512, "weights": {"web": 1, "memo": 0}}, {"weights": {"web": 1, "memo": 1}}])
    with pytest.raises(ConfigError, match=rf"got memo has {tokens} tokens"):
        order_of(dataset, only)


def test_heldout_rows_are_those_of_every_source(dataset: Dataset) -> None:
    assert list(heldout_streams(dataset, 64)) == ["books", "web"]
    assert heldout_streams(dataset, 4096) == {}


def test_stages_of_the_settings(dataset: Dataset) -> None:
    config = staged([{"tokens": 6400}, {"global_batch": 2, "weights": {"web": 1, "books": 0}}], seq_len=32)
    entry, two = stages_of(dataset, config, global_batch=10, steps=30)
    assert entry == StagePlan(first_step=0, num_steps=20, seq_len=32, global_batch=10, counts={"books": 5, "web": 16})
    assert two == StagePlan(first_step=20, num_steps=50, seq_len=32, global_batch=2, counts={"web": 1})
