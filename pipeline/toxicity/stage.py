"""The stage `toxicity`: counts listed words by what they measure, and scores sentences by a classifier.

The columns hold what was measured and which measures a language has. Limits of them drop a document or only mark it,
or toxic sentences are cut from it.
"""

from collections.abc import Callable, Mapping
from typing import Literal

from pydantic import field_validator, model_validator

from pipeline.classifier.linear import is_arrow
from pipeline.engine.stage import EVERY, Check, Cutoffs, PerDocument, Row, RowFunction
from pipeline.text.fasttext_model import load_model, probability_of, readable
from pipeline.text.spans import Span, complement, map_visible_spans
from pipeline.toxicity.model import ToxicityModel, load_toxicity
from pipeline.toxicity.sentences import sentence_spans, sentences_with
from pipeline.toxicity.words import LANGUAGES, LISTS, MEASURES, OTHER, AnyWordList, read_wordlist
from schemas.config import Section, decision, location, suggest_name
from schemas.errors import ConfigError, ContractError

BUILT_IN = "builtin"
ALL_MEASURES = (*MEASURES, OTHER)
DEFAULT_MEASURES = tuple(name for name in ALL_MEASURES if name != "violence")
WORDS, MODEL, NOTHING = "words", "model", "none"
"""What measured a document: see the column `toxicity_by`."""
MEASURED_BY = "toxicity_by"
"""Figure of `documents`: documents by language and by what measured them."""

Action = Literal["drop", "cut_sentences", "mark"]


