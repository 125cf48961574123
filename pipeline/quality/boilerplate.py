"""What surrounds the text of a page: boilerplate phrases by language, markup and code.

The phrases are our own short list in `phrases.toml`; a language that it lacks has no signal.
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
    """The boilerplate phrases of a language, in lower case."""
    return tuple(_lists()["phrases"].get(language, ()))


def function_words() -> frozenset[str]:
    """The closed word classes of English."""
    return frozenset(_lists()["function_words"].split())


def boilerplate_signals(whole: TextView, language: str) -> dict[str, float | None]:
    """The signals BOILERPLATE of a text; None where the language has no list."""
    phrases = phrases_of(language)
    if not phrases:
        return {"boilerplate_phrases": None, "boilerplate_lines": None}
    found = {phrase: count for phrase in phrases if (count := whole.lowered.count(phrase))}
    lines = [line for line in whole.lowered.split("\n") if line and not line.isspace()] if found else []
    holding = sum(any(phrase in line for phrase in found) for line in lines)
    return {"boilerplate_phrases": sum(found.values()), "boilerplate_lines": holding / max(len(lines), 1)}


def markup_signals(whole: TextView) -> dict[str, float]:
    """The signals MARKUP of a text."""
    text = whole.text
    tagged = sum(len(found) for found in _TAG.findall(text)) if "<" in text or "&" in text else 0
    classes = classes_of(text)
    filled = len(classes) - int(np.count_nonzero(classes & SPACE))
    lines = [line for line in map(str.rstrip, text.split("\n")) if line]
    return {
        "markup_chars": tagged / max(len(text), 1),
        "code_signs": int(np.count_nonzero(classes & CODE)) / max(filled, 1),
        "code_lines": sum(line.endswith(CODE_ENDS) for line in lines) / max(len(lines), 1),
    }
