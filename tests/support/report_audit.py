"""Figures of the manifests of `clusters` and `audit` of the synthetic run; shared by the report's tests."""

from typing import Any


def share(value: float | None, low: float = 0.0, high: float = 0.0, pairs: int = 0) -> dict[str, Any]:
    """Return a share as a manifest holds it."""
    return {"value": value, "low": low, "high": high, "pairs": pairs}


def recall(jaccard: float, joined: dict[str, Any], candidates: dict[str, Any]) -> dict[str, Any]:
    """Return the recall of pairs of at least one similarity."""
    return {"jaccard": jaccard, "pairs": joined["pairs"], "joined": joined, "candidates": candidates}


def point(
    lower: float, upper: float, jaccard: float, measured: dict[str, Any], expected: float | None
) -> dict[str, Any]:
    """Return one point of the measured curve."""
    hits = {"pairs": measured["pairs"], "candidates": 1, "joined": 1}
    return {"lower": lower, "upper": upper, "jaccard": jaccard, "share": measured, "expected": expected, **hits}


EMPTY_PRECISION = {"not_compared": 0, "earlier_snapshots": 0, "jaccard": {}}
AUDITED: dict[str, Any] = {
    "min_jaccard": 0.7,
    "bands_rows": [14, 8],
    "not_compared": {"without_text": 0, "too_long": 1},
    "precision": {
        "joined": EMPTY_PRECISION
        | {"jaccard": {"0.65": 37, "0.70": 663, "1.00": 1290}}
        | {"all": share(0.9815, 0.97, 0.99, 1990), "near": share(0.95, 0.93, 0.97, 700)},
        "removed": {"not_compared": 1, "earlier_snapshots": 8, "jaccard": {}}
        | {"all": share(0.9, 0.88, 0.92, 1981), "near": share(0.833, 0.8, 0.86, 612)}
        | {
            "false_positives": share(0.167, 0.14, 0.2, 612),
            "false_positives_with_numbers": share(0.25, 0.22, 0.29, 612),
        },
    },
    "losses": [],
    "recall": {
        "anchored": {
            "documents": 1234,
            "groups": 432,
            "capped_groups": 2,
            "left_out": 98_765,
            "pairs": 3210,
            "copies": 2345,
            "by_jaccard": [
                recall(0.65, share(0.61, 0.55, 0.66, 2800), share(0.63, 0.58, 0.69, 2800)),
                recall(0.7, share(0.8642, 0.82, 0.91, 2345), share(0.8976, 0.85, 0.93, 2345)),
                recall(1.0, share(1.0, 0.975, 1.0, 321), share(1.0, 0.975, 1.0, 321)),
            ],
            "curve": [
                point(0.2, 0.25, 0.2235, share(0.0004, 0.0, 0.01, 400), 0.0001),
                point(0.65, 0.7, 0.6789, share(0.47, 0.41, 0.53, 455), 0.468),
                point(1.0, 1.0, 1.0, share(1.0, 0.975, 1.0, 321), 1.0),
            ],
        },
        "uniform": {
            "documents": 2000,
            "is_all": False,
            "pairs": 17,
            "copies": 9,
            "by_jaccard": [
                recall(0.65, share(0.6, 0.3, 0.9, 11), share(0.7, 0.4, 0.9, 11)),
                recall(0.7, share(0.7778, 0.45, 0.94, 9), share(0.8889, 0.57, 0.98, 9)),
                recall(1.0, share(None), share(None)),
            ],
            "curve": [point(0.65, 0.7, 0.66, share(0.5, 0.1, 0.9, 2), 0.4)],
        },
    },
}
"""Figures of the manifest of `audit`; all of its numbers differ, and are larger than the synthetic crawl."""
FIGURES: dict[str, dict[str, Any]] = {
    "documents": {
        "toxicity_by": {"en/words and model": 32, "ja/none": 5},
        "toxic_documents": {"violence": 1, "obscenity": 3},
        "toxic_words": {"violence": 1, "obscenity": 9},
    },
    "clusters": {"joined_documents": 13, "layout": {"bands": 14, "rows": 8}},
    "audit": AUDITED,
}
NOTES: dict[str, dict[str, Any]] = {
    "clusters": {
        "pairs": [{"joined": 59, "failed": 12}, {"joined": 4, "failed": 2}],
        "rounds": 3,
        "edges_by_round": [64, 31],
        "shuffled_bytes": 81_400,
    }
}
