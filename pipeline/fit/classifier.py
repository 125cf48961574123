"""`penstock train-classifier`: train a quality classifier on examples of two classes, and measure it on held-out texts.

Only the hash of a text determines whether it is used for training, calibration or held-out metrics. A manifest is
written with the model: the digests of the inputs, the settings, and the held-out metrics.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from pipeline.classifier.fasttext import GOOD_LABEL, MIN_THREADS, load_fasttext, train_fasttext, write_example
from pipeline.classifier.linear import (
    FEATURES,
    MAX_NGRAM,
    Examples,
    LinearModel,
    fit_platt,
    fit_weights,
    load_linear,
    new_vocabulary,
    save_linear,
    word_keys_of,
)
from pipeline.fit.corpus import BAD, GOOD, Clock, Corpus, Gathered, Reading, TrainingText, commit_model, gather_corpora
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
LINEAR_ONLY = ("l2", "calibrate_share")
FASTTEXT_ONLY = ("dimensions", "epochs", "learning_rate", "threads")


class TrainClassifierConfig(Section):
    """The section `[train_classifier]`: the corpora, their division into three parts, and the training settings."""

    name: str = Field("quality", pattern=NAME)
    """Name of the model: its file name, and its name in the model store."""
    kind: Literal["linear", "fasttext"] = "linear"
    """Kind of the model. `linear` training is deterministic; `fasttext` training gives another file each time."""
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
    """Share of the texts that are used for Platt scaling of margins to probabilities. Linear only."""
    piece_chars: int = Field(5_000, ge=100)
    """Maximum length of an example [code points]. A longer text is split into several examples, at line ends or spaces
    if possible, so a book has more weight than a page. Default: about the length of a web page."""
    bits: int = Field(20, ge=8, le=28)
    """Base-2 logarithm of the number of hash buckets of n-grams; a linear model with 2^20 weights has 4 MiB."""
    ngrams: int = Field(2, ge=1, le=MAX_NGRAM)
    """Longest n-gram [words]."""
    l2: float = Field(1e-4, gt=0)
    """Coefficient of the L2 penalty that is added to the mean loss. Linear only."""
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
        ignored = FASTTEXT_ONLY if self.kind == "linear" else LINEAR_ONLY
        names = ", ".join(sorted(self.model_fields_set.intersection(ignored)))
        if names:
            raise ValueError(f"{names} would be ignored with kind = {self.kind!r}. Remove {names} from the recipe.")
        if not self.labelled and not (self.positives.given and self.negatives.given):
            raise ValueError(
                "expected both positives and negatives, or labelled files, got neither. "
                "Set train_classifier.positives and train_classifier.negatives."
            )
        return self

    def settings(self) -> dict[str, Any]:
        """Return the settings that change the model, for its manifest. Settings that `kind` ignores are omitted."""
        ignored = FASTTEXT_ONLY if self.kind == "linear" else LINEAR_ONLY
        settings = {name: value for name, value in self.content().items() if name not in ignored}
        return {**settings, "positives": self.positives.content(), "negatives": self.negatives.content()}


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
    parts = split_texts(gathered, config)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    path, figures = (_train_linear if config.kind == "linear" else _train_fasttext)(config, parts, folder)
    content = {
        "kind": config.kind,
        "deterministic": config.kind == "linear",
        "features": FEATURES if config.kind == "linear" else None,
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
    fraction = shuffle_key(config.seed, b"part" + text.digest) / (1 << 63)
    if fraction < config.heldout_share:
        return HELDOUT
    is_calibration = config.kind == "linear" and fraction < config.heldout_share + config.calibrate_share
    return CALIBRATE if is_calibration else TRAIN


def count_texts(gathered: Gathered, config: TrainClassifierConfig, name: str) -> dict[str, int]:
    """Return how many texts of the class `name` are used for each of TRAIN, CALIBRATE and HELDOUT."""
    parts = [part_of(text, config) for text in gathered.texts[name]]
    return {part: parts.count(part) for part in SPLIT_PARTS}


def split_texts(gathered: Gathered, config: TrainClassifierConfig) -> dict[str, list[LabeledExample]]:
    """Split the texts into examples, and return the examples of each of TRAIN, CALIBRATE and HELDOUT.

    For fastText, CALIBRATE is empty. Raises ContractError if TRAIN or HELDOUT lacks a class. For a linear model, also
    raises ContractError if CALIBRATE lacks a class.
    """
    parts: dict[str, list[LabeledExample]] = {part: [] for part in SPLIT_PARTS}
    for name in (GOOD, BAD):
        for text in gathered.texts[name]:
            spans = split_spans(text.text, config.piece_chars)
            parts[part_of(text, config)] += [LabeledExample(span, name == GOOD) for span in spans]
    for part in SPLIT_PARTS if config.kind == "linear" else (TRAIN, HELDOUT):
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
    return path, {
        "fit": {"steps": fit.steps, "loss": fit.value, "gradient": fit.gradient, "scale": scale, "offset": offset},
        HELDOUT: _heldout(scores, parts[HELDOUT]),
    }


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


def summary(manifest: dict[str, Any]) -> str:
    """Return a summary of a trained classifier and its held-out metrics, for the terminal."""
    content = manifest["content"]
    heldout = content[HELDOUT]
    half = heldout["thresholds"]["0.5"]
    lines = [
        f"model {content['model']['file']}  sha256 {content['model']['sha256']}  {content['model']['bytes']:,} bytes",
        f"held-out: {heldout['good']} good and {heldout['bad']} bad examples  AUC {heldout['auc']:.4f}  "
        f"Brier {heldout['brier']:.4f}  calibration error {heldout['expected_calibration_error']:.4f}",
        "at 0.5: "
        + "  ".join(f"{name} {'-' if value is None else format(value, '.3f')}" for name, value in half.items()),
    ]
    return "\n".join(lines)
