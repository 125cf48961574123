"""A stage of a recipe: how many prices a text names. Penstock calls `measure` for each document."""

import re
from typing import Any

PRICE = re.compile(r"(?:[$€£¥]\s?\d[\d.,]*|\d[\d.,]*\s?(?:[$€£¥]|EUR|USD|GBP)(?!\w))")
LETTER = re.compile(r"[^\W\d_]")


def measure(text: str, row: dict[str, Any], min_words: int = 20) -> dict[str, Any] | str:
    """Return the columns that recipe.toml declares, or the name of a reason to drop the document.

    `row`: the columns of earlier stages, such as `language`. `min_words`: from a text with fewer words, no share is
    computed [words].
    """
    if not LETTER.search(text):
        return "no_letters"
    prices, words = len(PRICE.findall(text)), len(text.split())
    return {"prices": prices, "prices_per_100_words": 100 * prices / words if words >= min_words else None}
