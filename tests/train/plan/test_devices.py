"""Tests of plans for devices through the real commands: one GPU, no device, and a run that trains by its plan."""

from pathlib import Path

import pytest

from jobs.cli import main
from schemas.storage import Store
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_runs import make_run
from tests.train.plan.test_make_plan import of_size, settings, values
from train.model.shape import flops_per_token
from train.monitor.metrics import read_metrics
from train.plan.layouts import choose_layout
from train.plan.make_plan import make_plan
from train.plan.plan import Plan, read_plan
from train.plan.text import print_plan
from train.pretrain.__main__ import main as pretrain


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return Store(str(make_run(tmp_path / "run", {"source": {"paths": ["crawl/*.warc.gz"]}})))


@pytest.mark.parametrize("device", ["h100-sxm", "a100-80gb"])
def test_a_plan_for_a_gpu_is_in_bf16_and_compiled(run: Store, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", run.uri, "--gpu", device, "--gpus", "1"]) == 0
    plan, shown = read_plan(run), capsys.readouterr().out
    found = plan.settings
    assert (found.train.precision, found.layout.compile) == ("bf16", True)
    assert found.layout.rows_at_once == plan.global_batch
    assert found == found.for_device("cpu")
    assert " costs " not in shown
    assert "  train.precision       bf16" in shown
    assert "  layout.compile        true" in shown
    figures = {figure.name: figure.value for figure in plan.figures}
    peak = {"h100-sxm": 989.4e12, "a100-80gb": 312e12}[device]
    assert figures["mfu"] == pytest.approx(plan.flops_per_token * figures["tokens_per_second"] / peak)


def test_what_a_recipe_fixes_has_its_price_in_the_plan(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["layout.compile=false", "layout.micro_batch=1"]
    words = [word for one in (*fixed, "layout.activation_checkpointing=full") for word in ("--set", one)]
    assert main(["plan", run.uri, "--gpu", "h100-sxm", "--gpus", "1", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in (
        "layout.compile = false",
        "layout.micro_batch = 1",
        'layout.activation_checkpointing = "full"',
    ):
        (sentence,) = (line for line in read_plan(run).advice if line.startswith(f"{name} costs "))
        assert sentence in shown
        assert " s a step in place of " in sentence
        assert sentence.endswith(" s; leave it out.")
    layout = read_plan(run).settings.layout
    assert (layout.compile, layout.micro_batch, layout.activation_checkpointing) == (False, 1, "full")


def test_offloading_has_its_price_and_its_memory_in_the_plan(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["layout.offload=optimizer", "layout.offload_dir=/nvme", "checkpoint.mode=sync"]
    words = [word for one in fixed for word in ("--set", one)]
    assert main(["plan", run.uri, "--gpu", "h100-sxm", "--gpus", "1", *words]) == 0
    plan, shown = read_plan(run), " ".join(capsys.readouterr().out.split())
    (sentence,) = (line for line in plan.advice if line.startswith('layout.offload = "optimizer" costs '))
    assert sentence in shown
    figures = {figure.name: figure.value for figure in plan.figures}
    assert figures["memory.1.disk"] == 8 * plan.num_params
    assert "memory.1.host" not in figures
    assert "memory.1.states" not in figures


def test_a_gpu_that_is_planned_for_refuses_documents_in_fp32(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu", "h100-sxm", "--gpus", "1", "--set", "train.precision=fp32", "--set", "plan.head_dim=16"]
    assert main(["plan", run.uri, *words]) == 2
    assert "train.precision: expected a 16-bit dtype" in capsys.readouterr().err
    assert not run.exists("train/plan.json")


def test_without_a_device_a_plan_says_what_it_will_be(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", run.uri]) == 0
    found, shown = read_plan(run).settings, capsys.readouterr().out
    assert (found.train.precision, found.layout.compile, found.layout.micro_batch) == ("auto", "auto", None)
    assert "  train.precision       auto: bf16 on a GPU (fp16 at compute capability 7.0 to 7.5" in shown
    assert "  layout.compile        auto: true on a GPU, false on a CPU" in shown
    assert "per GPU in bf16, compiled, at its peak" in " ".join(shown.split())


def test_a_run_keeps_the_precision_that_it_began_with(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan of a run that trains has nothing automatic left. `penstock plan` keeps it, or its content for a GPU."""
    assert main(["plan", run.uri]) == 0
    capsys.readouterr()
    assert pretrain([run.uri]) == 0
    assert "MFU" not in capsys.readouterr().out
    pinned = read_plan(run).settings
    assert pinned == pinned.for_device("cuda")
    assert (pinned.train.precision, pinned.layout.compile, pinned.layout.micro_batch) == ("fp32", False, 8)
    assert main(["plan", run.uri]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"plan kept, because the run has checkpoints: {run.uri}/train/plan.json\nplan for dataset ")
    assert read_plan(run).settings == pinned
    assert main(["plan", run.uri, "--gpu", "h100-sxm", "--gpus", "1"]) == 0
    again = read_plan(run).settings
    assert (again.train.precision, again.layout.compile) == ("fp32", True)


def test_a_trained_run_cannot_be_extended(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings of the training remain those of the plan, and a change of one is named with both values."""
    assert pretrain([run.uri, "--set", "train.steps=6"]) == 0
    trained = run.read_bytes("train/plan.json")
    capsys.readouterr()
    for words in (["--dry-run"], ["--quiet"]):
        assert main(["plan", run.uri, *words]) == 0
    assert " steps 6 steps as given " in " ".join(capsys.readouterr().out.split())
    assert main(["plan", run.uri, "--set", "train.steps=9"]) == 2
    error = capsys.readouterr().err
    assert "step-000006: expected the run that this checkpoint belongs to, got other values in this run\n" in error
    assert "\n  train.steps: expected 6, got 9\n" in error
    assert "train.stages" not in error
    assert "\n  order: " not in error
    assert error.endswith("or train with it in a new run folder: `penstock plan NEW --dataset RUN`.\n")
    assert run.read_bytes("train/plan.json") == trained


def test_an_mfu_of_a_run_is_by_the_device_that_was_planned_for(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """A CPU's is by the format that it computes in; the metrics of a run have the same peak as its plan."""
    assert main(["plan", run.uri, "--gpu", "cpu", "--gpus", "1"]) == 0
    plan = read_plan(run)
    assert (plan.settings.train.precision, plan.settings.layout.compile) == ("fp32", False)
    assert plan.settings.layout.micro_batch is not None
    assert pretrain([run.uri]) == 0
    assert "MFU is not shown" not in capsys.readouterr().out
    step = read_metrics(run)[-1]
    rate = plan.global_batch * plan.seq_len / step.step_seconds
    assert step.mfu == pytest.approx(plan.flops_per_token * rate / 1.5e11)


def test_an_mfu_is_by_the_length_of_the_rows_of_its_stage(tmp_path: Path) -> None:
    stages = [{"tokens": 1024}, {"seq_len": 256, "global_batch": 1}]
    changes = {"seq_len": 8, "global_batch": 64, "steps": 4, "eval_every": 0, "peak_flops": 1e12, "stages": stages}
    run = Store(str(make_run(tmp_path / "run", {"train": changes})))
    assert pretrain([run.uri]) == 0
    plan, lines = read_plan(run), read_metrics(run)
    assert [line.stage for line in lines] == [1, 1, 2, 2]
    for line, (length, positions) in zip(lines, [(8, 512), (8, 512), (256, 256), (256, 256)], strict=True):
        flops = flops_per_token(plan.shape, length) * positions
        assert line.mfu == pytest.approx(flops / line.step_seconds / 1e12)
    assert flops_per_token(plan.shape, 256) > 1.5 * flops_per_token(plan.shape, 8)


@pytest.mark.parametrize(("device", "least", "peak"), [("h100-sxm", 300_000, 989.4e12), ("a100-80gb", 150_000, 312e12)])
def test_124_million_parameters_on_one_gpu(tmp_path: Path, device: str, least: int, peak: float) -> None:
    """The whole plan with a vocabulary of GPT-2's size, and what two settings of a CPU would cost it."""
    make_tiny_dataset(tmp_path, vocab_size=50304)
    run = Store(str(tmp_path))
    dataset = of_size(run, web=10**10)

    def chosen(**sections: dict[str, object]) -> Plan:
        given = {"train": {"seq_len": 1024}, "plan": {"params": 124e6}, "cluster": {"device": device, "gpus": 1}}
        return choose_layout(make_plan(run, dataset, settings(**(given | sections))))[0]

    plan = chosen()
    found = values(plan)
    assert plan.num_params == pytest.approx(124e6, rel=0.02)
    assert (plan.settings.train.precision, plan.settings.layout.compile) == ("bf16", True)
    assert found["tokens_per_second"] > least
    assert found["mfu"] == pytest.approx(plan.flops_per_token * found["tokens_per_second"] / peak)
    assert "  train.precision       bf16" in print_plan(plan)
    single = chosen(train={"seq_len": 1024, "precision": "fp32", "document_mask": False})
    (sentence,) = (line for line in single.advice if line.startswith('train.precision = "fp32" costs '))
    assert f" in place of {found['step_seconds']:.3g} s; leave it out." in sentence
    assert values(single)["mfu"] < 0.55 * found["mfu"]
    eager = chosen(layout={"compile": False})
    assert [line for line in eager.advice if line.startswith("layout.compile = false costs ")]


def test_hours_buy_flops_of_the_bf16_peak_in_every_precision(run: Store) -> None:
    """An hour of an H100 at cluster.mfu, which is a share of that peak."""
    words = ["--gpu", "h100-sxm", "--gpus", "1", "--gpu-hours", "1e-6", "--set", "plan.max_epochs=1000"]
    more = ["--set", "train.steps=20", "--set", "train.document_mask=false", "--set", "plan.min_params=1"]
    budgets = []
    for precision in ("fp32", "bf16"):
        assert main(["plan", run.uri, *words, *more, "--set", f"train.precision={precision}"]) == 0
        budgets.append(values(read_plan(run))["compute_6nd"])
    assert budgets[0] == budgets[1] == pytest.approx(1e-6 * 3600 * 989.4e12 * 0.4, rel=0.5)
