"""`penstock init`: a commented recipe for some input files, from flags or from questions on a terminal.

Without `--from`, the recipe has the common settings with their defaults. With `--from RECIPE`, it is the text of that
recipe with other sources, languages and tokenizer: its comments stay, and keys without a comment get one. `--set` sets
any other setting.
"""

import argparse
import shlex
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from jobs.arguments import Command, whole
from jobs.recipe import read_values, recipe_file, recipe_sections, shipped_recipes
from pipeline.sources.config import SourceConfig
from pipeline.sources.first_rows import FieldSample, fields_of, suggest_text_field
from pipeline.sources.splits import find_splits, splits_of
from schemas.config import SOURCE
from schemas.errors import ConfigError
from schemas.field_docs import UNSET, SettingDoc, settings_of_section, summary_of, toml_value
from schemas.overrides import Unset, add_override_options, load_recipe, parse_recipe, parse_value, split_source_key
from schemas.text import format_bytes, printable

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
ROW_FORMATS = ("jsonl", "parquet", "csv", "arrow", "hf")
"""Formats whose rows have named fields."""


@dataclass(frozen=True)
class Answers:
    """What a recipe is written from."""

    paths: tuple[str, ...] = ()
    name: str = "web"
    """Name of the source; empty keeps that of `base`."""
    languages: tuple[str, ...] = ()
    """Languages to keep; empty keeps all, or those of `base`."""
    tokenizer: str | None = None
    """An existing tokenizer file; None trains a tokenizer."""
    vocab_size: int | None = None
    fields: dict[str, str] = field(default_factory=dict)
    """Settings of `[source]` that name fields of the rows."""
    base: str | None = None
    """The recipe to start from: a name or a file; None: the defaults."""
    overrides: tuple[str, ...] = ()
    """Further settings, as `section.key=value`, and `Unset` keys of the recipe."""

    def settings(self) -> dict[str, dict[str, object]]:
        """Return the settings that were answered, by section."""
        name = {"name": self.name} if self.name or self.base is None else {}
        values: dict[str, dict[str, object]] = {
            "source": {**name, "paths": list(self.paths), **self.fields},
            "language": {"languages": list(self.languages)} if self.languages or self.base is None else {},
            "tokenizer": {"model": self.tokenizer} if self.tokenizer is not None else {},
        }
        if self.vocab_size is not None:
            values["tokenizer"]["vocab_size"] = self.vocab_size
        return values


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `init`."""
    parser.add_argument("recipe", metavar="RECIPE.toml", help="the file to write; it must not exist")
    parser.add_argument(
        "--source",
        nargs="+",
        action="extend",
        metavar="[NAME=]PATH",
        help="input files or patterns; NAME=PATH for a recipe with several sources. Without it, questions are asked",
    )
    parser.add_argument(
        "--from",
        dest="base",
        metavar="RECIPE",
        help=f"start from a recipe with all of its settings: a file, or one of {', '.join(shipped_recipes())}",
    )
    parser.add_argument("--name", help="name of the source; default web, or that of --from")
    parser.add_argument(
        "--language",
        action="append",
        metavar="CODE",
        help="language to keep, such as en; may be repeated; default all, or those of --from",
    )
    parser.add_argument("--tokenizer", metavar="FILE", help="an existing tokenizer; default: one is trained")
    parser.add_argument("--vocab-size", type=whole, metavar="N", help="vocabulary of the trained tokenizer")
    add_override_options(parser, "write a setting into the recipe, such as source.stackexchange.site=HOST")


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
        arguments.name or ("" if arguments.base else "web"),
        tuple(arguments.language or ()),
        arguments.tokenizer,
        arguments.vocab_size,
        base=arguments.base,
        overrides=tuple(arguments.overrides),
    )
    if given.base is not None:
        read_values(given.base)  # reports a recipe that does not exist before any question
    if given.base is not None and isinstance(read_values(given.base).get(SOURCE), list):
        return _write_several(path, given)
    answers = given if given.paths else ask(given, arguments.name is None)
    answers, notes = with_fields(answers)
    text = recipe_text(answers) if answers.base is None else rewritten(answers.base, answers)
    text = with_overrides(text, answers, str(path))
    check(text, str(path))
    with path.open("x", encoding="utf-8") as stream:
        stream.write(text)
    print("\n".join([*map(printable, notes), f"recipe written to {path}"]))
    print(f"next: penstock run {shlex.quote(str(path))} --out run")
    return 0


def _write_several(path: Path, given: Answers) -> int:
    """Write a recipe with several sources: those of the recipe `given.base` for which there are files."""
    base = given.base or ""
    tables = read_values(base)[SOURCE]
    names = [table.get("name", "web") for table in tables]
    files: dict[str, list[str]] = {}
    for text in given.paths:
        name, equals, place = text.partition("=")
        if not equals or name not in names:
            raise ConfigError(
                f"init --from {base}: expected --source NAME=PATH with a source of the recipe ({', '.join(names)}), "
                f"got {text!r}. Correct --source."
            )
        files.setdefault(name, []).append(place)
    if not files:
        raise ConfigError(
            f"init --from {base}: expected --source NAME=PATH for at least one source of the recipe "
            f"({', '.join(names)}), got none. Add --source {names[0]}=PATH."
        )
    text = with_overrides(with_sources(base, given, files), given, str(path))
    splits = splits_of(load_recipe(parse_recipe(text, str(path)), (), recipe_sections(), str(path)))
    with path.open("x", encoding="utf-8") as stream:
        stream.write(text)
    for name in files:
        own = [split for split in splits if split.source == name]
        formats = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(one.format for one in own).items()))
        print(f"{name}: {formats}, {format_bytes(sum(split.size for split in own))}")
    if left_out := [name for name in names if name not in files]:
        print(f"left out, because no --source names their files: {', '.join(left_out)}")
    print(f"recipe written to {path}")
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
        usual = given.name or "that of the recipe"
        answers = replace(answers, name=_asked(f"Name of the source [{usual}]") or given.name)
    if not given.languages:
        usual = "all" if given.base is None else "those of the recipe"
        languages = _asked(f"Languages to keep, such as en de (empty: {usual})")
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
    values = read_values(answers.base) if answers.base is not None else {}
    source = {**values.get(SOURCE, {}), "paths": answers.paths}
    recipe = load_recipe({**values, SOURCE: source}, answers.overrides, recipe_sections(), "init")
    config = recipe.section(SOURCE, SourceConfig)
    splits = find_splits(config)
    formats = Counter(split.format for split in splits)
    size = format_bytes(sum(split.size for split in splits))
    counted = ", ".join(f"{count} {name}" for name, count in sorted(formats.items()))
    notes = [f"found {len(splits)} file{'s' if len(splits) != 1 else ''} ({counted}), {size}"]
    first = next((split for split in splits if split.format in ROW_FORMATS and split.size), None)
    if first is None:
        return answers, notes
    fields = fields_of(first, config)
    given = {override.partition("=")[0].strip() for override in answers.overrides}
    has_text = not given.isdisjoint((f"{SOURCE}.text", f"{SOURCE}.text_field"))
    chosen = {
        "text_field": None if has_text else _text_field(fields, first.name),
        "url_field": _named(fields, "url", ("url", "uri", "link")),
        "id_field": _named(fields, "id", ("id", "uuid", "key")),
    }
    where = f"; the text is in `{chosen['text_field']}`" if not has_text else ""
    notes.append(f"fields of {first.name}: {', '.join(fields)}{where}")
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
    values = answers.settings()
    kinds = recipe_sections()
    has_fields = bool(answers.fields)
    blocks = [
        "# A recipe of Penstock, written by `penstock init`. A line that starts with `# ` and a key shows the default\n"
        "# or an example. Remove the `# ` to set the key. `penstock settings` prints all sections, and\n"
        "# `penstock settings SECTION` the keys of a section. `penstock init --from web` starts from the recipe `web`."
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


@dataclass
class _Key:
    """A key of a recipe's text: its section, its lines, and whether a comment is above it."""

    section: str
    name: str
    first: int
    end: int
    has_comment: bool


