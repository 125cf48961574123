"""`penstock train-toxicity`: train the toxicity classifier on labelled texts, and measure it by cross-validation.

One logistic regression per label is trained on the texts of all languages together; n-grams are hashed with their
language, so each language has weights of its own. Every text is measured by a model that was trained without its fold.
The threshold of a language is the one with the best F1 on its labelled texts at which no more than a share of sentences
of ordinary text is taken for toxic.
"""

import gzip
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator

from pipeline.classifier.linear import logistic, minimize
from pipeline.fit.corpus import Clock, commit_model
from pipeline.models import NAME, ModelsConfig
from pipeline.toxicity.listed import FEATURES, listed_features
from pipeline.toxicity.model import (
    LABELS,
    MAX_NGRAM,
    NORMALIZATION,
    ToxicityModel,
    ngram_buckets,
    quantized,
    save_toxicity,
)
from pipeline.toxicity.sentences import sentence_spans
from schemas.config import Section, location
from schemas.errors import ConfigError, ContractError
from schemas.ids import file_sha256, shuffle_key
from schemas.text import text_table

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

TOXIC, HATE = LABELS
NEITHER, MISSING = 0, -1
LISTED = 0.3
"""Value of a feature of listed words; an n-gram of a text has its number over the root of all, about 0.05."""
MAX_TEXT = 2_000
"""Maximum length of a training text; the rest is not read [code points]."""


class LabelledTexts(Section):
    """A file of JSON lines with labelled or ordinary texts, plain or gzipped."""

    path: str = location(...)
    """Path of the file."""
    licence: str
    """Licence of the texts, which the card of the model states."""
    origin: str
    """Where the texts are published, which the card of the model states."""
    text_field: str = "text"
    language: str | None = None
    """Language of all texts; None: that of the field `language_field`."""
    language_field: str = "lang"
    label_field: str = "label"
    """Field with the label, or with a list of labels."""
    toxic: tuple[str, ...] = ()
    """Labels of toxic texts. A text with none of these and none of `ignored` is not toxic."""
    hate: tuple[str, ...] | None = None
    """Labels of hateful texts; None if the labels do not say what is hateful."""
    ignored: tuple[str, ...] = ()
    """Labels of texts that are left out."""
    weight: float = Field(1.0, gt=0)
    """Weight of each text."""
    group_fields: tuple[str, ...] = ()
    """Fields of the group of a text, such as its template; the first one with a value counts. The second
    cross-validation divides groups, not texts."""
    ordinary: bool = False
    """True for ordinary text: no text is toxic, and thresholds are chosen by it."""
    languages: tuple[str, ...] = ()
    """Languages to read; empty reads all."""


class TrainToxicityConfig(Section):
    """The section `[train_toxicity]`: labelled texts, and how the classifier is trained."""

    name: str = "toxic-multi"
    data: tuple[LabelledTexts, ...] = Field(min_length=1)
    buckets: int = Field(1 << 20, ge=1 << 10, le=1 << 24)
    """Number of hash buckets, a power of 2; a label takes a byte for each."""
    l2: float = Field(0.3, gt=0)
    """Penalty of the squared weights."""
    folds: int = Field(5, ge=2, le=20)
    max_set_weight: int = Field(3_000, ge=1)
    """Number of texts to which the weight of a larger set of one language is limited."""
    max_alarms: float = Field(0.025, ge=0, le=1)
    """Maximum share of ordinary texts at or above a threshold, by language."""
    min_texts: int = Field(500, ge=2)
    """Minimum number of labelled texts of a language; other languages have no score."""
    min_ordinary: int = Field(200, ge=0)
    """Minimum number of ordinary texts of a language; other languages have no score, as nothing shows its alarms."""
    min_rows: int = Field(3, ge=1)
    """Minimum number of training texts with an n-gram of a bucket; other buckets have no weight."""
    steps: int = Field(60, ge=1, le=10_000)
    """Maximum number of steps of L-BFGS."""

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if not NAME.fullmatch(name):
            raise ValueError(f"expected letters, digits, dots, dashes and underscores, got {name!r}. Rename the model.")
        return name

    @field_validator("buckets")
    @classmethod
    def _is_power(cls, buckets: int) -> int:
        if buckets & (buckets - 1):
            raise ValueError(f"expected a power of 2, got {buckets}. Set train_toxicity.buckets to a power of 2.")
        return buckets


