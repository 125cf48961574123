"""Tests of paragraph limits: causes and cuts by hand, quantiles, settings, and a run that loses one paragraph."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.cli import main
from jobs.recipe import deciding_models, recipe_sections, stored_recipe
from jobs.verbs.browse import open_run_of
from pipeline.browse.document import document_json
from pipeline.engine.rules import FINE, KEPT, bins_of, count_bins, elements_of, evaluate_checks, lower_edge
from pipeline.inspect.document_text import format_document
from pipeline.inspect.show import find_documents, parse_where
from pipeline.inspect.whatif import KEPT_VERDICT, format_prediction, predict
from pipeline.inspect.whatif_limits import changed_settings
from pipeline.perplexity.compile import compile_lm
from pipeline.perplexity.paragraphs import (
    CAUSES,
    HIGH,
    HIGH_CUT,
    LONG,
    LOW,
    LOW_CUT,
    PARAGRAPHS,
    SHORT,
    ParagraphsConfig,
    chars_left,
    judge_paragraphs,
    paragraph_cuts,
    paragraph_limits,
)
from pipeline.prepare import prepare
from pipeline.run import run_steps
from pipeline.stages import CHECKED, STEPS, checked_stages, steps_for
from pipeline.steps.paragraphs import count_cuts
from pipeline.steps.verdicts import cutoffs_of
from pipeline.templates.stage import TEMPLATES
from schemas.errors import ConfigError, ContractError
from schemas.manifest import open_table
from schemas.overrides import load_recipe
from schemas.storage import Store
from schemas.tables import SCORES
from tests.support.tiny_arpa import NGrams, write_arpa


def config(**settings: Any) -> ParagraphsConfig:
    return ParagraphsConfig.model_validate(settings)


def batch(*documents: tuple[str | None, list[tuple[int, int]] | None, list[float] | None]) -> pa.RecordBatch:
    """Documents as (language, spans of paragraphs, their perplexities)."""
    languages, spans, perplexities = zip(*documents)
    columns = {
        "language": pa.array(languages, pa.string()),
        "paragraphs": pa.array(spans, SCORES.field("paragraphs").type),
        "paragraph_perplexity": pa.array(perplexities, SCORES.field("paragraph_perplexity").type),
    }
    return pa.RecordBatch.from_pydict(columns)


def causes(limits: Any, rows: pa.RecordBatch) -> list[tuple[int, int, str | None]]:
    """(document, start, cause) of each paragraph."""
    judged = judge_paragraphs(limits, rows)
    names = [None if index == KEPT else CAUSES[index] for index in judged.causes.tolist()]
    return list(zip(judged.rows.tolist(), judged.starts.tolist(), names, strict=True))


LIMITS = {HIGH: {"en": 100.0, "*": 50.0}, LOW: {"en": 10.0}, LONG: {"*": 30.0}, SHORT: {"*": 5.0}}


def test_limits_are_inclusive_and_by_language() -> None:
    spans = [(0, 10), (10, 20), (20, 30), (30, 40)]
    documents = batch(
        ("en", spans, [100.0, 100.1, 10.0, 9.99]), ("de", spans, [50.0, 51.0, 1.0, 9.0]), (None, [(7, 12)], [60.0])
    )
    assert causes(LIMITS, documents) == [
        (0, 0, None),
        (0, 10, HIGH),
        (0, 20, None),
        (0, 30, LOW),
        (1, 0, None),
        (1, 10, HIGH),
        (1, 20, None),
        (1, 30, None),
        (2, 7, HIGH),
    ]


def test_lengths_need_no_perplexity_and_the_first_cause_counts() -> None:
    documents = batch(
        ("fr", [(0, 5), (6, 10), (11, 41), (42, 73)], None),
        ("en", None, None),
        ("en", [(0, 4), (5, 36), (40, 45)], [500.0, 1.0, 50.0]),
        ("en", [], []),
    )
    assert causes(LIMITS, documents) == [
        (0, 0, None),
        (0, 6, SHORT),
        (0, 11, None),
        (0, 42, LONG),
        (2, 0, HIGH),
        (2, 5, LOW),
        (2, 40, None),
    ]


def test_limits_compare_as_float32() -> None:
    stored = float(np.float32(0.1) * 1000)  # what the table holds for a limit that is written with other digits
    assert causes({HIGH: {"en": stored}}, batch(("en", [(0, 9)], [stored]))) == [(0, 0, None)]
    above = float(np.nextafter(np.float32(stored), np.float32(np.inf)))
    assert causes({HIGH: {"en": stored}}, batch(("en", [(0, 9)], [above]))) == [(0, 0, HIGH)]


def test_a_slice_of_a_batch_is_judged_as_its_documents() -> None:
    documents = batch(("en", [(0, 9)], [500.0]), ("en", [(3, 9), (9, 12)], [50.0, 50.0]), ("en", [(1, 9)], [500.0]))
    assert causes(LIMITS, documents.slice(1)) == [(0, 3, None), (0, 9, SHORT), (1, 1, HIGH)]


def test_a_document_needs_one_perplexity_for_each_paragraph() -> None:
    with pytest.raises(ContractError, match="expected a perplexity for each of 2 paragraphs, got 1"):
        judge_paragraphs(LIMITS, batch(("en", [(0, 9), (10, 20)], [50.0])))


def test_what_is_left_is_counted_only_where_something_is_cut() -> None:
    documents = batch(
        ("en", [(0, 20), (21, 31)], [50.0, 500.0]), ("en", [(0, 6)], [50.0]), ("en", [(0, 6)], [500.0]), ("de", [], [])
    )
    left = chars_left(LIMITS, documents)
    assert left[[0, 2]].tolist() == [20.0, 0.0]
    assert np.isnan(left[[1, 3]]).all()
    assert count_cuts(LIMITS, documents) == {
        "cut_documents": 2,
        "cut_paragraphs": {HIGH: 2, LOW: 0, LONG: 0, SHORT: 0},
        "cut_chars": {HIGH: 16, LOW: 0, LONG: 0, SHORT: 0},
    }


def test_the_check_drops_a_document_of_which_too_little_is_left() -> None:
    settings = config(max_perplexity={"en": 100}, min_left_chars=20)
    (check,) = PARAGRAPHS.checks(settings, {}, {})
    documents = batch(
        ("en", [(0, 20), (21, 31)], [50.0, 500.0]), ("en", [(0, 19), (21, 31)], [50.0, 500.0]), ("en", [(0, 3)], [50.0])
    )
    results = evaluate_checks([check], documents)
    assert results.broken.tolist() == [[False, True, False]]
    assert (results.values[0, 1], results.limits[0, 1]) == (19.0, 20.0)
    assert PARAGRAPHS.checks(config(), {}, {}) == ()


def test_quantiles_of_a_language_are_limits_unless_the_recipe_has_one() -> None:
    settings = config(min_quantile=0.1, max_quantile=0.9, max_perplexity={"de": 70})
    shares = [(quantile.name, quantile.share, quantile.keeps_highest) for quantile in PARAGRAPHS.quantiles(settings)]
    assert shares == [(LOW_CUT, 0.1, True), (HIGH_CUT, 0.9, False)]
    limits = paragraph_limits(settings, {LOW_CUT: {"en": 5.0}, HIGH_CUT: {"en": 90.0, "de": 80.0}})
    assert limits == {HIGH: {"en": float(np.nextafter(np.float32(90), np.float32(0))), "de": 70.0}, LOW: {"en": 5.0}}
    # the quantile itself is not kept, a value just below it is
    below = limits[HIGH]["en"]
    assert causes(limits, batch(("en", [(0, 1), (1, 2)], [below, 90.0]))) == [(0, 0, None), (0, 1, HIGH)]


def test_the_quantile_is_that_of_all_paragraphs_of_a_language() -> None:
    (item,) = PARAGRAPHS.quantiles(config(max_quantile=0.75))
    documents = batch(("en", [(0, 1)] * 3, [1.0, 2.0, 3.0]), ("de", [(0, 1)], [99.0]), ("en", [(0, 1)], [4.0]))
    values, rows = elements_of(item, documents)
    assert (values.tolist(), rows.tolist()) == ([1.0, 2.0, 3.0, 99.0, 4.0], [0, 0, 0, 1, 2])
    english = {str(key): count for key, count in count_bins(values[rows != 1], FINE).items()}
    cutoffs = cutoffs_of([item], {HIGH_CUT: {"en": english}})
    assert cutoffs == {HIGH_CUT: {"en": lower_edge(int(bins_of(np.array([3.0]), FINE)[0]) + 1, FINE)}}


@pytest.mark.parametrize(
    ("text", "cut", "left"),
    [
        ("A\n\nX\n\nB", {3}, "A\n\nB"),  # one paragraph break stays
        ("A\nX\nB", {2}, "A\nB"),
        ("A\nX\n\nB", {2}, "A\n\nB"),
        ("A\n\nX\nB", {3}, "A\n\nB"),
        ("A\n\n\nX\n \nB", {4}, "A\n\nB"),
        ("X\n\nA", {0}, "A"),
        ("A\n\nX", {3}, "A"),
        ("A\n\nX\n", {3}, "A"),
        ("\nX\nA", {1}, "A"),
        ("A\n\nX\n\nY\n\nB", {3, 6}, "A\n\nB"),
        ("A\n\nX\n\nB\n\nY\n\nC", {3, 9}, "A\n\nB\n\nC"),
        ("A \n\n\n B\nX", {8}, "A \n\n\n B"),  # what is not beside a cut does not change
        ("X", {0}, ""),
        ("X\n\nY\n", {0, 3}, ""),
        ("A\n\nB", set(), "A\n\nB"),
    ],
)
def test_cuts_by_hand(text: str, cut: set[int], left: str) -> None:
    spans = paragraph_cuts(text, dict.fromkeys(cut, HIGH))
    assert without_spans(text, spans) == left


def without_spans(text: str, cuts: list[tuple[int, int, str]]) -> str:
    return "".join(char for index, char in enumerate(text) if not any(start <= index < end for start, end, _ in cuts))


def test_each_paragraph_has_the_span_of_its_own_cause() -> None:
    assert paragraph_cuts("A\n\nX\n\nY\nB", {3: HIGH, 6: SHORT}) == [(3, 6, HIGH), (6, 8, SHORT)]
    assert paragraph_cuts("A\nX\n\nY\nB", {2: HIGH, 5: SHORT}) == [(2, 4, HIGH), (5, 7, SHORT)]


def test_cuts_of_any_text_leave_the_other_lines() -> None:
    chooser = random.Random(1)
    for _ in range(500):
        lines = [chooser.choice(["", " ", "a", "bb ", "c"]) for _ in range(chooser.randrange(1, 12))]
        text = "\n".join(lines)
        starts = [sum(len(line) + 1 for line in lines[:number]) for number in range(len(lines))]
        cut = {
            start: chooser.choice(CAUSES)
            for start, line in zip(starts, lines)
            if line.strip() and chooser.random() < 0.4
        }
        spans = paragraph_cuts(text, cut)
        assert all(start < end for start, end, _ in spans)
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
        left = without_spans(text, spans)
        kept = [line for start, line in zip(starts, lines) if line.strip() and start not in cut]
        assert [line for line in left.split("\n") if line.strip()] == kept
        assert cut or left == text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_perplexity": {"en": 0.5}}, r"max_perplexity.en: expected a perplexity of at least 1, got 0.5"),
        ({"min_perplexity": {"en": 9}, "max_perplexity": {"*": 8}}, r"min_perplexity for en: expected at most .* = 8"),
        ({"min_chars": 9, "max_chars": 8}, r"min_chars: expected at most max_chars = 8, got 9"),
        ({"min_quantile": 0.9, "max_quantile": 0.8}, r"min_quantile: expected at most max_quantile = 0.8, got 0.9"),
        ({"max_perplexity": {"*": 9}, "max_quantile": 0.9}, r"max_quantile would be ignored, because max_perplexity"),
        ({"min_left_chars": 9}, r"min_left_chars would be ignored without a limit"),
        ({"max_word": 3}, r"max_word: no such key"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(paragraphs=settings)


def recipe(**sections: dict[str, Any]) -> Any:
    return load_recipe({"source": {"paths": ["x.jsonl"]}, **sections}, [], recipe_sections(), "test")


NGRAM = {"scorer": "ngram", "models": {"en": "en.lm"}}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"paragraphs": {"max_perplexity": {"en": 9}}},
            r"paragraphs.max_perplexity: expected perplexities .* no perpl",
        ),
        ({"paragraphs": {"max_quantile": 0.9}}, r"paragraphs.max_quantile: expected perplexities of paragraphs"),
        (
            {"paragraphs": {"min_chars": 9}},
            r"min_chars: expected stored paragraphs.*Set paragraphs.every_document=true",
        ),
        (
            {"paragraphs": {"max_perplexity": {"en": 9, "fr": 8}}, "perplexity": NGRAM},
            r"max_perplexity: expected languages that perplexity.models has, got fr\.",
        ),
    ],
)
def test_limits_that_nothing_is_compared_with_are_refused_before_a_run(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        steps_for(recipe(**sections))
    with pytest.raises(ConfigError, match=message):
        checked_stages(recipe(**sections))


def test_the_command_ends_with_2_before_spark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "One."}\n', encoding="utf-8")
    paths = f'source.paths=["{tmp_path}/x.jsonl"]'
    run_of = ["run", "demo", "--out", str(tmp_path / "run"), "--set", paths]
    assert main([*run_of, "--set", "paragraphs.max_quantile=0.9"]) == 2
    assert "paragraphs.max_quantile: expected perplexities of paragraphs, got no perplexity.scorer." in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_only_a_recipe_with_limits_has_the_stage() -> None:
    def places(**sections: dict[str, Any]) -> list[str]:
        return [step.name for step in steps_for(recipe(**sections)) if PARAGRAPHS in step.stages]

    def used(**sections: dict[str, Any]) -> list[str]:
        wanted = recipe(**sections)
        return [step.name for step in STEPS if step.is_used(wanted) and step.name in ("scores", "paragraphs")]

    assert PARAGRAPHS in CHECKED
    assert (places(), used()) == ([], [])
    optional = PARAGRAPHS, TEMPLATES
    assert checked_stages(recipe()) == tuple(stage for stage in CHECKED if stage not in optional)
    limited = {"paragraphs": {"max_quantile": 0.9}, "perplexity": NGRAM}
    assert places(**limited) == ["verdicts", "paragraphs", "repeats"]
    assert used(**limited) == ["scores", "paragraphs"]
    stored = {"paragraphs": {"every_document": True}}
    assert (places(**stored), used(**stored)) == (["scores"], ["scores"])


def test_every_document_stores_spans_of_lines_with_words() -> None:
    rows: list[dict[str, Any]] = [
        {"_body": "One two\n\n three\n", "paragraphs": None, "paragraph_perplexity": None},
        {"_body": "One", "paragraphs": [], "paragraph_perplexity": []},
        {"_body": None, "paragraphs": None, "paragraph_perplexity": None},
    ]
    for stage in (PARAGRAPHS.make(config(every_document=True), {}), PARAGRAPHS.make(config(), {})):
        assert [stage(row) for row in rows] == [None] * 3
    assert [row["paragraphs"] for row in rows] == [[{"start": 0, "end": 7}, {"start": 9, "end": 15}], [], None]


# A run of documents of which one has a paragraph of nonsense.

WORDS = ["the", "old", "bridge", "over", "river", "was", "closed", "in", "spring", "because", "water", "had", "risen"]
GIBBERISH = "qx zzv kpt wrrl vvqj xkcd zzgh pqrt mnbv lkjh"


def prose(number: int, lines: int = 4) -> list[str]:
    """Lines of a document; a word of each names it, so that no two documents are copies."""
    chooser = random.Random(number)
    return [" ".join([f"town{number}", *chooser.choices(WORDS, k=14)]) for _ in range(lines)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files of documents, and a model of their prose. Document 5 has a line of nonsense, 9 little else."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = ["\n\n".join(prose(number)) for number in range(16)]
    texts[5] = "\n\n".join([*prose(5)[:2], GIBBERISH, *prose(5)[2:]])
    texts[9] = "\n".join([*prose(9)[:1], GIBBERISH])
    for file in range(4):
        rows = [{"id": number, "text": texts[number]} for number in range(file, 16, 4)]
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    # every word of the prose has the probability 1/10 (digits are read as 0), any other word 1/100,000
    known: NGrams = {(word,): (-1.0, 0.0) for word in sorted({*WORDS, "</s>", "town0", "town00"})}
    ngrams = {("<unk>",): (-5.0, 0.0), ("<s>",): (0.0, 0.0), **known, ("the", "old"): (-1.0, 0.0)}
    compile_lm(write_arpa(folder / "towns.arpa", ngrams), str(folder / "towns.lm"), None, "en")
    return folder


def overrides(corpus: Path, *more: str) -> list[str]:
    return [
        f'source.paths=["{corpus}/*.jsonl"]',
        'source.format="jsonl"',
        'source.name="books"',
        "quality.rules=[]",
        "toxicity.wordlists={}",
        "language.languages=[]",
        "audit.documents=0",
        "perplexity.scorer=ngram",
        f'perplexity.models={{en="{corpus}/towns.lm"}}',
        *more,
    ]


def run(spark: Any, corpus: Path, folder: Path, partitions: int, *more: str) -> Store:
    wanted = load_recipe({}, overrides(corpus, *more), recipe_sections(), "test")
    store = Store(str(folder))
    run_steps(spark, prepare(wanted, "clean"), store, partitions)
    return store


def rows(store: Store, table: str) -> list[dict[str, Any]]:
    folder, manifest = open_table(store, table)
    return [row for path in manifest.paths_of() for row in pq.read_table(folder.path(path)).to_pylist()]


LIMITED = ("paragraphs.max_perplexity={en=300}", "paragraphs.min_left_chars=200")


@pytest.fixture(scope="module")
def plain(spark: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return run(spark, corpus, tmp_path_factory.mktemp("plain") / "run", 2)


@pytest.mark.spark
def test_a_document_loses_exactly_its_paragraph_of_nonsense(
    spark: Any, corpus: Path, plain: Store, tmp_path: Path
) -> None:
    before = {row["doc_id"]: row["text"] for row in rows(plain, "clean")}
    assert len(before) == 16
    runs = [run(spark, corpus, tmp_path / str(number), number, *LIMITED) for number in (1, 3)]
    for table in ("scores", "verdicts", "dedup", "paragraphs", "clean"):
        first, second = (open_table(store, table)[1] for store in runs)
        assert first.content.files == second.content.files, table
        assert first.digest == second.digest, table
    store = runs[0]
    assert open_table(store, "scores")[1].digest == open_table(plain, "scores")[1].digest
    after = {row["doc_id"]: row["text"] for row in rows(store, "clean")}
    (dropped,) = before.keys() - after.keys()
    assert GIBBERISH in before[dropped]
    changed = [doc_id for doc_id, text in after.items() if text != before[doc_id]]
    assert len(changed) == 1
    # line rules have cut the blank lines before, so the spans of the cut lie between theirs
    assert after[changed[0]] == "\n".join(prose(5)) == before[changed[0]].replace(f"{GIBBERISH}\n", "")
    (text,) = (row["text"] for row in rows(store, "text") if row["doc_id"] == changed[0])
    cuts = {row["doc_id"]: row["cuts"] for row in rows(store, "paragraphs")}
    start = text.index(GIBBERISH)
    assert cuts.pop(changed[0]) == [{"start": start, "end": start + len(GIBBERISH) + 1, "reason": HIGH}]
    assert cuts.pop(dropped) is None
    assert [*cuts.values()] == [[]] * 14
    (verdict,) = (row for row in rows(store, "verdicts") if row["drop_stage"] is not None)
    left = len(before[dropped].split("\n")[0])
    assert [verdict[name] for name in ("doc_id", "drop_stage", "drop_rule", "drop_value", "drop_limit")] == [
        *(dropped, "paragraphs", "little_left"),
        *(left, 200),
    ]
    content = open_table(store, "paragraphs")[1].content
    assert content.figures == {
        "documents": 15,
        "kept_chars": sum(map(len, after.values())),
        "cut_documents": 1,
        "cut_paragraphs": {HIGH: 1, LOW: 0, LONG: 0, SHORT: 0},
        "cut_chars": {HIGH: len(GIBBERISH), LOW: 0, LONG: 0, SHORT: 0},
        "limits": {HIGH: {"en": 300.0}},
    }
    assert (content.counts.rows_in, content.counts.rows_kept) == (16, 16)
    # `show` marks the cut in the raw text of a document without a clean text, and lists it for others
    (row,) = find_documents(store, parse_where("drop_rule = little_left"), 9, with_text=True)
    assert "dropped by paragraphs/little_left" in format_document(row, True)
    shown = [format_document(row, False) for row in find_documents(store, parse_where("drop_rule is null"), 99)]
    assert (
        sum(
            f"paragraphs.cuts            {start}-{start + len(GIBBERISH) + 1} perplexity_high" in each for each in shown
        )
        == 1
    )
    page = document_json(open_run_of(store.uri), changed[0], None, "")
    pieces = [(piece["text"], piece["marks"]) for piece in page["text"]["pieces"] if GIBBERISH in piece["text"]]
    assert pieces == [(f"{GIBBERISH}\n", {"cut": "paragraph: perplexity high"})]


@pytest.mark.spark
def test_a_what_if_predicts_cuts_and_drops_without_text(spark: Any, plain: Store) -> None:
    wanted = stored_recipe(plain, [*LIMITED])
    assert {*changed_settings(stored_recipe(plain, []), wanted)} == {
        "paragraphs.max_perplexity",
        "paragraphs.min_left_chars",
    }
    prediction = predict(spark, plain, wanted, deciding_models(wanted))
    after = {cell.after: cell.documents for cell in prediction.cells}
    assert after == {KEPT_VERDICT: 15, "paragraphs/little_left": 1}
    assert prediction.paragraphs == {
        "cut_documents": 1,
        "cut_paragraphs": {HIGH: 1, LOW: 0, LONG: 0, SHORT: 0},
        "cut_chars": {HIGH: len(GIBBERISH), LOW: 0, LONG: 0, SHORT: 0},
    }
    text = format_prediction(prediction, {})
    line = "paragraphs cut from 1 of the documents that pass the checks: perplexity_high 1 (45 characters)"
    assert f"{line}; characters are counted before these cuts" in text
    (curve,) = (curve for curve in prediction.curves if curve.reason == "little_left")
    assert curve.setting == "paragraphs.min_left_chars"
    with pytest.raises(ConfigError, match=r"paragraphs\.every_document: it changes which paragraphs are stored"):
        changed_settings(stored_recipe(plain, []), stored_recipe(plain, ["paragraphs.every_document=true"]))


@pytest.mark.spark
def test_lengths_apply_without_a_model_and_repeats_are_searched_in_what_is_left(
    spark: Any, corpus: Path, tmp_path: Path
) -> None:
    """Lines that `paragraphs` cuts are no repeats, and `clean` has neither of the cuts."""
    same = "The council of the town has read the report and will answer all letters in the spring."
    texts = ["\n".join([*prose(number), "Menu", same]) for number in range(4)]
    (tmp_path / "x").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "x" / f"{number}.jsonl").write_text(
            json.dumps({"id": number, "text": text}) + "\n", encoding="utf-8"
        )
    settings = [
        "paragraphs.every_document=true",
        "paragraphs.min_chars=10",
        'repeats.units=["line"]',
        "repeats.keep_first=false",
        "quality.cut_lines=[]",
    ]
    wanted = [item for item in overrides(tmp_path / "x") if not item.startswith("perplexity.")] + settings
    store = Store(str(tmp_path / "run"))
    run_steps(spark, prepare(load_recipe({}, wanted, recipe_sections(), "test"), "clean"), store, 2)
    assert {row["paragraph_perplexity"] for row in rows(store, "scores")} == {None}
    assert sorted(row["text"] for row in rows(store, "clean")) == sorted("\n".join(prose(n)) for n in range(4))
    assert open_table(store, "paragraphs")[1].content.figures["cut_paragraphs"][SHORT] == 4
    figures = open_table(store, "repeats")[1].content.figures
    assert (figures["cut_documents"], figures["cut_chars"]) == ({"any": 4, "line": 4}, {"line": 4 * (len(same) + 1)})
    assert [row["body_chars"] for row in rows(store, "repeats")] == [row["num_chars"] for row in rows(store, "clean")]
