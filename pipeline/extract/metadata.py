"""Metadata of a page: what its head, JSON-LD, microdata and visible byline declare, as one record of typed values.

The elements that can declare something are selected once; bylines are searched only if no element declares an author or
a date. Sources are tried in a fixed order, the most specific first, and the first usable value counts. A value that
cannot be used is null, never an exception: pages are written by strangers.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import chain
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from resiliparse.parse.html import HTMLTree

from pipeline.extract.json_ld import JsonLd, Node, read_json_ld, types_of
from pipeline.extract.metadata_elements import PageElements, read_elements
from pipeline.extract.metadata_values import (
    MIN_DATE,
    absolute_url,
    author_names,
    clean,
    date_in_url,
    is_month,
    language_code,
    licence_name,
    parse_date,
    squeezed,
)

Value = TypeVar("Value")
PageType = Literal["article", "product", "listing", "forum", "documentation", "service", "collection", "other"]

MAX_TITLE_CHARS = 1_000
MAX_AUTHOR_CHARS = 500
MAX_NAME_CHARS = 200
MAX_DESCRIPTION_CHARS = 2_000
MAX_VISIBLE = 60
"""Maximum number of elements that are searched for a visible author or date."""
MAX_DATE_CHARS = 20_000
"""Length of the HTML after the first heading that is searched for a date [code points]."""


@dataclass(frozen=True, slots=True)
class PageMetadata:
    """What a page declares about itself. Strings are on one line, in NFC, without control characters."""

    title: str | None
    """Title without the site's name, at most 1,000 code points. Null: no heading and no declared title."""
    author: str | None
    """Names of the authors without "By", joined by ", ", at most 500 code points. Null: none declared or visible."""
    date_published: date | None
    """Day of publication in the time zone that the page states. Null: none declared, or out of range."""
    date_modified: date | None
    """Day of the last change in the time zone that the page states. Null: none declared, or out of range."""
    canonical_url: str | None
    """Absolute http(s) URL without fragment, at most 2,000 code points. Null: none declared, or not such a URL."""
    site_name: str | None
    """Name of the site, at most 200 code points. Null: none declared."""
    description: str | None
    """Summary of the page, at most 2,000 code points. Null: none declared."""
    declared_language: str | None
    """BCP 47 primary subtag, such as `pt` of `pt-BR`. Null: none declared, or no one language."""
    page_type: PageType | None
    """Kind of page by og:type or schema.org type. Null: none declared, or one of every page, such as `website`."""
    declared_licence: str | None
    """`CC-BY-SA-4.0` and its like for Creative Commons, else the licence's URL. Null: none declared."""
    types: frozenset[str]
    """The schema.org types that JSON-LD declares for the page and for what is on it."""
    open_graph_type: str | None
    """Value of og:type in lower case, at most 200 code points. Null: none declared."""
    bad_json_ld: int
    """Number of JSON-LD scripts that are not JSON after repair, or exceed the limit of size."""
    bad_dates: int
    """Number of dates that were read and are null: before 1990, or more than a day after the record."""


