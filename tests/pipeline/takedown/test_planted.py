"""Results of `plant-test` beside a certificate: read, computed again, and refused if they are others."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.takedown.check_result import CheckResult
from pipeline.takedown.planted import check_planted
from schemas.ranks import rank_test
from schemas.storage import Store
from schemas.takedown import Certificate, planted_name
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import certificates, documents_of, opened, take_down


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from which eight documents were taken down."""
    folder = tmp_path_factory.mktemp("planted") / "run"
    make_tiny_dataset(folder)
    assert take_down(folder, doc=[row["doc_id"].hex() for row in documents_of(opened(folder))[:24:3]]) == 0
    return folder


def result_of(certificate: Certificate) -> dict[str, Any]:
    ranks = [50.0, 20.0, 99.0, 47.0, 2.0, 81.0, 60.0, 35.0]
    removed = [
        {"document": own.document, "group": "removed", "rank": rank, "takedown": certificate.id}
        for own, rank in zip(certificate.documents, ranks, strict=True)
    ]
    others = [{"document": f"{n:064x}", "group": "trained", "rank": 99.0, "takedown": None} for n in range(9)]
    return {
        "checkpoint": {"step": 20, "sha256": ""},
        "commitment": "",
        "controls": 99,
        "takedowns": {certificate.id: certificate.seal},
        "documents": [*removed, *others],
        "groups": {"removed": rank_test(ranks, 99), "trained": rank_test([99.0] * 9, 99)},
    }


def checked(run: Path, certificate: Certificate, content: str) -> CheckResult:
    path = run / planted_name(certificate.id, 20)
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    found = CheckResult()
    check_planted(Store(str(run)), certificate, found)
    path.unlink()
    return found


def test_a_result_is_a_note_and_the_check_prints_it(taken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (certificate,) = certificates(taken)
    found = checked(taken, certificate, json.dumps(result_of(certificate)))
    assert found.problems == []
    assert found.notes == [
        f"takedowns/{certificate.id}/planted-00000020.json: the checkpoint of step 20 was tested for 8 planted "
        "identifiers of removed documents: not distinguishable from never seen, "
        "mean rank 0.497, 0.308 to 0.688, z -0.02"
    ]
    path = taken / planted_name(certificate.id, 20)
    path.write_text(json.dumps(result_of(certificate)))
    assert take_down(taken, check=f"takedowns/{certificate.id}.json") == 0
    assert "8 planted identifiers of removed documents" in capsys.readouterr().out
    path.unlink()


def test_other_values_are_problems(taken: Path) -> None:
    (certificate,) = certificates(taken)
    rank, seal, none = (result_of(certificate) for _ in range(3))
    rank["documents"][0]["rank"] = 3.0
    seal["takedowns"][certificate.id] = "0" * 64
    none["documents"] = none["documents"][8:]
    none["groups"]["removed"] = rank_test([], 99)
    assert "removed: mean is" in checked(taken, certificate, json.dumps(rank)).problems[0]
    assert "ValueError" in checked(taken, certificate, json.dumps(seal)).problems[0]
    assert "for no planted identifier" in checked(taken, certificate, json.dumps(none)).notes[0]


@pytest.mark.parametrize("content", ["", "[]", "3", "{}", '{"groups": {}}', "[" * 100_000])
def test_a_file_that_is_no_result_is_a_problem(taken: Path, content: str) -> None:
    (certificate,) = certificates(taken)
    found = checked(taken, certificate, content)
    assert len(found.problems) == 1
    assert "expected the result of `penstock plant-test`" in found.problems[0]
