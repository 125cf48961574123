"""The toxicity stage: counts toxic words of a language's list, and scores the text by an optional fastText classifier.

Whole words match, regardless of case; in languages without spaces, matches may start anywhere. Most pages contain no
listed word, so the words of a text are first looked up in a set. Only a text with a hit is scanned word by word.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import regex
from pydantic import model_validator

from pipeline.engine.stage import EVERY, Check, Cutoffs, PerDocument, Row, RowFunction
from pipeline.text import native
from pipeline.text.native import loaded
from schemas.config import Section, decision, location, suggest_name
from schemas.errors import ConfigError, ContractError

if TYPE_CHECKING:
    from pipeline.text import _native

BUILT_IN = "builtin"
LISTS = Path(__file__).parent / "wordlists"
LANGUAGES = ("de", "en", "es", "fr", "ru", "zh")
UNSPACED = frozenset({"bo", "dz", "ja", "km", "lo", "my", "th", "wuu", "yue", "zh"})
"""Languages written without spaces between words, as lid.176 names them."""

# ASCII bytes that are not letters or digits become spaces; bytes above ASCII belong to longer characters and are kept.
_SEPARATORS = bytes(byte if byte >= 128 or chr(byte).isalnum() else 32 for byte in range(256))
_PUNCTUATION = regex.compile(r"[\u0080-\u00bf\u2000-\u206f\u2e00-\u2e7f\u3000-\u303f\uff00-\uff0f\uff1a-\uff20]")


class ToxicityConfig(Section):
    """The section `[toxicity]` of a recipe: word lists, a classifier, and the limits of toxic text.

    A document for which there is no word list and no classifier is kept.
    """

    wordlists: dict[str, str] = location(dict.fromkeys(LANGUAGES, BUILT_IN))
    """Word list by language: `builtin`, or the path of a text file with one word or phrase per line; `#` starts a
    comment line. Empty turns word lists off."""
    max_word_share: float | None = decision(0.01, ge=0, le=1)
    """Maximum share of the text's words that are on the list; of its characters in languages without spaces. Default:
    the English cut-off of ROOTS (Laurençon et al. 2022, arXiv 2303.03915); None measures without dropping."""
    max_words: int | None = decision(None, ge=0)
    """Maximum number of occurrences of listed words; 0 is the rule of C4 (Raffel et al. 2020, arXiv 1910.10683, 2.2).
    """
    classifier: str | None = location(None)
    """Path of a supervised fastText model; None computes no score."""
    classifier_label: str | None = None
    """Label of the classifier whose probability is the score, such as `__label__toxic`."""
    max_score: float | None = decision(None, ge=0, le=1)
    """Maximum score of a kept document; None measures without dropping."""

    @model_validator(mode="after")
    def _used(self) -> "ToxicityConfig":
        if (self.classifier is None) != (self.classifier_label is None):
            raise ValueError(
                "classifier, classifier_label: expected both or neither, got one of them. "
                "Set both toxicity.classifier and toxicity.classifier_label, or remove both."
            )
        if self.max_score is not None and self.classifier is None:
            raise ValueError(
                f"max_score: expected toxicity.classifier to be set, got {self.max_score} without it. "
                "Set toxicity.classifier, or remove toxicity.max_score."
            )
        ignored = {"max_words", "max_word_share"} & self.model_fields_set
        if not self.wordlists and any(getattr(self, name) is not None for name in ignored):
            names = ", ".join(sorted(ignored))
            raise ValueError(
                f"{names}: expected at least one word list, got none. Set toxicity.wordlists, or remove {names}."
            )
        missing = sorted(k for k, v in self.wordlists.items() if v == BUILT_IN and k not in LANGUAGES)
        if missing:
            raise ValueError(
                f"wordlists: expected {BUILT_IN!r} only for {', '.join(LANGUAGES)}, got it for {', '.join(missing)}. "
                "Set toxicity.wordlists.LANGUAGE to the path of a word list."
            )
        return self


class WordList:
    """The word list of a language with spaces between words."""

    def __init__(self, entries: Iterable[str]):
        self._by_first: dict[bytes, list[tuple[bytes, ...]]] = {}
        self._literal: dict[tuple[bytes, ...], str] = {}
        for entry in sorted({entry.casefold().strip() for entry in entries}):
            phrase = tuple(words_of(entry))
            self._by_first.setdefault(phrase[0], []).append(phrase)
            if regex.search(r"[^\w\s'’-]", entry):  # `s&m` must not match "it's m...".
                self._literal[phrase] = entry
        for phrases in self._by_first.values():
            phrases.sort(key=lambda phrase: (-len(phrase), phrase))
        self._firsts = frozenset(self._by_first)

    @cached_property
    def _screen(self) -> "_native.WordSet":
        words: _native.WordSet = loaded().WordSet([first.decode() for first in self._firsts])
        return words

    def count(self, text: str) -> tuple[int, float]:
        """Return the number of matches, and the share of the text's words that they cover (0..1).

        Longer phrases of the list match first, and no word of the text is in two matches.
        """
        folded = text.casefold()
        if native.module is not None and not self._screen.may_have(folded):
            return 0, 0.0
        words = words_of(folded)
        firsts = self._firsts.intersection(words)
        if not firsts:
            return 0, 0.0
        absent = {phrase for phrase, entry in self._literal.items() if phrase[0] in firsts and entry not in folded}
        occurrences = covered = end = 0
        for position, word in enumerate(words):
            if word not in firsts or position < end:
                continue
            for phrase in self._by_first[word]:
                end = position + len(phrase)
                if tuple(words[position:end]) == phrase and phrase not in absent:
                    occurrences, covered = occurrences + 1, covered + len(phrase)
                    break
            else:
                end = position
        return occurrences, covered / len(words)


class UnspacedWordList:
    """The word list of a language without spaces between words.

    A listed word matches anywhere in the text. If it begins or ends with a Latin letter, the
    character next to that letter must not be a Latin letter or digit.
    """

    def __init__(self, entries: Iterable[str]):
        unique = {" ".join(entry.casefold().split()) for entry in entries}
        longest_first = sorted(unique, key=lambda entry: (-len(entry), entry))
        self._pattern = regex.compile("|".join(map(_latin_ends, longest_first)))

    def count(self, text: str) -> tuple[int, float]:
        """Return the number of matches, and the share of the text's characters that they cover (0..1).

        Longer phrases of the list match first, and no character of the text is in two matches.
        """
        matches = self._pattern.findall(text.casefold())
        return len(matches), sum(map(_characters, matches)) / max(1, _characters(text)) if matches else 0.0


def words_of(text: str) -> list[bytes]:
    """Return the words of a casefolded text as UTF-8, split at spaces and punctuation."""
    if not text.isascii():
        text = _PUNCTUATION.sub(" ", text)
    return text.encode("utf-8", "replace").translate(_SEPARATORS).split()


def _characters(text: str) -> int:
    return sum(map(len, text.split()))


def _latin_ends(entry: str) -> str:
    start = "(?<![A-Za-z0-9])" if entry[0].isascii() else ""
    end = "(?![A-Za-z0-9])" if entry[-1].isascii() else ""
    return f"{start}{regex.escape(entry)}{end}"


def read_wordlist(path: str, language: str) -> WordList | UnspacedWordList:
    """Read the word list in a file. Raises ConfigError if it has no word."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if words_of(line.casefold()) and not line.startswith("#")]
    if not entries:
        raise ConfigError(
            f"toxicity.wordlists.{language}: expected words, got none in {path}. "
            f"Set toxicity.wordlists.{language} to the path of a file with one word or phrase per line."
        )
    return UnspacedWordList(entries) if language in UNSPACED else WordList(entries)


