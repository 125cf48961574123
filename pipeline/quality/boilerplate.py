"""Signals of text that is not prose: boilerplate phrases by language, markup and code.

The phrases are a short list made for Penstock, `phrases.toml`. Boilerplate is not measured in languages without a list.
"""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.quality.redpajama import CODE, SPACE, classes_of
from pipeline.quality.text import TextView

FILE = Path(__file__).with_name("phrases.toml")
_TAG = re.compile(r"</?[A-Za-z!][^<>]{0,500}>|&(?:[A-Za-z]{2,8}|#\d{1,7}|#x[0-9A-Fa-f]{1,6});")
CODE_ENDS = (";", "{", "}", ");", "});", "*/", "=>", "\\")


@cache
def _lists() -> Mapping[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def phrases_of(language: str) -> tuple[str, ...]:
    """Return the boilerplate phrases of a language, in lower case; empty if `phrases.toml` has none for it."""
    return tuple(_lists()["phrases"].get(language, ()))


def labels_of(language: str) -> frozenset[str]:
    """Return the labels of buttons and links of a language, in lower case; empty if `phrases.toml` has none for it."""
    return frozenset(_lists()["labels"].get(language, ()))


def function_words() -> frozenset[str]:
    """Return the function words of English, such as articles and pronouns: the stop words of RedPajama-V2's signals."""
    return frozenset(_lists()["function_words"].split())


def boilerplate_signals(whole: TextView, language: str) -> dict[str, float | None]:
    """Return the signals in `schemas.signals.BOILERPLATE` for a text; all None if the language has no phrase list."""
    phrases = phrases_of(language)
    if not phrases:
        return {"boilerplate_phrases": None, "boilerplate_lines": None}
    counts = {phrase: count for phrase in phrases if (count := whole.lowered.count(phrase))}
    lines = [line for line in whole.lowered.split("\n") if line and not line.isspace()] if counts else []
    num_matching = sum(any(phrase in line for phrase in counts) for line in lines)
    return {"boilerplate_phrases": sum(counts.values()), "boilerplate_lines": num_matching / max(len(lines), 1)}


def markup_signals(whole: TextView, language: str) -> dict[str, float]:
    """Return the signals in `schemas.signals.MARKUP` for a text."""
    text = whole.text
    tag_chars = sum(map(len, _TAG.findall(text))) if "<" in text or "&" in text else 0
    classes = classes_of(text)
    num_visible = len(classes) - int(np.count_nonzero(classes & SPACE))
    lines = [line for line in map(str.rstrip, text.split("\n")) if line]
    return {
        "markup_chars": tag_chars / max(len(text), 1),
        "code_signs": int(np.count_nonzero(classes & CODE)) / max(num_visible, 1),
        "code_lines": sum(line.endswith(CODE_ENDS) for line in lines) / max(len(lines), 1),
    }
