"""Pains of training data: a lost order, a batch without names, tokens that vanish, samples that are read twice."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from schemas.manifest import read_run, write_run
from schemas.storage import Store
from schemas.tokens import TRAIN, Dataset, open_dataset
from tests.support import tiny_runs
from tests.support.tiny_dataset import make_tiny_dataset
from train.config.settings import load_settings
from train.export.torch_dataset import SampleDataset
from train.plan.make_plan import make_plan
from train.plan.plan import Plan, read_plan, write_plan
from train.trace import documents_of_step

STEPS, BATCH, LENGTH = 30, 4, 32
RECIPE: dict[str, dict[str, Any]] = {
    "plan": {"num_layers": 1, "d_model": 32, "num_heads": 2, "num_kv_heads": 2, "d_ffw": 64, "max_epochs": 4},
    "train": {"seq_len": LENGTH, "global_batch": BATCH, "steps": STEPS, "eval_every": 0},
    "optim": {"learning_rate": 1e-3, "warmup_steps": 4},
}


def planned(folder: Path, sources: dict[str, int] | None = None, **train: Any) -> Store:
    """Return a run folder with a dataset of many small shards, its recipe, and the plan that follows from both."""
    run = make_tiny_dataset(folder, sources, shard_tokens=1024)
    recipe = RECIPE | {"train": RECIPE["train"] | train}
    write_run(run, read_run(run).model_copy(update={"recipe": recipe}))
    write_plan(run, plan_of(run))
    return run


def plan_of(run: Store) -> Plan:
    """Return the plan that follows from the dataset and the recipe of a run; nothing is read from `train/`."""
    return make_plan(run, open_dataset(run), load_settings(read_run(run).recipe or {}, [], "test"))


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return planned(tmp_path / "run")


@pytest.fixture
def read_files() -> Iterator[list[str]]:
    """The files that are opened while the test runs, in order."""
    names: list[str] = []

    def opening(plain: Any, store: Store, name: str) -> Any:
        names.append(name)
        return plain(store, name)

    with ExitStack() as patches:
        for method in ("open_input", "open_unchecked"):
            patched = partialmethod(partial(opening, getattr(Store, method)))
            patches.enter_context(mock.patch.object(Store, method, patched))
        yield names


def test_the_order_needs_no_file_of_its_own(run: Store) -> None:
    """OLMo: the files with the data order of released models were no longer served. A reader could not see what a model
    had read at a step.

    https://github.com/allenai/OLMo/issues/763

    The order is computed from dataset, settings and step: the recipe alone gives back every batch.
    """
    batches = tiny_runs.opened(Path(run.root))
    before = [batches.batch(step).inputs_BT for step in range(STEPS)]
    order = read_plan(run).order
    assert sorted(name for name in run.walk() if name.startswith("train/")) == ["train/plan.json"]
    run.delete("train/plan.json")
    write_plan(run, plan_of(run))
    assert read_plan(run).order == order
    again = tiny_runs.opened(Path(run.root))
    assert all(torch.equal(again.batch(step).inputs_BT, before[step]) for step in range(STEPS))
    assert len({tuple(rows.flatten().tolist()) for rows in before}) == STEPS


def test_the_documents_of_any_step_are_a_few_files_away(tmp_path: Path, read_files: list[str]) -> None:
    """OLMo: a user who wanted to list the data of the first 20,000 steps had 44 batches after a night.

    https://github.com/allenai/OLMo/issues/869

    The documents of a step come from the document index of the shards that hold its rows, however late the step. No
    tokens are read.
    """
    run = planned(tmp_path / "run", {"web": 240, "books": 80})
    shards = sum(len(shards) for shards in open_dataset(run).streams.values())
    assert shards > 30
    for step in (1, STEPS):
        read_files.clear()
        assert {part.row for part in documents_of_step(run, step)} == set(range(BATCH))
        indexes = {name for name in read_files if name.endswith(".docs.arrow")}
        assert 1 <= len(indexes) <= 2 * BATCH
        assert not [name for name in read_files if name.endswith(".arrow") and name not in indexes]


def test_every_token_of_every_batch_has_its_source(run: Store) -> None:
    """OLMo: the token files were mixed and shuffled, so a user could not select the training tokens of the books.

    https://github.com/allenai/OLMo/issues/728

    The spans of documents that a step reads name their source, and add up to the tokens of the plan.
    """
    spans = [part for step in range(1, STEPS + 1) for part in documents_of_step(run, step)]
    sources = {part.doc_id: part.source for part in spans}
    truth = {row["doc_id"].hex(): row["source"] for row in tiny_rows(run)}
    assert sources == {doc_id: truth[doc_id] for doc_id in sources}
    plan = read_plan(run)
    rows = Counter(source for _, _, source in {(part.step, part.row, part.source) for part in spans})
    counts, total = plan.stages[0].counts, sum(plan.stages[0].counts.values())
    assert sum(rows.values()) == STEPS * BATCH
    assert all(abs(rows[name] - STEPS * BATCH * count / total) < 1 for name, count in counts.items())
    batches = tiny_runs.opened(Path(run.root))
    read = Counter(batches.order.sources[n] for step in range(STEPS) for n in batches.batch(step).sources_B.tolist())
    assert read == rows


def tiny_rows(run: Store) -> list[dict[str, Any]]:
    """Return the rows of the document index."""
    dataset = open_dataset(run)
    return [row for name in dataset.streams for row in tiny_stream(run, name)]


def tiny_stream(run: Store, name: str) -> list[dict[str, Any]]:
    """Return the rows of the document index of a stream."""
    dataset = open_dataset(run)
    files = [dataset.folder.path(shard.docs_path) for shard in dataset.streams[name]]
    return [row for file in files for row in pa.ipc.open_file(file).read_all().to_pylist()]


def tokens_of(dataset: Dataset, name: str) -> list[int]:
    """Return the tokens of a stream, as they are stored."""
    files = [dataset.folder.path(shard.path) for shard in dataset.streams[name]]
    documents = [ids for file in files for ids in pa.ipc.open_file(file).read_all().column("tokens").to_pylist()]
    return [token for ids in documents for token in ids]


def test_no_token_of_a_long_document_is_lost(tmp_path: Path) -> None:
    """open-instruct: the loader of OLMo-core looked for document ends in the tokens and passed over 2 % of them;
    nothing reported it.

    https://github.com/allenai/open-instruct/issues/1855

    In an epoch the loader returns every token of a source once, through documents far longer than a row. What does not
    fill a chunk at the end of a source is the only rest, and the plan names it.
    """
    run = planned(tmp_path / "run", {"web": 24}, steps=32)
    dataset = open_dataset(run)
    stream = tokens_of(dataset, f"web/{TRAIN}")
    batches = tiny_runs.opened(Path(run.root))
    units = batches.order.streams[0].num_units
    assert len(stream) - units <= dataset.chunk_tokens
    steps, rest = divmod(units, BATCH * LENGTH)
    assert (rest, steps <= 32) == (0, True)
    assert max(row["num_tokens"] for row in tiny_stream(run, f"web/{TRAIN}")) > 4 * LENGTH
    read = Counter(token for step in range(steps) for token in batches.batch(step).inputs_BT.flatten().tolist())
    assert read == Counter(stream[:units])


def test_a_batch_is_the_same_for_any_number_of_ranks_and_workers(run: Store) -> None:
    """OLMo: in older runs the order depended on the number of ranks and of loader workers, and a script had to
    reconstruct it.

    https://github.com/allenai/OLMo/pull/268

    The rows of all ranks, or of all workers of a loader, are the rows of one global batch.
    """
    batches = tiny_runs.opened(Path(run.root))
    whole = [batches.batch(step).inputs_BT for step in range(STEPS)]
    for ranks in (2, 4):
        share = BATCH // ranks
        parts = [batches.batch(9, range(rank * share, (rank + 1) * share)).inputs_BT for rank in range(ranks)]
        assert torch.equal(torch.cat(parts), whole[9])
    for workers in (0, 2):
        loader = DataLoader(SampleDataset(run.uri), batch_size=BATCH, num_workers=workers)
        assert torch.equal(torch.cat([batch["inputs"] for batch in loader]), torch.cat(whole))


def test_workers_of_a_loader_share_the_samples(run: Store) -> None:
    """torchtitan: with more than one loader worker, each worker read all samples again.

    https://github.com/pytorch/torchtitan/issues/291

    Two workers together return each sample of the plan once.
    """
    loader = DataLoader(SampleDataset(run.uri), batch_size=1, num_workers=2)
    rows = [tuple(batch["inputs"].flatten().tolist()) for batch in loader]
    assert len(rows) == len(set(rows)) == STEPS * BATCH


def test_a_late_step_is_reached_without_the_steps_before(run: Store, read_files: list[str]) -> None:
    """torchtitan: to resume with the right data, the loader had to read every sample before the checkpoint again.

    https://github.com/pytorch/torchtitan/pull/838

    A new process that starts at the last step opens the shards of that step's rows, and no others.
    """
    expected = tiny_runs.opened(Path(run.root)).batch(STEPS - 1)
    batches = tiny_runs.opened(Path(run.root))
    samples = batches.samples(STEPS - 1)
    read_files.clear()
    assert torch.equal(batches.batch(STEPS - 1).inputs_BT, expected.inputs_BT)
    assert 1 <= len(read_files) <= 2 * len(samples.pieces.row)
    assert len(read_files) < sum(len(shards) for shards in open_dataset(run).streams.values())


def test_more_steps_change_nothing_before_them(tmp_path: Path) -> None:
    """gpt-neox: the length of the run entered the order, so a run with another number of steps read other data.

    https://github.com/EleutherAI/gpt-neox/issues/984

    A longer run begins with all batches of the shorter one.
    """
    short, long = planned(tmp_path / "short", steps=10), planned(tmp_path / "long", steps=STEPS)
    few, many = tiny_runs.opened(Path(short.root)), tiny_runs.opened(Path(long.root))
    assert all(torch.equal(few.batch(step).inputs_BT, many.batch(step).inputs_BT) for step in range(10))
