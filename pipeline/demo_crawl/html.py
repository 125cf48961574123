"""Pages of the demo crawl and their HTML: eight layouts with the boilerplate that real pages have around their text.

The boilerplate is menus, breadcrumbs, side bars, cookie banners, scripts, adverts, share bars, tables, code and
comments. It is derived from the URL of the page, so a copy at another URL has different bytes around the same text.
"""

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any, Literal, Self

# A page before rendering, and the exact similarity of two texts, which is the label of near copies.

SHINGLE_WORDS = 5
WORD = re.compile(r"\w+")

Expected = Literal["keep", "drop", "either"]
Blocks = tuple[tuple[str, str], ...]
"""(element, text) of each block: `p`, `h2` or `pre`; a newline inside a `p` is a line break."""


@dataclass(frozen=True)
class DemoPage:
    """One page: its URL, text and encodings, the expected verdict, and the rules that may drop the page."""

    url: str
    title: str
    blocks: Blocks
    layout: str
    """Name of a layout in LAYOUTS."""
    kind: str = "page"
    """Kind of planted page; `page` is an ordinary page."""
    rules: tuple[str, ...] = ()
    """Names of the rules that may drop the page, the intended one first."""
    expected: Expected = "keep"
    """The expected verdict; of an original and its copies, any page may be the survivor."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the page's line in the truth file."""
    language: str = "en"
    charset: str = "utf-8"
    """Encoding of the bytes."""
    http_charset: str | None = "utf-8"
    """Charset in the Content-Type header; None = the header has no charset."""
    meta_charset: str | None = "utf-8"
    """Charset in the meta element of the page; None = the page has no such element."""
    encoding: str = "identity"
    """Content and transfer encoding of the body, one of `write.ENCODINGS`."""
    extras: bool = False
    """True if the layout may add tables, code and comments to the main content."""
    rendered_as: str | None = None
    """URL of the page whose bytes this page repeats; None = the page is not an exact copy."""
    menu: tuple[str, ...] = ("Home", "Guides", "Reference", "About", "Contact")
    """Labels of the navigation, in the language of the page."""

    def dropped_by(self, *rules: str) -> Self:
        """Return the page with the expected verdict `drop` and the rules that may drop it, the intended rule first."""
        return replace(self, rules=rules, expected="drop")

    @property
    def main_text(self) -> str:
        """The text that a perfect extractor returns: title and blocks, separated by blank lines."""
        return "\n\n".join(
            [self.title, *(text for _, text in self.blocks)] if self.title else [t for _, t in self.blocks]
        )


def prose(paragraphs: list[str]) -> Blocks:
    """Return paragraphs as blocks with the element `p`."""
    return tuple(("p", paragraph) for paragraph in paragraphs)


def shingles(text: str) -> set[tuple[str, ...]]:
    r"""Return the set of shingles of 5 words of a text; a word is a lower-cased run of `\w`."""
    words = WORD.findall(text.lower())
    return {tuple(words[i : i + SHINGLE_WORDS]) for i in range(len(words) - SHINGLE_WORDS + 1)}


def jaccard(a: str, b: str) -> float:
    """Return the Jaccard similarity in [0, 1] of the shingle sets of two texts; 1 if both sets are empty."""
    first, second = shingles(a), shingles(b)
    return len(first & second) / len(first | second) if first or second else 1.0


TAGS = ("b", "em", "i", "strong", "code", "span", "a")


def render(page: DemoPage) -> str:
    """Return the page as an HTML document."""
    page = replace(page, url=page.rendered_as or page.url)
    rng = random.Random(f"layout {page.url}")
    body = LAYOUTS[page.layout](page, rng)
    doctype = "" if page.layout == "bare" else "<!DOCTYPE html>\n"
    return f'{doctype}<html lang="{page.language}">\n{_head(page, rng)}\n<body>\n{body}\n</body>\n</html>\n'


def _head(page: DemoPage, rng: random.Random) -> str:
    name = _site(page)
    parts = [f'<meta charset="{page.meta_charset}">'] if page.meta_charset and page.layout != "bare" else []
    if page.meta_charset and page.layout == "bare":
        parts = [f'<meta http-equiv="Content-Type" content="text/html; charset={page.meta_charset}">']
    parts.append(f"<title>{escape(page.title or name)} - {name}</title>")
    if page.layout != "bare":
        parts.append('<meta name="viewport" content="width=device-width, initial-scale=1">')
        parts.append(f'<link rel="canonical" href="{page.url}">')
        parts.append(f'<link rel="stylesheet" href="/static/style.{rng.randrange(16**6):06x}.css">')
        parts.append(
            f"<script>window.dataLayer=window.dataLayer||[];var id='UA-{rng.randrange(10**6)}';track(id);</script>"
        )
    if page.extras and rng.random() < 0.4:
        about = {"@context": "https://schema.example", "@type": "Article", "name": page.title, "url": page.url}
        parts.append(f'<script type="application/ld+json">{json.dumps(about)}</script>')
    parts.append("<style>.nav li{display:inline} .x{color:#333}</style>")
    return "<head>\n" + "\n".join(parts) + "\n</head>"


