"""The toxicity classifier: probabilities of toxic and of hateful language of each sentence, language by language.

A sentence is the bag of the character n-grams of its normalized text. Each n-gram is hashed together with the language,
so that one file holds the weights of all languages, in 8 bits each. A language without training data has no score.
The margin of a sentence is the sum of the weights of its n-grams over the root of their number, plus what its listed
words add. A logistic function of it is the probability.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.classifier.linear import read_model, write_model
from pipeline.text import native
from pipeline.text.native import loaded
from pipeline.text.native_words import properties_of
from pipeline.toxicity.listed import FEATURES, list_digests, listed_features
from schemas import normalization
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.text import _native

KIND = "toxicity"
NORMALIZATION = 1
"""Version of the normalized text and of its n-grams, stored in every model file."""
MAX_NGRAM = 5
"""Maximum length of an n-gram [code points]."""
LABELS = ("toxic", "hate")
"""What a model scores: language that most would call toxic; attacks on people for the group that they belong to."""

Codes = npt.NDArray[np.uint64]
Buckets = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
_ADDRESS = re.compile(r"https?://\S{1,2000}|(?<!\w)@\w{1,50}")
_DIGIT, _OTHER, _REPEATED = re.compile("[0-9]"), re.compile(r"[\W_]+"), re.compile(r"([^\W0-9_])\1{2,}")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, odd


def folded(sentence: str) -> str:
    """Return a sentence casefolded, in NFKC and without invisible characters."""
    if not sentence.isascii():
        sentence = normalization.normalize("NFKC", _INVISIBLE.sub("", sentence))
    return sentence.casefold()


def all_folded(sentences: Sequence[str]) -> list[str]:
    """Return the folded sentences; together, because most of them are short."""
    parts = folded("\0".join(sentences)).split("\0")
    return parts if len(parts) == len(sentences) else [*map(folded, sentences)]


def normalize(sentence: str) -> str:
    """Return the text of a folded sentence of which a model sees the n-grams, with a space at both ends.

    It has no addresses and names of users; every digit is 0, other signs are one space, and a letter is at most twice
    in a row. `NgramSums` of the native module does the same.
    """
    plain = _OTHER.sub(" ", _DIGIT.sub("0", _ADDRESS.sub(" ", sentence)))
    return " " + _REPEATED.sub(r"\1\1", plain.strip()) + " "


def language_seed(language: str) -> np.uint64:
    """Return the number from which the hashes of a language's n-grams start."""
    return np.uint64(xxhash.xxh64_intdigest(language.encode()))


def ngram_buckets(sentences: Sequence[str], language: str, num_buckets: int) -> tuple[Buckets, Buckets]:
    """Return the bucket of each n-gram of the sentences, and the number of the sentence that it is in.

    No n-gram extends over two sentences. `num_buckets` is a power of 2.
    """
    texts = [*map(normalize, all_folded(sentences))]
    lengths = np.array([len(text) for text in texts], np.int64)
    points = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    number = np.repeat(np.arange(len(texts)), lengths)
    shift = np.uint64(64 - (num_buckets.bit_length() - 1))
    buckets, owners = [], []
    codes = np.full(len(points), language_seed(language), np.uint64)
    for size in range(1, MAX_NGRAM + 1):
        if len(points) < size:
            break
        codes = codes[: len(points) - size + 1] * _FACTOR + points[size - 1 :]
        first = number[: len(codes)]
        inside = first == number[size - 1 :]
        buckets.append((_mixed(codes[inside]) >> shift).astype(np.int64))
        owners.append(first[inside])
    empty = np.zeros(0, np.int64)
    return (np.concatenate(buckets), np.concatenate(owners)) if buckets else (empty, empty)


