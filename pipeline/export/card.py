"""The dataset card (`README.md`) and the Croissant metadata (`croissant.json`) of an export.

Everything in them is from manifests and the recipe, so the same run gives the same bytes.
"""

import json
import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.disclosure.croissant import DescribedFiles, describe_files
from pipeline.disclosure.dataset_card import CardText, DescribedPart, dataset_card
from pipeline.disclosure.hub import SHOWN_LANGUAGES, CardSection, HubCard
from pipeline.disclosure.markdown import code, escaped, table
from pipeline.disclosure.table_facts import facts_of_tables
from schemas.config import OFF, Recipe, can_be_off
from schemas.manifest import TableVersion
from schemas.overrides import toml_text
from schemas.text import printable_block, printable_value

BARE_KEY = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


@dataclass(frozen=True)
class ExportFacts:
    """What was exported."""

    tables: Mapping[str, TableVersion]
    """The tables of the run, by name."""
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
        return self.tables["clean"].manifest.run.started[:10]


def published_recipe(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the settings of a recipe that change the data, by section; locations of files are reduced to their names.

    Settings that only change how a run executes, such as paths of inputs, are left out.
    """
    sections: dict[str, dict[str, Any]] = {}
    for name, section in recipe.items():
        hidden, places = section.fields_of("execution"), section.fields_of("location")
        off = {key for key, info in type(section).model_fields.items() if can_be_off(info)}
        given = section.model_dump(mode="json", exclude_unset=True)
        values = {
            key: OFF if value is None else value for key, value in given.items() if value is not None or key in off
        }
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
    return name if name and BARE_KEY.issuperset(name) else toml_text(name)


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(name)} = {_toml(item)}' for name, item in value.items())} }}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # Numbers and truth values of TOML are those of JSON.
    return toml_text(value) if isinstance(value, str) else json.dumps(value)


def export_card(facts: ExportFacts, text: CardText) -> HubCard:
    """Return the dataset card of an export."""
    content, counts = facts.content, facts.content["counts"]
    left = []
    if counts["left_out_by_where"]:
        left.append((code(content["where"]), f"{counts['left_out_by_where']:,}", f"{facts.num_documents:,}"))
    fields = table(("field", "type", "meaning"), list(_fields(facts.schema)))
    part = DescribedPart(
        facts.num_documents,
        counts["text_bytes"],
        content["sources"],
        content["languages"],
        facts.digest,
        content["licences"],
        counts["with_licence"],
        _head(facts),
        (CardSection("Fields", fields),),
        tuple(left),
        tuple(_made(facts, text)),
    )
    return dataset_card(facts_of_tables(facts.tables), text, part)


def _head(facts: ExportFacts) -> dict[str, Any]:
    """Return the metadata by which the Hub and `datasets` read the files."""
    features = [{"name": column.name, "dtype": _dtype(column.type)} for column in facts.schema]
    num_bytes = sum(file["bytes"] for file in facts.content["files"])
    splits = [{"name": "train", "num_examples": facts.num_documents, "num_bytes": num_bytes}]
    files = [{"split": "train", "path": "data/*.parquet"}]
    return {
        "configs": [{"config_name": "default", "data_files": files}],
        "dataset_info": {"features": features, "splits": splits},
    }


def _dtype(kind: pa.DataType) -> str:
    return {"float": "float32", "double": "float64"}.get(str(kind), str(kind))


def _fields(schema: pa.Schema) -> Iterator[tuple[str, ...]]:
    for column in schema:
        named = {key.decode(): value.decode() for key, value in (column.metadata or {}).items()}
        unit = f" [{named['unit']}]" if named.get("unit") else ""
        yield code(column.name), escaped(_dtype(column.type)), escaped(f"{named.get('meaning', '')}{unit}")


def _made(facts: ExportFacts, text: CardText) -> Iterator[str]:
    clean = facts.tables["clean"].manifest
    command = f"penstock export RUN --format {facts.content['format']}"
    if facts.content["signals"]:
        command += f" --signals {','.join(facts.content['signals'])}"
    if facts.content["where"]:
        command += f" --where {json.dumps(facts.content['where'])}"
    command += f" --shard-size {facts.content['shard_bytes']}"
    yield (
        f"The clean text was made on {facts.built} with Penstock {clean.run.code_version}, and exported with "
        f"{code(command)}. The digest of the export is "
        f"{code(facts.digest)}; `export.json` has the SHA-256 of every file."
    )
    if text.recipe:
        yield f"The recipe, without the locations of files:\n\n```toml\n{printable_block(to_toml(text.recipe))}\n```"


def export_croissant(facts: ExportFacts, text: CardText) -> dict[str, Any]:
    """Return the Croissant metadata of an export with Parquet files, as a JSON-LD object."""
    files = tuple({**file, "key": file["path"]} for file in facts.content["files"])
    known = facts_of_tables(facts.tables)
    described = DescribedFiles(
        name=text.name,
        description=f"{facts.num_documents:,} documents of clean text, made with Penstock.",
        licence=text.licence,
        url=text.url or f"urn:sha256:{facts.digest}",
        creator=text.creator,
        published=facts.built,
        digest=facts.digest,
        cite_as=f"{text.creator}: {text.name}, {facts.built[:4]}, sha256:{facts.digest}",
        languages=tuple(facts.content["languages"])[:SHOWN_LANGUAGES],
        files=files,
        includes="data/*.parquet",
        columns=facts.schema,
        key="id",
    )
    safe: dict[str, Any] = printable_value(describe_files(described, known))
    return safe
