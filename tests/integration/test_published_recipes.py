"""The recipes of published corpora, each run on the same small archive: what becomes of every page, and why.

The pages are in tests/support/corpus_pages.py; each has one property that a rule acts on. Models that a user provides
are fitted here with the functions behind `penstock train-lm` and `penstock train-classifier`, on made sentences.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs.recipe import read_recipe
from pipeline.fit.classifier import TrainClassifierConfig, train_classifier
from pipeline.fit.language_model import LmConfig, make_language_model
from pipeline.perplexity.kneser_ney.config import TrainLmConfig
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.manifest import open_table, read_run
from schemas.overrides import Unset
from schemas.storage import Store
from schemas.tokens import open_dataset
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
NUM_REAL_PAGES = 60
Runner = Callable[..., Store]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_archive(tmp_path_factory.mktemp("archive") / "pages.warc")


@pytest.fixture(scope="module")
def run(spark: Any, archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A function that runs a recipe on the archive up to a step, with some settings and without the audit."""

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


def lines_cut(run: Store, name: str) -> bool:
    """Whether the clean text of a page lacks words of the page."""
    return len(texts(run)[name]) < len("\n".join(pages()[name]))


OTHER_LANGUAGE = dict.fromkeys(("german-0", "german-1"), "language_not_wanted")


def test_dolma_replaces_personal_data_drops_what_is_in_an_evaluation_set_and_cuts_repeated_lines(
    run: Runner, evaluation_set: Path
) -> None:
    made = run("dolma", f'decontaminate.evaluation_sets={{paloma="{evaluation_set}"}}')
    assert dropped(made) == OTHER_LANGUAGE | {
        "copy": "exact_duplicate",
        "second capture": "same_url",
        "contaminated": "contaminated",
        "test set": "contaminated",
        "short": "no_text",
        "repeats": "gopher_dup_line_frac",
    }
    clean = texts(made)
    assert (PASSAGE in clean["passage-1"], PASSAGE in clean["passage-2"]) == (True, False)
    assert (LINE in clean["line-1"], LINE in clean["line-2"]) == (True, False)
    assert "Opening hours" not in clean["headline"]  # it has no end punctuation
    assert EMAIL not in clean["email"]
    assert "<EMAIL>" in clean["email"]


@pytest.mark.slow
def test_c4_cuts_spans_of_three_sentences_and_drops_pages_for_a_bracket_or_a_listed_word(run: Runner) -> None:
    made = run("c4")
    assert dropped(made) == OTHER_LANGUAGE | {
        "copy": "exact_duplicate",
        "near": "c4_too_few_sentences",
        "second capture": "same_url",
        "test set": "nothing_left",
        "short": "c4_too_few_sentences",
        "swear": "toxic_words",
        "brace": "c4_curly_bracket",
    }
    clean = texts(made)
    assert (PASSAGE in clean["passage-1"], PASSAGE in clean["passage-2"]) == (True, False)
    assert LINE in clean["line-2"]  # a single sentence
    assert "Opening hours" not in clean["headline"]
    assert "\n\n" not in "".join(clean.values())


@pytest.mark.slow
def test_gopher_drops_what_is_mostly_a_test_set_and_near_copies(run: Runner, evaluation_set: Path) -> None:
    made = run("gopher", f'decontaminate.evaluation_sets={{lambada="{evaluation_set}"}}')
    assert dropped(made) == OTHER_LANGUAGE | {
        "copy": "exact_duplicate",
        "near": "near_duplicate",
        "test set": "contaminated_share",
        "short": "gopher_short_doc",
        "repeats": "gopher_dup_para_frac",
    }
    assert EVALUATION_ITEM in texts(made)["contaminated"]  # a fifth of its words


@pytest.mark.slow
def test_refinedweb_cuts_passages_of_fifty_words(run: Runner) -> None:
    made = run("refinedweb")
    found = dropped(made)
    assert found == OTHER_LANGUAGE | {
        "copy": "near_duplicate",
        "near": "nothing_left",  # too different for 450 equal hashes, and all of its passages are in good-1
        "second capture": "same_url",
        "test set": "nothing_left",
        "short": "gopher_short_doc",
    }
    clean = texts(made)
    assert (PASSAGE in clean["passage-1"], PASSAGE in clean["passage-2"]) == (True, False)
    assert LINE in clean["line-2"]  # shorter than fifty words
    assert len(column(made, "documents", "signature")["good-0"]) == 4 * 9000


@pytest.mark.slow
def test_fineweb_joins_near_copies_and_has_no_word_list(run: Runner) -> None:
    made = run("fineweb")
    assert dropped(made) == OTHER_LANGUAGE | {
        "copy": "near_duplicate",
        "near": "near_duplicate",
        "short": "gopher_top_3gram",
        "brace": "c4_curly_bracket",
    }
    assert BAD_WORD in texts(made)["swear"]


