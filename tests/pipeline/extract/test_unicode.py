"""Unicode repair: each kind by hand, what must stay, and real pages with and without it."""

import gzip
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resiliparse.parse.html import HTMLTree

from pipeline.extract import unicode
from pipeline.extract.charset import decode
from pipeline.extract.extractors import by_resiliparse
from pipeline.extract.unicode import REPAIRS, RepairedText, repair_text
from tests.pipeline.extract.test_charset import html_at
from tests.pipeline.extract.test_extract import row, run

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"


@pytest.mark.parametrize(
    ("text", "repaired", "repairs"),
    [
        ("Q&amp;A &quot;x&quot; &#8217; &nbsp;", 'Q&A "x" ’  ', {"entities": 5, "spaces": 1}),
        ("once: &amp;amp; &amp;nbsp;", "once: &amp; &nbsp;", {"entities": 2}),
        ("Caf&eacute; &#151; &#x200b;x", "Café — x", {"entities": 3, "invisible": 1}),
        ("JesteÅ\x9b tu: Strona gÅ\x82Ã³wna\ngut", "Jesteś tu: Strona główna\ngut", {"mojibake_lines": 1}),
        ("â\x80\x9cThe healthiestâ\x80\x9d", "“The healthiest”", {"mojibake_lines": 1}),
        ("I donâ€™t\nLa rÃ©ponse", "I don’t\nLa réponse", {"mojibake_lines": 2}),
        ("5Â°C\n1.Â\xa0One", "5°C\n1. One", {"mojibake_lines": 2, "spaces": 1}),
        ("РџСЂРёРІРµС‚ РјРёСЂ", "Привет мир", {"mojibake_lines": 1}),
        ("Ĺ‚Ăłdka", "łódka", {"mojibake_lines": 1}),
        ("æ\x97¥æ\x9c¬èª\x9e", "日本語", {"mojibake_lines": 1}),
        ("\x93quoted\x94 \x85", "“quoted” …", {"c1": 3}),
        ("\x81", "", {"c1": 1}),
        ("a\u00a0b\u202fc\u2009d", "a b c d", {"spaces": 3}),
        ("réac\u00adtion à la can\u00addi\u00adda\u00adture", "réaction à la candidature", {"soft_hyphens": 4}),
        ("zero\u200bwidth\u200c, joi\u200dner\ufeff\u2060", "zerowidth, joiner", {"invisible": 5}),
        ("left\u200eto\u202aright\u202c", "lefttoright", {"invisible": 3}),
        ("\U000e0041\U000e0042tags", "tags", {"invisible": 2}),
        ("\U0001f600\u200d!", "\U0001f600!", {"invisible": 1}),
    ],
)
def test_what_is_repaired(text: str, repaired: str, repairs: dict[str, int]) -> None:
    assert repair_text(text) == RepairedText(repaired, repairs, 0)
    assert set(repairs) <= set(REPAIRS)


@pytest.mark.parametrize(
    "text",
    [
        "AT&T, Q&A, R&D; &unknown; &amp &#;",
        "write &lt;p&gt; and &amp; in HTML\nand also &nbsp;",  # about markup
        "var b = &num;",
        "if (a &amp;&amp; b) { return; }",
        "`&copy;` is a name",
        "می\u200cخواهم کتاب\u200cها",
        "क्\u200dष न्\u200d, ശ്രീ ന്\u200d",
        f"the family {FAMILY} and \u2764\ufe0f\u200d\U0001f525, \U0001f3f3\ufe0f\u200d\U0001f308",
        "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
        "ภาษา\u200bไทย ភាសា\u200bខ្មែរ",
        "עברית \u200f(a)\u200e.",
        "全角\u3000空白",
        "ÎNVĂŢĂTURĂ",
        "NÍŽE, MÔŽE, PAPÁČI, MANHÃ\n“Ã”, “É”, É’, groß”, Ä…",
        "Рівне, Сірко, Світ",
        "naïve café – “quoted” … 5°C",
        "",
    ],
)
def test_what_stays(text: str) -> None:
    assert repair_text(text) == RepairedText(text)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Instead of é you see Ã© on the page.", 1),
        ("In UTF-8 that is read as Latin-1, you see â€™ in place of an apostrophe.", 1),
        ("ŒÊÐÂÎÅ > ¹úŒÊÒªÎÅ > Ê±ÊÂ¿ì±š", 6),  # Chinese, read as windows-1252
    ],
)
def test_uncertain_mojibake_is_counted_and_stays(text: str, left: int) -> None:
    result = repair_text(text)
    assert (result.text, result.repairs) == (text, {})
    assert result.mojibake == left


def test_c1_characters_prove_mojibake_in_a_text_about_encodings() -> None:
    text = "LANG selects UTF-8.\nThe option â\x80\x98-câ\x80\x99 counts.\nâ€™ is broken."
    assert repair_text(text) == RepairedText(
        "LANG selects UTF-8.\nThe option ‘-c’ counts.\nâ€™ is broken.", {"mojibake_lines": 1}, 1
    )


