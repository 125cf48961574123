"""Comparison of a run with the truth file of a demo crawl: for each kind of page, the number with the expected outcome.

A line of the truth file is joined with the tables by offset in the WARC file, else by URL. The file is read as a whole,
since demo crawls are small. The planted personal data is never shown.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resiliparse.parse.encoding import map_encoding_to_html5

from pipeline.engine.stage import Row
from pipeline.report.facts import RunFacts, is_earlier_drop
from pipeline.tokens.streams import MIX_RULE, TOKENS
from schemas.entries import to_mapping
from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.tables import LATER_VERDICTS

VERDICT = ["doc_id", "drop_stage", "drop_rule"]
FROM_DOCUMENTS = [*VERDICT, "url", "split", "offset", "record_type", "charset", "language"]
MORE = {"dedup": ["cluster"], "clean": ["pii_counts"]}
"""Table → columns that are read from it in addition to VERDICT."""
COPIES, LEVELS, QUALITY, LANGUAGES, PII, TOXIC, PAGES, BROKEN = (
    "Exact copies",
    "Near copies by true Jaccard similarity",
    "Low-quality pages by rule",
    "Languages and charsets",
    "Personal data by type",
    "Toxic pages",
    "Pages to keep",
    "Invalid records",
)
QUALITY_RULES = ("gopher_", "c4_", "fineweb_", "refinedweb_", "boilerplate_", "markup_", "code_")
"""Prefixes of the rules of the quality stage."""
CLEAN = ("kept", f"{TOKENS.name}/{MIX_RULE}")
"""Outcomes of the documents whose personal data was replaced."""
SAME_CHARSET = {"gbk": "gb18030"}
"""Charsets that count as their superset, which decodes the same pages to the same text."""


@dataclass(frozen=True)
class Score:
    """The number of planted items of one kind, and how many of these items had the expected outcome."""

    group: str
    kind: str
    expected: str
    """Description of the expected outcome."""
    planted: int
    found: int
    others: str = ""
    """Description of the outcomes that differ from the expected outcome."""
    judged: bool = True
    """True if `found` should equal `planted`; False for kinds with two correct outcomes."""


@dataclass
class RecordOutcome:
    """The outcome of one record in the run."""

    row: Row
    outcome: str
    """`kept`, or the `stage/rule` that dropped the record."""
    cluster: bytes | None = None
    pii: Mapping[str, int] = field(default_factory=dict)

    @property
    def rule(self) -> str:
        """The name of the rule without its stage, or `kept`."""
        return self.outcome.rpartition("/")[2]


@dataclass(frozen=True)
class PlantedResult:
    """One line of the truth file, and the outcome of the record that the line describes.

    The outcome is None if the run has no row for the record.
    """

    line: Mapping[str, Any]
    result: RecordOutcome | None


def score(facts: RunFacts, path: str) -> list[Score]:
    """Return the score of every kind of planted page in a truth file.

    Raises ConfigError if the file does not exist or is not a truth file.
    """
    lines = read_truth(path)
    if "documents" not in facts.tables:
        return []
    results = _results(facts)
    planted = _join(lines, results)
    groups: dict[str, list[PlantedResult]] = {}
    for item in planted:
        groups.setdefault(item.line["kind"], []).append(item)
    originals = {item.line["group"]: item for item in groups.pop("original", [])}
    scores = [_score_kind(kind, items, originals) for kind, items in sorted(groups.items())]
    scores += _score_languages(planted) + _score_pii(planted) + [_score_ordinary(lines, results)]
    order = (COPIES, LEVELS, QUALITY, LANGUAGES, PII, TOXIC, PAGES, BROKEN)
    return sorted(scores, key=lambda row: (order.index(row.group), row.kind))


def read_truth(path: str) -> list[dict[str, Any]]:
    """Read the lines of a truth file. Raises ConfigError if the file does not exist or is not a truth file."""
    folder, _, name = path.rpartition("/")
    store = Store(folder or ".")
    if not store.exists(name):
        raise ConfigError(
            f"--truth {path}: expected a file, got none. Set --truth to the truth.jsonl of `penstock demo-crawl`."
        )
    try:
        lines = [json.loads(line) for line in store.read_bytes(name).splitlines()]
        kinds = [line["kind"] for line in lines]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"--truth {path}: expected one planted record per line, got {error!r}. "
            "Set --truth to the truth.jsonl of `penstock demo-crawl`."
        ) from error
    return lines if kinds else []


def _results(facts: RunFacts) -> list[RecordOutcome]:
    """Return the final outcome of every row of `documents`."""
    results = {}
    for row in _read(facts, "documents", FROM_DOCUMENTS):
        results[row["doc_id"]] = RecordOutcome(row, _outcome(row))
    for table in LATER_VERDICTS:
        for row in _read(facts, table, [*VERDICT, *MORE.get(table, ())]):
            result, outcome = results[row["doc_id"]], _outcome(row)
            result.outcome = result.outcome if outcome == "kept" or is_earlier_drop(outcome) else outcome
            result.cluster = row.get("cluster", result.cluster)
            result.pii = to_mapping(row.get("pii_counts")) or {}
    for part in range(facts.num_parts("clean")) if "clean" in facts.tables else ():
        for identifier, drop in facts.left_out(part).items():
            results[identifier].outcome = f"{TOKENS.name}/{drop.rule}"
    return list(results.values())


def _outcome(row: Row) -> str:
    return "kept" if row["drop_stage"] is None else f"{row['drop_stage']}/{row['drop_rule']}"


def _read(facts: RunFacts, table: str, columns: list[str]) -> Iterator[Row]:
    for part in range(facts.num_parts(table)) if table in facts.tables else ():
        yield from facts.read_part(table, part, columns)


def _join(lines: Sequence[Mapping[str, Any]], results: Sequence[RecordOutcome]) -> list[PlantedResult]:
    # The first row at an offset is used: a damaged record can result in several rows at its offset.
    by_offset = {(result.row["split"].rpartition("/")[2], result.row["offset"]): result for result in reversed(results)}
    pages = (result for result in results if result.row["record_type"] == "response")
    by_url = {result.row["url"]: result for result in pages}
    return [
        PlantedResult(line, by_offset.get((line["file"], line["offset"])) or by_url.get(line["url"])) for line in lines
    ]


def _score_kind(kind: str, items: Sequence[PlantedResult], originals: Mapping[str, PlantedResult]) -> Score:
    """Return the score of one kind of planted page, by the verdict on each page."""
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
        name = {
            "language": "charset declared correctly",
            "wrong_charset": "charset declared wrongly or not at all",
        }.get(kind, kind)
        group = LANGUAGES if kind in ("language", "wrong_charset") else PAGES
        return Score(
            group,
            name,
            "kept if the recipe keeps the language, else dropped" if rules else "kept",
            len(items),
            found,
            others,
        )
    expected = "dropped by this rule" if rules == {kind} else f"dropped by {' or '.join(sorted(rules))}"
    is_quality = any(rule.startswith(QUALITY_RULES) for rule in rules)
    return Score(QUALITY if is_quality else BROKEN, kind, expected, len(items), found, others)


def _as_expected(item: PlantedResult) -> bool:
    if item.result is None:
        return False
    return item.result.rule in item.line["rules"] if item.line["rules"] else item.result.outcome == "kept"


def _outcomes(items: Sequence[PlantedResult]) -> str:
    """Format the outcomes of the items with their counts, most frequent first."""
    counts = Counter(item.result.rule if item.result else "no row" for item in items)
    return ", ".join(
        f"{number} {name}" for name, number in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    )


def _score_copies(kind: str, items: Sequence[PlantedResult], originals: Mapping[str, PlantedResult]) -> Score:
    """Return the score of one kind of copies.

    Depending on the kind, a copy should be in the cluster of its original, should not be in it, or may be in it.
    """
    joined = [item for item in items if _same_cluster(item, originals.get(item.line["group"]))]
    expected = {item.line["expected"] for item in items}
    apart = _outcomes([item for item in items if item not in joined])
    if kind.startswith("exact"):
        name = "same bytes, other URL" if kind == "exact_bytes" else "same text, other layout"
        return Score(COPIES, name, "in the cluster of the original", len(items), len(joined), apart)
    name = f"0.{kind.rpartition('_')[2]}"
    if expected == {"drop"}:
        return Score(LEVELS, name, "in the cluster of the original", len(items), len(joined), apart)
    if expected == {"keep"}:
        others = f"{len(joined)} in one cluster" if joined else ""
        return Score(LEVELS, name, "not in the cluster of the original", len(items), len(items) - len(joined), others)
    return Score(LEVELS, name, "in the cluster of the original or not", len(items), len(joined), apart, judged=False)


def _same_cluster(item: PlantedResult, original: PlantedResult | None) -> bool:
    results = (item.result, original.result if original else None)
    clusters = {result.cluster if result else None for result in results}
    return len(clusters) == 1 and None not in clusters


def _score_languages(planted: Sequence[PlantedResult]) -> list[Score]:
    """Return a score for each charset and a score for each language of the planted non-English pages.

    A score counts the pages whose charset or language the run detected correctly.
    """
    items = [item for item in planted if item.line["kind"] in ("language", "wrong_charset") and item.result]
    scores = []
    for name in ("charset", "language"):
        same = _same_charset if name == "charset" else str.__eq__
        by_value: dict[str, list[PlantedResult]] = {}
        for item in items:
            by_value.setdefault(item.line[name], []).append(item)
        for value, members in by_value.items():
            detected = [item.result.row[name] or "none" for item in members if item.result]
            wrong = Counter(other for other in detected if not same(value, other))
            others = ", ".join(f"{number} {other}" for other, number in sorted(wrong.items()))
            scores.append(
                Score(LANGUAGES, f"{name} {value}", "detected", len(detected), len(detected) - wrong.total(), others)
            )
    return scores


def _same_charset(planted: str, detected: str) -> bool:
    names = [map_encoding_to_html5(name) or name for name in (planted, detected)]
    return len({SAME_CHARSET.get(name, name) for name in names}) == 1


def _score_pii(planted: Sequence[PlantedResult]) -> list[Score]:
    """Return a score for each type of personal data: how many of the planted values were replaced.

    Only values in pages that reach `clean` are counted.
    """
    expected: Counter[str] = Counter()
    found: Counter[str] = Counter()
    more: Counter[str] = Counter()
    for item in planted:
        if "pii" in item.line and item.result and item.result.outcome in CLEAN:
            for name, number in item.line["pii"].items():
                expected[name] += number
                found[name] += min(number, item.result.pii.get(name, 0))
            more.update(item.result.pii)
    extra = {name: number - found[name] for name, number in more.items()}
    return [
        Score(
            PII, name, "replaced", number, found[name], f"{extra[name]} more in these pages" if extra.get(name) else ""
        )
        for name, number in sorted(expected.items())
    ]


def _score_ordinary(lines: Sequence[Mapping[str, Any]], results: Sequence[RecordOutcome]) -> Score:
    """Return the score of the pages in which nothing was planted: all of them should be kept."""
    urls = {line["url"] for line in lines}
    pages = [result for result in results if result.row["record_type"] == "response" and result.row["url"] not in urls]
    lost = [PlantedResult({}, result) for result in pages if result.outcome != "kept"]
    return Score(PAGES, "ordinary pages", "kept", len(pages), len(pages) - len(lost), _outcomes(lost))
