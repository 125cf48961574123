"""Recipes: a run is one TOML file, a section is one frozen model, one override form `section.key=value`.

A field is *content* (it changes the result and enters the fingerprint) unless it is declared with `execution(...)`
(partitions, memory, caches) or `location(...)` (where a file lies; its digest enters instead). Wrong names are all
reported at once, each with the nearest valid one.
"""

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.errors import ConfigError

S = TypeVar("S", bound="Section")
SHOWN_NAMES = 40
"""Valid names that an error lists."""


class Section(BaseModel):
    """One section of a recipe: frozen, unknown keys refused, documented by the strings under its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def fields_of(cls, role: str) -> set[str]:
        """The names of the fields with this role: `content`, `decision`, `execution` or `location`."""
        extras = {name: info.json_schema_extra for name, info in cls.model_fields.items()}
        roles = {name: extra.get("role") if isinstance(extra, dict) else None for name, extra in extras.items()}
        return {name for name, found in roles.items() if (found or "content") == role}

    def content(self) -> dict[str, Any]:
        """The fields that change what is measured and written, as JSON values."""
        return self.model_dump(mode="json", include=self.fields_of("content"))

    def decisions(self) -> dict[str, Any]:
        """The fields that change what is decided from it, as JSON values."""
        return self.model_dump(mode="json", include=self.fields_of("decision"))


def execution(default: Any, **constraints: Any) -> Any:
    """A field that changes how a run executes but never what it writes; kept out of every fingerprint."""
    return Field(default, json_schema_extra={"role": "execution"}, **constraints)


def decision(default: Any, **constraints: Any) -> Any:
    """A field that only decides: it is compared with stored measurements, so another value needs no text read again."""
    return Field(default, json_schema_extra={"role": "decision"}, **constraints)


def location(default: Any, **constraints: Any) -> Any:
    """A field that says where a file lies; the file enters the fingerprint by its digest, not by its place."""
    return Field(default, json_schema_extra={"role": "location"}, **constraints)


class Recipe(Mapping[str, Section]):
    """The validated sections of a run, by name; a section absent from the file has its defaults."""

    def __init__(self, sections: Mapping[str, Section]):
        self._sections = dict(sections)

    def __getitem__(self, name: str) -> Section:
        return self._sections[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sections)

    def __len__(self) -> int:
        return len(self._sections)

    def section(self, name: str, kind: type[S]) -> S:
        """The section `name` as its own type. Raises TypeError if the recipe holds another type there."""
        found = self._sections[name]
        if not isinstance(found, kind):
            raise TypeError(f"recipe section [{name}] is a {type(found).__name__}, not a {kind.__name__}")
        return found

    def to_json(self) -> dict[str, Any]:
        """What the recipe sets, by section; defaults are left to the code, and manifests hold every content value."""
        sections = {name: section.model_dump(mode="json", exclude_unset=True) for name, section in self.items()}
        return {name: values for name, values in sections.items() if values}


def suggest_name(name: str, valid: Iterable[str]) -> str:
    """` (did you mean X?)` for the valid name closest to `name`, or the valid names if none is close."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    if close:
        return f" (did you mean {close[0]!r}?)"
    more = f" and {len(valid) - SHOWN_NAMES} more" if len(valid) > SHOWN_NAMES else ""
    return f" (valid: {', '.join(valid[:SHOWN_NAMES])}{more})"


def build_recipe(raw: Mapping[str, Any], kinds: Mapping[str, type[Section]], where: str) -> Recipe:
    """The recipe in `raw` checked against the section types. Raises ConfigError that names every wrong field."""
    problems: list[str] = []
    sections: dict[str, Section] = {}
    for name, values in raw.items():
        if name not in kinds:
            problems.append(f"[{name}]: no such section{suggest_name(name, kinds)}")
        elif not isinstance(values, Mapping):
            problems.append(f"{name}: a section [{name}] is expected, found the value {values!r}")
    for name, kind in kinds.items():
        values = raw.get(name, {})
        if not isinstance(values, Mapping):
            continue
        try:
            sections[name] = kind.model_validate(dict(values))
        except ValidationError as error:
            problems.extend(_problem(name, kind, item) for item in error.errors())
    if problems:
        raise ConfigError(f"{where}: {len(problems)} wrong setting(s); nothing was started\n  " + "\n  ".join(problems))
    return Recipe(sections)


def _problem(section: str, kind: type[Section], item: Any) -> str:
    field = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{section}.{field}: no such key{suggest_name(str(item['loc'][-1]), kind.model_fields)}"
    found = "" if item["type"] == "missing" else f", found {item.get('input')!r}"
    if isinstance(item.get("input"), str) and item["type"] in ("dict_type", "tuple_type", "list_type"):
        found += " (not TOML: names of tables and texts inside lists want their quotes)"
    message = item["msg"].removeprefix("Value error, ")
    return f"{section}.{field}: {message}{found}" if field else f"[{section}]: {message}"


def parse_recipe(text: str, where: str) -> dict[str, Any]:
    """The values of a TOML text. Raises ConfigError if it is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from error


def load_recipe(
    raw: Mapping[str, Any], overrides: Iterable[str], kinds: Mapping[str, type[Section]], where: str
) -> Recipe:
    """The recipe in `raw` with `section.key=value` overrides on top. Raises ConfigError."""
    values = {name: dict(section) if isinstance(section, Mapping) else section for name, section in raw.items()}
    for override in overrides:
        path, equals, value = override.partition("=")
        section, dot, key = path.strip().partition(".")
        if not (equals and dot and section and key):
            raise ConfigError(f"--set {override!r}: expected section.key=value, for example quality.min_words=30")
        target = values.setdefault(section, {})
        if isinstance(target, dict):
            target[key] = parse_value(value)
    return build_recipe(values, kinds, where)


def parse_value(text: str) -> Any:
    """A TOML value; text that is not one is taken as a string, so `language.model=lid.176.ftz` needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
