"""`penstock mix suggest` over real runs, the plan that follows a mix, and the loop closed."""

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.verbs.mix import add_mix_arguments, mix_command
from pipeline.report.page import write_report
from schemas.errors import ConfigError, ContractError
from schemas.ids import file_sha256
from schemas.manifest import read_run, write_run
from schemas.mix import Mix, SourceMix, mix_toml, read_mix
from schemas.storage import Store
from schemas.tokens import RESERVED, open_dataset
from tests.support.measured_runs import STEPS, run_of
from tests.support.report_run import whole_run
from tests.support.tiny_dataset import make_tiny_dataset, tiny_documents
from tests.support.tiny_runs import trained
from train.config.settings import load_settings
from train.mix.measured import MeasuredRun, measured_run
from train.plan.make_plan import make_plan
from train.plan.plan import Plan, check_mix_overrides, copy_mix, mix_overrides, mix_path, read_settings, write_plan

RECIPE: dict[str, dict[str, Any]] = {
    "plan": {"num_layers": 2, "d_model": 48, "num_heads": 4, "num_kv_heads": 2, "d_ffw": 74},
    "train": {"seq_len": 32, "global_batch": 8, "steps": 200, "eval_every": 10, "eval_sequences": 32},
    "optim": {"learning_rate": 3e-3, "warmup_steps": 20},
    "checkpoint": {"every": 0},
}
EVEN = 'train.weights={"noise"=1,"words"=1}'


def documents(source: str, *arguments: Any) -> Iterator[dict[str, Any]]:
    """Those of the tiny dataset; the words of `noise` are drawn evenly, so only their frequency is to be learned."""
    for row in tiny_documents(source, *arguments):
        if source == "noise":
            draw = random.Random(row["offset"])
            first, _, size = len(RESERVED), row["tokens"], arguments[1].vocab_size
            row = row | {
                "tokens": [
                    row["tokens"][0],
                    *draw.choices(range(first, size), k=row["num_tokens"] - 2),
                    row["tokens"][-1],
                ]
            }
        yield row


def suggest(*words: str) -> int:
    """`penstock mix suggest WORDS`."""
    parser = argparse.ArgumentParser()
    add_mix_arguments(parser)
    return mix_command(parser.parse_args(["suggest", *words]))


def planned(folder: Path, *overrides: str) -> Plan:
    """The plan of a run folder's recipe, written."""
    run = Store(str(folder))
    plan = make_plan(run, open_dataset(run), load_settings(read_run(run).recipe, overrides, "test"))
    write_plan(run, plan)
    return plan


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a source that can be learned and one that cannot, 100 words each."""
    folder = tmp_path_factory.mktemp("mixed") / "run"
    sources = {"words": 150, "noise": 150}
    run = make_tiny_dataset(folder, sources, vocab_size=len(RESERVED) + 100, documents=documents)
    write_run(run, read_run(run).model_copy(update={"recipe": RECIPE}))
    return folder


def learnt(dataset: Path, name: str, *overrides: str) -> Path:
    """A copy of the run folder, planned and trained."""
    folder = dataset.parent / name
    shutil.copytree(dataset, folder)
    planned(folder, *overrides)
    return trained(folder, 1)


@pytest.fixture(scope="module")
def first(dataset: Path) -> Path:
    """A run that reads both sources as often."""
    return learnt(dataset, "first", EVEN)


def heldout(folder: Path) -> dict[str, float]:
    """Held-out losses at the end, by source."""
    run: MeasuredRun = measured_run(Store(str(folder)))
    return {name: run.heldout(name).losses[-1] for name in run.unique}


# ----------------------------------------------------------------------------------------------------------- the loop


@pytest.mark.dist
def test_the_loop_is_closed(dataset: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its own curves a run takes share from noise; a run of the mix learns more of the rest in as many tokens."""
    out = tmp_path / "mix.toml"
    assert suggest(str(first), "--out", str(out)) == 0
    output = capsys.readouterr().out
    assert "noise   0.5000  -> 0." in output
    mix = read_mix(str(out))
    assert mix.sources["noise"].share < 0.2
    assert mix.sources["words"].evidence["speed"] > 5 * mix.sources["noise"].evidence["speed"]
    assert mix.sources["noise"].keep < 0.5
    followed = learnt(dataset, "second", *mix_overrides(str(out), open_dataset(Store(str(dataset)))))
    before, after = heldout(first), heldout(followed)
    assert after["words"] < before["words"] - 0.15
    both = [measured_run(Store(str(folder))) for folder in (first, followed)]
    assert both[0].steps[-1].step == both[1].steps[-1].step
    assert sum(both[0].seen.values()) == pytest.approx(sum(both[1].seen.values()), rel=0.01)