def load_classifier(path: str, label: str) -> Callable[[str], float]:
    """Return a function from text to the probability of `label`. Raises ConfigError if the model has no such label."""
    import fasttext

    model = fasttext.load_model(path)
    labels = model.get_labels()
    if label not in labels:
        raise ConfigError(
            f"toxicity.classifier_label: expected a label of {path}, got {label!r}{suggest_name(label, labels)}. "
            "Set toxicity.classifier_label to one of the model's labels."
        )

    def score(text: str) -> float:
        # predict() requires a single line; k=-1 returns every label.
        names, values = model.predict([" ".join(text.split())], k=-1)
        value = float(dict(zip(names[0], values[0])).get(label, 0.0))
        if not 0.0 <= value <= 1.001:  # fastText's float sums reach 1.00001.
            raise ContractError(
                f"toxicity.classifier: expected a probability, got {value} from {path}. Train the model again."
            )
        return min(1.0, value)

    score("a probe, so that a model of NaN stops the run before the first document")
    return score


def make_toxicity(config: ToxicityConfig, models: Mapping[str, str]) -> RowFunction:
    """Load the word lists and the classifier, and return the function that adds the toxicity columns to a row."""
    lists = {language: read_wordlist(models[f"wordlist_{language}"], language) for language in config.wordlists}
    score = load_classifier(models["classifier"], config.classifier_label) if config.classifier_label else None

    def measure(row: Row) -> None:
        text, words = row["_body"], lists.get(row["language"])
        occurrences, share = words.count(text) if words else (None, None)
        value = score(text) if score else None
        row["toxic_words"], row["toxic_word_share"], row["toxicity_score"] = occurrences, share, value

    return measure


def model_files(config: ToxicityConfig) -> dict[str, str]:
    """Return the paths of the word lists and of the classifier, by the names that `make_toxicity` reads."""
    files = {
        f"wordlist_{language}": str(LISTS / f"{language}.txt") if path == BUILT_IN else path
        for language, path in config.wordlists.items()
    }
    return files | ({"classifier": config.classifier} if config.classifier else {})


def checks(config: ToxicityConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> tuple[Check, ...]:
    """Return the checks of the toxicity columns, one for each maximum that the recipe sets."""
    limits = (
        ("toxic_word_share", "toxic_word_share", "max_word_share", config.max_word_share if config.wordlists else None),
        ("toxic_words", "toxic_words", "max_words", config.max_words if config.wordlists else None),
        ("toxic_score", "toxicity_score", "max_score", config.max_score),
    )
    return tuple(
        Check(reason, column, setting, {EVERY: limit}) for reason, column, setting, limit in limits if limit is not None
    )


TOXICITY = PerDocument(
    name="toxicity",
    version=2,
    config=ToxicityConfig,
    reads=("_body", "language"),
    adds=("toxic_words", "toxic_word_share", "toxicity_score"),
    reasons={},
    verdicts={
        "toxic_word_share": "too large a share of the text is on the language's word list",
        "toxic_words": "too many occurrences of words on the language's list",
        "toxic_score": "the classifier finds the text toxic",
    },
    make=make_toxicity,
    checks=checks,
    models=model_files,
    ends=False,
    again="rest",
)
