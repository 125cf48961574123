"""Measures how well a small English classifier can agree with people, with and without training on their labels.

    python -m bench.quality_labels [DATA] [--repeats 5]
    python -m bench.quality_labels [DATA] --train OUT

The second form trains the shipped classifier `quality-en` again, byte for byte, with the settings of `quality_en.toml`.

Prints Markdown. DATA: the folder of real data, beside the project by default. The judged documents are Common Crawl
pages, whose terms allow measurements but not the release of a model that is trained on them. `quality-en` and the
models of the first table are trained on texts in the public domain or under CC BY, CC BY-SA or PDDL, and never on a
judged document. Models of the second table are trained on the labels in nested cross-validation and then discarded: the
penalty, the calibration and, in the last row, the features are chosen without the documents that are measured.
"""

import argparse
import bz2
import gzip
import hashlib
import html
import json
import random
import re
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from fastwarc.warc import ArchiveIterator
from resiliparse.extract.html2text import extract_plain_text
from scipy.sparse import csr_matrix, hstack

import penstock
from bench.quality import SHARED, agreement_row, interval, lines_of, rules_of_config, table, wikipedia, write_texts
from jobs.recipe import read_recipe
from pipeline.classifier.linear import Examples, fit_logistic, logistic, new_vocabulary, word_keys_of
from pipeline.classifier.signals import SignalMeter, standardize
from pipeline.classifier.stage import CLASSIFIER, ClassifierConfig
from pipeline.fit.classifier import TrainClassifierConfig, auc, calibration, kappa, train_classifier
from pipeline.fit.cross_validation import Choice, Folds, bootstrap_interval, choose
from pipeline.models import ModelsConfig, ensure_model
from pipeline.quality.config import QualityConfig

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

FOLDS = 5
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
WORD_BITS = 16
CHOSEN = "chosen of these without the measured fold"
SETS = {
    "size in bytes": (("num_bytes",), False),
    "number of stop words": (("dclm_stop_words",), False),
    "all signals": (None, False),
    "words": ((), True),
    "all signals and words": (None, True),
}
"""Features: name → (signals, None for all; whether hashed words are features)."""
NAME = "quality-en"
LIMITS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
SEED = 5
SETTINGS = Path(__file__).with_name("quality_en.toml")
EWT_GENRES = ("weblog", "newsgroup", "email", "reviews", "answers")
"""The genres of the treebank EWT (CC BY-SA). The other genres of the file are of GUM, which is non-commercial."""
DUMP = "sources/wikipedia/enwiki-pages-articles-part0.xml.bz2"
BUTTONS = """
    Home|About us|Contact|Log in|Register|Search|Share|Reply|Read more|Privacy policy|Terms of use|Next|Previous
    # comments|# views|Posted by|Tags:|Add to cart|Subscribe|Sign in|Sign up|Menu|Back to top|Print|Email this
    Follow us|Newsletter|Sitemap
"""


