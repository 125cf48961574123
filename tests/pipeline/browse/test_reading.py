"""Browsing without a server: searches and their pages, documents with marked texts, copies, and texts as pieces."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from jobs.verbs.browse import open_run_of
from pipeline.browse import document, search
from pipeline.browse.document import cluster_members, compare_documents, document_json, word_differences
from pipeline.browse.rows import BrowsedRun, Position, find_position, judged_batches, parse_doc_id, parse_position
from pipeline.browse.search import DocumentQuery, condition_of, make_query, page_json, random_documents, run_facts
from pipeline.browse.spans import Hits, Mark, divide, json_value, snippet
from pipeline.inspect.document_text import verdict_of
from pipeline.inspect.show import find_documents, parse_where
from pipeline.text.spans import without
from schemas.errors import ConfigError, ContractError
from tests.pipeline.tokens.test_streams import leave_out
from tests.support.browse_run import (
    ADDRESS,
    COPY,
    CUT,
    HOSTILE,
    IMAGE,
    LATIN,
    NO_TEXT,
    ORIGINAL,
    PAGES,
    PERSONAL,
    SCRIPT,
    SHORT_WORDS,
    identifier,
    make_browse_run,
    page,
)
from tests.support.report_repeats import add_repeats
from tests.support.report_run import make_run

DROPPED = {*SHORT_WORDS, COPY, LATIN, NO_TEXT}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> BrowsedRun:
    """The run of all tests that only read."""
    folder = tmp_path_factory.mktemp("browse") / "run"
    make_browse_run(folder)
    return open_run_of(str(folder))


def numbers_of(rows: list[dict]) -> list[int]:
    """The numbers of the documents of a page."""
    number = {identifier(n).hex(): n for n in range(PAGES)}
    return [number[row["doc"]] for row in rows]


def pages(run: BrowsedRun, limit: int, **fields: str) -> list[list[dict]]:
    """The rows of all pages of a search."""
    found, position = [], Position(0, 0)
    while position is not None:
        result = search.search(run, make_query(run, fields), position, limit)
        found.append(result.rows)
        position = result.next
    return found


# ------------------------------------------------------------------------------------------------------------- searches


def test_verdicts_are_those_of_show(tmp_path: Path) -> None:
    store = make_run(tmp_path / "run", "audit")
    add_repeats(store)
    run = open_run_of(store.uri)
    rows = [row for part in range(2) for batch in judged_batches(run, part, ["url"]) for row in batch.rows.to_pylist()]
    shown = list(find_documents(store, parse_where("record_type is not null"), 99))
    assert {row["doc_id"]: (verdict_of(row), row["url"]) for row in rows} == {
        row["doc_id"]: (verdict_of(row), row["url"]) for row in shown
    }
    assert len(rows) == 53


def test_documents_left_out_by_the_mix_are_dropped(tmp_path: Path) -> None:
    store = make_run(tmp_path / "run")
    left_out = leave_out(store, 0.5)
    rows = pages(open_run_of(store.uri), 99, verdict="dropped", rule="tokens/mix")[0]
    assert {bytes.fromhex(row["doc"]) for row in rows} == {*left_out}
    assert {row["verdict"]["limit"] for row in rows} == {0.5}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {*range(PAGES)}),
        ({"has_text": "1"}, {*range(PAGES)} - {NO_TEXT}),
        ({"verdict": "kept"}, {*range(PAGES)} - DROPPED),
        ({"verdict": "dropped"}, DROPPED),
        ({"rule": "quality/gopher_short_doc"}, {*SHORT_WORDS}),
        ({"where": "gopher_num_words < 35"}, {*range(8, 13)}),
        ({"where": "drop_rule = near_duplicate", "language": "en"}, {COPY}),
        ({"language": "de"}, set()),
        ({"source": "web", "domain": "c.example", "verdict": "dropped", "has_text": "1"}, DROPPED - {NO_TEXT}),
        ({"domain": "C.example.", "verdict": "dropped"}, DROPPED),
        ({"domain": "example"}, set()),
        ({"contains": "JANE.ROE@"}, {PERSONAL}),
        ({"contains": "hostile"}, {HOSTILE}),
        ({"contains": "lorem ipsum", "verdict": "kept"}, set()),
    ],
)
def test_every_filter(run: BrowsedRun, fields: dict[str, str], expected: set[int]) -> None:
    (rows,) = pages(run, 99, **fields)
    assert {*numbers_of(rows)} == expected


@pytest.mark.parametrize("fields", [{}, {"verdict": "kept"}, {"contains": "the", "has_text": "1"}])
@pytest.mark.parametrize("limit", [1, 7, 24])
def test_pages_hold_each_document_once_in_order(run: BrowsedRun, fields: dict[str, str], limit: int) -> None:
    (whole,) = pages(run, 99, **fields)
    parts = pages(run, limit, **fields)
    assert [row for part in parts for row in part] == whole
    assert all(len(part) == limit for part in parts[:-1])
    assert [(row["at"].split(".")[0], int(row["at"].split(".")[1])) for row in whole] == sorted(
        (row["at"].split(".")[0], int(row["at"].split(".")[1])) for row in whole
    )


def test_a_query_reads_the_columns_that_its_condition_names(run: BrowsedRun) -> None:
    for where, columns in (
        ("url contains 'language num_chars'", {"url"}),
        ("language = source", {"url", "language", "source"}),
        ("num_chars > 3 and not (domain contains x)", {"url", "num_chars", "domain"}),
        ("", {"url"}),
    ):
        assert {*search.columns_read(run, DocumentQuery(where=where, columns=()))} == columns, where


def test_a_page_reads_no_part_after_its_last_hit(run: BrowsedRun) -> None:
    result = search.search(run, make_query(run, {"verdict": "kept"}), Position(0, 0), 3)
    assert (result.rows_read, result.parts_done) == (24, 0)
    assert str(result.next).startswith("0.")
    result = search.search(run, make_query(run, {}), Position(1, 20), 99)
    assert (len(result.rows), result.rows_read, result.parts_done, result.next) == (4, 4, 2, None)


def test_a_search_stops_at_its_limits_and_continues(run: BrowsedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MAX_ROWS", 24)
    first = search.search(run, make_query(run, {"contains": "not in any text"}), Position(0, 0), 5)
    assert (first.rows, first.rows_read, str(first.next)) == ([], 24, "1.0")
    monkeypatch.setattr(search, "MAX_TEXTS", 10)
    monkeypatch.setattr(search, "TEXTS_AT_ONCE", 5)
    first = search.search(run, make_query(run, {"contains": "not in any text"}), Position(0, 0), 5)
    assert (first.rows, first.texts_read, str(first.next)) == ([], 10, "0.10")
    assert numbers_of([row for rows in pages(run, 5, contains=ADDRESS) for row in rows]) == [PERSONAL]


def test_a_page_names_the_command_that_prints_it(run: BrowsedRun) -> None:
    query = make_query(run, {"where": "num_chars > 9", "rule": "quality/gopher_short_doc", "verdict": "dropped"})
    value = page_json(run, query, search.search(run, query, Position(0, 0), 99))
    assert value["command"].startswith(f"penstock show {run.address} --where 'num_chars > 9' --where ")
    assert "'drop_rule = gopher_short_doc'" in value["command"]
    conditions = [parse_where(term, run.columns) for term in query.terms()]
    shown = list(find_documents(run.store, conditions[0] & conditions[1] & conditions[2] & conditions[3], 99))
    assert [row["doc_id"].hex() for row in shown] == [row["doc"] for row in value["rows"]]
    assert (
        page_json(run, make_query(run, {}), search.search(run, make_query(run, {}), Position(0, 0), 1))["command"]
        is None
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"columns": "language,num_charz"}, "columns: expected columns of this run, got 'num_charz' (did you mean"),
        ({"verdict": "maybe"}, "verdict: expected kept, dropped or nothing, got 'maybe'"),
        ({"where": "langage = de"}, "did you mean 'language'?"),
    ],
)
def test_wrong_queries_are_explained(run: BrowsedRun, fields: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        condition_of(run, make_query(run, fields))


def test_chosen_columns_are_shown_as_json(run: BrowsedRun) -> None:
    query = make_query(run, {"columns": "gopher_num_words,date,text_digest"})
    row = search.search(run, query, Position(0, 0), 1).rows[0]
    assert row["values"] == {
        "gopher_num_words": row["values"]["gopher_num_words"],
        "date": "2026-01-01T00:00:00+00:00",
        "text_digest": None,
    }
    assert row["title"] == page(HOSTILE)[0]
    assert json.loads(json.dumps(row)) == row


def test_random_documents_depend_on_the_seed_only(run: BrowsedRun) -> None:
    query = DocumentQuery(verdict="kept")
    drawn = [numbers_of(random_documents(run, query, seed, 5).rows) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert not DROPPED & {*drawn[0], *drawn[2]}
    everything = numbers_of(random_documents(run, query, 0, 99).rows)
    assert sorted(everything) == sorted({*range(PAGES)} - DROPPED)
    assert everything[:5] == drawn[0]
    with pytest.raises(ConfigError, match="expected no text for random documents"):
        random_documents(run, DocumentQuery(contains="x"), 0, 5)


def test_the_facts_of_a_run(run: BrowsedRun) -> None:
    facts = run_facts(run)
    assert (facts["rows"], facts["kept"], facts["parts"]) == (PAGES, PAGES - len(DROPPED), 2)
    assert facts["rules"][0] == {"name": "quality/gopher_short_doc", "count": 12, "meaning": "too few words"}
    assert facts["sources"] == ["web"]
    assert facts["languages"] == [("en", PAGES)]
    assert {"name": "num_chars", "type": "int64", "unit": "code points"}.items() <= next(
        column.items() for column in facts["columns"] if column["name"] == "num_chars"
    )


def test_a_folder_that_is_no_run_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="expected a table 'documents', got an empty run"):
        open_run_of(str(tmp_path))


# ------------------------------------------------------------------------------------------------------------ documents


def shown(run: BrowsedRun, number: int, contains: str = "") -> dict:
    """A document as the page gets it."""
    return document_json(run, identifier(number), None, contains)


def test_cuts_and_hits_are_marked_in_the_raw_text(run: BrowsedRun) -> None:
    value = shown(run, CUT, "Enable JAVASCRIPT")
    text = page(CUT)[1]
    assert "".join(piece["text"] for piece in value["text"]["pieces"]) == text
    cut = [piece["text"] for piece in value["text"]["pieces"] if "cut" in piece["marks"]]
    assert "Please enable javascript in your browser" in "".join(cut)
    assert {piece["marks"]["cut"] for piece in value["text"]["pieces"] if "cut" in piece["marks"]} == {
        "line rules of c4"
    }
    assert [piece["text"] for piece in value["text"]["pieces"] if "hit" in piece["marks"]] == ["enable javascript"]
    assert value["num_hits"] == 1
    assert value["cut_chars"] == sum(map(len, cut))
    kept = "".join(piece["text"] for piece in value["text"]["pieces"] if "cut" not in piece["marks"])
    assert "".join(piece["text"] for piece in value["clean"]["pieces"]) == kept


def test_the_verdict_is_in_words(run: BrowsedRun) -> None:
    verdict = shown(run, 8)["verdict"]
    assert verdict["sentence"] == (
        "Dropped by the rule gopher_short_doc of the stage quality: gopher_num_words is 30, and the minimum is 50."
    )
    assert (verdict["meaning"], verdict["setting"]) == ("too few words", "quality.min_words")
    assert shown(run, PERSONAL)["verdict"]["sentence"] == "Kept: no rule dropped this document."
    near = shown(run, COPY)["verdict"]
    assert near["sentence"] == "Dropped by the rule near_duplicate of the stage dedup: the measured value is 0.9."
    gone = shown(run, NO_TEXT)
    assert gone["verdict"]["sentence"] == "Dropped by the rule no_text of the stage extract."
    assert (gone["text"], gone["clean"], gone["cluster"]) == (None, None, None)


def test_signals_have_units_meanings_and_limits(run: BrowsedRun) -> None:
    signals = {row["name"]: row for row in shown(run, 8)["signals"]}
    words = signals["gopher_num_words"]
    assert (words["value"], words["unit"], words["table"]) == (30, "words", "documents")
    assert words["meaning"] == "words with at least one character that is not punctuation"
    assert [(check["rule"], check["side"], check["limit"], check["broken"]) for check in words["checks"]] == [
        ("quality/gopher_long_doc", "max", 100_000, False),
        ("quality/gopher_short_doc", "min", 50, True),
    ]
    assert not {"text", "title", "cuts", "signature"} & {*signals}


def test_personal_data_is_replaced_and_marked(run: BrowsedRun) -> None:
    value = shown(run, PERSONAL)
    pii = [piece for piece in value["clean"]["pieces"] if "pii" in piece["marks"]]
    assert pii == [{"text": "<EMAIL>", "marks": {"pii": "replaced email"}}]
    assert ADDRESS not in json.dumps(value["clean"])
    assert ADDRESS in json.dumps(value["text"])


def test_a_hostile_document_stays_text(run: BrowsedRun) -> None:
    value = shown(run, HOSTILE)
    assert SCRIPT in value["title"]
    assert IMAGE in "".join(piece["text"] for piece in value["text"]["pieces"])


def test_provenance_and_commands(run: BrowsedRun) -> None:
    value = shown(run, 9)
    fields = {row["name"]: row["value"] for row in value["provenance"]}
    assert (fields["split"], fields["offset"], fields["length"]) == ("crawl-1.warc.gz", 4000, 1000)
    assert value["commands"][0] == f"penstock show {run.address} --doc {identifier(9).hex()}"


def test_a_long_text_is_bounded(run: BrowsedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_TEXT_CHARS", 40)
    text = shown(run, CUT, "full stop")["text"]
    assert (text["shown_chars"], text["chars"]) == (40, len(page(CUT)[1]))
    assert sum(len(piece["text"]) for piece in text["pieces"]) == 40


def test_documents_are_found_by_id_with_any_hint(run: BrowsedRun) -> None:
    position = Position(1, 4)
    for hint in (None, position, Position(0, 0), Position(99, 7)):
        assert find_position(run, identifier(9), hint) == position
    with pytest.raises(ConfigError, match="got the id " + "0" * 32):
        find_position(run, bytes(16))


@pytest.mark.parametrize("text", ["", "1", "1.", "-1.0", "1.2.3", "a.b", "١.٢", "9" * 40 + ".1"])
def test_wrong_positions_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"at: expected PART\.ROW"):
        parse_position(text, "at")


@pytest.mark.parametrize("text", ["", "12ab", "g" * 32, "0" * 33, "../" * 11])
def test_wrong_ids_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="doc: expected 32 hex digits"):
        parse_doc_id(text, "doc")
    assert parse_doc_id(" " + "AB" * 16, "doc") == b"\xab" * 16


# --------------------------------------------------------------------------------------------------------------- copies


def test_the_members_of_a_cluster(run: BrowsedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = shown(run, COPY)["cluster"]
    assert (cluster["cluster_size"], cluster["survivor"]) == (2, identifier(ORIGINAL).hex())
    whole = cluster_members(run, bytes.fromhex(cluster["cluster"]), Position(0, 0))
    assert numbers_of(whole["members"]) == [ORIGINAL, COPY]
    assert [member["verdict"]["kept"] for member in whole["members"]] == [True, False]
    assert (whole["next"], whole["parts_done"], whole["parts"]) == (None, 2, 2)
    monkeypatch.setattr(document, "MAX_MEMBERS", 1)
    first = cluster_members(run, bytes.fromhex(cluster["cluster"]), Position(0, 0))
    assert numbers_of(first["members"]) == [ORIGINAL]
    second = cluster_members(run, bytes.fromhex(cluster["cluster"]), parse_position(first["next"], "from"))
    assert numbers_of(second["members"]) == [COPY]


def test_copies_are_compared_word_by_word(run: BrowsedRun) -> None:
    value = compare_documents(run, (identifier(ORIGINAL), None), (identifier(COPY), Position(1, 2)))
    assert "".join(piece["text"] for piece in value["a"]) == page(ORIGINAL)[1]
    assert "".join(piece["text"] for piece in value["b"]) == page(COPY)[1]
    removed = [piece["text"].strip() for piece in value["a"] if "removed" in piece["marks"]]
    added = [piece["text"].strip() for piece in value["b"] if "added" in piece["marks"]]
    assert (removed, added) == (["harbour", "signal."], ["haven", "stream."])
    assert value["is_whole"]
    assert value["equal_share"] == 2 * (91 - 2) / (2 * 91)
    with pytest.raises(ConfigError, match="expected the stored text of " + identifier(NO_TEXT).hex()):
        compare_documents(run, (identifier(ORIGINAL), None), (identifier(NO_TEXT), None))


def test_a_comparison_is_bounded(run: BrowsedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "MAX_COMPARED_WORDS", 10)
    value = compare_documents(run, (identifier(ORIGINAL), None), (identifier(COPY), None))
    assert not value["is_whole"]
    assert len("".join(piece["text"] for piece in value["a"]).split()) == 10


def test_word_differences() -> None:
    left, right, equal = word_differences(["a ", "b\n", "c"], ["a\n", "x ", "c"])
    assert left == [{"text": "a ", "marks": {}}, {"text": "b\n", "marks": {"removed": ""}}, {"text": "c", "marks": {}}]
    assert right == [{"text": "a\n", "marks": {}}, {"text": "x ", "marks": {"added": ""}}, {"text": "c", "marks": {}}]
    assert equal == 2
    assert document.WORD.findall("ab  cd日本 語x") == ["ab  ", "cd", "日", "本 ", "語", "x"]


# ---------------------------------------------------------------------------------------------------------------- spans


def test_texts_are_divided_at_marks() -> None:
    text = "ab𝒳cdef"
    pieces = divide(text, [Mark(1, 4, "cut", "rule"), Mark(3, 6, "hit"), Mark(6, 99, "pii", "x"), Mark(5, 5, "cut")])
    assert pieces == [
        {"text": "a", "marks": {}},
        {"text": "b𝒳", "marks": {"cut": "rule"}},
        {"text": "c", "marks": {"cut": "rule", "hit": ""}},
        {"text": "de", "marks": {"hit": ""}},
        {"text": "f", "marks": {"pii": "x"}},
    ]
    assert all(text.index(a["text"]) < text.index(b["text"]) for a, b in pairwise(pieces))
    assert without(text, [(1, 4)]) == "".join(piece["text"] for piece in pieces if "cut" not in piece["marks"])
    assert divide("", []) == []


def test_snippets_surround_the_first_hit() -> None:
    text = "x" * 200 + "Needle" + "y" * 200
    pieces = snippet(text, Hits("needle"))
    assert [piece["text"] for piece in pieces] == ["x" * 90, "Needle", "y" * 90]
    assert snippet(text, Hits("a.b")) == []


def test_values_become_json() -> None:
    assert json_value([{"name": "email", "value": 2}, {"name": "ip", "value": 1}]) == "email 2, ip 1"
    assert json_value([{"start": 1, "end": 2}]) == "start 1, end 2"
    assert json_value(float("nan")) == "nan"
    assert json_value(b"\x01\xff") == "01ff"
