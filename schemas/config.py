"""Recipes: a TOML file of sections describes a run; `--set` and `--unset` override single settings.

Each section is an immutable pydantic model. A field is *content* unless it is declared otherwise: content changes the
result and enters its fingerprint. `decision(...)` declares a threshold on stored measurements, and `execution(...)` a
number of partitions, an amount of memory or a cache. `location(...)` declares the path of a file; the digest of the
file enters the fingerprint, not the path. One error reports all wrong names, each with the most similar valid name.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from schemas.errors import ConfigError
from schemas.secrets import secrets_in, shown_value

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
    own_sections: ClassVar[Set[str]] = frozenset()
    """For the section `[source]`, which may be several tables `[[source]]`: the sections that each table may set for
    its documents alone, such as `[source.quality]`."""
    OWN_FIELDS: ClassVar[Set[str] | None] = None
    """The settings of the section that a source may set for its documents alone; None: all of them."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: object, field: ValidationInfo) -> object:
        # pydantic takes true for 1, so `min_words = true` would be a limit of one word.
        declared = cls.model_fields[str(field.field_name)]
        reads_others = any(isinstance(item, BeforeValidator) for item in declared.metadata)
        if _has_bool(value) and not (reads_others or _takes_bool(declared.annotation)):
            raise ValueError(f"expected another value than true or false, got {value!r}")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _off_by_name(cls, value: object, field: ValidationInfo) -> object:
        return None if value == OFF and can_be_off(cls.model_fields[str(field.field_name)]) else value

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


OFF = "none"
"""The value that turns off a setting whose default is another value. TOML has no null, and an absent key means the
default."""


def can_be_off(info: FieldInfo) -> bool:
    """Return True if a setting may be None, and None is not its default, so that a recipe writes it as OFF."""
    is_nullable = type(None) in get_args(info.annotation) and not info.is_required()
    return is_nullable and info.get_default(call_default_factory=True) is not None


def _has_bool(value: object) -> bool:
    """Return True if a value is true or false, or has one in its lists and tables."""
    if isinstance(value, Mapping):
        return any(map(_has_bool, value.values()))
    return any(map(_has_bool, value)) if isinstance(value, list | tuple) else isinstance(value, bool)


ANY = (bool, object, Any, dict, list)
"""Types of settings, and of their parts, that may be true or false, or hold such values."""


def _takes_bool(kind: Any) -> bool:
    """Return True if the type of a setting has a part that may be true or false; a section decides for itself."""
    parts = get_args(kind)
    return any(map(_takes_bool, parts)) if parts else kind in ANY or isinstance(kind, bool) or _is_section(kind)


def execution(default: Any, **constraints: Any) -> Any:
    """Declare a field that changes how a run executes but never its output. Fingerprints omit the field."""
    return Field(default, json_schema_extra={"role": "execution"}, **constraints)


def decision(default: Any, **constraints: Any) -> Any:
    """Declare a threshold for stored measurements. A new value takes effect without reading texts again."""
    return Field(default, json_schema_extra={"role": "decision"}, **constraints)


def location(default: Any, **constraints: Any) -> Any:
    """Declare the path of a file. The fingerprint contains the digest of the file, not the path."""
    return Field(default, json_schema_extra={"role": "location"}, **constraints)


SOURCE = "source"
"""The section of which a recipe may have several: `[[source]]`."""
SEPARATOR = "."
"""Separates the parts of the name of a section that one source has for itself; names of sections do not contain it."""


def own_key(source: str, section: str) -> str:
    """Return the name of a section that one of several sources has for itself, such as `source.books.quality`."""
    return f"{SOURCE}{SEPARATOR}{source}{SEPARATOR}{section}"


@dataclass(frozen=True)
class SourceSections:
    """One table `[[source]]`: its own settings, and the sections in which it differs from the rest of the recipe."""

    config: Any
    """The section `source` of this source; its `name` is the name of the source."""
    sections: Mapping[str, Section]
    """The whole sections with the settings of `[source.SECTION]`, by name; empty for most sources."""
    values: Mapping[str, Mapping[str, Any]]
    """The settings that the recipe makes in `[source.SECTION]`, by section."""


