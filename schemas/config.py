"""Recipes: a TOML file of sections describes a run; `--set` and `--unset` override single settings.

Each section is an immutable pydantic model. A field is *content* unless it is declared otherwise: content changes the
result and enters its fingerprint. `decision(...)` declares a threshold on stored measurements, and `execution(...)` a
number of partitions, an amount of memory or a cache. `location(...)` declares the path of a file; the digest of the
file enters the fingerprint, not the path. One error reports all wrong names, each with the most similar valid name.
"""

import argparse
import difflib
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.errors import ConfigError

S = TypeVar("S", bound="Section")
_WORD = "letters, digits, dots, _ and -, the first one a letter or digit"
PATTERNS: Mapping[str, str] = {
    r"^[a-z][a-z0-9_]{0,59}$": "lower-case letters, digits and _, the first one a letter, at most 60 characters",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": _WORD,
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,23}$": f"{_WORD}, at most 24 characters",
    "^([0-9a-f]{64})?$": "64 hexadecimal digits",
}
"""What the patterns of settings allow, in words."""
SHOWN_NAMES = 40
"""Maximum number of valid names that an error lists."""


class Section(BaseModel):
    """A section of a recipe: immutable, without unknown keys, and with a string under each field that describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
    REPLACES: ClassVar[Mapping[str, Set[str]]] = {}
    """Key -> keys that the recipe may not set beside it. `--set` of the key removes those that only the file sets."""
    array: ClassVar[str] = ""
    """For a section that a recipe writes as tables `[[section]]`: the field that holds them; each has a `name`."""

    @classmethod
    def table_class(cls) -> "type[Section]":
        """Return the class of the tables of an array `[[section]]`."""
        kind: type[Section] = get_args(cls.model_fields[cls.array].annotation)[0]
        return kind

    @classmethod
    def fields_of(cls, role: str) -> set[str]:
        """Return the names of the fields with this role: `content`, `decision`, `execution` or `location`."""
        extras = {name: info.json_schema_extra for name, info in cls.model_fields.items()}
        roles = {name: extra.get("role") if isinstance(extra, dict) else None for name, extra in extras.items()}
        return {name for name, declared in roles.items() if (declared or "content") == role}

    def content(self) -> dict[str, Any]:
        """Return the fields that change what is measured and written, as JSON values."""
        return self.model_dump(mode="json", include=self.fields_of("content"))

    def decisions(self) -> dict[str, Any]:
        """Return the fields that only change decisions on stored measurements, as JSON values."""
        return self.model_dump(mode="json", include=self.fields_of("decision"))


def execution(default: Any, **constraints: Any) -> Any:
    """Declare a field that changes how a run executes but never its output. Fingerprints omit the field."""
    return Field(default, json_schema_extra={"role": "execution"}, **constraints)


def decision(default: Any, **constraints: Any) -> Any:
    """Declare a threshold for stored measurements. A new value takes effect without reading texts again."""
    return Field(default, json_schema_extra={"role": "decision"}, **constraints)


def location(default: Any, **constraints: Any) -> Any:
    """Declare the path of a file. The fingerprint contains the digest of the file, not the path."""
    return Field(default, json_schema_extra={"role": "location"}, **constraints)


class Recipe(Mapping[str, Section]):
    """The validated sections of a run by name; a section that is absent from the file has its defaults.

    The tables of an array `[[section]]` can be looked up by their names too. They are not listed as sections.
    """

    def __init__(self, sections: Mapping[str, Section], notes: Sequence[str] = ()):
        self._sections = dict(sections)
        self._named = {table.name: table for section in sections.values() for table in _tables_of(section)}
        self.notes = tuple(notes)
        """Sentences to print: the settings of the file that an override has removed."""

    def __getitem__(self, name: str) -> Section:
        return self._sections[name] if name in self._sections else self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sections)

    def __len__(self) -> int:
        return len(self._sections)

    def section(self, name: str, kind: type[S]) -> S:
        """Return the section `name`. Raises TypeError if it is not an instance of `kind`."""
        section = self._sections[name]
        if not isinstance(section, kind):
            raise TypeError(f"recipe section [{name}]: expected a {kind.__name__}, got a {type(section).__name__}.")
        return section

    def with_section(self, name: str, section: Section) -> "Recipe":
        """Return the recipe with another section of this name."""
        return Recipe({**self._sections, name: section})

    def to_json(self) -> dict[str, Any]:
        """Return the values that the recipe sets, by section, without defaults."""
        sections = {name: section.model_dump(mode="json", exclude_unset=True) for name, section in self.items()}
        return {name: values for name, values in sections.items() if values}


def _tables_of(section: Section) -> Sequence[Any]:
    return getattr(section, section.array) if section.array else ()


def suggest_name(name: str, valid: Iterable[str]) -> str:
    """Return ` (did you mean X?)` with the name in `valid` most similar to `name`, else ` (valid: …)`."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    if close:
        return f" (did you mean {close[0]!r}?)"
    more = f" and {len(valid) - SHOWN_NAMES} more" if len(valid) > SHOWN_NAMES else ""
    return f" (valid: {', '.join(valid[:SHOWN_NAMES])}{more})"


