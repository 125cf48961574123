"""A MkDocs hook: reference pages that are written from the code at each build, and are never committed.

The command line comes from the parsers of the verbs, the settings from the sections of a recipe, the tables from their
Arrow schemas. A new verb, field or column therefore has its entry in the next build without a change here.
"""

import argparse
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pyarrow as pa
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from jobs.cli import GROUPS, build_parser, list_verbs
from jobs.recipe import recipe_sections, shipped_recipes
from jobs.verbs.settings import DATASET_FILES
from pipeline.fit.classifier import TrainClassifierConfig
from pipeline.fit.importance import TrainImportanceConfig
from pipeline.fit.language_model import LmConfig
from pipeline.perplexity.kneser_ney.config import TrainLmConfig
from pipeline.quality.config import QualityConfig
from pipeline.quality.limits import LIMIT_NAMES, default_limit
from pipeline.text.derive_profiles import DeriveConfig
from schemas.config import Section
from schemas.field_docs import describe_columns
from schemas.tables import TABLES
from train.monitor.metrics import HeldoutMetrics, StepMetrics

ROLES = {
    "content": "It changes the result, and the fingerprint of the tables contains it.",
    "decision": "It is compared with stored measurements: `penstock whatif` can try another value.",
    "execution": "It never changes the result.",
    "location": "A path: the fingerprint contains the digest of the file.",
}
OF_VERBS: Mapping[str, tuple[str, type[Section]]] = {
    "lm": ("train-lm", LmConfig),
    "train_lm": ("train-lm", TrainLmConfig),
    "train_classifier": ("train-classifier", TrainClassifierConfig),
    "train_importance": ("train-importance", TrainImportanceConfig),
    "derive": ("derive-profiles", DeriveConfig),
}
"""Sections that a verb reads besides a recipe's: name -> verb and class."""
LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than", "min_length": "at least this many:"}
NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "none", Any: "any value"}
FENCE = re.compile(r"^```(\w+) +(\S.*)$", re.MULTILINE)
WIDTH = 100
"""Columns of a usage line [characters]."""

CLI_INTRODUCTION = """\
# Command line

`penstock VERB --help` prints the same text, `penstock --help` the list by group, and `penstock --version` the version.
Exit codes: 0 success, 1 nothing found or a difference, 2 an error with its
explanation, 130 interrupted."""
SETTINGS_INTRODUCTION = """\
# Settings

A recipe is a TOML file with the sections below; every field has a default unless it says otherwise.
`--set section.field=value` replaces one field, and `--unset section.field` removes one, so that its default applies.
`penstock settings` prints this page. A wrong name is reported before anything starts, with the most similar
valid name."""
TABLES_INTRODUCTION = """\
# Tables and columns

`penstock settings --columns` prints this list, and `penstock settings --columns documents` the columns of a table.

A null value was not measured, because the document was dropped before; it never means zero. The metadata of each column
of the Parquet files has the same text. An *entries* column holds a list of (name, value), sorted by name; DuckDB reads
it with `map_from_entries`."""

METRICS_INTRODUCTION = """\
# Training metrics

Training writes a line of JSON for each optimizer step to `train/metrics.jsonl`. A field with its default is absent.
Values are those of the global batch, in any layout. `metrics.parquet` has a column for each source, such as `loss.web`,
`tokens.web` and `heldout.web.loss`; TensorBoard has the same values as `loss/web` and so on."""

# ------------------------------------------------------------------------------------------------------------- MkDocs


def on_config(config: Any) -> Any:
    """Return the configuration with one entry of the navigation for each section of a recipe."""
    below = [{"Overview": "reference/settings/index.md"}]
    below += [{f"[{name}]": f"reference/settings/{name}.md"} for name in all_sections()]
    for top in config["nav"]:
        for entry in top.get("Reference", []) if isinstance(top, dict) else []:
            if isinstance(entry, dict) and "Settings" in entry:
                entry["Settings"] = below
    return config


