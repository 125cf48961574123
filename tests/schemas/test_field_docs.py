"""Settings as text: types, ranges, units, defaults and meanings, as they are declared."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from schemas.config import Section, decision, execution, location
from schemas.field_docs import settings_of_section, summary_of, toml_value, type_text
from schemas.overrides import parse_value


class Inner(BaseModel):
    """A table."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    share: float = Field(0.5, ge=0, le=1)
    """The share."""


class Example(Section):
    """The section `[example]` of a recipe: what it sets. More."""

    size: int = Field(1 << 20, ge=1)
    """Maximum size of a page [bytes], of `[other]` too. Sources vary."""
    limit: float | None = decision(None, gt=0, lt=1)
    """A limit; not set by default."""
    kinds: tuple[Literal["a", "b"], ...] = Field(("a",), min_length=1)
    """Kinds."""
    model: str | None = location(None)
    """A path."""
    parts: int = execution(4, ge=1, le=64)
    """Parts."""
    tables: tuple[Inner, ...] = ()
    """Tables."""


def test_settings_are_described_as_declared() -> None:
    size, limit, kinds, model, parts, tables = settings_of_section(Example)
    assert (size.type, size.default, size.range, size.unit) == ("whole number", "1048576", "at least 1", "bytes")
    assert size.first_sentence == "Maximum size of a page [bytes], of `[other]` too"
    assert (limit.type, limit.default, limit.range) == ("number or unset", "unset", "above 0, below 1")
    assert (limit.role, limit.first_sentence) == ("decision", "A limit")
    assert (kinds.type, kinds.default, kinds.range) == ("list from a, b", '["a"]', "at least 1 item")
    assert kinds.allowed == ("a", "b")
    assert (model.role, parts.role, parts.range) == ("location", "execution", "1 to 64")
    assert (tables.type, [key.key for key in tables.keys], tables.keys[0].range) == (
        "list of tables",
        ["share"],
        "0 to 1",
    )
    assert summary_of(Example) == "What it sets."


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (bool, "true or false"),
        (dict[str, float], "table from text to number"),
        (Mapping[str, Mapping[str, float]], "table from text to table from text to number"),
        (tuple[Annotated[int, 1], ...], "list of whole numbers"),
        (bool | Literal["auto"], "true or false or auto"),
        (Any, "any value"),
    ],
)
def test_types_in_words(annotation: Any, expected: str) -> None:
    assert type_text(annotation) == expected


@pytest.mark.parametrize("value", [1, 1e-05, True, 'a"b\\c', "ü", [1, 2], {"a": [1.5], "b c": {"d": "e"}}, [], {}])
def test_values_are_toml(value: Any) -> None:
    assert parse_value(toml_value(value)) == value
    assert toml_value(None) == "unset"
