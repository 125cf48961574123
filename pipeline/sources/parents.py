"""The parents of a row: the documents that its text was made from, such as the original of a translation.

A parent is named by its id or by its URL. A row whose parents cannot be read is dropped, because a takedown of a parent
could not find it.
"""

import re
from typing import Any

from pipeline.engine.stage import Drop, Row
from pipeline.sources.provenance import encodable
from schemas.ids import DOC_ID_BYTES
from schemas.urls import resolved_host

MAX_PARENTS = 1_000
"""Maximum number of parents of a row."""
MAX_PARENT_CHARS = 2_048
"""Maximum length of the URL of a parent [code points]."""
DOC_ID = re.compile(rf"[0-9a-fA-F]{{{2 * DOC_ID_BYTES}}}")


def set_parents(row: Row, value: Any) -> Drop | None:
    """Set the parents of a row, in their order without repetitions, and return None.

    `value` is one text or a list of texts. None, an empty list and an empty text name no parent. If it names too many
    parents, or another thing than ids and URLs, nothing is set, and a Drop is returned.
    """
    if value is None or value == "":
        return None
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, list | tuple):
        return Drop("bad_parents")
    if len(named) > MAX_PARENTS:
        return Drop("too_many_parents", float(len(named)), float(MAX_PARENTS))
    parents = dict.fromkeys(_parent(name) for name in named)
    if None in parents:
        return Drop("bad_parents")
    if parents:
        row["parents"] = [*parents]
    return None


def _parent(name: Any) -> str | None:
    """Return an id in lower case, or a URL without white space around it; None if the value is neither."""
    if not isinstance(name, str) or len(name) > MAX_PARENT_CHARS:
        return None
    text: str = encodable(name.strip())
    if DOC_ID.fullmatch(text):
        return text.lower()
    return text if "://" in text and resolved_host(text) else None
