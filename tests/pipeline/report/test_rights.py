"""The section on rights: counts by hand of a part, prices by a law, and the text of the page."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.report.facts import PlanFigure, PlanSummary, RunFacts
from pipeline.report.judged import JudgedPart
from pipeline.report.page import render, write_report
from pipeline.report.rights import DomainRow, LanguageRow, RightsCounts, rights_counts, rights_view
from pipeline.rights.stage import RIGHTS
from schemas.storage import Store
from tests.support.report_run import whole_run, words_of

ROWS: list[dict[str, Any]] = [
    {"language": "en", "domain": "a.org", "robots_meta": ["noai"], "chars": 100},
    {"language": "en", "domain": "a.org", "robots_meta": ["noai"], "tdm_reservation": 1, "chars": 50},
    {"language": "de", "domain": "b.org", "tdm_reservation": 1, "chars": 30},
    {"language": None, "domain": None, "robots_usage": ["later/train-ai=n"], "chars": 20},
    {"language": "de", "domain": "c.org", "robots_denied": ["crawl/GPTBot"], "chars": 200},
    {"language": "de", "domain": "d.org", "chars": 600},
    {"language": "en", "domain": "a.org", "robots_meta": ["noai"], "chars": None},
]
"""The last row is not kept."""


def facts_of(**settings: Any) -> RunFacts:
    figures = (PlanFigure("tokens", 4_000.0, "tokens", "", ""), PlanFigure("unique_tokens", 1_000.0, "tokens", "", ""))
    plan = PlanSummary("", "", 1, figures, num_params=10)
    tables: Any = {}
    return RunFacts(
        run=Store("."),
        recipe={"rights": settings},
        tables=tables,
        stale=(),
        folders={},
        training=SimpleNamespace(plan=plan),  # type: ignore[arg-type]
    )


def part_of(rows: list[dict[str, Any]]) -> JudgedPart:
    kinds = {column.name: column.type for column in RIGHTS.columns} | dict.fromkeys(("language", "domain"), pa.string())
    table = pa.table({name: pa.array([row.get(name) for row in rows], kind) for name, kind in kinds.items()})
    chars = np.array([np.nan if row["chars"] is None else row["chars"] for row in rows])
    return JudgedPart(0, table, [(None, None, None, None)] * len(rows), chars)


def counted(facts: RunFacts, *parts: JudgedPart) -> RightsCounts:
    counts = rights_counts(facts)
    for part in parts:
        counts.add(part)
    return counts


def test_protocols_are_counted_alone_and_together() -> None:
    facts = facts_of(robots={"crawl": "x", "later": "y"})
    view = rights_view(facts, counted(facts, part_of(ROWS[:3]), part_of(ROWS[3:])), None)
    assert view is not None
    assert {row.name: (row.documents, row.chars) for row in view.rows} == {
        "robots_meta": (2, 150),
        "tdm": (2, 80),
        "content_usage": (1, 20),
        "content_usage, crawl": (0, 0),
        "content_usage, later": (1, 20),
        "content_signal": (0, 0),
        "content_signal, crawl": (0, 0),
        "content_signal, later": (0, 0),
        "robots_txt": (1, 200),
        "robots_txt, crawl": (1, 200),
        "robots_txt, later": (0, 0),
        "together": (5, 400),
    }
    assert (view.rows[0].document_share, view.rows[0].char_share, view.rows[0].tokens, view.rows[0].loss) == (
        *(2 / 6, 0.15, None, None),
    )
    assert view.languages[0] == LanguageRow("de", 3, (0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 2))
    assert view.languages[1:] == (
        LanguageRow("en", 2, (2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2)),
        LanguageRow("no language", 1, (0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1)),
    )
    assert view.domains[:2] == (
        DomainRow("a.org", 2, 150, "robots_meta, tdm"),
        DomainRow("c.org", 1, 200, "robots_txt"),
    )
    assert view.num_domains == 4


def test_the_price_is_the_loss_on_the_tokens_that_are_left() -> None:
    calls: list[tuple[Any, float, float, float]] = []

    def loss(own: Any, params: float, tokens: float, unique: float) -> float:
        calls.append((own, params, tokens, unique))
        return 1_000 / unique

    facts = facts_of()
    view = rights_view(facts, counted(facts, part_of(ROWS)), loss)
    assert view is not None
    assert [row.name for row in view.rows] == ["robots_meta", "tdm", "content_usage", "content_signal", "together"]
    assert view.rows[0].loss == pytest.approx(1 / 0.85 - 1)
    assert calls[:2] == [(None, 10, 4_000.0, 850.0), (None, 10, 4_000.0, 1_000.0)]


def test_without_marks_there_is_no_section(tmp_path: Path) -> None:
    facts = facts_of()
    part = part_of(ROWS)
    assert (
        rights_view(facts, counted(facts, JudgedPart(0, part.table.select(["language"]), [], part.clean_chars)), None)
        is None
    )
    run = whole_run(tmp_path / "run")
    assert 'id="rights"' not in Path(write_report(run)).read_text()


def test_the_licence_is_priced_if_some_are_allowed() -> None:
    rows = [{"chars": 1, "header_licence": name} for name in ("CC-BY-4.0", "CC-BY-NC-4.0", None)]
    facts = facts_of(licences=["CC-BY"])
    view = rights_view(facts, counted(facts, part_of(rows)), None)
    assert view is not None
    assert {row.name: row.documents for row in view.rows}["licence"] == 1


def test_the_section_escapes_names_from_the_web() -> None:
    rows = [{"domain": "<script>x</script>\x1b[2J", "robots_meta": ["noai"], "chars": 1, "language": "<b>"}]
    facts = facts_of()
    view = rights_view(facts, counted(facts, part_of(rows)), lambda *_: 2.0)
    values = {
        "rights": view,
        "kept": SimpleNamespace(reading=SimpleNamespace(is_all=True, rows=1)),
        "commands": SimpleNamespace(quoted="run"),
    }
    html = render("rights.html", values).decode()
    assert "<script>x" not in html
    assert "\x1b" not in html
    assert "&lt;script&gt;x&lt;/script&gt;" in html
    assert "together 1 100.0 % 1 100.0 %" in " ".join(words_of(html).split())
