"""The parts of a condition on columns, each with its values on arrays and in filters, and its canonical text.

`schemas/expressions.py` parses the text of a condition into these parts and checks their kinds.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

Kind = Literal["a number", "text", "true or false", "bytes", "a time", "a list"]
Source = Callable[[str], Any]
"""Column name → its values: an array, or the field of a filter."""
COMPARE = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
COMPUTE = {"+": pc.add, "-": pc.subtract, "*": pc.multiply, "/": pc.divide}


def kind_of(kind: pa.DataType) -> Kind:
    """Return the kind of a column's values; "a list" for every type that conditions cannot compare."""
    if pa.types.is_floating(kind) or pa.types.is_integer(kind):
        return "a number"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    if pa.types.is_boolean(kind):
        return "true or false"
    if pa.types.is_fixed_size_binary(kind) or pa.types.is_binary(kind):
        return "bytes"
    return "a time" if pa.types.is_timestamp(kind) else "a list"


# The parts of a parsed condition. Each is computed by the same functions of Arrow on arrays and in filters.


class ConditionPart(ABC):
    """A part of a condition."""

    kind: Kind
    rank: int = 7
    """Precedence: `or` is 1, `and` 2, `not` 3, comparisons 4, + and - 5, * and / 6, names and values 7."""

    @abstractmethod
    def values(self, source: Source) -> Any:
        """Return the values, as an array, a scalar or the expression of a filter."""

    @abstractmethod
    def text(self) -> str:
        """Return the part in canonical form."""

    def parts(self) -> tuple["ConditionPart", ...]:
        """Return the parts that this part is made of."""
        return ()

    def within(self, rank: int) -> str:
        """Return the canonical form as an operand of an operator of this precedence."""
        return self.text() if self.rank >= rank else f"({self.text()})"


@dataclass(frozen=True)
class ColumnPart(ConditionPart):
    """The values of a column."""

    name: str
    type: pa.DataType

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        return kind_of(self.type)

    def values(self, source: Source) -> Any:
        return source(self.name)

    def text(self) -> str:
        return self.name


@dataclass(frozen=True)
class ValuePart(ConditionPart):
    """A constant."""

    value: Any
    kind: Kind

    def values(self, source: Source) -> Any:
        return _literal(source, pa.scalar(self.value))

    def text(self) -> str:
        if self.kind == "text":
            return "'" + str(self.value).replace("'", "''") + "'"
        return repr(self.value).lower()  # True is written as true


@dataclass(frozen=True)
class ArithmeticPart(ConditionPart):
    """A computation with two numbers, in float64."""

    operator: str
    left: ConditionPart
    right: ConditionPart
    kind: Kind = "a number"

    @property
    def rank(self) -> int:  # type: ignore[override]
        return 5 if self.operator in "+-" else 6

    def values(self, source: Source) -> Any:
        left, right = (part.values(source).cast(pa.float64()) for part in (self.left, self.right))
        if self.operator == "/":
            is_zero = pc.equal(right, _literal(source, pa.scalar(0.0)))
            right = pc.if_else(is_zero, _literal(source, pa.scalar(None, pa.float64())), right)
        return COMPUTE[self.operator](left, right)

    def text(self) -> str:
        return f"{self.left.within(self.rank)} {self.operator} {self.right.within(self.rank + 1)}"

    def parts(self) -> tuple[ConditionPart, ...]:
        return self.left, self.right


@dataclass(frozen=True)
class ComparisonPart(ConditionPart):
    """A comparison of two values of the same kind."""

    operator: str
    left: ConditionPart
    right: ConditionPart
    kind: Kind = "true or false"
    rank: int = 4

    def values(self, source: Source) -> Any:
        left, right = self.left.values(source), self.right.values(source)
        for one, other in ((self.left, self.right), (self.right, self.left)):
            if isinstance(one, ColumnPart) and isinstance(other, ValuePart) and pa.types.is_float32(one.type):
                rounded = _literal(source, pa.scalar(other.value, pa.float32()))
                left, right = (left, rounded) if other is self.right else (rounded, right)
        return COMPARE[self.operator](left, right)

    def text(self) -> str:
        return f"{self.left.within(5)} {self.operator} {self.right.within(5)}"

    def parts(self) -> tuple[ConditionPart, ...]:
        return self.left, self.right


