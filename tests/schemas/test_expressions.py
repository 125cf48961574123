"""Conditions: values by hand, mistakes with their position, and random conditions against an interpreter of rows."""

import pickle
import re
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.condition_parts import (
    ArithmeticPart,
    ColumnPart,
    ComparisonPart,
    JoinedPart,
    MembershipPart,
    NegatedPart,
    NullTest,
    RangePart,
    TextMatchPart,
    ValuePart,
)
from schemas.condition_parts import ConditionPart as Part
from schemas.errors import ConfigError
from schemas.expressions import MAX_CHARS, MAX_DEPTH, SingleComparison, equality, parse_expression

SCHEMA = pa.schema(
    [
        ("share", pa.float32()),
        ("ratio", pa.float64()),
        ("words", pa.int32()),
        ("language", pa.string()),
        ("second", pa.string()),
        ("rule", pa.string()),
        ("url", pa.string()),
        ("flag", pa.bool_()),
        ("doc_id", pa.binary(16)),
        ("digest", pa.binary()),
        ("date", pa.timestamp("ms", tz="UTC")),
        ("entries", pa.list_(pa.int32())),
    ]
)
ROWS = pa.Table.from_pylist(
    [
        {
            "share": 0.3,
            "ratio": 0.3,
            "words": 1,
            "language": "en",
            "second": "en",
            "rule": "language",
            "url": "https://a.example/?q=1",
            "flag": True,
            "doc_id": bytes.fromhex("9acbdc408dec") + bytes(10),
            "digest": b"\x01\x02",
            "date": datetime(2024, 2, 1, 12, tzinfo=UTC),
            "entries": [1],
        },
        {
            "share": 0.5,
            "ratio": -2.0,
            "words": 2,
            "language": "de",
            "second": "fr",
            "rule": "it's",
            "doc_id": bytes(16),
        },
        {"share": 0.0, "words": 0, "language": "is", "flag": False, "date": datetime(2024, 2, 2, tzinfo=UTC)},
        {},
    ],
    SCHEMA,
)


def parse(text: str):
    return parse_expression(text, SCHEMA, "--where", ("rule",))


def parse_or_message(text: str):
    """The condition, or the message of its error."""
    try:
        return parse(text)
    except ConfigError as error:
        return str(error)


