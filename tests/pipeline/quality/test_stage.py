"""Tests of the quality decision: every rule on both sides of its limit, texts for every reason, replay, languages."""

from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.engine.rules import evaluate_row
from pipeline.engine.stage import EVERY, Drop
from pipeline.quality.config import QualityConfig
from pipeline.quality.rules import (
    DEFAULT_RULES,
    LIMITS,
    NEW_SIGNALS,
    REASONS,
    RULES,
    SIGNALS_OF,
    QualityLimits,
    QualityRule,
)
from pipeline.quality.stage import QUALITY, checks, make
from schemas.errors import ConfigError
from schemas.signals import FAMILIES, SIGNALS
from schemas.tables import DOCUMENTS
from tests.support.native import python_only

WORDS = [a + b + c for a in "bcdfghjklm" for b in ("an", "el", "in", "or", "ut") for c in "dgkmnprs"]
"""400 distinct words of four letters."""
PAGE = "\n".join(
    f"The {WORDS[i]} and the {WORDS[i + 1]} have {WORDS[i + 2]} to {WORDS[i + 3]} with {WORDS[i + 4]} {WORDS[i + 5]}."
    for i in range(0, 60, 6)
)
"""Ten sentences, each a line of 12 words, that no rule objects to."""

DATATROVE = RULES["datatrove"]
FUNCTIONS: dict[str, Any] = {}


def run(text: str, language: str = "en", **fields: Any) -> tuple[dict[str, Any], Drop | None]:
    """The row and verdict of a text."""
    config = QualityConfig(**fields)
    content = config.model_dump_json(include=config.fields_of("content"))
    if content not in FUNCTIONS:
        FUNCTIONS[content] = make(config, {})
    row: dict[str, Any] = {"text": text, "language": language}
    FUNCTIONS[content](row)
    return row, decide(row, config)


def decide(row: dict[str, Any], config: QualityConfig) -> Drop | None:
    """The first check that a row breaks."""
    broken = evaluate_row(checks(config, {}, {}), row)
    return Drop(broken[0], pytest.approx(broken[1]), pytest.approx(broken[2])) if broken else None


def rule_of(text: str, language: str = "en", **fields: Any) -> str | None:
    """The rule that drops a text."""
    drop = run(text, language, **fields)[1]
    return drop.rule if drop else None


def stored(row: dict[str, Any]) -> dict[str, Any]:
    """The signals as the documents table gives them back."""
    names = [signal.name for signal in SIGNALS if signal.name in row]
    schema = pa.schema([DOCUMENTS.field(name) for name in names])
    return dict(pa.RecordBatch.from_pylist([{name: row[name] for name in names}], schema=schema).to_pylist()[0])


@pytest.mark.usefixtures("implementation")
def test_a_plain_page_is_kept() -> None:
    row, drop = run(PAGE)
    assert drop is None
    assert (row["cuts"], row["_body"], row["num_bytes"]) == ([], PAGE, len(PAGE))
    assert row["gopher_num_words"] == 120
    assert row["gopher_stop_words"] == 5
    assert row["c4_num_sentences"] == 10
    assert row["fineweb_terminal_lines"] == 1.0
    with python_only():
        row, _ = run(PAGE)
    assert len(row["_words"]) == 120  # The native module computes them from the text where they are used.


EVERY_RULE = [
    (dialect, name, rule) for dialect, sets in RULES.items() for name, rules in sets.items() for rule in rules
]


@pytest.mark.parametrize(("dialect", "name", "rule"), EVERY_RULE, ids=lambda part: getattr(part, "setting", part))
def test_the_limit_itself_is_kept_and_the_next_value_is_not(dialect: str, name: str, rule: QualityRule) -> None:
    config = QualityConfig(dialect=dialect, rules=(name,))
    row = {other.signal: None for other in RULES[dialect][name]} | {"language": "en"}
    outward = -np.inf if rule.setting.startswith("min_") else np.inf
    at, beyond = rule.limit, rule.limit + np.sign(outward)
    if next(signal.kind for signal in (*SIGNALS, *NEW_SIGNALS) if signal.name == rule.signal) == pa.float32():
        at, beyond = np.float32(rule.limit), np.nextafter(np.float32(rule.limit), np.float32(outward))
    assert decide(row | {rule.signal: float(at)}, config) is None
    assert decide(row | {rule.signal: float(beyond)}, config) == Drop(rule.reason, float(beyond), rule.limit)
    other = decide(row | {rule.signal: float(beyond), "language": "xx"}, config)
    assert (other is not None) is rule.neutral
    assert decide(row, config) is None


