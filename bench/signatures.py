"""Speed of signatures: documents a second on one core, against the libraries whose signatures they stand in for.

    python -m bench.signatures [--texts 200] [--words 600] [--repeats 7]

Texts of `--words` words: real web pages if the data lie beside the project, otherwise words drawn by Zipf's law. CPU
time, the least of several repeats taken in turns. Three stages: *from the text*, everything between a string and a
signature's bytes; *from shingles*, for us from word keys, for the libraries from a list of shingles' bytes; *from
hashes*, the permutations alone. The libraries get the words that our own function finds, so they sign the same sets.
"""

import argparse
import gzip
import importlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datasketch import MinHash

from pipeline.minhash.fast import sketch
from pipeline.minhash.shingles import hashes, shingles, text_keys
from pipeline.minhash.stage import FAMILIES, SignatureConfig, anchor, signature
from pipeline.text.words import normal_words

DATA = Path(__file__).parents[2] / "shared" / "data"
PAGES = [DATA / name for name in ("quality/cc_en_head.jsonl.gz", "text/webtext.jsonl.gz")]
PERMUTATIONS = 112
PRIME = np.uint64((1 << 61) - 1)
CONFIG = SignatureConfig(permutations=PERMUTATIONS)
Signer = tuple[str, str, list[Any], Callable[[Any], object]]
"""Stage, name, inputs, the function of one of them."""


def real_words() -> Iterator[str]:
    """The words of real pages, one after the other."""
    for path in PAGES:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            for line in stream:
                yield from json.loads(line)["text"].split()


def drawn_words(count: int) -> list[str]:
    """Words of letters whose frequencies follow Zipf's law, one in twelve with a mark after it."""
    generator = np.random.default_rng(0)
    names = ["".join(chr(97 + letter) for letter in generator.integers(0, 26, size)) for size in range(2, 12)] * 3000
    names = [f"{name[: 2 + place % 9]}{chr(97 + place % 26)}" for place, name in enumerate(names)]
    marks = np.where(generator.random(count) < 1 / 12, ",", "")
    return [names[min(rank, len(names)) - 1] + mark for rank, mark in zip(generator.zipf(1.3, count), marks)]


def make_texts(count: int, size: int) -> tuple[str, list[str]]:
    """What the texts are, and the texts, of `size` words each."""
    real = all(path.is_file() for path in PAGES)
    words = list(real_words()) if real else drawn_words(count * size)
    kind = "from the web" if real else "drawn from Zipf's law"
    texts = [" ".join(words[start : start + size]) for start in range(0, len(words) - size + 1, size)]
    return kind, texts[:count]


def bytes_of_shingles(text: str) -> list[bytes]:
    """The five-word shingles of a text's normal words, as the libraries want them."""
    words = normal_words(text)
    return [" ".join(words[start : start + 5]).encode() for start in range(len(words) - 4)]


def update_batch(runs: list[bytes]) -> MinHash:
    """What a user of datasketch writes."""
    made = MinHash(num_perm=PERMUTATIONS)
    made.update_batch(runs)
    return made


DRAWN = MinHash(num_perm=PERMUTATIONS).permutations


def update_batch_reused(runs: list[Any], hashfunc: Callable[[Any], int] | None = None) -> MinHash:
    """The same with permutations drawn once for all documents, and with another hash if one is given."""
    made = MinHash(num_perm=PERMUTATIONS, permutations=DRAWN, scheme="affine32", hashfunc=hashfunc)
    made.update_batch(runs)
    return made


def datatrove_formula(a: Any, b: Any) -> Callable[[list[bytes]], Any]:
    """The signature as datatrove's formula has it: xxh64 of each shingle, (a x + b) mod 2^61 - 1, the least."""

    def sign(runs: list[bytes]) -> Any:
        numbers = np.array([xxhash.xxh64_intdigest(run) for run in runs], np.uint64)
        return ((numbers[:, None] * a + b) % PRIME).min(axis=0)

    return sign


