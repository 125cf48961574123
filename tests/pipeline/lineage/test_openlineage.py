"""OpenLineage events: conformance with specification 2-0-2, and agreement with the lineage.

The rules repeat the published JSON Schema: required members, types, enumerations and formats.
"""

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from jobs.verbs.lineage import encode_events, lineage_command
from pipeline.lineage.openlineage import openlineage_events
from pipeline.lineage.training import read_lineage
from schemas.ids import digest_of
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.tables import CLEAN
from tests.pipeline.lineage.test_graph import arguments, takedown
from tests.support.lineage_run import REWIND, SKIPPED, lineage_run

Json = dict[str, Any]
FACETS: Mapping[str, Mapping[str, type]] = {
    "schema": {"fields": list},
    "dataSource": {"name": str, "uri": str},
    "version": {"datasetVersion": str},
    "documentation": {"description": str},
    "storage": {"storageLayer": str, "fileFormat": str},
    "outputStatistics": {"rowCount": int, "size": int, "fileCount": int},
    "processing_engine": {"version": str, "name": str},
    "jobType": {"processingType": str, "integration": str, "jobType": str},
}
"""Members of each facet of the specification, with their types; the tests require all of them."""
EVENT_TYPES = {"START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER"}
SCHEMA_URL = re.compile(r"https://openlineage\.io/spec/(?:facets/)?\d+-\d+-\d+/\w+\.json#/\$defs/\w+")


def is_uri(value: Any) -> bool:
    """Return True if a value is a URI, which has a scheme."""
    return isinstance(value, str) and bool(urlsplit(value).scheme) and " " not in value


def facet_breaches(name: str, facet: Json) -> Iterator[str]:
    """Yield the violations in a facet."""
    if not is_uri(facet.get("_producer")):
        yield f"{name}: _producer is no URI"
    if not SCHEMA_URL.fullmatch(facet.get("_schemaURL", "")):
        yield f"{name}: _schemaURL"
    if name not in FACETS and not name.startswith("penstock_"):
        yield f"{name}: neither of the specification nor with a prefix of our own"
    for member, kind in FACETS.get(name, {}).items():
        if type(facet.get(member)) is not kind:
            yield f"{name}: {member} is {facet.get(member)!r}"
    for field in facet.get("fields", []):
        if not {"name"} <= field.keys() <= {"name", "type", "description"} or not all(
            isinstance(value, str) for value in field.values()
        ):
            yield f"{name}: field {field}"


def breaches(event: Json) -> list[str]:
    """Return all violations of the specification in an event."""
    problems = [
        f"{name} is missing" for name in ("eventTime", "producer", "schemaURL", "run", "job") if name not in event
    ]
    if problems:
        return problems
    if event["eventType"] not in EVENT_TYPES:
        problems.append(f"eventType {event['eventType']}")
    if datetime.fromisoformat(event["eventTime"]).tzinfo is None:
        problems.append(f"eventTime {event['eventTime']} has no offset")
    problems += [f"{name} is no URI" for name in ("producer", "schemaURL") if not is_uri(event[name])]
    if event["schemaURL"] != "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent":
        problems.append(f"schemaURL {event['schemaURL']}")
    if str(uuid.UUID(event["run"]["runId"])) != event["run"]["runId"]:
        problems.append("runId is no UUID")
    holders = [(event["run"], "facets"), (event["job"], "facets")]
    for side, own in (("inputs", "inputFacets"), ("outputs", "outputFacets")):
        for dataset in event.get(side, []):
            if not dataset.keys() <= {"namespace", "name", "facets", own}:
                problems.append(f"{side}: {sorted(dataset)}")
            holders += [(dataset, "facets"), (dataset, own)]
    for holder, _ in holders[1:]:
        problems += [
            f"{name} {holder.get(name)!r}" for name in ("namespace", "name") if not isinstance(holder.get(name), str)
        ]
    for holder, name in holders:
        for facet, value in holder.get(name, {}).items():
            problems += facet_breaches(facet, value)
    return problems


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """A run whose lineage is known."""
    return lineage_run(tmp_path / "run")


def made(run: Store) -> list[Json]:
    """Return the events of a run as they are read back."""
    written: list[Json] = json.loads(encode_events(openlineage_events(read_lineage(run), run), "events.json"))
    return written


def of(written: list[Json], job: str, kind: str = "COMPLETE") -> Json:
    """Return the only event of a kind of a job."""
    (event,) = [event for event in written if (event["job"]["name"], event["eventType"]) == (f"penstock.{job}", kind)]
    return event


def names(datasets: list[Json]) -> list[str]:
    """Return the last two folders of the datasets' names."""
    return ["/".join(dataset["name"].split("/")[-2:]) for dataset in datasets]


