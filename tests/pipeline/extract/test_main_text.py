"""The choice of blocks by their scores, the model's file, the extractor `penstock` and its second opinions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resiliparse.parse.html import HTMLTree

import penstock
from pipeline.engine.stage import CPU, Drop
from pipeline.extract import extractors
from pipeline.extract.blocks import MAX_TAGS, cut_blocks
from pipeline.extract.extract import EMPTY_PAGE, ERRORS, GUARD, LIMITED, ExtractConfig, make_extract
from pipeline.extract.extractors import DecodedPage, ExtractorError, Options, make_extractor
from pipeline.extract.features import PageFacts, WordOdds
from pipeline.extract.main_text import (
    SHIPPED_MODEL,
    MainTextModel,
    ScoredBlocks,
    feature_names,
    first_features,
    load_model,
    parse_page,
    score_blocks,
    second_features,
)
from pipeline.extract.second_opinion import Opinion, SecondOpinionError
from pipeline.extract.trees import Trees
from pipeline.models import REGISTRY
from schemas.errors import ContractError
from schemas.ids import file_sha256

SENTENCE = "The penstock carries water from the reservoir down to the turbine, and its gate can be closed. "
LINKS = "".join(f'<li><a href="/{name}">{name}</a>' for name in ("Home", "News", "Contact"))
MENU = f"<nav><ul>{LINKS}</ul></nav>"
PAGE = (
    f"<html><head><title>Water power - Example</title></head><body>{MENU}<main><h1>Water power</h1>"
    f"<p>{SENTENCE * 3}</p><p>{SENTENCE * 4}</p></main>"
    "<footer><p>© 2024 Example. All rights reserved.</p></footer></body></html>"
)


def blocks(scores: list[float], words: list[float]) -> ScoredBlocks:
    page = cut_blocks("<body>" + "<p>x</p>" * len(scores) + "</body>")
    return ScoredBlocks(page, np.array(words, np.float32), np.array(scores, np.float32))


@pytest.mark.parametrize(
    ("scores", "words", "kept", "f1"),
    [
        ([], [], [], 0.0),
        ([0.9, 0.1], [10, 10], [0], 2 * 9 / (10 + 10)),
        # Expected F1 with both blocks: 2 · (9 + 4) / (20 + 13); with the first alone: 2 · 9 / (10 + 13).
        ([0.9, 0.4], [10, 10], [0], 2 * 13 / 33),
        ([0.4, 0.4], [10, 10], [], 2 * 8 / (20 + 8)),
        ([0.44, 0.46], [10, 30], [1], None),
    ],
)
def test_the_blocks_to_keep(scores: list[float], words: list[float], kept: list[int], f1: float | None) -> None:
    scored = blocks(scores, words)
    # At least the best block is kept, whatever its score.
    best = [number for number, score in enumerate(scores) if score == max(scores)]
    assert scored.kept().tolist() == (kept or best)
    if f1 is not None:
        assert scored.expected_f1() == pytest.approx(f1, abs=1e-6)


@pytest.mark.parametrize(
    ("table", "scores", "kept"),
    [
        ("<tr><td>a<td>b<tr><td>c<td>d", [0.9, 0.1, 0.9, 0.9], [0, 1, 2, 3, 4, 5]),
        ("<tr><td>a<td>b<tr><td>c<td>d", [0.9, 0.1, 0.1, 0.9], [0, 5]),
        ("<tr><td>a<p>b<p>c<td>d", [0.9, 0.1, 0.1, 0.9], [0, 1, 4, 5]),  # page layout
    ],
)
def test_a_table_with_data_is_kept_whole_or_not_at_all(table: str, scores: list[float], kept: list[int]) -> None:
    page = cut_blocks(HTMLTree.parse(f"<p>x</p><table>{table}</table><p>y</p>").body.html)
    scored = ScoredBlocks(page, np.ones(6, np.float32), np.array([1.0, *scores, 1.0], np.float32))
    assert scored.kept().tolist() == kept


def test_the_main_text_of_a_page() -> None:
    page = penstock.extract(PAGE, extractor="penstock")
    assert page.text == f"Water power\n\n{(SENTENCE * 3).strip()}\n\n{(SENTENCE * 4).strip()}"
    assert (page.title, page.extracted_by) == ("Water power", "penstock")
    assert page.expected_f1 is not None
    assert page.expected_f1 > 0.8
    markdown = penstock.extract(PAGE, extractor="penstock", format="markdown").text
    assert markdown.startswith("# Water power\n\n")


@pytest.mark.parametrize("html", ["", "<html></html>", "<script>x()</script>", "<frameset><frame></frameset>", "\x00"])
def test_pages_without_text_are_dropped(html: str) -> None:
    assert penstock.extract(html, extractor="penstock").drop is not None


def test_features_are_finite_and_named() -> None:
    for body in ("x", "<p>" * 50 + "x", MENU, PAGE, "<div>" * 200 + SENTENCE, "<p>·<p>•<p>…", "<p>中文内容。" * 20):
        parsed = parse_page(body)
        page, first = first_features(parsed.blocks, PageFacts(), load_model(SHIPPED_MODEL).lexicon)
        second = second_features(page, first, np.full(first.shape[1], 0.5, np.float32))
        assert second.shape == (len(feature_names()), len(parsed.blocks))
        assert np.isfinite(second).all()
    assert len(set(feature_names())) == len(feature_names())


def test_the_shipped_model_is_the_registered_one() -> None:
    entry = REGISTRY["main-text"]
    assert (file_sha256(SHIPPED_MODEL), SHIPPED_MODEL.stat().st_size) == (entry.sha256, entry.num_bytes)
    assert SHIPPED_MODEL.stat().st_size < 2_000_000


def small_model() -> MainTextModel:
    """A model whose score is the share of words in long blocks: 1 for at least 10 words, else 0."""
    words = feature_names().index("words")
    split = (np.array([words], np.int16), np.array([9.5], np.float32), np.zeros((1, 1), np.int16))
    trees = Trees(*split, np.array([[0, 1]], np.float32), 0.0)
    return MainTextModel(WordOdds({"a": 1.5}, {"nav": -2.0}, frozenset(("the",))), trees, trees, feature_names())


def test_a_file_of_a_model(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        small_model().save(tmp_path / name)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    again = load_model(tmp_path / "a.npz")
    assert (again.lexicon.text, again.lexicon.markup, again.lexicon.stop_words) == ({"a": 1.5}, {"nav": -2.0}, {"the"})
    parsed = parse_page(PAGE)
    scores = score_blocks(parsed.blocks, parsed.facts, again).scores.tolist()
    assert scores == [float(len(text.split()) >= 10) for text in parsed.blocks.sources()]


@pytest.mark.parametrize("content", [b"", b"no model", None])
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.npz"
    if content is None:
        np.savez(path, format=np.array(1))
    else:
        path.write_bytes(content)
    with pytest.raises(ContractError, match="expected a model of main text, got"):
        load_model(path)


def test_a_model_of_another_version(tmp_path: Path) -> None:
    model = small_model()
    MainTextModel(model.lexicon, model.first, model.second, ("words",)).save(tmp_path / "model.npz")
    with pytest.raises(ContractError, match=f"the {len(feature_names())} features of this version, got format 1"):
        load_model(tmp_path / "model.npz")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pages that get a second opinion, which is "other"."""
    pages: list[str] = []

    def answer(page: str, url: str | None) -> Opinion:
        pages.append(page)
        if "fails" in page:
            raise SecondOpinionError("stopped", 3.0)
        return Opinion("" if "nothing" in page else "other", 0.25)

    monkeypatch.setattr(extractors, "_second_opinion", lambda settings: answer)
    return pages


