"""Fields of a row by name or path, and texts that are joined from several of them.

A path such as `metadata.authors` names a field of an object in a field. A field whose own name has dots comes first.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MISSING = object()
"""Takes the place of a field that a row does not have."""
EMPTY_LINE = "\n\n"
ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_TOKEN = re.compile(r"""\s*(?:(?P<plus>\+)|(?P<quote>['"])|(?P<field>[^\s+'"]+))""")


def lookup(row: Mapping[str, Any], path: str) -> Any:
    """Return the value of a field by its name or path; MISSING if the row has no such field."""
    value = row.get(path, MISSING)
    if value is not MISSING or "." not in path:
        return value
    value = row
    for name in path.split("."):
        value = value.get(name, MISSING) if isinstance(value, Mapping) else MISSING
        if value is MISSING:
            return MISSING
    return value


def decoded(value: Any) -> Any:
    """Return a value, as text if it is bytes in UTF-8: several writers of Parquet do not mark texts as such."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value


def top_field(path: str, names: Sequence[str]) -> str:
    """Return the field of a row that holds the value of a path: the whole path, or the name before its first dot."""
    return path if path in names else path.partition(".")[0]


def without(row: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return a copy of the row without the fields that paths name, and without objects that have no others."""
    rest = {name: value for name, value in row.items() if name not in paths}
    for path in paths:
        name, dot, inner = path.partition(".")
        if dot and path not in row and isinstance(value := rest.get(name), Mapping):
            rest[name] = without(value, (inner,))
            if not rest[name]:
                del rest[name]
    return rest


@dataclass(frozen=True)
class TextParts:
    """A text that is joined from fields: each field with the quoted text before it, and the text after the last one."""

    fields: tuple[tuple[str, str], ...]
    """(quoted text before the field, path of the field), at least one."""
    ending: str = ""
    """Quoted text after the last field."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the fields, in their order."""
        return tuple(path for _, path in self.fields)

    def join(self, row: Mapping[str, Any]) -> str | None:
        """Return the text of a row; None if it has none of the fields.

        A field that is missing, null, no text or number, or white space, is left out together with the quoted text
        before it. Quoted text between two fields is also left out if no field before it is in the text. The ending is
        left out with the last field.
        """
        parts: list[str] = []
        is_text = is_last = False
        for number, (before, path) in enumerate(self.fields):
            value = decoded(lookup(row, path))
            is_last = False
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                continue
            is_text = True
            text = str(value)
            if text and not text.isspace():
                parts += [before, text] if parts or number == 0 else [text]
                is_last = True
        if not is_text:
            return None
        return "".join([*parts, self.ending] if is_last else parts)


def parse_text(expression: str | Sequence[str]) -> TextParts:
    """Return the parts of an expression such as `title + ': ' + body`, or of a list of fields.

    The fields of a list are joined by an empty line. In quoted text, `\\n` is a line feed, `\\t` a tab, and a
    backslash before a quotation mark or a backslash means that character. Raises ValueError if the expression has
    another form.
    """
    if not isinstance(expression, str):
        if not expression or not all(path.strip() for path in expression):
            raise ValueError("expected the names of fields")
        return TextParts(tuple((EMPTY_LINE if number else "", path) for number, path in enumerate(expression)))
    fields: list[tuple[str, str]] = []
    before, is_operand, position, end = "", True, 0, len(expression.rstrip())
    while position < end:
        token = _TOKEN.match(expression, position)
        if token is None or (token["plus"] is not None) == is_operand:
            raise ValueError(f"expected {'a field or quoted text' if is_operand else '+'} at character {position + 1}")
        position = token.end()
        is_operand = not is_operand
        if token["quote"] is not None:
            quoted, position = _quoted(expression, position, token["quote"])
            before += quoted
        elif token["field"] is not None:
            fields.append((before, token["field"]))
            before = ""
    if is_operand:
        raise ValueError("expected a field or quoted text at the end")
    if not fields:
        raise ValueError("expected at least one field")
    return TextParts(tuple(fields), before)


def _quoted(expression: str, start: int, mark: str) -> tuple[str, int]:
    """Return the quoted text that starts after its mark, and the position after its closing mark."""
    text, position = "", start
    while position < len(expression):
        character = expression[position]
        if character == mark:
            return text, position + 1
        if character == "\\" and expression[position + 1 : position + 2] in ESCAPES:
            character, position = ESCAPES[expression[position + 1]], position + 1
        text, position = text + character, position + 1
    raise ValueError(f"expected a closing {mark} after character {start}")
