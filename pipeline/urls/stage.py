"""The stage `urls`: which lists have the URL of a document, and which listed words it contains.

All hits are columns. What drops a document is decided later, by `[urls]` on these columns.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.engine.stage import EVERY, Check, Cutoffs, Drop, PerDocument, Row, RowFunction
from pipeline.urls.address import address_of
from pipeline.urls.config import BUILT_IN, LIMIT_OF, UrlsConfig
from pipeline.urls.lists import parts_of
from pipeline.urls.rules import UrlWords, make_matcher, read_words
from pipeline.urls.table import ALLOW, ALLOWED, FILE, LIST, compile_table, make_table, open_table
from schemas.tables import field as column

BUILT_IN_WORDS = Path(__file__).with_name("banned_words.txt")
LISTS, ALLOWED_COLUMN = "url_lists", "url_allowed"
LISTED = "listed"
"""Reason of a document that is dropped before its extraction."""
COLUMN_OF = {
    "banned_words": "url_banned_words",
    "soft_banned_words": "url_soft_words",
    "banned_subwords": "url_banned_subwords",
}
"""The column of each setting that names a file of words."""


def make_urls(config: UrlsConfig, models: Mapping[str, str]) -> RowFunction:
    """Open the table of lists and read the words; return the function that adds the columns to a row."""
    words = [
        read_words(models[name], f"urls.{name}", is_part=name == "banned_subwords") if name in models else ()
        for name in COLUMN_OF
    ]
    match = make_matcher(open_table(models[FILE]) if FILE in models else make_table([], 0), UrlWords(*words)).match
    counted = [(place, COLUMN_OF[name]) for place, name in enumerate(COLUMN_OF, 1) if name in models]
    names = [(2 << number, name) for number, name in enumerate(sorted(config.block_lists))]
    has_allowed, empty = config.allow_list is not None, dict.fromkeys(URLS.adds)
    is_used = bool(counted or config.has_lists)

    def urls(row: Row) -> None:
        row.update(empty)
        url = row["url"] if is_used else None
        address = address_of(url) if url else None
        if address is None:
            return
        hits = match(*address)
        if names:
            row[LISTS] = [name for bit, name in names if hits[0] & bit] if hits[0] else []
        if has_allowed:
            row[ALLOWED_COLUMN] = bool(hits[0] & ALLOWED)
        for place, name in counted:
            row[name] = hits[place]

    return urls


def make_early_urls(config: UrlsConfig, models: Mapping[str, str]) -> RowFunction:
    """Return the function that drops a row whose URL a list of `early_lists` has and the allow list has not."""
    measure, early = make_urls(config, models), frozenset(config.early_lists)

    def early_urls(row: Row) -> Drop | None:
        measure(row)
        is_listed = not row[ALLOWED_COLUMN] and not early.isdisjoint(row[LISTS] or ())
        return Drop(LISTED) if is_listed else None

    return early_urls


def model_files(config: UrlsConfig) -> dict[str, str]:
    """Return the paths of lists and words, by the names that `compile_table` and `make_urls` read."""
    lists = {f"{LIST}{name}:": path for name, path in config.block_lists.items()}
    if config.allow_list is not None:
        lists[ALLOW] = config.allow_list
    files = {f"{name}{n}": part for name, path in lists.items() for n, part in enumerate(parts_of(path))}
    words = {name: path for name in COLUMN_OF if (path := getattr(config, name)) is not None}
    return files | {name: str(BUILT_IN_WORDS) if path == BUILT_IN else path for name, path in words.items()}


def is_allowed(batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Return for each document whether the allow list has its URL."""
    allowed: npt.NDArray[np.bool_] = batch.column(ALLOWED_COLUMN).fill_null(False).to_numpy(zero_copy_only=False)
    return allowed


def is_listed(category: str, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Return for each document whether the lists of a category have its URL, and the allow list has not."""
    lists = batch.column(LISTS)
    hits = np.zeros(len(batch), bool)
    values = lists.flatten().to_numpy(zero_copy_only=False)
    rows = pc.list_parent_indices(lists).to_numpy()
    hits[rows[values == category]] = True
    return hits & ~is_allowed(batch)


def count_of(name: str, batch: pa.RecordBatch) -> npt.NDArray[np.float64]:
    """Return a count of words for each document; NaN if it is null or the allow list has the URL."""
    counts = batch.column(name).cast(pa.float64()).to_numpy(zero_copy_only=False)
    return np.where(is_allowed(batch), np.nan, counts)


def checks(config: UrlsConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> tuple[Check, ...]:
    """Return a check for each category that drops documents, and for each limit of words."""
    categories = sorted(config.block_lists if config.drop_lists is None else config.drop_lists)
    listed = [
        Check(
            *("url_list", "", "drop_lists", {}),
            needs=(LISTS, ALLOWED_COLUMN),
            label=name,
            drops=partial(is_listed, name),
        )
        for name in categories
    ]
    limits = [(COLUMN_OF[name], limit, getattr(config, limit)) for name, limit in LIMIT_OF.items()]
    used = {COLUMN_OF[name] for name in COLUMN_OF if getattr(config, name) is not None}
    counted = [
        Check(name, name, setting, {EVERY: limit}, partial(count_of, name), (name, ALLOWED_COLUMN))
        for name, setting, limit in limits
        if limit is not None and name in used
    ]
    return (*listed, *counted)


URLS = PerDocument(
    name="urls",
    version=2,
    config=UrlsConfig,
    reads=("url",),
    adds=(LISTS, ALLOWED_COLUMN, *COLUMN_OF.values()),
    reasons={LISTED: "a list of `urls.early_lists` has its address; it was not extracted"},
    verdicts={
        "url_list": "a list of domains and URLs has its address",
        "url_banned_words": "its address has banned words",
        "url_soft_words": "its address has too many words that are suspect together",
        "url_banned_subwords": "its address contains banned character sequences",
    },
    make=make_urls,
    models=model_files,
    compile=compile_table,
    checks=checks,
    ends=False,
    columns=(
        column(
            LISTS, pa.list_(pa.field("element", pa.string())), "categories whose lists have the URL; null: no lists"
        ),
        column(ALLOWED_COLUMN, pa.bool_(), "true if the allow list has the URL; null: no allow list"),
        column("url_banned_words", pa.int32(), "different banned words in the URL; null: not measured", "words"),
        column("url_soft_words", pa.int32(), "different soft banned words in the URL; null: not measured", "words"),
        column(
            "url_banned_subwords", pa.int32(), "different banned sequences in the URL; null: not measured", "sequences"
        ),
    ),
)
"""The stage of URL rules."""
