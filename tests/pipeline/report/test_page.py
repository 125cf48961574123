"""The page of the report: its numbers, escaping of hostile text, well-formedness, and rendering in a real browser."""

import html
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline.decontaminate.stage import DOCUMENTS
from pipeline.report import page as report_page
from pipeline.report.facts import collect_facts
from pipeline.report.page import script_hash, write_report
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json
from schemas.manifest import MANIFEST_NAME, RunFile, make_manifest, open_table, read_run, write_run
from schemas.storage import Store
from schemas.takedown import PENDING_NAME
from schemas.union import write_union
from tests.support.paths import ROOT
from tests.support.report_run import ADDRESS, SCRIPT, bins, crawl, identifier, judged, make_run, whole_run, words_of
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import take_down


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Return the whole synthetic run."""
    return whole_run(tmp_path_factory.mktemp("report") / "harbour")


@pytest.fixture(scope="module")
def page(run: Store) -> str:
    """Return the report of that run."""
    path = write_report(run, None)
    assert path == f"{run.uri}/report.html"
    return Path(path).read_text()


def test_the_numbers_appear(run: Store, page: str) -> None:
    text = words_of(page)
    tokens = open_table(run, "tokens")[1]
    total = sum(sum(shards) for shards in tokens.content.figures["streams"].values())
    for expected in (
        f"2 files of 52 kB contain 53 records; 20 documents are kept (45.5 % of 44 pages), tokenized into {total:,}",
        "The main reasons for drops of pages are gopher_short_doc ( 6 ) , language_not_wanted ( 5 ) and",
        "All 24 consistency checks passed.",
        tokens.digest,
        "Pages per CPU second 1.9 23.5 s of CPU in 8 steps",
        "Held-out loss 4.568 after 40 steps",
        "gopher_short_doc too few words quality 6 11.3 % 540",
        "52,000 bytes in the rows, 52,000 in the files. The totals agree.",
        "gap/unreadable_gap 1,000 1.9 %",
        "it 5 0 0.0 % 0 0",
        "email 6 66.7 %",
        "9 values were replaced",
        "too large a share of the text is on the language's word list 0.01 3",
        "en 32 32 32 0 ja 5 0 0 5",
        "params 1,234,567 parameters N = 2·d count",
        "memory.2.states 2.5 MB",
        "40 of 40 optimizer steps were run, 1 of them without an update; the loss of the last step is 4.0000",
        "The steps spent 2.5 % of their time waiting for data; checkpoints stalled training for 0.5 s.",
        "the gradients that a rank sent from 2 MB to 40 kB",
        "books 780 4.4500 – – –",
        "web 2,340 4.0500 4.4500 85.6 –",
        "12 2026-01-02 03:04:05 spike loss 7.2500, above 7.1000 (mean 6.5000); 4 spans of documents in the step, "
        f"such as https://a.example/1, {SCRIPT}, {'d' * 32}",
        "20 2026-01-02 03:04:05 resumed from step-000020, with another layout: ranks 4 → 2, shard 4 → 2",
        "checkpoint 40 1.5 MB, 2 × cpu, shard 2, 1 thread per rank",
    ):
        assert expected in text
    assert 'aria-label="Loss over steps 1 to 40: training 7.9 to 4; held-out 6.5 to 4.5"' in page


def test_the_same_run_gives_the_same_report(run: Store, page: str) -> None:
    assert Path(write_report(run, None)).read_text() == page


@pytest.mark.parametrize("until", ["documents", "text", "verdicts", "clusters", "dedup", "audit", "clean"])
def test_an_incomplete_run_has_a_report(tmp_path: Path, until: str) -> None:
    run = make_run(tmp_path / "run", until)
    text = words_of(Path(write_report(run, None)).read_text())
    assert "53 records" in text
    assert ("Deduplication has not run on these documents yet." in text) == (until in ("documents", "text", "verdicts"))
    assert ("Toxicity has not been measured yet." in text) == (until in ("documents", "text"))
    for missing in (
        "The run has no tokenizer yet.",
        "The run has no token dataset yet.",
        "The training run has no plan yet",
        "No optimizer step has been made yet",
    ):
        assert missing in text


def test_tables_of_an_earlier_version_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    path = Path(run.uri) / "dedup/v-0000000071a9/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["content"]["inputs"][0]["sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    facts = collect_facts(run)
    assert (list(facts.tables), facts.stale) == (
        ["documents", "text", "verdicts", "clusters", "tokenizer", "tokens"],
        ["dedup", "audit", "clean"],
    )
    text = words_of(Path(write_report(run, None)).read_text())
    assert "Not shown: dedup, audit, clean, made from outdated versions of earlier tables." in text


def test_an_empty_run_has_a_report_and_another_folder_is_rejected(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    with pytest.raises(ConfigError, match=r"expected a run folder, got no run\.json"):
        write_report(run, None)
    write_run(run, RunFile())
    assert "The run has no table yet" in Path(write_report(run, None)).read_text()


def test_a_damaged_plan_or_metrics_file_is_named(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    write_run(run, RunFile())
    run.write_atomic("train/metrics.jsonl", b'{"step": 1}\n')
    with pytest.raises(
        ContractError,
        match=r"metrics\.jsonl: expected one complete step per line, got an invalid line \(KeyError\('loss'\)\)\.",
    ):
        write_report(run, None)
    run.write_atomic("train/plan.json", b'{"figures": []}')
    with pytest.raises(
        ContractError,
        match=r"plan\.json: expected a training plan, got an invalid one \(KeyError\('stages'\)\)\. Run `penstock",
    ):
        write_report(run, None)


# ------------------------------------------------------------------------------------------------------------- safety


def test_a_run_whose_first_steps_were_skipped_has_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    line = {"step": 1, "learning_rate": 1e-3, "tokens_per_second": 9.0, "skipped": True}
    run.write_atomic("train/metrics.jsonl", json.dumps(line).encode() + b"\n")
    run.write_atomic("train/events.jsonl", b'{"kind": "skipped", "step": 1, "at": "2026-01-02", "loss": 3.5}\n')
    text = words_of(Path(write_report(run, None)).read_text())
    assert "No update of the weights has been made yet" in text
    assert "1 2026-01-02 update skipped loss 3.5, gradient norm not finite" in text
    run.write_atomic("train/events.jsonl", b'{"kind": "skipped"}\n')
    with pytest.raises(
        ContractError,
        match=r"events\.jsonl, line \d+: expected a JSON object with the keys .*, got {'kind': 'skipped'}",
    ):
        write_report(run, None)


def test_hostile_text_is_escaped(page: str) -> None:
    assert page.lower().count("<script") == 1  # the script of the page itself
    assert "<img" not in page.lower()
    assert page.count("&lt;script&gt;document.title=&#39;PWNED&#39;&lt;/script&gt;") >= 4  # kind, url, title, text
    assert "&lt;img src=x onerror=" in page
    assert ADDRESS not in page


def test_no_template_or_module_marks_anything_as_safe() -> None:
    files = list((ROOT / "pipeline" / "report").glob("*.*"))
    assert {"page.html", "page.py"} < {file.name for file in files}
    marks = re.compile(r"\|\s*safe\b|\bMarkup\b|autoescape\s*(?:=\s*)?[Ff]alse|\bon\w+=|javascript:|https?://|url\(")
    assert [(file.name, hit.group()) for file in files if (hit := marks.search(file.read_text()))] == []


class Outline(HTMLParser):
    """Open elements, ids, links, and missing descriptions of tables and drawings."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.problems: list[str] = []
        self.undescribed = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag not in ("meta", "col", "br", "wbr"):
            self.open.append(tag)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.links += [values["href"] or ""] if "href" in values else []
        is_inner = tag == "svg" and "svg" in self.open[:-1]
        if self.undescribed and tag != "title":
            self.problems.append("a drawing without a description")
        self.undescribed = tag == "svg" and not (is_inner or "aria-hidden" in values or values.get("aria-label"))
        if tag == "th" and values.get("scope") not in ("col", "row", "rowgroup"):
            self.problems.append("a heading without scope")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes something else")


