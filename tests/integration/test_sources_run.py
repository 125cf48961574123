"""A run of several sources: web pages, the project's code and its guides, each by its own rules, deduplicated together.

The pages are those of the demo crawl; code and guides are files of this project. Some guides are in two sources.
"""

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from jobs.cli import main
from jobs.recipe import recipe_sections
from jobs.verbs.ablate import branch_recipe, change_of, steps_of
from jobs.verbs.ladder import shared_recipe
from jobs.verbs.proxies import proxy_recipe
from pipeline.forecast import is_complete
from pipeline.links.table import write_links
from pipeline.prepare import prepare
from pipeline.report.facts import collect_facts
from pipeline.report.funnel import checks
from pipeline.report.page import write_report
from pipeline.report.sources import sources
from pipeline.report.tallies import costs, evaluation_sets, num_pages, streams
from pipeline.run import run_steps
from schemas.manifest import open_table, read_run
from schemas.overrides import load_recipe
from schemas.storage import Store
from schemas.takedown import REMOVED_ID
from schemas.tokens import open_dataset
from tests.support.paths import ROOT
from tests.support.tiny_stages import order_of
from tests.support.tiny_takedown import documents_of, take_down
from train.config.train import TrainConfig

pytestmark = pytest.mark.spark
UNKNOWN = "https://code.example.org/failures.py"
"""The file of the source `code` that no submission of enough points links to."""
COPIES = 5
"""Number of guides that are in the source `copies` too."""


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def recipe_of(folder: Path, archive: Path) -> str:
    return f"""
[[source]]
name = "web"
paths = ["{archive}"]

[[source]]
name = "guides"
paths = ["{folder}/guides/*.jsonl.gz"]
[source.quality]
rules = ["gopher_quality"]
min_alpha_words = 0
max_hash_ratio = 1
min_words = 5
max_words = 900

[[source]]
name = "code"
paths = ["{folder}/code/*.jsonl.gz"]
[source.language]
languages = []
min_score = 0
[source.links]
tables = ["{folder}/links.parquet"]
min_score = 3
[source.quality]
rules = []
[[source.quality.rule]]
name = "long_code"
when = "num_chars > 18000"
reason = "the file is too long"
[[source.quality.rule]]
name = "unknown_code"
when = "linked_from < 1"
reason = "no submission of at least 3 points links to the file"
[source.pii]
types = []

[[source]]
name = "copies"
paths = ["{folder}/copies/*.jsonl.gz"]
[source.quality]
rules = []

[language]
languages = ["en"]
[dedup]
keep = ["source_rank"]
source_ranks = ["guides", "web", "code", "copies"]
[tokenizer]
vocab_size = 600
[tokens]
shard_tokens = 16384
chunk_tokens = 128
heldout_share = 0.02
[train]
seq_len = 128
weights = {{web = 1, guides = 3, code = 2, copies = 0}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, crawl: Path) -> str:
    """The text of the recipe; its files are written."""
    folder = tmp_path_factory.mktemp("sources")
    guides = [
        {"text": path.read_text(encoding="utf-8"), "url": f"https://docs.example.org/{path.stem}"}
        for path in sorted((ROOT / "docs/guides").glob("*.md"))
    ]
    code = [
        {"text": path.read_text(encoding="utf-8"), "url": f"https://code.example.org/{path.name}"}
        for path in sorted((ROOT / "pipeline/engine").glob("*.py"))
        if path.stat().st_size
    ]
    copies = [row | {"url": f"https://mirror.example.org/{number}"} for number, row in enumerate(guides[:COPIES])]
    submissions = [{"url": row["url"], "score": 2 if row["url"] == UNKNOWN else 3} for row in code]
    write_lines(folder / "submissions.jsonl.gz", submissions)
    write_links([str(folder / "submissions.jsonl.gz")], str(folder / "links.parquet"))
    for name, rows in (("guides", guides), ("code", code), ("copies", copies)):
        (folder / name).mkdir()
        write_lines(folder / name / "part-0.jsonl.gz", rows)  # the same name in each source
    return recipe_of(folder, sorted(crawl.glob("*.warc.gz"))[0])


def load(text: str, overrides: tuple[str, ...] = ()) -> Any:
    import tomllib

    return load_recipe(tomllib.loads(text), overrides, recipe_sections(), "test")


@pytest.fixture(scope="module")
def run(spark: Any, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The run of all sources."""
    from pipeline.run import run_steps

    store = Store(str(tmp_path_factory.mktemp("run")))
    run_steps(spark, prepare(load(recipe), None), store, 2)
    return store