def rewritten(base: str, answers: Answers) -> str:
    """Return the text of a recipe with the answered settings in place of its own, and a comment at each key.

    Raises ConfigError if the recipe has no tables `[section]` in which the settings can be replaced.
    """
    kinds, path = recipe_sections(), recipe_file(base)
    values = answers.settings()
    expected = {name: dict(own) if isinstance(own, dict) else own for name, own in read_values(base).items()}
    lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    for section, own in values.items():
        current = expected.setdefault(section, {}) if own else {}
        removed = {name for key in own for name in kinds[section].REPLACES.get(key, ()) if name not in own}
        for name in sorted(removed & current.keys()):
            del current[name]
            lines = _without_key(lines, section, name)
        for name, value in own.items():
            current[name] = value
            lines = _with_key(lines, section, name, value)
    title = f"Written by `penstock init --from {base}`, with other files, languages or tokenizer than this recipe:"
    text = "\n".join([_comment(title), "#", *lines]) + "\n"
    if not _is_toml(text) or parse_recipe(text, path) != expected:
        raise ConfigError(
            f"init --from {base}: expected settings in tables such as [source], got {path}, which writes them in "
            "another form. Copy the file, and change it by hand."
        )
    return text


def with_sources(base: str, answers: Answers, files: Mapping[str, Sequence[str]]) -> str:
    """Return the text of a recipe with several sources, reduced to those with files; `files`: the paths by source.

    Weights and ranks of the other sources are removed.
    """
    lines: list[str] = []
    for block in _source_blocks(Path(recipe_file(base)).read_text(encoding="utf-8-sig").splitlines()):
        if block[0].strip() != "[[source]]":
            lines += block
            continue
        name = next((line.partition("=")[2].strip().strip('"') for line in block if line.startswith("name")), "web")
        if name in files:
            at = next((number for number, line in enumerate(block) if line.startswith("name")), 0) + 1
            lines += [*block[:at], f"paths = {toml_value(list(files[name]))}", *block[at:]]
    values = read_values(base)
    ranks = values.get("dedup", {}).get("source_ranks")
    for setting in ("weights", "epochs"):
        if by_source := values.get("train", {}).get(setting):
            own_values = {name: value for name, value in by_source.items() if name in files}
            lines = _with_key(lines, "train", setting, own_values)
    if ranks:
        lines = _with_key(lines, "dedup", "source_ranks", [name for name in ranks if name in files])
    own = {name: settings for name, settings in answers.settings().items() if name != SOURCE}
    for section, settings in own.items():
        for name, value in settings.items():
            for other in recipe_sections()[section].REPLACES.get(name, ()):
                lines = _without_key(lines, section, other)
            lines = _with_key(lines, section, name, value)
    title = f"Written by `penstock init --from {base}`, with other files, languages or tokenizer than this recipe:"
    return "\n".join([_comment(title), "#", *lines]) + "\n"


