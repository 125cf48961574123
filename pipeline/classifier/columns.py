"""Values that checks compute from stored columns: scores by model name, random numbers from doc_id, checks of settings.

A random number is a function of (seed, name, doc_id) alone. So a sample is the same on every machine and in every
attempt, and a larger sample contains every smaller one.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.config import Section, suggest_name
from schemas.entries import lookup_entry
from schemas.ids import shuffle_key

Floats = npt.NDArray[np.float64]

MAX_SHAPE = 1e6
"""Upper bound of the results of `pareto_shape`, so that compared values are finite."""

_HALF = 0.5
_RANGE = float(1 << 63)
_SMALLEST, _LARGEST = 2.0**-40, 1.0 - 2.0**-24  # a float32 probability comes no nearer to 1


def entry_values(batch: pa.RecordBatch, column: str, name: str) -> Floats:
    """Return the value of `name` in each document's list of (name, value); shape (documents,), NaN if missing."""
    return _floats(lookup_entry(batch.column(column), name))


def column_values(batch: pa.RecordBatch, column: str) -> Floats:
    """Return the values of a numeric column; shape (documents,), NaN for null."""
    return _floats(batch.column(column))


def _floats(column: pa.Array) -> Floats:
    values: Floats = pc.fill_null(pc.cast(column, pa.float64()), np.nan).to_numpy(zero_copy_only=False)
    return values


def uniform_draws(identifiers: Iterable[bytes], seed: int, name: str) -> Floats:
    """Return a pseudorandom number in (0, 1) for each doc_id; it depends on doc_id, `seed` and `name` alone."""
    suffix = name.encode("utf-8", "surrogatepass")
    keys = [(shuffle_key(seed, identifier + suffix) + _HALF) / _RANGE for identifier in identifiers]
    return np.clip(np.array(keys, np.float64), None, np.nextafter(1.0, 0.0))


def log_odds(probabilities: Floats) -> Floats:
    """Return ln(p / (1 - p)) for each probability; it is finite also for 0 and 1."""
    clipped = np.clip(probabilities, _SMALLEST, _LARGEST)
    return np.log(clipped) - np.log1p(-clipped)


def pareto_shape(scores: Floats, uniforms: Floats) -> Floats:
    """Return the largest shape alpha at which GPT-3's rule keeps each document (documents,).

    `uniforms` are one uniform random number for each document. Source: Brown et al. 2020, arXiv 2005.14165, appendix A.
    """
    # The rule keeps a document if a draw of numpy's `pareto(alpha)` exceeds 1 - score. From a uniform number U, the
    # draw is U^(-1/alpha) - 1, so the condition is alpha <= -ln U / ln(2 - score).
    with np.errstate(divide="ignore"):
        return np.minimum(-np.log(uniforms) / np.log(2.0 - np.minimum(scores, 1.0)), MAX_SHAPE)


def gumbel_draws(uniforms: Floats) -> Floats:
    """Return draws of the standard Gumbel distribution, from uniform numbers.

    The k documents with the largest log weight + draw are a sample without replacement, drawn in proportion to the
    weights. Source: Xie et al. 2023, arXiv 2302.03169, section 3; Kool et al. 2019, arXiv 1903.06059.
    """
    return -np.log(-np.log(uniforms))


# Checks of settings that are tables by model name.


def check_model_names(config: Section, known: Mapping[str, str], fields: tuple[str, ...]) -> None:
    """Raise ValueError if one of the settings `fields` of a section names a model that is not in `known`."""
    unknown = [
        f"{field}.{name}: expected a name in `models`, got {name!r}"
        f"{suggest_name(name, known) if known else ', but models is empty'}"
        for field in fields
        for name in sorted(set(getattr(config, field)) - set(known))
    ]
    if unknown:
        raise ValueError(f"{'; '.join(unknown)}. Correct the name, or add the model to `models` of this section.")


def check_range(config: Section, fields: tuple[str, ...], is_valid: Callable[[float], bool], expected: str) -> None:
    """Raise ValueError if a value of these fields is outside its range; `expected` describes the range."""
    for field in fields:
        for name, value in sorted(getattr(config, field).items()):
            if not is_valid(value):
                raise ValueError(f"{field}.{name}: expected {expected}, got {value}. Set {field}.{name} to {expected}.")