def rows(run: Store, table: str) -> list[dict[str, Any]]:
    folder, manifest = open_table(run, table)
    return [row for path in manifest.paths_of() for row in pq.read_table(folder.path(path)).to_pylist()]


def test_each_source_is_judged_by_its_own_rules(run: Store) -> None:
    documents, verdicts = rows(run, "documents"), rows(run, "verdicts")
    source_of = {row["doc_id"]: row["source"] for row in documents}
    assert len(source_of) == len(documents)  # files of the same name in two sources have different documents
    rules = {(source_of[row["doc_id"]], row["drop_rule"]) for row in verdicts if row["drop_stage"]}
    assert {rule for source, rule in rules if source == "code"} == {"long_code", "unknown_code"}
    unknown = {row["doc_id"] for row in verdicts if row["drop_rule"] == "unknown_code"}
    evidence = {row["doc_id"]: (row["url"], row["linked_from"], row["link_score"]) for row in documents}
    assert [evidence[doc_id] for doc_id in unknown] == [(UNKNOWN, 0, None)]
    assert {row["linked_from"] for row in documents if row["source"] == "code" and row["url"] != UNKNOWN} == {1}
    assert {row["linked_from"] for row in documents if row["source"] != "code"} == {None}  # it has no tables
    assert not {rule for source, rule in rules if source == "copies"}
    assert "gopher_long_doc" in {rule for source, rule in rules if source == "guides"}
    assert {row["language"] for row in documents if row["source"] == "guides" and not row["drop_stage"]} == {"en"}
    limits = open_table(run, "verdicts")[1].content.figures["limits"]
    assert limits["quality/gopher_long_doc of guides"]["limits"]["en"] == 900
    assert limits["quality/long_code of code"]["limits"] == {"*": 18000}
    assert not [name for name in limits if name.startswith("quality/gopher") and name.endswith("of code")]


def test_personal_data_stays_where_a_source_says_so(run: Store) -> None:
    counts = Counter(row["source"] for row in rows(run, "clean") if row["pii_counts"])
    assert not counts["code"]


def test_the_books_balance_by_source(run: Store) -> None:
    for table in ("documents", "verdicts", "dedup", "clean"):
        content = open_table(run, table)[1].content
        by_source = content.figures["by_source"]
        assert sum(own["rows_in"] for own in by_source.values()) == content.counts.rows_in
        assert sum(own["rows_kept"] for own in by_source.values()) == content.counts.rows_kept
        for own in by_source.values():
            assert own["rows_in"] == own["rows_kept"] + sum(own["dropped"].values())


def nonzero(figures: Any) -> Any:
    """Return nested counts without those of 0."""
    if not isinstance(figures, Mapping):
        return figures
    left = {name: nonzero(value) for name, value in figures.items()}
    return {name: value for name, value in left.items() if value not in (0, {})}


