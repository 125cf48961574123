"""`penstock.extract`, `detect_language`, `signals` and `redact`: the stages of the pipeline on single texts."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest

import penstock
from schemas.errors import ConfigError

PAGE = """<html><head><title>A&nbsp;title</title></head><body><nav><a href="/">Home</a></nav><article><h1>Heading</h1>
<p>The first paragraph of this page has enough words to be its main text.</p><p>Größe: 3 m².</p></article></body></html>
"""
ENGLISH = "The quick brown fox jumps over the lazy dog, and that is the end of the story that we have to tell."


def test_extract_returns_text_title_and_charset() -> None:
    page = penstock.extract(PAGE)
    assert page.text.split("\n\n")[-2:] == [
        "The first paragraph of this page has enough words to be its main text.",
        "Größe: 3 m².",
    ]
    assert (page.title, page.charset, page.drop) == ("Heading", "utf-8", None)
    assert (page.metadata, page.extracted_by) == ({}, "penstock")
    assert page.expected_f1 is not None
    assert 0 < page.expected_f1 <= 1
    assert penstock.extract(PAGE, metadata=False).title == "A title"


@pytest.mark.parametrize("charset", ["iso-8859-1", None])
def test_extract_decodes_bytes(charset: str | None) -> None:
    page = penstock.extract(PAGE.replace("²", "").encode("windows-1252"), charset)
    assert "Größe: 3 m." in page.text
    assert page.charset == "windows-1252"  # what WHATWG calls iso-8859-1


def test_extract_names_the_rule_that_drops_a_page() -> None:
    page = penstock.extract("<html><body></body></html>")
    assert page.text == ""
    assert page.drop is not None
    assert (page.drop.rule, page.drop.value, page.drop.limit) == ("no_text", 0, 1)


@pytest.mark.parametrize(
    ("page", "text"),
    [("", ""), (b"", ""), ("no markup", "no markup"), ("<", "<"), ("\ud800", "?"), (b"\xff\x00<p>\x80", "\u00ff")],
)
def test_extract_takes_pages_of_any_kind(page: str | bytes, text: str) -> None:
    found = penstock.extract(page)
    assert found.text == text
    assert (found.drop is None) == bool(text)


def test_extract_drops_a_bomb() -> None:
    page = penstock.extract("<div>" * 100_000 + ENGLISH)
    assert page.drop is not None
    assert (page.text, page.drop.rule, page.drop.limit) == ("", "too_deep", 3000)


def test_extract_writes_markdown_with_links() -> None:
    html = PAGE.replace("Größe: 3 m².", f'{ENGLISH} See <a href="b">the <b>next</b> page</a>.')
    page = penstock.extract(html, url="https://example.org/a", format="markdown", links=True)
    assert page.text.split("\n\n") == [
        "The first paragraph of this page has enough words to be its main text.",
        f"{ENGLISH} See [the **next** page](https://example.org/b).",
    ]
    assert penstock.extract(html).text == page.text.replace(
        "[the **next** page](https://example.org/b)", "the next page"
    )
    with pytest.raises(
        ConfigError,
        match="links: expected only extractors that follow it, 'penstock' and 'trafilatura', got 'resiliparse'",
    ):
        penstock.extract(html, extractor="resiliparse", links=True)


def test_extract_takes_the_settings_of_the_recipe() -> None:
    page = penstock.extract(PAGE, max_text_chars=10)
    assert page.drop is not None
    assert page.drop.rule == "text_too_long"


def test_detect_language_is_a_code_with_a_score() -> None:
    language = penstock.detect_language("Guten Morgen, meine Damen und Herren, wie geht es Ihnen heute Abend?")
    assert language == "de"
    assert 0.9 < language.score <= 1


def test_detect_language_names_the_second_language() -> None:
    german = "Der Ausschuss hat in seiner Sitzung am Montag beschlossen, die Arbeiten im Frühjahr fortzusetzen. " * 4
    language = penstock.detect_language(f"{ENGLISH} " * 8 + german)
    assert {language, language.second} == {"en", "de"}
    assert language.share is not None
    assert 0.2 < language.share < 0.8


def test_signals_are_those_of_the_stage() -> None:
    measured = penstock.signals("one two three four\none two three four", language="en")
    assert measured["gopher_num_words"] == 8
    assert measured["gopher_dup_line_frac"] == 0.5
    assert not {"text", "cuts", "_body"} & measured.keys()


def test_signals_detect_the_language_if_none_is_given() -> None:
    assert penstock.signals(ENGLISH) == penstock.signals(ENGLISH, language="en")


def test_signals_of_other_families() -> None:
    assert "dolma_num_words" not in penstock.signals(ENGLISH, language="en")
    assert any(name.startswith("dolma") for name in penstock.signals(ENGLISH, language="en", families=["dolma"]))


def test_check_names_the_rules_that_would_drop_a_text() -> None:
    broken = {rule.reason: (rule.value, rule.limit) for rule in penstock.check(ENGLISH, language="en")}
    assert broken["gopher_short_doc"] == (22, 50)
    assert broken["c4_too_few_sentences"] == (1, 5)
    assert [rule.reason for rule in penstock.check(ENGLISH, language="en", rules=["c4"])] == ["c4_too_few_sentences"]


def test_check_applies_rules_of_ones_own() -> None:
    rule = {"name": "foxes", "when": "gopher_num_words > 20 and language = 'en'", "reason": "a test"}
    reasons = [
        broken.reason for broken in penstock.check(ENGLISH, language="en", rules=["gopher_quality"], rule=[rule])
    ]
    assert reasons == ["gopher_short_doc", "foxes"]


def test_redact_returns_a_text_with_counts() -> None:
    redacted = penstock.redact("Write to jane.doe@mail.example.com, or call +1 202-456-1111.", language="en")
    assert redacted == "Write to <EMAIL>, or call <PHONE>."
    assert redacted.text == redacted
    assert dict(redacted.counts) == {"email": 1, "phone": 1}
    assert type(redacted.text) is str


def test_redact_only_some_types() -> None:
    text = "Write to jane.doe@mail.example.com, or call +1 202-456-1111."
    assert penstock.redact(text, language="en", types=["phone"]).counts == {"phone": 1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: penstock.signals("x", "en", min_wrds=3), "quality.min_wrds: no such key (did you mean 'min_words'?)"),
        (lambda: penstock.extract("x", max_depth=0), "extract.max_depth"),
        (lambda: penstock.redact("x", types=["mail"]), "'mail' (did you mean 'email'?)"),
        (lambda: penstock.signals("x", "en", min_words={1, 2}), "expected settings that a recipe can hold"),
    ],
)
def test_wrong_settings_are_reported(call: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()  # type: ignore[operator]
    assert message in str(error.value)


def test_unknown_names_and_listed_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'extrct'"):
        _ = penstock.extrct
    assert {"extract", "open", "run", "signals"} <= set(dir(penstock))
    assert all(getattr(penstock, name) is not None for name in penstock.__all__)


def test_the_import_is_cheap_and_loads_neither_spark_nor_torch() -> None:
    code = (
        "import sys, time; start = time.process_time(); import penstock; seconds = time.process_time() - start\n"
        "assert not {'pyspark', 'torch', 'pyarrow', 'pandas', 'numpy'} & sys.modules.keys(), 'heavy imports'\n"
        "penstock.extract('<p>some text</p>'); penstock.signals('some text', language='en')\n"
        "assert not {'pyspark', 'torch', 'pandas'} & sys.modules.keys(), 'heavy imports of the functions'\n"
        "print(seconds)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) < 0.2  # [s] of CPU time; measured: 0.01


def test_settings_of_several_extractors_need_a_run() -> None:
    with pytest.raises(ConfigError, match="expected settings of one page, got compare, union, which a run uses"):
        penstock.extract("<p>x", union=["penstock", "all"], compare="all")


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_results_can_be_copied_and_sent_to_other_processes(again: Callable[[Any], Any]) -> None:
    redacted, language = penstock.redact("Write to jane@example.org."), penstock.detect_language(ENGLISH)
    for value, attributes in ((redacted, ("counts",)), (language, ("score", "share", "second"))):
        other = again(value)
        assert (type(other), other) == (type(value), value)
        assert [getattr(other, name) for name in attributes] == [getattr(value, name) for name in attributes]


def test_a_pool_of_processes_redacts() -> None:
    with ProcessPoolExecutor(1) as pool:
        (redacted,) = pool.map(penstock.redact, ["Write to jane@example.org."])
    assert (redacted, redacted.counts) == ("Write to <EMAIL>.", {"email": 1})


def test_threads_get_the_results_of_their_own_texts() -> None:
    sentence = "The gate of the penstock number {0} is opened by hand, and number {0} has to be closed again. "
    pages = [f"<title>{n}</title><p>{sentence.format(n) * 5}</p>" for n in range(30)]
    # Each page gets a second opinion. The words of DCLM are in a cache where a piece has a narrow space.
    texts = [" ".join(f"w{n + m % 17}\u202fx{m % (n + 3)}" for m in range(200)) for n in range(30)]

    def measure(number: int) -> tuple[str, str, dict[str, Any]]:
        page = penstock.extract(pages[number], min_expected_f1=1.0)
        redacted = penstock.redact(f"{number}: jane@example.org", types=["email"])
        return page.text, redacted, penstock.signals(texts[number], "en", families=["dclm"])

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(measure, range(30))) == list(map(measure, range(30)))
