"""The site: `mkdocs build --strict` finds no broken link, every generated page is filled, and nothing is remote."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pytest

from docs.generate import (
    STAGES_OF_A_RECIPE,
    Head,
    all_sections,
    cell,
    heads,
    limits,
    pages,
    read_head,
    toml,
    type_text,
)
from jobs.cli import list_verbs
from jobs.recipe import recipe_sections, shipped_recipes
from schemas.entries import entries_of
from schemas.field_docs import arrow_text
from schemas.tables import TABLES
from schemas.tokens import BY_ID, BY_URL, SHARD_DOCS
from tests.support.paths import ROOT
from train.monitor.metrics import HeldoutMetrics, StepMetrics

REMOTE = re.compile(r"<(?:script|img|iframe|source)[^>]+src=[\"']?(?:https?:)?//|<link[^>]+href=[\"']?(?:https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, without access to a network."""
    if not find_spec("mkdocs") or not find_spec("material"):
        pytest.skip("mkdocs-material is not installed: pip install 'penstock[docs]'")
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "mkdocs.yml", "penstock", "schemas", "train", "tests/pains"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "site")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1", "https_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "site"


def test_a_strict_build_has_every_page(site: Path) -> None:
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    expected = {f"reference/settings/{name}.html" for name in recipe_sections()}
    expected |= {"index.html", "reference/cli.html", "reference/tables.html", "reference/recipes.html", "glossary.html"}
    assert expected <= built
    assert "ConfigError" in (site / "reference/api.html").read_text(encoding="utf-8")


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert [str(path) for path, text in texts.items() if REMOTE.search(text)] == []


def test_the_titles_of_blocks_are_not_lost(site: Path) -> None:
    page = (site / "extend/rule.html").read_text(encoding="utf-8")
    assert 'class="filename"' in page
    assert "```" not in page


def test_every_verb_argument_and_setting_has_an_entry() -> None:
    made = pages()
    for verb in list_verbs():
        assert f"## {verb} {{ #{verb} }}" in made["reference/cli.md"]
    for name, kind in all_sections().items():
        text = made[f"reference/settings/{name}.md"]
        assert [field for field in kind.model_fields if f"## {field} {{ #{field} }}" not in text] == []
    assert made["reference/cli.md"].index("**inspect**: ") < made["reference/cli.md"].index("| [`browse`](#browse) |")
    assert (
        "| `--out OUT` | Run folder: a local path or s3://, gs://, abfs://, hdfs://. Required. |"
        in made["reference/cli.md"]
    )


def test_every_column_has_a_meaning() -> None:
    schemas = {name: table.schema for name, table in TABLES.items() if table.schema is not None}
    schemas |= {"docs": SHARD_DOCS, "by_url": BY_URL, "by_id": BY_ID}
    text = pages()["reference/tables.md"]
    for name, schema in schemas.items():
        for column in schema:
            meaning = (column.metadata or {}).get(b"meaning", b"").decode()
            assert meaning, f"{name}.{column.name}"
            assert f"| `{column.name}` | {arrow_text(column.type)} | {cell(meaning)} |" in text


def test_every_metric_has_a_meaning() -> None:
    text = pages()["reference/metrics.md"]
    assert "| `data_seconds` | number | Time rank 0 waited for its rows [s]; " in text
    for kind in (StepMetrics, HeldoutMetrics):
        assert [name for name in kind.model_fields if f"| `{name}` | " not in text] == []


def test_a_section_states_type_limit_default_and_role() -> None:
    text = pages()["reference/settings/quality.md"]
    assert "## min_words { #min_words }\n\ninteger or none · " in text
    assert "## rules { #rules }" in text
    assert " · decision\n" in text
    train = pages()["reference/settings/train.md"]
    assert "## Fields of train.stages { #train-stages }" in train
    assert "### tokens { #train-stages-tokens }" in train


def test_every_shipped_recipe_is_shown() -> None:
    text = pages()["reference/recipes.md"]
    for name, path in shipped_recipes().items():
        assert f"## {name} {{ #{name} }}" in text
        assert path.read_text(encoding="utf-8").rstrip() in text


def test_published_corpora_are_side_by_side() -> None:
    text = pages()["reference/recipes.md"]
    names = [name for name, head in heads().items() if head.paper]
    assert {"demo", "mixed", "web"} == shipped_recipes().keys() - {*names}
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert {line.count(" | ") for label, line in rows.items() if label in STAGES_OF_A_RECIPE} == {len(names)}
    limits = dict(zip(names, rows["`min_sentences`"].strip("| ").split(" | ")[1:], strict=True))
    assert {name: limit for name, limit in limits.items() if limit != "–"} == {"c4": "3", "fineweb": "5"}
    assert "5-grams of words, 9,000 hashes, 20 bands of 450, every candidate joined" in rows["near copies"]
    assert "probability ≥ 0.018112" in rows["classifier"]
    assert "drops more than 80% of the words in shared 13-grams of words" in rows["evaluation sets"]
    sources = [line for line in text.splitlines() if line.startswith("| `dolma` | `[")]
    assert '| `dolma` | `[repeats]` | `units = ["line"]` | section 5.4. |' in sources
    assert "| SafeSearch, Google's classifier of explicit content" in rows["[`gopher`](#gopher)"]


def test_the_head_of_a_recipe() -> None:
    head = read_head(
        "# Corpus, a text (Doe et al. 2020, arXiv 2001.00001, section 3;\n# code: doe). English.\n#   penstock run x\n"
        "#\n# What differs:\n# - one\n#   line\n# - two\n#\n# Speed: slow.\n# - none\n\n"
        '[extract]\n# Source: section 3.1,\n# and the code.\nformat = "text"\n'
    )
    assert head.title == "Corpus, a text (Doe et al. 2020, arXiv 2001.00001, section 3; code: doe)"
    assert (head.paper, head.lists) == ("2001.00001", {"What differs": ["one line", "two"]})
    assert head.sources == {"extract": "section 3.1, and the code."}
    assert read_head("# My own recipe.\n\n[extract]\n") == Head("", "", {}, {})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "none"),
        (True, "true"),
        (0.01, "0.01"),
        (64_000_000, "64_000_000"),
        (("a", 1), '["a", 1]'),
        ({"a": 2}, "{a = 2}"),
    ],
)
def test_toml(value: object, expected: str) -> None:
    assert toml(value) == expected


def test_type_text() -> None:
    assert type_text(tuple[str, ...]) == "list of text"
    assert type_text(dict[str, float] | None) == "table of number by name or none"


def test_arrow_and_cell() -> None:
    assert arrow_text(entries_of(pa.int32())) == "entries of int32"
    assert arrow_text(pa.binary(16)) == "binary[16]"
    assert cell("a | b <c> `<d>`") == "a \\| b &lt;c> `<d>`"
    assert limits(recipe_sections()["language"].model_fields["min_score"]) == ["at least 0", "at most 1"]
