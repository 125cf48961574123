"""What a demo crawl planted against what the run made of it: found and planted for each kind.

The truth file is joined with the tables by place in the WARC file, else by URL, and read whole: it belongs to crawls
that are built to be small. Planted values are never shown.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resiliparse.parse.encoding import map_encoding_to_html5

from pipeline.engine.stage import Row
from pipeline.report.facts import EARLIER_DROPS, RunFacts
from pipeline.tokens.streams import MIX_RULE, TOKENS
from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.tables import to_mapping

FROM_DOCUMENTS = ["doc_id", "url", "split", "offset", "record_type", "charset", "language", "drop_stage", "drop_rule"]
FROM_VERDICTS = ["doc_id", "drop_stage", "drop_rule"]
FROM_DEDUP = ["doc_id", "cluster", "drop_stage", "drop_rule"]
FROM_CLEAN = ["doc_id", "pii_counts", "drop_stage", "drop_rule"]
COPIES, LEVELS, QUALITY, LANGUAGES, PII, TOXIC, PAGES, BROKEN = (
    "Exact copies",
    "Near copies by true Jaccard similarity",
    "Low-quality pages by rule",
    "Languages and charsets",
    "Personal data by type",
    "Toxic pages",
    "Pages that must be kept",
    "Records that are no good page",
)
QUALITY_RULES = ("gopher_", "c4_", "fineweb_", "refinedweb_", "boilerplate_", "markup_", "code_")
"""What the rules of the quality stage begin with."""
CLEAN = ("kept", f"{TOKENS.name}/{MIX_RULE}")
"""Outcomes of the documents that reached the redaction."""
SAME_CHARSET = {"gbk": "gb18030"}
"""A superset decodes its subset's pages to the same text."""


@dataclass(frozen=True)
class Score:
    """One kind: how many were planted and found, and what became of the others."""

    group: str
    kind: str
    wanted: str
    planted: int
    found: int
    others: str = ""
    judged: bool = True
    """Whether found = planted is what should be; some kinds may go either way."""


@dataclass
class RecordOutcome:
    """What the run made of one record."""

    row: Row
    outcome: str
    """`kept`, or the `stage/rule` that dropped it."""
    cluster: bytes | None = None
    pii: Mapping[str, int] = field(default_factory=dict)

    @property
    def rule(self) -> str:
        """The rule alone."""
        return self.outcome.rpartition("/")[2]


@dataclass(frozen=True)
class PlantedResult:
    """One line of the truth file and what became of it; no fate if the run has no row for it."""

    line: Mapping[str, Any]
    fate: RecordOutcome | None


def score(facts: RunFacts, path: str) -> list[Score]:
    """Found and planted for every kind of a truth file. Raises ConfigError if there is no such file."""
    lines = read_truth(path)
    if "documents" not in facts.tables:
        return []
    fates = _fates(facts)
    planted = _join(lines, fates)
    groups: dict[str, list[PlantedResult]] = {}
    for item in planted:
        groups.setdefault(item.line["kind"], []).append(item)
    originals = {item.line["group"]: item for item in groups.pop("original", [])}
    scores = [_score_kind(kind, items, originals) for kind, items in sorted(groups.items())]
    scores += _score_languages(planted) + _score_pii(planted) + [_score_ordinary(lines, fates)]
    order = (COPIES, LEVELS, QUALITY, LANGUAGES, PII, TOXIC, PAGES, BROKEN)
    return sorted(scores, key=lambda row: (order.index(row.group), row.kind))


def read_truth(path: str) -> list[dict[str, Any]]:
    """The lines of a truth file. Raises ConfigError if there is none or it holds something else."""
    folder, _, name = path.rpartition("/")
    store = Store(folder or ".")
    if not store.exists(name):
        raise ConfigError(f"truth {path}: expected a truth file, got nothing. `penstock demo-crawl` writes it.")
    try:
        lines = [json.loads(line) for line in store.read_bytes(name).splitlines()]
        kinds = [line["kind"] for line in lines]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"truth {path}: expected one planted record a line, got {error!r}. Give truth.jsonl."
        ) from error
    return lines if kinds else []


