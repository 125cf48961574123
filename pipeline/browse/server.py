"""The web server of `penstock browse`: a thin HTTP layer on loopback over functions that return JSON values.

Every request needs the token of the session, so that neither other users of the machine nor other web pages can read
the run. The host name is checked against DNS rebinding, and a policy forbids scripts and requests to other servers.
"""

import hmac
import json
import secrets
import socketserver
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from pipeline.browse.document import cluster_members, compare_documents, document_json
from pipeline.browse.limits import LimitsLoader, limits_answer, parse_settings, sliders_of
from pipeline.browse.rows import BrowsedRun, Position, parse_doc_id, parse_position
from pipeline.browse.search import MAX_PAGE, make_query, page_json, random_documents, run_facts, search
from schemas.errors import ConfigError, PenstockError
from schemas.storage import describe_remote_error
from schemas.text import printable_value

HOST = "127.0.0.1"
HOST_NAMES = (HOST, "localhost")
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/dom.js": ("dom.js", "text/javascript; charset=utf-8"),
    "/document.js": ("document.js", "text/javascript; charset=utf-8"),
    "/limits.js": ("limits.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""The files of the page, by path: name in this folder and media type. No other file can be requested."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The header of every answer. `page.html` repeats it but for `frame-ancestors`, which only a header may set."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TOKEN_HEADER = "X-Penstock-Token"
MAX_TARGET_BYTES = 16_384
"""Maximum length of the path and query of a request."""
MAX_BODY_BYTES = 65_536
MAX_REQUESTS = 4
"""Number of requests that read data at the same time; others wait."""
READ_SECONDS = 30.0
"""Time after which a connection that sends nothing is closed."""

Parameters = Mapping[str, str]
Api = Callable[[Parameters], dict[str, Any]]


class BrowseServer(ThreadingHTTPServer):
    """The server of one run, bound to a port of the loopback interface; port 0 chooses a free one."""

    daemon_threads = True

    def __init__(self, run: BrowsedRun, port: int):
        self.run = run
        self.token = secrets.token_urlsafe(24)
        self.limits = LimitsLoader(run)
        self.readers = threading.BoundedSemaphore(MAX_REQUESTS)
        self.api = api_of(run, self.limits)
        super().__init__((HOST, port), _Handler)

    def server_bind(self) -> None:
        """Bind the socket. `HTTPServer` would also look up the name of the host, which may ask a name server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, int(self.server_address[1])

    @property
    def cookie(self) -> str:
        """The name of the cookie; servers on other ports share the cookies of the host, so it has the port."""
        return f"penstock_{self.server_port}"

    @property
    def url(self) -> str:
        """The address of the page with the token of this session."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"

    def is_token(self, text: str | None) -> bool:
        """Return True if the text is the token of this session. The time does not depend on the text."""
        return text is not None and hmac.compare_digest(text.encode(), self.token.encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an unexpected error; a browser that closes a connection is none."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


def api_of(run: BrowsedRun, limits: LimitsLoader) -> dict[str, Api]:
    """Return the functions that answer GET requests, by path. Each raises ConfigError for a wrong parameter."""
    return {
        "/api/run": lambda parameters: run_facts(run),
        "/api/documents": partial(_documents, run),
        "/api/random": partial(_random, run),
        "/api/document": partial(_document, run),
        "/api/cluster": partial(_cluster, run),
        "/api/compare": partial(_compare, run),
        "/api/limits": lambda parameters: _limits(limits),
    }


def _documents(run: BrowsedRun, parameters: Parameters) -> dict[str, Any]:
    query, start = make_query(run, parameters), parse_position(parameters.get("from", "0.0"), "from")
    return page_json(run, query, search(run, query, start, _number(parameters, "limit", 50, MAX_PAGE)))


def _random(run: BrowsedRun, parameters: Parameters) -> dict[str, Any]:
    query, seed = make_query(run, parameters), _number(parameters, "seed", 0, 2**53)
    page = random_documents(run, query, seed, _number(parameters, "limit", 20, MAX_PAGE))
    return page_json(run, query, page) | {"seed": seed}


def _document(run: BrowsedRun, parameters: Parameters) -> dict[str, Any]:
    doc_id = parse_doc_id(parameters.get("doc", ""), "doc")
    return document_json(run, doc_id, _position(parameters, "at"), parameters.get("contains", ""))


def _cluster(run: BrowsedRun, parameters: Parameters) -> dict[str, Any]:
    cluster = parse_doc_id(parameters.get("cluster", ""), "cluster")
    return cluster_members(run, cluster, parse_position(parameters.get("from", "0.0"), "from"))


def _compare(run: BrowsedRun, parameters: Parameters) -> dict[str, Any]:
    documents = [
        (parse_doc_id(parameters.get(name, ""), name), _position(parameters, f"at_{name}")) for name in ("a", "b")
    ]
    return compare_documents(run, documents[0], documents[1])


def _limits(loader: LimitsLoader) -> dict[str, Any]:
    limits = loader.get()
    if limits is None:
        return {"loading": True, "rows_read": loader.progress.rows_read, "rows_total": loader.progress.rows_total}
    return {"loading": False, **sliders_of(limits)}


def whatif_json(loader: LimitsLoader, body: Any) -> dict[str, Any]:
    """Return the answer to a what-if request `{"settings": {slider id: limit}}`, as a JSON value.

    Raises ConfigError if the request is not valid or the sample is still read.
    """
    if not isinstance(body, dict) or set(body) != {"settings"}:
        raise ConfigError('what-if: expected {"settings": {…}}, got another value. Reload the page.')
    limits = loader.get()
    if limits is None:
        raise ConfigError("what-if: expected a complete sample, got one that is still read. Wait, and try again.")
    return limits_answer(limits, parse_settings(limits, body["settings"]))


def _position(parameters: Parameters, name: str) -> Position | None:
    return parse_position(parameters[name], name) if parameters.get(name) else None


def _number(parameters: Parameters, name: str, default: int, most: int) -> int:
    text = parameters.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and 0 <= int(text) <= most):
        raise ConfigError(f"{name}: expected a whole number from 0 to {most}, got {text[:80]!r}. Correct it.")
    return max(1, int(text)) if name == "limit" else int(text)


def to_json_bytes(value: Any) -> bytes:
    """Return a JSON value as UTF-8: its texts safe to show, and the characters escaped that have a meaning in HTML."""
    text = json.dumps(printable_value(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode("utf-8", "replace")


class _Handler(BaseHTTPRequestHandler):
    """One connection. A request is checked completely before it is answered."""

    server: BrowseServer
    timeout = READ_SECONDS
    protocol_version = "HTTP/1.1"

    def version_string(self) -> str:
        """Return the name of the server, without the versions of Python and of the library."""
        return "penstock"

    def log_message(self, *arguments: object) -> None:
        """Print nothing: a request line may hold the token."""

    def do_GET(self) -> None:
        """Answer a request for a file of the page or for data."""
        self._answer(self._get)

    def do_HEAD(self) -> None:
        """Answer like GET, without the body."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Answer a what-if request."""
        self._answer(self._post)

    def _answer(self, respond: Callable[[str, Parameters], None]) -> None:
        """Check a request and answer it; errors that a user can fix have the status 400."""
        try:
            target = urlsplit(self.path) if len(self.path) <= MAX_TARGET_BYTES else None
            parameters = dict(parse_qsl(target.query, keep_blank_values=True, max_num_fields=100)) if target else {}
        except ValueError:
            self._send_error(HTTPStatus.BAD_REQUEST, "The address of the request is not valid.")
            return
        if target is None:
            self._send_error(HTTPStatus.REQUEST_URI_TOO_LONG, f"The address is longer than {MAX_TARGET_BYTES} bytes.")
            return
        refusal = self._refusal(target.path, parameters)
        if refusal is not None:
            self._send_error(HTTPStatus.FORBIDDEN, refusal)
            return
        try:
            respond(target.path, parameters)
        except PenstockError as error:
            self._send_error(HTTPStatus.BAD_REQUEST, str(error))
        except ConnectionError:
            raise
        except Exception as error:
            message = describe_remote_error(error)
            if message is None:
                traceback.print_exc()
                message = f"An unexpected error: {type(error).__name__}. The terminal of `penstock browse` shows it."
            self._send_error(HTTPStatus.INTERNAL_SERVER_ERROR, message)

    def _refusal(self, path: str, parameters: Parameters) -> str | None:
        """Return why a request may not be answered; None if it may."""
        hosts = self.headers.get_all("Host", [])
        allowed = {f"{name}:{self.server.server_port}" for name in HOST_NAMES}
        if len(hosts) != 1 or hosts[0].lower() not in allowed:
            return f"Expected the host {HOST}, got another name. Use the address that `penstock browse` printed."
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and path != "/":
            return "Expected a request of this page, got one of another site."
        origin = self.headers.get("Origin")
        if origin is not None and origin.lower() not in {f"http://{name}" for name in allowed}:
            return "Expected a request of this page, got one of another site."
        if self.server.is_token(self.headers.get(TOKEN_HEADER)):
            return None
        if self.command != "POST" and self.server.is_token(self._cookie_token()):
            return None
        if self.command != "POST" and path == "/" and self.server.is_token(parameters.get("token")):
            return None
        return (
            "Expected the token of this session, got none or another. Use the address that `penstock browse` printed."
        )

    def _cookie_token(self) -> str | None:
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return None
        return cookies[self.server.cookie].value if self.server.cookie in cookies else None

    def _get(self, path: str, parameters: Parameters) -> None:
        if path in FILES:
            name, kind = FILES[path]
            headers = {}
            if path == "/":
                headers = {"Set-Cookie": f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"}
            self._send(HTTPStatus.OK, (Path(__file__).parent / name).read_bytes(), kind, headers)
        elif path in self.server.api:
            with self.server.readers:
                value = self.server.api[path](parameters)
            # Scripts of this page alone can read this answer, and need the token for the header of POST requests.
            self._send_json(HTTPStatus.OK, value | {"token": self.server.token} if path == "/api/run" else value)
        else:
            self._send_error(HTTPStatus.NOT_FOUND, "There is no such page.")

    def _post(self, path: str, parameters: Parameters) -> None:
        if path != "/api/whatif":
            self._send_error(HTTPStatus.NOT_FOUND, "There is no such page.")
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or self.headers.get("Transfer-Encoding"):
            self._send_error(HTTPStatus.LENGTH_REQUIRED, "Expected a body with its length, got none.")
            return
        if len(length) > 9 or int(length) > MAX_BODY_BYTES:
            self._send_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The body is longer than {MAX_BODY_BYTES} bytes.")
            return
        if self.headers.get_content_type() != "application/json":
            self._send_error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "Expected application/json, got another type.")
            return
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            self._send_error(HTTPStatus.BAD_REQUEST, "Expected a JSON value, got another text.")
            return
        with self.server.readers:
            value = whatif_json(self.server.limits, body)
        self._send_json(HTTPStatus.OK, value)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the library could not parse, or whose method has no function here."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._send_error(status, f"The request is not supported: {status.phrase}.")

    def _send_error(self, status: HTTPStatus, message: str) -> None:
        # The rest of a refused request may not have been read, so the connection ends.
        self.close_connection = True
        headers = {"Connection": "close"} | ({"Allow": "GET, HEAD, POST"} if status == 405 else {})
        self._send(status, to_json_bytes({"error": message}), "application/json", headers)

    def _send_json(self, status: HTTPStatus, value: Any) -> None:
        self._send(status, to_json_bytes(value), "application/json", {})

    def _send(self, status: HTTPStatus, body: bytes, kind: str, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
