"""Recipes read from TOML, with the values of `--set` and `--unset`, which override single settings."""

import argparse
import copy
import json
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from schemas.config import SOURCE, Recipe, Section, as_section, build_recipe, fields_at, owner_of, suggest_name
from schemas.errors import ConfigError
from schemas.secrets import secret_in, shown_value


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
    sections = {name: as_section(section, kinds.get(name)) for name, section in raw.items()}
    values: dict[str, Any] = {name: copy.deepcopy(section) for name, section in sections.items()}
    wrong: list[str] = []
    given: dict[str, list[str]] = {}
    for override in overrides:
        section, key, value = _parse_override(override, kinds)
        if section == SOURCE and section in kinds and kinds[section].own_sections and _is_deep(key, values):
            wrong += _override_source(override, key, value, values, kinds)
            continue
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
    notes += [note for section, keys in given.items() for note in _set_by_sources(values, section, keys)]
    overridden = {f"{section}.{key}" for section, keys in given.items() for key in keys}
    return build_recipe(values, kinds, where, wrong, overridden).with_notes(notes)


def _set_by_sources(values: Mapping[str, Any], section: str, keys: Sequence[str]) -> list[str]:
    """Return a note about each setting of the command line that sources have for themselves, so that it is not used."""
    tables = values.get(SOURCE, [])
    sources = [table for table in (tables if isinstance(tables, list) else [tables]) if isinstance(table, Mapping)]
    notes = []
    for key in keys if section != SOURCE else ():
        own = [
            str(source.get("name", "web"))
            for source in sources
            if isinstance(source.get(section), Mapping) and key in source[section]
        ]
        if own:
            effect = "has no effect" if len(own) == len(sources) else f"does not apply to {', '.join(own)}"
            notes.append(
                f"--set {section}.{key} {effect}, because the recipe sets it for {', '.join(own)}; "
                f"--set source.{own[0]}.{section}.{key} replaces that"
            )
    return notes


def _parse_override(override: str, kinds: Mapping[str, type[Section]]) -> tuple[str, str, str]:
    """Return the section, key and value of an override; the value of an `Unset` is empty."""
    path, equals, value = override.partition("=")
    section, dot, key = path.strip().partition(".")
    if isinstance(override, Unset):
        if equals or not (dot and section and key):
            raise ConfigError(
                f"--unset: expected section.key, got {shown_value(str(override))}. "
                "Write it as --unset quality.min_words."
            )
    elif not (equals and dot and section and key):
        example = "--set quality.min_words=30"
        if equals and section in kinds and not key and secret_in(value) is None:
            named = kinds[section].array or next(iter(kinds[section].model_fields))
            example = f"--set {shlex.quote(f'{section}.{named}={value}')}"
        raise ConfigError(f"--set: expected section.key=value, got {shown_value(override)}. Write it as {example}.")
    return section, key, value


def _is_deep(key: str, values: Mapping[str, Any]) -> bool:
    """Return True if an override of `[source]` sets one of several sources, or a table in a source."""
    return isinstance(values.get(SOURCE), list) or "." in key


def split_source_key(key: str, names: Iterable[str], kind: type[Section]) -> tuple[str | None, str]:
    """Return the source that a key such as `books.quality.min_words` names, or None, and the setting of the source.

    A source may have the name of a setting: in `stackexchange.site`, it is both.
    """
    name = next((name for name in sorted(names, key=len, reverse=True) if key.startswith(f"{name}.")), None)
    rest = key.removeprefix(f"{name}.") if name is not None else key
    known = kind.model_fields.keys() | kind.own_sections
    is_both = name in known and rest.partition(".")[0] not in known
    return name, key if is_both else rest


def _override_source(
    override: str, key: str, value: str, values: dict[str, Any], kinds: Mapping[str, type[Section]]
) -> list[str]:
    """Apply an override of one source, or of a table in it, such as `source.books.quality.min_words=5`.

    Return problems as lines of text.
    """
    option = "--unset" if isinstance(override, Unset) else "--set"
    table = values.setdefault(SOURCE, {})
    tables = table if isinstance(table, list) else [table]
    default = kinds[SOURCE].model_fields["name"].default
    named = {each.get("name", default): each for each in tables if isinstance(each, dict)}
    name, rest = split_source_key(key, named, kinds[SOURCE])
    if name is None and len(tables) > 1:
        names = ", ".join(f"{SOURCE}.{each}.{key}" for each in named)
        return [f"{option} {SOURCE}.{key}: expected the name of a source, as in {names}"]
    target = named[name] if name is not None else next(iter(named.values()), {})
    *path, last = rest.split(".")
    if isinstance(override, Unset):
        for part in path:  # a table that the recipe lacks stays so
            target = target.get(part, {}) if isinstance(target, dict) else {}
        if isinstance(target, dict):
            target.pop(last, None)
        return _unknown_source_key(key, rest, kinds)
    for part in path:
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            return [f"{option} {SOURCE}.{key}: expected a table at {part}, got {shown_value(target)}"]
    target[last] = parse_value(value)
    return []


def _unknown_source_key(key: str, rest: str, kinds: Mapping[str, type[Section]]) -> list[str]:
    """Return a line of text about an `Unset` of a setting `rest` that no source has; empty if it exists."""
    names, kind = rest.split("."), kinds[SOURCE]
    known: Iterable[str] = kind.model_fields.keys() | kind.own_sections
    if names[0] in known and len(names) > 1:
        own = names[0] in kind.own_sections
        known = kinds[names.pop(0)].model_fields if own else fields_at(kind, tuple(names))
        names = names if own else names[-1:]
    if names[0] in known:
        return []
    return [f"--unset {SOURCE}.{key}: no such key{suggest_name(names[0], known)}"]


def _unknown_key(section: str, key: str, kinds: Mapping[str, type[Section]]) -> list[str]:
    """Return a line of text about an `Unset` that names no setting; empty if the setting exists."""
    if section not in kinds:
        return [f"--unset {section}.{key}: no such section{suggest_name(section, kinds)}"]
    fields = kinds[section].model_fields
    if key in fields:
        return []
    owner = owner_of(key, kinds)
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


def toml_text(text: str) -> str:
    """Return a text as a TOML string in quotes, which `parse_value` reads again."""
    # A JSON string is valid TOML except for the delete character, and for the surrogates of characters beyond U+FFFF.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_value(text: str) -> Any:
    """Return the value of a TOML text. If the text is not valid TOML, as `lid.176.ftz`, return the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