def recounted(run: Store, table: str) -> dict[str, Any]:
    """Return the figures of a table that count its rows, from its rows and those of `documents`."""
    facts = {row["doc_id"]: row for row in rows(run, "documents")}
    found: dict[str, Any] = {"kept_chars": 0, "dropped_chars": Counter(), "by_source": {}}
    for row in rows(run, table):
        document = facts[row["doc_id"]]
        source, language = document["source"], document["language"]
        chars = {"documents": document["num_chars"], "clean": row.get("num_chars")}.get(table, document["body_chars"])
        own = found["by_source"].setdefault(
            source, {"rows_in": 0, "rows_kept": 0, "kept_chars": 0, "dropped": Counter(), "dropped_chars": Counter()}
        )
        groups: dict[str, str | None] = {}
        own["rows_in"] += 1
        if row["drop_stage"] is None:
            own["rows_kept"] += 1
            found["kept_chars"], own["kept_chars"] = found["kept_chars"] + chars, own["kept_chars"] + chars
            groups = {"kept_languages": language} if table in ("verdicts", "clean") else {}
            groups |= {"kept_sources": source} if table == "verdicts" else {}
            groups |= {"kept_documents": source} if table == "clean" else {}
        else:
            reason = f"{row['drop_stage']}/{row['drop_rule']}"
            own["dropped"][reason] += 1
            for counts in (found["dropped_chars"], own["dropped_chars"]):
                counts[reason] += chars or 0
        groups |= {"languages": language, "charsets": row["charset"]} if table == "documents" else {}
        for figure, name in groups.items():
            if name is not None:
                found.setdefault(figure, Counter())[name] += 1
        for entry in (row.get("pii_counts") if row["drop_stage"] is None else None) or ():
            found.setdefault("pii", Counter())[entry["name"]] += entry["value"]
    return found


def test_the_figures_are_those_of_the_rows_also_after_a_takedown(run: Store, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.root, folder)
    taken = Store(str(folder))
    domains = ["docs.example.org", sorted(row["domain"] for row in rows(run, "clean") if row["source"] == "web")[0]]
    assert take_down(folder, domain=domains) == 0
    gone = {row["doc_id"] for row in rows(run, "clean")} - {row["doc_id"] for row in rows(taken, "clean")}
    assert len({row["source"] for row in rows(run, "documents") if row["doc_id"] in gone}) == 2
    for one in (run, taken):
        for table in ("documents", "verdicts", "dedup", "clean"):
            figures = open_table(one, table)[1].content.figures
            expected = nonzero(recounted(one, table))
            assert {name: nonzero(figures.get(name)) for name in expected} == expected, table
    before, after = ([(each.claim, each.holds) for each in checks(collect_facts(one))] for one in (run, taken))
    assert before == after
    checked = [claim for claim, holds in before if "bytes of the inputs" in claim and holds]
    assert checked == ["bytes of records and gaps = bytes of the inputs"]  # of the archives, not of lines in gzip
    stored = open_table(run, "documents")[1].content.figures["stored_bytes"]
    assert not {"row", "page"} & stored.keys()


def test_the_report_counts_what_a_takedown_left(run: Store, tmp_path: Path) -> None:
    shutil.copytree(run.root, tmp_path / "run")
    taken = Store(str(tmp_path / "run"))
    assert take_down(tmp_path / "run", domain=["docs.example.org"]) == 0
    before, after = collect_facts(run), collect_facts(taken)
    there = Counter(row["stream"] for row in documents_of(open_dataset(taken)) if row["doc_id"] != REMOVED_ID)
    left = {name: there[name] for name in after.tokens_left}
    assert {stream.name: stream.documents for stream in streams(after)} == left
    assert {stream.name: stream.tokens for stream in streams(after)} == after.tokens_left
    assert sum(after.tokens_left.values()) < sum(before.tokens_left.values())
    removed = open_table(taken, "documents")[1].content.counts.dropped["takedown/removed"]
    assert 0 < num_pages(before) - num_pages(after) <= removed
    assert costs(before, {"documents", "tokens"}) != [] == costs(after, {"documents", "tokens"})


def test_the_source_rank_says_whose_copy_stays(run: Store) -> None:
    lost = open_table(run, "dedup")[1].content.figures["lost_to"]
    assert lost["copies/guides"] == by_source(run, "dedup", "copies", "dropped").get("dedup/exact_duplicate")
    assert {name for name in lost if name.startswith("copies/")} == {"copies/guides"}
    kept = Counter(row["source"] for row in rows(run, "clean"))
    # A guide that its own rules drop does not take the place of its copy.
    assert kept["copies"] == COPIES - lost["copies/guides"]
    assert all(kept[name] for name in ("web", "guides", "code"))