def _site(page: DemoPage) -> str:
    labels = page.url.split("/")[2].split(".")
    return labels[-3 if labels[-2] == "example" else -2].title()


def _text(page: DemoPage, rng: random.Random) -> str:
    """Return the HTML of the blocks, with some inline elements and entities."""
    parts = [_block(element, text, page, rng) for element, text in page.blocks]
    if page.extras and rng.random() < 0.35:
        parts.insert(rng.randrange(len(parts)) + 1, _code(rng) if rng.random() < 0.6 else _table(rng))
    return "\n".join(parts)


def _block(element: str, text: str, page: DemoPage, rng: random.Random) -> str:
    if element != "p":
        return f"<{element}>{escape(text)}</{element}>"
    lines = [_inline(line, page, rng) for line in text.split("\n")]
    return "<p>" + "<br>\n".join(lines) + "</p>"


def _inline(line: str, page: DemoPage, rng: random.Random) -> str:
    words = escape(line).split(" ")
    if len(words) > 8 and rng.random() < 0.7:
        index, tag = rng.randrange(2, len(words) - 1), rng.choice(TAGS)
        attributes = f' href="/{rng.choice(page.menu).lower()}/{rng.randrange(900)}"' if tag == "a" else ""
        words[index] = f"<{tag}{attributes}>{words[index]}</{tag}>"
    if len(words) > 8 and rng.random() < 0.1 and words[-2].isalpha() and words[-2].isascii():
        words[-2] = f"&#{ord(words[-2][0])};{words[-2][1:]}"
    return " ".join(words)


def _code(rng: random.Random) -> str:
    name = rng.choice(("total", "rows", "frame", "result", "weights"))
    lines = (f"{name} = load({rng.randrange(99)})", f"for item in {name}:", f"    print(item + {rng.randrange(99)})")
    return "<pre><code>" + "\n".join(lines) + "</code></pre>"


def _table(rng: random.Random) -> str:
    rows = "".join(f"<tr><td>{name}</td><td>{rng.randrange(1000)}</td></tr>" for name in ("first", "second", "third"))
    return f'<table class="data"><thead><tr><th>Run</th><th>Items</th></tr></thead><tbody>{rows}</tbody></table>'


def _menu(page: DemoPage, kind: str = "nav") -> str:
    items = "".join(f'<li><a href="/{number}/">{escape(label)}</a></li>' for number, label in enumerate(page.menu))
    return f'<nav class="{kind}" role="navigation"><ul>{items}</ul></nav>'


