"""Croissant metadata and the bill of materials: values by hand, the tools that read them, and hostile answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.disclosure.answers import FactsFile, read_answers
from pipeline.disclosure.bom import bill_of_materials
from pipeline.disclosure.croissant import croissant
from pipeline.disclosure.fact import DisclosedFacts
from pipeline.disclosure.facts import collect
from pipeline.disclosure.publish import write_metadata
from schemas.consumption import Consumption
from schemas.errors import ContractError
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.pipeline.disclosure.facts_file import COMPLETE
from tests.pipeline.disclosure.test_facts import consumed_of
from tests.support.report_run import make_run
from tests.support.tiny_dataset import make_tiny_dataset

NOTHING = FactsFile("", {}, ("books", "web"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_run(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture
def complete(tmp_path: Path) -> FactsFile:
    (tmp_path / "facts.toml").write_text(COMPLETE)
    return read_answers(str(tmp_path / "facts.toml"), ("books", "web"))


def facts_of(run: Store, answers: FactsFile, consumed: Consumption | None = None) -> DisclosedFacts:
    return collect(run, open_dataset(run), consumed or consumed_of(run), answers, False)


def test_croissant_names_every_file_with_its_digest(run: Store, complete: FactsFile) -> None:
    file = croissant(facts_of(run, complete), complete)
    folder, manifest = open_table(run, "clean")
    files = [part for part in file.values["distribution"] if part["@type"] == "cr:FileObject"]
    assert [part["sha256"] for part in files] == [entry.sha256 for entry in manifest.content.files]
    for part in files:
        assert run.sha256(part["contentUrl"]) == part["sha256"]
    assert file.values["name"] == "Example text"
    assert file.values["license"] == "CC-BY-4.0"
    assert file.values["creator"]["name"] == "Example Models Ltd"
    assert file.values["datePublished"] == "2026-11-20"
    assert file.values["version"] == f"1.0.0+{manifest.digest[:12]}"
    assert file.missing == ()
    (files_of_table,) = (part for part in file.values["distribution"] if part["@type"] == "cr:FileSet")
    assert files_of_table["includes"] == f"clean/{folder.uri.rpartition('/')[2]}/*.parquet"


def test_croissant_without_answers_names_them_and_states_no_one(run: Store) -> None:
    file = croissant(facts_of(run, NOTHING), NOTHING)
    missing = ("dataset.name", "dataset.licence", "dataset.link", "provider.name", "document.updated")
    assert file.missing == missing
    assert "creator" not in file.values
    assert file.values["license"] == "unknown"


def test_croissant_needs_the_clean_text(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path / "run")
    with pytest.raises(ContractError, match=r"expected a run with the table `clean`, got one without"):
        croissant(facts_of(run, NOTHING), NOTHING)


def test_mlcroissant_accepts_it_and_reads_the_records(run: Store, complete: FactsFile) -> None:
    mlcroissant = pytest.importorskip("mlcroissant", reason="mlcroissant is not installed")
    path = write_metadata(run, None, croissant(facts_of(run, complete), complete))
    assert path == f"{run.uri}/croissant.json"
    dataset = mlcroissant.Dataset(path)
    assert not dataset.metadata.issues.errors
    assert not dataset.metadata.issues.warnings
    texts = [record["documents/num_chars"] for record in dataset.records("documents")]
    assert len(texts) == open_table(run, "clean")[1].content.counts.rows_kept


def test_bill_by_hand(run: Store, complete: FactsFile) -> None:
    bill = bill_of_materials(facts_of(run, complete), complete).values
    model, (dataset, books, web, *models) = bill["metadata"]["component"], bill["components"]
    assert (model["name"], model["version"]) == ("Example 1.0", "step 7")
    assert model["hashes"] == [{"alg": "SHA-256", "content": "1" * 64}]
    assert dataset["hashes"] == [{"alg": "SHA-256", "content": open_dataset(run).digest}]
    assert (books["name"], books["version"], books["data"][0]["classification"]) == ("Books", "3", "public")
    assert (web["name"], web["data"][0]["classification"]) == ("web", "crawled")
    assert {"name": "penstock:tokens read", "value": "1050"} in web["properties"]
    assert [part["ref"] for part in model["modelCard"]["modelParameters"]["datasets"]] == [
        "dataset",
        "source:books",
        "source:web",
    ]
    references = [part["bom-ref"] for part in (model, *bill["components"])]
    assert len({*references}) == len(references)
    assert all(part["type"] == "machine-learning-model" for part in models)


def test_equal_facts_give_equal_bills_and_others_another_serial_number(run: Store, complete: FactsFile) -> None:
    first = bill_of_materials(facts_of(run, complete), complete)
    assert first.to_bytes() == bill_of_materials(facts_of(run, complete), complete).to_bytes()
    consumed = consumed_of(run)
    consumed.languages["web", "en"] += 1
    other = bill_of_materials(facts_of(run, complete, consumed), complete)
    assert other.values["serialNumber"] != first.values["serialNumber"]


def test_the_schema_of_cyclonedx_accepts_it(run: Store, complete: FactsFile) -> None:
    pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed")
    pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    for answers in (complete, NOTHING):
        data = bill_of_materials(facts_of(run, answers), answers).to_bytes().decode()
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(data) is None


@pytest.mark.parametrize("make", [croissant, bill_of_materials])
def test_hostile_answers_stay_text(run: Store, make: Any) -> None:
    hostile = '"\x1b[2J\u202e</script>\n{}'
    keys = ("dataset.name", "dataset.licence", "provider.name", "sources.books.title")
    answers = FactsFile("f", dict.fromkeys(keys, hostile) | {"model.names": (hostile,)}, ("books", "web"))
    data = make(facts_of(run, answers), answers).to_bytes().decode()
    assert "\x1b" not in data
    assert "\u202e" not in data
    assert json.loads(data)
