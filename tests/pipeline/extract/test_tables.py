"""Tables with data, page layout, and the columns that spans make."""

import pytest

from pipeline.extract.tables import MAX_COLUMNS
from tests.pipeline.extract.test_assemble import write


@pytest.mark.parametrize(
    ("table", "text", "markdown"),
    [
        (
            "<tr><th>k<th>v<tr><td>a<td><tr><td>b<td>2",
            "k | v\na\nb | 2",
            "| k | v |\n| --- | --- |\n| a |  |\n| b | 2 |",
        ),
        (
            "<caption>Cap</caption><thead><tr><th>A<th>B</thead><tbody><tr><td>1<td>2</tbody>",
            "Cap\n\nA | B\n1 | 2",
            "Cap\n\n| A | B |\n| --- | --- |\n| 1 | 2 |",
        ),
        (
            "<tr><th>Year<td>2001<tr><th>Sum<td><b>x|y</b>",
            "Year | 2001\nSum | x|y",
            "| Year | 2001 |\n| --- | --- |\n| Sum | **x\\|y** |",
        ),
        (
            "<tr><th colspan=2>A<th>B<tr><td>1<td>2<td>3",
            "A |  | B\n1 | 2 | 3",
            "| A |  | B |\n| --- | --- | --- |\n| 1 | 2 | 3 |",
        ),
        (
            "<tr><td rowspan=2>a<td>b<tr><td>c<tr><td>d<td rowspan=2>e<tr><td>f",
            "a | b\n| c\nd | e\nf",
            "| a | b |\n| --- | --- |\n|  | c |\n| d | e |\n| f |  |",
        ),
        (
            "<tr><td>a<td>b<tr><td>c<td>d<td>e",
            "a | b\nc | d | e",
            "| a | b |  |\n| --- | --- | --- |\n| c | d | e |",
        ),
        (
            "<tr><td>a<br>b<td>c<tr><td><ul><li>d<li>e</ul><td>f",
            "a b | c\nd e | f",
            "| a b | c |\n| --- | --- |\n| d e | f |",
        ),
    ],
)
def test_tables_with_data(table: str, text: str, markdown: str) -> None:
    assert write(f"<table>{table}</table>") == text
    assert write(f"<table>{table}</table>", markdown=True) == markdown


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (["t|won|lost", "a||5", "b|8|"], "t | won | lost\na |  | 5\nb | 8"),
        (["|won|lost", "a||5", "b|8|2"], "| won | lost\na |  | 5\nb | 8 | 2"),
        (["a||b", "c||d"], "a | b\nc | d"),
        (["|a|", "|b|c", "d|e|"], "| a\n| b | c\nd | e"),
    ],
)
def test_values_stay_in_their_columns(rows: list[str], text: str) -> None:
    markup = "".join("<tr>" + "".join(f"<td>{cell}" for cell in row.split("|")) for row in rows)
    assert write(f"<table>{markup}</table>") == text


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("<tr><td>a<td>b", "a\n\nb"),
        ("<tr><td>a<tr><td>b", "a\n\nb"),
        ("<tr><td>x<td><table><tr><td>a<td>b<tr><td>c<td>d</table>", "x\n\na | b\nc | d"),
        ("<tr><td>a<td><pre>b\n  c</pre><tr><td>d<td>e", "a\n\nb\n  c\n\nd\n\ne"),
        ("<tr><td>a<td><p>b<p>c<p>d<p>e<tr><td>f<td>g", "a | b c d e\nf | g"),
        ("<tr><td>a<td><p>b<p>c<p>d<p>e<p>f<p>g<tr><td>h<td>i", "\n\n".join("abcdefghi")),
    ],
)
def test_other_tables(table: str, text: str) -> None:
    assert write(f"<table>{table}</table>") == text


@pytest.mark.parametrize(
    ("cell", "is_layout"),
    [
        ("word " * 60, False),
        ("word " * 61, True),
        ("水" * 120, False),
        ("水" * 122, True),
        ("ก" * (61 * 12 - 1), False),
        ("ก" * 61 * 12, True),
    ],
)
def test_long_cells_are_page_layout_in_every_script(cell: str, is_layout: bool) -> None:
    text = write(f"<table><tr><td>a<td>{cell}<tr><td>b<td>c</table>")
    assert (" | " not in text) == is_layout


def test_a_row_that_another_table_interrupts_is_written_once() -> None:
    inner = "<table><tr><td>1<td>2<tr><td>3<td>4</table>"
    text = write(f"<table><tr><td>a<td>b{inner}c<td>d<tr><td>e<td>f</table>")
    assert text == "a | b\n\n1 | 2\n3 | 4\n\nc\n\nd\n\ne | f"


def test_spans_are_limited() -> None:
    rows = "<tr><td colspan=9999 rowspan=9999>a<td>b<tr><td>c<td>d"
    text = write(f"<table>{rows}</table>", markdown=True)
    assert [line.count("|") for line in text.split("\n")] == 3 * [MAX_COLUMNS + 3]
