"""The settings of a recipe as text: type, default, range, unit and meaning of every field of a section.

Everything is read from the section classes: annotations, constraints, and the string under each field.
"""

import json
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pyarrow as pa
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from schemas.config import OFF, Section, can_be_off
from schemas.entries import value_type

UNSET = "unset"
"""How the value None, an absent key, is written."""
SCALARS = {bool: "true or false", int: "whole number", float: "number", str: "text", Any: "any value"}
CODE = re.compile(r"`[^`]*`")
UNIT = re.compile(r"\[([^\[\]]+)\]")


@dataclass(frozen=True)
class SettingDoc:
    """One setting of a section, or one key of the tables that a setting lists."""

    key: str
    type: str
    """The type in words, such as `list of text`, or the allowed values."""
    default: str
    """The default as TOML; `unset` if there is none."""
    range: str
    """The allowed values of a number or lengths of a list, such as `1 to 16`; empty if any value is allowed."""
    unit: str
    """The unit, such as `bytes`; empty if there is none."""
    meaning: str
    role: str
    """`content`, `decision`, `execution` or `location`; see `schemas/config.py`."""
    allowed: tuple[str, ...] = ()
    """The allowed values of a text or of the texts in a list; empty if any value is allowed."""
    keys: tuple["SettingDoc", ...] = ()
    """The keys of the tables that are the values of this setting; empty for other settings."""

    @property
    def first_sentence(self) -> str:
        """The meaning up to its first full stop or semicolon."""
        return re.split(r"(?<=[a-z0-9`)\]])[.;](?=\s|$)", self.meaning, maxsplit=1)[0]


def summary_of(section: type[Section]) -> str:
    """Return the first sentence of a section's docstring, without a leading `The section [x] of a recipe: `."""
    text = " ".join((section.__doc__ or "").split())
    text = re.sub(r"^The section `\[\w+\]` of a recipe[:;,]? ?", "", text)
    first = re.split(r"(?<=[a-z0-9`)])[.](?=\s|$)", text, maxsplit=1)[0]
    return f"{first[:1].upper()}{first[1:]}".rstrip(".") + "."


def settings_of_section(section: type[BaseModel]) -> tuple[SettingDoc, ...]:
    """Return the settings of a section in their order."""
    return tuple(_setting(name, info) for name, info in section.model_fields.items())


def _setting(name: str, info: FieldInfo) -> SettingDoc:
    extra = info.json_schema_extra
    role = str(extra.get("role", "content")) if isinstance(extra, dict) else "content"
    meaning = " ".join((info.description or "").split())
    unit = UNIT.search(CODE.sub("", meaning))
    nested = _table_of(info.annotation)
    return SettingDoc(
        key=name,
        type=type_text(info.annotation).replace(UNSET, f'"{OFF}"' if can_be_off(info) else UNSET),
        default=toml_value(info.get_default(call_default_factory=True)) if not info.is_required() else UNSET,
        range=range_text(info.metadata, "character" if _is_text(info.annotation) else "item"),
        unit=unit.group(1) if unit else "",
        meaning=meaning,
        role=role,
        allowed=allowed_values(info.annotation),
        keys=settings_of_section(nested) if nested is not None else (),
    )


def _table_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model whose values a setting holds, alone or in a list; None for other settings."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_table_of(argument) for argument in get_args(annotation))
    return next((model for model in inner if model is not None), None)


def allowed_values(annotation: Any) -> tuple[str, ...]:
    """Return the values that the Literals in an annotation allow."""
    if get_origin(annotation) is Literal:
        return tuple(map(str, get_args(annotation)))
    return tuple(value for argument in get_args(annotation) for value in allowed_values(argument))


def type_text(annotation: Any) -> str:
    """Return an annotation in words, such as `list of text`; Literals are listed."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in SCALARS:
        return SCALARS[annotation]
    if origin is Annotated:
        return type_text(arguments[0])
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else str(arguments[0])
    if origin in (Union, types.UnionType):
        kinds = [type_text(argument) for argument in arguments if argument is not type(None)]
        return " or ".join([*kinds, *([UNSET] if type(None) in arguments else [])])
    if origin in (tuple, list, set, frozenset):
        return f"list of {_plural(type_text(arguments[0]))}".replace("list of one of ", "list from ")
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"table from {type_text(arguments[0])} to {type_text(arguments[1])}"
    return "table"


def _plural(kind: str) -> str:
    return {"whole number": "whole numbers", "number": "numbers", "text": "texts", "table": "tables"}.get(kind, kind)


def _is_text(annotation: Any) -> bool:
    kinds = [argument for argument in get_args(annotation) if argument is not type(None)] or [annotation]
    return all(kind is str for kind in kinds)


def range_text(metadata: list[Any], counted: str = "item") -> str:
    """Return the constraints of a field in words, such as `1 to 16`, `above 0` or `at least 1 item`.

    `counted` is what a length counts.
    """
    low: list[str] = []
    high: list[str] = []
    lengths: list[str] = []
    for item in metadata:
        match item:
            case Ge(ge=bound):
                low.append(f"at least {bound}")
            case Gt(gt=bound):
                low.append(f"above {bound}")
            case Le(le=bound):
                high.append(f"at most {bound}")
            case Lt(lt=bound):
                high.append(f"below {bound}")
            case MinLen(min_length=bound):
                lengths.append(f"at least {bound} {counted}{'s' if bound != 1 else ''}")
            case MaxLen(max_length=bound):
                lengths.append(f"at most {bound} {counted}{'s' if bound != 1 else ''}")
    if low and high and low[0].startswith("at least ") and high[0].startswith("at most "):
        return f"{low[0].removeprefix('at least ')} to {high[0].removeprefix('at most ')}"
    return ", ".join([*low, *high, *lengths])


@dataclass(frozen=True)
class ColumnDoc:
    """One column of a table."""

    name: str
    type: str
    """The Arrow type in short, such as `entries of int32`."""
    meaning: str
    unit: str
    """Empty = none."""


def describe_columns(schema: pa.Schema) -> list[ColumnDoc]:
    """Return the columns of a schema with the meanings and units in its metadata."""
    docs = []
    for column in schema:
        about = {key.decode(): value.decode() for key, value in (column.metadata or {}).items()}
        docs.append(ColumnDoc(column.name, arrow_text(column.type), about.get("meaning", ""), about.get("unit", "")))
    return docs


def arrow_text(kind: pa.DataType) -> str:
    """Return an Arrow type in short."""
    inside = value_type(kind)
    if inside is not None:
        return f"entries of {arrow_text(inside)}"
    if pa.types.is_list(kind):
        return f"list of {arrow_text(kind.value_type)}"
    if pa.types.is_struct(kind):
        return "(" + ", ".join(f"{each.name}: {arrow_text(each.type)}" for each in kind) + ")"
    return str(kind).replace("fixed_size_binary", "binary")


def toml_value(value: Any) -> str:
    """Return a value as TOML, such as `["a", "b"]`; None is `unset`."""
    if value is None:
        return UNSET
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        items = (f"{_toml_key(str(key))} = {toml_value(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, tuple | list | set | frozenset):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, BaseModel):
        return toml_value(value.model_dump(mode="json", exclude_unset=True))
    return str(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)
