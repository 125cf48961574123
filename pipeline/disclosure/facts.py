"""The facts of a run that papers state: each a value with the tables, digests and queries that it came from.

A paper computes no figure. What it states is a fact of this file, or an answer of the facts file.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.disclosure.answers import FactsFile
from pipeline.tokens.streams import BUCKET_SEPARATOR
from schemas.consumption import Consumption, sums
from schemas.manifest import TableVersion, current_tables
from schemas.storage import Store
from schemas.tables import DROPPED_BEFORE, LATER_VERDICTS
from schemas.tokens import HELDOUT, TRAIN, Dataset, split_copies
from schemas.versions import DATASET

CONSUMED = "consumed"
"""Name of the origin of figures of what a checkpoint has read."""
LARGE_SHARE = 0.03
"""Share of the public data of a modality above which the template asks for the name of a dataset."""
TOP_SHARE, SMALL_SHARE, SMALL_NUMBER = 0.10, 0.05, 1000
"""Shares of the domains that the template asks for: of any provider, and of a small or medium one (or the number)."""
BANDS = (
    (10**9, "less than 1 billion tokens"),
    (10**13 + 1, "1 billion to 10 trillion tokens"),
)
LARGEST_BAND = "more than 10 trillion tokens"
LISTS = ("domains", "languages", "months", "sources")
"""The lists that `penstock summary RUN --list NAME` prints."""


@dataclass(frozen=True)
class Origin:
    """Where a fact comes from."""

    table: str
    """Table of the run, `checkpoint`, or `facts file`."""
    path: str
    """File that has it, relative to the run folder."""
    digest: str
    """SHA-256: of the content of a manifest, or of a file."""
    query: str
    """Command that prints the fact, for the run folder as the working directory."""


@dataclass(frozen=True)
class Fact:
    """A value, and the names of its origins in `DisclosedFacts.origins`."""

    value: Any
    origins: tuple[str, ...]


@dataclass(frozen=True)
class DisclosedFacts:
    """All facts of a run."""

    facts: Mapping[str, Fact]
    origins: Mapping[str, Origin]
    step: int | None
    """Step of the newest checkpoint; None: nothing was trained, so each training document counts once."""

    def value(self, name: str) -> Any:
        """Return the value of a fact."""
        return self.facts[name].value


def size_band(tokens: int) -> str:
    """Return the band of a number of tokens in the template; both ends of the middle band belong to it."""
    return next((name for limit, name in BANDS if tokens < limit), LARGEST_BAND)


def num_listed(num_domains: int, is_small: bool) -> int:
    """Return how many of the largest domains the template asks for: a tenth, or for a small provider less."""
    if is_small:
        return min(math.ceil(num_domains * SMALL_SHARE), SMALL_NUMBER)
    return math.ceil(num_domains * TOP_SHARE)


def sources_of(dataset: Dataset) -> list[str]:
    """Return the sources of a dataset as the recipe names them, without buckets and copies, sorted."""
    streams = (name.rpartition("/")[0] for name in dataset.streams)
    return sorted({split_copies(name)[0].partition(BUCKET_SEPARATOR)[0] for name in streams})


def collect(run: Store, dataset: Dataset, consumed: Consumption, answers: FactsFile, is_small: bool) -> DisclosedFacts:
    """Return the facts of a run. `answers` decides which sources are crawled, so which domains are listed."""
    tables = {name: table for name, table in current_tables(run).items() if name in (*STAGE_TABLES, DATASET)}
    tables[DATASET] = TableVersion(dataset.folder, dataset.manifest)
    origins = {name: _origin(name, table) for name, table in tables.items()}
    origins |= _origins_of_consumed(tables[DATASET], consumed)
    facts = _facts_of_dataset(dataset) | _facts_of_consumed(consumed)
    facts |= _facts_of_domains(consumed, answers, is_small) | _facts_of_stages(tables)
    return DisclosedFacts(facts, origins, consumed.step)


STAGE_TABLES = ("documents", *LATER_VERDICTS, "clean", "tokenizer")


POINTERS = {DATASET: ".content.figures", "documents": ".content | {inputs, counts, stages, config, models}"}
"""What the origin of a table shows of its manifest, by table."""
POINTER = ".content | {counts, figures, stages, config, models}"
"""The same for other tables."""


def _origin(name: str, table: TableVersion) -> Origin:
    path = _path(table)
    return Origin(name, path, table.manifest.digest, f"jq '{POINTERS.get(name, POINTER)}' {path}")


def _path(table: TableVersion) -> str:
    """Return the path of a manifest in its run, without the place of the run."""
    return f"{'/'.join(table.folder.uri.split('/')[-2:])}/manifest.json"


def _origins_of_consumed(table: TableVersion, consumed: Consumption) -> dict[str, Origin]:
    """Return an origin for each list of what was consumed, and the checkpoint's."""
    path = _path(table)
    found = {
        f"{CONSUMED}.{name}": Origin(DATASET, path, consumed.dataset, f"penstock summary . --list {name}")
        for name in LISTS
    }
    if consumed.step is not None:
        path = f"train/checkpoints/step-{consumed.step:06d}/checkpoint.json"
        found["checkpoint"] = Origin("checkpoint", path, consumed.checkpoint, f"jq '.step, .identity.order' {path}")
    return found