def signers(texts: list[str]) -> list[Signer]:
    """Everything that is measured."""
    generator = np.random.RandomState(1)
    a, b = (generator.randint(low, int(PRIME), dtype=np.uint64, size=PERMUTATIONS) for low in (1, 0))
    formula = datatrove_formula(a, b)
    runs, keys = [bytes_of_shingles(text) for text in texts], [text_keys(text) for text in texts]
    codes = [shingles(each, 5, CONFIG.seed) for each in keys]
    numbers = [(each >> np.uint64(32)).tolist() for each in codes]
    given = {"simhash": {}}
    found: list[Signer] = [("from the text", "fast", texts, lambda text: signature(text, "en", CONFIG))]

    def with_anchor(text: str) -> tuple[bytes, int]:
        found = hashes(text, "en", None, CONFIG)
        return sketch(found, CONFIG).tobytes(), anchor(found, CONFIG.seed)

    found.append(("from the text", "fast, with the anchor", texts, with_anchor))
    for family in ("datasketch", "datatrove", "simhash"):
        config = SignatureConfig(family=family, **given.get(family, {"permutations": PERMUTATIONS}))
        found.append(
            ("from the text", f"family {family}", texts, lambda text, config=config: signature(text, "en", config))
        )
    found += [
        ("from the text", "update_batch", texts, lambda text: update_batch(bytes_of_shingles(text))),
        ("from the text", "update_batch, reused", texts, lambda text: update_batch_reused(bytes_of_shingles(text))),
        ("from the text", "datatrove's formula", texts, lambda text: formula(bytes_of_shingles(text))),
        ("from shingles", "fast", keys, lambda each: sketch(shingles(each, 5, CONFIG.seed), CONFIG).tobytes()),
        ("from shingles", "update_batch", runs, update_batch),
        ("from shingles", "update_batch, reused", runs, update_batch_reused),
        ("from shingles", "datatrove's formula", runs, formula),
        ("from hashes", "fast", codes, lambda each: sketch(each, CONFIG).tobytes()),
        ("from hashes", "family datatrove", codes, lambda each: FAMILIES["datatrove"].sketch(each, CONFIG)),
        ("from hashes", "update_batch, reused", numbers, lambda each: update_batch_reused(each, int)),
    ]
    return found + rensa_signers(texts, runs)


def rensa_signers(texts: list[str], runs: list[list[bytes]]) -> list[Signer]:
    """The same of rensa, if it is installed."""
    try:
        rensa = importlib.import_module("rensa")
    except ImportError:
        return []

    def sign(kind: str) -> Callable[[list[bytes]], object]:
        def of(shingles_of_text: list[bytes]) -> object:
            made = getattr(rensa, kind)(num_perm=PERMUTATIONS, seed=1)
            made.update(shingles_of_text)
            return made.digest()

        return of

    found: list[Signer] = []
    for kind in ("RMinHash", "CMinHash"):
        signer = sign(kind)
        found.append(("from the text", f"rensa {kind}", texts, lambda text, s=signer: s(bytes_of_shingles(text))))
        found.append(("from shingles", f"rensa {kind}", runs, signer))
    return found


def seconds(inputs: list[Any], sign: Callable[[Any], object]) -> float:
    """CPU seconds of signing every input once."""
    started = time.process_time()
    for each in inputs:
        sign(each)
    return time.process_time() - started


def bench_signatures(count: int = 200, size: int = 600, repeats: int = 7) -> None:
    """Print the cost of every kind of signature of `count` texts of `size` words."""
    kind, texts = make_texts(count, size)
    measured = signers(texts)
    least = [float("inf")] * len(measured)
    for _ in range(repeats):
        for place, (_, _, inputs, sign) in enumerate(measured):
            least[place] = min(least[place], seconds(inputs, sign) / len(inputs))
    ascii_share = sum(text.isascii() for text in texts) / len(texts)
    print(f"{len(texts)} texts of {size} words ({kind}), {ascii_share:.0%} ASCII; {PERMUTATIONS} values")
    print(f"{'':<15} {'':<24} {'µs/document':>11} {'documents/s':>11} {'x the cost of fast':>18}")
    ours = {stage: spent for (stage, name, _, _), spent in zip(measured, least) if name == "fast"}
    for stage in ours:
        for (of, name, _, _), spent in zip(measured, least):
            if of == stage:
                print(f"{stage:<15} {name:<24} {spent * 1e6:>11.1f} {1 / spent:>11.0f} {spent / ours[stage]:>18.2f}")


def main() -> None:
    """Parse the arguments, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--words", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    bench_signatures(arguments.texts, arguments.words, arguments.repeats)


if __name__ == "__main__":
    main()
