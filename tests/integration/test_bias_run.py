"""A run on texts of two dialects: rules that hit one are found and shown, a random one is not, a limit stops it."""

import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.recipe import read_recipe
from pipeline.bias.audit import BIAS_FIGURE, judge, stored_comparisons
from pipeline.bias.stage import BiasConfig
from pipeline.prepare import prepare
from pipeline.report.page import write_report
from pipeline.run import run_steps
from schemas.errors import ContractError
from schemas.manifest import open_table, read_run
from schemas.storage import Store

pytestmark = pytest.mark.spark

AAE, SCOTS = "dialect/african_american_english", "dialect/scots"
MARKERS = {
    "AAE": ("finna", "tryna", "he be", "she be", "y'all", "ain't no", "done told", "they finna"),
    "Scots": ("aye", "cannae", "bairn", "hoose", "didnae", "auld", "whit", "dreich"),
}
WORDS = """the morning was long and people walked along the river with their friends before they went home again because
it had started to rain and no one wanted to wait for another bus in this part of the town where shops close early"""
STAGE = '''
import hashlib

def measure(text, row):
    """A count of one word, a number that follows from the text alone, and a reason that hits the other dialect."""
    if "dreich" in text:
        return "bleak"
    draw = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32
    return {"finna": text.count("finna"), "draw": draw}
'''
RECIPE = """
[source]
name = "texts"
paths = ["PLACE/texts-*.jsonl"]

[language]
min_score = 0.0

[quality]
rules = []

[[quality.rule]]
name = "slang"
when = "finna > 0"
reason = "It has a word that the rule hits."

[[quality.rule]]
name = "chance"
when = "draw < 0.2"
reason = "It is left out at random."

[dedup]
verify = "jaccard"
min_similarity = 0.95

[toxicity]
wordlists = {}

[[stage]]
name = "mine"
function = "mine.py:measure"
reasons = { bleak = "It has a word of the weather." }

[stage.columns]
finna = "int32"
draw = "float32"
"""
DOCUMENTS = 240
"""Number of documents of each dialect."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bias")
    draws = random.Random(4)
    rows = []
    for number in range(2 * DOCUMENTS):
        words = draws.choices(WORDS.split(), k=120)
        for marker in draws.sample(MARKERS["AAE" if number % 2 else "Scots"], 4):
            words.insert(draws.randrange(len(words)), marker)
        rows.append({"id": str(number), "text": " ".join(words)})
    for part in range(2):
        lines = "".join(json.dumps(row) + "\n" for row in rows[part::2])
        (folder / f"texts-{part}.jsonl").write_text(lines)
    (folder / "mine.py").write_text(STAGE)
    (folder / "recipe.toml").write_text(RECIPE.replace("PLACE", str(folder)))
    return folder / "recipe.toml"


@pytest.fixture(scope="module")
def run(recipe: Path, spark) -> Store:
    folder = Store(str(recipe.parent / "run"))
    run_steps(spark, prepare(read_recipe(str(recipe), []), "dedup"), folder, 2)
    return folder


def figures(run: Store, table: str):
    return open_table(run, table)[1].content.figures


def test_the_filters_that_hit_a_dialect_are_found_and_the_random_one_is_not(run: Store) -> None:
    compared = stored_comparisons([figures(run, "verdicts"), figures(run, "dedup")])
    found = {
        (one.comparison.filter, one.comparison.group)
        for one in judge(compared, BiasConfig())
        if one.is_significant and one.is_worse
    }
    assert found - {("quality", AAE)} == {("quality/slang", AAE), ("mine/bleak", SCOTS), ("mine", SCOTS)}
    assert ("quality/chance", AAE) in {(one.filter, one.group) for one in compared}


def test_the_counts_are_those_of_the_rows(run: Store) -> None:
    (slang,) = [
        one
        for one in stored_comparisons([figures(run, "verdicts")])
        if (one.filter, one.group) == ("quality/slang", AAE)
    ]
    folder, manifest = open_table(run, "documents")
    rows = [
        row
        for path in manifest.paths_of()
        for row in pq.read_table(folder.path(path), filesystem=folder.fs).to_pylist()
    ]
    assert len(rows) == 2 * DOCUMENTS
    members = [row for row in rows if AAE in row["groups"] and row["drop_stage"] is None]
    assert slang.reached == len(members) == DOCUMENTS
    assert slang.rates.dropped == sum(row["finna"] > 0 for row in members)
    # A document that a stage drops in `documents` has groups too.
    assert {tuple(row["groups"]) for row in rows if row["drop_rule"] == "bleak"} == {(SCOTS,)}


def test_the_report_shows_whom_the_filters_hit(run: Store) -> None:
    write_report(run)
    page = run.read_bytes("report.html").decode()
    section = page[page.index('<section id="bias"') :]
    section = section[: section.index("</section>")]
    assert "Whom the filters hit" in section
    worse = section[: section.index("Largest differences")]
    assert "African-American English" in worse
    assert "slang" in worse
    assert "chance" not in worse
    assert "The filter quality/slang drops" in page or "The filter mine" in page


def test_a_limit_stops_the_run_and_a_higher_one_lets_it_continue_without_reading(
    run: Store, recipe: Path, spark
) -> None:
    before = read_run(run).tables
    with pytest.raises(ContractError, match=r"step verdicts: .* got (quality/slang and dialect/african|mine)"):
        run_steps(spark, prepare(read_recipe(str(recipe), ["bias.max_ratio=2"]), "dedup"), run, 2)
    settings = ["bias.max_ratio=2", "bias.min_difference=1"]
    run_steps(spark, prepare(read_recipe(str(recipe), settings), "dedup"), run, 2)
    after = read_run(run).tables
    assert after["documents"] == before["documents"]
    assert after["verdicts"] != before["verdicts"]
    assert figures(run, "verdicts")[BIAS_FIGURE]


def test_the_same_rows_at_another_partitioning(run: Store, recipe: Path, spark) -> None:
    other = Store(str(recipe.parent / "other"))
    run_steps(
        spark, prepare(read_recipe(str(recipe), ["bias.max_ratio=2", "bias.min_difference=1"]), "dedup"), other, 1
    )
    for table in ("documents", "verdicts", "dedup"):
        assert open_table(other, table)[1].digest == open_table(run, table)[1].digest