def matching(text: str) -> list[int]:
    """The numbers of the rows that match, by `evaluate`; the filter must match the same ones."""
    condition = parse(text)
    values = condition.evaluate(ROWS)
    assert values.type == pa.bool_()
    assert values.null_count == 0
    assert ROWS.filter(condition.to_filter()).equals(ROWS.filter(values))
    (batch,) = ROWS.to_batches()
    assert condition.evaluate(batch).equals(values)
    return [number for number, is_true in enumerate(values.to_pylist()) if is_true]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("words > 1", [1]),
        ("words >= 1", [0, 1]),
        ("1 < words", [1]),
        ("words = 1", [0]),
        ("words == 1.0", [0]),
        ("words != 1", [1, 2]),
        ("words <> 1", [1, 2]),
        ("share > 0.3", [1]),  # 0.3 is rounded to float32, as the column is
        ("share = .3", [0]),
        ("ratio > share", []),  # float32(0.3) is larger than 0.3
        ("share > ratio", [0, 1]),
        ("words is null", [3]),
        ("words IS NOT NULL", [0, 1, 2]),
        ("entries is null", [1, 2, 3]),
        ("share * 2 > 0.9", [1]),
        ("words + 1 = 2 or words - 2 = 0", [0, 1]),
        ("-words < -1", [1]),
        ("1 / words > 0.7", [0]),  # 1 / 0 is null
        ("1 / words is null", [2, 3]),
        ("(words + 1) * 2 = 4", [0]),
        ("words + 1 * 2 = 4", [1]),
        ("language = de", [1]),
        ('language == "de"', [1]),
        ("language = is", [2]),
        ("language != 'de'", [0, 2]),
        ("language = second", [0]),
        ("language = 'second'", []),
        ("language in (de, 'is', xx)", [1, 2]),
        ("language not in ('de')", [0, 2]),
        ("words in (0, 2)", [1, 2]),
        ("language > 'en'", [2]),
        ("rule = language", [0]),  # values of `rule` are names
        ("rule = 'it''s'", [1]),
        ('rule = "it\'s"', [1]),
        ("url = https://a.example/?q=1", [0]),
        ("url contains 'example/?q'", [0]),  # ? is no pattern
        ("url contains EXAMPLE", []),  # case matters
        ("url contains .", [0]),
        ("url contains '%'", []),
        ("url not contains 'print'", [0]),  # a null neither contains a text nor lacks it
        ("url like '%example/_q=1'", [0]),
        ("url like 'example'", []),  # the whole text
        ("language like e%", [0]),
        ("language not like 'e%'", [1, 2]),
        ("language contains e", [0, 1]),
        ("language not contains e", [2]),
        ("language CONTAINS second", []),  # the name of a column is text here
        ("not (language contains e)", [2]),
        ("rule contains 't''s' or url contains \"example\"", [0, 1]),
        ("flag", [0]),
        ("not flag", [2]),
        ("flag = false", [2]),
        ("not (words > 1)", [0, 2]),
        ("not words > 1", [0, 2]),
        ("not words > 1 and flag", [0]),
        ("words > 1 or flag and language = de", [1]),
        ("(words > 1 or flag) and language = de", [1]),
        ("flag or words = 2", [0, 1]),
        ("doc_id = 9acbdc408dec", [0]),
        ("doc_id = '9ACBDC408DEC0'", [0]),
        ("doc_id != 9acbdc408dec", [1]),
        (f"doc_id = {'00' * 16}", [1]),
        (f"doc_id > {'00' * 16}", [0]),
        ("doc_id in (9acbdc408dec, 000000000000)", [0, 1]),
        ("digest = 0102", [0]),
        ("date > 2024-02-01", [0, 2]),
        ("date >= '2024-02-01T13:00:00+01:00'", [0, 2]),
        ("'2024-02-01T12:00:00Z' < date", [2]),
    ],
)
def test_rows_that_match(text: str, rows: list[int]) -> None:
    assert matching(text) == rows
    assert matching(parse(text).canonical) == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--where: expected a condition, got none."),
        (
            "langage = de",
            "the name of a column at character 1 of `langage = de`, got 'langage' (did you mean 'language'?)",
        ),
        ("words > 1 and shar > 2", "the name of a column at character 15 of `words > 1 and shar > 2`, got 'shar'"),
        ("words < many", "a number or a column at character 9 of `words < many`, got 'many'. Compare words with a"),
        ("share < rato", "got 'rato' (did you mean 'ratio'?)"),
        ("words > 'a'", "a number at character 9 of `words > 'a'`, got text 'a'. Compare words with a number."),
        ("language > 3", "text at character 12 of `language > 3`, got the number 3. Put text in quotes."),
        ("words = true", "a number at character 9 of `words = true`, got true."),
        ("words = language", "a number at character 9 of `words = language`, got language, which is text."),
        ("words + language > 3", "a number at character 9 of `words + language > 3`, got language, which is text."),
        ("words > 1 / 0", "a finite number at character 13 of `words > 1 / 0`, got 1 / 0."),
        ("words >", "a column or a value at character 8 of `words >`, got the end."),
        ("(words > 1", "`)` at character 11 of `(words > 1`, got the end."),
        ("words > 1)", "`and`, `or` or the end at character 10 of `words > 1)`, got ')'."),
        ("words", "a comparison at character 1 of `words`, got a number alone. Write it as words > 0."),
        ("language or flag", "a comparison before `or` at character 1 of `language or flag`, got text alone."),
        ("flag and language", "a comparison at character 10 of `flag and language`, got text alone."),
        ("url ilike 'x'", "an operator at character 5 of `url ilike 'x'`, got 'ilike'. Write url contains 'text'"),
        ("words like '1%'", "a column of text before `like` at character 1 of `words like '1%'`, got words, which is"),
        ("url like", "text after `like` at character 9 of `url like`, got the end. Write it as url like '%news%'."),
        ("flag && words > 1", "`and`, `or` or the end at character 6 of `flag && words > 1`, got '&&'. Write `and`."),
        ("words > 1 || flag", "`and`, `or` or the end at character 11 of `words > 1 || flag`, got '||'. Write `or`."),
        ("words > 1&&flag", "at character 10 of `words > 1&&flag`, got '&&flag'. Write `and`."),
        ("language && flag", "an operator at character 10 of `language && flag`, got '&&'. Write `and`."),
        (
            "words contains 1",
            "a column of text before `contains` at character 1 of `words contains 1`, got words, which is a number.",
        ),
        ("'a' contains url", "a column of text before `contains` at character 1 of `'a' contains url`, got text 'a'."),
        ("url contains", "text after `contains` at character 13 of `url contains`, got the end. Write it as url"),
        ("url contains ''", "text after `contains` at character 14 of `url contains ''`, got \"''\"."),
        ("1 < 2", "a condition on a column at character 1 of `1 < 2`, got one without columns."),
        ("0 < words < 3", "one comparison at character 11 of `0 < words < 3`, got another, '<'. Join comparisons with"),
        (
            "rule = a b",
            "`and`, `or` or the end at character 10 of `rule = a b`, got 'b'. Put text that contains spaces in",
        ),
        ("entries = 3", "a column with one value at character 11 of `entries = 3`, got the list entries."),
        ("doc_id = 9acbdc408de", "32 hexadecimal digits, or the first 12 or more, at character 10 of"),
        ("doc_id > 9acbdc408dec", "32 hexadecimal digits, or the first 12 or more, at character 10 of"),
        ("doc_id = 9acbdc408dex", "got '9acbdc408dex'"),
        ("date > yesterday", "a time at character 8 of `date > yesterday`, got 'yesterday'."),
        (
            "language = null",
            "a value at character 12 of `language = null`, got `null`. Write `is null` or `is not null`.",
        ),
        ("words in 3", "a list in parentheses after `in` at character 10 of `words in 3`, got '3'."),
        ("words in (3", "`,` or `)` at character 12 of `words in (3`, got the end."),
        ("words in (share)", "a value at character 11 of `words in (share)`, got the column share."),
        ("words is 3", "`null` or `not null` after `is` at character 10 of `words is 3`, got '3'."),
        ("'en", "a column or a value at character 1 of `'en`, got \"'en\". Close the quote."),
        ("flag < true", "`=` or `!=` at character 8 of `flag < true`, got `<` of true or false."),
        ("words = #", "a column or a value at character 9 of `words = #`, got '#'."),
        ("words = __import__('os')", "a number or a column at character 9"),
        ("words > 1 and " * 400 + "flag", f"a condition of at most {MAX_CHARS:,} characters, got 5,604. Shorten it."),
        ("(" * 41 + "flag" + ")" * 41, f"at most {MAX_DEPTH} nested levels at character 42"),
        ("not " * 41 + "flag", f"at most {MAX_DEPTH} nested levels"),
        ("words" + " + words" * 41 + " > 1", f"at most {MAX_DEPTH} nested levels"),
    ],
)
def test_mistakes_are_reported_with_their_position(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert str(error.value).startswith("--where: expected ")
    assert message in str(error.value)


def test_a_long_condition_is_not_repeated_whole() -> None:
    with pytest.raises(ConfigError) as error:
        parse("words > 1 and " * 200 + "wrds > 1")
    assert "at character 2801 of `…" in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("words>1 AND flag", "words > 1 and flag"),
        ("(words == 1)", "words = 1"),
        ('language = "it\'s"', "language = 'it''s'"),
        ("(flag and flag) and flag", "flag and flag and flag"),
        ("(flag or flag) and flag", "(flag or flag) and flag"),
        ("not (flag)", "not flag"),
        ("not (flag and flag)", "not (flag and flag)"),
        ("words - (1 - share) > 2*3", "words - (1 - share) > 6.0"),
        ("(words - 1) - share > 0", "words - 1 - share > 0"),
        ("words / (share * 2) > 0", "words / (share * 2) > 0"),
        ("language IN (de,'fr')", "language in ('de', 'fr')"),
        ("doc_id = 9ACBDC408DEC", "doc_id = '9acbdc408dec'"),
        ("2 < words", "2 < words"),
        ('url CONTAINS "it\'s"', "url contains 'it''s'"),
        ("url NOT LIKE a%b", "url not like 'a%b'"),
        ("url not contains a%b", "url not contains 'a%b'"),
        ("not (url contains a)", "not url contains 'a'"),
    ],
)
def test_the_canonical_form(text: str, canonical: str) -> None:
    assert parse(text).canonical == canonical
    assert parse(canonical) == parse(text)