class Material:
    """The texts and short items that the two classes are made of, with one seeded source of random choices."""

    def __init__(self, data: Path):
        self.random = random.Random(SEED)
        self.articles = wikipedia(data / DUMP)
        markup = html.unescape(html.unescape(bz2.decompress((data / DUMP).read_bytes()).decode("utf-8")))
        self.links = re.findall(r"\[\[([^\[\]|#:]{3,60})", markup)
        self.categories = re.findall(r"\[\[Category:([^\]|]+)", markup)
        references = re.findall(r"<ref[^>/]*>(.*?)</ref>", markup, re.DOTALL)
        self.references = [re.sub(r"\s+", " ", text)[:160] for text in references]
        self.posts, self.titles = posts_and_titles(data / "sources" / "stackexchange")
        papers = lines_of(data / "sources" / "arxiv" / "unarxive.jsonl.gz")
        formula = re.compile(r"\{\{[^}]*\}\}")
        self.papers = ["\n".join(formula.sub("", part["text"]) for part in paper["body_text"]) for paper in papers]
        reddit = reddit_posts(data / "sources" / "reddit" / "submissions.jsonl.zst")
        self.titles += [row["title"] for row in reddit]
        self.reddit = [row["selftext"] for row in reddit if row.get("selftext")]
        self.web = [
            row["text"] for row in lines_of(data / "text" / "ud_english_docs.jsonl.gz") if row["genre"] in EWT_GENRES
        ]
        self.books, self.speeches = (
            [row["text"] for row in lines_of(data / "text" / f"{name}.jsonl.gz")] for name in ("gutenberg", "speeches")
        )

        self.prose = self.articles + self.posts + self.reddit[:300] + self.web

    def excerpt(self, text: str, mean: float = 7.4, spread: float = 1.0) -> str:
        """A span of a text that begins at a line, of a log-normal size [characters]; by default the median is 1,600."""
        size = int(np.exp(self.random.gauss(mean, spread)))
        start = max(text.find("\n", self.random.randrange(max(1, len(text) - size))), 0)
        return text[start : start + size].strip()

    def sentences(self) -> str:
        """One to three consecutive sentences, at most 300 characters."""
        parts = re.split(r"(?<=[.!?])\s+", self.random.choice(self.prose))
        start = self.random.randrange(len(parts))
        return " ".join(parts[start : start + self.random.randint(1, 3)])[:300]

    def item(self) -> str:
        """A line of page furniture: a button, a title, a link, a date, a price or the start of a teaser."""
        draw, choice, number = self.random.random(), self.random.choice, self.random.randint
        if draw < 0.20:
            return choice(re.split(r"[|\n]\s*", BUTTONS.strip())).replace("#", str(number(0, 400)))
        for limit, items in ((0.40, self.titles), (0.55, self.links), (0.62, self.categories), (0.70, self.references)):
            if draw < limit:
                return choice(items)[:160]
        if draw < 0.76:
            day = f"{choice(['Jan', 'May', 'Sep'])} {number(1, 28)}, 20{number(3, 24):02}"
            return f"{choice(self.links)}, {day} at {number(0, 23)}:{number(0, 59):02}"
        if draw < 0.82:
            return f"{choice(self.links)} ${number(1, 400)}.{number(0, 99):02}"
        text = self.sentences()
        return text[: number(60, 160)] + " [...]" if self.random.random() < 0.5 else text

    def lines(self, mean: float, spread: float, prose: float) -> str:
        """Lines up to a log-normal size [characters], of which the share `prose` are sentences and the others items."""
        size, lines = int(np.exp(self.random.gauss(mean, spread))), [""]
        while sum(map(len, lines)) < size:
            lines.append(self.sentences() if self.random.random() < prose else self.item())
        return "\n".join(lines).strip()


def posts_and_titles(folder: Path) -> tuple[list[str], list[str]]:
    """The bodies and the titles of Stack Exchange posts, without markup."""
    posts, titles = [], []
    for site in ("coffee", "quantumcomputing"):
        with gzip.open(folder / f"{site}.Posts.xml.gz", "rt", encoding="utf-8") as stream:
            rows = re.findall(r"<row (.*?)/>", stream.read())
        for row in rows:
            body, title = re.search(r' Body="(.*?)"', row), re.search(r' Title="(.*?)"', row)
            posts += [re.sub(r"<[^>]+>", "", html.unescape(body[1]))] if body else []
            titles += [html.unescape(title[1])] if title else []
    return posts, titles


def reddit_posts(path: Path) -> list[dict[str, Any]]:
    """The submissions of a Zstandard file of JSON lines."""
    with pa.input_stream(str(path), compression="zstd") as stream:
        return [json.loads(line) for line in stream.read().splitlines()]


def training_texts(data: Path) -> dict[str, list[str]]:
    """The texts of both classes: prose, and page furniture with fragments of prose.

    The sizes of both classes overlap widely. With a median of 2,000 against 620 characters and half the spread, a model
    learned little but the size: its margins had a correlation of .96 with ln(bytes).
    """
    made = Material(data)
    chosen = made.random.choice
    sources = made.articles * 3
    for texts, count in ((made.speeches, 100), (made.books, 80), (made.papers, 60)):
        sources += [chosen(texts) for _ in range(count)]
    sources += [text for text in made.posts + made.reddit + made.web if len(text) > 800][:700]
    good = [text for text in map(made.excerpt, sources) if len(text) > 150]
    bad = [made.lines(6.6, 1.0, prose) for prose in (0, 0, 0.2, 0.4, 0.6, 0.75) for _ in range(len(good) // 6)]
    for _ in range(200):
        prose, furniture = made.excerpt(chosen(sources), 5.9, 0.5), made.lines(5.9, 0.6, 0.1)
        bad.append("\n".join((furniture, prose) if made.random.random() < 0.5 else (prose, furniture)))
    # With 160 texts of repeated lines among the bad, the AUC on the judged pages rose from .815 to .840. But the
    # share of forum pages whose main text by people is below 0.5 rose from 4 to 70 %. Rules of
    # repetition drop such texts.
    return {"good": good, "bad": bad}


def train_shipped(data: Path, out: Path) -> dict[str, Any]:
    """Train `quality-en` in a folder: the model, its training texts, and the content block of its manifest as JSON."""
    out.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))["train_classifier"]
    for name, texts in training_texts(data).items():
        settings["positives" if name == "good" else "negatives"] = {"files": [str(out / f"{name}.jsonl")]}
        write_texts(out / f"{name}.jsonl", texts)
    content: dict[str, Any] = train_classifier(TrainClassifierConfig.model_validate(settings), str(out))["content"]
    # without the block `run`, whose times differ in every training
    text = json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    (out / f"{settings['name']}.json").write_text(text, encoding="utf-8")
    return content


