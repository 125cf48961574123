"""The page on Kubernetes and YARN: its sizes have room for the workers, and its command for YARN names what exists."""

import re
import shlex
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyspark
import pytest

from jobs import run_all
from jobs.spark_session import MIN_VERSION
from tests.examples.test_kubernetes import WORKER_BYTES, size
from tests.examples.test_schedulers import snapshot_settings
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/guides/kubernetes_and_yarn.md").read_text(encoding="utf-8")


def test_the_sizes_have_room_for_the_workers_and_one_row_is_that_of_the_settings() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+g) \| (\d+g) \| ([\d.]+) GB \| (\d+) GB \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    for cores, heap, overhead, workers, memory in rows:
        assert float(workers) == int(cores) * WORKER_BYTES / 1e9 <= size(overhead) / 1e9
        assert (size(heap) + size(overhead)) // 2**30 == int(memory)
    settings = dict(snapshot_settings())
    named = ("spark.executor.cores", "spark.executor.memory", "spark.executor.memoryOverhead")
    assert tuple(settings[name] for name in named) in [row[:3] for row in rows]


def test_the_command_for_yarn_names_its_archive_and_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```bash\n(spark-submit --master yarn.*?)```", PAGE, re.DOTALL)
    words = shlex.split(block.replace("\\\n", " "))
    settings = dict(after.split("=", 1) for word, after in pairwise(words) if word == "--conf")
    archive, _, folder = words[words.index("--archives") + 1].partition("#")
    assert settings["spark.yarn.appMasterEnv.PYSPARK_PYTHON"] == f"./{folder}/bin/python"
    assert f"--output {archive}\n" in PAGE
    assert (ROOT / words[words.index("--properties-file") + 1]).is_file()
    seen: list[tuple[Any, ...]] = []

    def run(*values: Any, **options: Any) -> Any:
        seen.append(values)
        return types.SimpleNamespace(text=lambda: "")

    monkeypatch.setattr(run_all, "run_recipe", run)
    assert run_all.main(words[words.index("jobs/run_all.py") + 1 :]) == 0
    assert seen == [("web", "s3://corpus/run", ["source.crawl=CC-MAIN-2024-10"])]


def test_the_jars_are_those_of_the_installed_spark() -> None:
    names = [path.name for path in (Path(pyspark.__file__).parent / "jars").glob("*.jar")]
    assert {name.partition("_")[0] for name in names} >= {"spark-kubernetes", "spark-yarn"}
    assert [name for name in names if re.search("hadoop-(aws|cloud|azure)|aws|gcs", name)] == []
    assert f"Spark has to be {'.'.join(map(str, MIN_VERSION))} or newer" in PAGE
