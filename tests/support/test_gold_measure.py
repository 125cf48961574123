"""The gold pages and the measure of extraction, on values that are computed by hand."""

import gzip
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from tests import bench_extraction as bench
from tests.support import gold_extractors
from tests.support.gold_extractors import Extract, by_fold, label_of, loaders
from tests.support.gold_measure import (
    MEASURES,
    Estimate,
    Overlap,
    PageScore,
    RecipeRules,
    bootstrap,
    compare,
    estimate,
    found_snippets,
    overlap,
    words,
)
from tests.support.gold_pages import SETS, GoldPage, fold_of, gold_pages, missing_data, site_of
from tests.support.paths import SHARED

CANONICAL = '<html><head><link rel="canonical" href="https://www.example.co.uk/a"></head><body>x</body></html>'
OPEN_GRAPH = '<html><head><meta property="og:url" content="https://news.example.de/a"></head><body>x</body></html>'
RELATIVE = '<html><head><link rel="canonical" href="/a"></head><body>x</body></html>'


@pytest.mark.parametrize(
    ("url", "html", "expected"),
    [
        ("https://www.bbc.co.uk/news/1", CANONICAL, "bbc.co.uk"),
        ("https://web.archive.org/web/20120216182711/http://www.stol.it/a", "", "stol.it"),
        ("https://web.archive.org/web/20130307194448/the-pain.net/2008", "", "the-pain.net"),
        ("https://web.archive.org/", "", "archive.org"),
        ("http://192.0.2.7/a", "", "192.0.2.7"),
        ("http://readability.saved.invalid/1", CANONICAL, "example.co.uk"),
        ("http://readability.saved.invalid/1", OPEN_GRAPH, "example.de"),
        ("http://readability.saved.invalid/1", RELATIVE, "0123abcd"),
        ("http://readability.saved.invalid/1", "", "0123abcd"),
    ],
)
def test_site(url: str, html: str, expected: str) -> None:
    assert site_of(url, html, "0123abcd") == expected


def test_fold_of_a_site() -> None:
    assert [fold_of(site) for site in ("bbc.co.uk", "stol.it", "example.de")] == [
        zlib.crc32(b"bbc.co.uk") % 5,
        zlib.crc32(b"stol.it") % 5,
        zlib.crc32(b"example.de") % 5,
    ]
    assert {fold_of(f"{number}.example") for number in range(100)} == {0, 1, 2, 3, 4}


def test_missing_pages_are_named(tmp_path: Path) -> None:
    reason = "the gold pages are not beside the project (html_gold/daniel.jsonl.gz is missing)"
    assert missing_data(("daniel",), tmp_path) == reason
    with pytest.raises(FileNotFoundError, match=r"html_gold/daniel\.jsonl\.gz is missing"):
        next(gold_pages(("daniel",), tmp_path))


def test_pages_of_the_real_data(shared_data: Path) -> None:
    if reason := missing_data(("newspaper4k", "readability", "wcxb")):
        pytest.skip(reason)
    pages = list(gold_pages(("readability", "newspaper4k")))
    assert [page.set for page in pages] == ["newspaper4k"] * 9 + ["readability"] * 42
    assert len({page.key for page in pages}) == 51
    assert sum(page.url.split("/")[2].endswith(".invalid") and page.site == page.id for page in pages) == 18
    assert all(page.fold == fold_of(page.site) and page.text and not page.with_ for page in pages)
    assert {page.language for page in pages if page.set == "newspaper4k"} == {"ar", "en", "es", "ja", "lv", "zh"}
    first = next(gold_pages(("wcxb",)))
    lines = gzip.decompress((SHARED / SETS["wcxb"][0]).read_bytes()).splitlines()
    record = json.loads(lines[0])
    assert (first.key, first.site, first.language) == ("wcxb/f1c34fd619fc1a51", "spaceotechnologies.com", "en")
    assert (first.text, first.with_, first.without) == (record["text"], (*record["with"],), (*record["without"],))
    assert (first.page_type, first.title, first.date) == ("article", record["title"], record["date"])
    assert first.html.count("<p") > 10


