"""Tests of the quality decision: every rule on both sides of its limit, texts for every reason, replay, languages."""

from math import ceil
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.quality.decide import QUALITY, RULES, QualityConfig, Rule, decide, make
from pipeline.stage import Drop
from schemas.signals import SIGNALS
from schemas.tables import DOCUMENTS

WORDS = [a + b + c for a in "bcdfghjklm" for b in ("an", "el", "in", "or", "ut") for c in "dgkmnprs"]
"""400 distinct words of four letters."""
PAGE = "\n".join(
    f"The {WORDS[i]} and the {WORDS[i + 1]} have {WORDS[i + 2]} to {WORDS[i + 3]} with {WORDS[i + 4]} {WORDS[i + 5]}."
    for i in range(0, 60, 6)
)
"""Ten sentences, each a line of 12 words, that no rule objects to."""

FUNCTIONS: dict[QualityConfig, Any] = {}


def run(text: str, language: str = "en", **fields: Any) -> tuple[dict[str, Any], Drop | None]:
    """The row and verdict of a text."""
    config = QualityConfig(**fields)
    if config not in FUNCTIONS:
        FUNCTIONS[config] = make(config, {})
    row: dict[str, Any] = {"text": text, "language": language}
    return row, FUNCTIONS[config](row)


def rule_of(text: str, language: str = "en", **fields: Any) -> str | None:
    """The rule that drops a text."""
    drop = run(text, language, **fields)[1]
    return drop.rule if drop else None


def stored(row: dict[str, Any]) -> dict[str, Any]:
    """The signals as the documents table gives them back."""
    names = [signal.name for signal in SIGNALS]
    schema = pa.schema([DOCUMENTS.field(name) for name in names])
    return dict(pa.RecordBatch.from_pylist([{name: row[name] for name in names}], schema=schema).to_pylist()[0])


def test_a_plain_page_is_kept() -> None:
    row, drop = run(PAGE)
    assert drop is None
    assert (row["cuts"], row["_body"], row["num_bytes"]) == ([], PAGE, len(PAGE))
    assert row["quality_scope"] == "all"
    assert row["gopher_num_words"] == 120
    assert row["gopher_stop_words"] == 5
    assert row["c4_num_sentences"] == 10
    assert row["fineweb_terminal_lines"] == 1.0
    assert len(row["_words"]) == 120


@pytest.mark.parametrize("rule", [rule for rules in RULES.values() for rule in rules], ids=lambda rule: rule.reason)
def test_the_limit_itself_is_kept_and_the_next_value_is_not(rule: Rule) -> None:
    signals, limit = run(PAGE)[0], getattr(QualityConfig(), rule.limit)
    outward = -np.inf if rule.limit.startswith("min_") else np.inf
    at, beyond = limit, limit + np.sign(outward)
    if next(signal.kind for signal in SIGNALS if signal.name == rule.signal) == pa.float32():
        at, beyond = np.float32(limit), np.nextafter(np.float32(limit), np.float32(outward))
    assert decide(signals | {rule.signal: float(at)}, QualityConfig()) is None
    assert decide(signals | {rule.signal: float(beyond)}, QualityConfig()) == Drop(rule.reason, float(beyond), limit)
    neutral = decide(signals | {rule.signal: float(beyond), "quality_scope": "neutral"}, QualityConfig())
    assert (neutral is not None) is rule.neutral
    assert decide(signals | {rule.signal: None}, QualityConfig()) is None


def test_rule_sets_decide_in_the_order_of_the_recipe_and_only_if_named() -> None:
    broken = run(PAGE)[0] | {"gopher_dup_line_frac": 0.9, "gopher_num_words": 3, "c4_curly_brackets": 1}
    assert decide(broken, QualityConfig()) == Drop("gopher_dup_line_frac", 0.9, 0.3)
    assert decide(broken, QualityConfig(rules=("c4", "gopher_quality"))) == Drop("c4_curly_bracket", 1, 0)
    assert decide(broken, QualityConfig(rules=("fineweb",))) is None