def test_rule_sets_decide_in_the_order_of_the_recipe_and_only_if_named() -> None:
    broken = run(PAGE)[0] | {"gopher_dup_line_frac": 0.9, "gopher_num_words": 3, "c4_curly_brackets": 1}
    assert decide(broken, QualityConfig()) == Drop("gopher_dup_line_frac", 0.9, 0.3)
    assert decide(broken, QualityConfig(rules=("c4", "gopher_quality"))) == Drop("c4_curly_bracket", 1, 0)
    assert decide(broken, QualityConfig(rules=("fineweb",))) is None


def test_only_the_families_that_are_asked_for_are_measured() -> None:
    row = run(PAGE, rules=("c4",), families=("c4",))[0]
    assert {signal.name for signal in SIGNALS if signal.name in row} == {signal.name for signal in FAMILIES["c4"]}
    assert "lines" not in row
    assert run(PAGE, dialect="dclm")[0].keys() & {"gopher_num_words", "dclm_num_words"} == {"dclm_num_words"}
    assert run(PAGE, rules=("markup",))[0]["code_lines"] == 0  # measured, because a rule looks at it


def test_one_table_serves_every_dialect_whose_families_it_has() -> None:
    measured = {"families": ("c4", "dclm", "dolma"), "cut_lines": ("refinedweb",)}
    dclm = QualityConfig(dialect="dclm", rules=("gopher_quality",), **measured)
    dolma = QualityConfig(dialect="dolma", **measured)
    assert dclm.content() == dolma.content()
    assert (dclm.decisions()["dialect"], dolma.decisions()["dialect"]) == ("dclm", "dolma")


