"""A whole run over a small demo crawl, made once and shared by the tests that only read it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.paths import ROOT

RECIPE = ROOT / "jobs" / "recipes" / "demo.toml"
SMALL = [
    "tokenizer.vocab_size=1600",
    "tokens.shard_tokens=20000",
    "tokens.chunk_tokens=512",
    "tokens.heldout_share=0.1",
]
PAGES, SEED = 240, 3


@pytest.fixture(scope="session")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo crawl of the shared run."""
    from pipeline.demo_crawl.build import build_demo_crawl

    folder = tmp_path_factory.mktemp("crawl")
    build_demo_crawl(folder, pages=PAGES, seed=SEED)
    return folder


@pytest.fixture(scope="session")
def run_at(spark, crawl, tmp_path_factory):
    """A function that runs the crawl into a folder of its own (or a given one) with some partitions and settings."""
    from jobs.recipe import read_recipe
    from pipeline.prepare import prepare
    from pipeline.run import run_steps
    from schemas.storage import Store

    def run(partitions=None, overrides=(), folder=None, until=None, reuse=()) -> Store:
        store = Store(str(folder or tmp_path_factory.mktemp("run")))
        paths = f'source.paths=["{crawl}/*.warc.gz"]'
        recipe = read_recipe(str(RECIPE), [paths, *SMALL, *overrides])
        run_steps(spark, replace(prepare(recipe, until), reuse=reuse), store, partitions)
        return store

    return run


@pytest.fixture(scope="session")
def finished(run_at):
    """The run at two partitions. Tests read it and do not change it."""
    return run_at(2)