# ------------------------------------------------------------------------------------------------ features and models


@dataclass(frozen=True, eq=False)
class Measured:
    """The signals and the words of texts."""

    names: tuple[str, ...]
    signals: Floats
    words: Any
    """CSR matrix (texts, buckets) of unit vectors of hashed words."""

    def matrix(self, fitted: Ints, rows: Ints, name: str, reference: "Measured") -> Any:
        """The features of some texts as a CSR matrix, standardized by the texts `fitted` of `reference`."""
        wanted, with_words = SETS[name]
        places = [number for number, one in enumerate(self.names) if wanted is None or one in wanted]
        parts = []
        if places:
            known = reference.signals[fitted][:, places]
            parts.append(csr_matrix(standardize(self.signals[rows][:, places], known.mean(axis=0), known.std(axis=0))))
        return hstack([*parts, *([self.words[rows]] if with_words else [])], format="csr")


def measured(texts: list[str]) -> Measured:
    """The features of texts; a signal that is null is 0."""
    meter, vocabulary, examples = SignalMeter(), new_vocabulary(), Examples(1 << WORD_BITS, 1)
    for text in texts:
        examples.add(word_keys_of(text, vocabulary), False)
    sizes = np.log1p([len(text.encode("utf-8", "replace")) for text in texts])
    signals = np.nan_to_num(np.array([meter.features(text) for text in texts]))
    words = examples.matrix(np.arange(1 << WORD_BITS))
    return Measured((*meter.names, "num_bytes"), np.column_stack([signals, sizes]), words)


def margins(fitted: tuple[Measured, Labels, Ints], scored: tuple[Measured, Ints], name: str, l2: float) -> Floats:
    """The margins of texts under a logistic regression on other texts."""
    features, labels, rows = fitted
    point = fit_logistic(features.matrix(rows, rows, name, features), labels[rows], l2).point
    others, places = scored
    result: Floats = others.matrix(rows, places, name, features) @ point[:-1] + point[-1]
    return result


def nested(features: Measured, folds: Folds, repeats: int) -> dict[str, Floats]:
    """Held-out probabilities (repeats, documents) of each set of features, and of the set that inner folds choose."""
    every = np.arange(len(folds.labels))
    result = {name: np.zeros((repeats, len(every))) for name in (*SETS, CHOSEN)}

    def by(name: str) -> Any:
        return lambda train, others, l2: margins((features, folds.labels, train), (features, others), name, l2)

    for repeat in range(repeats):
        fold = folds.of(every, repeat, b"outer")
        for number in range(FOLDS):
            train, others = every[fold != number], every[fold == number]
            choices: dict[str, Choice] = {}
            for name in SETS:
                choice = choices[name] = choose(by(name), folds, train, PENALTIES, repeat)
                logits = choice.scale * by(name)(train, others, choice.l2) + choice.offset
                result[name][repeat, others] = logistic(logits)
            best = min(choices, key=lambda name: choices[name].loss)
            result[CHOSEN][repeat, others] = result[best][repeat, others]
    return result


# ------------------------------------------------------------------------------------------------------------- tables


def mean_figure(figure: Any, scores: Floats, good: Labels) -> str:
    """The mean of a figure over repeats, with its 95 % bootstrap interval over documents."""

    def mean(texts: Ints) -> float | None:
        if not 0 < good[texts].sum() < len(texts):
            return None
        return float(np.mean([figure(row[texts], good[texts]) for row in scores]))

    low, high = bootstrap_interval(mean, len(good))
    return f"{mean(np.arange(len(good))):.3f} ({low:.3f}–{high:.3f})"


