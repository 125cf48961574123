"""Reference text by language from the real data: clean documents of realistic length, in two disjoint halves.

Most of that data are single sentences: consecutive ones of a source are joined to documents of 120 to 300 words in
lines of one to five, lengths drawn from the document's number. Pages and books are taken as they are, the Declaration
of Human Rights and Genesis in stretches of the same length. Which half a document belongs to is a bit of its digest.

    python -m tests.support.language_reference FILE    writes the first half for `penstock derive-profiles`
    python -m tests.support.language_reference         prints what the built-in profiles drop of the second half
"""

import gzip
import hashlib
import json
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from fastwarc.warc import ArchiveIterator, WarcRecordType
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.html import HTMLTree

from pipeline.engine.rules import evaluate_row
from pipeline.language import LABEL_PREFIX, load_model
from pipeline.models import ModelsConfig, ensure_model
from pipeline.quality.config import QualityConfig
from pipeline.quality.stage import QUALITY
from pipeline.text.profiles import load_profiles
from pipeline.text.spacy_tokens import UNSPACED_LANGUAGES, splitter_of
from tests.support.paths import SHARED

MIN_WORDS = 60
CODES = {"nb": "no", "nn": "nn", "fil": "tl", "pes": "fa", "arb": "ar", "cmn": "zh", "ekk": "et", "lvs": "lv"}
"""Codes of the data → codes of the language model."""
NOT_CLEAN = ("lolcat", "swedish")
"""Versions of Genesis that are a joke, or were decoded with the wrong charset."""
BRACES = re.compile(r"[{}]")
"""Around words that the Portuguese version of Genesis supplies."""
DEBRIS = re.compile("[{}]|Content-Length:|Read More Latest News")
"""What is left of markup, HTTP headers and link lists; sentences with it (most of the Urdu ones) are left out."""
NOT_THE_LANGUAGE = re.compile("068|vie_han|ell_polytonic|azj_cyrl|bos_cyrl|deu_1901|cmn_hans_.*")
"""Declarations under a language's code that are in another language (Welche), script or old spelling than its pages,
or that repeat another."""
ENUMERATED = re.compile(r"^\d+\.\s+")


@dataclass(frozen=True)
class Document:
    """One reference document."""

    lang: str
    text: str
    origin: str

    @property
    def half(self) -> int:
        """0: limits are derived from it; 1: they are checked on it."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).digest()[0] & 1


def lines_of(path: Path) -> Iterator[dict[str, str]]:
    """The records of a gzipped file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        yield from map(json.loads, stream)


def num_words(text: str, lang: str) -> int:
    """Words and marks of a text."""
    split = splitter_of(lang)
    return sum(len(split(piece)) for piece in text.split())


def joined(sentences: Iterable[str], lang: str, origin: str) -> Iterator[Document]:
    """Documents of consecutive sentences; the last ones may not fill a document and are left out."""
    space = "" if lang in UNSPACED_LANGUAGES - {"th", "lo", "km"} else " "
    lines: list[str] = []
    words = number = 0
    held: list[str] = []
    for count, sentence in enumerate(sentences):
        held.append(sentence)
        words += num_words(sentence, lang)
        if len(held) > (count * 7 + number) % 5:
            lines.append(space.join(held))
            held = []
        if words >= 120 + number * 37 % 180:
            yield Document(lang, "\n".join([*lines, space.join(held)] if held else lines), origin)
            lines, held, words, number = [], [], 0, number + 1


def stretches(paragraphs: Iterable[str], lang: str, origin: str) -> Iterator[Document]:
    """Documents of consecutive paragraphs, each a line."""
    lines: list[str] = []
    words = number = 0
    for paragraph in paragraphs:
        lines.append(paragraph)
        words += num_words(paragraph, lang)
        if words >= 120 + number * 37 % 180:
            yield Document(lang, "\n".join(lines), origin)
            lines, words, number = [], 0, number + 1


def reference(data: Path, known: Iterable[str]) -> Iterator[Document]:
    """Every reference document in a language that the model knows."""
    known = frozenset(known)
    for document in _documents(data):
        if document.lang in known and num_words(document.text, document.lang) >= MIN_WORDS:
            yield document