class Recipe(Mapping[str, Section]):
    """The validated sections of a run by name; a section that is absent from the file has its defaults.

    The tables of an array `[[section]]` can be looked up by their names too. They are not listed as sections. A recipe
    with several sources has no section `source`: `of_source` returns the recipe of one of them.
    """

    def __init__(
        self,
        sections: Mapping[str, Section],
        notes: Sequence[str] = (),
        several: Sequence[SourceSections] = (),
        own: Set[str] = frozenset(),
    ):
        """`several`: the sources, if there are several; the section `source` is then left out of `sections`."""
        self._sections = dict(sections)
        self._named = {table.name: table for section in sections.values() for table in _tables_of(section)}
        self._several = {source.config.name: source for source in several}
        self.notes = tuple(notes)
        """Sentences to print: the settings of the file that an override has removed."""
        self.own = frozenset(own)
        """For the recipe of one of several sources: the sections that it has for itself."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources, in the order of the recipe."""
        return tuple(self._several) or (getattr(self._sections.get(SOURCE), "name", ""),)

    @property
    def has_several_sources(self) -> bool:
        """True if the recipe has two or more tables `[[source]]`."""
        return bool(self._several)

    def of_source(self, name: str) -> "Recipe":
        """Return the recipe of one source: the sections of the run, with those in which this source differs."""
        if not self._several:
            return self
        source = self._several[name]
        sections = {**self._sections, **source.sections, SOURCE: source.config}
        return Recipe(sections, own=source.sections.keys())

    def by_source(self) -> "dict[str, Recipe]":
        """Return the recipe of each source, by the source's name."""
        return {name: self.of_source(name) for name in self.sources}

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

    def section_at(self, key: str) -> Section:
        """Return the section with this name; `own_key` is the name of a section that one of several sources has."""
        place, _, name = key.rpartition(SEPARATOR)
        source = place.removeprefix(f"{SOURCE}{SEPARATOR}")
        return self.of_source(source)[name] if place else self[key]

    def differences(self, other: "Recipe") -> Iterator[tuple[str, Section, Section]]:
        """Yield (name, section, section of the other recipe) of all sections, with those of single sources.

        Raises ConfigError unless both recipes have the same sources.
        """
        if self.sources != other.sources:
            raise ConfigError(
                f"[[{SOURCE}]]: expected the same sources, got {', '.join(self.sources)} and "
                f"{', '.join(other.sources)}. Leave the names of the sources as they are."
            )
        yield from ((name, section, other[name]) for name, section in self.items())
        for source in self.sources if self._several else ():
            one, two = self.of_source(source), other.of_source(source)
            for name in (SOURCE, *sorted(one.own | two.own)):
                yield own_key(source, name), one[name], two[name]

    def with_section(self, name: str, section: Section) -> "Recipe":
        """Return the recipe with another section of this name, for all sources that do not have it for themselves."""
        return Recipe({**self._sections, name: section}, self.notes, list(self._several.values()), self.own)

    def with_notes(self, notes: Sequence[str]) -> "Recipe":
        """Return the recipe with other notes."""
        return Recipe(self._sections, notes, list(self._several.values()), self.own)

    def with_own(self, changed: Mapping[str, Mapping[str, Section]]) -> "Recipe":
        """Return the recipe with other sections of single sources, by the name of the source and of the section."""
        several = [
            SourceSections(each.config, {**each.sections, **changed.get(name, {})}, each.values)
            for name, each in self._several.items()
        ]
        return Recipe(self._sections, self.notes, several, self.own)

    def to_json(self) -> dict[str, Any]:
        """Return the values that the recipe sets, by section, without defaults."""
        sections: dict[str, Any] = {name: _set_values(section) for name, section in self.items()}
        if self._several:
            sections[SOURCE] = [{**_set_values(each.config), **each.values} for each in self._several.values()]
        return {name: values for name, values in sections.items() if values}


