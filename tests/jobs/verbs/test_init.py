"""`penstock init`: recipes from flags and from questions, for archives and for rows with fields; and one that runs."""

import json
import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.cli import main
from jobs.recipe import read_recipe, read_values, shipped_recipes
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.manifest import open_table
from schemas.storage import Store
from tests.support.paths import ROOT


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "page.warc.gz"
    path.write_bytes(b"")
    return path


def written(recipe: Path) -> dict[str, dict[str, object]]:
    """The keys that a recipe sets."""
    return {name: section for name, section in tomllib.loads(recipe.read_text()).items() if section}


def test_flags_become_settings(archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.toml"
    given = ["--source", str(archive), "--name", "crawl", "--language", "en", "--language", "de", "--vocab-size", "600"]
    assert main(["init", str(recipe), *given]) == 0
    assert written(recipe) == {
        "source": {"name": "crawl", "paths": [str(archive)]},
        "language": {"languages": ["en", "de"]},
        "tokenizer": {"vocab_size": 600},
    }
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "found 1 file (1 warc), 0 bytes",
        f"recipe written to {recipe}",
        f"next: penstock run {recipe} --out run",
    ]


def test_every_line_that_is_a_comment_is_a_valid_setting(archive: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    assert main(["init", str(recipe), "--source", str(archive)]) == 0
    lines = recipe.read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if line.startswith("# ") and " = " in line]
    keys = [number for number in keys if lines[number][2:].partition(" = ")[0].isidentifier()]
    assert len(keys) > 20
    sections = set(tomllib.loads(recipe.read_text()))
    assert {"source", "extract", "language", "quality", "dedup", "pii", "tokenizer", "tokens", "train"} <= sections
    for number in keys:
        changed = tmp_path / "changed.toml"
        changed.write_text("\n".join([*lines[:number], lines[number][2:], *lines[number + 1 :]]))
        read_recipe(str(changed), [])
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize("base", [name for name in shipped_recipes() if name != "mixed"])
def test_a_recipe_from_a_shipped_one_has_its_settings(archive: Path, tmp_path: Path, base: str) -> None:
    recipe = tmp_path / "r.toml"
    assert main(["init", str(recipe), "--from", base, "--source", str(archive)]) == 0
    expected = read_values(base)
    expected["source"]["paths"] = [str(archive)]
    assert tomllib.loads(recipe.read_text()) == expected
    lines = recipe.read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if line[:1].isalpha()]
    assert [lines[number] for number in keys if not lines[number - 1].startswith("# ")] == []
    read_recipe(str(recipe), [])