@pytest.mark.parametrize(
    ("html", "text", "by", "cause"),
    [
        ("<p>short", "other", "trafilatura", "unsure"),
        ("<p>nothing", "nothing", "penstock", "unsure: empty"),
        ("<p>fails", "fails", "penstock", "unsure: stopped"),
        ("<script>x()</script>", "other", "trafilatura", "empty"),
        (PAGE, None, "penstock", None),
    ],
)
def test_second_opinions(asked: list[str], html: str, text: str | None, by: str, cause: str | None) -> None:
    extract = make_extractor("penstock", Options(min_expected_f1=1.0 if html != PAGE else 0.1))
    given = extract(DecodedPage(html))
    assert (given.extracted_by, given.second_opinion) == (by, cause)
    assert text is None or given.text == text
    assert asked == ([] if cause is None else [html])


def test_a_page_that_declares_a_product_is_unsure_below_a_higher_limit(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    product = '<script type="application/ld+json">{"@type": "Product", "name": "Valve"}</script><p>A valve of brass.'
    for expected, least, cause in ((0.79, 0.45, "unsure"), (0.8, 0.45, None), (0.89, 0.9, "unsure"), (0.1, 0.0, None)):
        monkeypatch.setattr(ScoredBlocks, "expected_f1", lambda scored, expected=expected: expected)
        extract = make_extractor("penstock", Options(min_expected_f1=least))
        assert extract(DecodedPage(product)).second_opinion == cause
        assert extract(DecodedPage("<p>A valve of brass.")).second_opinion == (cause if least != 0.45 else None)


def test_a_very_short_text_of_a_long_page(asked: list[str]) -> None:
    extract = make_extractor("penstock", Options())
    words = " ".join(f"<li><a href=/{number}>link</a>" for number in range(400))
    given = extract(DecodedPage(f"<ul>{words}</ul>"))
    assert given.second_opinion in (None, "short")
    assert given.text


def test_the_share_of_second_opinions_is_limited_by_a_hash_of_the_page(asked: list[str]) -> None:
    pages = [f"<p>short {number}" for number in range(400)]
    extract = make_extractor("penstock", Options(min_expected_f1=1.0, max_second_opinions=0.25))
    given = {html: extract(DecodedPage(html)).second_opinion for html in pages}
    chosen = [html for html, opinion in given.items() if opinion == "unsure"]
    assert {*given.values()} == {"unsure", "unsure: limit"}
    assert 70 <= len(chosen) <= 130  # 100 expected
    assert asked == chosen
    # The pages before make no difference, and a page without a text is asked for at any share.
    again = make_extractor("penstock", Options(min_expected_f1=1.0, max_second_opinions=0.25))
    assert {html: again(DecodedPage(html)).second_opinion for html in reversed(pages)} == given
    none = make_extractor("penstock", Options(min_expected_f1=1.0, max_second_opinions=0.0))
    assert none(DecodedPage("<script>x()</script>")).second_opinion == "empty"


def test_the_blocks_with_the_highest_scores() -> None:
    scored = blocks([0.2, 0.9, 0.5, 0.95], [100, 50, 60, 0])
    assert scored.best(50).tolist() == [1]
    assert scored.best(51).tolist() == [1, 2]
    assert scored.best(1000).tolist() == [0, 1, 2]
    assert blocks([], []).best(1).tolist() == []


@pytest.mark.parametrize(("words", "by"), [(149, "penstock"), (150, "all")])
def test_a_page_with_many_words_is_not_empty(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, words: int, by: str
) -> None:
    monkeypatch.setattr(extractors, "score_blocks", lambda *page: blocks([], []))
    html = f"<p>{'word ' * (words - 1)}nothing</p>"
    given = make_extractor("penstock", Options())(DecodedPage(html))
    assert (given.extracted_by, given.second_opinion) == (by, "empty: empty")
    assert len(given.text.split()) == (words if by == "all" else 0)


def test_a_page_with_scored_blocks_falls_back_to_the_best_of_them(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScoredBlocks, "kept", lambda scored: np.zeros(0, np.int64))
    given = make_extractor("penstock", Options())(DecodedPage(f"<main><p>{SENTENCE * 2}<p>nothing</main>"))
    assert given.second_opinion == "empty: empty"
    assert given.extracted_by == "penstock"
    assert SENTENCE.strip() in given.text


def broken(*args: object) -> None:
    raise ValueError("no score")


def test_an_error_of_the_model_is_a_cause_and_a_drop_if_nobody_knows(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extractors, "score_blocks", broken)
    extract = make_extractor("penstock", Options())
    given = extract(DecodedPage(PAGE))
    assert (given.text, given.extracted_by, given.second_opinion) == ("other", "trafilatura", "error")
    with pytest.raises(ExtractorError, match="ValueError"):
        extract(DecodedPage("<p>fails"))
    page = {"_payload": f"<p>fails {'word ' * 150}".encode(), "_http_charset": None, "text": None}
    assert make_extract(ExtractConfig(extractor="penstock"), {})(page) == Drop("parser_error")
    assert (page["second_opinion"], page[GUARD]) == ("error: stopped", "error/stopped")
    assert page[EMPTY_PAGE] == "error: stopped"
    assert page[CPU] == {"second_opinion": 3.0}


@pytest.mark.parametrize(
    ("html", "settings", "guard", "empty"),
    [
        (PAGE, {}, "none", None),
        ("<p>short", {"min_expected_f1": 1.0}, "unsure/used", None),
        ("<p>nothing", {"min_expected_f1": 1.0}, "unsure/empty", None),
        ("<p>fails", {"min_expected_f1": 1.0}, "unsure/stopped", None),
        ("<p>short", {"min_expected_f1": 1.0, "max_second_opinions": 0.0}, "unsure/limit", None),
        ("<script>nothing</script>", {}, "empty/empty", None),
        (f"<p>{'word ' * 149}", {"min_text_chars": 5000, "min_expected_f1": 0.0}, "none", None),
        (f"<p>{'word ' * 150}", {"min_text_chars": 5000, "min_expected_f1": 0.0}, "none", "short_text"),
    ],
)
def test_what_is_counted_of_a_page(
    asked: list[str], html: str, settings: dict[str, Any], guard: str, empty: str | None
) -> None:
    page = {"_payload": html.encode(), "_http_charset": None, "text": None}
    make_extract(ExtractConfig(extractor="penstock", **settings), {})(page)
    assert (page[GUARD], page.get(EMPTY_PAGE)) == (guard, empty)


def extracted(html: str, **settings: Any) -> dict[str, Any]:
    """Return the row of a page after extraction."""
    page = {"_payload": html.encode(), "_http_charset": None, "text": None, "url": "https://example.org/a"}
    make_extract(ExtractConfig(**settings), {})(page)
    return page


def test_code_at_the_start_keeps_the_indentation_of_its_first_line() -> None:
    code = "".join(f"    gate_{number} = open_gate(lake, {number})\n" for number in range(40))
    html = f"<html><body><article><pre>\n  # no text before\n{code}</pre></article></body></html>"
    page = extracted(html, min_expected_f1=0.0)
    assert page["text"] == f"  # no text before\n{code}".rstrip()
    assert page["num_chars"] == len(page["text"])


def test_second_opinions_have_the_form_of_the_recipe() -> None:
    html = PAGE.replace("<p>", "<h2>The gate</h2><p>Opened <b>slowly</b> <a href=/log>here</a>. ", 1)
    plain, marked = (
        extracted(html, min_expected_f1=1.0, format=form, links=links)
        for form, links in (("text", False), ("markdown", True))
    )
    assert (plain["extracted_by"], marked["extracted_by"]) == ("trafilatura", "trafilatura")
    assert "The gate\nOpened slowly here." in plain["text"]
    assert "## The gate\n\nOpened **slowly** [here](https://example.org/log)." in marked["text"]


@pytest.mark.parametrize("tag", ["<p>", "<b>x</b>"])
def test_a_page_with_too_many_tags_is_counted(asked: list[str], tag: str) -> None:
    whole = extracted(PAGE, min_expected_f1=0.0)
    long = extracted(PAGE.replace("</main>", f"{tag * MAX_TAGS}</main>"), min_expected_f1=0.0)
    assert (whole[LIMITED], long[LIMITED]) == ((), ("tags",))
    other = extracted(f"<script>{tag * MAX_TAGS}</script>", min_expected_f1=0.0)
    assert (other["extracted_by"], other[LIMITED]) == ("trafilatura", ())


def test_errors_are_counted_by_the_names_of_their_types(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(page: str, url: str | None) -> Opinion:
        raise SecondOpinionError("failed", 0.5, "RecursionError")

    assert extracted(PAGE, min_expected_f1=0.0)[ERRORS] == ()
    monkeypatch.setattr(extractors, "_second_opinion", lambda settings: fails)
    assert extracted("<p>short", min_expected_f1=1.0)[ERRORS] == ("trafilatura/RecursionError",)
    monkeypatch.setattr(extractors, "score_blocks", broken)
    page = extracted("<p>short", min_expected_f1=1.0)
    assert page[GUARD] == "error/failed"
    assert page[ERRORS] == ("penstock/ValueError", "trafilatura/RecursionError")
