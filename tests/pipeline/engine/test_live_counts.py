"""Counts of parts that travel in datagrams: what arrives, what is ignored, and that nothing depends on them."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from pipeline.engine import live_counts
from pipeline.engine.live_counts import CountsAddress, CountsListener, PartMeter, WorkCounts, counting, current_meter


@pytest.fixture
def listener() -> Iterator[CountsListener]:
    opened = CountsListener("127.0.0.1", "127.0.0.1")
    yield opened
    opened.close()


def arrived(listener: CountsListener, expected: WorkCounts) -> WorkCounts:
    """The counts as soon as they are those expected, or after five seconds."""
    until = time.monotonic() + 5
    while listener.counts() != expected and time.monotonic() < until:
        time.sleep(0.01)
    return listener.counts()


def test_parts_are_summed_and_the_last_counts_of_a_part_replace_its_earlier_ones(listener: CountsListener) -> None:
    address = listener.begin_work()
    with counting(address, 0) as first:
        first.position = lambda: 700
        first.add(3)
        first.send()
        first.add(4)
    second = PartMeter(address, 1)
    second.add(10)
    second.send()
    assert arrived(listener, WorkCounts(17, 700, 1)) == WorkCounts(17, 700, 1)


def test_counts_are_sent_once_a_second(listener: CountsListener, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[object]] = []
    monkeypatch.setattr(live_counts, "_send", lambda host, port, data: sent.append(json.loads(data)))
    now = [100.0]
    monkeypatch.setattr(live_counts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    meter = PartMeter(listener.begin_work(), 7)
    for _ in range(25):
        meter.add(2)
        now[0] += 0.125
    assert [(message[2], message[3], message[5]) for message in sent] == [(7, 18, 0), (7, 34, 0), (7, 50, 0)]


def test_datagrams_of_others_and_of_earlier_work_are_ignored(listener: CountsListener) -> None:
    earlier = listener.begin_work()
    address = listener.begin_work()
    foreign = CountsAddress(address.host, address.port, "0" * 32, address.work)
    for meter in (PartMeter(foreign, 0), PartMeter(earlier, 1)):
        meter.add(1000)
        meter.send()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        for data in (b"", b"\xff", b"[" * 1000, b"[1,2]", b'{"a": 1}', b'["x", "y", {}, [], 1, 2]'):
            other.sendto(data, (address.host, address.port))
    with counting(address, 2) as own:
        own.add(5)
    assert arrived(listener, WorkCounts(5, 0, 1)) == WorkCounts(5, 0, 1)


def test_parts_of_an_input_count_until_the_work_itself_sends(listener: CountsListener) -> None:
    lazy = listener.address()
    address = listener.begin_work()
    with counting(lazy, 0) as read:
        read.add(9)
    assert arrived(listener, WorkCounts(9, 0, 1)) == WorkCounts(9, 0, 1)
    with counting(address, 0) as written:
        written.add(4)
    assert arrived(listener, WorkCounts(4, 0, 1)) == WorkCounts(4, 0, 1)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "127.0.0.1"])
def test_a_driver_that_cannot_be_reached_changes_nothing(host: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    started = time.monotonic()
    with counting(CountsAddress(host, port, "x"), 0) as meter:
        for _ in range(100):
            meter.add()
            meter.send()
    assert meter.rows == 100
    assert time.monotonic() - started < 30


def test_outside_of_a_task_rows_are_counted_and_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_counts, "_send", lambda *call: pytest.fail("sent"))
    current_meter().send(done=True)
    with counting(None, 3) as meter:
        assert current_meter() is meter
        meter.add(2)
        meter.send()
    assert meter.rows == 2
    assert current_meter() is not meter


def test_closing_ends_the_thread() -> None:
    before = threading.active_count()
    CountsListener("127.0.0.1", "127.0.0.1").close()
    assert threading.active_count() == before
