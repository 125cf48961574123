"""Perplexity of a document and of each paragraph under its language's model, and what is kept by it.

A document is in the head, the middle or the tail of its language by percentiles of our own sample, which the data
decide after everything has been measured. Source: Wenzek et al. 2020 (CCNet), arXiv 1911.00359, section 3.4.
"""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import model_validator

from pipeline.engine.stage import EVERY, Check, Cutoffs, PerDocument, Quantile, Row, RowFunction
from pipeline.perplexity.model import Scorer, line_spans, open_model, require_kenlm
from schemas.config import Section, decision, execution, location
from schemas.errors import ConfigError, ContractError
from schemas.tables import DOC_ID, SCORES, field

Bucket = Literal["head", "middle", "tail"]
BUCKETS: tuple[Bucket, ...] = ("head", "middle", "tail")
ALL = "all"
"""The bucket of a document that was not measured."""
HEAD_CUT, MIDDLE_CUT = "perplexity_head", "perplexity_middle"
"""Names of the cut-offs: the head lies below the first, the middle below the second."""
NGRAM, CHECKPOINT = "ngram", "checkpoint:"
METADATA_FILE = "checkpoint.json"
PLAIN_WORDS = "words"
COLUMNS = ("perplexity", "perplexity_tokens", "paragraphs", "paragraph_perplexity")
TO_SCORE = pa.schema(
    [DOC_ID, field("language", pa.string(), "most probable language"), field("text", pa.string(), "text after cuts")]
)
"""What a checkpoint's job reads."""
SCORED = pa.schema([DOC_ID, *(SCORES.field(name) for name in COLUMNS)])
"""What it writes, in the same order."""
FILES_AT_ONCE = 256
"""Files that one process scores: a command line has an end."""
MAX_PERPLEXITY = float(np.finfo(np.float32).max)


class PerplexityConfig(Section):
    """The section `[perplexity]` of a recipe."""

    scorer: str | None = location(None)
    """Who measures: "ngram" (the models below), or "checkpoint:PATH", the folder of a checkpoint of our own, such as
    `checkpoint:RUN/train/checkpoints/step-001000`; None: nothing is measured."""
    models: dict[str, str] = location({})
    """Language → path, or name in the model store, of a compiled language model or of a KenLM binary (`….bin`).
    Documents in other languages are not measured."""
    pieces: dict[str, str] = location({})
    """Language → SentencePiece model of its KenLM binary; "words" if that one's words stand between spaces."""
    python: str | None = execution(None)
    """Python that runs a checkpoint, in an environment with torch; None: the one that runs this."""
    head_share: float = decision(0.30, gt=0, lt=1)
    """Share of a language's documents that make its head: those of least perplexity. CCNet's."""
    middle_share: float = decision(0.60, gt=0, lt=1)
    """Share of a language's documents that make its head and middle; the rest is its tail. CCNet's."""
    keep_buckets: tuple[Bucket, ...] = decision(BUCKETS)
    """Buckets that stay, side by side; default: all."""
    min_perplexity: float | None = decision(None, ge=1)
    """Least perplexity that stays, in every language; None: any."""
    max_perplexity: float | None = decision(None, ge=1)
    """Greatest perplexity that stays, in every language; None: any."""

    @model_validator(mode="after")
    def _means_something(self) -> "PerplexityConfig":
        fields = {*type(self).model_fields}
        if self.scorer is None:
            used = {"scorer"}
        elif self.scorer == NGRAM:
            used = fields - {"python"}
        elif self.scorer.startswith(CHECKPOINT) and self.scorer != CHECKPOINT:
            used = fields - {"models", "pieces"}
        else:
            raise ValueError(f'scorer is "{NGRAM}" or "{CHECKPOINT}PATH", found {self.scorer!r}')
        if ignored := sorted(self.model_fields_set - used):
            raise ValueError(f"{', '.join(ignored)} would be ignored with scorer = {self.scorer!r}")
        if self.scorer == NGRAM and not self.models:
            raise ValueError('scorer = "ngram" needs models by language, found none')
        if strange := sorted(self.pieces.keys() - self.models.keys()):
            raise ValueError(f"pieces without a model: {', '.join(strange)}")
        if self.head_share >= self.middle_share:
            raise ValueError(f"head_share is below middle_share, found {self.head_share} and {self.middle_share}")
        numbers = sorted(map(BUCKETS.index, self.keep_buckets))
        if not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)):
            raise ValueError(f"keep_buckets are one to three side by side, each once, found {list(self.keep_buckets)}")
        if self.min_perplexity and self.max_perplexity and self.min_perplexity > self.max_perplexity:
            raise ValueError(f"min_perplexity {self.min_perplexity} lies above max_perplexity {self.max_perplexity}")
        return self


def make_perplexity(config: PerplexityConfig, models: Mapping[str, str]) -> RowFunction:
    """The function that adds the four columns to a row, null where its language has no model.

    A checkpoint scores in a job of its own: then the rows come with what it found, and it is left as it is.
    """
    scorers: dict[str, Scorer] = {}
    for language in config.models if config.scorer == NGRAM else ():
        spm = models.get(f"pieces_{language}")
        scorers[language] = open_model(models[f"lm_{language}"], spm, config.pieces.get(language) == PLAIN_WORDS)

    def perplexity(row: Row) -> None:
        scorer = scorers.get(row["language"])
        if scorer is None or row["_body"] is None:
            for name in COLUMNS:
                row.setdefault(name, None)
        else:
            row.update(measure(scorer, row["_body"]))

    return perplexity