def test_reasons_are_closed_and_columns_are_declared() -> None:
    assert {rule.reason for sets in RULES.values() for rules in sets.values() for rule in rules} == set(REASONS)
    assert (QUALITY.reasons, QUALITY.verdicts) == ({}, REASONS)
    assert {rule.setting for sets in RULES.values() for rules in sets.values() for rule in rules} == {
        row.setting for row in LIMITS
    }
    assert {row.setting for row in LIMITS} == set(QualityLimits.model_fields) == QualityLimits.fields_of("decision")
    assert len(checks(QualityConfig(), {}, {})) == 30
    row = run(PAGE, families=(*SIGNALS_OF, "lines"), cut_repeated_lines=True)[0]
    assert set(row) == {"text", "language", *QUALITY.adds}
    assert {signal.name for signal in SIGNALS} < set(QUALITY.adds)
    assert QUALITY.ends is False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rules": ["gopher_qualty"]}, "gopher_qualty"),
        ({"rules": ["c4", "c4"]}, "rules: expected each rule set once, got 'c4' 2 times. Name it once."),
        ({"min_wrds": 3}, "min_wrds"),
        (
            {"rules": ["c4"], "min_words": 3},
            "min_words: expected .*, got one that no chosen rule of the dialect 'datatrove' uses",
        ),
        ({"by_language": {"de": {"min_wrds": 3}}}, "by_language.de.min_wrds: .*got 'min_wrds' .did you mean 'min_wo"),
        ({"rules": ["c4"], "by_language": {"de": {"min_words": 3}}}, "by_language.de.min_words: .* no chosen rule of"),
        ({"families": ["gopher_quality", "gopher_repetition", "fineweb"]}, "'c4', which .* Add 'c4' to quality.famil"),
        ({"families": ["fineweb"], "rules": ["fineweb"], "cut_lines": [], "c4_min_line_words": 3}, "c4_min_line_words"),
        (
            {"refinedweb_min_line_words": 3},
            "refinedweb_min_line_words: expected 'refinedweb' in families .*, got it in neither. Remove",
        ),
        (
            {"dialect": "dclm", "rules": ["fineweb"]},
            "rule sets of the dialect 'dclm', got 'fineweb' .did you mean 'ref",
        ),
        (
            {"dialect": "dclm", "max_hash_ratio": 0.2},
            "max_hash_ratio: .* no chosen rule of the dialect 'dclm' uses. Remove quality.max_hash_ratio",
        ),
        ({"dialect": "dolma", "families": ["c4"]}, "'dolma', which the rules compare, got .'c4'.. Add 'dolma' to"),
        ({"rules": ["c4"], "max_code_signs": 0.2}, "max_code_signs: .* no chosen rule of"),
        (
            {"cut_lines": [], "keep_structure": True},
            "keep_structure: expected line rules in cut_lines, got none. Remove",
        ),
        ({"dialect": "dolma", "keep_structure": True}, "keep_structure: expected line rules"),
        ({"c4_min_line_words": 0}, "c4_min_line_words\\n.*greater than or equal to 1"),
        ({"dialect": "gopher"}, "dialect"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        QualityConfig(**fields)


def limit_of(reason: str, **fields: Any) -> dict[str, float]:
    """The limits of a check by language."""
    return dict(next(check.limits for check in checks(QualityConfig(**fields), {}, {}) if check.reason == reason))


def test_explicit_thresholds_hold_wherever_the_rule_does() -> None:
    assert limit_of("gopher_short_doc", min_words=30)[EVERY] == 30
    assert limit_of("gopher_short_doc", min_words=30)["en"] == 30
    assert EVERY not in limit_of("gopher_alpha_words", min_alpha_words=0.5)
    limits = limit_of("gopher_short_doc", min_words=30, by_language={"de": {"min_words": 20}})
    assert (limits["de"], limits["en"], limits[EVERY]) == (20, 30, 30)
    assert limit_of("fineweb_short_lines", by_language={"xx": {"max_short_lines": 0.5}})["xx"] == 0.5


def test_thresholds_and_rules_decide_and_do_not_change_what_is_stored() -> None:
    plain = QualityConfig()
    moved = QualityConfig(min_words=3, rules=("gopher_quality",), by_language={"de": {"min_words": 9}})
    assert moved.content() == plain.content()
    assert moved.decisions() != plain.decisions()
    assert QualityConfig(cut_lines=()).content() != plain.content()
    assert plain.content()["families"] == list(DEFAULT_RULES["datatrove"])


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
    limits |= {rule.setting: 9 for rule in DATATROVE["gopher_repetition"] if "gram" in rule.setting}
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
    limits: dict[str, Any] = {"cut_lines": ()}
    limits |= {"max_newline_ratio": 1.0} if reason == "fineweb_short_lines" else {"max_short_lines": 1.0}
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
    unlimited = {rule.setting: 9 for rule in DATATROVE["gopher_repetition"] if rule.setting != "max_dup_line_frac"}
    row, drop = run(parts(10, 3, "\n"), rules=("gopher_repetition",), **unlimited)
    assert float(np.float32(0.3)) > 0.3
    assert row["gopher_dup_line_frac"] == float(np.float32(0.3))
    assert drop is None


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([*WORDS[:20], "the", "of", ".", "\n", "\n\n", "...", "#", "- ", "17", "[1]", "{"])))
def test_a_limit_moved_to_the_measured_value_keeps(tokens: list[str]) -> None:
    row, drop = run(" ".join(tokens))
    table = stored(row) | {"language": "en"}
    assert decide(table, QualityConfig()) == drop
    measured = table["gopher_dup_line_frac"], table["gopher_dup_para_frac"]
    moved = QualityConfig(max_dup_line_frac=measured[0], max_dup_para_frac=measured[1])
    verdict = decide(row, moved)
    assert verdict is None or verdict.rule not in ("gopher_dup_line_frac", "gopher_dup_para_frac")


