"""Tests of line signals and RefinedWeb's line rules: known answers of the peers, cuts against their definition."""

import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.quality.boilerplate import labels_of
from pipeline.quality.c4_fineweb import MAX_LABEL, C4LineRules, _label
from pipeline.quality.redpajama import COUNTER
from pipeline.quality.refinedweb import RefinedWebRules
from pipeline.quality.stage import QualityMeasures, measure
from pipeline.text.spacy_tokens import split_english
from pipeline.text.spans import union, without
from pipeline.text.words import Vocabulary
from schemas.signals import LINE_SIGNALS
from tests.pipeline.quality.test_rules import TEXT

pytestmark = pytest.mark.usefixtures("implementation")
VOCABULARY = Vocabulary(split_english)
CUT = QualityMeasures(frozenset(("refinedweb", "lines")), frozenset(("refinedweb",)))
KNOWN = {
    "rps_lines_ending_with_terminal_punctution_mark": [0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 0, 0],
    "rps_lines_javascript_counts": [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    "rps_lines_num_words": [1, 0, 12, 13, 13, 0, 13, 4, 1, 2, 2, 6, 4, 4, 6],
    "rps_lines_numerical_chars_fraction": [0, 0, 0.1458333, 0, 0, 0, 0, 0, 1, 0.1428571, 0.4, 0, 0, 0, 0.0769231],
    "rps_lines_start_with_bulletpoint": [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    "rps_lines_uppercase_letter_fraction": [
        *(0.2, 0, 0.0491803, 0.0277778, 0.0172414, 0, 0.0172414, 0.44, 0, 0.125, 0, 0.0833333, 0.0416667, 0.05, 0.04)
    ],
    "refinedweb_line_uppercase": [
        *(0.25, 0, 0.05, 2 / 71, 1 / 57, 0, 1 / 57, 11 / 24, 0, 1 / 7, 0, 2 / 23, 1 / 23, 1 / 19, 1 / 25)
    ],
    "refinedweb_line_digits": [0, 0, 7 / 60, 0, 0, 0, 0, 0, 1, 1 / 7, 4 / 12, 0, 0, 0, 0],
    "refinedweb_line_counter": [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0],
    "refinedweb_line_words": [1, 0, 13, 16, 15, 0, 15, 5, 1, 2, 2, 6, 4, 4, 6],
}
"""Signal → its value on each line of TEXT; those of RedPajama-V2 from the peer, the others counted by hand."""
LEFT = (
    TEXT.removeprefix("Menu\n\n")
    .replace("12345\n3 Likes\n1,024 views!\nItems in cart Buy", " Buy")
    .replace(" read more...\nSign-in to", "\nto")
)
"""What DCLM's line modifiers leave of TEXT."""


def body(text: str, language: str = "en") -> str:
    """What the line rules leave."""
    return str(measure(text, language, CUT, VOCABULARY)["_body"])


def test_known_answers() -> None:
    row = measure(TEXT, "en", CUT, VOCABULARY)
    assert set(KNOWN) == {signal.name for signal in LINE_SIGNALS}
    for name, values in KNOWN.items():
        assert row[name] == pytest.approx(values, abs=1e-6), name
    assert row["lines"][:3] == [(0, 5), (5, 6), (6, 67)]
    assert (row["lines"][-1], len(row["lines"])) == ((376, len(TEXT)), 15)
    assert row["_body"] == without(TEXT, row["cuts"]) == LEFT


@settings(deadline=None, max_examples=60)
@given(st.text("aB1 \n\u2028\r.", max_size=40))
def test_lines_tile_the_text(text: str) -> None:
    row = measure(text, "en", CUT, VOCABULARY)
    assert [text[start:end] for start, end in row["lines"]] == re.findall(r"[^\n]*\n|[^\n]+", text)
    assert {len(row[name]) for name in KNOWN} == {len(row["lines"])}


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("AbcD efGH", True),  # 4 of 9
        ("AbcD eFGHI", False),  # 6 of 10
        ("ABCD efgh1", True),
        ("ABCDe fg H", True),  # exactly half
        ("12345 6", True),
        ("3 likes", False),
        ("1,234.5K  Views!", False),
        ("- 12m followers -", False),
        ("3 people like this", True),
        ("likes: 3", True),
        ("alone", False),
        ("two words", True),
        ("", True),
    ],
)
def test_line_rules(line: str, kept: bool) -> None:
    assert body(f"first line\n{line}\nlast line") == (
        f"first line\n{line}\nlast line" if kept else "first line\nlast line"
    )


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("  first line \n1234\nlast line\n\n", "first line \nlast line"),
        ("one two\n 1234 \n", "one two"),  # stripped, the last line is a number; and one word
        ("3 items in cart\nITEMS IN CART\nmy Items in Cart please", "3\nmy please"),
        ("Sign-in\nsign-in now please\nplease sign-in", "now please\nplease sign-in"),
        ("a tale Read more...\nread more... of it\nread moreabc", "a tale\nread more... of it"),
        (" ".join(["word"] * 10) + " items in cart", " ".join(["word"] * 10) + " items in cart"),
        ("LOUD LOUD\n12\nx", ""),
        ("", ""),
    ],
)
def test_what_is_left(text: str, left: str) -> None:
    assert body(text) == left