def measure(scorer: Scorer, text: str) -> Row:
    """The four columns of a text; a text without a word has no perplexity and no paragraph."""
    scores = scorer.score_text(text)
    (scored,) = np.nonzero(scores.tokens)
    log10, tokens = scores.log10[scored].tolist(), scores.tokens[scored].tolist()
    return {
        "perplexity": perplexity_of(math.fsum(log10), sum(tokens)) if tokens else None,
        "perplexity_tokens": sum(tokens),
        "paragraphs": [{"start": start, "end": end} for start, end in line_spans(text)[scored].tolist()],
        "paragraph_perplexity": [perplexity_of(*one) for one in zip(log10, tokens)],
    }


def perplexity_of(log10: float, tokens: int) -> float:
    """10^(-log10 / tokens) as a float32 holds it; tokens count line ends."""
    # Python's power, not numpy's, whose last bits depend on the processor's vector unit.
    return float(np.float32(min(10.0 ** min(-log10 / tokens, 300.0), MAX_PERPLEXITY)))


def perplexity_buckets(
    perplexity: npt.ArrayLike, head_cut: npt.ArrayLike, middle_cut: npt.ArrayLike
) -> npt.NDArray[np.str_]:
    """(documents,) head, middle or tail; ALL where the perplexity or a cut-off is NaN. Compared as float32."""
    measured, head, middle = np.broadcast_arrays(
        *(np.asarray(values, np.float64).astype(np.float32) for values in (perplexity, head_cut, middle_cut))
    )
    unknown = np.isnan(measured) | np.isnan(head) | np.isnan(middle)
    return np.select([unknown, measured < head, measured < middle], [ALL, "head", "middle"], "tail")


def _checks(config: PerplexityConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> Sequence[Check]:
    if config.scorer is None:
        return ()
    checks = []
    low, high = "min_perplexity", "max_perplexity"
    if config.max_perplexity is not None:
        checks.append(Check("perplexity_high", "perplexity", high, {EVERY: config.max_perplexity}))
    if config.min_perplexity is not None:
        checks.append(Check("perplexity_low", "perplexity", low, {EVERY: config.min_perplexity}))
    from_head, from_middle = dict(cutoffs.get(HEAD_CUT, {})), dict(cutoffs.get(MIDDLE_CUT, {}))
    keep = config.keep_buckets
    if "tail" not in keep:
        checks.append(Check("perplexity_tail", "perplexity", high, _below(from_middle)))
    if "head" not in keep:
        checks.append(Check("perplexity_head", "perplexity", low, from_head))
    if "middle" not in keep:
        side, limits = (high, _below(from_head)) if "head" in keep else (low, from_middle)
        checks.append(Check("perplexity_middle", "perplexity", side, limits))
    return checks


def _below(cutoffs: Mapping[str, float]) -> dict[str, float]:
    """The greatest float32 below each cut-off."""
    return {name: float(np.nextafter(np.float32(cut), np.float32(-np.inf))) for name, cut in cutoffs.items()}


def _quantiles(config: PerplexityConfig) -> Sequence[Quantile]:
    if config.scorer is None:
        return ()
    return (
        Quantile(HEAD_CUT, "perplexity", config.head_share),
        Quantile(MIDDLE_CUT, "perplexity", config.middle_share),
    )


def _models(config: PerplexityConfig) -> dict[str, str]:
    if config.scorer is None:
        return {}
    if config.scorer != NGRAM:
        return checkpoint_files(config.scorer.removeprefix(CHECKPOINT))
    for path in config.models.values():
        if path.endswith(".bin"):
            require_kenlm(path)
    pieces = {f"pieces_{language}": path for language, path in config.pieces.items() if path != PLAIN_WORDS}
    return {f"lm_{language}": path for language, path in config.models.items()} | pieces


def checkpoint_files(folder: str) -> dict[str, str]:
    """The note of a checkpoint and every file of its state; their digests say which weights measured."""
    note = Path(folder) / METADATA_FILE
    try:
        names = sorted(json.loads(note.read_bytes())["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"perplexity.scorer: expected a checkpoint folder with {METADATA_FILE}, got {error!r}. Give "
            f"{CHECKPOINT}RUN/train/checkpoints/step-…."
        ) from error
    return {"checkpoint": str(note)} | {f"checkpoint/{name}": str(note.with_name(name)) for name in names}


def score_with_checkpoint(config: PerplexityConfig, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Have the checkpoint of `scorer` score Parquet files (TO_SCORE) into as many others (SCORED), in a process apart.

    Raises ConfigError with what the process complained about.
    """
    checkpoint = (config.scorer or "").removeprefix(CHECKPOINT)
    command = [config.python or sys.executable, "-m", "train.eval.score", "--checkpoint", checkpoint]
    for start in range(0, len(inputs), FILES_AT_ONCE):
        some = slice(start, start + FILES_AT_ONCE)
        files = ["--in", *inputs[some], "--out", *outputs[some]]
        try:
            done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
        except OSError as error:
            raise ConfigError(f"perplexity.python: expected a Python with torch, got {error}. Correct it.") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            kind = ConfigError if done.returncode == 2 or "No module named" in lines[-1] else ContractError
            raise kind(f"perplexity.scorer: expected scores by {checkpoint}, got: {lines[-1]}")


PERPLEXITY = PerDocument(
    name="perplexity",
    version=1,
    config=PerplexityConfig,
    reads=("_body", "language"),
    adds=COLUMNS,
    reasons={},
    make=make_perplexity,
    models=_models,
    stays=("checkpoint",),
    ends=False,
    verdicts={
        "perplexity_high": "the perplexity is above max_perplexity",
        "perplexity_low": "the perplexity is below min_perplexity",
        "perplexity_tail": "the document is in the tail of its language, which is not kept",
        "perplexity_head": "the document is in the head of its language, which is not kept",
        "perplexity_middle": "the document is in the middle of its language, which is not kept",
    },
    checks=_checks,
    quantiles=_quantiles,
    again="rest",
)