@dataclass(frozen=True)
class RangePart(ConditionPart):
    """A comparison of a column of times or bytes with constants: its value must be in the range of the constant."""

    operator: str
    column: ColumnPart
    written: str
    low: Any
    high: Any
    """The smallest and the largest value that agree with what was written; they differ for a prefix of an id."""
    kind: Kind = "true or false"
    rank: int = 4

    def values(self, source: Source) -> Any:
        values = source(self.column.name)
        low, high = (_literal(source, pa.scalar(value, self.column.type)) for value in (self.low, self.high))
        if self.low == self.high:
            return COMPARE[self.operator](values, low)
        is_in = pc.and_kleene(pc.greater_equal(values, low), pc.less_equal(values, high))
        return is_in if self.operator == "=" else pc.invert(is_in)

    def text(self) -> str:
        return f"{self.column.name} {self.operator} '{self.written}'"

    def parts(self) -> tuple[ConditionPart, ...]:
        return (self.column,)


@dataclass(frozen=True)
class MembershipPart(ConditionPart):
    """Whether a value is in a list."""

    operand: ConditionPart
    choices: tuple[ConditionPart, ...]
    """Comparisons of the operand with each of the listed values."""
    shown: tuple[str, ...]
    negated: bool
    kind: Kind = "true or false"
    rank: int = 4

    def values(self, source: Source) -> Any:
        found = reduce(pc.or_kleene, (choice.values(source) for choice in self.choices))
        return pc.invert(found) if self.negated else found

    def text(self) -> str:
        return f"{self.operand.within(5)} {'not ' if self.negated else ''}in ({', '.join(self.shown)})"

    def parts(self) -> tuple[ConditionPart, ...]:
        return (self.operand, *self.choices)


MATCHES: Mapping[str, Callable[[Any, str], Any]] = {"contains": pc.match_substring, "like": pc.match_like}
"""Operators that compare a text with a constant one. `contains`: a part of it, letter for letter and in the same case.
`like`: the whole text with a pattern of SQL, in which `%` is any text and `_` one character."""


@dataclass(frozen=True)
class TextMatchPart(ConditionPart):
    """Whether a text fits a constant text, by an operator of MATCHES."""

    operand: ConditionPart
    operator: str
    literal: str
    negated: bool
    kind: Kind = "true or false"
    rank: int = 4

    def values(self, source: Source) -> Any:
        hit = MATCHES[self.operator](self.operand.values(source), self.literal)
        return pc.invert(hit) if self.negated else hit

    def text(self) -> str:
        literal = ValuePart(self.literal, "text").text()
        return f"{self.operand.within(5)} {'not ' if self.negated else ''}{self.operator} {literal}"

    def parts(self) -> tuple[ConditionPart, ...]:
        return (self.operand,)


@dataclass(frozen=True)
class NullTest(ConditionPart):
    """Whether a value is null."""

    operand: ConditionPart
    negated: bool
    kind: Kind = "true or false"
    rank: int = 4

    def values(self, source: Source) -> Any:
        found = self.operand.values(source)
        return pc.is_valid(found) if self.negated else pc.is_null(found)

    def text(self) -> str:
        return f"{self.operand.within(5)} is {'not ' if self.negated else ''}null"

    def parts(self) -> tuple[ConditionPart, ...]:
        return (self.operand,)


@dataclass(frozen=True)
class NegatedPart(ConditionPart):
    """A condition with `not`."""

    operand: ConditionPart
    kind: Kind = "true or false"
    rank: int = 3

    def values(self, source: Source) -> Any:
        return pc.invert(self.operand.values(source))

    def text(self) -> str:
        return f"not {self.operand.within(3)}"

    def parts(self) -> tuple[ConditionPart, ...]:
        return (self.operand,)


@dataclass(frozen=True)
class JoinedPart(ConditionPart):
    """Two or more conditions joined by `and` or by `or`."""

    word: Literal["and", "or"]
    terms: tuple[ConditionPart, ...]
    kind: Kind = "true or false"

    @property
    def rank(self) -> int:  # type: ignore[override]
        return 2 if self.word == "and" else 1

    def values(self, source: Source) -> Any:
        join = pc.and_kleene if self.word == "and" else pc.or_kleene
        return reduce(join, (term.values(source) for term in self.terms))

    def text(self) -> str:
        return f" {self.word} ".join(term.within(self.rank + 1) for term in self.terms)

    def parts(self) -> tuple[ConditionPart, ...]:
        return self.terms


def _literal(source: Source, value: pa.Scalar) -> Any:
    # Functions of Arrow make a filter only if their first argument is an expression.
    return pc.scalar(value) if source is pc.field else value


def parts_within(node: ConditionPart) -> Iterator[ConditionPart]:
    """Yield a part and all parts that it is made of."""
    yield node
    for part in node.parts():
        yield from parts_within(part)
