"""Counts of documents by their verdict in a run and with other limits, and the numbers of tokens that they have."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from schemas.arrow_files import ArrowFile
from schemas.storage import CheckedPath, Store

KEPT_VERDICT = "kept"
Rates = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class PredictionCell:
    """Counts of the documents with equal `before`, `after`, `language` and `source`.

    `before` is the verdict in the run, `after` the verdict with the new settings. A verdict is `kept` or the
    `stage/rule` that drops the documents.
    """

    before: str
    after: str
    language: str
    source: str
    documents: int
    chars: int
    tokens: int
    """Number of tokens of the documents that are in the dataset."""
    uncounted_chars: int
    """Number of characters of the documents that are not in the dataset, so that their tokens are unknown."""


def counts_of_shard(task: tuple[Store, CheckedPath]) -> Iterator[pa.RecordBatch]:
    """Yield the columns `doc` and `tokens` of one shard. `task` is (dataset folder, path of the document index)."""
    folder, path = task
    with folder.open_input(path) as stream:
        reader = ArrowFile(stream, f"{folder.uri}/{path}")
        indices = [reader.schema.get_field_index(name) for name in ("doc_id", "num_tokens")]
        for number in range(reader.num_record_batches):
            doc, tokens = (reader.get_batch(number).column(index) for index in indices)
            yield pa.RecordBatch.from_arrays([doc.cast(pa.binary()), tokens], ["doc", "tokens"])


def token_rates(cells: Sequence[PredictionCell]) -> Rates:
    """Return the tokens per character by (language, source); the key ("", "") has the rate of all documents."""
    tokens: Counter[tuple[str, str]] = Counter()
    chars: Counter[tuple[str, str]] = Counter()
    for cell in cells:
        for key in ((cell.language, cell.source), ("", "")):
            tokens[key] += cell.tokens
            chars[key] += cell.chars - cell.uncounted_chars
    return {key: tokens[key] / number for key, number in chars.items() if number}


def kept_tokens(cells: Sequence[PredictionCell], after: bool, rates: Rates) -> tuple[int, bool]:
    """Return the number of tokens of the kept documents, and True if the number is partly an estimate.

    If `after` is True, the documents kept with the new settings are counted, else the documents kept in the run. The
    tokens of a document that is not in the dataset are estimated from its length and `rates`.
    """
    exact, estimate = 0, 0.0
    for cell in cells:
        if (cell.after if after else cell.before) == KEPT_VERDICT:
            exact += cell.tokens
            estimate += cell.uncounted_chars * rates.get((cell.language, cell.source), rates.get(("", ""), 0.0))
    return exact + round(estimate), estimate > 0
