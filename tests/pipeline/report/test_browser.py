"""The pages of the report in a real browser: nothing is cut off, tables sort, numbers show their commands."""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.report.compare import write_comparison
from pipeline.report.live import LiveServer
from pipeline.report.page import ReportOptions, write_report
from schemas.storage import Store
from tests.support.browser import browser as browser  # a fixture
from tests.support.report_run import SCRIPT, crawl, make_run, metrics_line, whole_run
from tests.support.tiny_progress import progress, step

pytestmark = pytest.mark.browser

OVERFLOW = """() => {
  document.querySelectorAll("details").forEach(details => { details.open = true; });
  const cut = [];
  document.querySelectorAll("table").forEach(table => {
    const box = table.closest(".wide, .card, figure");
    const scrolls = box && getComputedStyle(box).overflowX === "auto";
    const room = (box || document.body).clientWidth + 1;
    if (!scrolls && table.scrollWidth > room) cut.push("table " + table.innerText.slice(0, 40));
    table.querySelectorAll("td, th").forEach(cell => {
      const clips = getComputedStyle(cell).overflowX !== "visible" && cell.scrollWidth > cell.clientWidth + 1;
      const spills = !cell.querySelector("svg") && cell.scrollWidth > cell.clientWidth + 2;
      if (clips || spills) cut.push("cell " + cell.innerText.slice(0, 40));
    });
  });
  const wide = [...document.querySelectorAll(".wide")].filter(box => box.scrollWidth > box.clientWidth + 1).length;
  return { page: document.documentElement.scrollWidth, window: innerWidth, cut, wide };
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the addresses of the report of the synthetic run, and of its comparison with another run."""
    folder = tmp_path_factory.mktemp("report")
    run = whole_run(folder / "harbour")
    other = make_run(folder / "bay", records=crawl()[:-2])
    compared = write_comparison(("harbour", run), ("bay", other), Store(str(folder)), "compare.html")
    return {"report": Path(write_report(run)).as_uri(), "comparison": Path(compared).as_uri()}


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("name", ["report", "comparison"])
def test_nothing_is_cut_off(browser: Any, pages: dict[str, str], name: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(pages[name])
    measured = page.evaluate(OVERFLOW)
    page.close()
    assert measured["page"] <= measured["window"] == width
    assert measured["cut"] == []
    if width == 1200:
        assert measured["wide"] == 0  # no table needs its scroll bar on a laptop


@pytest.mark.parametrize("name", ["report", "comparison"])
def test_the_policy_blocks_nothing_of_the_page(browser: Any, pages: dict[str, str], name: str) -> None:
    page = browser.new_page()
    page.add_init_script(
        "window.blocked = []; addEventListener('securitypolicyviolation', event => "
        "window.blocked.push(event.violatedDirective + ' ' + event.blockedURI))"
    )
    page.goto(pages[name])
    page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    page.locator("table.sortable th button").first.click()
    assert page.evaluate("blocked") == []
    # A hostile link and a hostile handler are blocked, which shows that violations are counted.
    page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', "
        '\'<a id=trap href="javascript:document.title=1">x</a><img src=x onerror="document.title=1">\')'
    )
    page.click("#trap")
    page.wait_for_timeout(200)
    assert "Penstock" in page.title()
    assert len(page.evaluate("blocked")) >= 2
    page.close()


def test_a_click_or_a_key_sorts_a_table(browser: Any, pages: dict[str, str]) -> None:
    page = browser.new_page()
    page.goto(pages["report"])
    heading = page.locator("#drops table.sortable th").filter(has_text="Documents")
    column = "[...document.querySelector('#drops tbody').rows].map(row => row.cells[3].innerText)"
    assert page.evaluate(column) == ["6", "5", "4", "4", "3", "3", "3", "2", "2", "1"]
    heading.get_by_role("button").press("Enter")
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert page.evaluate(column) == ["1", "2", "2", "3", "3", "3", "4", "4", "5", "6"]
    page.locator("#drops table.sortable th").filter(has_text="Rule").get_by_role("button").click()
    assert heading.get_attribute("aria-sort") is None
    assert page.locator("#drops tbody code").first.inner_text() == "c4_lorem_ipsum"
    page.close()


def test_a_number_shows_its_command(browser: Any, pages: dict[str, str]) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(pages["report"])
    number = page.locator("#drops tbody button.rows").first
    command = number.get_attribute("data-command")
    assert command.endswith("--where 'drop_stage = quality and drop_rule = gopher_short_doc' --limit 6")
    number.click()
    card = page.get_by_role("dialog")
    assert card.locator("code").inner_text() == command
    box = card.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= page.viewport_size["width"]
    card.get_by_role("button").click()
    page.get_by_text("Copied", exact=True).wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == command
    page.keyboard.press("Escape")
    assert not card.is_visible()
    assert page.evaluate("document.activeElement.dataset.command") == command
    context.close()