def test_answers_replace_settings_of_the_recipe(archive: Path, tmp_path: Path) -> None:
    recipe, mine = tmp_path / "r.toml", tmp_path / "mine.toml"
    mine.write_text(
        '[language]\nlanguages = [  # two\n    "en",\n    "fr",\n]\nmin_score = 0.7\n\n'
        "[tokenizer]\nvocab_size = 900\nsample_bytes = 5_000\n[[quality.rule]]\n"
        'name = "short"\nwhen = "gopher_num_words < 9"\nreason = "It is short."\n'
    )
    given = ["--source", str(archive), "--language", "de", "--tokenizer", "t.json", "--name", "mine"]
    assert main(["init", str(recipe), "--from", str(mine), *given]) == 0
    assert tomllib.loads(recipe.read_text()) == {
        "language": {"languages": ["de"], "min_score": 0.7},
        "tokenizer": {"model": "t.json"},
        "quality": {"rule": [{"name": "short", "when": "gopher_num_words < 9", "reason": "It is short."}]},
        "source": {"name": "mine", "paths": [str(archive)]},
    }


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_fields_of_rows_are_detected(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    rows = [{"uuid": "1", "title": "short", "body": "a much longer text", "page_url": "http://a.org/1"}] * 3
    path = tmp_path / f"x.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    recipe = tmp_path / "r.toml"
    assert main(["init", str(recipe), "--source", str(path)]) == 0
    source = written(recipe)["source"]
    assert (source["text_field"], source["url_field"], source["id_field"]) == ("body", "page_url", "uuid")
    assert "fields of x." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["r.toml", "--source", "none.jsonl"], "no such file"),
        (["r.toml"], "expected --source PATH, got none, and standard input is no terminal"),
        (["r.toml", "--source", "x.jsonl", "--from", "webb"], "recipe webb: expected "),
        (["r.toml", "--source", "x.jsonl", "--from", "inline.toml"], "expected settings in tables such as [source]"),
        (["r.txt", "--source", "x.jsonl"], "expected a name that ends with .toml, got "),
        (["here.toml", "--source", "x.jsonl"], "which exists. Name another file, or remove it."),
        (["none/r.toml", "--source", "x.jsonl"], "expected an existing folder, got "),
        (["r.toml", "--source", "numbers.jsonl"], "expected a field with texts in numbers.jsonl, got n."),
        (["r.toml", "--source", "x.jsonl", "--name", "a/b"], "source.name: "),
        (["r.toml", "--source", "x.jsonl", "--vocab-size", "5"], "tokenizer.vocab_size: "),
        (["r.toml", "--source", "x.jsonl", "--set", "quality.min_wrds=3"], "(did you mean 'min_words'?)"),
        (["r.toml", "--source", "x.jsonl", "--set", "min_words=3"], "--set: expected section.key=value, got "),
        (["r.toml", "--source", "x.jsonl", "--vocab-size", "600", "--tokenizer", "t.json"], "would be ignored"),
    ],
)
def test_wrong_flags_write_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    (tmp_path / "here.toml").write_text("x")
    (tmp_path / "inline.toml").write_text('source = {name = "a"}\n')
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "numbers.jsonl").write_text('{"n": 1}\n')
    assert main(["init", *words]) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"here.toml", "inline.toml", "x.jsonl", "numbers.jsonl"}
    assert (tmp_path / "here.toml").read_text() == "x"


def test_questions_on_a_terminal(archive: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "jobs.cli", "init", str(tmp_path / "r.toml")]
    started = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    os.write(ours, f"\n{archive}\ncrawl\nen, fr\n\n".encode())
    out, _ = started.communicate(timeout=120)
    os.close(ours)
    os.close(theirs)
    assert started.returncode == 0, out.decode()
    assert written(tmp_path / "r.toml") == {
        "source": {"name": "crawl", "paths": [str(archive)]},
        "language": {"languages": ["en", "fr"]},
    }
    for question in ("Input files or patterns", "At least one file", "Name of the source [web]", "Languages to keep"):
        assert question in out.decode()


