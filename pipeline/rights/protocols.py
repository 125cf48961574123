"""The protocols by which a document's rights can be reserved, as decisions on stored columns.

A run, a what-if and the report use these functions on the same columns, so another decision reads no text.
"""

import re
from collections.abc import Callable, Collection
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.extract.metadata_values import licence_name
from pipeline.rights.config import RightsConfig
from pipeline.rights.expressions import is_met
from pipeline.rights.preferences import RESERVES, SAME_AS, SIGNALS

_VERSION = re.compile(r"-\d[\w.+-]*\Z")
Mask = npt.NDArray[np.bool_]
Batch: TypeAlias = pa.RecordBatch | pa.Table

REASONS = {
    "robots_meta": "a robots meta tag or X-Robots-Tag has one of rights.directives",
    "tdm": "text and data mining is reserved by the TDM Reservation Protocol",
    "content_usage": "Content-Usage of AIPREF reserves training",
    "content_signal": "a content signal reserves training",
    "robots_txt": "robots.txt denies the page to one of rights.agents",
    "licence": "the licence is not one of rights.licences",
}
"""Protocol → the reason for which it drops a document."""
NEEDS = {
    "robots_meta": ("robots_meta",),
    "tdm": ("tdm_reservation", "robots_usage"),
    "content_usage": ("content_usage", "robots_usage"),
    "content_signal": ("content_usage", "robots_usage"),
    "robots_txt": ("robots_denied",),
    "licence": ("licence", "declared_licence", "header_licence"),
}
"""Protocol → the columns that decide it, besides `domain`."""
COLUMNS = tuple(dict.fromkeys(("domain", *(name for names in NEEDS.values() for name in names))))
"""Columns that the decisions read."""
TDM_FILE = "tdm-reservation"
"""Label in `robots_usage` of what the tdmrep.json of a host states."""


def reserved(protocol: str, config: RightsConfig, batch: Batch) -> Mask:
    """Return whether a protocol reserves each document (documents,), except for domains that the recipe allows."""
    mask = _DECISIONS[protocol](config, batch)
    if config.allow_domains:
        allowed = pc.is_in(batch.column("domain"), pa.array(sorted(config.allow_domains), pa.string()))
        mask = mask & ~_mask(allowed)
    return mask


def _robots_meta(config: RightsConfig, batch: Batch) -> Mask:
    agents = ("", *(f"{agent.lower()}:" for agent in config.agents))
    names = {*config.directives, *(name for own in config.directives for name in SAME_AS.get(own, ()))}
    return has_any(batch, "robots_meta", {agent + name for agent in agents for name in names})


def _tdm(config: RightsConfig, batch: Batch) -> Mask:
    own = batch.column("tdm_reservation")
    in_file = has_any(batch, "robots_usage", {f"{date}/{TDM_FILE}=1" for date in _dates(config)})
    return _mask(pc.fill_null(pc.equal(own, 1), False)) | (in_file & _mask(pc.is_null(own)))


def _content_usage(config: RightsConfig, batch: Batch) -> Mask:
    mask = _prefers(config, batch, RESERVES - SIGNALS)
    return mask | (_prefers(config, batch, {"bots=n"}) & ~_prefers(config, batch, {"train-ai=y"}))


def _content_signal(config: RightsConfig, batch: Batch) -> Mask:
    return _prefers(config, batch, RESERVES & SIGNALS)


def _prefers(config: RightsConfig, batch: Batch, entries: Collection[str]) -> Mask:
    """Return whether the header or a counted robots.txt states one of the preferences for each document."""
    in_files = {f"{date}/{entry}" for date in _dates(config) for entry in entries}
    return has_any(batch, "content_usage", entries) | has_any(batch, "robots_usage", in_files)


def _robots_txt(config: RightsConfig, batch: Batch) -> Mask:
    wanted = {f"{date}/{agent}" for date in _dates(config) for agent in config.agents}
    return has_any(batch, "robots_denied", wanted)


def _licence(config: RightsConfig, batch: Batch) -> Mask:
    stated = pc.coalesce(*(batch.column(name) for name in NEEDS["licence"]))
    names = pc.unique(stated).drop_null().to_pylist()
    wrong = pa.array([name for name in names if not is_allowed(name, config.licences)], pa.string())
    mask = _mask(pc.is_in(stated, wrong))
    return mask | _mask(pc.is_null(stated)) if config.unlicensed == "drop" else mask


def is_allowed(licence: str, allowed: Collection[str]) -> bool:
    """Return True if a licence is one of the allowed ones or a version of one: CC-BY-4.0 of CC-BY, not CC-BY-SA.

    Of an expression, such as `MIT AND CC-BY-4.0`, one alternative has to be allowed with all that apply together. The
    address of a licence of Creative Commons, as arXiv has it, is its name.
    """
    stems = [_named(own).upper() for own in allowed]
    licence = _named(licence)
    return licence.upper() in stems or is_met(licence.upper(), lambda name: _is_version(name, stems))


def _named(licence: str) -> str:
    is_address = licence.lower().startswith(("https://", "http://"))
    return (licence_name(licence) if is_address else None) or licence


def _is_version(name: str, stems: Collection[str]) -> bool:
    return any(name == stem or (name.startswith(f"{stem}-") and _VERSION.match(name, len(stem))) for stem in stems)


_DECISIONS: dict[str, Callable[[RightsConfig, Batch], Mask]] = {
    "robots_meta": _robots_meta,
    "tdm": _tdm,
    "content_usage": _content_usage,
    "content_signal": _content_signal,
    "robots_txt": _robots_txt,
    "licence": _licence,
}


def _dates(config: RightsConfig) -> Collection[str]:
    return config.dates or config.robots


def has_any(batch: Batch, name: str, wanted: Collection[str]) -> Mask:
    """Return whether the list of each row in a column has one of the wanted values (documents,)."""
    column = batch.column(name)
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    hits = _mask(pc.is_in(column.flatten(), pa.array(sorted(wanted), pa.string())))
    mask: Mask = np.bincount(np.repeat(np.arange(len(column)), lengths)[hits], minlength=len(column)) > 0
    return mask


def _mask(values: pa.Array | pa.ChunkedArray) -> Mask:
    mask: Mask = np.asarray(values.to_numpy() if isinstance(values, pa.ChunkedArray) else values.to_numpy(False), bool)
    return mask
