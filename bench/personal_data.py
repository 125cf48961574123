"""Personal data in labelled texts, by type and language, against plain presidio in one run, with the time of both.

    python -m bench.personal_data DATA

DATA is the folder with `pii/` (JSON lines with `lang`, `text` and `spans`) and `html_gold/` (pages with main text, for
the times). National numbers are not labelled there: numbers with right check digits are drawn after a naming word, and
the same number of wrong ones. These figures show which numbers a tool knows, not how well it agrees with our checks.

presidio runs with a blank spaCy pipeline, which only splits words, and with all of its pattern recognizers: each in its
own language, the general ones in every language. Its minimum score is 0 by default; figures with 0.5 are printed too.
"""

import argparse
import gzip
import json
import logging
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline.pii.matching import import_presidio
from pipeline.pii.stage import Redactor
from pipeline.pii.types import TYPES

LABELS = {
    "EMAIL": "email", "EMAIL_ADDRESS": "email", "PHONE": "phone", "PHONE_NUMBER": "phone", "CREDIT_CARD": "credit_card",
    "IBAN": "iban", "IBAN_CODE": "iban", "IPV4": "ip", "IPV6": "ip", "IP_ADDRESS": "ip", "CN_ID": "cn_id",
    "US_SSN": "us_ssn",
}  # fmt: skip
"""Our type by label of the data or of presidio."""
OF_PRESIDIO = {
    "FI_PERSONAL_IDENTITY_CODE": "fi_hetu", "ZA_ID_NUMBER": "za_id", "US_ITIN": "us_itin", "MAC_ADDRESS": "mac",
    "CRYPTO": "crypto", "NG_NIN": "ng_nin",
}  # fmt: skip
OF_BOTH = ("de_tax_id", "th_tnin")
"""Types with a search of ours for their groups that presidio recognizes without groups in their own languages."""
IGNORED = ("URL", "DATE_TIME", "UUID")
"""Entities of presidio that are not labelled as personal data."""
GENERAL = ("CreditCard", "Crypto", "Email", "Iban", "Ip", "MacAddress", "Phone")
NUMBERS, TIMED, CHARS, SEED = 30, 60, 4_000, 7
Hit = tuple[int, int, str]
"""(start, end, type)."""
Finder = Callable[[str, str], list[Hit]]


