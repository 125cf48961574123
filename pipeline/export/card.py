"""The dataset card (`README.md`) and the Croissant metadata (`croissant.json`) of an export.

Everything in them is from manifests and the recipe, so the same run gives the same bytes.
"""

import json
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from schemas.config import Recipe
from schemas.manifest import Manifest
from schemas.planted import describe_planted
from schemas.tables import DROPPED_BEFORE, LATER_VERDICTS, META_CUT, TABLES
from schemas.versions import DATASET

UNKNOWN = "unknown"
CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
"""The specification that `croissant.json` follows. Source: MLCommons, Croissant Format Specification 1.0."""
PARQUET_TYPE = "application/x-parquet"
SIZES: tuple[tuple[int, str], ...] = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
)
SIZES += ((10**8, "10M<n<100M"), (10**9, "100M<n<1B"), (10**10, "1B<n<10B"), (10**11, "10B<n<100B"))
LARGEST = "100B<n<1T"
BARE_KEY = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
SHOWN_LANGUAGES = 100
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{
        name: f"cr:{name}"
        for name in (
            *(
                "citeAs",
                "column",
                "equivalentProperty",
                "extract",
                "field",
                "fileProperty",
                "fileObject",
                "fileSet",
                "format",
                "includes",
            ),
            *("isLiveDataset", "jsonPath", "key", "md5", "parentField", "path", "recordSet", "references", "regex"),
            *("repeated", "replace", "samplingRate", "separator", "source", "subField", "transform"),
        )
    },
}
CROISSANT_TYPES: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pa.types.is_boolean, "sc:Boolean"),
    (pa.types.is_integer, "sc:Integer"),
)
CROISSANT_TYPES += ((pa.types.is_floating, "sc:Float"),)


@dataclass(frozen=True)
class CardText:
    """What only the publisher of a dataset knows."""

    name: str
    """Name of the dataset."""
    licence: str = UNKNOWN
    """Licence of the whole dataset, as the Hugging Face Hub names it, such as `odc-by`."""
    creator: str = UNKNOWN
    """Person or organization that publishes the dataset."""
    url: str | None = None
    """Address where the dataset is published; None: not yet known."""
    recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The settings that made the dataset, as `published_recipe` returns them."""


@dataclass(frozen=True)
class ExportFacts:
    """What was exported."""

    manifests: Mapping[str, Manifest]
    """The manifests of the run's tables, by name."""
    schema: pa.Schema
    """The columns."""
    content: Mapping[str, Any]
    """The block `content` of `export.json`."""
    digest: str
    """The SHA-256 of that block."""

    @property
    def num_documents(self) -> int:
        """The number of exported documents."""
        return int(self.content["counts"]["exported"])

    @property
    def built(self) -> str:
        """The day on which the clean text was made, ISO 8601."""
        return self.manifests["clean"].run.started[:10]


def published_recipe(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the settings of a recipe that change the data, by section; locations of files are reduced to their names.

    Settings that only change how a run executes, such as paths of inputs, are left out.
    """
    sections: dict[str, dict[str, Any]] = {}
    for name, section in recipe.items():
        hidden, places = section.fields_of("execution"), section.fields_of("location")
        values = section.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        kept = {
            key: _base_names(value) if key in places else value for key, value in values.items() if key not in hidden
        }
        if kept:
            sections[name] = kept
    return sections


def _base_names(value: Any) -> Any:
    if isinstance(value, str):
        return posixpath.basename(value)
    if isinstance(value, list):
        return [_base_names(item) for item in value]
    return {name: _base_names(item) for name, item in value.items()} if isinstance(value, dict) else value


def to_toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return sections of settings as a TOML text."""
    blocks = []
    for name, values in sections.items():
        blocks.append(
            "\n".join([f"[{_key(name)}]", *(f"{_key(key)} = {_toml(value)}" for key, value in values.items())])
        )
    return "\n\n".join(blocks)


def _key(name: str) -> str:
    return name if name and BARE_KEY.issuperset(name) else json.dumps(name)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(name)} = {_toml(item)}' for name, item in value.items())} }}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)  # TOML's basic strings, numbers and truth values are those of JSON


def size_category(number: int) -> str:
    """Return the Hub's category of a number of documents, such as `1K<n<10K`."""
    return next((name for limit, name in SIZES if number < limit), LARGEST)


