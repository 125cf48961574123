"""`penstock settings`: every key of every section, in words, as JSON and as Markdown, with the nearest name."""

import json

import pytest

from jobs.cli import main
from jobs.recipe import read_values, recipe_sections
from pipeline.stages import DOCUMENT_COLUMNS
from schemas.tables import TABLES


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["settings", *words]) == 0
    return capsys.readouterr().out


SECTIONS = {name: kind.table_class() if kind.array else kind for name, kind in recipe_sections().items()}


def test_sections_are_listed_with_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys).splitlines()[:-2]
    assert [line.split()[0] for line in lines] == [
        "[[stage]]" if name == "stage" else f"[{name}]" for name in recipe_sections()
    ]
    assert all(len(line.split()) > 4 and line.endswith(".") for line in lines)


def test_every_key_has_a_type_a_default_and_a_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    sections = json.loads(printed(capsys, "--json"))
    assert {name: [*section["keys"]] for name, section in sections.items()} == {
        name: [*kind.model_fields] for name, kind in SECTIONS.items()
    }
    for section in sections.values():
        for key in section["keys"].values():
            assert len(key["meaning"]) > 10, key
            assert key["type"]
            assert key["default"]
            assert key["role"] in ("content", "decision", "execution", "location")


def test_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "source")
    assert "  source.max_page_bytes = 16777216  (whole number, at least 1 [bytes])\n" in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(
    ("key", "effect"),
    [
        ("source.text_field", "Changing it reruns the step `documents` and the steps that read its tables."),
        ("source.paths", "Other files rerun the step `documents`; the same files at another path rerun nothing."),
        ("quality.min_words", "Changing it reruns the step `verdicts` and the steps that read its tables."),
        ("dedup.by_url", "Changing it reruns the step `dedup` and the steps that read its tables."),
        ("dedup.rounds", "Changing it reruns the step `clusters` and the steps that read its tables."),
        (
            "tokenizer.model",
            "Changing the content of the file reruns the step `tokenizer` and the steps that read its tables.",
        ),
        ("spark.partitions", "Changing it reruns nothing: it does not change results."),
        ("train.seq_len", "Changing it changes the plan or the training run, and reruns no data step."),
    ],
)
def test_one_key_and_what_it_reruns(capsys: pytest.CaptureFixture[str], key: str, effect: str) -> None:
    lines = printed(capsys, key).splitlines()
    assert lines[2].startswith(f"  {key} = ")
    assert lines[-1].strip() == effect


def test_a_key_without_its_section_is_looked_up_in_all(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "max_words")
    assert "  quality.max_words = unset" in text
    assert "  toxicity.max_words = unset" in text


def test_an_unset_limit_states_the_one_that_applies(capsys: pytest.CaptureFixture[str]) -> None:
    words = "If unset: the dialect's own limit, 50."
    assert f" {words}\n" in printed(capsys, "quality.min_words")
    assert json.loads(printed(capsys, "quality.min_words", "--json"))["quality"]["keys"]["min_words"][
        "meaning"
    ].endswith(f" {words}")
    assert f" {words}<br>" in printed(capsys, "quality.min_words", "--markdown")
    assert "If unset" not in printed(capsys, "quality.dialect")


def test_keys_of_tables_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "      learning_rate = unset  (number or unset, above 0)\n" in printed(capsys, "train.stages")


def test_the_settings_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "web")
    assert '  extract.unicode = "repair"  (default "keep"; one of keep, repair)\n' in text
    assert "  quality.max_dup_line_chars = 0.05  (default unset; number or unset" in text
    assert '  extract.extractor = "penstock"  (default "penstock"; one of ' in text
    assert "extract.format" not in text
    assert "extract.metadata" not in text
    values = json.loads(printed(capsys, "web.toml", "--json"))
    assert values["quality"]["keys"]["skip_rules"]["value"] == '["c4_curly_bracket"]'
    assert "| `keep_structure` | true or false | `false` | `true` | " in printed(capsys, "web", "--markdown")
    assert {name: {*section["keys"]} for name, section in values.items()} == {
        name: {*section} for name, section in read_values("web").items()
    }


def test_every_column_of_every_table_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    tables = printed(capsys, "--columns").splitlines()
    assert [line.split()[0] for line in tables[:-2]] == [*TABLES]
    text = printed(capsys, "--columns", "documents")
    for column in DOCUMENT_COLUMNS:
        assert f"  {column.name}  (" in text
    assert "  gopher_num_words  (int32) [words]\n      " in text
    assert {"clean", "tokens: Token shard"} <= {*json.loads(printed(capsys, "--columns", "--json"))}
    assert "| `cluster` | " in printed(capsys, "--columns", "dedup", "--markdown")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--columns", "document"], "expected a table, got 'document' (did you mean 'documents'?)"),
        (["--columns", "documents", "quality"], "expected no section, got 'quality'"),
        (["webb"], "expected a section, a key or a recipe, got 'webb' (did you mean 'web'?)"),
    ],
)
def test_wrong_names(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["settings", *words]) == 2
    assert message in capsys.readouterr().err


def test_lengths_of_texts_are_characters(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "quality.rule")
    assert "reason = unset  (text, at least 1 character, at most 200 characters)" in text


def test_literals_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "(one of penstock, resiliparse, trafilatura, all)" in printed(capsys, "extract.extractor")
    key = json.loads(printed(capsys, "extract.extractor", "--json"))["extract"]["keys"]["extractor"]
    assert key["allowed"] == ["penstock", "resiliparse", "trafilatura", "all"]


def test_markdown_is_one_table_for_each_section(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--markdown")
    assert text.count("\n| key | type | default | meaning |\n|---|---|---|---|\n") == len(recipe_sections())
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(kind.model_fields) for kind in SECTIONS.values())
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sorce", "expected a section, a key or a recipe, got 'sorce' (did you mean 'source'?)"),
        ("source.txt_field", "expected a key of [source], got 'txt_field' (did you mean 'text_field'?)"),
        ("min_word", "expected a section, a key or a recipe, got 'min_word' (did you mean 'min_words'?)"),
        ("trian.seq_len", "expected a section, a key or a recipe, got 'trian.seq_len' (did you mean 'train.seq_len'?)"),
    ],
)
def test_the_nearest_name_is_suggested(capsys: pytest.CaptureFixture[str], name: str, message: str) -> None:
    assert main(["settings", name]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "effect"),
    [
        ("source.files", "Other files rerun the step `documents`"),
        ("source.share", "Other files rerun the step `documents`"),
        ("train.skip_file", "It may change the trained weights."),
        ("guard.quarantine", "It may change the trained weights."),
        ("cluster.usd_per_gpu_hour", "it changes the size of the model"),
        ("train.log_every", "Changing it reruns nothing: it does not change results."),
    ],
)
def test_the_effect_of_a_setting_is_what_it_does(setting: str, effect: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert effect in " ".join(printed(capsys, setting).split())
