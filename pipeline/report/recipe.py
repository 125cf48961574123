"""The recipe, the package versions and the times that made a run, as the report shows them.

The recipe is text in TOML that `penstock run` accepts. Settings that differ from their defaults are marked.
"""

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic_core import PydanticUndefined

from pipeline.extract import native as markup
from pipeline.report.facts import RunFacts
from pipeline.text import native as words
from schemas.config import Section
from schemas.overrides import toml_text

PACKAGES = (
    "pyspark",
    "pyarrow",
    "numpy",
    "fastwarc",
    "resiliparse",
    "trafilatura",
    "fasttext",
    "sentencepiece",
    "tokenizers",
    "torch",
)
"""Packages whose versions can change what a run writes."""


UNSET = "not set"
"""The default of a setting that has no value."""


@dataclass(frozen=True)
class SettingLine:
    """One setting of a recipe, as TOML."""

    key: str
    value: str
    """The value; empty if the setting has none (off)."""
    default: str
    """The default value; UNSET if it is None, and empty if a value is required."""
    is_set: bool
    """True if the recipe sets it."""
    is_changed: bool
    """True if the value differs from the default."""


@dataclass(frozen=True)
class RecipeSection:
    """One section of a recipe, with its settings in the order of their declaration."""

    header: str
    """The line that begins the section, such as `[quality]`."""
    lines: tuple[SettingLine, ...]

    @property
    def set_lines(self) -> list[SettingLine]:
        """The settings that the recipe sets."""
        return [line for line in self.lines if line.is_set]


def recipe_sections(facts: RunFacts, kinds: Mapping[str, type[Section]]) -> list[RecipeSection]:
    """Return the sections of a run's recipe.

    `kinds` has the classes of sections. A section without a class is shown with the settings that the recipe sets, and
    without defaults.
    """
    shown = []
    for name in [*kinds, *(name for name in facts.recipe if name not in kinds)]:
        values = facts.recipe.get(name, {})
        is_list = isinstance(values, list)
        for entry in values if is_list else [values]:
            lines = tuple(_lines(entry, kinds.get(name)))
            if lines:
                shown.append(RecipeSection(f"[[{name}]]" if is_list else f"[{name}]", lines))
    return shown


def _lines(values: Mapping[str, Any], kind: type[Section] | None) -> Iterator[SettingLine]:
    defaults = _defaults(kind) if kind else {}
    for key in [*defaults, *(key for key in values if key not in defaults)]:
        default = defaults.get(key, PydanticUndefined)
        value = values.get(key, default)
        is_known = default is not PydanticUndefined
        yield SettingLine(
            key=key,
            value="" if value is PydanticUndefined else to_toml(value),
            default=(to_toml(default) or UNSET) if is_known else "",
            is_set=key in values,
            is_changed=key in values and (not is_known or value != default),
        )


def _defaults(kind: type[Section]) -> dict[str, Any]:
    """Return the default of every field of a section as a JSON value; PydanticUndefined for a required field."""
    defaults = {
        name: PydanticUndefined if info.is_required() else info.get_default(call_default_factory=True)
        for name, info in kind.model_fields.items()
    }
    known = {name: value for name, value in defaults.items() if value is not PydanticUndefined}
    as_json = kind.model_construct(None, **known).model_dump(mode="json", include=set(known), warnings=False)
    return {name: as_json.get(name, PydanticUndefined) for name in defaults}


def to_toml(value: Any) -> str:
    """Return a JSON value as TOML on one line; empty for None, which TOML cannot express."""
    if value is None:
        return ""
    if isinstance(value, str):
        return toml_text(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        pairs = (f"{_key(key)} = {to_toml(inner)}" for key, inner in value.items() if inner is not None)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    return str(value)


def _key(name: str) -> str:
    return name if name.isascii() and name.replace("_", "").replace("-", "").isalnum() else to_toml(name)


def recipe_text(shown: list[RecipeSection]) -> str:
    """Return the settings that a recipe sets as the text of a TOML file."""
    blocks = []
    for section in shown:
        lines = [f"{line.key} = {line.value}" for line in section.set_lines if line.value]
        if lines:
            blocks.append("\n".join([section.header, *lines]))
    return "\n\n".join(blocks) + "\n" if blocks else ""


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed where the report is written.

    The entries `words` and `markup` say whether native modules or Python read texts and pages: `native` or `python`.
    """
    versions = {"python": platform.python_version(), "words": words.implementation(), "markup": markup.implementation()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # a machine has the packages of one half only
            continue
    return versions
