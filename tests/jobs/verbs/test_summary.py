"""`penstock summary`: files and exit codes, lists, the template, and options that would be ignored."""

import json
from pathlib import Path

import pytest

from jobs.cli import main
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.pipeline.disclosure.facts_file import COMPLETE
from tests.support.tiny_dataset import make_tiny_dataset

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return make_tiny_dataset(tmp_path / "run")


def test_answers_that_are_missing_give_exit_code_1_unless_it_is_a_draft(run: Store, capsys: Printed) -> None:
    assert main(["summary", run.uri, "--eu"]) == 1
    out, err = capsys.readouterr()
    assert "more answers of a person, got nothing for these. Add them to a file" in err
    assert "1.1.a    provider.name" in err
    assert "Of 242 public metrics, " in out
    assert main(["summary", run.uri, "--eu", "--draft"]) == 0


def test_a_complete_file_gives_exit_code_0_and_the_same_bytes_again(
    run: Store, tmp_path: Path, capsys: Printed
) -> None:
    (tmp_path / "facts.toml").write_text(COMPLETE)
    words = ["summary", run.uri, "--eu", "--ab2013", "--facts", str(tmp_path / "facts.toml")]
    assert main([*words, "--out", str(tmp_path / "a")]) == 0
    assert main([*words, "--out", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().err == ""
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["ab2013.html", "ab2013.json", "ab2013.md", "eu.html", "eu.json", "eu.md"]
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    paper = json.loads((tmp_path / "a" / "eu.json").read_text())
    assert paper["missing"] == []
    tokens = sum(open_dataset(run).num_tokens().values())
    values = {entry["key"]: entry["value"] for field in paper["fields"].values() for entry in field["entries"]}
    assert values["size.consumed"] == f"{tokens:,} tokens"


def test_the_default_folder_has_the_version(run: Store, capsys: Printed) -> None:
    assert main(["summary", run.uri, "--eu", "--draft", "--format", "json"]) == 0
    line, version = capsys.readouterr().out.splitlines()[:2]
    file = Path(line.removeprefix("eu: "))
    assert file.parent.parent == Path(run.root) / "summaries"
    assert json.loads(file.read_text())["version"].startswith(file.parent.name)
    assert version == f"eu: version {json.loads(file.read_text())['version']}"


def test_the_score_is_printed_and_in_no_paper(run: Store, tmp_path: Path, capsys: Printed) -> None:
    assert main(["summary", run.uri, "--eu", "--draft", "--score", "--out", str(tmp_path / "out")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (
        sum(row[0].startswith(("D", "F")) and row[-1] in ("0", "0.5", "1", "open", "applicable") for row in rows) == 242
    )
    assert not any(b"public metrics" in path.read_bytes() for path in (tmp_path / "out").iterdir())


def test_changes_against_an_earlier_file_are_printed(run: Store, tmp_path: Path, capsys: Printed) -> None:
    facts = tmp_path / "facts.toml"
    facts.write_text(COMPLETE)
    words = ["summary", run.uri, "--eu", "--facts", str(facts), "--format", "json", "--out"]
    assert main([*words, str(tmp_path / "old")]) == 0
    facts.write_text(COMPLETE.replace("examplebot", "otherbot"))
    capsys.readouterr()
    assert main([*words, str(tmp_path / "new"), "--against", str(tmp_path / "old" / "eu.json")]) == 0
    assert "  crawler.names: 'examplebot' -> 'otherbot'" in capsys.readouterr().out
    changes = json.loads((tmp_path / "new" / "eu.json").read_text())["changes"]
    assert changes == [{"name": "crawler.names", "before": "examplebot", "after": "otherbot"}]


def test_a_list_adds_up_to_the_dataset(run: Store, capsys: Printed) -> None:
    assert main(["summary", run.uri, "--list", "domains"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["tokens", "source", "domains"]
    assert sum(int(row[0]) for row in rows[1:]) == sum(open_dataset(run).num_tokens().values())
    assert {row[2] for row in rows[1:]} == {f"site{number}.co.uk" for number in range(7)}


def test_the_template_names_the_sources_of_the_run(run: Store, capsys: Printed) -> None:
    assert main(["summary", "--template"]) == 0
    assert "[sources.NAME]" in capsys.readouterr().out
    assert main(["summary", run.uri, "--template"]) == 0
    assert "[sources.web]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN"], "--dataset-card, --model-card, --croissant, --bom, --spdx), --list or --template, got none"),
        (["RUN", "--eu", "--list", "domains"], "got --list, --eu"),
        (["--eu"], "expected a run folder, got none"),
        (["RUN", "--template", "--sme"], "summary --sme: expected a paper with it"),
        (["RUN", "--list", "domains", "--facts", "x"], "summary --facts: expected a paper with it"),
        (["RUN", "--eu", "--ab2013", "--against", "x"], "expected one paper with it"),
        (["RUN", "--model-card", "--list", "domains"], "got --list, --model-card"),
        (["RUN", "--bom", "--score"], "summary --score: expected --eu with it"),
        (["RUN", "--bom", "--format", "md"], "summary --format: expected a paper with it, got only other files"),
        (["RUN", "--eu", "--facts", "none.toml"], "expected a TOML file of at most"),
    ],
)
def test_options_without_effect_are_refused(run: Store, capsys: Printed, words: list[str], message: str) -> None:
    assert main(["summary", *(run.uri if word == "RUN" else word for word in words)]) == 2
    assert message in capsys.readouterr().err