@pytest.mark.dist
def test_a_reference_that_knows_a_source_better_raises_it(dataset: Path, first: Path, tmp_path: Path) -> None:
    reference = learnt(dataset, "reference", 'train.weights={"noise"=1,"words"=9}')
    out = tmp_path / "mix.toml"
    assert suggest(str(first), "--reference", str(reference), "--out", str(out)) == 0
    mix = read_mix(str(out))
    words = mix.sources["words"]
    assert words.evidence["excess"] > 0.2
    assert mix.sources["noise"].evidence["excess"] < 0.1
    assert 0.55 < words.share < 0.7  # one round moves by e^excess, however good the reference
    assert "Xie et al. 2023" in mix.reference


@pytest.mark.dist
def test_another_seed_is_no_reason(dataset: Path, first: Path, tmp_path: Path) -> None:
    other = learnt(dataset, "seed", EVEN, "train.seed=1")
    out = tmp_path / "mix.toml"
    assert suggest(str(first), "--reference", str(other), "--out", str(out)) == 0
    assert {name: part.share for name, part in read_mix(str(out)).sources.items()} == {"noise": 0.5, "words": 0.5}


# ------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def given_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with given losses, of two buckets of a source."""
    folder = tmp_path_factory.mktemp("given") / "run"
    run_of(folder, {"web+head": lambda step: 2 + (step / STEPS) ** -0.3, "web+tail": lambda step: 5.0})
    return folder


