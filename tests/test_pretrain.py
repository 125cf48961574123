"""The training loop: equal to plain torch at one rank and at two, in any micro-batching, stopped, killed and resumed.

Two ranks play every scenario in a row, since starting costs more than training; one `torchrun` of the real command is
there to lose a rank to kill -9.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_dataset import flip_byte, make_tiny_dataset

from schemas.errors import PenstockError
from schemas.manifest import read_run, write_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from train import pretrain
from train.checkpoint import Note, read_state, standing_notes, training_state
from train.data import open_batches
from train.metrics import StepMetrics, read_metrics
from train.model import Transformer, build_model, token_losses
from train.optim import learning_rate
from train.parallel import as_fsdp, count_targets, rows_of_rank, set_initial_weights
from train.plan import read_plan
from train.prepare import prepare
from train.ranks import Ranks, open_ranks

pytestmark = pytest.mark.dist

STEPS = 20
# A batch of 5 and a feed-forward width of 75 divide by nothing, so every split is uneven. The warm-up is half the run
# because Adam's first updates have full size wherever the gradient is beyond rounding. Seen: one element in 83,280 had
# a gradient of -4e-11 in one split and -3e-9 in another; at a first learning rate of 5e-4 it moved the loss by 1e-6.
RECIPE = {
    "plan": {"num_layers": 2, "d_model": 48, "num_heads": 3, "num_kv_heads": 1, "d_ffw": 75, "tie_embeddings": False},
    "train": {
        "seq_len": 32,
        "global_batch": 5,
        "steps": STEPS,
        "learning_rate": 1e-3,
        "warmup_steps": 10,
        "eval_every": 7,
        "eval_sequences": 5,
        "checkpoint_every": 5,
    },
}
STOP_AFTER = 11
SPLIT = ["train.micro_batch=1", "train.activation_checkpointing=full", "train.reshard=false"]


# ------------------------------------------------------------------------------------ scenarios, played at both sizes


class Stopping:
    """Batches that send this process SIGTERM while the update after `after` steps is being made."""

    def __init__(self, batches, after: int = STOP_AFTER, everywhere: bool = False):
        self._batches, self._after, self._everywhere = batches, after, everywhere
        self.order = batches.order

    def batch(self, step: int, rows: range) -> torch.Tensor:
        if step == self._after and (self._everywhere or rows.start > 0):
            os.kill(os.getpid(), signal.SIGTERM)
        return self._batches.batch(step, rows)

    def heldout(self, count: int) -> torch.Tensor:
        return self._batches.heldout(count)


class WrongRows(Stopping):
    """Batches that give the second rank the rows of the step before."""

    def batch(self, step: int, rows: range) -> torch.Tensor:
        right = super().batch(step, rows)
        return self._batches.batch(step - 1, rows) if rows.start > 0 and step else right


def averaged_per_rank(model: Transformer, parts, num_targets: float) -> float:
    """The common mistake: each rank takes the mean over its own targets, then the ranks are averaged."""
    own, total = count_targets(parts) * torch.distributed.get_world_size(), 0.0
    for number, (ids, targets) in enumerate(parts, start=1):
        as_fsdp(model).set_requires_gradient_sync(number == len(parts))
        losses = token_losses(model(ids), targets).sum()
        (losses / own).backward()
        total += losses.item() * num_targets / own
    return total


def run_quietly(run: Path, ranks: Ranks, overrides: Sequence[str] = ()) -> int:
    return pretrain.train(Store(str(run)), overrides, ranks)


def run_with_batches(run: Path, ranks: Ranks, wrap: Callable) -> int:
    setup = prepare(Store(str(run)), [], ranks)
    return pretrain.pretrain(replace(setup, batches=wrap(setup.batches)), ranks)


def play(root: Path, ranks: Ranks) -> dict:
    """Every two-rank scenario; returns what cannot be read from the run folders."""
    told = {"full": run_quietly(root / "full", ranks), "split": run_quietly(root / "split", ranks, SPLIT)}
    told["killed"] = run_quietly(root / "killed", ranks, SPLIT)
    told["stopped"] = run_with_batches(root / "stopped", ranks, Stopping)
    ranks.on_first(lambda: shutil.copytree(root / "stopped", root / "to-one"))
    told["resumed"] = run_quietly(root / "stopped", ranks)
    told["from-one"] = run_quietly(root / "from-one", ranks)
    run_with_batches(root / "wrong-rows", ranks, lambda batches: WrongRows(batches, 3))
    right = pretrain.accumulate_gradient
    pretrain.accumulate_gradient = averaged_per_rank
    run_with_batches(root / "averaged", ranks, lambda batches: Stopping(batches, 3))
    pretrain.accumulate_gradient = right
    for name, overrides in (("flipped", []), ("crowded", ["train.global_batch=1"])):
        try:
            told[name] = run_quietly(root / name, ranks, overrides)
        except PenstockError as error:
            told[name] = [type(error).__name__, str(error)]
    store = Store(str(root / "full"))
    batches = open_batches(open_dataset(store), read_plan(store).train_config, 5)
    told["rows"] = [batches.batch(step, rows_of_rank(5, ranks)).tolist() for step in range(STEPS)]
    return told


def play_as(rank: int, port: int, root: Path) -> None:
    """Play the scenarios as one of two ranks, with the variables that torchrun would set."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with open_ranks() as ranks:
        (root / f"told-{rank}.json").write_text(json.dumps(play(root, ranks)))


