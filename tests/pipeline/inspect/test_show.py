"""Documents as `penstock show` prints them: the verdict of the last table that has one, and columns of later tables."""

import json
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest

from jobs.exit_codes import exit_code_of
from jobs.verbs.inspect import add_show_arguments, show_command
from pipeline.dedup.config import NEAR_MEANINGS
from pipeline.extract.extract import ExtractConfig, make_extract
from pipeline.inspect.document_text import format_document, format_summary, mark_spans
from pipeline.inspect.show import (
    WITH_TEXT,
    column_equals,
    columns_of_run,
    find_documents,
    parse_where,
    sample_documents,
)
from pipeline.stages import declared_reasons
from schemas.ids import shuffle_key
from schemas.manifest import current_tables, open_table
from schemas.storage import Store
from schemas.tables import META_FIELDS, META_NUMBERS
from schemas.text import CONTROL_CHARACTERS
from tests.pipeline.tokens.test_streams import leave_out
from tests.support.lineage_run import edit
from tests.support.report_repeats import add_repeats
from tests.support.report_run import Record, identifier, make_run
from tests.support.tiny_archive import read, record


def test_cuts_and_verdicts_of_repeats_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "audit")
    add_repeats(run)
    assert [*current_tables(run)] == ["documents", "text", "verdicts", "clusters", "dedup", "audit", "repeats"]
    dropped = list(find_documents(run, parse_where("drop_rule = nothing_left"), 5))
    assert [row["drop_stage"] for row in dropped] == ["repeats"]
    (again,) = [
        row for row in find_documents(run, parse_where("drop_rule = gopher_short_doc"), 99) if row.get("repeats.cuts")
    ]
    text = format_document(again, False)
    assert "dropped by quality/gopher_short_doc" in text
    assert "repeats.cuts               3-9 line" in text
    assert "repeats.body_chars         894 code points" in text
    assert "repeats.gopher_num_words   8" in text
    assert f"clusters.cluster           {again['doc_id'].hex()}" in text
    copies = list(find_documents(run, pc.field("drop_rule") == "near_duplicate", 99))
    assert len(copies) == 3  # a document that `repeats` does not drop keeps its verdict


def test_an_index_of_another_run_does_not_hide_a_table(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "dedup")
    path = Path(run.uri) / "dedup/v-0000000071a9/manifest.json"
    manifest = json.loads(path.read_text())
    outside = {"name": "earlier-0/representatives", "bytes": 1, "sha256": "0" * 64}
    manifest["content"]["inputs"].append(outside)
    path.write_text(json.dumps(manifest))
    assert "dedup" in current_tables(run)
    manifest["content"]["inputs"].append(outside | {"name": "index"})
    path.write_text(json.dumps(manifest))
    assert "dedup" not in current_tables(run)


def test_documents_left_out_by_the_mix_are_not_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert len(list(find_documents(run, parse_where("drop_stage is null"), 99))) == 20
    shares = leave_out(run, 0.5)
    assert 0 < len(shares) < 20
    left = list(find_documents(run, parse_where("drop_rule = mix"), 99))
    assert {row["doc_id"] for row in left} == {*shares}
    for row in left:
        assert (row["drop_stage"], row["drop_limit"]) == ("tokens", 0.5)
        assert row["clean.text"] == "…"  # it is in `clean`, but in no shard
        value = np.float32(shares[row["doc_id"]])
        assert format_document(row, False).splitlines()[0].endswith(f"  dropped by tokens/mix ({value:g}, limit 0.5)")
        (same,) = find_documents(run, column_equals("doc_id", row["doc_id"].hex()), 5)
        assert same == row
    kept = list(find_documents(run, parse_where("drop_stage is null"), 99))
    assert len(kept) == 20 - len(shares)
    assert {format_document(row, False).splitlines()[0].partition("  ")[2] for row in kept} == {"kept"}
    assert len(list(find_documents(run, parse_where("drop_stage = tokens and drop_value >= 0.5"), 99))) == len(shares)
    assert not any(find_documents(run, parse_where("drop_stage = tokens and drop_limit > 0.5"), 9))


