"""Names of sources and languages in settings: those that no document can have are refused before a run starts."""

import re
from pathlib import Path

import pytest

from jobs.recipe import read_recipe
from pipeline.demo_crawl.build import build_demo_crawl
from pipeline.prepare import prepare
from schemas.errors import ConfigError

TWO = """
[[source]]
name = "web"
paths = ["{crawl}/demo-000.warc.gz"]

[[source]]
name = "books"
paths = ["{crawl}/demo-001.warc.gz"]

[extract]
extractor = "resiliparse"
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of two sources."""
    folder = tmp_path_factory.mktemp("names")
    build_demo_crawl(folder / "crawl", 100, 1)
    (folder / "words.txt").write_text("darn\n")
    (folder / "two.toml").write_text(TWO.format(crawl=folder / "crawl"))
    return folder / "two.toml"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "dedup.source_ranks=['bookz', 'web']",
            "dedup.source_ranks: expected sources of the recipe, got 'bookz' (did you mean 'books'?)",
        ),
        ("quality.by_language={eng={min_words=3}}", "quality.by_language: expected codes of languages"),
        ("toxicity.wordlists={enn='FOLDER/words.txt'}", "toxicity.wordlists: expected codes of languages"),
        ("source.books.quality.by_language={eng={min_words=3}}", "got 'eng' (did you mean 'en'?)"),
    ],
)
def test_a_name_that_no_document_has_is_refused(recipe: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        prepare(read_recipe(str(recipe), [setting.replace("FOLDER", str(recipe.parent))]), None)


@pytest.mark.parametrize(
    "settings",
    [
        ["dedup.source_ranks=['books', 'web']"],
        ["quality.by_language={de={min_words=3}}", "toxicity.wordlists={en='builtin'}"],
        ["dedup.source_ranks=['news', 'web']", "dedup.keep=['snapshot', 'source_rank']", "dedup.write_index=true"],
    ],
)
def test_names_that_documents_may_have_are_accepted(recipe: Path, settings: list[str]) -> None:
    assert prepare(read_recipe(str(recipe), settings), None).recipe.sources == ("web", "books")