# ---------------------------------------------------------------------------------------------------------- the measure


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cat's 2nd_name, x2!", ["the", "cat", "s", "2nd", "name", "x2"]),
        ("Cafe\u0301 Straße", ["café", "straße"]),
        ("GPT-4模型2.0", ["gpt", "4", "模", "型", "2", "0"]),
        ("カナ・時々ｱ。", ["カ", "ナ", "時", "々", "ｱ"]),
        ("한국어 책", ["한", "국", "어", "책"]),
        ("ΚΌΣΜΟΣ", ["κόσμος"]),
        ("𠀀一x", ["𠀀", "一", "x"]),
        (" \u2026 -- _ ", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("The cat sat on the mat", "the cat ran ON", Overlap(6 / 10, 3 / 4, 3 / 6)),
        ("今天天气很好。", "今天很好", Overlap(8 / 10, 1, 4 / 6)),
        (
            "Ο ΚΌΣΜΟΣ είναι μικρός",
            "ο κόσμος μικρός",
            Overlap(6 / 7, 1, 3 / 4),
        ),
        ("한국어 책", "책 한 권", Overlap(4 / 7, 2 / 3, 2 / 4)),
        ("a a b", "a a a", Overlap(4 / 6, 2 / 3, 2 / 3)),
        ("a b", "c", Overlap(0, 0, 0)),
        ("a b", " \u2026", Overlap(0, 0, 0)),
        ("a b", "b A", Overlap(1, 1, 1)),
    ],
    ids=["latin", "chinese", "greek", "korean", "repeated", "disjoint", "empty", "equal"],
)
def test_overlap(answer: str, text: str, expected: Overlap) -> None:
    found = overlap(answer, text)
    assert [found.f1, found.precision, found.recall] == pytest.approx([*vars(expected).values()])


def test_snippets_are_found_whatever_their_white_space() -> None:
    text = "One  line\nand\u00a0the cafe\u0301\n\nof today."
    assert found_snippets(["line and the", "café of\ttoday", "One line and"], text) == 3
    assert found_snippets(["one line", "Oneline", "today!"], text) == 0
    assert found_snippets([], text) == 0


def test_bootstrap_on_computed_cases() -> None:
    assert bootstrap(["a", "a"], [(1, 1), (0, 1)]) == Estimate(0.5, 0.5, 0.5, 2)
    assert bootstrap(["a", "b"], [(1, 1), (0, 1)]) == Estimate(0.5, 0.0, 1.0, 2)
    assert bootstrap(["a", "a", "a", "b"], [(1, 1), (1, 1), (1, 1), (0, 1)]) == Estimate(0.75, 0.0, 1.0, 4)
    assert bootstrap(["a", "b"], [(1, 4), (3, 4)]).value == 0.5
    even = [(number % 2, 1) for number in range(400)]
    spread = bootstrap([str(number) for number in range(400)], even)
    assert spread.high - spread.low == pytest.approx(2 * 1.96 * (0.25 / 400) ** 0.5, rel=0.1)


def test_bootstrap_is_seeded_and_ignores_the_order() -> None:
    sites, parts = [f"{number % 7}" for number in range(40)], [(number % 3 / 2, 1.0) for number in range(40)]
    first = bootstrap(sites, parts)
    assert bootstrap(sites, parts) == first
    turned = bootstrap(sites[::-1], parts[::-1])
    assert [turned.value, turned.low, turned.high] == pytest.approx([first.value, first.low, first.high])
    assert (round(first.low, 3), round(first.value, 3), round(first.high, 3)) == (0.461, 0.487, 0.5)


# ------------------------------------------------------------------------------------------------------------ the bench

SENTENCES = (
    "The river runs through the valley, and the old mill has been working there since the first bridge was built.",
    "In spring the farmers open the gates so that the water can reach the fields which lie far below the village.",
    "Every year some of them meet in the hall to decide how much water each of the families will be given.",
    "It is an old custom that was written down by a teacher, who lived with the miller and his three daughters.",
    "The book is still read in the school today, although the paper is thin and many of its pages are missing.",
)
ARTICLE = "\n".join(SENTENCES)
HEAD = "<html lang=en><head><title>Mill</title></head><body>"
MENU = "<nav><ul><li><a href=/>Home</a></li><li><a href=/shop>Shop now</a></li></ul></nav>"
BODY = f"<main><article>{''.join(f'<p>{sentence}</p>' for sentence in SENTENCES)}</article></main></body></html>"