# ----------------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder that nothing has been trained in; copy it."""
    folder = tmp_path_factory.mktemp("dataset") / "run"
    run = make_tiny_dataset(folder)
    write_run(run, read_run(run).model_copy(update={"recipe": RECIPE}))
    return folder


def copy(dataset: Path, to: Path) -> Path:
    shutil.copytree(dataset, to)
    return to


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """One thread for this process, since two that wait for each other on a busy machine take many times as long."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@pytest.fixture(scope="module")
def one(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a single process: `full`, `split` into micro-batches of 1, and `stopped` after STOP_AFTER steps."""
    root = tmp_path_factory.mktemp("one")
    with on_one_core(), open_ranks() as ranks:
        assert run_quietly(copy(dataset, root / "full"), ranks) == 0
        assert run_quietly(copy(dataset, root / "split"), ranks, SPLIT) == 0
        stop = partial(Stopping, everywhere=True)
        assert run_with_batches(copy(dataset, root / "stopped"), ranks, stop) == 128 + signal.SIGTERM
    return root


@pytest.fixture(scope="module")
def killed(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run of the real command that lost a rank, and its exit code."""
    run = copy(dataset, tmp_path_factory.mktemp("killed") / "run")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "train.pretrain", str(run), *(part for text in SPLIT for part in ("--set", text))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_step(run, 7, process)
    os.kill(children(process)[-1], signal.SIGKILL)
    return run, process.wait(timeout=60)


@pytest.fixture(scope="module")
def two(
    dataset: Path, one: Path, killed: tuple[Path, int], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict]]:
    """Runs of two ranks, and what each rank told. Both are forked from one process that has torch loaded."""
    root = tmp_path_factory.mktemp("two")
    for name in ("full", "split", "stopped", "wrong-rows", "averaged", "flipped", "crowded"):
        copy(dataset, root / name)
    copy(one / "stopped", root / "from-one")
    copy(killed[0], root / "killed")
    flip_byte(next((root / "flipped").glob("tokens/*/web/train/shard-00000.arrow")))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train.pretrain"])
    processes = [context.Process(target=play_as, args=(rank, port, root), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
    assert [process.exitcode for process in processes] == [0, 0]
    return root, [json.loads((root / f"told-{rank}.json").read_text()) for rank in range(2)]


def children(process: subprocess.Popen) -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in path.read_text().split()]


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    """Return as soon as the metrics hold this step; fail if the process ends before."""
    path, limit = run / "train/metrics.jsonl", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < limit:
        with contextlib.suppress(FileNotFoundError):
            if path.read_bytes().count(b"\n") >= step:
                return
        time.sleep(0.002)
    pytest.fail(f"step {step} was not seen, exit code {process.returncode}")


# -------------------------------------------------------------------------------------------------------- comparisons

EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens", "heldout_loss")


def metrics(run: Path) -> list[StepMetrics]:
    return read_metrics(Store(str(run)))


def numbers(run: Path) -> list[tuple]:
    """What a step computed, without its timing."""
    return [tuple(getattr(record, name) for name in EXACT) for record in metrics(run)]


def events(run: Path, name: str) -> dict[int, float]:
    """A curve as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "train/tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


def deviations(run: Path, other: Path, steps: int = STEPS) -> tuple[float, float]:
    """Largest relative deviation of loss (held-out loss included) and of gradient norm over the first steps."""
    pairs = list(zip(metrics(run)[:steps], metrics(other)[:steps], strict=True))
    assert [a.step for a, _ in pairs] == [b.step for _, b in pairs] == list(range(1, steps + 1))
    assert [a.tokens for a, _ in pairs] == [b.tokens for _, b in pairs] == [5 * 32] * steps
    losses = [abs(a.loss / b.loss - 1) for a, b in pairs]
    losses += [abs(a.heldout_loss / b.heldout_loss - 1) for a, b in pairs if a.heldout_loss is not None]
    return max(losses), max(abs(a.grad_norm / b.grad_norm - 1) for a, b in pairs)


def assert_equal_up_to_rounding(run: Path, other: Path) -> None:
    loss, norm = deviations(run, other)
    assert loss <= 1e-6
    assert norm <= 1e-5


def final_state(run: Path) -> tuple[Note, dict[str, torch.Tensor]]:
    """The last checkpoint as full tensors, weights and moments."""
    store = Store(str(run))
    note = standing_notes(store)[-1]
    model = build_model(read_plan(store).shape).to_empty(device="cpu")
    state = training_state(model, None)
    state |= {
        name.replace("model.", f"{moment}.", 1): torch.empty_like(value)
        for name, value in state.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    with open_ranks() as ranks:
        read_state(store, note, state, ranks)
    return note, state


def assert_equal_bits(run: Path, other: Path) -> None:
    assert numbers(run) == numbers(other)
    (note, state), (other_note, other_state) = final_state(run), final_state(other)
    assert note.step == other_note.step == STEPS
    assert state.keys() == other_state.keys()
    assert all(torch.equal(state[name], other_state[name]) for name in state)


# -------------------------------------------------------------------------------------------------------- one process


def test_equals_a_plain_torch_loop(one: Path) -> None:
    """No sharding, no micro-batches, torch's own mean, clipping and AdamW."""
    store = Store(str(one / "full"))
    plan, found = read_plan(store), metrics(one / "full")
    batches = open_batches(open_dataset(store), plan.train_config, plan.global_batch)
    model = build_model(plan.shape).to_empty(device="cpu")
    set_initial_weights(model, plan.train_config.seed)
    decayed = [p for name, p in model.named_parameters() if p.ndim == 2 and name != "embedding.weight"]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or name == "embedding.weight"]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for record in found:
        rows = batches.batch(record.step - 1)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(record.step, plan, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        assert record.loss == pytest.approx(loss.item(), rel=1e-6)
        assert record.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        assert record.learning_rate == optimizer.param_groups[0]["lr"]
    rows = batches.heldout(5)
    with torch.no_grad():
        heldout = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).item()
    assert [record.step for record in found if record.heldout_loss is not None] == [7, 14, 20]
    assert found[-1].heldout_loss == pytest.approx(heldout, rel=1e-6)
    assert found[-1].heldout_loss < found[0].loss - 0.1


def test_micro_batches_do_not_enter_the_mathematics(one: Path) -> None:
    assert_equal_up_to_rounding(one / "full", one / "split")


def test_the_end_of_a_run(one: Path) -> None:
    run = Store(str(one / "full"))
    manifest, dataset = run.read_json("train/manifest.json"), open_dataset(run)
    last = metrics(one / "full")[-1]
    assert manifest["dataset"] == dataset.digest
    assert (manifest["steps"], manifest["loss"], manifest["heldout_loss"]) == (STEPS, last.loss, last.heldout_loss)
    assert manifest["checkpoint"] == "train/checkpoints/step-000020"
    assert manifest["plan"] == standing_notes(run)[-1].identity.plan
    assert [note.step for note in standing_notes(run)] == [15, 20]
    note = run.read_json("train/checkpoints/step-000020/checkpoint.json")
    assert note["identity"]["settings"]["train.global_batch"] == 5
    assert note["layout"] == {"ranks": 1, "micro_batch": 8, "threads": 1, "device": "cpu"}


def test_tensorboard_holds_every_step(one: Path) -> None:
    assert events(one / "full", "loss") == pytest.approx({r.step: r.loss for r in metrics(one / "full")}, rel=1e-6)
    assert list(events(one / "full", "heldout_loss")) == [7, 14, 20]


def test_stopped_and_resumed_is_the_uninterrupted_run(one: Path, tmp_path: Path, capsys) -> None:
    run = copy(one / "stopped", tmp_path / "run")
    assert [record.step for record in metrics(run)] == list(range(1, STOP_AFTER + 1))
    assert standing_notes(Store(str(run)))[-1].step == STOP_AFTER
    assert not (run / "train/manifest.json").exists()
    # What a kill leaves behind: a checkpoint without its note, metrics beyond the checkpoint, half a line.
    (run / "train/checkpoints/step-000013").mkdir()
    lines = (one / "full/train/metrics.jsonl").read_bytes().splitlines(keepends=True)
    with open(run / "train/metrics.jsonl", "ab") as stream:
        stream.write(lines[11] + lines[12] + lines[13][:20])
    assert pretrain.main(["--run", str(run)]) == 0
    assert "going on from step 11, exactly" in capsys.readouterr().out
    assert not (run / "train/checkpoints/step-000013").exists()
    assert_equal_bits(run, one / "full")


def test_again_after_the_end_changes_nothing(one: Path, tmp_path: Path, capsys) -> None:
    run = copy(one / "full", tmp_path / "run")
    (run / "train/manifest.json").unlink()
    assert pretrain.main(["--run", str(run)]) == 0
    assert capsys.readouterr().out == "already trained to the last step\n"
    for name in ("manifest.json", "metrics.jsonl", "plan.json"):
        assert (run / "train" / name).read_bytes() == (one / "full/train" / name).read_bytes()


def test_bf16_stays_near_fp32(one: Path, dataset: Path, tmp_path: Path) -> None:
    run = copy(dataset, tmp_path / "run")
    with on_one_core():
        assert pretrain.main(["--run", str(run), "--set", "train.precision=bf16"]) == 0
    loss, norm = deviations(run, one / "full")
    assert 1e-6 < loss < 5e-3
    assert norm < 5e-2
    assert {value.dtype for value in final_state(run)[1].values()} == {torch.float32}


def test_non_finite_loss_stops_before_the_update(dataset: Path, tmp_path: Path, capsys) -> None:
    run = copy(dataset, tmp_path / "run")
    settings = ["train.learning_rate=1e30", "train.warmup_steps=0", "train.checkpoint_every=1"]
    assert pretrain.main(["--run", str(run), *(part for text in settings for part in ("--set", text))]) == 2
    steps = [record.step for record in metrics(run)]
    message = capsys.readouterr().err
    assert f"penstock: train, step {len(steps) + 1}: promised a finite " in message
    assert ", found nan; " in message or ", found inf; " in message
    assert standing_notes(Store(str(run)))[-1].step == len(steps) < 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.learning_rte=1"], "train.learning_rte: no such key (did you mean 'learning_rate'?)"),
        (["plan.num_layers=3"], "[plan]: no such section"),
        (["train.learning_rate=0.003"], "train.learning_rate: promised 0.001, found 0.003"),
        (["train.steps=21", "train.seed=1"], "train.seed: promised 0, found 1\n  train.steps: promised 20, found 21"),
        (["train.skip_file=none.txt"], "promised a file"),
    ],
)
def test_refusals(one: Path, tmp_path: Path, capsys, settings: list[str], message: str) -> None:
    run = copy(one / "stopped", tmp_path / "run")
    before = {path: path.read_bytes() for path in (run / "train").rglob("*.json*")}
    assert pretrain.main(["--run", str(run), *(part for text in settings for part in ("--set", text))]) == 2
    assert message in capsys.readouterr().err
    after = {path: path.read_bytes() for path in (run / "train").rglob("*.json*")}
    assert after == before


