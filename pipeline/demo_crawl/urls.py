"""URLs of the demo crawl: a few sites under names that are reserved for examples (RFC 2606, RFC 6761)."""

import random
import re

HOSTS = (
    *("www.penrose.example", "docs.penrose.example", "docs.lumen.example", "blog.lumen.example", "www.tern.example"),
    *("forum.quince.example.org", "wiki.ash.example.net", "www.harbour.example.com", "notes.alder.example.com"),
    *("journal.sorrel.example.net", "www.marl.example.org", "help.kestrel.invalid", "blog.tarn.invalid"),
    *("reader.osier.test", "www.fathom.test", "archive.gannet.example"),
)
SECTIONS = ("guide", "articles", "reference", "2024/03", "topics", "node", "posts", "library")


class Urls:
    """New URLs, every one once."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._number = 0

    def new(self, words: str) -> str:
        """A URL that was not handed out before, with `words` in its path."""
        self._number += 1
        slug = re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:60]
        scheme, host, section = (self._rng.choice(names) for names in (("https", "https", "http"), HOSTS, SECTIONS))
        return f"{scheme}://{host}/{section}/{slug}-{self._number}{self._rng.choice(('', '.html', '/'))}"
