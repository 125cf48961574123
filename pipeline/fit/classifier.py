"""`penstock train-classifier`: train a quality classifier on examples of two classes, and measure it on held-out texts.

Only the hash of a text determines whether it is used for training, calibration or held-out metrics. With few texts, a
repeated cross-validation replaces the division. A manifest is written with the model: the digests of the inputs, the
settings, and the metrics.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from pipeline.classifier.fasttext import GOOD_LABEL, MIN_THREADS, load_fasttext, train_fasttext, write_example
from pipeline.classifier.linear import (
    FEATURES,
    MAX_NGRAM,
    Examples,
    LinearModel,
    Minimum,
    fit_platt,
    fit_weights,
    load_linear,
    new_vocabulary,
    save_linear,
    word_keys_of,
)
from pipeline.classifier.signals import (
    SignalMeter,
    SignalModel,
    calibrated,
    fit_signals,
    load_signals,
    save_signals,
)
from pipeline.fit.corpus import BAD, GOOD, Clock, Corpus, Gathered, Reading, TrainingText, commit_model, gather_corpora
from pipeline.fit.cross_validation import Folds, bootstrap_interval, choose, cross_validate
from pipeline.models import ModelsConfig
from schemas.config import Section, location
from schemas.errors import ContractError
from schemas.ids import shuffle_key

# Metrics of a binary classifier: AUC, precision and recall, Cohen's kappa, and calibration, all exact.
#
# Labels are True for the good class. Sums have a fixed order (stable sort by score), so equal input gives equal bytes.

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.bool_]

BINS = 10
"""Default number of reliability bins."""


def auc(scores: Floats, labels: Labels) -> float:
    """Return the area under the ROC curve: the share of (good, bad) pairs whose good document has the higher score.

    A tie counts as a half. Raises ContractError if a class is missing.
    """
    num_good = int(labels.sum())
    num_bad = len(labels) - num_good
    if not num_good or not num_bad:
        raise ContractError(
            f"AUC: expected documents of two classes, got {num_good} good and {num_bad} bad. "
            "Add documents of the missing class to the corpora of train_classifier."
        )
    _, rank = np.unique(scores, return_inverse=True)
    good = np.bincount(rank[labels], minlength=int(rank.max()) + 1)
    bad = np.bincount(rank[~labels], minlength=len(good))
    bad_below = np.cumsum(bad) - bad
    twice_won = int((good * (2 * bad_below + bad)).sum())
    return twice_won / (2 * num_good * num_bad)


def confusion(kept: Labels, labels: Labels) -> dict[str, int]:
    """Return the number of documents by class and verdict: `good_kept`, `good_dropped`, `bad_kept`, `bad_dropped`."""
    return {
        "good_kept": int((kept & labels).sum()),
        "good_dropped": int((~kept & labels).sum()),
        "bad_kept": int((kept & ~labels).sum()),
        "bad_dropped": int((~kept & ~labels).sum()),
    }


def ratio(part: int, whole: int) -> float | None:
    """Return the share part / whole; None if whole is 0."""
    return part / whole if whole else None


def precision_recall(kept: Labels, labels: Labels) -> dict[str, float | None]:
    """Return the precision and the recall of the verdicts `kept`.

    Precision is the share of kept documents that are good; None if no document is kept. Recall is the share of good
    documents that are kept; None if no document is good.
    """
    counts = confusion(kept, labels)
    good_kept = counts["good_kept"]
    return {
        "precision": ratio(good_kept, good_kept + counts["bad_kept"]),
        "recall": ratio(good_kept, good_kept + counts["good_dropped"]),
    }


def kappa(first: Labels, second: Labels) -> float | None:
    """Return Cohen's kappa of two labelings of the same documents: 1 = full agreement, 0 = as much as by chance.

    None if both give all documents the same label. Source: Cohen 1960, "A coefficient of agreement for nominal scales".
    """
    total = len(first)
    agreed = int((first == second).sum())
    by_chance = int(first.sum()) * int(second.sum()) + int((~first).sum()) * int((~second).sum())
    return (agreed * total - by_chance) / (total * total - by_chance) if by_chance != total * total else None


def calibration(probabilities: Floats, labels: Labels, bins: int = BINS) -> dict[str, Any]:
    """Return the Brier score, the expected calibration error, and the reliability bins of equal width.

    Bin i holds the probabilities in [i / bins, (i + 1) / bins); the last bin also holds 1. Empty bins are omitted. The
    calibration error is the mean of |mean probability - share of good documents| over the bins, weighted by their
    number of documents. Sources: Brier 1950; Guo et al. 2017, arXiv 1706.04599.
    """
    order = np.lexsort((labels, probabilities))
    probabilities, labels = probabilities[order], labels[order]
    bin_of = np.minimum((probabilities * bins).astype(np.int64), bins - 1)
    rows = []
    for number in np.unique(bin_of).tolist():
        inside = bin_of == number
        count, good = int(inside.sum()), int(labels[inside].sum())
        mean = float(np.add.reduce(probabilities[inside])) / count
        rows.append({"from": number / bins, "documents": count, "mean_probability": mean, "good_share": good / count})
    error = sum(row["documents"] * abs(row["mean_probability"] - row["good_share"]) for row in rows) / len(labels)
    brier = float(np.add.reduce((probabilities - labels) ** 2)) / len(labels)
    return {"brier": brier, "expected_calibration_error": error, "bins": rows}


def heldout_figures(probabilities: Floats, labels: Labels) -> dict[str, Any]:
    """Return all metrics of a model, from its probabilities for held-out documents and their labels.

    Precision and recall are given at several thresholds.
    """
    thresholds = {str(limit): precision_recall(probabilities >= limit, labels) for limit in (0.1, 0.25, 0.5, 0.75, 0.9)}
    return {
        "good": int(labels.sum()),
        "bad": int((~labels).sum()),
        "auc": auc(probabilities, labels),
        "thresholds": thresholds,
        **calibration(probabilities, labels),
    }


TRAIN, CALIBRATE, HELDOUT = "train", "calibrate", "heldout"
SPLIT_PARTS = (TRAIN, CALIBRATE, HELDOUT)
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
CROSS_VALIDATION_ONLY = ("repeats", "l2_choices")
DIVISION_ONLY = ("heldout_share", "calibrate_share", "l2")
_FASTTEXT_ONLY = ("dimensions", "epochs", "learning_rate", "threads")
IGNORED: dict[str, tuple[str, ...]] = {
    "linear": _FASTTEXT_ONLY,
    "signals": (*_FASTTEXT_ONLY, "piece_chars", "bits", "ngrams"),
    "fasttext": ("l2", "calibrate_share", "folds", *CROSS_VALIDATION_ONLY),
}
"""The settings that do not apply to each kind of model."""


class TrainClassifierConfig(Section):
    """The section `[train_classifier]`: the corpora, their division into three parts, and the training settings."""

    name: str = Field("quality", pattern=NAME)
    """Name of the model: its file name, and its name in the model store."""
    kind: Literal["linear", "signals", "fasttext"] = "linear"
    """Kind of the model. `linear` has a weight for each n-gram, and `signals` has one for each quality signal of an
    English text. Their training is deterministic; `fasttext` training gives another file each time."""
    positives: Corpus = Corpus.model_validate({})
    """Texts of the good class, such as Wikipedia or books."""
    negatives: Corpus = Corpus.model_validate({})
    """Texts of the bad class, such as a random crawl."""
    labelled: tuple[str, ...] = location(())
    """JSON lines or Parquet files with a label that names each text's class."""
    reading: Reading = Reading.model_validate({})
    """Names of the text and label fields in the files."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of the samples, and of the division into training, calibration and held-out texts."""
    heldout_share: float = Field(0.1, gt=0, lt=0.5)
    """Share of the texts that are held out for the metrics."""
    calibrate_share: float = Field(0.1, gt=0, lt=0.5)
    """Share of the texts that are used for Platt scaling of margins to probabilities. Not for fastText."""
    folds: int = Field(0, ge=0, le=20)
    """Number of folds of a nested cross-validation, which replaces held-out and calibration texts: the model is then
    trained on all texts. 0 = no cross-validation. Use it for fewer than a thousand texts."""
    repeats: int = Field(10, ge=1, le=1000)
    """Number of repetitions of the cross-validation."""
    l2_choices: tuple[float, ...] = Field((1e-4, 1e-3, 1e-2, 1e-1), min_length=1)
    """Values of `l2` from which the cross-validation chooses. Each fold's value is chosen without that fold."""
    piece_chars: int = Field(5_000, ge=100)
    """Maximum length of an example [code points]. A longer text is split into several examples, at line ends or spaces
    if possible, so a book has more weight than a page. Default: about the length of a web page."""
    bits: int = Field(20, ge=8, le=28)
    """Base-2 logarithm of the number of hash buckets of n-grams; a linear model with 2^20 weights has 4 MiB."""
    ngrams: int = Field(2, ge=1, le=MAX_NGRAM)
    """Longest n-gram [words]."""
    l2: float = Field(1e-4, gt=0)
    """Coefficient of the L2 penalty that is added to the mean loss. Not for fastText."""
    dimensions: int = Field(16, ge=1)
    """Size of fastText's vectors; with 2^bits buckets the file has at least 4 x 2^bits x dimensions bytes."""
    epochs: int = Field(5, ge=1)
    """Number of fastText's passes over the texts. Default: fastText's own."""
    learning_rate: float = Field(0.5, gt=0)
    """Initial learning rate of fastText."""
    threads: int = Field(MIN_THREADS, ge=MIN_THREADS)
    """Number of fastText's threads; with fewer than eleven, fastText starts from uninitialized memory."""

    @model_validator(mode="after")
    def _used(self) -> "TrainClassifierConfig":
        names = ", ".join(sorted(self.model_fields_set.intersection(IGNORED[self.kind])))
        if names:
            raise ValueError(f"{names} would be ignored with kind = {self.kind!r}. Remove {names} from the recipe.")
        names = ", ".join(sorted(self.model_fields_set.intersection(self._unused())))
        if names:
            raise ValueError(f"{names} would be ignored with folds = {self.folds}. Remove {names} from the recipe.")
        if self.folds == 1 or min(self.l2_choices) <= 0:
            raise ValueError(
                f"expected folds = 0 or at least 2, and l2_choices above 0, got {self.folds} and {self.l2_choices}. "
                "Set train_classifier.folds and train_classifier.l2_choices."
            )
        if not self.labelled and not (self.positives.given and self.negatives.given):
            raise ValueError(
                "expected both positives and negatives, or labelled files, got neither. "
                "Set train_classifier.positives and train_classifier.negatives."
            )
        return self

    def settings(self) -> dict[str, Any]:
        """Return the settings that change the model, for its manifest. Settings that are not used are omitted."""
        ignored = (*IGNORED[self.kind], *self._unused(), *(() if self.folds else ("folds",)))
        settings = {name: value for name, value in self.content().items() if name not in ignored}
        return {**settings, "positives": self.positives.content(), "negatives": self.negatives.content()}

    def _unused(self) -> tuple[str, ...]:
        return DIVISION_ONLY if self.folds else CROSS_VALIDATION_ONLY


