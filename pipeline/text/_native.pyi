"""The native module: functions of whole texts that return arrays as bytes of 64-bit numbers or 8-bit flags.

`properties` is a function from a code point to bits of the constants below; see `native_words.properties_of`.
"""

from collections.abc import Callable, Mapping, Sequence

SOURCES: str
ENGLISH: int
NEUTRAL: int
UNSPACED_WORDS: int
SPACE: int
BREAK: int
ALPHA: int
ALNUM: int
NUMERIC: int
SENTENCE_END: int
SYMBOL: int
PUNCTUATION: int
UNSPACED: int
HEAD: int
TAIL: int
STOP: int
LOWER: int
UPPER: int
MEASURE_END: int
UPPERCASE: int
OTHER_CASE: int
LOWERED: int
DECOMPOSED: int
JOINED: int

class Tokenizer:
    """A tokenizer of `pipeline.text.spacy_tokens`; `dialect` is ENGLISH, NEUTRAL or UNSPACED_WORDS."""

    def __init__(
        self,
        dialect: int,
        properties: Callable[[int], int],
        split: Callable[[str], Sequence[str]],
        forms: Mapping[str, Sequence[str]],
        joinable: Mapping[Sequence[str], Sequence[str]],
    ) -> None: ...
    def words(self, text: str) -> tuple[bytes, bytes, bytes, bytes, bytes]:
        """Return the pieces of each line, the tokens of each piece, and length, flags and code of each token."""
    def cached(self) -> int:
        """Return the number of pieces for which the answer of `split` is cached."""

class Pieces:
    """The words of the other dialects, with their number in each piece, their lengths, flags and codes."""

    def __init__(
        self,
        properties: Callable[[int], int],
        normal_piece: Callable[[str], str],
        unicode_words: Callable[[str], Sequence[str]],
    ) -> None: ...
    def plain(self, text: str) -> tuple[bytes, bytes, bytes, bytes, bytes]:
        """Return what `read_pieces` returns for the pieces of a text."""
    def normal(self, text: str) -> tuple[bytes, bytes, bytes, bytes, bytes]:
        """Return what `read_normal_pieces` returns for the pieces of a text."""
    def raw(self, text: str) -> tuple[bytes, bytes, bytes, bytes]:
        """Return what `read_raw_words` returns for the pieces of a text."""
    def unicode(self, text: str) -> tuple[bytes, bytes, bytes, bytes]:
        """Return what `read_unicode_words` returns for the pieces of a text."""
    def may_repeat(self, text: str, least: int) -> bool:
        """Return False only if no two lines of at least `least` code points are equal, with single spaces."""

class Normal:
    """The normal words of `normal_words`; `zero` is True if every number counts as 0."""

    def __init__(
        self,
        properties: Callable[[int], int],
        expand: Callable[[int], tuple[str | None, bool, bool]],
        words: Callable[[str], Sequence[str]],
        zero: bool,
    ) -> None: ...
    def keys(self, text: str) -> bytes:
        """Return the key of each word of a text."""
    def points(self, text: str) -> bytes:
        """Return the code points of the words of a text, each as 64 bits."""

class WordSet:
    """A set of words of `pipeline.text.term_words`, of beginnings of words, and of pairs such as `a b`."""

    def __new__(cls, words: Sequence[str], prefixes: Sequence[str], pairs: Sequence[str]) -> WordSet: ...
    def may_have(self, text: str) -> bool:
        """Return False only if a casefolded text has no such word, no such beginning, and no such pair in a row."""

class TermSet:
    """Terms: lists of words of `pipeline.text.term_words`, and sequences that may be anywhere in a text."""

    def __new__(cls, phrases: Sequence[Sequence[str]], anywhere: Sequence[str]) -> TermSet: ...
    def find(self, text: str) -> list[int]:
        """Return the numbers of the terms in a casefolded text, in order; sequences are numbered after phrases."""

class UrlRules:
    """The table of `pipeline.urls.table`, as (keys, masks, starts, shift, longest), and the words of URLs."""

    def __new__(
        cls,
        table: tuple[object, object, object, int, int],
        banned: Sequence[bytes],
        soft: Sequence[bytes],
        subwords: Sequence[bytes],
    ) -> UrlRules: ...
    def match(self, host: bytes, path: bytes) -> tuple[int, int, int, int]:
        """Return what `PythonMatcher.match` returns for an address."""

class NgramSums:
    """The weights of hashed n-grams of `pipeline.toxicity.model`: 8 bits for each label of each bucket."""

    def __new__(cls, properties: Callable[[int], int], weights: bytes, labels: int, max_n: int) -> NgramSums: ...
    def sums(self, sentences: Sequence[str], seed: int) -> tuple[bytes, bytes]:
        """Return the number of n-grams of each casefolded sentence, and the sum of their weights for each label."""

class FastTextModel:
    """The model of `pipeline.text.fasttext_model` from the bytes of its file."""

    def __new__(cls, data: bytes) -> FastTextModel: ...
    def labels(self) -> list[str]:
        """Return the labels in the order of the file."""
    def predict(self, lines: Sequence[str], most: int) -> list[list[tuple[str, float]]]:
        """Return the `most` most probable labels of each line with their probabilities, in order; all for 0."""

def gopher_ngrams(codes: object, lengths: object) -> tuple[int, ...]:
    """Return the characters of the most frequent 2-, 3- and 4-grams, then of repeated 5- to 10-grams."""

def recurring_ngrams(codes: object) -> list[tuple[bytes, int, bytes]]:
    """Return places, most and firsts, as in `RecurringNgrams`, of the recurring n-grams for n = 2 to 10."""

def mask_signs(text: str) -> int:
    """Return the signs of masked words in a casefolded text, as bits of `pipeline.toxicity.masks.Sign`."""

def blake2s(data: bytes, size: int) -> bytes:
    """Return the BLAKE2s digest of `size` bytes, 1 to 32."""