def test_a_checkpoint_of_another_dataset_is_refused(one: Path, tmp_path: Path, capsys) -> None:
    run = copy(one / "stopped", tmp_path / "run")
    old = open_dataset(Store(str(run))).digest
    shutil.rmtree(run / "tokens")
    shutil.rmtree(run / "tokenizer")
    new = open_dataset(make_tiny_dataset(run, seed=1)).digest
    (run / "train/plan.json").unlink()
    write_run(Store(str(run)), read_run(Store(str(run))).model_copy(update={"recipe": RECIPE}))
    assert pretrain.main(["--run", str(run)]) == 2
    assert f"dataset: promised {old}, found {new}" in capsys.readouterr().err


def test_skip_list_may_grow_ahead_of_the_checkpoint_only(one: Path, tmp_path: Path, capsys) -> None:
    run = copy(one / "stopped", tmp_path / "run")
    (run / "train/skips.txt").write_text("3\n")
    assert pretrain.main(["--run", str(run), "--set", "train.skip_file=skips.txt"]) == 2
    assert "found [3], which the checkpoint has already used" in capsys.readouterr().err
    (run / "train/skips.txt").write_text(f"{STOP_AFTER * 5}\n")
    assert pretrain.main(["--run", str(run), "--set", "train.skip_file=skips.txt"]) == 0
    before, after = numbers(one / "full"), numbers(run)
    assert after[:STOP_AFTER] == before[:STOP_AFTER]
    assert after[STOP_AFTER][1] != before[STOP_AFTER][1]