def kappa_of(scores: Floats, good: Labels) -> float | None:
    """Kappa of the verdict that keeps probabilities of 0.5 and more."""
    return kappa(scores >= 0.5, good)


def table_of_labels(scores: dict[str, Floats], good: Labels, sure: Labels) -> str:
    """AUC, kappa and calibration of models that are trained on the labels."""
    rows = []
    for name, probabilities in scores.items():
        errors = [calibration(row, good) for row in probabilities]
        rows.append(
            [
                name,
                mean_figure(auc, probabilities, good),
                mean_figure(kappa_of, probabilities, good),
                mean_figure(kappa_of, probabilities[:, sure], good[sure]),
                *(float(np.mean([one[key] for one in errors])) for key in ("brier", "expected_calibration_error")),
            ]
        )
    header = ["features", "AUC", "kappa", f"kappa, {int(sure.sum())} unanimous", "Brier", "calibration error"]
    return table(header, rows)


def lowest_dropped(scores: Floats, good: Labels) -> float | None:
    """Kappa of a limit that drops as many documents as people call bad."""
    dropped = np.zeros(len(scores), bool)
    dropped[np.argsort(scores, kind="stable")[: int((~good).sum())]] = True
    return kappa(~dropped, good)


def table_without_labels(scores: dict[str, Floats], sizes: Floats, good: Labels, sure: Labels) -> str:
    """AUC and kappa of scores that were not trained on the labels, and how far they follow the size of the text."""
    rows = [
        [
            name,
            interval(auc, score, good),
            interval(lowest_dropped, score, good),
            interval(lowest_dropped, score[sure], good[sure]),
            float(np.corrcoef(score, sizes)[0, 1]),
        ]
        for name, score in scores.items()
    ]
    names = ["AUC", f"kappa, {int((~good).sum())} lowest dropped", "kappa, unanimous", "correlation with ln(bytes)"]
    return table(["score", *names], rows)


def table_after_rules(scores: dict[str, Floats], dropped: Labels, good: Labels) -> str:
    """What a limit of each score drops of the documents that the rules keep, at 5 and 10 % of the good ones."""
    rows = [["rules of web alone", "–", *agreement_row("", dropped, good)[1:]]]
    kept = ~dropped
    for name, score in scores.items():
        for share in (0.05, 0.10):
            both = dropped | (score < np.quantile(score[kept & good], share))
            lost = f"{int((both & kept & good).sum())} of {int((kept & good).sum())}"
            rows.append([f"rules and {name}", lost, *agreement_row("", both, good)[1:]])
    return table(["decides", "good lost after rules", "drops", "agreement", "precision", "recall", "kappa"], rows)


def shipped_scores(texts: list[str]) -> tuple[Floats, float]:
    """The scores of `quality-en`, and its CPU time [ms a text], the fastest of three."""
    place = str(ensure_model(NAME, ModelsConfig(offline=True)).path)
    classify = CLASSIFIER.make(ClassifierConfig(models={NAME: NAME}), {NAME: place})
    seconds = []
    for _ in range(3):
        rows: list[Any] = [{"_body": text, "language": "en"} for text in texts]
        started = time.process_time()
        for row in rows:
            classify(row)
        seconds.append(time.process_time() - started)
    return np.array([row["classifier_scores"][NAME] for row in rows]), min(seconds) / len(texts) * 1e3


def table_of_limits(scores: Floats, dropped: Labels, good: Labels) -> str:
    """What each limit of the shipped classifier drops, alone and of the documents that the rules keep."""
    rows = []
    kept = ~dropped
    for limit in LIMITS:
        low = scores < limit
        shares = [
            f"{int((low & part).sum())} of {int(part.sum())}" for part in (good, ~good, kept & good, kept & ~good)
        ]
        rows.append([f"{limit:g}", *shares, kappa(~low, good), kappa(kept & ~low, good)])
    header = ["limit", "good dropped", "bad dropped", "good dropped after rules", "bad dropped after rules"]
    return table([*header, "kappa", "kappa with rules"], rows)


