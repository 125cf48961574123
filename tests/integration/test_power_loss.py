"""Power loss: what a file system that forgets keeps of a run, at every moment, is complete or not there.

A whole run and a training are recorded; see `tests/support/power_loss.py`. In each state that the recording contains,
everything that a manifest, a part's result, `run.json` or a checkpoint names has to be durable. Then runs and trainings
are resumed from some of the states.
"""

import json
import os
import posixpath
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from jobs.recipe import read_recipe
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.storage import Store
from tests.fixtures.make_run import RECIPE
from tests.support.kills import digests, various_pages
from tests.support.paths import ROOT
from tests.support.power_loss import KINDS, Recording, durable, recorded, write_state

pytestmark = pytest.mark.spark
SEED = 20
STATES = int(os.environ.get("POWER_LOSSES", "6"))
"""Number of states that a run is resumed from."""
MANIFEST = re.compile(r"(?P<folder>[a-z_]+/v-[^/]+)/manifest\.json")
PART = re.compile(r"(?P<folder>[a-z_]+/v-[^/]+)/parts/part-\d+\.json")
FINISHED = re.compile(r"finished_parts/[a-z]+/[0-9a-f]{32}\.json")
LISTING = re.compile(r"(?P<folder>[a-z_]+/v-[^/]+/scratch(?:/.+)?)/[^/]+\.json")


@dataclass(frozen=True)
class Recorded:
    """An undisturbed run that was recorded."""

    recipe: str
    run: Path
    recording: Recording


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A run of every step over a few invented pages."""
    folder = tmp_path_factory.mktemp("power")
    for number in range(3):
        (folder / f"pages-{number}.jsonl").write_text(various_pages(20, number))
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder).replace("pages.jsonl", "pages-*.jsonl"))
    run = folder / "run"
    run.mkdir()
    recording = Recording(run, folder / "record")
    words = [sys.executable, "-m", "jobs.cli", "run", str(folder / "recipe.toml"), "--out", str(run)]
    subprocess.run(words, cwd=ROOT, env=recorded(run, recording.to), check=True, timeout=900)
    return Recorded(str(folder / "recipe.toml"), run, recording)


def names_of(path: str, content: dict) -> dict[str, str | None]:
    """Return the files that a file of a run names, relative to the run, each with its SHA-256 if it is named too.

    The result of a part names files of any table of its step, without the table: `*`.
    """
    if match := MANIFEST.fullmatch(path):
        digest_of = {entry["key"]: entry["sha256"] for entry in content["content"]["files"]}
        paths = content["run"]["paths"].items()
        return {posixpath.normpath(f"{match['folder']}/{name}"): digest_of[key] for key, name in paths}
    if match := PART.fullmatch(path):
        version = match["folder"].rpartition("/")[2]
        return {f"*/{version}/{file['path']}": file["sha256"] for file in content["files"].values()}
    if FINISHED.fullmatch(path):
        return {f"{table}/{file['path']}": file["sha256"] for table, file in content["files"].items()}
    if match := LISTING.fullmatch(path):
        files = [file["path"] for frame in content["frames"].values() for file in frame["files"]]
        return {f"{match['folder']}/{file}": None for file in files}
    if path == "run.json":
        return {f"{table}/{version}/manifest.json": None for table, version in content["tables"].items()}
    return {}


def find(files: dict[str, Path | None], name: str) -> Path | None:
    """Return the content of a file; its first folder may be `*`."""
    if not name.startswith("*/"):
        return files.get(name)
    return next((content for path, content in files.items() if path.partition("/")[2] == name[2:]), None)


def test_what_a_durable_file_names_is_durable(data: Recorded) -> None:
    seen: set[tuple[str, Path]] = set()
    kinds: Counter[str] = Counter()
    for number, (kind, *_), root in data.recording.replay():
        if kind != "D":
            continue
        files = durable(root)
        for path, content in files.items():
            if content is None or (path, content) in seen or not path.endswith(".json"):
                continue
            seen.add((path, content))
            named = names_of(path, json.loads(content.read_bytes()))
            for name, digest in named.items():
                target = find(files, name)
                assert target is not None, f"change {number}: {path} names {name}"
                assert digest is None or sha256(target.read_bytes()).hexdigest() == digest, (number, path, name)
            kinds[path.rpartition("/")[2] if named else ""] += 1
            kinds["listing"] += bool(named) and "/scratch/" in path
            kinds["finished"] += bool(named) and FINISHED.fullmatch(path) is not None
    assert kinds["manifest.json"] >= 9
    assert kinds["part-00000.json"] >= 2
    assert kinds["finished"] >= 6
    assert kinds["listing"] >= 1
    assert kinds["run.json"] >= 8


def test_the_end_of_a_run_is_durable(data: Recorded) -> None:
    """When the command has ended, everything that `run.json` leads to is on the disk."""
    files = durable(data.recording.at(len(data.recording.lines)))
    ends = [
        "run.json",
        "train/plan.json",
        *(path.relative_to(data.run) for path in data.run.glob("*/v-*/manifest.json")),
    ]
    for path in map(str, ends):
        content = files[path]
        assert content is not None
        assert content.read_bytes() == (data.run / path).read_bytes(), path


@pytest.mark.parametrize("number", range(STATES))
def test_a_run_resumes_from_what_a_power_loss_leaves(spark, data: Recorded, tmp_path: Path, number: int) -> None:
    choose = random.Random(f"{SEED}/{number}")
    kind = KINDS[number % len(KINDS)]
    change = choose.randrange(1, len(data.recording.lines))
    state = tmp_path / "run"
    write_state(data.recording.at(change), state, kind, choose)
    run_steps(spark, prepare(read_recipe(data.recipe, []), None), Store(str(state)), 2)
    assert digests(state) == digests(data.run), (kind, change)