def test_reasons_are_closed_and_columns_are_declared() -> None:
    assert len(QUALITY.reasons) == sum(map(len, RULES.values())) == 30
    assert set(run(PAGE)[0]) == {"text", "language", *QUALITY.adds}
    assert {signal.name for signal in SIGNALS} < set(QUALITY.adds)
    assert QUALITY.ends is False


def test_an_unknown_rule_set_or_threshold_is_refused() -> None:
    with pytest.raises(ValidationError, match="gopher_qualty"):
        QualityConfig(rules=("gopher_qualty",))
    with pytest.raises(ValidationError, match="min_wrds"):
        QualityConfig(min_wrds=3)


def parts(count: int, repeated: int, between: str) -> str:
    """`count` parts of two words, the last `repeated` of them copies of the first."""
    distinct = [f"{WORDS[2 * i]} {WORDS[2 * i + 1]}" for i in range(count - repeated)]
    return between.join(distinct + distinct[:1] * repeated)


def echo(size: int, between: str) -> str:
    """Four parts, the last of 20 characters repeating the first, `size` characters in all."""
    return between.join(("a" * 20, "b" * 20, "c" * (size - 60 - 3 * len(between)), "a" * 20))


def top(n: int, times: int, num_words: int) -> str:
    """One n-gram `times` times with single words between and after, `num_words` in all: 5 num_words - 1 characters."""
    gram = " ".join(WORDS[300 : 300 + n])
    text = " ".join(f"{gram} {WORDS[i]}" for i in range(times))
    return " ".join([text, *WORDS[50 : 50 + num_words - times * (n + 1)]])


def passages(n: int, num_words: int) -> str:
    """Four passages of n words, each twice, and single words after, `num_words` in all; 16 n characters are repeats."""
    runs = [" ".join(WORDS[i * n : i * n + n]) for i in range(4)]
    return " ".join([*runs, *reversed(runs), *WORDS[50 : 50 + num_words - 8 * n]])


@pytest.mark.parametrize(
    ("reason", "kept", "dropped", "others"),
    [
        ("gopher_dup_para_frac", parts(10, 3, "\n\n"), parts(10, 4, "\n\n"), {"max_dup_para_char_frac": 1}),
        ("gopher_dup_para_char_frac", echo(100, "\n\n"), echo(99, "\n\n"), {}),
        ("gopher_dup_line_frac", parts(10, 3, "\n"), parts(10, 4, "\n"), {}),
        ("gopher_dup_line_char_frac", echo(100, "\n"), echo(99, "\n"), {"max_dup_line_char_frac": 0.2}),
    ],
)
def test_repeated_parts(reason: str, kept: str, dropped: str, others: dict[str, float]) -> None:
    limits = {"max_dup_line_char_frac": 1, "max_dup_line_frac": 0.3} | others
    limits |= {rule.limit: 9 for rule in RULES["gopher_repetition"] if "gram" in rule.limit}
    limits |= {"max_dup_line_frac": 1} if "para" in reason else {}
    assert rule_of(kept, rules=("gopher_repetition",), **limits) is None
    assert rule_of(dropped, rules=("gopher_repetition",), **limits) == reason


@pytest.mark.parametrize(("n", "times", "limit"), [(2, 10, 0.20), (3, 9, 0.18), (4, 8, 0.16)])
def test_top_ngrams(n: int, times: int, limit: float) -> None:
    most = ceil(((5 * n - 1) * times / limit + 1) / 5)
    kept, dropped = run(top(n, times, most))[0], run(top(n, times, most - 1))
    assert kept[f"gopher_top_{n}gram"] == pytest.approx((5 * n - 1) * times / (5 * most - 1))
    assert rule_of(top(n, times, most), rules=("gopher_repetition",)) is None
    assert dropped[1] == Drop(f"gopher_top_{n}gram", pytest.approx((5 * n - 1) * times / (5 * most - 6)), limit)


@pytest.mark.parametrize(("n", "limit"), [(5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)])
def test_repeated_ngrams(n: int, limit: float) -> None:
    most = ceil((16 * n / limit + 1) / 5)
    assert rule_of(passages(n, most), rules=("gopher_repetition",)) is None
    drop = run(passages(n, most - 1))[1]
    assert drop == Drop(f"gopher_dup_{n}gram", pytest.approx(16 * n / (5 * most - 6)), limit)


