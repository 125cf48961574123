"""Tests of the rows of the table `templates`: limits on both sides, headings, and texts measured again."""

from typing import Any

import pyarrow as pa
import pytest

from jobs.recipe import recipe_sections
from pipeline.engine.stage import Drop, PerDocument, Row
from pipeline.engine.worker import FusedStages
from pipeline.stages import MEASURED
from pipeline.templates.blocks import PageCounts, blocks_of, host_number
from pipeline.templates.stage import TemplatesConfig
from pipeline.templates.step import TemplatesTask, count_row, find_templates, measure_without, measured_again, rows_of
from pipeline.text.spans import without
from schemas.config import Recipe
from schemas.overrides import load_recipe
from schemas.storage import Store
from schemas.tables import MEASURED_AGAIN

URL = "http://a.example/1"
MENU = "Home | News | Contact"
NOTICE = "All rights reserved by Acme."
STORY = [
    "The council of the town has read the report and will answer all letters in the spring.",
    "A new bridge was built over the river, and many people came to see it on the first day.",
    "The old one had been closed for three years, because nobody wanted to pay for it.",
]


def recipe(*overrides: str) -> Recipe:
    settings = ['source.paths=["x"]', "toxicity.wordlists={}", "templates.min_share=0.3", *overrides]
    return load_recipe({}, settings, recipe_sections(), "test")


def counts(host_pages: int, **pages: int) -> PageCounts:
    """The counts of a host: its pages, and the pages with each line."""
    host = host_number(URL)
    assert host is not None
    own = int(host).to_bytes(8, "big")
    lines = blocks_of("\n".join(pages)).keys
    keys = [own, *(own + int(line).to_bytes(8, "big") for line in lines)]
    columns = {"key": pa.array(keys, pa.binary()), "total": pa.array([host_pages, *pages.values()], pa.int64())}
    return PageCounts([pa.RecordBatch.from_pydict(columns)])


def found(text: str, host_pages: int, title: str | None = None, **pages: int) -> Row:
    row: Row = {}
    stored = {"url": URL, "text": text, "title": title}
    find_templates(row, stored, counts(host_pages, **pages), TemplatesConfig(min_share=0.3))
    return row


def left(text: str, row: Row) -> str:
    return without(text, [(start, end) for start, end, _ in row["cuts"]])


@pytest.mark.parametrize(
    ("host_pages", "pages", "is_cut"),
    [
        (9, 9, None),  # a host with fewer than 10 pages is left alone
        (10, 4, False),  # fewer than 5 pages
        (10, 5, True),
        (20, 5, False),  # 25 %
        (20, 6, True),  # 30 %
        (1000, 299, False),
        (1000, 300, True),
    ],
)
def test_a_line_is_cut_from_both_limits_on(host_pages: int, pages: int, is_cut: bool | None) -> None:
    row = found("Menu\nStory", host_pages, Menu=pages, Story=1)
    if is_cut is None:
        assert row == {}
        return
    assert row["host_pages"] == host_pages
    assert row["blocks"] == ([(0, 4, pages)] if pages >= 5 else [])
    assert row["cuts"] == ([(0, 5, "template")] if is_cut else [])
    assert row["template_chars"] == 5 * is_cut


def test_all_occurrences_are_cut_and_one_break_is_left() -> None:
    text = "Menu\n\nStory\n\nmenu\nMENU\n\nMore\nMenu"
    row = found(text, 10, Menu=10)
    assert left(text, row) == "Story\n\nMore"
    assert [pages for _, _, pages in row["blocks"]] == [10, 10, 10, 10]
    assert row["template_chars"] == len(text) - len("Story\n\nMore")


def test_a_page_keeps_its_own_heading() -> None:
    text = "Sleep\nStory\nFood"
    assert left(text, found(text, 10, "Sleep | Acme", Sleep=9, Food=9)) == "Sleep\nStory"
    assert left(text, found(text, 10, "Acme: sleep", Sleep=9, Food=9)) == "Story"


def test_a_page_without_a_host_is_left_alone() -> None:
    for url in (None, "mailto:a@b.example", "http://other.example/"):
        row: Row = {}
        find_templates(
            row, {"url": url, "text": "Menu", "title": None}, counts(10, Menu=10), TemplatesConfig(min_share=1)
        )
        assert row == {}


AGAIN = measured_again(MEASURED)