def _fates(facts: RunFacts) -> list[RecordOutcome]:
    """Every row of the run with its final outcome."""
    fates = {}
    for row in _read(facts, "documents", FROM_DOCUMENTS):
        fates[row["doc_id"]] = RecordOutcome(row, _outcome(row))
    for row in _read(facts, "verdicts", FROM_VERDICTS):
        fates[row["doc_id"]].outcome = _outcome(row)
    for row in _read(facts, "dedup", FROM_DEDUP):
        fate = fates[row["doc_id"]]
        fate.cluster = row["cluster"]
        fate.outcome = fate.outcome if _outcome(row) in ("kept", *EARLIER_DROPS) else _outcome(row)
    for row in _read(facts, "repeats", FROM_VERDICTS):
        fate = fates[row["doc_id"]]
        fate.outcome = fate.outcome if _outcome(row) in ("kept", *EARLIER_DROPS) else _outcome(row)
    for row in _read(facts, "clean", FROM_CLEAN):
        fate = fates[row["doc_id"]]
        fate.pii = to_mapping(row["pii_counts"]) or {}
        fate.outcome = _outcome(row) if fate.outcome == "kept" else fate.outcome
    for part in range(facts.num_parts("clean")) if "clean" in facts.tables else ():
        for identifier, drop in facts.left_out(part).items():
            fates[identifier].outcome = f"{TOKENS.name}/{drop.rule}"
    return list(fates.values())


def _outcome(row: Row) -> str:
    return "kept" if row["drop_stage"] is None else f"{row['drop_stage']}/{row['drop_rule']}"


def _read(facts: RunFacts, table: str, columns: list[str]) -> Iterator[Row]:
    for part in range(facts.num_parts(table)) if table in facts.tables else ():
        yield from facts.read_part(table, part, columns)


def _join(lines: Sequence[Mapping[str, Any]], fates: Sequence[RecordOutcome]) -> list[PlantedResult]:
    # The first row of a place wins: what a damaged record drags along shares its start.
    by_place = {(fate.row["split"].rpartition("/")[2], fate.row["offset"]): fate for fate in reversed(fates)}
    pages = (fate for fate in fates if fate.row["record_type"] == "response")
    by_url = {fate.row["url"]: fate for fate in pages}
    return [
        PlantedResult(line, by_place.get((line["file"], line["offset"])) or by_url.get(line["url"])) for line in lines
    ]


def _score_kind(kind: str, items: Sequence[PlantedResult], originals: Mapping[str, PlantedResult]) -> Score:
    """One kind that is judged by what became of each page as a whole."""
    first = items[0].line
    if "group" in first:
        return _score_copies(kind, items, originals)
    rules = {rule for item in items for rule in item.line["rules"]}
    wrong = [item for item in items if not _as_expected(item)]
    others = _outcomes(wrong)
    found = len(items) - len(wrong)
    if kind == "toxic":
        return Score(TOXIC, kind, "dropped by a toxicity rule", len(items), found, others)
    if kind in ("language", "wrong_charset") or not rules:
        name = {"language": "declared rightly", "wrong_charset": "declared wrongly or not"}.get(kind, kind)
        group = LANGUAGES if kind in ("language", "wrong_charset") else PAGES
        return Score(
            group,
            name,
            "kept where the language is wanted, else dropped" if rules else "kept",
            len(items),
            found,
            others,
        )
    wanted = "dropped by this rule" if rules == {kind} else f"dropped by {' or '.join(sorted(rules))}"
    is_quality = any(rule.startswith(QUALITY_RULES) for rule in rules)
    return Score(QUALITY if is_quality else BROKEN, kind, wanted, len(items), found, others)


def _as_expected(item: PlantedResult) -> bool:
    if item.fate is None:
        return False
    return item.fate.rule in item.line["rules"] if item.line["rules"] else item.fate.outcome == "kept"


