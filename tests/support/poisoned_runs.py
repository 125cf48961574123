"""Runs over a tiny dataset with one poisoned document: it repeats four tokens that no other document contains.

Its few passages come late in each epoch, so that the guard's windows are full by then. The model is small, and its
gradient norm reacts before its loss does. It has few tokens, so that their gradients add up and any initial weights
react: with four, the norm was 7 to 14 deviations above its window in widths 48 and 64, and 4 at most in any other step.
With a hundred it was 4; with one, the second passage had no larger loss than other documents.
"""

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from schemas.ids import doc_id
from schemas.tokens import Dataset, TokenizerContract
from tests.support import tiny_runs
from tests.support.tiny_dataset import make_tiny_dataset, tiny_documents

POISON = doc_id("web", "web.warc.gz", 2000)
"""The document: 31 words and the separators, in steps 16 and 30 of the run, and the token before in step 29."""
SOURCES = {"web": 24, "books": 8}
STEPS = 36
WATCHING = {"grad_sigmas": 5.0, "spike_window": 8}
RECIPE: dict[str, dict[str, Any]] = {
    "train": {"steps": STEPS, "eval_every": 0, "eval_sequences": None},
    "optim": {"learning_rate": 1e-2, "warmup_steps": 5},
    "checkpoint": {"every": 5, "keep": 99},
}


def _documents(
    source: str, number: int, contract: TokenizerContract, seed: int, suffix: str
) -> Iterator[dict[str, Any]]:
    first, bos, eos = (contract.reserved[name] for name in ("sentinel_0", "bos", "eos"))
    for row in tiny_documents(source, number, contract, seed, suffix):
        if row["doc_id"] == POISON:
            words = [first + place % 4 for place in range(row["num_tokens"] - 2)]
            row = row | {"tokens": [bos, *words, eos]}
        yield row


@cache
def _dataset(poisoned: bool) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="poisoned-runs-"))
    make_tiny_dataset(folder / "run", SOURCES, documents=_documents if poisoned else tiny_documents)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder / "run"


def make_run(folder: Path, guard: Mapping[str, Any] | None = None, poisoned: bool = True, **changes: Any) -> Path:
    """Return an untrained run folder with these guard settings and changes by section."""
    sections = {name: dict(section) for name, section in RECIPE.items()}
    for name, section in {"guard": guard or {}, **changes}.items():
        sections[name] = sections.get(name, {}) | dict(section)
    with mock.patch("tests.support.tiny_runs._dataset", return_value=_dataset(poisoned)):
        return tiny_runs.make_run(folder, sections)


def sentinel_0(dataset: Dataset) -> int:
    """Return the first of the four tokens of the poison."""
    return dataset.tokenizer.reserved["sentinel_0"]