def build_recipe(
    raw: Mapping[str, Any],
    kinds: Mapping[str, type[Section]],
    where: str,
    wrong: Sequence[str] = (),
    overridden: Set[str] = frozenset(),
) -> Recipe:
    """Return the recipe of the values `raw`, validated by the section classes `kinds`.

    `overridden`: the settings `section.key` that `--set` sets, which an error names as such. Raises ConfigError that
    lists every wrong setting, after those in `wrong`.
    """
    problems = list(wrong)
    sections: dict[str, Section] = {}
    raw = {name: _as_section(values, kinds.get(name)) for name, values in raw.items()}
    for name, values in raw.items():
        if name not in kinds:
            problems.append(f"[{name}]: no such section{suggest_name(name, kinds)}")
        elif not isinstance(values, Mapping):
            is_array = isinstance(values, list) and values and isinstance(values[0], Mapping)
            got = f"tables [[{name}]]. Write [{name}]" if is_array else f"the value {values!r}"
            problems.append(f"{name}: expected a section [{name}], got {got}")
        elif kinds[name].array and values and kinds[name].array not in values:
            problems.append(f"{name}: expected tables [[{name}]], got one table [{name}]. Write [[{name}]]")
            raw[name] = {}  # its keys are no problem of their own
    for name, kind in kinds.items():
        values = raw.get(name, {})
        if not isinstance(values, Mapping):
            continue
        try:
            sections[name] = kind.model_validate(dict(values))
        except ValidationError as error:
            problems.extend(_problem(name, kinds, item, overridden) for item in error.errors())
    for name, section in sections.items():
        problems += [
            f"[[{name}]] {table.name}: expected a name that no section has, got {table.name!r}. Rename it."
            for table in _tables_of(section)
            if table.name in kinds
        ]
    if problems:
        given = all(problem.startswith("--") for problem in problems)
        fix = "Correct the options" if given else "Correct them in the recipe, or with --set and --unset"
        raise ConfigError(
            f"{'command line' if given else where}: expected valid settings, got {len(problems)} wrong:\n  "
            + "\n  ".join(problems)
            + f"\nNothing was started. {fix}."
        )
    return Recipe(sections)


def _as_section(values: Any, kind: type[Section] | None) -> Any:
    """Return an array of tables `[[section]]` as the section that holds it; other values as they are."""
    return {kind.array: values} if kind is not None and kind.array and isinstance(values, list) else values


def _problem(section: str, kinds: Mapping[str, type[Section]], item: Any, overridden: Set[str]) -> str:
    """Return one of pydantic's validation errors in a section as a line of text, with `--set` if that is its place."""
    field = ".".join(str(part) for part in item["loc"])
    option = "--set " if item["loc"] and f"{section}.{item['loc'][0]}" in overridden else ""
    where, value = f"{option}{section}.{field}", item.get("input")
    match item["type"]:
        case "extra_forbidden":
            if len(item["loc"]) == 1 and (owner := _owner_of(field, kinds)):
                return f"{where}: no such key (did you mean '{owner}.{field}'?)"
            fields = _fields_at(kinds[section], item["loc"])
            return f"{where}: no such key{suggest_name(str(item['loc'][-1]), fields)}"
        case "missing":
            return f"{where}: expected a value, got none. Set `{item['loc'][-1]}`"
        case "string_pattern_mismatch" if item["ctx"]["pattern"] in PATTERNS:
            return f"{where}: expected {PATTERNS[item['ctx']['pattern']]}, got {value!r}"
        case "tuple_type" | "list_type" if isinstance(value, Mapping):
            return f"{where}: expected tables [[{section}.{field}]], got one table. Write [[{section}.{field}]]"
    message = item["msg"].removeprefix("Value error, ")
    got = "" if ", got " in message else f", got {value!r}"
    if isinstance(value, str) and item["type"] in ("dict_type", "tuple_type", "list_type"):
        got += " (not TOML: put quotes around names of tables and around texts inside lists)"
    return f"{where}: {message}{got}" if field else f"[{section}]: {message}"


def _owner_of(key: str, kinds: Mapping[str, type[Section]]) -> str | None:
    """Return the only section that has a key of this name; None if none or several have it."""
    owners = [name for name, kind in kinds.items() if key in kind.model_fields]
    return owners[0] if len(owners) == 1 else None