_VISIBLE = (
    '[rel~="author"],a[href*="/author/"],[class*="author" i],[class*="byline" i],[class*="date" i],[class*="meta" i]'
)
"""Elements that can show an author or a date. Three more class names find 2 more of 484
marked authors, and the search takes 0.35 instead of 0.25 ms a page (296 gold pages, least of three passes)."""
_BYLINE = re.compile(r"author|byline", re.IGNORECASE)
_FOREIGN_SCOPES = frozenset(("Review", "Comment", "Answer", "UserComments", "Rating", "AggregateRating"))
"""Types of items whose author and dates are not those of the page."""
_ASIDES = re.compile(
    r"comment|sidebar|related|recommend|footer|widget|reply|respond|popular|trending|teaser|more-|latest|share|social|card",
    re.IGNORECASE,
)
_SHORT_TEXT = re.compile(r">([^<>]{0,60}(?:19|20)\d\d[^<>]{0,30})<")
_NOT_NAME = re.compile(
    r"[?!:@#\d]|\b(?:ago|about|read|more|min|view|all|posts|comments?|share|follow|profile)\b", re.IGNORECASE
)
_KINDS: tuple[tuple[PageType, str], ...] = (
    ("forum", "DiscussionForumPosting QAPage Question"),
    (
        "article",
        "Article NewsArticle BlogPosting Report ScholarlyArticle MedicalScholarlyArticle AnalysisNewsArticle "
        "OpinionNewsArticle ReportageNewsArticle BackgroundNewsArticle ReviewNewsArticle LiveBlogPosting Recipe HowTo "
        "AdvertiserContentArticle SatiricalArticle",
    ),
    ("documentation", "TechArticle APIReference"),
    ("product", "Product ProductGroup IndividualProduct ProductModel Vehicle Car"),
    ("service", "Service FinancialService ProfessionalService FinancialProduct"),
    ("collection", "CollectionPage MediaGallery ImageGallery OfferCatalog"),
    ("listing", "ItemList SearchResultsPage Blog"),
    (
        "other",
        "AboutPage ContactPage ProfilePage FAQPage CheckoutPage MedicalWebPage VideoObject Event JobPosting Movie Book "
        "Course Dataset Person Review SoftwareApplication MobileApplication WebApplication PodcastEpisode MusicAlbum",
    ),
)
"""Page type → its schema.org types. A page that declares several has the first in this order."""
_KIND_OF = {name: kind for kind, names in _KINDS for name in names.split()}
_KIND_OF_OG: dict[str, PageType] = {
    **{"article": "article", "news": "article", "blogpost": "article", "blog": "listing", "forum": "forum"},
    **{"product": "product", "product.item": "product", "og:product": "product", "product.group": "collection"},
    **{"video": "other", "music": "other", "book": "other", "books": "other", "profile": "other"},
}
_AUTHOR_METAS = (
    *("author", "parsely-author", "sailthru.author", "dc.creator", "dcterms.creator", "citation_author", "byl"),
    *("article:author", "og:article:author", "article:author_name", "book:author", "twitter:data1"),
)
_PUBLISHED_METAS = (
    *("article:published_time", "og:article:published_time", "og:published_time", "datepublished", "parsely-pub-date"),
    *("sailthru.date", "citation_publication_date", "citation_date", "pubdate", "publishdate", "publish-date"),
    *("publish_date", "publication_date", "article.published", "published_date", "dc.date.issued", "dcterms.issued"),
    *("dc.date", "dcterms.date", "dc.date.created", "dcterms.created", "date", "article:published"),
)
_MODIFIED_METAS = (
    *("article:modified_time", "og:updated_time", "datemodified", "dcterms.modified", "dc.date.modified", "lastmod"),
    *("last-modified", "article:modified", "revised", "updated_time"),
)
_LICENCE_METAS = (
    *("dcterms.license", "dcterms:license", "dct:license", "dc.rights.license", "dc.license", "dc:license"),
    *("cc:license", "license", "dc.rights", "dc:rights", "dcterms.rights", "dcterms:rights", "dct:rights", "copyright"),
)
_WORKS = frozenset(("CreativeWork", "LearningResource"))
"""Types of nodes whose licence is that of the page, besides the types of pages."""


@dataclass(slots=True)
class _Dates:
    """Reads dates in a range, and counts those that are out of it."""

    latest: date
    out_of_range: int = 0

    def first(self, values: Iterable[object]) -> date | None:
        """Return the first date in range."""
        return next((day for value in values if (day := self.in_range(parse_date(value)))), None)

    def in_range(self, day: date | None) -> date | None:
        """Return a date if it is in range, else None."""
        if day is not None and not MIN_DATE <= day <= self.latest:
            self.out_of_range += 1
            return None
        return day