def prose(num_words: int, *others: str, stop_words: str = "the of") -> str:
    """So many words, two of them stop words, and other tokens after."""
    words = stop_words.split()
    return " ".join([*words, *WORDS[: num_words - len(words)], *others])


def listed(count: int, marked: int, before: str = "", after: str = "") -> str:
    """`count` lines of six words, the first of them marked."""
    lines = [" ".join(["the", "of", *WORDS[4 * i : 4 * i + 4]]) for i in range(count)]
    return "\n".join(f"{before}{line}{after}" if i < marked else line for i, line in enumerate(lines))


SHORT = " ".join(["the", "of", *(word[:3] for word in WORDS[:47])])
LONG = " ".join(["the", "of", *(word[:1] * 10 for word in WORDS[:47])])


@pytest.mark.parametrize(
    ("reason", "kept", "dropped"),
    [
        ("gopher_short_doc", prose(50), prose(49)),
        ("gopher_long_doc", prose(300), prose(301)),
        ("gopher_short_words", f"{SHORT} four", f"{SHORT} six"),
        ("gopher_long_words", f"{LONG} {'x' * 25}", f"{LONG} {'x' * 26}"),
        ("gopher_hashes", prose(90, *["#"] * 10), prose(89, *["#"] * 11)),
        ("gopher_ellipses", prose(89, *["...", "…"] * 5, "end"), prose(88, *["...", "…"] * 5, "...", "end")),
        ("gopher_bullet_lines", listed(10, 9, before=" - "), listed(10, 10, before="• ")),
        ("gopher_ellipsis_lines", listed(10, 3, after=" ... "), listed(10, 4, after="…")),
        ("gopher_alpha_words", prose(80, *["17"] * 20), prose(79, *["17"] * 21)),
        ("gopher_stop_words", prose(60, stop_words="the with"), prose(60, stop_words="the The the OF")),
    ],
)
def test_gopher_quality(reason: str, kept: str, dropped: str) -> None:
    assert rule_of(kept, rules=("gopher_quality",), max_words=300) is None
    assert rule_of(dropped, rules=("gopher_quality",), max_words=300) == reason


FIVE = "One two three. Four five six! Seven eight nine? Ten eleven twelve.\nThis is line two."


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (None, FIVE),
        (None, FIVE + "\n{ }"),
        (None, FIVE + "\nuse javascript { here }"),
        (None, FIVE + "\nlorem ipsum"),
        ("c4_curly_bracket", FIVE + "\nif x { y"),
        ("c4_curly_bracket", FIVE + "\nour privacy policy { applies"),
        ("c4_lorem_ipsum", FIVE + "\nLorem Ipsum dolor sit"),
        ("c4_lorem_ipsum", FIVE + "\nlorem ipsum in javascript"),
        ("c4_too_few_sentences", FIVE.replace("!", "")),
        ("c4_too_few_sentences", FIVE.replace(" is line", "")),
    ],
)
def test_c4(reason: str | None, text: str) -> None:
    assert rule_of(text, rules=("c4",)) == reason


