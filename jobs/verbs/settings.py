"""`penstock settings`: every key of a recipe with its type, default, unit and meaning, and what it reruns."""

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs.arguments import Command
from jobs.recipe import read_values, recipe_file, recipe_sections, shipped_recipes
from pipeline.quality.limits import LIMIT_NAMES, default_limit
from pipeline.sources.config import SourceConfig
from pipeline.stages import DOCUMENT_COLUMNS, STEPS
from pipeline.stages import sections as data_sections
from schemas.config import SOURCE, Section, build_recipe, suggest_name
from schemas.errors import ConfigError
from schemas.field_docs import (
    ColumnDoc,
    SettingDoc,
    describe_columns,
    settings_of_section,
    summary_of,
    toml_value,
)
from schemas.tables import TABLES
from schemas.text import text_table
from schemas.tokens import BY_ID, BY_URL, SHARD_DOCS, shard_schema
from schemas.versions import DATASET

GROUP = "data"
VERBS = {
    "settings": "Print every setting, or columns of tables. Each setting has a type, a default, a unit and a meaning.",
}

WIDTH = 110
"""Width of the printed text [characters]."""
OTHER_FILES = "Other files rerun the step `documents`; the same files at another path rerun nothing."
OTHER_WEIGHTS = "Changing it reruns no data step. It may change the trained weights."
OTHER_SIZE = "Changing it reruns no data step. With a budget of hours or money it changes the size of the model."
EFFECTS = {
    **{("source", key): OTHER_FILES for key in ("paths", "crawl", "kind", "files", "share", "max_unreadable")},
    **{("train", key): OTHER_WEIGHTS for key in ("skip_file", "mix", "eval_every", "eval_sequences")},
    **{("guard", key): OTHER_WEIGHTS for key in ("quarantine", "max_rewinds", "rewind_window", "max_non_finite")},
    ("checkpoint", "every"): OTHER_WEIGHTS,  # a rewind leads to the checkpoint before
    **{("cluster", key): OTHER_SIZE for key in ("device", "usd_per_gpu_hour", "mfu")},
    ("train", "peak_flops"): OTHER_SIZE,
}
"""What a changed value reruns, for settings for which the role does not say it."""
Sections = Mapping[str, type[Section]]
NO_VALUES: Mapping[str, str] = {}
DATASET_FILES: Mapping[str, pa.Schema] = {
    "Token shard": shard_schema("uint16"),
    "Document index of a shard": SHARD_DOCS,
    "Index by URL": BY_URL,
    "Index by id": BY_ID,
}
"""The columns of the files of the token dataset, which are Arrow IPC files."""


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `settings`."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="SECTION[.KEY] or RECIPE",
        help="a section, one key, or a recipe (its name or file), of which the settings that it makes are printed; "
        "without it, the sections are listed",
    )
    parser.add_argument(
        "--columns",
        nargs="?",
        const="",
        metavar="TABLE",
        help="print the columns of a table, such as documents; without a name, the tables are listed",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--markdown", action="store_true", help="print one Markdown table for each section")


def settings_command(arguments: argparse.Namespace) -> int:
    """Print the sections of a recipe, the keys of one section, one key, the settings of a recipe, or columns."""
    if arguments.columns is not None:
        return _print_columns(arguments)
    recipe = recipe_file(arguments.name) if arguments.name is not None else ""
    if Path(recipe).is_file() and arguments.name not in recipe_sections():
        return _print_recipe(arguments, recipe)
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


def _print_recipe(arguments: argparse.Namespace, path: str) -> int:
    """Print the settings that a recipe makes, with their values and meanings."""
    name, read = arguments.name, read_values(path)
    tables = read.get(SOURCE, {})
    tables = tables if isinstance(tables, list) else [tables]
    example = {**read, SOURCE: [{"paths": ["x"], **table} for table in tables]}  # a shipped recipe names no files
    build_recipe(example, recipe_sections(), f"recipe {name}")
    documented = choose(None, recipe_sections())
    texts: list[str] = []
    content: dict[str, Any] = {}
    for label, section, table in _written_tables(read):
        kind, settings = documented[section]
        values = {key: toml_value(value) for key, value in table.items()}
        found = kind, tuple(item for item in settings if item.key in table)
        write = section_markdown if arguments.markdown else section_text
        title = heading(section) if label == section or section == "stage" else f"[{label}]"
        texts.append(write(section, *found, values, title))
        content[label] = section_json(section, *found, values)
    title = f"{name} ({path}) makes these settings. `penstock init FILE.toml --from {name}` writes it as your own."
    if arguments.json:
        print(json.dumps(content, indent=1))
    else:
        print("\n\n".join([*([] if arguments.markdown else ["\n".join(_wrapped(title, ""))]), *texts]))
    return 0


def _written_tables(read: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield (name to print, section, values) of each table of a recipe, and of each table in a source."""
    for section, own in read.items():
        for table in own if isinstance(own, list) else [own]:
            label = f"{section}.{table.get('name', 'web')}" if isinstance(own, list) else section
            nested = {key for key in table if section == SOURCE and key in SourceConfig.own_sections}
            yield label, section, {key: value for key, value in table.items() if key not in nested}
            yield from ((f"{label}.{key}", key, table[key]) for key in table if key in nested)


def _print_columns(arguments: argparse.Namespace) -> int:
    """Print the tables of a run, or the columns of one table and of its files."""
    if arguments.name is not None:
        raise ConfigError(
            f"settings --columns: expected no section, got {arguments.name!r}. Name a table: `penstock settings "
            f"--columns {arguments.name}`."
        )
    schemas = table_schemas(arguments.columns)
    if arguments.json:
        print(json.dumps({name: [asdict(doc) for doc in docs] for name, docs in schemas.items()}, indent=1))
    elif arguments.markdown:
        for name, docs in schemas.items():
            rows = [f"| `{doc.name}` | {doc.type} | {doc.meaning} | {doc.unit} |" for doc in docs]
            print("\n".join([f"## {name}", "", "| column | type | meaning | unit |", "|---|---|---|---|", *rows, ""]))
    elif not arguments.columns:
        print("\n".join(text_table([(name, f"{table.meaning}.") for name, table in TABLES.items()])))
        print("\npenstock settings --columns TABLE prints the columns of a table.")
    else:
        for name, docs in schemas.items():
            print(f"{name}")
            for doc in docs:
                unit = f" [{doc.unit}]" if doc.unit else ""
                print(f"  {doc.name}  ({doc.type}){unit}", *_wrapped(doc.meaning, " " * 6), sep="\n")
    return 0


def table_schemas(name: str) -> dict[str, list[ColumnDoc]]:
    """Return the columns of a table by its name and those of its files; with an empty name, of all tables.

    Raises ConfigError with the most similar name if there is no such table.
    """
    if name and name not in TABLES:
        raise ConfigError(
            f"settings --columns: expected a table, got {name!r}{suggest_name(name, TABLES)}. "
            "Run `penstock settings --columns`, which lists the tables."
        )
    schemas = {table: TABLES[table].schema for table in ([name] if name else TABLES)}
    if "documents" in schemas:
        schemas["documents"] = DOCUMENT_COLUMNS
    found = {table: describe_columns(schema) for table, schema in schemas.items() if schema is not None}
    if DATASET in schemas:
        found |= {f"{DATASET}: {file}": describe_columns(schema) for file, schema in DATASET_FILES.items()}
    if not found:
        raise ConfigError(
            f"settings --columns: expected a table with columns, got {name!r}, which has files of other kinds. "
            "Name another table."
        )
    return found


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
    names = [*documented, *shipped_recipes(), *(keys if dot else (item.partition(".")[2] for item in keys))]
    raise ConfigError(
        f"settings: expected a section, a key or a recipe, got {name!r}{suggest_name(name, set(names))}. "
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


def section_text(
    name: str,
    kind: type[Section],
    settings: tuple[SettingDoc, ...],
    values: Mapping[str, str] = NO_VALUES,
    title: str = "",
) -> str:
    """Return a section and some of its settings as text, with the values of a recipe in place of the defaults.

    `title` takes the place of the section's heading.
    """
    lines = [f"{title or heading(name)}  {summary_of(kind)}"]
    for setting in settings:
        lines += ["", *_setting_lines(name, setting, "  ", values.get(setting.key))]
        for key in setting.keys if setting.key not in values else ():
            head = f"{'':6}{key.key} = {key.default}  ({facts(key)})"
            lines += [head] if len(head) <= WIDTH else _wrapped(head.strip(), " " * 6)
            lines += _wrapped(key.meaning, " " * 10)
    return "\n".join(lines)


def _setting_lines(section: str, setting: SettingDoc, indent: str, value: str | None) -> list[str]:
    head = f"{indent}{section}.{setting.key} = {setting.default if value is None else value}"
    about = f"({facts(setting)})" if value is None else f"(default {setting.default}; {facts(setting)})"
    first = [f"{head}  {about}"] if len(head) + len(about) + 2 <= WIDTH else [head, *_wrapped(about, f"{indent}    ")]
    return [*first, *_wrapped(meaning(section, setting), f"{indent}    "), f"{indent}    {effect(section, setting)}"]


def _wrapped(text: str, indent: str) -> list[str]:
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, **options)


def section_json(
    name: str, kind: type[Section], settings: tuple[SettingDoc, ...], values: Mapping[str, str] = NO_VALUES
) -> dict[str, Any]:
    """Return a section and some of its settings as JSON values; `value` is that of a recipe, as TOML."""
    own = {key: {"value": value} for key, value in values.items()}
    keys = {
        item.key: {
            **own.get(item.key, {}),
            **asdict(item),
            "meaning": meaning(name, item),
            "effect": effect(name, item),
        }
        for item in settings
    }
    return {"summary": summary_of(kind), "keys": keys}


def section_markdown(
    name: str,
    kind: type[Section],
    settings: tuple[SettingDoc, ...],
    values: Mapping[str, str] = NO_VALUES,
    title: str = "",
) -> str:
    """Return a section and some of its settings as a Markdown table, with the values of a recipe if there are any.

    `title` takes the place of the section's heading.
    """
    names = ["key", "type", "default", *(["value"] if values else []), "meaning"]
    lines = [f"## `{title or heading(name)}`", "", summary_of(kind), ""]
    lines += [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for setting in settings:
        nested = "".join(
            f"<br>`{key.key}` ({facts(key)}, default `{key.default}`): {key.meaning}" for key in setting.keys
        )
        text = f"{meaning(name, setting)}{nested}<br>*{effect(name, setting)}*"
        value = [f"`{values[setting.key]}`"] if values else []
        cells = (f"`{setting.key}`", facts(setting), f"`{setting.default}`", *value, text)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


COMMANDS = {
    "settings": Command((add_settings_arguments,), settings_command, "settings source.text_field"),
}