def read_metadata(
    tree: HTMLTree, url: str | None = None, fetched: date | None = None, html: str | None = None
) -> PageMetadata:
    """Return the metadata of a parsed page.

    `url`: URL of the page; relative URLs are resolved against it, and its path can contain the date. `fetched`: day of
    the record [UTC]; a date more than a day after it is null. Without it, no date is too late. `html`: the decoded
    page. A date is searched in it after the heading if no element has one; without it, that search is left out.
    """
    page = read_elements(tree)
    data = read_json_ld(script.text for script in page.scripts)
    main = _main_nodes(data)
    base = absolute_url(page.base, url) or url
    dates = _Dates(date.max if fetched is None or fetched == date.max else fetched + timedelta(days=1))
    kind = _page_type(page, data)
    site_name = _site_name(page, data)
    published = _published(page, main, dates)
    in_url = dates.in_range(date_in_url(url or ""))
    if published is None or (in_url is not None and abs(published - in_url) <= timedelta(days=1)):
        # Many sites declare times in UTC, which can be on the next or previous day; their URLs have the site's own day.
        published = in_url or published
    sites = _site_keys(site_name, url)
    authors = _declared_authors(page, data, main)
    has_text = kind in (None, "article", "forum", "documentation", "service")
    by_site = all(squeezed(name) in sites for name in authors)
    shown = page.select(_VISIBLE, MAX_VISIBLE) if has_text and (by_site or published is None) else ()
    if by_site:
        authors = _visible_authors(page, shown) or authors
    if published is None and has_text:
        published = _visible_date(page, shown, dates) or _date_in_text(html or "", dates)
    author = clean(", ".join(authors), MAX_AUTHOR_CHARS)
    return PageMetadata(
        title=_title(page, main, sites),
        author=author,
        date_published=published,
        date_modified=dates.first(
            chain(_values(main, "dateModified"), page.meta(*_MODIFIED_METAS), _item_values(page, "dateModified"))
        ),
        canonical_url=_first(absolute_url(value, base) for value in chain([page.canonical], page.meta("og:url"))),
        site_name=site_name,
        description=_first(
            clean(value, MAX_DESCRIPTION_CHARS)
            for value in chain(
                page.meta("description", "og:description", "twitter:description", "dc.description", "dcterms.abstract"),
                _values(main, "description"),
            )
        ),
        declared_language=_language(page, main),
        page_type=kind,
        declared_licence=_licence(page, data, main, base),
        types=frozenset(data.types),
        open_graph_type=_first(clean(value.lower(), MAX_NAME_CHARS) for value in page.meta("og:type")),
        bad_json_ld=data.num_unread,
        bad_dates=dates.out_of_range,
    )


def _first(values: Iterable[Value | None]) -> Value | None:
    return next((value for value in values if value is not None), None)


# -------------------------------------------------------------------------------------------------------------- JSON-LD


def _main_nodes(data: JsonLd) -> list[Node]:
    """Return the nodes that can be the page's main subject or the page itself, the most specific first."""
    order = {kind: rank for rank, (kind, _) in enumerate(_KINDS)}
    ranked = []
    for node in data.nodes:
        ranks = [order[_KIND_OF[name]] if name in _KIND_OF else len(order) for name in types_of(node) if _is_page(name)]
        if ranks:
            ranked.append((min(ranks), node))
    return [node for _, node in sorted(ranked, key=lambda pair: pair[0])]


def _is_page(name: str) -> bool:
    return (name in _KIND_OF and name not in ("Person", "ItemList", "Review")) or name in ("WebPage", "ItemPage")


def _values(nodes: Iterable[Node], *names: str) -> Iterator[Any]:
    """Yield the values of properties of the nodes, the items of a list one by one."""
    for node in nodes:
        for name in names:
            value = node.get(name)
            yield from value[:50] if isinstance(value, list) else [value]


def _name(data: JsonLd, value: Any) -> Iterator[str]:
    """Yield the names of a value that is a string, or an object that has a name or refers to one that has."""
    value = data.resolved(value)
    if isinstance(value, dict):
        value = value.get("name") or " ".join(
            part for key in ("givenName", "familyName") if isinstance(part := value.get(key), str)
        )
    for name in value[:20] if isinstance(value, list) else [value]:
        if cleaned := clean(name, MAX_NAME_CHARS):
            yield cleaned


def _page_type(page: PageElements, data: JsonLd) -> PageType | None:
    declared = {_KIND_OF[name] for node in data.nodes for name in types_of(node) if name in _KIND_OF}
    # A person, a list or a review is more often a part of the page than its subject, so og:type precedes these.
    for kind, _ in _KINDS[:-2]:
        if kind in declared:
            return kind
    for value in page.meta("og:type"):
        name = value.strip().lower()
        known = _KIND_OF_OG.get(name) or _KIND_OF_OG.get(name.partition(".")[0])
        if known is not None:
            return known
    return next((kind for kind, _ in _KINDS[-2:] if kind in declared), None)