def by_source(run: Store, table: str, source: str, name: str) -> Any:
    return open_table(run, table)[1].content.figures["by_source"][source][name]


def test_the_report_shows_each_source(run: Store) -> None:
    found = sources(collect_facts(run))
    assert [row.name for row in found.rows] == ["code", "copies", "guides", "web"]
    tokens = open_dataset(run).num_tokens()
    held = open_dataset(run).num_tokens("heldout")
    assert {row.name: row.tokens for row in found.rows if row.tokens} == {
        name: number + held.get(name, 0) for name, number in tokens.items()
    }
    assert found.winners == tuple(sorted(set(found.winners)))
    text = Path(write_report(run)).read_text(encoding="utf-8")
    assert 'id="sources"' in text
    assert "Copies by source" in text


def test_weights_of_sources_hold_at_every_prefix(run: Store) -> None:
    dataset = open_dataset(run)
    weights = dict.fromkeys(dataset.num_tokens(), 0.0) | {"web": 1.0, "guides": 3.0, "code": 2.0}
    order = order_of(dataset, TrainConfig(seq_len=128, weights=weights))
    taken = np.array(order.sources)[order.at(0, np.arange(600)).source]
    for name, weight in weights.items():
        counts = np.cumsum(taken == name)
        assert np.abs(counts - np.arange(1, len(taken) + 1) * weight / 6).max() < 1


def test_the_same_recipe_builds_nothing_again(run: Store, recipe: str) -> None:
    assert is_complete(prepare(load(recipe), None), run)
    stricter = prepare(load(recipe, ("source.guides.quality.max_words=700",)), None)
    assert not is_complete(stricter, run)
    changes = dict(steps_of(load(recipe), load(recipe, ("source.guides.quality.max_words=700",))))
    assert (changes["documents"], changes["verdicts"]) == (False, True)


def test_a_source_can_be_ablated(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    change = change_of(["source.copies"], [])
    after = branch_recipe(run, change)
    assert after.sources == ("web", "guides", "code")
    sources = read_run(run).recipe["source"]
    assert proxy_recipe(read_run(run).recipe)["source"] == sources
    assert [source["name"] for source in shared_recipe(run, [])[0]["source"]] == ["web", "guides", "code", "copies"]
    assert main(["ablate", run.uri, "--without", "source.copies", "--tokens", "20000", "--dry-run"]) == 0
    assert "ablation   source.copies" in capsys.readouterr().out
    assert dict(steps_of(load_recipe(read_run(run).recipe, (), recipe_sections(), "run"), after))["documents"]


def test_evaluation_sets_of_one_source_are_counted_with_their_items(spark: Any, tmp_path: Path) -> None:
    item = "which of the four towns on the river has a bridge of stone with seven arches and a tower at its end"
    (tmp_path / "quiz.jsonl").write_text(json.dumps({"text": item}) + "\n" + json.dumps({"text": item[::-1]}) + "\n")
    for name, text in (("web", "A page about nothing."), ("books", f"A quiz. {item} Good luck.")):
        write_lines(tmp_path / f"{name}.jsonl.gz", [{"text": text, "url": f"https://{name}.example/"}])
    sources = "".join(
        f'[[source]]\nname = "{name}"\npaths = ["{tmp_path}/{name}.jsonl.gz"]\n' for name in ("web", "books")
    )
    own = f'[source.decontaminate]\nevaluation_sets = {{quiz = "{tmp_path}/quiz.jsonl"}}\n'
    run = Store(str(tmp_path / "run"))
    run_steps(spark, prepare(load(sources + own), "documents"), run, 2)
    (found,) = evaluation_sets(collect_facts(run))
    assert (found.name, found.items, found.found, found.documents, found.share) == ("quiz", 2, 1, 1, 0.5)
