"""Language identification measured on text with known languages: F1 by kind of text, mixed pages, segmentation, cost.

    python -m bench.language [--only f1|mixed|segment|cost] [--languages]

F1 is of the code that a detector gives to a text, averaged over the languages that both detectors know; `--languages`
prints that of every language. A detector that answers nothing is wrong. Costs are the least CPU time of five rounds
over real main texts, taken in turns in one run.
"""

import argparse
import gzip
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from resiliparse.parse.lang import detect_fast, supported_langs

from pipeline.language import LABEL_PREFIX, MODEL, LanguageConfig, load_model, make_language, predict
from pipeline.models import ModelsConfig, ensure_model
from pipeline.text.spacy_tokens import split_neutral, split_unspaced

DATA = Path(__file__).parents[2] / "shared" / "data"
CODES = {"nb": "no", "nn": "no", "es-AR": "es", "es-ES": "es", "pt-BR": "pt", "pt-PT": "pt"}
OF_ONE_KIND = {"nn": "no", "bh": "hi", "arz": "ar", "wuu": "zh", "yue": "zh"}
"""Answers that stand for a language that the data do not tell apart."""
MIXED_CHARS = (1_000, 2_000, 3_500, 6_000)
SHARES = (0.0, 0.05, 0.2, 0.5)
Sample = tuple[str, str, str]
"""Kind, language, text."""


def samples() -> Iterator[Sample]:
    """Every text of the language data; `xx`, some other language, is left out."""
    for name in ("lingua", "ud", "tweets", "dsl2015"):
        for entry in entries(f"langid/{name}.jsonl.gz"):
            if entry["lang"] != "xx":
                yield f"{name} {entry['kind']}", CODES.get(entry["lang"], entry["lang"]), entry["text"]


def entries(path: str) -> Iterator[dict[str, Any]]:
    """The records of a gzipped file of JSON lines."""
    with gzip.open(DATA / path, "rt", encoding="utf-8") as stream:
        yield from map(json.loads, stream)


def f1_of(pairs: Sequence[tuple[str, str]], languages: set[str]) -> dict[str, float]:
    """F1 of each language from (true, given) codes."""
    right, true, given = Counter(), Counter(), Counter()
    for truth, answer in pairs:
        true[truth] += 1
        given[answer] += 1
        right[truth] += truth == answer
    return {code: 2 * right[code] / (true[code] + given[code]) for code in sorted(languages)}


def print_f1(model: Any, every_language: bool) -> None:
    """The table of F1 by kind of text."""
    known = {label.removeprefix(LABEL_PREFIX) for label in model.labels()} & set(supported_langs())
    kinds: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for kind, lang, text in samples():
        if lang in known:
            kinds[kind].append((lang, text))
    print(f"{'kind':<28} {'texts':>6} {'languages':>9} {'lid.176.ftz':>11} {'resiliparse':>11}   macro F1")
    for kind, texts in kinds.items():
        languages = {lang for lang, _ in texts}
        answers = {
            "lid.176.ftz": [predict(model, text)[0] for _, text in texts],
            "resiliparse": [detect_fast(text)[0] for _, text in texts],
        }
        found = {
            name: f1_of([(lang, OF_ONE_KIND.get(code, code)) for (lang, _), code in zip(texts, given)], languages)
            for name, given in answers.items()
        }
        means = [sum(scores.values()) / len(scores) for scores in found.values()]
        print(f"{kind:<28} {len(texts):>6} {len(languages):>9} {means[0]:>11.3f} {means[1]:>11.3f}")
        if every_language:
            print(
                "  " + "  ".join(f"{c} {found['lid.176.ftz'][c]:.2f}/{found['resiliparse'][c]:.2f}" for c in languages)
            )


def mixed_page(paragraphs: dict[str, list[str]], languages: Sequence[str], share: float, draw: random.Random) -> str:
    """A page of real paragraphs of the first language, with this share of characters in the second."""
    size, scattered = draw.choice(MIXED_CHARS), draw.random() < 0.5
    first = taken(paragraphs[languages[0]], int(size * (1 - share)), draw)
    second = taken(paragraphs[languages[1]], int(size * share), draw)
    if not scattered:
        return "\n".join([*first, *second])
    for paragraph in second:
        first.insert(draw.randrange(len(first) + 1), paragraph)
    return "\n".join(first)


