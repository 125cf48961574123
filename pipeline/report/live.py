"""The live page of a run: a local web server that shows what `progress.json` and the metrics of training say.

The server listens on 127.0.0.1 only. Every request needs the token of the printed address, so other users and web pages
cannot read the run; the header Host must name this machine, so that a rebound DNS name is refused too.
"""

import hmac
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pipeline.report.facts import OUTCOME_NAME, read_plan
from pipeline.report.page import REPORT_NAME, ReportOptions, render, script_hash, template_text, write_report
from schemas.errors import ConfigError, ContractError, PenstockError
from schemas.manifest import RUN_NAME
from schemas.paths import METRICS_NAME, PLAN_NAME
from schemas.storage import Store
from schemas.text import printable_value, to_json_value

PROGRESS_NAME = "progress.json"
"""File of a run folder in which a running command reports its steps."""
PROGRESS_FORMAT = 1
PROGRESS_FIELDS = ("command", "started", "updated", "state", "steps")
STEP_FIELDS = ("name", "state", "what", "rows", "seconds")
RUNNING = "running"
STALE_SECONDS = 60
"""Age of the last update of a running command from which it is shown as stopped without notice [s]."""
MAX_CURVE_POINTS = 400
"""Maximum number of points of the loss curve; beyond it, pairs of points are averaged."""
RECENT_STEPS = 100
"""Number of optimizer steps from which the time left is estimated."""
HOST_NAMES = ("127.0.0.1", "localhost")
SECURITY_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
LIVE_SCRIPT = "live_script.html"