def _banner(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return ""
    return (
        '<div id="cookie-banner" class="cookie-consent" role="dialog">We use cookies to improve this site. '
        '<a href="/privacy">Privacy policy</a> <button>Accept all</button></div>'
    )


def _side(page: DemoPage, rng: random.Random) -> str:
    labels = [escape(rng.choice(page.menu)) for _ in range(5)]
    links = "".join(f'<li><a href="/p/{rng.randrange(10**6)}">{label} {n}</a></li>' for n, label in enumerate(labels))
    advert = '<div class="ad">Advertisement</div>'
    return f'<aside class="sidebar"><h3>{escape(page.menu[-1])}</h3><ul>{links}</ul>{advert}</aside>'


def _footer(page: DemoPage, rng: random.Random) -> str:
    links = " | ".join(f'<a href="/f/{rng.randrange(99)}">{escape(label)}</a>' for label in page.menu)
    return f'<footer class="footer"><p>&copy; {2010 + rng.randrange(14)} {_site(page)}. {links}</p></footer>'


def _heading(page: DemoPage) -> str:
    return f"<h1>{escape(page.title)}</h1>" if page.title else ""


def _comments(page: DemoPage, rng: random.Random) -> str:
    if not page.extras:
        return ""
    remarks = rng.sample(REMARKS, 2)
    items = "".join(f'<div class="comment"><p>{text}</p></div>' for text in remarks)
    return f'<section id="comments" class="comments"><h3>Comments</h3>{items}</section>'


def _article(page: DemoPage, rng: random.Random) -> str:
    return f"""{_banner(rng)}<header>{_menu(page)}</header>
<main><article>{_heading(page)}
{_text(page, rng)}</article></main>
{_side(page, rng)}{_footer(page, rng)}"""


def _documentation(page: DemoPage, rng: random.Random) -> str:
    crumbs = " &raquo; ".join(f'<a href="/{n}">{escape(label)}</a>' for n, label in enumerate(page.menu[:3]))
    contents = "".join(f'<li><a href="#s{n}">{escape(label)}</a></li>' for n, label in enumerate(page.menu))
    return f"""<div class="breadcrumbs"><nav>{crumbs}</nav></div>
<div class="sphinxsidebar"><nav><ul>{contents}</ul></nav></div>
<div class="document" role="main"><div class="body"><section>{_heading(page)}
{_text(page, rng)}</section></div></div>
<script>var DOC_VERSION="{rng.randrange(9)}.{rng.randrange(9)}";</script>{_footer(page, rng)}"""


def _blog(page: DemoPage, rng: random.Random) -> str:
    return f"""{_banner(rng)}<div id="page">
<header id="masthead"><a href="/">{_site(page)}</a>{_menu(page, "main-menu")}</header>
<div id="content"><article class="post entry">{_heading(page)}
<div class="entry-content">{_text(page, rng)}</div>
<div class="share-buttons"><a href="#s1">Share</a> <a href="#s2">Print</a></div></article>
{_comments(page, rng)}</div>{_side(page, rng)}</div>{_footer(page, rng)}"""


def _forum(page: DemoPage, rng: random.Random) -> str:
    return f"""<div class="navbar">{_menu(page)}</div><div class="topic">{_heading(page)}
<div class="post"><div class="post-message content"><div class="message-body">
{_text(page, rng)}</div></div></div></div>
{_comments(page, rng)}<script>initForum({rng.randrange(10**5)});</script>{_footer(page, rng)}"""


def _bare(page: DemoPage, rng: random.Random) -> str:
    return f"{_heading(page)}\n<hr>\n{_text(page, rng)}\n<hr>"


def _wiki(page: DemoPage, rng: random.Random) -> str:
    return f"""<div id="mw-navigation">{_menu(page)}</div>
<div id="content" class="mw-body" role="main">{_heading(page)}
<div id="bodyContent"><div class="mw-parser-output">{_text(page, rng)}</div></div></div>
<!-- cached copy {rng.randrange(10**8)} -->{_footer(page, rng)}"""


def _magazine(page: DemoPage, rng: random.Random) -> str:
    advert = '<ins class="adsbygoogle"></ins><script>push({slot: 4});</script>'
    return f"""{_banner(rng)}<div class="header">{_menu(page)}</div>
<div class="wrapper"><div class="advertisement">{advert}</div><main id="main">{_heading(page)}
<div class="article-body">{_text(page, rng)}</div></main></div>
{_side(page, rng)}{_footer(page, rng)}"""


def _shell(page: DemoPage, rng: random.Random) -> str:
    return f"""<div id="app"><div class="topbar menu">{_menu(page)}</div>
<section class="page"><div class="page-content">{_heading(page)}
{_text(page, rng)}</div></section>{_footer(page, rng)}</div>
<noscript>Please turn on scripts.</noscript>
<script src="/static/app.{rng.randrange(16**6):06x}.js" async></script>"""


LAYOUTS: dict[str, Callable[[DemoPage, random.Random], str]] = {
    "article": _article,
    "documentation": _documentation,
    "blog": _blog,
    "forum": _forum,
    "bare": _bare,
    "wiki": _wiki,
    "magazine": _magazine,
    "shell": _shell,
}

CLEAN_LAYOUTS = ("documentation", "blog", "shell")
"""Layouts of planted pages. The extractor `penstock` finds exactly the main text of at least 216 of 240 planted pages
in each; what it leaves out of the others does not change their verdict. In `article` and `bare`, it takes a line that
occurs twice for furniture on some pages, and in the others it often leaves out the heading."""

REMARKS = (
    "Thank you, this cleared up a question that I had for a long time.",
    "I tried it last week and it worked on the first attempt.",
    "Could you say more about the second paragraph when you find the time?",
    "The same thing happened to me, and the advice above was the answer.",
    "Nice summary, although I would have started with the example.",
    "We use this every day at work and it has never let us down.",
    "Is there a printed version of this page that I could give to a friend?",
    "My colleague disagrees, but I think that you are right about the order.",
)


# URLs at a few host names that are reserved for examples (RFC 2606, RFC 6761).

HOSTS = (
    *("www.penrose.example", "docs.penrose.example", "docs.lumen.example", "blog.lumen.example", "www.tern.example"),
    *("forum.quince.example.org", "wiki.ash.example.net", "www.harbour.example.com", "notes.alder.example.com"),
    *("journal.sorrel.example.net", "www.marl.example.org", "help.kestrel.invalid", "blog.tarn.invalid"),
    *("reader.osier.test", "www.fathom.test", "archive.gannet.example"),
)
SECTIONS = ("guide", "articles", "reference", "2024/03", "topics", "node", "posts", "library")


class UrlGenerator:
    """A generator of distinct URLs."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._number = 0

    def new(self, words: str) -> str:
        """Return a new URL with `words` in its path."""
        self._number += 1
        slug = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:60]
        scheme, host, section = (self._rng.choice(names) for names in (("https", "https", "http"), HOSTS, SECTIONS))
        return f"{scheme}://{host}/{section}/{slug}-{self._number}{self._rng.choice(('', '.html', '/'))}"
