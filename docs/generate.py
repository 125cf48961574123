"""A MkDocs hook: reference pages that are written from the code at each build, and are never committed.

The command line comes from the parsers of the verbs, the settings from the sections of a recipe, the tables from their
Arrow schemas. A new verb, field or column therefore has its entry in the next build without a change here.
"""

import argparse
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pyarrow as pa
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from docs.pains import pains_page
from jobs.cli import GROUPS, build_parser, list_verbs
from jobs.recipe import read_recipe, read_values, recipe_sections, shipped_recipes
from jobs.verbs.settings import DATASET_FILES
from pipeline.classifier.stage import ClassifierConfig
from pipeline.decontaminate.config import DecontaminateConfig
from pipeline.dedup.config import DedupConfig, RepeatsConfig
from pipeline.engine.stage import EVERY
from pipeline.extract.extract import ExtractConfig
from pipeline.fit.classifier import TrainClassifierConfig
from pipeline.fit.importance import TrainImportanceConfig
from pipeline.fit.language_model import LmConfig
from pipeline.language import LanguageConfig
from pipeline.minhash.config import SignatureConfig
from pipeline.perplexity.kneser_ney.config import TrainLmConfig
from pipeline.perplexity.stage import PerplexityConfig
from pipeline.pii.stage import PiiConfig
from pipeline.quality.config import QualityConfig
from pipeline.quality.limits import LIMIT_NAMES, default_limit
from pipeline.quality.rules import DEFAULT_RULES, QualityLimits
from pipeline.quality.stage import ENGLISH
from pipeline.quality.stage import checks as quality_checks
from pipeline.text.derive_profiles import DeriveConfig
from pipeline.toxicity.stage import ToxicityConfig
from schemas.config import Recipe, Section
from schemas.field_docs import describe_columns
from schemas.tables import TABLES
from train.eval.harness_results import HarnessResult
from train.monitor.metrics import HeldoutMetrics, StepMetrics
from train.monitor.rank_figures import RankFigures

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
The value `"none"` turns a field off whose default is another value, where its type says so.
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
`tokens.web` and `heldout.web.loss`; TensorBoard and Weights & Biases have the same values as `loss/web` and so on.

`train/ranks.jsonl` has a line for each rank in each window of `train.ranks_every` steps, and `train/harness.jsonl` one
for each metric of a downstream task that `penstock evaluate --harness` measured."""
METRICS_TABLES: Mapping[str, type[BaseModel]] = {
    "metrics.jsonl": StepMetrics,
    "Fields of heldout, by source": HeldoutMetrics,
    "ranks.jsonl": RankFigures,
    "harness.jsonl": HarnessResult,
}

RECIPES_INTRODUCTION = """\
# Shipped recipes

`penstock run NAME --out RUN` runs one of them by its name, without a path. `penstock init recipe.toml --from NAME`
writes a copy with your files, and `penstock settings NAME` explains its settings.

`web` is the recipe for a new corpus, and `demo` is for the demo crawl. The others follow published corpora.

## Published corpora