def taken(paragraphs: list[str], size: int, draw: random.Random) -> list[str]:
    """Paragraphs in random order, the last one cut so that they have `size` characters."""
    found: list[str] = []
    for paragraph in draw.sample(paragraphs, len(paragraphs)):
        if size <= 0:
            break
        found.append(paragraph[:size])
        size -= len(found[-1])
    return found


def ud_paragraphs() -> dict[str, list[str]]:
    """Paragraphs by language."""
    found: dict[str, list[str]] = defaultdict(list)
    for entry in entries("langid/ud.jsonl.gz"):
        if entry["kind"] == "paragraph":
            found[entry["lang"]].append(entry["text"])
    return found


def print_mixed(path: str, pages: int = 500) -> None:
    """How many constructed pages are marked with the right pair of languages, and how many pure ones are marked."""
    measure = make_language(LanguageConfig(languages=()), {MODEL: path})
    paragraphs, draw = ud_paragraphs(), random.Random(7)
    print("share of the second language   pages   marked with both   language_share (mean)")
    for share in SHARES:
        marked, shares = 0, []
        for _ in range(pages):
            pair = draw.sample(sorted(paragraphs), 2)
            row: dict[str, Any] = {"text": mixed_page(paragraphs, pair, share, draw)}
            measure(row)
            second = row["second_language"]
            marked += second is not None and ({row["language"], second} == set(pair) or not share)
            shares.append(row["language_share"])
        sure = [value for value in shares if value is not None]
        print(f"{share:>28.0%} {pages:>7} {marked / pages:>18.1%} {sum(sure) / len(sure):>23.3f}")
    rows = [{"text": text} for text in main_texts()]
    for row in rows:
        measure(row)
    marked = sum(row["second_language"] is not None for row in rows)
    print(f"real main texts: {len(rows)}, marked {marked} ({marked / len(rows):.2%})")


def main_texts() -> list[str]:
    """Main texts of real pages, of 400 characters and more."""
    names = sorted(path.name for path in (DATA / "html_gold").glob("*.jsonl.gz"))
    texts = [entry.get("text") or "" for name in names for entry in entries(f"html_gold/{name}")]
    return [text for text in texts if len(text) > 400]


def least(functions: dict[str, Callable[[], None]], rounds: int = 5) -> dict[str, float]:
    """The least CPU seconds of each function, called in turns."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            started = time.process_time()
            function()
            best[name] = min(best[name], time.process_time() - started)
    return best


def print_cost(path: str) -> None:
    """Milliseconds of the language stage with and without excerpts, and of resiliparse's detector."""
    texts = main_texts()
    stages = {
        name: make_language(LanguageConfig(languages=(), excerpts=number), {MODEL: path})
        for name, number in (("without excerpts", 0), ("with excerpts", LanguageConfig().excerpts))
    }
    functions = {name: lambda stage=stage: [stage({"text": text}) for text in texts] for name, stage in stages.items()}
    functions["resiliparse"] = lambda: [detect_fast(text) for text in texts]
    best = least(functions)
    print(f"{len(texts)} main texts, {sum(map(len, texts)) / len(texts):.0f} characters on average")
    for name, seconds in best.items():
        print(f"{name:<18} {seconds / len(texts) * 1e3:.3f} ms a text, ratio {seconds / best['without excerpts']:.2f}")


def print_segment() -> None:
    """Megabytes of UTF-8 a second that the splitters cut."""
    for lang in ("zh", "ja", "th"):
        pieces = [p for entry in entries("langid/ud.jsonl.gz") if entry["lang"] == lang for p in entry["text"].split()]
        size = sum(len(piece.encode()) for piece in pieces)
        best = least(
            {
                "words": lambda pieces=pieces: [split_unspaced(piece) for piece in pieces],
                "characters": lambda pieces=pieces: [split_neutral(piece) for piece in pieces],
            }
        )
        print(f"{lang}: " + ", ".join(f"{name} {size / seconds / 1e6:.1f} MB/s" for name, seconds in best.items()))


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("f1", "mixed", "segment", "cost"))
    parser.add_argument("--languages", action="store_true")
    options = parser.parse_args()
    path = str(ensure_model("lid.176.ftz", ModelsConfig()).path)
    tables = {
        "f1": lambda: print_f1(load_model(path), options.languages),
        "mixed": lambda: print_mixed(path),
        "segment": print_segment,
        "cost": lambda: print_cost(path),
    }
    for name, table in tables.items():
        if options.only in (None, name):
            table()


if __name__ == "__main__":
    main()
