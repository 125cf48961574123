"""Wikitext: each construct becomes the text that a reader sees, and no markup left open takes quadratic time."""

import sys

import pytest

from pipeline.sources.wiki.blocks import WikiForm
from pipeline.sources.wiki.names import DISAMBIGUATION, DISAMBIGUATION_NAMES, FILE_NAMESPACES, KEPT_TEMPLATES
from pipeline.sources.wiki.wikitext import categories, plain_name, template_names, text_of_wikitext

INLINE = [
    ("'''Bold''' and ''italic'' and '''''both'''''.", "Bold and italic and both."),
    ("l'''amour''", "l'amour"),
    ("L'''opera'' e '''altro'''", "L'opera e altro"),
    ("a ''''b'''' c", "a 'b' c"),
    ("[[Target]]s, [[Target|label]], [[:Category:X]], [[a_b]]", "Targets, label, Category:X, a b"),
    ("x[[File:a.jpg|thumb|A [[link]] in it]]y [[Datei:b.png]]", "xy"),
    ("Text.[[Category:Things]] [[fr:Chose]] [[doi:10.1|10.1]]", "Text. 10.1"),
    ("[http://a.org the label] and [http://b.org] and http://c.org", "the label and and http://c.org"),
    ("A{{ref|1}} b {{cite web|url=http://x|title={{nested}}}} c.", "A b c."),
    ("A (, {{IPA|x}}; born 1 May) b", "A (born 1 May) b"),
    ("A ({{IPA|x}}; born 1 May) b ({{a}}) c ({{a}}, {{b}}).", "A (born 1 May) b c."),
    ("A ({{lang|de|Wort}}) {{convert|5|km|mi}} {{nowrap|a {{lang|fr|b}} c}}", "A (Wort) 5 km a b c"),
    ("{{lang-ru|слово}}, {{unknown|x}}end", "слово, end"),
    ("a<ref>note {{x}}</ref>b<ref name=n />c<ref name='m'>n</ref>.", "abc."),
    ("a <!-- no --> b", "a b"),
    ("a &lt;b&gt; &amp;amp; &nbsp;c", "a <b> &amp; c"),
    ("a<br />b<BR>c", "a\nb\nc"),
    ("<nowiki>[[a]] {{b}} &lt; ''</nowiki>", "[[a]] {{b}} < ''"),
    ("x <math>a^{{2}}</math> y", "x $a^{{2}}$ y"),
    ("<code>f(x)</code> <unknown>", "f(x) <unknown>"),
    ("<span style='display:none'>hidden</span>seen<div class=\"navbox\">a<div>b</div></div>!", "seen!"),
    ("x [[File:a.png|thumb|A\n<source>\ncode\n</source>\n[[b]]]] y", "x y"),
    ("a\n\n* {{Cite}}.\n* b {{Cite}}.\n{{Cite}}\n", "a\n\n- b."),
    ("a <source>\n  x\n\n y</source> b", "a\n\n  x\n\n y\n\nb"),
    ("__NOTOC__ a __init__", "a __init__"),
    ("-{zh-hant:臺灣;zh-hans:台湾}- -{H|zh-cn:a;zh-tw:b}- -{plain}-", "台湾 plain"),
    ("{{{1|default}}} x", "x"),
    ("a }} b ]] c {{ d [[ e", "a }} b c {{ d e"),
    ("<poem>\none\ntwo\n</poem>", "one\ntwo"),
    ("\ufdd2" + "0\ufdd3 \ufdd1x", "0 x"),
]


@pytest.mark.parametrize(("source", "expected"), INLINE)
def test_inline_markup(source: str, expected: str) -> None:
    assert text_of_wikitext(source, WikiForm()) == expected


PAGE = """{{Infobox
| name = A
}}
'''A''' is
a thing.

== One ==
* item
** inner ''i''
* [[File:x.jpg]]
# first
# second
:#third
; term : definition

=== Empty ===
<!-- nothing -->

== Two ==
{| class="wikitable"
|+ The caption
|-
! A !! style="x" | B
|-
| 1 || [[a|2]]
|-
| 3
| 4<br>5
|}
after
{| class="infobox"
| gone
|}
:<math>x = y</math>
<syntaxhighlight lang="python">
def f():
    return "<ref>"
</syntaxhighlight>
 code line
----
== References ==
<references />
[[Category:A]]
"""


def test_a_page() -> None:
    assert text_of_wikitext(PAGE, WikiForm()) == (
        "A is a thing.\n\nOne\n\n- item\n  - inner i\n1. first\n2. second\n1. third\nterm\ndefinition\n\nTwo\n\n"
        'The caption\n\nA | B\n1 | 2\n3 | 4 5\n\nafter\n\n$$x = y$$\n\ndef f():\n    return "<ref>"\n\ncode line'
    )