def test_other_languages_lose_capitals_and_digits_alone() -> None:
    text = "LAUTES GESCHREI\n1234\n3 likes\nallein\nzwei Wörter"
    assert body(text, "de") == "3 likes\nallein\nzwei Wörter"


def test_settings_of_the_line_rules() -> None:
    rules = RefinedWebRules(max_uppercase=0.2, min_words=3)
    row = measure(
        "AbCd efgh ij\nxy zz\na b c", "en", QualityMeasures(frozenset(), CUT.cut_lines, refinedweb=rules), VOCABULARY
    )
    assert row["_body"] == "AbCd efgh ij\na b c"
    assert "refinedweb_lines_cut" not in row


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("one two three four\nX", 1 / 5),
        ("one two three four\n12 34", 0.0),
        ("X\none\u00a0two three", 1 / 3),
        ("X Y\n\u00a0one two", 1 / 3),  # of X, Y, two; stripped, "\u00a0one" becomes a word
        ("LOUD", 1.0),
        ("...", 1.0),
        ("", 1.0),
    ],
)
def test_share_of_removed_words(text: str, share: float) -> None:
    assert measure(text, "en", CUT, VOCABULARY)["refinedweb_removed_words"] == pytest.approx(share)


def test_both_line_rules_cut_together() -> None:
    measures = QualityMeasures(cut_lines=frozenset(("c4", "refinedweb")))
    text = "LOUD LOUD LOUD\none two three [1]\nfour five\nour privacy policy is here\nsix seven eight"
    row = measure(text, "en", measures, VOCABULARY)
    assert row["_body"] == without(text, row["cuts"]) == "one two three \nsix seven eight"
    assert union([(0, 2), (5, 7)], [(2, 3), (6, 9)]) == [(0, 3), (5, 9)]


def dclm_left(text: str) -> str:
    """What the first four line modifiers of DCLM leave, by their definition."""

    def keep(text: str, rule: Any) -> str:
        return "\n".join(line for line in text.split("\n") if not line or rule(line))

    text = keep(text, lambda line: sum(map(str.isupper, line)) <= 0.5 * len(line)).strip()
    text = keep(text, lambda line: sum(map(str.isdigit, line)) <= 0.999999 * len(line)).strip()
    text = keep(text, lambda line: not COUNTER.search(line.lower())).strip()
    return keep(text, lambda line: 2 <= len(line.split()) < math.inf).strip()


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(["AB", "ab", "12", "3 likes", " ", "\n", "\n", "a b c", "\u2028", "X y"])))
def test_cuts_are_those_of_the_definition(parts: list[str]) -> None:
    text = "".join(parts)
    row = measure(text, "en", CUT, VOCABULARY)
    assert row["_body"] == without(text, row["cuts"]) == dclm_left(text)
    assert all(left[1] < right[0] for left, right in zip(row["cuts"], row["cuts"][1:]))


# ------------------------------------------------------------------------------------------- cuts that keep structure

STRUCTURE = QualityMeasures(keep_structure=True)
RECIPE = """# Green Shakshuka

Serves 4

Ingredients:
- 2 leeks [edit]
- salt

Privacy Policy
Please enable JavaScript

Method

    Fry the leeks.[1] Add the
    eggs, and wait.[2]
[edit]

We use cookies.

Enjoy"""


def kept(text: str, measures: QualityMeasures = STRUCTURE, language: str = "en") -> str:
    row = measure(text, language, measures, VOCABULARY)
    assert row["_body"] == without(text, row["cuts"])
    assert row["num_bytes"] == len(row["_body"].encode())
    return str(row["_body"])