@dataclass(frozen=True)
class TrainingExample:
    """A labelled text."""

    text: str
    language: str
    origin: int
    """Number of its file among `data`."""
    labels: tuple[int, ...]
    """For each of LABELS 1 or 0; MISSING if the file does not say."""
    group: bytes


def read_examples(config: TrainToxicityConfig) -> list[TrainingExample]:
    """Read all texts, without texts that are repeated in a language.

    Raises ConfigError if a file cannot be read, or has no text, and ContractError if a line is wrong.
    """
    found: dict[tuple[str, str], TrainingExample] = {}
    for origin, data in enumerate(config.data):
        before = len(found)
        for example in _read(data, origin):
            found.setdefault((example.language, example.text), example)
        if len(found) == before:
            raise ConfigError(
                f"train_toxicity.data: expected labelled texts, got no new one in {data.path}. Correct its settings."
            )
    return list(found.values())


def _read(data: LabelledTexts, origin: int) -> Iterator[TrainingExample]:
    try:
        raw = Path(data.path).read_bytes()
        content = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        lines = io.StringIO(content.decode("utf-8"))
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError(
            f"train_toxicity.data: expected JSON lines, got {data.path}, which cannot be read ({error}). Set its path."
        ) from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            text = str(row[data.text_field])[:MAX_TEXT]
            language = data.language or str(row[data.language_field])
            given = [] if data.ordinary else row[data.label_field]
            group = next((str(row[name]) for name in data.group_fields if row.get(name)), text)
        except (ValueError, KeyError, TypeError) as error:
            raise ContractError(
                f"{data.path}, line {number}: expected an object with the fields that its settings name, got "
                f"{type(error).__name__} {error}. Correct train_toxicity.data."
            ) from error
        labels = {str(label) for label in (given if isinstance(given, list) else [given])}
        if not text.strip() or labels & set(data.ignored) or (data.languages and language not in data.languages):
            continue
        toxic = int(bool(labels & set(data.toxic)))
        hate = NEITHER if data.ordinary else MISSING if data.hate is None else int(bool(labels & set(data.hate)))
        yield TrainingExample(text, language, origin, (toxic, hate), f"{language}:{group}".encode())


@dataclass(frozen=True)
class LabelWeights:
    """The weights of one label, and by language its bias and what its listed words add."""

    weights: Floats
    """(buckets + languages * FEATURES,), as the columns of `_Matrix`."""
    listed: Mapping[str, Mapping[str, float]]
    biases: Mapping[str, float]


def train_toxicity(config: TrainToxicityConfig, out: str, models: ModelsConfig | None) -> dict[str, Any]:
    """Train a model, write it with its manifest to the folder `out`, add it to the store, and return the manifest."""
    clock = Clock()
    prepared = _prepare(config)
    examples = prepared.examples
    thresholds: dict[str, dict[str, dict[str, float]]] = {}
    columns: dict[str, npt.NDArray[np.int8]] = {}
    scales: dict[str, float] = {}
    figures: dict[str, Any] = {}
    for label in LABELS:
        truth = prepared.truth(label)
        fit = _fit(prepared, truth, np.flatnonzero(truth != MISSING), config)
        columns[label], scales[label] = quantized(fit.weights[: config.buckets])
        figures[label] = _figures(_cross_validated(prepared, truth, config), truth, examples, config)
        for language, bias in sorted(fit.biases.items()):
            threshold = figures[label]["languages"][language]["threshold"]
            thresholds.setdefault(language, {})[label] = {"bias": bias, "threshold": threshold, **fit.listed[language]}
    model = ToxicityModel(columns, scales, thresholds)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{config.name}.arrow"
    save_toxicity(path, model)
    content = {
        "kind": "toxicity",
        "config": config.model_dump(mode="json", exclude={"data": {"__all__": {"path"}}}),
        "features": {"normalization": NORMALIZATION, "max_ngram": MAX_NGRAM},
        "data": [_described(data, examples, number) for number, data in enumerate(config.data)],
        "figures": figures,
    }
    return commit_model(path, content, clock, models)


def out_of_fold(config: TrainToxicityConfig, label: str) -> tuple[list[TrainingExample], Floats]:
    """Return the training texts, and the probability of a label for each by a model that was trained without its fold.

    The probability is that of the text's most toxic sentence; NaN where the label is missing.
    """
    prepared = _prepare(config)
    return prepared.examples, _cross_validated(prepared, prepared.truth(label), config)["texts"]