def _facts_of_dataset(dataset: Dataset) -> dict[str, Fact]:
    stored: dict[str, int] = {}
    for split in (TRAIN, HELDOUT):
        stored[split] = sum(dataset.num_tokens(split).values())
    contract = dataset.tokenizer
    return {
        "dataset": Fact(dataset.digest, (DATASET,)),
        "stored": Fact(stored, (DATASET,)),
        "size_band": Fact(size_band(stored[TRAIN]), (DATASET,)),
        "tokenizer": Fact(
            {"kind": contract.kind, "sha256": contract.sha256, "vocab_size": contract.vocab_size}, (DATASET,)
        ),
    }


def _facts_of_consumed(consumed: Consumption) -> dict[str, Fact]:
    read = ("checkpoint",) if consumed.step is not None else ()
    sources = consumed.sources
    total = sum(sources.values())
    months = {
        source: (min(own), max(own))
        for source in sources
        if (own := [month for name, month in consumed.months if name == source and month])
    }
    latest = max((last for _, last in months.values()), default="")
    return {
        "step": Fact(consumed.step, read),
        "consumed": Fact(consumed.tokens, (f"{CONSUMED}.sources", *read)),
        "removed": Fact(consumed.removed, (f"{CONSUMED}.sources", *read)),
        "sources": Fact(sources, (f"{CONSUMED}.sources", *read)),
        "shares": Fact(
            {name: _share(number, total) for name, number in sources.items()}, (f"{CONSUMED}.sources", *read)
        ),
        "documents_read": Fact(dict(sorted(consumed.documents.items())), (f"{CONSUMED}.sources", *read)),
        "months": Fact({name: list(pair) for name, pair in months.items()}, (f"{CONSUMED}.months", *read)),
        "latest": Fact(_month(latest), (f"{CONSUMED}.months", *read)),
        "languages": Fact(_ranked(sums(consumed.languages, 1)), (f"{CONSUMED}.languages", *read)),
        "languages_of": Fact(
            {name: _ranked(sums(consumed.languages, 1, [name])) for name in sources}, (f"{CONSUMED}.languages", *read)
        ),
    }