def dataset_card(facts: ExportFacts, text: CardText) -> str:
    """Return the dataset card: the YAML head that the Hugging Face Hub reads, and a description in Markdown."""
    blocks = [
        "\n".join(["---", *_head(facts, text), "---"]),
        f"# {_markdown(text.name)}",
        f"{facts.num_documents:,} documents of clean text, {facts.content['counts']['text_bytes']:,} bytes of UTF-8. "
        "Made with Penstock from the sources below; every document has an id, its URL and its date, as far as known.",
        "## Fields\n\n" + _table(("field", "type", "meaning"), _fields(facts)),
        "## How documents were selected\n\n" + _table(("step", "dropped", "left"), funnel(facts)) + _left_out(facts),
        "## Sources, languages and licences\n\n" + _origins(facts, text),
        "## Personal data\n\n" + _personal_data(facts),
        "## Known limits\n\n" + "\n".join(f"- {limit}" for limit in _limits(facts)),
        "## How it was made\n\n" + _made(facts, text),
    ]
    return "\n\n".join(blocks) + "\n"


def _head(facts: ExportFacts, text: CardText) -> Iterator[str]:
    # JSON strings are YAML strings; without quotes, YAML reads the language `no` as false.
    yield f"pretty_name: {json.dumps(text.name)}"
    yield f"license: {json.dumps(text.licence)}"
    languages = [name for name in facts.content["languages"] if name.isalpha() and len(name) in (2, 3)]
    if languages:
        yield f"language: {json.dumps(languages[:SHOWN_LANGUAGES])}"
    yield f"size_categories: {json.dumps([size_category(facts.num_documents)])}"
    yield 'task_categories: ["text-generation"]'
    yield from ("configs:", "- config_name: default", "  data_files:", "  - split: train", "    path: data/*.parquet")
    yield from ("dataset_info:", "  features:")
    for column in facts.schema:
        yield from (f"  - name: {json.dumps(column.name)}", f"    dtype: {_dtype(column.type)}")
    yield from ("  splits:", "  - name: train", f"    num_examples: {facts.num_documents}")
    yield f"    num_bytes: {sum(file['bytes'] for file in facts.content['files'])}"


def _dtype(kind: pa.DataType) -> str:
    return {"float": "float32", "double": "float64"}.get(str(kind), str(kind))


def _fields(facts: ExportFacts) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for column in facts.schema:
        named = {key.decode(): value.decode() for key, value in (column.metadata or {}).items()}
        unit = f" [{named['unit']}]" if named.get("unit") else ""
        rows.append((f"`{column.name}`", _dtype(column.type), f"{named.get('meaning', '')}{unit}"))
    return rows


def funnel(facts: ExportFacts) -> list[tuple[str, ...]]:
    """Return (step, documents dropped, documents left) for the input and for every rule that dropped documents."""
    left = facts.manifests["documents"].content.counts.rows_in
    rows: list[tuple[str, ...]] = [("records of the inputs", "", f"{left:,}")]
    for table in ("documents", *LATER_VERDICTS):
        if table not in facts.manifests or table == DATASET:
            continue
        dropped = facts.manifests[table].content.counts.dropped
        for name, number in dropped.items():
            if number and not name.endswith(f"/{DROPPED_BEFORE}"):
                left -= number
                rows.append((f"`{name}`", f"{number:,}", f"{left:,}"))
    rows.append(("documents of clean text", "", f"{facts.content['counts']['clean']:,}"))
    if facts.content["counts"]["left_out_by_where"]:
        number = facts.content["counts"]["left_out_by_where"]
        rows.append((f"`{facts.content['where']}`", f"{number:,}", f"{facts.num_documents:,}"))
    return rows


def _left_out(facts: ExportFacts) -> str:
    if DATASET not in facts.manifests:
        return ""
    streams = facts.manifests[DATASET].content.figures.get("streams", {})
    tokens = sum(sum(shards) for shards in streams.values())
    return f"\n\nThe token dataset of the same run has {tokens:,} tokens."


def _origins(facts: ExportFacts, text: CardText) -> str:
    tables = []
    for name in ("sources", "languages", "licences"):
        counts: Mapping[str, int] = facts.content[name]
        rows = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_LANGUAGES]
        if rows:
            tables.append(_table((name, "documents"), [(_markdown(own), f"{number:,}") for own, number in rows]))
    stated = facts.content["counts"]["with_licence"]
    tables.append(
        f"Licence of the dataset as a whole: {_markdown(text.licence)}. {stated:,} of {facts.num_documents:,} "
        "documents state a licence of their own in the field `licence`. For all others it is unknown, and the rights "
        "of their authors apply."
    )
    return "\n\n".join(tables)


def _personal_data(facts: ExportFacts) -> str:
    counts = facts.manifests["clean"].content.figures.get("pii", {})
    replaced = _table(("type", "replaced"), [(f"`{name}`", f"{number:,}") for name, number in sorted(counts.items())])
    number = sum(counts.values())
    return (
        "Values that patterns and check digits recognize as personal data were replaced by placeholders such as "
        f"`<EMAIL>` in text, title, URL, licence and meta: {number:,} values in the clean text of the run."
        + (f"\n\n{replaced}" if counts else "")
        + "\n\nOther personal data, such as names in texts, may remain."
    )