def test_an_existing_file_is_not_replaced(given_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "mix.toml"
    out.write_text("mine")
    with pytest.raises(ConfigError, match=r"got .*mix.toml. Set --out to another file, or add --force"):
        suggest(str(given_run), "--out", str(out))
    assert out.read_text() == "mine"
    assert suggest(str(given_run), "--out", str(out), "--force") == 0
    written = out.read_bytes()
    assert suggest(str(given_run), "--out", str(out), "--force") == 0
    assert out.read_bytes() == written
    assert list(tmp_path.iterdir()) == [out]


def test_the_table_names_buckets(given_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert suggest(str(given_run), "--out", str(tmp_path / "mix.toml"), "--tokens", "1e5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"mix for dataset {open_dataset(Store(str(given_run))).digest[:12]}, by the run's own")
    assert lines[1].split() == [
        "source",
        "share",
        "passes",
        "loss",
        "against",
        "excess",
        "keep",
        "tokens",
        "to",
        "collect",
    ]
    assert lines[2].startswith("web+head  0.")
    assert lines[4].startswith("web+head: held-out loss 2.9988, falling by 0.3000 ± 0.0000 nats/token for each e-fold")


def test_a_law_gives_its_exponent(given_run: Path, tmp_path: Path) -> None:
    law = tmp_path / "law.json"
    numbers = {"floor": 1.8, "a": 480.0, "b": 2000.0, "alpha": 0.35, "beta": 0.37}
    size = {"num_runs": 8, "deviation": 0.01, "params": 1e8, "tokens": 1e10, "compute": 6e18, "dataset": "d" * 64}
    law.write_text(json.dumps({"format_version": 1, "law": numbers | size, "how": "by hand", "points": []}))
    assert suggest(str(given_run), "--law", str(law), "--out", str(tmp_path / "mix.toml")) == 0
    mix = read_mix(str(tmp_path / "mix.toml"))
    assert "a = 0.37 of the law fitted to 8 runs on dataset dddddddddddd" in mix.reference
    assert mix.sources["web+head"].evidence["exponent"] == 0.37


def test_a_law_that_is_none_is_named_as_it_was_given(given_run: Path, tmp_path: Path) -> None:
    (tmp_path / "law.json").write_text("{}")
    for name, found in (("law.json", "expected a law of format version 1"), ("no.json", "got no such file")):
        with pytest.raises(ConfigError, match=rf"^--law {tmp_path / name}: .*{found}"):
            suggest(str(given_run), "--law", str(tmp_path / name), "--out", str(tmp_path / "mix.toml"))


def test_a_folder_is_no_file_to_replace(given_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"expected a file to write, got the folder {tmp_path}. Set --out to a file"):
        suggest(str(given_run), "--out", str(tmp_path), "--force")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--tokens", "0"], "expected --tokens > 0, got 0"),
        (["--step-size", "2"], "expected --step-size only with --reference"),
        (["--reference", "x", "--from-step", "3"], "expected --from-step only without --reference"),
        (["--from-step", "90"], "got 3 of web.head, 3 of web.tail. .*--set train.eval_every=8"),
        (["--out", "nowhere/mix.toml"], "expected a folder for nowhere/mix.toml"),
    ],
)
def test_words_that_say_nothing(given_run: Path, tmp_path: Path, words: list[str], found: str) -> None:
    out = [] if "--out" in words else ["--out", str(tmp_path / "mix.toml")]
    with pytest.raises(ConfigError, match=found):
        suggest(str(given_run), *words, *out)
    assert not list(tmp_path.iterdir())


def test_a_run_whose_dataset_is_another_now(given_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(given_run, folder)
    plan = json.loads((folder / "train/plan.json").read_text())
    (folder / "train/plan.json").write_text(json.dumps(plan | {"dataset": "0" * 64}))
    with pytest.raises(ContractError, match="expected dataset 0000"):
        suggest(str(folder), "--out", str(tmp_path / "mix.toml"))


# ---------------------------------------------------------------------------------------------- the trainer reads it


def mix_of(dataset: str, **shares: float) -> Mix:
    """A mix of sources, `_` for `+`."""
    sources = {
        name.replace("_", "+"): SourceMix(share=share, repeat=1, keep=1.0, wanted_tokens=None, why="because")
        for name, share in shares.items()
    }
    return Mix(dataset=dataset, plan="p" * 64, reference="r", sources=sources)


def test_shares_become_weights(given_run: Path, tmp_path: Path) -> None:
    run, path = Store(str(given_run)), tmp_path / "mix.toml"
    dataset = open_dataset(run)
    path.write_text(mix_toml(mix_of(dataset.digest, web_head=0.99998, web_tail=2e-5)))
    overrides = mix_overrides(str(path), dataset, ["train.steps=50"])
    assert overrides == [
        'train.weights={"web+head" = 0.99998, "web+tail" = 2e-05}',
        f'train.mix="{file_sha256(path)}"',
    ]
    settings = load_settings(read_run(run).recipe, overrides, "test")
    plan = make_plan(run, dataset, settings)
    assert plan.stages[0].counts == {"web+head": 49999, "web+tail": 1}
    assert plan.settings.train.mix == file_sha256(path)
    plain = make_plan(run, dataset, load_settings(read_run(run).recipe, overrides[:1], "test"))
    assert plan.settings.content() == plain.settings.content()  # the origin of the mix does not change the weights


def test_a_mix_of_other_sources_is_refused(given_run: Path, tmp_path: Path) -> None:
    dataset, path = open_dataset(Store(str(given_run))), tmp_path / "mix.toml"
    path.write_text(mix_toml(mix_of(dataset.digest, web_head=0.5, web=0.5)))
    with pytest.raises(ConfigError, match=rf"mix.toml, for dataset {dataset.digest[:12]}: .* got 'web'"):
        mix_overrides(str(path), dataset)
    path.write_text(mix_toml(mix_of(dataset.digest, web_head=1.0)))
    with pytest.raises(ConfigError, match=r"got no web\+tail\."):
        mix_overrides(str(path), dataset)


@pytest.mark.parametrize("text", ['train.weights={"web+head"=1,"web+tail"=1}', 'train.mix=""'])
def test_shares_are_given_in_one_place(given_run: Path, tmp_path: Path, text: str) -> None:
    dataset, path = open_dataset(Store(str(given_run))), tmp_path / "mix.toml"
    path.write_text(mix_toml(mix_of(dataset.digest, web_head=0.5, web_tail=0.5)))
    with pytest.raises(ConfigError, match=r"expected shares from the mix only, got --set train\.(weights|mix)"):
        mix_overrides(str(path), dataset, [text])


def test_a_plan_that_follows_a_mix_keeps_its_shares(given_run: Path, tmp_path: Path) -> None:
    folder, path = tmp_path / "run", tmp_path / "mix.toml"
    shutil.copytree(given_run, folder)
    run = Store(str(folder))
    dataset = open_dataset(run)
    path.write_text(mix_toml(mix_of(dataset.digest, web_head=0.75, web_tail=0.25)))
    plan = planned(folder, *mix_overrides(str(path), dataset))
    assert copy_mix(run, str(path)) == mix_path(plan.settings.train.mix) == f"train/mix-{file_sha256(path)[:12]}.toml"
    assert read_mix(str(folder / mix_path(plan.settings.train.mix))) == read_mix(str(path))
    standing = plan.settings.to_json()
    check_mix_overrides(standing, ["train.eval_every=7"])
    with pytest.raises(
        ConfigError, match=r"the shares of mix [0-9a-f]{12} in the plan, got other shares\. .*run `penstock plan`"
    ):
        check_mix_overrides(standing, ['train.weights={"web+head"=1,"web+tail"=1}'])
    check_mix_overrides(planned(folder).settings.to_json(), ['train.weights={"web+head"=1,"web+tail"=1}'])


@pytest.mark.parametrize(
    ("train", "found"),
    [
        ({"mix": "f" * 64}, "mix requires weights"),
        ({"mix": "f" * 63, "weights": {"a": 1}}, "train.mix: expected 64 hexadecimal digits, got 'fff"),
        (
            {"mix": "f" * 64, "weights": {"a": 1}, "stages": [{"weights": {"a": 1}}]},
            "mix requires stages without their own weights",
        ),
    ],
)
def test_a_mix_that_would_not_be_followed(train: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        load_settings({"train": train}, [], "test")


# ------------------------------------------------------------------------------------------------- buckets as sources


def test_weights_of_buckets_size_a_plan(given_run: Path) -> None:
    """100 steps of 2 x 32 tokens: 70 and 30 of 100 samples in the order of their block, 140 and 60 of the run."""
    run = Store(str(given_run))
    dataset = open_dataset(run)
    text = 'train.weights={"web+head"=0.7,"web+tail"=0.3}'
    plan = make_plan(run, dataset, load_settings(read_run(run).recipe, [text], "test"))
    figures = {figure.name: figure.value for figure in plan.figures}
    chunks = {name: (dataset.num_tokens()[name] - 1) // 256 * 256 for name in ("web+head", "web+tail")}
    assert plan.stages[0].counts == {"web+head": 7, "web+tail": 3}
    assert figures["epochs.web+head"] == 140 * 32 / chunks["web+head"]
    assert figures["epochs.web+tail"] == 60 * 32 / chunks["web+tail"]
    assert figures["unique_tokens"] == sum(chunks.values())
    assert figures["tokens.web+head"] == dataset.num_tokens()["web+head"]
    with pytest.raises(ConfigError, match=r"'web' is no source .did you mean 'web\+tail'.*'web\+tail' is not named"):
        make_plan(run, dataset, load_settings(read_run(run).recipe, ["train.weights={web=0.7, 'web+head'=1}"], "test"))


@pytest.mark.dist
def test_buckets_are_trained_and_told_apart(given_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(given_run, folder)
    (folder / "train/metrics.jsonl").unlink()
    planned(folder, 'train.weights={"web+head"=0.75,"web+tail"=0.25}', "train.steps=4", "train.eval_every=1")
    run = measured_run(Store(str(trained(folder, 1))))
    assert run.shares == {"web+head": 0.75, "web+tail": 0.25}
    assert sum(run.seen.values()) == sum(step.tokens for step in run.steps)
    assert {name for step in run.steps for name in step.heldout} == {"web+head", "web+tail"}
    kept = read_settings(Store(str(folder)), run.dataset, ['train.weights={"web+head"=1,"web+tail"=0}'])
    assert kept.train.weights == {"web+head": 1, "web+tail": 0}


# ---------------------------------------------------------------------------------------------------------- the report


def test_the_report_tells_shares_and_the_mix_they_follow(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run")
    plan = run.read_json("train/plan.json")
    lines = [json.loads(line) for line in run.read_bytes("train/metrics.jsonl").splitlines()[:40]]
    for line in lines:
        line.update(losses={"web+head": 2.0, "web+tail": 3.0}, source_tokens={"web+head": 30, "web+tail": 10})
    run.write_atomic("train/metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    page = Path(write_report(run, None)).read_text()
    assert "follow mix" not in page
    for name, share in (("web+head", "75.0 %"), ("web+tail", "25.0 %")):
        row = page.partition(f'<th scope="row">{name}</th>')[2].partition("</tr>")[0]
        assert f'<td class="num">{share}</td>' in row
    run.write_atomic("train/plan.json", json.dumps(plan | {"settings": {"train": {"mix": "ab" * 32}}}).encode())
    assert "follow mix <code>abababababab</code>" in Path(write_report(run, None)).read_text()
