"""The web server of `browse`: its token, host, methods and bodies, and the page in a real browser with hostile text."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import main
from jobs.verbs.browse import open_run_of
from pipeline.browse import server as module
from pipeline.browse.server import FILES, POLICY, TOKEN_HEADER, BrowseServer, to_json_bytes
from tests.support.browse_run import (
    ADDRESS,
    COPY,
    CUT,
    HOSTILE,
    IMAGE,
    PAGES,
    PERSONAL,
    SCRIPT,
    identifier,
    make_browse_run,
)
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that every test reads."""
    folder = tmp_path_factory.mktemp("served") / "harbour"
    make_browse_run(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[BrowseServer]:
    """A running server."""
    with BrowseServer(open_run_of(str(folder)), 0) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def ask(
    server: BrowseServer, path: str, method: str = "GET", body: bytes | None = None, **headers: str | None
) -> tuple[int, dict[str, str], bytes]:
    """Send a request with the token; a header of None is left out, `_` in a name stands for `-`."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    sent = {TOKEN_HEADER: server.token, "Content-Type": "application/json"} if body is not None else {}
    sent = {TOKEN_HEADER: server.token} | sent | {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, {name: value for name, value in sent.items() if value is not None})
    response = connection.getresponse()
    answer = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return answer


def value_of(server: BrowseServer, path: str, **options: Any) -> Any:
    """The JSON value of a successful request."""
    status, headers, body = ask(server, path, **options)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    return json.loads(body)


def error_of(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    """The status and message of a refused request."""
    return answer[0], json.loads(answer[2])["error"]


NO_TOKEN = {"X_Penstock_Token": None}


# ------------------------------------------------------------------------------------------------------------ the token


def test_the_first_request_sets_the_cookie_that_opens_everything(server: BrowseServer) -> None:
    assert server.url == f"http://127.0.0.1:{server.server_port}/?token={server.token}"
    status, headers, body = ask(server, f"/?token={server.token}", **NO_TOKEN)
    assert status == 200
    assert body.startswith(b"<!DOCTYPE html>")
    cookie = f"penstock_{server.server_port}={server.token}"
    assert headers["Set-Cookie"] == f"{cookie}; HttpOnly; SameSite=Strict; Path=/"
    assert server.token.encode() not in body
    for path in (*FILES, "/api/run"):
        assert ask(server, path, **NO_TOKEN, Cookie=f"other=1; {cookie}")[0] == 200


@pytest.mark.parametrize("path", [*FILES, "/api/run", "/api/documents", "/api/limits", "/no/such/page"])
@pytest.mark.parametrize("cookie", [None, "penstock=x", "penstock_{port}=wrong", "penstock_{port}=é", "=;;\x01"])
def test_nothing_is_answered_without_the_token(server: BrowseServer, path: str, cookie: str | None) -> None:
    sent = None if cookie is None else cookie.replace("{port}", str(server.server_port))
    status, message = error_of(ask(server, f"{path}?token=wrong", **NO_TOKEN, Cookie=sent))
    assert (status, message.split(",")[0]) == (403, "Expected the token of this session")


def test_the_token_in_the_address_opens_the_page_only(server: BrowseServer) -> None:
    assert ask(server, f"/api/run?token={server.token}", **NO_TOKEN)[0] == 403
    assert ask(server, f"/page.js?token={server.token}", **NO_TOKEN)[0] == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "localhost.:{port}"]
)
def test_other_host_names_are_refused(server: BrowseServer, host: str) -> None:
    status, message = error_of(ask(server, "/api/run", Host=host.replace("{port}", str(server.server_port))))
    assert (status, message.split(",")[0]) == (403, "Expected the host 127.0.0.1")


def test_localhost_is_a_name_of_the_host(server: BrowseServer) -> None:
    assert ask(server, "/api/run", Host=f"LOCALHOST:{server.server_port}")[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_requests_of_other_pages_are_refused(server: BrowseServer, headers: dict[str, str]) -> None:
    assert error_of(ask(server, "/api/run", **headers)) == (
        403,
        "Expected a request of this page, got one of another site.",
    )


def test_the_server_listens_on_loopback_only(server: BrowseServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


# --------------------------------------------------------------------------------------------------- methods and bodies


def test_every_answer_has_the_policy(server: BrowseServer) -> None:
    for answer in (ask(server, "/"), ask(server, "/api/run"), ask(server, "/none"), ask(server, "/", **NO_TOKEN)):
        headers = answer[1]
        assert headers["Content-Security-Policy"] == POLICY
        assert "script-src 'self'; style-src 'self'" in POLICY
        assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
        assert (headers["Referrer-Policy"], headers["X-Frame-Options"]) == ("no-referrer", "DENY")
        assert headers["Server"] == "penstock"
    page = ask(server, "/")[2].decode()
    (meta,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page)
    assert f"{meta}; frame-ancestors 'none'" == POLICY


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "X"])
def test_other_methods_are_refused(server: BrowseServer, method: str) -> None:
    status, headers, _ = ask(server, "/api/run", method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD, POST")


def test_head_has_the_headers_only(server: BrowseServer) -> None:
    status, headers, body = ask(server, "/page.css", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) == len(ask(server, "/page.css")[2]) > 1000


@pytest.mark.parametrize(
    "path",
    [
        "/../server.py",
        "/server.py",
        "/%2e%2e/server.py",
        "/page.html",
        "//etc/passwd",
        "/page.js/",
        "/api",
        "/api/run/..",
    ],
)
def test_only_the_files_of_the_page_are_served(server: BrowseServer, path: str) -> None:
    assert error_of(ask(server, path)) == (404, "There is no such page.")


def test_huge_and_broken_addresses_are_refused(server: BrowseServer) -> None:
    assert ask(server, f"/api/documents?where={'x' * 20_000}")[0] == 414
    assert ask(server, f"/api/documents?where={'x' * 70_000}")[0] == 414
    assert ask(server, "/api/documents?" + "&".join(f"a{n}=1" for n in range(200)))[0] == 400
    assert ask(server, "/api/run", X_Long="x" * 70_000)[0] == 431


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/api/documents?where=nothing+%3D+1", "got 'nothing'"),
        ("/api/documents?limit=-1", "limit: expected a whole number from 0 to 200, got '-1'"),
        ("/api/documents?limit=9999999999999999999999", "limit: expected a whole number from 0 to 200"),
        ("/api/documents?from=x", "from: expected PART.ROW, such as 0.17, got 'x'"),
        ("/api/document?doc=12", "doc: expected 32 hex digits, got '12'"),
        (f"/api/document?doc={'0' * 32}", "which no row of `documents` has"),
        ("/api/compare?a=12&b=12", "a: expected 32 hex digits"),
        ("/api/cluster", "cluster: expected 32 hex digits, got ''"),
    ],
)
def test_wrong_parameters_are_explained(server: BrowseServer, path: str, message: str) -> None:
    status, text = error_of(ask(server, path))
    assert status == 400
    assert message in text


WHATIF = json.dumps({"settings": {"quality.min_words": 0}}).encode()


def test_a_what_if_needs_the_token_in_the_header(server: BrowseServer) -> None:
    while value_of(server, "/api/limits")["loading"]:
        pass
    totals = value_of(server, "/api/whatif", method="POST", body=WHATIF)["totals"]
    assert totals["after"]["documents"] > totals["before"]["documents"] == 34
    cookie = f"penstock_{server.server_port}={server.token}"
    for headers in (NO_TOKEN, {**NO_TOKEN, "Cookie": cookie}, {"X_Penstock_Token": "wrong", "Cookie": cookie}):
        assert ask(server, "/api/whatif", "POST", WHATIF, **headers)[0] == 403
    assert ask(server, f"/api/whatif?token={server.token}", "POST", WHATIF, **NO_TOKEN)[0] == 403


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (WHATIF, {"Content_Type": "text/plain"}, 415),
        (WHATIF, {"Content_Type": "application/x-www-form-urlencoded"}, 415),
        (WHATIF, {"Content_Type": "multipart/form-data; boundary=application/json"}, 415),
        (WHATIF, {"Content_Type": None}, 415),
        (WHATIF, {"Content_Length": "-1"}, 411),
        (WHATIF, {"Content_Length": "999999999999"}, 413),
        (WHATIF, {"Transfer_Encoding": "chunked"}, 411),
        (b" " * 70_000, {}, 413),
        (b"{", {}, 400),
        (b"[" * 60_000, {}, 400),
        (b"\xff\xfe", {}, 400),
        (b"[]", {}, 400),
        (b'{"settings": {"quality.min_words": NaN}}', {}, 400),
        (b'{"settings": {"spark.master": 1}}', {}, 400),
        (b'{"settings": {}, "more": 1}', {}, 400),
    ],
)
def test_hostile_bodies_are_refused(
    server: BrowseServer, body: bytes, headers: dict[str, str | None], status: int
) -> None:
    assert ask(server, "/api/whatif", "POST", body, **headers)[0] == status


def test_posts_to_other_paths_are_refused(server: BrowseServer) -> None:
    assert ask(server, "/api/documents", "POST", WHATIF)[0] == 404


def test_json_is_escaped_for_html() -> None:
    assert to_json_bytes({"a": "<script>&\u2028é"}) == b'{"a":"\\u003cscript\\u003e\\u0026\\\\u2028\xc3\xa9"}'
    assert json.loads(to_json_bytes({"lone \ud800": ["\x1b]0;\u202e\n"]})) == {r"lone \ud800": ["\\x1b]0;\\u202e\n"]}


def test_an_unexpected_error_is_shown_in_the_terminal(
    server: BrowseServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(parameters: object) -> dict[str, Any]:
        raise KeyError("secret")

    monkeypatch.setitem(server.api, "/api/run", fail)
    status, message = error_of(ask(server, "/api/run"))
    assert (status, message) == (500, "An unexpected error: KeyError. The terminal of `penstock browse` shows it.")
    assert "KeyError: 'secret'" in capfd.readouterr().err


def test_a_client_that_leaves_is_no_error(server: BrowseServer, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port)) as client:
        client.sendall(b"GET /api/run HTTP/1.1\r\nHost: 127.0.0.1\r\n")
    assert ask(server, "/api/run")[0] == 200
    assert capfd.readouterr().err == ""


def test_requests_at_the_same_time(server: BrowseServer) -> None:
    values: list[Any] = []
    threads = [
        threading.Thread(target=lambda: values.append(value_of(server, "/api/documents?limit=99&verdict=kept")))
        for _ in range(3 * module.MAX_REQUESTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(values) == len(threads)
    assert all(value == values[0] for value in values)
    assert len(values[0]["rows"]) == 33


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_command_serves_until_it_is_interrupted(folder: Path) -> None:
    command = [sys.executable, "-m", "jobs.cli", "browse", str(folder), "--no-open"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline().strip()
        address, _, token = line.partition("/?token=")
        connection = HTTPConnection(address.removeprefix("http://"), timeout=30)
        connection.request("GET", "/api/run", headers={TOKEN_HEADER: token})
        facts = json.loads(connection.getresponse().read())
        assert (facts["name"], facts["rows"]) == ("harbour", PAGES)
        connection.close()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, f"\npenstock: the page of {folder} is no longer served\n", "")


def test_a_port_in_use_is_explained(folder: Path, server: BrowseServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["browse", str(folder), "--no-open", "--port", str(server.server_port)]) == 2
    assert f"--port {server.server_port}: expected a free port, got one that cannot be used" in capsys.readouterr().err
    assert main(["browse", str(folder), "--no-open", "--port", "70000"]) == 2
    assert "--port: expected 0 to 65535, got 70000" in capsys.readouterr().err
    assert main(["browse", str(folder / "none"), "--no-open"]) == 2
    assert "expected a run folder, got no such folder" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no chromium on the PATH")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser: Any, server: BrowseServer) -> Iterator[Any]:
    """The open page; a script error, a blocked script or a request to another host fails the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    opened.on("request", lambda request: problems.append(request.url) if "127.0.0.1" not in request.url else None)
    opened.goto(server.url)
    opened.wait_for_selector("#lists tbody tr[data-doc]")
    yield opened
    context.close()
    assert problems == []


def wait_until(tab: Any, expression: str) -> None:
    """Wait until an expression is true. The policy of the page forbids to evaluate it there again and again."""
    end = time.monotonic() + 90
    while not tab.evaluate(expression):
        assert time.monotonic() < end, expression
        tab.wait_for_timeout(50)


def open_in(tab: Any, number: int) -> None:
    """Open a document from the list."""
    tab.click(f'#lists tr[data-doc="{identifier(number).hex()}"] a')
    wait_until(tab, f"document.querySelector('#document .id')?.textContent === '{identifier(number).hex()}'")


@pytest.mark.browser
def test_search_read_and_compare_in_a_browser(tab: Any, server: BrowseServer) -> None:
    assert tab.title() == "harbour · Penstock browse"
    assert "token" not in tab.url
    assert tab.inner_text("#run-facts") == "33 documents kept of 48 records in 2 parts"
    assert "47 documents · scanned 2 of 2 parts, 48 of 48 rows" in tab.inner_text(".list-foot")
    # Hits are marked in the list and in the text, next to the cuts.
    tab.fill("#contains", "javascript")
    tab.press("#contains", "Enter")
    wait_until(tab, "document.querySelectorAll('#lists tbody tr[data-doc]').length === 1")
    assert tab.inner_text("#lists .snippet mark") == "javascript"
    open_in(tab, CUT)
    assert tab.inner_text("#judgement b") == "Kept: no rule dropped this document."
    assert "Please enable" in tab.inner_text("#part > .text .cut >> nth=0")
    assert tab.get_attribute("#part > .text mark", "class") == "cut hit"
    style = "getComputedStyle(document.querySelector('#part > .text .cut')).textDecorationLine"
    assert tab.evaluate(style) == "line-through"
    tab.click('[data-part="clean"]')
    assert "javascript" not in tab.inner_text("#part")
    # A condition, and the copies of a document side by side.
    tab.click('button[type="reset"]')
    tab.fill("#where", "drop_rule = near_duplicate")
    tab.press("#where", "Enter")
    wait_until(tab, "document.querySelectorAll('#lists tbody tr[data-doc]').length === 1")
    open_in(tab, COPY)
    assert "near_duplicate of the stage dedup" in tab.inner_text("#judgement b")
    tab.click('[data-part="copies"]')
    tab.wait_for_selector("#comparison .pair")
    for kind, words in (("removed", ["haven", "stream."]), ("added", ["harbour", "signal."])):
        assert [text.strip() for text in tab.locator(f"#comparison .pair .{kind}").all_inner_texts()] == words
    # A link opens the same document in a new page.
    link = tab.url
    tab.goto("about:blank")
    tab.goto(link)
    tab.wait_for_selector("#judgement")
    assert tab.inner_text("#document .id") == identifier(COPY).hex()
    # Signals have meanings, and placeholders are marked.
    tab.goto(f"{link.partition('#')[0]}#doc={identifier(PERSONAL).hex()}")
    wait_until(tab, f"document.querySelector('#document .id')?.textContent === '{identifier(PERSONAL).hex()}'")
    tab.click('[data-part="clean"]')
    assert tab.locator("#part .text .pii").all_inner_texts() == ["<EMAIL>"]
    assert ADDRESS not in tab.inner_text("#part")
    tab.click('[data-part="signals"]')
    assert "words with at least one character that is not punctuation" in tab.inner_text("#part")


@pytest.mark.browser
def test_what_is_typed_right_after_a_reset_stays_in_a_browser(tab: Any) -> None:
    tab.fill("#where", "language = de")
    tab.press("#where", "Enter")
    wait_until(tab, "location.hash.includes('language')")
    # Both in one task of the page: the event of a changed address comes later.
    tab.evaluate("""() => {
        document.querySelector('button[type="reset"]').click();
        document.querySelector('#where').value = 'drop_rule = near_duplicate';
    }""")
    tab.wait_for_timeout(200)
    assert tab.input_value("#where") == "drop_rule = near_duplicate"
    tab.press("#where", "Enter")
    wait_until(tab, "document.querySelectorAll('#lists tbody tr[data-doc]').length === 1")
    # The way back shows each state.
    tab.go_back()
    wait_until(tab, "document.querySelector('#where').value === ''")
    tab.go_back()
    wait_until(tab, "document.querySelector('#where').value === 'language = de'")
    tab.go_forward()
    wait_until(tab, "document.querySelector('#where').value === ''")


@pytest.mark.browser
def test_kept_beside_dropped_random_and_errors_in_a_browser(tab: Any) -> None:
    tab.check("#beside")
    wait_until(tab, "document.querySelectorAll('#lists .list').length === 2")
    for list_, count in ((1, 33), (2, 14)):
        wait_until(tab, f"document.querySelectorAll('#lists .list:nth-child({list_}) tr[data-doc]').length === {count}")
    assert tab.locator("#lists .list >> nth=0 >> td.verdict.dropped").count() == 0
    assert tab.locator("#lists .list >> nth=1 >> td.verdict.dropped").count() == 14
    tab.uncheck("#beside")
    tab.click("#random")
    wait_until(tab, "document.querySelector('.list-foot').textContent.includes('20 random documents of seed 0')")
    first = tab.locator("#lists tr[data-doc] >> nth=0").get_attribute("data-doc")
    tab.click("#random")
    wait_until(tab, "document.querySelector('.list-foot').textContent.includes('of seed 1')")
    assert tab.locator("#lists tr[data-doc] >> nth=0").get_attribute("data-doc") != first
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.id") == "contains"
    tab.click("#columns-menu summary")
    tab.fill("#column-filter", "gopher_num_words")
    tab.check("#columns input >> nth=0")
    wait_until(
        tab, "[...document.querySelectorAll('#lists thead button')].some((b) => b.textContent === 'gopher_num_words')"
    )
    tab.keyboard.press("Escape")
    tab.click("#lists thead button:text-is('gopher_num_words')")
    values = [int(text) for text in tab.locator("#lists tr[data-doc] td:last-child").all_inner_texts()]
    assert values == sorted(values)


@pytest.mark.browser
def test_a_moved_slider_is_answered_in_a_browser(tab: Any) -> None:
    tab.click("#tab-limits")
    tab.wait_for_selector('[data-tile="documents"] dd')
    assert "Counts are exact: all 47 documents with signals are in memory." in tab.inner_text("#sample-note")
    assert tab.inner_text('[data-tile="documents"] dd').split()[0] == "34"
    card = tab.locator('[data-slider="quality.min_words"]')
    assert card.locator("svg rect.here").count() > 0
    card.locator('input[type="range"]').press("Home")
    tab.wait_for_selector('[data-row="quality/gopher_short_doc"] .fewer')
    assert tab.inner_text('[data-tile="documents"] dd').split()[0] != "34"
    command = tab.inner_text("#whatif-command")
    assert command.startswith("penstock whatif ")
    assert command.endswith("--set quality.min_words=0")
    assert tab.locator(".examples a").count() > 5
    card.locator("button").click()
    wait_until(tab, "document.querySelector('[data-tile=documents] dd').textContent.startsWith('34')")


@pytest.mark.browser
def test_hostile_text_is_inert_in_a_browser(tab: Any) -> None:
    row = tab.locator(f'#lists tr[data-doc="{identifier(HOSTILE).hex()}"]')
    assert SCRIPT in row.inner_text()
    open_in(tab, HOSTILE)
    assert SCRIPT in tab.inner_text("#document h2")
    assert IMAGE in tab.inner_text("#part")
    assert tab.locator("#document img, #document script, #lists img, #lists script").count() == 0
    assert tab.title() == "harbour · Penstock browse"
    # The policy is a second defense: even as HTML the text runs no script. The blocked script is reported, so the
    # report is awaited in a page of its own.
    other = tab.context.new_page()
    reports: list[str] = []
    other.on("console", lambda message: reports.append(message.text))
    other.goto(tab.url)
    other.wait_for_selector("#judgement")
    other.evaluate("(html) => { document.querySelector('#part').innerHTML = html; }", IMAGE)
    other.wait_for_timeout(300)
    assert other.title() == "harbour · Penstock browse"
    assert any("Content Security Policy" in text for text in reports)


@pytest.mark.browser
def test_a_narrow_page_shows_the_list_or_the_document(tab: Any) -> None:
    tab.set_viewport_size({"width": 390, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    open_in(tab, CUT)
    assert not tab.is_visible("#lists")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    tab.click(".back")
    tab.wait_for_selector("#lists", state="visible")
    tab.click("#tab-limits")
    tab.wait_for_selector('[data-tile="documents"] dd')
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
