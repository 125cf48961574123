"""The inputs of the report: every number of a run that is known by hand, and redacted samples."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import spacy

from pipeline.pii.stage import PII
from pipeline.report.facts import collect_facts
from pipeline.report.funnel import checks, drops_by_rule, funnel_rows
from pipeline.report.page import write_report
from pipeline.report.samples import PER_RULE, SHOWN_CHARS, draw_samples, shorten
from pipeline.report.tallies import (
    contract,
    languages,
    num_pages,
    ranked_counts,
    streams,
    toxicity_coverage,
    toxicity_measures,
)
from schemas.ids import shuffle_key
from schemas.manifest import RunFile, open_table, read_run, write_run
from schemas.storage import Store
from schemas.text import printable_line
from tests.support.report_run import ADDRESS, REASONS, crawl, identifier, make_run, whole_run, words_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return the whole synthetic run."""
    return whole_run(tmp_path_factory.mktemp("report") / "harbour")


def test_the_funnel_follows_the_documents_from_the_records_to_the_tokens(run: Store) -> None:
    funnel = funnel_rows(collect_facts(run), REASONS)
    assert [(level.name, level.documents, level.chars) for level in funnel] == [
        ("records", 53, None),
        ("source", 44, 32_000),
        ("extract", 42, 32_000),
        ("language", 37, 31_000),
        ("cuts", 37, 27_900),
        ("quality", 30, 27_000),
        ("toxicity", 27, 24_300),
        ("dedup", 20, 18_000),
        ("redaction", 20, 17_000),
        ("tokens", 20, 17_000),
    ]
    tokens = sum(sum(shards) for shards in open_table(run, "tokens")[1].content.figures["streams"].values())
    assert (funnel[-1].tokens, funnel[-1].exact) == (tokens, True)
    assert funnel[-2].tokens == pytest.approx(tokens)
    assert not funnel[-2].exact
    assert funnel[5].tokens == pytest.approx(tokens * 27_000 / 17_000)
    assert funnel[0].tokens is None


def test_every_declared_rule_is_counted_and_explained(run: Store) -> None:
    drops = drops_by_rule(collect_facts(run), REASONS)
    assert list(drops) == [*(stage for stage in REASONS if stage in drops)]
    assert {"source", "quality", "toxicity", "dedup", "pii"} <= set(drops)
    loud = {row.name: (row.count, row.chars) for rows in drops.values() for row in rows if row.count}
    assert loud == {
        "source/not_a_page": (4, 0),
        "source/http_status": (3, 0),
        "source/unreadable_gap": (2, 0),
        "extract/no_text": (2, 0),
        "language/language_not_wanted": (5, 1000),
        "quality/gopher_short_doc": (6, 540),
        "quality/c4_lorem_ipsum": (1, 360),
        "dedup/exact_duplicate": (4, 3600),
        "dedup/near_duplicate": (3, 2700),
        "toxicity/toxic_word_share": (3, 2700),
    }
    assert all(row.meaning for rows in drops.values() for row in rows)
    assert drops["quality"][0].share == pytest.approx(6 / 53)
    assert {row.rule for row in drops["pii"]} == {*PII.reasons, "failed", "crashed"}
    assert "dropped_before" not in {row.rule for row in drops["dedup"]}


def test_the_tallies_are_those_of_the_crawl(run: Store) -> None:
    facts = collect_facts(run)
    assert num_pages(facts) == 44
    rows, more = languages(facts)
    assert [(row.code, row.documents, row.passed, row.passed_chars, row.clean) for row in rows] == [
        ("en", 32, 22, 19_800, 15),
        ("it", 5, 0, 0, 0),
        ("ja", 5, 5, 4500, 5),
    ]
    assert more == 0
    coverage = [(row.language, row.documents, row.words, row.model, row.neither) for row in toxicity_coverage(facts)]
    assert coverage == [("en", 32, 32, 32, 0), ("ja", 5, 0, 0, 5)]
    measures = [(row.name, row.documents, row.words, row.counts) for row in toxicity_measures(facts)]
    assert measures == [("obscenity", 3, 9, True), ("violence", 1, 1, False)]
    assert [stream.name for stream in streams(facts)] == ["web/heldout", "web/train"]
    assert contract(facts)["bytes_per_token"] == 20 * 950 / sum(stream.tokens for stream in streams(facts))
    assert [(count.name, count.number) for count in ranked_counts({"a": 1, "b": 3})] == [("b", 3), ("a", 1)]


