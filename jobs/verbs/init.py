"""`penstock init`: a commented recipe for some input files, from flags or from questions on a terminal."""

import argparse
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jobs.arguments import Command
from jobs.recipe import recipe_sections
from pipeline.sources.config import SourceConfig
from pipeline.sources.first_rows import FieldSample, fields_of, suggest_text_field
from pipeline.sources.splits import find_splits
from schemas.config import load_recipe, parse_recipe
from schemas.errors import ConfigError
from schemas.field_docs import UNSET, SettingDoc, settings_of_section, summary_of, toml_value
from schemas.text import format_bytes

GROUP = "data"
VERBS = {
    "init": "Write a commented recipe for some input files.",
}

WIDTH = 110
"""Width of the comments [characters]."""
SHOWN: dict[str, tuple[str, ...]] = {
    "source": ("name", "paths", "text_field", "url_field", "id_field", "max_page_bytes"),
    "extract": ("extractor", "min_text_chars"),
    "language": ("languages", "min_score"),
    "quality": ("rules", "min_words", "by_language"),
    "toxicity": ("max_word_share",),
    "dedup": ("near", "min_similarity", "keep", "by_url"),
    "pii": ("types",),
    "tokenizer": ("model", "vocab_size", "sample_bytes"),
    "tokens": ("shard_tokens", "chunk_tokens", "heldout_share"),
    "spark": ("driver_memory",),
    "train": ("seq_len", "global_batch", "steps"),
    "plan": ("max_epochs", "params"),
}
"""The sections and settings that the recipe shows, in order; those that are not set are comments with their default."""
EXAMPLES: dict[tuple[str, str], object] = {
    ("quality", "rules"): ["gopher_repetition", "gopher_quality", "c4", "fineweb"],
    ("quality", "min_words"): 50,
    ("quality", "by_language"): {"de": {"min_words": 30}},
    ("pii", "types"): ["email", "phone", "iban", "ip"],
    ("tokenizer", "model"): "tokenizer.json",
    ("train", "global_batch"): 64,
    ("train", "steps"): 1000,
    ("plan", "params"): 100_000_000,
}
"""Values that are shown for settings without a default, or with a default that is longer than a line."""
ROW_FORMATS = ("jsonl", "parquet")
"""Formats whose rows have named fields."""


@dataclass(frozen=True)
class Answers:
    """What a recipe is written from."""

    paths: tuple[str, ...] = ()
    name: str = "web"
    languages: tuple[str, ...] = ()
    """Languages to keep; empty keeps all."""
    tokenizer: str | None = None
    """An existing tokenizer file; None trains a tokenizer."""
    vocab_size: int | None = None
    fields: dict[str, str] = field(default_factory=dict)
    """Settings of `[source]` that name fields of the rows."""


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `init`."""
    parser.add_argument("recipe", metavar="RECIPE.toml", help="the file to write; it must not exist")
    parser.add_argument(
        "--source", nargs="+", metavar="PATH", help="input files or patterns; without it, questions are asked"
    )
    parser.add_argument("--name", help="name of the source; default web")
    parser.add_argument(
        "--language", action="append", metavar="CODE", help="language to keep, such as en; may be repeated; default all"
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="an existing tokenizer; default: one is trained")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="vocabulary of the trained tokenizer")


def init_command(arguments: argparse.Namespace) -> int:
    """Write a commented recipe for some input files."""
    path = Path(arguments.recipe)
    if path.exists():
        raise ConfigError(f"init: expected a new file, got {path}, which exists. Name another file, or remove it.")
    if path.suffix != ".toml":
        raise ConfigError(f"init: expected a name that ends with .toml, got {path}. Name it {path}.toml.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"init: expected an existing folder, got {path.absolute().parent}. Create the folder.")
    given = Answers(
        tuple(arguments.source or ()),
        arguments.name or "web",
        tuple(arguments.language or ()),
        arguments.tokenizer,
        arguments.vocab_size,
    )
    answers = given if given.paths else ask(given, arguments.name is None)
    answers, notes = with_fields(answers)
    text = recipe_text(answers)
    check(text, str(path))
    with path.open("x", encoding="utf-8") as stream:
        stream.write(text)
    print("\n".join([*notes, f"recipe written to {path}"]))
    print(f"next: penstock run {shlex.quote(str(path))} --out run")
    return 0


def ask(given: Answers, asks_name: bool) -> Answers:
    """Return the answers to questions on the terminal; flags that were given are not asked for.

    Raises ConfigError if standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise ConfigError(
            "init: expected --source PATH, got none, and standard input is no terminal on which to ask. Add --source."
        )
    paths = _asked("Input files or patterns, such as crawl/*.warc.gz (several: separated by spaces)")
    while not (words := shlex.split(paths)):
        paths = _asked("At least one file or pattern is needed")
    answers = replace(given, paths=tuple(words))
    if asks_name:
        answers = replace(answers, name=_asked("Name of the source [web]") or "web")
    if not given.languages:
        languages = _asked("Languages to keep, such as en de (empty: all)")
        answers = replace(answers, languages=tuple(languages.replace(",", " ").split()))
    if given.tokenizer is None and given.vocab_size is None:
        answers = replace(answers, tokenizer=_asked("File of an existing tokenizer (empty: train one)") or None)
    return answers