def _outcomes(items: Sequence[PlantedResult]) -> str:
    """What became of some items, most frequent first."""
    counts = Counter(item.fate.rule if item.fate else "no row" for item in items)
    return ", ".join(
        f"{number} {name}" for name, number in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    )


def _score_copies(kind: str, items: Sequence[PlantedResult], originals: Mapping[str, PlantedResult]) -> Score:
    """Copies are found when they share a cluster with their original, whichever of them stays."""
    joined = [item for item in items if _same_cluster(item, originals.get(item.line["group"]))]
    expected = {item.line["expected"] for item in items}
    apart = _outcomes([item for item in items if item not in joined])
    if kind.startswith("exact"):
        name = "same bytes, other URL" if kind == "exact_bytes" else "same text, other layout"
        return Score(COPIES, name, "joined with the original", len(items), len(joined), apart)
    name = f"0.{kind.rpartition('_')[2]}"
    if expected == {"drop"}:
        return Score(LEVELS, name, "joined with the original", len(items), len(joined), apart)
    if expected == {"keep"}:
        others = f"{len(joined)} joined" if joined else ""
        return Score(LEVELS, name, "left apart", len(items), len(items) - len(joined), others)
    return Score(LEVELS, name, "joined or not, either is right", len(items), len(joined), apart, judged=False)


def _same_cluster(item: PlantedResult, original: PlantedResult | None) -> bool:
    fates = (item.fate, original.fate if original else None)
    clusters = {fate.cluster if fate else None for fate in fates}
    return len(clusters) == 1 and None not in clusters


def _score_languages(planted: Sequence[PlantedResult]) -> list[Score]:
    """Language and charset of the pages in other languages, as the run recognised them."""
    items = [item for item in planted if item.line["kind"] in ("language", "wrong_charset") and item.fate]
    found = []
    for name in ("charset", "language"):
        same = _same_charset if name == "charset" else str.__eq__
        by_value: dict[str, list[PlantedResult]] = {}
        for item in items:
            by_value.setdefault(item.line[name], []).append(item)
        for value, members in by_value.items():
            seen = [item.fate.row[name] or "none" for item in members if item.fate]
            wrong = Counter(other for other in seen if not same(value, other))
            others = ", ".join(f"{number} {other}" for other, number in sorted(wrong.items()))
            found.append(
                Score(LANGUAGES, f"{name} {value}", "recognised", len(seen), len(seen) - wrong.total(), others)
            )
    return found


def _same_charset(planted: str, found: str) -> bool:
    names = [map_encoding_to_html5(name) or name for name in (planted, found)]
    return len({SAME_CHARSET.get(name, name) for name in names}) == 1


def _score_pii(planted: Sequence[PlantedResult]) -> list[Score]:
    """Values replaced on the pages that reached the redaction, by type; counts only."""
    wanted: Counter[str] = Counter()
    found: Counter[str] = Counter()
    more: Counter[str] = Counter()
    for item in planted:
        if "pii" in item.line and item.fate and item.fate.outcome in CLEAN:
            for name, number in item.line["pii"].items():
                wanted[name] += number
                found[name] += min(number, item.fate.pii.get(name, 0))
            more.update(item.fate.pii)
    extra = {name: number - found[name] for name, number in more.items()}
    return [
        Score(
            PII, name, "replaced", number, found[name], f"{extra[name]} more in these pages" if extra.get(name) else ""
        )
        for name, number in sorted(wanted.items())
    ]


def _score_ordinary(lines: Sequence[Mapping[str, Any]], fates: Sequence[RecordOutcome]) -> Score:
    """The pages that nothing was planted in: all should be kept."""
    urls = {line["url"] for line in lines}
    pages = [fate for fate in fates if fate.row["record_type"] == "response" and fate.row["url"] not in urls]
    lost = [PlantedResult({}, fate) for fate in pages if fate.outcome != "kept"]
    return Score(PAGES, "ordinary pages", "kept", len(pages), len(pages) - len(lost), _outcomes(lost))