def _set_values(section: Section) -> dict[str, Any]:
    return section.model_dump(mode="json", exclude_unset=True)


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
    # They are reported alone, because other messages quote values.
    secrets = [line for name, values in raw.items() for line in secrets_in(values, name)]
    if secrets:
        raise ConfigError("\n  ".join([f"{where}: expected settings without secrets; nothing was started", *secrets]))
    problems = list(wrong)
    sections: dict[str, Section] = {}
    raw, tables = _split_sources(raw, kinds, problems)
    several: list[SourceSections] = []
    raw = {name: as_section(values, kinds.get(name)) for name, values in raw.items()}
    for name, values in raw.items():
        if name not in kinds:
            problems.append(f"[{name}]: no such section{suggest_name(name, kinds)}")
        elif not isinstance(values, Mapping):
            is_array = isinstance(values, list) and values and isinstance(values[0], Mapping)
            got = f"tables [[{name}]]. Write [{name}]" if is_array else f"the value {shown_value(values)}"
            problems.append(f"{name}: expected a section [{name}], got {got}")
        elif kinds[name].array and values and kinds[name].array not in values:
            problems.append(f"{name}: expected tables [[{name}]], got one table [{name}]. Write [[{name}]]")
            raw[name] = {}  # its keys are no problem of their own
    for name, kind in kinds.items():
        values = raw.get(name, {})
        if not isinstance(values, Mapping) or (name == SOURCE and tables):
            continue
        try:
            sections[name] = kind.model_validate(dict(values))
        except ValidationError as error:
            problems.extend(_problem(name, kinds, item, overridden) for item in error.errors())
    for table in tables:
        several += _source_sections(table, raw, kinds, (problems, overridden))
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
    return Recipe(sections, several=several)


def _split_sources(
    raw: Mapping[str, Any], kinds: Mapping[str, type[Section]], problems: list[str]
) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    """Return the values of a recipe without its tables `[[source]]`, and these tables if there are several.

    The sections of a single source are those of the recipe. Problems are added to `problems`.
    """
    kind, values = kinds.get(SOURCE), raw.get(SOURCE)
    if kind is None or not kind.own_sections or values is None:
        return raw, ()
    tables = values if isinstance(values, list) else [values]
    if not tables or not all(isinstance(table, Mapping) for table in tables):
        return raw, ()  # reported as a section that is none
    if len(tables) == 1:
        own = _own_values(tables[0], kinds, problems)
        rest = _without_sections(tables[0], kinds)
        merged = {name: _merged(raw.get(name, {}), values, kinds[name]) for name, values in own.items()}
        return {**raw, **merged, SOURCE: rest}, ()
    default = kind.model_fields["name"].default
    names = [table.get("name", default) for table in tables]
    problems += [
        f"[[{SOURCE}]]: expected a name of its own for each source, got {name!r} more than once. Set `name`"
        for name in dict.fromkeys(name for name in names if names.count(name) > 1)
    ]
    return {key: value for key, value in raw.items() if key != SOURCE}, tables


def _source_sections(
    table: Mapping[str, Any],
    raw: Mapping[str, Any],
    kinds: Mapping[str, type[Section]],
    reports: tuple[list[str], Set[str]],
) -> Iterator[SourceSections]:
    """Yield one of several sources, unless a setting of it is wrong.

    `reports`: the list to which problems are added, and the settings that `--set` sets.
    """
    problems, overridden = reports
    own = _own_values(table, kinds, problems)
    name = table.get("name", kinds[SOURCE].model_fields["name"].default)
    found: dict[str, Section] = {}
    for section, values in {SOURCE: _without_sections(table, kinds), **own}.items():
        whole = values if section == SOURCE else _merged(raw.get(section, {}), values, kinds[section])
        try:
            found[section] = kinds[section].model_validate(dict(whole))
        except ValidationError as error:
            where = f"{SOURCE}.{name}." if section == SOURCE else f"{SOURCE}.{name}.{section}."
            problems += [
                where + _problem(section, kinds, item, overridden).removeprefix(f"{section}.")
                for item in error.errors()
            ]
    if len(found) == len(own) + 1:
        config = found.pop(SOURCE)
        yield SourceSections(config, found, {section: dict(values) for section, values in own.items()})


def _without_sections(table: Mapping[str, Any], kinds: Mapping[str, type[Section]]) -> dict[str, Any]:
    """Return the keys of a table `[[source]]` that are not sections of the recipe."""
    fields = kinds[SOURCE].model_fields
    return {key: value for key, value in table.items() if key in fields or key not in kinds}


