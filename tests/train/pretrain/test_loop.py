"""The training loop: equal to plain torch on one rank and on two, for every objective; its errors and output files.

Resumes are tested in test_resume.py, failures in test_survive.py.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.filesystem import FileSystemReader

from schemas.manifest import read_run, write_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support import tiny_runs
from tests.support.tiny_dataset import flip_byte, make_tiny_dataset
from tests.support.tiny_runs import (
    RECIPE,
    assert_equal_up_to_rounding,
    assert_same_bits,
    copied,
    cut_back,
    deviations,
    events,
    make_run,
    metrics,
    notes,
    opened,
    state_at,
    trained,
)
from train.data.batches import Batches
from train.data.rows import IGNORED, Rows, concatenate_rows
from train.model.transformer import build_model, initial_weight
from train.optim.schedule import learning_rate
from train.parallel.layout import rows_of
from train.parallel.parallelize import SplitModel
from train.plan.plan import read_plan
from train.pretrain.__main__ import main
from train.pretrain.step import Learner

pytestmark = pytest.mark.dist

STEPS = 20
SPLIT = ("layout.micro_batch=1", "layout.activation_checkpointing=full")

# ------------------------------------------------------------------------------------------------------- the reference


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other on a busy machine take many times as long as one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Expected:
    """The expected figures of a step."""

    loss: float
    norm: float
    rate: float
    losses: dict[str, float]
    tokens: dict[str, int]


def plain(folder: Path) -> tuple[list[Expected], float]:
    """Return the steps of a loop without ranks and micro-batches, with torch's own loss, norm, clipping and AdamW.

    The second value is the held-out loss at its end.
    """
    plan, batches = read_plan(Store(str(folder))), opened(folder)
    optim, train = plan.settings.optim, plan.settings.train
    model = build_model(plan.shape, causal=train.objective != "mlm").to_empty(device="cpu")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(initial_weight(name, weight.shape, plan.shape, train.seed))
    decayed = [p for name, p in model.named_parameters() if p.ndim == 2 and name != "embedding.weight"]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or name == "embedding.weight"]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    actual = []
    for step in range(1, plan.steps + 1):
        rows = batches.batch(step - 1)
        loss, z_loss, losses_B, counts_B = losses_of(model, rows)
        (loss + optim.z_loss * z_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = learning_rate(step, plan.course, optim)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        chosen = {name: rows.sources_B == i for i, name in enumerate(batches.order.sources)}
        tokens = {name: int(counts_B[rows_B].sum()) for name, rows_B in chosen.items() if counts_B[rows_B].sum()}
        means = {name: losses_B[chosen[name]].sum().item() / number for name, number in tokens.items()}
        actual.append(Expected(loss.item(), norm.item(), rate, means, tokens))
    with torch.no_grad():
        return actual, losses_of(model, batches.heldout().rows)[0].item()


def losses_of(model: torch.nn.Module, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean loss, mean (log Z)², and sum and number of the losses of every row."""
    logits = model(rows.inputs_BT, rows.documents_BT)
    counts = rows.targets_BT != IGNORED
    losses_BT = F.cross_entropy(logits.flatten(0, 1), rows.targets_BT.flatten(), reduction="none").view_as(counts)
    squares = torch.logsumexp(logits, -1)[counts] ** 2
    return losses_BT.sum() / counts.sum(), squares.mean(), losses_BT.detach().double().sum(1), counts.sum(1)


def assert_equals_plain(folder: Path) -> None:
    """Loss within 1e-6 and norm within 1e-5 at every step, held-out loss and losses of the sources too."""
    expected, heldout = plain(folder)
    actual = metrics(folder)
    assert [record.step for record in actual] == list(range(1, len(expected) + 1))
    for record, expected_value in zip(actual, expected, strict=True):
        assert record.loss == pytest.approx(expected_value.loss, rel=1e-6)
        assert record.grad_norm == pytest.approx(expected_value.norm, rel=1e-5)
        assert record.learning_rate == expected_value.rate
        assert record.source_tokens == expected_value.tokens
        assert record.losses == pytest.approx(expected_value.losses, rel=1e-6)
    assert actual[-1].heldout_loss == pytest.approx(heldout, rel=1e-6)


# -------------------------------------------------------------------------------------------------------- disturbances


