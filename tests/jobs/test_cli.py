"""The command: every verb has a help text with an example, and errors come as one message and exit code 2."""

import argparse
import os
import pkgutil
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

import jobs.verbs
from jobs import run_all
from jobs.cli import GROUPS, build_parser, import_job, list_verbs, main, read_literals
from jobs.recipe import read_recipe
from jobs.verbs import inspect
from jobs.verbs import models as learning
from jobs.verbs import train as training
from schemas.manifest import read_run, write_run
from schemas.tokens import open_dataset
from tests.support import tiny_runs
from tests.support.paths import ROOT
from tests.support.tiny_dataset import make_tiny_dataset
from train.config.settings import load_settings, settings_of
from train.plan.make_plan import make_plan
from train.plan.plan import settings_beyond_recipe, write_plan

EXPECTED = ("run", "stage", "plan", "train", "report", "show", "models", "trace", "generate", "export", "demo-crawl")
EXPECTED += ("whatif", "train-lm", "train-classifier", "train-importance", "derive-profiles")
EXPECTED += ("calibrate", "fit-scaling", "verify", "takedown", "lineage", "diff", "dvc")
EXPECTED += ("ladder", "ablate", "mix", "evaluate")
"""The verbs that the pages use."""


@pytest.mark.parametrize("verb", list_verbs())
def test_every_verb_shows_one_example(verb, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([verb, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0
    assert text.count(f"example: penstock {verb} ") == 1


def parser_of(verb: str) -> argparse.ArgumentParser:
    """The parser of a verb, with its arguments."""
    return next(action for action in build_parser(verb)._actions if action.choices).choices[verb]


@pytest.mark.parametrize("verb", list_verbs())
def test_every_argument_has_a_help_text(verb):
    without = [action.option_strings or action.dest for action in parser_of(verb)._actions if not action.help]
    assert without == []


@pytest.mark.parametrize("verb", list_verbs())
def test_unset_is_accepted_beside_set(verb):
    options = {option for action in parser_of(verb)._actions for option in action.option_strings}
    assert ("--set" in options) is ("--unset" in options)


def test_every_verb_that_starts_spark_can_print_its_messages():
    modules = {verb.module: import_job(f"verbs.{verb.module}") for verb in list_verbs().values()}
    starts = {name for name, module in modules.items() if {"spark_session", "run_recipe"} & {*vars(module)}}
    verbose = {
        verb.module for name, verb in list_verbs().items() if "--verbose" in parser_of(name)._option_string_actions
    }
    assert verbose == starts == {"ablate", "dvc", "export", "inspect", "models", "repair", "run"}


def test_every_example_parses():
    for verb in list_verbs():
        parser = build_parser(verb)
        example = parser_of(verb).epilog
        words = subprocess.run(["sh", "-c", f"printf '%s\\n' {example.split('penstock ')[1]}"], capture_output=True)
        arguments = parser.parse_args(words.stdout.decode().splitlines())
        assert arguments.verb == verb
        assert callable(arguments.command)


def test_the_help_lists_every_verb_in_order(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    listed = re.findall(r"^  ([a-z][a-z-]+)  ", text.partition("\ndata: ")[2], re.MULTILINE)
    assert listed == [*list_verbs()]
    assert {*EXPECTED} <= {*listed}
    assert re.findall(r"^([a-z]+): ", text.partition("options:")[2], re.MULTILINE) == [*GROUPS][:-1]
    assert [line for line in text.splitlines() if len(line) > 80] == []
    by_group = {verb.group: [] for verb in list_verbs().values()}
    for name, verb in list_verbs().items():
        by_group[verb.group].append(name)
    assert [names == sorted(names) for names in by_group.values()] == [True] * (len(GROUPS) - 1)
    assert by_group["join"] == ["lineage", "plant-test", "prove", "sign", "summary", "takedown", "trace"]


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert (stopped.value.code, capsys.readouterr().out) == (0, f"penstock {version('penstock')}\n")


@pytest.mark.parametrize(
    ("verb", "hint"),
    [
        ("runn", "Did you mean `penstock run`?"),
        ("train_lm", "Did you mean `penstock train-lm`?"),
        ("xyzzy", "`penstock --help` lists them."),
    ],
)
def test_a_mistyped_verb_is_answered_with_the_nearest(verb, hint, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([verb, "run", "--out", "x"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[1:] == [f"penstock: error: expected a verb, got {verb!r}. {hint}"]


def test_an_interrupt_before_a_verb_has_started_is_one_sentence(monkeypatch, capsys):
    def interrupted(name):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr("jobs.cli.build_parser", interrupted)
    assert main(["run"]) == 130
    assert capsys.readouterr().err == "penstock: interrupted; the same command resumes where it stopped\n"


def test_a_module_declares_the_verbs_that_it_defines():
    modules = [import_job(f"verbs.{module.name}") for module in pkgutil.iter_modules(jobs.verbs.__path__)]
    declared = [module for module in modules if hasattr(module, "VERBS")]
    assert [list(module.VERBS) for module in declared] == [list(module.COMMANDS) for module in declared]
    verbs = [verb for module in declared for verb in module.VERBS]
    assert sorted(verbs) == sorted(list_verbs())  # so no verb has two modules


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            '"""A verb."""\nimport pyarrow\nGROUP = "data"\nVERBS = {"a": "One.", "b-c": "Two" " and three."}',
            {"GROUP": "data", "VERBS": {"a": "One.", "b-c": "Two and three."}},
        ),
        ('"""Shared by verbs."""\nCOMMANDS = {"a": 1}', {}),
        ("def f():\n    VERBS = {'a': 'One.'}", {}),
    ],
)
def test_verbs_are_read_without_an_import(source, expected):
    assert read_literals(source.encode()) == expected


@pytest.mark.parametrize("verb", [[], ["nonsense"], ["--nonsense"]])
def test_no_verb_or_an_unknown_verb_is_an_error(verb, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(verb)
    assert stopped.value.code == 2
    assert "usage: penstock [-h] [--version] VERB ..." in capsys.readouterr().err


@pytest.mark.parametrize(("words", "imported"), [(["--help"], False), (["show", "--help"], True)])
def test_the_help_imports_no_heavy_library(words, imported):
    program = (
        "import sys\nfrom jobs.cli import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
        "    print(sorted({'numpy', 'pyarrow', 'pydantic', 'pyspark', 'torch'} & {*sys.modules}), file=sys.stderr)\n"
        "    print('jobs.verbs.plan' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy, plan = done.stderr.splitlines()
    assert ("'pyarrow'" in heavy) is imported
    assert heavy == "[]" or imported
    assert plan == "False"


def test_all_wrong_names_at_once(tmp_path, capsys):
    recipe = tmp_path / "r.toml"
    recipe.write_text("[qualty]\n[tokens]\nshard_token = 3\n[train]\nseqlen = 4\n")
    assert main(["run", str(recipe), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "[qualty]: no such section (did you mean 'quality'?)" in error
    assert "tokens.shard_token: no such key (did you mean 'shard_tokens'?)" in error
    assert "train.seqlen: no such key (did you mean 'seq_len'?)" in error
    assert "source.paths: expected at least one file, got none." in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "no-such.toml", "--out", "x"], "recipe no-such.toml: expected a readable TOML file, got an error"),
        (["plan", "no-such-run"], "expected a run folder"),
        (["show", "no-such-run"], "expected --doc, --url, --domain, --rule, --where or --random"),
        (["show", "no-such-run", "--where", "langage = de"], "did you mean 'language'?"),
        (["show", "no-such-run", "--where", "gopher_num_words < many"], "a number or a column at character 20"),
        (["show", "no-such-run", "--doc", "xyz"], "--doc: expected a document id of 12 to 32 hex digits, got 'xyz'"),
        (["models", "fetch", "lid.176.ftx"], "lid.176.ftz"),
        (["models", "verify"], "expected a name"),
        (["trace", "no-such-run", "--step", "1"], "no-such-run"),
        (["train", "no-such-run", "--dry-run"], "no-such-run: expected a run folder, got no such folder"),
        (["train", "no-such-run", "--ranks", "0"], "expected --ranks >= 1 and --restarts >= 0, got 0 and 0"),
        (
            ["export", "no-such-run", "--out", "x", "--format", "megatron"],
            "no-such-run: expected a run folder, got no such folder",
        ),
        (
            ["export", "no-such-run", "--out", "x", "--format", "megatron", "--step", "3"],
            "export --step: expected --format huggingface, got megatron",
        ),
    ],
)
def test_errors_are_one_message(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("penstock: ")
    assert message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "RECIPE", "--set", "quality.min_word=3"], "did you mean 'min_words'?"),
        (["run", "RECIPE", "--set", "quality.dialect=dcml"], "'dclm'"),
        (["run", "RECIPE", "--set", "quality.families=['c4']"], "Add 'fineweb' to quality.families"),
        (["run", "RECIPE", "--set", "quality.profiles=no.toml"], "model 'no.toml': expected a"),
        (["run", "RECIPE", "--set", "perplexity.scorer=ngram", "--set", "perplexity.models={en='no.lm'}"], "no.lm"),
        (["run", "RECIPE", "--set", "perplexity.scorer='checkpoint:no'"], "expected a checkpoint folder"),
        (["run", "RECIPE", "--set", "classifier.models={q='no.arrow'}"], "no.arrow"),
        (["run", "RECIPE", "--set", "classifier.min_score={q=0.5}"], "q"),
        (["run", "RECIPE", "--set", "decontaminate.evaluation_sets={a='no.jsonl'}"], "no.jsonl"),
        (["whatif", "no-such-run"], "expected a run folder"),
        (["train-lm", "--out", "x.lm"], "expected either lm.run or train_lm.input, got neither"),
        (
            ["train-lm", "--out", "x.bin", "--set", "lm.run=r"],
            "expected a path that ends with .lm, in an existing folder",
        ),
        (["train-lm", "--out", "x.lm", "--set", "train_lm.input=['no-such.txt']"], "no-such.txt"),
        (["train-lm", "--out", "x.lm", "--set", "lm.run=no-such-run"], "expected a run folder, got no such folder"),
        (["train-classifier", "--out", "x"], "expected both positives and negatives, or labelled files"),
        (
            ["train-importance", "--out", "x", "--set", "train_importance.target={run='no'}"],
            "[train_importance]: expected",
        ),
        (["derive-profiles", "--out", "x.toml"], "[derive]: expected"),
        (
            ["derive-profiles", "--out", "x.toml", "--set", "derive.run=no-such-run"],
            "expected a run folder, got no such folder",
        ),
    ],
)
def test_what_is_wrong_or_missing_is_reported_before_spark_starts(arguments, message, capsys, monkeypatch, tmp_path):
    def starts(*_):
        raise RuntimeError("Spark was started")

    for module in (run_all, learning, inspect):
        monkeypatch.setattr(module, "spark_session", starts)
    (tmp_path / "page.warc.gz").write_bytes(b"")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[source]\npaths = ["{tmp_path}/*.warc.gz"]\n')
    filled = [str(recipe) if argument == "RECIPE" else argument for argument in arguments]
    assert main([*filled, *(["--out", str(tmp_path / "run")] if arguments[0] == "run" else [])]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "path",
    [path for path in sorted((ROOT / "jobs/recipes").glob("*.toml")) if path.stem != "mixed"],
    ids=lambda path: path.stem,
)
def test_recipes_name_settings_that_exist(path):
    settings = settings_of(read_recipe(str(path), ["source.paths=['x']"]))
    assert settings.train.seq_len >= 256


# ---------------------------------------------------------------------------------------------------- training a model


@pytest.fixture
def tiny_run(tmp_path):
    """A run folder with a dataset and a recipe, not yet planned."""
    run = make_tiny_dataset(tmp_path)
    recipe = {"train": {"seq_len": 64, "global_batch": 6}, "plan": {"num_kv_heads": 2}}
    write_run(run, read_run(run).model_copy(update={"recipe": recipe}))
    return run


def became(monkeypatch, run, *arguments):
    """The command that `penstock train` turns into, without its Python, and the variables that it sets."""
    found = []
    monkeypatch.setattr(training.os, "execve", lambda *call: found.append(call))
    assert main(["train", run.uri, *arguments]) == 0
    ((program, command, environment),) = found
    assert command[:2] == [program, "-m"] == [sys.executable, "-m"]
    return command[2:], {name: value for name, value in environment.items() if os.environ.get(name) != value}


def test_one_process_needs_no_torchrun(monkeypatch, tiny_run):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    command, set_here = became(monkeypatch, tiny_run, "--set", "train.steps=3", "--set", "optim.schedule=wsd")
    settings = ["--set", "train.steps=3", "--set", "optim.schedule=wsd"]
    assert command == ["train.start", "train.pretrain", tiny_run.uri, *settings]
    assert "OMP_NUM_THREADS" not in set_here


@pytest.mark.parametrize(("given", "ranks", "restarts"), [("--ranks 2", 2, 0), ("--restarts 3", 1, 3)])
def test_several_processes_and_restarts_are_torchruns(monkeypatch, tiny_run, given, ranks, restarts):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    command, set_here = became(monkeypatch, tiny_run, *given.split(), "--set", "layout.data=ddp")
    counts = ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts), "--shutdown-timeout", "3600"]
    trained = ["-m", "train.start", "--quiet", "train.pretrain", tiny_run.uri, "--set", "layout.data=ddp"]
    assert command == ["train.start", "train.launch", "--standalone", *counts, *trained]
    assert set_here["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "OMP_NUM_THREADS" not in became(monkeypatch, tiny_run, *given.split())[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--ranks 3 --set layout.tensor=2", "layout: expected 3 rank(s), got tensor 2"),
        ("--ranks 8", "expected at least 8 sequences, one for each data-parallel group of ranks, got 6"),
        ("--set layout.compress=bf16 --set layout.data=ddp", "got one rank"),
        ("--set guard.patience=2 --set train.eval_every=0", "guard.patience = 2: expected held-out losses"),
        ("--set train.step=3", "train.step"),
        ("--set cluster.device=h100-sxm", "cluster.device=h100-sxm, which size the model or choose its layout"),
        ("--set train.weights={wiki=-1.0}", "expected weights of 0 or more, with at least one above 0"),
        ("--set train.stages=[{weights={wiki=0.0}}]", "expected weights of 0 or more, with at least one above 0"),
    ],
)
def test_a_run_that_cannot_train_is_refused_before_a_rank_starts(monkeypatch, tiny_run, capsys, given, message):
    monkeypatch.setattr(training.os, "execve", lambda *call: pytest.fail("ranks were started"))
    assert main(["train", tiny_run.uri, "--restarts", "3", *given.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_is_printed_and_goes_by_the_recipe(tmp_path, capsys):
    run = make_tiny_dataset(tmp_path)
    recipe = {"source": {"paths": ["x"]}, "train": {"seq_len": 64, "global_batch": 6}}
    write_run(run, read_run(run).model_copy(update={"recipe": recipe}))
    stages = "train.stages=[{tokens=3840}, {learning_rate=1e-3}]"
    assert main(["plan", run.uri, "--set", "train.steps=30", "--set", stages]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  steps +30 steps +as given$", shown, re.MULTILINE)
    settings = run.read_json("train/plan.json")["settings"]
    assert settings["train"] == {
        **{"seq_len": 64, "global_batch": 6, "steps": 30},
        "stages": [{"tokens": 3840}, {"learning_rate": 1e-3}],
    }
    assert main(["plan", run.uri, "--quiet"]) == 0
    assert capsys.readouterr().out == f"plan written to {run.uri}/train/plan.json\n"
    assert run.read_json("train/plan.json")["settings"]["train"] == recipe["train"]


@pytest.mark.dist
def test_a_plan_that_a_checkpoint_could_not_go_on_under_is_refused(tmp_path, capsys):
    """So that planning again does not cut a trained run off from its plan."""
    run = tiny_runs.trained(tiny_runs.make_run(tmp_path / "run", {"source": {"paths": ["x"]}}), 1)
    before = (run / "train/plan.json").read_bytes()
    assert main(["plan", str(run), "--set", "optim.learning_rate=1e-5"]) == 2
    assert "optim.learning_rate: expected" in capsys.readouterr().err
    assert (run / "train/plan.json").read_bytes() == before
    assert main(["plan", str(run)]) == 0


def test_a_replay_moves_nothing_for_settings_that_are_wrong(monkeypatch, tiny_run, capsys):
    monkeypatch.setattr(training, "begin_replay", lambda *call: pytest.fail("checkpoints were moved"))
    before = read_run(tiny_run)
    write_run(tiny_run, before.model_copy(update={"recipe": before.recipe | {"source": {"paths": ["x"]}}}))
    assert main(["plan", tiny_run.uri, "--quiet"]) == 0
    assert main(["train", tiny_run.uri, "--replay-from", "clean", "--set", "train.stepz=3"]) == 2
    assert "did you mean 'steps'" in capsys.readouterr().err
    assert main(["train", tiny_run.uri, "--replay-from", "clean", "--dry-run"]) == 2


def test_settings_of_earlier_commands_are_named_where_they_are_in_the_way(monkeypatch, tiny_run, capsys):
    monkeypatch.setattr(training.os, "execve", lambda *call: None)
    recipe = read_run(tiny_run).recipe
    settings = load_settings(recipe, ["layout.pipeline=2", "layout.micro_batch=3"], "test")
    write_plan(tiny_run, make_plan(tiny_run, open_dataset(tiny_run), settings))
    assert main(["train", tiny_run.uri, "--ranks", "2", "--set", "layout.tensor=2"]) == 2
    assert "(kept from earlier commands: layout.pipeline = 2, layout.micro_batch = 3)" in capsys.readouterr().err


def test_settings_that_a_device_resolved_are_not_those_of_the_user(tiny_run):
    """A plan holds them after the run has started; `train.steps` is the only one that a command gave."""
    dataset = open_dataset(tiny_run)
    settings = load_settings(read_run(tiny_run).recipe, ["train.steps=30"], "test")
    write_plan(tiny_run, make_plan(tiny_run, dataset, settings.for_device("cpu")))
    assert "micro_batch" in tiny_run.read_json("train/plan.json")["settings"]["layout"]
    assert settings_beyond_recipe(tiny_run) == ["train.steps = 30"]


def test_a_dry_run_shows_what_would_be_and_writes_nothing(monkeypatch, tmp_path, capsys):
    run = make_tiny_dataset(tmp_path)
    recipe = {"train": {"seq_len": 64, "global_batch": 6}, "plan": {"device_memory": 1000, "num_kv_heads": 2}}
    write_run(run, read_run(run).model_copy(update={"recipe": recipe}))
    before = sorted(run.walk())
    assert main(["train", run.uri, "--dry-run", "--ranks", "4", "--set", "layout.tensor=2"]) == 2
    shown = capsys.readouterr().out
    for line in (
        "4 rank(s), nothing was started",
        "layout: zero3, shard 2 · tensor 2",
        "rows: 6 a step; 2 data-parallel groups of ranks compute 3 rows each (0-2, 3-5); 1 micro-batch of 3",
        "!! does not fit: plan.device_memory is 1 kB",
        "memory of a rank (this machine, ",
        "run: 112 steps, 43,008 tokens",
    ):
        assert line in shown
    assert sorted(run.walk()) == before
    room = ["--set", "plan.device_memory=80_000_000_000"]
    assert main(["train", run.uri, "--dry-run", "--set", "train.packing=best_fit", *room]) == 0
    assert "  fits: plan.device_memory is 80 GB, 0 % of it used" in capsys.readouterr().out
    assert sorted(run.walk()) == before
    assert main(["train", run.uri, "--dry-run", "--set", "plan.d_model=64"]) == 2
    assert "`penstock plan`" in capsys.readouterr().err
    compressed = ["--set", "layout.data=ddp", "--set", "layout.compress=powersgd"]
    assert main(["train", run.uri, "--dry-run", *room, *compressed]) == 2
    assert "!! layout.compress = powersgd: expected at least 2 ranks" in capsys.readouterr().out
    write_run(run, read_run(run).model_copy(update={"recipe": recipe | {"cluster": {"device": "h100-sxm"}}}))
    assert main(["train", run.uri, "--dry-run"]) == 2  # of the device that the recipe names
    assert "!! does not fit: plan.device_memory is 1 kB" in capsys.readouterr().out


def test_megatron_files_are_written_without_torch(tmp_path, capsys):
    run = make_tiny_dataset(tmp_path / "run", {"web": 10})
    assert main(["export", run.uri, "--format", "megatron", "--out", str(tmp_path / "megatron")]) == 0
    assert f"{tmp_path}/megatron/web: 9 documents, " in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "megatron").iterdir()) == ["web.bin", "web.idx"]


def test_the_models_are_listed_with_their_licences(capsys):
    assert main(["models", "list"]) == 0
    assert "CC BY-SA 3.0" in capsys.readouterr().out


@pytest.mark.slow
def test_the_installed_command_runs():
    done = subprocess.run([sys.executable, "-m", "jobs.cli", "--help"], capture_output=True, text=True, check=True)
    assert all(verb in done.stdout for verb in EXPECTED)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "run", "--restarts", "-1"],
            "--restarts: expected a whole number from 0 to 999999999999999, got '-1'",
        ),
        (
            ["show", "run", "--limit", "9" * 30],
            f"--limit: expected a whole number from 0 to 999999999999999, got '{'9' * 30}'",
        ),
        (["generate", "run", "--temperature", "nan"], "--temperature: expected a finite number from 0, got 'nan'"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_is_read(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_option_is_not_quoted_with_its_secret(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ('source.paths=["s3://b/x?session_token=SEKRET"]', "spark.hadoop.fs.s3a.secret.key=SEKRET"):
        with pytest.raises(SystemExit) as ended:
            main(["settings", "demo", "--set", word])
        assert ended.value.code == 2
        err = capsys.readouterr().err
        assert "error: unrecognized arguments: --set <not shown, because it may hold a secret>" in err
        assert "SEKRET" not in err
