"""Tests of the index of evaluation sets: broken files, equal bytes, and exactness against sets of word tuples."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.decontaminate.index import (
    build_index,
    character_keys,
    compile_index,
    located_characters,
    located_words,
    ngrams,
    prefix_sums,
    read_items,
)
from pipeline.decontaminate.match import open_index
from pipeline.decontaminate.stage import DecontaminateConfig
from pipeline.text.words import BASE, normal_words, word_keys
from schemas.errors import ConfigError, ContractError

LINE = {"question": "a question of exactly eight words, no more"}


def jsonl(path: Path, *items: object) -> str:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


def config_of(**paths: str) -> tuple[DecontaminateConfig, dict[str, str]]:
    return DecontaminateConfig(evaluation_sets=paths), {f"set_{name}": path for name, path in paths.items()}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "cut', r"exam\.jsonl:3: expected a JSON object, got Unterminated string"),
        (b'["a", "list"]', r"exam\.jsonl:3: expected a JSON object, got list"),
        (b'{"question": "\xff\xfe"}', r"exam\.jsonl:3: expected a JSON object, got 'utf-8' codec"),
        (b'{"questoin": "x", "id": 1}', r"exam\.jsonl:3: expected a field question or .*, got 'id', 'questoin'"),
        (b"{}", r"exam\.jsonl:3: expected a field question or .*, got none\. Name the fields to read in"),
        (b"[" * 100_000, r"exam\.jsonl:3: expected a JSON object, got maximum recursion"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "exam.jsonl"
    path.write_bytes(json.dumps(LINE).encode() + b"\n\n" + line + b"\n")
    config, paths = config_of(exam=str(path))
    with pytest.raises(ConfigError, match=f"^decontaminate.evaluation_sets.exam: .*{message}"):
        compile_index(config, paths, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exam.jsonl"]


def test_an_unknown_field_is_reported_with_the_nearest_name(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "exam.jsonl", {"quesiton": "x"})
    with pytest.raises(ConfigError, match=r"exam.jsonl:1: expected a field question, .*did you mean 'quesiton'"):
        list(read_items(path, "where", ("question",)))


@pytest.mark.parametrize("content", [b"", b"\n \n", b'{"question": null}\n', b'{"question": "too short for it"}\n'])
def test_a_set_without_items_that_can_match_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "exam.jsonl"
    path.write_bytes(content)
    config, paths = config_of(exam=str(path))
    with pytest.raises(ConfigError, match=rf"sets.exam: expected items .* got none among {content.count(b'{')} it"):
        compile_index(config, paths, str(tmp_path))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "exam.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(LINE).encode() * 50)[:-20])
    config, paths = config_of(exam=str(path))
    with pytest.raises(ConfigError, match=r"exam: expected a readable file, got .*exam\.jsonl\.gz"):
        compile_index(config, paths, str(tmp_path))


def test_fields_lists_and_nested_objects(tmp_path: Path) -> None:
    item = {
        "question": ["first", ["second", 3, None]],
        "choices": [{"text": "a"}, {"text": ["b"]}, {"label": "c"}, "d"],
        "answer": 4,
        "text": "\ud800",
    }
    path = jsonl(tmp_path / "items.jsonl", item, {"answer": "x", "question": None})
    assert list(read_items(path, "where")) == [(1, ["first", "second", "\ud800"]), (2, [])]
    assert next(read_items(path, "where", ("choices.text", "answer"))) == (1, ["a", "b"])


def test_compressed_files_are_read_alike_and_equal_sets_give_equal_bytes(tmp_path: Path) -> None:
    items = [{"question": f"{LINE['question']} {word}"} for word in ("one", "two", "three")]
    plain = jsonl(tmp_path / "exam.jsonl", *items)
    data = Path(plain).read_bytes()
    for suffix, codec in (("gz", "gzip"), ("zst", "zstd"), ("bz2", "bz2")):
        with pa.output_stream(str(tmp_path / f"exam.jsonl.{suffix}"), compression=codec) as stream:
            stream.write(data)
    (tmp_path / "windows.jsonl").write_bytes(b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n\r\n"))
    names = ["exam.jsonl", "exam.jsonl.gz", "exam.jsonl.zst", "exam.jsonl.bz2"]
    built = {build_index(*config_of(exam=str(tmp_path / name))) for name in names}
    assert len(built) == 1
    other = tmp_path / "other.jsonl"
    other.write_bytes(data)
    assert compile_index(*config_of(exam=str(other)), str(tmp_path)) == compile_index(
        *config_of(exam=plain), str(tmp_path)
    )
    hashes = {
        tuple(open_index(compile_index(*config_of(exam=str(tmp_path / name)), str(tmp_path))["index"]).arrays["hashes"])
        for name in (*names, "windows.jsonl")
    }
    assert len(hashes) == 1


def test_the_file_name_depends_on_sets_and_settings(tmp_path: Path) -> None:
    small, large = jsonl(tmp_path / "1", LINE), jsonl(tmp_path / "2", LINE, LINE)
    config, paths = config_of(exam=small)
    first = compile_index(config, paths, str(tmp_path))["index"]
    written = Path(first).stat().st_mtime_ns
    assert compile_index(config, paths, str(tmp_path)) == {"index": first}
    assert Path(first).stat().st_mtime_ns == written
    eight = config.model_copy(update={"ngram": 8})
    others = [
        compile_index(*config_of(exam=large), str(tmp_path)),
        compile_index(*config_of(quiz=small), str(tmp_path)),
    ]
    assert len({first, *(other["index"] for other in others), compile_index(eight, paths, str(tmp_path))["index"]}) == 4


def test_a_file_that_is_no_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.arrow").write_bytes(b"no arrow file")
    with pytest.raises(ContractError, match=r"index.arrow: expected an index of evaluation sets, got "):
        open_index(str(tmp_path / "index.arrow"))


def test_ngrams_by_their_definition() -> None:
    keys = word_keys(list("abcabcd"))
    expected = [sum(int(key) * BASE**i for i, key in enumerate(keys[at : at + 3])) % (1 << 64) for at in range(5)]
    assert ngrams(prefix_sums(keys), 3).tolist() == expected
    assert expected[0] == expected[3] != expected[1]
    assert ngrams(prefix_sums(keys), 8).tolist() == []
    assert ngrams(prefix_sums(keys[:0]), 1).tolist() == []


@pytest.mark.parametrize(
    "text",
    ["", "Don't stop: 3.5 km!", "每年12月25日，GPT-4 が出る。", "๑๒๓ ภาษาไทย", "Ⅷ ﬁn İstanbul ㍿", "\ud800x 字\ud800"],
)
def test_located_units_are_the_units_of_the_text(text: str) -> None:
    keys, (starts, ends) = located_words(text)
    assert keys.tolist() == word_keys(normal_words(text)).tolist()
    assert [text[start:end].split() for start, end in zip(starts, ends)] == [[text[s:e]] for s, e in zip(starts, ends)]
    keys, (starts, ends) = located_characters(text)
    assert keys.tolist() == character_keys(text).tolist()
    assert len(starts) == len(ends) == len(keys)
    assert (np.diff(starts) >= 0).all()


def test_real_books_against_real_questions_agree_with_sets_of_words(tmp_path: Path, shared_data: Path) -> None:
    """The index matches exactly the n-grams that two collections of text share."""
    texts = {}
    for name in ("gutenberg", "brown"):
        with gzip.open(shared_data / "text" / f"{name}.jsonl.gz") as lines:
            texts[name] = [json.loads(line)["text"] for line in lines]
    words = {name: [normal_words(text) for text in collection] for name, collection in texts.items()}
    for size in (5, 13):
        items = [{"text": " ".join(book[at : at + 40])} for book in words["gutenberg"] for at in range(0, 16_000, 400)]
        path = jsonl(tmp_path / "books.jsonl", *[item for item in items if item["text"]])
        config = DecontaminateConfig(evaluation_sets={"books": path}, ngram=size, min_item_words=size)
        index = open_index(compile_index(config, {"set_books": path}, str(tmp_path))["index"])
        known = {tuple(run) for item in items for run in runs_of(item["text"].split(), size)}
        assert index.header["sets"][0]["ngrams"] == len(known) > 9_000
        document = [word for text in words["brown"] for word in text]
        expected = {at for at, run in enumerate(runs_of(document, size)) if tuple(run) in known}
        assert set(index.runs(word_keys(document), "word_sizes").starts.tolist()) == expected
        assert len(expected) > 0 if size == 5 else len(expected) < 20


def runs_of(words: list[str], size: int) -> list[list[str]]:
    return [words[at : at + size] for at in range(len(words) - size + 1)]