def _documents(data: Path) -> Iterator[Document]:
    sentences = (entry for entry in lines_of(data / "langid/ud.jsonl.gz") if entry["kind"] == "sentence")
    for (lang, _), group in groupby(sentences, key=lambda entry: (entry["lang"], entry["treebank"])):
        yield from joined([entry["text"] for entry in group], lang, "sentences")
    sentences = (entry for entry in lines_of(data / "langid/lingua.jsonl.gz") if entry["kind"] == "sentence")
    for lang, group in groupby(sentences, key=lambda entry: entry["lang"]):
        texts = [ENUMERATED.sub("", entry["text"]) for entry in group if not DEBRIS.search(entry["text"])]
        yield from joined(texts, CODES.get(lang, lang), "sentences")
    for path in sorted((data / "html_gold").glob("*.jsonl.gz")):
        for entry in lines_of(path):
            if entry.get("lang") and entry.get("text"):
                yield Document(CODES.get(entry["lang"], entry["lang"]), entry["text"], PAGES)
    for path in sorted((data / "text").glob("*.jsonl.gz")):
        for entry in lines_of(path):
            if path.name.startswith("genesis"):
                if not entry["id"].startswith(NOT_CLEAN):
                    verses = BRACES.sub("", entry["text"]).splitlines()
                    yield from stretches(verses, entry["lang"], "genesis")
            else:
                yield Document(entry["lang"], entry["text"], "english")
    yield from _declarations(data / "warc")


def _declarations(folder: Path) -> Iterator[Document]:
    """The Declaration of Human Rights in every language, headings and articles as the pages have them."""
    index = list(lines_of(folder / "udhr-lang-index.jsonl.gz"))
    codes = {e["record_id"]: e["bcp47"] for e in index if not NOT_THE_LANGUAGE.fullmatch(e["code"])}
    with (folder / "udhr-lang.warc.gz").open("rb") as stream:
        for record in ArchiveIterator(stream, record_types=WarcRecordType.response):
            if record.record_id not in codes:
                continue
            lang = codes[record.record_id].split("-")[0]
            tree = HTMLTree.parse(unicodedata.normalize("NFC", record.reader.read().decode("utf-8")))
            text = extract_plain_text(tree, main_content=False, alt_texts=False, links=False)
            paragraphs = [line.strip() for line in text.splitlines() if line.strip()]
            yield from stretches(paragraphs, CODES.get(lang, lang), "declaration")


@dataclass(frozen=True)
class Dropped:
    """What the default rules drop of one language's documents."""

    documents: int
    rules: Counter[str]

    @property
    def share(self) -> float:
        """Share of documents that were dropped."""
        return self.rules.total() / max(self.documents, 1)

    def named(self) -> str:
        """The rules with their numbers, most frequent first."""
        return ", ".join(f"{rule} {number}" for rule, number in self.rules.most_common())


NOTHING = Dropped(0, Counter())
PAGES = "pages"
"""Origin of main texts of web pages: real lines and layout, but not all of them clean."""


def dropped(documents: Iterable[Document], settings: Mapping[str, Any] | None = None) -> dict[str, Dropped]:
    """By language, how many documents the quality stage with these settings drops, and by which rule first."""
    config = QualityConfig.model_validate(settings or {})
    models = QUALITY.models(config)
    measure, checks = QUALITY.make(config, models), QUALITY.checks(config, models, {})
    numbers: Counter[str] = Counter()
    rules: dict[str, Counter[str]] = defaultdict(Counter)
    for document in documents:
        row: dict[str, Any] = {"language": document.lang, "text": document.text, "num_chars": len(document.text)}
        measure(row)
        row["body_chars"] = len(row["_body"])
        numbers[document.lang] += 1
        broken = evaluate_row(checks, row)
        if broken is not None:
            rules[document.lang][broken[0]] += 1
    return {lang: Dropped(number, rules[lang]) for lang, number in numbers.most_common()}


def known_languages() -> frozenset[str]:
    """The codes of the language model. Raises ConfigError where it cannot be had."""
    model = load_model(str(ensure_model("lid.176.ftz", ModelsConfig()).path))
    return frozenset(label.removeprefix(LABEL_PREFIX) for label in model.labels())


def main(arguments: list[str]) -> None:
    """Write the first half, or print what is dropped of the second."""
    documents = list(reference(SHARED, known_languages()))
    if arguments:
        with open(arguments[0], "w", encoding="utf-8") as stream:
            for document in documents:
                if document.half == 0:
                    stream.write(json.dumps({"lang": document.lang, "text": document.text}, ensure_ascii=False) + "\n")
        return
    check = [document for document in documents if document.half == 1]
    sentences = dropped(document for document in check if document.origin != PAGES)
    pages = dropped(document for document in check if document.origin == PAGES)
    print("language  profile  documents  dropped    pages  dropped  rules, of pages after the bar")
    for lang in sorted(sentences | pages, key=lambda lang: -sentences.get(lang, NOTHING).documents):
        own, real = sentences.get(lang, NOTHING), pages.get(lang, NOTHING)
        shares = f"{own.documents:>9} {own.share:>8.1%} {real.documents:>8} {real.share:>8.1%}"
        print(f"{lang:<9} {lang in load_profiles(None)!s:<8} {shares}  {own.named()} | {real.named()}")


if __name__ == "__main__":
    main(sys.argv[1:])
