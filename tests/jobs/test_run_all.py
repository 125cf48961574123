"""Runs that are refused before Spark starts, and runs that share the tables of another: with a real, trained run."""

import hashlib
import os
import shlex
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jobs import run_all
from jobs.cli import main
from jobs.recipe import read_recipe
from pipeline.prepare import prepare
from pipeline.run import run_steps
from pipeline.tokens.tokenizer import TokenizerConfig
from schemas.errors import ConfigError
from schemas.locks import lock_tables
from schemas.manifest import open_table, read_run
from schemas.overrides import Unset
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support import tiny_runs
from tests.support.demo_run import RECIPE, SMALL
from tests.support.paths import ROOT
from train.plan.plan import read_plan

STEPS = ("documents", "verdicts", "clusters", "dedup", "audit", "clean", "tokenizer", "tokens")


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark may not start."""

    def starts(*_: Any, **__: Any) -> None:
        raise RuntimeError("Spark was started")

    monkeypatch.setattr(run_all, "spark_session", starts)


@pytest.fixture
def same_spark(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs use the session of the tests."""
    monkeypatch.setattr(run_all, "spark_session", lambda *_, **__: nullcontext(spark))


@pytest.fixture(scope="module")
def trained_once(finished: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared run with a model that was trained by `penstock train RUN --set train.steps=3`."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    shutil.copytree(finished.root, folder)
    assert main(["plan", str(folder), "--quiet"]) == 0
    return tiny_runs.trained(folder, 1, "train.steps=3", "train.eval_every=0", "train.global_batch=2")


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    return tiny_runs.copied(trained_once, tmp_path / "run")


def files_of(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def command(crawl: Path, out: Path, *words: str, verb: tuple[str, ...] = ("run",)) -> list[str]:
    """The command line of the shared run, into another folder and with more settings."""
    settings = [f'source.paths=["{crawl}/*.warc.gz"]', *SMALL]
    given = [word for setting in settings for word in ("--set", setting)]
    return [*verb, str(RECIPE), "--out", str(out), *given, *words]


def printed_command(error: str) -> list[str]:
    """The words after `penstock` of the command that a refusal prints."""
    (line,) = (line for line in error.splitlines() if line.startswith("  penstock "))
    return shlex.split(line)[1:]


# ------------------------------------------------------------------------------------------------- a model is trained


@pytest.mark.spark
@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize(
    ("words", "verb", "replaced", "reason"),
    [
        (
            ("--set", "quality.min_words=60"),
            ("run",),
            "verdicts, dedup, clean, tokenizer, tokens",
            "quality.min_words: nothing → 60",
        ),
        (("--set", "quality.min_words=60"), ("stage", "verdicts"), "verdicts", "quality.min_words: nothing → 60"),
        (("--set", "tokens.chunk_tokens=256"), ("run",), "tokens", "tokens.chunk_tokens: 512 → 256"),
        (("--unset", "tokens.chunk_tokens"), ("run",), "tokens", "tokens.chunk_tokens: 512 → "),
    ],
)
def test_a_changed_setting_is_refused_with_the_command_for_a_new_folder(
    trained: Path, crawl: Path, capsys: pytest.CaptureFixture[str], words: Any, verb: Any, replaced: str, reason: str
) -> None:
    before = files_of(trained)
    assert main(command(crawl, trained, *words, verb=verb)) == 2
    error = capsys.readouterr().err
    step = tiny_runs.notes(trained)[-1].name
    assert error.startswith(f"penstock: {trained}: expected the settings and inputs of the dataset that {step} was ")
    assert f"got others, which replace {replaced}\n  {reason}" in error
    settings = command(crawl, trained, *words)[4:]
    new = ["--out", f"{trained}-2", "--reuse", str(trained)]
    assert printed_command(error) == [*verb, str(RECIPE), *settings, *new]
    assert files_of(trained) == before


@pytest.mark.spark
@pytest.mark.usefixtures("no_spark")
def test_other_inputs_are_refused(
    trained: Path, crawl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = tmp_path / "crawl"
    fewer.mkdir()
    first, *others = sorted(crawl.glob("*.warc.gz"))
    shutil.copy2(first, fewer / first.name)
    before = files_of(trained)
    assert main(command(crawl, trained, "--set", f'source.paths=["{fewer}/*.warc.gz"]')) == 2
    error = capsys.readouterr().err
    assert f"which replace {', '.join(step for step in STEPS if step != 'audit')}\n" in error
    assert f"input files: {len(others)} removed\n" in error
    assert "--reuse" not in printed_command(error)  # nothing is left to share
    assert files_of(trained) == before


@pytest.mark.spark
@pytest.mark.usefixtures("no_spark")
def test_a_model_that_was_trained_generates_after_a_refusal(
    trained: Path, crawl: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(command(crawl, trained, "--set", "quality.min_words=60")) == 2
    assert main(["generate", str(trained), "--tokens", "3"]) == 0
    assert main(["trace", str(trained), "--step", "1", "--brief"]) == 0


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.usefixtures("no_spark")
def test_a_model_that_was_trained_is_exported_and_evaluated_after_a_refusal(
    trained: Path, finished: Store, crawl: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(command(crawl, trained, "--set", "quality.min_words=60")) == 2
    assert main(["export", str(trained), "--format", "huggingface", "--out", str(tmp_path / "llama")]) == 0
    assert (tmp_path / "llama/model.safetensors").stat().st_size > 10_000
    assert main(["evaluate", str(trained), "--on", finished.uri, "--sequences", "4"]) == 0


@pytest.mark.spark
@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize("words", [["--set", "spark.partitions=3", "--set", "train.seq_len=128"], []])
def test_what_leaves_the_dataset_as_it_is_is_complete_and_keeps_the_plan(
    trained: Path, crawl: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    plan, dataset = (trained / "train/plan.json").read_bytes(), open_dataset(Store(str(trained))).digest
    assert main(command(crawl, trained, *words)) == 0
    shown = capsys.readouterr()
    assert [line.split()[:3] for line in shown.err.splitlines()] == [[step, "is", "complete"] for step in STEPS]
    name = tiny_runs.notes(trained)[-1].name
    lines = shown.out.splitlines()
    assert lines[0].startswith("run complete in ")
    assert (
        f"{trained}/train/plan.json is kept, because {name} was trained with it; `penstock plan` would change it"
        in lines
    )
    assert (trained / "train/plan.json").read_bytes() == plan
    assert open_dataset(Store(str(trained))).digest == dataset
    assert read_plan(Store(str(trained))).steps == 3


@pytest.mark.spark
@pytest.mark.usefixtures("same_spark")
def test_the_printed_command_makes_a_run_that_shares_unchanged_tables(
    trained: Path, crawl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(trained)
    assert main(command(crawl, trained, "--set", "tokens.chunk_tokens=256")) == 2
    words = printed_command(capsys.readouterr().err)
    assert main(words) == 0
    shown = capsys.readouterr()
    complete = [line.split()[0] for line in shown.err.splitlines() if line.endswith(f" in {trained}")]
    assert complete == [step for step in STEPS if step != "tokens"]
    rows = [line.split(maxsplit=1) for line in shown.out.splitlines() if line.startswith(("  reused ", "  built "))]
    assert rows == [
        ["reused", f"{', '.join(complete)} of {trained}"],
        ["built", "tokens: tokens.chunk_tokens: 512 → 256"],
    ]
    assert files_of(trained) == before
    new = Store(f"{trained}-2")
    tables = read_run(new).tables
    assert {name for name, version in tables.items() if not version.startswith("../../run/")} == {"tokens"}
    assert {path.partition("/")[0] for path in new.walk()} == {"progress.json", "run.json", "tokens", "train"}
    assert open_dataset(new).chunk_tokens == 256
    assert open_table(new, "clean")[1].digest == open_table(Store(str(trained)), "clean")[1].digest
    assert read_plan(new).dataset == open_dataset(new).digest
    # The same command without --reuse resumes: run.json names the other run.
    assert main(words[: words.index("--reuse")]) == 0
    assert sum(line.endswith(f" in {trained}") for line in capsys.readouterr().err.splitlines()) == len(STEPS) - 1
    # A table that somebody deleted is built again.
    shutil.rmtree(f"{new.root}/tokens/{tables['tokens']}")
    assert main(words[: words.index("--reuse")]) == 0
    assert read_run(new).tables == tables


@pytest.mark.spark
@pytest.mark.usefixtures("same_spark")
def test_a_run_with_other_tables_returns_to_those_of_its_model(
    spark: Any, trained: Path, crawl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier version let a changed recipe replace the tables below a model."""
    run, dataset = Store(str(trained)), open_dataset(Store(str(trained))).digest
    recipe = run_all.read_recipe(
        str(RECIPE), [f'source.paths=["{crawl}/*.warc.gz"]', *SMALL, "tokens.chunk_tokens=256"]
    )
    run_steps(spark, prepare(recipe, None), run, 2)
    assert open_dataset(run).digest != dataset
    assert main(command(crawl, trained, "--set", "tokens.chunk_tokens=1024")) == 2
    capsys.readouterr()
    assert main(command(crawl, trained)) == 0
    assert open_dataset(run).digest == dataset


# ------------------------------------------------------------------------------------------------ an existing tokenizer


def sentencepiece_model(finished: Store, folder: Path) -> Path:
    """The SentencePiece model that the shared run has trained."""
    table, manifest = open_table(finished, "tokenizer")
    return Path(shutil.copy(table.path(manifest.paths["model"]), folder / "own.model"))


def tokenizer_json(finished: Store, folder: Path) -> Path:
    """A byte-level BPE of the library `tokenizers`."""
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    own = Tokenizer(models.BPE())
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    own.train_from_iterator(["an old tokenizer of another model"] * 9, trainer)
    own.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


NOT_USED = (
    "tokenizer.vocab_size and tokenizer.sample_bytes of the recipe are not used, because --set gives tokenizer.model"
)


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "jobs/recipes").glob("*.toml")) if path.stem != "mixed"],
    ids=lambda path: path.stem,
)
def test_every_shipped_recipe_takes_an_existing_tokenizer(path: Path) -> None:
    recipe = read_recipe(str(path), ["source.paths=['x']", "tokenizer.model=tokenizer.json"])
    assert recipe.section("tokenizer", TokenizerConfig).model == "tokenizer.json"
    assert recipe.to_json()["tokenizer"] == {"model": "tokenizer.json"}
    assert recipe.notes == (NOT_USED,)
    unset = [Unset("tokenizer.vocab_size"), Unset("tokenizer.sample_bytes")]
    assert read_recipe(str(path), ["source.paths=['x']", *unset]).section("tokenizer", TokenizerConfig).model is None


@pytest.mark.spark
@pytest.mark.usefixtures("same_spark")
@pytest.mark.parametrize(("make", "kind"), [(sentencepiece_model, "sentencepiece"), (tokenizer_json, "huggingface")])
def test_a_run_with_an_existing_tokenizer(
    finished: Store, crawl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, kind: str
) -> None:
    model, run = make(finished, tmp_path), tmp_path / "run"
    shutil.copytree(finished.root, run)
    settings = [f'source.paths=["{crawl}/*.warc.gz"]', *(one for one in SMALL if "vocab_size" not in one)]
    words = [word for one in [*settings, f"tokenizer.model={model}"] for word in ("--set", one)]
    assert main(["stage", "tokens", str(RECIPE), "--out", str(run), *words]) == 0
    assert f"penstock: {NOT_USED}\n" in capsys.readouterr().err
    dataset = open_dataset(Store(str(run)))
    assert dataset.tokenizer.kind == kind
    assert dataset.tokenizer.sha256 == hashlib.sha256(model.read_bytes()).hexdigest()
    assert sum(dataset.num_tokens().values()) > 10_000


# ------------------------------------------------------------------------------------------------ folders and recipes


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The message of a command that is refused, which is one line."""
    assert main(list(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.usefixtures("no_spark")
def test_a_file_is_no_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.md"
    file.write_text("text")
    assert refused(capsys, *command(tmp_path, file)) == (
        f"penstock: --out {file}: expected a folder, got a file. Name another folder."
    )
    assert refused(capsys, *command(tmp_path, file / "run")) == (
        f"penstock: --out {file}/run: expected a folder that can be written, got an error: Not a directory. Name "
        "another folder, or change its permissions."
    )
    assert file.read_text() == "text"


@pytest.mark.usefixtures("no_spark")
def test_a_folder_without_write_permission_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.geteuid() and parent.name.startswith("pytest"):
            parent.chmod(0o755)
    tmp_path.chmod(0o755)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # permissions do not bind the superuser
    try:
        line = refused(capsys, *command(tmp_path, closed / "run"))
    finally:
        os.seteuid(user)
    assert line == (
        f"penstock: --out {closed}/run: expected a folder that can be written, got an error: Permission denied. Name "
        "another folder, or change its permissions."
    )


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "recipe {}: expected a readable TOML file, got an error: No such file or directory. Correct the path, "),
        ("folder", "recipe {}: expected a readable TOML file, got an error: Is a directory. Correct the path, "),
        (
            b"\xff\xfe",
            "recipe {}: expected a readable TOML file, got an error: it is not UTF-8 text. Correct the path, ",
        ),
        (b"[source\n", "{}: expected valid TOML, got an error: "),
    ],
)
def test_a_recipe_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | str | None, message: str
) -> None:
    recipe = tmp_path / "own.toml"
    if content == "folder":
        recipe.mkdir()
    elif isinstance(content, bytes):
        recipe.write_bytes(content)
    line = refused(capsys, "run", str(recipe), "--out", str(tmp_path / "run"))
    assert line.startswith(f"penstock: {message.format(recipe)}")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_spark")
def test_a_recipe_without_a_source_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.toml").write_text("[quality]\nmin_words = 3\n")
    assert main(["run", str(tmp_path / "own.toml"), "--out", str(tmp_path / "run")]) == 2
    assert "source.paths: expected at least one file, got none." in capsys.readouterr().err


@pytest.mark.usefixtures("no_spark")
def test_a_run_to_reuse_is_another_run_on_the_same_filesystem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = command(tmp_path, run, "--reuse", str(tmp_path / "none"))
    assert refused(capsys, *words) == (
        f"penstock: --reuse {tmp_path}/none: expected a run folder, got one without run.json. Correct the path."
    )
    tiny_runs.make_run(run)
    assert "expected another run than --out, got the same" in refused(
        capsys, *command(tmp_path, run, "--reuse", f"{run}/")
    )
    with pytest.raises(ConfigError, match="Set --out to a folder on the filesystem of the run"):
        run_all.open_reused(str(run), Store("mock:///bucket/run"))


@pytest.mark.spark
@pytest.mark.usefixtures("no_spark")
def test_a_locked_run_is_named_before_spark_starts(
    crawl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = Store(str(tmp_path / "run")), tiny_runs.make_run(tmp_path / "other")
    (tmp_path / "run").mkdir()
    with lock_tables(run, "penstock takedown"):
        line = refused(capsys, *command(crawl, tmp_path / "run"))
    assert (
        f"expected a free lock for `penstock run`, got one held by `penstock takedown` (process {os.getpid()}" in line
    )
    with lock_tables(Store(str(other)), "penstock takedown"):
        line = refused(capsys, *command(crawl, tmp_path / "run", "--reuse", str(other)))
    assert line.startswith(f"penstock: {other}/tables.lock: expected a free lock for `penstock run`")


@pytest.mark.usefixtures("no_spark")
def test_a_limit_that_replaces_those_of_languages_is_noted_before_spark_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        f'[source]\npaths = ["{tmp_path}/a.jsonl"]\nformat = "jsonl"\n[language]\nlanguages = ["en", "ru"]\n'
        "[quality]\nmin_alpha_words = 0.7\n"
    )
    for word, is_noted in (("quality.min_words=30", True), ("quality.min_alpha_words=0.611", False)):
        with pytest.raises(RuntimeError, match="Spark was started"):
            main(["run", str(recipe), "--out", str(tmp_path / "run"), "--set", word])
        note = (
            "penstock: quality.min_alpha_words = 0.7 replaces limits of single languages:\n"
            "  0.7 is stricter for ru (0.611)\n"
        )
        assert (note in capsys.readouterr().err) is is_noted
