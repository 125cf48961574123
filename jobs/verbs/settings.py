"""`penstock settings`: every key of a recipe with its type, default, unit and meaning, and what it reruns."""

import argparse
import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from jobs.arguments import Command
from jobs.recipe import recipe_sections
from pipeline.quality.limits import LIMIT_NAMES, default_limit
from pipeline.stages import STEPS
from pipeline.stages import sections as data_sections
from schemas.config import Section, suggest_name
from schemas.errors import ConfigError
from schemas.field_docs import SettingDoc, settings_of_section, summary_of
from schemas.text import text_table

GROUP = "data"
VERBS = {
    "settings": "Print every setting. Each has a type, a default, a unit and a meaning.",
}

WIDTH = 110
"""Width of the printed text [characters]."""
EFFECTS = {
    ("source", "paths"): "Other files rerun the step `documents`; the same files at another path rerun nothing.",
}
"""What a changed value reruns, for settings for which the role does not say it."""
Sections = Mapping[str, type[Section]]


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `settings`."""
    parser.add_argument(
        "name", nargs="?", metavar="SECTION[.KEY]", help="a section, or one key; without it, the sections are listed"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--markdown", action="store_true", help="print one Markdown table for each section")


def settings_command(arguments: argparse.Namespace) -> int:
    """Print the sections of a recipe, the keys of one section, or one key."""
    chosen = choose(arguments.name, recipe_sections())
    if arguments.json:
        print(json.dumps({name: section_json(name, *found) for name, found in chosen.items()}, indent=1))
    elif arguments.markdown:
        print("\n\n".join(section_markdown(name, *found) for name, found in chosen.items()))
    elif arguments.name is None:
        rows = [(heading(name), summary_of(kind)) for name, (kind, _) in chosen.items()]
        print("\n".join([*text_table(rows), "", "penstock settings SECTION prints the keys of a section."]))
    else:
        print("\n\n".join(section_text(name, *found) for name, found in chosen.items()))
    return 0


Chosen = tuple[type[Section], tuple[SettingDoc, ...]]


def choose(name: str | None, sections: Sections) -> dict[str, Chosen]:
    """Return the sections with the settings that `name` selects: all, a section, `SECTION.KEY`, or a key of any.

    Raises ConfigError with the most similar name if there is no such section or key.
    """
    kinds = {section: kind.table_class() if kind.array else kind for section, kind in sections.items()}
    documented = {section: (kind, settings_of_section(kind)) for section, kind in kinds.items()}
    if name is None:
        return documented
    section, dot, key = name.strip("[]").partition(".")
    if section in documented and not dot:
        return {section: documented[section]}
    wanted = key if dot else section
    places = [section] if section in documented else [*documented] if not dot else []
    found = {
        place: (documented[place][0], tuple(item for item in documented[place][1] if item.key == wanted))
        for place in places
    }
    found = {place: chosen for place, chosen in found.items() if chosen[1]}
    if found:
        return found
    if section in documented:
        raise ConfigError(
            f"settings: expected a key of {heading(section)}, got {key!r}"
            f"{suggest_name(key, documented[section][0].model_fields)}. "
            f"Run `penstock settings {section}`, which lists the keys."
        )
    keys = [f"{place}.{item.key}" for place, (_, items) in documented.items() for item in items]
    names = [*documented, *(keys if dot else (item.partition(".")[2] for item in keys))]
    raise ConfigError(
        f"settings: expected a section or a key, got {name!r}{suggest_name(name, set(names))}. "
        "Run `penstock settings`, which lists the sections."
    )


def effect(section: str, setting: SettingDoc) -> str:
    """Return what a changed value of a setting reruns, as a sentence."""
    role = setting.role
    if (section, setting.key) in EFFECTS:
        return EFFECTS[section, setting.key]
    if role == "execution":
        return "Changing it reruns nothing: it does not change results."
    if section not in data_sections():
        return "Changing it changes the plan or the training run, and reruns no data step."
    if data_sections()[section].array:
        return "Changing it reruns the step `documents` and the steps that read its tables."
    settings = "decision" if role == "decision" else "content"
    steps = [step for step in STEPS if any(stage.name == section for stage in step.stages)]
    first = next((step.name for step in steps if step.settings == settings), None) or steps[0].name
    what = "Changing the content of the file" if role == "location" else "Changing it"
    return f"{what} reruns the step `{first}` and the steps that read its tables."


def meaning(section: str, setting: SettingDoc) -> str:
    """Return the meaning of a setting, and for a limit of `[quality]` the limit that applies if it is not set."""
    is_limit = section == "quality" and setting.key in LIMIT_NAMES
    return f"{setting.meaning} {default_limit(setting.key)}" if is_limit else setting.meaning


def heading(section: str) -> str:
    """Return how a recipe writes a section, such as `[quality]`, or `[[stage]]` for one that has several tables."""
    return f"[[{section}]]" if recipe_sections()[section].array else f"[{section}]"


def facts(setting: SettingDoc) -> str:
    """Return type, range and unit of a setting, such as `whole number, at least 1 [bytes]`."""
    return ", ".join(filter(None, (setting.type, setting.range))) + (f" [{setting.unit}]" if setting.unit else "")


def section_text(name: str, kind: type[Section], settings: tuple[SettingDoc, ...]) -> str:
    """Return a section and some of its settings as text."""
    lines = [f"{heading(name)}  {summary_of(kind)}"]
    for setting in settings:
        lines += ["", *_setting_lines(name, setting, "  ")]
        for key in setting.keys:
            lines += [f"{'':6}{key.key} = {key.default}  ({facts(key)})", *_wrapped(key.meaning, " " * 10)]
    return "\n".join(lines)


def _setting_lines(section: str, setting: SettingDoc, indent: str) -> list[str]:
    head = f"{indent}{section}.{setting.key} = {setting.default}"
    about = f"({facts(setting)})"
    first = [f"{head}  {about}"] if len(head) + len(about) + 2 <= WIDTH else [head, *_wrapped(about, f"{indent}    ")]
    return [*first, *_wrapped(meaning(section, setting), f"{indent}    "), f"{indent}    {effect(section, setting)}"]


def _wrapped(text: str, indent: str) -> list[str]:
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, **options)


def section_json(name: str, kind: type[Section], settings: tuple[SettingDoc, ...]) -> dict[str, Any]:
    """Return a section and some of its settings as JSON values."""
    keys = {
        setting.key: {**asdict(setting), "meaning": meaning(name, setting), "effect": effect(name, setting)}
        for setting in settings
    }
    return {"summary": summary_of(kind), "keys": keys}


def section_markdown(name: str, kind: type[Section], settings: tuple[SettingDoc, ...]) -> str:
    """Return a section and some of its settings as a Markdown table."""
    lines = [
        f"## `{heading(name)}`",
        "",
        summary_of(kind),
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for setting in settings:
        nested = "".join(
            f"<br>`{key.key}` ({facts(key)}, default `{key.default}`): {key.meaning}" for key in setting.keys
        )
        text = f"{meaning(name, setting)}{nested}<br>*{effect(name, setting)}*"
        cells = (f"`{setting.key}`", facts(setting), f"`{setting.default}`", text)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


COMMANDS = {
    "settings": Command((add_settings_arguments,), settings_command, "settings source.text_field"),
}