def page(number: int, **changes: object) -> GoldPage:
    """A page with an article of 99 words and a menu; `changes` are of its fields."""
    html = HEAD + MENU + BODY
    whole = GoldPage(
        set="wcxb",
        id=str(number),
        url=f"https://{number}.example/",
        site=f"{number}.example",
        fold=number % 5,
        num_bytes=len(html),
        language="en",
        page_type="article",
        html=html,
        text=ARTICLE,
        with_=("the old mill", "three daughters"),
        without=("Shop now",),
        title="Mill",
        author=None,
        date=None,
    )
    return replace(whole, **changes)


PAGES = (page(1), page(2, text="Home\nShop now"), page(3, text=None, set="trafilatura", page_type=None))


@pytest.fixture(scope="module")
def rules() -> RecipeRules:
    return RecipeRules()


def test_three_pages(rules: RecipeRules) -> None:
    scores = {name: bench.measure(name, loaders()[name](), PAGES, rules) for name in ("resiliparse", "whole page")}
    first, second, third = scores["resiliparse"]
    assert (first.f1, first.precision, first.recall, first.num_words) == (1.0, 1.0, 1.0, len(words(ARTICLE)))
    assert (first.num_with, first.found_with, first.num_without, first.found_without) == (2, 2, 1, 0)
    assert (first.broken, second.broken, third.broken) == ((), None, None)  # the second answer is too short to be kept
    assert (second.f1, third.f1, third.found_with, third.error) == (0.0, None, 2, None)
    assert 0 < first.seconds < 1
    whole = scores["whole page"][0]
    assert (whole.recall, whole.found_without) == (1.0, 1)
    assert whole.precision == pytest.approx(len(words(ARTICLE)) / (len(words(ARTICLE)) + 3))
    text = bench.report(scores)
    assert (
        "| resiliparse | .500±.500 | .500±.500 | .500±.500 | - | 1.000±.000 | .000±.000 | .000±.000 | .000±.000 |"
        in text
    )
    assert "Errors" not in text
    figures = bench.as_json(scores)["resiliparse"]
    assert figures["html_gold"]["f1"] == {"value": 0.5, "low": 0.0, "high": 1.0, "num_pages": 2}
    assert figures["by_set"]["wcxb"]["pages"] == 2
    assert figures["by_page_type"].keys() == {"article"}
    assert figures["by_size"].keys() == {"to 30 kB"}


def test_an_extractor_that_fails_is_counted(rules: RecipeRules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PAGE_SECONDS", 0.05)

    def fails(page: GoldPage) -> str:
        if page.id == "1":
            raise ValueError("no\nbody")
        while page.id == "2":
            pass
        return None  # type: ignore[return-value]

    scores = bench.measure("fails", fails, PAGES, rules)
    assert [score.error for score in scores] == [
        "ValueError: no body",
        "PageTimeout: stopped after 0.05 s",
        "TypeError: expected a text, got NoneType",
    ]
    assert (scores[0].f1, scores[0].num_words, scores[0].broken) == (0.0, 0, ("no_text",))
    assert estimate(scores, MEASURES["errors"]).value == 1.0
    assert estimate(scores, MEASURES["lost"]) == Estimate(1.0, 1.0, 1.0, 1)
    assert bench.lost_by_rule(scores) == {"no_text": 1.0}
    assert "fails: 1 pages: ValueError: no body" in bench.report({"fails": scores})


def test_rules_of_the_recipe(rules: RecipeRules) -> None:
    assert rules.broken(ARTICLE) == ()
    assert rules.broken(" \n") == ("no_text",)
    assert rules.broken("Aquesta és una frase en català que no és en cap de les altres llengües. " * 4) == (
        "language_not_wanted",
    )
    assert {"gopher_short_doc", "c4_too_few_sentences"} <= {*rules.broken("The short text is in English, and it ends.")}


def test_each_fold_has_an_extractor_of_its_own(rules: RecipeRules) -> None:
    made: list[int] = []

    def make(fold: int) -> Callable[[str], str]:
        made.append(fold)
        return lambda html: f"fold {fold} {len(html)}"

    extract = by_fold(make)()
    pages = [page(number) for number in (7, 1, 2, 12)]
    assert [extract(one) for one in pages] == [f"fold {number % 5} {len(pages[0].html)}" for number in (7, 1, 2, 12)]
    assert made == [2, 1]


def test_extractors_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"resiliparse", "trafilatura"} <= {*gold_extractors.OF_PIPELINE} <= {*loaders()}
    monkeypatch.setattr(gold_extractors, "CROSS_VALIDATED", {"resiliparse": by_fold(lambda fold: str.upper)})
    named = loaders()
    assert named["resiliparse"]()(page(1, html="a")) == "A"
    assert named["resiliparse (shipped)"]()(page(1)) == ARTICLE.replace("\n", "\n\n")


