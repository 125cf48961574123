"""A web server on this machine that has the files of a folder, and that fails in the ways that real ones do."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Faults:
    """What the server does wrong, by the number of the request for a file: a name, or a name and its argument."""

    plan: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    every: bool = False
    """True: the plan is that of every file; False: that of the names with `.warc`."""


class CrawlServer(ThreadingHTTPServer):
    """The server; `requests` has (path, value of Range) of each request, in order."""

    daemon_threads = True

    def __init__(self, folder: Path, faults: Faults | None = None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.faults = folder, faults or Faults()
        self.requests: list[tuple[str, str | None]] = []
        self.counts: Counter[str] = Counter()
        self.open = self.most_open = 0
        self.lock, self.stopped = threading.Lock(), threading.Event()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        server: Any = self.server
        with server.lock:
            server.open += 1
            server.most_open = max(server.most_open, server.open)
        try:
            self._answer(server)
        finally:
            with server.lock:
                server.open -= 1
            self.close_connection = True

    def _answer(self, server: CrawlServer) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        asked = self.headers.get("Range")
        with server.lock:
            server.requests.append((path, asked))
            server.counts[path] += 1
            number = server.counts[path]
        file = server.folder / path
        fault, *rest = (
            server.faults.plan.get(number, ("none",)) if server.faults.every or ".warc" in path else ("none",)
        )
        if fault == "status":
            self._empty(*rest)
            return
        if fault == "drip":  # some bytes, and then others again and again
            self.wfile.write(rest[0])
            while not server.stopped.wait(0.02):
                self.wfile.write(rest[1])
            return
        if not file.is_file():
            self._empty(404)
            return
        data = file.read_bytes()
        etag = f'"{md5(data).hexdigest()}"'
        condition = self.headers.get("If-Match")
        if condition is not None and condition != etag:
            self._empty(412)
            return
        self._send(data, etag, asked, (fault, *rest))

    def _empty(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, data: bytes, etag: str, asked: str | None, fault: tuple[Any, ...]) -> None:
        first, last = 0, len(data) - 1
        kind = fault[0]
        if asked is not None and kind != "ignore_range":
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end) if end else last, last)
            if first >= len(data):
                self._empty(416)
                return
            body, shown = data[first : last + 1], first
            if kind == "shifted":  # a header as asked for, with other bytes
                body = data[first + 7 : last + 8].ljust(len(body), b"x")
            elif kind == "wrong_range":
                shown = first + 100
                body = data[shown : last + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {shown}-{last}/{len(data)}")
        else:
            body = data
            self.send_response(200)
        self.send_header("ETag", etag)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if kind == "truncate":
            body = body[: fault[1]]
        elif kind == "more":
            body += b"surplus" * 1000
        elif kind == "stall":
            self.wfile.write(body[: fault[1]])
            self.wfile.flush()
            time.sleep(fault[2])
            return
        self.wfile.write(body)


@contextmanager
def serving(folder: Path, faults: Faults | None = None) -> Iterator[CrawlServer]:
    """The server of a folder, until the end of the block."""
    server = CrawlServer(folder, faults)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()
