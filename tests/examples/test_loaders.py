"""The loaders in `examples/loaders`: each yields what its codebase expects, in the order of the plan."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.loaders.nanochat import penstock_loader
from examples.loaders.olmo_core import PenstockItems
from examples.loaders.olmo_core_files import write_streams
from examples.loaders.torchtitan import PenstockSamples
from schemas.manifest import read_run, write_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.paths import ROOT
from tests.support.tiny_dataset import make_tiny_dataset
from train.config.settings import load_settings
from train.data.batches import Batches
from train.plan.make_plan import make_plan
from train.plan.plan import open_order, read_plan, write_plan

T, BATCH = 64, 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Batches]:
    """A planned run with sequences of 64 tokens, and the reader of the trainer's own batches."""
    store = make_tiny_dataset(tmp_path_factory.mktemp("run"))
    recipe = {"train": {"seq_len": T, "global_batch": BATCH, "document_mask": False}, "plan": {"num_kv_heads": 2}}
    write_run(store, read_run(store).model_copy(update={"recipe": recipe}))
    dataset = open_dataset(store)
    write_plan(store, make_plan(store, dataset, load_settings(recipe, [], "recipe")))
    plan = read_plan(store, dataset)
    return store.uri, Batches(dataset, plan.settings.train, open_order(store, dataset, plan))


@pytest.mark.parametrize("path", sorted((ROOT / "examples/loaders").glob("*.py")), ids=lambda path: path.stem)
def test_a_loader_has_at_most_30_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 30


def test_nanochat(run: tuple[str, Batches]) -> None:
    batches = list(islice(penstock_loader(run[0], BATCH, T), 3))
    for step, (inputs, targets) in enumerate(batches):
        rows = run[1].batch(step)
        assert torch.equal(inputs, rows.inputs_BT)
        assert torch.equal(targets, rows.targets_BT.masked_fill(rows.targets_BT == -100, -1))
        assert (targets >= -1).all()
    assert (inputs.dtype, inputs.shape) == (torch.int64, (BATCH, T))


def test_nanochat_resumes_with_another_number_of_ranks(run: tuple[str, Batches]) -> None:
    one = list(islice(penstock_loader(run[0], BATCH, T), 3))
    ranks = [next(penstock_loader(run[0], BATCH // 2, T, rank, 2, step=2)) for rank in range(2)]
    assert torch.equal(one[2][0], torch.cat([inputs for inputs, _ in ranks]))


def test_nanochat_rejects_another_length(run: tuple[str, Batches]) -> None:
    with pytest.raises(ValueError, match=r"T: expected the train.seq_len of .*, 64, got 32\."):
        next(penstock_loader(run[0], BATCH, 32))


def test_nanochat_starts_again_after_the_last_sample(run: tuple[str, Batches]) -> None:
    number = run[1].order.stages[0].num_samples
    first = next(penstock_loader(run[0], 1, T))
    again = next(penstock_loader(run[0], 1, T, step=number))
    assert torch.equal(first[0], again[0])


def test_torchtitan(run: tuple[str, Batches]) -> None:
    rows = run[1].batch(0)
    for rank in range(2):
        own = list(islice(PenstockSamples(run[0], rank, 2), 3))
        assert torch.equal(torch.stack([item["input"] for item, _ in own]), rows.inputs_BT[rank::2])
        assert torch.equal(torch.stack([labels for _, labels in own]), rows.targets_BT[rank::2])


def test_torchtitan_resumes_with_another_number_of_ranks(run: tuple[str, Batches]) -> None:
    before = PenstockSamples(run[0], 0, 2)
    list(islice(before, 3))
    assert before.state_dict() == {"rows": 6}
    after = PenstockSamples(run[0], 2, 3)
    after.load_state_dict(before.state_dict())
    assert torch.equal(next(iter(after))[0]["input"], run[1].batch(1).inputs_BT[2])


def test_olmo_core_items(run: tuple[str, Batches]) -> None:
    items, rows = PenstockItems(run[0]), run[1].batch(0)
    assert len(items) == run[1].order.stages[0].num_samples
    assert torch.equal(items[1]["input_ids"], rows.inputs_BT[1])
    mask = items[1]["label_mask"]
    assert (mask.dtype, mask.shape, mask[0].item()) == (torch.bool, (T,), False)
    # OLMo-core's labels are the tokens shifted by one: equal to the targets of Penstock where they have a loss.
    labels = torch.where(mask, rows.inputs_BT[1], -100)[1:]
    assert torch.equal(labels, rows.targets_BT[1][:-1])


def test_olmo_core_files(run: tuple[str, Batches], tmp_path: Path) -> None:
    dataset = open_dataset(Store(run[0]))
    paths = write_streams(run[0], tmp_path / "npy")
    sizes = {source: np.memmap(path, dtype=dataset.tokenizer.dtype, mode="r").size for source, path in paths.items()}
    assert sizes == dataset.num_tokens()
    assert {*paths} == {"web", "books"}
    assert np.memmap(paths["web"], dtype=dataset.tokenizer.dtype, mode="r")[0] == dataset.tokenizer.reserved["bos"]
