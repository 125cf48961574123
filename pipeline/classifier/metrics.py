"""Metrics of a binary classifier: AUC, precision and recall, Cohen's kappa, and calibration, all exact.

Labels are True for the good class. Sums have a fixed order (stable sort by score), so equal input gives equal bytes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from schemas.errors import ContractError

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.bool_]

BINS = 10
"""Default number of reliability bins."""


def auc(scores: Floats, labels: Labels) -> float:
    """Return the area under the ROC curve: the share of (good, bad) pairs whose good document has the higher score.

    A tie counts as a half. Exact, because counted in integers. Raises ContractError if a class is missing.
    """
    num_good = int(labels.sum())
    num_bad = len(labels) - num_good
    if not num_good or not num_bad:
        raise ContractError(
            f"AUC: expected documents of two classes, got {num_good} good and {num_bad} bad. "
            "Add documents of the missing class."
        )
    _, rank = np.unique(scores, return_inverse=True)
    good = np.bincount(rank[labels], minlength=int(rank.max()) + 1)
    bad = np.bincount(rank[~labels], minlength=len(good))
    bad_below = np.cumsum(bad) - bad
    twice_won = int((good * (2 * bad_below + bad)).sum())
    return twice_won / (2 * num_good * num_bad)


def confusion(kept: Labels, labels: Labels) -> dict[str, int]:
    """Return the numbers of good and bad documents that are kept and dropped."""
    return {
        "good_kept": int((kept & labels).sum()),
        "good_dropped": int((~kept & labels).sum()),
        "bad_kept": int((kept & ~labels).sum()),
        "bad_dropped": int((~kept & ~labels).sum()),
    }


def ratio(part: int, whole: int) -> float | None:
    """Return the share part / whole; None if whole is 0."""
    return part / whole if whole else None


def precision_recall(kept: Labels, labels: Labels) -> dict[str, float | None]:
    """Return the precision (share of kept documents that are good) and recall (share of good ones that are kept)."""
    counts = confusion(kept, labels)
    good_kept = counts["good_kept"]
    return {
        "precision": ratio(good_kept, good_kept + counts["bad_kept"]),
        "recall": ratio(good_kept, good_kept + counts["good_dropped"]),
    }


def kappa(first: Labels, second: Labels) -> float | None:
    """Return Cohen's kappa of two labelings of the same documents: 1 = agreement, 0 = agreement by chance.

    None if both labelings are the same constant. Source: Cohen 1960, "A coefficient of agreement for nominal scales".
    """
    total = len(first)
    agreed = int((first == second).sum())
    by_chance = int(first.sum()) * int(second.sum()) + int((~first).sum()) * int((~second).sum())
    return (agreed * total - by_chance) / (total * total - by_chance) if by_chance != total * total else None


def calibration(probabilities: Floats, labels: Labels, bins: int = BINS) -> dict[str, Any]:
    """Return the Brier score, the expected calibration error, and the reliability bins of equal width.

    A bin holds [i / bins, (i + 1) / bins), the last bin also 1; empty bins are omitted. The error is the mean over
    documents of |mean probability - share of good documents| of their bin. Sources: Brier 1950; Guo et al. 2017,
    arXiv 1706.04599.
    """
    order = np.lexsort((labels, probabilities))
    probabilities, labels = probabilities[order], labels[order]
    bin_of = np.minimum((probabilities * bins).astype(np.int64), bins - 1)
    rows = []
    for number in np.unique(bin_of).tolist():
        inside = bin_of == number
        count, good = int(inside.sum()), int(labels[inside].sum())
        mean = float(np.add.reduce(probabilities[inside])) / count
        rows.append({"from": number / bins, "documents": count, "mean_probability": mean, "good_share": good / count})
    error = sum(row["documents"] * abs(row["mean_probability"] - row["good_share"]) for row in rows) / len(labels)
    brier = float(np.add.reduce((probabilities - labels) ** 2)) / len(labels)
    return {"brier": brier, "expected_calibration_error": error, "bins": rows}


def heldout_figures(probabilities: Floats, labels: Labels) -> dict[str, Any]:
    """Return all metrics of a model on held-out documents; precision and recall are by threshold."""
    thresholds = {str(limit): precision_recall(probabilities >= limit, labels) for limit in (0.1, 0.25, 0.5, 0.75, 0.9)}
    return {
        "good": int(labels.sum()),
        "bad": int((~labels).sum()),
        "auc": auc(probabilities, labels),
        "thresholds": thresholds,
        **calibration(probabilities, labels),
    }