class ToxicityConfig(Section):
    """The section `[toxicity]` of a recipe: word lists, a classifier, and the limits of toxic text.

    A document in a language for which there is no word list and no classifier is kept, and counted as not measured.
    """

    wordlists: dict[str, str] = location(dict.fromkeys(LANGUAGES, BUILT_IN))
    """Word list by language: `builtin`, or the path of a text file with one word or phrase per line; `#` starts a
    comment line, and a line such as `[threat]` begins the words of a measure. A word that ends with `*` also matches
    longer words. Empty turns word lists off."""
    measures: tuple[str, ...] = DEFAULT_MEASURES
    """Measures whose words count in `toxic_words` and `toxic_word_share`: some of hate, threat, obscenity, sexual,
    violence, and other, for files without sections. Words of violence are in every report of a crime."""
    action: Action = "drop"
    """What the limits do. `drop` drops a document beyond one. `mark` keeps it, and names the limit in the column
    `marked_by` of `verdicts`. `cut_sentences` cuts each sentence that the classifier takes for toxic or that has a
    listed word of `measures`, with all sentences over which a listed phrase extends, and drops a document only beyond
    `max_cut_share`."""
    max_word_share: float | None = decision(0.01, ge=0, le=1)
    """Maximum share of the text's words that are on the list; of its characters in languages without spaces. Default:
    the English cut-off of ROOTS (Laurençon et al. 2022, arXiv 2303.03915); "none" measures without dropping."""
    max_words: int | None = decision(None, ge=0)
    """Maximum number of occurrences of listed words; 0 is the rule of C4 (Raffel et al. 2020, arXiv 1910.10683, 2.2).
    """
    classifier: str | None = location(None)
    """Name in the model store, or path, of a classifier: `toxic-multi`, a model of `penstock train-toxicity`, or a
    supervised fastText model. None computes no score."""
    classifier_label: str | None = None
    """Label of a fastText model whose probability is the score of the text, such as `__label__toxic`."""
    max_score: float | None = decision(None, ge=0, le=1)
    """Maximum score of a fastText model; None measures without dropping."""
    max_toxic_share: float | None = decision(None, ge=0, le=1)
    """Maximum share of the text that is in sentences which the classifier takes for toxic; None measures only."""
    max_hateful_share: float | None = decision(None, ge=0, le=1)
    """Maximum share of the text that is in sentences which the classifier takes for hateful; None measures only."""
    max_cut_share: float | None = decision(0.5, ge=0, le=1)
    """With `action = "cut_sentences"`: maximum share of the text that was cut; "none" drops no document."""

    @field_validator("measures")
    @classmethod
    def _known(cls, measures: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [f"{name!r}{suggest_name(name, ALL_MEASURES)}" for name in measures if name not in ALL_MEASURES]
        if wrong or not measures:
            raise ValueError(
                f"expected some of {', '.join(ALL_MEASURES)}, got {', '.join(wrong) or 'none'}. Correct "
                "toxicity.measures."
            )
        return measures

    @model_validator(mode="after")
    def _used(self) -> "ToxicityConfig":
        given = self.model_fields_set
        if self.classifier is None:
            scored = ("classifier_label", "max_score", "max_toxic_share", "max_hateful_share")
            ignored = [name for name in scored if getattr(self, name) is not None]
            if ignored:
                raise ValueError(
                    f"{ignored[0]}: expected toxicity.classifier to be set, got {getattr(self, ignored[0])} without "
                    f"it. Set toxicity.classifier, or remove toxicity.{ignored[0]}."
                )
        elif self.max_score is not None and self.classifier_label is None:
            raise ValueError(
                f"max_score: expected toxicity.classifier_label to be set, got {self.max_score} without it. "
                "Set toxicity.classifier_label to the label of a fastText model, or remove toxicity.max_score."
            )
        listed = {name for name in {"max_words", "max_word_share"} & given if getattr(self, name) is not None}
        if not self.wordlists and "measures" in given:
            raise ValueError(
                "measures: expected at least one word list, got none. Set toxicity.wordlists, or remove "
                "toxicity.measures."
            )
        if not self.wordlists and listed:
            names = ", ".join(sorted(listed))
            raise ValueError(
                f"{names}: expected at least one word list, got none. Set toxicity.wordlists, or remove {names}."
            )
        cutting = self.action == "cut_sentences"
        by_score = ("max_score", "max_toxic_share", "max_hateful_share")
        dropping = {*listed, *(name for name in by_score if getattr(self, name) is not None)}
        if (cutting and dropping) or (not cutting and "max_cut_share" in given):
            name = min(dropping) if cutting else "max_cut_share"
            raise ValueError(
                f"{name}: expected a limit that applies with action = {self.action!r}, got {getattr(self, name)}. "
                f"Remove toxicity.{name}, or set another toxicity.action."
            )
        if cutting and not self.wordlists and self.classifier is None:
            raise ValueError(
                "action: expected word lists or a classifier with cut_sentences, got neither. Set toxicity.classifier."
            )
        missing = sorted(k for k, v in self.wordlists.items() if v == BUILT_IN and k not in LANGUAGES)
        if missing:
            raise ValueError(
                f"wordlists: expected {BUILT_IN!r} only for {', '.join(LANGUAGES)}, got it for {', '.join(missing)}. "
                "Set toxicity.wordlists.LANGUAGE to the path of a word list."
            )
        return self


class WordLists:
    """The word lists of a recipe. A built-in one is read when the first text of its language is measured."""

    def __init__(self, paths: Mapping[str, str]):
        """Read the lists that are not built in, so that a wrong one stops the run before the first document."""
        self._paths = dict(paths)
        built_in = {str(LISTS / f"{language}.txt") for language in LANGUAGES}
        self._read = {name: read_wordlist(path, name) for name, path in self._paths.items() if path not in built_in}

    def of(self, language: str | None) -> AnyWordList | None:
        """Return the list of a language; None if there is none."""
        if language is None or language not in self._paths:
            return None
        if language not in self._read:
            self._read[language] = read_wordlist(self._paths[language], language)
        return self._read[language]


def load_fasttext_score(path: str, label: str) -> Callable[[str], float]:
    """Return a function from text to the probability of `label`. Raises ConfigError if the model has no such label."""
    try:
        model = load_model(path)
    except ValueError as error:
        raise ConfigError(
            "toxicity.classifier: expected a classifier or a fastText model, got a file that cannot be loaded "
            f"({error}). Set toxicity.classifier to such a file."
        ) from error
    labels = model.labels()
    if label not in labels:
        raise ConfigError(
            f"toxicity.classifier_label: expected a label of {path}, got {label!r}{suggest_name(label, labels)}. "
            "Set toxicity.classifier_label to one of the model's labels."
        )
    score = probability_of(model, label, f"toxicity.classifier: {path}")
    return lambda text: score(readable(" ".join(text.split())))


Classifiers = tuple[ToxicityModel | None, Callable[[str], float] | None]


def load_classifiers(config: ToxicityConfig, models: Mapping[str, str]) -> Classifiers:
    """Return the classifier of sentences or the fastText model of whole texts, whichever the file is.

    Raises ConfigError if the settings do not suit the file.
    """
    if config.classifier is None:
        return None, None
    path = models["classifier"]
    if is_arrow(path):
        if config.classifier_label is not None:
            raise ConfigError(
                f"toxicity.classifier_label: expected a fastText model, got {path}, a model of sentences with labels "
                "of its own. Remove toxicity.classifier_label."
            )
        return load_toxicity(path, "toxicity.classifier"), None
    shares = [name for name in ("max_toxic_share", "max_hateful_share") if getattr(config, name) is not None]
    if shares:
        raise ConfigError(
            f"toxicity.{shares[0]}: expected a classifier of sentences, got {path}, a fastText model of whole texts. "
            "Set toxicity.max_score in its place."
        )
    if config.classifier_label is None:
        raise ConfigError(
            f"toxicity.classifier_label: expected the label of a fastText model, got none for {path}. "
            "Set toxicity.classifier_label."
        )
    return None, load_fasttext_score(path, config.classifier_label)


class Meter:
    """Measures the toxicity of documents, with word lists and classifiers that are loaded once."""

    def __init__(self, config: ToxicityConfig, models: Mapping[str, str]):
        prefix = "wordlist_"
        self._lists = WordLists({name: models[f"{prefix}{name}"] for name in config.wordlists})
        self._model, self._score = load_classifiers(config, models)
        self._measures = frozenset(config.measures)
        self._cuts = config.action == "cut_sentences"
        self._built_in = frozenset(name for name, path in config.wordlists.items() if path == BUILT_IN)

    def measure(self, row: Row) -> None:
        """Set the columns of the stage. With `action = "cut_sentences"`, also cut the text of the row."""
        text, language = row["_body"], row["language"]
        words = self._lists.of(language)
        found = words.count(text) if words else None
        row["toxic_word_counts"] = None if found is None else dict(found.by_measure)
        row["toxic_words"] = None if found is None else found.total(self._measures)
        row["toxic_word_share"] = None if found is None else found.share(self._measures)
        row["toxicity_score"] = self._score(text) if self._score else None
        row["toxic_sentences"] = row["toxic_share"] = row["hateful_share"] = row["toxic_cut_share"] = None
        by = [name for name, used in ((WORDS, words), (MODEL, self._score or self._scores(language))) if used]
        row[MEASURED_BY] = " and ".join(by) or NOTHING
        spans = sentence_spans(text) if self._scores(language) or (self._cuts and found and row["toxic_words"]) else []
        toxic = self._toxic_sentences(row, text, spans)
        if self._cuts and "_rest" not in row:  # a document that is measured again has lost its toxic sentences before
            if words and row["toxic_words"]:
                rest = [n for n in range(len(spans)) if n not in toxic]
                listed = sentences_with(text, [spans[n] for n in rest], lambda part: self._is_listed(part, words))
                toxic.update(rest[n] for n in listed)
            row["toxic_cut_share"] = cut_sentences(row, [spans[number] for number in sorted(toxic)])

    def _scores(self, language: str | None) -> bool:
        return self._model is not None and language in self._model.languages

    def _is_listed(self, text: str, words: AnyWordList) -> bool:
        return words.count(text).total(self._measures) > 0

    def _toxic_sentences(self, row: Row, text: str, spans: list[Span]) -> set[int]:
        """Set the columns of the classifier of sentences, and return the numbers of the toxic or hateful sentences."""
        if self._model is None or not self._scores(row["language"]):
            return set()
        # The built-in list has just searched the whole text, which costs as much as the classifier.
        is_searched = row["language"] in self._built_in and not row["toxic_word_counts"]
        sentences = [text[start:end] for start, end in spans]
        flagged = self._model.toxic_sentences(sentences, row["language"], may_be_listed=not is_searched)
        length = max(1, len(text))
        toxic: set[int] = set()
        for label, column in (("toxic", "toxic_share"), ("hate", "hateful_share")):
            numbers = flagged[label].nonzero()[0].tolist() if label in flagged else []
            if label in self._model.languages[row["language"]]:
                row[column] = sum(spans[number][1] - spans[number][0] for number in numbers) / length
            toxic.update(numbers)
        row["toxic_sentences"] = len(toxic)
        return toxic


def cut_sentences(row: Row, sentences: list[Span]) -> float:
    """Cut sentences of `_body` out of the text of a row; return the share of `_body` that was cut.

    Replaces `cuts`, `_body`, `_words` and `num_bytes`. Raises ContractError if `_body` is not the text without `cuts`.
    """
    text, body = row["text"], row["_body"]
    if not sentences:
        return 0.0
    visible = complement([tuple(span) for span in row["cuts"]], len(text))
    if sum(end - start for start, end in visible) != len(body):
        raise ContractError(
            f"toxicity: expected `_body` to be the text without `cuts`, got {len(body)} code points in place of "
            f"{sum(end - start for start, end in visible)}. Make each earlier stage that adds cuts also change `_body`."
        )
    kept = complement(sentences, len(body))
    row["cuts"] = complement(map_visible_spans(visible, kept), len(text))
    row["_body"] = "".join([body[start:end] for start, end in kept])
    row["_words"] = None
    row["num_bytes"] = len(row["_body"].encode("utf-8", "surrogatepass"))
    return sum(end - start for start, end in sentences) / len(body)


def make_toxicity(config: ToxicityConfig, models: Mapping[str, str]) -> RowFunction:
    """Load the word lists and the classifier, and return the function that adds the toxicity columns to a row."""
    return Meter(config, models).measure


def model_files(config: ToxicityConfig) -> dict[str, str]:
    """Return the paths of the word lists and of the classifier, by the names that `make_toxicity` reads."""
    files = {
        f"wordlist_{language}": str(LISTS / f"{language}.txt") if path == BUILT_IN else path
        for language, path in config.wordlists.items()
    }
    return files | ({"classifier": config.classifier} if config.classifier else {})


def checks(config: ToxicityConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> tuple[Check, ...]:
    """Return the checks of the toxicity columns, one for each maximum that the recipe sets."""
    limits: tuple[tuple[str, str, str, float | None], ...] = (
        ("toxic_word_share", "toxic_word_share", "max_word_share", config.max_word_share if config.wordlists else None),
        ("toxic_words", "toxic_words", "max_words", config.max_words if config.wordlists else None),
        ("toxic_score", "toxicity_score", "max_score", config.max_score),
        ("toxic_sentences", "toxic_share", "max_toxic_share", config.max_toxic_share),
        ("hateful_sentences", "hateful_share", "max_hateful_share", config.max_hateful_share),
    )
    if config.action == "cut_sentences":
        limits = (("toxic_cut", "toxic_cut_share", "max_cut_share", config.max_cut_share),)
    return tuple(
        Check(reason, column, setting, {EVERY: limit}, marks=config.action == "mark")
        for reason, column, setting, limit in limits
        if limit is not None
    )


TOXICITY = PerDocument(
    name="toxicity",
    version=8,
    config=ToxicityConfig,
    reads=("text", "cuts", "_body", "_words", "language"),
    adds=(
        *("toxic_words", "toxic_word_share", "toxic_word_counts", "toxicity_score"),
        *("toxic_sentences", "toxic_share", "hateful_share", "toxic_cut_share", MEASURED_BY),
    ),
    reasons={},
    verdicts={
        "toxic_word_share": "too large a share of the text is on the language's word list",
        "toxic_words": "too many occurrences of words on the language's list",
        "toxic_score": "the classifier finds the text toxic",
        "toxic_sentences": "the classifier takes too large a share of the text for toxic",
        "hateful_sentences": "the classifier takes too large a share of the text for hateful",
        "toxic_cut": "cutting toxic sentences leaves too little of the text",
    },
    make=make_toxicity,
    checks=checks,
    models=model_files,
    ends=False,
    again="rest",
)
