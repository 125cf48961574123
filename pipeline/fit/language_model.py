"""`penstock train-lm`: trains a SentencePiece model and an n-gram model on the clean text of a run, and compiles it.

Besides the model `X.lm` it writes the ARPA file `X.arpa`, which other tools read, and `X.json` with the settings, the
inputs and figures.
"""

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field, model_validator

from pipeline.engine.spark import dataframe_from_tasks, ship_models, worker_path
from pipeline.fit.corpus import RunSampleTask, sample_run
from pipeline.perplexity.compile import SET_PIECES, compile_lm
from pipeline.perplexity.kneser_ney.config import TrainLmConfig
from pipeline.perplexity.kneser_ney.read_text import find_ranges
from pipeline.perplexity.kneser_ney.train import train_lm, train_lm_on_frame
from pipeline.perplexity.model import load_splitter, normalize
from schemas.config import Section, location
from schemas.errors import ConfigError
from schemas.ids import file_sha256
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.text import format_duration

THREADS = 4
"""Number of SentencePiece threads; it is fixed, because the trained model depends on it."""
SEED = 11
"""Seed of the sample that the SentencePiece model is trained on."""
LINE_BYTES = 1 << 16
"""Maximum length of a line that SentencePiece trains on [bytes]."""
LINES = pa.schema([pa.field("sentences", pa.string())])


class LmConfig(Section):
    """The section `[lm]`: the training text of a language model. If `run` is not set, `train_lm.input` is the text."""

    run: str | None = location(None)
    """Run folder whose clean documents of one language are the training text; each line is a sentence."""
    language: str = "en"
    """Language of the documents, as the code in the column `language`."""
    sources: tuple[str, ...] = ()
    """Sources of the run whose documents are used; empty = all."""
    normalisation: Literal["ccnet", "none"] = "ccnet"
    """Text normalization: "ccnet" (lower case, no accents, digits as 0; CCNet, arXiv 1911.00359) or "none"."""
    pieces: str | None = location(None)
    """Path of a SentencePiece model that splits the text; None trains one on a sample of the text."""
    num_pieces: int = Field(65_536, ge=100)
    """Vocabulary size of the SentencePiece model that is trained. Default: CCNet's."""
    coverage: float = Field(0.9995, gt=0.9, le=1)
    """Share of the text's characters that the SentencePiece vocabulary must cover. Default: CCNet's."""
    sample_documents: int = Field(100_000, ge=1)
    """Number of documents that the SentencePiece model is trained on: those with the lowest hashes."""

    @model_validator(mode="after")
    def _used(self) -> "LmConfig":
        if self.run is None and (ignored := sorted(self.model_fields_set - {"run", "language"})):
            raise ValueError(
                f"{', '.join(ignored)} would be ignored without lm.run, because train_lm.input is already split into "
                "words. Set lm.run, or remove these settings from [lm]."
            )
        if self.pieces and (ignored := sorted(self.model_fields_set & {"num_pieces", "coverage", "sample_documents"})):
            names = ", ".join(ignored)
            raise ValueError(f"{names} would be ignored, because lm.pieces is set. Remove {names} from [lm].")
        return self


@dataclass(frozen=True)
class LinesTask:
    """A part of a run's table `clean`, and the SentencePiece model and normalization to apply to its text."""

    sample: RunSampleTask
    pieces: str
    normalisation: str


def make_language_model(spark: Any, config: LmConfig, training: TrainLmConfig, out: str) -> dict[str, Any]:
    """Train a language model and write it to the local path `out`, which ends with .lm.

    The manifest has the same path with the suffix .json. Return the manifest, with the wall time of each phase [s]
    added as `seconds`. Equal text and settings give equal bytes. Raises ConfigError if a setting is invalid.
    """
    target = checked_target(config, training, out)
    arpa, spm = target.with_suffix(".arpa"), target.with_suffix(".pieces")
    if config.run is None:
        report, pieces = train_lm(spark, training, str(arpa)), None
    else:
        pieces = config.pieces or write_pieces(spark, config, spm)
        ship_models(spark, [pieces])
        report = train_lm_on_frame(
            spark, sentence_frame(spark, config, pieces), inputs_of(config, pieces), training, str(arpa)
        )
    normalisation = config.normalisation if pieces else "none"
    header = compile_lm(str(arpa), out, pieces, config.language, normalisation)
    manifest = {
        "settings": {"lm": config.content(), "train_lm": training.content()},
        "model": {"sha256": file_sha256(target), "bytes": target.stat().st_size, "language": header.language},
        "ngrams": list(header.counts),
        "arpa": {name: value for name, value in asdict(report).items() if name not in ("arpa", "seconds")},
        "pieces": file_sha256(Path(pieces)) if pieces else None,
    }
    target.with_suffix(".json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return manifest | {"seconds": report.seconds}


def checked_target(config: LmConfig, training: TrainLmConfig, out: str) -> Path:
    """Return the path `out` of the model to write, after checking the path and the settings.

    Raises ConfigError if `out` is not a `.lm` path in an existing folder. Raises ConfigError if both lm.run and
    train_lm.input are set, or neither.
    """
    target = Path(out)
    if target.suffix != ".lm" or not target.absolute().parent.is_dir():
        raise ConfigError(
            f"train-lm --out: expected a path that ends with .lm, in an existing folder, got {out!r}. Correct --out."
        )
    if (config.run is None) == (not training.input):
        got, fix = ("both", "Remove train_lm.input") if training.input else ("neither", "Set lm.run")
        raise ConfigError(f"train-lm: expected either lm.run or train_lm.input, got {got}. {fix}.")
    if training.input:
        find_ranges(training.input)
    if config.run is not None:
        open_table(Store(config.run), "clean")
    if config.pieces is not None:
        load_splitter(_read(config.pieces), config.pieces, SET_PIECES)
    return target


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"lm.pieces: expected a SentencePiece model, got a file that cannot be read ({error}). {SET_PIECES}"
        ) from error