def test_a_link_opens_the_section_of_its_target(browser: Any, pages: dict[str, str]) -> None:
    page = browser.new_page()
    page.goto(pages["report"])
    assert not page.locator("#costs table").is_visible()
    page.locator("nav a[href='#costs']").click()
    page.locator("#costs table").wait_for(state="visible")
    page.get_by_role("button", name="Open all sections").click()
    assert page.evaluate("[...document.querySelectorAll('details.fold')].every(fold => fold.open)")
    page.close()


def test_without_javascript_the_commands_are_titles(browser: Any, pages: dict[str, str]) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(pages["report"])
    number = page.locator("#drops tbody button.rows").first
    assert number.get_attribute("title") == number.get_attribute("data-command")
    page.locator("#costs summary").first.click()
    assert page.locator("#costs table").is_visible()
    context.close()


CONTRAST = """() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const part = v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
    return .2126 * part(r) + .7152 * part(g) + .0722 * part(b);
  };
  const ground = node => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
  };
  document.querySelectorAll("details").forEach(details => { details.open = true; });
  let worst = [21, ""];
  document.querySelectorAll("p, td, th, summary, a, code, small, dt, dd, li, button, i, b").forEach(node => {
    if (![...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim())) return;
    const pair = [light(parse(getComputedStyle(node).color)), light(ground(node))].sort((a, b) => b - a);
    const ratio = (pair[0] + .05) / (pair[1] + .05);
    if (ratio < worst[0]) worst = [ratio, node.outerHTML.slice(0, 80)];
  });
  return worst;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(browser: Any, pages: dict[str, str], scheme: str) -> None:
    page = browser.new_page(color_scheme=scheme)
    page.goto(pages["report"])
    ratio, node = page.evaluate(CONTRAST)
    page.close()
    assert ratio >= 4.5, node


# --------------------------------------------------------------------------------------------------------- live page


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Store, str]]:
    """Yield a run folder that a command has just started to fill, and the address of its live page."""
    run = Store(str(tmp_path / "run"))
    run.write_atomic("progress.json", progress([step("documents", "running", rows=10, parts=1, total_parts=4)]))
    server = LiveServer(run, 0, ReportOptions())
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    yield run, server.address
    server.close()
    thread.join()


def test_the_live_page_follows_the_run(browser: Any, live: tuple[Store, str], tmp_path: Path) -> None:
    run, address = live
    page = browser.new_page()
    page.goto(address)
    page.get_by_text("Running", exact=True).wait_for()
    row = page.locator("#steps tr").first
    assert row.inner_text().split() == ["documents", "documents", "work", "running", "10", "5/s", "0:00:02", "0:00:06"]
    assert row.locator(".track span").evaluate("bar => bar.style.width") == "25%"
    assert not page.locator("#report").is_visible()
    dropped = {f"quality/{SCRIPT}": 7, "source/not_a_page": 9, "dedup/dropped_before": 5, "extract/no_text": 0}
    done = step("documents", "done", rows=1234, kept=1218, dropped=dropped)
    run.write_atomic("progress.json", progress([done, step("verdicts", "running", total_bytes=200, bytes=50)]))
    page.get_by_text("1,218 documents are kept by documents so far.").wait_for()
    assert [text.split() for text in page.locator("#rules tr").all_inner_texts()] == [
        ["source/not_a_page", "9"],
        [*f"quality/{SCRIPT}".split(), "7"],
    ]
    late = (datetime.now(UTC) - timedelta(seconds=90)).isoformat()
    run.write_atomic("progress.json", progress([done], updated=late))
    page.get_by_text("No update", exact=True).wait_for()
    assert "the command may have been killed" in page.locator("#when").inner_text()
    run.write_atomic("progress.json", progress([done], state="failed", message="x: expected a, got b. Fix c."))
    page.get_by_text("x: expected a, got b. Fix c.").wait_for()
    make_run(Path(run.uri))
    run.write_atomic("progress.json", progress([done], state="finished"))
    page.get_by_role("link", name="Open the report", exact=True).wait_for()
    page.get_by_role("link", name="Open the report", exact=True).click()
    page.locator("#funnel").wait_for()
    assert page.title() == "run · Penstock report"
    page.locator("#drops table.sortable th").filter(has_text="Rule").get_by_role("button").click()
    assert page.locator("#drops tbody code").first.inner_text() == "c4_lorem_ipsum"
    page.close()


def test_the_live_page_shows_the_loss_of_a_training_run(browser: Any, live: tuple[Store, str]) -> None:
    run, address = live
    page = browser.new_page(viewport={"width": 390, "height": 900})
    lines = [json.dumps(metrics_line(number)) + "\n" for number in range(1, 21)]
    run.write_atomic("train/metrics.jsonl", "".join(lines[:10]).encode())
    page.goto(address)
    page.locator("#step").get_by_text("10").wait_for()
    points = page.locator("#curve polyline").first.get_attribute("points").split()
    assert (len(points), points[0].split(",")[0], points[-1].split(",")[0]) == (9, "0.0", "1000.0")  # one was skipped
    run.write_atomic("train/metrics.jsonl", "".join(lines).encode())
    page.locator("#step").get_by_text("20").wait_for()
    assert page.locator("#loss").inner_text() == "6.0000"
    assert page.locator("#curve circle").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()