def _facts_of_domains(consumed: Consumption, answers: FactsFile, is_small: bool) -> dict[str, Fact]:
    """Return the facts of domains: those of crawled sources or, if there is none, of all sources that have domains."""
    crawled = answers.sources_of("crawled")
    totals = consumed.domains.totals(crawled or None)
    listed = consumed.domains.largest(num_listed(totals.num_values, is_small), crawled or None)
    origins = (f"{CONSUMED}.domains", *(("checkpoint",) if consumed.step is not None else ()))
    values = {
        "domains": [list(pair) for pair in listed],
        "num_domains": totals.num_values,
        "domain_tokens": totals.tokens,
        "listed_tokens": sum(number for _, number in listed),
        "without_domain": totals.without,
        "domain_sources": sorted(crawled or consumed.sources),
        "domain_rule": "the top 5 %, at most 1,000" if is_small else "the top 10 %",
    }
    return {name: Fact(value, origins) for name, value in values.items()}


def _facts_of_stages(tables: Mapping[str, TableVersion]) -> dict[str, Fact]:
    """Return what entered, what was dropped by reason, and the stages with their settings and models, by table."""
    facts: dict[str, Fact] = {}
    dropped: dict[str, int] = {}
    stages: list[dict[str, Any]] = []
    used = tuple(name for name in tables if name != DATASET)
    for name, table in tables.items():
        content = table.manifest.content
        own = {reason: number for reason, number in content.counts.dropped.items() if number}
        dropped |= {reason: number for reason, number in own.items() if not reason.endswith(f"/{DROPPED_BEFORE}")}
        for stage, version in sorted(content.stages.items()):
            stages.append(
                {
                    "stage": stage,
                    "version": version,
                    "table": name,
                    "settings": content.config.get(stage, {}),
                    "models": {key: sha for key, sha in content.models.items() if key.startswith(f"{stage}/")},
                    "dropped": sum(number for reason, number in own.items() if reason.startswith(f"{stage}/")),
                }
            )
    if "documents" in tables:
        content = tables["documents"].manifest.content
        inputs = {"files": len(content.inputs), "bytes": sum(entry.bytes for entry in content.inputs)}
        facts["inputs"] = Fact(inputs, ("documents",))
        facts["rows_in"] = Fact(content.counts.rows_in, ("documents",))
    if "clean" in tables:
        content = tables["clean"].manifest.content
        facts["clean"] = Fact(content.counts.rows_kept, ("clean",))
        facts["files"] = Fact(_files(tables["clean"]), ("clean",))
        facts["personal_data"] = Fact(dict(content.figures.get("pii", {})), ("clean",))
    facts["dropped"] = Fact(dict(sorted(dropped.items())), used)
    facts["stages"] = Fact(stages, used)
    return facts


def _files(table: TableVersion) -> list[dict[str, Any]]:
    """Return the files of a table, with their paths in the run folder."""
    folder, paths = _path(table).rpartition("/")[0], table.manifest.run.paths
    return [entry.model_dump() | {"path": f"{folder}/{paths[entry.key]}"} for entry in table.manifest.content.files]


def dropped_by(facts: DisclosedFacts, prefixes: Iterable[str]) -> int:
    """Return how many documents reasons dropped whose names begin with one of the prefixes, such as `toxicity/`."""
    starts = tuple(prefixes)
    return sum(number for reason, number in facts.value("dropped").items() if reason.startswith(starts))


def consumption_list(consumed: Consumption, name: str) -> Iterator[tuple[str, str, int]]:
    """Yield all rows (source, value, tokens) of one of LISTS, most tokens first."""
    if name == "domains":
        yield from consumed.domains.ranked()
        return
    if name == "sources":
        rows = [(source, "", number) for source, number in consumed.sources.items()]
    else:
        rows = [(source, value, number) for (source, value), number in getattr(consumed, name).items()]
    yield from sorted(rows, key=lambda row: (-row[2], row[0], row[1]))


def _share(number: int, total: int) -> float:
    return round(number / total, 6) if total else 0.0


def _month(text: str) -> str:
    """Return `YYYY-MM` as MM/YYYY, the form of the template."""
    return f"{text[5:]}/{text[:4]}" if text else ""


def _ranked(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