class LabeledExample(NamedTuple):
    """A training example: a text, or a span of a long text. `good` is True for the good class."""

    text: str
    good: bool


def train_classifier(
    config: TrainClassifierConfig, out: str, spark: Any = None, models: ModelsConfig | None = None
) -> dict[str, Any]:
    """Train and measure a classifier, write the model and its manifest to the folder `out`, and return the manifest.

    The model is `<name>.arrow` or, for fastText, `<name>.bin`. The manifest is `<name>.json`. With `models`, the model
    is also added to that model store. Raises ConfigError if files do not exist. Raises ContractError if training fails,
    or if the training, calibration or held-out texts lack a class.
    """
    clock = Clock()
    corpora = {GOOD: config.positives, BAD: config.negatives}
    gathered = gather_corpora(corpora, config.labelled, config.reading, config.seed, spark)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[LabeledExample]] = {}
    if config.folds:
        path, figures = train_by_folds(config, gathered, folder)
    else:
        parts = split_texts(gathered, config)
        path, figures = TRAINING[config.kind](config, parts, folder)
    content = {
        "kind": config.kind,
        "deterministic": config.kind != "fasttext",
        "features": None if config.kind == "fasttext" else FEATURES,
        "settings": config.settings(),
        "inputs": gathered.inputs,
        "texts": {name: count_texts(gathered, config, name) for name in (GOOD, BAD)},
        "pieces": {part: len(examples) for part, examples in parts.items()},
        "left_out": dict(sorted(gathered.left_out.items())),
        **figures,
    }
    return commit_model(path, content, clock, models)


