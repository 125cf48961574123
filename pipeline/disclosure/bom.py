"""The bill of materials of a model: the model, its training data by source, and the models that filters used.

Source: OWASP CycloneDX 1.6, the profile for machine learning (components of the types `machine-learning-model` and
`data`). It has no time and no random number, so equal facts give equal bytes.
"""

import uuid
from collections.abc import Iterator
from typing import Any

from pipeline.disclosure.answers import GIVEN, FactsFile
from pipeline.disclosure.eu import language_name
from pipeline.disclosure.fact import DisclosedFacts
from pipeline.disclosure.publish import MetadataFile, stated
from schemas.ids import digest_of

NAME = "bom"
MODEL, DATASET = "model", "dataset"
"""References of the model and of the dataset in the bill."""
SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"
ASKED = ("model.names", "provider.name")
"""Answers that it states."""


def bill_of_materials(facts: DisclosedFacts, answers: FactsFile) -> MetadataFile:
    """Return the bill of materials of a run."""
    sources = list(_sources(facts, answers))
    models = list(_models(facts))
    named = stated(answers, "model.names")
    provider = stated(answers, "provider.name")
    values: dict[str, Any] = {
        "$schema": SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _model(facts, named or "unnamed model", sources)},
        "components": [_dataset(facts, sources), *sources, *models],
        "dependencies": [
            {"ref": MODEL, "dependsOn": [DATASET]},
            {"ref": DATASET, "dependsOn": [part["bom-ref"] for part in (*sources, *models)]},
        ],
    }
    if provider:
        values["metadata"]["supplier"] = {"name": provider}
    values["serialNumber"] = f"urn:uuid:{uuid.UUID(digest_of(values)[:32], version=4)}"
    missing = tuple(key for key in ASKED if answers.of(key).state != GIVEN)
    return MetadataFile(NAME, "bom.cdx.json", values, missing)


def _model(facts: DisclosedFacts, name: str, sources: list[dict[str, Any]]) -> dict[str, Any]:
    step = facts.value("step")
    checkpoint = facts.origins.get("checkpoint")
    model: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": MODEL,
        "name": name,
        "modelCard": {
            "modelParameters": {
                "task": "text-generation",
                "datasets": [{"ref": DATASET}, *({"ref": source["bom-ref"]} for source in sources)],
                "inputs": [{"format": "text"}],
                "outputs": [{"format": "text"}],
            }
        },
        "properties": _properties({"steps": step or 0, "tokens read": facts.value("consumed") if step else 0}),
    }
    if checkpoint is not None:
        # The digest is that of the checkpoint's metadata file, which lists the digests of its weights.
        model["version"] = f"step {step}"
        model["hashes"] = [{"alg": "SHA-256", "content": checkpoint.digest}]
    return model


def _dataset(facts: DisclosedFacts, sources: list[dict[str, Any]]) -> dict[str, Any]:
    stored, contract = facts.value("stored"), facts.value("tokenizer")
    return {
        "type": "data",
        "bom-ref": DATASET,
        "name": "token dataset",
        "version": facts.value("dataset")[:12],
        "hashes": [{"alg": "SHA-256", "content": facts.value("dataset")}],
        "data": [{"type": "dataset", "name": "token dataset", "classification": "training data"}],
        "properties": _properties(
            {
                "training tokens": stored["train"],
                "held-out tokens": stored["heldout"],
                "tokenizer SHA-256": contract["sha256"],
                "sources": len(sources),
            }
        ),
    }


def _sources(facts: DisclosedFacts, answers: FactsFile) -> Iterator[dict[str, Any]]:
    documents = facts.value("documents_read")
    for source, tokens in facts.value("sources").items():
        languages = ", ".join(language_name(code) for code, _ in facts.value("languages_of")[source])
        component: dict[str, Any] = {
            "type": "data",
            "bom-ref": f"source:{source}",
            "name": answers.of_source(source, "title").value or source,
            "data": [
                {"type": "dataset", "name": source, "classification": answers.kind_of(source) or "unknown",
                 "description": f"Languages: {languages}"}
            ],
            "properties": _properties({"tokens read": tokens, "documents": documents.get(source, 0)}),
        }  # fmt: skip
        version = answers.of_source(source, "version")
        if version.state == GIVEN:
            component["version"] = str(version.value)
        yield component


def _models(facts: DisclosedFacts) -> Iterator[dict[str, Any]]:
    """Yield the models that stages used, each once."""
    found = {name: sha256 for stage in facts.value("stages") for name, sha256 in stage["models"].items()}
    for name, sha256 in sorted(found.items()):
        yield {
            "type": "machine-learning-model",
            "bom-ref": f"filter:{name}",
            "name": name,
            "hashes": [{"alg": "SHA-256", "content": sha256}],
        }


def _properties(values: dict[str, Any]) -> list[dict[str, str]]:
    return [{"name": f"penstock:{name}", "value": str(value)} for name, value in values.items()]
