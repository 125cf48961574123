"""The id of a paper on arXiv, from the name of its file."""

import posixpath
import re
from datetime import UTC, datetime

NEW_ID = re.compile(r"(\d{2})(\d{2})\.(\d{4,5})(v\d+)?")
OLD_ID = re.compile(r"([a-z-]+(?:\.[A-Z]{2})?)[/_]?(\d{2})(\d{2})(\d{3})(v\d+)?")
_SUFFIX = re.compile(r"(?:\.tar\.gz|\.tgz|\.gz|\.tex|\.pdf|\.tar)$", re.IGNORECASE)


def identify(name: str) -> tuple[str, datetime | None]:
    """Return the id of the paper in a package of this name, and the month in which it was submitted.

    If the name is none of arXiv's, the id is the name without its suffix, and the date is None.
    """
    stem = _SUFFIX.sub("", posixpath.basename(name))
    if match := NEW_ID.fullmatch(stem):
        year, month = 2000 + int(match[1]), int(match[2])
    elif match := OLD_ID.fullmatch(stem):
        year, month = int(match[2]), int(match[3])
        year += 1900 if year > 90 else 2000
        stem = f"{match[1]}/{match[2]}{match[3]}{match[4]}{match[5] or ''}"
    else:
        return stem, None
    return (stem, datetime(year, month, 1, tzinfo=UTC)) if 1 <= month <= 12 else (stem, None)
