"""The test on the ranks of planted identifiers, and the check of a file with its results; standard library only.

python ranks.py RESULT [KEY]: RESULT is a file of `penstock plant-test --out`, KEY the file of the secret key. All
numbers are computed again from the ranks: `rank` of `controls` means that so many controls have a higher loss than the
identifier, and half of those with an equal one. For a model that never read the identifiers all ranks are equally
probable, with the mean 1/2 as a share of the controls, and a known variance.
"""

import hashlib
import hmac
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean, pvariance
from typing import Any

LEVEL = 0.95
"""Coverage of the interval. An identifier counts as learned if the mean is above 1/2 at the same level."""
POWER = 0.8
QUANTILE = NormalDist().inv_cdf(0.5 + LEVEL / 2)
LEARNED, BELOW, CHANCE = "learned", "less probable than never seen", "not distinguishable from never seen"


def rank_test(ranks: Sequence[float], controls: int) -> dict[str, Any]:
    """Return the test of the ranks of n identifiers among `controls` (at least 1) controls each; n may be 0.

    `mean`: mean share of controls with a higher loss, as AUC; `z`: its distance from 1/2 in standard deviations if no
    identifier was read; `p`: probability of such a z or a higher one; `low`, `high`: interval of the mean; `verdict`;
    `detectable`: the smallest mean that n identifiers show with a probability of 0.8.

    The interval is Wilson's, with n times the ratio of the variance of a yes-or-no value to that of the shares. That is
    the larger of the variance of uniform ranks and the measured one. Source: Wilson 1927, JASA 22, page 209.
    """
    shares = [rank / controls for rank in ranks]
    if not shares:
        return dict.fromkeys(("mean", "z", "p", "low", "high", "detectable", "verdict")) | {"n": 0}
    number, mean = len(shares), fmean(shares)
    variance = (controls + 2) / (12 * controls)
    z = (mean - 0.5) / math.sqrt(variance / number)
    of_binary = mean * (1 - mean)
    ratio = max(4 * variance, pvariance(shares) / of_binary if of_binary else 0.0)
    trials = number / min(ratio, 1.0)
    middle = (mean + QUANTILE**2 / (2 * trials)) / (1 + QUANTILE**2 / trials)
    half = QUANTILE / (1 + QUANTILE**2 / trials) * math.sqrt(of_binary / trials + (QUANTILE / (2 * trials)) ** 2)
    detectable = 0.5 + (QUANTILE + NormalDist().inv_cdf(POWER)) * math.sqrt(variance / number)
    return {
        "n": number,
        "mean": mean,
        "z": z,
        "p": math.erfc(z / math.sqrt(2)) / 2,
        "low": middle - half,
        "high": middle + half,
        "detectable": min(detectable, 1.0),
        "verdict": LEARNED if z > QUANTILE else BELOW if z < -QUANTILE else CHANCE,
    }


def commit(content: bytes) -> str:
    """Return the commitment to a key that the manifest of `clean` has. Hexadecimal digits in a key file are decoded."""
    digits = content.strip()
    is_hex = re.fullmatch(rb"(?:[0-9a-f]{2})+|(?:[0-9A-F]{2})+", digits)
    key = bytes.fromhex(digits.decode()) if is_hex else content
    return hmac.new(key, b"penstock commitment plant", hashlib.sha256).hexdigest()


def problems_of(result: Mapping[str, Any], key: bytes | None = None) -> list[str]:
    """Return what differs between a result and what follows from its ranks, and from a key if there is one."""
    found = [] if key is None or commit(key) == result["commitment"] else ["the key is another one"]
    for group, stated in result["groups"].items():
        ranks = [own["rank"] for own in result["documents"] if own["group"] == group]
        for name, value in rank_test(ranks, result["controls"]).items():
            same = stated[name] == value
            if not same and isinstance(value, float) and isinstance(stated[name], float):
                same = math.isclose(stated[name], value, rel_tol=1e-9, abs_tol=1e-12)
            found += [] if same else [f"{group}: {name} is {value} by the ranks, not {stated[name]}"]
    return found


if __name__ == "__main__":
    try:
        checked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        secret = Path(sys.argv[2]).read_bytes() if len(sys.argv) > 2 else None
        wrong = problems_of(checked, secret)
        print("\n".join(wrong or [f"{name}: {own}" for name, own in checked["groups"].items()]))
        sys.exit(1 if wrong else 0)
    except (OSError, ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        sys.exit(f"not checked: {error!r}")