@dataclass
class LiveCurve:
    """The metrics of a training run, read in pieces as the file grows."""

    offset: int = 0
    """Number of bytes that are read."""
    points: list[tuple[float, float]] = field(default_factory=list)
    """(step, mean training loss)."""
    group: int = 1
    """Number of steps that a point averages."""
    pending: list[tuple[float, float]] = field(default_factory=list)
    heldout: list[tuple[float, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Durations of the last RECENT_STEPS steps [s]."""
    last: Mapping[str, Any] = field(default_factory=dict)
    """The last line of the file."""

    def read(self, run: Store) -> None:
        """Read the complete lines that were added. A file that became shorter is read from its start.

        Raises ContractError if a line is not a step.
        """
        size = run.size(METRICS_NAME)
        if size < self.offset:
            vars(self).update(vars(LiveCurve()))  # a rewind wrote the file anew
        with run.open_unchecked(METRICS_NAME) as stream:
            stream.seek(self.offset)
            data = stream.read(size - self.offset)
        complete = data[: data.rfind(b"\n") + 1]
        try:
            for line in complete.splitlines():
                self._add(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ContractError(
                f"{run.uri}/{METRICS_NAME}: expected one complete step per line, got an invalid line ({error!r}). "
                f"Restore {METRICS_NAME} from a backup."
            ) from error
        self.offset += len(complete)

    def _add(self, line: Mapping[str, Any]) -> None:
        self.last = line
        self.seconds = [*self.seconds, float(line.get("step_seconds") or 0.0)][-RECENT_STEPS:]
        step, loss, heldout = int(line["step"]), line.get("loss"), line.get("heldout_loss")
        if heldout is not None:
            self.heldout = _thinned([*self.heldout, (step, heldout)])
        if loss is None:
            return
        self.pending.append((step, loss))
        if len(self.pending) == self.group:
            self.points.append(_mean(self.pending))
            self.pending = []
        if len(self.points) > MAX_CURVE_POINTS:
            self.points = _thinned(self.points)
            self.group *= 2

    def shown(self) -> list[tuple[float, float]]:
        """Return the points of the curve, with the steps that fill no whole group as its last point."""
        return [*self.points, *([_mean(self.pending)] if self.pending else [])]


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return points[-1][0], sum(y for _, y in points) / len(points)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the means of pairs of points if there are more than MAX_CURVE_POINTS."""
    if len(points) <= MAX_CURVE_POINTS:
        return points
    return [_mean(points[start : start + 2]) for start in range(0, len(points), 2)]


@dataclass
class LiveRun:
    """A run that is watched: `state` returns what the page shows."""

    run: Store
    options: ReportOptions
    curve: LiveCurve = field(default_factory=LiveCurve)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def state(self, now: datetime) -> dict[str, Any]:
        """Return the state of the run as a JSON value; a file that cannot be read is described in `problem`."""
        values: dict[str, Any] = {"progress": None, "training": None, "problem": None, "stale": False, "age": None}
        with self.lock:
            try:
                if self.run.exists(PROGRESS_NAME):
                    values["progress"] = read_progress(self.run)
                    values["age"] = _age(values["progress"]["updated"], now)
                    is_running = values["progress"]["state"] == RUNNING
                    values["stale"] = is_running and values["age"] > STALE_SECONDS
                if self.run.exists(METRICS_NAME):
                    values["training"] = self._training()
            except PenstockError as error:
                values["problem"] = str(error)
        return values | {"report": self.run.exists(RUN_NAME), "name": self.run.uri.rstrip("/").rpartition("/")[2]}

    def _training(self) -> dict[str, Any]:
        self.curve.read(self.run)
        plan = read_plan(self.run) if self.run.exists(PLAN_NAME) else None
        last, steps = self.curve.last, plan.steps if plan else None
        done = int(last.get("step", 0))
        pace = sum(self.curve.seconds) / len(self.curve.seconds) if self.curve.seconds else None
        return {
            "step": done,
            "steps": steps,
            "loss": last.get("loss"),
            "tokens_per_second": last.get("tokens_per_second"),
            "seconds_left": None if pace is None or steps is None else pace * max(steps - done, 0),
            "finished": self.run.exists(OUTCOME_NAME) and steps is not None and done >= steps,
            "points": self.curve.shown(),
            "heldout": self.curve.heldout,
        }

    def report(self) -> bytes:
        """Write the report of what exists so far, and return it."""
        with self.lock:
            write_report(self.run, options=self.options)
            return self.run.read_bytes(REPORT_NAME)


def read_progress(run: Store) -> dict[str, Any]:
    """Return the content of `progress.json`. Raises ContractError if it is not in the expected format."""
    where = f"{run.uri}/{PROGRESS_NAME}"
    try:
        progress = json.loads(run.read_bytes(PROGRESS_NAME))
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{where}: expected JSON, got an error: {error}. Run the command again.") from error
    version = progress.get("format") if isinstance(progress, dict) else None
    if version != PROGRESS_FORMAT:
        raise ContractError(
            f"{where}: expected format {PROGRESS_FORMAT}, got {version}. Use the version of penstock that wrote it."
        )
    steps = progress.get("steps")
    missing = [name for name in PROGRESS_FIELDS if name not in progress]
    if steps is not None and not (isinstance(steps, list) and all(isinstance(step, dict) for step in steps)):
        missing, steps = [*missing, "steps as a list of objects"], []
    missing += [f"steps.{name}" for name in STEP_FIELDS if any(name not in step for step in steps or ())]
    try:
        _age(progress.get("updated", ""), datetime.now(UTC))
    except (TypeError, ValueError):
        missing.append("updated as ISO 8601 with a zone")
    if missing:
        raise ContractError(
            f"{where}: expected a progress report, got one without {', '.join(missing)}. Run the command again."
        )
    return dict(progress)


def _age(updated: str, now: datetime) -> float:
    return (now - datetime.fromisoformat(updated)).total_seconds()


class LiveServer:
    """The web server of a live page; `serve` runs until `close` is called or the command is interrupted."""

    def __init__(self, run: Store, port: int, options: ReportOptions):
        """`port`: 0 = any free port. Raises ConfigError if the folder is no run or the port is in use."""
        if not any(run.exists(name) for name in (PROGRESS_NAME, RUN_NAME, METRICS_NAME)):
            raise ConfigError(
                f"{run.uri}: expected a run folder, got no {PROGRESS_NAME} and no {RUN_NAME}. Start `penstock run` "
                "first."
            )
        self.token = secrets.token_urlsafe(24)
        self.live = LiveRun(run, options)
        handler = type("BoundHandler", (LiveHandler,), {"token": self.token, "live": self.live})
        try:
            self._server = ThreadingHTTPServer((HOST_NAMES[0], port), handler)
        except OSError as error:
            raise ConfigError(
                f"report --port: expected a free port, got {port}: {error.strerror}. Give another --port."
            ) from error
        self._server.daemon_threads = True

    @property
    def address(self) -> str:
        """The address of the page, with its token."""
        scheme = "http"
        return f"{scheme}://{HOST_NAMES[0]}:{self._server.server_port}/?token={self.token}"

    def serve(self) -> None:
        """Answer requests until `close` is called."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()


READ_SECONDS = 30.0
"""Time after which a connection without a request is closed [s]."""


class LiveHandler(BaseHTTPRequestHandler):
    """Answers the requests of a live page; a subclass has the token and the run."""

    token: str
    live: LiveRun
    timeout = READ_SECONDS
    server_version = "penstock"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request for the page, its data or the report."""
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            address = urlsplit(self.path)
            token = parse_qs(address.query).get("token", [""])[0]
        except ValueError:  # such as brackets that are not closed
            self._refuse(400, "The address or the header Host is not valid.")
            return
        if host not in HOST_NAMES:
            self._refuse(403, "The header Host does not name this machine.")
        elif self._is_of_another_site(address.path):
            self._refuse(403, "The request is one of another site.")
        elif not hmac.compare_digest(token.encode(), self.token.encode()):
            self._refuse(403, "The token is missing or wrong. Open the address that `penstock report --live` printed.")
        elif (answer := self._answers().get(address.path)) is None:
            self._refuse(404, "There is no such page.")
        else:
            self._send(200, *answer())

    def _is_of_another_site(self, path: str) -> bool:
        """Return True if a browser says that a page of another site sent the request; a link to "/" is allowed."""
        if path != "/" and self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return True
        origin = self.headers.get("Origin")
        return origin is not None and urlsplit(origin).netloc.lower() != self.headers.get("Host", "").lower()

    def _refuse_method(self) -> None:
        self._refuse(405, "Only GET is allowed.", {"Allow": "GET"})

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse_method

    def _answers(self) -> Mapping[str, Callable[[], tuple[str, bytes, dict[str, str]]]]:
        return {"/": self._page, "/state": self._state, "/report": self._report}

    def _page(self) -> tuple[str, bytes, dict[str, str]]:
        policy = (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src '{script_hash(template_text(LIVE_SCRIPT))}'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        name = self.live.run.uri.rstrip("/").rpartition("/")[2]
        page = render("live.html", {"name": name})
        return "text/html; charset=utf-8", page, {"Content-Security-Policy": policy}

    def _state(self) -> tuple[str, bytes, dict[str, str]]:
        values = self.live.state(datetime.now(UTC))
        return "application/json", json.dumps(printable_value(to_json_value(values)), allow_nan=False).encode(), {}

    def _report(self) -> tuple[str, bytes, dict[str, str]]:
        try:
            return "text/html; charset=utf-8", self.live.report(), {"Content-Security-Policy": "frame-ancestors 'none'"}
        except PenstockError as error:
            return "text/plain; charset=utf-8", f"penstock: {error}\n".encode(), {}

    def _refuse(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{reason}\n".encode(), headers or {})

    def _send(self, status: int, kind: str, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **SECURITY_HEADERS,
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Print nothing: the page asks for its data every two seconds."""