def test_a_dataset_of_other_documents_leaves_nothing_out(tmp_path: Path) -> None:
    """The clean documents were rebuilt and the dataset was not, so its mix does not apply to them."""
    run = make_run(tmp_path / "run")
    assert leave_out(run, 0.5)
    edit(run, "clean", lambda content: content["figures"].update(made="again"))
    assert not any(find_documents(run, parse_where("drop_rule = mix"), 9))
    assert len(list(find_documents(run, parse_where("drop_stage is null"), 99))) == 20


def test_values_by_name_are_shown_by_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "clean")
    rows = list(find_documents(run, parse_where("drop_stage is null"), 99))
    lines = [line for row in rows for line in format_document(row, False).splitlines() if "pii_counts" in line]
    assert lines.count("  clean.pii_counts           email 2, phone 1 occurrences") == 3
    assert lines.count("  zero or none: clean.pii_counts") == 17


def test_columns_are_printed_in_groups_and_empty_ones_in_one_line() -> None:
    row = {"doc_id": bytes(16), "source": "web", "offset": 0, "url": "http://a.example/", "drop_stage": None}
    row |= {"num_chars": 70, "unicode_repairs": [], "mojibake": 0, "language": "en", "second_language": None}
    row |= {"gopher_num_words": 12, "gopher_dup_5gram": 0.0, "gopher_hash_ratio": 0.0, "curious": 0.5}
    row |= {"dedup.cluster_size": 2, "dedup.survivor": bytes(16), "clean.pii_counts": [], "clean.text": "x"}
    assert format_document(row, False).splitlines() == [
        f"document {'00' * 16}  kept",
        "provenance",
        "  source                     web",
        "  offset                     0 bytes",
        "  url                        http://a.example/",
        "text and language",
        "  num_chars                  70 code points",
        "  language                   en",
        "  zero or none: unicode_repairs, mojibake",
        "quality signals",
        "  gopher_num_words           12 words",
        "  zero or none: gopher_dup_5gram, gopher_hash_ratio",
        "other columns",
        "  curious                    0.5",
        "table dedup",
        "  dedup.cluster_size         2 documents",
        f"  dedup.survivor             {'00' * 16}",
        "table clean",
        "  zero or none: clean.pii_counts",
    ]


def test_the_short_form_of_a_copy_names_the_copy_that_is_kept() -> None:
    survivor = identifier(7)
    row = {"doc_id": bytes(16), "drop_stage": "dedup", "drop_rule": "near_duplicate", "dedup.survivor": survivor}
    row |= {
        "dedup.similarity": 0.99,
        "drop_value": 0.964,
        "language": "en",
        "language_score": 0.9,
        "num_chars": 2180,
        "source": "web",
    }
    meanings = {"dedup/near_duplicate": NEAR_MEANINGS["estimate"]}
    assert format_summary(row, False, meanings).splitlines() == [
        f"document {'00' * 16}  dropped by dedup/near_duplicate: it is a near copy of the survivor, or linked to it by "
        "near copies, by estimated similarity",
        f"  kept copy  {survivor.hex()}, similarity 0.96",
        "  language   en (0.90)",
        "  source     web",
        "  length     2,180 code points",
    ]


@pytest.mark.parametrize("verify", ["estimate", "jaccard"])
def test_near_duplicate_means_what_the_run_verified(tmp_path: Path, verify: str) -> None:
    run = make_run(tmp_path / "run", "dedup")
    edit(run, "clusters", lambda content: content["config"].update(dedup={"verify": verify}))
    tables = {"clusters": open_table(run, "clusters")[1]}
    assert declared_reasons(tables)["dedup"]["near_duplicate"] == NEAR_MEANINGS[verify]
    assert {"estimate": "by estimated similarity", "jaccard": "by verified similarity"}[verify] in NEAR_MEANINGS[verify]
    edit(run, "dedup", lambda content: content["config"].update(dedup={"compare_survivor": "require"}))
    tables["dedup"] = open_table(run, "dedup")[1]
    assert declared_reasons(tables)["dedup"]["near_duplicate"] == NEAR_MEANINGS["require"]


# ------------------------------------------------------------------------------------------------------- the command