def test_every_event_conforms_to_the_specification(run: Store) -> None:
    written = made(run)
    assert [breach for event in written for breach in breaches(event)] == []
    by_run: dict[str, list[str]] = {}
    for event in written:
        by_run.setdefault(event["run"]["runId"], []).append(event["eventType"])
    assert sorted(map(tuple, by_run.values())) == [("START", "COMPLETE")] * 9 + [("START", "OTHER", "COMPLETE")]
    assert made(run) == written


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (lambda event: event.pop("job"), "job is missing"),
        (lambda event: event.update(eventType="DONE"), "eventType DONE"),
        (lambda event: event.update(eventTime="2026-01-01T00:00:00"), "has no offset"),
        (lambda event: event.update(producer="penstock"), "producer is no URI"),
        (lambda event: event["job"].update(namespace=None), "namespace None"),
        (lambda event: event["job"]["facets"]["jobType"].pop("integration"), "integration is None"),
        (lambda event: event["outputs"][0]["facets"]["schema"]["fields"].append({"type": "x"}), "field {'type': 'x'}"),
        (lambda event: event["outputs"][0]["facets"]["version"].pop("_producer"), "_producer is no URI"),
        (lambda event: event["outputs"][0].update(inputFacets={}), "outputs: "),
        (lambda event: event["outputs"][0]["outputFacets"]["outputStatistics"].update(rowCount="9"), "rowCount is '9'"),
        (lambda event: event["run"]["facets"].update(counts={}), "counts: neither of the specification"),
    ],
)
def test_the_rules_themselves(run: Store, harm: Any, expected: str) -> None:
    event = of(made(run), "clean")
    assert breaches(event) == []
    harm(event)
    assert expected in "\n".join(breaches(event))


def test_a_step_names_what_it_read_and_wrote(run: Store) -> None:
    written = made(run)
    assert names(of(written, "documents")["outputs"]) == ["documents/v-0000000071a9", "text/v-0000000071a9"]
    assert names(of(written, "dedup")["inputs"]) == [
        "documents/v-0000000071a9",
        "verdicts/v-0000000071a9",
        "clusters/v-0000000071a9",
    ]
    assert names(of(written, "tokens")["inputs"]) == ["clean/v-0000000071a9", "tokenizer/v-0000000071a9"]
    assert names(of(written, "plan")["inputs"]) == ["tokens/v-0000000071a9"]
    train = of(written, "train")
    skips = f"train/skips.txt@{digest_of(SKIPPED)[:12]}"
    assert names(train["inputs"]) == ["train/plan.json", skips, "tokens/v-0000000071a9"]
    assert names(train["outputs"])[-2:] == ["checkpoints/step-000012", "train/manifest.json"]
    rewind = of(written, "train", "OTHER")
    assert rewind["eventTime"] == REWIND["at"]
    assert rewind["run"]["facets"]["penstock_rewind"]["samples skipped"] == 2


def test_facets_hold_the_values_of_the_manifests(run: Store) -> None:
    clean, manifest = of(made(run), "clean"), open_table(run, "clean")[1]
    (output,) = clean["outputs"]
    assert output["facets"]["version"]["datasetVersion"] == manifest.digest
    assert [field["name"] for field in output["facets"]["schema"]["fields"]] == CLEAN.names
    described = {field["name"]: field for field in output["facets"]["schema"]["fields"]}
    assert described["num_bytes"] == {
        "name": "num_bytes",
        "type": "int64",
        "description": "length of this text [bytes of UTF-8]",
    }
    statistics = output["outputFacets"]["outputStatistics"]
    assert (statistics["rowCount"], statistics["fileCount"]) == (20, 2)
    assert statistics["size"] == sum(entry.bytes for entry in manifest.content.files)
    assert clean["eventTime"] == "2026-01-01T00:00:08+00:00"  # start, plus a duration of 8 s
    assert output["namespace"] == "file"
    assert output["facets"]["dataSource"]["uri"] == f"file://{run.root}/clean/v-0000000071a9"
    counts = of(made(run), "dedup")["run"]["facets"]["penstock_counts"]
    assert (counts["rowsIn"], counts["rowsKept"], counts["dropped"]["dedup/exact_duplicate"]) == (37, 20, 4)
    (crawl,) = of(made(run), "documents")["inputs"]
    assert [entry["name"] for entry in crawl["facets"]["penstock_files"]["files"]] == [
        "crawl-0.warc.gz",
        "crawl-1.warc.gz",
    ]
    tokens = of(made(run), "tokens")["outputs"][0]
    assert tokens["facets"]["schema"]["fields"][1]["type"].startswith("list<item: uint16")
    assert tokens["outputFacets"]["outputStatistics"]["rowCount"] == 20


def test_a_takedown_is_a_job_from_one_dataset_to_the_next(run: Store) -> None:
    takedown(run)
    written = made(run)
    assert [breach for event in written for breach in breaches(event)] == []
    event = of(written, "takedown")
    assert "abc123abc123/tokens.json" in names(event["inputs"])
    assert names(event["outputs"]) == ["tokens/v-000000000ae8"]


def test_a_run_under_way_is_not_complete(run: Store) -> None:
    run.delete("train/manifest.json")
    assert of(made(run), "train", "RUNNING")["outputs"]


def test_the_file_is_an_array_or_a_line_for_each_event(run: Store, tmp_path: Path) -> None:
    for name in ("events.json", "events.ndjson"):
        assert lineage_command(arguments(run.uri, openlineage=str(tmp_path / name))) == 0
    whole = json.loads((tmp_path / "events.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "events.ndjson").read_text().splitlines()]
    assert whole == lines == made(run)