def test_a_library_that_is_missing_is_named(rules: RecipeRules, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Extract:
        import no_such_extractor

        return no_such_extractor.extract

    monkeypatch.setattr(gold_extractors, "LIBRARIES", {"other": ("no-such-extractor", load)})
    results = list(bench.measure_all(["other", "resiliparse"], PAGES[:1], processes=1))
    assert results[0] == "other: skipped, it is not installed (No module named 'no_such_extractor')"
    assert [score.extractor for score in results[1]] == ["resiliparse"]
    assert label_of("other") == "other"


def score(number: int, f1: float | None, **changes: object) -> PageScore:
    """A score of page `number`, of one site."""
    blank = PageScore(
        *("x", str(number), "u", "wcxb", f"site {number}", "en", None, 40_000, number / 1e3, None, 9),
        *(f1, f1, f1, 0, 0, 0, 0, None),
    )
    return replace(blank, **changes)


def test_comparison_is_paired() -> None:
    first = [score(1, 0.9), score(2, 0.2), score(3, 0.5), score(4, None), score(5, 0.1)]
    second = [score(3, 0.5), score(2, 0.8), score(1, 0.6), score(4, None)]
    result = compare(first, second)
    assert result.difference.value == pytest.approx((0.3 - 0.6 + 0.0) / 3)
    assert [a.page for a, _ in result.pages] == ["1", "3", "2"]
    assert all(a.page == b.page for a, b in result.pages)
    text = bench.comparison("x minus y", result)
    assert text.splitlines()[1].startswith("x minus y: F1 -0.1000, 95 % interval -0.6000 to +0.3000, 3 pages")
    assert text.splitlines()[2:] == [
        "  largest gains:",
        "    +0.300  0.900 0.600  1  u",
        "  largest losses:",
        "    -0.600  0.200 0.800  2  u",
    ]
    with pytest.raises(ValueError, match="expected pages with an answer that both extractors read"):
        compare(first[:1], second[:1])


def test_four_figures_by_set_language_and_page_type() -> None:
    """Every table has an interval for each extractor; groups of fewer than five pages have no row."""
    one = [score(n, 0.5 + n / 20, broken=(), num_without=2, found_without=n % 2) for n in range(6)]
    more = [score(n, None, set="trafilatura", num_with=1, num_words=n % 2, language="de") for n in range(10, 16)]
    few = [score(20, 0.1, set="magic-html", page_type="forum", language="zh")]
    typed = [replace(part, page_type="article") for part in one]
    tables = bench.report({"a": [*typed, *more, *few], "b": [*typed, *more, *few]})
    titles = [line for line in tables.split("\n") if line[:1] not in ("|", "")]
    for title in bench.TITLES.values():
        assert [f"{title} {where}" for where in bench.PLACES.values()] == [t for t in titles if t.startswith(title)]
    assert "| wcxb | 6 | .625±" in tables
    assert "| de | 6 | .500±" in tables  # three of the six pages with wanted snippets are empty
    assert "| article | 6 | .250±" in tables  # one of two unwanted snippets is found on every other page
    assert "forum" not in tables
    assert "minus" not in tables


def test_differences_from_trafilatura_are_paired() -> None:
    base = [score(n, 0.5) for n in range(5)]
    other = [score(n, 0.5 + n / 100) for n in range(5)]
    text = bench.differences({"x": other, "trafilatura": base, "y": base})
    rows = [line for line in text.split("\n") if line.startswith("| ")]
    assert rows[0] == "| pages of | pages | x | y |"
    assert rows[2].startswith("| set wcxb | 5 | +.020±.01")
    assert rows[2].endswith(" | +.000±.000 |")
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| set wcxb", "| language en"]
    assert bench.signed(Estimate(-0.0123, -0.02, 0.0, 5)) == "-.012±.010"
    assert bench.differences({"x": other}) == bench.differences({"trafilatura": base}) == ""


def test_times_and_groups() -> None:
    scores = [score(number, 0.5) for number in range(1, 101)]
    assert bench.times(scores) == pytest.approx({"mean": 50.5, "median": 50.5, "p95": 95.0})
    assert [bench.size_of(score(1, None, num_bytes=size)) for size in (29_999, 30_000, 299_999, 300_000)] == [
        "to 30 kB",
        "30 to 100 kB",
        "100 to 300 kB",
        "over 300 kB",
    ]
    broken = [score(1, 1.0, broken=()), score(2, 1.0, broken=("a", "b")), score(3, 1.0, broken=("b",)), score(4, 1.0)]
    assert bench.lost_by_rule(broken) == pytest.approx({"b": 2 / 3, "a": 1 / 3})
    assert estimate(broken, MEASURES["lost"]).value == pytest.approx(2 / 3)


def test_command(shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if reason := missing_data(("newspaper4k",)):
        pytest.skip(reason)
    saved, figures = tmp_path / "scores.jsonl", tmp_path / "figures.json"
    where = ["--sets", "newspaper4k", "--save", str(saved)]
    bench.main([*where, "--extractors", "resiliparse", "whole page", "--json", str(figures)])
    printed = capsys.readouterr().out
    assert "| newspaper4k | 9 |" in printed
    assert json.loads(figures.read_text())["whole page"]["html_gold"]["recall"]["value"] > 0.9
    loaded = bench.read_scores(saved)
    assert {name: len(scores) for name, scores in loaded.items()} == {"resiliparse": 9, "whole page": 9}
    bench.main([*where, "--extractors", "resiliparse", "whole page", "--load", str(saved)])
    assert capsys.readouterr().out == printed
    bench.main(["--sets", "newspaper4k", "--load", str(saved), "--compare", "resiliparse", "whole page"])
    assert capsys.readouterr().out.count("resiliparse minus whole page, ") == 2
    bench.main(["--sets", "newspaper4k", "--before", str(saved), "--compare", "resiliparse", "resiliparse (before)"])
    printed = capsys.readouterr().out
    assert "resiliparse minus resiliparse (before), html_gold: F1 +0.0000, 95 % interval +0.0000 to +0.0000" in printed
    with pytest.raises(SystemExit, match=r"got \{'resiliparse': 5, 'whole page': 9\} pages"):
        bench.main(["--sets", "newspaper4k", "--load", str(subset(saved)), "--extractors", *loaded])


def test_a_run_that_stops_has_saved_the_extractors_before(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := missing_data(("newspaper4k",)):
        pytest.skip(reason)

    def stopped() -> Extract:
        raise KeyboardInterrupt

    monkeypatch.setattr(gold_extractors, "LIBRARIES", {"slow": ("Resiliparse", stopped)})
    saved = tmp_path / "scores.jsonl"
    with pytest.raises(KeyboardInterrupt):
        bench.main(["--sets", "newspaper4k", "--extractors", "resiliparse", "slow", "--save", str(saved)])
    assert {name: len(scores) for name, scores in bench.read_scores(saved).items()} == {"resiliparse": 9}


def subset(saved: Path) -> Path:
    """A file with five of the nine pages of resiliparse, and all of the other extractor."""
    lines = saved.read_text().splitlines(keepends=True)
    saved.write_text("".join([*lines[:5], *lines[9:]]))
    return saved


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--extractors", "resiliparze"], "got \\['resiliparze'\\]. Correct the names"),
        (["--sets", "newspaper4k"], r"bench_extraction: no pages"),
    ],
)
def test_wrong_arguments(argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "missing_data", lambda sets: "no pages" if "newspaper4k" in sets[:1] else None)
    with pytest.raises(SystemExit, match=message):
        bench.main(argv)


def test_counts_are_at_least_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.arguments(["--every", "0"])
    assert "--every: expected 1 or more, got 0" in capsys.readouterr().err


def test_figures_of_forty_real_pages(shared_data: Path, rules: RecipeRules) -> None:
    """Pins the measure, and what resiliparse extracts."""
    sets = ("daniel", "fundus", "scrapinghub", "wcxb")
    if reason := missing_data(sets):
        pytest.skip(reason)
    pages = [one for name in sets for one in islice(gold_pages((name,)), 10)]
    scores = bench.measure("resiliparse", loaders()["resiliparse"](), pages, rules)
    values = {name: estimate(scores, part) for name, part in MEASURES.items()}
    assert {name: (round(value.value, 3), value.num_pages) for name, value in values.items()} == {
        "f1": (0.9, 40),
        "precision": (0.847, 40),
        "recall": (0.979, 40),
        "with": (0.864, 10),
        "without": (0.093, 10),
        "empty": (0.0, 40),
        "lost": (0.026, 38),
        "errors": (0.0, 40),
    }