def _site_name(page: PageElements, data: JsonLd) -> str | None:
    sites = [node for node in data.nodes if "WebSite" in types_of(node)]
    publishers = chain.from_iterable(_name(data, value) for value in _values(data.nodes, "publisher"))
    declared = (clean(value, MAX_NAME_CHARS) for value in page.meta("og:site_name"))
    others = page.meta("application-name", "apple-mobile-web-app-title", "dc.publisher")
    return _first(
        chain(
            declared,
            chain.from_iterable(_name(data, value) for value in _values(sites, "name")),
            (clean(value, MAX_NAME_CHARS) for value in others),
            publishers,
        )
    )


def _language(page: PageElements, main: list[Node]) -> str | None:
    root = page.tree.document.query_selector("html") if page.tree.document is not None else None
    on_root = [root.getattr("lang"), root.getattr("xml:lang")] if root is not None else []
    others = page.meta("content-language", "language", "dc.language", "dcterms.language", "og:locale")
    return _first(map(language_code, chain(on_root, others, _values(main, "inLanguage"))))


def _licence(page: PageElements, data: JsonLd, main: list[Node], base: str | None) -> str | None:
    """Return the licence that the page declares for itself; a link in the text counts if no other licence is linked.

    A link that credits a picture states no licence of the page.
    """
    declared: list[Any] = list(page.licences)
    works = [node for node in data.nodes if not _WORKS.isdisjoint(types_of(node))]
    for value in _values([*main, *works], "license"):
        node = data.resolved(value)
        declared += [node.get(key) for key in ("url", "@id", "name")] if isinstance(node, dict) else [node]
    declared += page.meta(*_LICENCE_METAS)
    linked = {name for href in page.cc_links if (name := licence_name(href))}  # others are no licences
    names = (licence_name(value) for value in declared)
    only = linked.pop() if len(linked) == 1 else None
    in_text = (value for value in declared if isinstance(value, str) and re.match(r"\s*https?://", value))
    urls = (absolute_url(value, base) for value in chain(page.licences, in_text))
    return _first(names) or _first(urls) or only


# ------------------------------------------------------------------------------------------------------ author and date


def _is_foreign(element: Any) -> bool:
    """Return whether an element is in an item of its own, such as a comment, in a sidebar or in a footer."""
    for _ in range(24):
        element = element.parent
        if element is None or element.tag in ("html", "body", "article", "main"):
            return False
        if element.tag in ("aside", "footer", "nav"):
            return True
        if kind := element.getattr("itemtype"):
            return kind.rpartition("/")[2] in _FOREIGN_SCOPES
        if (name := element.getattr("class")) and _ASIDES.search(name[:300]):
            return True
    return False


def _item_values(page: PageElements, name: str) -> Iterator[str | None]:
    """Yield what the first microdata properties of a name contain, except those of comments and reviews."""
    for element in page.items.get(name, ())[:5]:
        if not _is_foreign(element):
            yield element.getattr("content") or element.getattr("datetime") or page.text(element, MAX_NAME_CHARS)


def _published(page: PageElements, main: list[Node], dates: _Dates) -> date | None:
    stated = (
        element.getattr("datetime")
        for element in page.times[:8]
        if "updated" not in (element.getattr("class") or "") and not _is_foreign(element)
    )
    return dates.first(
        chain(
            _values(main, "datePublished", "dateCreated", "uploadDate"),
            page.meta(*_PUBLISHED_METAS),
            _item_values(page, "datePublished"),
            stated,
        )
    )


def _visible_date(page: PageElements, shown: Iterable[Any], dates: _Dates) -> date | None:
    """Return the date in the text of the first element that looks like a dateline."""
    for element in chain(page.times[:8], shown):
        text = page.text(element, MAX_NAME_CHARS)
        day = parse_date(text) if text and len(text) < MAX_NAME_CHARS else None
        if day is not None and not _is_foreign(element) and dates.in_range(day):
            return day
    return None


def _date_in_text(html: str, dates: _Dates) -> date | None:
    """Return the first date of a short text after the first heading."""
    start = html.find("<h1")
    if start < 0:
        return None
    for match in _SHORT_TEXT.finditer(html, start, start + MAX_DATE_CHARS):
        if day := dates.in_range(parse_date(clean(match[1], MAX_NAME_CHARS))):
            return day
    return None


