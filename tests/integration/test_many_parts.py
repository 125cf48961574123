"""Many parts: what the driver gets and keeps does not grow with the figures of a part, nor the shuffles with the parts.

The figures for 90,000 parts in `docs/guides/clusters_and_s3.md` follow from what is measured here.
"""

import gzip
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark import SparkContext

from jobs.recipe import read_recipe
from pipeline.engine.tasks import GROUPS_PER_CORE
from pipeline.prepare import prepare
from pipeline.run import run_steps
from pipeline.sources import splits
from schemas.manifest import open_table
from schemas.storage import Store
from tests.support.paths import ROOT

pytestmark = pytest.mark.spark
PARTS = 2_000 if os.environ.get("SLOW") else 100
CORES = 2
LANGUAGES = {
    "en": "The water of the valley runs through the pipe, and the gate at its end can be closed by one man at night. ",
    "de": "Das Wasser des Tales läuft durch das Rohr, und das Tor am Ende kann von einem Mann geschlossen werden. ",
    "fr": "L'eau de la vallée coule dans le tuyau, et la porte à son bout peut être fermée par un homme dans la nuit. ",
    "es": "El agua del valle corre por el tubo, y la puerta al final puede ser cerrada por un hombre en la noche. ",
}
MAX_ANSWER = 2_000
"""Most bytes that the driver gets of a part in one step."""
MAX_METRICS = 12_000
"""Most bytes of the metrics that Spark sends with the result of a task, whatever the task does."""


class Stage(NamedTuple):
    job: str
    """Description of its job."""
    tasks: int
    result_bytes: int
    """Size of the results of its tasks, metrics included."""


class Measured(NamedTuple):
    run: Store
    stages: list[Stage]


def archive(number: int) -> bytes:
    """Return a small WARC file with a page in each language."""
    records = []
    for at, (language, sentence) in enumerate(LANGUAGES.items()):
        text = "".join(f"<p>{sentence * (2 + (number + at) % 3)}{number} {step}.</p>" for step in range(4))
        page = f"<html lang={language}><title>{number}</title><body><article>{text}</article></body></html>".encode()
        body = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + page
        head = (
            f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: https://h{number}.example/{language}\r\n"
            f"WARC-Date: 2026-01-01T00:00:00Z\r\nWARC-Record-ID: <urn:uuid:{number:08}-0000-4000-8000-{at:012}>\r\n"
            f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        records.append(gzip.compress(head.encode() + body + b"\r\n\r\n", mtime=0))
    return b"".join(records)


@pytest.fixture(scope="module")
def measured(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    crawl = tmp_path_factory.mktemp("crawl")
    for number in range(PARTS):
        (crawl / f"{number:05}.warc.gz").write_bytes(archive(number))
    recipe = read_recipe(
        str(ROOT / "jobs/recipes/web.toml"),
        [
            f'source.paths=["{crawl}/*.warc.gz"]',
            "language.min_score=0",
            'quality.rules=["c4", "fineweb"]',
            "tokenizer.vocab_size=600",
        ],
    )
    run = Store(str(tmp_path_factory.mktemp("run")))
    store = spark.sparkContext._jsc.sc().statusStore()
    before = stages_of(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "MAX_OWN_PARTS", PARTS)
        run_steps(spark, prepare(recipe, None), run, None)
    return Measured(run, [stage for number, stage in stages_of(store).items() if number not in before])


def description_of(stage: Any) -> str:
    """Return the description of a stage's job; jobs of other tests of the session may have none."""
    described = stage.description()
    return str(described.get()) if described.isDefined() else ""


def stages_of(store: Any) -> dict[int, Stage]:
    """Return the stages that Spark has run, by their number."""
    gateway = SparkContext._gateway
    every = gateway.jvm.java.util.ArrayList()
    listed = store.stageList(every, False, False, gateway.new_array(gateway.jvm.double, 0), every)
    stages = [listed.apply(number) for number in range(listed.size())]
    return {
        stage.stageId(): Stage(description_of(stage), stage.numTasks(), stage.resultSize())
        for stage in stages
        if stage.numCompleteTasks()  # the others read what an earlier stage has written
    }


def test_every_table_has_all_parts(measured: Measured) -> None:
    for table in ("documents", "text", "verdicts", "clusters", "dedup", "clean"):
        assert len(open_table(measured.run, table)[1].content.files) == PARTS
    documents = open_table(measured.run, "documents")[1].content
    assert documents.counts.rows_in == len(LANGUAGES) * PARTS
    figures = open_table(measured.run, "verdicts")[1].content.figures
    assert figures["kept_languages"] == dict.fromkeys(LANGUAGES, PARTS)
    (words,) = (counts for name, counts in figures["distributions"].items() if "short_lines" in name)
    assert {language: sum(bins.values()) for language, bins in words.items()} == dict.fromkeys(LANGUAGES, PARTS)


def test_the_driver_gets_less_than_2_kb_of_a_part(measured: Measured) -> None:
    steps: dict[str, int] = {}
    for stage in measured.stages:
        step = stage.job.partition(":")[0]
        steps[step] = steps.get(step, 0) + max(0, stage.result_bytes - MAX_METRICS * stage.tasks)
    assert {"documents", "verdicts", "clusters", "dedup", "clean", "tokenizer", "tokens"} <= steps.keys()
    assert max(steps.values()) / PARTS < MAX_ANSWER, steps


def test_jobs_are_described(measured: Measured) -> None:
    jobs = {stage.job for stage in measured.stages}
    assert {"documents", "clusters: compare candidate pairs, round 1", "clusters: write clusters"} <= jobs


def test_stages_have_a_few_tasks_for_each_core(measured: Measured) -> None:
    """So the blocks of a shuffle, writing tasks times reading ones, follow the cores and not the parts."""
    assert max(stage.tasks for stage in measured.stages) <= 1.5 * GROUPS_PER_CORE * CORES


def test_no_result_of_a_part_is_left(measured: Measured) -> None:
    root = Path(measured.run.root)
    assert not [*root.glob("*/*/parts/*.json")]
    assert not [*root.glob("tokenizer/*/scratch")]