def test_the_page_is_well_formed_and_described(page: str) -> None:
    outline = Outline()
    outline.feed(page)
    assert (outline.open, outline.problems) == ([], [])
    assert len(set(outline.ids)) == len(outline.ids)
    assert outline.links
    assert {link.removeprefix("#") for link in outline.links} <= set(outline.ids)
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', page)[0])
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src '{script_hash(script)}';" in policy
    )


# ------------------------------------------------------------------------------------------------------------ browser


@pytest.fixture
def chromium(tmp_path: Path) -> Callable[[Path, str], str]:
    """Return a function that loads a file in a headless browser with an empty profile and returns the rendered page."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no chromium on the PATH")

    def load(file: Path, profile: str) -> str:
        switches = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
        switches += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        switches += [f"--user-data-dir={tmp_path / profile}", "--virtual-time-budget=2000", "--dump-dom"]
        done = subprocess.run(
            [program, *switches, file.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout

    return load


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a local web server and the list of the paths requested from it."""
    requested: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            self.send_error(404)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}", requested
        httpd.shutdown()


@pytest.mark.browser
def test_a_browser_runs_no_other_script_and_sends_no_request(
    tmp_path: Path, chromium: Callable[[Path, str], str], server: tuple[str, list[str]]
) -> None:
    address, requested = server
    hostile = f'{SCRIPT}"><img src={address}/pixel onerror="document.title=\'PWNED\'">'
    verdicts = {**judged(), "distributions": {"quality/gopher_short_doc": {hostile: bins([4, 60])}}}
    documents = {DOCUMENTS: {hostile: 3}, "mixed_languages": {f"en+{hostile}": 1}}
    figures = {"documents": documents, "verdicts": verdicts}
    report = Path(write_report(make_run(tmp_path / "harbour", records=crawl(hostile), figures=figures), None))
    title = "<title>harbour · Penstock report</title>"
    shown = chromium(report, "escaped")
    assert title in shown
    assert "All 21 consistency checks" in words_of(shown)
    assert requested == []
    # The policy is a second defense: it holds if the escaping is removed ...
    raw = html.unescape(report.read_text())
    (tmp_path / "raw.html").write_text(raw)
    assert title in chromium(tmp_path / "raw.html", "policy")
    assert requested == []
    # ... and without both the page attacks, so this test would detect a hole.
    (tmp_path / "bare.html").write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", raw))
    assert "<title>PWNED</title>" in chromium(tmp_path / "bare.html", "bare")
    assert set(requested) == {"/pixel"}


