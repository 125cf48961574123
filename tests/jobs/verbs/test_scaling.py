"""`penstock fit-scaling` and the budgets of `penstock plan`: what they read, print and refuse."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.cli import main
from jobs.verbs.proxies import Proxy
from jobs.verbs.scaling import measured_run
from schemas.errors import ConfigError, ContractError
from schemas.manifest import read_run, write_run
from schemas.storage import Store
from tests.support import tiny_runs
from tests.support.tiny_dataset import make_tiny_dataset
from train.plan.plan import read_plan
from train.scaling.laws import BESIROGLU
from train.scaling.own_law import read_law


def table_of(path: Path, number: int = 30) -> Path:
    """A table of runs that follow a law."""
    random = np.random.default_rng(3)
    rows = ["params,tokens,loss"]
    for _ in range(number):
        n, d = 10 ** random.uniform(7.6, 10.2), 10 ** random.uniform(9, 11.5)
        rows.append(f"{n:.6g},{d:.6g},{BESIROGLU.loss(n, d) * math.exp(random.normal() * 0.001)}")
    path.write_text("\n".join(rows) + "\n")
    return path


def test_a_table_of_runs_becomes_a_law(tmp_path: Path, capsys) -> None:
    out = tmp_path / "law.json"
    table = table_of(tmp_path / "runs.csv")
    assert main(["fit-scaling", str(table), "--draws", "10", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "L(N, D) of 30 runs: least " in shown
    assert "1e+24 FLOPs: " in shown
    values = read_law(str(out))
    assert values.law.floor == pytest.approx(BESIROGLU.floor, rel=0.02)
    low, high = values.law.intervals["alpha"]
    assert low < values.law.alpha < high
    assert (values.law.num_runs, values.law.dataset, len(values.points)) == (30, "", 30)
    assert values.points[0].run == f"{table}, line 2"
    assert "beyond 100 times that, " in shown


def test_a_fitted_law_is_one_that_a_plan_goes_by(run: Store, tmp_path: Path, capsys) -> None:
    """The text also states that the dataset of a table's runs is unknown."""
    out = tmp_path / "law.json"
    assert main(["fit-scaling", str(table_of(tmp_path / "runs.csv")), "--draws", "5", "--out", str(out)]) == 0
    words = ["--set", "plan.law=own", "--set", f"plan.law_file={out}", "--flops", "6e11", *MANY]
    assert main(["plan", run.uri, *words, "--set", "plan.min_params=1"]) == 0
    assert figures(run)["size.own_law.params"] == pytest.approx(BESIROGLU.for_compute(6e11).params, rel=0.3)
    assert "fitted on a dataset that it does not name" in " ".join(capsys.readouterr().out.split())


@pytest.mark.dist
def test_a_loss_is_not_measured_for_a_plan_that_was_made_later(tmp_path: Path) -> None:
    trained = Store(str(tiny_runs.trained(tiny_runs.make_run(tmp_path / "run", {"source": {"paths": ["x"]}}), 1)))
    assert measured_run(trained, "run").params == read_plan(trained).num_params
    shutil.rmtree(tmp_path / "run/train/checkpoints")
    assert main(["plan", trained.uri, "--set", "plan.d_ffw=96"]) == 0
    with pytest.raises(ConfigError, match="expected the plan that the run was trained with, got one"):
        measured_run(trained, "run")


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_runs.make_run(tmp_path_factory.mktemp("scaling") / "run", {"train": {"steps": 4}})
    return tiny_runs.trained(folder, 1)


def edited(folder: Path, to: Path, file: str, **values: Any) -> Store:
    """A copy of a run, with other values in a JSON file of its training."""
    run = Store(str(tiny_runs.copied(folder, to)))
    run.write_atomic(f"train/{file}.json", json.dumps(run.read_json(f"train/{file}.json") | values).encode())
    return run