@dataclass(frozen=True)
class _Prepared:
    """The examples of a training, their n-grams, and the weight of each."""

    examples: list[TrainingExample]
    matrix: "_Matrix"
    weights: Floats

    def truth(self, label: str) -> Ints:
        """Return 1, 0 or MISSING for each example."""
        number = LABELS.index(label)
        return np.array([example.labels[number] for example in self.examples])


def _prepare(config: TrainToxicityConfig) -> _Prepared:
    examples = _with_enough(read_examples(config), config)
    matrix = _matrix([[example.text] for example in examples], examples, config.buckets)
    return _Prepared(examples, matrix, _example_weights(examples, config))


def _with_enough(examples: list[TrainingExample], config: TrainToxicityConfig) -> list[TrainingExample]:
    """Return the examples of the languages that have enough labelled texts of both kinds."""
    labelled = [example for example in examples if not config.data[example.origin].ordinary]
    counts = Counter(example.language for example in labelled)
    kinds = {(example.language, example.labels[0]) for example in labelled}
    ordinary = Counter(example.language for example in examples if config.data[example.origin].ordinary)
    enough = {
        language
        for language, count in counts.items()
        if count >= config.min_texts
        and ordinary[language] >= config.min_ordinary
        and {(language, 0), (language, 1)} <= kinds
    }
    if not enough:
        raise ConfigError(
            f"train_toxicity.data: expected a language with at least {config.min_texts} labelled texts, toxic and not, "
            f"and {config.min_ordinary} ordinary ones, got {dict(counts) or 'none'} and {dict(ordinary) or 'none'}. "
            "Add texts, or set a lower train_toxicity.min_texts and train_toxicity.min_ordinary."
        )
    return [example for example in examples if example.language in enough]


@dataclass(frozen=True)
class _Matrix:
    """The n-grams of examples: in row i, column b is the number of n-grams in bucket b over the root of all.

    After the buckets there are columns for the features of listed words, those of each language.
    """

    rows: Any
    """Sparse matrix (examples, buckets + languages * FEATURES)."""
    pieces: Any
    """The same for each sentence of the examples."""
    owners: Ints
    """The example of each sentence."""
    languages: Ints
    """The number of the language of each example, in the order of `names`."""
    names: tuple[str, ...]


def _matrix(texts: Sequence[Sequence[str]], examples: Sequence[TrainingExample], buckets: int) -> _Matrix:
    names = tuple(sorted({example.language for example in examples}))
    sentences = [[text[start:end] for start, end in sentence_spans(text)] for (text,) in texts]
    owners = np.repeat(np.arange(len(examples)), [len(found) for found in sentences])
    return _Matrix(
        rows=_sparse(texts, examples, buckets),
        pieces=_sparse(sentences, examples, buckets),
        owners=owners,
        languages=np.array([names.index(example.language) for example in examples]),
        names=names,
    )


def _sparse(texts: Sequence[Sequence[str]], examples: Sequence[TrainingExample], buckets: int) -> Any:
    import scipy.sparse

    # The parts of all texts of a language are counted in one go: a text has few n-grams, and calls would dominate.
    sizes = np.array([len(parts) for parts in texts])
    first = np.concatenate(([0], np.cumsum(sizes)))
    rows, columns = [], []
    names = sorted({example.language for example in examples})
    listed = scipy.sparse.lil_matrix((int(first[-1]), len(names) * len(FEATURES)))
    for block, language in enumerate(names):
        mine = [number for number, example in enumerate(examples) if example.language == language]
        places = np.concatenate([np.arange(first[number], first[number + 1]) for number in mine])
        parts = [part for number in mine for part in texts[number]]
        found, owners = ngram_buckets(parts, language, buckets)
        with_listed, features = np.nonzero(listed_features(parts, language))
        listed[places[with_listed], features + block * len(FEATURES)] = LISTED
        rows.append(places[owners])
        columns.append(found)
    where = np.concatenate(rows), np.concatenate(columns)
    counts = scipy.sparse.csr_matrix((np.ones(len(where[0])), where), (int(first[-1]), buckets))
    counts.sum_duplicates()
    totals = np.maximum(1.0, np.asarray(counts.sum(axis=1)).ravel())
    return scipy.sparse.hstack([scipy.sparse.diags(1 / np.sqrt(totals)).dot(counts), listed]).tocsr()


