"""The bill of materials of a model as SPDX 3.0.1: the model, its dataset and sources, and the models that filters used.

Source: System Package Data Exchange specification 3.0.1, profiles Core, Software, AI, Dataset and SimpleLicensing. Both
packages of these profiles have the properties and the two relationships of licences that the profiles require. A
source is a plain package, because when and by whom it was built is not known. Times are those of the facts file or of
the dataset's manifest, so equal facts give equal bytes.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from pipeline.disclosure.answers import GIVEN, FactsFile
from pipeline.disclosure.card_sections import known_limits
from pipeline.disclosure.eu import language_name
from pipeline.disclosure.fact import DisclosedFacts
from pipeline.disclosure.publish import MetadataFile, stated
from pipeline.disclosure.table_facts import stage_rows
from schemas.consumption import CheckpointTraining
from schemas.errors import reading
from schemas.ids import digest_of

NAME = "spdx"
CONTEXT = "https://spdx.org/rdf/3.0.1/spdx-context.jsonld"
VERSION = "3.0.1"
PROFILES = ("core", "software", "ai", "dataset", "simpleLicensing")
CREATION = "_:creation"
NO_ASSERTION = "expandedlicensing_NoAssertionLicense"
"""The individual of the model for a licence about which nothing is stated."""
EXPRESSION = re.compile(r"\(*[A-Za-z0-9.+-]{1,100}\)*(?: (?:AND|OR|WITH) \(*[A-Za-z0-9.+-]{1,100}\)*){0,20}")
"""The form of a licence expression."""
ADDRESS = re.compile(r"https?://[!#-;=?-\[\]_a-z~]{1,2000}")
"""The form of an address that is a valid identifier."""
ASKED = ("model.names", "model.licence", "dataset.licence", "dataset.link", "provider.name", "document.updated")
"""Answers that it states."""

Element = dict[str, Any]


@dataclass(frozen=True)
class SpdxNames:
    """What all elements share."""

    namespace: str
    """Beginning of the identifiers."""
    created: str
    """Time, as SPDX writes it."""
    facts: DisclosedFacts
    answers: FactsFile

    def id(self, name: str) -> str:
        """Return the identifier of an element."""
        return f"{self.namespace}#{quote(name, safe='')}"

    def element(self, kind: str, key: str, /, **properties: Any) -> Element:
        """Return an element; properties that are empty are left out."""
        given = {name: value for name, value in properties.items() if value not in ("", (), [], None)}
        return {"type": kind, "spdxId": self.id(key), "creationInfo": CREATION, **given}

    def relationship(self, name: str, origin: str, kind: str, targets: list[str]) -> Element:
        """Return a relationship of an element to others, by their identifiers."""
        properties = {"from": self.id(origin), "to": targets, "relationshipType": kind}
        return self.element("Relationship", name, completeness="complete", **properties)


def spdx_document(facts: DisclosedFacts, answers: FactsFile) -> MetadataFile:
    """Return the bill of materials of a run."""
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in answers.values.items()}
    stated_digest = digest_of([facts.value("dataset"), facts.value("consumed"), facts.step, values])
    names = SpdxNames(f"urn:penstock:{stated_digest}", _created(facts, answers), facts, answers)
    parts = [_agent(names), _model(names), _dataset(names), *_sources(names), *_filters(names)]
    parts += [*_licences(names), *_relationships(names, parts)]
    identifiers = [part["spdxId"] for part in parts]
    bill = names.element(
        "software_Sbom", "bom", name="AI bill of materials", software_sbomType=["build"],
        rootElement=[names.id("model")], element=identifiers, profileConformance=list(PROFILES),
    )  # fmt: skip
    document = names.element(
        "SpdxDocument", "document", name="AI bill of materials", rootElement=[bill["spdxId"]],
        element=[*identifiers, bill["spdxId"]], profileConformance=list(PROFILES),
    )  # fmt: skip
    creation = {
        "type": "CreationInfo",
        "@id": CREATION,
        "specVersion": VERSION,
        "created": names.created,
        "createdBy": [names.id("provider")],
    }
    missing = tuple(key for key in ASKED if answers.of(key).state != GIVEN)
    content = {"@context": CONTEXT, "@graph": [creation, document, bill, *parts]}
    return MetadataFile(NAME, "bom.spdx.json", content, missing)


def _created(facts: DisclosedFacts, answers: FactsFile) -> str:
    """Return when the bill was made: the day of the facts file, or the time at which the dataset was made."""
    if day := stated(answers, "document.updated"):
        return f"{day}T00:00:00Z"
    with reading(facts.origins["tokens"].path, "a time in `run.started`"):
        return f"{datetime.fromisoformat(facts.value('dataset_built')).astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _agent(names: SpdxNames) -> Element:
    name = stated(names.answers, "provider.name")
    return names.element("Organization", "provider", name=name or "not given")


def _model(names: SpdxNames) -> Element:
    facts, answers = names.facts, names.answers
    training: CheckpointTraining | None = facts.get("training")
    placed = stated(answers, "model.placed_on_market")
    checkpoint = facts.origins.get("checkpoint")
    return names.element(
        "ai_AIPackage",
        "model",
        name=stated(answers, "model.names") or "unnamed model",
        suppliedBy=names.id("provider"),
        releaseTime=f"{placed}T00:00:00Z" if placed else names.created,
        software_packageVersion=f"step {facts.step}" if facts.step is not None else "not trained",
        software_downloadLocation=_address(answers, "model.links") or f"urn:sha256:{_digest(facts)}",
        software_primaryPurpose="model",
        # The digest is that of the checkpoint's metadata file, which lists the digests of its weights.
        verifiedUsing=[_sha256(checkpoint.digest)] if checkpoint else [],
        ai_typeOfModel=["transformer language model"],
        ai_informationAboutTraining=(
            f"{facts.step:,} optimizer steps, which have read {facts.value('consumed'):,} tokens."
            if facts.step is not None
            else "not trained"
        ),
        ai_informationAboutApplication=stated(answers, "model.uses"),
        ai_hyperparameter=_hyperparameters(training),
        ai_metric=_metrics(training),
        ai_limitation=stated(answers, "model.limits"),
        ai_modelDataPreprocessing=_preprocessing(facts),
        ai_useSensitivePersonalInformation="noAssertion",
    )


def _digest(facts: DisclosedFacts) -> str:
    checkpoint = facts.origins.get("checkpoint")
    return checkpoint.digest if checkpoint else str(facts.value("dataset"))


def _address(answers: FactsFile, key: str) -> str:
    """Return the first address of an answer that is a valid identifier; empty if there is none."""
    answer = answers.of(key)
    given = (answer.value,) if isinstance(answer.value, str) else answer.value
    return next((text for text in given if ADDRESS.fullmatch(text)), "") if answer.state == GIVEN else ""


def _hyperparameters(training: CheckpointTraining | None) -> list[Element]:
    if training is None:
        return []
    values = {"num_params": training.num_params, **training.shape, **training.settings}
    return [_entry(name, json.dumps(value)) for name, value in sorted(values.items())]


def _metrics(training: CheckpointTraining | None) -> list[Element]:
    if training is None or not training.heldout or not math.isfinite(training.heldout[-1][1]):
        return []
    step, loss = training.heldout[-1]
    return [_entry(f"held-out cross-entropy per token at step {step}", f"{loss:.6f}")]


def _entry(key: str, value: str) -> Element:
    return {"type": "DictionaryEntry", "key": key, "value": value}


def _sha256(digest: str) -> Element:
    return {"type": "Hash", "algorithm": "sha256", "hashValue": digest}


def _preprocessing(facts: DisclosedFacts) -> list[str]:
    return [f"{stage} of {tables}: {dropped} documents dropped" for stage, tables, _, dropped, _ in stage_rows(facts)]


def _dataset(names: SpdxNames) -> Element:
    facts, answers = names.facts, names.answers
    replaced: Mapping[str, int] = facts.get("personal_data", {})
    found = facts.get("bias", {"findings": []})["findings"]
    return names.element(
        "dataset_DatasetPackage",
        "dataset",
        name=stated(answers, "dataset.name") or "token dataset",
        originatedBy=[names.id("provider")],
        builtTime=names.created,
        releaseTime=names.created,
        software_packageVersion=facts.value("dataset")[:12],
        software_downloadLocation=_address(answers, "dataset.link") or f"urn:sha256:{facts.value('dataset')}",
        software_primaryPurpose="data",
        verifiedUsing=[_sha256(facts.value("dataset"))],
        dataset_datasetType=["text"],
        dataset_datasetSize=facts.value("dataset_bytes"),
        dataset_dataCollectionProcess="; ".join(_collection(facts, answers)),
        dataset_dataPreprocessing=_preprocessing(facts),
        dataset_anonymizationMethodUsed=[
            f"{number:,} values of the type {kind} replaced" for kind, number in sorted(replaced.items())
        ],
        dataset_datasetNoise=" ".join(known_limits(facts)),
        dataset_knownBias=[
            f"{one['filter']} drops {one['rate']:.1%} of {one['documents']:,} documents of the group {one['group']}, "
            f"and {one['expected']:.1%} of comparable others"
            for one in found
        ],
        dataset_intendedUse="pretraining of language models",
        dataset_hasSensitivePersonalInformation="noAssertion",
    )


def _collection(facts: DisclosedFacts, answers: FactsFile) -> Iterator[str]:
    months = facts.value("months")
    for source in facts.value("sources"):
        period = " to ".join(months[source]) if source in months else "not known"
        yield f"{source}: {answers.kind_of(source) or 'kind not given'}, months of capture {period}"


def _sources(names: SpdxNames) -> Iterator[Element]:
    facts, answers = names.facts, names.answers
    documents = facts.value("documents_read")
    for source, tokens in facts.value("sources").items():
        title, version, link = (answers.of_source(source, key) for key in ("title", "version", "link"))
        languages = ", ".join(language_name(code) for code, _ in facts.value("languages_of")[source])
        place = str(link.value) if link.state == GIVEN and ADDRESS.fullmatch(str(link.value)) else ""
        yield names.element(
            "software_Package",
            f"source-{source}",
            name=str(title.value) if title.state == GIVEN else source,
            summary=f"{tokens:,} tokens of {documents.get(source, 0):,} documents were read. Languages: {languages}.",
            software_packageVersion=str(version.value) if version.state == GIVEN else "",
            software_downloadLocation=place,
            software_primaryPurpose="data",
        )


def _filters(names: SpdxNames) -> Iterator[Element]:
    """Yield the models that stages used, each once."""
    found = {name: sha256 for stage in names.facts.value("stages") for name, sha256 in stage["models"].items()}
    for name, sha256 in sorted(found.items()):
        yield names.element(
            "software_Package",
            f"filter-{name}",
            name=name,
            software_primaryPurpose="model",
            verifiedUsing=[_sha256(sha256)],
        )


def _licences(names: SpdxNames) -> Iterator[Element]:
    """Yield the licences that the provider states, and two relationships for each package that needs them."""
    for package in ("model", "dataset"):
        licence = stated(names.answers, f"{package}.licence")
        declared = names.id(f"licence-{package}") if licence else NO_ASSERTION
        if licence and EXPRESSION.fullmatch(licence):
            kind, properties = "LicenseExpression", {"simplelicensing_licenseExpression": licence}
        else:
            kind, properties = "SimpleLicensingText", {"simplelicensing_licenseText": licence}
        if licence:
            yield names.element(f"simplelicensing_{kind}", f"licence-{package}", **properties)
        yield names.relationship(f"declared-{package}", package, "hasDeclaredLicense", [declared])
        yield names.relationship(f"concluded-{package}", package, "hasConcludedLicense", [NO_ASSERTION])


def _relationships(names: SpdxNames, parts: list[Element]) -> Iterator[Element]:
    yield names.relationship("trained-on", "model", "trainedOn", [names.id("dataset")])
    begins = {"contains": names.id("source-"), "dependsOn": names.id("filter-")}
    for kind, begin in begins.items():
        if targets := [part["spdxId"] for part in parts if part["spdxId"].startswith(begin)]:
            yield names.relationship(f"dataset-{kind}", "dataset", kind, targets)