Answer = tuple[int, str, str]
HOSTILE = "A\x1b]0;owned\x07\x9b31m\u202etitle"


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """`penstock show`: exit code, output and errors."""

    def call(run: Store, *words: str) -> Answer:
        parser = ArgumentParser()
        parser.add_argument("run")
        add_show_arguments(parser)
        code = exit_code_of(lambda: show_command(parser.parse_args([run.uri, *words])))
        return (code, *capsys.readouterr())

    return call


def test_the_raw_text_of_a_dropped_document_is_shown_with_its_cuts(tmp_path: Path, show: Callable[..., Answer]) -> None:
    records = [
        Record("quality/gopher_short_doc", title="T", text="Menu\nOne.\nEnd", chars=13, cuts=((0, 5), (10, 13))),
        Record(title="Kept", text="raw", chars=3),
        Record("source/http_status"),
    ]
    run = make_run(tmp_path / "run", "clean", records)
    code, out, err = show(run, "--rule", "gopher_short_doc", "--text")
    assert (code, err) == (0, "show: the text of dropped documents is raw and may hold personal data\n")
    assert out.endswith(
        "\n\n  raw text; [- and -] enclose the spans that were cut\n  title: T\n  | [-Menu\n  | -]One.\n  | [-End-]\n\n"
        "1 document(s)\n"
    )
    assert "Menu" not in show(run, "--rule", "gopher_short_doc")[1]
    code, out, err = show(run, "--where", "drop_stage is null", "--text")
    assert (code, err) == (0, "")
    assert out.endswith("\n\n  | …\n\n1 document(s)\n")
    assert "no text is stored: the record has none" in show(run, "--rule", "source/http_status", "--text")[1]


def test_several_documents_are_printed_in_a_short_form(tmp_path: Path, show: Callable[..., Answer]) -> None:
    short = Record("quality/gopher_short_doc", url="https://a.example/1", text="Menu\nOne.", chars=9, language="en")
    kept = Record(url="https://a.example/2", title="T", text="raw", chars=1234, language="de")
    run = make_run(tmp_path / "run", "clean", [short, kept, replace(short, url="https://a.example/3")])
    code, out, _ = show(run, "--where", "num_chars > 0")
    assert code == 0
    dropped = f"document {identifier(0).hex()}  dropped by quality/gopher_short_doc (4, limit 50): too few words\n"
    assert f"{dropped}  url        https://a.example/1\n  language   en\n  source     web\n  length     " in out
    assert (
        f"document {identifier(1).hex()}  kept\n  url        https://a.example/2\n  title      T\n  language   de\n"
    ) in out
    assert "num_chars" not in out
    assert out.endswith("\n\n3 document(s)\n")
    text = show(run, "--where", "num_chars > 0", "--text")[1]
    assert "\n\n  raw text\n  | Menu\n  | One.\n" in text
    # One document, and every document with --all, is printed with all columns.
    whole = show(run, "--where", "num_chars > 0", "--all")[1]
    assert whole.count("provenance\n") == 3
    one = show(run, "--where", "num_chars > 0", "--limit", "1")[1]
    assert whole.startswith(one.removesuffix("1 document(s)\n"))
    assert show(run, "--where", "num_chars > 0", "--limit", "1", "--all")[1] == one


def test_marked_spans() -> None:
    assert mark_spans("abcdef", [(0, 1), (3, 6)]) == "[-a-]bc[-def-]"
    assert mark_spans("abc", []) == "abc"


def test_short_ids(tmp_path: Path, show: Callable[..., Answer]) -> None:
    run = make_run(tmp_path / "run", "clean")
    whole = identifier(30).hex()
    for digits in (12, 13, 31, 32):
        code, out, _ = show(run, "--doc", whole[:digits].upper())
        assert (code, out.partition("  ")[0]) == (0, f"document {whole}")
    assert show(run, "--doc", "0" * 12)[2].startswith(
        f"penstock: --doc 000000000000: expected the beginning of a document id of {run.uri}, got no document"
    )
    for text in (whole[:11], "x" * 12, f"{whole}0"):
        expected = f"penstock: --doc: expected a document id of 12 to 32 hex digits, got {text!r}. Copy the id"
        code, _, err = show(run, "--doc", text)
        assert (code, err.startswith(expected)) == (2, True), err