# ----------------------------------------------------------------------------------------------------------- two ranks


def test_the_global_batches_are_the_same(one: Path, two: tuple[Path, list[dict]]) -> None:
    store = Store(str(one / "full"))
    batches = open_batches(open_dataset(store), read_plan(store).train_config, 5)
    for step, parts in enumerate(zip(*(told["rows"] for told in two[1]), strict=True)):
        assert [len(part) for part in parts] == [2, 3]
        assert [row for part in parts for row in part] == batches.batch(step).tolist()


@pytest.mark.parametrize("name", ["full", "split"])
def test_two_ranks_equal_one(one: Path, two: tuple[Path, list[dict]], name: str) -> None:
    assert [told[name] for told in two[1]] == [0, 0]
    assert_equal_up_to_rounding(two[0] / name, one / "full")


@pytest.mark.parametrize("name", ["wrong-rows", "averaged"])
def test_a_wrong_computation_fails_the_comparison(one: Path, two: tuple[Path, list[dict]], name: str) -> None:
    loss, norm = deviations(two[0] / name, one / "full", steps=3)
    assert loss > 1e-4
    assert norm > 1e-3


def test_a_signal_to_one_rank_stops_both_and_resumes_to_the_same_bits(two: tuple[Path, list[dict]]) -> None:
    root, told = two
    assert [rank["stopped"] for rank in told] == [128 + signal.SIGTERM] * 2
    assert [rank["resumed"] for rank in told] == [0, 0]
    assert standing_notes(Store(str(root / "to-one")))[-1].step == STOP_AFTER
    assert_equal_bits(root / "stopped", root / "full")


