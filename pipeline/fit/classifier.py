"""`penstock train-classifier`: a quality classifier from examples of two classes, measured on texts it has not seen.

Each text goes to training, calibration or the held-out part by its hash alone. Beside the model lies a manifest: what
it learned from (by digest), the settings, and the held-out figures.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
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
from pipeline.classifier.metrics import heldout_figures
from pipeline.fit.corpus import BAD, GOOD, Clock, Corpus, Gathered, Reading, TrainingText, commit_model, gather_corpora
from pipeline.models import ModelsConfig
from schemas.config import Section, location
from schemas.errors import ContractError
from schemas.ids import shuffle_key

TRAIN, CALIBRATE, HELDOUT = "train", "calibrate", "heldout"
SPLIT_PARTS = (TRAIN, CALIBRATE, HELDOUT)
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
LINEAR_ONLY = ("l2", "calibrate_share")
FASTTEXT_ONLY = ("dimensions", "epochs", "learning_rate", "threads")


class TrainClassifierConfig(Section):
    """The section `[train_classifier]`: what is learned from, and how."""

    name: str = Field("quality", pattern=NAME)
    """Name of the model, of its file and in the model store."""
    kind: Literal["linear", "fasttext"] = "linear"
    """`linear`: the same bytes at every run. `fasttext`: another file at every run; it enters runs by its digest."""
    positives: Corpus = Corpus.model_validate({})
    """Texts of the good class, such as Wikipedia or books."""
    negatives: Corpus = Corpus.model_validate({})
    """Texts of the bad class, such as a random crawl."""
    labelled: tuple[str, ...] = location(())
    """JSON lines or Parquet files whose label tells the class."""
    reading: Reading = Reading.model_validate({})
    """Which fields of the files are read."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of the samples and of the split."""
    heldout_share: float = Field(0.1, gt=0, lt=0.5)
    """Share of the texts that only the figures are taken on."""
    calibrate_share: float = Field(0.1, gt=0, lt=0.5)
    """Share of the texts that turn margins into probabilities. Linear only."""
    piece_chars: int = Field(5_000, ge=100)
    """Longer texts are cut into pieces of at most this, at a line end or space where there is one, so that a book
    counts for its length and not as one page [code points]. Default: about the length of a web page."""
    bits: int = Field(20, ge=8, le=28)
    """Logarithm of the number of buckets n-grams are hashed to: 2^20 weights are 4 MiB."""
    ngrams: int = Field(2, ge=1, le=MAX_NGRAM)
    """Longest n-gram [words]."""
    l2: float = Field(1e-4, gt=0)
    """Weight of the squared weights beside the mean loss. Linear only."""
    dimensions: int = Field(16, ge=1)
    """Length of fastText's vectors; with 2^bits buckets the file has 4 x 2^bits x dimensions bytes and more."""
    epochs: int = Field(5, ge=1)
    """fastText's passes over the texts; its own default."""
    learning_rate: float = Field(0.5, gt=0)
    """fastText's first learning rate."""
    threads: int = Field(MIN_THREADS, ge=MIN_THREADS)
    """fastText's threads: below eleven it trains on uninitialised memory."""

    @model_validator(mode="after")
    def _used(self) -> "TrainClassifierConfig":
        ignored = FASTTEXT_ONLY if self.kind == "linear" else LINEAR_ONLY
        wrong = sorted(self.model_fields_set.intersection(ignored))
        if wrong:
            raise ValueError(
                f"kind {self.kind!r} would ignore {', '.join(wrong)}; leave them out or set the other kind"
            )
        if not self.labelled and not (self.positives.given and self.negatives.given):
            raise ValueError("expected positives and negatives, or labelled files; found neither pair. Name them.")
        return self

    def settings(self) -> dict[str, Any]:
        """The content settings, those of the corpora included and those of the other kind left out."""
        ignored = FASTTEXT_ONLY if self.kind == "linear" else LINEAR_ONLY
        own = {name: value for name, value in self.content().items() if name not in ignored}
        return {**own, "positives": self.positives.content(), "negatives": self.negatives.content()}


class LabeledExample(NamedTuple):
    """One example: a text, or a stretch of a long one."""

    text: str
    good: bool