def part_of(text: TrainingText, config: TrainClassifierConfig) -> str:
    """Return TRAIN, CALIBRATE or HELDOUT: the use of a text. It depends only on the text's hash and the settings."""
    if config.folds:
        return TRAIN
    fraction = shuffle_key(config.seed, b"part" + text.digest) / (1 << 63)
    if fraction < config.heldout_share:
        return HELDOUT
    is_calibration = config.kind != "fasttext" and fraction < config.heldout_share + config.calibrate_share
    return CALIBRATE if is_calibration else TRAIN


def count_texts(gathered: Gathered, config: TrainClassifierConfig, name: str) -> dict[str, int]:
    """Return how many texts of the class `name` are used for each of TRAIN, CALIBRATE and HELDOUT."""
    parts = [part_of(text, config) for text in gathered.texts[name]]
    return {part: parts.count(part) for part in SPLIT_PARTS}


def split_texts(gathered: Gathered, config: TrainClassifierConfig) -> dict[str, list[LabeledExample]]:
    """Split the texts into examples, and return the examples of each of TRAIN, CALIBRATE and HELDOUT.

    For fastText, CALIBRATE is empty. Raises ContractError if TRAIN or HELDOUT lacks a class. For other kinds, also
    raises ContractError if CALIBRATE lacks a class.
    """
    parts: dict[str, list[LabeledExample]] = {part: [] for part in SPLIT_PARTS}
    for name in (GOOD, BAD):
        for text in gathered.texts[name]:
            spans = [text.text] if config.kind == "signals" else split_spans(text.text, config.piece_chars)
            parts[part_of(text, config)] += [LabeledExample(span, name == GOOD) for span in spans]
    for part in (TRAIN, HELDOUT) if config.kind == "fasttext" else SPLIT_PARTS:
        good = sum(example.good for example in parts[part])
        if not 0 < good < len(parts[part]):
            raise ContractError(
                f"train_classifier: expected both classes in the {part} texts, got {good} good and "
                f"{len(parts[part]) - good} bad examples. Add texts of the missing class to "
                "train_classifier.positives or train_classifier.negatives."
            )
    return parts


