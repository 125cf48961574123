"""Corpora of any size with known copies: documents of real paragraphs, and families of altered copies.

A base document is a draw of real paragraphs (of made-up ones where the real data is not beside the project), so that
two bases share a paragraph now and then and never half of them. Sizes of families follow a power law; a copy is its
base with words substituted, the end cut off, or a site's furniture around it, and its exact Jaccard similarity with the
base is known. A split is a function of (law, split): splits can be made in any order and in several processes.

    python -m tests.support.dedup_corpus FOLDER [--documents N] [--skew 0.5]     JSON lines and truth for every split
"""

import argparse
import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.text.words import normal_words
from tests.support.paths import SHARED

DATA = SHARED
TEXTS = ("text/gutenberg", "text/brown", "text/speeches", "text/abc_news", "text/webtext", "text/ud_english_docs")
NEWS = ("sources/news/reuters",)
SHINGLE = 5
PARAGRAPH_WORDS = (40, 90)
"""Words of a paragraph: it ends with the first sentence after the least, or at the most."""
PARAGRAPHS = (6, 12)
"""Paragraphs of a base document, least and most."""
SUBSTITUTED = (0.005, 0.01, 0.02, 0.04, 0.08)
"""Shares of words that a substitution replaces: similarities of about 0.95, 0.91, 0.83, 0.69 and 0.49."""
KEPT = (0.9, 0.8, 0.65)
"""Shares of a base that are left where the end is cut off: about its similarity."""
FURNITURE = (10, 120)
"""Words of a site's boilerplate, half before and half after the text."""
NUM_SITES = 200
OPERATIONS = {"exact": 0.35, "substitute": 0.40, "truncate": 0.10, "furniture": 0.15}
"""How copies come about, with their shares."""
SPLIT_DOCUMENTS = 12_500
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Law:
    """The number of documents, and the distribution of their copies."""

    documents: int
    duplicated: float = 0.4
    """Share of documents that belong to a family of two or more, bases included; of those that `skew` leaves."""
    exponent: float = 2.2
    """The number of families of k documents falls as k to the minus this."""
    largest: int = 1000
    """Most documents of a family."""
    skew: float = 0.0
    """Share of all documents that are one and the same text."""
    seed: int = 1

    @property
    def identical(self) -> int:
        """Number of documents that are one text."""
        return round(self.documents * self.skew)

    @property
    def splits(self) -> int:
        """Number of input files: in proportion to the documents."""
        return -(-self.documents // SPLIT_DOCUMENTS)


@dataclass(frozen=True)
class Copy:
    """One document."""

    number: int
    text: str
    family: int
    operation: str
    similarity: float
    """Exact Jaccard similarity with the base of its family."""


@dataclass(frozen=True)
class Stock:
    """Paragraphs to build from: the pieces of all of them in one row, and which normal word each piece is."""

    pieces: Sequence[str]
    words: Ints
    stream: Ints
    starts: Ints
    """Where paragraphs start in the stream; one more at its end."""
    origin: str


def sizes_of(law: Law) -> Ints:
    """Return the size of every family, largest first, single documents last; sizes are exact quantiles, not drawn."""
    ks = np.arange(2, law.largest + 1)
    weights = ks ** -float(law.exponent)
    cumulated = np.cumsum(weights / weights.sum())
    wanted = round((law.documents - law.identical) * law.duplicated)
    mean = float((ks * weights).sum() / weights.sum())
    families = round(wanted / mean)
    sizes = ks[np.searchsorted(cumulated, (np.arange(families) + 0.5) / max(families, 1))][::-1]
    fitting = sizes[np.cumsum(sizes) <= law.documents - law.identical]
    given = [law.identical] if law.identical else []
    singles = np.ones(law.documents - law.identical - int(fitting.sum()), np.int64)
    return np.concatenate([np.array(given, np.int64), fitting, singles]).astype(np.int64)


def places_of(law: Law) -> tuple[Ints, Ints]:
    """Family and number within it of every document, in the order in which they lie in the splits."""
    sizes = sizes_of(law)
    families = np.repeat(np.arange(len(sizes)), sizes)
    members = np.arange(len(families)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    order = np.random.default_rng([law.seed, 0]).permutation(len(families))
    return families[order], members[order]


def documents_of(stock: Stock, law: Law, split: int) -> Iterator[Copy]:
    """The documents of one split."""
    families, members = places_of(law)
    first, last = (law.documents * place // law.splits for place in (split, split + 1))
    for number in range(first, last):
        yield document(stock, law, number, (int(families[number]), int(members[number])))


def document(stock: Stock, law: Law, number: int, place: tuple[int, int]) -> Copy:
    """The document of a place (family, number within it)."""
    family, member = place
    base = base_of(stock, law, family)
    if member == 0 or (law.identical and family == 0):
        return Copy(number, text_of(stock, base), family, "exact" if member else "base", 1.0)
    draw = drawn(law.seed, family, member)
    operation = draw.choice(list(OPERATIONS), p=list(OPERATIONS.values()))
    copy = altered(stock, base, operation, draw)
    similarity = jaccard(stock.words[base], stock.words[copy])
    return Copy(number, text_of(stock, copy), family, str(operation), similarity)


def base_of(stock: Stock, law: Law, family: int) -> Ints:
    """Return the pieces of a family's first document."""
    draw = drawn(law.seed, family, 0)
    count = draw.integers(PARAGRAPHS[0], PARAGRAPHS[1] + 1)
    chosen = draw.integers(0, len(stock.starts) - 1, count).tolist()
    return np.concatenate([stock.stream[stock.starts[i] : stock.starts[i + 1]] for i in chosen])


def drawn(seed: int, family: int, member: int) -> np.random.Generator:
    """The random numbers of one document; Philox is keyed without any work, which a SeedSequence is not."""
    return np.random.Generator(np.random.Philox(key=[seed, family << 24 | member]))


def altered(stock: Stock, base: Ints, operation: str, draw: np.random.Generator) -> Ints:
    """A copy of a base."""
    if operation == "substitute":
        changed = draw.random(len(base)) < draw.choice(SUBSTITUTED)
        return np.where(changed, stock.stream[draw.integers(0, len(stock.stream), len(base))], base)
    if operation == "truncate":
        return base[: int(len(base) * draw.choice(KEPT))]
    if operation == "furniture":
        half = int(draw.integers(FURNITURE[0], FURNITURE[1] + 1)) // 2
        site = int(draw.integers(0, NUM_SITES)) * (len(stock.stream) // (NUM_SITES + 1))
        return np.concatenate([stock.stream[site : site + half], base, stock.stream[site + half : site + 2 * half]])
    return base


def text_of(stock: Stock, pieces: Ints) -> str:
    """The text of a row of pieces; a paragraph's last one ends in a line feed."""
    return " ".join([stock.pieces[i] for i in pieces.tolist()])


def shingles_of(words: Ints) -> npt.NDArray[np.uint64]:
    """The distinct runs of five words, as numbers; of the whole if it is shorter."""
    size = min(SHINGLE, len(words))
    codes = np.zeros(len(words) - size + 1, np.uint64)
    for offset in range(size):
        codes = codes * np.uint64(0x9E3779B97F4A7C15) + words[offset : len(words) - size + 1 + offset].astype(np.uint64)
        codes ^= codes >> np.uint64(29)
    return np.unique(codes)


def jaccard(left: Ints, right: Ints) -> float:
    """Return the exact similarity of two rows of words."""
    first, second = shingles_of(left), shingles_of(right)
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)


def stock_of(texts: Iterable[str], origin: str) -> Stock:
    """The stock that these texts make, each paragraph once."""
    numbers: dict[str, int] = {}
    words: dict[str, int] = {}
    word_of: list[int] = []
    seen: set[tuple[int, ...]] = set()
    stream: list[int] = []
    starts = [0]
    for text in texts:
        for paragraph in paragraphs_of(text):
            key = []
            for piece, word in paragraph:
                if piece not in numbers:
                    numbers[piece] = len(numbers)
                    word_of.append(words.setdefault(word, len(words)))
                key.append(numbers[piece])
            start = tuple(word_of[number] for number in key[:8])
            if start not in seen:
                seen.add(start)
                stream += key
                starts.append(len(stream))
    return Stock(list(numbers), np.array(word_of), np.array(stream), np.array(starts), origin)


def paragraphs_of(text: str) -> Iterator[list[tuple[str, str]]]:
    """Return paragraphs as pieces with their words; pieces of several words are split, pieces without words dropped."""
    least, most = PARAGRAPH_WORDS
    held: list[tuple[str, str]] = []
    for piece in text.split():
        words = normal_words(piece)
        held += [(piece, words[0])] if len(words) == 1 else [(word, word) for word in words]
        if len(held) >= most or (len(held) >= least and piece[-1] in ".!?"):
            held[-1] = (held[-1][0] + "\n", held[-1][1])
            yield held
            held = []


def real_texts(data: Path = DATA) -> Iterator[str]:
    """English text of books, speeches, news and forums."""
    for name in (*TEXTS, *NEWS):
        with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as stream:
            for line in stream:
                yield json.loads(line)["text"]


def made_up_texts(words: int = 2_000_000, vocabulary: int = 30_000) -> Iterator[str]:
    """Text whose words follow Zipf's law, in sentences of 5 to 30."""
    draw = np.random.default_rng(7)
    syllables = [a + b for a in "bcdfghjklmnprstvwz" for b in "aeiou"]
    names = ["".join(draw.choice(syllables, int(draw.integers(1, 5)))) for _ in range(vocabulary)]
    shares = 1 / np.arange(1, vocabulary + 1)
    for _ in range(words // 1000):
        words = [names[i] for i in draw.choice(vocabulary, 1000, p=shares / shares.sum()).tolist()]
        ends = np.cumsum(draw.integers(5, 31, 200))
        for end in ends[ends < len(words)].tolist():
            words[end] += "."
        yield " ".join(words)


def default_stock(data: Path = DATA) -> Stock:
    """Return the stock of the real data, or of generated words if the data is missing."""
    if (data / "text").is_dir():
        return stock_of(real_texts(data), "real text")
    return stock_of(made_up_texts(), "made-up words of Zipf's law")


def url_of(number: int) -> str:
    """Return the URL of a document, the key of its row of truth."""
    return f"https://corpus.example/{number}"


def write_split(stock: Stock, law: Law, split: int, folder: Path) -> int:
    """Write `corpus-N.jsonl.gz` and `truth-N.jsonl.gz`; returns the number of documents."""
    count = 0
    with (
        gzip.open(folder / f"corpus-{split:05d}.jsonl.gz", "wt", 1, encoding="utf-8") as texts,
        gzip.open(folder / f"truth-{split:05d}.jsonl.gz", "wt", 1, encoding="utf-8") as truth,
    ):
        for copy in documents_of(stock, law, split):
            url = url_of(copy.number)
            texts.write(json.dumps({"url": url, "text": copy.text}, ensure_ascii=False) + "\n")
            facts = {"family": copy.family, "operation": copy.operation, "similarity": round(copy.similarity, 4)}
            truth.write(json.dumps({"url": url, **facts}) + "\n")
            count += 1
    return count


def main() -> None:
    """Write a corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--skew", type=float, default=0.0)
    arguments = parser.parse_args()
    law = Law(arguments.documents, skew=arguments.skew)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    stock = default_stock()
    total = sum(write_split(stock, law, split, arguments.folder) for split in range(law.splits))
    print(f"{total} documents of {stock.origin} in {law.splits} splits")


if __name__ == "__main__":
    main()
