"""The recipes of published corpora, each run on the same small archive: what becomes of every page, and why.

The pages are in tests/support/corpus_pages.py; each has one property that a rule acts on. Models that a user provides are
fitted here with the functions behind `penstock train-lm` and `penstock train-classifier`, on a few hundred sentences.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.recipe import read_recipe
from pipeline.fit.classifier import TrainClassifierConfig, train_classifier
from pipeline.fit.language_model import LmConfig, make_language_model
from pipeline.perplexity.kneser_ney.config import TrainLmConfig
from pipeline.run import prepare, run_steps
from schemas.config import Unset
from schemas.errors import ConfigError
from schemas.manifest import open_table, read_run
from schemas.storage import Store
from tests.support.corpus_pages import (
    BAD_WORD,
    EMAIL,
    EVALUATION_ITEM,
    GOOD,
    LINE,
    PASSAGE,
    pages,
    paragraphs,
    spam,
    url_of,
    write_archive,
)

pytestmark = pytest.mark.spark

KEPT = "kept"
Run = Callable[..., Store]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_archive(tmp_path_factory.mktemp("archive") / "pages.warc")


@pytest.fixture(scope="module")
def run(spark: Any, archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A function that runs a recipe on the archive up to a step, with some settings."""

    def run_recipe(name: str, *settings: str, until: str = "clean") -> Store:
        recipe = read_recipe(name, [f'source.paths=["{archive}"]', "audit.documents=0", *settings])
        store = Store(str(tmp_path_factory.mktemp(name) / "run"))
        run_steps(spark, prepare(recipe, until), store, 2)
        return store

    return run_recipe


@pytest.fixture(scope="module")
def evaluation_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluation") / "items.jsonl"
    path.write_text(json.dumps({"text": EVALUATION_ITEM}) + "\n")
    return path


@pytest.fixture(scope="module")
def language_model(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The settings of a small model of English."""
    folder = tmp_path_factory.mktemp("lm")
    texts = [sentence for number in range(40) for text in paragraphs(f"lm {number}") for sentence in text.split(". ")]
    (folder / "text.txt").write_text("\n".join(text.lower().rstrip(".").replace(",", "") for text in texts) + "\n")
    training = TrainLmConfig(input=[str(folder / "text.txt")], order=3, discount_fallback=[0.5, 1.0, 1.5])
    make_language_model(spark, LmConfig(), training, str(folder / "en.lm"))
    return [f'perplexity.models={{en="{folder}/en.lm"}}', "perplexity.pieces={}"]


def rows(run: Store, table: str) -> list[dict[str, Any]]:
    folder, manifest = open_table(run, table)
    return [row for path in manifest.paths_of() for row in pq.read_table(folder.path(path)).to_pylist()]


def names_of(run: Store) -> dict[bytes, str]:
    """The name of the page of each document; pages with the same URL are told apart by their order."""
    documents = [row for row in rows(run, "documents") if row["record_type"] == "response"]
    documents.sort(key=lambda row: row["offset"])
    assert [row["url"] for row in documents] == [url_of(name) for name in pages()]
    return {row["doc_id"]: name for row, name in zip(documents, pages())}


def outcomes(run: Store) -> dict[str, str]:
    """The reason for which each page is dropped, or KEPT."""
    names = names_of(run)
    found = dict.fromkeys(pages(), KEPT)
    for table in ("documents", "verdicts", "dedup", "repeats"):
        for row in rows(run, table) if table in read_run(run).tables else ():
            name = names.get(row["doc_id"])
            if name and found[name] == KEPT and row["drop_rule"]:
                found[name] = row["drop_rule"]
    return found


def dropped(run: Store) -> dict[str, str]:
    return {name: reason for name, reason in outcomes(run).items() if reason != KEPT}


def texts(run: Store) -> dict[str, str]:
    """The clean text of each kept page."""
    names = names_of(run)
    return {names[row["doc_id"]]: row["text"] for row in rows(run, "clean")}


def column(run: Store, table: str, name: str) -> dict[str, Any]:
    names = names_of(run)
    return {names[row["doc_id"]]: row[name] for row in rows(run, table) if row["doc_id"] in names}


GERMAN = {"german-0": "language_not_wanted", "german-1": "language_not_wanted"}


def show(name, made):
    print("@@", name, dropped(made))
    print("@@", name, {k: len(v) for k, v in texts(made).items()})
    return made


def test_dolma(run: Run, evaluation_set: Path) -> None:
    made = show("dolma", run("dolma", f'decontaminate.evaluation_sets={{paloma="{evaluation_set}"}}'))


def test_c4(run: Run) -> None:
    made = show("c4", run("c4", "language.min_score=0.9"))


def test_gopher(run: Run, evaluation_set: Path) -> None:
    made = show("gopher", run("gopher", f'decontaminate.evaluation_sets={{paloma="{evaluation_set}"}}'))


def test_refinedweb(run: Run) -> None:
    made = show("refinedweb", run("refinedweb"))
    print("@@", column(made, "documents", "signature").popitem()[1].__len__() if True else 0)


def test_fineweb(run: Run) -> None:
    made = show("fineweb", run("fineweb"))


def test_fineweb2(run: Run) -> None:
    made = show("fineweb2", run("fineweb2"))
    print("@@", column(made, "dedup", "weight"))


def test_redpajama2(run: Run, language_model) -> None:
    made = show("redpajama2", run("redpajama2", *language_model))
    print("@@", column(made, "verdicts", "perplexity_bucket"))
    print("@@", column(made, "scores", "perplexity"))


def test_ccnet(run: Run, language_model) -> None:
    made = show("ccnet", run("ccnet", *language_model, "tokenizer.vocab_size=400", "tokens.shard_tokens=20000", "tokens.chunk_tokens=512", "tokens.heldout_share=0", until="tokens"))
    print("@@", column(made, "verdicts", "perplexity_bucket"))


def test_dclm(run: Run, tmp_path) -> None:
    good = [" ".join(paragraphs(f"c {n}", 1, 3)) for n in range(150)]
    bad = [" ".join(spam(f"c {n}")[:1]) for n in range(150)]
    for name, texts_ in (("good", good), ("bad", bad)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts_))
    config = TrainClassifierConfig.model_validate({"kind": "fasttext", "positives": {"files": [str(tmp_path / "good.jsonl")]}, "negatives": {"files": [str(tmp_path / "bad.jsonl")]}, "bits": 12, "dimensions": 8, "epochs": 25})
    print("@@", train_classifier(config, str(tmp_path)))
    made = show("dclm", run("dclm", f'classifier.models={{quality="{tmp_path}/quality.bin"}}', Unset("classifier.labels")))
    print("@@", column(made, "scores", "classifier_scores"))