Each recipe has the stages of its corpus that are published and that Penstock has, with the published limits. The
comments at the head of each recipe list what is the same, and what differs and why. The tables are made from the
recipes; `–` means that a recipe has no such stage."""
LIMITS_INTRODUCTION = """\
The limit of English, or for `fineweb2` of every language; `by language` are those of the
[profiles](../guides/languages.md). [The section quality](settings/quality.md) explains each. Dialects count words and
repeats differently, so one limit may be compared with different measurements."""
GIVEN, LACKING = ("You provide",), ("Not published", "Not part of Penstock")
HEADINGS = ("What differs", *GIVEN, *LACKING)
"""Headings of the lists in the comments at the head of a recipe."""
SOURCE_COMMENT = re.compile(r"^\[+([a-z_.]+)\]+\n# Source: (.+(?:\n#.*)*)", re.MULTILINE)
CORPUS = re.compile(r".*?\(.*?arXiv (\d{4}\.\d{5})[^)]*\)")
"""The first words of a recipe that follows a published corpus: its name, and its paper in parentheses."""


def _text_of_pages(recipe: Recipe) -> str:
    config = recipe.section("extract", ExtractConfig)
    usual = ExtractConfig()
    parts = ["all visible text, or WET" if config.extractor == "all" else config.extractor]
    parts += ["favoring precision"] if config.favor_precision else []
    parts += [f"at least {config.min_text_chars:,} characters"] if config.min_text_chars != usual.min_text_chars else []
    parts += [f"at most {config.max_text_chars:,} characters"] if config.max_text_chars != usual.max_text_chars else []
    return ", ".join([*parts, *(["repaired"] if config.unicode == "repair" else [])])


def _languages(recipe: Recipe) -> str:
    config = recipe.section("language", LanguageConfig)
    return f"{', '.join(config.languages) or 'all'}; probability ≥ {config.min_score}"


def _rules(recipe: Recipe) -> str:
    config = recipe.section("quality", QualityConfig)
    names = [f"`{name}`" for name in (DEFAULT_RULES[config.dialect] if config.rules is None else config.rules)]
    without = f", without {', '.join(f'`{name}`' for name in config.skip_rules)}" if config.skip_rules else ""
    own = f"; own rules: {', '.join(f'`{rule.name}`' for rule in config.rule)}" if config.rule else ""
    return f"{', '.join(names)} (dialect {config.dialect}){without}{own}" if names else ""


def _words(recipe: Recipe) -> str:
    config = recipe.section("toxicity", ToxicityConfig)
    return f"at most {config.max_words} listed words" if config.wordlists and config.max_words is not None else ""


def _perplexity(recipe: Recipe) -> str:
    config = recipe.section("perplexity", PerplexityConfig)
    shares = f"at {config.head_share:.0%} and {config.middle_share:.0%}"
    return f"{', '.join(config.models)}; keeps {', '.join(config.keep_buckets)}; cut {shares}" if config.models else ""


def _classifier(recipe: Recipe) -> str:
    config = recipe.section("classifier", ClassifierConfig)
    return ", ".join(f"probability ≥ {limit}" for limit in config.min_score.values())


def _evaluation_sets(recipe: Recipe) -> str:
    config = recipe.section("decontaminate", DecontaminateConfig)
    share = config.max_contaminated_share
    limit = "any shared" if share is None else f"more than {share:.0%} of the words in shared"
    return f"drops {limit} {config.ngram}-grams of words" if config.evaluation_sets else ""


def _near_copies(recipe: Recipe) -> str:
    config, signature = recipe.section("dedup", DedupConfig), recipe.section("signature", SignatureConfig)
    if not config.near:
        return ""
    found = f"{config.bands} bands of {config.rows}" if config.threshold is None else f"bands for {config.threshold}"
    scope = f", within each {' and '.join(config.scope)}" if config.scope else ""
    least = f", joined from {config.min_similarity:g}" if config.min_similarity else ", every candidate joined"
    return f"{signature.shingle_words}-grams of words, {signature.permutations:,} hashes, {found}{least}{scope}"


def _passages(recipe: Recipe) -> str:
    config = recipe.section("repeats", RepeatsConfig)
    names = {"sentences": f"{config.sentences} sentences", "substring": f"{config.length} {config.substring_unit}"}
    least = f", of {config.min_unit_chars} characters and more" if config.min_unit_chars > 1 else ""
    return ", ".join(names.get(unit, f"each {unit}") for unit in config.units) + least if config.units else ""


def _personal_data(recipe: Recipe) -> str:
    types, every = recipe.section("pii", PiiConfig).types, PiiConfig().types
    return f"{len(every)} types (Penstock's)" if types == every else ", ".join(types)


STAGES_OF_A_RECIPE: Mapping[str, Callable[[Recipe], str]] = {
    "text of a page": _text_of_pages,
    "languages": _languages,
    "rules, in order": _rules,
    "lines cut by the rules of": lambda recipe: ", ".join(recipe.section("quality", QualityConfig).cut_lines),
    "word lists": _words,
    "perplexity": _perplexity,
    "classifier": _classifier,
    "evaluation sets": _evaluation_sets,
    "one page for each URL": lambda recipe: recipe.section("dedup", DedupConfig).by_url.replace("off", ""),
    "equal texts": lambda recipe: recipe.section("dedup", DedupConfig).exact.replace("off", ""),
    "near copies": _near_copies,
    "repeated passages cut": _passages,
    "personal data replaced": _personal_data,
}
"""Label → function that describes the stage in a recipe; empty if the recipe does not use it."""

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
    made["reference/pains.md"] = pains_page()
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
    """Return the page of the fields of `metrics.jsonl`, `ranks.jsonl` and `harness.jsonl`."""
    lines = METRICS_INTRODUCTION.splitlines()
    for title, kind in METRICS_TABLES.items():
        lines += ["", f"## {title}", "", "| field | type | meaning |", "|---|---|---|"]
        for name, info in kind.model_fields.items():
            lines.append(f"| `{name}` | {type_text(info.annotation)} | {cell(info.description or '')} |")
    return "\n".join(lines) + "\n"


def recipes_page() -> str:
    """Return the page of the shipped recipes: tables of the published corpora, then each recipe with its TOML."""
    names = [name for name in shipped_recipes() if heads()[name].paper]
    published = {name: read_recipe(name, ['source.paths=["crawl/*.warc.gz"]']) for name in names}
    lines = [*RECIPES_INTRODUCTION.splitlines(), "", *_papers(published)]
    lines += ["", "### Stages side by side", "", *_side_by_side(published, STAGES_OF_A_RECIPE)]
    lines += ["", "### Limits of the rules side by side", "", *LIMITS_INTRODUCTION.splitlines(), ""]
    lines += _limits_table(published)
    lines += ["", "### Settings and their sources", "", "| recipe | section | settings | source |", "|---|---|---|---|"]
    lines += [row for name in published for row in _sources(name)]
    for name, path in shipped_recipes().items():
        lines += ["", f"## {name} {{ #{name} }}", "", "```toml", path.read_text(encoding="utf-8").rstrip(), "```"]
    return "\n".join(lines) + "\n"


class Head(NamedTuple):
    """What the comments of a recipe state about the corpus that it follows."""

    title: str
    """The name of the corpus with its paper; empty if the recipe follows no published corpus."""
    paper: str
    """The number of the paper on arXiv; empty too."""
    lists: Mapping[str, list[str]]
    """The items below each of HEADINGS."""
    sources: Mapping[str, str]
    """Section → the comment `# Source: …` at its beginning."""


@cache
def heads() -> Mapping[str, Head]:
    """Return what the comments of each shipped recipe state, by name."""
    return {name: read_head(path.read_text(encoding="utf-8")) for name, path in shipped_recipes().items()}


def read_head(text: str) -> Head:
    """Return what the comments of a recipe's text state."""
    top = text.split("\n[", 1)[0]
    comments = [line.removeprefix("#").removeprefix(" ") for line in top.splitlines() if line.startswith("#")]
    corpus = CORPUS.match(" ".join(takewhile(lambda line: line and not line.startswith(" "), comments)))
    lists: dict[str, list[str]] = {}
    items: list[str] | None = None
    for line in comments:
        if line.rstrip(":") in HEADINGS:
            items = lists.setdefault(line.rstrip(":"), [])
        elif line.startswith("- ") and items is not None:
            items.append(line.removeprefix("- "))
        elif line.startswith("  ") and items:
            items[-1] += f" {line.strip()}"
        else:
            items = None
    sources = {section: source.replace("\n#", "") for section, source in SOURCE_COMMENT.findall(text)}
    return Head(corpus[0], corpus[1], lists, sources) if corpus else Head("", "", lists, sources)


