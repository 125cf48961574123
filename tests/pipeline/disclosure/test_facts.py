"""Facts by hand: bands, the number of listed domains, shares and origins."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from pipeline.disclosure.answers import FactsFile
from pipeline.disclosure.croissant import croissant
from pipeline.disclosure.facts import collect, consumption_list, num_listed, size_band, sources_of
from pipeline.disclosure.table_facts import facts_of_tables
from pipeline.report.facts import collect_facts
from schemas.consumption import Consumption
from schemas.manifest import TableVersion, open_table
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.pipeline.disclosure.facts_file import sums_of
from tests.support.paths import ROOT
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import documents_of, take_down
from train.trace.consumed import consumption_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_tiny_dataset(tmp_path_factory.mktemp("run"))


def consumed_of(run: Store) -> Consumption:
    """11 domains of `web` and one of `books`."""
    consumed = Consumption(7, open_dataset(run).digest, "0" * 64, "1" * 64)
    domains = {("web", f"d{n:02d}.example"): 100 - n for n in range(11)}
    consumed.domains = sums_of({**domains, ("books", "books.example"): 1000, ("web", ""): 5})
    consumed.languages = Counter({("web", "en"): 900, ("web", "de"): 150, ("books", "en"): 1000})
    consumed.months = Counter({("web", "2025-03"): 1, ("web", "2026-01"): 2, ("web", ""): 3})
    consumed.documents = Counter({"web": 12, "books": 3})
    return consumed


def test_keys_are_no_models(run: Store) -> None:
    folder, manifest = open_table(run, "tokens")
    models = {"plant/key": "0" * 64, "pii/key": "1" * 64, "pii/ner-en": "2" * 64}
    content = manifest.content.model_copy(update={"stages": {"plant": 1, "pii": 6}, "models": models})
    table = TableVersion(folder, manifest.model_copy(update={"content": content}))
    stages = facts_of_tables({"tokens": table}).value("stages")
    assert [stage["models"] for stage in stages] == [{"pii/ner-en": "2" * 64}, {}]


@pytest.mark.parametrize(
    ("tokens", "band"),
    [
        (10**9 - 1, "less than 1 billion tokens"),
        (10**9, "1 billion to 10 trillion tokens"),
        (10**13, "1 billion to 10 trillion tokens"),
        (10**13 + 1, "more than 10 trillion tokens"),
    ],
)
def test_bands(tokens: int, band: str) -> None:
    assert size_band(tokens) == band


@pytest.mark.parametrize(
    ("domains", "is_small", "listed"),
    [
        *[(0, False, 0), (1, False, 1), (10, False, 1), (11, False, 2), (40, True, 2), (41, True, 3)],
        *[(20_000, True, 1000), (20_001, True, 1000), (20_001, False, 2001)],
    ],
)
def test_number_of_listed_domains(domains: int, is_small: bool, listed: int) -> None:
    assert num_listed(domains, is_small) == listed


def test_domains_are_those_of_crawled_sources(run: Store) -> None:
    answers = FactsFile("f", {"sources.web.kind": "crawled"}, ("books", "web"))
    facts = collect(run, open_dataset(run), consumed_of(run), answers, False)
    assert facts.value("domains") == [["d00.example", 100], ["d01.example", 99]]
    assert (facts.value("num_domains"), facts.value("without_domain")) == (11, 5)
    assert facts.value("domain_tokens") == sum(100 - n for n in range(11))
    whole = collect(run, open_dataset(run), consumed_of(run), FactsFile("", {}, ("books", "web")), False)
    assert whole.value("domains") == [["books.example", 1000], ["d00.example", 100]]
    assert whole.value("num_domains") == 12


def test_shares_months_and_languages(run: Store) -> None:
    facts = collect(run, open_dataset(run), consumed_of(run), FactsFile(""), False)
    assert facts.value("shares") == {"books": 0.487805, "web": 0.512195}
    assert facts.value("months") == {"web": ["2025-03", "2026-01"]}
    assert facts.value("latest") == "01/2026"
    assert facts.value("languages") == [("en", 1900), ("de", 150)]
    assert facts.value("consumed") == 2050


def test_every_fact_has_origins_with_the_digest_of_the_run(run: Store) -> None:
    facts = collect(run, open_dataset(run), consumed_of(run), FactsFile(""), False)
    for name, fact in facts.facts.items():
        assert fact.origins, name
        assert {*fact.origins} <= facts.origins.keys()
    folder, manifest = open_table(run, "tokens")
    origin = facts.origins["tokens"]
    assert origin.digest == manifest.digest
    assert origin.path == f"tokens/{folder.uri.rpartition('/')[2]}/manifest.json"
    assert not any(run.uri in text for own in facts.origins.values() for text in (own.path, own.query))


def test_lists_have_all_rows(run: Store) -> None:
    assert [*consumption_list(consumed_of(run), "languages")] == [
        ("books", "en", 1000),
        ("web", "en", 900),
        ("web", "de", 150),
    ]
    assert [*consumption_list(consumed_of(run), "sources")] == [("web", "", 1050), ("books", "", 1000)]
    rows = [*consumption_list(consumed_of(run), "domains")]
    assert rows[:2] == [("books", "books.example", 1000), ("web", "d00.example", 100)]
    assert len(rows) == 13


def test_sources_are_named_without_buckets_and_copies(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path / "run", {"web+low": 10, "web+high+x3": 10, "books": 10})
    assert sources_of(open_dataset(run)) == ["books", "web"]


def test_what_a_takedown_removed_is_neither_stored_nor_read(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "fixtures" / "runs" / "0.1.0", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "train")
    run = Store(str(tmp_path / "run"))
    document = documents_of(open_dataset(run))[0]
    assert take_down(tmp_path / "run", doc=[document["doc_id"].hex()]) == 0
    dataset, answers = open_dataset(run), FactsFile("", {}, ("web",))
    assert dataset.num_tokens() == {"web": document["num_tokens"]}
    facts = collect(run, dataset, consumption_of(run, dataset), answers, False)
    assert facts.value("stored") == {"train": 0, "heldout": 0}
    assert (facts.value("stored_tokens"), facts.value("consumed"), facts.value("removed")) == (0, 0, 0)
    assert sum(collect_facts(run).tokens_left.values()) == 0
    assert "checkpoint" not in croissant(facts, answers).values["description"]


def test_drops_of_a_stage_in_several_tables_are_added(run: Store) -> None:
    folder, manifest = open_table(run, "tokens")

    def table_of(name: str, number: int) -> TableVersion:
        dropped = {"toxicity/toxic_share": number, "toxicity/dropped_before": 7}
        counts = manifest.content.counts.model_copy(update={"dropped": dropped})
        update = {"stages": {"toxicity": 1}, "counts": counts, "table": name}
        return TableVersion(folder, manifest.model_copy(update={"content": manifest.content.model_copy(update=update)}))

    facts = facts_of_tables({"verdicts": table_of("verdicts", 10), "repeats": table_of("repeats", 8)})
    assert facts.value("dropped")["toxicity/toxic_share"] == 18
    assert [stage["dropped"] for stage in facts.value("stages")] == [10, 8]