def test_headings_lists_tables_and_formulas_are_left_out_by_choice() -> None:
    assert text_of_wikitext(PAGE, WikiForm(False, False, False, False)) == (
        'A is a thing.\n\nterm\ndefinition\n\nafter\n\ndef f():\n    return "<ref>"\n\ncode line'
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{|\n| only one cell with text\n|}", "only one cell with text"),
        ("{|\n| a || " + "word " * 100 + "\n|-\n| b || c\n|}", "a\n\n" + ("word " * 100).strip() + "\n\nb\n\nc"),
        ("{|\n| a\n|\n{|\n! x !! y\n|-\n| 1 || 2\n|}\n|}", "a\n\nx | y\n1 | 2"),
        ("{|\n| a || b\n|-\n| c || d", "a | b\nc | d"),
        ("{|\n! !! 2019 !! 2020\n|-\n| A || 5 || 6\n|-\n| B || || 7\n|}", "| 2019 | 2020\nA | 5 | 6\nB |  | 7"),
        ('{|\n| rowspan="2" | 1999 || A || x\n|-\n| B || y\n|}', "1999 | A | x\n| B | y"),
        ("{|\n! colspan=2 | A !! B\n|-\n| a || b || c\n|}", "A |  | B\na | b | c"),
        ("{|\n| a || || b\n|-\n| c || || d\n|}", "a | b\nc | d"),
        ("{|\n| rowspan=9999 colspan=9999 | a || b\n|-\n| c || d\n|}", "a | b\n| c | d"),
        ("{{table}}\n|}\nx", "|} x"),
        ("<table><tr><td>a</td><td>b</td></tr><tr><td>c</td><td>d</td></tr></table>", "a | b\nc | d"),
    ],
)
def test_tables(source: str, expected: str) -> None:
    assert text_of_wikitext(source, WikiForm()) == expected


def test_namespaces_of_the_wiki() -> None:
    source = "a [[Fails:x.jpg|thumb|b]] [[Eksemplo:x|c]]"
    assert text_of_wikitext(source, WikiForm()) == "a c"
    assert text_of_wikitext(source, WikiForm(), frozenset({"eksemplo"})) == "a"


def test_names() -> None:
    assert [*template_names("{{ A_b }}{{Template:C|x}}{{d\n|y}} {{#if:x}}")] == ["a b", "c", "d", "x"]
    assert [*categories("[[Category:A b|key]] [[x]] [[Kat: C ]]")] == ["a b", "c"]
    assert plain_name(" Template:Foo_Bar ") == "foo bar"
    every = [*DISAMBIGUATION_NAMES, *FILE_NAMESPACES, *KEPT_TEMPLATES]
    assert [name for name in every if name != plain_name(name)] == []
    assert len(DISAMBIGUATION) == len({*DISAMBIGUATION})


OPENINGS = (
    "{{~{{{~[[~[[a|~''~'''a~<b>~<ref>~{|\n~|-\n~[http://a ~=a\n~&~<!--~<div ~\n*~{{a|b=~[[a|{{b|~<b a=\"~{{lang|fr|~"
    "<div class='infobox'>~<pre>~<math>~<td>~-{a;~__A~({{a}}, ~ {{a}} ;~\n|a||b~\n{|\n|a~\n:#*~(~<nowiki>~{{{{{~\n=="
)


class _Steps:
    """Counts the calls and returns of functions, which do not depend on the speed of the machine."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, *_: object) -> None:
        self.number += 1


@pytest.mark.parametrize("opening", [*OPENINGS.split("~"), OPENINGS])
def test_markup_left_open_takes_linear_work(opening: str) -> None:
    """A quadratic regular expression is not counted, but takes much longer."""
    text_of_wikitext(opening * (20_000 // len(opening)), WikiForm())

    def work(repeats: int) -> int:
        steps = _Steps()
        sys.setprofile(steps)
        try:
            text_of_wikitext(opening * repeats, WikiForm())
        finally:
            sys.setprofile(None)
        return steps.number

    assert work(400) <= 2.2 * work(200) + 200


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("1.5{{e|5}} kg, 5.97{{E|24}}, 10{{e|5}}, m{{e|2}}, XX{{e}}", "1.5×10^5 kg, 5.97×10^24, 10^5, m2, XX"),
        ("10<sup>5</sup> 10<SUP>−3</SUP> 3<sup>1</sup>/<sub>2</sub>", "10^5 10^−3 3 1/2"),
        ("101<sub>2</sub> m<sup>2</sup> H<sub>2</sub>O 10{{sup|5}}", "101_2 m2 H2O 10^5"),
        ("{{frac|2}} {{frac|1|2}} {{frac|3|1|2}} {{sfrac|3|4}}", "1/2 1/2 3 1/2 3/4"),
        ("{{val|1.67|e=-27|u=kg}} {{val|5|0.2}} {{val|5|(2)}}", "1.67×10^-27 kg 5 ± 0.2 5(2)"),
        ("{{convert|5|km|mi}} {{convert|5|to|10|km}} {{cvt|5|-|10|km|mi|0}}", "5 km 5 to 10 km 5–10 km"),
        ("{{convert|5|ft|10|in|cm}} {{convert|3|x|4|m}} {{convert|5|km|0}}", "5 ft 10 in 3 × 4 m 5 km"),
        ("{{circa|1900}} {{c.|1900|1910}} b", "c. 1900 c. 1900 – c. 1910 b"),
        ("{{as of|2020|7|lc=y}}, {{As of|2019}}, {{as of|2020|alt=in 2020}}", "as of July 2020, As of 2019, in 2020"),
        ("{{langx|uk|Київ}} {{sortname|Ada|Byron}} {{formatnum:1234}}", "Київ Ada Byron 1234"),
        ("{{math|''n'' {{=}} 5}} {{HMS|Hood|51}} {{gaps|1|000}} {{US$|5}}", "n = 5 HMS Hood 1000 US$5"),
        ("{{ubl|a|b}}", "a\nb"),
        ("({{lang|x|}}) [[File:a.jpg|thumb|left|A [[b]] c\n\nd]] [[e\n\nf]]", "e\n\nf"),
    ],
)
def test_templates_keep_their_numbers_and_words(source: str, text: str) -> None:
    assert text_of_wikitext(f"x {source}", WikiForm()) == f"x {text}"
