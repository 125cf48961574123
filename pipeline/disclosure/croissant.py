"""Croissant metadata of the clean text of a run: its files with digests, its columns, and where it comes from.

Source: MLCommons, Croissant Format Specification 1.1 (2026-01-29), with provenance in terms of PROV-O. That of a run is
of the table `clean`, of which the tokens were made, by paths in the run folder. `penstock export` writes that of an
export.
"""

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.disclosure.answers import GIVEN, FactsFile
from pipeline.disclosure.fact import DisclosedFacts
from pipeline.disclosure.publish import MetadataFile, stated
from schemas.errors import ContractError
from schemas.planted import PURPOSE
from schemas.tables import CLEAN, NOT_PLANTED
from schemas.takedown import CROISSANT

NAME = "croissant"
CONFORMS_TO = "http://mlcommons.org/croissant/1.1"
PARQUET_TYPE = "application/x-parquet"
TERMS = (
    *("arrayShape", "citeAs", "column", "containedIn", "equivalentProperty", "extract", "field", "fileObject"),
    *("fileProperty", "fileSet", "format", "includes", "isArray", "isLiveDataset", "jsonPath", "key", "md5"),
    *("parentField", "path", "recordSet", "references", "regex", "repeated", "replace", "samplingRate", "separator"),
    *("source", "subField", "transform"),
)
"""Terms of Croissant that the context maps to its namespace."""
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "prov": "http://www.w3.org/ns/prov#",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "description": {"@container": "@language"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "name": {"@container": "@language"},
    **{name: f"cr:{name}" for name in TERMS},
}
COLUMN_TYPES: tuple[tuple[Callable[[pa.DataType], bool], str], ...] = (
    (pa.types.is_boolean, "sc:Boolean"),
    (pa.types.is_integer, "sc:Integer"),
    (pa.types.is_floating, "sc:Float"),
    (pa.types.is_timestamp, "sc:DateTime"),
)
"""The Croissant type of each kind of column; any other is text."""
ASKED = ("dataset.name", "dataset.licence", "dataset.link", "provider.name", "document.updated")
"""Answers that it states."""
TABLE = "clean"


@dataclass(frozen=True)
class DescribedFiles:
    """Parquet files of one schema that the metadata describe."""

    name: str
    description: str
    licence: str
    url: str
    creator: str
    """Person or organization; empty: not known."""
    published: str
    """Day of publication, ISO 8601; empty: not known."""
    digest: str
    """SHA-256 that identifies the dataset."""
    cite_as: str
    languages: Sequence[str]
    files: Sequence[Mapping[str, Any]]
    """`key`, `path`, `rows`, `bytes` and `sha256` of each file."""
    includes: str
    """Pattern that matches their paths."""
    columns: pa.Schema
    key: str
    """Name of the column that identifies a row."""


def croissant(facts: DisclosedFacts, answers: FactsFile) -> MetadataFile:
    """Return the metadata of a run. Raises ContractError if the run has no table `clean`, as a union of datasets."""
    if TABLE not in facts.origins:
        raise ContractError(
            "summary --croissant: expected a run with the table `clean`, got one without. Name the run that wrote the "
            "dataset."
        )
    digest = facts.origins[TABLE].digest
    described = DescribedFiles(
        name=stated(answers, "dataset.name") or f"penstock-{digest[:12]}",
        description=(
            f"{facts.value('clean'):,} documents of clean text, of which {facts.value('stored')['train']:,} training "
            f"tokens were made.{_read_by_checkpoint(facts)}"
        ),
        licence=stated(answers, "dataset.licence") or "unknown",
        url=stated(answers, "dataset.link") or f"urn:sha256:{digest}",
        creator=stated(answers, "provider.name"),
        published=stated(answers, "document.updated"),
        digest=digest,
        cite_as=f"sha256:{digest}",
        languages=[language for language, _ in facts.value("languages") if language],
        files=facts.value("files"),
        includes=f"{facts.origins[TABLE].path.rpartition('/')[0]}/*.parquet",
        # Croissant has no type for a list of pairs, as `pii_counts` is.
        columns=pa.schema([column for column in _stored_columns(facts) if not pa.types.is_list(column.type)]),
        key="doc_id",
    )
    missing = tuple(key for key in ASKED if answers.of(key).state != GIVEN)
    return MetadataFile(NAME, CROISSANT, describe_files(described, facts), missing, has_paths=True)