@contextlib.contextmanager
def wrong_rows() -> Iterator[None]:
    """The second rank reads the rows of the step before."""
    right = Batches.batch

    def batch(self: Batches, step: int, rows: range | None = None) -> Rows:
        return right(self, step - 1 if rows is not None and rows.start > 0 and step else step, rows)

    with mock.patch.object(Batches, "batch", batch):
        yield


@contextlib.contextmanager
def averaged_per_rank() -> Iterator[None]:
    """The common mistake: each rank takes the mean over its own targets, then the ranks are averaged."""
    right = SplitModel.backward

    def backward(self: SplitModel, rows: list[Rows], scale: float, counts_right: bool = False) -> Any:
        own = sum(part.num_targets for part in rows)
        return right(self, rows, 1 / (own * torch.distributed.get_world_size()), counts_right)

    with mock.patch.object(SplitModel, "backward", backward):
        yield


@contextlib.contextmanager
def recorded(folder: str) -> Iterator[None]:
    """Every rank keeps the rows that it learns from."""
    right, kept = Learner.compute, []

    def compute(self: Learner, step: int, rows: Rows, *arguments: Any) -> Any:
        kept.append((rows.inputs_BT, rows.targets_BT, rows.documents_BT, rows.sources_B))
        return right(self, step, rows, *arguments)

    with mock.patch.object(Learner, "compute", compute):
        yield
    torch.save(kept, f"{folder}/rows-{torch.distributed.get_rank()}.pt")


# ------------------------------------------------------------------------------------------------------------ fixtures


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank to its end; tests must not change it."""
    return trained(make_run(tmp_path_factory.mktemp("full") / "run"), 1)


@pytest.fixture(scope="module")
def halfway(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, killed after step 15; tests must not change it."""
    return cut_back(copied(full, tmp_path_factory.mktemp("halfway") / "run"), 15)


def command(run: Path, *settings: str) -> int:
    """Run the command in this process; return its exit code."""
    return main(["--run", str(run), *(part for text in settings for part in ("--set", text))])


def files(run: Path) -> dict[str, bytes]:
    """Return the files that an error must not change."""
    return {str(path): path.read_bytes() for path in (run / "train").rglob("*.json*") if path.name != "verified.json"}


# -------------------------------------------------------------------------------------------------------- mathematics


def test_equals_a_plain_torch_loop(full: Path) -> None:
    assert_equals_plain(full)
    actual = metrics(full)
    assert [record.step for record in actual if record.heldout_loss is not None] == [7, 14, 20]
    assert actual[-1].heldout_loss < actual[6].heldout_loss - 0.05
    assert {record.tokens for record in actual} == {5 * 32}


def test_micro_batches_do_not_enter_the_mathematics(full: Path, tmp_path: Path) -> None:
    for number, size in enumerate((1, 2, 3)):
        run = trained(make_run(tmp_path / str(number)), 1, f"layout.micro_batch={size}", *SPLIT[1:])
        assert_equal_up_to_rounding(run, full)


