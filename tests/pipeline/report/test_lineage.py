"""The lineage in the report: positions of dots and links, the text beside them, and the rendering in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.lineage.graph import LineageBuilder, Node
from pipeline.report.lineage import EDGE, LINE, ROW, TRACK, Drawing, draw, lineage_drawing
from pipeline.report.page import write_report
from schemas.manifest import open_table
from schemas.storage import Store
from tests.support.lineage_run import edit, lineage_run
from tests.support.report_run import SCRIPT, words_of


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """Return a run whose lineage is known."""
    return lineage_run(tmp_path / "run")


def drawing(links: str, **notes: tuple[str, ...]) -> Drawing:
    """Return the drawing of nodes of one letter; `links` is for example `ab bc`."""
    growing = LineageBuilder()
    for key in sorted({*links.replace(" ", "")}):
        growing.add(Node(key, "table", key, key * 64, {"rows": 1}, notes=notes.get(key, ())))
    growing.links += [(link[0], link[1]) for link in links.split()]
    return draw(growing.done())


def tracks(links: str) -> dict[str, int]:
    """Return the track of every node."""
    return {stop.title: (stop.x - EDGE) // TRACK for stop in drawing(links).stops}


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ("ab bc cd", {"a": 0, "b": 0, "c": 0, "d": 0}),
        ("ab ac bd cd", {"a": 0, "b": 0, "c": 1, "d": 0}),
        ("ab ac bd de", {"a": 0, "b": 0, "c": 1, "d": 0, "e": 0}),  # c leads nowhere, so it gets a side track
        ("ac bc cd", {"a": 0, "b": 1, "c": 0, "d": 0}),
        ("ab bc ac", {"a": 0, "b": 0, "c": 0}),  # the path from a over b implies the link from a to c
        ("ab ac ad be ce de", {"a": 0, "b": 0, "c": 1, "d": 2, "e": 0}),
    ],
)
def test_tracks(links: str, expected: dict[str, int]) -> None:
    assert tracks(links) == expected


def test_a_straight_link_is_a_line_and_another_bends_once() -> None:
    picture = drawing("ab ac bd cd")
    x0, x1, half = EDGE, EDGE + TRACK, ROW // 2
    assert picture.paths[0] == f"M{x0} 15V{15 + ROW}"
    assert picture.paths[1] == f"M{x0} 15C{x0} {15 + half} {x1} 15 {x1} {15 + half}V{15 + 2 * ROW}"
    assert picture.left == EDGE + 2 * TRACK
    assert picture.height > picture.stops[-1].texts[-1].y


def test_rows_grow_with_their_notes() -> None:
    picture = drawing("ab bc", a=("one",), b=("one", "two", "three"))
    assert [stop.y for stop in picture.stops] == [15, 15 + ROW + LINE, 15 + 2 * ROW + 3 * LINE]
    assert [text.words for text in picture.stops[1].texts] == ["1 rows", "", "one", "two"]
    assert "three" in picture.stops[1].hint


def test_an_empty_run_has_an_empty_drawing(tmp_path: Path) -> None:
    Store(str(tmp_path)).write_atomic("run.json", b"{}")
    picture = lineage_drawing(Store(str(tmp_path)))
    assert (picture.stops, picture.paths, picture.height) == ((), (), 0)
    text = words_of(Path(write_report(Store(str(tmp_path)), None)).read_text())
    assert "The run has no table yet, so it has no lineage." in text


def test_the_report_shows_every_node_with_digest_counts_and_time(run: Store) -> None:
    page = Path(write_report(run, None)).read_text()
    section = re.findall(r'<section id="lineage".*?</section>', page, re.DOTALL)[0]
    text = words_of(section)
    dedup = open_table(run, "dedup")[1].digest
    for expected in (
        f"dedup {dedup[:12]} 37 rows, 20 kept,",
        "2026-01-01 00:00:00 UTC · code 0.1.0",
        "files of the crawl",
        "2 files, 52 kB",
        "rewound from step 8 to 6",
        "2 samples skipped",
        "spike at step 8",
        "1,000 parameters, 12 steps, 768 tokens",
        "12 steps, loss 4.0000",
    ):
        assert expected in text
    assert dedup in section  # the whole digest is in the tooltip
    assert 'href="#lineage"' in page
    assert "The lineage is broken" not in text
    assert Path(write_report(run, None)).read_text() == page


def test_a_broken_chain_is_marked_in_the_report(run: Store) -> None:
    edit(run, "dedup", lambda content: content["figures"].update(bait=1))
    (mark,) = [stop for stop in lineage_drawing(run).stops if stop.style == "broken"]
    assert mark.title == "dedup"
    text = words_of(Path(write_report(run, None)).read_text())
    assert "The lineage is broken. 1 check failed: dedup/v-0000000071a9: expected" in text


def test_hostile_words_are_escaped(run: Store) -> None:
    run.write_atomic("train/skips.txt", f"96  # {SCRIPT}\n97\n".encode())
    page = Path(write_report(run, None)).read_text()
    assert page.lower().count("<script") == 1  # the script of the page itself
    assert "&lt;script&gt;" in page


@pytest.mark.browser
def test_a_browser_lays_it_out_in_light_and_dark(run: Store, tmp_path: Path) -> None:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no chromium on the PATH")
    report = Path(write_report(run, None))
    # This copy of the report has no policy, and a script that measures what the browser has laid out.
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report.read_text())
    (tmp_path / "measured.html").write_text(page.replace("</body>", f"<script>{MEASURE}</script></body>"))
    layouts = {}
    for scheme, name in ((0, "dark"), (1, "light")):
        switches = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        switches += [f"--blink-settings=preferredColorScheme={scheme}", f"--user-data-dir={tmp_path / name}"]
        command = [program, *switches, "--dump-dom", (tmp_path / "measured.html").as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        layouts[name] = json.loads(re.findall(r"<title>(\{.*?\})</title>", shown)[0])
    for measured in layouts.values():
        assert measured["stops"] == len(lineage_drawing(run).stops)
        assert measured["overlaps"] == 0
        assert measured["widest"] <= 680
    shades = {name: (measured["ink"], measured["paper"]) for name, measured in layouts.items()}
    assert shades["light"] == ("rgb(27, 34, 38)", "rgb(252, 252, 251)")
    assert shades["dark"] == ("rgb(228, 233, 235)", "rgb(16, 21, 23)")


MEASURE = """
document.querySelectorAll("details").forEach(details => { details.open = true; });
const svg = document.querySelector("svg.lineage"), box = svg.getBoundingClientRect();
const boxes = [...svg.querySelectorAll("text")].filter(t => t.textContent.trim()).map(t => t.getBoundingClientRect());
const dots = [...svg.querySelectorAll("circle")].map(c => c.getBoundingClientRect());
const hit = (a, b) => a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom;
let overlaps = 0;
const all = [...boxes, ...dots];
all.forEach((a, i) => all.slice(i + 1).forEach(b => { overlaps += hit(a, b) ? 1 : 0; }));
document.title = JSON.stringify({
  stops: dots.length, overlaps, widest: Math.max(...boxes.map(b => b.right)) - box.left,
  ink: getComputedStyle(svg.querySelector(".name")).fill, paper: getComputedStyle(document.body).backgroundColor,
});
"""
