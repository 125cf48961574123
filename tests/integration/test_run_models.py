"""Models in whole runs: a language model trained on a run, its percentiles, a classifier, the same bytes everywhere."""

import json
import shutil
from collections import Counter
from pathlib import Path
from unittest import mock

import pyarrow.parquet as pq
import pytest

from jobs.recipe import deciding_models, recipe_sections, stored_recipe
from pipeline.fit.classifier import TrainClassifierConfig, train_classifier
from pipeline.fit.language_model import LmConfig, make_language_model
from pipeline.inspect.diff import compare_runs, open_compared_run
from pipeline.inspect.show import find_documents, parse_where
from pipeline.inspect.whatif import KEPT_VERDICT, predict
from pipeline.perplexity.kneser_ney.config import TrainLmConfig
from pipeline.report.facts import collect_facts
from pipeline.report.tallies import describe_buckets
from schemas.entries import to_mapping
from schemas.errors import ConfigError
from schemas.ids import shuffle_key
from schemas.manifest import open_table, read_run, write_run
from schemas.overrides import load_recipe
from schemas.storage import Store
from schemas.tables import SCORES
from schemas.tokens import open_dataset
from schemas.versions import open_run as run_at_address
from tests.pipeline.tokens.test_streams import mix, written
from tests.support.table_readers import by_every_reader, check_reader
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import documents_of
from tests.train.eval.test_generate import RECIPE as TINY
from train.plan.layouts import plan_for_devices
from train.pretrain.__main__ import main

pytestmark = pytest.mark.spark


@pytest.fixture
def rerun(run_at, finished, tmp_path):
    """A function that runs a copy of the shared run up to a step with other settings; again: the same copy."""
    shutil.copytree(finished.root, tmp_path / "run")
    return lambda until, overrides, partitions=2: run_at(partitions, overrides, tmp_path / "run", until)


def rows(run: Store, table: str) -> list[dict]:
    folder, manifest = open_table(run, table)
    return [row for path in manifest.paths_of() for row in pq.read_table(folder.path(path)).to_pylist()]


@pytest.fixture(scope="module")
def models(spark, finished, tmp_path_factory) -> dict[str, str]:
    """A language model of the run's English, and a classifier that tells its German from its English."""
    folder = tmp_path_factory.mktemp("models")
    training = TrainLmConfig(order=3, discount_fallback=[0.5, 1.0, 1.5])
    config = LmConfig(run=finished.uri, num_pieces=1000)
    make_language_model(spark, config, training, str(folder / "en.lm"))
    classifier = TrainClassifierConfig.model_validate(
        {
            "name": "german",
            "positives": {"run": finished.uri, "languages": ["de", "fr"]},
            "negatives": {"run": finished.uri, "languages": ["en"]},
            "heldout_share": 0.3,
            "calibrate_share": 0.3,
        }
    )
    train_classifier(classifier, str(folder), spark)
    return {"lm": str(folder / "en.lm"), "classifier": str(folder / "german.arrow")}


def settings(models: dict[str, str]) -> list[str]:
    return [
        "perplexity.scorer=ngram",
        f'perplexity.models={{en="{models["lm"]}"}}',
        'perplexity.keep_buckets=["head","middle"]',
        f'classifier.models={{german="{models["classifier"]}"}}',
    ]


@pytest.fixture(scope="module")
def scored(run_at, finished, models, tmp_path_factory) -> Store:
    folder = tmp_path_factory.mktemp("scored") / "run"
    shutil.copytree(finished.root, folder)
    return run_at(2, settings(models), folder, "dedup")


def test_the_tail_of_a_language_is_what_its_own_percentiles_say(scored):
    figures = open_table(scored, "verdicts")[1].content.figures
    scores = {row["doc_id"]: row for row in rows(scored, "scores")}
    english = [row for row in rows(scored, "documents") if row["language"] == "en" and row["drop_stage"] is None]
    values = sorted(scores[row["doc_id"]]["perplexity"] for row in english)
    head, middle = (figures["cutoffs"][name]["en"] for name in ("perplexity_head", "perplexity_middle"))
    assert 0.30 <= sum(value < head for value in values) / len(values) < 0.32
    assert 0.60 <= sum(value < middle for value in values) / len(values) < 0.62
    assert sum(figures["buckets"]["en"].values()) == len(english)
    assert figures["buckets"]["de"] == {"all": figures["buckets"]["de"]["all"]}
    assert figures["cutoffs"]["perplexity_head"].keys() == {"en"}
    for row in rows(scored, "verdicts"):
        if row["perplexity_bucket"] == "tail":
            assert row["drop_stage"] is not None
        assert row["drop_rule"] != "perplexity_tail" or row["perplexity_bucket"] == "tail"