def records(folder: Path) -> Iterator[dict[str, Any]]:
    """The labelled texts."""
    for path in sorted((folder / "pii").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            yield from map(json.loads, stream)


def drawn_numbers() -> Iterator[dict[str, Any]]:
    """Texts with a national number after a word that names it; every second number has a wrong check digit or date."""
    draw = random.Random(SEED)
    for kind in TYPES:
        if not kind.digits or kind.check is None or kind.recognizer or not kind.default or kind.name in OF_BOTH:
            continue
        for wanted in (True, False) * NUMBERS:
            digits = "".join(draw.choices("0123456789", k=kind.digits))
            while kind.check(digits) is not wanted:
                digits = "".join(draw.choices("0123456789", k=kind.digits))
            text = f"{kind.words[0]}: {digits}."
            span = {"type": kind.name, "start": len(text) - 1 - kind.digits, "end": len(text) - 1}
            yield {"lang": "en", "text": text, "spans": [span] if wanted else []}


def presidio_finder(languages: Iterable[str]) -> Callable[[str, str], list[tuple[int, int, str, float]]]:
    """A function that returns what plain presidio finds, with scores."""
    presidio = import_presidio()
    logging.getLogger("tldextract").disabled = True  # It logs that it cannot download a list that it has a copy of.
    import spacy
    from presidio_analyzer.nlp_engine import SpacyNlpEngine

    class Blank(SpacyNlpEngine):
        """Pipelines that only split words."""

        def __init__(self) -> None:
            super().__init__()
            self.nlp = {language: spacy.blank("xx") for language in languages}

    registry = presidio.RecognizerRegistry(supported_languages=sorted(languages))
    module = presidio.predefined_recognizers
    for name in sorted(dir(module)):
        made = getattr(module, name)
        is_phone = name == "PhoneRecognizer"
        if not isinstance(made, type) or not (is_phone or issubclass(made, presidio.PatternRecognizer)):
            continue
        general = name.removesuffix("Recognizer") in GENERAL
        for language in languages if general else (None,):
            recognizer = made(supported_language=language) if language else made()
            if recognizer.supported_language in languages:
                registry.add_recognizer(recognizer)
    engine = presidio.AnalyzerEngine(registry=registry, nlp_engine=Blank(), supported_languages=sorted(languages))
    print(f"presidio: {len(registry.recognizers)} recognizers")

    def find(text: str, language: str) -> list[tuple[int, int, str, float]]:
        results = engine.analyze(text, language)
        return [(r.start, r.end, name_of(r.entity_type), r.score) for r in results if r.entity_type not in IGNORED]

    return find


def name_of(entity: str) -> str:
    """Our name of an entity of presidio."""
    return LABELS.get(entity) or OF_PRESIDIO.get(entity) or entity.lower()


class Tally:
    """Labelled values, found values, right and false ones of one tool, by a key such as the type."""

    def __init__(self) -> None:
        self.labels: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.right: Counter[str] = Counter()

    def add(self, wanted: list[Hit], found: list[Hit], key: Callable[[str], str]) -> None:
        """Count a text. A value is recalled, and a found one is right, if one of the same type overlaps it."""
        for start, end, kind in wanted:
            self.labels[key(kind)] += 1
            self.hits[key(kind)] += any(k == kind and s < end and start < e for s, e, k in found)
        for start, end, kind in found:
            self.found[key(kind)] += 1
            self.right[key(kind)] += any(k == kind and s < end and start < e for s, e, k in wanted)

    def shares(self, key: str) -> str:
        """Recall and precision in percent."""
        recall = f"{self.hits[key] / self.labels[key]:.1%}" if self.labels[key] else "–"
        precision = f"{self.right[key] / self.found[key]:.1%}" if self.found[key] else "–"
        return f"{recall} / {precision}"


def compare(texts: list[dict[str, Any]], finders: dict[str, Finder], types: set[str], by_language: bool) -> None:
    """Print a table of recall and precision by type, and by language if asked for."""
    tallies: dict[str, dict[str, Tally]] = {name: defaultdict(Tally) for name in finders}
    for entry in texts:
        spans = [(s["start"], s["end"], LABELS.get(s["type"], s["type"])) for s in entry["spans"]]
        wanted = [span for span in spans if span[2] in types]
        for name, find in finders.items():
            found = find(entry["text"], entry["lang"])
            tallies[name]["type"].add(wanted, found, lambda kind: kind if kind in types else "other types")
            tallies[name]["language"].add(wanted, found, lambda kind, lang=entry["lang"]: lang)
            tallies[name]["all"].add(wanted, found, lambda kind: "all")
    for title in ("type", "language", "all") if by_language else ("type", "all"):
        print(f"\n| {title} | values | {' | '.join(f'{name}: recall / precision' for name in finders)} |")
        print("|---|--:|" + "--:|" * len(finders))
        first = tallies[next(iter(finders))][title]
        for key in sorted({key for each in tallies.values() for key in (*each[title].labels, *each[title].found)}):
            cells = " | ".join(tallies[name][title].shares(key) for name in finders)
            print(f"| {key} | {first.labels[key]} | {cells} |")


def timed_texts(folder: Path) -> list[str]:
    """The beginnings of main texts of real English pages."""
    texts = []
    for path in sorted((folder / "html_gold").glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            texts += [text[:CHARS] for line in stream if len(text := json.loads(line).get("text") or "") >= CHARS]
    latin = [text for text in texts if len(re.findall("[a-z]", text)) > CHARS // 2]
    return random.Random(SEED).sample(latin, TIMED)


def seconds(find: Finder, texts: list[str], rounds: int) -> float:
    """CPU seconds a text, the least of the rounds."""
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        for text in texts:
            find(text, "en")
        best = min(best, time.process_time() - started)
    return best / len(texts)


def main() -> None:
    """Print the tables and the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    folder = parser.parse_args().data
    texts, numbers, redactor = list(records(folder)), list(drawn_numbers()), Redactor()
    theirs = presidio_finder({entry["lang"] for entry in texts})

    def ours(text: str, language: str) -> list[Hit]:
        return [(start, end, kind) for start, end, kind, _ in redactor.find(text, language)]

    finders: dict[str, Finder] = {"Penstock": ours}
    for least in (0.0, 0.5):
        finders[f"presidio, score {least:g} and more"] = lambda text, language, least=least: [
            hit[:3] for hit in theirs(text, language) if hit[3] >= least
        ]
    print(f"{len(texts)} labelled texts")
    compare(texts, finders, set(LABELS.values()), by_language=True)
    print(f"\n{len(numbers)} texts with a drawn national number, half of them wrong")
    compare(numbers, finders, {kind.name for kind in TYPES}, by_language=False)
    pages = timed_texts(folder)
    mine, other = seconds(ours, pages, 5), seconds(finders["presidio, score 0 and more"], pages, 2)
    print(
        f"\n{len(pages)} main texts of {CHARS} characters: Penstock {mine * 1e3:.3f} ms, presidio {other * 1e3:.1f} ms"
    )
    print(f"ratio {other / mine:.0f}")


if __name__ == "__main__":
    main()
