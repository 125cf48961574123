"""Tests of cutting: what goes and what stays to the character, and that nothing shared is left."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.decontaminate.index import compile_index
from pipeline.decontaminate.match import pieces_left
from pipeline.decontaminate.stage import DecontaminateConfig, make
from pipeline.text.spans import complement
from pipeline.text.words import normal_words, word_keys
from schemas.errors import ContractError

ITEM = [f"word{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
CHINESE = "北京大学的研究人员昨天在会议上宣布他们发现了一种新的材料可以在常温下导电"


def stage(folder: Path, *items: str, **others: object):
    """The stage's function, cutting."""
    path = folder / "exam.jsonl"
    path.write_text("".join(json.dumps({"text": item}) + "\n" for item in items))
    config = DecontaminateConfig(
        evaluation_sets={"exam": str(path)},
        **{"action": "cut", "cut_margin": 0, "min_piece_chars": 0, "ngram": 5, "min_item_words": 5} | others,
    )
    return make(config, compile_index(config, {"set_exam": str(path)}, str(folder)))


def row_of(text: str, cuts: list[tuple[int, int]]) -> dict:
    body = "".join(text[start:end] for start, end in complement(cuts, len(text)))
    return {"text": text, "cuts": cuts, "_body": body, "_words": word_keys(normal_words(body)), "num_bytes": -1}


def cut(function, text: str, cuts: list[tuple[int, int]] | None = None) -> dict:
    """The row after the stage, its columns checked against each other."""
    row = row_of(text, cuts or [])
    function(row)
    left = complement(row["cuts"], len(text))
    assert "".join(text[start:end] for start, end in left) == row["_body"]
    assert complement(left, len(text)) == row["cuts"]  # sorted, disjoint, none empty, none adjacent
    assert row["_words"].tolist() == word_keys(normal_words(row["_body"])).tolist()
    if row["contamination"]:
        assert row["num_bytes"] == len(row["_body"].encode("utf-8", "surrogatepass"))
        again = row_of(row["_body"], [])
        function(again)
        assert (again["contamination"], again["contaminated_pieces"]) == ({}, None)
    else:
        assert (row["cuts"], row["num_bytes"]) == (cuts or [], -1)
    return row


E5 = "worda wordb wordc wordd worde"


@pytest.mark.parametrize(
    ("text", "body", "pieces"),
    [
        (f"one two {E5} three", "one two three", 2),
        (f"one two\n{E5}\nthree", "one two\nthree", 2),
        (f"one two {E5}\n\nthree", "one two\nthree", 2),
        (f"one two, “{E5.upper()}”! Three.", "one two, Three.", 2),
        (f"{E5} three", "three", 1),
        (f"one {E5}", "one", 1),
        (f" {E5}. ", "", 0),
        (f"one {E5} two {E5} three {E5}", "one two three", 3),
        (f"one {E5} wordb wordc wordd worde two", "one wordb wordc wordd worde two", 2),
        ("one worda wordb wordc wordd two", "one worda wordb wordc wordd two", None),
    ],
)
def test_what_stays_to_the_character(tmp_path: Path, text: str, body: str, pieces: int | None) -> None:
    row = cut(stage(tmp_path, E5), text)
    assert (row["_body"], row["contaminated_pieces"]) == (body, pieces)


def test_the_margin_takes_whole_tokens_and_short_pieces_go(tmp_path: Path) -> None:
    text = f"aaaa bbbb cccc {E5} dddd eeee ffff {E5} gggg hhhh"
    assert cut(stage(tmp_path, E5, cut_margin=1), text)["_body"] == "aaaa bbbb cccc dddd eeee ffff gggg hhhh"
    assert cut(stage(tmp_path, E5, cut_margin=2), text)["_body"] == "aaaa bbbb eeee hhhh"
    assert cut(stage(tmp_path, E5, cut_margin=6), text)["_body"] == "aaaa bbbb eeee hhhh"
    assert cut(stage(tmp_path, E5, cut_margin=7), text)["_body"] == "aaaa"
    assert cut(stage(tmp_path, E5, min_piece_chars=14), text)["_body"] == "aaaa bbbb cccc dddd eeee ffff"
    assert cut(stage(tmp_path, E5, min_piece_chars=15), text)["_body"] == ""
    longest = cut(stage(tmp_path, E5, min_piece_chars=14, cut_margin=1000), text)
    assert (longest["_body"], longest["contaminated_pieces"], longest["cuts"]) == ("", 0, [(0, len(text))])


def test_published_margin_and_least_piece(tmp_path: Path) -> None:
    words = " ".join(f"left{n:03}" for n in range(100))  # 799 characters
    function = stage(tmp_path, E5, cut_margin=200, min_piece_chars=200)
    row = cut(function, f"{words} {E5} {words[:300]}")
    assert row["_body"] == words[: 75 * 8 - 1]  # 25 words and 200 characters of margin; 100 characters on the right
    assert row["contaminated_pieces"] == 1


