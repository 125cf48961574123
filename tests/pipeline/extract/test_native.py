"""The native code of extraction returns what the functions in Python return, for every page."""

import sys
import unicodedata
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resiliparse.parse.html import HTMLTree

from pipeline.extract import blocks, features, native, nesting, page_limits, tags
from pipeline.extract.extract import ExtractConfig
from pipeline.extract.features import WordOdds, count_characters_in_python, normal_word
from pipeline.extract.main_text import load_model
from pipeline.language import text_between_tags, text_between_tags_in_python
from pipeline.models import ModelsConfig, ensure_model
from pipeline.sources.config import SourceConfig
from pipeline.sources.source import SOURCE
from pipeline.sources.splits import find_splits, open_stream
from tests.pipeline.extract import test_nesting

pytestmark = pytest.mark.skipif(
    native.module is None, reason="the native module is not built from these sources (pip install -e .)"
)

PARTS = (
    *('<div class="Post-body sideBar HTMLParser x">', "</div>", "<p>", "</p>", "<br>", "<hr>", "<pre>", "</pre>"),
    *('<a href="/x">', "</a>", "<b>", "</b>", "<img>", "<script>", "</script>", "<svg><svg>", "</svg>", "<!-- a > b"),
    *("-->", "<textarea>", "</textarea>", '<i title="a > b < c">', '<td x="', '"', "'", "<", ">", "=", " ", "<!", "</"),
    *('<li id="Comments" itemprop="articleBody" itemscope>', '<ul style="display: none" hidden roleplay>', "&nbsp;"),
    *('<h1 itemprop="ÀB" role="navigation">', "<blockquotes-and-more-than-sixteen-bytes>", "\x00", "\x0b", "\xa0"),
    *(
        "1,234.50",
        "Wort",
        "漢字、かな。",
        "ΟΔΟΣ",
        "İstanbul",
        "😀",
        "\ud800",
        "\u2028",
        "été",
        "»»",
        "the",
        "…",
        "\x1c",
    ),
)
HIDDEN_PARTS = (
    *(
        "<script",
        "<SCRIPT>",
        "</script",
        "</Script >",
        "<scripts>",
        "<title/>",
        "</title>",
        "</templat",
        "<template x>",
    ),
    *("</template>", "<header>", "<head>", "</head>", "</heads>", "</head-x>", "<ſcript>", "</ſcript>", "<\u212a>"),
    *("<!-->", "<!--", "--", "-->", "->", "<!x", "<?", "</1", "<1", "< a", ">", "word", "é", "漢", "😀", " \t", "\x85"),
    *("<noscript>", "</noscript>", "<select-a>", "</select>", "<p", "<é>", "\x00", "<p\ud800>", "&nbsp;", "\u3000"),
)
pages = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=40).map("".join)
texts = st.lists((pages | st.text(min_size=1)).map(str.strip).filter(bool), min_size=1, max_size=6)
ODDS = WordOdds(
    {"wort": 0.5, "été": -1.25, "0,000.00": 2.0, "οδος": 0.1, "»»": 0.3}, {"post": 1.0}, frozenset(("the", "wort"))
)


def assert_same_markup(html: str) -> None:
    """Compare the markup, and the start tags of all its tags as containers of two kinds."""
    found, expected = blocks.read_markup(html), blocks.read_markup_in_python(html)
    for name, own, other in zip(blocks.Markup._fields, found, expected, strict=True):
        assert np.array_equal(own, other), name
    is_read = np.arange(len(found.starts)) % 3 > 0
    read = [
        function(found.html, found.starts + 1, found.ends, is_read)
        for function in (tags.read_tags, tags.read_tags_in_python)
    ]
    assert read[0][0] == read[1][0]
    assert np.array_equal(read[0][1], read[1][1])


