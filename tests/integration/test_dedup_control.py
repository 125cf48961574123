"""The control of deduplication: near misses stay, planted copies are found, and every removal is measured directly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.minhash.stage import SignatureConfig, as_matrix, similarity, value_type
from tests.support.dedup_control import COPY, Outcome, documents, recipe_for, run_control
from tests.support.dedup_oracle import all_pairs, shingles_of
from tests.support.dedup_tables import columns_of

SIGNED = SignatureConfig()
REMOVED = ["doc_id", "survivor", "drop_rule", "drop_value"]


@pytest.fixture(scope="module")
def control(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The control with the settings of the recipe `web`: the run folder, and what was found."""
    folder = tmp_path_factory.mktemp("control")
    outcome = run_control(spark, folder, recipe_for(folder, "web", []))
    print("\n".join(outcome.lines()))
    return folder, outcome


def test_near_misses_are_no_copies_of_one_another() -> None:
    sets = [shingles_of(each.text) for each in documents() if not each.is_copy and each.kind != "base"]
    assert len(sets) == 1200
    assert len(all_pairs(sets, 0.7)) == 0
    assert len(all_pairs(sets, 0.4)) > 10_000  # but near: they could be taken for copies


@pytest.mark.spark
def test_near_misses_stay_and_planted_copies_are_found(control: tuple[Path, Outcome]) -> None:
    outcome = control[1]
    assert outcome.share(outcome.misses) <= 0.01
    assert outcome.share(outcome.copies) >= 0.95
    assert all(found == total for found, total in (outcome.copies[kind] for kind in [*COPY][:4]))  # equal words
    assert outcome.foreign <= 0.01 * sum(total for _, total in outcome.misses.values())


@pytest.mark.spark
def test_every_removed_copy_is_similar_to_the_document_kept(control: tuple[Path, Outcome]) -> None:
    signed = columns_of(control[0], "documents", ["doc_id", "signature", "text_digest"]).to_pylist()
    of = {row["doc_id"]: row for row in signed}
    rows = columns_of(control[0], "dedup", REMOVED).to_pylist()
    kept = {row["doc_id"] for row in rows if row["drop_rule"] is None}
    removed = [row for row in rows if row["drop_rule"]]
    assert len(removed) > 600
    assert {row["survivor"] for row in removed} <= kept
    equal = [of[row["doc_id"]]["text_digest"] == of[row["survivor"]]["text_digest"] for row in removed]
    assert [row["drop_rule"] == "exact_duplicate" for row in removed] == equal
    ends = [[of[row[name]]["signature"] for row in removed] for name in ("doc_id", "survivor")]
    values = similarity(*(as_matrix(each, value_type(SIGNED)) for each in ends))
    assert values.min() >= np.float32(0.7)
    assert [row["drop_value"] for row in removed] == pytest.approx(values.tolist(), abs=1e-6)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "kind"),
    [("signature.numbers=zero", "report of other numbers"), ("dedup.min_similarity=0.4", "code with the same licence")],
)
def test_other_settings_fail_the_control(spark: Any, tmp_path: Path, setting: str, kind: str) -> None:
    outcome = run_control(spark, tmp_path, recipe_for(tmp_path, "web", [setting]))
    assert outcome.share(outcome.misses) > 0.01
    assert outcome.misses[kind][0] > 10
