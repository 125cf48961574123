"""The sections that the cards of a dataset and of a model share, from the facts of a run."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.disclosure.fact import DisclosedFacts
from pipeline.disclosure.hub import CardSection
from pipeline.disclosure.markdown import code, escaped, table
from pipeline.disclosure.table_facts import dropped_by

SHOWN_ROWS = 100
"""Maximum number of rows of a table of sources, languages, licences or findings."""
SETTING_CHARS = 300
"""Maximum length of a setting that is stated."""
SETTING_NAMES = {
    "rights": ("agents", "respect", "directives", "dates", "licences", "unlicensed", "allow_domains"),
    "toxicity": ("action", "measures", "max_word_share", "max_words", "max_score", "max_toxic_share"),
}
"""The settings of a stage that cards state, where the run has them."""


def count_table(name: str, unit: str, counts: Mapping[str, int]) -> str:
    """Return a table of counts by name, the largest first; empty without counts."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rows = [(escaped(own) or "unknown", f"{number:,}") for own, number in ranked[:SHOWN_ROWS]]
    if len(ranked) > SHOWN_ROWS:
        rest = ranked[SHOWN_ROWS:]
        rows.append((f"{len(rest):,} others", f"{sum(number for _, number in rest):,}"))
    return table((name, unit), rows) if rows else ""


def funnel_rows(facts: DisclosedFacts) -> list[tuple[str, ...]]:
    """Return (step, documents dropped, documents left) for the input and for every rule that dropped documents."""
    left = facts.value("rows_in")
    rows: list[tuple[str, ...]] = [("records of the inputs", "", f"{left:,}")]
    for reason, number in facts.value("funnel"):
        left -= number
        rows.append((code(reason), f"{number:,}", f"{left:,}"))
    rows.append(("documents of clean text", "", f"{facts.value('clean'):,}"))
    return rows


def selection(facts: DisclosedFacts, more: Sequence[tuple[str, ...]] = (), after: str = "") -> CardSection:
    """Return how documents were selected; `more`: rows after the clean text, `after`: a paragraph after the table."""
    if facts.get("rows_in") is None or facts.get("clean") is None:
        text = "The run has no tables of its documents, so the rules that dropped documents are not known here."
        return CardSection("How documents were selected", text)
    rows = table(("step", "dropped", "left"), [*funnel_rows(facts), *more])
    return CardSection("How documents were selected", "\n\n".join(filter(None, (rows, after))))


def personal_data(facts: DisclosedFacts) -> CardSection:
    """Return how many values were replaced as personal data, by type."""
    counts: Mapping[str, int] | None = facts.get("personal_data")
    if counts is None:
        return CardSection("Personal data", "The run has no table `clean`, so what was replaced is not known here.")
    parts = [
        "Values that patterns and check digits recognize as personal data were replaced by placeholders such as "
        f"`<EMAIL>` in text, title, URL, licence and meta: {sum(counts.values()):,} values in the clean text of the "
        "run.",
        table(("type", "replaced"), [(code(name), f"{number:,}") for name, number in sorted(counts.items())])
        if counts
        else "",
        "Other personal data, such as names in texts, may remain.",
    ]
    return CardSection("Personal data", "\n\n".join(filter(None, parts)))


def rights(facts: DisclosedFacts) -> CardSection:
    """Return what reservations of rights dropped, and with which settings."""
    if not _used(facts, "rights"):
        return CardSection("Rights", "Reservations of rights were not measured. The rights of authors apply.")
    number = dropped_by(facts, ["rights/"])
    lines = [
        "The directives of pages and hosts for robots, reservations of text and data mining, usage preferences and "
        f"licences were measured. {number:,} documents were dropped for them.",
        _settings(facts, "rights"),
        "A page without a mark is no permission: the rights of authors apply to all texts.",
    ]
    return CardSection("Rights", "\n\n".join(filter(None, lines)))