@pytest.mark.slow
def test_fineweb2_has_other_languages_only(run: Runner) -> None:
    made = run("fineweb2")
    assert texts(made).keys() == {"german-0", "german-1"}
    assert {reason for name, reason in dropped(made).items() if name != "short"} == {"english"}
    assert {name: weight for name, weight in column(made, "dedup", "weight").items() if weight} == {
        "german-0": 1,
        "german-1": 1,
    }


@pytest.mark.slow
def test_redpajama2_drops_the_tail_and_stores_signals(run: Runner, language_model: list[str]) -> None:
    made = run("redpajama2", *language_model)
    found, buckets = dropped(made), column(made, "verdicts", "perplexity_bucket")
    assert {name for name, bucket in buckets.items() if bucket == "tail"} >= {"shuffled", "spam"}
    assert {found[name] for name, bucket in buckets.items() if bucket == "tail"} <= {
        "perplexity_tail",
        "gopher_dup_5gram",
    }
    assert buckets["german-0"] == "all"
    assert found["copy"] == "exact_duplicate"
    assert found["short"] == "no_text"
    assert {"german-0", "german-1"} <= texts(made).keys()
    assert column(made, "documents", "rps_doc_word_count")["good-0"] > 200
    assert len(column(made, "documents", "signature")["good-0"]) == 4 * 128


@pytest.mark.slow
def test_ccnet_divides_the_text_by_perplexity_and_cuts_repeated_lines(run: Runner, language_model: list[str]) -> None:
    small = ["tokenizer.vocab_size=600", "tokens.shard_tokens=20000", "tokens.chunk_tokens=512"]
    made = run("ccnet", *language_model, *small, "tokens.heldout_share=0", until="tokens")
    found, buckets = dropped(made), column(made, "verdicts", "perplexity_bucket")
    assert {name: reason for name, reason in found.items() if name != "test set"} == {
        "copy": "exact_duplicate",
        "short": "no_text",
    }
    assert {buckets["shuffled"], buckets["spam"]} == {"tail"}
    assert {*buckets.values()} == {"head", "middle", "tail", "all"}
    sizes = [sum(bucket == name for bucket in buckets.values()) for name in ("head", "middle", "tail")]
    assert sizes[0] / sum(sizes) == pytest.approx(0.3, abs=0.04)
    assert sizes[2] / sum(sizes) == pytest.approx(0.4, abs=0.04)
    clean = texts(made)
    assert (LINE in clean["line-1"], LINE in clean["line-2"]) == (True, False)
    assert {*open_dataset(made).num_tokens()} == {"web+head", "web+middle", "web+tail", "web+all"}


@pytest.mark.slow
def test_dclm_drops_by_a_fasttext_classifier_that_is_fitted_here(run: Runner, tmp_path: Path) -> None:
    pytest.importorskip("fasttext")
    examples = {
        "good": [" ".join(paragraphs(f"example {number}", 1, 3)) for number in range(150)],
        "bad": [spam(f"example {number}")[0] for number in range(150)],
    }
    for name, made in examples.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in made))
    small = {"kind": "fasttext", "bits": 12, "dimensions": 8, "epochs": 25}
    corpora = {
        side: {"files": [str(tmp_path / f"{name}.jsonl")]}
        for side, name in (("positives", "good"), ("negatives", "bad"))
    }
    train_classifier(TrainClassifierConfig.model_validate({**small, **corpora}), str(tmp_path))
    model = f'classifier.models={{quality="{tmp_path}/quality.bin"}}'
    run_here = run("dclm", model, Unset("classifier.labels"))
    assert dropped(run_here) == OTHER_LANGUAGE | {
        "copy": "exact_duplicate",
        "near": "near_duplicate",
        "test set": "nothing_left",
        "short": "gopher_short_doc",
        "repeats": "gopher_dup_line_frac",
        "spam": "classifier_score",
    }
    assert {name for name in GOOD if not lines_cut(run_here, name)} == {*GOOD}
    assert PASSAGE not in texts(run_here)["passage-2"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["c4", "refinedweb"])
def test_real_pages_are_kept(spark: Any, shared_data: Path, tmp_path: Path, name: str) -> None:
    archive = shared_data / "warc" / "pages-002.warc.gz"
    with gzip.open(shared_data / "warc" / "pages-index.jsonl.gz", "rt") as stream:
        places = [page["offset"] for page in map(json.loads, stream) if page["warc"] == archive.name]
    with archive.open("rb") as stream:
        (tmp_path / "pages.warc.gz").write_bytes(stream.read(sorted(places)[NUM_REAL_PAGES]))
    paths = f'source.paths=["{tmp_path}/pages.warc.gz"]'
    made = Store(str(tmp_path / "run"))
    run_steps(spark, prepare(read_recipe(name, [paths, "audit.documents=0"]), "clean"), made, 2)
    counts = open_table(made, "documents")[1].content.counts
    assert counts.rows_in == NUM_REAL_PAGES + 1  # and the record that describes the file
    assert 5 <= len(rows(made, "clean")) <= 33  # 33 pages are in English