@pytest.mark.parametrize(
    ("text", "single"),
    [
        ("share > 0.3", SingleComparison("share", ">", 0.3)),
        ("0.3 >= share", SingleComparison("share", "<=", 0.3)),
        ("words = 2", SingleComparison("words", "=", 2.0)),
        ("words > 60 * 2", SingleComparison("words", ">", 120.0)),
        ("share > 0.3 and flag", None),
        ("not share > 0.3", None),
        ("share > ratio", None),
        ("share * 2 > 1", None),
        ("language = de", None),
        ("words is null", None),
    ],
)
def test_a_single_comparison_with_a_number(text: str, single: SingleComparison | None) -> None:
    assert parse(text).single == single


def test_columns_and_pickles() -> None:
    assert parse("url contains language and flag").columns == {"url", "flag"}
    condition = parse("share > ratio or not (language = second and words in (1, 2)) or doc_id = 9acbdc408dec")
    assert condition.columns == {"share", "ratio", "language", "second", "words", "doc_id"}
    assert pickle.loads(pickle.dumps(condition)) == condition


def test_equality_takes_any_text() -> None:
    url = "a 'b' and \"c\""
    condition = equality("url", url, SCHEMA, "--url")
    assert condition.evaluate(pa.table({"url": [url, "a", None]})).to_pylist() == [True, False, False]
    with pytest.raises(ConfigError, match=r"--doc: expected 32 hexadecimal digits, .* got 'xyz'"):
        equality("doc_id", "xyz", SCHEMA, "--doc")


