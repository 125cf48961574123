"""The facts of a run that papers state: each a value with the tables, digests and queries that it came from.

A paper computes no figure. What it states is a fact of this file, or an answer of the facts file.
"""

import math
from collections.abc import Iterator, Mapping

from pipeline.disclosure.answers import FactsFile
from pipeline.disclosure.fact import DisclosedFacts, Fact, Origin
from pipeline.disclosure.paper import SHORT_DIGEST
from pipeline.disclosure.table_facts import facts_of_tables, manifest_path
from pipeline.tokens.streams import BUCKET_SEPARATOR, tokens_left
from schemas.consumption import Consumption, sums
from schemas.errors import ContractError
from schemas.manifest import TableVersion, current_tables
from schemas.storage import Store
from schemas.tokens import HELDOUT, TRAIN, Dataset, split_copies
from schemas.versions import DATASET, replaced_input

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
    """Return the facts of a run. `answers` decides which sources are crawled, so which domains are listed.

    Raises ContractError if tables of the run have other versions than those that the dataset was made from.
    """
    if (name := replaced_input(run, DATASET)) is not None:
        digest = dataset.digest[:SHORT_DIGEST]
        raise ContractError(
            f"{run.uri}: expected the tables that the dataset {digest} was made from, got another version of `{name}`. "
            f"Run `penstock run` until all its steps are complete, or name the version as RUN@{digest}, with --out."
        )
    tables = current_tables(run) | {DATASET: TableVersion(dataset.folder, dataset.manifest)}
    known = facts_of_tables(tables)
    origins = {**known.origins, **_origins_of_consumed(tables[DATASET], consumed)}
    facts = {**known.facts, **_facts_of_dataset(dataset), **_facts_of_consumed(consumed)}
    return DisclosedFacts(facts | _facts_of_domains(consumed, answers, is_small), origins, consumed.step)


def _origins_of_consumed(table: TableVersion, consumed: Consumption) -> dict[str, Origin]:
    """Return an origin for each list of what was consumed, and the checkpoint's."""
    path = manifest_path(table)
    found = {
        f"{CONSUMED}.{name}": Origin(DATASET, path, consumed.dataset, f"penstock summary . --list {name}")
        for name in LISTS
    }
    if consumed.step is not None:
        path = f"train/checkpoints/step-{consumed.step:06d}/checkpoint.json"
        found["checkpoint"] = Origin("checkpoint", path, consumed.checkpoint, f"jq '.step, .identity.order' {path}")
    return found


def _facts_of_dataset(dataset: Dataset) -> dict[str, Fact]:
    left = tokens_left(dataset)
    stored = {
        split: sum(number for stream, number in left.items() if stream.endswith(f"/{split}"))
        for split in (TRAIN, HELDOUT)
    }
    contract = dataset.tokenizer
    return {
        "dataset": Fact(dataset.digest, (DATASET,)),
        "stored": Fact(stored, (DATASET,)),
        "dataset_bytes": Fact(sum(entry.bytes for entry in dataset.manifest.content.files), (DATASET,)),
        "dataset_built": Fact(dataset.manifest.run.started, (DATASET,)),
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
        **({"training": Fact(consumed.training, read)} if consumed.training is not None else {}),
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
