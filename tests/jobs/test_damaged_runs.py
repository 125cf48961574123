"""Every verb answers a damaged run with one sentence: no traceback, no hang, whatever file is damaged and how."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jobs.cli import main
from tests.support.lineage_run import lineage_run
from tests.support.report_run import identifier

DOCUMENT = identifier(40).hex()
VERBS = (
    ["show", "RUN", "--limit", "2", "--text"],
    ["show", "RUN", "--doc", DOCUMENT],
    ["report", "RUN"],
    ["verify", "RUN", "--paranoid"],
    ["lineage", "RUN"],
    ["lineage", "RUN", "--verify"],
    ["trace", "RUN", "--step", "3"],
    ["trace", "RUN", "--doc", DOCUMENT],
    ["diff", "RUN", "OTHER"],
    ["diff", "OTHER", "RUN"],
    ["plan", "RUN", "--dry-run"],
    ["train", "RUN", "--dry-run"],
    ["takedown", "RUN", "--doc", DOCUMENT, "--dry-run"],
    ["prove", "RUN", "--doc", DOCUMENT],
    ["rights", "RUN", "--domain", "b.example"],
    ["repair", "RUN", "--dry-run"],
    ["gc", "RUN", "--dry-run"],
    ["register", "RUN", "--delta"],
    ["summary", "RUN", "--eu", "--draft"],
    ["summary", "RUN", "--dataset-card", "--model-card", "--spdx", "--draft"],
    ["sign", "RUN", "--verify", "--public-key", "none.pub"],
)
"""Command lines of the verbs that read a run and start neither Spark nor torch."""


def truncated(path: Path, part: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])


def flipped(path: Path, part: float) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[min(int(len(data) * part), len(data) - 1)] ^= 1 << int(8 * part) % 8
    path.write_bytes(data)


def replaced(data: bytes) -> Callable[[Path, float], None]:
    return lambda path, part: (path.write_bytes(data), None)[1]


def missing(path: Path, part: float) -> None:
    path.unlink()


def pipe(path: Path, part: float) -> None:
    path.unlink()
    os.mkfifo(path)


def itself(path: Path, part: float) -> None:
    path.unlink()
    path.symlink_to(path.name)


def sparse(path: Path, part: float) -> None:
    os.truncate(path, 200 << 30)


def folder(path: Path, part: float) -> None:
    path.unlink()
    path.mkdir()


SPARSE = "200 GB of zeros"
DAMAGES: dict[str, Callable[[Path, float], None]] = {
    "truncated": truncated,
    "flipped": flipped,
    "missing": missing,
    "pipe": pipe,
    "folder": folder,
    "empty": replaced(b""),
    "a list": replaced(b"[]"),
    "a number": replaced(b"3"),
    "null": replaced(b"null"),
    "wrong types": replaced(b'{"content": 3, "run": [], "tables": 7, "recipe": "x", "step": "a"}'),
    "unknown keys": replaced(b'{"surprise": {}}'),
    "nested": replaced(b"[" * 200_000),
    "a line of brackets": replaced(b"[" * 200_000 + b"\n"),
    "a link to itself": itself,
    SPARSE: sparse,
    "not UTF-8": replaced(b"\xff\xfe\x00"),
    "a ZIP file": replaced(b"PK\x03\x04" + bytes(60)),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with tables and training that no test changes."""
    run = tmp_path_factory.mktemp("whole") / "run"
    lineage_run(run)
    return run


def files_of(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


def answers(run: Path, other: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Call every verb. An exception that no verb explains ends the test here."""
    for verb in VERBS:
        words = [{"RUN": str(run), "OTHER": str(other)}.get(word, word) for word in verb]
        capfd.readouterr()
        try:
            code = main(words)
        except SystemExit as error:
            raise AssertionError(f"{verb}: expected an accepted command line") from error
        out, err = capfd.readouterr()
        assert code in (0, 1, 2), (verb, code)
        assert "Traceback" not in out + err, verb
        assert code == 0 or err.strip() or out.strip(), (verb, "said nothing")


def test_every_verb_of_the_list_takes_a_whole_run(whole: Path, capfd: pytest.CaptureFixture[str]) -> None:
    answers(whole, whole, capfd)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["run.json", "documents/v-0000000071a9/manifest.json", "train/plan.json"])
def test_damaged_json_is_one_sentence(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, damage: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    DAMAGES[damage](run / name, 0.4)
    answers(run, whole, capfd)


@pytest.mark.parametrize("damage", ["missing", "pipe", "folder", "truncated", "flipped", "a ZIP file"])
@pytest.mark.parametrize(
    "pattern", ["documents/*/part-*", "clean/*/part-*", "tokens/*/web/train/*", "tokenizer/*/*.json"]
)
def test_a_damaged_file_of_a_table_is_one_sentence(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], pattern: str, damage: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    DAMAGES[damage](min(path for path in run.glob(pattern) if path.name != "manifest.json"), 0.4)
    answers(run, whole, capfd)


@settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # an example takes seconds, so none is shrunk
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_random_damage_is_one_sentence(whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], data) -> None:
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(whole, run)
    for name in data.draw(st.lists(st.sampled_from(files_of(whole)), min_size=1, max_size=2, unique=True)):
        damage = data.draw(st.sampled_from(sorted({*DAMAGES} - {SPARSE})))  # `verify` would read all of a table
        DAMAGES[damage](run / name, data.draw(st.floats(0, 1)))
    answers(run, whole, capfd)
