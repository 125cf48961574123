"""The stage `templates`: lines that many pages of a host have are cut, such as menus, notices and lists of links.

The step `templates` counts the pages and stores the lines with their counts. Lines that reach the limits are cut, and
the rest of the document is measured again, so that all later steps see it as if the lines had never been there. The
checks here compare what is left with a limit. Sources of the idea: Bar-Yossef and Rajagopalan 2002, "Template detection
via data mining", section 3; Yi, Liu and Li 2003, "Eliminating noisy information in web pages".
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from pipeline.engine.stage import EVERY, Check, Cutoffs, PerDocument, Row, RowFunction
from schemas.config import Recipe, Section, decision

LITTLE_LEFT, REMAINDER = "little_left", "remainder"
ROUNDING = 1e-9
"""Keeps a product such as 0.1 * 30 = 3.0000000000000004 from being rounded up."""


class TemplatesConfig(Section):
    """Which lines are cut as templates of their host.

    A template is a line that many pages of a host have: a menu, a notice, a list of links. The step needs no text of
    other hosts and no model. Lines are compared in the normal form of `repeats.units`: lower case, digits as 0, no
    accents, no punctuation. Lines without letters and lines that look like code are not compared. Pages with the same
    URL or the same text count once. A page keeps the line with which its title begins.
    """

    min_share: float | None = Field(None, gt=0, le=1)
    """Least share of the pages of a host that have a line, for the line to be cut, 0..1. None = the step does not
    run."""
    min_pages: int = Field(5, ge=2)
    """Least number of pages of a host that have a line, for the line to be stored and cut [pages]."""
    min_host_pages: int = Field(10, ge=2)
    """Least number of pages of a host; nothing is cut from hosts with fewer [pages]."""
    min_left_chars: int = decision(1, ge=1)
    """Least text that the cuts must leave of a document [code points]; the quality checks apply in addition. A document
    from which nothing was cut is not dropped."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> "TemplatesConfig":
        ignored = sorted(self.model_fields_set - {"min_share"}) if self.min_share is None else []
        if ignored:
            raise ValueError(
                f"expected settings that have an effect, got {', '.join(ignored)} without min_share. Set "
                "templates.min_share, such as 0.3, or remove them."
            )
        return self

    def pages_needed(self, host_pages: int) -> int:
        """Return the least number of pages with a line for which the line is cut, on a host with so many pages.

        The step must be in use: `min_share` is not None.
        """
        share = 1.0 if self.min_share is None else self.min_share
        return max(self.min_pages, math.ceil(share * host_pages - ROUNDING))


def cuts_templates(recipe: Recipe) -> bool:
    """Return True if the recipe cuts templates, so that the step `templates` runs."""
    return recipe.section("templates", TemplatesConfig).min_share is not None


def chars_left(batch: pa.RecordBatch) -> npt.NDArray[np.float64]:
    """Return the length of the text without the templates of each document; NaN where nothing was cut."""
    is_cut = pc.fill_null(pc.greater(batch.column("template_chars"), 0), False).to_numpy(zero_copy_only=False)
    chars = pc.fill_null(pc.cast(batch.column("num_chars"), pa.float64()), np.nan).to_numpy(zero_copy_only=False)
    return np.where(is_cut, chars, np.nan)


def remainder_dropped(batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Return, for each document, True if a stage dropped the text without the templates."""
    dropped: npt.NDArray[np.bool_] = batch.column("remainder_drop").is_valid().to_numpy(zero_copy_only=False)
    return dropped


def _make(config: TemplatesConfig, models: Mapping[str, str]) -> RowFunction:
    def nothing(row: Row) -> None:
        """Leave the row as it is: one page alone has no templates."""

    return nothing


def _checks(config: TemplatesConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> Sequence[Check]:
    if config.min_share is None:
        return ()
    return (
        Check(REMAINDER, "", "min_share", {}, needs=("remainder_drop",), drops=remainder_dropped),
        Check(
            LITTLE_LEFT,
            "template_chars_left",
            "min_left_chars",
            {EVERY: config.min_left_chars},
            chars_left,
            ("num_chars", "template_chars"),
        ),
    )


TEMPLATES = PerDocument(
    name="templates",
    version=2,
    config=TemplatesConfig,
    reads=(),
    adds=(),
    reasons={},
    make=_make,
    ends=False,
    verdicts={
        REMAINDER: "a stage drops the text without the templates of its host, or fails on it",
        LITTLE_LEFT: "the cuts of templates leave less text than min_left_chars",
    },
    checks=_checks,
)
