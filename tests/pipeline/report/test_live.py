"""The server of the live page: who may read it, what it returns, and the state that it reads from files."""

import http.client
import json
import threading
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pipeline.report.live import MAX_CURVE_POINTS, LiveCurve, LiveRun, LiveServer, read_progress
from pipeline.report.page import ReportOptions
from schemas.errors import ConfigError, ContractError
from schemas.manifest import RunFile, write_run
from schemas.storage import Store
from tests.support.report_run import make_run, metrics_line, whole_run
from tests.support.tiny_progress import progress, step

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """Return a run folder with a progress file."""
    run = Store(str(tmp_path / "run"))
    run.write_atomic("progress.json", progress([step("documents", "running")], updated=NOW.isoformat()))
    return run


@pytest.fixture
def server(run: Store) -> Iterator[LiveServer]:
    """Yield a running server of that folder."""
    server = LiveServer(run, 0, ReportOptions())
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    yield server
    server.close()
    thread.join()


def ask(
    server: LiveServer,
    path: str = "/",
    token: str | None = None,
    host: str = "127.0.0.1",
    method: str = "GET",
    **headers: str,
) -> http.client.HTTPResponse:
    """Return the response to a request."""
    address = urlsplit(server.address)
    assert address.hostname == "127.0.0.1"
    connection = http.client.HTTPConnection("127.0.0.1", address.port or 0, timeout=10)
    query = f"?token={server.token if token is None else token}"
    connection.request(method, f"{path}{query}", headers={"Host": f"{host}:{address.port}", **headers})
    return connection.getresponse()


def test_the_page_needs_the_token(server: LiveServer) -> None:
    assert server.address.endswith(f"/?token={server.token}")
    assert len(server.token) >= 32
    for path in ("/", "/state", "/report", "/other"):
        for token in ("", "x", server.token[:-1], f"{server.token}x", "%ff"):
            assert ask(server, path, token).status == 403
    assert ask(server).status == 200
    assert ask(server, "/other").status == 404
    assert ask(server, "/../etc/passwd").status == 404


def test_another_host_is_refused(server: LiveServer) -> None:
    hosts = ("attacker.example", "127.0.0.1.attacker.example", "127.0.0.2", "")
    assert [ask(server, host=host).status for host in hosts] == [403] * 4
    assert [ask(server, host=host).status for host in ("127.0.0.1", "localhost")] == [200, 200]
    assert ask(server, host="[").status == 400


def test_a_request_of_another_site_is_refused(server: LiveServer) -> None:
    own = {"Origin": f"http://{urlsplit(server.address).netloc}", "Sec-Fetch-Site": "same-origin"}
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        assert ask(server, "/state", **headers).status == 403
    assert ask(server, "/state", **own).status == 200
    assert ask(server, "/", **{"Sec-Fetch-Site": "cross-site"}).status == 200  # a link to the page


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
def test_only_get_is_allowed(server: LiveServer, method: str) -> None:
    response = ask(server, method=method)
    assert (response.status, response.headers["Allow"]) == (405, "GET")


def test_the_headers_forbid_everything_else(server: LiveServer) -> None:
    response = ask(server)
    policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "connect-src 'self'" in policy
    assert (response.headers["Cache-Control"], response.headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
    assert b"<script>" in response.read()


def test_a_port_in_use_and_another_folder_are_refused(run: Store, server: LiveServer, tmp_path: Path) -> None:
    port = urlsplit(server.address).port or 0
    with pytest.raises(
        ConfigError, match=rf"report --port: expected a free port, got {port}: .*\. Give another --port"
    ):
        LiveServer(run, port, ReportOptions())
    with pytest.raises(ConfigError, match=r"expected a run folder, got no progress\.json and no run\.json\. Start"):
        LiveServer(Store(str(tmp_path)), 0, ReportOptions())


def test_the_report_is_written_on_request(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "verdicts")
    server = LiveServer(run, 0, ReportOptions(address="my run"))
    threading.Thread(target=server.serve, daemon=True).start()
    body = ask(server, "/report").read()
    server.close()
    assert body == (tmp_path / "run" / "report.html").read_bytes()
    assert b"penstock show &#39;my run&#39; --where" in body


def test_the_state_of_a_run(run: Store) -> None:
    live = LiveRun(run, ReportOptions())
    state = live.state(NOW + timedelta(seconds=60))
    assert (state["stale"], state["age"], state["report"], state["problem"], state["name"]) == (
        False,
        60,
        False,
        None,
        "run",
    )
    assert live.state(NOW + timedelta(seconds=61))["stale"]
    for ended in ("finished", "failed", "interrupted"):
        run.write_atomic("progress.json", progress([], updated=NOW.isoformat(), state=ended))
        assert not live.state(NOW + timedelta(hours=9))["stale"]
    write_run(run, RunFile())
    assert live.state(NOW)["report"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"progress\.json: expected JSON, got an error: .*\. Run the command again\."),
        (b"[]", r"progress\.json: expected format 1, got None\. Use the version of penstock that wrote it\."),
        (b'{"format": 2}', r"expected format 1, got 2\."),
        (
            b'{"format": 1}',
            r"got one without command, started, updated, state, steps, updated as ISO 8601 with a zone\.",
        ),
        (progress([{"name": "x"}]), r"got one without steps\.state, steps\.what, steps\.rows, steps\.seconds\."),
        (progress(5), r"got one without steps as a list of objects\."),
        (progress([5]), r"got one without steps as a list of objects\."),
        (progress([], updated="2026-01-01T00:00:00"), r"got one without updated as ISO 8601 with a zone\."),
    ],
)
def test_a_wrong_progress_file_is_described(run: Store, content: bytes, message: str) -> None:
    run.write_atomic("progress.json", content)
    with pytest.raises(ContractError, match=message):
        read_progress(run)
    problem = LiveRun(run, ReportOptions()).state(NOW)["problem"]
    assert "progress.json: expected " in problem