def on_files(files: Any, config: Any) -> Any:
    """Return the files of the site with the generated pages added."""
    from mkdocs.structure.files import File  # tests read the pages where MkDocs is not installed

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page in which the words after the language of a fenced block are its title."""
    return FENCE.sub(lambda hit: f"```{hit[1]}{_title(hit[2])}", markdown)


def _title(words: str) -> str:
    named = re.match(r"(?:new|add)=(\S+)(?: after=(.*))?$", words)
    if not named:
        return ""
    after = f", after the line {named[2].strip(chr(39))}" if named[2] else ""
    return f' title="{named[1]}{after}"'.replace('""', '"') if '"' not in after else f' title="{named[1]}"'


def pages() -> dict[str, str]:
    """Return the generated pages: path below `docs/` -> Markdown."""
    sections = all_sections()
    made = {"reference/cli.md": cli_page(), "reference/tables.md": tables_page()}
    made["reference/recipes.md"] = recipes_page()
    made["reference/metrics.md"] = metrics_page()
    made["reference/settings/index.md"] = settings_index(sections)
    made |= {f"reference/settings/{name}.md": section_page(name, kind) for name, kind in sections.items()}
    return made


# -------------------------------------------------------------------------------------------------------- command line


def cli_page() -> str:
    """Return the page of the command line."""
    lines = CLI_INTRODUCTION.splitlines()
    verbs = list_verbs()
    for group in dict.fromkeys(entry.group for entry in verbs.values()):
        lines += ["", f"**{group}**: {GROUPS[group]}", "", "| verb | what it does |", "|---|---|"]
        chosen = {verb: entry for verb, entry in verbs.items() if entry.group == group}
        lines += [f"| [`{verb}`](#{verb}) | {cell(entry.text)} |" for verb, entry in chosen.items()]
    for verb, entry in verbs.items():
        lines += ["", f"## {verb} {{ #{verb} }}", "", entry.text, "", *_verb(verb)]
    return "\n".join(lines) + "\n"


def verb_parser(verb: str) -> argparse.ArgumentParser:
    """Return the parser of one verb."""
    top = build_parser(verb)
    choices: Mapping[str, argparse.ArgumentParser] = next(
        action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction)
    )
    return choices[verb]


def _verb(verb: str) -> Iterator[str]:
    parser = verb_parser(verb)
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=WIDTH)
    yield from ("```text", parser.format_usage().removeprefix("usage: ").strip(), "```", "", "| argument | meaning |")
    yield "|---|---|"
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            yield f"| {cell(_argument(action))} | {cell(_help(action))} |"
    yield from ("", f"```bash\n{(parser.epilog or '').removeprefix('example: ')}\n```")


def _argument(action: argparse.Action) -> str:
    """Return the name of an argument with the name of its value, as code."""
    metavar = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else None)
    if not action.option_strings:
        return f"`{metavar or action.dest}`"
    value = "" if action.nargs == 0 else f" {metavar or action.dest.upper()}"
    return f"`{action.option_strings[-1]}{value}`"


def _help(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%")
    required = " Required." if action.required and action.option_strings else ""
    return f"{text[:1].upper()}{text[1:]}.{required}" if text else required.strip()


# ----------------------------------------------------------------------------------------------------------- settings


def all_sections() -> dict[str, type[Section]]:
    """Return the class of every section, those of a recipe and those that one verb reads, by name."""
    recipe = {name: kind.table_class() if kind.array else kind for name, kind in recipe_sections().items()}
    return {**recipe, **{name: kind for name, (_, kind) in OF_VERBS.items()}}


def settings_index(sections: Mapping[str, type[BaseModel]]) -> str:
    """Return the page that lists the sections of a recipe."""
    lines = [*SETTINGS_INTRODUCTION.splitlines(), "", "| role of a field | meaning |", "|---|---|"]
    lines += [f"| {role} | {text} |" for role, text in ROLES.items()]
    lines += ["", "| section | subject | fields |", "|---|---|--:|"]
    for name, kind in sections.items():
        verb = f" Read by `penstock {OF_VERBS[name][0]}`." if name in OF_VERBS else ""
        lines.append(f"| [`[{name}]`]({name}.md) | {cell(first_line(kind))}{verb} | {len(kind.model_fields)} |")
    return "\n".join(lines) + "\n"


def section_page(name: str, kind: type[BaseModel]) -> str:
    """Return the page of one section of a recipe, with every field."""
    lines = [f"# [{name}] {{ #{name} }}", "", " ".join((kind.__doc__ or "").split()), "", *_fields(name, kind, 2)]
    return "\n".join(lines) + "\n"


def _fields(name: str, kind: type[BaseModel], level: int) -> Iterator[str]:
    nested: dict[str, type[BaseModel]] = {}
    for field, info in kind.model_fields.items():
        yield from (f"{'#' * level} {field} {{ #{field if level == 2 else f'{name}-{field}'} }}", "")
        own = [default_limit(field)] if kind is QualityConfig and field in LIMIT_NAMES else []
        yield from (_facts(info), "", " ".join([*(info.description or "").split(), *own]), "")
        nested |= {f"{name}.{field}": model for model in models_in(info.annotation)}
    for path, model in nested.items():
        yield from (f"## Fields of {path} {{ #{path.replace('.', '-')} }}", "", (model.__doc__ or "").strip(), "")
        yield from _fields(path.replace(".", "-"), model, 3)


def _facts(info: FieldInfo) -> str:
    """Return the type, limits, default and role of a field in one line."""
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    facts = [type_text(info.annotation), *limits(info)]
    default = info.get_default(call_default_factory=True) if not info.is_required() else PydanticUndefined
    facts.append("required" if default is PydanticUndefined else f"default `{toml(default)}`")
    return " · ".join([*facts, str(extra.get("role") or "content")])


def limits(info: FieldInfo) -> list[str]:
    """Return the limits of a field's value as text."""
    return [
        f"{words} {getattr(limit, name)}"
        for limit in info.metadata
        for name, words in LIMITS.items()
        if getattr(limit, name, None) is not None
    ]