def sentences(lengths: list[int]) -> str:
    """Distinct lines of so many characters (multiples of 5), each ending in a full stop."""
    return "\n".join(" ".join(WORDS[i : i + size // 5]) + "." for i, size in enumerate(lengths))


@pytest.mark.parametrize(
    ("reason", "kept", "dropped"),
    [
        ("fineweb_terminal_lines", (sentences([40] * 25), 22), (sentences([40] * 25), 23)),
        ("fineweb_short_lines", (sentences([30] * 67 + [35] * 33), 0), (sentences([30] * 68 + [35] * 32), 0)),
        ("fineweb_newline_ratio", (sentences([45] + [10] * 10 + [15]), 0), (sentences([40] + [10] * 10 + [15]), 0)),
    ],
)
def test_fineweb(reason: str, kept: tuple[str, int], dropped: tuple[str, int]) -> None:
    limits = {"max_newline_ratio": 1.0} if reason == "fineweb_short_lines" else {"max_short_lines": 1.0}
    limits |= {"max_newline_ratio": 0.25} if reason == "fineweb_newline_ratio" else {}  # 11 newlines, 44 or 43 tokens
    assert rule_of(kept[0].replace(".", "", kept[1]), rules=("fineweb",), **limits) is None
    assert rule_of(dropped[0].replace(".", "", dropped[1]), rules=("fineweb",), **limits) == reason


def test_fineweb_repeated_lines() -> None:
    lines = sentences([300] * 32 + [200]).split("\n")
    twice = [sentences([100])] * 2
    assert rule_of("\n".join(lines + twice), rules=("fineweb",)) is None  # 100 of 10,000 characters
    shorter = [sentences([295]), *lines[1:]]
    drop = run("\n".join(shorter + twice), rules=("fineweb",))[1]
    assert drop == Drop("fineweb_dup_line_chars", pytest.approx(100 / 9995), 0.01)


def test_a_share_equal_to_its_limit_is_kept_although_the_table_rounds_it_up() -> None:
    unlimited = {rule.limit: 9 for rule in RULES["gopher_repetition"] if rule.limit != "max_dup_line_frac"}
    row, drop = run(parts(10, 3, "\n"), rules=("gopher_repetition",), **unlimited)
    assert float(np.float32(0.3)) > 0.3
    assert row["gopher_dup_line_frac"] == float(np.float32(0.3))
    assert drop is None


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([*WORDS[:20], "the", "of", ".", "\n", "\n\n", "...", "#", "- ", "17", "[1]", "{"])))
def test_decisions_replayed_from_the_table_are_the_same(tokens: list[str]) -> None:
    row, drop = run(" ".join(tokens))
    assert decide(stored(row), QualityConfig()) == drop
    measured = row["gopher_dup_line_frac"]
    moved = QualityConfig(max_dup_line_frac=measured, max_dup_para_frac=row["gopher_dup_para_frac"])
    assert decide(stored(row), moved) == decide(row, moved)


def test_only_neutral_rules_decide_in_other_languages() -> None:
    german = PAGE.replace("The", "Die").replace(".", "")
    for english, word in {"the": "der", "and": "und", "have": "haben", "to": "über", "with": "mit"}.items():
        german = german.replace(f" {english} ", f" {word} ")
    row, drop = run(german, "de")
    assert drop is None
    assert row["quality_scope"] == "neutral"
    assert (row["gopher_stop_words"], row["fineweb_terminal_lines"], row["cuts"]) == (0, 0.0, [])
    assert rule_of(german, "en", rules=("gopher_quality",)) == "gopher_stop_words"
    assert rule_of(german + "\n{", "de", rules=("c4",)) == "c4_curly_bracket"
    assert rule_of("Guten Tag", "de", rules=("gopher_quality",)) == "gopher_short_doc"
    assert rule_of("\n".join([german.split("\n")[0]] * 9), "de") == "gopher_dup_line_frac"


def test_characters_count_as_words_but_make_no_ngrams_where_words_are_not_spaced() -> None:
    chinese = (
        "我们在北京的大学里学习中文。老师讲得非常清楚,学生也很努力!今天下午有一个关于历史和文化的讲座,欢迎大家参加。"
    )
    row, drop = run(chinese, "zh")
    assert drop is None
    assert row["gopher_num_words"] == 50
    assert row["c4_num_sentences"] == 3
    assert [row[rule.signal] for rule in RULES["gopher_repetition"] if "gram" in rule.signal] == [None] * 9
    assert stored(row)["gopher_dup_5gram"] is None
    assert rule_of(chinese[:-3], "zh") == "gopher_short_doc"
    assert rule_of("\n".join([chinese] * 3), "zh") == "gopher_dup_line_frac"


@pytest.mark.parametrize("language", ["en", "de", "zh"])
@pytest.mark.parametrize("text", ["", " ", "\n\n", "x", "[1]", "....", "\u2028", "\ud800 lone surrogate"])
def test_no_text_is_too_small(text: str, language: str) -> None:
    assert rule_of(text, language) is not None


@settings(deadline=None, max_examples=60)
@given(st.text(), st.sampled_from(["en", "de", "ja"]))
def test_any_text_is_measured(text: str, language: str) -> None:
    row, _ = run(text, language)
    assert stored(row) == {name: row[name] for name in stored(row)}
    assert row["num_bytes"] == len(row["_body"].encode())