@pytest.mark.parametrize("overrides", [(), SPLIT, ("layout.data=ddp",), ("layout.pipeline=2", "layout.micro_batch=2")])
def test_two_ranks_equal_one(full: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run = trained(make_run(tmp_path / "run"), 2, *overrides)
    assert_equal_up_to_rounding(run, full)
    for record in metrics(run):
        parts = [record.losses[name] * number for name, number in record.source_tokens.items()]
        assert sum(record.source_tokens.values()) == record.tokens
        assert sum(parts) / record.tokens == pytest.approx(record.loss, rel=1e-6)


@pytest.mark.parametrize("mistake", [wrong_rows, averaged_per_rank])
def test_a_wrong_computation_fails_the_comparison(full: Path, tmp_path: Path, mistake: Any) -> None:
    run = trained(make_run(tmp_path / "run"), 2, "layout.data=ddp", during=[(mistake, ())])
    loss, norm = deviations(run, full)
    assert loss > 1e-5
    assert norm > 1e-3


def test_two_ranks_learn_from_the_same_global_batches_bit_for_bit(full: Path, tmp_path: Path) -> None:
    run = trained(make_run(tmp_path / "run"), 2, "layout.data=ddp", during=[(recorded, (str(tmp_path),))])
    first, second = (torch.load(tmp_path / f"rows-{rank}.pt") for rank in range(2))
    assert len(first) == len(second) == STEPS
    batches = opened(run)
    for step, parts in enumerate(zip(first, second, strict=True)):
        assert [len(part[0]) for part in parts] == [2, 3]
        together, whole = concatenate_rows([Rows(*part) for part in parts]), batches.batch(step)
        for name in ("inputs_BT", "targets_BT", "documents_BT", "sources_B"):
            assert torch.equal(getattr(together, name), getattr(whole, name))
        assert [row for rank in range(2) for row in rows_of(5, 2, rank)] == list(range(5))


DDP = {"layout": {"data": "ddp"}}
LEARNING = {
    "train": {"seq_len": 32, "global_batch": 6, "steps": 40, "eval_every": 10},
    "optim": {"learning_rate": 5e-3, "warmup_steps": 20},
    "checkpoint": {"every": 0},
}
STAGES = [
    {"tokens": 20 * 6 * 32, "weights": {"web": 3, "books": 1}},
    {
        "tokens": 20 * 3 * 64,
        "seq_len": 64,
        "global_batch": 3,
        "weights": {"web": 1, "books": 1},
        "learning_rate": 2e-3,
        "schedule": "linear",
        "final_lr_share": 0.5,
    },
]


@pytest.mark.parametrize(
    ("ranks", "changes", "falls"),
    [
        (1, {"optim": {"z_loss": 1e-2}}, 0.3),
        (2, {"train": {"objective": "mlm", "mask_share": 0.4}, "optim": {"learning_rate": 2e-3}} | DDP, 0.1),
        (2, {"train": {"objective": "span", "document_mask": False}}, 0.1),
        (2, {"train": {"packing": "best_fit"}} | DDP, 0.3),
    ],
    ids=["z_loss", "mlm", "span", "best_fit"],
)
def test_everything_learns_and_equals_plain_torch(tmp_path: Path, ranks: int, changes: Any, falls: float) -> None:
    changes = {name: LEARNING.get(name, {}) | changes.get(name, {}) for name in {*LEARNING, *changes}}
    assert_learns_and_equals_plain_torch(trained(make_run(tmp_path / "run", changes), ranks), falls)


def assert_learns_and_equals_plain_torch(run: Path, falls: float) -> None:
    """Compare every step with plain torch's; the held-out loss falls by a number of nats after step 10."""
    assert_equals_plain(run)
    actual = metrics(run)
    assert len(actual) == 40
    assert actual[-1].heldout_loss < actual[9].heldout_loss - falls
    assert actual[-1].heldout.keys() == {"web", "books"}


def test_stages_change_length_batch_mixture_and_rate(tmp_path: Path) -> None:
    changes = LEARNING | {"train": LEARNING["train"] | {"stages": STAGES, "steps": None}}
    run = trained(make_run(tmp_path / "run", changes), 2, "layout.data=zero1")
    assert_learns_and_equals_plain_torch(run, 0.3)
    actual = metrics(run)
    assert [(record.stage, record.tokens) for record in actual] == [(1, 192)] * 20 + [(2, 192)] * 20
    assert [sum(record.source_tokens["books"] for record in actual[first : first + 20]) for first in (0, 20)] == [
        192 * 20 / 4,
        192 * 20 / 2,
    ]
    assert actual[20].learning_rate == pytest.approx(2e-3 * (1 - 0.5 / 20))
    assert actual[39].learning_rate == pytest.approx(1e-3)


# ----------------------------------------------------------------------------------------------------------- precision


def dtypes(run: Path) -> set[torch.dtype]:
    """Number formats in the last checkpoint."""
    metadata = FileSystemReader(run / notes(run)[-1].name).read_metadata()
    return {tensor.properties.dtype for tensor in metadata.state_dict_metadata.values()}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("precision", "loss_bounds", "norm_bound"),
    [("bf16", (1e-5, 1e-3), 1e-2), ("fp16", (1e-6, 2e-4), 2e-3), ("fp8", (3e-4, 5e-3), 5e-2)],
)
def test_half_precision_stays_near_fp32(
    full: Path, tmp_path: Path, ranks: int, precision: str, loss_bounds: tuple[float, float], norm_bound: float
) -> None:
    # Seen on one and two ranks: loss 1.5e-4, 2.6e-5, 7e-4; norm 1.9e-3, 2.1e-4, 6.6e-3.
    run = trained(make_run(tmp_path / "run", {"train": {"precision": precision}}), ranks)
    loss, norm = deviations(run, full)
    assert loss_bounds[0] < loss < loss_bounds[1]
    assert norm < norm_bound
    assert dtypes(run) == {torch.float32}
    assert {record.loss_scale for record in metrics(run)} == ({65536.0} if precision == "fp16" else {None})


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_fp16_halves_the_scale_where_it_overflows_and_doubles_it_again(tmp_path: Path, ranks: int) -> None:
    changes = {
        "train": {"precision": "fp16", "eval_every": 0, "eval_sequences": None},
        "optim": {"initial_loss_scale": 2.0**24, "loss_scale_steps": 8, "learning_rate": 5e-3, "warmup_steps": 2},
        "checkpoint": {"every": 1, "keep": 30, "first": True},
        "guard": {"max_non_finite": 0},
    }
    run = trained(make_run(tmp_path / "run", changes | DDP), ranks)
    actual, skipped = metrics(run), [record.step for record in metrics(run) if record.skipped]
    assert 1 <= len(skipped) < 10
    assert skipped[0] == 1
    scale, finite, before = 2.0**24, 0, state_at(run, 0)
    for record in actual:
        assert record.loss_scale == scale
        assert record.loss is not None
        assert (record.grad_norm is None) == record.skipped
        finite = 0 if record.skipped else finite + 1
        scale = scale / 2 if record.skipped else scale * (2 if finite == 8 else 1)
        finite %= 8
        after = state_at(run, record.step)
        same = [name for name in after if torch.equal(before[name], after[name])]
        assert len(same) == (len(after) if record.skipped else 0)
        before = after
    results = events(run, "skipped")
    assert [(event.step, event.loss_scale) for event in results] == [
        (step, actual[step - 1].loss_scale) for step in skipped
    ]
    assert notes(run)[-1].progress.guard.skipped == len(skipped)
    assert notes(run)[-1].progress.loss_scale == scale
    assert actual[-1].loss < actual[0].loss - 0.05