def with_overrides(text: str, answers: Answers, where: str) -> str:
    """Return the text of a recipe with the further settings, and with a comment at each key.

    Raises ConfigError that lists every wrong setting, and if a setting cannot be written into the tables of the text.
    """
    kinds = recipe_sections()
    before = parse_recipe(text, where)
    expected = load_recipe(before, answers.overrides, kinds, where)
    lines = text.splitlines()
    for override in answers.overrides:
        path, _, given = override.partition("=")
        section, _, key = path.strip().partition(".")
        value = None if isinstance(override, Unset) else parse_value(given)
        if answers.base is None and value is not None:
            lines = _uncommented(lines, section, key)
        if section == SOURCE:
            lines = _with_source_key(lines, key, value)
            continue
        if value is None:
            lines = _without_key(lines, section, key)
            continue
        for other in kinds[section].REPLACES.get(key, ()):
            lines = _without_key(lines, section, other)
        lines = _with_key(lines, section, key, value)
    text = "\n".join(lines) + "\n"
    if not _is_toml(text) or load_recipe(parse_recipe(text, where), (), kinds, where).to_json() != expected.to_json():
        raise ConfigError(
            "init: expected settings of --set that fit into tables such as [source], got "
            f"{', '.join(answers.overrides)}. Leave out --set, and change the recipe by hand."
        )
    return text if answers.base is None else _with_comments(text)


def _with_source_key(lines: Sequence[str], key: str, value: object) -> list[str]:
    """Return the lines of a recipe in which one of its sources sets a key, such as `books.quality.min_words`.

    A value of None removes the key.
    """
    kind = recipe_sections()[SOURCE]
    blocks = _source_blocks(lines)
    names = {_name_of(block): number for number, block in enumerate(blocks) if _is_source(block)}
    name, rest = split_source_key(key, names, kind)
    *tables, last = rest.split(".")
    section = ".".join((SOURCE, *tables))
    number = names.get(name, next(iter(names.values()))) if name is not None else next(iter(names.values()))
    block = blocks[number]
    if value is None:
        blocks[number] = _without_key(block, section, last)
        return [line for block in blocks for line in block]
    for other in kind.REPLACES.get(rest, ()):
        block = _without_key(block, SOURCE, other)
    keys = _keys(block)
    if all(one.section != section for one in keys):
        end = max(one.end for one in keys if one.section.partition(".")[0] == SOURCE)
        block = [*block[:end], f"[{section}]", *block[end:]]
    blocks[number] = _with_key(block, section, last, value)
    return [line for block in blocks for line in block]


