"""Toxicity: words of a language's list counted in the text, and the score of a fastText classifier where one is given.

Words match whole and without case; in languages without spaces they match anywhere. Most pages hold none of them, so
the words of a text are first looked up in a set at C speed, and only a text with a hit is walked word by word.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import regex
from pydantic import model_validator

from pipeline.engine.stage import EVERY, Check, Cutoffs, PerDocument, Row, RowFunction
from schemas.config import Section, decision, location, suggest_name
from schemas.errors import ConfigError, ContractError

BUILT_IN = "builtin"
LISTS = Path(__file__).parent / "wordlists"
LANGUAGES = ("de", "en", "es", "fr", "ru", "zh")
UNSPACED = frozenset({"bo", "dz", "ja", "km", "lo", "my", "th", "wuu", "yue", "zh"})
"""Languages written without spaces between words, as lid.176 names them."""

# ASCII bytes that are not letters or digits become spaces; the other bytes belong to longer characters and stay.
_SEPARATORS = bytes(byte if byte >= 128 or chr(byte).isalnum() else 32 for byte in range(256))
_PUNCTUATION = regex.compile(r"[\u0080-\u00bf\u2000-\u206f\u2e00-\u2e7f\u3000-\u303f\uff00-\uff0f\uff1a-\uff20]")


class ToxicityConfig(Section):
    """What counts as toxic. Without a list for its language and without a classifier a document passes unmeasured."""

    wordlists: dict[str, str] = location(dict.fromkeys(LANGUAGES, BUILT_IN))
    """Word list by language: `builtin`, or the path of a text file with one word or phrase a line, `#` begins a
    comment line. Empty turns word lists off."""
    max_word_share: float | None = decision(0.01, ge=0, le=1)
    """Largest share of the text that may be on the list [words over words; characters in unspaced languages]. Default:
    the English cut-off of ROOTS (Laurençon et al. 2022, arXiv 2303.03915); None only measures."""
    max_words: int | None = decision(None, ge=0)
    """Largest number of occurrences [words]; 0 is the rule of C4 (Raffel et al. 2020, arXiv 1910.10683, 2.2)."""
    classifier: str | None = location(None)
    """Path of a supervised fastText model."""
    classifier_label: str | None = None
    """Label of that model whose probability is the score, such as `__label__toxic`."""
    max_score: float | None = decision(None, ge=0, le=1)
    """Largest score to keep a document; None only measures."""

    @model_validator(mode="after")
    def _used(self) -> "ToxicityConfig":
        if (self.classifier is None) != (self.classifier_label is None):
            raise ValueError("classifier and classifier_label belong together; give both or neither")
        if self.max_score is not None and self.classifier is None:
            raise ValueError(f"max_score = {self.max_score} would be ignored without a classifier")
        ignored = {"max_words", "max_word_share"} & self.model_fields_set
        if not self.wordlists and any(getattr(self, name) is not None for name in ignored):
            raise ValueError(f"{', '.join(sorted(ignored))} would be ignored without word lists")
        missing = sorted(k for k, v in self.wordlists.items() if v == BUILT_IN and k not in LANGUAGES)
        if missing:
            raise ValueError(f"no built-in word list for {', '.join(missing)}; built in are {', '.join(LANGUAGES)}")
        return self


class WordList:
    """The list of one language whose words stand between spaces, ready to count with."""

    def __init__(self, entries: Iterable[str]):
        self._by_first: dict[bytes, list[tuple[bytes, ...]]] = {}
        self._literal: dict[tuple[bytes, ...], str] = {}
        for entry in sorted({entry.casefold().strip() for entry in entries}):
            phrase = tuple(words_of(entry))
            self._by_first.setdefault(phrase[0], []).append(phrase)
            if regex.search(r"[^\w\s'’-]", entry):  # `s&m` is not "it's m..."
                self._literal[phrase] = entry
        for phrases in self._by_first.values():
            phrases.sort(key=lambda phrase: (-len(phrase), phrase))
        self._firsts = frozenset(self._by_first)

    def count(self, text: str) -> tuple[int, float]:
        """Occurrences of entries (longest first, no word counted twice), and the share of words they cover, 0..1."""
        folded = text.casefold()
        words = words_of(folded)
        firsts = self._firsts.intersection(words)
        if not firsts:
            return 0, 0.0
        found = covered = end = 0
        for position, word in enumerate(words):
            if word not in firsts or position < end:
                continue
            for phrase in self._by_first[word]:
                end = position + len(phrase)
                if tuple(words[position:end]) == phrase and self._literal.get(phrase, "") in folded:
                    found, covered = found + 1, covered + len(phrase)
                    break
            else:
                end = position
        return found, covered / len(words)


class UnspacedWordList:
    """The list of a language written without spaces: entries match anywhere; only Latin ends need the end of a word."""

    def __init__(self, entries: Iterable[str]):
        unique = {" ".join(entry.casefold().split()) for entry in entries}
        longest_first = sorted(unique, key=lambda entry: (-len(entry), entry))
        self._pattern = regex.compile("|".join(map(_latin_ends, longest_first)))

    def count(self, text: str) -> tuple[int, float]:
        """Occurrences of entries (longest first, no character counted twice), and the share of characters, 0..1."""
        found = self._pattern.findall(text.casefold())
        return len(found), sum(map(_characters, found)) / max(1, _characters(text)) if found else 0.0


def words_of(text: str) -> list[bytes]:
    """The words of a casefolded text as UTF-8: what stands between spaces and punctuation."""
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
    """The word list in a file. Raises ConfigError if it holds no word."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if words_of(line.casefold()) and not line.startswith("#")]
    if not entries:
        raise ConfigError(f"toxicity.wordlists.{language}: expected words, got none in {path}. Give another list.")
    return UnspacedWordList(entries) if language in UNSPACED else WordList(entries)