# ------------------------------------------------------------------------------------------------------ end of the run


def scalars(run: Path, name: str) -> dict[int, float]:
    """Return a curve as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "train/tensorboard"))
    accumulator.Reload()
    return {event.step: event.value for event in accumulator.Scalars(name)}


def test_the_end_of_a_run(full: Path) -> None:
    run, last = Store(str(full)), metrics(full)[-1]
    manifest, dataset = run.read_json("train/manifest.json"), open_dataset(run)
    note = notes(full)[-1]
    assert manifest == {
        "dataset": dataset.digest,
        "tokenizer": note.identity.tokenizer,
        "plan": note.identity.plan,
        "skip_list": note.identity.skip_list,
        "steps": STEPS,
        "loss": last.loss,
        "heldout_loss": last.heldout_loss,
        "checkpoint": "train/checkpoints/step-000020",
    }
    assert [checkpoint.step for checkpoint in notes(full)] == [15, 20]
    assert (note.layout.ranks, note.layout.threads, note.layout.device) == (1, 1, "cpu")
    assert note.identity.settings["train.stages"][0]["global_batch"] == 5
    assert events(full, "resumed") == []


def test_metrics_table_and_tensorboard_agree(full: Path) -> None:
    records, table = metrics(full), pq.read_table(full / "train/metrics.parquet").to_pylist()
    assert len(json.loads((full / "train/metrics.jsonl").read_bytes().splitlines()[0])) > 8
    for record, row in zip(records, table, strict=True):
        assert {name: row[name] for name in record.flat(".")} == record.flat(".")
        assert [value for name, value in row.items() if name not in record.flat(".")] == [None] * (
            len(row) - len(record.flat("."))
        )
    curves = {"loss": "loss", "loss/web": "loss.web", "heldout/books/perplexity": "heldout.books.perplexity"}
    for tag, column in curves.items():
        expected = {row["step"]: row[column] for row in table if row[column] is not None}
        assert scalars(full, tag) == pytest.approx(expected, rel=1e-6)
    assert list(scalars(full, "heldout_loss")) == [7, 14, 20]


def test_a_source_without_training_has_its_held_out_losses(tmp_path: Path) -> None:
    """A weight of 0 excludes a source from training; its held-out text is measured all the same, and after a resume."""
    changes = {"train": {"weights": {"web": 1, "books": 0}, "steps": 8, "eval_every": 3}}
    folder = trained(make_run(tmp_path / "run", changes), 1)
    measured = [step for step in metrics(folder) if step.heldout]
    assert [(step.step, [*step.heldout], [*step.losses]) for step in measured] == [
        (number, ["books", "web"], ["web"]) for number in (3, 6, 8)
    ]
    table = pq.read_table(folder / "train/metrics.parquet")
    assert table.column("heldout.books.loss").to_pylist()[5] == measured[1].heldout["books"].loss
    assert "loss.books" not in table.column_names
    assert_same_bits(trained(cut_back(copied(folder, tmp_path / "cut"), 5), 1), folder)


def test_again_after_the_end_changes_nothing(full: Path, tmp_path: Path, capsys: Any) -> None:
    run = copied(full, tmp_path / "run")
    before = files(run)
    assert command(run) == 0
    assert capsys.readouterr().out == "already trained to the end\n"
    assert files(run) == before


def test_an_end_without_its_manifest_is_concluded_again(full: Path, tmp_path: Path) -> None:
    run = copied(full, tmp_path / "run")
    (run / "train/manifest.json").unlink()
    trained(run, 1)
    assert (run / "train/manifest.json").read_bytes() == (full / "train/manifest.json").read_bytes()
    assert_same_bits(run, full)


def test_the_seed_is_a_checkpoint_that_is_kept(full: Path, tmp_path: Path) -> None:
    run = trained(make_run(tmp_path / "run", {"checkpoint": {"first": True}}), 2, "layout.data=ddp")
    assert [note.step for note in notes(run)] == [0, 15, 20]
    shape = read_plan(Store(str(run))).shape
    for name, value in state_at(run, 0).items():
        kind, _, parameter = name.partition(".")
        expected = initial_weight(parameter, value.shape, shape, 0) if kind == "model" else torch.zeros_like(value)
        assert torch.equal(value, expected)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.learning_rte=1"], "train.learning_rte: no such key"),
        (["optim.learning_rte=1"], "optim.learning_rte: no such key (did you mean 'learning_rate'?)"),
        (
            ["plan.num_layers=3"],
            "expected settings that only affect training, got plan.num_layers=3, which size the model",
        ),
        (["optim.learning_rate=0.003"], "optim.learning_rate: expected 0.001, got 0.003"),
        (["train.seed=1", "optim.clip_norm=2.0"], "optim.clip_norm: expected 1.0, got 2.0\n  train.seed: expected 0"),
        (["train.steps=21"], "train.steps: expected 20, got 21"),
        (["train.precision=bf16"], "train.precision: expected fp32, got bf16"),
        (["train.skip_file=none.txt"], "expected a file"),
        (["train.objective=causal", "train.mask_share=0.2"], "mask_share requires objective = mlm or span"),
        (["optim.initial_loss_scale=8"], "optim.initial_loss_scale: expected train.precision = fp16, got fp32"),
        (["optim.loss_scale_steps=8"], "optim.loss_scale_steps: expected train.precision = fp16, got fp32"),
        (["optim.momentum=0.9"], "momentum: expected optimizer = muon or normuon, got adamw"),
        (["optim.decay_share=0.2"], "decay_share: expected schedule = wsd, got cosine"),
        (["layout.compress=topk"], "compress requires data = ddp or replicate > 1"),
        (["layout.compress_rank=2"], "compress_rank requires compress = powersgd"),
        (["layout.context_by=keys"], "context_by requires context > 1"),
        (["guard.on_spike=rewind"], "on_spike = rewind requires spike_sigmas"),
        (["guard.min_improvement=0.1"], "min_improvement requires patience"),
        (["checkpoint.keep_every=7"], "keep_every: expected a multiple of every = 5, got 7"),
        (["layout.tensor=2"], "expected 1 rank(s), got tensor 2 = 2, which does not divide that"),
        (["train.profile=30-31"], "expected steps of the run, 1 to 20, got '30-31'"),
    ],
)
def test_refusals(halfway: Path, capsys: Any, settings: list[str], message: str) -> None:
    before = files(halfway)
    assert command(halfway, *settings) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("penstock: ")
    assert files(halfway) == before


@pytest.mark.parametrize("setting", ["optim.schedule=plateau", "guard.patience=3"])
def test_what_listens_to_held_out_losses_wants_some(tmp_path: Path, capsys: Any, setting: str) -> None:
    run = make_run(tmp_path / "run")
    assert command(run, setting, "train.eval_every=0") == 2
    shown = setting.replace("=", " = ")
    assert f"{shown}: expected held-out losses, got train.eval_every = 0" in capsys.readouterr().err
    changes = {"optim": {"schedule": "plateau"}, "guard": {"patience": 50}}
    listening = trained(make_run(tmp_path / "listening", changes), 1)
    assert command(cut_back(listening, 15), "train.eval_every=5") == 2
    assert "train.eval_every: expected 7, got 5" in capsys.readouterr().err


def test_a_checkpoint_of_another_dataset_is_refused(halfway: Path, tmp_path: Path, capsys: Any) -> None:
    run = copied(halfway, tmp_path / "run")
    old = open_dataset(Store(str(run))).digest
    shutil.rmtree(run / "tokens")
    shutil.rmtree(run / "tokenizer")
    new = open_dataset(make_tiny_dataset(run, seed=1)).digest
    assert command(run) == 2
    assert f"expected dataset {old}, got {new}" in capsys.readouterr().err
    (run / "train/plan.json").unlink()
    write_run(Store(str(run)), read_run(Store(str(run))).model_copy(update={"recipe": RECIPE}))
    assert command(run) == 2
    assert f"dataset: expected {old}, got {new}" in capsys.readouterr().err


def test_the_skip_list_may_grow_ahead_of_the_checkpoint_only(full: Path, halfway: Path, tmp_path: Path) -> None:
    run, skips = copied(halfway, tmp_path / "run"), "train.skip_file=skips.txt"
    (run / "train/skips.txt").write_text("3\n")
    assert "got [3], which the checkpoint has already used" in tiny_runs.train(run, 1, skips)[0].error
    (run / "train/skips.txt").write_text(f"{15 * 5}  # the next row\n")
    trained(run, 1, skips)
    before, after = tiny_runs.computed(full), tiny_runs.computed(run)
    assert after[:15] == before[:15]
    assert after[15]["loss"] != before[15]["loss"]
    cut_back(run, 15)
    (run / "train/skips.txt").write_text("")
    results = tiny_runs.train(run, 1, skips)[0]
    assert results.code == 0  # the checkpoint of step 15 was written before the list had an entry
    (run / "train/skips.txt").write_text(f"{19 * 5}\n{99 * 5}\n")
    assert "got [95], which the checkpoint has already used" in tiny_runs.train(run, 1, skips)[0].error


def test_a_skip_list_that_lost_an_entry_is_refused(halfway: Path, tmp_path: Path) -> None:
    run, skips = copied(halfway, tmp_path / "run"), "train.skip_file=skips.txt"
    (run / "train/skips.txt").write_text("76\n90\n")
    trained(run, 1, skips)
    (run / "train/skips.txt").write_text("76\n")
    assert "expected the checkpoint's 2 entries with digest" in tiny_runs.train(run, 1, skips)[0].error


def test_a_refusal_reaches_every_rank(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    path = next(run.glob("tokens/*/web/train/shard-00000.arrow"))
    results = tiny_runs.train(run, 2, "train.global_batch=1")
    assert [item.error.partition(":")[0] for item in results] == ["ConfigError", "FirstRankFailed"]
    assert "expected at least 2 sequences, one for each data-parallel group of ranks, got 1" in results[0].error
    flip_byte(path)
    results = tiny_runs.train(run, 2)
    assert [item.error.partition(":")[0] for item in results] == ["ContractError", "FirstRankFailed"]
    assert "expected SHA-256" in results[0].error
    assert str(path) in results[0].error
    assert results[0].error.partition(":")[2] == results[1].error.partition(":")[2]
    assert not (run / "train/plan.json").exists()