def _fields_at(kind: type[Section], path: tuple[int | str, ...]) -> Iterable[str]:
    """Return the names of the fields of the section, or of the section inside it, that a path of keys leads into."""
    for part in path[:-1]:
        info = kind.model_fields.get(str(part))
        inner = (
            []
            if info is None
            else [each for each in (info.annotation, *get_args(info.annotation)) if _is_section(each)]
        )
        kind = inner[0] if inner else kind
    return kind.model_fields


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def parse_recipe(text: str, where: str) -> dict[str, Any]:
    """Return the values of a TOML text. Raises ConfigError if it is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: expected valid TOML, got an error: {error}. Correct the TOML there.") from error


class Unset(str):
    """The override `--unset section.key`, as the text `section.key`: it removes a key that the recipe sets."""


def add_override_options(parser: argparse.ArgumentParser, effect: str = "override a setting of the recipe") -> None:
    """Add the repeatable options `--set` and `--unset`, in one list `overrides` in the order of the command line."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help=f"{effect}; may be repeated",
    )
    parser.add_argument(
        "--unset",
        action="append",
        default=[],
        type=Unset,
        metavar="SECTION.KEY",
        dest="overrides",
        help="remove a setting of the recipe, so that its default applies; may be repeated",
    )


def override_words(overrides: Iterable[str]) -> list[str]:
    """Return overrides as words of a command line, such as `["--set", "train.steps=3", "--unset", "plan.compute"]`."""
    return [word for text in overrides for word in ("--unset" if isinstance(text, Unset) else "--set", str(text))]


def load_recipe(
    raw: Mapping[str, Any], overrides: Iterable[str], kinds: Mapping[str, type[Section]], where: str
) -> Recipe:
    """Return the recipe of the values `raw` with overrides applied: `section.key=value`, or an `Unset` key.

    A key that the file sets is removed if an override sets a key that replaces it (see `Section.REPLACES`); a note of
    the recipe names it. Raises ConfigError that lists every wrong setting.
    """
    sections = {name: _as_section(section, kinds.get(name)) for name, section in raw.items()}
    values = {name: dict(section) if isinstance(section, Mapping) else section for name, section in sections.items()}
    wrong: list[str] = []
    given: dict[str, list[str]] = {}
    for override in overrides:
        section, key, value = _parse_override(override, kinds)
        if isinstance(override, Unset):
            wrong += _unknown_key(section, key, kinds)
            if isinstance(values.get(section), dict):
                values[section].pop(key, None)
            continue
        given.setdefault(section, []).append(key)
        target = values.setdefault(section, {})
        if isinstance(target, dict):
            target[key] = parse_value(value)
    notes = [note for section, keys in given.items() for note in _drop_replaced(values, kinds, section, keys)]
    overridden = {f"{section}.{key}" for section, keys in given.items() for key in keys}
    return Recipe(build_recipe(values, kinds, where, wrong, overridden), notes)


def _parse_override(override: str, kinds: Mapping[str, type[Section]]) -> tuple[str, str, str]:
    """Return the section, key and value of an override; the value of an `Unset` is empty."""
    path, equals, value = override.partition("=")
    section, dot, key = path.strip().partition(".")
    if isinstance(override, Unset):
        if equals or not (dot and section and key):
            raise ConfigError(
                f"--unset: expected section.key, got {str(override)!r}. Write it as --unset quality.min_words."
            )
    elif not (equals and dot and section and key):
        example = "--set quality.min_words=30"
        if equals and section in kinds and not key:
            named = kinds[section].array or next(iter(kinds[section].model_fields))
            example = f"--set {shlex.quote(f'{section}.{named}={value}')}"
        raise ConfigError(f"--set: expected section.key=value, got {override!r}. Write it as {example}.")
    return section, key, value


def _unknown_key(section: str, key: str, kinds: Mapping[str, type[Section]]) -> list[str]:
    """Return a line of text about an `Unset` that names no setting; empty if the setting exists."""
    if section not in kinds:
        return [f"--unset {section}.{key}: no such section{suggest_name(section, kinds)}"]
    fields = kinds[section].model_fields
    if key in fields:
        return []
    owner = _owner_of(key, kinds)
    hint = f" (did you mean '{owner}.{key}'?)" if owner else suggest_name(key, fields)
    return [f"--unset {section}.{key}: no such key{hint}"]


def _drop_replaced(
    values: dict[str, Any], kinds: Mapping[str, type[Section]], section: str, keys: Sequence[str]
) -> Iterator[str]:
    """Remove the keys of a section that the overridden `keys` replace; yield a sentence about each removal."""
    target = values[section]
    if section not in kinds or not isinstance(target, dict):
        return
    for key in dict.fromkeys(keys):
        replaced = [name for name in target if name in kinds[section].REPLACES.get(key, ()) and name not in keys]
        if replaced and target.get(key) is not None:
            for name in replaced:
                del target[name]
            names = " and ".join(f"{section}.{name}" for name in replaced)
            verb = "are" if replaced[1:] else "is"
            yield f"{names} of the recipe {verb} not used, because --set gives {section}.{key}"


def parse_value(text: str) -> Any:
    """Return the value of a TOML text. If the text is not valid TOML, as `lid.176.ftz`, return the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