def _own_values(
    table: Mapping[str, Any], kinds: Mapping[str, type[Section]], problems: list[str]
) -> dict[str, Mapping[str, Any]]:
    """Return the tables `[source.SECTION]` of a source, by section. Sections that it may not have are problems."""
    kind, rest = kinds[SOURCE], _without_sections(table, kinds)
    own = {key: value for key, value in table.items() if key not in rest}
    problems += [
        f"{SOURCE}.{name}: expected a section that a source may have for itself"
        f" ({', '.join(sorted(kind.own_sections))}), got [{SOURCE}.{name}]. Write [{name}], for all sources"
        for name in own
        if name not in kind.own_sections
    ]
    problems += [
        f"{SOURCE}.{name}: expected a table [{SOURCE}.{name}], got {value!r}"
        for name, value in own.items()
        if name in kind.own_sections and not isinstance(value, Mapping)
    ]
    for name, values in own.items():
        fields = kinds[name].OWN_FIELDS
        if name in kind.own_sections and isinstance(values, Mapping) and fields is not None:
            problems += [
                f"{SOURCE}.{name}.{key}: expected a setting of [{name}] that a source may have for itself"
                f" ({', '.join(sorted(fields))}), got {key} = {value!r}. Write {name}.{key}, for all sources"
                for key, value in values.items()
                if key in kinds[name].model_fields.keys() - fields
            ]
    return {name: value for name, value in own.items() if isinstance(value, Mapping)}


def _merged(base: Any, values: Mapping[str, Any], kind: type[Section]) -> dict[str, Any]:
    """Return the settings of a section with those of a source, which replace the keys that they exclude."""
    kept = dict(base) if isinstance(base, Mapping) else {}
    for key in values:
        for name in kind.REPLACES.get(key, ()):
            if name not in values:
                kept.pop(name, None)
    return {**kept, **values}


def as_section(values: Any, kind: type[Section] | None) -> Any:
    """Return an array of tables `[[section]]` as the section that holds it; other values as they are."""
    return {kind.array: values} if kind is not None and kind.array and isinstance(values, list) else values


def _problem(section: str, kinds: Mapping[str, type[Section]], item: Any, overridden: Set[str]) -> str:
    """Return one of pydantic's validation errors in a section as a line of text, with `--set` if that is its place."""
    field = ".".join(str(part) for part in item["loc"])
    option = "--set " if item["loc"] and f"{section}.{item['loc'][0]}" in overridden else ""
    where, value = f"{option}{section}.{field}", item.get("input")
    match item["type"]:
        case "extra_forbidden":
            if len(item["loc"]) == 1 and (owner := owner_of(field, kinds)):
                return f"{where}: no such key (did you mean '{owner}.{field}'?)"
            fields = fields_at(kinds[section], item["loc"])
            return f"{where}: no such key{suggest_name(str(item['loc'][-1]), fields)}"
        case "missing":
            return f"{where}: expected a value, got none. Set `{item['loc'][-1]}`"
        case "string_pattern_mismatch" if item["ctx"]["pattern"] in PATTERNS:
            return f"{where}: expected {PATTERNS[item['ctx']['pattern']]}, got {value!r}"
        case "tuple_type" | "list_type" if isinstance(value, Mapping):
            return f"{where}: expected tables [[{section}.{field}]], got one table. Write [[{section}.{field}]]"
    message = item["msg"].removeprefix("Value error, ")
    got = "" if ", got " in message else f", got {shown_value(value)}"
    if isinstance(value, str) and item["type"] in ("dict_type", "tuple_type", "list_type"):
        got += " (not TOML: put quotes around names of tables and around texts inside lists)"
    return f"{where}: {message}{got}" if field else f"[{section}]: {message}"


def owner_of(key: str, kinds: Mapping[str, type[Section]]) -> str | None:
    """Return the only section that has a key of this name; None if none or several have it."""
    owners = [name for name, kind in kinds.items() if key in kind.model_fields]
    return owners[0] if len(owners) == 1 else None


def fields_at(kind: type[Section], path: tuple[int | str, ...]) -> Iterable[str]:
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
