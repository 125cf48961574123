"""Tests of classifier training: reading of corpora, the split, equal bytes, the manifest, the store, run samples."""

import bz2
import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.classifier.fasttext import one_line
from pipeline.classifier.stage import CLASSIFIER, ClassifierConfig
from pipeline.fit.classifier import TrainClassifierConfig, part_of, split_spans, summary, train_classifier
from pipeline.fit.corpus import BAD, GOOD, Corpus, LowestHashSample, Reading, digest_of_text, gather_corpora, sample_run
from pipeline.models import ModelsConfig, ensure_model
from schemas.config import build_recipe
from schemas.errors import ConfigError, ContractError
from schemas.ids import shuffle_key
from schemas.manifest import RunFile, make_manifest, write_manifest, write_run
from schemas.storage import Store
from schemas.tables import CLEAN

READING = Reading.model_validate({})
GOOD_WORDS = ["history", "river", "century", "science", "music", "theory", "island", "language"]
BAD_WORDS = ["click", "buy", "cheap", "casino", "login", "free", "deal", "now"]


def corpus(**values: Any) -> Corpus:
    return Corpus.model_validate(values)


def write_lines(path: Path, rows: Sequence[Any]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    opener = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
    with opener(path, "wt", encoding="utf-8") as stream:
        stream.write(text)
    return str(path)


def sentences(words: list[str], count: int, seed: int) -> list[str]:
    chooser = random.Random(seed)
    shared = ["the", "of", "and", "a"]
    return [" ".join(chooser.choice(words + shared) for _ in range(20)) for _ in range(count)]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return {
        "good": write_lines(tmp_path / "good.jsonl.gz", [{"text": text} for text in sentences(GOOD_WORDS, 150, 1)]),
        "bad": write_lines(tmp_path / "bad.jsonl.bz2", [{"text": text} for text in sentences(BAD_WORDS, 150, 2)]),
    }


def config(files: dict[str, str], **values: Any) -> TrainClassifierConfig:
    return TrainClassifierConfig.model_validate(
        {"positives": {"files": [files["good"]]}, "negatives": {"files": [files["bad"]]}, "bits": 12} | values
    )


def test_training_is_deterministic(tmp_path: Path, files: dict[str, str]) -> None:
    first = train_classifier(config(files), str(tmp_path / "first"))
    second = train_classifier(config(files), str(tmp_path / "second"))
    for name in ("quality.arrow",):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert first["content"] == second["content"]
    assert first == json.loads((tmp_path / "first" / "quality.json").read_text())
    assert train_classifier(config(files, seed=1), str(tmp_path / "first"))["content"] != first["content"]


def test_the_manifest_has_inputs_settings_and_metrics(tmp_path: Path, files: dict[str, str]) -> None:
    content = train_classifier(config(files), str(tmp_path / "out"))["content"]
    assert content["kind"] == "linear"
    assert content["deterministic"] is True
    assert [(entry["class"], entry["name"]) for entry in content["inputs"]] == [
        ("good", "good.jsonl.gz"),
        ("bad", "bad.jsonl.bz2"),
    ]
    import hashlib

    assert content["inputs"][0]["sha256"] == hashlib.sha256(Path(files["good"]).read_bytes()).hexdigest()
    model = (tmp_path / "out" / "quality.arrow").read_bytes()
    assert content["model"] == {
        "file": "quality.arrow",
        "bytes": len(model),
        "sha256": hashlib.sha256(model).hexdigest(),
    }
    assert content["settings"]["bits"] == 12
    assert "epochs" not in content["settings"]
    assert content["settings"]["positives"]["max_documents"] == 50_000
    assert "files" not in content["settings"]["positives"]
    for name in ("good", "bad"):
        assert sum(content["texts"][name].values()) == 150
        assert 5 <= content["texts"][name]["heldout"] <= 30
    heldout = content["heldout"]
    assert heldout["auc"] > 0.99
    assert heldout["good"] == content["texts"]["good"]["heldout"]
    assert heldout["thresholds"]["0.5"]["precision"] > 0.9
    assert heldout["brier"] < 0.1
    assert "AUC" in summary({"content": content})


def test_a_model_goes_into_the_store_and_scores_by_its_name(tmp_path: Path, files: dict[str, str]) -> None:
    store = ModelsConfig.model_validate({"cache": str(tmp_path / "cache"), "offline": True})
    manifest = train_classifier(config(files, name="wiki"), str(tmp_path / "out"), models=store)
    local = ensure_model("wiki", store)
    assert local.sha256 == manifest["content"]["model"]["sha256"]
    assert local.path.name == f"{local.sha256[:16]}.arrow"
    classify = CLASSIFIER.make(ClassifierConfig(models={"w": "wiki"}), {"w": str(local.path)})
    rows: list[dict[str, Any]] = [{"_body": " ".join(words)} for words in (GOOD_WORDS, BAD_WORDS)]
    for row in rows:
        classify(row)
    assert rows[0]["classifier_scores"]["w"] > 0.9
    assert rows[1]["classifier_scores"]["w"] < 0.1


def test_labeled_files_hold_both_classes(tmp_path: Path) -> None:
    rows = [{"body": text, "y": 1} for text in sentences(GOOD_WORDS, 80, 1)]
    rows += [{"body": text, "y": 0} for text in sentences(BAD_WORDS, 80, 2)]
    reading = {"text_field": "body", "label_field": "y"}
    paths = [write_lines(tmp_path / "l.jsonl", rows[:100]), str(tmp_path / "l.parquet")]
    pq.write_table(pa.Table.from_pylist(rows[100:]), paths[1])
    settings = TrainClassifierConfig.model_validate({"labelled": paths, "reading": reading, "bits": 12})
    content = train_classifier(settings, str(tmp_path / "out"))["content"]
    assert {name: sum(parts.values()) for name, parts in content["texts"].items()} == {"good": 80, "bad": 80}
    assert {entry["class"] for entry in content["inputs"]} == {"labelled"}


@pytest.mark.parametrize(
    ("label", "good_labels", "good"),
    [
        (1, ["1"], True),
        (0, ["1"], False),
        (True, ["true"], True),
        ("hq", ["hq"], True),
        ("1", ["1"], True),
        (1.0, ["1"], False),
    ],
)
def test_labels_are_compared_as_json(tmp_path: Path, label: Any, good_labels: list[str], good: bool) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"text": "a b", "label": label}])
    reading = Reading.model_validate({"good_labels": good_labels})
    gathered = gather_corpora({GOOD: corpus(), BAD: corpus()}, (path,), reading, 0)
    assert [len(gathered.texts[name]) for name in (GOOD, BAD)] == [int(good), int(not good)]


