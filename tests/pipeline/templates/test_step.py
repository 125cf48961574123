"""The step `templates` in real runs: from archives to tokens, the same bytes at any partitioning, and a takedown."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import penstock
from jobs.cli import main
from jobs.recipe import deciding_models, recipe_sections, stored_recipe
from jobs.verbs.browse import open_run_of
from pipeline.browse.document import document_json
from pipeline.browse.rows import Position
from pipeline.browse.search import make_query, search
from pipeline.inspect.document_text import format_document
from pipeline.inspect.show import find_documents, parse_where
from pipeline.inspect.whatif import KEPT_VERDICT, predict
from pipeline.inspect.whatif_limits import changed_settings
from pipeline.prepare import prepare
from pipeline.report.facts import collect_facts
from pipeline.report.funnel import checks
from pipeline.report.judged import choose_parts, read_judged
from pipeline.report.page import write_report
from pipeline.run import run_steps
from schemas.errors import ConfigError
from schemas.manifest import current_tables, open_table
from schemas.overrides import load_recipe
from schemas.storage import Store
from tests.support.tiny_archive import record
from tests.support.tiny_takedown import documents_of, opened, take_down
from train.trace.documents import open_decoder

pytestmark = pytest.mark.spark

MENU = ["Home", "News of the region", "Contact and imprint"]
NOTICE = "All rights reserved by the Acme Publishing House."
MORE = "Read more about this"
WORDS = [
    *("river", "market", "school", "garden", "harbour", "winter", "council", "letter", "engine", "forest"),
    *("theatre", "museum", "bakery", "station"),
]


def story(number: int) -> list[str]:
    """Five lines of prose that no other page has."""
    name, other = WORDS[number % 14], WORDS[(number // 14 + 3 * number + 1) % 14]
    return [
        f"The {name} of the town {chr(97 + number)}ville was opened by the {other} in the spring of that year.",
        f"Many people from {chr(97 + number)}ville came to see the {name} and they stayed with the {other} all day.",
        f"It had been closed because the old {other} of {chr(97 + number)}ville was in a bad state for a long time.",
        f"The council of {chr(97 + number)}ville will have to pay for the {name}, and the work is to be done by May.",
        f"A letter that the {other} has sent to the people of {chr(97 + number)}ville can be read at the {name}.",
    ]


def lines_of(number: int) -> list[str]:
    """A page of the large host: its menu twice, a heading, a story, and repeated links to other pages."""
    heading = f"News from {chr(97 + number)}ville"
    return [*MENU, heading, *story(number), *[MORE] * 8, *MENU, NOTICE]


def page(url: str, lines: Sequence[str], title: str) -> bytes:
    body = "".join(f"<p>{line}</p>" for line in lines)
    html = f"<html lang=en><head><title>{title}</title></head><body>{body}</body></html>"
    return record(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + html.encode(), WARC_Target_URI=url)


def pages() -> list[bytes]:
    """12 pages of a large host under varied addresses; 9 of a small one; 12 copies of one page; 4 single pages."""
    hosts = ["http://big.example", "https://WWW.BIG.example:443", "http://big.example:80"]
    large = [page(f"{hosts[n % 3]}/{n}", lines_of(n), f"News from {chr(97 + n)}ville - Acme") for n in range(12)]
    small = [page(f"http://small.example/{n}", [*MENU, *story(12 + n), NOTICE], "x") for n in range(9)]
    copied = [page("http://copies.example/only", [*story(21), f"Visit {chr(97 + n)}"], "x") for n in range(12)]
    single = [page(f"http://one-{n}.example/", [*MENU, *story(22 + n), NOTICE], "x") for n in range(4)]
    return [*large, *small, *copied, *single]


def write_archives(folder: Path, num_files: int) -> Path:
    """Write the pages to some archives, in turn."""
    folder.mkdir()
    for number in range(num_files):
        (folder / f"{number}.warc").write_bytes(b"".join(pages()[number::num_files]))
    return folder


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_archives(tmp_path_factory.mktemp("archives") / "three", 3)


def run(spark: Any, crawl: Path, folder: Path, partitions: int | None, until: str, *more: str) -> Store:
    settings = [
        f'source.paths=["{crawl}/*"]',
        'extract.extractor="all"',
        "language.languages=[]",
        "language.min_score=0",
        'quality.rules=["gopher_repetition"]',
        "quality.cut_lines=[]",
        "toxicity.wordlists={}",
        "audit.documents=0",
        *("tokenizer.vocab_size=450", "tokens.shard_tokens=4096", "tokens.chunk_tokens=64"),
        *more,
    ]
    store = Store(str(folder))
    wanted = load_recipe({}, settings, recipe_sections(), "test")
    run_steps(spark, prepare(wanted, until), store, partitions)
    return store


def rows(store: Store, table: str) -> list[dict[str, Any]]:
    folder, manifest = open_table(store, table)
    return [row for path in manifest.paths_of() for row in pq.read_table(folder.path(path)).to_pylist()]


def url_of(store: Store) -> dict[bytes, str]:
    return {row["doc_id"]: row["url"] for row in rows(store, "documents")}


SHARE = "templates.min_share=0.5"


@pytest.fixture(scope="module")
def cut(spark: Any, archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return run(spark, archives, tmp_path_factory.mktemp("cut") / "run", 2, "tokens", SHARE)


@pytest.fixture(scope="module")
def plain(spark: Any, archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return run(spark, archives, tmp_path_factory.mktemp("plain") / "run", 2, "clean")


def is_large(url: str) -> bool:
    return "big.example" in url.lower()


def test_pages_lose_the_lines_of_their_host_before_the_rules_look(cut: Store, plain: Store) -> None:
    urls = url_of(cut)
    before = {urls[row["doc_id"]]: row for row in rows(plain, "verdicts")}
    assert {row["drop_rule"] for url, row in before.items() if is_large(url)} == {"gopher_dup_para_frac"}
    repeated = [row for row in rows(plain, "documents") if is_large(row["url"])]
    assert min(row["gopher_dup_line_frac"] for row in repeated) > 0.3
    texts = {urls[row["doc_id"]]: row["text"] for row in rows(cut, "clean")}
    large = {url: text for url, text in texts.items() if is_large(url)}
    assert len(large) == 12
    for url, text in large.items():
        number = int(url.rpartition("/")[2])
        # every page keeps its heading, with which its title begins
        assert text.split("\n\n") == [f"News from {chr(97 + number)}ville", *story(number)]
    others = [text for url, text in texts.items() if not is_large(url)]
    assert len(others) == 9 + 1 + 4  # of the copies, one is left
    assert sum(NOTICE in text for text in others) == 13
    (copied,) = (text for url, text in texts.items() if "copies.example" in url)
    assert copied.split("\n\n")[:5] == story(21)


def test_the_table_has_the_counts_and_the_values_without_the_lines(cut: Store, plain: Store) -> None:
    urls = url_of(cut)
    table = {row["doc_id"]: row for row in rows(cut, "templates")}
    documents = {row["doc_id"]: row for row in rows(cut, "documents")}
    assert {*table} == {doc_id for doc_id, row in documents.items() if row["drop_stage"] is None}
    for doc_id, row in table.items():
        if not is_large(urls[doc_id]):
            assert row["host_pages"] is None
            assert not row["cuts"]
            continue
        assert row["host_pages"] == 12
        assert {block["pages"] for block in row["blocks"]} == {12}
        text = "\n\n".join([*lines_of(0)[3:4], *story(0)])
        assert row["gopher_num_words"] < documents[doc_id]["gopher_num_words"]
        assert abs(row["num_chars"] - len(text)) < 20
        assert row["template_chars"] == documents[doc_id]["num_chars"] - row["num_chars"]
        assert row["text_digest"] not in (None, documents[doc_id]["text_digest"])
    content = open_table(cut, "templates")[1].content
    assert content.figures["hosts"] == {"measured": 1, "cut": 1}
    assert content.figures["documents"] == 12
    assert content.figures["cut_documents"] == {"en": 12}
    assert content.figures["cut_lines"] == {"en": 12 * (2 * len(MENU) + 8 + 1)}
    assert content.figures["cut_chars"] == {"en": sum(row["template_chars"] or 0 for row in table.values())}
    assert content.figures["kept_chars"] == sum(documents[doc_id]["num_chars"] for doc_id in table) - sum(
        content.figures["cut_chars"].values()
    )
    assert (content.counts.rows_in, content.counts.rows_kept) == (len(table), len(table))
    assert open_table(cut, "documents")[1].digest == open_table(plain, "documents")[1].digest


def test_the_tokens_no_longer_hold_the_furniture(cut: Store) -> None:
    dataset = opened(Path(cut.root))
    decode = open_decoder(dataset)
    texts = [decode(document["tokens"][1:-1]) for document in documents_of(dataset)]
    assert sum("ville" in text for text in texts) == len(texts)
    assert not any(MORE in text for text in texts)
    assert sum(NOTICE in text for text in texts) == 13


def test_the_counts_of_all_tables_balance_and_the_report_shows_the_step(cut: Store) -> None:
    assert [check.claim for check in checks(collect_facts(cut)) if not check.holds] == []
    html = Path(write_report(cut, None)).read_text()
    assert "the same texts without the lines that many pages of their host have" in html
    assert [*current_tables(cut)][:3] == ["documents", "text", "templates"]


@pytest.mark.parametrize("partitions", [1, pytest.param(7, marks=pytest.mark.slow)])
def test_the_bytes_are_the_same_at_any_partitioning(
    spark: Any, archives: Path, cut: Store, tmp_path: Path, partitions: int
) -> None:
    other = run(spark, archives, tmp_path / "run", partitions, "clean", SHARE)
    for table in ("templates", "verdicts", "clusters", "dedup", "clean"):
        first, second = (open_table(store, table)[1] for store in (cut, other))
        assert first.content.files == second.content.files, table
        assert first.digest == second.digest, table


@pytest.mark.parametrize("num_files", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_the_cuts_do_not_depend_on_the_division_into_files(
    spark: Any, cut: Store, tmp_path: Path, num_files: int
) -> None:
    other = run(spark, write_archives(tmp_path / "crawl", num_files), tmp_path / "run", None, "templates", SHARE)

    def facts(store: Store) -> list[tuple[Any, ...]]:
        urls = url_of(store)
        names = ("host_pages", "blocks", "cuts", "text_digest", "num_chars")
        listed = [(urls[row["doc_id"]], *(row[name] for name in names)) for row in rows(store, "templates")]
        return sorted(listed, key=repr)

    assert facts(other) == facts(cut)
    figures = [open_table(store, "templates")[1].content.figures for store in (cut, other)]
    assert figures[0] == figures[1]


def test_exports_and_the_report_use_the_values_without_the_lines(cut: Store, tmp_path: Path) -> None:
    out = tmp_path / "export"
    signals = "gopher_num_words,template_chars"
    assert (
        main(
            ["export", cut.root, "--format", "jsonl", "--out", str(out), "--compression", "none", "--signals", signals]
        )
        == 0
    )
    lines = [json.loads(line) for file in out.rglob("*.jsonl") for line in file.read_text().splitlines()]
    again = {row["doc_id"].hex(): row for row in rows(cut, "templates")}
    stored = {row["doc_id"].hex(): row for row in rows(cut, "documents")}
    assert sum(line["template_chars"] is not None for line in lines) == 12
    for line in lines:
        source = again if line["template_chars"] else stored
        assert line["gopher_num_words"] == source[line["id"]]["gopher_num_words"]
    facts = collect_facts(cut)
    words = [part.numbers("gopher_num_words") for part in read_judged(facts, choose_parts(facts), ["gopher_num_words"])]
    expected = [(again[one] if again[one]["cuts"] else stored[one])["gopher_num_words"] for one in again]
    assert sorted(value for part in words for value in part.tolist()) == sorted(expected)


def test_conditions_compare_the_values_without_the_lines(cut: Store) -> None:
    again = {row["doc_id"]: row for row in rows(cut, "templates")}
    stored = {row["doc_id"]: row for row in rows(cut, "documents")}
    changed = {one: row["gopher_num_words"] for one, row in again.items() if row["cuts"]}
    limit = max(changed.values())
    assert limit < min(stored[one]["gopher_num_words"] for one in changed)
    where = f"template_chars > 0 and gopher_num_words <= {limit}"
    found = {row["doc_id"]: row for row in find_documents(cut, parse_where(where), 99)}
    assert {one: row["gopher_num_words"] for one, row in found.items()} == changed
    for one, row in found.items():
        assert row["documents.gopher_num_words"] == stored[one]["gopher_num_words"]
        assert "templates.gopher_num_words" not in row
    selected = penstock.open(cut.uri).documents.where(where).select("gopher_num_words")
    assert sorted(row["gopher_num_words"] for row in selected) == sorted(changed.values())
    browsed = open_run_of(cut.uri)
    query = make_query(browsed, {"where": where, "columns": "gopher_num_words"})
    page = search(browsed, query, Position(0, 0), 99)
    assert len(page.rows) == len(changed)
    assert sorted(row["values"]["gopher_num_words"] for row in page.rows) == sorted(changed.values())


def test_show_and_browse_mark_the_cuts(cut: Store) -> None:
    found = list(find_documents(cut, parse_where("template_chars > 0"), 99, with_text=True))
    assert len(found) == 12
    shown = format_document(found[0], False)
    (start, end, pages) = found[0]["templates.blocks"][0].values()
    assert f"templates.blocks           {start}-{end} on {pages} pages, " in shown
    first = found[0]["templates.cuts"][0]
    assert f"templates.cuts             {first['start']}-{first['end']} template, " in shown
    page = document_json(open_run_of(cut.uri), found[0]["doc_id"], None, "")
    marked = {piece["text"].strip(): piece["marks"] for piece in page["text"]["pieces"] if piece["marks"]}
    assert any(NOTICE in text for text in marked)
    assert {mark.get("cut") for mark in marked.values()} == {"template"}


def test_a_what_if_uses_the_values_without_the_lines_and_refuses_other_limits(spark: Any, cut: Store) -> None:
    wanted = stored_recipe(cut, ["templates.min_left_chars=5000", "quality.max_dup_line_frac=0.001"])
    prediction = predict(spark, cut, wanted, deciding_models(wanted))
    after: dict[str, int] = {}
    for cell in prediction.cells:
        after[cell.after] = after.get(cell.after, 0) + cell.documents
    assert after["templates/little_left"] == 12
    wanted = stored_recipe(cut, ["quality.max_dup_line_frac=0.001"])
    assert {cell.after for cell in predict(spark, cut, wanted, deciding_models(wanted)).cells} <= {
        KEPT_VERDICT,
        "dedup/exact_duplicate",
        "dedup/near_duplicate",
        "dedup/same_url",
    }
    with pytest.raises(ConfigError, match=r"templates\.min_share: it changes the cuts, and so the text"):
        changed_settings(stored_recipe(cut, []), stored_recipe(cut, ["templates.min_share=0.7"]))


def test_a_document_of_which_little_is_left_is_dropped_and_later_cuts_are_made_in_the_rest(
    spark: Any, archives: Path, cut: Store, tmp_path: Path
) -> None:
    left = {row["doc_id"]: row["num_chars"] for row in rows(cut, "templates") if row["cuts"]}
    limit = sorted(left.values())[6]
    settings = [SHARE, f"templates.min_left_chars={limit}", 'quality.cut_lines=["c4"]', "quality.rules=[]"]
    settings += ['repeats.units=["line"]', "repeats.min_unit_chars=20"]
    store = run(spark, archives, tmp_path / "run", 3, "clean", *settings)
    urls = url_of(store)
    verdicts = {row["doc_id"]: row for row in rows(store, "verdicts") if row["drop_stage"] is not None}
    assert {*verdicts} == {doc_id for doc_id, chars in left.items() if chars < limit}
    assert 0 < len(verdicts) < 12
    for doc_id, row in verdicts.items():
        stored = [row[name] for name in ("drop_stage", "drop_rule", "drop_value", "drop_limit")]
        assert stored == ["templates", "little_left", left[doc_id], limit]
    # the line rules cut the empty lines of the rest
    texts = [row["text"] for row in rows(store, "clean") if is_large(urls[row["doc_id"]])]
    assert [len(text.split("\n")) for text in texts] == [6] * (12 - len(verdicts))
    page = document_json(open_run_of(store.uri), next(iter(left.keys() - verdicts.keys())), None, "")
    marked = [piece["marks"].get("cut") for piece in page["text"]["pieces"] if piece["marks"]]
    assert {*marked} == {"template", "line rules of c4"}
    # the notice of the other hosts is a repeat; the lines of the large host are gone before
    figures = open_table(store, "repeats")[1].content.figures
    assert not any(is_large(urls[row["doc_id"]]) and row["cuts"] for row in rows(store, "repeats"))
    assert figures["cut_documents"]["line"] > 0
    assert [check.claim for check in checks(collect_facts(store)) if not check.holds] == []


def test_rows_without_url_and_empty_files_are_left_alone(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "crawl").mkdir()
    lines = [{"text": "\n".join([*MENU, *story(n)]), "url": f"http://a.example/{n}"} for n in range(10)]
    lines += [{"text": "\n".join([*MENU, *story(10 + n)])} for n in range(10)]
    lines += [{"text": "\n".join([*MENU, *story(20)]), "url": "not a url"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "crawl" / "a.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "crawl" / "b.jsonl").write_text("", encoding="utf-8")
    store = run(
        spark, tmp_path / "crawl", tmp_path / "run", 2, "clean", SHARE, 'source.format="jsonl"', 'source.name="own"'
    )
    table = rows(store, "templates")
    assert sum(row["host_pages"] == 10 for row in table) == 10
    assert sum(row["host_pages"] is None for row in table) == 11
    assert sum(MENU[1] in row["text"] for row in rows(store, "clean")) == 11


def test_a_takedown_removes_a_document_from_the_table(cut: Store, tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run"))
    shutil.copytree(cut.root, store.root)
    gone = next(row["doc_id"] for row in rows(store, "templates") if row["cuts"])
    assert take_down(store.root, doc=[gone.hex()]) == 0
    left = rows(store, "templates")
    assert gone not in {row["doc_id"] for row in left}
    assert len(left) == len(rows(cut, "templates")) - 1
    counts = open_table(store, "templates")[1].content.counts
    assert counts.rows_in == counts.rows_kept == len(left)
    assert [check.claim for check in checks(collect_facts(store)) if not check.holds] == []
    assert main(["verify", str(store.root)]) == 0