def load_classifier(path: str, label: str) -> Callable[[str], float]:
    """The probability of `label` as a function of the text. Raises ConfigError if the model has no such label."""
    import fasttext

    model = fasttext.load_model(path)
    labels = model.get_labels()
    if label not in labels:
        raise ConfigError(f"toxicity.classifier_label: {path} has no label {label!r}{suggest_name(label, labels)}")

    def score(text: str) -> float:
        # predict() wants one line; k=-1 gives every label, also with more than one.
        names, values = model.predict([" ".join(text.split())], k=-1)
        value = float(dict(zip(names[0], values[0])).get(label, 0.0))
        if not 0.0 <= value <= 1.001:  # fastText's float sums reach 1.00001
            raise ContractError(f"toxicity.classifier: {path} expected a probability, got {value}. Train it again.")
        return min(1.0, value)

    score("a probe, so that a model of NaN stops the run before the first document")
    return score


def make_toxicity(config: ToxicityConfig, models: Mapping[str, str]) -> RowFunction:
    """The stage's function, with its lists and model loaded."""
    lists = {language: read_wordlist(models[f"wordlist_{language}"], language) for language in config.wordlists}
    score = load_classifier(models["classifier"], config.classifier_label) if config.classifier_label else None

    def measure(row: Row) -> None:
        text, words = row["_body"], lists.get(row["language"])
        occurrences, share = words.count(text) if words else (None, None)
        value = score(text) if score else None
        row["toxic_words"], row["toxic_word_share"], row["toxicity_score"] = occurrences, share, value

    return measure


def model_files(config: ToxicityConfig) -> dict[str, str]:
    """Paths of the word lists and of the classifier."""
    files = {
        f"wordlist_{language}": str(LISTS / f"{language}.txt") if path == BUILT_IN else path
        for language, path in config.wordlists.items()
    }
    return files | ({"classifier": config.classifier} if config.classifier else {})


def checks(config: ToxicityConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> tuple[Check, ...]:
    """What the settings say of the stored counts and scores."""
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