def split_spans(text: str, size: int) -> Iterator[str]:
    """Yield the text in spans of at most `size` code points. Spans of whitespace alone are skipped.

    A span ends after a line end if possible, else after a space if possible.
    """
    start = 0
    while len(text) - start > size:
        end = start + size
        for separator in ("\n", " "):
            position = text.rfind(separator, start, end)
            if position > start:
                end = position + 1
                break
        if text[start:end].split():
            yield text[start:end]
        start = end
    if text[start:].split():
        yield text[start:]


def _train_linear(
    config: TrainClassifierConfig, parts: dict[str, list[LabeledExample]], folder: Path
) -> tuple[Path, dict[str, Any]]:
    vocabulary = new_vocabulary()
    examples = Examples(1 << config.bits, config.ngrams)
    for example in parts[TRAIN]:
        examples.add(word_keys_of(example.text, vocabulary), example.good)
    weights, fit = fit_weights(examples, config.l2)
    uncalibrated = LinearModel(weights, config.ngrams, 1.0, 0.0)
    margins = [uncalibrated.margin(word_keys_of(example.text, vocabulary)) for example in parts[CALIBRATE]]
    scale, offset = fit_platt(margins, [example.good for example in parts[CALIBRATE]])
    path = folder / f"{config.name}.arrow"
    save_linear(LinearModel(weights, config.ngrams, scale, offset), path)
    model = load_linear(str(path), "train_classifier")
    scores = [model.probability(word_keys_of(example.text, vocabulary)) for example in parts[HELDOUT]]
    return path, {"fit": _fit_figures(fit, scale, offset), HELDOUT: _heldout(scores, parts[HELDOUT])}


def _train_signals(
    config: TrainClassifierConfig, parts: dict[str, list[LabeledExample]], folder: Path
) -> tuple[Path, dict[str, Any]]:
    trainer = {part: SignalTrainer([(e.text, e.good) for e in examples]) for part, examples in parts.items()}
    train, rest = trainer[TRAIN], trainer[CALIBRATE]
    uncalibrated, fit = fit_signals(train.names, train.features, train.labels, config.l2)
    scale, offset = fit_platt(uncalibrated.margins(rest.features).tolist(), rest.labels.tolist())
    path = folder / f"{config.name}.arrow"
    save_signals(calibrated(uncalibrated, scale, offset), path)
    model = load_signals(str(path), "train_classifier")
    scores = [model.probability(features) for features in trainer[HELDOUT].features]
    return path, {"fit": _fit_figures(fit, scale, offset), HELDOUT: _heldout(scores, parts[HELDOUT])}


def _fit_figures(fit: Minimum, scale: float, offset: float) -> dict[str, Any]:
    return {"steps": fit.steps, "loss": fit.value, "gradient": fit.gradient, "scale": scale, "offset": offset}