def assert_same_words(sources: list[str], odds: WordOdds, title: str = "") -> None:
    """Compare the counts of characters and the words of texts."""
    for own, other in zip(features._count_characters(sources), count_characters_in_python(sources), strict=True):
        assert np.array_equal(own, other)
    forms = features._title_words(title)[1]
    for own, other in zip(odds.look_up(sources, forms), odds.look_up_in_python(sources, forms), strict=True):
        assert own.dtype == other.dtype
        assert np.array_equal(own, other)


def assert_same_visible_text(page: str) -> None:
    assert text_between_tags(page) == text_between_tags_in_python(page)


@settings(max_examples=500, deadline=None)
@given(pages | st.lists(st.sampled_from(HIDDEN_PARTS) | st.text(max_size=3), max_size=40).map("".join))
def test_visible_text_is_that_of_python(page: str) -> None:
    assert_same_visible_text(page)


@settings(max_examples=500, deadline=None)
@given(pages)
def test_markup_of_any_string(page: str) -> None:
    assert_same_markup(page)
    assert_same_markup(f"<body>{page}</body>")


@settings(max_examples=200, deadline=None)
@given(pages)
def test_markup_of_which_little_is_read_in_vain(page: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "HEAD_FACTOR", 0)
        assert_same_markup(page)


@settings(max_examples=200, deadline=None)
@given(pages.filter(lambda page: "\ud800" not in page))
def test_markup_of_parsed_pages(page: str) -> None:
    body = HTMLTree.parse(page).body
    assert_same_markup(body.html if body is not None else "")