def test_a_what_if_sees_the_percentiles_of_the_new_shares(spark, scored, rerun, models):
    wanted = stored_recipe(scored, ["perplexity.middle_share=0.8"])
    prediction = predict(spark, scored, wanted, deciding_models(wanted))
    kept = sum(cell.documents for cell in prediction.cells if cell.after == KEPT_VERDICT)
    run = rerun("dedup", [*settings(models), "perplexity.middle_share=0.8"], 7)
    assert kept == open_table(run, "dedup")[1].content.counts.rows_kept
    assert kept > open_table(scored, "dedup")[1].content.counts.rows_kept
    assert open_table(run, "scores")[1].digest == open_table(scored, "scores")[1].digest


def test_scores_keep_their_schema_and_books(scored):
    folder, manifest = open_table(scored, "scores")
    assert pq.read_schema(folder.path(manifest.paths_of()[0])).equals(SCORES)
    documents = open_table(scored, "documents")[1].content.counts
    assert manifest.content.counts.rows_in == manifest.content.counts.rows_kept == documents.rows_kept


def test_a_checkpoint_scores_the_same_columns_in_a_process_apart(rerun, tmp_path):
    tiny = make_tiny_dataset(tmp_path / "tiny")
    write_run(tiny, read_run(tiny).model_copy(update={"recipe": TINY}))
    with (
        mock.patch("train.pretrain.setup.default_threads", return_value=1),
        mock.patch("train.pretrain.setup.call_planner", plan_for_devices),
    ):
        assert main([tiny.uri]) == 0
    (checkpoint, *_) = sorted((tmp_path / "tiny" / "train" / "checkpoints").iterdir())
    overrides = [f'perplexity.scorer="checkpoint:{checkpoint}"', 'perplexity.keep_buckets=["head"]']
    run = rerun("verdicts", overrides)
    found = rows(run, "scores")
    texts = {row["doc_id"]: row["body_chars"] for row in rows(run, "documents")}
    assert all(row["perplexity"] > 1 and row["paragraphs"] for row in found if texts[row["doc_id"]])
    figures = open_table(run, "verdicts")[1].content.figures
    assert {"en", "de"} <= set(figures["cutoffs"]["perplexity_head"])
    models = open_table(run, "scores")[1].content.models
    assert any(name.startswith("perplexity/checkpoint") for name in models)
    left = [path.name for path in Path(run.uri).rglob("*.parquet") if "text" in path.name or "scored" in str(path)]
    assert left == []


def test_scores_of_a_classifier_tell_its_classes_apart(scored):
    languages = {row["doc_id"]: row["language"] for row in rows(scored, "documents")}
    found: dict[str, list[float]] = {}
    for row in rows(scored, "scores"):
        found.setdefault(languages[row["doc_id"]], []).append(to_mapping(row["classifier_scores"])["german"])
    assert sum(found["de"]) / len(found["de"]) > sum(found["en"]) / len(found["en"]) + 0.2