def _declared_authors(page: PageElements, data: JsonLd, main: list[Node]) -> list[str]:
    of_nodes = [name for value in _values(main, "author", "creator") for name in _name(data, value)]
    if names := author_names(of_nodes):
        return names
    label = next(page.meta("twitter:label1"), "").lower()
    written_by = any(
        word in label for word in ("written", "verfasst", "escrito", "écrit", "scritto", "author", "autor")
    )
    for meta in _AUTHOR_METAS:
        if meta == "twitter:data1" and not written_by:
            continue
        if names := author_names([name for value in page.meta(meta) if (name := clean(value, MAX_NAME_CHARS))]):
            return names
    found = []
    for element in page.items.get("author", ())[:5]:
        if not _is_foreign(element):
            named = element.query_selector('[itemprop~="name"]')
            name = element if named is None else named
            found.append(name.getattr("content") or page.text(name, MAX_NAME_CHARS))
    return author_names([name for value in found if (name := clean(value, MAX_NAME_CHARS))])


def _visible_authors(page: PageElements, shown: Iterable[Any]) -> list[str]:
    """Return the names in the first byline of the page."""
    for element in shown:
        is_link = element.tag == "a" and "/author/" in (element.getattr("href") or "")
        if not is_link and element.getattr("rel") != "author" and not _BYLINE.search(element.getattr("class") or ""):
            continue
        text = page.text(element, MAX_NAME_CHARS)
        names = author_names([text]) if text and len(text) <= 80 else []
        if names and all(map(_is_name, names)) and not _is_foreign(element):
            return names
    return []


def _is_name(text: str) -> bool:
    words = text.split()
    return len(words) <= 5 and not _NOT_NAME.search(text) and not all(is_month(word) for word in words)


# ---------------------------------------------------------------------------------------------------------------- title

_SEPARATOR = re.compile(r"\s+[-–—|·•»«:~/]+\s+|\s*[|»]\s*")


def _title(page: PageElements, main: list[Node], sites: set[str]) -> str | None:
    """Return the heading that the declared titles agree with, else the only heading, else a declared title."""
    declared = [
        title
        for value in chain(
            _values(main[:1], "headline"),
            page.meta("og:title", "twitter:title"),
            (page.text(element, MAX_TITLE_CHARS) for element in page.titles[:1]),
            page.meta("dc.title", "citation_title"),
            _values(main[:1], "name"),
        )
        if (title := clean(value, MAX_TITLE_CHARS))
    ]
    headings = [text for element in page.headings[:8] if (text := page.text(element, MAX_TITLE_CHARS))]
    headings = [_without_site(text, sites, []) for text in headings]
    of_page = [text for text in dict.fromkeys(headings) if squeezed(text) not in sites]
    keys = [squeezed(title) for title in declared]
    for heading in of_page:
        key = squeezed(heading)
        if len(key) >= 4 and any(other.startswith(key) or (len(other) >= 8 and other in key) for other in keys):
            return heading
    if len(of_page) == 1 and len(of_page[0]) <= 200:
        return of_page[0]
    stripped = [_without_site(title, sites, keys) for title in declared]
    return next(iter(stripped or headings), None)


def _site_keys(site_name: str | None, url: str | None) -> set[str]:
    """Return the squeezed names by which a title can name its site: declared name, host, and domain label."""
    names = [site_name] if site_name else []
    try:
        host = (urlsplit(url or "").hostname or "").removeprefix("www.")
    except ValueError:
        host = ""
    labels = host.split(".")
    names += [host, *labels[:-1]] if host else []
    return {key for name in names if len(key := squeezed(name)) >= 3}


def _without_site(title: str, sites: set[str], keys: list[str]) -> str:
    """Return a title without its first or last part if that names the site, or if another title ends before it."""
    spans = [(match.start(), match.end()) for match in _SEPARATOR.finditer(title)]
    for start, _ in spans:
        if len(key := squeezed(title[:start])) >= 8 and key in keys:
            return title[:start]
    if spans and _names_site(title[spans[-1][1] :], sites):
        return title[: spans[-1][0]]
    if spans and _names_site(title[: spans[0][0]], sites):
        return title[spans[0][1] :]
    return title


def _names_site(part: str, sites: set[str]) -> bool:
    key = squeezed(part)
    return key in sites or any(len(key) >= 5 and (key.startswith(site) or site.startswith(key)) for site in sites)
