"""The stage `perplexity`: perplexity of documents and paragraphs by a language model, and checks of documents by it.

Each language has its own model. A document is in the head, middle or tail of its language, by quantiles of the
perplexities of this run, which are computed after all documents are scored. Source: Wenzek et al. 2020 (CCNet), arXiv
1911.00359, section 3.4.
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
"""The bucket of a document without perplexity."""
HEAD_CUT, MIDDLE_CUT = "perplexity_head", "perplexity_middle"
"""Names of the two quantiles of a language: documents below the first are its head, others below the second its
middle."""
NGRAM, CHECKPOINT = "ngram", "checkpoint:"
METADATA_FILE = "checkpoint.json"
PLAIN_WORDS = "words"
COLUMNS = ("perplexity", "perplexity_tokens", "paragraphs", "paragraph_perplexity")
TO_SCORE = pa.schema(
    [DOC_ID, field("language", pa.string(), "most probable language"), field("text", pa.string(), "text after cuts")]
)
"""Schema of the files from which a checkpoint's process reads documents."""
SCORED = pa.schema([DOC_ID, *(SCORES.field(name) for name in COLUMNS)])
"""Schema of the files that a checkpoint's process writes, with the rows in the same order."""
FILES_AT_ONCE = 256
"""Number of files that one process scores. It is bounded because the length of a command line is."""
MAX_PERPLEXITY = float(np.finfo(np.float32).max)


class PerplexityConfig(Section):
    """The section `[perplexity]` of a recipe: the language models, and limits of the perplexity."""

    scorer: str | None = location(None)
    """What computes perplexities: "ngram" (the language models in `models`), or "checkpoint:PATH" with the folder of a
    checkpoint of `penstock train`, such as `checkpoint:RUN/train/checkpoints/step-001000`. None = no perplexities."""
    models: dict[str, str] = location({})
    """Path, or name in the model store, of a compiled language model or of a KenLM binary (`….bin`), by language.
    Documents in other languages get no perplexity."""
    pieces: dict[str, str] = location({})
    """Path of the SentencePiece model of a KenLM binary, by language; "words" if its words are separated by spaces."""
    python: str | None = execution(None)
    """Python executable that runs a checkpoint, in an environment with torch; None = the current executable."""
    head_share: float = decision(0.30, gt=0, lt=1)
    """Share of a language's documents in its head: those with the lowest perplexities. Default: CCNet's."""
    middle_share: float = decision(0.60, gt=0, lt=1)
    """Share of a language's documents in its head and middle; the rest is its tail. Default: CCNet's."""
    keep_buckets: tuple[Bucket, ...] = decision(BUCKETS)
    """Adjacent buckets to keep; default: all."""
    min_perplexity: float | None = decision(None, ge=1)
    """Minimum perplexity of a kept document, in every language; None = no limit."""
    max_perplexity: float | None = decision(None, ge=1)
    """Maximum perplexity of a kept document, in every language; None = no limit."""

    @model_validator(mode="after")
    def _consistent(self) -> "PerplexityConfig":
        fields = {*type(self).model_fields}
        if self.scorer is None:
            used = {"scorer"}
        elif self.scorer == NGRAM:
            used = fields - {"python"}
        elif self.scorer.startswith(CHECKPOINT) and self.scorer != CHECKPOINT:
            used = fields - {"models", "pieces"}
        else:
            raise ValueError(
                f'scorer: expected "{NGRAM}" or "{CHECKPOINT}PATH", got {self.scorer!r}. '
                f'Set perplexity.scorer = "{NGRAM}".'
            )
        if ignored := ", ".join(sorted(self.model_fields_set - used)):
            raise ValueError(
                f"{ignored} would be ignored with scorer = {self.scorer!r}. Remove {ignored} from [perplexity]."
            )
        if self.scorer == NGRAM and not self.models:
            raise ValueError('scorer = "ngram" requires models by language, got none. Set perplexity.models.')
        if unknown := ", ".join(sorted(self.pieces.keys() - self.models.keys())):
            raise ValueError(
                f"pieces: expected languages that perplexity.models has, got {unknown}. "
                f"Remove {unknown} from perplexity.pieces."
            )
        if self.head_share >= self.middle_share:
            raise ValueError(
                f"head_share: expected less than middle_share = {self.middle_share}, got {self.head_share}. "
                "Lower perplexity.head_share."
            )
        numbers = sorted(map(BUCKETS.index, self.keep_buckets))
        if not numbers or numbers != list(range(numbers[0], numbers[-1] + 1)):
            raise ValueError(
                f"keep_buckets: expected one to three adjacent buckets, each once, got {list(self.keep_buckets)}. "
                "Set perplexity.keep_buckets to adjacent buckets, such as ['head', 'middle']."
            )
        if self.min_perplexity and self.max_perplexity and self.min_perplexity > self.max_perplexity:
            raise ValueError(
                f"min_perplexity: expected at most max_perplexity = {self.max_perplexity}, got "
                f"{self.min_perplexity}. Lower perplexity.min_perplexity."
            )
        return self