def test_earlier_cuts_are_kept_and_joined(tmp_path: Path) -> None:
    text = f"menu\none two {E5[:17]}AD{E5[17:]} three\nfooter"
    cuts = [(0, 5), (text.index("AD"), text.index("AD") + 2), (text.index("\nfooter"), len(text))]
    row = cut(stage(tmp_path, E5), text, cuts)
    assert row["_body"] == "one two three"
    assert row["cuts"] == [(0, 5), (13, text.index("three")), (len(text) - 7, len(text))]


def test_what_only_the_cut_brings_together_goes_too(tmp_path: Path) -> None:
    function = stage(tmp_path, E5, "inner one two three four five")
    row = cut(function, "x worda wordb inner one two three four five wordc wordd worde y")
    assert (row["contamination"], row["_body"]) == ({"exam": 2}, "x y")


@pytest.mark.parametrize(("levels", "body"), [(20, "x y"), (21, "")])
def test_cuts_within_cuts_end(tmp_path: Path, levels: int, body: str) -> None:
    text = "x " + "worda wordb " * levels + "wordc wordd worde " * levels + "y"
    assert cut(stage(tmp_path, E5), text)["_body"] == body


def test_characters_are_cut_where_words_are_not_spaced(tmp_path: Path) -> None:
    function = stage(tmp_path, CHINESE, ngram_chars=10)
    row = cut(function, f"前文在这里，{CHINESE[4:20]}。后文在那里。")
    assert row["_body"] == "前文在这里，。后文在那里。"
    assert row["contaminated_share"] == float(np.float32(16 / 26))
    row = cut(function, f"{E5} 前文，{CHINESE}\n后文 {E5}")
    assert row["_body"] == f"{E5} 前文，\n后文 {E5}"


def test_a_body_that_is_not_the_text_without_its_cuts_is_refused(tmp_path: Path) -> None:
    row = row_of(f"one {E5}", []) | {"cuts": [(0, 1)]}
    with pytest.raises(ContractError, match=r"found 33 code points in place of 32"):
        stage(tmp_path, E5)(row)


WORDS = st.sampled_from([*ITEM[:7], "x", "Y,", "3.5", "(worda", "worde.", "\n", "  ", "字", "\ud800"])


@pytest.fixture(scope="module")
def cutters(tmp_path_factory: pytest.TempPathFactory):
    """Functions with several margins over one set."""
    items = [" ".join(ITEM[:7]), " ".join(ITEM[4:7] + ITEM[:4]), "x x x x x"]
    given = [{}, {"cut_margin": 3}, {"cut_margin": 7, "min_piece_chars": 20}]
    return [stage(tmp_path_factory.mktemp("cut"), *items, **others) for others in given]


@settings(deadline=None, max_examples=100)
@given(st.lists(WORDS, max_size=60), st.lists(st.integers(0, 200), max_size=6), st.integers(0, 2))
def test_nothing_shared_is_left_of_any_text(cutters, words: list[str], edges: list[int], which: int) -> None:
    text = " ".join(words)
    inside = sorted({edge for edge in edges if edge <= len(text)})
    cut(cutters[which], text, list(zip(inside[::2], inside[1::2])))


def test_pieces_left() -> None:
    assert pieces_left("aa bb cc", np.array([[3, 5]]), 0, 0) == [(0, 3), (6, 8)]
    assert pieces_left("aa bb cc", np.array([[3, 5]]), 1, 0) == [(0, 3), (6, 8)]
    assert pieces_left("aa bb cc", np.array([[3, 5]]), 2, 0) == []


def test_real_pages_lose_what_was_planted_and_nothing_else(tmp_path: Path, shared_data: Path) -> None:
    with gzip.open(shared_data / "text" / "gutenberg.jsonl.gz") as lines:
        book = json.loads(next(lines))["text"].split()
    with gzip.open(shared_data / "text" / "brown.jsonl.gz") as lines:
        pages = [json.loads(line)["text"] for _, line in zip(range(40), lines)]
    items = [" ".join(book[at : at + 30]) for at in range(1000, 21_000, 500)]
    function = stage(tmp_path, *items, ngram=13, min_item_words=13)
    for page, item in zip(pages, items):
        before, after = page[:1500].rsplit(" ", 1)[0].lstrip(), page[1500:3000].split(" ", 1)[-1].rstrip()
        row = cut(function, f"{before} {item} {after}")
        assert row["contamination"]["exam"] == len(normal_words(item)) - 12
        assert (row["_body"], row["contaminated_pieces"]) == (f"{before} {after}", 2)
