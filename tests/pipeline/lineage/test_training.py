"""The lineage of runs with quarantined documents: extensions of the list, skipped samples, and missing documents."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.lineage.openlineage import openlineage_events
from pipeline.lineage.training import QUARANTINE_NAME, quarantine_extensions, read_lineage
from schemas.errors import ContractError
from schemas.ids import digest_of
from schemas.storage import Store
from tests.support.lineage_run import REWIND, SKIPPED, lineage_run

BAD, WORSE, OLD = "aa" * 16, "bb" * 16, "cc" * 16
REASON = "spike in step 8, with 1 more samples of 2 quarantined documents"


def line(doc_id: str, step: int, rewind: int = 1) -> dict[str, Any]:
    return {"doc_id": doc_id, "step": step, "rewind": rewind, "at": "2026-01-02T03:04:05.000+00:00"}


def listed(run: Store, *lines: dict[str, Any], rest: bytes = b"") -> bytes:
    """Write the quarantine list of a run; returns its bytes."""
    text = b"".join(json.dumps(row).encode() + b"\n" for row in lines) + rest
    run.write_atomic(QUARANTINE_NAME, text)
    return text


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """A run that was rewound from step 8 to 6 without two samples, and without two documents."""
    run = lineage_run(tmp_path / "run")
    event = REWIND | {"quarantined": [BAD, WORSE]}
    run.write_atomic("train/events.jsonl", json.dumps(event).encode() + b"\n")
    run.write_atomic("train/skips.txt", b"".join(b"%d  # %s\n" % (index, REASON.encode()) for index in SKIPPED))
    return run


def test_the_list_is_between_the_rewind_and_the_skip_list(run: Store) -> None:
    text = listed(run, line(BAD, 8), line(WORSE, 8), rest=b'{"doc_id": "dd')
    lineage = read_lineage(run)
    assert lineage.breaks == ()
    (node,) = [node for node in lineage.nodes if node.kind == "quarantine"]
    whole = text[: text.rindex(b"\n") + 1]
    assert node.digest == hashlib.sha256(whole).hexdigest()
    assert (node.key, node.title) == (f"{QUARANTINE_NAME}@{node.digest[:12]}", "quarantine")
    assert (dict(node.counts), node.notes) == ({"documents": 2}, ("blamed for the spike in step 8",))
    (rewind,) = lineage.sources(node.key)
    assert lineage.node(rewind).title == "rewound from step 8 to 6"
    assert dict(lineage.node(rewind).counts) == {"samples skipped": 2, "documents quarantined": 2}
    skips = f"train/skips.txt@{digest_of(SKIPPED)[:12]}"
    assert lineage.sources(skips) == [node.key]
    assert skips in lineage.sources("train/checkpoints/step-000008")


def test_each_spike_adds_to_the_list(run: Store) -> None:
    listed(run, line(OLD, 3, 1), line(BAD, 8, 2), line(WORSE, 8, 2), line(OLD, 8, 3))
    first, second, third = quarantine_extensions(run)
    assert [(growth.step, growth.doc_ids, growth.total) for growth in (first, second, third)] == [
        (3, (OLD,), 1),
        (8, (BAD, WORSE), 3),
        (8, (OLD,), 3),
    ]
    lineage = read_lineage(run)
    nodes = {node.key: node for node in lineage.nodes if node.kind == "quarantine"}
    assert dict(nodes[second.key].counts) == {"documents": 3, "new": 2}
    # The others have no rewind: a killed process, or another run, wrote them.
    assert lineage.sources(first.key) == lineage.sources(third.key) == ["train/plan.json"]
    assert set(lineage.sources(f"train/skips.txt@{digest_of(SKIPPED)[:12]}")) == {second.key, third.key}


def test_samples_are_skipped_for_a_list_of_another_run(run: Store) -> None:
    listed(run, line(OLD, 300))
    run.write_atomic("train/events.jsonl", b"")
    run.write_atomic("train/skips.txt", b"".join(b"%d  # quarantined documents\n" % index for index in SKIPPED))
    lineage = read_lineage(run)
    (only,) = quarantine_extensions(run)
    assert lineage.sources(only.key) == ["train/plan.json"]
    assert lineage.sources(f"train/skips.txt@{digest_of(SKIPPED)[:12]}") == [only.key]


@pytest.mark.parametrize("lines", [[], [line(BAD, 8)]])
def test_a_list_that_lacks_documents_of_a_rewind_is_a_break(run: Store, lines: list[dict[str, Any]]) -> None:
    listed(run, *lines)
    (entry,) = read_lineage(run).breaks
    assert entry.key.startswith("rewind/")
    assert entry.message.endswith(
        f"expected 2 quarantined document(s) of step 8 in {QUARANTINE_NAME}, got {len(lines)}. Restore the file."
    )


def test_a_run_without_a_list_has_none_in_its_lineage(tmp_path: Path) -> None:
    lineage = read_lineage(lineage_run(tmp_path / "run"))
    assert [node for node in lineage.nodes if node.kind == "quarantine"] == []
    (rewind,) = [node for node in lineage.nodes if node.kind == "rewind"]
    assert dict(rewind.counts) == {"samples skipped": 2}


def test_a_plan_without_a_skip_list_uses_that_of_its_rewinds(tmp_path: Path) -> None:
    run = lineage_run(tmp_path / "run")
    plan = run.read_json("train/plan.json") | {"settings": {"guard": {"spike_sigmas": 6.0, "on_spike": "rewind"}}}
    run.write_atomic("train/plan.json", json.dumps(plan).encode())
    lineage = read_lineage(run)
    assert lineage.breaks == ()
    assert f"train/skips.txt@{digest_of(SKIPPED)[:12]}" in {node.key for node in lineage.nodes}


def test_events_contain_the_quarantined_documents(run: Store) -> None:
    listed(run, line(BAD, 8), line(WORSE, 8))
    written = openlineage_events(read_lineage(run), run)
    (rewound,) = [event for event in written if event["eventType"] == "OTHER"]
    assert rewound["run"]["facets"]["penstock_rewind"]["documents quarantined"] == 2
    trained = next(event for event in written if event["job"]["name"] == "penstock.train")
    assert [dataset for dataset in trained["inputs"] if "quarantine.jsonl@" in dataset["name"]]


def test_a_checkpoint_is_in_the_folder_of_its_step(run: Store) -> None:
    """A copy under another name is no checkpoint, as for the trainer; metadata of another step is an error."""
    nodes = read_lineage(run).nodes
    folder = Path(run.path("train/checkpoints"))
    shutil.copytree(folder / "step-000008", folder / "step-000008.bak")
    shutil.copytree(folder / "step-000008", folder / "older/step-000008")
    assert read_lineage(run).nodes == nodes
    shutil.copy(folder / "step-000006/checkpoint.json", folder / "step-000008")
    with pytest.raises(ContractError, match=r"step-000008/checkpoint.json: .* got that of step 6\. Remove this checkp"):
        read_lineage(run)
    (folder / "step-000008").rename(folder / "step-000099")
    with pytest.raises(ContractError, match=r"step-000099/checkpoint.json: expected the metadata of the step in the "):
        read_lineage(run)