def test_unusable_rows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "good.jsonl"
    path.write_bytes(
        b'{"text": "one"}\n\n{"text": 5}\nnot json\n[1]\n{"text": " \\n"}\n{"text": "one"}\n{"text": "both"}\n'
    )
    bad = write_lines(tmp_path / "bad.jsonl", [{"text": "both"}, {"text": "two"}])
    gathered = gather_corpora({GOOD: corpus(files=[str(path)]), BAD: corpus(files=[bad])}, (), READING, 0)
    assert [text.text for text in gathered.texts[GOOD]] == ["one"]
    assert [text.text for text in gathered.texts[BAD]] == ["two"]
    assert dict(gathered.left_out) == {"no_text": 1, "bad_line": 2, "empty": 1, "repeated": 1, "contradictory": 2}
    unlabelled = gather_corpora({GOOD: corpus(), BAD: corpus()}, (str(path),), READING, 0)
    assert unlabelled.left_out["no_label"] == 4


def test_text_files_are_documents_and_patterns_name_many(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"\ufeffbook {number}\nline", encoding="utf-8")
    gathered = gather_corpora({GOOD: corpus(files=[str(tmp_path / "*.txt")])}, (), READING, 0)
    assert sorted(text.text for text in gathered.texts[GOOD]) == [f"book {number}\nline" for number in range(3)]
    assert [entry["name"] for entry in gathered.inputs] == ["0.txt", "1.txt", "2.txt"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"good\.files: 1 problem(?s:.*)no file that matches"):
        gather_corpora({GOOD: corpus(files=[str(tmp_path / "*.jsonl")])}, (), READING, 0)
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(ConfigError, match=r"good\.files: expected a suffix of \.jsonl, .*got .*x\.csv\. Convert the"):
        gather_corpora({GOOD: corpus(files=[str(tmp_path / "x.csv")])}, (), READING, 0)
    (tmp_path / "x.txt").write_text("a")
    with pytest.raises(ConfigError, match="labelled: expected JSON lines or Parquet, which can hold labels"):
        gather_corpora({GOOD: corpus(), BAD: corpus()}, (str(tmp_path / "x.txt"),), READING, 0)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"text": "a"}\n' * 9999)[:-20])
    with pytest.raises(
        ContractError, match=r"good\.files: expected .*cut\.jsonl\.gz to be readable, got .*\. Replace the file"
    ):
        gather_corpora({GOOD: corpus(files=[str(cut)])}, (), READING, 0)
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match=r"expected the columns text, got body in .*\. Set reading\.text_field to"):
        gather_corpora({GOOD: corpus(files=[str(tmp_path / "x.parquet")])}, (), READING, 0)