def _mixed(codes: Codes) -> Codes:
    # Source: Stafford 2011, variant 13 of MurmurHash3, so that all bits of a code decide its bucket.
    codes = (codes ^ (codes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    codes = (codes ^ (codes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return codes ^ (codes >> np.uint64(31))


@dataclass(frozen=True)
class ToxicityModel:
    """The weights of a model, and for each language the bias and the threshold of each label."""

    weights: Mapping[str, npt.NDArray[np.int8]]
    """(buckets,) by label."""
    scales: Mapping[str, float]
    """Value of the weight 1, by label."""
    languages: Mapping[str, Mapping[str, Mapping[str, float]]]
    """`bias` and `threshold` (a probability) by label and language, and what a feature of listed words adds to the
    margin, such as `listed_hate`. A language that is not named has no score."""

    def probabilities(self, sentences: Sequence[str], language: str, may_be_listed: bool = True) -> dict[str, Floats]:
        """Return the probability of each label for each sentence; empty if the language has no score.

        With `may_be_listed` false, the built-in list of the language is known to have no word of the sentences.
        """
        known = self.languages.get(language)
        if not known or not sentences:
            return {}
        counts, sums = self._sums(sentences, language)
        roots = np.sqrt(np.maximum(1, counts))
        listed = listed_features(sentences if may_be_listed else [], language)
        found = {}
        for label, values in known.items():
            margins = self.scales[label] * sums[:, list(self.weights).index(label)] / roots + values["bias"]
            # One feature after another, so that the sum of floats has one order.
            for name, flags in zip(FEATURES, listed.T) if len(listed) else ():
                margins = margins + flags * values.get(f"listed_{name}", 0.0)
            found[label] = 1 / (1 + np.exp(-np.clip(margins, -30, 30)))
        return found

    def _sums(self, sentences: Sequence[str], language: str) -> tuple[Buckets, Buckets]:
        """Return the number of n-grams of each sentence, and the sums (sentences, labels) of their weights."""
        if native.module is not None:
            seed = int(language_seed(language))
            counts, sums = self._native.sums(all_folded(sentences), seed)
            return np.frombuffer(counts, np.int64), np.frombuffer(sums, np.int64).reshape(len(sentences), -1)
        buckets, owners = ngram_buckets(sentences, language, len(next(iter(self.weights.values()))))
        size = len(sentences)
        # The weights are whole numbers, so their sums are exact in any order.
        sums_of = [np.bincount(owners, column[buckets], size).astype(np.int64) for column in self.weights.values()]
        return np.bincount(owners, minlength=size), np.stack(sums_of, axis=1)

    @cached_property
    def _native(self) -> "_native.NgramSums":
        weights = np.stack(list(self.weights.values()), axis=1)
        made: _native.NgramSums = loaded().NgramSums(properties_of, weights.tobytes(), weights.shape[1], MAX_NGRAM)
        return made

    def toxic_sentences(
        self, sentences: Sequence[str], language: str, may_be_listed: bool = True
    ) -> dict[str, npt.NDArray[np.bool_]]:
        """Return, for each label, whether each sentence has at least the language's threshold; empty if not scored."""
        return {
            label: found >= self.languages[language][label]["threshold"]
            for label, found in self.probabilities(sentences, language, may_be_listed).items()
        }


def save_toxicity(path: Path, model: ToxicityModel) -> None:
    """Write a model file; equal models give equal bytes."""
    header = {
        "normalization": NORMALIZATION,
        "max_ngram": MAX_NGRAM,
        "scales": dict(sorted(model.scales.items())),
        "lists": list_digests(model.languages),
        "languages": {name: dict(values) for name, values in sorted(model.languages.items())},
    }
    write_model(path, KIND, header, {label: model.weights[label] for label in sorted(model.weights)})


def load_toxicity(path: str, where: str) -> ToxicityModel:
    """Load a model file. Raises ConfigError if the file is not one, or was made for other n-grams or word lists."""
    header, columns = read_model(path, KIND, where)
    if (header.get("normalization"), header.get("max_ngram")) != (NORMALIZATION, MAX_NGRAM):
        raise ConfigError(
            f"{where}: expected a model with normalization {NORMALIZATION} and n-grams of 1 to {MAX_NGRAM}, got "
            f"{header.get('normalization')} and {header.get('max_ngram')} in {path}. Train it again with "
            "`penstock train-toxicity`."
        )
    labels = {label for values in header["languages"].values() for label in values}
    sizes = {len(column) for column in columns.values()}
    numbers = [own for values in header["languages"].values() for own in values.values()]
    is_whole = labels <= header["scales"].keys() and all({"bias", "threshold"} <= own.keys() for own in numbers)
    is_power = len(sizes) == 1 and all(size > 1 and not size & (size - 1) for size in sizes)
    if labels - columns.keys() or not is_whole or not is_power:
        raise ConfigError(
            f"{where}: expected a column of weights for each label, as many as a power of 2, got {sorted(columns)} of "
            f"{sorted(sizes)} in {path}. Train the model again with `penstock train-toxicity`."
        )
    other = {name for name, digest in header.get("lists", {}).items() if list_digests([name]).get(name) != digest}
    if other:
        raise ConfigError(
            f"{where}: expected a model that was trained with the built-in word lists of this version, got other lists "
            f"of {', '.join(sorted(other))} in {path}. Train it again with `penstock train-toxicity`."
        )
    return ToxicityModel(columns, header["scales"], header["languages"])


def quantized(weights: Floats) -> tuple[npt.NDArray[np.int8], float]:
    """Return weights as whole numbers of -127 to 127, and the value of 1."""
    scale = float(np.abs(weights).max(initial=0.0)) / 127 or 1.0
    return np.rint(weights / scale).astype(np.int8), scale