def _example_weights(examples: Sequence[TrainingExample], config: TrainToxicityConfig) -> Floats:
    """Return a weight for each example: toxic and other texts of a set of one language weigh the same in sum.

    A set of one language weighs as much as its number of texts, at most `max_set_weight`.
    """
    keys = [(example.origin, example.language) for example in examples]
    sizes, kinds = Counter(keys), Counter((key, example.labels[0]) for key, example in zip(keys, examples))
    weights = []
    for key, example in zip(keys, examples):
        parts = sum((key, label) in kinds for label in (0, 1))
        size = min(sizes[key], config.max_set_weight) * config.data[example.origin].weight
        weights.append(size / (parts * kinds[key, example.labels[0]]))
    return np.array(weights)


def _fit(prepared: _Prepared, truth: Ints, chosen: Ints, config: TrainToxicityConfig) -> LabelWeights:
    """Train one label on the chosen examples."""
    matrix, weights = prepared.matrix, prepared.weights
    rows = matrix.rows[chosen]
    columns = np.flatnonzero(np.bincount(rows.indices, minlength=rows.shape[1]) >= config.min_rows)
    rows = rows[:, columns].tocsr()
    turned = rows.T.tocsr()
    signs, weight = 2.0 * truth[chosen] - 1.0, weights[chosen]
    languages, num = matrix.languages[chosen], len(matrix.names)

    def objective(point: Floats) -> tuple[float, Floats]:
        values, biases = point[:-num], point[-num:]
        margins = signs * (rows @ values + biases[languages])
        losses = weight * np.logaddexp(0.0, -margins)
        slope = -signs * weight * logistic(-margins)
        penalty = 0.5 * config.l2 * float(np.add.reduce(values * values))
        gradient = np.concatenate((turned @ slope + config.l2 * values, np.bincount(languages, slope, num)))
        return float(np.add.reduce(losses)) + penalty, gradient

    found = minimize(objective, np.zeros(len(columns) + num), 1e-4 * len(chosen), config.steps).point
    all_weights = np.zeros(matrix.rows.shape[1])
    all_weights[columns] = found[:-num]
    present = {matrix.names[number] for number in np.unique(languages[truth[chosen] == 1])}
    biases = {name: float(found[len(columns) + number]) for number, name in enumerate(matrix.names) if name in present}
    added = LISTED * all_weights[config.buckets :].reshape(num, len(FEATURES))
    listed = {
        name: {f"listed_{feature}": float(value) for feature, value in zip(FEATURES, row)}
        for name, row in zip(matrix.names, added)
    }
    return LabelWeights(all_weights, listed, biases)


def _fold_of(examples: Sequence[TrainingExample], folds: int, grouped: bool) -> Ints:
    keys = [example.group if grouped else f"{example.language}:{example.text}".encode() for example in examples]
    return np.array([shuffle_key(0, key) % folds for key in keys])


def _cross_validated(prepared: _Prepared, truth: Ints, config: TrainToxicityConfig) -> dict[str, Floats]:
    """Return the highest probability of a sentence of each example, by a model that was not trained on its fold.

    `texts` divides texts at random; `groups` keeps the texts of a group in one fold. NaN where the label is missing.
    """
    matrix, examples = prepared.matrix, prepared.examples
    results = {}
    for name, grouped in (("texts", False), ("groups", True)):
        fold = _fold_of(examples, config.folds, grouped)
        found = np.full(len(examples), np.nan)
        for number in range(config.folds):
            fit = _fit(prepared, truth, np.flatnonzero((fold != number) & (truth != MISSING)), config)
            biases = np.array([fit.biases.get(name, np.nan) for name in matrix.names])
            mine = np.flatnonzero(fold[matrix.owners] == number)
            margins = matrix.pieces[mine] @ fit.weights + biases[matrix.languages[matrix.owners[mine]]]
            best = np.full(len(examples), -np.inf)
            np.maximum.at(best, matrix.owners[mine], margins)
            here = (fold == number) & (truth != MISSING)
            found[here] = logistic(best[here])
        results[name] = found
    return results


