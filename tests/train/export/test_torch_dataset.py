"""Tests of the samples as a torch Dataset: a DataLoader with any number of workers gives the trainer's batches."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from schemas.errors import ContractError
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import make_tiny_dataset, replace_token, settle
from tests.support.tiny_stages import batches_of, staged
from train.config.settings import Settings
from train.data.batches import Batches
from train.data.verify import VERIFIED_NAME
from train.export import torch_dataset
from train.export.torch_dataset import SampleDataset

STAGES = staged([{"tokens": 64 * 8 * 4}, {"seq_len": 32, "global_batch": 4}], steps=10)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Batches]:
    """A run folder with a plan of two stages."""
    store = make_tiny_dataset(tmp_path)
    batches = batches_of(open_dataset(store), STAGES)
    plan = SimpleNamespace(settings=Settings(train=STAGES), stages=batches.order.stages)
    monkeypatch.setattr(torch_dataset, "read_plan", lambda run, dataset: plan)
    return store.uri, batches


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_loader_gives_the_batches_of_the_trainer(run: tuple[str, Batches], workers: int) -> None:
    loader = DataLoader(SampleDataset(run[0]), batch_size=8, num_workers=workers)
    batches = list(loader)
    assert len(batches) == 4
    for step, batch in enumerate(batches):
        rows = run[1].batch(step)
        assert torch.equal(batch["inputs"], rows.inputs_BT)
        assert torch.equal(batch["targets"], rows.targets_BT)
        assert torch.equal(batch["documents"], rows.documents_BT)
        assert torch.equal(batch["source"], rows.sources_B)


def test_a_later_stage_and_single_samples(run: tuple[str, Batches]) -> None:
    samples = SampleDataset(run[0], stage=1)
    assert len(samples) == 24
    assert torch.equal(samples[5]["inputs"], run[1].batch(5).inputs_BT[1])
    assert len(list(samples)) == 24
    for number in (24, -1):
        with pytest.raises(IndexError, match=f"sample {number} of 24"):
            samples[number]


def test_a_worker_is_sent_the_folder_only(run: tuple[str, Batches]) -> None:
    samples = SampleDataset(run[0])
    first = samples[0]["inputs"]
    sent = pickle.dumps(samples)
    assert len(sent) < 500
    assert torch.equal(pickle.loads(sent)[0]["inputs"], first)


def test_a_shard_whose_checksums_were_fitted_is_refused(run: tuple[str, Batches]) -> None:
    expected = replace_token(Store(run[0]), "web/train")
    with pytest.raises(ContractError, match=rf"expected SHA-256 {expected}, got \w{{64}}"):
        SampleDataset(run[0])[0]


def test_a_run_that_cannot_be_written_to_is_read(run: tuple[str, Batches], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(store: Store, name: str, data: bytes) -> None:
        raise OSError(30, "Read-only file system", name)

    settle(Store(run[0]))
    monkeypatch.setattr(Store, "write_atomic", refuse)
    assert torch.equal(SampleDataset(run[0])[0]["inputs"], run[1].batch(0).inputs_BT[0])
    assert not Store(run[0]).exists(VERIFIED_NAME)
