"""Counts of the parts that workers are processing now, sent to the driver in datagrams, for display only.

Spark passes accumulators to the driver when a task ends, which is too late for a part that takes minutes. So a worker
sends the counts of its part about once a second, in a UDP datagram to the address where Spark's executors reach the
driver. No result depends on a datagram: the counts of tables are those of the results that tasks return.
"""

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

SEND_SECONDS = 1.0
"""Time between the datagrams of one part [s]."""
MAX_DATAGRAM = 1024
"""Maximum size of a datagram [bytes]."""
CLOSE_SECONDS = 0.2
"""Longest time that closing a listener takes [s]."""


@dataclass(frozen=True)
class CountsAddress:
    """Where workers send the counts of their parts; it is part of the functions that Spark sends to them."""

    host: str
    port: int
    token: str
    """A random value, by which the driver recognizes the datagrams of its own workers."""
    work: int = 0
    """The number of the piece of work that the parts belong to; 0: the piece that is under way when they arrive."""


class PartMeter:
    """Counts the rows of one part in the worker that processes it, and sends them to the driver."""

    def __init__(self, address: CountsAddress | None, part: int):
        """`address`: None = nothing is sent."""
        self._address, self._part = address, part
        self.rows = 0
        """Rows processed so far."""
        self.position: Callable[[], int] | None = None
        """Returns the number of bytes of the input file that were read; None if the part reads no input file."""
        self._due = time.monotonic() + SEND_SECONDS

    def add(self, rows: int = 1) -> None:
        """Count rows as processed, and send the counts if a second has passed since the last time."""
        self.rows += rows
        if time.monotonic() >= self._due:
            self.send()

    def send(self, done: bool = False) -> None:
        """Send the counts of the part now. `done`: the part is complete."""
        self._due = time.monotonic() + SEND_SECONDS
        if self._address is None:
            return
        read = self.position() if self.position is not None else 0
        counts = [self._address.token, self._address.work, self._part, self.rows, read, int(done)]
        _send(self._address.host, self._address.port, json.dumps(counts).encode())


_METER: ContextVar[PartMeter] = ContextVar("part_meter")


@contextmanager
def counting(address: CountsAddress | None, part: int) -> Iterator[PartMeter]:
    """Make a meter for part `part` the current meter, and send its last counts at the end of the `with` block."""
    meter = PartMeter(address, part)
    earlier = _METER.set(meter)
    try:
        yield meter
        meter.send(done=True)
    finally:
        _METER.reset(earlier)


def current_meter() -> PartMeter:
    """Return the meter of the part that this worker processes; outside of `counting`, one that sends nothing."""
    return _METER.get(None) or PartMeter(None, 0)


def _send(host: str, port: int, data: bytes) -> None:
    """Send a datagram without waiting.

    If the driver cannot be reached, because a firewall opens only Spark's own ports or the name of the driver cannot be
    resolved, the datagram is lost. Then the display advances whenever a part is complete, by Spark's accumulators.
    """
    endpoint = _endpoint(host, port)
    if endpoint is not None:
        with suppress(OSError):  # such as a full buffer; the next datagram contains these counts too
            endpoint[0].sendto(data, endpoint[1])


@lru_cache(maxsize=4)
def _endpoint(host: str, port: int) -> tuple[socket.socket, Any] | None:
    """Return a socket of this process and the driver's address; None if the address cannot be resolved."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        endpoint = socket.socket(family, kind, protocol)
    except OSError:
        return None
    endpoint.setblocking(False)
    return endpoint, target


@dataclass
class WorkCounts:
    """The sums of the counts that the parts of one piece of work have sent."""

    rows: int = 0
    bytes: int = 0
    done: int = 0
    """Number of complete parts."""


_Parts = dict[int, tuple[int, int, int]]
"""Rows, bytes and 1 for a complete part, by part number."""


class CountsListener:
    """Receives the counts of parts on the driver, in a thread of its own; `close` after use."""

    def __init__(self, bind: str, host: str):
        """Open a UDP port at the local address `bind`; workers send to `host`. Raises OSError if there is no port."""
        family, kind, protocol, _, local = socket.getaddrinfo(bind, 0, type=socket.SOCK_DGRAM)[0]
        self._socket = socket.socket(family, kind, protocol)
        try:
            self._socket.bind(local)
        except OSError:
            self._socket.close()
            raise
        self._socket.settimeout(CLOSE_SECONDS)
        self._token, self._host, self._port = secrets.token_hex(16), host, int(self._socket.getsockname()[1])
        self._work = 0
        self._own, self._others = _Parts(), _Parts()
        self._lock, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._receive, name="live counts", daemon=True)
        self._thread.start()

    def begin_work(self) -> CountsAddress:
        """Start a new piece of work with counts of 0, and return the address for its parts."""
        with self._lock:
            self._work += 1
            self._own, self._others = _Parts(), _Parts()
            return CountsAddress(self._host, self._port, self._token, self._work)

    def address(self) -> CountsAddress:
        """Return the address for parts that belong to whatever piece of work is under way when they run."""
        return CountsAddress(self._host, self._port, self._token)

    def counts(self) -> WorkCounts:
        """Return the sums over the parts of the current piece of work.

        Parts sent to `address` count only while no part of its own has been heard of: they are its input.
        """
        with self._lock:
            rows, read, done = map(sum, zip((0, 0, 0), *(self._own or self._others).values()))
        return WorkCounts(rows, read, done)

    def close(self) -> None:
        """Close the port and end the thread."""
        self._closed = True
        self._thread.join()
        self._socket.close()

    def _receive(self) -> None:
        while not self._closed:
            try:
                data = self._socket.recv(MAX_DATAGRAM)
            except OSError:  # a timeout, after which `_closed` is read, or a report that an earlier datagram was lost
                continue
            self._enter(data)

    def _enter(self, data: bytes) -> None:
        """Store the counts of one datagram. Ignore a datagram of another sender or an earlier piece of work."""
        try:
            token, work, part, *counts = json.loads(data)
            rows, read, done = map(int, counts)
            is_own = hmac.compare_digest(str(token).encode(), self._token.encode())
            work, part = int(work), int(part)
        except (ValueError, TypeError, RecursionError):
            return
        with self._lock:
            if is_own and work in (0, self._work):
                parts = self._own if work else self._others
                earlier = parts.get(part, (0, 0, 0))
                # The largest counts are kept: datagrams change order, and an attempt may run beside another one.
                parts[part] = (max(earlier[0], rows), max(earlier[1], read), max(earlier[2], done))