def test_a_sample_is_the_bottom_k_in_any_order() -> None:
    texts = [f"text {number}" for number in range(200)]
    expected = sorted(texts, key=lambda text: shuffle_key(3, digest_of_text(text)))[:20]
    for order in (texts, texts[::-1], texts + texts):
        sample = LowestHashSample(20, gather_corpora({}, (), READING, 0).left_out)
        for text in order:
            sample.offer_by_hash(text, 3)
        assert [text.text for text in sample.texts()] == expected


def test_the_split_depends_on_the_text_alone(files: dict[str, str]) -> None:
    settings = config(files, heldout_share=0.2, calibrate_share=0.3)
    gathered = gather_corpora({GOOD: settings.positives, BAD: settings.negatives}, (), settings.reading, settings.seed)
    texts = [text for name in (GOOD, BAD) for text in gathered.texts[name]]
    parts = {text.text: part_of(text, settings) for text in texts}
    fractions = {text.text: shuffle_key(0, b"part" + text.digest) / 2**63 for text in texts}
    for text, fraction in fractions.items():
        assert parts[text] == ("heldout" if fraction < 0.2 else "calibrate" if fraction < 0.5 else "train")
    fast = config(files, heldout_share=0.2, kind="fasttext")
    assert {text.text for text in texts if part_of(text, fast) == "heldout"} == {
        text for text, part in parts.items() if part == "heldout"
    }
    assert {part_of(text, fast) for text in texts} == {"train", "heldout"}


@pytest.mark.parametrize(
    ("text", "size", "pieces"),
    [
        ("short", 100, ["short"]),
        ("", 100, []),
        ("ab cd\nef gh", 8, ["ab cd\n", "ef gh"]),
        ("ab cd ef gh", 8, ["ab cd ", "ef gh"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("\nabcdef", 4, ["\nabc", "def"]),
        ("ab      cd", 4, ["ab  ", "cd"]),
    ],
)
def test_long_texts_are_split_at_line_ends_and_spaces(text: str, size: int, pieces: list[str]) -> None:
    assert list(split_spans(text, size)) == pieces


def test_all_spans_of_a_text_are_in_one_part(tmp_path: Path, files: dict[str, str]) -> None:
    book = " ".join(sentences(GOOD_WORDS, 500, 9))
    more = write_lines(tmp_path / "book.jsonl", [{"text": book}])
    settings = config(files, positives={"files": [files["good"], more]}, piece_chars=200)
    content = train_classifier(settings, str(tmp_path / "out"))["content"]
    assert sum(content["texts"]["good"].values()) == 151
    pieces = len(list(split_spans(book, 200)))
    book_pieces = {part: content["pieces"][part] for part in content["pieces"]}
    assert pieces > 300
    assert sum(count > pieces for count in book_pieces.values()) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 3}, r"epochs would be ignored with kind = 'linear'\. Remove epochs"),
        (
            {"kind": "fasttext", "l2": 0.1, "calibrate_share": 0.2},
            r"calibrate_share, l2 would be ignored with kind = 'fasttext'\. Remove calibrate_share, l2",
        ),
        ({"kind": "fasttext", "threads": 10}, "threads: Input should be greater than or equal to 11, .* 10"),
        (
            {"negatives": {}},
            r"expected both positives and negatives, or labelled files, got neither\. Set train_classifier\.positives",
        ),
        (
            {"positives": {"files": ["x"], "sources": ["web"]}},
            r"sources, languages: expected `run` to be set, .* got no `run`\. Set",
        ),
        ({"name": "a/b"}, "name: expected letters, digits, dots, _ and -"),
        ({"postives": {}}, "postives: no such key .did you mean 'positives'"),
    ],
)
def test_invalid_settings_are_rejected(values: dict[str, Any], message: str) -> None:
    raw = {"positives": {"files": ["x"]}, "negatives": {"files": ["y"]}} | values
    with pytest.raises(ConfigError, match=message):
        build_recipe({"train_classifier": raw}, {"train_classifier": TrainClassifierConfig}, "test")


def test_a_part_without_a_class_is_rejected(tmp_path: Path, files: dict[str, str]) -> None:
    few = write_lines(tmp_path / "few.jsonl", [{"text": "only one"}])
    with pytest.raises(
        ContractError, match=r"expected both classes in the \w+ texts, got \d+ good and \d+ bad examples"
    ):
        train_classifier(config(files, positives={"files": [few]}), str(tmp_path / "out"))