def test_a_required_setting_of_a_source_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dump whose path names no site needs `source.stackexchange.site`, before the file is read."""
    dump, mine, recipe = tmp_path / "Posts.xml", tmp_path / "mine.toml", tmp_path / "r.toml"
    dump.write_text("<posts></posts>")
    mine.write_text('[source]\nname = "qa"\nformat = "stackexchange"\n\n[language]\nlanguages = ["en"]\n')
    given = ["init", str(recipe), "--from", str(mine), "--source", str(dump)]
    assert main(given) == 2
    assert "Set source.stackexchange.site." in capsys.readouterr().err
    assert main([*given, "--set", "source.stackexchange.site=coffee.stackexchange.com"]) == 0
    assert tomllib.loads(recipe.read_text()) == {
        "source": {
            "name": "qa",
            "format": "stackexchange",
            "paths": [str(dump)],
            "stackexchange": {"site": "coffee.stackexchange.com"},
        },
        "language": {"languages": ["en"]},
    }


def test_further_settings_without_a_recipe(archive: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    further = [
        "quality.min_words=30",
        "source.http_statuses=[200, 203]",
        "source.quality.min_words=9",
        "plan.compute=1e18",
    ]
    assert main(["init", str(recipe), "--source", str(archive), *(f"--set={one}" for one in further)]) == 0
    own = {"http_statuses": [200, 203], "quality": {"min_words": 9}}
    assert written(recipe) == {
        "source": {"name": "web", "paths": [str(archive)], **own},
        "quality": {"min_words": 30},
        "plan": {"compute": 1e18},
        "language": {"languages": []},
    }
    assert "# min_words" not in recipe.read_text()


@pytest.mark.parametrize("key", ["source.stackexchange.site", "source.stackexchange.stackexchange.site"])
def test_a_required_setting_of_one_of_several_sources(tmp_path: Path, key: str) -> None:
    (tmp_path / "Posts.xml").write_text("<posts></posts>")
    (tmp_path / "a.warc").write_bytes(b"")
    path = tmp_path / "corpus.toml"
    files = [f"web={tmp_path}/a.warc", f"stackexchange={tmp_path}/Posts.xml"]
    further = [f"{key}=coffee.stackexchange.com", "source.web.http_statuses=[203]"]
    removed = ["source.stackexchange.stackexchange.min_score", "source.web.extract.unicode", "language.languages"]
    given = ["--source", *files, *(f"--set={one}" for one in further), *(f"--unset={one}" for one in removed)]
    assert main(["init", str(path), "--from", "mixed", *given]) == 0
    web, posts = tomllib.loads(path.read_text())["source"]
    assert (web["http_statuses"], web["extract"]) == ([203], {})
    assert posts["stackexchange"] == {"keep_unanswered": False, "site": "coffee.stackexchange.com"}
    assert "languages" not in tomllib.loads(path.read_text())["language"]


@pytest.mark.spark
def test_the_recipe_runs(spark, crawl: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    source = str(crawl / "demo-001.warc.gz")
    assert main(["init", str(recipe), "--source", source, "--language", "en", "--vocab-size", "600"]) == 0
    run = Store(str(tmp_path / "run"))
    run_steps(spark, prepare(read_recipe(str(recipe), []), None), run, 2)
    tokens = open_table(run, "tokens")[1].content
    assert tokens.counts.rows_kept > 3
    assert set(tokens.figures["streams"]) <= {"web/train", "web/heldout"}
    assert run.read_json("progress.json")["state"] == "finished"


def test_a_recipe_with_several_sources_keeps_those_with_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "news.jsonl").write_text('{"text": "words"}\n')
    (tmp_path / "a.warc").write_bytes(b"WARC/1.0\r\n\r\n")
    path = tmp_path / "corpus.toml"
    news, web = f"news={tmp_path}/*.jsonl", f"web={tmp_path}/a.warc"
    assert main(["init", str(path), "--from", "mixed", "--source", news, "--source", web, "--language", "de"]) == 0
    out = capsys.readouterr().out
    assert "news: 1 jsonl" in out
    assert "left out, because no --source names their files: wikipedia, books, code" in out
    recipe = read_recipe(str(path), [])
    mixed = read_recipe("mixed", [f"source.{name}.paths=['x']" for name in read_recipe_names("mixed")])
    assert recipe.sources == ("web", "news")
    for name in recipe.sources:
        for section in ("quality", "classifier", "extract"):
            assert recipe.of_source(name)[section] == mixed.of_source(name)[section]
    assert recipe["train"].weights == {"web": 60, "news": 4}  # type: ignore[attr-defined]
    assert recipe["dedup"].source_ranks == ("news", "web")  # type: ignore[attr-defined]
    assert recipe["language"].languages == ("de",)  # type: ignore[attr-defined]


def read_recipe_names(name: str) -> list[str]:
    return [table["name"] for table in read_values(name)["source"]]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([], "expected --source NAME=PATH for at least one source of the recipe"),
        (["x.warc"], "expected --source NAME=PATH with a source of the recipe"),
    ],
)
def test_the_files_of_several_sources_have_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sources: list[str], expected: str
) -> None:
    flags = ["--source", *sources] if sources else []
    assert main(["init", str(tmp_path / "c.toml"), "--from", "mixed", *flags]) != 0
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "c.toml").exists()
