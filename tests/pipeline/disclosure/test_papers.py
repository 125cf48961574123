"""The papers: every field, states, versions and changes, the score by hand, and hostile values in each format."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.disclosure.ab2013 import ab2013_documentation
from pipeline.disclosure.answers import FactsFile, read_answers
from pipeline.disclosure.bom import bill_of_materials
from pipeline.disclosure.eu import eu_summary
from pipeline.disclosure.fact import Fact
from pipeline.disclosure.facts import collect
from pipeline.disclosure.paper import Entry, Paper, PaperField, PaperSection, to_html, to_markdown
from pipeline.disclosure.publish import changes_since, to_json, write_paper
from pipeline.disclosure.score import BY_FORM, ENTRIES, grade, metrics, score, score_rows, totals
from schemas.consumption import Consumption
from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.pipeline.disclosure.facts_file import COMPLETE, rows_of, sums_of
from tests.pipeline.disclosure.test_facts import consumed_of
from tests.support.tiny_dataset import make_tiny_dataset

FIELDS = [
    *(
        "0.a",
        "0.b",
        "1.1.a",
        "1.1.b",
        "1.2.a",
        "1.2.b",
        "1.2.c",
        "1.3.a",
        "1.3.b",
        "1.3.c",
        "1.3.d",
        "1.3.e",
        "1.3.f",
        "1.3.g",
    ),
    *(
        "2.1.a",
        "2.1.b",
        "2.1.c",
        "2.1.d",
        "2.1.e",
        "2.2.1.a",
        "2.2.1.b",
        "2.2.2.a",
        "2.2.2.b",
        "2.2.2.c",
        "2.2.2.d",
        "2.2.2.e",
    ),
    *(
        "2.3.a",
        "2.3.b",
        "2.3.c",
        "2.3.d",
        "2.3.e",
        "2.3.f",
        "2.3.g",
        "2.3.h",
        "2.3.i",
    ),
    *(
        "2.4.a",
        "2.4.b",
        "2.4.c",
        "2.4.d",
        "2.4.e",
        "2.5.a",
        "2.5.b",
        "2.5.c",
        "2.5.d",
        "2.5.e",
        "2.6.a",
        "2.6.b",
        "2.6.c",
    ),
    *(
        "3.1.a",
        "3.1.b",
        "3.1.c",
        "3.2.a",
        "3.3.a",
    ),
]
NOTHING: dict[str, object] = {"changes": None}
HOSTILE = "<img src=x onerror=alert(1)>`|\"'\x1b[2J\u202e](javascript:alert(1))\n# x"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_tiny_dataset(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> FactsFile:
    file = tmp_path_factory.mktemp("facts") / "facts.toml"
    file.write_text(COMPLETE)
    return read_answers(str(file), ("books", "web"))


def paper_of(run: Store, answers: FactsFile, consumed: Consumption | None = None) -> Paper:
    return eu_summary(collect(run, open_dataset(run), consumed or consumed_of(run), answers, False), answers)


def entries(paper: Paper) -> dict[str, Entry]:
    return {entry.key: entry for entry in paper.entries}


def test_every_field_of_the_template_has_entries(run: Store, complete: FactsFile) -> None:
    for answers in (complete, FactsFile("", {}, ("books", "web"))):
        paper = paper_of(run, answers)
        fields = [field for section in paper.sections for field in section.fields]
        assert [field.id for field in fields] == FIELDS
        assert all(field.entries for field in fields)


def test_a_complete_file_leaves_nothing_missing(run: Store, complete: FactsFile) -> None:
    assert paper_of(run, complete).missing == []
    facts = collect(run, open_dataset(run), consumed_of(run), complete, False)
    california = ab2013_documentation(facts, complete)
    assert california.missing == []
    assert [field.id for field in california.sections[0].fields] == [f"({n})" for n in range(1, 13)]


def test_missing_answers_are_named_with_their_first_field(run: Store) -> None:
    missing = dict(map(reversed, paper_of(run, FactsFile("", {}, ("books", "web"))).missing))
    assert missing["provider.name"] == "1.1.a"
    assert missing["sources.books.kind"] == "2.1.a"
    assert "content.comments" not in missing  # optional


def test_what_the_entries_say(run: Store, complete: FactsFile) -> None:
    found = entries(paper_of(run, complete))
    assert found["domains"].rows == (("d00.example", "100"), ("d01.example", "99"))
    assert found["domains.rule"].value == (
        "2 of 11 domains, the top 10 % by tokens that were read, with 18.95% of the tokens of web."
    )
    assert found["languages"].rows == (("English (en)", "1,900", "92.68%"), ("German (de)", "150", "7.32%"))
    assert found["content.sources"].rows == (("books", "1,000", "48.78%", "3"), ("web", "1,050", "51.22%", "12"))
    assert found["latest"].value == "01/2026"
    assert found["period.web"].value == "03/2025 to 01/2026"
    assert found["public.used"].value == "yes: books"
    assert found["sources.books.title"].value == "Books"
    assert found["size.band"].value == "less than 1 billion tokens"
    assert found["crawler.names"].value == ("examplebot",)


def test_a_public_source_of_three_percent_is_not_large(run: Store, complete: FactsFile) -> None:
    """Large is above 3 % of the public text: 30 of 1,000 tokens are described, 31 of 1,000 are named."""
    answers = FactsFile("f", {"sources.web.kind": "public", "sources.books.kind": "public"}, ("books", "web"))
    for tokens, is_named in ((30, False), (31, True)):
        consumed = consumed_of(run)
        consumed.languages.clear()
        consumed.languages.update({("books", "en"): tokens, ("web", "en"): 1000 - tokens})
        found = entries(paper_of(run, answers, consumed))
        assert ("sources.books.title" in found) == is_named
        assert ("sources.books.content" in found) != is_named


def test_versions_follow_from_what_is_stated(run: Store, complete: FactsFile) -> None:
    assert paper_of(run, complete).version == paper_of(run, complete).version
    other = consumed_of(run)
    other.domains.add(rows_of({("web", "d00.example"): 1}))
    assert paper_of(run, complete, other).version != paper_of(run, complete).version


def test_changes_since_an_earlier_version(run: Store, complete: FactsFile, tmp_path: Path) -> None:
    older, newer = paper_of(run, complete), consumed_of(run)
    write_paper(run, Store(str(tmp_path)), older, ["json"], NOTHING)
    file = str(tmp_path / "eu.json")
    assert changes_since(older, file) == []
    newer.domains.add(rows_of({("web", "d01.example"): 2}))
    assert changes_since(paper_of(run, complete, newer), file) == [
        {"name": "domains.rule", "before": older_rule(older), "after": older_rule(paper_of(run, complete, newer))},
        {"name": "domains: d01.example", "before": "99", "after": "101"},
    ]


def older_rule(paper: Paper) -> str:
    return str(entries(paper)["domains.rule"].value)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"paper": "ab2013", "fields": {}}', '{"paper": "eu", "fields": {"1": 3}}']
)
def test_another_file_is_no_earlier_version(run: Store, complete: FactsFile, tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ContractError, match=r"expected a paper that `penstock summary` wrote, got"):
        changes_since(paper_of(run, complete), str(tmp_path / "x.json"))
    with pytest.raises(ConfigError, match=r"expected the JSON file of an earlier paper, got none"):
        changes_since(paper_of(run, complete), str(tmp_path / "none.json"))


def test_there_are_242_metrics_with_their_sums() -> None:
    every = list(metrics())
    assert len(every) == len({metric.id for metric in every}) == 242
    assert {*ENTRIES} | BY_FORM <= {metric.id for metric in every}
    # Sums of the largest published evaluations of sections 2.4 and 3: completeness 3+5+15+3+1, clarity 15+1.
    users = [metric for metric in every if metric.field.startswith("2.4")]
    assert sum(metric.weight for metric in users if metric.dimension == "P") == 27
    assert sum(metric.weight for metric in users if metric.dimension == "L") == 16
    assert {metric.field for metric in every} - {"", *["1", "2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "3"]} == {*FIELDS}


def test_points_by_hand(run: Store, complete: FactsFile) -> None:
    full = {one.metric.id: one for one in score(paper_of(run, complete))}
    bare = {one.metric.id: one for one in score(paper_of(run, FactsFile("", {}, ("books", "web"))))}
    assert (full["F1.1.a.1"].points, bare["F1.1.a.1"].points) == (1.0, 0.0)
    assert full["F1.1.a.2"].points is None  # whether a name is detailed enough, a person judges
    assert not full["F1.1.b.1"].applies
    assert full["F2.3.h.1"].points == full["F2.3.h.2"].points == full["F2.3.h.3"].points == 1.0
    assert full["F2.3.h.4"].points is None
    assert not full["F2.4.c.1"].applies
    assert full["F1.3.d.4"].points == 1.0
    assert (full["D28"].points, bare["D28"].points) == (1.0, 0.0)


def test_totals_by_hand() -> None:
    entry = Entry("provider.name", "name", "given", "x")
    field = PaperField("1.1.a", "", (entry, Entry("provider.contact", "contact", "missing")))
    paper = Paper("eu", "", "", (), (PaperSection("1", "", (field,)),), {})
    own = [one for one in score(paper) if one.metric.field == "1.1.a"]
    assert [one.points for one in own] == [1.0, None, 0.0, 0.0]
    ranges = totals(own)
    assert (ranges["transparency"].low, ranges["transparency"].high) == (33.3, 33.3)
    assert (ranges["usefulness"].low, ranges["usefulness"].high) == (0.0, 100.0)
    assert [grade(value) for value in (95, 94.9, 90, 80, 75, 60, 50, 40, 25, 24.9, 0)] == (
        ["A+", "A", "A", "B+", "B", "C+", "C", "D+", "D", "F", "F"]
    )


def test_the_table_of_the_score_has_a_row_for_each_metric(run: Store, complete: FactsFile) -> None:
    rows = score_rows(score(paper_of(run, complete)))
    assert len(rows) == 243
    assert rows[1] == ("D1", "all", "accessibility", "3", "1")
    assert ("F1.1.a.1", "1.1.a", "completeness", "5", "1") in rows
    assert ("F1.1.a.2", "1.1.a", "comprehension", "5", "open") in rows
    assert ("F1.1.b.1", "1.1.b", "completeness", "3", "not applicable") in rows


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open += [tag] if tag not in ("meta", "br") else []
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        assert not any(name.startswith("on") for name, _ in attrs)


def test_hostile_values_stay_text(run: Store, complete: FactsFile) -> None:
    values = {key: (HOSTILE,) if isinstance(value, tuple) else value for key, value in complete.values.items()}
    answers = FactsFile(
        HOSTILE, values | {"provider.name": HOSTILE, "model.links": ("javascript:alert(1)",)}, complete.sources
    )
    consumed = consumed_of(run)
    consumed.domains = sums_of({("web", HOSTILE): 10**6})
    paper = paper_of(run, answers, consumed)
    more = {"changes": [{"name": HOSTILE, "before": HOSTILE, "after": HOSTILE}]}
    page = to_html(paper, more).decode()
    found = Tags(page)
    assert found.open == []
    assert not found.tags & {"img", "script", "iframe", "object", "form"}
    assert all(re.match("#|https://", link) for link in found.links)
    text = to_markdown(paper, more).decode()
    assert "<img" not in re.sub("`[^`\n]*`", "", text).replace("\\<img", "")
    assert not any(line.startswith("# x") for line in text.splitlines())
    for output in (page, text, to_json(paper, more).decode()):
        assert "\x1b" not in output
        assert "\u202e" not in output
        assert "alert(1)" in output or "alert\\(1\\)" in output
    assert json.loads(to_json(paper, more))["fields"]["1.1.a"]["entries"][0]["value"]


def test_a_page_loads_nothing_and_links_every_number_to_its_origin(run: Store, complete: FactsFile) -> None:
    page = to_html(paper_of(run, complete), NOTHING).decode()
    anchors = {*re.findall(r'<li id="(o\d+)"', page)}
    cited = {*re.findall(r'href="#(o\d+)"', page)}
    assert cited
    assert cited <= anchors
    assert "<script" not in page
    assert not re.search(r"(?:\ssrc=|@import|url\()", page)


def test_a_paper_is_deleted_again_if_a_table_was_replaced(
    run: Store, complete: FactsFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([{"tokens": "v-1"}, {"tokens": "v-2"}])
    monkeypatch.setattr(
        "pipeline.disclosure.publish.read_run", lambda _: type("State", (), {"tables": next(answers)})()
    )
    with pytest.raises(ContractError, match=r"expected the same tables at the end as at the start"):
        write_paper(run, Store(str(tmp_path)), paper_of(run, complete), ["md", "json"], NOTHING)
    assert [*tmp_path.iterdir()] == []


def test_stages_for_rights_and_harm_are_stated_with_their_settings(run: Store, complete: FactsFile) -> None:
    facts = collect(run, open_dataset(run), consumed_of(run), complete, False)
    stage = {"stage": "rights", "version": 1, "table": "documents", "models": {}, "dropped": 3}
    stages = [stage | {"settings": {"respect": ["tdm"]}}, stage | {"stage": "quality", "settings": {"x": 1}}]
    dropped = {"quality/x": 7, "rights/robots_meta": 1, "rights/tdm": 2}
    values = facts.facts | {"stages": Fact(stages, ("tokens",)), "dropped": Fact(dropped, ("tokens",))}
    found = entries(eu_summary(replace(facts, facts=values), complete))
    assert found["rights.measured"].value == "3 documents dropped by rights"
    assert found["rights.settings"].value == ('rights.respect = ["tdm"]',)
    assert "harm.measured" not in found


@pytest.mark.parametrize("kind", ["public", "crawled"])
def test_a_source_that_no_step_has_reached_has_no_tokens(run: Store, kind: str) -> None:
    answers = FactsFile("f", {"sources.books.kind": kind, "sources.web.kind": kind}, ("books", "web"))
    consumed = consumed_of(run)
    consumed.domains = sums_of({("web", "d.example"): 1050})
    for counts in (consumed.languages, consumed.months):
        for key in [key for key in counts if key[0] == "books"]:
            del counts[key]
    del consumed.documents["books"]
    paper = paper_of(run, answers, consumed)
    found = entries(paper)
    if kind == "public":
        assert found["public.sizes"].rows == (("books", "0", "0.00%", "0"), ("web", "1,050", "100.00%", "12"))
        assert found["public.books.languages"].value == "none was read"
    else:
        assert found["period.books"].value == "not known"
        assert found["spoken.books"].value == "none was read"
    assert to_html(paper, NOTHING)
    assert bill_of_materials(collect(run, open_dataset(run), consumed, answers, False), answers).to_bytes()


def test_a_checkpoint_that_has_read_nothing_has_a_paper(run: Store, complete: FactsFile) -> None:
    empty = Consumption(1, open_dataset(run).digest)
    found = entries(paper_of(run, complete, empty))
    assert found["domains"].rows == ()
    assert found["languages.eu"].value == "none"
    assert found["latest"].value == "no document has a date"