def test_rules_have_a_suggestion(tmp_path: Path, show: Callable[..., Answer]) -> None:
    run = make_run(tmp_path / "run", "clean")
    assert show(run, "--rule", "gopher_short_doc")[1].endswith("6 document(s)\n")
    assert show(run, "--rule", "quality/gopher_short_doc", "--where", "language = de")[:2] == (1, "0 document(s)\n")
    code, _, err = show(run, "--rule", "gopher_shrt_doc")
    assert (code, "got none (did you mean 'gopher_short_doc'?). Correct --rule." in err) == (2, True)


def test_a_url_is_also_found_by_its_canonical_form(tmp_path: Path, show: Callable[..., Answer]) -> None:
    record = Record("extract/no_text", url="http://www.c.example/a/?utm_source=x")
    run = make_run(tmp_path / "run", "documents", [record, Record("extract/no_text", url="http://c.example/b")])
    assert show(run, "--url", record.url)[::2] == (0, "")
    code, out, err = show(run, "--url", "https://c.example/a#top")
    assert err == ("show: no document has exactly this URL; searching for the canonical form http://c.example/a\n")
    assert (code, out.partition("  ")[0]) == (0, f"document {identifier(0).hex()}")
    assert show(run, "--url", "https://c.example/c")[:2] == (1, "0 document(s)\n")


def test_random_documents_are_those_with_the_smallest_hashes(tmp_path: Path, show: Callable[..., Answer]) -> None:
    run = make_run(tmp_path / "run", "clean")
    with_text = [row["doc_id"] for row in find_documents(run, WITH_TEXT, 999)]
    assert len(with_text) == 42
    for seed in (0, 7):
        expected = sorted(with_text, key=lambda identifier: shuffle_key(seed, identifier))[:5]
        assert [row["doc_id"] for row in sample_documents(run, WITH_TEXT, 5, seed)] == expected
        out = show(run, "--random", "5", "--seed", str(seed), "--json")[1]
        assert [json.loads(line)["doc_id"] for line in out.splitlines()] == [own.hex() for own in expected]
    assert len(list(sample_documents(run, WITH_TEXT, 99, 0))) == 42
    only = show(run, "--random", "3", "--rule", "http_status", "--json")
    assert (only[0], only[1].count('"drop_rule": "http_status"'), only[2]) == (0, 3, "3 document(s)\n")


def test_json_lines_have_hex_ids_and_objects(tmp_path: Path, show: Callable[..., Answer]) -> None:
    meta = '{"score":3.5,"by":"x"}'
    records = [Record(title="T", text="raw", chars=3, pii={"email": 2}, meta=meta)]
    run = make_run(tmp_path / "run", "clean", records)
    (line,) = show(run, "--where", "drop_stage is null", "--json", "--text")[1].splitlines()
    row = json.loads(line)
    assert (row["doc_id"], row["meta"], row["clean.pii_counts"]) == (
        identifier(0).hex(),
        {"score": 3.5, "by": "x"},
        {"email": 2},
    )
    assert (row["clean.text"], row["clean.title"], row["date"]) == ("…", "T", "2026-01-01 00:00:00+00:00")
    assert "drop_rule" not in row


def test_fields_of_meta_are_columns_of_conditions(tmp_path: Path, show: Callable[..., Answer]) -> None:
    metas = ['{"score":3.5,"by":"ann"}', '{"score":"2","by":7,"tags":["a"]}', '{"by":"bob"}', None]
    records = [Record(text="raw", chars=3, meta=meta) for meta in metas]
    figures = {META_FIELDS: {"score": 2, "by": 3, "tags": 1}, META_NUMBERS: {"score": 2, "by": 1}}
    run = make_run(tmp_path / "run", "clean", records, {"documents": figures})
    assert [str(columns_of_run(run).field(f"meta.{name}").type) for name in figures[META_FIELDS]] == [
        "double",
        "string",
        "string",
    ]
    for condition, numbers in (
        ("meta.score > 3", [0]),
        ("meta.score <= 3.5", [0, 1]),
        ("meta.score is null", [2, 3]),
        ("meta.by = 'bob'", [2]),
        ("meta.by = 7 and meta.score < 3", [1]),
        ("meta.tags = '[\"a\"]'", [1]),
    ):
        out = show(run, "--where", condition, "--json")[1]
        found = {json.loads(line)["doc_id"] for line in out.splitlines()}
        assert found == {identifier(number).hex() for number in numbers}, condition
    assert "  meta.by                    ann\n" in show(run, "--where", "meta.score > 3")[1]
    assert "did you mean 'meta.score'?" in show(run, "--where", "meta.scor > 3")[2]


