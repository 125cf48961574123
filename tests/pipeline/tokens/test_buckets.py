"""Tests of quality buckets: the settings that define them, the bucket of a value, and the tables that are read."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.recipe import read_recipe, recipe_sections
from pipeline.engine.parquet import Part
from pipeline.engine.stage import Split
from pipeline.inspect.whatif import mix_of, open_tables
from pipeline.perplexity import stage as perplexity
from pipeline.stages import STEPS
from pipeline.steps.requirements import check_buckets
from pipeline.tokens.streams import (
    FAMILY_OF,
    PERPLEXITY_BUCKETS,
    SCORE_COLUMNS,
    TOKENS,
    Measure,
    Sorting,
    TokensConfig,
    bucket_numbers,
    buckets_of_part,
    find_bucket,
)
from schemas.entries import to_entries
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json
from schemas.manifest import RunFile, TableVersion, make_manifest, open_table, read_run, write_manifest, write_run
from schemas.overrides import load_recipe
from schemas.storage import Store
from schemas.tables import DOCUMENTS, SCORES
from tests.support.checked_paths import written_part
from tests.support.lineage_run import edit
from tests.support.paths import ROOT
from tests.support.report_repeats import add_repeats
from tests.support.report_run import make_run

RECIPE = ROOT / "jobs" / "recipes" / "demo.toml"
SIGNAL = "fineweb_terminal_lines"
SPLITS = [
    Split(ordinal, f"{source}.warc.gz", "", 1, "", source, "warc") for ordinal, source in enumerate(("web", "books"))
]


def config(by: str, *cuts: float) -> TokensConfig:
    return TokensConfig(buckets_by=by, bucket_cuts=cuts)


@pytest.mark.parametrize(
    ("by", "cuts", "names"),
    [
        ("", (), ()),
        ("perplexity", (), ("head", "middle", "tail", "all")),
        (SIGNAL, (0.5,), ("low", "high", "none")),
        (SIGNAL, (0.5, 0.75), ("low", "middle", "high", "none")),
        (SIGNAL, (-1.0, 0.0, 1.0), ("b0", "b1", "b2", "b3", "none")),
        ("classifier.wiki", (0.5, 1.0), ("low", "middle", "high", "none")),
        ("importance.wiki", (-2.5,), ("low", "high", "none")),
    ],
)
def test_names_of_buckets(by: str, cuts: tuple[float, ...], names: tuple[str, ...]) -> None:
    assert config(by, *cuts).bucket_names == names


def test_buckets_of_perplexity_are_those_of_the_verdicts() -> None:
    assert (*perplexity.BUCKETS, perplexity.ALL) == PERPLEXITY_BUCKETS


def test_every_signal_of_buckets_is_a_numeric_column() -> None:
    assert len(FAMILY_OF) > 60
    assert all(pa.types.is_floating(kind) or pa.types.is_integer(kind) for kind in map(_kind, FAMILY_OF))


def _kind(name: str) -> pa.DataType:
    return DOCUMENTS.field(name).type


def test_the_measure_of_a_config() -> None:
    assert config("").measure is config("perplexity").measure is None
    assert config(SIGNAL, 0.5).measure == Measure("documents", SIGNAL)
    assert config("classifier.wiki", 0.5).measure == Measure("scores", "classifier_scores", "wiki")
    assert config("importance.my.set 2", 0.5).measure == Measure("scores", "importance", "my.set 2")
    assert {*SCORE_COLUMNS.values()} <= {*SCORES.names}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"buckets_by": "fineweb_terminal_line"},
            r"expected a signal or score, got 'fineweb_terminal_line' \(did you mean 'fineweb_t",
        ),
        ({"buckets_by": "perplexty"}, r"did you mean 'perplexity'"),
        ({"buckets_by": "url"}, r"expected a signal or score, got 'url' \(valid: "),
        ({"bucket_cuts": [0.5]}, "bucket_cuts would be ignored: buckets_by names no signal"),
        ({"buckets_by": "perplexity", "bucket_cuts": [0.5]}, r"would be ignored: the shares of \[perplexity\] define"),
        ({"buckets_by": SIGNAL}, "buckets_by = 'fineweb_terminal_lines' requires bucket_cuts"),
        ({"buckets_by": SIGNAL, "bucket_cuts": [0.5, 0.5]}, r"expected ascending values .* got \[0.5, 0.5\]"),
        ({"buckets_by": SIGNAL, "bucket_cuts": [0.7, 0.5]}, r"got \[0.7, 0.5\]"),
        ({"buckets_by": SIGNAL, "bucket_cuts": [0.1, 0.1 + 1e-12]}, "differ in single precision"),
        ({"buckets_by": SIGNAL, "bucket_cuts": [float("nan")]}, "finite number"),
        ({"buckets_by": "clasifier.wiki"}, r"score, got 'clasifier.wiki' \(did you mean 'classifier.NAME'\?\)"),
        ({"buckets_by": "classifier"}, r"score, got 'classifier' \(did you mean 'classifier.NAME'\?\)"),
        ({"buckets_by": "importance."}, r"score, got 'importance\.' \(did you mean 'importance.NAME'\?\)"),
        ({"buckets_by": "classifier.wiki"}, r"buckets_by = 'classifier\.wiki' requires bucket_cuts"),
        ({"buckets_by": "classifier.wiki", "bucket_cuts": [0.5, 1.5]}, r"expected probabilities .*got \[0.5, 1.5\]"),
        ({"buckets_by": "classifier.wiki", "bucket_cuts": [0, 0.5]}, r"above 0 and up to 1, got \[0.0, 0.5\]"),
        ({"mix": 3}, "tokens.mix: Input should be a valid string"),
    ],
)
def test_inconsistent_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe({"tokens": settings}, [], recipe_sections(), "test")


def test_buckets_require_a_measured_value() -> None:
    """Checked before the run starts: without a scorer there is no perplexity, without its family a signal is null."""

    def checked(*overrides: str) -> None:
        whole = ['tokens.buckets_by=""', "tokens.bucket_cuts=[]"]
        recipe = read_recipe(str(RECIPE), [*whole, *overrides])
        assert check_buckets(recipe, SPLITS) == {}

    checked()
    checked(f"tokens.buckets_by={SIGNAL}", "tokens.bucket_cuts=[0.5]")
    with pytest.raises(
        ConfigError, match=r"expected perplexity\.scorer to be set for buckets by perplexity, got no scorer"
    ):
        checked("tokens.buckets_by=perplexity")
    checked("tokens.buckets_by=perplexity", "perplexity.scorer=ngram", 'perplexity.models={en="en.lm"}')
    dclm = ["tokens.buckets_by=dclm_stop_words", "tokens.bucket_cuts=[3]"]
    with pytest.raises(ConfigError, match=r"got 'dclm_stop_words' of the family 'dclm', but quality\.families has"):
        checked(*dclm)
    families = '["gopher_repetition","gopher_quality","c4","fineweb","dclm"]'
    checked(*dclm, f"quality.families={families}")


WIKI = 'classifier.models={wiki="wiki.arrow"}'
BOOKS = 'importance.models={books="books.arrow"}'


def cut_by(by: str, *models: str, cut: float = 0.5) -> Any:
    return read_recipe(str(RECIPE), [f'tokens.buckets_by="{by}"', f"tokens.bucket_cuts=[{cut}]", *models])


@pytest.mark.parametrize(
    ("by", "models", "got"),
    [
        ("classifier.wiki", (), r"'classifier\.wiki' and no model .*'wiki' to classifier\.models\."),
        ("classifier.wkii", (WIKI,), r"'classifier\.wkii' \(did you mean 'classifier\.wiki'\?\)\. "),
        ("importance.wiki", (WIKI,), r"'importance\.wiki' \(valid: classifier\.wiki\)\. .*'wiki' to importance\.m"),
        ("classifier.books", (BOOKS,), r"'classifier\.books' \(did you mean 'importance\.books'\?\)\. .*classifier\.m"),
        ("classifier.y", (WIKI, BOOKS), r"'classifier\.y' \(did you mean 'classifier\.wiki'\?\)\. "),
    ],
)
def test_buckets_require_the_score_of_a_model(by: str, models: tuple[str, ...], got: str) -> None:
    expected = "tokens.buckets_by: expected the score of a model in the recipe"
    with pytest.raises(ConfigError, match=f"{expected}, got {got}"):
        check_buckets(cut_by(by, *models), SPLITS)


def test_scores_are_read_only_if_they_define_the_buckets() -> None:
    """Other recipes do not read them, so the digests of their datasets do not change."""
    tokens = STEPS[-1]
    for by, models, tables in (
        ("classifier.wiki", (WIKI,), ("documents", "scores")),
        ("importance.books", (BOOKS,), ("documents", "scores")),
        (SIGNAL, (WIKI,), ("documents", "templates", "verdicts", "repeats")),
    ):
        recipe = cut_by(by, *models)
        assert check_buckets(recipe, SPLITS) == {}
        assert tokens.inputs(recipe) == ("clean", "tokenizer", *tables)
    whole = read_recipe(str(RECIPE), ['tokens.buckets_by=""', "tokens.bucket_cuts=[]", WIKI])
    assert tokens.inputs(whole) == ("clean", "tokenizer")
    perplexity = read_recipe(str(RECIPE), ["tokens.buckets_by=perplexity", "tokens.bucket_cuts=[]"])
    assert tokens.inputs(perplexity) == ("clean", "tokenizer", "documents", "templates", "verdicts", "repeats")


def test_a_cut_belongs_to_the_bucket_above_it() -> None:
    floats = pa.array([None, -1.0, 0.29999998, 0.3, 0.30000001, 0.5, 7.0, float("nan")], pa.float32())
    assert bucket_numbers(floats, (0.3, 0.5)).tolist() == [3, 0, 0, 1, 1, 2, 2, 3]
    counts = pa.array([2, 3, 4, None, 2**31 - 1], pa.int32())
    assert bucket_numbers(counts, (3.0,)).tolist() == [0, 1, 1, 2, 1]
    assert bucket_numbers(pa.array([], pa.int32()), (3.0,)).tolist() == []


def test_both_sides_are_single_precision() -> None:
    """0.1 as a float32 is slightly more than 0.1: as doubles, a stored 0.1 would be above a cut of 0.1."""
    assert bucket_numbers(pa.array([0.1, 0.7], pa.float32()), (0.1, 0.7)).tolist() == [1, 2]


DROPPED = 3
"""The number of the document that is not measured."""


def part_of(folder: Path, **columns: dict[str, list[Any]]) -> Part:
    """Write a part of tables of five documents; `documents` has one more, dropped before it is measured."""
    ids = [bytes([number]) * 16 for number in range(6)]
    store, paths = Store(str(folder)), {}
    for name, values in columns.items():
        has_all = name == "documents"
        doc_ids = [doc_id for number, doc_id in enumerate(ids) if has_all or number != DROPPED]
        rows: dict[str, Any] = {"doc_id": pa.array(doc_ids, pa.binary(16))} | values
        if has_all:
            rows["drop_stage"] = pa.array([None] * DROPPED + ["source"] + [None] * 2, pa.string())
        paths[name] = f"{name}.parquet"
        pq.write_table(pa.table(rows), folder / paths[name])
    return written_part(0, dict.fromkeys(paths, store), paths)


def buckets_by_id(part: Part, given: TokensConfig) -> dict[int, str]:
    return {identifier[0]: bucket for identifier, bucket in buckets_of_part(part, given)}


def test_buckets_of_a_signal(tmp_path: Path) -> None:
    part = part_of(tmp_path, documents={SIGNAL: pa.array([0.1, 0.5, None, None, 0.9, 0.4], pa.float32())})
    assert buckets_by_id(part, config(SIGNAL, 0.5)) == {0: "low", 1: "high", 2: "none", 4: "high", 5: "low"}


def test_documents_with_cut_spans_have_the_bucket_of_the_remaining_text(tmp_path: Path) -> None:
    """Also if the remaining text has no value; `repeats` is not read for documents without cut spans."""
    span = {"start": 0, "end": 3, "reason": "sentence"}
    kind = pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32()), ("reason", pa.string())]))
    part = part_of(
        tmp_path,
        documents={SIGNAL: pa.array([0.1, 0.1, 0.1, None, 0.9, 0.9], pa.float32())},
        repeats={
            "cuts": pa.array([[span], [], None, [span], [span, span]], kind),
            SIGNAL: pa.array([0.9, None, 0.9, None, 0.2], pa.float32()),
        },
    )
    assert buckets_by_id(part, config(SIGNAL, 0.5)) == {0: "high", 1: "low", 2: "low", 4: "none", 5: "low"}


def scores(column: str, *values: dict[str, float | None] | None) -> dict[str, list[Any]]:
    return {column: pa.array([to_entries(entries) for entries in values], SCORES.field(column).type)}


def test_buckets_of_a_classifier(tmp_path: Path) -> None:
    """0.7 and the cut at 0.7 are the same float32, slightly below 0.7, so the value is in the upper bucket."""
    named = [{"de": 0.9, "wiki": 0.1}, {"wiki": 0.7}, {"de": 0.9}, None, {"wiki": 0.69}]
    part = part_of(tmp_path, documents={}, scores=scores("classifier_scores", *named))
    assert buckets_by_id(part, config("classifier.wiki", 0.7)) == {0: "low", 1: "high", 2: "none", 4: "none", 5: "low"}
    expected = {0: "middle", 1: "none", 2: "middle", 4: "none", 5: "none"}
    assert buckets_by_id(part, config("classifier.de", 0.5, 1.0)) == expected


def test_buckets_of_importance(tmp_path: Path) -> None:
    """A text without words has an entry and no value."""
    named = [{"wiki": -1.5}, {"wiki": None}, {"wiki": -1.0}, {"wiki": 0.25}, {"wiki": 3.0}]
    part = part_of(tmp_path, documents={}, scores=scores("importance", *named))
    cut = config("importance.wiki", -1.0, 0.0, 3.0)
    assert buckets_by_id(part, cut) == {0: "b0", 1: "none", 2: "b1", 4: "b2", 5: "b3"}


def test_scores_are_of_the_whole_document(tmp_path: Path) -> None:
    """Models score a text before spans are cut from it, and nothing scores the remaining text."""
    span = {"start": 0, "end": 3, "reason": "sentence"}
    kind = pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32()), ("reason", pa.string())]))
    part = part_of(
        tmp_path,
        documents={},
        scores=scores("classifier_scores", *[{"wiki": 0.9}] * 5),
        repeats={"cuts": pa.array([[span]] * 5, kind)},
    )
    assert {*buckets_by_id(part, config("classifier.wiki", 0.5)).values()} == {"high"}


def test_buckets_of_perplexity(tmp_path: Path) -> None:
    named = ["head", "all", "tail", "middle", "head"]
    part = part_of(tmp_path, documents={}, verdicts={"perplexity_bucket": pa.array(named, pa.string())})
    assert buckets_by_id(part, config("perplexity")) == {0: "head", 1: "all", 2: "tail", 4: "middle", 5: "head"}


def test_buckets_are_read_in_the_order_of_documents_only() -> None:
    ids = [bytes([number]) * 16 for number in range(4)]
    pairs = list(zip(ids, ["low", "high", "none", "low"]))
    buckets = iter(pairs)
    assert [find_bucket(buckets, ids[1]), find_bucket(buckets, ids[3])] == ["high", "low"]
    for first, second in ((ids[1], ids[0]), (ids[2], ids[2])):
        buckets = iter(pairs)
        find_bucket(buckets, first)
        with pytest.raises(ContractError, match=f"table `clean`: .* got document {second.hex()}"):
            find_bucket(buckets, second)


def lineage(run: Store, **reads: str) -> None:
    """Record in the manifest of `dedup` the versions that it was made from."""
    path = "dedup/v-0000000071a9/manifest.json"
    manifest = run.read_json(path)
    manifest["run"]["lineage"] = {
        **dict.fromkeys(("documents", "verdicts", "clusters", "index"), "v-0000000071a9"),
        **reads,
    }
    run.write_atomic(path, canonical_json(manifest))


def add_table(run: Store, name: str) -> None:
    content = {"table": name, "stages": {}, "config": {}, "inputs": [], "files": []}
    how = {"paths": {}, "started": "", "wall_seconds": 0.0, "cpu_seconds": 0.0, "code_version": ""}
    manifest = make_manifest(content | {"counts": {"rows_in": 0, "rows_kept": 0}}, how, name)
    write_manifest(run.child(f"{name}/v-0000000071a9"), manifest)
    state = read_run(run)
    write_run(run, RunFile(tables=state.tables | {name: "v-0000000071a9"}, recipe=state.recipe))


def test_a_prediction_reads_the_values_of_the_buckets(tmp_path: Path) -> None:
    """It reads `repeats`, unless the spans of `repeats` are cut from other documents."""
    run = make_run(tmp_path / "run", "clean")
    add_table(run, "index")
    lineage(run)
    assert "repeats" not in open_tables(run)
    add_repeats(run)
    assert "repeats" in open_tables(run)
    edit(run, "dedup", lambda content: content["figures"].update(made="again"))
    assert "repeats" not in open_tables(run)


def test_scores_of_other_models_than_those_of_the_verdicts_are_rejected(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "clean")
    for name in ("index", "scores"):
        add_table(run, name)
    lineage(run, scores="v-0000000071a9")
    assert "scores" in open_tables(run)
    for earlier in ({"scores": "v-earlier"}, {}):
        lineage(run, **earlier)
        with pytest.raises(ContractError, match=r"`dedup` made from scores/v-0000000071a9, got .*(v-e|None)"):
            open_tables(run)


def test_a_prediction_uses_the_mix_only_for_the_same_documents(tmp_path: Path) -> None:
    """A dataset of other documents may have buckets of scores that no longer exist."""
    run = make_run(tmp_path / "run")
    tables = {"documents": TableVersion(*open_table(run, "documents"))}
    assert mix_of(run, tables) is None
    read = {"clean": "c" * 64, "documents": tables["documents"].manifest.digest}

    def cut(content: dict[str, Any]) -> None:
        content["config"] = {"tokens": config("classifier.wiki", 0.5).content()}
        content["stages"] = {"tokens": TOKENS.version}
        content["figures"]["mix"] = {"web+low": {"keep": 0.5}}
        content["inputs"] = [{"name": name, "bytes": 1, "sha256": digest} for name, digest in read.items()]

    edit(run, "tokens", cut)
    assert mix_of(run, tables) == Sorting(config("classifier.wiki", 0.5), {"web+low": 0.5})
    read["scores"] = "5" * 64
    edit(run, "tokens", cut)
    assert mix_of(run, tables) is None
    read.pop("scores")
    edit(run, "tokens", cut)
    edit(run, "documents", lambda content: content["figures"].update(made="again"))
    assert mix_of(run, {"documents": TableVersion(*open_table(run, "documents"))}) is None
