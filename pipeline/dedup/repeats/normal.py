"""The normal form in which lines, paragraphs and sentences are compared: lower case, digits as 0, nothing but words.

Source: Wenzek et al. 2020 (CCNet), arXiv 1911.00359, section 3.1: lower case, numbers by a placeholder, no Unicode
punctuation, no accent marks. Besides, whitespace is a single space, since removed punctuation leaves holes. (CCNet's
code keeps accents and ASCII punctuation; what is followed here is the paper.)
"""

import string
import sys
import unicodedata
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

REMOVED = 0xFFFFFFFF
REPLACEMENT = 0xFFFD
_DELETED = bytes(code for code in range(128) if not chr(code).isspace() and unicodedata.category(chr(code))[0] in "PC")
_PLAIN = bytes.maketrans(string.digits.encode(), b"0" * 10)


@cache
def _table() -> npt.NDArray[np.uint32]:
    """What becomes of each code point of decomposed lower-case text; REMOVED: nothing."""
    table = np.arange(sys.maxunicode + 1, dtype=np.uint32)
    for code in range(sys.maxunicode + 1):
        category = unicodedata.category(chr(code))
        if category == "Cs":  # half a surrogate pair has no UTF-8
            table[code] = REPLACEMENT
        elif category == "Nd":
            table[code] = ord("0")
        elif category == "Mn" or category[0] == "P" or (category == "Cc" and not chr(code).isspace()):
            table[code] = REMOVED
    return table


def normal_forms(units: Sequence[str]) -> list[str]:
    """The normal form of each unit; empty where it has no word. A line break inside a unit is a space."""
    joined = "\n".join([unit.replace("\n", " ") for unit in units]).lower()
    if joined.isascii():
        normal = joined.encode().translate(_PLAIN, _DELETED).decode()
    else:
        points = np.frombuffer(unicodedata.normalize("NFD", joined).encode("utf-32-le", "surrogatepass"), np.uint32)
        points = _table()[points]
        normal = points[points != REMOVED].tobytes().decode("utf-32-le")
    return [" ".join(form.split()) for form in normal.split("\n")]