def type_text(kind: Any) -> str:
    """Return a type annotation in words of a recipe: `text`, `list of integers` and the like."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(f"`{toml(value)}`" for value in inside)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_text(each) for each in inside)
    if origin is typing.Annotated:
        return type_text(inside[0])
    if origin in (tuple, list):
        return f"list of {type_text(inside[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"table of {type_text(inside[1])} by name"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "table"
    return NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def models_in(kind: Any) -> list[type[BaseModel]]:
    """Return the nested models of an annotation, such as the stage of a list of stages."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for inside in get_args(kind) for model in models_in(inside)]


def toml(value: Any) -> str:
    """Return a default as it would be written in a recipe; a value that is not set is `none`."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case BaseModel():
            return toml(dict(value))
        case Mapping():
            return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
        case tuple() | list():
            return "[" + ", ".join(toml(each) for each in value) + "]"
        case int() if abs(value) >= 100_000:
            return f"{value:_}"
    return str(value)


# -------------------------------------------------------------------------------------------------- tables and recipes


def tables_page() -> str:
    """Return the page of the tables of a run and of the files of the dataset, with meaning and unit of each column."""
    lines = [*TABLES_INTRODUCTION.splitlines(), ""]
    lines += ["| table | meaning | a row is a |", "|---|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {cell(table.meaning)} | {table.rows} |" for name, table in TABLES.items()]
    for name, table in TABLES.items():
        lines += ["", f"## {name} {{ #{name} }}", "", f"{table.meaning}.", *_columns(table.schema)]
    for name, schema in DATASET_FILES.items():
        lines += ["", f"## {name}", "", "An Arrow IPC file of the table [`tokens`](#tokens).", *_columns(schema)]
    return "\n".join(lines) + "\n"


def _columns(schema: pa.Schema | None) -> list[str]:
    if schema is None:
        return []
    lines = ["", "| column | type | meaning | unit |", "|---|---|---|---|"]
    for column in describe_columns(schema):
        lines.append(f"| `{column.name}` | {column.type} | {cell(column.meaning)} | {cell(column.unit)} |")
    return lines


def metrics_page() -> str:
    """Return the page of the fields of `metrics.jsonl`."""
    lines = METRICS_INTRODUCTION.splitlines()
    for kind in (StepMetrics, HeldoutMetrics):
        title = "metrics.jsonl" if kind is StepMetrics else "Fields of heldout, by source"
        lines += ["", f"## {title}", "", "| field | type | meaning |", "|---|---|---|"]
        for name, info in kind.model_fields.items():
            lines.append(f"| `{name}` | {type_text(info.annotation)} | {cell(info.description or '')} |")
    return "\n".join(lines) + "\n"


def recipes_page() -> str:
    """Return the page of the shipped recipes, each with its TOML."""
    lines = ["# Shipped recipes", "", "`penstock run NAME --out RUN` runs one of them by its name, without a path."]
    for name, path in shipped_recipes().items():
        lines += ["", f"## {name} {{ #{name} }}", "", "```toml", path.read_text(encoding="utf-8").rstrip(), "```"]
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------------------------------------- text


def first_line(kind: type) -> str:
    """Return the first sentence of a class's docstring."""
    return " ".join((kind.__doc__ or "").split()).split(". ")[0].rstrip(".") + "."


def cell(text: str) -> str:
    """Return a text for a cell of a table: one line, `|` escaped, `<` escaped outside of code."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    for page, content in pages().items():
        path = Path(page)
        print(f"{len(content.splitlines()):6} lines  {path}")
