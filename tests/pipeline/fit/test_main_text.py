"""Fitting the model of main text: labels of blocks by hand, log odds of words, and a small fit with catboost."""

import math
from pathlib import Path

import numpy as np
import pytest

from pipeline.extract.main_text import score_blocks
from pipeline.fit.main_text import (
    MarkedPage,
    fit_lexicon,
    fit_main_text,
    label_page,
    labels_by_snippets,
    labels_by_text,
    trees_of,
)

TEXT = "the gate at the head of the penstock is closed before the turbine is opened for repair"
MORE = "water that has passed the turbine leaves the power house through the draft tube below it"


@pytest.mark.parametrize(
    ("blocks", "text", "expected"),
    [
        ([TEXT, "home news"], TEXT, [1.0, 0.0]),
        ([TEXT, "unrelated words that nobody has marked in this page at all", MORE], f"{TEXT} {MORE}", [1.0, 0.0, 1.0]),
        # A short block is main text only between its neighbors in the marked text.
        ([TEXT, "then", MORE, "then"], f"{TEXT} then {MORE}", [1.0, 1.0, 1.0, 0.0]),
        # Half of the words, in a row, are marked.
        ([f"{TEXT} {'other ' * 17}".strip()], TEXT, [0.5]),
        # A copy of the text, such as a teaser.
        ([TEXT, MORE, TEXT], f"{TEXT} {MORE}", [1.0, 1.0, 0.0]),
        ([], TEXT, []),
    ],
)
def test_labels_by_text(blocks: list[str], text: str, expected: list[float]) -> None:
    labels = labels_by_text([block.split() for block in blocks], text.split())
    assert labels.tolist() == pytest.approx(expected, abs=0.01)


def test_labels_by_snippets() -> None:
    labels = labels_by_snippets([TEXT.split(), ["home", "news"], ["more"]], ["The penstock is"], ["Home news!"])
    assert labels[:2].tolist() == [1.0, 0.0]
    assert math.isnan(labels[2])


def page(number: int, fold: int) -> MarkedPage:
    menu = "".join(f"<li><a href=/{link}>Menu entry {link}</a>" for link in range(6))
    text = f"{TEXT.capitalize()}, as report {number} says. {MORE.capitalize()}."
    html = f"<body><ul class=menu>{menu}</ul><div class=story><p>{text}<p>{text[::-1]}</div><p class=foot>Imprint"
    return MarkedPage(html, f"site{number}.example", fold, f"{text} {text[::-1]}")


PAGES = [label_page(page(number, number % 2)) for number in range(12)]


def test_words_get_odds_by_their_sites() -> None:
    lexicon = fit_lexicon(PAGES)
    assert lexicon.markup["story"] > 0 > lexicon.markup["menu"]
    assert lexicon.text["menu"] < 0
    assert "report" not in fit_lexicon(PAGES[:2]).text  # on too few sites


def test_a_fit_learns_and_is_the_same_twice(tmp_path: Path) -> None:
    pytest.importorskip("catboost", reason="the extra `fit` is not installed")
    lines: list[str] = []
    fit_main_text(PAGES, lines.append).save(tmp_path / "a.npz")
    model = fit_main_text(PAGES)
    model.save(tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    assert lines[-1] == "second pass"
    new = label_page(page(99, 0))
    scores = score_blocks(new.parsed.blocks, new.parsed.facts, model).scores
    assert np.all((scores > 0.5) == (new.labels > 0.5))


def test_trees_with_fewer_levels() -> None:
    tree = {"splits": [{"float_feature_index": 1, "border": 0.5}], "leaf_values": [1.0, 3.0]}
    trees = trees_of({"oblivious_trees": [tree], "scale_and_bias": [2.0, [0.25]]})
    assert trees.predict(np.array([[9, 9], [0.5, 0.6]], np.float32)).tolist() == [2.25, 6.25]