def make_perplexity(config: PerplexityConfig, models: Mapping[str, str]) -> RowFunction:
    """Return the function that adds the columns COLUMNS to a row; null if no model is for the row's language.

    If `scorer` is a checkpoint, rows already have the columns and are not changed.
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
    """Return the columns COLUMNS of a text. A text without words has no perplexity and no paragraphs."""
    scores = scorer.score_text(text)
    (scored,) = np.nonzero(scores.tokens)
    log10, tokens = scores.log10[scored].tolist(), scores.tokens[scored].tolist()
    return {
        "perplexity": perplexity_of(math.fsum(log10), sum(tokens)) if tokens else None,
        "perplexity_tokens": sum(tokens),
        "paragraphs": [{"start": start, "end": end} for start, end in line_spans(text)[scored].tolist()],
        "paragraph_perplexity": [perplexity_of(*scores) for scores in zip(log10, tokens)],
    }


def perplexity_of(log10: float, tokens: int) -> float:
    """Return the perplexity 10^(-log10 / tokens), rounded to float32; `tokens` includes line ends."""
    # Python's power: the last bits of numpy's depend on the processor's vector unit.
    return float(np.float32(min(10.0 ** min(-log10 / tokens, 300.0), MAX_PERPLEXITY)))


def perplexity_buckets(
    perplexity: npt.ArrayLike, head_cut: npt.ArrayLike, middle_cut: npt.ArrayLike
) -> npt.NDArray[np.str_]:
    """Return the bucket of each document: head, middle or tail.

    ALL if the perplexity of the document or one of the cut-offs is NaN.
    """
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
    head_cuts, middle_cuts = dict(cutoffs.get(HEAD_CUT, {})), dict(cutoffs.get(MIDDLE_CUT, {}))
    keep = config.keep_buckets
    if "tail" not in keep:
        checks.append(Check("perplexity_tail", "perplexity", high, largest_below(middle_cuts)))
    if "head" not in keep:
        checks.append(Check("perplexity_head", "perplexity", low, head_cuts))
    if "middle" not in keep:
        side, limits = (high, largest_below(head_cuts)) if "head" in keep else (low, middle_cuts)
        checks.append(Check("perplexity_middle", "perplexity", side, limits))
    return checks


def largest_below(cutoffs: Mapping[str, float]) -> dict[str, float]:
    """Return the largest float32 below each quantile.

    A check keeps values equal to its maximum, so the quantile itself cannot be the maximum.
    """
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
    """Return the paths of a checkpoint's files: `checkpoint` is its metadata, `checkpoint/FILE` each other file.

    Raises ConfigError if the folder is not a checkpoint.
    """
    metadata = Path(folder) / METADATA_FILE
    try:
        names = sorted(json.loads(metadata.read_bytes())["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"perplexity.scorer: expected a checkpoint folder, got one without a valid {METADATA_FILE} ({error!r}). "
            f"Set perplexity.scorer to {CHECKPOINT}RUN/train/checkpoints/step-…."
        ) from error
    return {"checkpoint": str(metadata)} | {f"checkpoint/{name}": str(metadata.with_name(name)) for name in names}


def score_with_checkpoint(config: PerplexityConfig, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Score files with the checkpoint of `scorer`, in a separate process.

    Each Parquet file of `inputs` (schema TO_SCORE) yields the file at the same index of `outputs` (schema SCORED).
    Raises ConfigError or ContractError with the last error line of the process.
    """
    checkpoint = (config.scorer or "").removeprefix(CHECKPOINT)
    # -P: a `train.py` in the current folder does not hide ours.
    command = [config.python or sys.executable, "-P", "-m", "train.eval.score", "--checkpoint", checkpoint]
    for start in range(0, len(inputs), FILES_AT_ONCE):
        batch = slice(start, start + FILES_AT_ONCE)
        files = ["--in", *inputs[batch], "--out", *outputs[batch]]
        try:
            done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
        except OSError as error:
            raise ConfigError(
                f"perplexity.python: expected a Python with torch, got one that cannot be run ({error}). "
                "Set perplexity.python to the path of a Python with torch."
            ) from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            kind = ConfigError if done.returncode == 2 or "No module named" in lines[-1] else ContractError
            raise kind(
                f"perplexity.scorer: expected scores by {checkpoint}, got the error: {lines[-1]}. "
                "Set perplexity.scorer to a checkpoint that perplexity.python can load."
            )


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
