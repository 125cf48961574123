"""Pages in other languages and charsets, declared rightly, wrongly or not at all.

Every text is composed of the project's own sentences; what the bytes are and what is said about them is in the truth.
"""

import random
from dataclasses import dataclass

from pipeline.demo_crawl.html import CLEAN_LAYOUTS, DemoPage, prose
from pipeline.demo_crawl.speech import Speech, compose
from pipeline.demo_crawl.speech_de import GERMAN
from pipeline.demo_crawl.speech_es import SPANISH
from pipeline.demo_crawl.speech_fr import FRENCH
from pipeline.demo_crawl.speech_it import ITALIAN
from pipeline.demo_crawl.speech_ja import JAPANESE
from pipeline.demo_crawl.speech_ru import RUSSIAN
from pipeline.demo_crawl.speech_zh import CHINESE


@dataclass(frozen=True)
class Encoding:
    """A language in an encoding, and what the server and the page say that it is; None says nothing."""

    speech: Speech
    charset: str
    http: str | None
    meta: str | None

    @property
    def is_true(self) -> bool:
        """Whether what is said is said by somebody, and by nobody wrongly."""
        return {self.http, self.meta} - {None} == {self.charset}


ENCODINGS = (
    Encoding(CHINESE, "gb18030", "gb18030", "gb18030"),
    Encoding(CHINESE, "gbk", None, "gbk"),
    Encoding(CHINESE, "utf-8", "utf-8", "utf-8"),
    Encoding(JAPANESE, "shift_jis", "shift_jis", None),
    Encoding(JAPANESE, "euc-jp", None, "euc-jp"),
    Encoding(JAPANESE, "iso-2022-jp", None, "iso-2022-jp"),
    Encoding(JAPANESE, "utf-8", "utf-8", None),
    Encoding(RUSSIAN, "windows-1251", "windows-1251", "windows-1251"),
    Encoding(RUSSIAN, "koi8-r", None, "koi8-r"),
    Encoding(RUSSIAN, "utf-8", None, "utf-8"),
    Encoding(GERMAN, "iso-8859-1", "iso-8859-1", None),
    Encoding(GERMAN, "utf-8", "utf-8", "utf-8"),
    Encoding(FRENCH, "iso-8859-1", None, "iso-8859-1"),
    Encoding(FRENCH, "windows-1252", "windows-1252", "windows-1252"),
    Encoding(SPANISH, "utf-8", "utf-8", "utf-8"),
    Encoding(SPANISH, "iso-8859-15", None, "iso-8859-15"),
    Encoding(ITALIAN, "utf-8", "utf-8", "utf-8"),
    Encoding(FRENCH, "utf-8", "iso-8859-1", "utf-8"),
    Encoding(GERMAN, "utf-8", "iso-8859-1", None),
    Encoding(SPANISH, "utf-8", None, "iso-8859-1"),
    Encoding(RUSSIAN, "windows-1251", None, "utf-8"),
    Encoding(CHINESE, "gb18030", "utf-8", None),
    Encoding(JAPANESE, "shift_jis", None, "utf-8"),
    Encoding(RUSSIAN, "windows-1251", None, None),
    Encoding(CHINESE, "gb18030", None, None),
    Encoding(JAPANESE, "shift_jis", None, None),
)
"""Every combination that is planted, the wrongly and the undeclared ones last."""
DROPPED_LANGUAGE = ITALIAN.language
"""The one language that the demo's recipe leaves out."""


def foreign_page(encoding: Encoding, url: str, rng: random.Random) -> DemoPage:
    """A page of 16 to 26 sentences in the encoding's language and charset."""
    speech = encoding.speech
    title, paragraphs = compose(speech, rng, rng.randint(16, 26))
    page = DemoPage(
        url=url,
        title=title,
        blocks=prose(paragraphs),
        layout=rng.choice(CLEAN_LAYOUTS),
        kind="language" if encoding.is_true else "wrong_charset",
        language=speech.language,
        charset=encoding.charset,
        http_charset=encoding.http,
        meta_charset=encoding.meta,
        menu=speech.menu,
    )
    return page if speech.language != DROPPED_LANGUAGE else page.dropped_by("language_not_wanted")
