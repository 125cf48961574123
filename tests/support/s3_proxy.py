"""A real HTTP proxy in front of the tests' server of S3, which answers 503, or never answers.

`proxy(port, fault)` calls `fault(method, path)` at each request. The request is passed on if it returns None, answered
with 503 if it returns OVERLOADED, and never answered if it returns STALLED.
"""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

OVERLOADED, STALLED = "overloaded", "stalled"
SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
Fault = Callable[[str, str], str | None]


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, fault: Fault):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.fault = port, fault
        self.ended = threading.Event()
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Proxy

    def _relay(self) -> None:
        body = self._body()
        with self.server.lock:
            fault = self.server.fault(self.command, self.path)
        if fault == STALLED:
            self.server.ended.wait()
            self.close_connection = True
        elif fault == OVERLOADED:
            self._answer(503, [("Content-Type", "application/xml")], SLOW_DOWN)
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.server.target)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            self._answer(answer.status, answer.getheaders(), answer.read())
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            elif name.lower() not in (*HOP_BY_HOP, "content-length", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        blocks = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            blocks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(blocks)

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _relay


HOP_BY_HOP = ("transfer-encoding", "connection", "expect", "keep-alive")


@contextmanager
def proxy(port: int, fault: Fault) -> Iterator[int]:
    """Run a proxy in front of a server at `port`, and yield the port of the proxy."""
    served = _Proxy(port, fault)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    try:
        yield served.server_address[1]
    finally:
        served.ended.set()
        served.shutdown()
        thread.join()
        served.server_close()