@pytest.mark.dist
@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("plan", {"num_params": 10**6}, "expected num_params = [0-9]+, got 1000000"),
        ("plan", {"advice": ["more"]}, r"expected the plan with digest \w{64}, got \w{64}, so it was edited"),
        ("manifest", {"dataset": "0" * 64}, r"manifest.json: expected dataset \w{12} of the run, got 000000000000"),
        ("manifest", {"steps": 3}, "manifest.json: expected the 4 steps of the plan, got 3"),
        ("manifest", {"heldout_loss": None, "loss": float("nan")}, "expected a loss above 0, got nan"),
        ("manifest", {"heldout_loss": float("inf")}, "expected a loss above 0, got inf"),
        ("manifest", {"heldout_loss": 0.0}, r"expected a loss above 0, got 0\.0"),
    ],
)
def test_no_loss_is_measured_of_an_edited_run(
    trained_run: Path, tmp_path: Path, file: str, values: dict[str, Any], message: str
) -> None:
    assert measured_run(Store(str(trained_run)), "run").loss > 0
    with pytest.raises(ContractError, match=message):
        measured_run(edited(trained_run, tmp_path / "run", file, **values), "run")


@pytest.mark.dist
@pytest.mark.parametrize("values", [{"dataset": "0" * 64}, {"steps": 3}, {"plan": "0" * 64}])
def test_a_proxy_run_with_another_manifest_is_trained_to_its_end(
    trained_run: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    plan = read_plan(Store(str(trained_run)))
    assert Proxy(Store(str(trained_run)), plan).done
    run = edited(trained_run, tmp_path / "run", "manifest", **values)
    assert not Proxy(run, plan).done
    tiny_runs.train(tmp_path / "run", 1)
    assert Proxy(run, plan).done


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("params,tokens,loss\n1e9,2e9,x\n", [], "line 2: expected three numbers, got ['1e9', '2e9', 'x']"),
        ("params,loss\n1e9,3\n", [], "expected the columns params, tokens, loss, got no tokens"),
        ("params,tokens,loss\n1e9,2e9,3\n", ["--share", "1.5"], "got 200 and 1.5"),
        ("params,tokens,loss\n1e9,2e9,3\n", [], "expected runs of at least 2 different sizes, got 1"),
        (None, [], "expected a CSV table of runs, got no such file"),
    ],
)
def test_what_no_law_can_be_made_of(tmp_path: Path, capsys, text: str | None, words: list[str], message: str) -> None:
    path = tmp_path / "runs.csv"
    if text is not None:
        path.write_text(text)
    assert main(["fit-scaling", str(path), *words]) == 2
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ budgets


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """A run folder of some 11,000 tokens."""
    run = make_tiny_dataset(tmp_path)
    recipe = {"source": {"paths": ["x"]}, "train": {"seq_len": 64, "global_batch": 4}}
    write_run(run, read_run(run).model_copy(update={"recipe": recipe}))
    return run


MANY = ("--set", "plan.max_epochs=100")
"""The tiny dataset is read so often that it never runs out."""


def figures(run: Store) -> dict[str, float]:
    return {one["name"]: one["value"] for one in run.read_json("train/plan.json")["figures"]}


def test_a_budget_decides_n_and_d(run: Store, capsys) -> None:
    assert main(["plan", run.uri, "--flops", "3.2e11", "--set", "plan.min_params=1000", *MANY]) == 0
    values, shown = figures(run), capsys.readouterr().out
    assert values["compute_6nd"] == 3.2e11
    assert 6 * values["params"] * values["tokens"] == pytest.approx(3.2e11, rel=0.1)
    assert values["tokens_per_parameter"] == pytest.approx(20, rel=0.2)
    assert values["size.hoffmann_approach_3.params"] != values["size.besiroglu.params"]
    assert "kaplan" in shown
    assert "N': N = " in shown  # the text states how the law counts parameters
    assert "from the budget: D = 20·N, C = 6ND" in " ".join(shown.split())
    assert "D / (B · L), D = C / (6·N), no source over max_epochs" in " ".join(shown.split())