@pytest.mark.parametrize("cut_lines", ["[]", '["c4"]', '["c4", "refinedweb"]'])
def test_the_rest_is_measured_as_if_the_lines_had_never_been_there(cut_lines: str) -> None:
    """All columns are those of a document that has only the rest; the cuts of line rules lead to the same text."""
    settings = recipe(
        f"quality.cut_lines={cut_lines}",
        'quality.families=["gopher_repetition", "gopher_quality", "c4", "fineweb", "lines"]',
    )
    measure = FusedStages(AGAIN, settings, {})
    text = "\n".join([MENU, STORY[0], NOTICE, "", STORY[1], "javascript is needed", STORY[2], NOTICE])
    rest = "\n".join([STORY[0], "", STORY[1], "javascript is needed", STORY[2]])
    start = text.index(NOTICE)
    cuts = [(0, len(MENU) + 1), (start, start + len(NOTICE) + 1), (len(text) - len(NOTICE) - 1, len(text))]
    assert without(text, cuts) == rest
    known = {"language": "en", "source": "web"}
    again = measure_without(known, text, cuts, measure)
    alone = FusedStages(AGAIN, settings, {})(known | {"text": rest})
    for name in MEASURED_AGAIN:
        if name not in ("num_chars", "body_chars"):
            assert again.get(name) == alone.get(name), name
    assert (again["num_chars"], again["body_chars"]) == (len(rest), len(alone["_body"]))
    assert without(text, again["text_cuts"]) == alone["_body"]
    assert [text[start:end] for start, end in again["lines"]] == [rest[start:end] for start, end in alone["lines"]]
    assert "remainder_drop" not in again
    assert not {"text", "cuts", "language"} & again.keys()


def test_nothing_may_be_left() -> None:
    again = measure_without({"language": "en"}, MENU, [(0, len(MENU))], FusedStages(AGAIN, recipe(), {}))
    assert (again["num_chars"], again["body_chars"], again["num_bytes"]) == (0, 0, 0)
    assert again["text_cuts"] == [(0, len(MENU))]
    assert again["signature"] is not None


def _stage(function: Any) -> PerDocument:
    return PerDocument("mine", 1, TemplatesConfig, ("_body",), (), {"too_sad": "x"}, lambda config, models: function)


class Task(TemplatesTask):
    @property
    def context(self) -> list[str]:
        return ["language", "source"]


@pytest.mark.parametrize(
    ("function", "reason"), [(lambda row: Drop("too_sad"), "too_sad"), (lambda row: 1 / 0, "failed")]
)
def test_a_text_that_a_stage_drops_is_not_cut(function: Any, reason: str) -> None:
    settings = recipe()
    sections = Recipe({**dict(settings), "mine": TemplatesConfig()})
    task = Task(None, sections, (*AGAIN, _stage(function)), {}, Store("x"))  # type: ignore[arg-type]
    measure = FusedStages(task.stages, sections, {})
    text = "\n".join([MENU, *STORY])
    columns = {
        "doc_id": pa.array([bytes(16)], pa.binary(16)),
        **{
            "url": [URL],
            "language": ["en"],
            "source": ["web"],
            "num_chars": [len(text)],
            "text": [text],
            "title": [""],
        },
    }
    pages = {MENU: 9}
    (row,) = rows_of(pa.RecordBatch.from_pydict(columns), counts(10, **pages), task, measure)
    assert (row["cuts"], row["template_chars"], row["remainder_drop"]) == ([], 0, f"mine/{reason}")
    assert row["blocks"] == [(0, len(MENU), 9)]
    assert not {*MEASURED_AGAIN} & row.keys()
    figures = count_row(row)
    assert figures["remainder_drop"] == {f"mine/{reason}": 1}
    assert figures["cut_documents"] == {}
    assert figures["kept_chars"] == len(text)


def test_figures_count_cuts_by_language_and_lines_by_share() -> None:
    row = {
        "host_pages": 20,
        "_language": "de",
        "_chars": 100,
        "_lines": 2,
        "blocks": [(0, 4, 5), (5, 9, 6), (10, 30, 20)],
        "cuts": [(5, 10, "template"), (10, 30, "template")],
        "template_chars": 25,
    }
    assert count_row(row) == {
        "documents": 1,
        "kept_chars": 75,
        "cut_documents": {"de": 1},
        "cut_lines": {"de": 2},
        "cut_chars": {"de": 25},
        "by_share": {"0.2": {"lines": 1, "chars": 4}, "0.3": {"lines": 1, "chars": 4}, "1": {"lines": 1, "chars": 20}},
        "remainder_drop": {},
    }
    assert count_row({"_chars": 7, "_language": None})["kept_chars"] == 7
    assert count_row({"_chars": 7, "_language": None})["documents"] == 0
