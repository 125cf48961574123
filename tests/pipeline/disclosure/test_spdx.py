"""The bill of materials as SPDX 3.0.1: required properties by name, the model's own parser, and hostile answers."""

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from pipeline.disclosure.answers import FactsFile
from pipeline.disclosure.fact import Fact
from pipeline.disclosure.spdx import NO_ASSERTION, spdx_document
from schemas.errors import ContractError
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.pipeline.disclosure.test_cards import HOSTILE, NOTHING, complete, facts_of, run  # noqa: F401

COMMON = {"spdxId", "creationInfo", "name"}
REQUIRED = {
    "ai_AIPackage": COMMON
    | {"releaseTime", "suppliedBy", "software_downloadLocation", "software_packageVersion", "software_primaryPurpose"},
    "dataset_DatasetPackage": COMMON
    | {"builtTime", "originatedBy", "releaseTime", "software_downloadLocation", "software_primaryPurpose"}
    | {"dataset_datasetType"},
    "SpdxDocument": COMMON | {"rootElement", "element", "profileConformance"},
    "software_Sbom": COMMON | {"rootElement", "element", "profileConformance"},
    "Relationship": {"from", "to", "relationshipType"},
}
"""Properties with a minimum of one, by class: of the profiles AI and Dataset, their cardinality updates too."""


def graph_of(run: Store, answers: FactsFile) -> list[dict[str, Any]]:  # noqa: F811
    values = json.loads(spdx_document(facts_of(run, answers), answers).to_bytes())
    assert values["@context"] == "https://spdx.org/rdf/3.0.1/spdx-context.jsonld"
    graph: list[dict[str, Any]] = values["@graph"]
    return graph


def of_type(graph: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [element for element in graph if element["type"] == kind]


def hostile_answers(answers: FactsFile) -> FactsFile:
    values = {key: (HOSTILE,) if isinstance(value, tuple) else HOSTILE for key, value in answers.values.items()}
    kept = {
        key: value for key, value in answers.values.items() if key.endswith((".kind", "updated", "placed_on_market"))
    }
    return FactsFile("f", values | kept, answers.sources)


def test_the_required_properties_are_there(run: Store, complete: FactsFile) -> None:  # noqa: F811
    for answers in (complete, NOTHING, hostile_answers(complete)):
        graph = graph_of(run, answers)
        (creation,) = of_type(graph, "CreationInfo")
        assert {"@id", "specVersion", "created", "createdBy"} <= creation.keys()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", creation["created"])
        identifiers = [element["spdxId"] for element in graph if element is not creation]
        assert len({*identifiers}) == len(identifiers)
        assert all(re.fullmatch(r"urn:penstock:[0-9a-f]{64}#[\w.~%-]+", name) for name in identifiers)
        for kind, names in REQUIRED.items():
            assert of_type(graph, kind)
            for element in of_type(graph, kind):
                assert names <= element.keys(), element
                assert all(element[name] not in ("", []) for name in names)
        for relationship in of_type(graph, "Relationship"):
            assert {relationship["from"], *relationship["to"]} <= {*identifiers, NO_ASSERTION}


def test_each_package_has_one_declared_and_one_concluded_licence(run: Store, complete: FactsFile) -> None:  # noqa: F811
    for answers in (complete, NOTHING, hostile_answers(complete)):
        graph = graph_of(run, answers)
        for package in (*of_type(graph, "ai_AIPackage"), *of_type(graph, "dataset_DatasetPackage")):
            own = [part for part in of_type(graph, "Relationship") if part["from"] == package["spdxId"]]
            for kind in ("hasDeclaredLicense", "hasConcludedLicense"):
                assert [len(part["to"]) for part in own if part["relationshipType"] == kind] == [1]
    texts = {part["simplelicensing_licenseExpression"] for part in of_type(
        graph_of(run, complete), "simplelicensing_LicenseExpression")}  # fmt: skip
    assert texts == {"apache-2.0", "CC-BY-4.0"}
    assert len(of_type(graph_of(run, hostile_answers(complete)), "simplelicensing_SimpleLicensingText")) == 2


def test_the_bill_by_hand(run: Store, complete: FactsFile) -> None:  # noqa: F811
    graph = graph_of(run, complete)
    (model,), (dataset,) = of_type(graph, "ai_AIPackage"), of_type(graph, "dataset_DatasetPackage")
    assert (model["name"], model["software_packageVersion"]) == ("Example 1.0", "step 7")
    assert model["verifiedUsing"] == [{"type": "Hash", "algorithm": "sha256", "hashValue": "1" * 64}]
    assert model["releaseTime"] == "2026-11-25T00:00:00Z"
    assert model["software_downloadLocation"] == "https://example.org/model"
    assert {"type": "DictionaryEntry", "key": "num_layers", "value": "2"} in model["ai_hyperparameter"]
    assert [(entry["key"], entry["value"]) for entry in model["ai_metric"]] == [
        ("held-out cross-entropy per token at step 7", "2.000000")
    ]
    assert dataset["verifiedUsing"][0]["hashValue"] == open_dataset(run).digest
    assert dataset["dataset_datasetSize"] == sum(entry.bytes for entry in open_dataset(run).manifest.content.files)
    assert "6 values of the type email replaced" in dataset["dataset_anonymizationMethodUsed"]
    (books,) = (part for part in of_type(graph, "software_Package") if part["name"] == "Books")
    assert (books["software_packageVersion"], books["software_downloadLocation"]) == ("3", "https://example.org/books")
    trained = [part for part in of_type(graph, "Relationship") if part["relationshipType"] == "trainedOn"]
    assert [(part["from"], part["to"]) for part in trained] == [(model["spdxId"], [dataset["spdxId"]])]


def test_equal_facts_give_equal_bytes(run: Store, complete: FactsFile) -> None:  # noqa: F811
    for answers in (complete, NOTHING):
        first, second = (spdx_document(facts_of(run, answers), answers).to_bytes() for _ in range(2))
        assert first == second


def test_a_manifest_without_a_time_is_refused(run: Store) -> None:  # noqa: F811
    facts = facts_of(run, NOTHING)
    broken = replace(facts, facts={**facts.facts, "dataset_built": Fact("yesterday", ())})
    with pytest.raises(ContractError, match=r"tokens/v-.*manifest.json: expected a time in `run.started`"):
        spdx_document(broken, NOTHING)


def test_the_parser_of_the_model_accepts_it(run: Store, complete: FactsFile) -> None:  # noqa: F811
    """The bindings are generated from the published SHACL model: they check classes, types and cardinalities."""
    package = pytest.importorskip("spdx_python_model", reason="spdx-python-model is not installed")
    model = package.v3_0_1
    for answers in (complete, NOTHING, hostile_answers(complete)):
        objects, data = model.SHACLObjectSet(), spdx_document(facts_of(run, answers), answers).to_bytes()
        model.JSONLDDeserializer().read(io.BytesIO(data), objects)
        assert objects.missing_ids == set()
        written = io.BytesIO()
        model.JSONLDSerializer().write(objects, written)
        assert len(json.loads(written.getvalue())["@graph"]) == len(json.loads(data)["@graph"])
        with pytest.raises(Exception, match="nonsense"):
            model.JSONLDDeserializer().read(io.BytesIO(data.replace(b"ai_metric", b"nonsense")), model.SHACLObjectSet())