def test_the_state_of_training(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run")
    training = LiveRun(run, ReportOptions()).state(NOW)["training"]
    assert (training["step"], training["steps"], training["loss"], training["seconds_left"]) == (40, 40, 4.0, 0.0)
    assert training["finished"]
    assert (len(training["points"]), training["heldout"]) == (39, [(20, 6.5), (40, 4.5)])


@pytest.mark.parametrize("line", [b"[1]", b'{"step": 1e999}', b'{"step": 1, "loss": 1, "step_seconds": [1]}'])
def test_a_line_that_is_no_step_is_described(tmp_path: Path, line: bytes) -> None:
    run = Store(str(tmp_path))
    run.write_atomic("train/metrics.jsonl", line + b"\n")
    problem = LiveRun(run, ReportOptions()).state(NOW)["problem"]
    assert "metrics.jsonl: expected one complete step per line, got an invalid line" in problem


def test_numbers_that_are_not_finite_are_none(tmp_path: Path) -> None:
    """A browser reads no NaN and no Infinity in JSON."""
    run = Store(str(tmp_path))
    run.write_atomic("train/metrics.jsonl", b'{"step": 1, "loss": NaN, "tokens_per_second": Infinity}\n')
    live = LiveServer(run, 0, ReportOptions())
    thread = threading.Thread(target=live.serve, daemon=True)
    thread.start()
    with urllib.request.urlopen(live.address.replace("/?", "/state?")) as answer:
        state = json.loads(answer.read(), parse_constant=lambda name: pytest.fail(name))
    live.close()
    thread.join()
    assert (state["training"]["loss"], state["training"]["tokens_per_second"]) == (None, None)


def lines(first: int, last: int) -> bytes:
    """Return the metrics of some steps."""
    return "".join(json.dumps(metrics_line(number)) + "\n" for number in range(first, last + 1)).encode()


def test_metrics_are_read_as_they_grow(tmp_path: Path) -> None:
    run, curve = Store(str(tmp_path)), LiveCurve()
    run.write_atomic("train/metrics.jsonl", lines(1, 3) + b'{"step": 4, "lo')
    curve.read(run)
    assert (curve.last["step"], curve.offset, len(curve.shown())) == (3, len(lines(1, 3)), 3)
    run.write_atomic("train/metrics.jsonl", lines(1, 6))
    curve.read(run)
    assert [step for step, _ in curve.shown()] == [1, 2, 3, 4, 5, 6]
    run.write_atomic("train/metrics.jsonl", lines(1, 2))  # a rewind
    curve.read(run)
    assert [step for step, _ in curve.shown()] == [1, 2]
    run.write_atomic("train/metrics.jsonl", lines(1, 2) + b"{}\n")
    with pytest.raises(
        ContractError, match=r"expected one complete step per line, got an invalid line \(KeyError\('step'\)\)"
    ):
        curve.read(run)


def test_a_long_curve_is_averaged(tmp_path: Path) -> None:
    run, curve, number = Store(str(tmp_path)), LiveCurve(), 3 * MAX_CURVE_POINTS
    rows = (json.dumps({"step": step, "loss": float(step)}) for step in range(1, number + 1))
    run.write_atomic("train/metrics.jsonl", ("\n".join(rows) + "\n").encode())
    curve.read(run)
    shown = curve.shown()
    assert len(shown) <= MAX_CURVE_POINTS + 1
    assert (curve.group, shown[0], shown[-1][0]) == (4, (4, 2.5), number)