def _figures(
    out_of_fold: Mapping[str, Floats], truth: Ints, examples: Sequence[TrainingExample], config: TrainToxicityConfig
) -> dict[str, Any]:
    """Return the threshold of each language, and the figures of each set and language at this threshold."""
    ordinary = np.array([config.data[example.origin].ordinary for example in examples])
    language = np.array([example.language for example in examples])
    origin = np.array([example.origin for example in examples])
    probability = out_of_fold["texts"]
    by_language: dict[str, Any] = {}
    by_set: list[dict[str, Any]] = []
    for name in sorted(set(language[(truth == 1)].tolist())):
        mine = (language == name) & ~np.isnan(probability)
        labelled, plain = mine & ~ordinary, mine & ordinary
        sets = [labelled & (origin == number) for number in sorted(set(origin[labelled].tolist()))]
        measured = [(probability[chosen], truth[chosen] == 1) for chosen in sets]
        threshold = best_threshold(measured, probability[plain], config.max_alarms)
        by_language[name] = {
            "threshold": threshold,
            "ordinary_texts": int(plain.sum()),
            "ordinary_alarms": _share(probability[plain] >= threshold),
        }
        for number in sorted(set(origin[labelled].tolist())):
            chosen = labelled & (origin == number)
            by_set.append(
                {"origin": config.data[number].origin, "language": name, "num_texts": int(chosen.sum())}
                | {
                    kind: scores(values[chosen] >= threshold, truth[chosen] == 1)
                    for kind, values in out_of_fold.items()
                }
            )
    return {"languages": by_language, "sets": by_set}


def best_threshold(sets: Sequence[tuple[Floats, Flags]], ordinary: Floats, max_alarms: float) -> float:
    """Return the threshold with the best mean of the sets' macro F1 at which few ordinary texts are taken for toxic.

    `sets` are the probabilities and labels of each set. `max_alarms` is the largest share of ordinary texts. Of equal
    thresholds, the highest is returned; 1 if none is allowed.
    """
    candidates = np.arange(1, 100) / 100
    allowed: list[float] = [
        at for at in candidates.tolist() if not len(ordinary) or np.mean(ordinary >= at) <= max_alarms
    ]
    if not allowed:
        return 1.0

    def mean_f1(at: float) -> float:
        total = sum((scores(found >= at, labels)["macro_f1"] or 0.0 for found, labels in sets), 0.0)
        return float(total / max(1, len(sets)))

    return max(allowed, key=lambda at: (mean_f1(at), at))


def scores(flagged: Flags, labels: Flags) -> dict[str, float | None]:
    """Return F1 and macro F1, precision, recall, specificity and balanced accuracy; None where a class is missing."""
    hits, false = int((flagged & labels).sum()), int((flagged & ~labels).sum())
    missed, right = int((~flagged & labels).sum()), int((~flagged & ~labels).sum())
    recall = hits / (hits + missed) if hits + missed else None
    specificity = right / (right + false) if right + false else None
    f1 = 2 * hits / (2 * hits + false + missed) if hits + false + missed else None
    other = 2 * right / (2 * right + false + missed) if right + false + missed else None
    both = recall is not None and specificity is not None
    return {
        "f1": _rounded(f1),
        "macro_f1": _rounded(None if f1 is None or other is None else (f1 + other) / 2),
        "precision": _rounded(hits / (hits + false) if hits + false else None),
        "recall": _rounded(recall),
        "specificity": _rounded(specificity),
        "balanced_accuracy": _rounded((recall + specificity) / 2 if both else None),  # type: ignore[operator]
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _share(flags: Flags) -> float | None:
    return _rounded(float(flags.mean())) if len(flags) else None


def _described(data: LabelledTexts, examples: Sequence[TrainingExample], number: int) -> dict[str, Any]:
    """Return what the card says about a file of texts."""
    mine = [example for example in examples if example.origin == number]
    return {
        "origin": data.origin,
        "licence": data.licence,
        "sha256": file_sha256(Path(data.path)),
        "texts": dict(sorted(Counter(example.language for example in mine).items())),
        "toxic": sum(example.labels[0] for example in mine),
        "ordinary": data.ordinary,
    }


def summary(manifest: Mapping[str, Any]) -> str:
    """Return a text table of the figures of each label, set and language, measured by cross-validation."""
    lines = []
    for label, figures in manifest["content"]["figures"].items():
        rows: list[tuple[str, ...]] = [
            (label, "texts", "threshold", "F1", "macro F1", "balanced", "specificity", "balanced by group")
        ]
        for row in figures["sets"]:
            shown = [row["texts"][name] for name in ("f1", "macro_f1", "balanced_accuracy", "specificity")]
            shown.append(row["groups"]["balanced_accuracy"])
            threshold = figures["languages"][row["language"]]["threshold"]
            rows.append(
                (
                    f"{row['origin']} {row['language']}",
                    f"{row['num_texts']:,}",
                    f"{threshold:.2f}",
                    *("-" if value is None else f"{value:.3f}" for value in shown),
                )
            )
        lines += [*text_table(rows, "<>"), ""]
    return "\n".join(lines)
