"""Code blocks: the text as typed, without what highlighters and pages add, and the language that a class names."""

import re

import pytest
from resiliparse.parse.html import HTMLTree

from pipeline.extract.code_blocks import Code, code_of, language_of
from tests.support.gold_pages import gold_pages, missing_data

CODE = "def f(x):\n\n    return x"


@pytest.mark.parametrize(
    ("html", "text"),
    [
        (CODE, CODE),
        ("\n\n  a\n\n\n\tb  \nc \n\n", "  a\n\n\n\tb  \nc"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("a<br>  b<br/><br>c", "a\n  b\n\nc"),
        ('<span class="k">def</span> <span class="nf">f</span><span class="p">(</span>x<span>):</span>', "def f(x):"),
        ("a &lt; b &amp;&amp; c &amp;lt; d&nbsp;&nbsp;e", "a < b && c &lt; d  e"),
        ("a<!-- hidden > text -->b<!-- open", "ab"),
        ('<button class="x">Copy</button>a<svg><title>Copy</title></svg><style>.a{}</style>', "a"),
        ('a<div class="btn-copy">Copy</div><span class="clipboard">x</span><clipboard-copy>c</clipboard-copy>', "a"),
        ('<pre class="hljs-copy"><i class="copy-icon">c</i>a</pre>', "a"),
        ('<span class="token copyright">c</span>', "c"),
        ("", ""),
        ("  \n ", ""),
        ("a < b <3 c", "a < b <3 c"),
        ("</b>a</pre><i>b", "ab"),
    ],
)
def test_text(html, text):
    assert code_of(html).text == text


@pytest.mark.parametrize(
    "html",
    [
        # Pygments and Rouge: a table with a column of numbers
        '<table class="highlighttable"><tbody><tr><td class="linenos"><div><pre>1\n2\n3</pre></div></td>\n'
        f'<td class="code"><div><pre><span></span>{CODE}\n</pre></div></td></tr></tbody></table>',
        '<table class="rouge-table"><tbody><tr><td class="rouge-gutter gl"><pre class="lineno">1\n2\n3\n</pre></td>'
        f'<td class="rouge-code"><pre>{CODE}\n</pre></td></tr></tbody></table>',
        # Pygments and Chroma: a number in each line
        '<span class="linenos">1</span>def f(x):\n<span class="linenos">2</span>\n<span class="linenos">3</span>'
        "    return x",
        '<span class="line"><span class="ln">1</span><span class="cl">def f(x):\n</span></span><span class="line">'
        '<span class="ln">2</span><span class="cl">\n</span></span><span class="ln">3</span>    return x',
        # GitHub: a table with a row for each line
        '<table><tbody>\n <tr>\n  <td class="blob-num" data-line-number="1"></td>\n  <td>def f(x):</td>\n </tr>\n'
        ' <tr>\n  <td class="blob-num" data-line-number="2"></td>\n  <td>\n</td>\n </tr>\n'
        ' <tr>\n  <td class="blob-num" data-line-number="3"></td>\n  <td>    return x</td>\n </tr>\n</tbody></table>',
        # highlight.js with numbers
        '<table class="hljs-ln"><tr><td class="hljs-ln-numbers"><div data-line-number="1">1</div></td>'
        '<td>def f(x):</td></tr><tr><td class="hljs-ln-numbers">2</td><td>\n</td></tr>'
        '<tr><td class="hljs-ln-numbers">3</td><td>    return x</td></tr></table>',
        # SyntaxHighlighter: lines are elements
        '<table><tr><td class="gutter"><div class="line">1</div><div class="line">2</div></td><td class="code"><div>'
        '<div class="line"><code>def</code> <code>f(x):</code></div><div class="line"></div>'
        '<div class="line"><code>&nbsp;&nbsp;&nbsp;&nbsp;return</code> <code>x</code></div></div></td></tr></table>',
        # google-code-prettify and Prism
        '<ol class="linenums">\n<li class="L0">def f(x):</li>\n<li></li>\n<li class="L2">    return x</li>\n</ol>',
        f'{CODE}<span aria-hidden="true" class="line-numbers-rows"><span></span><span></span></span>',
        # Docusaurus
        '<div class="token-line">def f(x):<br></div><div class="token-line"><span></span><br></div>'
        '<div class="token-line">    return x<br></div>',
        # numbers that no class marks
        '<div><span data-line-number="1">1</span>def f(x):</div><div><span data-line-number="2">2</span></div>'
        '<div><span data-line-number="3"> 3 </span>    return x</div>',
        "<div>1</div><div>def f(x):</div><div>2</div><div></div><div>3</div><div>    return x</div>",
        f"<div>1</div><div>2</div><div>3</div>{CODE}",
    ],
)
def test_line_numbers_are_removed(html):
    assert code_of(html).text == CODE


@pytest.mark.parametrize(
    "text",
    ["1\n2\n3", "1\nx", "1\n00:00:01\nHi\n\n2\n00:00:02\nYo", "2\na\n3\nb", "1\n2\na", '{"a":\n 1\n}'],
)
def test_numbers_that_are_the_code_stay(text):
    assert code_of(text).text == text


def test_an_attribute_that_is_not_the_number_of_its_text_removes_nothing():
    assert code_of('<span data-line-number="1">a = 1</span>\n<span data-line-number="2">2</span>').text == "a = 1"
    assert code_of('<span data-line-number="7">2</span>').text == "2"


def test_cells_of_a_table_are_separated():
    assert code_of("<table><tr> <td>a</td> <td>b</td></tr><tr><td>c</td><td></td></tr></table>").text == "a\tb\nc"


@pytest.mark.parametrize(
    ("classes", "language"),
    [
        *(("language-python", "python"), ("x lang-C++ y", "c++"), ("highlight highlight-source-shell", "shell")),
        *(("brush: js notranslate", "js"), ("brush:csharp", "csharp"), ("sourceCode haskell", "haskell")),
        *(("hljs rust", "rust"), ("hljs language-go", "go"), ("highlight-python3 notranslate", "python3")),
        *(("prettyprint lang-py linenums", "py"), ("language-objective-c", "objective-c")),
        *(("language-plaintext", None), ("language-none lang-c", "c"), ("highlight", None), ("highlight-lines", None)),
        *(("python", None), ("", None), ("mylanguage-x", None), ("language-", None)),
    ],
)
def test_language_of_classes(classes, language):
    assert language_of(classes) == language


@pytest.mark.parametrize(
    ("html", "language"),
    [
        ('<code class="language-Ruby" data-lang="perl">x</code>', "ruby"),
        ('<pre class="highlight"><code data-lang="perl">x</code></pre>', "perl"),
        ('<pre data-language="plaintext"><code>x</code></pre>', None),
        ('<code>a<span class="token language-css">x</span></code>', None),
        ('<div class="highlight-source-json"><pre>x</pre></div>', "json"),
        ('<button class="language-x">b</button><code>x</code>', None),
        ("<code class=language>x</code>", None),
    ],
)
def test_language(html, language):
    assert code_of(html).language == language


def test_code_is_read_as_resiliparse_serializes_it():
    tree = HTMLTree.parse('<pre class="language-c">\n  if (a < b &amp;&amp; c > d) {<br>\tx = "&amp;lt;";\n  }\n</pre>')
    assert tree.document is not None
    node = tree.document.query_selector("pre")
    assert node is not None
    assert code_of(node.html) == Code('  if (a < b && c > d) {\n\tx = "&lt;";\n  }', "c")
    assert code_of(node.inner_html) == Code('  if (a < b && c > d) {\n\tx = "&lt;";\n  }', None)


@pytest.mark.parametrize(
    ("html", "length"),
    [
        ("<" * 200_000, 200_000),
        ("<!--" * 100_000, 0),
        ("<div>" * 50_000 + "</div>" * 50_000, 0),
        ("<b>" * 50_000 + "</i>" * 50_000 + "x", 1),
        ('<span data-line-number="1">' * 20_000 + "x", 1),
        ('<i><b class="' + "a-" * 100_000 + '">x', 1),
        ('<code class="' + "lang-none brush: " * 20_000 + '">x', 1),
        ("<i class=" + "'\"" * 100_000 + ">x", 1),
        ("1\n" * 100_000, 199_999),
    ],
)
def test_markup_that_is_written_to_break_the_scan(html, length):
    assert len(code_of(html).text) == length


@pytest.mark.skipif(missing_data(("wcxb_more",)) is not None, reason=str(missing_data(("wcxb_more",))))
def test_blocks_of_real_pages_keep_their_words():
    """The words of a block without line elements are those of its text content, buttons and numbers aside."""
    num_blocks, changed, languages = 0, 0, set()
    for page in gold_pages(("wcxb_more",)):
        if page.page_type != "documentation" and "<pre" not in page.html:
            continue
        document = HTMLTree.parse(page.html).document
        for node in document.query_selector_all("pre").values():
            code = code_of(node.html)
            num_blocks += 1
            languages.add(code.language)
            changed += re.findall(r"\w+", code.text) != re.findall(r"\w+", node.text)
    assert num_blocks > 400
    assert {"bash", "python", "c", "shellscript"} <= languages
    assert 0 < changed < num_blocks / 4