# Random conditions. The interpreter computes one row at a time with None for null and for unknown.


def interpret(part: Part, row: dict[str, Any]) -> Any:
    match part:
        case ColumnPart():
            return row[part.name]
        case ValuePart():
            return part.value
        case ArithmeticPart():
            left, right = (interpret(side, row) for side in (part.left, part.right))
            if left is None or right is None or (part.operator == "/" and right == 0):
                return None
            with np.errstate(all="ignore"):
                left, right = np.float64(left), np.float64(right)
                return {"+": left + right, "-": left - right, "*": left * right, "/": left / (right or 1)}[
                    part.operator
                ]
        case ComparisonPart():
            return compare(part, row)
        case RangePart():
            value = row[part.column.name]
            if value is None:
                return None
            is_in = part.low <= value <= part.high
            return {"=": is_in, "!=": not is_in, "<": value < part.low, ">": value > part.high}[part.operator]
        case MembershipPart():
            value = interpret(part.operand, row)
            return None if value is None else any(interpret(choice, row) for choice in part.choices) != part.negated
        case TextMatchPart():
            value = interpret(part.operand, row)
            if value is None:
                return None
            pattern = re.escape(part.literal).replace("%", ".*").replace("_", ".")
            hit = re.fullmatch(pattern, value) is not None if part.operator == "like" else part.literal in value
            return hit != part.negated
        case NullTest():
            return (interpret(part.operand, row) is None) != part.negated
        case NegatedPart():
            value = interpret(part.operand, row)
            return None if value is None else not value
        case JoinedPart():
            values = [interpret(term, row) for term in part.terms]
            decisive = part.word == "or"
            return decisive if decisive in values else None if None in values else not decisive
    raise TypeError(part)


