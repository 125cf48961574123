"""Perplexity of texts by a trained checkpoint, written as the perplexity columns of the scores table.

A document is read as in training: the tokens that begin documents (if there are none, those that end them), its text,
and the tokens that end it. Every token after the beginning counts, the end included. If no token begins documents, the
first token has no context and does not count. A document longer than seq_len is read in windows of seq_len tokens that
start half a window apart. A token counts in the first window that contains it, so from the second window on it has at
least half a window of context. A token belongs to the line in which it begins, and a line break to the line that it
ends. The tokens that end a document belong to no line.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F

from schemas.checkpoints import CHECKPOINTS
from schemas.errors import ConfigError, ContractError, PenstockError
from schemas.logs import print_error, printable_output
from schemas.storage import Store
from schemas.tables import DOC_ID, SCORES
from schemas.tokens import ESCAPE, SPACE, Dataset, TokenizerContract, encode_exactly, escape
from train.checkpoint.state import (
    default_device,
    open_checkpoint,
    read_model,
    read_tokenizer,
    sequence_length_of,
)
from train.data.rows import IGNORED
from train.model.transformer import Transformer

COLUMNS = ("perplexity", "perplexity_tokens", "paragraphs", "paragraph_perplexity")
SCORED_SCHEMA = pa.schema([DOC_ID, *(SCORES.field(name) for name in COLUMNS)])
"""Schema of the output: a row for every input row, in the same order."""
ROWS_AT_ONCE = 256
BATCH_TOKENS = 4096
"""Positions of a forward pass. Not a setting: other batch shapes can change the last bits of the losses."""
MIN_WINDOW = 16
MAX_NATS = 88.0
"""Largest exponent for which exp() is a finite float32."""

OffsetEncoder = Callable[[str], tuple[list[int], list[int]]]
"""Text → its token ids, and the start of each token in the text [code points]."""


@dataclass(frozen=True)
class ScoreWindow:
    """A span of a document's tokens that one forward pass reads; losses count from the token `first` on."""

    document: int
    start: int
    """First token that is read."""
    first: int
    """First token that counts; it is predicted from the tokens before it."""
    end: int
    """Token after the last that counts."""

    @property
    def length(self) -> int:
        """Number of input positions."""
        return self.end - 1 - self.start


class CheckpointScorer:
    """Scores texts by a checkpoint and its tokenizer."""

    def __init__(self, model: Transformer, marked: OffsetEncoder, contract: TokenizerContract, seq_len: int):
        self._model, self._marked, self._seq_len = model, marked, seq_len
        self._after = [contract.reserved[name] for name in contract.after]
        self._before = [contract.reserved[name] for name in contract.before] or self._after

    def score(self, texts: Sequence[str | None]) -> list[dict[str, Any]]:
        """Return a dict with the keys COLUMNS for each text; for a text of None, all values are None.

        A text without tokens has no perplexity or paragraphs. The scores of a text do not depend on the other texts.
        """
        first = max(1, len(self._before))
        encoded, nats = self._nats(texts, first)
        return [
            dict.fromkeys(COLUMNS) if text is None else columns_of(text, starts, text_nats, (len(self._before), first))
            for text, (_, starts), text_nats in zip(texts, encoded, nats)
        ]

    def losses_between(self, texts: Sequence[str], bounds: Sequence[tuple[int, int]]) -> list[Any]:
        """Return, for each text, the losses [nats] of the tokens that begin in its span [start, end) [code points]."""
        encoded, nats = self._nats(texts, max(1, len(self._before)))
        found = []
        for (_, starts), own, (start, end) in zip(encoded, nats, bounds, strict=True):
            places = np.array(starts)
            of_text = own[len(self._before) : len(self._before) + len(starts)]
            found.append(of_text[(places >= start) & (places < end)])
        return found

    def _nats(self, texts: Sequence[str | None], first: int) -> tuple[list[tuple[list[int], list[int]]], list[Any]]:
        """Return the tokens of each text with their starts, and the losses of its document from token `first` on."""
        encoded = [self._marked(text) if text else ([], []) for text in texts]
        ids = [np.array([*self._before, *tokens, *self._after] if tokens else [], np.int64) for tokens, _ in encoded]
        windows = [
            ScoreWindow(number, *bounds)
            for number, document in enumerate(ids)
            for bounds in window_bounds(len(document), first, self._seq_len)
        ]
        nats = [np.zeros(len(document)) for document in ids]
        for batch in batches_of(windows, self._seq_len):
            losses = self._losses([ids[window.document] for window in batch], batch)
            for window, window_nats in zip(batch, losses):
                nats[window.document][window.first : window.end] = window_nats
        return encoded, nats

    @torch.no_grad()
    def _losses(self, ids: Sequence[Any], windows: Sequence[ScoreWindow]) -> Iterator[Any]:
        """Yield, for each window, the losses [nats] of its tokens that count."""
        length = batch_length(windows[0].length, self._seq_len)
        rows = max(1, BATCH_TOKENS // length)
        ids_BT = torch.zeros((rows, length), dtype=torch.int64)
        targets_BT = torch.full((rows, length), IGNORED)
        for row, (document, window) in enumerate(zip(ids, windows)):
            ids_BT[row, : window.length] = torch.from_numpy(document[window.start : window.end - 1])
            counted = slice(window.first - 1 - window.start, window.length)
            targets_BT[row, counted] = torch.from_numpy(document[window.first : window.end])
        device = next(self._model.parameters()).device
        logits_NV, targets_N = self._model(ids_BT.to(device)).flatten(0, 1), targets_BT.to(device).flatten()
        losses_N = F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="none")
        losses_BT = losses_N.view(rows, length).cpu()
        for row, window in enumerate(windows):
            yield losses_BT[row, window.first - 1 - window.start : window.length].double().numpy()


