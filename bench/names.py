"""Names of persons: what the windows find of what a whole pipeline finds, and the time of both.

    python -m bench.names ner-en.whl en TEXTS.jsonl.gz [--first 0] [--most 300]

Each line of TEXTS is a JSON object with a `text`, and with a `lang` if texts in other languages are to be left out. A
name of the whole pipeline has a capital letter, and is found if all its letters are covered. If a line has `spans` with
the type PERSON, recall of these is printed too. Times are CPU times of a thread: set OMP_NUM_THREADS=1, as Spark does.
"""

import argparse
import gzip
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.pii.name_windows import find_windows
from pipeline.pii.names import READ_CHARS, NameFinder, labels_of, load_pipeline

WINDOWS = (2, 4, 8, 16, 32, 1000)
Places = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Found:
    """What one way of recognition found in all texts, and the CPU time for a text."""

    places: list[Places]
    milliseconds: float


def timed(find: Callable[[str], Places], texts: Sequence[str]) -> Found:
    """Return what a function finds in the texts."""
    find(texts[0])
    started = time.thread_time()
    places = [find(text) for text in texts]
    return Found(places, (time.thread_time() - started) / len(texts) * 1e3)


def whole(pipeline: Any, labels: set[str]) -> Callable[[str], Places]:
    """Return a function that finds the persons of a whole text, as the pipeline itself marks them."""

    def find(text: str) -> Places:
        entities = pipeline(text[:READ_CHARS]).ents
        return [
            (own.start_char, own.end_char) for own in entities if own.label_ in labels and own.text.lower() != own.text
        ]

    return find


def covered(texts: Sequence[str], wanted: Sequence[Places], found: Sequence[Places]) -> tuple[int, int]:
    """Return how many of the wanted places are covered by found ones, and the number of wanted places."""
    number = total = 0
    for text, places, own in zip(texts, wanted, found, strict=True):
        marked = {at for start, end in own for at in range(start, end)}
        for start, end in places:
            total += 1
            number += all(at in marked for at in range(start, end) if text[at].isalpha())
    return number, total


def lines_of(path: str, language: str, first: int, most: int) -> list[dict[str, Any]]:
    """Return the lines of a file with a text in this language."""
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as stream:
        lines = [json.loads(line) for line in stream]
    return [line for line in lines if line.get("text") and line.get("lang") in (None, language)][first : first + most]


def main() -> None:
    """Print a table of recall and time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("language")
    parser.add_argument("texts")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--most", type=int, default=300)
    chosen = parser.parse_args()
    lines = lines_of(chosen.texts, chosen.language, chosen.first, chosen.most)
    texts = [line["text"] for line in lines]
    marked = [
        [(own["start"], own["end"]) for own in line.get("spans", ()) if own["type"] == "PERSON"] for line in lines
    ]
    labels = {*labels_of(("person",))}
    truth = timed(whole(load_pipeline(chosen.model), labels), texts)
    prefilter = timed(lambda text: [(0, len(own)) for own in find_windows(text, 16).texts], texts)
    chars = sum(map(len, texts)) / len(texts)
    print(f"{len(texts)} texts of {chars:.0f} characters, prefilter {prefilter.milliseconds:.2f} ms")
    print("| windows | ms a text | of the whole pipeline's names | of these, also its | of marked persons |")
    print("|--:|--:|--:|--:|--:|")
    ways = {"whole, pipeline alone": truth}
    for most in (*WINDOWS, None):
        finder = NameFinder({chosen.language: chosen.model}, ("person",), most)

        def find(text: str, finder: NameFinder = finder) -> Places:
            names = finder.names_of([text], chosen.language)
            return [(start, end) for start, end, *_ in names.find(text)]

        ways["whole" if most is None else str(most)] = timed(find, texts)
    for name, way in ways.items():
        number, total = covered(texts, truth.places, way.places)
        agreed, own = covered(texts, way.places, truth.places)
        right, persons = covered(texts, marked, way.places)
        shown = f"{right / persons:.3f}" if persons else ""
        print(
            f"| {name} | {way.milliseconds:.2f} | {number / max(1, total):.3f} | {agreed / max(1, own):.3f} | {shown} |"
        )


if __name__ == "__main__":
    main()
