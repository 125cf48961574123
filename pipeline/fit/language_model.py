"""The job that makes a language model: clean text of a run, its pieces, the n-grams counted on Spark, one model file.

Beside the model `X.lm` it leaves the ARPA file `X.arpa`, which other tools read, and `X.json`: what it was made of.
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
from pipeline.perplexity.compile import compile_lm
from pipeline.perplexity.kneser_ney.config import TrainLmConfig
from pipeline.perplexity.kneser_ney.read_text import find_ranges
from pipeline.perplexity.kneser_ney.train import train_lm, train_lm_on_frame
from pipeline.perplexity.model import load_splitter, normalize
from schemas.config import Section, location
from schemas.errors import ConfigError
from schemas.ids import file_sha256
from schemas.manifest import open_table
from schemas.storage import Store

THREADS = 4
"""Fixed, because the pieces that SentencePiece finds change with it."""
SEED = 11
LINE_BYTES = 1 << 16
LINES = pa.schema([pa.field("sentences", pa.string())])


class LmConfig(Section):
    """The section `[lm]`: what a language model is trained on. Without a run, `train_lm.input` is taken as it is."""

    run: str | None = location(None)
    """Run folder whose clean documents of one language are the text, each line a sentence."""
    language: str = "en"
    """That language, by the code of the language model that labelled the documents."""
    sources: tuple[str, ...] = ()
    """Sources of the run; empty: all."""
    normalisation: Literal["ccnet", "none"] = "ccnet"
    """Lower case without accents, digits as 0 (CCNet, arXiv 1911.00359), or the text as it is."""
    pieces: str | None = location(None)
    """Path of a SentencePiece model that cuts the text; None: one is trained on a sample."""
    num_pieces: int = Field(65_536, ge=100)
    """Pieces of a model that is trained here. CCNet's."""
    coverage: float = Field(0.9995, gt=0.9, le=1)
    """Share of all characters that get a piece of their own. CCNet's."""
    sample_documents: int = Field(100_000, ge=1)
    """Documents that the pieces are trained on: those with the lowest hashes."""

    @model_validator(mode="after")
    def _used(self) -> "LmConfig":
        if self.run is None and (ignored := sorted(self.model_fields_set - {"run", "language"})):
            raise ValueError(f"{', '.join(ignored)} would be ignored without a run: train_lm.input is words already")
        if self.pieces and (ignored := sorted(self.model_fields_set & {"num_pieces", "coverage", "sample_documents"})):
            raise ValueError(f"{', '.join(ignored)} would be ignored: pieces are given")
        return self


@dataclass(frozen=True)
class LinesTask:
    """One part of a run's clean text, and what cuts it."""

    sample: RunSampleTask
    pieces: str
    normalisation: str


def make_language_model(spark: Any, config: LmConfig, training: TrainLmConfig, out: str) -> dict[str, Any]:
    """Train the model file `out` (`….lm`, a local path) and return what it is. Raises ConfigError before Spark works.

    Equal text and settings give equal bytes.
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
    made = {
        "settings": {"lm": config.content(), "train_lm": training.content()},
        "model": {"sha256": file_sha256(target), "bytes": target.stat().st_size, "language": header.language},
        "ngrams": list(header.counts),
        "arpa": {name: value for name, value in asdict(report).items() if name not in ("arpa", "seconds")},
        "pieces": file_sha256(Path(pieces)) if pieces else None,
    }
    target.with_suffix(".json").write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return made | {"seconds": report.seconds}


def checked_target(config: LmConfig, training: TrainLmConfig, out: str) -> Path:
    """The place of the model. Raises ConfigError if it cannot be one, or if the settings name no text or two."""
    target = Path(out)
    if target.suffix != ".lm" or not target.absolute().parent.is_dir():
        raise ConfigError(f"train-lm --out: expected a path ….lm in a folder that exists, got {out!r}")
    if (config.run is None) == (not training.input):
        found = "both" if training.input else "neither"
        raise ConfigError(f"train-lm: expected lm.run or train_lm.input, got {found}. Set one.")
    if training.input:
        find_ranges(training.input)
    if config.run is not None:
        open_table(Store(config.run), "clean")
    if config.pieces is not None:
        load_splitter(_read(config.pieces), config.pieces)
    return target


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"lm.pieces: expected a SentencePiece model, got {error}. Give its path.") from error


def inputs_of(config: LmConfig, pieces: str) -> dict[str, str]:
    """What the sentences were made of, by name and digest."""
    _, manifest = open_table(Store(config.run or ""), "clean")
    return {"clean": manifest.digest, "pieces": file_sha256(Path(pieces))}


def write_pieces(spark: Any, config: LmConfig, target: Path) -> str:
    """Train the pieces on the run's sample and write them; returns their path."""
    wanted = config.sources, (config.language,), SEED
    sample = sample_run(spark, config.run or "", wanted, config.sample_documents)
    target.write_bytes(train_pieces((text for _, text in sample.texts), config))
    return str(target)


def train_pieces(texts: Iterable[str], config: LmConfig) -> bytes:
    """The bytes of a unigram SentencePiece model. Raises ConfigError if the text does not give that many pieces."""
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
            f"lm.num_pieces: expected {config.num_pieces} pieces from the sample, got: {str(error).strip()}. "
            "Set fewer, or sample more documents."
        ) from error
    return model.getvalue()


def sentences_of(text: str, normalisation: str) -> list[str]:
    """The lines of a text that hold something, normalised."""
    normal = normalize(text) if normalisation == "ccnet" else text
    return [line for line in map(str.strip, normal.split("\n")) if line]


def sentence_frame(spark: Any, config: LmConfig, pieces: str) -> Any:
    """The run's sentences as a DataFrame of pieces between spaces, column `sentences`."""
    folder, manifest = open_table(Store(config.run or ""), "clean")
    tasks = [
        LinesTask(RunSampleTask(folder, path, config.sources, (config.language,), SEED), pieces, config.normalisation)
        for path in manifest.paths_of()
    ]
    return dataframe_from_tasks(spark, sentences_of_part, tasks, "sentences string")


def sentences_of_part(task: LinesTask) -> Iterator[pa.RecordBatch]:
    """The sentences of one part as pieces between spaces."""
    path = worker_path(task.pieces)
    cut = load_splitter(Path(path).read_bytes(), path)
    for batch in task.sample.batches(["text"]):
        texts = batch.column("text").to_pylist()
        cuts = cut([line for text in texts for line in sentences_of(text, task.normalisation)])
        yield pa.RecordBatch.from_arrays(
            [pa.array([" ".join(words) for words in cuts if words], pa.string())], schema=LINES
        )


def describe_model(made: dict[str, Any]) -> str:
    """What was made, for the terminal."""
    counts = ", ".join(f"{number:,} {order}-grams" for order, number in enumerate(made["ngrams"], 1))
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in made["seconds"].items())
    return f"{made['model']['sha256'][:12]}  {made['model']['bytes']:,} bytes: {counts}\n{seconds}"
