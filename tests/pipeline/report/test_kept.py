"""What a report shows of the kept documents, the neighbours of limits, the recipe, and the commands behind numbers."""

import html
import json
import re
import shlex
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from jobs.cli import build_parser
from jobs.recipe import recipe_sections as recipe_kinds
from jobs.verbs.inspect import show_command
from pipeline.report.commands import Commands
from pipeline.report.corpus import LITTLE_TEXT, CorpusCounts, Kept, coarse_bins
from pipeline.report.facts import collect_facts
from pipeline.report.findings import Anomaly
from pipeline.report.funnel import checks
from pipeline.report.judged import JudgedPart, choose_parts, read_judged
from pipeline.report.page import ReportOptions, excerpt, name_pieces, write_report
from pipeline.report.recipe import RecipeSection, recipe_sections, recipe_text, to_toml
from pipeline.report.samples import PER_LANGUAGE, LimitCheck, SampleChoice, survey
from schemas.ids import shuffle_key
from schemas.manifest import RunFile, open_table, read_run, write_run
from schemas.storage import Store
from schemas.tables import DOCUMENTS
from tests.support.report_run import (
    ADDRESS,
    CLEAN_CHARS,
    bins,
    crawl,
    identifier,
    make_run,
    whole_run,
    words_of,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return the whole synthetic run."""
    return whole_run(tmp_path_factory.mktemp("report") / "harbour")


@pytest.fixture(scope="module")
def page(run: Store) -> str:
    """Return the report of that run."""
    return Path(write_report(run)).read_text()


def kept_of(run: Store) -> Kept:
    """Return what a run kept."""
    kept, _ = survey(collect_facts(run))
    assert kept is not None
    return kept


# ---------------------------------------------------------------------------------------------------- what was kept


def test_the_kept_documents_are_counted(run: Store) -> None:
    kept = kept_of(run)
    assert (kept.documents, kept.chars) == (20, 20 * CLEAN_CHARS)
    assert kept.sources == (("web", "en", 15), ("web", "ja", 5))
    (year,) = kept.years
    assert (year.name, year.documents, year.chars, year.document_share) == ("2026", 20, 20 * CLEAN_CHARS, 1.0)
    characters = kept.lengths[0]
    assert (characters.unit, characters.all.low, characters.all.median, characters.all.high) == (
        "characters",
        *[850] * 3,
    )
    assert characters.all.mean == 850
    assert [(row.name, row.documents) for row in characters.rows] == [("en", 15), ("ja", 5)]
    tokens = kept.lengths[-1]
    assert (tokens.unit, [row.name for row in tokens.rows]) == ("tokens", ["web"])
    assert kept.reading.is_all


def test_a_run_without_clean_has_kept_nothing_yet(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "dedup")
    kept, drawn = survey(collect_facts(run))
    assert (kept, drawn.kept) == (None, ())
    assert "no document is finally kept" in words_of(Path(write_report(run)).read_text())


def judged_part(**columns: list[object]) -> JudgedPart:
    """Return a part of hand-made rows; `verdicts` and `clean_chars` are columns too."""
    verdicts = columns.pop("verdicts")
    chars = np.array(columns.pop("clean_chars"), np.float64)
    rows = len(chars)
    table = {"doc_id": [bytes([row] * 16) for row in range(rows)]} | dict.fromkeys(("url", "num_chars"), [None] * rows)
    return JudgedPart(0, pa.table(table | columns), verdicts, chars)  # type: ignore[arg-type]


KEPT = (None, None, None, None)
SHORT = ("quality", "gopher_short_doc", 40.0, 50.0)


def test_domains_years_and_signals_by_hand(run: Store) -> None:
    part = judged_part(
        clean_chars=[100, 300, 50, np.nan, 50],
        verdicts=[KEPT, KEPT, KEPT, SHORT, ("tokens", "mix", None, None)],
        source=["web"] * 5,
        language=["en", "en", None, "en", "en"],
        domain=["b.example", "a.example", "b.example", "c.example", "b.example"],
        date=[datetime(2019, 5, 1, tzinfo=UTC), datetime(2021, 1, 1, tzinfo=UTC), None, None, None],
        gopher_num_words=[60.0, 80.0, None, 40.0, 70.0],
        page_bytes=[40_000, 40_000, 10, 40_000, 30_000],
        num_chars=[LITTLE_TEXT - 1, LITTLE_TEXT, 50, 10, 50],
    )
    counts = CorpusCounts({"gopher_num_words": {"quality/gopher_short_doc *": 50.0}}, DOCUMENTS)
    counts.add(part)
    kept = counts.result(choose_parts(collect_facts(run)))
    assert (kept.documents, kept.chars, kept.num_domains) == (3, 450, 2)
    assert [(row.name, row.documents, row.chars) for row in kept.domains] == [
        ("b.example", 2, 150),
        ("a.example", 1, 300),
    ]
    assert [(row.name, row.documents) for row in kept.years] == [("2019", 1), ("2021", 1), ("", 1)]
    assert kept.sources == (("web", "en", 2), ("web", "no language", 1))
    words = kept.lengths[1]
    assert (words.unit, words.all.documents, words.all.low, words.all.high, words.all.mean) == ("words", 2, 60, 80, 70)
    (pair,) = kept.pairs
    assert (pair.column, pair.kept, pair.dropped) == ("gopher_num_words", 2, 2)
    assert (kept.large_pages, kept.without_text) == (3, 2)


def test_coarse_bins_are_those_of_the_values() -> None:
    counts = CorpusCounts({}, DOCUMENTS)
    values = np.array([1.0, 3.0, 850.0, 851.0, 70_000.0])
    counts._count_lengths("characters", "en", values)
    assert coarse_bins(counts.lengths["characters", "en"]) == {int(key): n for key, n in bins(values).items()}


def test_parts_are_chosen_by_hash_up_to_a_number_of_rows(run: Store) -> None:
    facts = collect_facts(run)
    assert [(r.parts, r.rows, r.is_all) for r in (choose_parts(facts), choose_parts(facts, 53))] == [
        ([0, 1], 53, True)
    ] * 2
    first = min(range(2), key=lambda part: shuffle_key(0, f"part-{part:05d}".encode()))
    size = facts.tables["documents"].content.files[first].rows
    for limit, rows in ((52, size), (5, 5)):
        reading = choose_parts(facts, limit)
        assert (reading.parts, reading.rows, reading.all_rows, reading.is_all) == ([first], rows, 53, False)
        (part,) = read_judged(facts, reading, [])
        assert part.table.num_rows == rows


def test_verdicts_of_all_tables_are_final(run: Store) -> None:
    facts = collect_facts(run)
    rules: dict[str, int] = {}
    for part in read_judged(facts, choose_parts(facts), ["gopher_num_words"]):
        for stage, rule, *_ in part.verdicts:
            rules[f"{stage}/{rule}"] = rules.get(f"{stage}/{rule}", 0) + 1
        assert int(part.kept.sum()) == sum(stage is None for stage, *_ in part.verdicts)
    assert rules == {
        **{"None/None": 20, "source/not_a_page": 4, "source/http_status": 3, "source/unreadable_gap": 2},
        **{"extract/no_text": 2, "language/language_not_wanted": 5, "quality/gopher_short_doc": 6},
        **{"quality/c4_lorem_ipsum": 1, "dedup/exact_duplicate": 4, "dedup/near_duplicate": 3},
        "toxicity/toxic_word_share": 3,
    }


# ----------------------------------------------------------------------------------------------------------- samples


def test_kept_samples_are_those_with_the_smallest_hash(run: Store) -> None:
    _, drawn = survey(collect_facts(run))
    english, japanese = drawn.kept
    assert (english.source, english.language, english.documents, len(japanese.samples)) == ("web", "en", 15, 3)
    kept = range(len(crawl()) - 20, len(crawl()) - 5)
    order = sorted(kept, key=lambda number: shuffle_key(0, identifier(number)))[:PER_LANGUAGE]
    assert [sample.doc_id for sample in english.samples] == [identifier(number).hex() for number in order]
    assert {(sample.lines, sample.is_cut, sample.chars) for sample in english.samples} == {(("…",), False, CLEAN_CHARS)}


def test_no_personal_value_is_on_the_page(page: str) -> None:
    assert ADDRESS not in html.unescape(page)


def test_the_documents_nearest_to_a_limit_are_on_both_sides() -> None:
    check = LimitCheck("quality/gopher_short_doc", "gopher_num_words", True, {"*": 50.0, "ja": 20.0})
    selection = SampleChoice([check])
    dropped = [("quality", "gopher_short_doc", value, 50.0) for value in (10.0, 49.0, 30.0)]
    part = judged_part(
        clean_chars=[9, 9, 9, 9, np.nan, np.nan, np.nan],
        verdicts=[KEPT, KEPT, KEPT, KEPT, *dropped],
        source=["web"] * 7,
        language=["en", "en", "ja", "en", "en", "en", "en"],
        gopher_num_words=[90.0, 51.0, 30.0, None, 10.0, 49.0, 30.0],
    )
    selection.add(part)
    near = {
        side: [(c.row["drop_value"], c.row["drop_limit"]) for c in selection.near[check.name, side]]
        for side in (True, False)
    }
    assert near[False] == [(49.0, 50.0), (30.0, 50.0)]
    assert near[True] == [(51.0, 50.0), (30.0, 20.0)]  # half of its limit away, before the one that is 0.8 away
    selection.add(part)  # the same documents again: the best of both parts are kept
    assert [c.row["drop_value"] for c in selection.near[check.name, False]] == [49.0, 49.0]


def test_a_limit_of_zero_has_no_near_kept_document() -> None:
    check = LimitCheck("quality/c4_curly_bracket", "c4_curly_brackets", False, {"*": 0.0})
    selection = SampleChoice([check])
    row = ("quality", "c4_curly_bracket", 1.0, 0.0)
    selection.add(
        judged_part(
            clean_chars=[9, np.nan],
            verdicts=[KEPT, row],
            source=["web"] * 2,
            language=["en"] * 2,
            c4_curly_brackets=[0, 1],
        )
    )
    assert selection.near[check.name, True] == []
    assert len(selection.near[check.name, False]) == 1


def test_examples_are_on_the_page(page: str) -> None:
    text = words_of(page)
    assert "toxic_word_share 3 dropped · both sides of the limit Nearest dropped https://c.example/toxicity/" in text
    assert "en 15 documents" in text.replace("web · ", "")


# ---------------------------------------------------------------------------------------------------------- commands


def commands_of(page: str) -> dict[str, str]:
    """Return the commands of a page with the texts of their buttons; a command of several buttons has the last text."""
    buttons = re.findall(r'<button type="button" class="rows" data-command="([^"]*)" title="[^"]*">([^<]*)<', page)
    return {html.unescape(command): html.unescape(text) for command, text in buttons}


def shown(command: str, capsys: pytest.CaptureFixture[str]) -> int:
    """Run a `penstock show` command and return the number of documents that it prints."""
    words = shlex.split(command)
    assert words[:2] == ["penstock", "show"]
    arguments = build_parser("show").parse_args(words[1:])
    capsys.readouterr()
    assert arguments.command(arguments) == 0
    assert arguments.command is show_command
    return int(re.findall(r"^([\d,]+) document\(s\)$", capsys.readouterr().out, re.MULTILINE)[-1].replace(",", ""))


def test_every_command_prints_as_many_rows_as_its_number(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    # The synthetic rows have no signals; the commands of limits are tested on a whole run.
    listed = {command: text for command, text in commands_of(page).items() if "--where" in command}
    counts = {
        command: text for command, text in listed.items() if not re.search("num_words|word_share|ipsum >", command)
    }
    assert len(counts) > 15
    for command, text in counts.items():
        if re.search(r"\d", text):
            assert (command, shown(command, capsys)) == (command, int(re.sub(r"\D", "", text)))
    conditions = {re.findall(r"--where '?([^']*?)'? --limit", command)[0] for command in counts}
    assert {
        "drop_stage = quality and drop_rule = gopher_short_doc",
        "drop_stage = toxicity",
        "drop_stage is null",
        "language = it",
        "language = ja and drop_stage is null",
        "charset = utf-8",
        "record_type = gap",
        "drop_stage = dedup and drop_rule = near_duplicate",
        "drop_stage is null and date >= 2026-01-01T00:00:00Z and date < 2027-01-01T00:00:00Z",
    } <= conditions


@pytest.mark.spark
def test_the_commands_of_a_whole_run(finished: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ReportOptions(address=finished.uri, output=Store(str(tmp_path)), name="report.html")
    listed = commands_of(Path(write_report(finished, options=options)).read_text())
    counts = {command: text for command, text in listed.items() if "--where" in command and re.search(r"\d", text)}
    assert len(counts) > 60
    limits = [command for command in counts if re.search(r" [<>] [\d.]+", command) and "page_bytes" not in command]
    assert len(limits) > 5
    for command in [*limits[:4], *list(counts)[::9]]:
        assert (command, shown(command, capsys)) == (command, int(re.sub(r"\D", "", counts[command])))


def test_a_value_from_the_web_is_never_part_of_a_command(run: Store) -> None:
    commands = Commands("my run", collect_facts(run))
    assert commands.where(3, {"charset": "utf-8"}) == "penstock show 'my run' --where 'charset = utf-8' --limit 3"
    for value in ("a b", "$(reboot)", "x' or 'y", "é", "", "a;b"):
        assert commands.where(3, {"charset": value}) == ""
    assert commands.where(0, {"charset": "utf-8"}) == ""
    assert commands.domain(2, "a.example") == (
        "penstock show 'my run' --where 'domain = a.example and drop_stage is null' --limit 2"
    )


# ------------------------------------------------------------------------------------------------------------ recipe


def test_the_recipe_is_toml_with_marked_settings(run: Store, tmp_path: Path) -> None:
    recipe = {
        "quality": {"min_words": 40, "rules": ["c4"]},
        "train": {"seq_len": 512},
        "tokens": {"chunk_tokens": 4096},
    }
    write_run(run, RunFile(tables=read_run(run).tables, recipe=recipe))
    facts = collect_facts(run)
    shown_sections = recipe_sections(facts, recipe_kinds())
    assert tomllib.loads(recipe_text(shown_sections)) == recipe
    lines = {f"{part.header}{line.key}": line for part in shown_sections for line in part.lines}
    assert (lines["[quality]min_words"].is_changed, lines["[quality]min_words"].default) == (True, "not set")
    assert (lines["[tokens]chunk_tokens"].is_changed, lines["[tokens]chunk_tokens"].default) == (True, "8192")
    assert (lines["[train]seq_len"].is_set, lines["[train]seq_len"].is_changed) == (True, False)
    assert not lines["[tokens]heldout_share"].is_set
    assert [part.header for part in recipe_sections(facts, {}) if part.header == "[train]"] == ["[train]"]
    text = Path(write_report(run)).read_text()
    assert "<b>chunk_tokens = 4096</b><i>  # default: 8192</i>" in text
    assert "penstock run recipe.toml --out" in words_of(text)
    assert "python 3." in words_of(text)


def test_several_sources_are_an_array_of_tables(run: Store) -> None:
    sources = [{"name": "web", "paths": ["a.warc.gz"]}, {"name": "books", "paths": ["b.jsonl"]}]
    facts = collect_facts(run)
    vars(facts)["recipe"] = {"source": sources}
    text = recipe_text(recipe_sections(facts, {}))
    assert tomllib.loads(text) == {"source": sources}


@pytest.mark.parametrize(
    "value", [1, 0.5, True, 'a "quoted" \\ text\n', ["a", 2], {"en": 0.5, "zh-hans": [1], "a b": "c"}, "\x7f", [], {}]
)
def test_a_setting_is_valid_toml(value: object) -> None:
    assert tomllib.loads(f"value = {to_toml(value)}")["value"] == value


def test_a_section_lists_what_the_recipe_sets() -> None:
    assert RecipeSection("[a]", ()).set_lines == []
    assert recipe_text([RecipeSection("[a]", ())]) == ""


# ---------------------------------------------------------------------------------------------------------- findings


def findings_of(run: Store) -> list[Anomaly]:
    """Return what the report of a run names as worth a look."""
    from pipeline.report.page import _view

    findings: list[Anomaly] = _view(collect_facts(run), [], ReportOptions())["findings"]
    return findings


def test_findings_name_what_is_unusual(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run")
    texts = [finding.text for finding in findings_of(run)]
    assert texts == [
        "1.9 % of the bytes of the inputs belong to no readable record.",
        "Training has 5 events to check: update skipped, spike, rewound, checkpoint not saved, stopped by an error.",
    ]
    path = Path(run.uri) / "documents/v-0000000071a9/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["content"]["counts"]["dropped"]["source/not_a_page"] -= 1
    manifest["content"]["counts"]["dropped"]["extract/crashed"] = 1
    path.write_text(json.dumps(manifest))
    assert "Stage extract could not process 1 documents (crashed)." in [finding.text for finding in findings_of(run)]
    manifest["content"]["counts"]["dropped"] |= {"extract/crashed": 0, "extract/failed": 1}
    entry = {"count": 1, "document": "0a", "message": "boom"}
    manifest["run"]["notes"]["errors"] = {"extract: ValueError at my.py:3": entry}
    path.write_text(json.dumps(manifest))
    text = (
        "Stage extract could not process 1 documents (failed). ValueError: boom (my.py:3), 1 document(s), such as 0a."
    )
    assert text in [finding.text for finding in findings_of(run)]


def test_a_run_without_unusual_figures_reports_that(tmp_path: Path) -> None:
    records = [record for record in crawl() if record.kind != "gap"]
    run = make_run(tmp_path / "run", "clean", records)
    assert findings_of(run) == []
    passed = len(checks(collect_facts(run)))
    text = words_of(Path(write_report(run)).read_text())
    assert f"Nothing unusual was measured. All {passed} consistency checks passed." in text


# ------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gopher_dup_line_char_frac", ["gopher_", "dup_", "line_", "char_", "frac"]),
        ("flops_per_token.appendix_f", ["flops_", "per_", "token.", "appendix_", "f"]),
        ("plain", ["plain"]),
        ("", []),
        ("_a__b", ["_", "a__", "b"]),
    ],
)
def test_a_name_breaks_after_its_signs_only(name: str, expected: list[str]) -> None:
    assert name_pieces(name) == expected
    assert "".join(expected) == name


def test_an_excerpt_is_short() -> None:
    assert (excerpt("a" * 240), excerpt("a" * 241)) == ("a" * 240, "a" * 240 + "…")


def test_no_heading_is_empty(page: str) -> None:
    drops = re.findall(r'<section id="drops".*?</section>', page, re.DOTALL)[0]
    body = re.findall(r"<tbody>(.*?)</tbody>", drops, re.DOTALL)[0]
    assert body.count("<tr>") == 10
    assert re.findall(r"(\d+) rules dropped nothing", words_of(drops)) == ["122"]


@pytest.mark.parametrize(
    ("documents", "epochs", "cause"),
    [
        (30, 2.5, "A source was read 2.5 times, so the model may be overfitted."),
        (30, 1.0, "No token was read twice, so the cause is not overfitting; the held-out text may differ."),
        (29, 2.5, None),
    ],
)
def test_overfitting_is_named_only_where_tokens_were_repeated(
    tmp_path: Path, documents: int, epochs: float, cause: str | None
) -> None:
    run = whole_run(tmp_path / "run")
    folder = open_table(run, "tokens")[0]
    manifest = folder.read_json("manifest.json")
    (heldout,) = (file for file in manifest["content"]["files"] if file["key"] == "web/heldout/00000.docs")
    heldout["rows"] = documents
    folder.write_atomic("manifest.json", json.dumps(manifest).encode())
    plan = run.read_json("train/plan.json")
    plan["figures"].append({"name": "epochs.web", "value": epochs, "unit": "passes", "formula": "", "source": "count"})
    run.write_atomic("train/plan.json", json.dumps(plan).encode())
    text = "The held-out loss is 0.568 nats per token above the training loss."
    texts = [finding.text for finding in findings_of(run) if finding.text.startswith(text)]
    assert texts == ([] if cause is None else [f"{text} {cause}"])


def test_a_limit_of_some_sources_is_not_near_for_others() -> None:
    check = LimitCheck("quality/short of books", "words", True, {"*": 5.0, "ja": 3.0}, sources=frozenset(("books",)))
    found = check.limits_of(["en", "ja", "en"], ["books", "books", "web"])
    assert found[:2].tolist() == [5.0, 3.0]
    assert np.isnan(found[2])
