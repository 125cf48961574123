"""Nesting: the count that lets most pages pass, the scan behind it, and bombs of several kinds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resiliparse.parse.html import HTMLTree

from pipeline.engine.stage import Drop
from pipeline.extract.nesting import MAX_REOPENED, SAFE_TAGS, nesting_problem
from tests.support.growth import MOST, growth

pytestmark = pytest.mark.usefixtures("implementation")

DEEP = Drop("too_deep", 3001, 3000)


def problem(text: str, max_depth: int = 3000, charset: str = "utf-8") -> Drop | None:
    return nesting_problem(text.encode(charset), text, max_depth)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<div>" * 3000, None),
        ("<div>" * 3001, DEEP),
        ("<DIV class=x>\n" * 100_000, DEEP),
        ("<div>" * 100_000 + "</div>" * 100_000, DEEP),
        ("<div></x>" * 100_000, DEEP),
        ("<b>" * 100_000, DEEP),
        ("<table><tr><td>" * 3001, DEEP),
        ("<ul><li>" * 3000, None),
        ("<x-y>" * 3001, DEEP),
        ("<div>text</div>" * 5000, None),
        ("<p>one<br><img src=x><li>two<td>three<a name=x>" * 1000, None),
        ("<svg>" + "<path d='M0 0'/>" * 5000 + "</svg>", None),
        ("<div></DIV>" * 5000, None),
        ("</div>" * 5000 + "<div>" * 3000, None),
        ("a < b && c <d" * 5000, DEEP),
        ("", None),
        ("<", None),
    ],
)
def test_depth(text: str, expected: Drop | None) -> None:
    assert problem(text) == expected


@pytest.mark.parametrize(("depth", "expected"), [(3, None), (4, Drop("too_deep", 4, 3))])
def test_a_low_limit_is_kept_exactly(depth: int, expected: Drop | None) -> None:
    assert problem("<p>x<br>" * 100 + "<div>" * depth + "</div>" * depth, max_depth=3) == expected


HIDDEN = [
    "<!--</div>-->",
    "<br x='</div>'>",
    '<br x="></div>">',
    "<br x=</div>",
    "<script></div></script>",
    "<script><!--<script></script></div>--></div></script>",
    "<style></div></style>",
    "<title></div></title>",
    "<textarea></div></textarea>",
    "<xmp></div></xmp>",
    "<svg><![CDATA[></div>]]></svg>",
    "<svg><style><!--</style></div>--></svg>",
    "<?</div>",
    "<!x </div>",
]


@pytest.mark.parametrize("hidden", HIDDEN)
def test_an_end_tag_that_a_parser_does_not_see_closes_nothing(hidden: str) -> None:
    assert problem(f"<div>a{hidden}" * 5000) == DEEP
    hidden = hidden.replace("</div>", "</font>")
    text = "<p>" + "".join(f"<font color={number}>{hidden}" for number in range(1000)) + "<p>x" * 1000
    found = problem(text)
    assert found is not None
    assert found.rule == "unclosed_formatting"


def test_tags_in_comments_and_scripts_are_closed_there() -> None:
    for hidden in ("<!--<div></div>-->", "<script>'<div></div>'</script>", "<a title='<div></div>'></a>"):
        assert problem(f"<div>{hidden}</div>" * 5000) is None


@pytest.mark.parametrize(("blocks", "reopens"), [(500, False), (501, True)])
def test_unclosed_formatting(blocks: int, reopens: bool) -> None:
    assert MAX_REOPENED == 500 * 500
    text = "<p>" + "".join(f"<font color={number}>" for number in range(500)) + "<p>x" * blocks
    assert problem(text) == (Drop("unclosed_formatting", 250_500, MAX_REOPENED) if reopens else None)


@pytest.mark.parametrize(
    ("tag", "reopens"), [("b", True), ("B", True), ("br", False), ("body", False), ("span", False)]
)
def test_only_formatting_elements_are_reopened(tag: str, reopens: bool) -> None:
    text = f"<{tag}>" * 600 + "<p>x" * 600
    assert problem(text) == (Drop("unclosed_formatting", 250_200, MAX_REOPENED) if reopens else None)


def test_closed_formatting_is_not_reopened() -> None:
    assert problem("<p><font color=1><b>x</b></font>" * 100_000) is None


def test_too_few_tags_to_do_harm_are_not_scanned() -> None:
    assert SAFE_TAGS**2 / 4 <= MAX_REOPENED
    assert problem("<b>" * 500 + "<p>" * 500, max_depth=10**6) is None


@pytest.mark.parametrize("charset", ["utf-8", "utf-16", "utf-16-be", "utf-32", "cp1252", "iso2022_jp"])
def test_the_count_hides_nothing_in_any_charset(charset: str) -> None:
    assert problem("<div>" * 3000, charset=charset) is None
    assert problem("<div>" * 3001, charset=charset) == DEEP
    assert problem("㰯" * 9000 + "<div>" * 3001, charset=charset if "utf" in charset else "utf-8") == DEEP


PARTS = (
    *("<div>", "</div>", "<section ", "<dl a='", '<dl a="', "<dl a=\xa0'", "'", '"', ">", "=", "\xa0", "a", "<div/>"),
    *("<!--", "-->", "--!>", "<!-->", "<?", "<!", "</ ", "<![CDATA[", "]]>", "<script>", "</script>", "<style>"),
    *("</style>", "<title>", "</title>", "<textarea>", "</textarea>", "<xmp>", "</xmp>", "<iframe>", "</iframe>"),
    *("<svg>", "</svg>", "<math>", "</math>", "<select>", "</select>", "<desc>", "<template>", "</template>"),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=40).map("".join))
def test_the_estimate_is_never_below_the_depth_of_the_parser(markup: str) -> None:
    text = "<p>" * SAFE_TAGS + markup
    deepest, nodes = 0, [(HTMLTree.parse(markup).body, 0)]
    while nodes:
        node, depth = nodes.pop()
        deepest = max(deepest, depth)
        nodes += [(child, depth + 1) for child in (node.child_nodes if node is not None else ())]
    elements = deepest - 1  # a text is as deep as an element
    assert elements < 2 or problem(text, max_depth=elements - 1) is not None


@pytest.mark.parametrize(
    "unit",
    [
        *("<", "<!--", "<script>", "<script><!--", "<script><!-- -->", "<![CDATA[", "<title>", "<a b='", "<a ", "</ "),
        *('<" e="<" c=">" d="', '<x" e="<x" c=">" d="', "<b/</b>"),
    ],
)
def test_the_scan_takes_time_linear_in_the_length(unit: str) -> None:
    def scan(text: str) -> None:
        problem(text, max_depth=10**9)

    assert growth(scan, lambda n: unit * (n // len(unit)), 100_000) < MOST