def test_the_counts_of_tables_agree(run: Store) -> None:
    claims = {check.claim: (check.left, check.right) for check in checks(collect_facts(run))}
    assert all(left == right for left, right in claims.values())
    assert claims["bytes of records and gaps = bytes of the inputs"] == (52_000, 52_000)
    assert claims["documents extracted = rows of verdicts"] == (37, 37)
    assert claims["documents extracted = rows of clusters"] == (37, 37)
    assert claims["documents that pass the verdicts = documents deduplicated"] == (27, 27)
    assert claims["survivors = documents cleaned"] == (20, 20)
    assert claims["clean documents = documents in shards"] == (20, 20)
    assert {
        "clean was made from this version of dedup",
        "audit was made from this version of clusters",
        "the plan was made for this dataset",
    } < set(claims)
    assert "checkpoint of step 40 was trained on this dataset" in claims


def test_unaccounted_bytes_are_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "text")
    path = Path(run.uri) / "documents/v-0000000071a9/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["content"]["inputs"][0]["bytes"] += 7
    path.write_text(json.dumps(manifest))
    text = words_of(Path(write_report(run, None)).read_text())
    assert "1 of 2 consistency checks failed: bytes of records and gaps = bytes of the inputs." in text
    assert "7 bytes are unaccounted for" in text


# ------------------------------------------------------------------------------------------------------------ samples


def test_samples_are_those_with_the_smallest_hash(run: Store) -> None:
    drawn = draw_samples(collect_facts(run))
    assert drawn.rows_read == 53
    order = sorted(range(16, 22), key=lambda number: shuffle_key(0, identifier(number)))[:PER_RULE]
    urls = [sample.url for sample in drawn.by_rule["quality/gopher_short_doc"]]
    assert urls == [f"https://b.example/short/{number - 16}" for number in order]
    assert drawn.by_rule["dedup/near_duplicate"][0].value == pytest.approx(0.9)
    (toxic, *_) = drawn.by_rule["toxicity/toxic_word_share"]
    assert (toxic.limit, toxic.text.startswith("toxicity/toxic_word_share")) == (0.01, True)
    assert "kept" not in drawn.by_rule
    assert "dedup/dropped_before" not in drawn.by_rule
    assert {sample.why_empty for sample in drawn.by_rule["source/http_status"]} == {"no text was extracted"}


def test_samples_are_redacted(run: Store) -> None:
    (sample,) = draw_samples(collect_facts(run)).by_rule["quality/c4_lorem_ipsum"]
    assert ADDRESS not in f"{sample.url} {sample.text} {sample.title}"
    assert sample.text.startswith("Write to <EMAIL> or <script>")
    assert "<EMAIL>" in sample.url


def test_a_sample_without_stored_text_names_the_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "verdicts", [replace(record, text=None) for record in crawl()])
    drawn = draw_samples(collect_facts(run))
    assert {sample.why_empty for sample in drawn.by_rule["quality/gopher_short_doc"]} == {
        "the recipe does not store the text of dropped documents"
    }


def find_names_by(run: Store, pipeline: Path) -> None:
    """Change the run into one that recognized names with the spaCy pipeline in a zip file."""
    path = Path(run.uri) / "clean/v-0000000071a9/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["content"]["models"]["pii/ner.*"] = "f" * 64
    path.write_text(json.dumps(manifest))
    write_run(run, RunFile(tables=read_run(run).tables, recipe={"pii": {"ner_models": {"*": str(pipeline)}}}))


def test_names_are_replaced_if_the_run_recognized_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "clean")
    pipeline = spacy.blank("en")
    pipeline.add_pipe("entity_ruler").add_patterns([{"label": "PERSON", "pattern": "Lorem"}])  # type: ignore[attr-defined]
    pipeline.to_disk(tmp_path / "names")
    find_names_by(run, Path(shutil.make_archive(str(tmp_path / "names"), "zip", tmp_path / "names")))
    (sample,) = draw_samples(collect_facts(run)).by_rule["quality/c4_lorem_ipsum"]
    assert sample.text.endswith("by <PERSON>")


def test_without_the_name_recognition_model_no_text_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "clean")
    find_names_by(run, tmp_path / "lost.zip")
    assert draw_samples(collect_facts(run)).by_rule == {}
    text = words_of(Path(write_report(run, None)).read_text())
    assert "Samples are not shown: the name recognition model of the run is not at the path in its recipe" in text


def test_a_sample_is_one_short_printable_line() -> None:
    assert printable_line("a\n\n b\u202ec\x00\ud800") == r"a b\u202ec\x00\ud800"
    assert shorten("x" * SHOWN_CHARS) == "x" * SHOWN_CHARS
    assert shorten("x" * (SHOWN_CHARS + 1)) == "x" * (SHOWN_CHARS - 1) + "…"
    cut = shorten("word " * 100)
    assert cut.endswith("word…")
    assert len(cut) <= SHOWN_CHARS