def _asked(question: str) -> str:
    try:
        return input(f"{question}: ").strip()
    except EOFError:
        raise ConfigError("init: expected an answer, got the end of the input. Give --source PATH.") from None


def with_fields(answers: Answers) -> tuple[Answers, list[str]]:
    """Return the answers with the names of text, URL and id fields, and lines that describe what was detected.

    Raises ConfigError if the paths match no readable file, or no field of a row format holds text.
    """
    splits = find_splits(SourceConfig.model_validate({"paths": answers.paths}))
    formats = Counter(split.format for split in splits)
    size = format_bytes(sum(split.size for split in splits))
    counted = ", ".join(f"{count} {name}" for name, count in sorted(formats.items()))
    notes = [f"found {len(splits)} file{'s' if len(splits) != 1 else ''} ({counted}), {size}"]
    first = next((split for split in splits if split.format in ROW_FORMATS and split.size), None)
    if first is None:
        return answers, notes
    fields = fields_of(first)
    chosen = {
        "text_field": _text_field(fields, first.name),
        "url_field": _named(fields, "url", ("url", "uri", "link")),
        "id_field": _named(fields, "id", ("id", "uuid", "key")),
    }
    notes.append(f"fields of {first.name}: {', '.join(fields)}; the text is in `{chosen['text_field']}`")
    return replace(answers, fields={key: value for key, value in chosen.items() if value}), notes


def _text_field(fields: dict[str, FieldSample], name: str) -> str:
    if "text" in fields and "text" in fields["text"].kinds:
        return "text"
    best = suggest_text_field(fields)
    if best is None:
        listed = ", ".join(fields) or "no fields"
        raise ConfigError(f"init: expected a field with texts in {name}, got {listed}. Name other files with --source.")
    return best


def _named(fields: dict[str, FieldSample], default: str, names: Sequence[str]) -> str | None:
    """Return the field whose name contains one of `names`; None if `default` is a field or no name fits."""
    if default in fields:
        return None
    parts = ((field, field.lower().replace("-", "_").split("_")) for field in fields)
    return next((field for field, words in parts if any(name in words for name in names)), None)


def recipe_text(answers: Answers) -> str:
    """Return the recipe as TOML: what was asked for is set, other common settings are comments with their default."""
    values: dict[str, dict[str, object]] = {
        "source": {"name": answers.name, "paths": list(answers.paths), **answers.fields},
        "language": {"languages": list(answers.languages)},
        "tokenizer": {"model": answers.tokenizer} if answers.tokenizer is not None else {},
    }
    if answers.vocab_size is not None:
        values["tokenizer"]["vocab_size"] = answers.vocab_size
    kinds = recipe_sections()
    has_fields = bool(answers.fields)
    blocks = [
        "# A recipe of Penstock, written by `penstock init`. A line that starts with `# ` and a key shows the default\n"
        "# or an example. Remove the `# ` to set the key. `penstock settings` prints all sections, and\n"
        "# `penstock settings SECTION` the keys of a section."
    ]
    for name, keys in SHOWN.items():
        documented = {setting.key: setting for setting in settings_of_section(kinds[name])}
        shown = [key for key in keys if has_fields or not key.endswith("_field")]
        lines = [_comment(summary_of(kinds[name])), f"[{name}]"]
        for key in shown:
            lines += _setting_lines(name, documented[key], values.get(name, {}))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _setting_lines(section: str, setting: SettingDoc, values: dict[str, object]) -> list[str]:
    """Return a setting with a comment: set if it has a value, else as a comment with its default or an example."""
    about = f"{setting.first_sentence}."
    if setting.key in values:
        return [_comment(about), f"{setting.key} = {toml_value(values[setting.key])}"]
    if (section, setting.key) in EXAMPLES:
        usual = "Not set by default" if setting.default == UNSET else "Not the default"
        return [_comment(f"{about} {usual}."), f"# {setting.key} = {toml_value(EXAMPLES[section, setting.key])}"]
    return [_comment(about), f"# {setting.key} = {setting.default}"]


def _comment(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False)


def check(text: str, where: str) -> None:
    """Raise ConfigError if the text is no valid recipe."""
    load_recipe(parse_recipe(text, where), (), recipe_sections(), where)


COMMANDS = {
    "init": Command((add_init_arguments,), init_command, "init recipe.toml --source 'crawl/*.warc.gz' --language en"),
}