def toxicity(facts: DisclosedFacts) -> CardSection:
    """Return what was found and dropped as toxic."""
    if not _used(facts, "toxicity"):
        return CardSection("Toxicity", "Toxicity was not measured.")
    found = facts.get("toxicity", {})
    documents, words = found.get("toxic_documents", {}), found.get("toxic_words", {})
    rows = [(escaped(name), f"{number:,}", f"{words.get(name, 0):,}") for name, number in documents.items()]
    how = sorted(found.get("toxicity_by", {}).items())
    lines = [
        f"{dropped_by(facts, ['toxicity/']):,} documents were dropped for toxic words or sentences.",
        _settings(facts, "toxicity"),
        "Documents with listed words, before any rule dropped them:\n\n"
        + table(("measure", "documents", "words"), rows)
        if rows
        else "",
        "Measured by, for each language and method: "
        + ", ".join(f"{escaped(name)} {number:,}" for name, number in how[:SHOWN_ROWS])
        + "."
        if how
        else "",
        "Texts below the limits, and in languages without a word list, are kept, so toxic text remains.",
    ]
    return CardSection("Toxicity", "\n\n".join(filter(None, lines)))


def bias(facts: DisclosedFacts) -> CardSection:
    """Return which filters drop documents of a group more or less often than comparable others."""
    title = "Whom the filters hit"
    found: Mapping[str, Any] | None = facts.get("bias")
    if found is None:
        return CardSection(title, "The drop rates of groups of documents were not compared.")
    findings = found["findings"]
    text = (
        f"The drop rate of each filter was compared for groups of documents with that of comparable others: "
        f"{found['compared']:,} pairs, of which {len(findings):,} differ after p was adjusted for all pairs. A group "
        "is a set of words, a page type or a country, not a set of people."
    )
    rows = [
        (code(one["filter"]), code(one["group"]), f"{one['documents']:,}", f"{one['rate']:.1%}",
         f"{one['expected']:.1%}", f"{one['adjusted_p']:.2g}")
        for one in findings[:SHOWN_ROWS]
    ]  # fmt: skip
    head = ("filter", "group", "documents", "dropped", "of others", "adjusted p")
    return CardSection(title, f"{text}\n\n{table(head, rows)}" if rows else text)


def known_limits(facts: DisclosedFacts) -> Iterator[str]:
    """Yield known limits of the data as sentences."""
    yield "Quality rules and duplicate detection make mistakes in both directions; the table above has their counts."
    yield "Language is that of a model, and short or mixed texts may have a wrong one."
    yield "Personal data is recognized by patterns, so unusual spellings remain and some similar numbers were replaced."
    if planted := facts.get("planted"):
        yield f"In the clean text of the run, {planted}"
    if number := facts.get("meta_cut", 0):
        yield f"Fields of {number:,} rows of the inputs were too large or could not be read, and are not in `meta`."
    cuts = facts.get("cuts", ())
    if "repeats" in cuts:
        yield "Passages that occur in several documents were cut out of the texts."
    if "templates" in cuts:
        yield "Lines that many pages of one host have were cut out of the texts; some of them may be content."
    if "paragraphs" in cuts:
        yield "Paragraphs whose perplexity or length is out of the recipe's range were cut out of the texts."


def limits(sentences: Sequence[str]) -> CardSection:
    """Return the known limits as a list."""
    return CardSection("Known limits", "\n".join(f"- {sentence}" for sentence in sentences))


def origins(facts: DisclosedFacts) -> str:
    """Return the digest of each table and file that the card was made from, with the command that prints it."""
    rows = [
        (code(name), code(own.path), code(own.digest), code(own.query)) for name, own in sorted(facts.origins.items())
    ]
    return "Each number follows from one of these files. Start the commands in the run folder:\n\n" + table(
        ("table", "file", "SHA-256", "command"), rows
    )


def _used(facts: DisclosedFacts, name: str) -> bool:
    return any(stage["stage"] == name for stage in facts.value("stages"))


def _settings(facts: DisclosedFacts, name: str) -> str:
    """Return the settings of a stage that cards state, as one sentence; empty if none is set."""
    found: dict[str, Any] = {}
    for stage in facts.value("stages"):
        if stage["stage"] == name:
            found |= {key: value for key, value in stage["settings"].items() if key in SETTING_NAMES[name]}
    given = {key: value for key, value in sorted(found.items()) if value not in (None, [], "")}
    texts = [f"{name}.{key} = {json.dumps(value)}"[:SETTING_CHARS] for key, value in given.items()]
    return "Settings: " + ", ".join(map(code, texts)) + "." if texts else ""
