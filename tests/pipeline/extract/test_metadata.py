"""Every field of a page's metadata from each of its sources, and pages that are written to break the reader."""

import json
from datetime import date
from itertools import islice

import pytest
from resiliparse.parse.html import HTMLTree

from pipeline.extract.metadata import (
    MAX_AUTHOR_CHARS,
    MAX_DESCRIPTION_CHARS,
    MAX_NAME_CHARS,
    MAX_TITLE_CHARS,
    PageMetadata,
    read_metadata,
)
from pipeline.extract.metadata_values import licence_name, parse_date, squeezed
from tests.support.gold_pages import gold_pages, missing_data

URL = "https://www.example.com/blog/turbines"
FETCHED = date(2024, 6, 1)


def read(head: str = "", body: str = "", url: str | None = URL, html_attributes: str = "") -> PageMetadata:
    """The metadata of a page with this head and body."""
    html = f"<!doctype html><html {html_attributes}><head>{head}</head><body>{body}</body></html>"
    return read_metadata(HTMLTree.parse(html), url, FETCHED, html)


def ld(value: object) -> str:
    """A JSON-LD script."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f'<script type="application/ld+json">{text}</script>'


def test_a_page_without_declarations_has_no_metadata():
    assert read(body="<p>Text.</p>") == PageMetadata(*[None] * 10, frozenset(), None, bad_json_ld=0, bad_dates=0)
    assert read_metadata(HTMLTree.parse("")) == PageMetadata(
        *[None] * 10, frozenset(), None, bad_json_ld=0, bad_dates=0
    )


# ---------------------------------------------------------------------------------------------------------------- title


@pytest.mark.parametrize(
    ("head", "body", "title"),
    [
        ("<title>How turbines work</title>", "", "How turbines work"),
        ("<title>How turbines work | Example</title>", "", "How turbines work"),
        ("<title>Example - How turbines work</title>", "", "How turbines work"),
        ("<title>How turbines work – example.com</title>", "", "How turbines work"),
        ("<title>Turbines - A short history</title>", "", "Turbines - A short history"),
        (
            '<title>How turbines work :: River News</title><meta property="og:site_name" content="River News">',
            "",
            "How turbines work",
        ),
        (
            '<title>How turbines work - Hydro weekly</title><meta property="og:title" content="How turbines work">',
            "",
            "How turbines work",
        ),
        ('<meta name="twitter:title" content="Turbines &amp;amp; pipes">', "", "Turbines & pipes"),
        (ld({"@type": "NewsArticle", "headline": "Water <b>power</b>"}), "", "Water power"),
        ("<title>River News</title>", "<h1>The <em>new</em>\n dam</h1>", "The new dam"),
        ("<title>The new dam | River News</title>", "<h1>Menu</h1><h1>The new dam</h1>", "The new dam"),
        ("<title>The new dam</title>", "<h1>Example</h1><svg><title>icon</title></svg>", "The new dam"),
        ("<title>\x01 \x7f</title>", "", None),
    ],
)
def test_the_title_is_that_of_the_page_without_the_site(head, body, title):
    assert read(head, body).title == title


# --------------------------------------------------------------------------------------------------------------- author


@pytest.mark.parametrize(
    ("head", "body", "author"),
    [
        (ld({"@type": "Article", "author": {"name": "Ada Lovelace"}}), "", "Ada Lovelace"),
        (ld({"@type": "Article", "author": [{"name": "Ada"}, "Grace Hopper"]}), "", "Ada, Grace Hopper"),
        (ld({"@type": "Article", "author": {"givenName": "Ada", "familyName": "Byron"}}), "", "Ada Byron"),
        (
            ld({"@graph": [{"@type": "Article", "author": {"@id": "#a"}}, {"@id": "#a", "name": "Ada"}]}),
            "",
            "Ada",
        ),
        (ld({"@type": "Organization", "author": "Ada"}), "", None),
        ('<meta name="author" content="By Ada Lovelace and Grace Hopper">', "", "Ada Lovelace, Grace Hopper"),
        ('<meta name="author" content="von Ada Lovelace">', "", "Ada Lovelace"),
        ('<meta name="author" content="admin">', "", None),
        ('<meta property="article:author" content="https://social.example/ada">', "", None),
        ('<meta name="DC.Creator" content="Ada"><meta name="DC.Creator" content="Grace">', "", "Ada, Grace"),
        (
            '<meta name="twitter:label1" content="Written by"><meta name="twitter:data1" content="Ada Lovelace">',
            "",
            "Ada Lovelace",
        ),
        (
            '<meta name="twitter:label1" content="Price"><meta name="twitter:data1" content="Ten Euro">',
            "",
            None,
        ),
        ("", '<div itemprop="author" itemscope>by <b itemprop="name">Ada Lovelace</b></div>', "Ada Lovelace"),
        (
            "",
            '<div itemscope itemtype="https://schema.org/Review"><b itemprop="author">Some Buyer</b></div>',
            None,
        ),
        ("", '<p class="byline">By Ada Lovelace</p>', "Ada Lovelace"),
        ("", '<a rel="author" href="/people/ada">Ada Lovelace</a>', "Ada Lovelace"),
        ("", '<p class="byline">May 17, 2024</p>', None),
        ("", '<div class="comments"><span class="author">Some Reader</span></div>', None),
        (ld({"@type": "Product", "name": "Pump"}), '<span class="author">Some Buyer</span>', None),
    ],
)
def test_the_author_is_a_byline_without_its_words(head, body, author):
    assert read(head, body).author == author


def test_a_person_in_the_byline_precedes_the_site_as_author():
    head = ld({"@type": "Article", "author": {"name": "Example"}})
    assert read(head, '<p class="byline">By Ada Lovelace</p>').author == "Ada Lovelace"
    assert read(head).author == "Example"


# ----------------------------------------------------------------------------------------------------------------- date

DAY = date(2024, 5, 17)


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (ld({"@type": "BlogPosting", "datePublished": "2024-05-17T23:30:00-05:00"}), ""),
        ('<meta property="article:published_time" content="2024-05-17T08:00:00Z">', ""),
        ('<meta name="DC.date.issued" content="2024-05-17">', ""),
        ('<meta itemprop="datePublished" content="20240517">', ""),
        ("", '<span itemprop="datePublished">17 May 2024</span>'),
        ("", '<time datetime="2024-05-17">last week</time>'),
        ("", "<time>17. Mai 2024</time>"),
        ("", '<p class="post-date">Posted on May 17th, 2024</p>'),
        ("", "<h1>Turbines</h1><p>2024年5月17日</p>"),
        ("", "<h1>Turbines</h1><p>17.05.2024</p>"),
    ],
)
def test_the_date_of_publication_is_the_day_that_the_page_states(head, body):
    assert read(head, body).date_published == DAY


def test_the_date_in_the_url_is_the_last_declared_source():
    url = "https://example.com/2024/05/17/turbines"
    assert read(url=url).date_published == DAY
    assert read('<meta name="date" content="2023-01-02">', url=url).date_published == date(2023, 1, 2)


def test_a_time_in_utc_does_not_move_the_day_of_the_url():
    url = "https://example.com/2024/05/17/turbines"
    assert read('<meta name="date" content="2024-05-18T03:00:00Z">', url=url).date_published == DAY
    assert read('<meta name="date" content="2024-05-19T03:00:00Z">', url=url).date_published == date(2024, 5, 19)


@pytest.mark.parametrize(
    ("stated", "day", "bad"),
    [
        ("1990-01-01", date(1990, 1, 1), 0),
        ("1989-12-31", None, 1),
        ("2024-06-02", date(2024, 6, 2), 0),
        ("2024-06-03", None, 1),
        ("2024-02-30", None, 0),
        ("2024-13-01", None, 0),
        ("03/04/2024", None, 0),
        ("13/04/2024", date(2024, 4, 13), 0),
        ("yesterday", None, 0),
        ("", None, 0),
        ("9" * 100_000, None, 0),
    ],
)
def test_a_date_out_of_range_is_null_and_counted(stated, day, bad):
    metadata = read(f'<meta name="date" content="{stated}">')
    assert (metadata.date_published, metadata.bad_dates) == (day, bad)


def test_a_later_source_replaces_a_date_out_of_range():
    head = '<meta property="article:published_time" content="1970-01-01"><meta name="date" content="2099-01-01">'
    metadata = read(head + '<meta name="article:published" content="2024-05-17">')
    assert (metadata.date_published, metadata.bad_dates) == (DAY, 2)


def test_without_a_day_of_the_record_no_date_is_too_late():
    tree = HTMLTree.parse('<meta name="date" content="2099-01-01">')
    assert read_metadata(tree).date_published == date(2099, 1, 1)
    assert read_metadata(tree, fetched=date.max).date_published == date(2099, 1, 1)


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (ld({"@type": "WebPage", "dateModified": "2024-05-17"}), ""),
        ('<meta property="article:modified_time" content="2024-05-17T08:00:00+00:00">', ""),
        ('<meta property="og:updated_time" content="2024-05-17">', ""),
        ("", '<time itemprop="dateModified" class="updated" datetime="2024-05-17">today</time>'),
    ],
)
def test_the_date_of_the_last_change_is_another_field(head, body):
    metadata = read(head, body)
    assert (metadata.date_modified, metadata.date_published) == (DAY, None)


# ------------------------------------------------------------------------------------- URL, site, description, language


@pytest.mark.parametrize(
    ("head", "canonical"),
    [
        ('<link rel="canonical" href="https://example.com/a#part">', "https://example.com/a"),
        ('<link rel="canonical" href="/a?b=1">', "https://www.example.com/a?b=1"),
        ('<link rel="canonical" href="c">', "https://www.example.com/blog/c"),
        ('<base href="https://cdn.example.net/x/"><link rel="canonical" href="c">', "https://cdn.example.net/x/c"),
        ('<base href="/y/"><link rel="canonical" href="c">', "https://www.example.com/y/c"),
        ('<base href="javascript:1"><link rel="canonical" href="c">', "https://www.example.com/blog/c"),
        ('<link rel="canonical" href="javascript:alert(1)">', None),
        ('<link rel="canonical" href="data:text/html,x">', None),
        ('<link rel="canonical" href="http://[::1">', None),
        ('<link rel="canonical" href="https://example.com:99999/">', None),
        ('<link rel="canonical" href="https://exam\x01ple.com/">', None),
        (f'<link rel="canonical" href="https://example.com/{"a" * 2_000}">', None),
        ('<link rel="canonical" href="ftp:x"><meta property="og:url" content="/b">', "https://www.example.com/b"),
    ],
)
def test_the_canonical_url_is_absolute_http(head, canonical):
    assert read(head).canonical_url == canonical


def test_a_relative_canonical_url_without_the_url_of_the_page_is_null():
    assert read('<link rel="canonical" href="/a">', url=None).canonical_url is None


@pytest.mark.parametrize(
    ("head", "name"),
    [
        ('<meta property="og:site_name" content=" River&#10;News ">', "River News"),
        (ld({"@type": "WebSite", "name": "River News"}), "River News"),
        (ld({"@type": "Article", "publisher": {"name": "River News"}}), "River News"),
        ('<meta name="application-name" content="River News">', "River News"),
    ],
)
def test_the_site_has_its_declared_name(head, name):
    assert read(head).site_name == name


def test_the_description_is_one_line():
    assert read('<meta name="Description" content="Water\n\tand  &lt;b&gt;power">').description == "Water and power"
    assert read(ld({"@type": "Article", "description": "Water"})).description == "Water"


@pytest.mark.parametrize(
    ("attributes", "head", "language"),
    [
        ('lang="pt_BR"', "", "pt"),
        ('lang="EN-us"', "", "en"),
        ('xml:lang="de"', "", "de"),
        ('lang="ger"', "", "de"),
        ('lang="iw"', "", "he"),
        ('lang="und"', '<meta http-equiv="Content-Language" content="fr-CA">', "fr"),
        ("", '<meta property="og:locale" content="sv_SE">', "sv"),
        ("", '<meta http-equiv="content-language" content="en, fr">', None),
        ('lang="{{ lang }}"', "", None),
    ],
)
def test_the_language_is_a_primary_subtag(attributes, head, language):
    assert read(head, html_attributes=attributes).declared_language == language


@pytest.mark.parametrize(
    "text",
    [
        *("17\u00a0May\u00a02024", "17.\u202fMai 2024", "May\u200917, 2024", "17 Mai 2024", "17 MAI 2024"),
        *("2024\u201305\u201317", "2024\u201105\u201117", "2024\u221205\u221217", "17\u201005\u20102024"),
        *(
            "\uff12\uff10\uff12\uff14\u5e74\uff15\u6708\uff11\uff17\u65e5",
            "\uff12\uff10\uff12\uff14\uff0f05\uff0f17",
            "2024\u5e74\u30005\u6708\u300017\u65e5",
        ),
    ],
)
def test_dates_with_other_blanks_dashes_and_digits(text):
    assert parse_date(text) == date(2024, 5, 17)


def test_months_may_be_decomposed():
    assert parse_date("17 Ma\u0308rz 2024") == date(2024, 3, 17)


# ---------------------------------------------------------------------------------------------------- kind and licence


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        ('<meta property="og:type" content="Article">', "article"),
        ('<meta property="og:type" content="website">', None),
        ('<meta property="og:type" content="product.group">', "collection"),
        ('<meta property="og:type" content="video.movie">', "other"),
        (ld({"@type": "http://schema.org/NewsArticle"}), "article"),
        (ld({"@type": ["Thing", "Product"]}), "product"),
        (ld({"@type": "QAPage", "mainEntity": {"@type": "Question"}}), "forum"),
        (ld({"@type": "TechArticle"}), "documentation"),
        (ld({"@type": "Service"}), "service"),
        (ld([{"@type": "BreadcrumbList"}, {"@type": "CollectionPage"}]), "collection"),
        (ld({"@type": "SearchResultsPage"}), "listing"),
        (ld({"@type": "Event"}), "other"),
        (ld({"@type": "Event"}) + '<meta property="og:type" content="article">', "article"),
        (ld({"@type": "Organization"}), None),
        (ld({"@type": 7}), None),
    ],
)
def test_the_kind_of_page_is_the_declared_one(head, kind):
    assert read(head).page_type == kind


CC = "https://creativecommons.org"


@pytest.mark.parametrize(
    ("head", "body", "licence"),
    [
        (f'<link rel="license" href="{CC}/licenses/by-sa/4.0/">', "", "CC-BY-SA-4.0"),
        (f'<link rel="license" href="{CC}/licenses/by-nc-nd/3.0/de/deed.en">', "", "CC-BY-NC-ND-3.0-DE"),
        (f'<link rel="license" href="{CC}/publicdomain/zero/1.0/">', "", "CC0-1.0"),
        ('<link rel="license" href="/terms">', "", "https://www.example.com/terms"),
        ('<link rel="license" href="javascript:x">', "", None),
        ('<meta name="DC.rights" content="CC BY-NC 4.0">', "", "CC-BY-NC-4.0"),
        ('<meta name="DC.rights" content="All rights reserved">', "", None),
        ('<meta name="DC.rights" content="Creative Commons Attribution-ShareAlike 3.0">', "", "CC-BY-SA-3.0"),
        (ld({"@type": "Article", "license": {"@id": f"{CC}/licenses/by/4.0"}}), "", "CC-BY-4.0"),
        (ld({"@type": "Article", "license": "https://example.org/l"}), "", "https://example.org/l"),
        ("", f'<a href="{CC}/licenses/by/2.0/">Licence</a>', "CC-BY-2.0"),
        ("", f'<a href="{CC}/licenses/by/2.0/">1</a><a href="{CC}/licenses/by-sa/2.0/">2</a>', None),
        ("", f'<a href="{CC}/">CC</a><a href="{CC.upper()}/licenses/by/2.0/">Licence</a>', "CC-BY-2.0"),
        ('<meta name="dc:rights" content="CC BY-NC 4.0">', "", "CC-BY-NC-4.0"),
        (f'<meta property="dct:license" content="{CC}/licenses/by/4.0/">', "", "CC-BY-4.0"),
        (ld({"@type": ["CreativeWork", "LearningResource"], "license": f"{CC}/licenses/by/4.0"}), "", "CC-BY-4.0"),
        (ld({"@type": "ImageObject", "license": f"{CC}/licenses/by/4.0"}), "", None),
        (
            ld(
                {"@graph": [{"@type": "WebPage", "license": {"@id": "#l"}}, {"@id": "#l", "name": "CC BY 4.0", "x": 1}]}
            ),
            "",
            "CC-BY-4.0",
        ),
        (
            ld({"@type": "Article", "license": f"{CC}/licenses/by/4.0"}).replace("ld+json", "ld+json; charset=utf-8"),
            "",
            "CC-BY-4.0",
        ),
    ],
)
def test_the_licence_has_its_short_name_or_url(head, body, licence):
    assert read(head, body).declared_licence == licence


LINK = f'<a href="{CC}/licenses/by/4.0/">CC BY 4.0</a>'


@pytest.mark.parametrize(
    "body",
    [
        f"<figure><img src=x><figcaption>A bridge {LINK}</figcaption></figure>",
        f'<div class="wp-caption"><img src=x><p class="wp-caption-text">A bridge <em>{LINK}</em></p></div>',
        f'<div class="post-thumbnail__caption">A bridge | {LINK}</div>',
        f"<p>Foto: Ana Lopez, via Wikimedia Commons | Lizenz: {LINK}</p>",
        f"<p>Photo by Ana Lopez on Flickr, <small>{LINK}</small></p>",
        f"<h6>Bildnachweis: Beitragsbild: Ana Lopez {LINK}</h6>",
        f"<small>By Ana Lopez (Own work) [{LINK}], via Wikimedia Commons</small>",
        f"<p>写真：山田 {LINK}</p>",
    ],
)
def test_the_credit_of_a_picture_is_no_licence_of_the_page(body):
    assert read("", f"<article><p>Text.</p>{body}</article>").declared_licence is None
    footer = f'<footer><a href="{CC}/licenses/by-nc/4.0/">CC BY-NC</a></footer>'
    assert read("", body + footer).declared_licence == "CC-BY-NC-4.0"


@pytest.mark.parametrize(
    "body",
    [
        f"<footer>{LINK}</footer>",
        f"<p>Unless otherwise stated, text and images are licensed under {LINK}</p>",
        f"<p>Alle Inhalte und Fotos dieses Blogs: <b>{LINK}</b></p>",
        f"<p>This work by Ana Lopez is licensed under a {LINK}</p>",
        f"<p>Credit lines are long. {'A text of many words. ' * 20} {LINK}</p>",
        f"<figure><a href='{CC}/licenses/by/4.0/'><img src='by.svg'></a></figure>",
        f"<p>版权声明：本文遵循 {LINK} 版权协议，图片除外</p>",
    ],
)
def test_a_link_that_states_more_than_a_credit_is_the_licence(body):
    assert read("", body).declared_licence == "CC-BY-4.0"


@pytest.mark.parametrize(
    "gap", ["-", " ", " - ", "\u2011", " \u2013 ", "\u2212", "_", "/", ", ", "\u00a0", "\u00ad-", "+", " ("]
)
@pytest.mark.parametrize("start", ["CC BY", "cc-by", "CC_BY", "Creative Commons BY"])
@pytest.mark.parametrize("parts", ["NC", "NC SA", "SA NC", "ND NC", "NC ND"])
def test_conditions_of_a_licence_count_with_any_signs_between_them(start, parts, gap):
    expected = "CC-BY-NC" + "".join(f"-{part}" for part in parts.split() if part != "NC")
    text = gap.join([start, *parts.split()])
    assert licence_name(f"{text} 4.0") == f"{expected}-4.0"
    address = f"{CC}/licenses/{gap.join(('by', *parts.lower().split()))}/4.0"
    assert gap == "/" or licence_name(address) in (f"{expected}-4.0", None)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        # Official titles of versions 1.0 to 4.0, and how they are written.
        ("Attribution 4.0 International", "CC-BY-4.0"),
        ("Attribution-ShareAlike 4.0 International", "CC-BY-SA-4.0"),
        ("Attribution-Share Alike 3.0 Unported", "CC-BY-SA-3.0"),
        ("Attribution-NoDerivs 2.5 Generic", "CC-BY-ND-2.5"),
        ("Attribution-No Derivative Works 3.0 Unported", "CC-BY-ND-3.0"),
        ("Attribution-NonCommercial-NoDerivatives 4.0", "CC-BY-NC-ND-4.0"),
        ("Attribution-Noncommercial-No Derivative Works 3.0", "CC-BY-NC-ND-3.0"),
        ("Attribution-Noncommercial-Share Alike 3.0 United States", "CC-BY-NC-SA-3.0"),
        ("Attribution \u2013 Non Commercial \u2013 Share Alike 4.0", "CC-BY-NC-SA-4.0"),
        ("Attribution\u2011NonCommercial 4.0", "CC-BY-NC-4.0"),
        ("Attribution License (non-commercial)", "CC-BY-NC"),
        ("Zero v1.0 Universal", "CC0-1.0"),
        ("by Lawrence Lessig", None),
    ],
)
def test_licences_are_known_by_their_titles(text, name):
    assert licence_name(f"Creative Commons {text}") == name
    assert licence_name(f"CREATIVE COMMONS: {text.upper()}") == name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("licenses/by-nd-nc/1.0/", "CC-BY-NC-ND-1.0"),
        ("licenses/nc-sa/1.0/", "CC-NC-SA-1.0"),
        ("licenses/by-nc%2F4.0", "CC-BY-NC-4.0"),
        ("licenses/by%2Dnc/4.0", "CC-BY-NC-4.0"),
        ("/licenses/BY-NC/4.0/deed.de", "CC-BY-NC-4.0"),
        ("licenses/sampling+/1.0/", None),
        ("licenses/nc-sampling+/1.0/", None),
    ],
)
def test_licences_are_known_by_their_addresses(path, name):
    assert licence_name(f"{CC}/{path}") == name


@pytest.mark.parametrize("text", ["CC03DDB5EF", "cc 0x10", "ACC BY design", "BCC by mail", "success by"])
def test_other_texts_name_no_licence(text):
    assert licence_name(text) is None


# -------------------------------------------------------------------------------------------------------- hostile pages

ARTICLE = '{"@type": "Article", "headline": "Water power"}'


@pytest.mark.parametrize(
    "script",
    [
        ARTICLE,
        f"[{ARTICLE}]",
        f'{{"@graph": [{ARTICLE}]}}',
        f"<!-- {ARTICLE} -->",
        f"//<![CDATA[\n{ARTICLE}\n//]]>",
        f"/* data */ {ARTICLE};",
        '{"@type": "Article", "headline": "Water power",}',
        '{"@type": ["Article",], "headline": "Water\n power"}',
        ARTICLE.replace('"', "&quot;"),
        f"\ufeff{ARTICLE}{ARTICLE}",
    ],
)
def test_json_ld_is_read_tolerantly(script):
    metadata = read(ld(script))
    assert (metadata.title, metadata.page_type, metadata.bad_json_ld) == ("Water power", "article", 0)


@pytest.mark.parametrize(
    "script",
    [
        '{"@type": "Article", "headline": "Water',
        "var x = 1",
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 100_000,
        f'"{"a" * 5_000_000}"',
        '"' + '\\"' * 200_000,
        "\n" * 200_000 + "x",
        "/*" * 200_000,
    ],
    ids=["cut", "script", "arrays", "objects", "number", "5 MB", "quotes", "lines", "comments"],
)
def test_a_broken_script_is_skipped_and_counted(script):
    metadata = read(ld(script) + ld(ARTICLE))
    assert metadata.bad_json_ld == 1
    assert metadata.title == "Water power"


@pytest.mark.parametrize("script", ["7", '"a text"', "null", "true, {}", "[1, null]"])
def test_json_that_is_no_object_is_no_node(script):
    metadata = read(f'<script type="application/ld+json">{script}</script><title>Water power</title>')
    assert (metadata.title, metadata.bad_json_ld) == ("Water power", 0)


@pytest.mark.parametrize("value", [7, True, None, [], {}, [[["x"]]], {"name": 7}, {"@id": "#a"}, {"name": {"name": 1}}])
def test_values_of_a_wrong_type_are_null(value):
    names = ("headline", "author", "datePublished", "dateModified", "license", "description", "publisher", "inLanguage")
    metadata = read(ld({"@type": "Article", "@id": "#a", **dict.fromkeys(names, value)}))
    assert metadata == PageMetadata(*[None] * 8, "article", None, metadata.types, None, 0, 0)
    assert "Article" in metadata.types


def test_only_near_and_few_nodes_are_searched():
    node: object = json.loads(ARTICLE)
    for _ in range(50):
        node = {"mainEntity": node}
    assert read(ld(node)).title is None
    assert read(ld([{"a": 1}] * 5_000 + [json.loads(ARTICLE)])).title is None


def test_long_values_are_cut():
    long = "wort " * 10_000
    head = f'<title>{long}</title><meta name="description" content="{long}">'
    head += f'<meta property="og:site_name" content="{long}">'
    metadata = read(head + "".join(f'<meta name="author" content="Ada {n * "x"}">' for n in range(60)))
    assert len(metadata.title or "") == MAX_TITLE_CHARS - 1
    assert len(metadata.description or "") == MAX_DESCRIPTION_CHARS - 1
    assert len(metadata.site_name or "") == MAX_NAME_CHARS - 1
    assert 100 < len(metadata.author or "") <= MAX_AUTHOR_CHARS


def test_control_characters_and_surrogates_do_not_reach_a_value():
    metadata = read(ld('{"@type": "Article", "headline": "Wa\\u0000t\\u202eer \\ud800", "author": "A\\u0007da"}'))
    assert (metadata.title, metadata.author) == ("Water \ufffd", "Ada")


@pytest.mark.parametrize(
    "body",
    [
        "<h1>" * 2_000 + "x" * 1_000_000,
        '<div class="author" itemprop="author">' * 2_000 + "word " * 100_000,
        '<time class="date">' * 2_000 + "2024 " * 100_000,
        "<h1>a</h1>" + "<p>" + "2024 " * 100_000,
        '<meta name="author" content="a, ">' * 20_000,
        '<a href="https://creativecommons.org/x">' * 2_000,
    ],
    ids=["headings", "authors", "times", "text", "metas", "links"],
)
def test_a_page_of_many_nested_or_long_elements_has_no_metadata(body):
    """Without bounds on the texts that are read, these pages take minutes."""
    metadata = read_metadata(HTMLTree.parse(body), URL, FETCHED, body)
    assert (metadata.date_published, metadata.bad_json_ld, metadata.page_type) == (None, 0, None)
    assert len(metadata.author or "") <= MAX_AUTHOR_CHARS


# ----------------------------------------------------------------------------------------------------------- real pages


@pytest.mark.skipif(missing_data(("wcxb",)) is not None, reason=str(missing_data(("wcxb",))))
def test_most_values_of_real_pages_are_those_that_people_marked():
    right = dict.fromkeys(("title", "author", "date"), 0)
    marked = dict(right)
    for page in islice(gold_pages(("wcxb",)), 100):
        metadata = read_metadata(HTMLTree.parse(page.html), page.url, date(2026, 3, 31), page.html)
        day = metadata.date_published and metadata.date_published.isoformat()
        values = (
            ("title", metadata.title, page.title),
            ("author", metadata.author, page.author),
            ("date", day, page.date),
        )
        for name, value, answer in values:
            marked[name] += bool(answer)
            right[name] += bool(answer) and squeezed(value or "") == squeezed(answer or "")
    assert marked == {"title": 100, "author": 57, "date": 57}
    # Measured when this was written: 77, 34 and 51. Answers join several authors in other ways, which counts as wrong.
    assert (right["title"] >= 75, right["author"] >= 32, right["date"] >= 49) == (True, True, True), right
