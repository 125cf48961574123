"""Conditions on columns: a text such as `code_lines > 0.2 and language = 'en'`, checked against a schema.

A condition has comparisons (= or ==, != or <>, <, <=, >, >=), `is null`, `is not null`, `in (...)`, `not in (...)`,
`contains`, `not contains`, `like`, `not like`, `and`, `or`, `not`, parentheses, and + - * / on numbers. `contains`
searches a column of text for a text: case matters, and no character is a pattern. `like 'eng%'` compares a whole text
with a pattern, in which `%` is any text and `_` one character. Text is in single or double quotes; a doubled quote is a
quote in the text. A single word after a column of text needs no quotes, unless it names another column of text. Bytes
are compared as hexadecimal digits, times as ISO 8601. Logic is that of SQL: a comparison with null is neither true nor
false, and a row whose condition is not true does not match. Numbers are computed in float64; a number that is compared
with a float32 column is rounded to float32. Division by zero is null.
"""

import difflib
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from schemas.condition_parts import (
    COMPARE,
    ArithmeticPart,
    ColumnPart,
    ComparisonPart,
    ConditionPart,
    JoinedPart,
    MembershipPart,
    NegatedPart,
    NullTest,
    RangePart,
    TextMatchPart,
    ValuePart,
    kind_of,
    parts_within,
)
from schemas.config import suggest_name
from schemas.errors import ConfigError

MAX_CHARS = 4000
"""Maximum length of a condition [code points]."""
MAX_DEPTH = 40
"""Maximum depth of nested parentheses and operators."""
SHOWN_CHARS = 60
"""Number of characters before and after a mistake that an error message repeats."""
MIN_PREFIX = 12
"""Minimum number of hexadecimal digits that name an id by its beginning."""
KEYWORDS = ("and", "or", "not", "in", "is", "null", "true", "false")
CONTAINS, LIKE = "contains", "like"
"""The operators for a part and a pattern of a text. They are keywords only after a column or value, so columns may have
these names."""
FOREIGN = {
    "ilike": "Write url contains 'text' for a part of a text, or like with a pattern; case matters.",
    "&&": "Write `and`.",
    "&": "Write `and`.",
    "||": "Write `or`.",
    "|": "Write `or`.",
}
"""Operators of other languages → what to write here."""
SPELLINGS = {"==": "=", "<>": "!="}
FLIPPED = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


class UnknownColumnError(ConfigError):
    """A condition names a column that does not exist."""

    def __init__(self, message: str, name: str):
        super().__init__(message)
        self.name = name
        """The name in the condition."""


@dataclass(frozen=True)
class SingleComparison:
    """A condition that only compares one column with one number."""

    column: str
    operator: str
    """One of = != < <= > >=, with the column on its left."""
    number: float


@dataclass(frozen=True)
class Expression:
    """A checked condition on the columns of a schema."""

    root: ConditionPart

    @property
    def columns(self) -> frozenset[str]:
        """The names of the columns that the condition reads."""
        return frozenset(node.name for node in parts_within(self.root) if isinstance(node, ColumnPart))

    @property
    def canonical(self) -> str:
        """The condition in one form for all spellings; parsing it gives an equal condition."""
        return self.root.text()

    @property
    def single(self) -> SingleComparison | None:
        """The comparison, if the condition only compares a column with a number; else None."""
        root = self.root
        if not isinstance(root, ComparisonPart):
            return None
        match root.left, root.right:
            case ColumnPart() as column, ValuePart(value=number, kind="a number"):
                return SingleComparison(column.name, root.operator, float(number))
            case ValuePart(value=number, kind="a number"), ColumnPart() as column:
                return SingleComparison(column.name, FLIPPED[root.operator], float(number))
        return None

    def evaluate(self, rows: pa.Table | pa.RecordBatch) -> pa.BooleanArray:
        """Return, for each row, whether the condition is true; False where it is null.

        `rows` must have the columns `columns`, with the types of the schema.
        """
        result = pc.fill_null(self.root.values(rows.column), False)
        return result.combine_chunks() if isinstance(result, pa.ChunkedArray) else result

    def to_filter(self) -> pc.Expression:
        """Return the condition as a filter of Arrow, for `Table.filter` and for datasets."""
        return self.root.values(pc.field)