def _train_fasttext(
    config: TrainClassifierConfig, parts: dict[str, list[LabeledExample]], folder: Path
) -> tuple[Path, dict[str, Any]]:
    path = folder / f"{config.name}.bin"
    settings = {"lr": config.learning_rate, "epoch": config.epochs, "dim": config.dimensions, "thread": config.threads}
    with tempfile.TemporaryDirectory() as scratch:
        examples = Path(scratch) / "examples.txt"
        with examples.open("wb") as stream:
            for example in parts[TRAIN]:
                write_example(stream, example.text, example.good)
        train_fasttext(examples, path, {**settings, "bucket": 1 << config.bits, "wordNgrams": config.ngrams})
    score = load_fasttext(str(path), GOOD_LABEL, "train_classifier")
    return path, {HELDOUT: _heldout([score(example.text) for example in parts[HELDOUT]], parts[HELDOUT])}


def _heldout(scores: list[float], examples: list[LabeledExample]) -> dict[str, Any]:
    # rounded to float32, as the table stores scores
    rounded = np.array(scores, np.float32).astype(np.float64)
    return heldout_figures(rounded, np.array([example.good for example in examples], bool))


TRAINING = {"linear": _train_linear, "signals": _train_signals, "fasttext": _train_fasttext}


# Training by folds: the model is trained on all texts, and measured by models that were trained on a part of them.


class FoldTrainer(Protocol):
    """Trains models of one kind on some of its texts, which are given by number."""

    labels: Labels

    def margins(self, train: Any, others: Any, l2: float) -> Floats:
        """Return the margins of other texts by a model that is trained on the texts `train`."""

    def write(self, path: Path, l2: float, calibration: tuple[float, float]) -> Minimum:
        """Train a model on all texts and write it with the scale and offset of `calibration`."""


class NgramTrainer:
    """Trains linear models over n-grams. A long text is split for training and measured as a whole."""

    def __init__(self, config: TrainClassifierConfig, texts: list[tuple[str, bool]]):
        vocabulary = new_vocabulary()
        self._config = config
        self._spans = [
            [word_keys_of(span, vocabulary) for span in split_spans(text, config.piece_chars)] for text, _ in texts
        ]
        self._keys = [word_keys_of(text, vocabulary) for text, _ in texts]
        self.labels = np.array([good for _, good in texts], bool)

    def margins(self, train: Any, others: Any, l2: float) -> Floats:
        """Return the margins of other texts by a model that is trained on the texts `train`."""
        weights, _ = self._fit(train, l2)
        model = LinearModel(weights, self._config.ngrams, 1.0, 0.0)
        return np.array([model.margin(self._keys[text]) for text in others])

    def write(self, path: Path, l2: float, calibration: tuple[float, float]) -> Minimum:
        """Train a model on all texts and write it with the scale and offset of `calibration`."""
        weights, fit = self._fit(np.arange(len(self.labels)), l2)
        save_linear(LinearModel(weights, self._config.ngrams, *calibration), path)
        return fit

    def _fit(self, train: Any, l2: float) -> tuple[npt.NDArray[np.float32], Minimum]:
        examples = Examples(1 << self._config.bits, self._config.ngrams)
        for text in train:
            for keys in self._spans[text]:
                examples.add(keys, bool(self.labels[text]))
        return fit_weights(examples, l2)


class SignalTrainer:
    """Trains models over the quality signals of its texts."""

    def __init__(self, texts: list[tuple[str, bool]]):
        meter = SignalMeter()
        self.names = meter.names
        self.features = np.array([meter.features(text) for text, _ in texts])
        self.labels = np.array([good for _, good in texts], bool)

    def margins(self, train: Any, others: Any, l2: float) -> Floats:
        """Return the margins of other texts by a model that is trained on the texts `train`."""
        return self._fit(train, l2)[0].margins(self.features[others])

    def write(self, path: Path, l2: float, calibration: tuple[float, float]) -> Minimum:
        """Train a model on all texts and write it with the scale and offset of `calibration`."""
        model, fit = self._fit(np.arange(len(self.labels)), l2)
        save_signals(calibrated(model, *calibration), path)
        return fit

    def _fit(self, train: Any, l2: float) -> tuple[SignalModel, Minimum]:
        return fit_signals(self.names, self.features[train], self.labels[train], l2)