def window_bounds(num_tokens: int, first: int, seq_len: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, first, end) of a document's windows, as in `ScoreWindow`.

    Each token from the argument `first` on counts in exactly one window.
    """
    start = 0
    while first < num_tokens:
        end = min(num_tokens, start + seq_len + 1)
        if first < end:  # otherwise the window holds only the tokens that begin the document
            yield start, first, end
            first = end
        start += (seq_len + 1) // 2


def batch_length(length: int, seq_len: int) -> int:
    """Return the row length of the batch for a window of this length: a power of two, or seq_len if smaller."""
    return min(seq_len, max(MIN_WINDOW, 1 << (length - 1).bit_length()))


def batches_of(windows: Sequence[ScoreWindow], seq_len: int) -> Iterator[list[ScoreWindow]]:
    """Yield batches of windows that have the same row length."""
    by_length: dict[int, list[ScoreWindow]] = {}
    for window in windows:
        by_length.setdefault(batch_length(window.length, seq_len), []).append(window)
    for length, alike in sorted(by_length.items()):
        rows = max(1, BATCH_TOKENS // length)
        for start in range(0, len(alike), rows):
            yield alike[start : start + rows]


def columns_of(text: str, starts: Sequence[int], nats: Any, offsets: tuple[int, int]) -> dict[str, Any]:
    """Return the values of COLUMNS for a text. Its *document* is its tokens with the reserved tokens around them.

    `starts`: start of each token in the text [code points]. `nats`: loss of each token of the document [nats].
    `offsets`: indices in the document of the text's first token and of the first token that counts.
    """
    before, first = offsets
    counted = nats[first:]
    if not len(counted):
        return {"perplexity": None, "perplexity_tokens": 0, "paragraphs": [], "paragraph_perplexity": []}
    lines = text.split("\n")
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    ends = np.cumsum(lengths + 1) - 1
    line_of = np.searchsorted(ends, starts)[first - before :]
    own = nats[first : before + len(starts)]
    totals = np.bincount(line_of, own, len(lines))
    tokens = np.bincount(line_of, minlength=len(lines))
    scored = [number for number, line in enumerate(lines) if tokens[number] and line.strip()]
    return {
        "perplexity": perplexity_of(math.fsum(counted.tolist()), len(counted)),
        "perplexity_tokens": len(counted),
        "paragraphs": [{"start": int(ends[number] - lengths[number]), "end": int(ends[number])} for number in scored],
        "paragraph_perplexity": [perplexity_of(float(totals[number]), int(tokens[number])) for number in scored],
    }


def perplexity_of(nats: float, tokens: int) -> float:
    """Return e^(nats / tokens), rounded to float32."""
    return float(np.float32(math.exp(min(nats / tokens, MAX_NATS))))


def open_offset_encoder(dataset: Dataset) -> OffsetEncoder:
    """Return a function that encodes text by a dataset's tokenizer: to token ids, and the start of each token.

    Raises ContractError if the model file does not match the contract.
    """
    data = read_tokenizer(dataset)
    if dataset.tokenizer.kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        processor = SentencePieceProcessor(model_proto=data)

        def mark(text: str) -> tuple[list[int], list[int]]:
            encoding = processor.encode(escape(text), out_type="offset_mapping")
            starts = [start for start, _ in encoding["offsets"]]
            if SPACE in text or ESCAPE in text:  # these are offsets in the escaped text
                origin = [number for number, char in enumerate(text) for _ in escape(char)]
                starts = [origin[start] for start in starts]
            return encoding["ids"], starts

        return mark
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(data)
    encode_exactly(tokenizer)
    tokenizer.no_padding()
    tokenizer.no_truncation()

    def encode(text: str) -> tuple[list[int], list[int]]:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    return encode


def open_scorer(path: str) -> CheckpointScorer:
    """Return a scorer for a checkpoint folder, or for the last checkpoint of a run folder.

    Raises ContractError if the checkpoint is missing or damaged.
    """
    where = path.rstrip("/")
    named = re.fullmatch(rf"(.*)/{CHECKPOINTS}/step-(\d+)", where)
    run, step = (Store(named[1]), int(named[2])) if named else (Store(where), None)
    dataset, note = open_checkpoint(run, step, "causal")
    model = read_model(run, note, default_device())
    return CheckpointScorer(model, open_offset_encoder(dataset), dataset.tokenizer, sequence_length_of(note))


def read_texts(uri: str) -> Iterator[pa.RecordBatch]:
    """Yield the columns doc_id and text of a Parquet or Arrow IPC file in batches.

    Raises ConfigError if the file cannot be opened, ContractError if it lacks a column.
    """
    folder, _, name = uri.rpartition("/")
    try:
        stream = Store(folder or ".").open_unchecked(name)
    except OSError as error:
        raise ConfigError(
            f"{uri}: expected a Parquet or Arrow file, got one that cannot be opened ({error}). "
            "Correct the path in --in."
        ) from error
    with stream:
        arrow = bytes(stream.read_at(6, 0)) == b"ARROW1"
        file = pa.ipc.open_file(stream) if arrow else pq.ParquetFile(stream)
        names = (file.schema if arrow else file.schema_arrow).names
        if missing := [name for name in ("doc_id", "text") if name not in names]:
            raise ContractError(
                f"{uri}: expected the columns doc_id and text, got no {' and no '.join(missing)}. Add the column."
            )
        if arrow:
            for number in range(file.num_record_batches):
                batch = file.get_batch(number).select(["doc_id", "text"])
                yield from (batch.slice(start, ROWS_AT_ONCE) for start in range(0, batch.num_rows, ROWS_AT_ONCE))
        else:
            yield from file.iter_batches(ROWS_AT_ONCE, columns=["doc_id", "text"])


def score_files(scorer: CheckpointScorer, inputs: Sequence[str], output: str) -> int:
    """Write the scores of all input rows, in order, to one Parquet file, and return their number."""
    folder, _, name = output.rpartition("/")
    rows = 0
    with Store(folder or ".").open_output(name) as sink, pq.ParquetWriter(sink, SCORED_SCHEMA) as writer:
        for uri in inputs:
            for batch in read_texts(uri):
                scores = scorer.score(batch.column("text").to_pylist())
                identified = zip(batch.column("doc_id").to_pylist(), scores)
                writer.write_batch(
                    pa.RecordBatch.from_pylist([{"doc_id": i} | row for i, row in identified], SCORED_SCHEMA)
                )
                rows += batch.num_rows
    return rows


@printable_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, score the files, and return the exit code."""
    parser = argparse.ArgumentParser(prog="train.eval.score", description="Perplexity of texts by a checkpoint.")
    parser.add_argument("--checkpoint", required=True, help="checkpoint folder, or run folder for its last checkpoint")
    parser.add_argument(
        "--in", dest="inputs", nargs="+", required=True, help="Parquet or Arrow files with doc_id and text"
    )
    parser.add_argument("--out", nargs="+", required=True, help="one Parquet file, or one for each input")
    a = parser.parse_args(argv)
    try:
        if len(a.out) not in (1, len(a.inputs)):
            raise ConfigError(
                f"--out: expected 1 or {len(a.inputs)} files, got {len(a.out)}. Give --out one file, or one for each "
                "file of --in."
            )
        groups = [a.inputs] if len(a.out) == 1 else [[uri] for uri in a.inputs]
        scorer = open_scorer(a.checkpoint)
        for group, output in zip(groups, a.out):
            print(f"{output}: {score_files(scorer, group, output)} documents")
    except PenstockError as error:
        print_error(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
