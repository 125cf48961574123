"""The tests of `tests/pains` and the page that lists them are one list: a thread a test, a test a row."""

import re
from collections import Counter

import pytest

from docs.generate import pages
from docs.pains import LINK, read_pain, read_pains
from tests.support.paths import ROOT

PROJECTS = {
    "BigCode": "bigcode-project/opt-out-v2",
    "Data-Juicer": "datajuicer/data-juicer",
    "NeMo Curator": "NVIDIA-NeMo/Curator",
    "OLMo": "allenai/OLMo",
    "PyTorch": "pytorch/pytorch",
    "OLMo-core": "allenai/OLMo-core",
    "datatrove": "huggingface/datatrove",
    "gpt-neox": "EleutherAI/gpt-neox",
    "marin": "marin-community/marin",
    "open-instruct": "allenai/open-instruct",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "torchtitan": "pytorch/torchtitan",
    "trafilatura": "adbar/trafilatura",
}
"""Name of a project -> its repository."""
FEWEST = 30
PAINS = [pain for subject in read_pains() for pain in subject.pains]


def test_every_pain_has_its_row_and_every_row_its_test() -> None:
    page = pages()["reference/pains.md"]
    rows = re.findall(r"^\| \[([^]]+)\]\((\S+)\) \| .+ \| `(\S+)` \|$", page, re.MULTILINE)
    assert rows == [(pain.project, pain.link, pain.test) for pain in PAINS]
    tests = {
        f"tests/pains/{path.name}::{name}"
        for path in (ROOT / "tests/pains").glob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {test for *_, test in rows} == tests
    assert len(rows) == len(tests) >= FEWEST


@pytest.mark.parametrize("pain", PAINS, ids=lambda pain: pain.test.rpartition("::")[2])
def test_a_thread_is_of_its_project(pain) -> None:
    owner, name = LINK.fullmatch(pain.link).groups()
    assert f"{owner}/{name}" == PROJECTS[pain.project]
    assert pain.problem.endswith(".")
    assert pain.here.endswith(".")
    sentences = re.split(r"(?<=[.?])\s+(?=[A-Z])", f"{pain.problem} {pain.here}")
    assert [sentence for sentence in sentences if len(sentence.split()) > 25] == []


def test_no_thread_is_named_twice() -> None:
    assert [link for link, number in Counter(pain.link for pain in PAINS).items() if number > 1] == []


def test_all_subjects_have_a_title() -> None:
    titles = [subject.title for subject in read_pains()]
    assert all(titles)
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize(
    "docstring",
    [
        "",
        "A project: it failed.\n\nIt does not fail here.",
        "A project: it failed.\n\nhttps://github.com/a/b/issues/1\n\nhttps://github.com/a/b/pull/2",
        "A project: it failed.\n\nhttps://github.com/a/b/issues/1 and https://example.org/\n\nIt does not fail here.",
        "It failed.\n\nhttps://github.com/a/b/issues/1\n\nIt does not fail here.",
        "A project: it failed.\n\nhttps://github.com/a/b/commit/1\n\nIt does not fail here.",
    ],
)
def test_other_docstrings_are_refused(docstring: str) -> None:
    with pytest.raises(ValueError, match="expected a docstring of three paragraphs"):
        read_pain("tests/pains/test_x.py::test_y", docstring)