def train_classifier(
    config: TrainClassifierConfig, out: str, spark: Any = None, models: ModelsConfig | None = None
) -> dict[str, Any]:
    """Train, measure and write `<out>/<name>.arrow` or `.bin` and `<out>/<name>.json`; returns the manifest.

    With `models` the model is put into that store under its name. Raises ConfigError, ContractError.
    """
    clock = Clock()
    found = gather_corpora(
        {GOOD: config.positives, BAD: config.negatives}, config.labelled, config.reading, config.seed, spark
    )
    parts = split_texts(found, config)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    path, figures = (_train_linear if config.kind == "linear" else _train_fasttext)(config, parts, folder)
    content = {
        "kind": config.kind,
        "deterministic": config.kind == "linear",
        "features": FEATURES if config.kind == "linear" else None,
        "settings": config.settings(),
        "inputs": found.inputs,
        "texts": {name: count_texts(found, config, name) for name in (GOOD, BAD)},
        "pieces": {part: len(pieces) for part, pieces in parts.items()},
        "left_out": dict(sorted(found.left_out.items())),
        **figures,
    }
    return commit_model(path, content, clock, models)


def part_of(text: TrainingText, config: TrainClassifierConfig) -> str:
    """The part a text belongs to, by its hash alone."""
    place = shuffle_key(config.seed, b"part" + text.digest) / (1 << 63)
    if place < config.heldout_share:
        return HELDOUT
    calibrates = config.kind == "linear" and place < config.heldout_share + config.calibrate_share
    return CALIBRATE if calibrates else TRAIN


def count_texts(found: Gathered, config: TrainClassifierConfig, name: str) -> dict[str, int]:
    """Number of texts of a class in each part."""
    parts = [part_of(text, config) for text in found.texts[name]]
    return {part: parts.count(part) for part in SPLIT_PARTS}


def split_texts(found: Gathered, config: TrainClassifierConfig) -> dict[str, list[LabeledExample]]:
    """The pieces of each part. Raises ContractError if a part that is needed lacks a class."""
    parts: dict[str, list[LabeledExample]] = {part: [] for part in SPLIT_PARTS}
    for name in (GOOD, BAD):
        for text in found.texts[name]:
            parts[part_of(text, config)] += [
                LabeledExample(p, name == GOOD) for p in split_spans(text.text, config.piece_chars)
            ]
    for part in SPLIT_PARTS if config.kind == "linear" else (TRAIN, HELDOUT):
        good = sum(piece.good for piece in parts[part])
        if not 0 < good < len(parts[part]):
            raise ContractError(
                f"train_classifier: expected both classes in the part {part}, got {good} good and "
                f"{len(parts[part]) - good} bad pieces. Give more texts, larger shares or another seed."
            )
    return parts


def split_spans(text: str, size: int) -> Iterator[str]:
    """The text cut into pieces of at most `size` code points, at the last line end or else space in reach."""
    start = 0
    while len(text) - start > size:
        end = start + size
        for gap in ("\n", " "):
            found = text.rfind(gap, start, end)
            if found > start:
                end = found + 1
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
    for piece in parts[TRAIN]:
        examples.add(word_keys_of(piece.text, vocabulary), piece.good)
    weights, fit = fit_weights(examples, config.l2)
    plain = LinearModel(weights, config.ngrams, 1.0, 0.0)
    calibrating = parts[CALIBRATE]
    margins = [plain.margin(word_keys_of(piece.text, vocabulary)) for piece in calibrating]
    scale, offset = fit_platt(margins, [piece.good for piece in calibrating])
    path = folder / f"{config.name}.arrow"
    save_linear(LinearModel(weights, config.ngrams, scale, offset), path)
    model = load_linear(str(path), "train_classifier")
    scores = [model.probability(word_keys_of(piece.text, vocabulary)) for piece in parts[HELDOUT]]
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
            for piece in parts[TRAIN]:
                write_example(stream, piece.text, piece.good)
        train_fasttext(examples, path, {**settings, "bucket": 1 << config.bits, "wordNgrams": config.ngrams})
    score = load_fasttext(str(path), GOOD_LABEL, "train_classifier")
    return path, {HELDOUT: _heldout([score(piece.text) for piece in parts[HELDOUT]], parts[HELDOUT])}


def _heldout(scores: list[float], pieces: list[LabeledExample]) -> dict[str, Any]:
    # as the table stores them
    rounded = np.array(scores, np.float32).astype(np.float64)
    return heldout_figures(rounded, np.array([piece.good for piece in pieces], bool))


def summary(manifest: dict[str, Any]) -> str:
    """What a user wants to know of a trained classifier, in a few lines."""
    content = manifest["content"]
    heldout = content[HELDOUT]
    half = heldout["thresholds"]["0.5"]
    lines = [
        f"model {content['model']['file']}  sha256 {content['model']['sha256']}  {content['model']['bytes']:,} bytes",
        f"held out: {heldout['good']} good and {heldout['bad']} bad pieces  AUC {heldout['auc']:.4f}  "
        f"Brier {heldout['brier']:.4f}  calibration error {heldout['expected_calibration_error']:.4f}",
        "at 0.5: "
        + "  ".join(f"{name} {'-' if value is None else format(value, '.3f')}" for name, value in half.items()),
    ]
    return "\n".join(lines)