def inputs_of(config: LmConfig, pieces: str) -> dict[str, str]:
    """Return the digests of the run's table `clean` and of the SentencePiece model, as `clean` and `pieces`."""
    _, manifest = open_table(Store(config.run or ""), "clean")
    return {"clean": manifest.digest, "pieces": file_sha256(Path(pieces))}


def write_pieces(spark: Any, config: LmConfig, target: Path) -> str:
    """Train a SentencePiece model on a sample of the run's documents, write it to `target` and return this path."""
    selection = config.sources, (config.language,), SEED
    sample = sample_run(spark, config.run or "", selection, config.sample_documents)
    target.write_bytes(train_pieces((text for _, text in sample.texts), config))
    return str(target)


def train_pieces(texts: Iterable[str], config: LmConfig) -> bytes:
    """Train a unigram SentencePiece model and return its bytes.

    Raises ConfigError if the texts do not suffice for a vocabulary of lm.num_pieces pieces.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for text in texts for line in sentences_of(text, config.normalisation)),
            model_writer=model,
            model_type="unigram",
            vocab_size=config.num_pieces,
            character_coverage=config.coverage,
            normalization_rule_name="identity",
            max_sentence_length=LINE_BYTES,
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"lm.num_pieces: expected {config.num_pieces} pieces from the sample, got an error of SentencePiece: "
            f"{str(error).strip()}. "
            "Lower lm.num_pieces."
        ) from error
    return model.getvalue()


def sentences_of(text: str, normalisation: str) -> list[str]:
    """Return the lines of a text after normalization, without surrounding whitespace and without blank lines."""
    normalized = normalize(text) if normalisation == "ccnet" else text
    return [line for line in map(str.strip, normalized.split("\n")) if line]


def sentence_frame(spark: Any, config: LmConfig, pieces: str) -> Any:
    """Return a DataFrame with the column `sentences`: the run's sentences, as SentencePiece pieces joined by spaces."""
    folder, manifest = open_table(Store(config.run or ""), "clean")
    tasks = [
        LinesTask(RunSampleTask(folder, path, config.sources, (config.language,), SEED), pieces, config.normalisation)
        for path in manifest.paths_of()
    ]
    return dataframe_from_tasks(spark, sentences_of_part, tasks, "sentences string")


def sentences_of_part(task: LinesTask) -> Iterator[pa.RecordBatch]:
    """Yield the sentences of a part of `clean`, each as SentencePiece pieces joined by spaces."""
    path = worker_path(task.pieces)
    cut = load_splitter(Path(path).read_bytes(), path, SET_PIECES)
    for batch in task.sample.batches(["text"]):
        texts = batch.column("text").to_pylist()
        cuts = cut([line for text in texts for line in sentences_of(text, task.normalisation)])
        yield pa.RecordBatch.from_arrays(
            [pa.array([" ".join(words) for words in cuts if words], pa.string())], schema=LINES
        )


def describe_model(manifest: dict[str, Any]) -> str:
    """Return a summary of a trained model, for the terminal."""
    counts = ", ".join(f"{number:,} {order}-grams" for order, number in enumerate(manifest["ngrams"], 1))
    seconds = ", ".join(f"{name} {format_duration(value)}" for name, value in manifest["seconds"].items())
    return f"{manifest['model']['sha256'][:12]}  {manifest['model']['bytes']:,} bytes: {counts}\n{seconds}"