def test_use_makes_the_model_smaller_and_its_training_longer(run: Store, capsys) -> None:
    """The text states what the training costs beyond the budget."""
    words = ["--flops", "6e11", "--set", "plan.law=approach_3", "--set", "plan.min_params=1", *MANY]
    assert main(["plan", run.uri, *words]) == 0
    plain = figures(run)
    capsys.readouterr()
    assert main(["plan", run.uri, *words, "--set", "plan.inference_tokens=1e6"]) == 0
    values, shown = figures(run), " ".join(capsys.readouterr().out.split())
    assert values["wanted_params"] < plain["wanted_params"]
    ratio = re.search(r"tokens of use \(Sardana .*\): ([0-9.]+) x to train", shown)
    assert float(ratio[1]) > 1


def test_a_number_of_parameters_decides_d(run: Store, capsys) -> None:
    assert main(["plan", run.uri, "--params", "30000", *MANY]) == 0
    values = figures(run)
    assert values["tokens_per_parameter"] == pytest.approx(20, rel=0.02)
    assert "times, worth" in capsys.readouterr().out


def test_a_budget_that_outruns_the_data_makes_a_larger_model(run: Store, capsys) -> None:
    """1 token per parameter asks for 57,735 tokens for 2e10 FLOPs; 168 samples of 64 in 4 passes are 43,008."""
    few = ("--set", "plan.min_params=1000", "--set", "plan.num_layers=1")
    assert main(["plan", run.uri, "--flops", "6e9", "--set", "plan.tokens_per_parameter=1", *few]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "wanted_params 31,623 parameters from the budget: D = 1·N, C = 6ND" in shown
    assert main(["plan", run.uri, "--flops", "2e10", "--set", "plan.tokens_per_parameter=1", *few]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "asks for 57,735 tokens, and 4 passes give 43,008." in shown
    # 2e10 / 6 / 43,008: not the size of the law, 57,735.
    formula = "from the budget and the tokens: N = C / (6·D), D = the tokens in plan.max_epochs"
    assert f"wanted_params 77,505 parameters {formula}" in shown
    values = figures(run)
    assert values["epochs.web"] <= 4
    assert 6 * values["params"] * values["tokens"] == pytest.approx(2e10, rel=0.15)
    assert "plan.max_epochs = 5.4 would do" in shown  # 5.37 passes, rounded up


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # sqrt(20 · 1e13 / 6) = 5,773,503 tokens; 43,008 / 20 = 2,150 parameters, 6 · 2,150 · 43,008 FLOPs.
        (
            "--flops 1e13 --set plan.min_params=1000",
            "plan.compute: expected a budget for at most 2 times the 43,008 tokens of 4 passes over the dataset "
            "(plan.max_epochs), got one for 5,773,503 tokens and 288,675 parameters, so 5,730,495 tokens are missing. "
            "Lower plan.compute to 5.5e+08 (2,150 parameters), add 1,432,624 training tokens to the dataset, or set "
            "plan.params in place of plan.compute.",
        ),
        # A budget that suits the tokens would be for fewer than plan.min_params = 200,000 parameters.
        (
            "--flops 1e18 --set plan.max_epochs=1",
            "the 10,752 tokens of 1 pass over the dataset (plan.max_epochs), got one for 1,825,741,858 tokens and "
            "91,287,093 parameters, so 1,825,731,106 tokens are missing. Add 1,825,731,106 training tokens to the "
            "dataset, or set plan.params in place of plan.compute.",
        ),
        ("--flops 1e14", "so 18,214,411 tokens are missing"),
        ("--flops 1e21 --set plan.max_epochs=100", "got one for 57,735,026,919 tokens and 2,886,751,346 parameters"),
        ("--gpu h100-sxm --gpu-hours 100", "plan.gpu_hours: expected a budget for at most 2 times the 43,008 tokens"),
    ],
)
def test_a_budget_far_beyond_the_data_is_refused(run: Store, capsys, words: str, message: str) -> None:
    assert main(["plan", run.uri, *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not run.exists("train/plan.json")


def test_a_refused_plan_leaves_no_new_folder(run: Store, tmp_path: Path, capsys) -> None:
    assert main(["plan", str(tmp_path / "next"), "--dataset", run.uri, "--flops", "1e18"]) == 2
    assert "so 1,825,698,850 tokens are missing" in capsys.readouterr().err
    assert not (tmp_path / "next").exists()
    (tmp_path / "mine").mkdir()
    assert main(["plan", str(tmp_path / "mine"), "--dataset", run.uri, "--flops", "1e18"]) == 2
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_batch_of_all_samples_is_described(run: Store, capsys) -> None:
    """The rule gives 16 sequences for this model; 0.08 passes have 13, which is no power of two."""
    words = ["--set", "plan.max_epochs=0.08", "--set", "plan.num_layers=2", "--set", "plan.d_model=1024"]
    assert main(["plan", run.uri, *words, "--unset", "train.global_batch"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert figures(run)["global_batch"] == 13
    assert (
        "global_batch 13 sequences all samples in max_epochs, fewer than B = 0.2920·C^0.3271 / L, to a power of two"
        in shown
    )


def test_values_that_follow_from_a_setting_are_printed(run: Store, capsys) -> None:
    """A learning rate that is set is not listed, nor is any value of a plan without changes."""
    assert main(["plan", run.uri, "--quiet"]) == 0
    before = run.read_json("train/plan.json")
    assert main(["plan", run.uri, "--set", "plan.num_layers=1"]) == 0
    shown, after = " ".join(capsys.readouterr().out.split()), run.read_json("train/plan.json")
    assert before["learning_rate"] != after["learning_rate"]
    rates = f"{after['learning_rate']} {before['learning_rate']} without these settings"
    assert (
        f"FOLLOWS FROM plan.num_layers=1 parameters {after['num_params']:,} {before['num_params']:,} without" in shown
    )
    assert f"optim.learning_rate {rates}" in shown
    assert shown.endswith("set optim.learning_rate.") or "or optim.learning_rate." in shown
    assert main(["plan", run.uri, "--set", "plan.num_layers=1", "--set", "optim.learning_rate=0.01"]) == 0
    assert "optim.learning_rate " not in capsys.readouterr().out.partition("FOLLOWS FROM")[2].partition("\n")[2]
    assert main(["plan", run.uri]) == 0
    assert "FOLLOWS FROM" not in capsys.readouterr().out


def test_nothing_is_short_where_the_shape_or_the_steps_make_a_run_short(run: Store, capsys) -> None:
    """Two passes are asked for by the law, four allowed: advice to get data, let alone less than none, is untrue."""
    assert main(["plan", run.uri, "--params", "50000", "--set", "plan.tokens_per_parameter=0.4"]) == 0
    assert main(["plan", run.uri, "--params", "50000", "--set", "train.steps=3"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "-" not in [word[0] for word in re.findall(r"Or get more data: (\S+)", shown)]


def test_a_source_that_runs_out_before_the_others_is_named(run: Store, capsys) -> None:
    """books, 40 of 168 samples, is half of what is drawn: its four passes end the run, though tokens are left."""
    words = ["--params", "50000", "--set", "train.weights={web=1,books=1}", "--set", "plan.tokens_per_parameter=0.5"]
    assert main(["plan", run.uri, *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    values = figures(run)
    assert re.search(r"The run draws 2\d,\d+ tokens from 10,752 unique ones \(books 4 times, web 1\.2\d times\)", shown)
    assert values["worth_in_unique_tokens"] < values["tokens"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--flops 2e10 --set plan.min_params=1",
            "expected a model of 12,910 parameters, from the budget, got 43,232",
        ),
        (
            "--params 0.5",
            "expected a model of 0.5 parameters, from plan.params, got 43,232, the fewest that 512 tokens",
        ),
        ("--params 1e30", "expected a model of 1e+30 parameters, from plan.params, got 1,6"),
        (
            "--params 1e9 --set plan.num_layers=2 --set plan.d_model=32",
            "1,000,000,000 parameters, from plan.params, got",
        ),
    ],
)
def test_sizes_that_no_model_has_are_refused(run: Store, capsys, words: str, message: str) -> None:
    assert main(["plan", run.uri, *words.split(), *MANY]) == 2
    assert message in capsys.readouterr().err
    assert not run.exists("train/plan.json")


def test_a_budget_for_a_shape_that_is_given_buys_tokens(run: Store) -> None:
    """64 + 32 wide layers of 512 ids: D = C / 6N."""
    words = ["--flops", "2e11", "--set", "plan.num_layers=2", "--set", "plan.d_model=32", *MANY]
    assert main(["plan", run.uri, *words, "--set", "plan.min_params=1"]) == 0
    values = figures(run)
    assert 6 * values["params"] * values["tokens"] == pytest.approx(2e11, rel=0.02)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--flops 1e3", "expected a budget for at least 200,000 parameters (plan.min_params), got one for"),
        ("--flops 1e10 --params 1e6", "compute and params: expected a single budget"),
        ("--usd 100", "plan.usd = 100: expected a price of a device hour, got no cluster.usd_per_gpu_hour"),
        ("--gpu-hours 5", "expected the peak FLOP/s of a device, to convert device hours to FLOPs, got neither"),
        ("--flops -1", "plan.compute"),
        ("--set plan.inference_tokens=1e9", "inference_tokens requires compute, gpu_hours or usd"),
        ("--gpus 4", "gpus: expected a device, got none"),
        ("--set plan.law=chinchila", "plan.law"),
        (
            "--params many",
            "plan.params: Input should be a valid number, unable to parse string as a number, got 'many'",
        ),
        ("--set train.learning_rate=1", "train.learning_rate: no such key (did you mean 'optim.learning_rate'?)"),
        (
            "--unset train.learning_rate",
            "--unset train.learning_rate: no such key (did you mean 'optim.learning_rate'?)",
        ),
    ],
)
def test_budgets_that_buy_nothing_are_refused(run: Store, capsys, words: str, message: str) -> None:
    assert main(["plan", run.uri, *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not run.exists("train/plan.json")


# ------------------------------------------------------------------------------------------------------------ devices


def test_named_devices_choose_the_layout(run: Store, capsys) -> None:
    words = ["--gpu", "h100-sxm", "--gpus", "4", "--usd-per-gpu-hour", "2.5", "--set", "train.precision=bf16"]
    assert main(["plan", run.uri, *words]) == 0
    shown, plan = capsys.readouterr().out, run.read_json("train/plan.json")
    assert "predicted, not measured" in shown
    assert "rejected:" in shown
    assert 1 <= len(plan["layouts"]) <= 5
    seconds = [one["step_seconds"] for one in plan["layouts"]]
    assert seconds == sorted(seconds)
    assert plan["settings"]["layout"].items() >= plan["layouts"][0]["layout"].items()
    values = figures(run)
    assert values["devices"] == 4
    assert values["usd"] == pytest.approx(2.5 * values["gpu_hours"])
    assert values["gpu_hours"] == pytest.approx(4 * values["hours"])


def test_a_layout_that_is_given_is_kept(run: Store) -> None:
    words = ["--gpu", "h100-sxm", "--gpus", "4", "--set", "layout.tensor=2", "--set", "train.precision=bf16"]
    assert main(["plan", run.uri, *words, "--set", "plan.num_kv_heads=2"]) == 0
    assert all(one["layout"].get("tensor", 2) == 2 for one in run.read_json("train/plan.json")["layouts"])
    assert run.read_json("train/plan.json")["settings"]["layout"]["tensor"] == 2


def test_hours_and_money_buy_flops(run: Store) -> None:
    """An H100 hour in bf16: 989.4 TFLOP/s at 40 % of the peak, attention counted as MFU does; 2 USD buy one."""
    words = ["--gpu", "h100-sxm", "--gpus", "1", "--set", "train.precision=bf16", "--set", "plan.min_params=1", *MANY]
    assert main(["plan", run.uri, *words, "--gpu-hours", "0.0000003"]) == 0
    values = figures(run)
    assert values["flops"] == pytest.approx(3e-7 * 3600 * 989.4e12 * 0.4, rel=0.02)
    assert values["compute_6nd"] == pytest.approx(6 * values["params"] * values["tokens"], rel=0.02)
    by_hours = values["compute_6nd"]
    assert main(["plan", run.uri, *words, "--usd", "0.0000006", "--usd-per-gpu-hour", "2"]) == 0
    assert figures(run)["compute_6nd"] == pytest.approx(by_hours)


def test_what_the_layout_takes_of_the_hours_is_said(run: Store, capsys) -> None:
    """A tiny model waits for the host: at the MFU that was found for it the run takes the hours that were given."""
    words = ["--gpu", "h100-sxm", "--gpus", "1", "--set", "train.precision=bf16", "--set", "plan.min_params=1", *MANY]
    assert main(["plan", run.uri, *words, "--gpu-hours", "0.0000003"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"sized for 3e-07 hours of a device at cluster.mfu = 0.4, and the layout .* --set cluster.mfu=", shown
    )


def test_memory_is_that_of_the_layout_found(run: Store, capsys) -> None:
    """Not of the layout before the search, at numbers of ranks that no setting names."""
    words = ["--gpu", "h100-sxm", "--gpus", "4", "--set", "train.precision=bf16"]
    assert main(["plan", run.uri, *words]) == 0
    values = {name: size for name, size in figures(run).items() if name.startswith("memory.")}
    assert {name.split(".")[1] for name in values} == {"4"}
    assert values["memory.4"] == run.read_json("train/plan.json")["layouts"][0]["memory"]
    assert "per h100-sxm, at its peak" in " ".join(capsys.readouterr().out.split())
    # The limit is the search's: the layout before it, of 8 rows a micro-batch, may need more.
    limit = int(values["memory.4"])
    assert main(["plan", run.uri, *words, "--set", f"plan.device_memory={limit}"]) == 0


@pytest.mark.parametrize("words", ["--params 30K", "--params 30_000", "--set plan.params=0.03M", "--params 3e4"])
def test_a_size_may_have_a_suffix(run: Store, words: str) -> None:
    assert main(["plan", run.uri, *words.split(), *MANY]) == 0
    assert read_plan(run).settings.plan.params == 30_000
    assert main(["plan", run.uri, "--set", "plan.min_params=0.25M", *MANY]) == 0
    assert read_plan(run).settings.plan.min_params == 250_000


def test_the_number_of_devices_that_no_setting_gives_is_stated(run: Store, capsys) -> None:
    usual = "cluster.gpus is not set, so a node has as many as is usual for a100-40gb"
    words = ["--gpu", "a100-40gb", "--set", "train.precision=bf16"]
    assert main(["plan", run.uri, *words, "--params", "20B"]) == 2
    error = capsys.readouterr().err
    assert usual in error
    assert "Value error" not in error
    assert main(["plan", run.uri, *words, "--set", "train.global_batch=8"]) == 0
    assert usual in " ".join(capsys.readouterr().out.split())
    assert main(["plan", run.uri, *words, "--gpus", "4"]) == 0
    assert usual not in " ".join(capsys.readouterr().out.split())


def test_a_dry_run_names_the_folder_of_the_user(run: Store, capsys) -> None:
    assert main(["plan", "next", "--dataset", run.uri, "--dry-run", "--set", "plan.layers=2"]) == 2
    assert capsys.readouterr().err.startswith("penstock: command line: expected valid settings, got 1 wrong:\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpu h101", "got h101"),
        ("--gpu h100-sxm --gpus 0", "cluster.gpus"),
        ("--gpu h100-sxm --gpus 8 --set layout.tensor=3", "expected axis sizes that together divide 8 devices"),
        ("--gpu h100-sxm --gpus 8 --set layout.tensor=4 --set layout.context=4", "got context = 4, tensor = 4"),
        ("--gpu a100-80gb --set train.precision=fp8", "expected a precision that a100-80gb computes in"),
        ("--gpu h100-sxm --gpus 1 --params 2e10 --set train.precision=bf16", "got none among"),
    ],
)
def test_devices_that_cannot_be_are_refused(run: Store, capsys, words: str, message: str) -> None:
    assert main(["plan", run.uri, *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not run.exists("train/plan.json")