def _papers(recipes: Mapping[str, Recipe]) -> Iterator[str]:
    """Yield a table of the corpora, what a user provides, and what the recipe lacks."""
    yield from ("| recipe | corpus | you provide | not published, or not part of Penstock |", "|---|---|---|---|")
    for name in recipes:
        given, lacking = (_first_sentences(heads()[name], keys) for keys in (GIVEN, LACKING))
        yield f"| [`{name}`](#{name}) | {cell(heads()[name].title)} | {given} | {lacking} |"


def _first_sentences(head: Head, headings: Sequence[str]) -> str:
    """Return the first sentence of each item below some headings, for a cell of a table."""
    items = chain(*(head.lists.get(heading, []) for heading in headings))
    return "<br>".join(cell(re.split(r"\. (?=[A-Z])", item)[0].rstrip(".")) for item in items) or "–"


def _side_by_side(recipes: Mapping[str, Recipe], rows: Mapping[str, Callable[[Recipe], str]]) -> Iterator[str]:
    """Yield a table with a column for each recipe."""
    yield f"| | {' | '.join(f'`{name}`' for name in recipes)} |"
    yield "|---|" + "---|" * len(recipes)
    for label, value in rows.items():
        yield f"| {label} | {' | '.join(cell(value(recipe)) or '–' for recipe in recipes.values())} |"


def _limits_table(recipes: Mapping[str, Recipe]) -> Iterator[str]:
    """Yield a table of the limits of the quality rules in use, with a column for each recipe."""
    limits = {name: limits_in(recipe) for name, recipe in recipes.items()}
    used = [setting for setting in QualityLimits.model_fields if any(setting in own for own in limits.values())]
    yield f"| limit | {' | '.join(f'`{name}`' for name in recipes)} |"
    yield "|---|" + "--:|" * len(recipes)
    for setting in used:
        yield f"| `{setting}` | {' | '.join(own.get(setting, '–') for own in limits.values())} |"


def limits_in(recipe: Recipe) -> dict[str, str]:
    """Return the limit of each rule that a recipe uses: that of English, or of every language."""
    config = recipe.section("quality", QualityConfig)
    is_english = "en" in recipe["language"].model_dump()["languages"]
    found = {}
    for check in quality_checks(config, {}, {}):
        of_all = {*check.limits.values()} if not is_english else set()
        limit = check.limits.get(ENGLISH, check.limits.get(EVERY)) if is_english else check.limits.get(EVERY)
        if len(of_all) == 1:
            (limit,) = of_all
        found[check.setting] = "by language" if limit is None or len(of_all) > 1 else f"{limit:g}"
    return found


def _sources(name: str) -> Iterator[str]:
    """Yield a row for each section of a recipe that states its source."""
    values = read_values(name)
    for section, source in heads()[name].sources.items():
        own = [f"`{key} = {toml(value)}`" for key, value in values[section].items()]
        yield f"| `{name}` | `[{section}]` | {'<br>'.join(map(cell, own))} | {cell(source)} |"


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