def test_headings_lists_and_paragraph_breaks_stay() -> None:
    assert kept(RECIPE) == (
        "# Green Shakshuka\n\nServes 4\n\nIngredients:\n- 2 leeks\n- salt\n\nMethod\n\n"
        "    Fry the leeks. Add the\n    eggs, and wait.\n\nEnjoy"
    )
    assert kept(RECIPE, QualityMeasures()) == ("# Green Shakshuka\n- 2 leeks \nFry the leeks. Add the\neggs, and wait.")
    assert kept(RECIPE, language="de") == RECIPE


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a\ncookie policy\nb", "a\nb"),
        ("a\n\ncookie policy\nb", "a\n\nb"),
        ("a\ncookie policy\n\nb", "a\n\nb"),
        ("a\n\ncookie policy\n\nuse cookies\n\nb", "a\n\nb"),
        ("a\n\nb\ncookie policy\nc\n\n\nd", "a\n\nb\nc\n\n\nd"),
        ("cookie policy\n\n a\n\ncookie policy", "a"),
        ("cookie policy", ""),
        ("\n a \n", "\n a \n"),  # nothing is cut
        (f"a\n{'x' * 1001}\nb", "a\nb"),
        (f"a\n{'x' * 1000}\nb", f"a\n{'x' * 1000}\nb"),
        ("see [1], and [citation needed] [2]\n[3] [4]\nb", "see, and\nb"),
        ("a [1] b[2]. c [3]d\n  [4] e", "a b. c d\n e"),
        ("", ""),
    ],
)
def test_a_run_of_cut_lines_leaves_at_most_one_paragraph_break(text: str, left: str) -> None:
    assert kept(text) == left


@pytest.mark.parametrize(
    ("line", "stays"),
    [
        ("Please enable JavaScript to view the comments.", False),
        ("This slideshow requires JavaScript.", False),
        ("href=javascript:void(0)", False),
        ("JavaScript", True),
        ("We learned JavaScript and Rust at school.", True),
        ("You need JavaScript" + " word" * 22, False),
        ("You need JavaScript" + " word" * 23, True),
    ],
)
def test_only_notices_about_javascript_are_cut(line: str, stays: bool) -> None:
    assert kept(f"first\n{line}\nlast") == (f"first\n{line}\nlast" if stays else "first\nlast")


@pytest.mark.parametrize(
    ("line", "stays"),
    [
        ("ADVERTISEMENT", False),
        ("  • Read more…", False),
        ("Share:", False),
        ("Share the bread", True),
        ("Ingredients", True),
        ("}", True),
        ("* * *", True),
        ("×", False),
    ],
)
def test_labels_are_cut_from_english(line: str, stays: bool) -> None:
    assert kept(f"first\n\n{line}\nlast") == (f"first\n\n{line}\nlast" if stays else "first\n\nlast")
    assert kept(f"first\n\n{line}\nlast", language="de") == f"first\n\n{line}\nlast"


def test_labels_are_what_a_line_is_compared_with() -> None:
    labels = labels_of("en")
    assert labels_of("xx") == frozenset()
    assert {label: _label(f" • {label.upper()} …\n") for label in labels} == {label: label for label in labels}
    assert max(map(len, labels)) + 4 < MAX_LABEL


def test_refinedweb_keeps_short_lines_and_at_most_one_paragraph_break() -> None:
    measures = QualityMeasures(CUT.families, CUT.cut_lines, keep_structure=True)
    text = "Method\n\n3 likes\n\n1234\n\nFry the leeks.\nSign-in now please\nitems in cart\nEnjoy"
    assert kept(text, measures) == "Method\n\nFry the leeks.\nnow please\nEnjoy"
    assert kept("alone\ntwo words", measures) == "alone\ntwo words"


def test_both_line_rules_keep_structure_together() -> None:
    measures = QualityMeasures(cut_lines=frozenset(("c4", "refinedweb")), keep_structure=True)
    assert kept("one\n\nLOUD\n\ncookie policy\n\ntwo", measures) == "one\n\ntwo"
    assert kept("one\n\ncookie policy\nLOUD\n\ntwo", measures) == "one\n\ntwo"


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from(["", "one", "one two three.", "use cookies", "12 [1]", "LOUD LOUD", "{javascript}"])))
def test_signals_do_not_depend_on_the_structure_of_the_text(parts: list[str]) -> None:
    text = "\n".join(parts)
    both = frozenset(("c4", "refinedweb"))
    families = frozenset(("c4", "fineweb", "refinedweb"))
    published, structured = (
        measure(text, "en", QualityMeasures(families, both, keep_structure=keeps), VOCABULARY)
        for keeps in (False, True)
    )
    own = {"cuts", "_body", "_words", "num_bytes"}
    assert {
        name: value.tolist() if name == "_words" else value for name, value in published.items() if name not in own
    } == {name: value for name, value in structured.items() if name not in own}
    assert "\n\n\n" not in structured["_body"] or "\n\n\n" in text
    assert (structured["_body"] == text) or structured["cuts"]


def test_other_settings_of_the_lines_do_not_change_what_stays() -> None:
    rules = C4LineRules(terminal_punctuation=True, min_words=5)
    assert kept(RECIPE, QualityMeasures(lines=rules, keep_structure=True)) == kept(RECIPE)