def test_only_neutral_rules_decide_in_other_languages() -> None:
    german = PAGE.replace("The", "Die").replace(".", "")
    for english, word in {"the": "der", "and": "und", "have": "haben", "to": "über", "with": "mit"}.items():
        german = german.replace(f" {english} ", f" {word} ")
    row, drop = run(german, "xx")
    assert drop is None
    assert (row["gopher_stop_words"], row["fineweb_terminal_lines"], row["cuts"]) == (0, 0.0, [])
    assert rule_of(german, "en", rules=("gopher_quality",)) == "gopher_stop_words"
    assert rule_of(german + "\n{", "xx", rules=("c4",)) == "c4_curly_bracket"
    assert rule_of("Guten Tag", "xx", rules=("gopher_quality",)) == "gopher_short_doc"
    assert rule_of("\n".join([german.split("\n")[0]] * 9), "xx") == "gopher_dup_line_frac"


PROFILES = """
[en]
script = "Latn"
stop_words = ["and", "the"]
[de]
script = "Latn"
stop_words = ["der", "und"]
[de.limits]
min_stop_words = 1
max_mean_word_length = 12.5
max_dup_5gram = 0.25
[fr]
script = "Latn"
[fr.limits]
max_short_lines = 0.9
"""


def test_a_profile_gives_a_language_its_stop_words_and_limits(tmp_path: Path) -> None:
    file = tmp_path / "profiles.toml"
    file.write_text(PROFILES)
    config = QualityConfig(profiles=str(file), max_short_lines=0.8, by_language={"fr": {"max_dup_5gram": 0.2}})
    assert QUALITY.models(config) == {"profiles": str(file)}
    models = {"profiles": str(file)}
    limits = {check.setting: dict(check.limits) for check in checks(config, models, {})}
    assert limits["min_stop_words"] == {"en": 2, "de": 1}
    assert limits["max_mean_word_length"] == {"en": 10, "de": 12.5}
    assert limits["max_dup_5gram"] == {"en": 0.15, EVERY: 0.15, "de": 0.25, "fr": 0.2}
    assert limits["max_short_lines"] == {"en": 0.8, "fr": 0.8}
    measure_row = make(config, models)
    row: dict[str, Any] = {"text": "der Hund und der Mann the", "language": "de"}
    measure_row(row)
    assert row["gopher_stop_words"] == 2
    english: dict[str, Any] = {"text": "the and of der", "language": "en"}
    measure_row(english)
    assert english["gopher_stop_words"] == 3


def test_built_in_profiles_hold_in_the_dialect_they_were_derived_in(tmp_path: Path) -> None:
    built_in = {check.setting: check.limits for check in checks(QualityConfig(dialect="dclm"), {}, {})}
    assert built_in["min_stop_words"] == {"en": 2}
    file = tmp_path / "profiles.toml"
    file.write_text(PROFILES)
    given = checks(QualityConfig(dialect="dclm"), {"profiles": str(file)}, {})
    assert {check.setting: check.limits for check in given}["min_stop_words"] == {"en": 2, "de": 1}


def test_a_profile_with_a_limit_of_no_threshold_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "profiles.toml"
    file.write_text('[de]\nscript = "Latn"\n[de.limits]\nmin_wrds = 3\n')
    with pytest.raises(ConfigError, match=r"expected names of limits in \[quality\], got .'min_wrds'.\. Run `pens"):
        checks(QualityConfig(), {"profiles": str(file)}, {})


def test_words_come_from_dictionaries_where_writing_does_not_separate_them() -> None:
    chinese = (
        "我们在北京的大学里学习中文。老师讲得非常清楚,学生也很努力!今天下午有一个关于历史和文化的讲座,欢迎大家参加。"
    )
    row, drop = run(chinese, "zh", rules=("gopher_quality", "c4"), min_words=25)
    assert drop is None
    assert 25 <= row["gopher_num_words"] <= 35
    assert row["c4_num_sentences"] == 3
    assert row["gopher_dup_5gram"] == 0
    assert rule_of(chinese[:20], "zh", rules=("gopher_quality",), min_words=25) == "gopher_short_doc"
    assert rule_of("\n".join([chinese] * 3), "zh") == "gopher_dup_line_frac"
    assert run("\n".join([chinese] * 3), "zh")[0]["gopher_dup_10gram"] > 0.5


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