def test_resumes_at_another_number_of_ranks(one: Path, two: tuple[Path, list[dict]], tmp_path: Path, capsys) -> None:
    assert_equal_up_to_rounding(two[0] / "from-one", one / "full")
    run = copy(two[0] / "to-one", tmp_path / "run")
    with on_one_core():
        assert pretrain.main(["--run", str(run)]) == 0
    assert "going on from step 11, in another layout" in capsys.readouterr().out
    assert_equal_up_to_rounding(run, one / "full")


def test_a_refusal_reaches_every_rank(two: tuple[Path, list[dict]]) -> None:
    first, second = two[1]
    assert [first["flipped"][0], second["flipped"][0]] == ["ContractError", "FirstRankFailed"]
    assert "promised SHA-256" in first["flipped"][1]
    assert first["flipped"][1] == second["flipped"][1]
    assert [first["crowded"][0], second["crowded"][0]] == ["ConfigError", "FirstRankFailed"]
    assert "promised a sequence for each of 2 ranks, found 1" in first["crowded"][1]


def test_a_killed_rank_ends_the_run_and_the_same_command_finishes_it(two: tuple[Path, list[dict]], killed) -> None:
    folder, code = killed
    assert code != 0
    assert standing_notes(Store(str(folder)))[-1].step < STEPS
    assert [told["killed"] for told in two[1]] == [0, 0]
    assert_equal_bits(two[0] / "killed", two[0] / "split")
    assert events(two[0] / "killed", "loss") == events(two[0] / "split", "loss")
