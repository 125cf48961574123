"""Rights in the report: what each protocol would remove of the kept documents, alone and together, and its price.

All figures are counts over the rows that the report reads, so their memory is bounded by `MAX_ROWS` of `judged.py`.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.report.facts import RunFacts
from pipeline.report.judged import JudgedPart
from pipeline.rights.config import RightsConfig
from pipeline.rights.protocols import COLUMNS, NEEDS, Mask, reserved
from pipeline.tokens.streams import TOKENS
from schemas.errors import reading
from schemas.manifest import RUN_NAME

TOGETHER = "together"
SHOWN_LANGUAGES, SHOWN_DOMAINS = 12, 15
NO_LANGUAGE = "no language"
BY_DATE = ("robots_txt", "content_usage", "content_signal")
"""Protocols that are counted for each table of robots.txt on its own too."""

Loss = Callable[[Mapping[str, Any] | None, float, float, float], float]
"""(own law of the plan or None, parameters, training tokens, unique tokens) → expected loss [nats/token]."""


@dataclass(frozen=True)
class ProtocolRow:
    """What a protocol would remove of the kept documents."""

    name: str
    documents: int
    document_share: float
    """Share of the kept documents, 0..1."""
    chars: int
    char_share: float
    tokens: int | None
    """Estimate: this share of the characters, of all tokens of the dataset; None: there is no dataset."""
    loss: float | None
    """Increase of the expected loss without these tokens [nats/token]; None: there is no plan or no law."""


@dataclass(frozen=True)
class LanguageRow:
    """The kept documents of a language, and how many of them each protocol would remove."""

    name: str
    documents: int
    removed: tuple[int, ...]
    """In the order of the protocols."""


@dataclass(frozen=True)
class DomainRow:
    """A domain with kept documents that some protocol would remove."""

    name: str
    documents: int
    chars: int
    protocols: str


@dataclass(frozen=True)
class RightsView:
    """The section on rights."""

    rows: tuple[ProtocolRow, ...]
    """Each protocol alone, then all together."""
    languages: tuple[LanguageRow, ...]
    domains: tuple[DomainRow, ...]
    num_domains: int
    """Number of domains that some protocol would remove documents of."""
    respected: tuple[str, ...]
    dropped: int
    """Documents that the run dropped by protocols that it respects."""


@dataclass
class RightsCounts:
    """Counts over kept documents, of which `RightsView` is made; `add` counts one part."""

    protocols: Mapping[str, tuple[str, RightsConfig]]
    """Name of a row → the protocol, and the settings by which it is decided."""
    is_measured: bool = False
    """True if a part has the columns of marks."""
    all: list[int] = field(default_factory=lambda: [0, 0])
    """Kept documents and their characters."""
    removed: dict[str, list[int]] = field(default_factory=dict)
    by_language: dict[str, Counter[str]] = field(default_factory=dict)
    """Name of a row, or an empty name for all kept documents → documents by language."""
    domains: dict[str, list[int]] = field(default_factory=dict)
    by_domain: dict[str, set[str]] = field(default_factory=dict)

    def add(self, part: JudgedPart) -> None:
        """Count the rows of one part."""
        if not {"robots_meta", "robots_usage"} <= {*part.table.column_names}:
            return
        self.is_measured = True
        kept = part.kept
        languages = np.array([name or NO_LANGUAGE for name in part.strings("language")], object)
        self.all = [self.all[0] + int(kept.sum()), self.all[1] + int(part.clean_chars[kept].sum())]
        self.by_language.setdefault("", Counter()).update(languages[kept].tolist())
        table = _with_nulls(part.table)
        every: Mask = np.zeros(len(kept), bool)
        names = part.strings("domain")
        for row, (protocol, config) in self.protocols.items():
            mask = reserved(protocol, config, table) & kept
            every |= mask
            self._count(row, mask, part, languages)
            for place in np.flatnonzero(mask).tolist():
                self.by_domain.setdefault(names[place] or "", set()).add(protocol)
        self._count(TOGETHER, every, part, languages)
        for place in np.flatnonzero(every).tolist():
            entry = self.domains.setdefault(names[place] or "", [0, 0])
            entry[0] += 1
            entry[1] += int(part.clean_chars[place])

    def _count(self, row: str, mask: Mask, part: JudgedPart, languages: Any) -> None:
        entry = self.removed.setdefault(row, [0, 0])
        entry[0] += int(mask.sum())
        entry[1] += int(part.clean_chars[mask].sum())
        self.by_language.setdefault(row, Counter()).update(languages[mask].tolist())


def rights_counts(facts: RunFacts) -> RightsCounts:
    """Return empty counts for the protocols that the settings of a run can decide."""
    config = _config(facts)
    rows: dict[str, tuple[str, RightsConfig]] = {}
    for protocol in NEEDS:
        if protocol == "licence" and not config.licences:
            continue
        if protocol != "robots_txt" or config.robots:
            rows[protocol] = protocol, config
        dates = sorted(config.robots) if protocol in BY_DATE and len(config.robots) > 1 else ()
        rows |= {f"{protocol}, {date}": (protocol, config.model_copy(update={"dates": (date,)})) for date in dates}
    return RightsCounts(rows)


def _config(facts: RunFacts) -> RightsConfig:
    with reading(f"{facts.run.uri}/{RUN_NAME}", "a valid section [rights]"):
        return RightsConfig.model_validate(facts.recipe.get("rights", {}))


def _with_nulls(table: pa.Table) -> pa.Table:
    """Return the table with the columns of COLUMNS that it lacks, in which every value is null."""
    for name in (name for name in COLUMNS if name not in table.column_names):
        table = table.append_column(name, pa.nulls(table.num_rows, pa.string()))
    return table


def rights_view(facts: RunFacts, counts: RightsCounts, loss: Loss | None) -> RightsView | None:
    """Return the section on rights; None if the run did not measure marks or keeps no document."""
    if not counts.is_measured or not counts.all[0]:
        return None
    names = [*counts.protocols, TOGETHER]
    ranked = sorted(counts.by_language[""].items(), key=lambda item: (-item[1], item[0]))[:SHOWN_LANGUAGES]
    domains = sorted(counts.domains.items(), key=lambda item: (-item[1][0], -item[1][1], item[0]))
    config = _config(facts)
    dropped = facts.tables["verdicts"].content.counts.dropped if "verdicts" in facts.tables else {}
    return RightsView(
        rows=tuple(_row(name, counts, facts, loss) for name in names),
        languages=tuple(
            LanguageRow(code, number, tuple(counts.by_language[name][code] for name in names))
            for code, number in ranked
        ),
        domains=tuple(
            DomainRow(name, documents, chars, ", ".join(sorted(counts.by_domain[name])))
            for name, (documents, chars) in domains[:SHOWN_DOMAINS]
        ),
        num_domains=len(domains),
        respected=config.respect,
        dropped=sum(number for name, number in dropped.items() if name.startswith("rights/")),
    )


def _row(name: str, counts: RightsCounts, facts: RunFacts, loss: Loss | None) -> ProtocolRow:
    documents, chars = counts.removed[name]
    share = chars / (counts.all[1] or 1)
    tokens = round(share * sum(facts.tokens_left.values())) if TOKENS.name in facts.tables else None
    return ProtocolRow(name, documents, documents / counts.all[0], chars, share, tokens, _price(share, facts, loss))


def _price(share: float, facts: RunFacts, loss: Loss | None) -> float | None:
    """Return the increase of the expected loss if this share of the unique tokens were missing [nats/token].

    The model and the number of training tokens stay those of the plan, so the other tokens are repeated more often.
    """
    plan = facts.training.plan
    figures = {} if plan is None else {figure.name: figure.value for figure in plan.figures}
    if loss is None or plan is None or not plan.num_params or not {"tokens", "unique_tokens"} <= figures.keys():
        return None
    tokens, unique = figures["tokens"], figures["unique_tokens"]
    if not unique or share >= 1:
        return None
    own = plan.settings.get("plan.own_law")
    return loss(own, plan.num_params, tokens, unique * (1 - share)) - loss(own, plan.num_params, tokens, unique)
