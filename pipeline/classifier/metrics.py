"""How well scores tell two classes apart and how far they are probabilities: exact figures, ties and all.

Labels are True for the good class. Sums run in a fixed order (stable sort by score), so equal input gives equal bytes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.errors import ContractError

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.bool_]

BINS = 10


def auc(scores: Floats, labels: Labels) -> float:
    """Area under the ROC curve: the share of (good, bad) pairs in which the good one scores higher, ties as a half.

    Exact: counted in integers. Raises ContractError if a class is missing.
    """
    num_good = int(labels.sum())
    num_bad = len(labels) - num_good
    if not num_good or not num_bad:
        raise ContractError(
            f"AUC: expected two classes, got {num_good} good and {num_bad} bad. Give documents of both."
        )
    _, place = np.unique(scores, return_inverse=True)
    good = np.bincount(place[labels], minlength=int(place.max()) + 1)
    bad = np.bincount(place[~labels], minlength=len(good))
    bad_below = np.cumsum(bad) - bad
    twice_won = int((good * (2 * bad_below + bad)).sum())
    return twice_won / (2 * num_good * num_bad)


def confusion(kept: Labels, labels: Labels) -> dict[str, int]:
    """How many good and bad documents are kept and dropped."""
    return {
        "good_kept": int((kept & labels).sum()),
        "good_dropped": int((~kept & labels).sum()),
        "bad_kept": int((kept & ~labels).sum()),
        "bad_dropped": int((~kept & ~labels).sum()),
    }


def ratio(part: int, whole: int) -> float | None:
    """A share; None of nothing."""
    return part / whole if whole else None


def precision_recall(kept: Labels, labels: Labels) -> dict[str, float | None]:
    """Of the kept documents the share that is good, and of the good ones the share that is kept."""
    counts = confusion(kept, labels)
    good_kept = counts["good_kept"]
    return {
        "precision": ratio(good_kept, good_kept + counts["bad_kept"]),
        "recall": ratio(good_kept, good_kept + counts["good_dropped"]),
    }


def kappa(one: Labels, other: Labels) -> float | None:
    """Cohen's kappa of two judgements of the same documents: 1 agrees, 0 as by chance; None where neither varies.

    Source: Cohen 1960, "A coefficient of agreement for nominal scales".
    """
    total = len(one)
    agreed = int((one == other).sum())
    by_chance = int(one.sum()) * int(other.sum()) + int((~one).sum()) * int((~other).sum())
    return (agreed * total - by_chance) / (total * total - by_chance) if by_chance != total * total else None


def calibration(probabilities: Floats, labels: Labels, bins: int = BINS) -> dict[str, Any]:
    """Brier score, expected calibration error, and the reliability bins of equal width they come from.

    A bin holds [i / bins, (i + 1) / bins), the last one 1 as well; empty bins are left out. The error is the mean over
    documents of |mean probability - share of good ones| of their bin. Sources: Brier 1950; Guo et al. 2017,
    arXiv 1706.04599.
    """
    order = np.lexsort((labels, probabilities))
    probabilities, labels = probabilities[order], labels[order]
    place = np.minimum((probabilities * bins).astype(np.int64), bins - 1)
    found = []
    for number in np.unique(place).tolist():
        inside = place == number
        count, good = int(inside.sum()), int(labels[inside].sum())
        mean = float(np.add.reduce(probabilities[inside])) / count
        found.append({"from": number / bins, "documents": count, "mean_probability": mean, "good_share": good / count})
    error = sum(b["documents"] * abs(b["mean_probability"] - b["good_share"]) for b in found) / len(labels)
    brier = float(np.add.reduce((probabilities - labels) ** 2)) / len(labels)
    return {"brier": brier, "expected_calibration_error": error, "bins": found}


def heldout_figures(probabilities: Floats, labels: Labels) -> dict[str, Any]:
    """All figures of a model on documents it has not seen; precision and recall by threshold."""
    thresholds = {str(limit): precision_recall(probabilities >= limit, labels) for limit in (0.1, 0.25, 0.5, 0.75, 0.9)}
    return {
        "good": int(labels.sum()),
        "bad": int((~labels).sum()),
        "auc": auc(probabilities, labels),
        "thresholds": thresholds,
        **calibration(probabilities, labels),
    }