# The parser: one function for each level of precedence.

_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])"
_QUOTED = r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\""
_TOKEN = re.compile(
    rf"\s*(?:(?P<number>{_NUMBER})|(?P<word>[^\W\d]\w*(?:\.\w+)*)|(?P<quoted>{_QUOTED})|(?P<sign>==|!=|<>|<=|>=|[=<>()+\-*/,])|$)"
)
_BARE = re.compile(r"\s*([^\s()'\",]+)")


def parse_expression(
    text: str, schema: pa.Schema, where: str, name_columns: Collection[str] = frozenset()
) -> Expression:
    """Return the checked condition of a text on the columns of `schema`.

    `where` starts each error message. A word without quotes after a column in `name_columns` is text, even if it names
    a column. Raises ConfigError, with the position of the mistake, if the text is not a condition, names a column that
    `schema` does not have (UnknownColumnError), or compares values of different kinds.
    """
    if len(text) > MAX_CHARS:
        raise ConfigError(
            f"{where}: expected a condition of at most {MAX_CHARS:,} characters, got {len(text):,}. Shorten it."
        )
    return Expression(_Parser(text, schema, where, name_columns).condition())


def equality(name: str, value: str, schema: pa.Schema, where: str) -> Expression:
    """Return the condition `name = value` for a column of text, bytes or times.

    Raises ConfigError if the value cannot be compared with the column.
    """
    parser = _Parser(value, schema, where, ())
    return Expression(parser.compare("=", parser.column(name, 0), ValuePart(value, "text"), 0))


