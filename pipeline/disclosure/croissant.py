"""Croissant metadata of the clean text of a run: its files with digests, its columns, and where it comes from.

Source: MLCommons, Croissant Format Specification 1.1 (2026-01-29), with provenance in terms of PROV-O. It describes the
table `clean`, of which the tokens were made, by paths in the run folder; `penstock export` describes an export.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from pipeline.disclosure.answers import GIVEN, FactsFile
from pipeline.disclosure.facts import DisclosedFacts
from pipeline.disclosure.publish import MetadataFile, stated
from pipeline.export.card import CONTEXT, CROISSANT_TYPES, PARQUET_TYPE
from schemas.errors import ContractError
from schemas.planted import PURPOSE
from schemas.tables import CLEAN, NOT_PLANTED
from schemas.takedown import CROISSANT

NAME = "croissant"
CONFORMS_TO = "http://mlcommons.org/croissant/1.1"
CONTEXT_1_1: dict[str, Any] = {
    **CONTEXT,
    "arrayShape": "cr:arrayShape",
    "containedIn": "cr:containedIn",
    "isArray": "cr:isArray",
    "description": {"@container": "@language"},
    "name": {"@container": "@language"},
    "prov": "http://www.w3.org/ns/prov#",
}
ASKED = ("dataset.name", "dataset.licence", "dataset.link", "provider.name", "document.updated")
"""Answers that it states."""
TABLE = "clean"
COLUMN_TYPES = (*CROISSANT_TYPES, (pa.types.is_timestamp, "sc:DateTime"))


def croissant(facts: DisclosedFacts, answers: FactsFile) -> MetadataFile:
    """Return the metadata of a run. Raises ContractError if the run has no table `clean`, as a union of datasets."""
    if TABLE not in facts.origins:
        raise ContractError(
            "summary --croissant: expected a run with the table `clean`, got one without. Name the run that wrote the "
            "dataset."
        )
    digest = facts.origins[TABLE].digest
    values: dict[str, Any] = {
        "@context": CONTEXT_1_1,
        "@type": "sc:Dataset",
        "name": stated(answers, "dataset.name") or f"penstock-{digest[:12]}",
        "description": (
            f"{facts.value('clean'):,} documents of clean text, of which {facts.value('stored')['train']:,} training "
            f"tokens were made. The newest checkpoint of the run has read {facts.value('consumed'):,} tokens."
        ),
        "conformsTo": CONFORMS_TO,
        "license": stated(answers, "dataset.licence") or "unknown",
        "url": stated(answers, "dataset.link") or f"urn:sha256:{digest}",
        "version": f"1.0.0+{digest[:12]}",
        "inLanguage": [language for language, _ in facts.value("languages") if language],
        "citeAs": f"sha256:{digest}",
        "isLiveDataset": False,
        "rai:personalSensitiveInformation": _personal_data(facts),
        "rai:dataCollectionTimeframe": _timeframe(facts),
        "prov:wasDerivedFrom": [{"@id": f"urn:sha256:{facts.origins[name].digest}"} for name in _inputs(facts)],
        "distribution": [*_files(facts), _all_files(facts)],
        "recordSet": [_record_set(facts)],
    }
    if name := stated(answers, "provider.name"):
        values["creator"] = {"@type": "sc:Organization", "name": name}
    if day := stated(answers, "document.updated"):
        values["datePublished"] = day
    missing = tuple(key for key in ASKED if answers.of(key).state != GIVEN)
    return MetadataFile(NAME, CROISSANT, values, missing, has_paths=True)


def _inputs(facts: DisclosedFacts) -> list[str]:
    """Return the tables that `clean` was made from, as far as the run has them."""
    return [name for name in facts.origins if name in ("documents", "verdicts", "dedup")]


def _personal_data(facts: DisclosedFacts) -> str:
    found: Mapping[str, int] = facts.value("personal_data")
    listed = ", ".join(f"{number:,} of {kind}" for kind, number in sorted(found.items()))
    return f"Values that patterns recognize as personal data were replaced: {listed or 'none'}. Others may remain."


def _timeframe(facts: DisclosedFacts) -> list[str]:
    return sorted({month for pair in facts.value("months").values() for month in pair})


def _files(facts: DisclosedFacts) -> Iterator[dict[str, Any]]:
    for file in facts.value("files"):
        yield {
            "@type": "cr:FileObject",
            "@id": file["key"],
            "name": file["key"],
            "description": f"{file['rows']:,} documents.",
            "contentUrl": file["path"],
            "contentSize": f"{file['bytes']} B",
            "encodingFormat": PARQUET_TYPE,
            "sha256": file["sha256"],
        }


def _all_files(facts: DisclosedFacts) -> dict[str, Any]:
    return {
        "@type": "cr:FileSet",
        "@id": "parquet-files",
        "name": "parquet-files",
        "description": "All parts of the table.",
        "encodingFormat": PARQUET_TYPE,
        "includes": f"{facts.origins[TABLE].path.rpartition('/')[0]}/*.parquet",
    }


def _record_set(facts: DisclosedFacts) -> dict[str, Any]:
    is_planted = any(stage["stage"] == PURPOSE and stage["settings"] for stage in facts.value("stages"))
    columns = CLEAN if is_planted else NOT_PLANTED
    return {
        "@type": "cr:RecordSet",
        "@id": "documents",
        "name": "documents",
        "description": "One record for each document.",
        "key": {"@id": "documents/doc_id"},
        # Croissant has no type for a list of pairs, as `pii_counts` is.
        "field": [_column(column) for column in columns if not pa.types.is_list(column.type)],
    }


def _column(column: pa.Field) -> dict[str, Any]:
    kinds = (name for is_kind, name in COLUMN_TYPES if is_kind(column.type))
    return {
        "@type": "cr:Field",
        "@id": f"documents/{column.name}",
        "name": column.name,
        "description": column.metadata[b"meaning"].decode(),
        "dataType": next(kinds, "sc:Text"),
        "source": {"fileSet": {"@id": "parquet-files"}, "extract": {"column": column.name}},
    }
