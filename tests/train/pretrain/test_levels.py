"""Documents are held against their source and language: a rare language is not blamed for a spike, a bad page in it is.

As in a real crawl, every page of the rare language has a high loss. The pages of the other language have a low one.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from schemas.ids import doc_id
from schemas.storage import Store
from schemas.tokens import TokenizerContract, open_dataset
from tests.support import tiny_runs
from tests.support.tiny_dataset import make_tiny_dataset, tiny_documents
from tests.support.tiny_runs import events, metrics, opened, trained
from train.monitor.events import SpikeDocument
from train.monitor.quarantine import SourceLevels, attribute_spike, merge_parts
from train.pretrain.levels import REFERENCES, reference_documents
from train.trace import open_trace

pytestmark = pytest.mark.dist
CORRUPT = [doc_id("web", "web.warc.gz", 1000 * i) for i in (71, 3)]
"""Pages of the rare language whose words no other page has; they are in steps 23 and 29."""


def bilingual(
    source: str, number: int, contract: TokenizerContract, seed: int, suffix: str
) -> Iterator[dict[str, Any]]:
    """Yield pages of which every fourth is Japanese: words at random from 400. English repeats ten words."""
    bos, eos, sentinel = (contract.reserved[name] for name in ("bos", "eos", "sentinel_0"))
    first = len(contract.reserved)
    for i, row in enumerate(tiny_documents(source, number, contract, seed, suffix)):
        count, rng = row["num_tokens"] - 2, random.Random(i)
        words = [first + (i + place) % 10 for place in range(count)]
        if is_japanese := i % 4 == 3:
            words = [rng.randrange(first + 10, contract.vocab_size) for _ in range(count)]
        if row["doc_id"] in CORRUPT:
            words = [sentinel + 7 * place * place % 100 for place in range(count)]
        yield row | {"language": "ja" if is_japanese else "en", "tokens": [bos, *words, eos]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks in which nearly every step counts as a spike, so that its documents are measured."""
    folder = tmp_path_factory.mktemp("bilingual")
    make_tiny_dataset(folder / "run", {"web": 120}, documents=bilingual)
    sections = {
        "train": {"steps": 40, "eval_every": 0, "eval_sequences": None, "global_batch": 8},
        "optim": {"learning_rate": 1e-2, "warmup_steps": 5},
        "checkpoint": {"every": 0},
        "guard": {"spike_sigmas": 1e-6, "spike_window": 8},
    }
    with mock.patch("tests.support.tiny_runs._dataset", return_value=folder / "run"):
        return trained(tiny_runs.make_run(folder / "trained", sections), 2, "layout.data=ddp")


def test_a_corrupt_page_of_a_rare_language_is_blamed_and_its_language_is_not(run: Path) -> None:
    languages: dict[str, set[tuple[str, bool]]] = {"source": set(), "language": set()}
    late = [event for event in events(run, "spike") if event.step > 12]
    corrupt = {own.hex() for own in CORRUPT}
    for event in late:
        sources = SourceLevels(metrics(run)[event.step - 9 : event.step - 1])
        by_source = [item.model_copy(update={"level": sources.of("web")}) for item in event.documents]
        language_of = {item.doc_id: item.language for item in event.documents}
        for way, documents in (("source", by_source), ("language", event.documents)):
            parts = [(item.doc_id, item.source, item.loss, item.targets, item.level) for item in documents]
            chosen = attribute_spike(merge_parts(parts))
            if chosen.why.startswith("an outlier"):
                blamed = [own.doc_id for own in chosen.documents_blamed]
                languages[way] |= {(language_of[own], own in corrupt) for own in blamed}
    # By source, sound pages of the rare language are blamed; with its language, only corrupt ones are.
    assert ("ja", False) in languages["source"]
    assert ("ja", False) not in languages["language"]
    assert ("ja", True) in languages["language"]


def test_references_are_other_documents_of_the_language_and_not_listed_ones(run: Path) -> None:
    batches, trace, dataset = opened(run), open_trace(Store(str(run))), open_dataset(Store(str(run)))
    found = {step: trace.documents_of_step(step) for step in range(1, 41)}
    batch = {step: [SpikeDocument.model_validate(part) for part in parts] for step, parts in found.items()}
    step, parts = next(item for item in batch.items() if {part.language for part in item[1]} == {"en", "ja"})
    references = reference_documents(batches, dataset, step, parts)
    of_place = {}
    for language in ("en", "ja"):
        own = [reference for reference in references if reference.language == language]
        assert len(own) == len({reference.start for reference in own}) == REFERENCES
        for reference in own:
            ((row, begin),) = trace.documents.covering("web/train", [(reference.start, reference.start + 1)])
            assert (begin, row["language"]) == (reference.start, language)
            assert reference.length == min(row["num_tokens"] - 1, 32)
            assert row["doc_id"].hex() not in {part.doc_id for part in parts}
            of_place[reference.start] = row["doc_id"].hex()
    listed = [of_place[references[0].start]]
    again = reference_documents(batches, dataset, step, parts, listed)
    assert references[0] not in again
    assert len(again) == len(references)
    unknown = [part.model_copy(update={"language": ""}) for part in parts]
    assert reference_documents(batches, dataset, step, unknown) == []