class _Parser:
    """Reads a condition from left to right."""

    def __init__(self, text: str, schema: pa.Schema, where: str, name_columns: Collection[str]):
        self._text, self._schema, self._where, self._name_columns = text, schema, where, name_columns
        self._at = self._depth = 0

    def condition(self) -> ConditionPart:
        """Return the whole condition."""
        if not self._text.strip():
            raise ConfigError(f"{self._where}: expected a condition, got none. Write one such as language = 'de'.")
        root = self._truth(self._or)
        if self._peek() != ("end", ""):
            fix = self._foreign() or "Put text that contains spaces in quotes."
            raise self._error("`and`, `or` or the end", self._shown(), fix)
        if not any(isinstance(node, ColumnPart) for node in parts_within(root)):
            raise self._error("a condition on a column", "one without columns", "Name a column.", 0)
        return root

    # Tokens. A mistake is reported with the position of the token, counted from 1.

    def _peek(self) -> tuple[str, str]:
        """Return the kind and the text of the next token."""
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            return "unknown", self._text[self._start() :].split()[0]
        return match.lastgroup or "end", match.group().strip()

    def _start(self) -> int:
        rest = self._text[self._at :]
        return self._at + len(rest) - len(rest.lstrip())

    def _next(self) -> str:
        """Consume and return the text of the next token."""
        match = _TOKEN.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return match.group().strip() if match is not None else ""

    def _accept(self, *choices: str) -> str | None:
        """Consume the next token if it is one of the words or signs `choices`, and return it in lower case."""
        kind, token = self._peek()
        if kind in ("word", "sign") and token.lower() in choices:
            return self._next().lower()
        return None

    def _shown(self) -> str:
        kind, token = self._peek()
        return "the end" if kind == "end" else repr(token)

    def _error(self, expected: str, got: str, fix: str, at: int | None = None) -> ConfigError:
        at = self._start() if at is None else at
        first, last = max(0, at - SHOWN_CHARS), at + SHOWN_CHARS
        shown = f"{'…' * (first > 0)}{self._text[first:last]}{'…' * (last < len(self._text))}"
        place = f"at character {at + 1} of `{shown}`"
        return ConfigError(f"{self._where}: expected {expected} {place}, got {got}. {fix}")

    def _foreign(self) -> str | None:
        """Return what to write in place of the next token, if it is an operator of another language; else None."""
        token = self._peek()[1].lower()
        sign = re.match(r"[&|]+", token)
        return FOREIGN.get(sign.group() if sign else token)

    def _deeper(self, parse: Callable[[], ConditionPart]) -> ConditionPart:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"at most {MAX_DEPTH} nested levels", "more", "Divide the condition.")
        node = parse()
        self._depth -= 1
        return node

    def _truth(self, parse: Callable[[], ConditionPart]) -> ConditionPart:
        """Return what `parse` reads, which must be true or false."""
        start = self._start()
        node = parse()
        if node.kind != "true or false":
            if fix := self._foreign():
                raise self._error("an operator", self._shown(), fix)
            example = {"a number": "> 0", "text": "= 'a'"}.get(node.kind, "is not null")
            raise self._error("a comparison", f"{node.kind} alone", f"Write it as {node.text()} {example}.", start)
        return node

    # Levels of precedence.

    def _or(self) -> ConditionPart:
        return self._junction("or", lambda: self._junction("and", self._not))

    def _junction(self, word: Literal["and", "or"], parse: Callable[[], ConditionPart]) -> ConditionPart:
        start = self._start()
        terms = [parse()]
        while self._peek()[0] == "word" and self._peek()[1].lower() == word:
            if terms[0].kind != "true or false":
                raise self._error(f"a comparison before `{word}`", f"{terms[0].kind} alone", "Compare it.", start)
            self._next()
            terms.append(self._truth(parse))
        flat = [part for term in terms for part in _terms(term, word)]
        return terms[0] if len(terms) == 1 else JoinedPart(word, tuple(flat))

    def _not(self) -> ConditionPart:
        if self._accept("not"):
            return NegatedPart(self._truth(lambda: self._deeper(self._not)))
        return self._comparison()

    def _comparison(self) -> ConditionPart:
        start = self._start()
        left = self._sum()
        if self._accept("is"):
            negated = self._accept("not") is not None
            if not self._accept("null"):
                raise self._error("`null` or `not null` after `is`", self._shown(), "Write `is null`.")
            return NullTest(left, negated)
        before = self._at
        negated = self._accept("not") is not None
        if self._accept("in"):
            return self._membership(left, negated, start)
        if word := self._accept(CONTAINS, LIKE):
            return self._text_match(word, left, negated, start)
        if fix := self._foreign() if self._peek()[0] == "word" else None:
            raise self._error("an operator", self._shown(), fix)
        self._at = before
        kind, token = self._peek()
        operator = SPELLINGS.get(token, token)
        if kind != "sign" or operator not in COMPARE:
            return left
        self._next()
        at = self._start()
        node = self.compare(operator, left, self._operand(left, operator), at)
        if self._peek()[0] == "sign" and SPELLINGS.get(self._peek()[1], self._peek()[1]) in COMPARE:
            raise self._error("one comparison", f"another, {self._shown()}", "Join comparisons with `and`.")
        return node

    def _membership(self, left: ConditionPart, negated: bool, start: int) -> ConditionPart:
        if not self._accept("("):
            raise self._error("a list in parentheses after `in`", self._shown(), "Write it as in ('a', 'b').")
        choices, shown = [], []
        while True:
            at = self._start()
            value = self._operand(left, "=")
            if not isinstance(value, ValuePart):
                raise self._error("a value", f"the column {value.text()}", "List values only.", at)
            choices.append(self.compare("=", left, value, at))
            shown.append(value.text())
            if self._accept(")"):
                return MembershipPart(left, tuple(choices), tuple(shown), negated)
            if not self._accept(","):
                raise self._error("`,` or `)`", self._shown(), "Close the list.")

    def _text_match(self, operator: str, left: ConditionPart, negated: bool, start: int) -> ConditionPart:
        if not (isinstance(left, ColumnPart) and left.kind == "text"):
            raise self._error(f"a column of text before `{operator}`", _described(left), "Name such a column.", start)
        at, shown = self._start(), self._shown()
        kind = self._peek()[0]
        match = None if kind == "quoted" else _BARE.match(self._text, self._at)
        literal = _unquoted(self._next()) if kind == "quoted" else match[1] if match else ""
        if not literal:
            example = "'news'" if operator == CONTAINS else "'%news%'"
            raise self._error(f"text after `{operator}`", shown, f"Write it as url {operator} {example}.", at)
        self._at = match.end() if match else self._at
        return TextMatchPart(left, operator, literal, negated)

    def _operand(self, left: ConditionPart, operator: str) -> ConditionPart:
        """Return the operand after an operator; after a column of text, bytes or times it may be a bare word."""
        is_open = isinstance(left, ColumnPart) and left.kind in ("text", "bytes", "a time")
        match = _BARE.match(self._text, self._at) if is_open else None
        if match is None:
            kind, token = self._peek()
            is_unknown = kind == "word" and token.lower() not in KEYWORDS and token not in self._schema.names
            if left.kind == "a number" and is_unknown:
                numbers = [field.name for field in self._schema if kind_of(field.type) == "a number"]
                close = suggest_name(token, numbers) if difflib.get_close_matches(token, numbers) else ""
                raise self._error("a number or a column", f"{token!r}{close}", f"Compare {left.text()} with a number.")
            return self._sum()
        word = match[1]
        if word.lower() == "null":
            raise self._error("a value", "`null`", "Write `is null` or `is not null`.")
        if left.kind == "text" and operator[0] in "<>" and re.fullmatch(_NUMBER, word):
            raise self._error("text", f"the number {word}", "Put text in quotes.")
        self._at = match.end()
        names_column = word in self._schema.names and kind_of(self._schema.field(word).type) == left.kind
        if names_column and left.text() not in self._name_columns:
            return self.column(word, self._at)
        return ValuePart(word, "text")

    def _sum(self) -> ConditionPart:
        return self._arithmetic("+-", lambda: self._arithmetic("*/", self._unary))

    def _arithmetic(self, signs: str, parse: Callable[[], ConditionPart]) -> ConditionPart:
        start, depth = self._start(), self._depth
        node = parse()
        while (operator := self._accept(*signs)) is not None:
            self._depth += 1  # a chain of operators is nested to the left
            at = self._start()
            right = self._deeper(parse)
            for part, place in ((node, start), (right, at)):
                self._is_number(part, place)
            node = self._computed(operator, node, right, at)
        self._depth = depth
        return node

    def _is_number(self, node: ConditionPart, at: int) -> None:
        if node.kind != "a number":
            raise self._error("a number", _described(node), "Compute with numbers only.", at)

    def _computed(self, operator: str, left: ConditionPart, right: ConditionPart, at: int) -> ConditionPart:
        """Return the result of an operator; that of two constants is computed here."""
        node = ArithmeticPart(operator, left, right)
        if not (isinstance(left, ValuePart) and isinstance(right, ValuePart)):
            return node
        value = node.values(str).as_py()  # there is no column in it
        if value is None or not math.isfinite(value):
            raise self._error("a finite number", f"{node.text()}", "Correct the computation.", at)
        return ValuePart(value, "a number")

    def _unary(self) -> ConditionPart:
        if self._accept("-"):
            at = self._start()
            operand = self._deeper(self._unary)
            self._is_number(operand, at)
            if isinstance(operand, ValuePart):
                return ValuePart(-operand.value, "a number")
            return ArithmeticPart("*", ValuePart(-1, "a number"), operand)
        return self._primary()

    def _primary(self) -> ConditionPart:
        start = self._start()
        kind, token = self._peek()
        if self._accept("("):
            node = self._deeper(self._or)
            if not self._accept(")"):
                raise self._error("`)`", self._shown(), "Close the parenthesis.")
            return node
        if kind == "quoted":
            self._next()
            return ValuePart(_unquoted(token), "text")
        if kind == "number":
            self._next()
            return ValuePart(_number(token), "a number")
        if kind == "word" and token.lower() in ("true", "false"):
            return ValuePart(self._next().lower() == "true", "true or false")
        if kind == "word" and token.lower() not in KEYWORDS:
            self._next()
            return self.column(token, start)
        fix = "Close the quote." if token[:1] in ("'", '"') else "Write a condition such as code_lines > 0.3."
        raise self._error("a column or a value", self._shown(), fix)

    # Names and kinds.

    def column(self, name: str, at: int) -> ColumnPart:
        """Return the column `name`. Raises ConfigError if the schema does not have it."""
        if name not in self._schema.names:
            close = suggest_name(name, self._schema.names)
            fix = "Correct it, or put text in quotes."
            raise UnknownColumnError(str(self._error("the name of a column", f"{name!r}{close}", fix, at)), name)
        return ColumnPart(name, self._schema.field(name).type)

    def compare(self, operator: str, left: ConditionPart, right: ConditionPart, at: int) -> ConditionPart:
        """Return a comparison. Raises ConfigError if its sides are of different kinds."""
        if isinstance(left, ValuePart) and isinstance(right, ColumnPart) and right.kind in ("bytes", "a time"):
            left, right, operator = right, left, FLIPPED[operator]
        if isinstance(left, ColumnPart) and isinstance(right, ValuePart) and right.kind == "text":
            if left.kind == "bytes":
                return self._bytes(operator, left, right.value, at)
            if left.kind == "a time":
                return self._time(operator, left, right.value, at)
        if "a list" in (left.kind, right.kind):
            node = left if left.kind == "a list" else right
            raise self._error("a column with one value", f"the list {node.text()}", "Compare it by `is null`.", at)
        if left.kind != right.kind:
            raise self._error(left.kind, _described(right), f"Compare {left.text()} with {left.kind}.", at)
        if left.kind == "true or false" and operator not in ("=", "!="):
            raise self._error("`=` or `!=`", f"`{operator}` of true or false", "Correct the operator.", at)
        return ComparisonPart(operator, left, right)

    def _bytes(self, operator: str, column: ColumnPart, value: str, at: int) -> ConditionPart:
        """Return a comparison with hexadecimal digits; fewer digits than an id has are a prefix."""
        kind = column.type
        width = 2 * kind.byte_width if pa.types.is_fixed_size_binary(kind) else 0
        is_hex = re.fullmatch("[0-9a-fA-F]+", value) is not None
        is_whole = len(value) == width or (not width and len(value) % 2 == 0)
        is_prefix = MIN_PREFIX <= len(value) < width and operator in ("=", "!=")
        if not is_hex or not (is_whole or is_prefix):
            size = f"{width} hexadecimal digits, or the first {MIN_PREFIX} or more," if width else "hexadecimal digits"
            raise self._error(size, repr(value), f"Write {column.name} as `penstock show` prints it.", at)
        digits = max(width, len(value))
        low, high = (bytes.fromhex(value.ljust(digits, end)) for end in "0f")
        return RangePart(operator, column, value.lower(), low, high)

    def _time(self, operator: str, column: ColumnPart, value: str, at: int) -> ConditionPart:
        try:
            time = datetime.fromisoformat(value)
        except ValueError as error:
            fix = "Write it as 2024-01-31 or 2024-01-31T12:00:00Z."
            raise self._error("a time", f"{value!r}", fix, at) from error
        time = time if time.tzinfo else time.replace(tzinfo=UTC)
        return RangePart(operator, column, value, time, time)


def _terms(node: ConditionPart, word: str) -> tuple[ConditionPart, ...]:
    return node.terms if isinstance(node, JoinedPart) and node.word == word else (node,)


def _unquoted(token: str) -> str:
    """Return the text of a quoted token."""
    return token[1:-1].replace(token[0] * 2, token[0])


def _number(token: str) -> int | float:
    whole = int(token) if token.isdigit() else None
    return whole if whole is not None and whole < 2**63 else float(token)


def _described(node: ConditionPart) -> str:
    """Return the kind of a part and how it is written, for an error message."""
    if isinstance(node, ValuePart):
        return node.text() if node.kind == "true or false" else f"{node.kind.removeprefix('a ')} {node.text()}"
    return f"{node.text()}, which is {node.kind}"
