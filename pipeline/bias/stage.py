"""The stage `bias`: adds the groups of each document, by which an audit compares how often filters drop documents.

It runs after the language stage, and on documents that the language stage drops too, as that one is audited as well.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from pipeline.bias.groups import BUILT_IN, COUNTRY, DIALECT, IDENTITY, PAGE, TOPIC, GroupFinder, country_of, read_groups
from pipeline.engine.stage import PerDocument, Row, RowFunction
from schemas.config import Section, decision, location

SHIPPED = "builtin"
GROUPS = "groups"
"""Name of the column, and of the file of groups among the models of the stage."""
Kind = Literal["identity", "dialect", "topic", "page", "country"]


class BiasConfig(Section):
    """The section `[bias]` of a recipe: the groups of documents, and what the audit of filters reports or refuses."""

    groups: str = location(SHIPPED)
    """File of groups: `builtin`, or the path of a TOML file of the same form as `pipeline/bias/groups.toml`."""
    kinds: tuple[Kind, ...] = ("identity", "dialect", "topic", "page", "country")
    """Kinds of groups that are measured; empty turns the audit off."""
    min_terms: int = Field(2, ge=1)
    """Minimum number of distinct terms of a group of people in a document of the group. One term alone is often a name
    or a remark."""
    min_markers: int = Field(3, ge=1)
    """Minimum number of distinct markers of a dialect in a document of the dialect."""
    min_topic_words: int = Field(4, ge=1)
    """Minimum number of distinct words of a topic in a document of the topic."""
    min_documents: int = decision(30, ge=2)
    """Minimum number of documents of a group that reached a filter; smaller groups are not compared."""
    max_error: float = decision(0.05, gt=0, lt=1)
    """Share of false findings that is accepted among the findings of a run (Benjamini and Hochberg 1995)."""
    min_difference: float = decision(0.01, ge=0, le=1)
    """Minimum difference of two drop rates that is a finding."""
    max_ratio: float | None = decision(None, ge=1)
    """Maximum ratio of the drop rate of a group to that of comparable other documents. A finding above it stops the run
    after the step with the filter. None: none does."""

    @model_validator(mode="after")
    def _used(self) -> "BiasConfig":
        kind_of = {"min_terms": IDENTITY, "min_markers": DIALECT, "min_topic_words": TOPIC}
        idle = [name for name, kind in kind_of.items() if name in self.model_fields_set and kind not in self.kinds]
        if idle:
            raise ValueError(
                f"{', '.join(idle)}: expected {', '.join(kind_of[name] for name in idle)} among the kinds, got "
                f"{list(self.kinds)}. Add them to bias.kinds, or remove {', '.join(f'bias.{name}' for name in idle)}."
            )
        return self


def make_bias(config: BiasConfig, models: Mapping[str, str]) -> RowFunction:
    """Read the groups, and return the function that adds the column `groups` to a row. Raises ConfigError for the file.

    A row has a null there if no kind of groups is measured, or if it was dropped before its language was predicted.
    """
    least = {IDENTITY: config.min_terms, DIALECT: config.min_markers, TOPIC: config.min_topic_words}
    kinds = frozenset(config.kinds)
    finder = GroupFinder(read_groups(models[GROUPS]), {kind: number for kind, number in least.items() if kind in kinds})

    def bias(row: Row) -> None:
        row[GROUPS] = None
        language = row.get("language")
        if not kinds or language is None:
            return
        groups = finder.find(row["text"], (language, row.get("declared_language")))
        page, country = row.get("page_type"), country_of(row.get("domain"))
        if PAGE in kinds and page is not None:
            groups.append(f"{PAGE}/{page}")
        if COUNTRY in kinds and country is not None:
            groups.append(f"{COUNTRY}/{country}")
        row[GROUPS] = groups

    return bias


def model_files(config: BiasConfig) -> dict[str, str]:
    """Return the path of the file of groups, by the name that `make_bias` reads."""
    return {GROUPS: str(BUILT_IN) if config.groups == SHIPPED else config.groups}


BIAS = PerDocument(
    name="bias",
    version=3,
    config=BiasConfig,
    reads=("text", "language", "declared_language", "page_type", "domain"),
    adds=(GROUPS,),
    reasons={},
    make=make_bias,
    models=model_files,
    after_drops=True,
)
"""The stage of groups."""