def test_a_classifier_cuts_the_sources_and_everyone_agrees(spark, scored, run_at, models, tmp_path):
    """The dataset, a mix of its buckets, diff, show and what-if, against the stored scores; the cut is one of them."""
    shutil.copytree(scored.root, tmp_path / "run")
    german = {row["doc_id"]: to_mapping(row["classifier_scores"])["german"] for row in rows(scored, "scores")}
    cut = sorted(german.values())[len(german) * 3 // 5]
    wanted = [*settings(models), "tokens.buckets_by=classifier.german", f"tokens.bucket_cuts=[{cut!r}]"]
    run = run_at(2, wanted, tmp_path / "run", "tokens")
    whole = open_table(run, "tokens")[1]
    reads = {entry.name for entry in whole.content.inputs}
    assert reads == {"clean", "tokenizer", "documents", "scores"}
    before = {row["doc_id"]: row["stream"] for row in documents_of(open_dataset(run))}
    bucket = {doc: "high" if german[doc] >= cut else "low" for doc in before}
    assert {doc: stream.partition("/")[0] for doc, stream in before.items()} == {
        doc: f"web+{name}" for doc, name in bucket.items()
    }
    assert min(Counter(bucket.values()).values()) > 5
    assert cut in {german[doc] for doc in german}
    assert describe_buckets(collect_facts(run)) == (
        f"classifier.german, low below {cut:g}, high from {cut:g}, none where it was not measured"
    )
    path = written(tmp_path, mix(web_low={"keep": 0.5}, web_high={}))
    run = run_at(2, [*wanted, f'tokens.mix="{path}"'], tmp_path / "run", "tokens")
    gone = {doc for doc, one in before.items() if one == "web+low/train" and shuffle_key(2, doc) / 2**63 >= 0.5}
    assert 0 < len(gone) < len(before)
    assert {row["doc_id"] for row in documents_of(open_dataset(run))} == before.keys() - gone
    sides = open_compared_run(run_at_address(f"{run.uri}@{whole.digest}")), open_compared_run(run)
    found = compare_runs(*sides, 1000)
    assert found.moved(out=True) == {("web", "tokens/mix"): len(gone)}
    assert found.settings.keys() == {"tokens.mix web+low: keep", "model tokens/mix"}
    assert {bytes.fromhex(one.doc_id) for one in found.examples["web", "kept", "tokens/mix"]} == gone
    assert {row["doc_id"] for row in find_documents(run, parse_where("drop_rule = mix"), 1000)} == gone
    tried = stored_recipe(run, [])
    prediction = predict(spark, run, tried, deciding_models(tried))
    fates = Counter()
    for cell in prediction.cells:
        fates[cell.before] += cell.documents
    assert (fates["tokens/mix"], fates[KEPT_VERDICT]) == (len(gone), len(before) - len(gone))


@by_every_reader
def test_others_read_the_scores_as_they_are(reader, scored, tmp_path):
    assert "scores" in check_reader(reader, scored, tmp_path)


def test_without_models_there_is_no_scores_table(finished, scored):
    assert "scores" not in read_run(finished).tables
    assert "scores" in read_run(scored).tables


def test_shared_ngrams_and_canaries_drop_a_document_and_are_reported(rerun, finished, tmp_path):
    text = next(row["text"] for row in rows(finished, "clean") if row["language"] == "en" and row["text"])
    words = text.split()
    exam = tmp_path / "exam.jsonl"
    exam.write_text(json.dumps({"question": " ".join(words[10:40])}) + "\n", encoding="utf-8")
    run = rerun("verdicts", [f'decontaminate.evaluation_sets={{exam="{exam}"}}'])
    figures = open_table(run, "documents")[1].content.figures
    dropped = open_table(run, "verdicts")[1].content.counts.dropped["decontaminate/contaminated"]
    assert figures["contaminated_documents"] == {"exam": dropped}
    assert dropped >= 1
    assert figures["evaluation_sets"]["exam"]["items"] == 1


def test_models_that_are_missing_or_of_no_use_are_refused_before_spark_works(run_at, tmp_path):
    for setting, message in (
        (['perplexity.scorer="ngram"', 'perplexity.models={en="nowhere.lm"}'], "nowhere.lm"),
        (["perplexity.scorer=ngram"], "models by language"),
        (['decontaminate.evaluation_sets={exam="nowhere.jsonl"}'], "nowhere.jsonl"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_at(2, setting, tmp_path / "run", "verdicts")
    assert not (tmp_path / "run" / "documents").exists()


def test_every_section_of_a_whole_recipe_is_known():
    known = set(recipe_sections())
    assert {"perplexity", "classifier", "importance", "decontaminate", "toxicity", "quality"} <= known
    with pytest.raises(ConfigError, match="did you mean 'perplexity'"):
        load_recipe({"perplexty": {}}, [], recipe_sections(), "x")
