"""Values that checks compute from stored columns: values by name, and random numbers that follow from doc_id.

A random number is a function of (seed, name, doc_id) alone, so a sample is the same on every machine and at every try,
and a document that is in it stays in it when the share grows.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.ids import shuffle_key
from schemas.tables import lookup_entry

Floats = npt.NDArray[np.float64]

MAX_SHAPE = 1e6
"""Largest shape that is told apart, so that what is compared is finite."""

_HALF = 0.5
_RANGE = float(1 << 63)
_SMALLEST, _LARGEST = 2.0**-40, 1.0 - 2.0**-24  # a float32 probability comes no nearer to 1


def entry_values(batch: pa.RecordBatch, column: str, name: str) -> Floats:
    """(documents,) the value of `name` in a column of entries; NaN where there is none or it is null."""
    return _floats(lookup_entry(batch.column(column), name))


def column_values(batch: pa.RecordBatch, column: str) -> Floats:
    """(documents,) a numeric column; NaN where it is null."""
    return _floats(batch.column(column))


def _floats(column: pa.Array) -> Floats:
    values: Floats = pc.fill_null(pc.cast(column, pa.float64()), np.nan).to_numpy(zero_copy_only=False)
    return values


def uniform_draws(identifiers: Iterable[bytes], seed: int, name: str) -> Floats:
    """(documents,) a number in the open interval (0, 1) for each doc_id; independent for each name."""
    suffix = name.encode("utf-8", "surrogatepass")
    keys = [(shuffle_key(seed, identifier + suffix) + _HALF) / _RANGE for identifier in identifiers]
    return np.clip(np.array(keys, np.float64), None, np.nextafter(1.0, 0.0))


def log_odds(probabilities: Floats) -> Floats:
    """ln(p / (1 - p)), finite: keeps apart what lies close to 0 and 1, where one bin of a histogram would hold all."""
    inside = np.clip(probabilities, _SMALLEST, _LARGEST)
    return np.log(inside) - np.log1p(-inside)


def pareto_shape(scores: Floats, uniforms: Floats) -> Floats:
    """The largest shape alpha at which GPT-3's rule keeps a document of this score, given its uniform number.

    The rule keeps it if a draw of numpy's `pareto(alpha)` exceeds 1 - score. Such a draw is U^(-1/alpha) - 1, so it
    does when alpha <= -ln U / ln(2 - score): with probability (2 - score)^-alpha, and always at score 1.
    Source: Brown et al. 2020, arXiv 2005.14165, appendix A.
    """
    with np.errstate(divide="ignore"):
        return np.minimum(-np.log(uniforms) / np.log(2.0 - np.minimum(scores, 1.0)), MAX_SHAPE)


def gumbel_draws(uniforms: Floats) -> Floats:
    """Draws of the standard Gumbel distribution: the k largest of log weight + draw are a sample without replacement.

    Source: Xie et al. 2023, arXiv 2302.03169, section 3; Kool et al. 2019, arXiv 1903.06059.
    """
    return -np.log(-np.log(uniforms))