def test_markup_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of too many tags ends at one, which can be inside a comment, a tag or an element that is left out."""
    monkeypatch.setattr(blocks, "MAX_TAGS", 6)
    for end in ("<p>", "<!--", '<i title="é', "<script>", "<br é", "<br>", '<textarea x="<p><p>'):
        for count in range(5):
            page = "<body>" + "<p>a</p>" * count + end + "<b>c" * 9
            assert_same_markup(page)
            assert blocks.read_markup(page).is_cut


def test_a_tag_that_is_cut_inside_a_character_is_read() -> None:
    html = '<div itemprop="a" title="é'.encode()[:-1]
    places = np.array([1]), np.array([len(html)]), np.array([True])
    for read in (tags.read_tags, tags.read_tags_in_python):
        ((tag,), _) = read(html, *places)
        assert tag.words == ("itemprop:a",)


@settings(max_examples=300, deadline=None)
@given(texts, st.text(max_size=20) | pages)
def test_words_of_any_texts(sources: list[str], title: str) -> None:
    assert_same_words(sources, ODDS, title)
    assert_same_words(sources, ODDS, " ".join(sources))


def test_each_character_has_the_same_lower_case_class_and_white_space() -> None:
    every = [chr(code) for code in range(sys.maxunicode + 1)]
    assert_same_words([f"a{char}b" for char in every], ODDS)
    lower = {normal_word(char): float(code) for code, char in enumerate(every) if char.lower() != char}
    odds = WordOdds(lower, {}, frozenset())
    assert len(lower) > 1_400
    assert_same_words([char for char in every if not char.isspace()], odds)
    assert_same_words([f"ß{char}" for char in every if unicodedata.category(char) != "Cn"], odds)


TAG_PARTS = (
    *(
        "<html",
        "<HTML",
        "<Body",
        "<a",
        "<div",
        " ",
        "/",
        ">",
        "=",
        '"',
        "'",
        ' a="b"',
        " a='>'",
        " data-x=1",
        "x<y",
        "\n",
    ),
    *(
        '<p class="x">',
        "<b>",
        "<İ>",
        "<\u0131/",
        "<\u017fmall ",
        "<strike\u2003",
        "<I\t",
        "<code>",
        "</b>",
        "\xa0",
        ' x=\xa0"',
        " x=\x1c'",
        "é",
    ),
    *(" z" * 250, ' q="' + "r" * 400 + '"', '<i title="<u>">', "<ul>", "<bigger>", "<STRONG/>"),
)
tagged = st.lists(st.sampled_from(TAG_PARTS) | st.text(max_size=2), max_size=30).map("".join)


def assert_same_counts(page: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_limits, "READ_FACTOR", 1)
        assert page_limits.attribute_work(page) == page_limits.attribute_work_in_python(page)
    assert page_limits.attribute_work(page) == page_limits.attribute_work_in_python(page)
    assert nesting.num_formatting(page) == nesting.num_formatting_in_python(page)


def assert_same_nesting(page: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for reopened, factor in ((5, 1), (nesting.MAX_REOPENED, nesting.ATTRIBUTE_FACTOR)):
            patch.setattr(nesting, "MAX_REOPENED", reopened)
            patch.setattr(nesting, "ATTRIBUTE_FACTOR", factor)
            for max_depth in (2, 10**6):
                assert nesting.scan(page, max_depth) == nesting.scan_in_python(page, max_depth)


@settings(max_examples=1000, deadline=None)
@given(tagged)
def test_counts_of_tags_of_any_string(page: str) -> None:
    assert_same_counts(page)


NESTED = (*test_nesting.PARTS, *test_nesting.HIDDEN, *TAG_PARTS, "<FONT>", "</font>", "\ud800")


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.sampled_from(NESTED), max_size=40).map("".join))
def test_nesting_of_any_string(page: str) -> None:
    assert_same_nesting(page)


def test_each_character_in_the_name_of_a_tag() -> None:
    every = [chr(code) for code in range(sys.maxunicode + 1)]
    for names in ("{}", "s{}", "{}mall", "str{}ke", "b{}g"):
        assert_same_counts("".join(f"<{names.format(char)}>" for char in every))
    assert_same_counts("".join(f"<b{char} <html{char}a{char}b=1>" for char in every))
    # Of these characters Python makes ASCII letters, or several characters.
    lowered = [char for char in every if not char.isascii() and (char.lower().isascii() or len(char.lower()) > 1)]
    assert {"\u212a", "İ"} <= {*lowered}
    assert_same_nesting("".join(f"<trac{char}></TRACK></i{char}><i{char}>" for char in lowered))


@pytest.fixture(scope="module")
def real_pages(shared_data) -> list[str]:
    """Every third page of a real archive."""
    config = SourceConfig(paths=(str(shared_data / "warc" / "pages-002.warc.gz"),))
    (split,) = find_splits(config)
    with closing(open_stream(split)) as stream:
        payloads = [row["_payload"] for row, drop in SOURCE.open(split, stream, config) if drop is None]
    return [payload.decode("utf-8", "replace") for payload in payloads[::3]]


def test_real_pages(real_pages: list[str]) -> None:
    path = ensure_model(ExtractConfig().model, ModelsConfig()).path
    lexicon = load_model(path).lexicon
    for page in real_pages:
        assert_same_counts(page)
        assert_same_nesting(page)
        assert_same_visible_text(page)
        tree = HTMLTree.parse(page)
        body = tree.body.html if tree.body is not None else ""
        assert_same_markup(body)
        if sources := blocks.cut_blocks(body).sources():
            assert_same_words(sources, lexicon, tree.title or "")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory of a process is read from /proc")
def test_calls_leave_nothing_behind() -> None:
    """The memory of a process does not grow with the number of calls, refused ones included."""
    page = (
        '<body><div class="a B" itemprop="É" id="c"><p>Hello wörld, <b>1,234</b> ΣΑΣ</p><svg>x</svg></div></body>' * 60
    )
    module = native.loaded()

    def call() -> None:
        assert_same_markup(page)
        assert_same_words(["Hello wörld ΟΔΟΣ"], ODDS, "Hello")
        assert_same_counts(page)
        assert_same_nesting(page)
        assert_same_visible_text(page)
        module.lexicon({"a": 1.0}, "x")
        for function, arguments in (
            (module.read_markup, (5, 1)),
            (module.look_up, (ODDS.native, [5], set(), 4, 0.0)),
            (module.text_between_tags, (5,)),
        ):
            with pytest.raises(TypeError):
                function(*arguments)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    for _ in range(300):
        call()
    before = resident()
    for _ in range(1500):
        call()
    assert resident() - before < 4 << 20