def _read_by_checkpoint(facts: DisclosedFacts) -> str:
    if facts.step is None:
        return ""
    return f" The newest checkpoint of the run has read {facts.value('consumed'):,} tokens."


def _stored_columns(facts: DisclosedFacts) -> pa.Schema:
    is_planted = any(stage["stage"] == PURPOSE and stage["settings"] for stage in facts.value("stages"))
    return CLEAN if is_planted else NOT_PLANTED


def describe_files(described: DescribedFiles, facts: DisclosedFacts) -> dict[str, Any]:
    """Return the metadata of Parquet files of clean text, as a JSON-LD object."""
    values: dict[str, Any] = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "name": described.name,
        "description": described.description,
        "conformsTo": CONFORMS_TO,
        "license": described.licence,
        "url": described.url,
        "version": f"1.0.0+{described.digest[:12]}",
        "inLanguage": list(described.languages),
        "citeAs": described.cite_as,
        "isLiveDataset": False,
        "rai:personalSensitiveInformation": _personal_data(facts),
        "prov:wasDerivedFrom": [{"@id": f"urn:sha256:{facts.origins[name].digest}"} for name in _inputs(facts)],
        "distribution": [*_files(described), _all_files(described)],
        "recordSet": [_record_set(described)],
    }
    if "months" in facts.facts:
        values["rai:dataCollectionTimeframe"] = _timeframe(facts)
    if described.creator:
        values["creator"] = {"@type": "sc:Organization", "name": described.creator}
    if described.published:
        values["datePublished"] = described.published
    return values


def _inputs(facts: DisclosedFacts) -> list[str]:
    """Return the tables that `clean` was made from, as far as the run has them."""
    return [name for name in facts.origins if name in ("documents", "verdicts", "dedup")]


def _personal_data(facts: DisclosedFacts) -> str:
    found: Mapping[str, int] = facts.value("personal_data")
    listed = ", ".join(f"{number:,} of {kind}" for kind, number in sorted(found.items()))
    return f"Values that patterns recognize as personal data were replaced: {listed or 'none'}. Others may remain."


def _timeframe(facts: DisclosedFacts) -> list[str]:
    return sorted({month for pair in facts.value("months").values() for month in pair})


def _files(described: DescribedFiles) -> Iterator[dict[str, Any]]:
    for file in described.files:
        yield {
            "@type": "cr:FileObject",
            "@id": file["key"],
            "name": posixpath.basename(file["key"]),
            "description": f"{file['rows']:,} documents.",
            "contentUrl": file["path"],
            "contentSize": f"{file['bytes']} B",
            "encodingFormat": PARQUET_TYPE,
            "sha256": file["sha256"],
        }


def _all_files(described: DescribedFiles) -> dict[str, Any]:
    return {
        "@type": "cr:FileSet",
        "@id": "parquet-files",
        "name": "parquet-files",
        "description": "All files of the dataset.",
        "encodingFormat": PARQUET_TYPE,
        "includes": described.includes,
    }


def _record_set(described: DescribedFiles) -> dict[str, Any]:
    return {
        "@type": "cr:RecordSet",
        "@id": "documents",
        "name": "documents",
        "description": "One record for each document.",
        "key": {"@id": f"documents/{described.key}"},
        "field": [_column(column) for column in described.columns],
    }


def _column(column: pa.Field) -> dict[str, Any]:
    kinds = (name for is_kind, name in COLUMN_TYPES if is_kind(column.type))
    return {
        "@type": "cr:Field",
        "@id": f"documents/{column.name}",
        "name": column.name,
        "description": (column.metadata or {}).get(b"meaning", b"").decode(),
        "dataType": next(kinds, "sc:Text"),
        "source": {"fileSet": {"@id": "parquet-files"}, "extract": {"column": column.name}},
    }