def pages_of(folder: Path, archives: Path) -> Iterator[tuple[str, str, str]]:
    """(page type, main text by people, HTML) of pages, nearly all of which are English."""
    for row in lines_of(folder / "wcxb.jsonl.gz"):
        with (archives / row["warc"]).open("rb") as stream:
            stream.seek(row["offset"])
            record = next(iter(ArchiveIterator(stream, parse_http=True)))
            yield row["page_type"], row["text"], record.reader.read().decode("utf-8", "replace")


def table_of_pages(data: Path) -> str:
    """The share of real pages that score below a limit, by page type and by which text of the page is scored."""
    pages = list(pages_of(data / "html_gold", data / "warc"))
    texts = {
        "main text by people": [text for _, text, _ in pages],
        "text by the extractor": [penstock.extract(page).text for _, _, page in pages],
        "whole visible text": [extract_plain_text(page, main_content=False) for _, _, page in pages],
    }
    rows = []
    for name, some in texts.items():
        scores, ms = shipped_scores(some)
        for kind in ("all", "article", *sorted({kind for kind, *_ in pages} - {"article"})):
            inside = np.array([kind in ("all", one) for one, *_ in pages])
            below = [f"{(scores[inside] < limit).mean():.0%}" for limit in LIMITS]
            rows.append([name, kind, int(inside.sum()), float(np.median(scores[inside])), *below])
        print(f"{name}: {ms:.2f} ms a text of {np.mean([len(text) for text in some]):.0f} characters\n")
    return table(["text", "page type", "pages", "median score", *(f"below {limit:g}" for limit in LIMITS)], rows)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=SHARED / "data")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train", type=Path, metavar="OUT", help="folder to write the shipped classifier to")
    arguments = parser.parse_args()
    if arguments.train:
        print(json.dumps(train_shipped(arguments.data, arguments.train)["model"]))
        return 0
    judged = lines_of(arguments.data / "quality" / "dclm_human.jsonl.gz")
    texts = [row["text"] for row in judged]
    good, sure = (np.array([bool(row[name]) for row in judged]) for name in ("label", "unanimous"))
    features, every = measured(texts), np.arange(len(texts))
    free = training_texts(arguments.data)
    made = measured(free["good"] + free["bad"])
    labels = np.arange(len(made.signals)) < len(free["good"])
    both = (made, labels, np.arange(len(labels)))
    scores = {
        f"{name}, l2 {l2:g}, free texts": margins(both, (features, every), name, l2)
        for name in ("all signals", "words", "all signals and words")
        for l2 in PENALTIES
    }
    scores["quality-en"], ms = shipped_scores(texts)
    print(f"quality-en: {ms:.2f} ms a text of {np.mean([len(text) for text in texts]):.0f} characters\n")
    plain = dict(zip(features.names, features.signals.T))
    # The derived limits of English were chosen on these labels; tests/derive_english.py measures them.
    published = ["quality.english_limits='published'", "quality.by_language={}"]
    config = read_recipe("web", ["source.paths=['unused']", *published]).section("quality", QualityConfig)
    dropped = next(iter(rules_of_config(config, texts, "web").values()))
    print("### Limits of quality-en\n")
    print(table_of_limits(scores["quality-en"], dropped, good))
    errors = calibration(scores["quality-en"], good)
    print(f"Brier {errors['brier']:.3f}, calibration error {errors['expected_calibration_error']:.3f}\n")
    print("### Pages with a main text by people\n")
    print(table_of_pages(arguments.data), flush=True)
    scores["number of stop words, no model"] = plain["dclm_stop_words"]
    print(f"### Not trained on the labels: {len(free['good'])} good and {len(free['bad'])} bad free texts\n")
    print(table_without_labels(scores, plain["num_bytes"], good, sure), flush=True)
    digests = [hashlib.sha256(text.encode("utf-8", "replace")).digest()[:16] for text in texts]
    held = nested(features, Folds(digests, good, FOLDS, 0), arguments.repeats)
    print(f"### Trained on the labels: {FOLDS} folds, {arguments.repeats} repeats, {len(PENALTIES)} penalties each\n")
    print(table_of_labels(held, good, sure), flush=True)
    scores |= {f"{name}, trained on the labels": held[name][0] for name in ("all signals", CHOSEN)}
    print("### After the rules of the recipe web, with published limits\n")
    print(table_after_rules(scores, dropped, good))
    return 0


if __name__ == "__main__":
    sys.exit(main())
