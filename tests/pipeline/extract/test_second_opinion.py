"""The second opinion: the answer of trafilatura from a process of its own, and its limits, which really end it."""

import os
import signal
import subprocess
import threading
from contextlib import suppress
from typing import Any

import pytest

from pipeline.extract import second_opinion
from pipeline.extract.extractors import by_trafilatura
from pipeline.extract.second_opinion import LibrarySettings, SecondOpinion, SecondOpinionError, error_name

SENTENCE = "The penstock carries water from the reservoir down to the turbine, and its gate can be closed. "
PAGE = f"<html><body><article><p>{SENTENCE * 5}</p></article></body></html>"

LOOP = """
import os, resource, sys
from pipeline.extract import second_opinion as module
class Odd(ValueError): pass
class Library:
    @staticmethod
    def extract(page, favor_precision, include_comments):
        print("printed by the library")
        if "loop" in page:
            while True: pass
        if "die" in page: os._exit(3)
        if "raise" in page: raise Odd("no")
        return page.upper()
sys.modules["trafilatura"] = Library
module.serve()
"""


@pytest.fixture
def opinion():
    asked = SecondOpinion()
    yield asked
    asked.close()


@pytest.fixture
def odd_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has a library that prints, loops, dies or raises, as the page says."""
    start = subprocess.Popen

    def with_loop(command, **streams):
        path = command[2].partition("; from")[0]
        return start([*command[:2], f"{path}\n{LOOP}"], **streams)

    monkeypatch.setattr(second_opinion.subprocess, "Popen", with_loop)


def test_the_answer_is_that_of_the_library(opinion: SecondOpinion) -> None:
    first = opinion(PAGE)
    assert first.text == by_trafilatura(PAGE) == (SENTENCE * 5).strip()
    process = opinion._process
    second = opinion("<p>x")
    assert second.text == by_trafilatura("<p>x")
    assert opinion._process is process
    # The first page pays for the start of the process.
    assert first.cpu_seconds > 10 * second.cpu_seconds > 0


def test_the_form_of_the_text_is_that_of_the_settings() -> None:
    page = PAGE.replace("<p>", "<h2>The gate</h2><p><b>Closed</b> <a href=/log>here</a> <img src=a.png alt=gate> ", 1)
    text = (SENTENCE * 5).strip()
    forms = {
        LibrarySettings(): f"The gate\nClosed here {text}",
        LibrarySettings(markdown=True): f"## The gate\n\n**Closed** here {text}",
        LibrarySettings(links=True): f"The gate\nClosed [here](https://example.org/log) {text}",
        LibrarySettings(images=True): f"The gate\nClosed here ![gate](https://example.org/a/a.png) {text}",
    }
    for settings, expected in forms.items():
        opinion = SecondOpinion(settings)
        given = opinion(page, "https://example.org/a/b\nc").text
        opinion.close()
        assert given == by_trafilatura(page, "https://example.org/a/b c", settings)
        assert " ".join(given.split()) == " ".join(expected.split())


def test_a_page_that_takes_too_long_ends_the_process(opinion: SecondOpinion, odd_library: None) -> None:
    assert opinion("a page").text == "A PAGE"
    first = opinion._process
    with pytest.raises(SecondOpinionError, match="stopped") as stopped:
        opinion("loop")
    limit = second_opinion.MAX_CPU_SECONDS
    assert limit - 1 <= stopped.value.cpu_seconds <= limit + 2
    assert first is not None
    assert first.poll() is not None
    assert opinion("next").text == "NEXT"
    assert opinion._process is not first


@pytest.mark.parametrize(("page", "cause", "error"), [("die", "stopped", None), ("raise", "failed", "ValueError")])
def test_causes(opinion: SecondOpinion, odd_library: None, page: str, cause: str, error: str | None) -> None:
    with pytest.raises(SecondOpinionError, match=f"^{cause}$") as refused:
        opinion(page)
    assert refused.value.error == error
    assert opinion("again").text == "AGAIN"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_after_an_interruption_a_page_gets_its_own_answer(
    opinion: SecondOpinion, odd_library: None, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    assert opinion("one").text == "ONE"

    def interrupted(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(second_opinion, "_receive", interrupted)
        with pytest.raises(error):
            opinion("two")
    assert opinion("three").text == "THREE"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_page_is_not_to_blame_for_a_process_that_the_system_ends(
    opinion: SecondOpinion, odd_library: None, number: signal.Signals
) -> None:
    """As when memory is short: the text of a page must not depend on it."""
    assert opinion("a page").text == "A PAGE"
    process = opinion._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)

    def end() -> None:
        os.kill(process.pid, number)
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)

    threading.Timer(0.2, end).start()
    assert opinion("the next").text == "THE NEXT"
    assert process.returncode == -number
    assert opinion._process is not process


def test_a_page_whose_process_is_always_ended_has_no_opinion(
    opinion: SecondOpinion, odd_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, run = [], SecondOpinion._running

    def running(self: SecondOpinion) -> Any:
        process = run(self)
        process.kill()
        started.append(process)
        return process

    monkeypatch.setattr(SecondOpinion, "_running", running)
    monkeypatch.setattr(second_opinion, "PAUSE_SECONDS", 0.01)
    with pytest.raises(SecondOpinionError, match="stopped"):
        opinion("a page")
    assert len(started) == second_opinion.MAX_SIGNALS


def test_a_page_beyond_the_limits_is_not_sent(opinion: SecondOpinion) -> None:
    for page in ("x" * (second_opinion.MAX_PAGE_CHARS + 1), "<b>" * (second_opinion.MAX_PAGE_TAGS + 1)):
        with pytest.raises(SecondOpinionError, match="too_large"):
            opinion(page)
    assert opinion._process is None


def test_names_of_errors_are_those_of_python_and_of_parsers() -> None:
    from lxml.etree import ParserError

    made = type("Made", (type("Inner", (KeyError,), {}),), {})
    assert [error_name(error) for error in (made(), ParserError(""), MemoryError())] == [
        "KeyError",
        "ParserError",
        "MemoryError",
    ]