def make_run(folder: Path, parts: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Write a run folder with only a clean table of these parts; return its path."""
    run = Store(str(folder))
    table = run.child("clean/v-test")
    entries, paths = [], {}
    for ordinal, rows in enumerate(parts):
        key = f"part-{ordinal:05d}"
        table.make_parent(f"{key}.parquet")
        full = [{name: row.get(name) for name in CLEAN.names} for row in rows]
        pq.write_table(pa.Table.from_pylist(full, schema=CLEAN), table.path(f"{key}.parquet"))
        size = table.size(f"{key}.parquet")
        entries.append({"key": key, "rows": len(rows), "bytes": size, "sha256": table.sha256(f"{key}.parquet")})
        paths[key] = f"{key}.parquet"
    total = sum(map(len, parts))
    content = {"table": "clean", "stages": {}, "config": {}, "inputs": [], "files": entries}
    content["counts"] = {"rows_in": total, "rows_kept": total, "dropped": {}}
    timing = {"started": "", "wall_seconds": 0.0, "cpu_seconds": 0.0, "code_version": "test"}
    write_manifest(table, make_manifest(content, {"paths": paths, **timing}, "test"))
    write_run(run, RunFile(tables={"clean": "v-test"}))
    return str(folder)


def row(number: int, **values: Any) -> dict[str, Any]:
    words = GOOD_WORDS if number % 2 else BAD_WORDS
    text = f"{number} " + " ".join(random.Random(number).choices(words, k=20))
    source = "wiki" if number % 2 else "web"
    return {"doc_id": number.to_bytes(16, "big"), "source": source, "language": "en", "text": text} | values


ROWS = [row(number) for number in range(300)]


@pytest.mark.parametrize("layout", [[ROWS], [ROWS[:7], [], ROWS[7:]], [ROWS[::-1]]])
def test_a_sample_of_a_run_is_the_bottom_k_by_doc_id(tmp_path: Path, layout: Any) -> None:
    run = make_run(tmp_path / "run", layout)
    web = [r for r in ROWS if r["source"] == "web"]
    expected = sorted((shuffle_key(5, r["doc_id"]), r["text"]) for r in web)
    for size in (1, 10, 150, 1000):
        assert sample_run(None, run, (("web",), (), 5), size).texts == expected[:size]


def test_dropped_rows_and_other_languages_are_not_sampled(tmp_path: Path) -> None:
    rows = [row(0), row(2, drop_stage="pii"), row(4, language="de"), row(6, language=None)]
    run = make_run(tmp_path / "run", [rows])
    assert [text for _, text in sample_run(None, run, ((), ("en",), 0), 9).texts] == [rows[0]["text"]]
    assert len(sample_run(None, run, ((), (), 0), 9).texts) == 3
    with pytest.raises(
        ContractError, match=r"expected kept documents of sources \['books'\] and languages all, got none"
    ):
        sample_run(None, run, (("books",), (), 0), 9)


def test_a_classifier_of_a_run_s_sources(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [ROWS])
    settings = TrainClassifierConfig.model_validate(
        {"positives": {"run": run, "sources": ["wiki"]}, "negatives": {"run": run, "sources": ["web"]}, "bits": 12}
    )
    content = train_classifier(settings, str(tmp_path / "out"))["content"]
    assert {name: sum(parts.values()) for name, parts in content["texts"].items()} == {"good": 150, "bad": 150}
    assert content["heldout"]["auc"] > 0.99
    assert [entry["name"] for entry in content["inputs"]] == ["clean", "clean"]
    assert len(content["inputs"][0]["sha256"]) == 64


@pytest.mark.spark
def test_spark_returns_the_same_sample(tmp_path: Path, spark: Any) -> None:
    run = make_run(tmp_path / "run", [ROWS[:100], ROWS[100:]])
    for size in (1, 40, 1000):
        assert sample_run(spark, run, (("web",), (), 5), size) == sample_run(None, run, (("web",), (), 5), size)


@pytest.mark.slow
def test_fasttext_is_trained_and_measured_on_the_same_texts(tmp_path: Path, files: dict[str, str]) -> None:
    pytest.importorskip("fasttext")
    fast = train_classifier(config(files, kind="fasttext", epochs=25), str(tmp_path / "out"))["content"]
    linear = train_classifier(config(files), str(tmp_path / "out"))["content"]
    assert fast["deterministic"] is False
    assert fast["model"]["file"] == "quality.bin"
    assert fast["heldout"]["auc"] > 0.95
    assert [fast["texts"][name]["heldout"] for name in (GOOD, BAD)] == [
        linear["texts"][name]["heldout"] for name in (GOOD, BAD)
    ]
    assert "l2" not in fast["settings"]


def test_a_line_for_fasttext_contains_no_label() -> None:
    assert one_line("a\n__label__good\tb ") == "a label good b"