def test_mojibake_beyond_the_limit_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unicode, "MAX_SUSPECTED", 10)
    assert repair_text("rÃ©ponse\nrÃ©ponse").text == "réponse\nrÃ©ponse"


def test_clean_text_does_not_import_ftfy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    unicode._ftfy.cache_clear()
    assert repair_text("naïve café\u00a0– “x” É’").text == "naïve café – “x” É’"
    with pytest.raises(ModuleNotFoundError):
        repair_text("rÃ©ponse")
    unicode._ftfy.cache_clear()


@given(st.text("aé Ã©â€™\x80\x99&;mp\u00a0\u00ad\u200b\u200d\n漢", max_size=30))
def test_a_repair_keeps_lines_and_ascii_letters(text: str) -> None:
    result = repair_text(text, has_entities=False)
    assert result.text.count("\n") == text.count("\n")
    assert re.sub("[^a;mp]", "", result.text) == re.sub("[^a;mp]", "", text)
    assert not set(result.text) & set("\u00a0\u00ad\u200b\x80\x99")
    assert result.repairs or result.text == text


def test_the_stage_repairs_by_choice_and_counts() -> None:
    html = "<title>Strona gÅ\x82Ã³wna\xa0Q&amp;amp;A</title><p>Strona gÅ\x82Ã³wna Q&amp;amp;A\xa0\ufffd" + "x" * 100
    kept, repaired = row(html), row(html)
    settings = {"extractor": "resiliparse", "metadata": False}
    assert run(kept, **settings) is run(repaired, unicode="repair", **settings) is None
    assert (kept["title"], kept["text"][:22]) == ("Strona gÅÃ³wna Q&amp;A", "Strona gÅÃ³wna Q&amp;A")
    assert (kept["unicode_repairs"], kept["mojibake"], kept["replacement_chars"]) == (None, None, 1)
    assert repaired["title"] == "Strona główna Q&A"
    assert repaired["text"].startswith("Strona główna Q&A ")
    counts = {"entities": 1, "mojibake_lines": 1, "spaces": 1}
    assert (repaired["unicode_repairs"], repaired["mojibake"], repaired["replacement_chars"]) == (counts, 0, 1)


def test_entities_of_plain_text_are_content() -> None:
    page = row(b"a &amp; b\xa0c", mime="text/plain")
    assert run(page, unicode="repair") is None
    assert (page["text"], page["unicode_repairs"]) == ("a &amp; b c", {"spaces": 1})
    given_text = row(text="a &amp; b", title="c &amp; d")
    assert run(given_text, unicode="repair") is None
    assert (given_text["text"], given_text["title"]) == ("a & b", "c & d")


KINDS = {
    "spaces": "[\xa0\u2000-\u200a\u202f\u205f]",
    "soft_hyphens": "\xad",
    "zero_width": "[\u200b-\u200d\u2060\ufeff]",
    "c1": "[\x80-\x9f]",
    "entities": r"&(?:[a-z]+|#\d+);",
    "mojibake": "[ÃÅ][\x80-\xbf]|â[\x80€]|Â[\xa0°®£]",
}
MISREAD = re.compile(r"nto\.pl|edp24|thecomet|langleyadvance|receptyprevas|northnews")


def test_real_pages(shared_data: Path) -> None:
    """Occurrences before and after, in the text of every fifteenth page and of six pages that are or look misread."""
    index = gzip.decompress((shared_data / "warc/pages-index.jsonl.gz").read_bytes()).splitlines()
    entries = [json.loads(line) for line in index]
    entries = [entry for entry in entries if not entry["content_encoding"] and not entry["transfer_encoding"]]
    entries = [entry for number, entry in enumerate(entries) if not number % 15 or MISREAD.search(entry["url"])]
    before, after, repairs = Counter[str](), Counter[str](), Counter[str]()
    for entry in entries:
        page = decode(html_at(shared_data / "warc" / entry["warc"], entry["offset"]), entry["http_charset"])
        text = by_resiliparse(HTMLTree.parse(page.text))
        repaired = repair_text(text)
        repairs.update(repaired.repairs)
        for kind, pattern in KINDS.items():
            before[kind] += len(re.findall(pattern, text))
            after[kind] += len(re.findall(pattern, repaired.text))
    assert len(entries) == 216
    assert before == {
        **{"spaces": 1611, "soft_hyphens": 7, "zero_width": 12},
        **{"c1": 902, "entities": 6, "mojibake": 713},
    }
    # The entities are in lines of code. Two soft hyphens were part of mojibake.
    assert {kind: count for kind, count in after.items() if count} == {"entities": 6, "mojibake": 1}
    assert repairs == {"spaces": 1611, "mojibake_lines": 128, "invisible": 12, "soft_hyphens": 5}