def compare(part: ComparisonPart, row: dict[str, Any]) -> bool | None:
    sides = [interpret(side, row) for side in (part.left, part.right)]
    if None in sides:
        return None
    is_float32 = [isinstance(side, ColumnPart) and side.type == pa.float32() for side in (part.left, part.right)]
    for one, other in ((0, 1), (1, 0)):
        if is_float32[one] and isinstance((part.left, part.right)[other], ValuePart):
            sides[other] = float(np.float32(sides[other]))
    left, right = sides
    results = {"=": left == right, "!=": left != right, "<": left < right, "<=": left <= right, ">": left > right}
    return bool(results.get(part.operator, left >= right))


NUMBERS = ["share", "ratio", "words"]
number_text = st.one_of(st.integers(0, 5).map(str), st.sampled_from(["0.3", "1e2", ".5", "2.0"]))
sums = st.recursive(
    st.one_of(st.sampled_from(NUMBERS), number_text),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda it: f"({it[0]} {it[1]} {it[2]})"),
        inner.map(lambda it: f"-{it}"),
    ),
    max_leaves=4,
)
signs = st.sampled_from(["=", "==", "!=", "<>", "<", "<=", ">", ">="])
texts = st.sampled_from(["language", "second", "'en'", '"de"', "'it''s'"])
terms = st.one_of(
    st.tuples(st.sampled_from(NUMBERS), signs, sums).map(" ".join),
    st.tuples(sums, signs, st.sampled_from(NUMBERS)).map(" ".join),
    st.tuples(st.sampled_from(["language", "second"]), signs, texts).map(" ".join),
    st.tuples(st.sampled_from(["language", "words", "flag"]), st.sampled_from([" is null", " is not null"])).map(
        "".join
    ),
    st.sampled_from(["flag", "language in (en, 'fr')", "words not in (1, 2, 2)", "share in (0.3, 0.5)"]),
    st.tuples(
        st.sampled_from(["language", "second", "url", "rule"]),
        st.sampled_from([" contains ", " not contains "]),
        st.sampled_from(["e", "'en'", "'?q'", '"."', "'t''s'", "%", "E", "'\\'"]),
    ).map("".join),
    st.tuples(
        st.sampled_from(["language", "second", "url", "rule"]),
        st.sampled_from([" like ", " not like "]),
        st.sampled_from(["e%", "'en'", "'_n'", "'%?q%'", "'%t''s%'", "'%'", "E%", "'__%_'"]),
    ).map("".join),
    st.sampled_from(["doc_id = 000000000000", "doc_id != 9acbdc408dec", "date < 2024-02-02", "date != 2024-02-02"]),
)
conditions = st.recursive(
    terms,
    lambda inner: st.one_of(
        inner.map(lambda it: f"not ({it})"),
        inner.map(lambda it: f"({it})"),
        st.tuples(inner, st.sampled_from([" and ", " or ", " AND "]), inner).map("".join),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(conditions)
def test_random_conditions_agree_with_the_interpreter(text: str) -> None:
    condition = parse_or_message(text)
    if isinstance(condition, str):
        assert "a finite number" in condition  # a computation such as 1 / 0
        return
    expected = [interpret(condition.root, row) is True for row in ROWS.to_pylist()]
    assert condition.evaluate(ROWS).to_pylist() == expected
    assert ROWS.filter(condition.to_filter()).equals(ROWS.filter(pa.array(expected)))
    again = parse(condition.canonical)
    assert again.canonical == condition.canonical
    assert again.evaluate(ROWS).to_pylist() == expected


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("wordshflagn 0123.=!<>()'\"+-*/,_éx\n\0"), max_size=40))
def test_any_text_is_a_condition_or_a_config_error(text: str) -> None:
    condition = parse_or_message(text)
    if isinstance(condition, str):
        assert condition.startswith("--where: expected ")
        return
    assert len(condition.evaluate(ROWS)) == ROWS.num_rows


def test_numbers_of_any_size() -> None:
    assert matching("words < 99999999999999999999999") == [0, 1, 2]
    assert matching("share < 1e300") == [0, 1, 2]
