"""A takedown from a real run of the demo crawl: every table, the index for later snapshots, the report, a rerun."""

import shutil
from pathlib import Path

import pytest

import pipeline.run
from jobs.recipe import read_recipe
from pipeline.demo_crawl.build import build_demo_crawl
from pipeline.report.facts import collect_facts
from pipeline.report.funnel import checks
from pipeline.report.page import write_report
from pipeline.run import prepare, run_steps
from schemas.errors import ContractError
from schemas.manifest import current_tables, open_table, read_run
from schemas.storage import Store
from tests.support.paths import ROOT
from tests.support.tiny_takedown import certificates, documents_of, opened, rows_of, take_down

pytestmark = pytest.mark.spark

RECIPE = ROOT / "jobs" / "recipes" / "demo.toml"
SMALL = [
    "tokenizer.vocab_size=1600",
    "tokens.shard_tokens=20000",
    "tokens.chunk_tokens=512",
    "tokens.heldout_share=0.1",
    "dedup.write_index=true",
    'dedup.keep=["snapshot","source_rank","longest","earliest"]',
]


@pytest.fixture(scope="module")
def crawl(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("crawl")
    build_demo_crawl(folder, pages=160, seed=3)
    return folder


def run_again(spark, crawl: Path, store: Store, *overrides: str) -> None:
    """`penstock run` of the crawl into a folder."""
    recipe = read_recipe(str(RECIPE), [f'source.paths=["{crawl}/*.warc.gz"]', *SMALL, *overrides])
    run_steps(spark, prepare(recipe, None), store, None)


@pytest.fixture(scope="module")
def run(spark, crawl: Path, tmp_path_factory) -> Store:
    """The run, before anything is taken down."""
    store = Store(str(tmp_path_factory.mktemp("run")))
    run_again(spark, crawl, store)
    return store


def test_a_real_run_loses_documents_from_every_table(run: Store, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.root, folder)
    store = Store(str(folder))
    stand = [*current_tables(store)]
    clusters = {row["doc_id"]: row["cluster"] for row in rows_of(folder, "clusters")}
    kept = {row["doc_id"] for row in documents_of(opened(folder))}
    sizes = {one: sum(cluster == one for cluster in clusters.values()) for one in set(clusters.values())}
    near = next(one for one in kept if sizes[clusters[one]] > 2)
    gone = {one for one, cluster in clusters.items() if cluster == clusters[near]}
    old = read_run(store).tables
    assert take_down(folder, near=[near.hex()]) == 0
    certificate = certificates(folder)[0]
    assert (len(certificate.documents), certificate.copies_left) == (len(gone), 0)
    assert {*old} == {*certificate.tables}
    assert certificate.tables["index"].rows > 0
    assert any(one.text for one in certificate.documents)
    assert any(one.tokens for one in certificate.documents)
    for table in ("verdicts", "clusters", "dedup", "clean"):
        assert not gone & {row["doc_id"] for row in rows_of(folder, table)}
    assert not gone & {row["doc_id"] for row in documents_of(opened(folder))}
    assert take_down(folder, check=f"takedowns/{certificate.id}.json") == 0
    assert [check.claim for check in checks(collect_facts(store)) if not check.holds] == []
    assert [*current_tables(store)] == stand
    assert near.hex() not in Path(write_report(store, None)).read_text()
    content = open_table(store, "tokenizer")[1].content
    assert certificate.tokenizer is not None
    assert certificate.tokenizer.read == certificate.tables["clean"].before
    assert certificate.tokenizer.sha256 == content.figures["contract"]["sha256"]


@pytest.mark.skipif(not hasattr(pipeline.run, "standing_version"), reason="a run does not look for takedowns yet")
def test_a_rerun_brings_nothing_back(run: Store, spark, crawl: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.root, folder)
    store = Store(str(folder))
    gone = documents_of(opened(folder))[7]["doc_id"]
    assert take_down(folder, doc=[gone.hex()]) == 0
    after = read_run(store).tables
    run_again(spark, crawl, store)
    assert read_run(store).tables == after
    with pytest.raises(ContractError, match="documents: expected the settings from before the takedowns"):
        run_again(spark, crawl, store, 'language.languages=["de"]')
    run_again(spark, crawl, store, "tokens.seed=5")  # a later step reads the tables as they stand
    left = {row["doc_id"] for row in documents_of(opened(folder))}
    assert gone not in left
    assert len(left) == len({row["doc_id"] for row in documents_of(opened(Path(run.root)))}) - 1