def test_a_union_has_a_report(tmp_path: Path) -> None:
    """It has no table `documents`, and its counts can name a rule that left documents out of its members."""
    members = [make_tiny_dataset(tmp_path / name, {"web": 20}, suffix=name) for name in ("a", "b")]
    for member in members:
        folder, manifest = open_table(member, "tokens")
        content = manifest.content.model_dump(mode="json")
        content["counts"] |= {"rows_in": content["counts"]["rows_in"] + 3, "dropped": {"tokens/mix": 3}}
        made = make_manifest(content, manifest.run.model_dump(mode="json"), "tokens")
        folder.write_atomic(MANIFEST_NAME, canonical_json(made.model_dump(mode="json")))
    union = Store(str(tmp_path / "union"))
    write_union(union, members)
    page = Path(write_report(union, None)).read_text()
    assert "1 rules dropped 6 rows" in words_of(page)
    assert "Shares are relative to all" not in page


@pytest.mark.parametrize("after", [False, True])
def test_a_report_that_began_before_a_takedown_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    run = make_run(tmp_path / "run")
    write = Store.write_atomic

    def suspended(store: Store, name: str, data: bytes) -> None:
        if name == "report.html" and after:
            assert take_down(run.uri, doc=[identifier(40).hex()]) == 0
        write(store, name, data)

    def slow(template: str, values: Mapping[str, Any]) -> bytes:
        if not after:
            assert take_down(run.uri, doc=[identifier(40).hex()]) == 0
        return b""

    monkeypatch.setattr(Store, "write_atomic", suspended)
    monkeypatch.setattr(report_page, "render", slow)
    with pytest.raises(
        ContractError, match=r"same tables at the end .*, got other versions of .*clean, .*`penstock rep"
    ):
        write_report(run, None)
    assert not run.exists("report.html")


def test_a_report_is_refused_while_a_takedown_is_not_finished(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.write_atomic(PENDING_NAME, b"{}")
    with pytest.raises(ConfigError, match=r"expected no unfinished takedown, got one, .*`penstock takedown .*/run`"):
        write_report(run, None)
    assert not run.exists("report.html")


def test_tables_that_a_run_adds_meanwhile_are_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run")
    tables = read_run(run).tables
    write_run(run, RunFile(tables={name: tables[name] for name in ("documents", "text")}))
    render = report_page.render

    def slow(template: str, values: Mapping[str, Any]) -> bytes:
        write_run(run, RunFile(tables=tables))
        return render(template, values)

    monkeypatch.setattr(report_page, "render", slow)
    assert write_report(run, None) == f"{run.uri}/report.html"
