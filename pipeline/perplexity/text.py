"""Text as the language models read it: normalised as CCNet does, a paragraph a line, cut into pieces.

Source: Wenzek et al. 2020 (CCNet), arXiv 1911.00359. Lower case, canonical decomposition without combining marks, every
digit as 0, typographic punctuation as its plain counterpart, no control characters.
"""

import sys
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.errors import ConfigError

Cut = Callable[[Sequence[str]], list[list[str]]]
"""Lines → the pieces of each."""

PUNCTUATION = {
    '"': "\u00ab\u00bb\u201c\u201d\u201e\u300a\u300b\u300c\u300d",
    "'": "\u00b4\u2019",
    ",": "\u3001\uff0c",
    "-": "\u2013\u2501\u25ba",
    **{".": "\u3002", ":": "\u2236\uff1a", "?": "\uff1f", "!": "\uff01", ";": "\uff1b", "%": "\uff05", "~": "\uff5e"},
    **{"(": "\uff08", ")": "\uff09", "<": "\u3008", ">": "\u3009", "[": "\u3010", "]": "\u3011"},
}
"""Plain character → those that become it."""
LONGER = {"\u2014": " - ", "\u2026": "...", "\uff0e": ". "}
"""Those that become several characters."""
REMOVED = 0xFFFFFFFF
REPLACEMENT = 0xFFFD


@lru_cache(maxsize=1)
def _table() -> npt.NDArray[np.uint32]:
    """What becomes of each code point of decomposed lower-case text; REMOVED: nothing."""
    table = np.arange(sys.maxunicode + 1, dtype=np.uint32)
    for code in range(sys.maxunicode + 1):
        match unicodedata.category(chr(code)):
            case "Mn" | "Cc":
                table[code] = REMOVED
            case "Nd":
                table[code] = ord("0")
            case "Cs":  # half a surrogate pair has no UTF-8
                table[code] = REPLACEMENT
    for plain, others in PUNCTUATION.items():
        table[list(map(ord, others))] = ord(plain)
    table[ord("\n")] = ord("\n")
    return table


def normalise(text: str) -> str:
    """The text in normal form, with the line ends where they were."""
    text = unicodedata.normalize("NFD", text.lower())
    for char, several in LONGER.items():
        text = text.replace(char, several)
    points = _table()[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)]
    normal: str = points[points != REMOVED].tobytes().decode("utf-32-le")
    return normal


def line_spans(text: str) -> npt.NDArray[np.int64]:
    """(lines, 2): start and end of each line of a text [code points]; a line end belongs to no line."""
    lengths = np.fromiter(map(len, text.split("\n")), np.int64)
    ends = np.cumsum(lengths + 1) - 1
    return np.stack([ends - lengths, ends], axis=1)


def words(lines: Sequence[str]) -> list[list[str]]:
    """What stands between spaces in each line: the pieces of a model that has no SentencePiece model."""
    return [line.split() for line in lines]


def load_pieces(model: bytes, where: str) -> Cut:
    """The pieces of a SentencePiece model as a function of lines. Raises ConfigError if the bytes are not one."""
    import sentencepiece

    processor: Any = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except RuntimeError as error:
        raise ConfigError(f"{where}: promised a SentencePiece model, found {error}; give the right file") from error

    def cut(lines: Sequence[str]) -> list[list[str]]:
        # Not as one batch: for that it starts threads, which costs more than they save.
        return [processor.encode(line, out_type=str) for line in lines]

    return cut


def sentences(text: str, cut: Cut) -> list[str]:
    """The lines of a text as a trainer takes them: normalised, pieces with spaces between, none blank."""
    return [" ".join(pieces) for pieces in cut(normalise(text).split("\n")) if pieces]
