"""Tests of the shipped classifier: its file and card, fixed texts, agreement with people, and a run with it."""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from jobs.recipe import deciding_models, read_recipe, read_values, recipe_sections, stored_recipe
from pipeline.classifier.stage import CLASSIFIER, ClassifierConfig
from pipeline.fit.classifier import auc, kappa
from pipeline.inspect.whatif import KEPT_VERDICT, predict
from pipeline.models import REGISTRY, SHIPPED, ModelsConfig, ensure_model, list_models, verify_model
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.entries import to_mapping
from schemas.errors import ConfigError
from schemas.manifest import open_table
from schemas.overrides import load_recipe
from schemas.storage import Store
from tests.support.paths import SHARED

NAME = "quality-en"
FOLDER = SHIPPED / "classifier"
LABELS = SHARED / "quality" / "dclm_human.jsonl.gz"
PROSE = """\
The river rises in the hills above the town, and for most of its length it is too shallow for boats. In the eighteenth
century the mill owners built a weir, which raised the water by two metres and made it possible to drive four wheels at
once. When the last mill closed in 1931 the weir was left in place, because the council feared that the banks would
collapse without it.

Today the question is being asked again. Engineers who have studied the flow believe that the weir could be lowered in
stages, and that trout would return to the upper reaches within ten years. People who live beside the water are not so
sure. They remember the flood of 1968, and they want to know what would happen if the same rain fell on a river without
a weir. The council has promised to publish the results of a model before it decides.
"""
FURNITURE = """\
Home
About us
Log in
12 comments
Read more
Tags: garden, tools
Hose 20 m $14.99
Posted by admin, May 3, 2011 at 4:07
Next"""


def offline(tmp_path: Path) -> ModelsConfig:
    return ModelsConfig(cache=str(tmp_path / "no-cache"), offline=True)


def scores_of(texts: list[str], language: str = "en") -> list[float | None]:
    path = str(ensure_model(NAME, ModelsConfig(offline=True)).path)
    classify = CLASSIFIER.make(ClassifierConfig(models={NAME: NAME}), {NAME: path})
    rows: list[dict[str, Any]] = [{"_body": text, "language": language} for text in texts]
    for row in rows:
        assert classify(row) is None
    return [(row["classifier_scores"] or {}).get(NAME) for row in rows]


def test_the_file_has_the_digest_of_its_card_its_manifest_and_the_registry() -> None:
    data = (FOLDER / "quality-en.arrow").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    manifest = json.loads((FOLDER / "quality-en.json").read_text(encoding="utf-8"))
    assert manifest["model"] == {"file": "quality-en.arrow", "bytes": len(data), "sha256": digest}
    assert (REGISTRY[NAME].sha256, REGISTRY[NAME].num_bytes) == (digest, len(data))
    card = (FOLDER / "quality-en.md").read_text(encoding="utf-8")
    assert [name for name in (digest, *(entry["sha256"] for entry in manifest["inputs"])) if name not in card] == []
    assert len(data) < 2_000_000


def test_the_name_resolves_offline_without_a_cache(tmp_path: Path) -> None:
    model = verify_model(NAME, offline(tmp_path))
    assert model == ensure_model(NAME, offline(tmp_path))
    assert (model.path, model.sha256) == (FOLDER / "quality-en.arrow", REGISTRY[NAME].sha256)
    assert [str(row.path) for row in list_models(offline(tmp_path)) if row.name == NAME] == [str(model.path)]
    assert not (tmp_path / "no-cache").exists()


def test_a_damaged_installation_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.models.SHIPPED", tmp_path)
    with pytest.raises(ConfigError, match="no such file\nInstall penstock again, or give its path in the recipe"):
        ensure_model(NAME, offline(tmp_path))
    with pytest.raises(ConfigError, match=r"expected model quality-en, got no file\. Install penstock again\."):
        verify_model(NAME, offline(tmp_path))
    assert "file missing: install penstock again" in next(
        str(row) for row in list_models(offline(tmp_path)) if row.name == NAME
    )


def test_the_recipe_web_uses_it_for_english(tmp_path: Path) -> None:
    recipe = read_recipe("web", ['source.paths=["x"]', f'models.cache="{tmp_path}"', "models.offline=true"])
    assert recipe.section("classifier", ClassifierConfig).min_score == {"english": 0.5}
    assert CLASSIFIER.models(recipe["classifier"]) == {"english": NAME}
    assert ensure_model(NAME, recipe.section("models", ModelsConfig)).path == FOLDER / "quality-en.arrow"


def test_scores_of_fixed_texts() -> None:
    expected = [0.86103, 0.00018, 0.00333, 0.99998]
    assert scores_of([PROSE, FURNITURE, "", PROSE * 20]) == pytest.approx(expected, abs=1e-4)
    assert scores_of([PROSE, FURNITURE], "de") == [None, None]


def test_it_agrees_with_people() -> None:
    if not LABELS.exists():
        pytest.skip(f"no judged documents at {LABELS}")
    with gzip.open(LABELS, "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    scores, good = np.array(scores_of([row["text"] for row in rows])), np.array([bool(row["label"]) for row in rows])
    low = scores < 0.5
    assert (int((low & good).sum()), int((low & ~good).sum())) == (8, 56)
    assert auc(scores, good) == pytest.approx(0.815, abs=1e-3)
    assert kappa(~low, good) == pytest.approx(0.426, abs=1e-3)


@pytest.mark.spark
def test_a_run_of_three_documents_and_a_what_if(spark: Any, tmp_path: Path) -> None:
    rows = [{"id": number, "text": text} for number, text in enumerate((PROSE, FURNITURE, PROSE[435:]))]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = ['source.name="x"', f'source.paths=["{tmp_path}/x.jsonl"]', 'source.format="jsonl"']
    values = {**read_values("web"), "quality": {"rules": []}}  # so that the classifier alone decides
    recipe = load_recipe(values, [*settings, "models.offline=true"], recipe_sections(), "web")
    run = Store(str(tmp_path / "run"))
    run_steps(spark, prepare(recipe, "dedup"), run, 1)
    folder, manifest = open_table(run, "scores")
    (scores,) = (pq.read_table(folder.path(path))["classifier_scores"].to_pylist() for path in manifest.paths_of())
    assert [to_mapping(score)["english"] > 0.5 for score in scores] == [True, False, True]
    assert REGISTRY[NAME].sha256 in manifest.content.models.values()
    counts = open_table(run, "verdicts")[1].content.counts
    assert counts.rows_kept == 2
    assert {reason: count for reason, count in counts.dropped.items() if count} == {"classifier/classifier_score": 1}
    wanted = stored_recipe(run, ["classifier.min_score={english=0.999}"])
    prediction = predict(spark, run, wanted, deciding_models(wanted))
    assert sum(cell.documents for cell in prediction.cells) == 3
    assert [cell.after for cell in prediction.cells if cell.after == KEPT_VERDICT] == []
