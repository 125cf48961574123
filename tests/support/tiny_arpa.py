"""Small ARPA files, and back-off probabilities directly by definition; shared by the tests of language models."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

NGrams = dict[tuple[str, ...], tuple[float, float]]

TINY: NGrams = {
    ("<unk>",): (-2.0, 0.0),
    ("<s>",): (0.0, -0.5),
    ("</s>",): (-1.0, 0.0),
    ("a",): (-0.5, -0.25),
    ("b",): (-0.75, -0.125),
    ("<s>", "a"): (-0.25, -0.0625),
    ("a", "b"): (-0.375, -0.03125),
    ("b", "</s>"): (-0.1875, 0.0),
    ("<s>", "a", "b"): (-0.0625, 0.0),
}
"""N-grams up to order 3, in which `a b </s>` backs off; every sum of the numbers is exact in floating point."""


def write_arpa(path: Path, ngrams: NGrams) -> str:
    """Write an ARPA file in the order of the dict within each order; the highest order has no back-off weights."""
    highest = max(map(len, ngrams))
    orders = [[(words, *values) for words, values in ngrams.items() if len(words) == n] for n in range(1, highest + 1)]
    lines = ["\\data\\", *(f"ngram {n}={len(entries)}" for n, entries in enumerate(orders, 1)), ""]
    for n, entries in enumerate(orders, 1):
        lines.append(f"\\{n}-grams:")
        for words, probability, backoff in entries:
            lines.append(f"{probability!r}\t{' '.join(words)}" + (f"\t{backoff!r}" if n < highest else ""))
        lines.append("")
    path.write_text("\n".join([*lines, "\\end\\", ""]), encoding="utf-8")
    return str(path)


def random_ngrams(sentences: Sequence[Sequence[str]], order: int, prune: Sequence[int], seed: int = 0) -> NGrams:
    """Return the n-grams that occur more than `prune[n - 1]` times, with random weights (not a distribution)."""
    chain = random.Random(seed)
    counts: Counter[tuple[str, ...]] = Counter()
    for sentence in sentences:
        words = ["<s>", *sentence, "</s>"]
        for n in range(1, order + 1):
            counts.update(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    ngrams: NGrams = {("<unk>",): (-3.0, 0.0)}
    for words, count in sorted(counts.items()):
        if count > prune[len(words) - 1]:
            ngrams[words] = (round(-5 * chain.random(), 4), round(0.2 - chain.random(), 4))
    ngrams["<s>",] = (0.0, ngrams["<s>",][1])
    return ngrams


def log10_of(sentence: Sequence[str], ngrams: NGrams) -> float:
    """Return the log10 probability of a sentence with its end, by the definition of back-off."""
    order = max(map(len, ngrams))
    words = ["<s>", *(word if (word,) in ngrams else "<unk>" for word in sentence), "</s>"]

    def word_given(context: tuple[str, ...], word: str) -> float:
        if (*context, word) in ngrams:
            return ngrams[(*context, word)][0]
        return ngrams.get(context, (0.0, 0.0))[1] + word_given(context[1:], word)

    return sum(word_given(tuple(words[max(0, i - order + 1) : i]), words[i]) for i in range(1, len(words)))