def _limits(facts: ExportFacts) -> Iterator[str]:
    yield "Quality rules and duplicate detection make mistakes in both directions; the table above has their counts."
    yield "Language is that of a model, and short or mixed texts may have a wrong one."
    yield "Personal data is recognized by patterns, so unusual spellings remain and some similar numbers were replaced."
    if planted := describe_planted(facts.manifests["clean"].content):
        yield f"In the clean text of the run, {planted}"
    if not facts.content["licences"]:
        yield "No licence of a document is known."
    cut = sum(facts.manifests["documents"].content.figures.get(META_CUT, {}).values())
    if cut:
        yield f"Fields of {cut:,} rows of the inputs were too large or could not be read, and are not in `meta`."
    if any(TABLES[name].rows == "document" and name == "repeats" for name in facts.manifests):
        yield "Passages that occur in several documents were cut out of the texts."
    if "templates" in facts.manifests:
        yield "Lines that many pages of one host have were cut out of the texts; some of them may be content."
    if "paragraphs" in facts.manifests:
        yield "Paragraphs whose perplexity or length is out of the recipe's range were cut out of the texts."


def _made(facts: ExportFacts, text: CardText) -> str:
    clean = facts.manifests["clean"]
    rows = [(f"`{name}`", f"`{manifest.digest}`") for name, manifest in facts.manifests.items()]
    command = f"penstock export RUN --format {facts.content['format']}"
    if facts.content["signals"]:
        command += f" --signals {','.join(facts.content['signals'])}"
    if facts.content["where"]:
        command += f" --where {json.dumps(facts.content['where'])}"
    parts = [
        f"The clean text was made on {facts.built} with Penstock {clean.run.code_version}, and exported with "
        f"`{command} --shard-size {facts.content['shard_bytes']}`. The digest of the export is `{facts.digest}`; "
        "`export.json` has the SHA-256 of every file.",
        "Digests of the tables:\n\n" + _table(("table", "SHA-256"), rows),
    ]
    if text.recipe:
        parts.append(f"The recipe, without the locations of files:\n\n```toml\n{to_toml(text.recipe)}\n```")
    return "\n\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _markdown(text: str) -> str:
    """Return text of the data or of a user on one line, without characters that Markdown or HTML interprets."""
    escaped = "".join(f"\\{char}" if char in "\\`*_{}[]<>()#|!~" else char for char in " ".join(text.split()))
    return escaped.replace("&", "&amp;")


def croissant(facts: ExportFacts, text: CardText) -> dict[str, Any]:
    """Return the Croissant metadata of an export with Parquet files, as a JSON-LD object."""
    files = [
        {
            "@type": "cr:FileObject",
            "@id": file["path"],
            "name": posixpath.basename(file["path"]),
            "contentUrl": file["path"],
            "contentSize": f"{file['bytes']} B",
            "encodingFormat": PARQUET_TYPE,
            "sha256": file["sha256"],
        }
        for file in facts.content["files"]
    ]
    all_files = {
        "@type": "cr:FileSet",
        "@id": "parquet-files",
        "name": "parquet-files",
        "description": "All shards of the dataset.",
        "encodingFormat": PARQUET_TYPE,
        "includes": "data/*.parquet",
    }
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "name": text.name,
        "description": f"{facts.num_documents:,} documents of clean text, made with Penstock.",
        "conformsTo": CONFORMS_TO,
        "license": text.licence,
        "url": text.url or f"urn:sha256:{facts.digest}",
        "creator": {"@type": "sc:Organization", "name": text.creator},
        "datePublished": facts.built,
        "version": f"1.0.0+{facts.digest[:12]}",
        "inLanguage": list(facts.content["languages"])[:SHOWN_LANGUAGES],
        "citeAs": f"{text.creator}: {text.name}, {facts.built[:4]}, sha256:{facts.digest}",
        "isLiveDataset": False,
        "rai:personalSensitiveInformation": _personal_data(facts),
        "distribution": [*files, all_files],
        "recordSet": [
            {
                "@type": "cr:RecordSet",
                "@id": "documents",
                "name": "documents",
                "description": "One record for each document.",
                "key": {"@id": "documents/id"},
                "field": [_croissant_field(column) for column in facts.schema],
            }
        ],
    }


def _croissant_field(column: pa.Field) -> dict[str, Any]:
    kinds = (name for is_kind, name in CROISSANT_TYPES if is_kind(column.type))
    return {
        "@type": "cr:Field",
        "@id": f"documents/{column.name}",
        "name": column.name,
        "description": (column.metadata or {}).get(b"meaning", b"").decode(),
        "dataType": next(kinds, "sc:Text"),
        "source": {"fileSet": {"@id": "parquet-files"}, "extract": {"column": column.name}},
    }