def _is_source(block: Sequence[str]) -> bool:
    return any(line.strip() in (f"[{SOURCE}]", f"[[{SOURCE}]]") for line in block)


def _name_of(block: Sequence[str]) -> str:
    """Return the name of the source of a block of lines."""
    lines = (block[key.first] for key in _keys(block) if (key.section, key.name) == (SOURCE, "name"))
    return next((str(parse_value(line.partition("=")[2])) for line in lines), "web")


def _source_blocks(lines: Sequence[str]) -> list[list[str]]:
    """Return the lines of a recipe cut before each `[[source]]` and after the last table of each source."""
    blocks: list[list[str]] = [[]]
    in_source = False
    for line in lines:
        header = line.strip()
        starts = header == "[[source]]"
        ends = in_source and header.startswith("[") and not header.startswith(("[source.", "[[source."))
        if starts or ends:
            blocks.append([])
        in_source = starts or (in_source and not ends)
        blocks[-1].append(line)
    return [block for block in blocks if block]


def _keys(lines: Sequence[str]) -> list[_Key]:
    """Return the keys of the tables `[section]` of a recipe, and the header of each table as a key without a name."""
    keys: list[_Key] = []
    section, number = "", 0
    while number < len(lines):
        line, end = lines[number].strip(), number + 1
        if line.startswith("["):
            section = line.partition("#")[0].strip().strip("[]").strip()
            keys.append(_Key(section, "", number, end, True))
        elif line and not line.startswith("#"):
            while not _is_toml("\n".join(lines[number:end])) and end < len(lines):
                end += 1  # a value of several lines
            above = lines[number - 1].strip() if number else ""
            keys.append(_Key(section, line.partition("=")[0].strip(), number, end, above.startswith("#")))
        number = end
    return keys


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _with_key(lines: list[str], section: str, name: str, value: object) -> list[str]:
    """Return the lines of a recipe in which a section sets a key."""
    line, keys = f"{name} = {toml_value(value)}", _keys(lines)
    for key in keys:
        if (key.section, key.name) == (section, name):
            return [*lines[: key.first], line, *lines[key.end :]]
    header = next((key for key in keys if (key.section, key.name) == (section, "")), None)
    if header is None:
        return [*lines, "", f"[{section}]", line]
    return [*lines[: header.end], line, *lines[header.end :]]


def _uncommented(lines: list[str], section: str, name: str) -> list[str]:
    """Return the lines of a recipe with a key itself in place of the comment that shows it, as `# min_words = 50`."""
    number = next((key.end for key in _keys(lines) if (key.section, key.name) == (section, "")), None)
    while number is not None and number < len(lines) and not lines[number].startswith("["):
        if lines[number].startswith(f"# {name} = "):
            return [*lines[:number], lines[number].removeprefix("# "), *lines[number + 1 :]]
        number += 1
    return lines


def _without_key(lines: list[str], section: str, name: str) -> list[str]:
    """Return the lines of a recipe without a key of a section."""
    keys = [key for key in _keys(lines) if (key.section, key.name) == (section, name)]
    return [*lines[: keys[0].first], *lines[keys[0].end :]] if keys else lines


def _with_comments(text: str) -> str:
    """Return the text of a recipe with a comment at each key of a section that has none, and at each section."""
    lines, kinds = text.splitlines(), recipe_sections()
    for key in reversed(_keys(lines)):
        if key.section not in kinds or kinds[key.section].array:
            continue
        documented = {setting.key: setting for setting in settings_of_section(kinds[key.section])}
        if key.name in documented and not key.has_comment:
            lines[key.first : key.first] = _comment(f"{documented[key.name].first_sentence}.").splitlines()
        elif not key.name:
            lines[key.first : key.first] = _comment(summary_of(kinds[key.section])).splitlines()
    return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False)


def check(text: str, where: str) -> None:
    """Raise ConfigError if the text is no valid recipe."""
    load_recipe(parse_recipe(text, where), (), recipe_sections(), where)


COMMANDS = {
    "init": Command(
        (add_init_arguments,), init_command, "init recipe.toml --from web --source 'crawl/*.warc.gz' --language en"
    ),
}
