"""Copies in the demo crawl: exact ones, and near ones whose true Jaccard similarity is measured and stored.

A near copy replaces single words; each breaks the up to five shingles it stands in, so with S shingles and k words the
similarity is about (S - 5k) / (S + 5k). The number of words is searched until the exact value meets its level.
"""

import random
import re
from dataclasses import replace

from pipeline.demo_crawl.html import CLEAN
from pipeline.demo_crawl.page import Blocks, Page, jaccard

LEVELS = (0.95, 0.9, 0.8, 0.7, 0.5, 0.3)
"""Similarities at which near copies are made."""
MIN_DUPLICATE, MAX_DISTINCT = 0.75, 0.65
"""From the first similarity on a pair counts as copies, up to the second as distinct; between them either is right."""
NEAR_COPY_CHARS = 1800
"""Length of a text that is precise enough for the highest level: one word of 300 moves the similarity by 0.03."""
REPLACEABLE = re.compile(r"[a-z]{2,}")


def exact_copies(original: Page, urls: list[str], same_bytes: bool, rng: random.Random) -> list[Page]:
    """The original and a copy of it at every URL: the same bytes, or the same text in another layout."""
    kind = "exact_bytes" if same_bytes else "exact_text"
    pages = [replace(original, kind="original", details={"group": original.url, "copies": kind})]
    for url in urls:
        other = rng.choice([name for name in CLEAN if name != original.layout])
        copy = replace(original, url=url, kind=kind, details={"group": original.url, "jaccard": 1.0})
        copy = replace(copy, rendered_as=original.url) if same_bytes else replace(copy, layout=other)
        pages.append(copy.dropped_by("exact_duplicate", "near_duplicate"))
    return pages


def near_copy(original: Page, url: str, level: float, words: list[str], rng: random.Random) -> list[Page]:
    """The original and a copy whose similarity is as near to `level` as single words allow; its exact value is kept."""
    kind = f"near_{round(100 * level)}"
    copy = replace(original, url=url, kind=kind, blocks=_altered(original, level, words, rng), layout=rng.choice(CLEAN))
    similarity = jaccard(original.main_text, copy.main_text)
    if similarity >= MIN_DUPLICATE:
        copy = copy.dropped_by("near_duplicate")
    elif similarity > MAX_DISTINCT:
        copy = replace(copy.dropped_by("near_duplicate"), expected="either")
    details = {"group": original.url, "jaccard": round(similarity, 6)}
    return [
        replace(original, kind="original", details={"group": original.url, "copies": kind}),
        replace(copy, details=details),
    ]


def _altered(page: Page, level: float, words: list[str], rng: random.Random) -> Blocks:
    """The page's blocks with as many words replaced as bring the similarity nearest to `level`."""
    texts = [text.split(" ") for _, text in page.blocks]
    spots = [(b, w) for b, text in enumerate(texts) for w, word in enumerate(text) if REPLACEABLE.fullmatch(word)]
    rng.shuffle(spots)
    fillers = [rng.choice([word for word in rng.sample(words, 2) if word != texts[b][w]]) for b, w in spots]

    def altered(count: int) -> Blocks:
        changed = [list(text) for text in texts]
        for (block, word), filler in zip(spots[:count], fillers):
            changed[block][word] = filler
        return tuple((element, " ".join(text)) for (element, _), text in zip(page.blocks, changed))

    def similarity(count: int) -> float:
        return jaccard(page.main_text, replace(page, blocks=altered(count)).main_text)

    low, high = 0, len(spots)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if similarity(middle) >= level else (low, middle)
    return altered(min((low, high), key=lambda count: abs(similarity(count) - level)))