def test_control_characters_of_a_page_do_not_reach_the_terminal(tmp_path: Path, show: Callable[..., Answer]) -> None:
    html = f"<title>{HOSTILE}</title><p>{'words and words ' * 40}</p>"
    block = f"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n{html}".encode()
    ((row, drop),) = read(record(block, WARC_Target_URI="http://c.example/\x1b[31m\u202e"))
    assert drop is None
    assert make_extract(ExtractConfig(metadata=False), {})(row) is None
    assert "\u202e" in row["title"]  # extraction removes the other control characters
    meta = json.dumps({"by": HOSTILE})
    records = [
        Record(url=row["url"], title=row["title"], text="raw", chars=9, meta=meta),
        Record(
            "quality/gopher_short_doc", url=row["url"], title=HOSTILE, text=f"a\n{HOSTILE}\r\nb", chars=9, meta=meta
        ),
    ]
    run = make_run(tmp_path / "run", "clean", records, {"documents": {META_FIELDS: {"by": 2}}})
    for words in (["--text"], ["--text", "--json"]):
        code, out, _ = show(run, "--random", "2", *words)
        assert code == 0
        assert CONTROL_CHARACTERS.findall(out.replace("\n", "")) == []
    out = show(run, "--random", "2", "--text", "--all")[1]
    assert "  meta.by                    A\\x1b]0;owned\\x07\\x9b31m\\u202etitle\n" in out
    assert "  | A\\x1b]0;owned\\x07\\x9b31m\\u202etitle\n  | b\n" in out
    assert f"{row['title'].replace(chr(0x202E), chr(92) + 'u202e')}\n" in out
    assert json.loads(show(run, "--rule", "gopher_short_doc", "--json")[1])["meta"] == {"by": HOSTILE}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "show: expected --doc, --url, --domain, --rule, --where or --random, got none of them. Add one."),
        (["--random", "0"], "show --random: expected at least 1 document, got 0"),
        (["--rule", "x", "--limit", "0"], "show --limit: expected at least 1 document, got 0"),
        (["--random", "1", "--limit", "2"], "show: expected --random or --limit, got both. Remove --limit."),
        (["--rule", "x", "--seed", "1"], "show: expected --seed only together with --random, got no --random."),
        (["--random", "1", "--url", "x"], "show: expected --random or --url, got both. Remove --random."),
    ],
)
def test_options_without_an_effect_are_refused(
    tmp_path: Path, show: Callable[..., Answer], words: list[str], message: str
) -> None:
    code, out, err = show(Store(str(tmp_path)), *words)
    assert (code, out, err.startswith(f"penstock: {message}")) == (2, "", True), err


def test_a_domain_has_its_hosts_also_without_a_public_suffix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = ("archive.gannet.example", "gannet.example", "notgannet.example", "www.site.co.uk", "shop.site.co.uk")
    records = [Record(language="en", chars=100, url=f"https://{host}/{n}", text=host) for n, host in enumerate(hosts)]
    run = make_run(tmp_path / "run", "documents", records)
    parser = ArgumentParser()
    parser.add_argument("run")
    add_show_arguments(parser)
    for domain, expected in (
        ("gannet.example", {*hosts[:2]}),
        ("Archive.gannet.example", {hosts[0]}),
        ("site.co.uk", {*hosts[3:]}),
        ("shop.site.co.uk", {hosts[4]}),
        ("example", set()),
    ):
        words = [run.uri, "--domain", domain, "--json"]
        assert exit_code_of(lambda words=words: show_command(parser.parse_args(words))) == (0 if expected else 1)
        lines = capsys.readouterr().out.splitlines()
        assert {json.loads(line)["url"].split("/")[2] for line in lines} == expected