def train_by_folds(config: TrainClassifierConfig, gathered: Gathered, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Train a model on all texts, and return its file and the metrics of a nested cross-validation.

    Raises ContractError if a class has fewer texts than 2 x folds, so that an inner fold could lack it.
    """
    texts = [(text, name == GOOD) for name in (GOOD, BAD) for text in gathered.texts[name]]
    for name in (GOOD, BAD):
        if len(gathered.texts[name]) < 2 * config.folds:
            raise ContractError(
                f"train_classifier.folds: expected at least {2 * config.folds} {name} texts for {config.folds} folds, "
                f"got {len(gathered.texts[name])}. Add texts or decrease train_classifier.folds."
            )
    plain = [(text.text, good) for text, good in texts]
    trainer: FoldTrainer = SignalTrainer(plain) if config.kind == "signals" else NgramTrainer(config, plain)
    folds = Folds([text.digest for text, _ in texts], trainer.labels, config.folds, config.seed)
    measured = cross_validate(trainer.margins, folds, config.l2_choices, config.repeats)
    choice = choose(trainer.margins, folds, np.arange(len(texts)), config.l2_choices, 0)
    path = folder / f"{config.name}.arrow"
    fit = trainer.write(path, choice.l2, (choice.scale, choice.offset))
    chosen = {str(l2): measured.chosen[l2] for l2 in config.l2_choices}
    figures = cross_validation_figures(measured.probabilities, trainer.labels)
    return path, {
        "fit": {"l2": choice.l2, **_fit_figures(fit, choice.scale, choice.offset)},
        "cross_validation": {"l2_chosen": chosen, **figures},
    }


def cross_validation_figures(probabilities: Floats, labels: Labels) -> dict[str, Any]:
    """Return the metrics of probabilities (repetitions, texts) of texts with these labels (texts,).

    Kappa and AUC are means over the repetitions; kappa is that of the verdict at 0.5. Their intervals are 95 %
    bootstrap intervals over texts. `limits` has, for shares of good texts dropped, the score and the share of bad texts
    below it, over all repetitions.
    """
    rounded = probabilities.astype(np.float32).astype(np.float64)
    pooled, pooled_labels = rounded.ravel(), np.tile(labels, len(rounded))

    def mean_kappa(texts: Any) -> float | None:
        values = [kappa(row[texts] >= 0.5, labels[texts]) for row in rounded]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    def mean_auc(texts: Any) -> float | None:
        if not 0 < labels[texts].sum() < len(texts):
            return None
        return float(np.mean([auc(row[texts], labels[texts]) for row in rounded]))

    every = np.arange(len(labels))
    limits = {}
    for share in (0.02, 0.05, 0.1):
        limit = float(np.quantile(pooled[pooled_labels], share))
        limits[str(share)] = {"score": limit, "bad_dropped": float((pooled[~pooled_labels] < limit).mean())}
    return {
        "good": int(labels.sum()),
        "bad": int((~labels).sum()),
        "repeats": len(rounded),
        "kappa": {"mean": mean_kappa(every), "interval": bootstrap_interval(mean_kappa, len(labels))},
        "auc": {"mean": mean_auc(every), "interval": bootstrap_interval(mean_auc, len(labels), 200)},
        "limits": limits,
        **calibration(pooled, pooled_labels),
    }


def summary(manifest: dict[str, Any]) -> str:
    """Return a summary of a trained classifier and its metrics, for the terminal."""
    content = manifest["content"]
    lines = [
        f"model {content['model']['file']}  sha256 {content['model']['sha256']}  {content['model']['bytes']:,} bytes"
    ]
    if "cross_validation" in content:
        figures = content["cross_validation"]
        lines.append(
            f"cross-validation: {figures['good']} good and {figures['bad']} bad texts, {figures['repeats']} times"
        )
        for name in ("kappa", "auc"):
            mean, (low, high) = figures[name]["mean"], figures[name]["interval"]
            lines.append(f"{name} {mean:.3f}, 95 % interval {low:.3f} to {high:.3f}")
        for share, row in figures["limits"].items():
            dropped = f"{float(share):.0%} of the good and {row['bad_dropped']:.0%} of the bad texts"
            lines.append(f"score {row['score']:.3f}: drops {dropped}")
        return "\n".join(lines)
    heldout = content[HELDOUT]
    half = heldout["thresholds"]["0.5"]
    lines += [
        f"held-out: {heldout['good']} good and {heldout['bad']} bad examples  AUC {heldout['auc']:.4f}  "
        f"Brier {heldout['brier']:.4f}  calibration error {heldout['expected_calibration_error']:.4f}",
        "at 0.5: "
        + "  ".join(f"{name} {'-' if value is None else format(value, '.3f')}" for name, value in half.items()),
    ]
    return "\n".join(lines)
