"""The ground truth section: planted pages of a demo crawl compared with the verdicts of the run."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.report.facts import collect_facts
from pipeline.report.funnel import checks, drops_by_rule, funnel_rows
from pipeline.report.ground_truth import score
from pipeline.report.page import write_report
from pipeline.report.samples import draw_samples
from pipeline.report.tallies import contract, streams
from pipeline.tokens.streams import TOKENS
from schemas.errors import ConfigError
from schemas.storage import Store
from tests.pipeline.tokens.test_streams import leave_out
from tests.support.report_run import CLEAN_BYTES, crawl, identifier, make_run, place_of, whole_run, words_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return the whole synthetic run."""
    return whole_run(tmp_path_factory.mktemp("report") / "harbour")


def truth_line(kind: str, number: int, *rules: str, **details: Any) -> dict[str, Any]:
    """Return a planted record at the offset of a record of the crawl."""
    part, offset = place_of(number)
    line = {"kind": kind, "url": crawl()[number].url or f"https://z.example/{number}", "file": f"crawl-{part}.warc.gz"}
    return line | {"offset": offset, "rules": list(rules), "expected": "drop" if rules else "keep"} | details


def write_truth(path: Path) -> str:
    """Write a truth file: kept pages are records 33 to 52, exact copies 23 to 26, near copies 27 to 29."""
    copies, rules = ("exact_duplicate", "near_duplicate"), ("gopher_short_doc",)
    lines = [
        truth_line("original", 33, group="one"),
        truth_line("original", 34, group="two"),
        truth_line("exact_text", 23, *copies, group="one", jaccard=1.0),
        truth_line("exact_text", 27, *copies, group="one", jaccard=1.0),
        truth_line("near_80", 28, "near_duplicate", group="two", jaccard=0.8),
        truth_line("near_70", 35, "near_duplicate", group="two", jaccard=0.7, expected="either"),
        truth_line("near_30", 36, group="two", jaccard=0.3),
        truth_line("gopher_short_doc", 16, *rules),
        truth_line("gopher_short_doc", 22, *rules),
        truth_line("toxic", 30, "toxic_word_share"),
        truth_line("language", 52, language="ja", charset="utf-8"),
        truth_line("language", 40, language="fr", charset="shift_jis"),
        truth_line("pii_email", 33, pii={"email": 2, "phone": 2}, values=[["email", "planted@penrose.com"]]),
        truth_line("pii_email", 34, pii={"email": 1}),
        truth_line("record_garbage", 0, "unreadable_gap"),
        truth_line("encoding_br", 41),
        truth_line("no_text", 9, "no_text") | {"file": "elsewhere.warc.gz"},
        truth_line("empty_body", 9, "no_text") | {"file": "elsewhere.warc.gz", "url": "https://z.example/none"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_found_and_planted_for_every_kind(run: Store, tmp_path: Path) -> None:
    scores = score(collect_facts(run), write_truth(tmp_path / "truth.jsonl"))
    found = {row.kind: (row.found, row.planted, row.others) for row in scores}
    lost = "5 gopher_short_doc, 5 language_not_wanted, 3 exact_duplicate, 3 http_status, 2 toxic_word_share"
    lost += ", 1 near_duplicate, 1 no_text"
    assert found == {
        "same text, other layout": (1, 2, "1 near_duplicate"),
        "0.80": (1, 1, ""),
        "0.70": (0, 1, "1 kept"),
        "0.30": (1, 1, ""),
        "gopher_short_doc": (1, 2, "1 c4_lorem_ipsum"),
        "toxic": (1, 1, ""),
        "charset declared correctly": (2, 2, ""),
        "language ja": (1, 1, ""),
        "language fr": (0, 1, "1 en"),
        "charset utf-8": (1, 1, ""),
        "charset shift_jis": (0, 1, "1 utf-8"),
        "email": (3, 3, "1 more in these pages"),
        "phone": (1, 2, "1 more in these pages"),
        "pii_email": (2, 2, ""),
        "record_garbage": (1, 1, ""),
        "encoding_br": (1, 1, ""),
        "no_text": (1, 1, ""),
        "empty_body": (0, 1, "1 no row"),
        "ordinary pages": (13, 33, lost),
    }
    assert [row.kind for row in scores if not row.judged] == ["0.70"]
    page = Path(write_report(run, str(tmp_path / "truth.jsonl"))).read_text()
    assert "Ground truth" in page
    assert "1 c4_lorem_ipsum" in page
    assert "planted@penrose.com" not in page
    assert "mix of the dataset" not in page
    assert "bytes estimated" not in page


def test_an_invalid_truth_file_is_rejected(run: Store, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"--truth .*nowhere\.jsonl: expected a file, got none\. Set --truth to the truth\.jsonl of ",
    ):
        write_report(run, str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "other.json").write_text('{"files": []}\n')
    with pytest.raises(ConfigError, match=r"other\.json: expected one planted record per line, got KeyError"):
        write_report(run, str(tmp_path / "other.json"))


def test_documents_left_out_by_the_mix_are_not_kept(tmp_path: Path) -> None:
    """Three documents are kept. Values in the others are still counted as replaced, and copies as found."""
    run = make_run(tmp_path / "run")
    before = {row.kind: row for row in score(collect_facts(run), write_truth(tmp_path / "truth.jsonl"))}
    clean = sorted(leave_out(run, 0).values())
    left_out = leave_out(run, clean[3])
    assert len(left_out) == 17
    scores = {row.kind: row for row in score(collect_facts(run), write_truth(tmp_path / "truth.jsonl"))}
    kept_before, ordinary = before["ordinary pages"].found, scores["ordinary pages"]
    counts = dict(reversed(entry.split(" ")) for entry in ordinary.others.split(", "))
    assert ordinary.found + int(counts["mix"]) == kept_before == 13
    num_kept = sum(identifier(number) not in left_out for number in (33, 34))
    assert (scores["pii_email"].found, scores["pii_email"].others) == (
        num_kept,
        f"{2 - num_kept} mix" if num_kept < 2 else "",
    )
    for kind in ("email", "phone", "0.30", "0.80", "language ja", "gopher_short_doc"):
        assert scores[kind] == before[kind]
    page = words_of(Path(write_report(run, str(tmp_path / "truth.jsonl"))).read_text())
    assert f"{counts['mix']} mix" in page
    assert "found equals planted. The mix of the dataset leaves out some of the pages that should be kept" in page
    assert "separators included, bytes estimated from characters" in page


def test_the_page_counts_documents_left_out_by_the_mix_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    left_out = leave_out(run, 0.5)
    facts, reasons = collect_facts(run), {"tokens": TOKENS.reasons}
    number = len(left_out)
    funnel = {level.name: level for level in funnel_rows(facts, reasons)}
    assert (funnel["redaction"].documents, funnel["mix"].documents, funnel["tokens"].documents) == (
        20,
        20 - number,
        20 - number,
    )
    assert funnel["mix"].chars == funnel["tokens"].chars == 850 * (20 - number)
    (row,) = drops_by_rule(facts, reasons)["tokens"]
    assert (row.name, row.count, row.chars) == ("tokens/mix", number, 850 * number)
    assert [check.claim for check in checks(facts) if not check.holds] == []
    tokens = sum(stream.tokens for stream in streams(facts))
    assert contract(facts)["bytes_per_token"] == pytest.approx(CLEAN_BYTES * (20 - number) / tokens)
    drawn = draw_samples(facts).by_rule["tokens/mix"]
    assert len(drawn) == 3
    assert {(sample.limit, sample.value in left_out.values()) for sample in drawn} == {(0.5, True)}
    assert all(sample.text.startswith("kept ") for sample in drawn)
