"""Pains of deduplication: documents that are no copies, chains of copies, and survivors that change."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.dedup.config import DedupConfig
from pipeline.dedup.verify import CARRIED, FAILED, compare_pairs, make_comparison
from pipeline.minhash.stage import SignatureConfig, jaccard, shingle_hashes, signature
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.storage import Store
from tests.support.dedup_tables import Text, columns_of, recipe_of, table_of, write_documents

SIGNED = SignatureConfig()
LIMIT = DedupConfig().min_similarity


def words(seed: int, number: int) -> list[str]:
    """Return words that no other seed has."""
    draw = np.random.default_rng(seed)
    return ["".join(draw.choice(list("abcdefghijklmnop"), 8)) for _ in range(number)]


def templated() -> list[str]:
    """Texts on topics of their own with the same opening, questions and ending, a third of each text."""
    frame = words(1, 90)
    return [" ".join([*frame[:50], *words(100 + n, 180), *frame[50:]]) for n in range(30)]


def copies() -> list[str]:
    """Texts, each followed by a copy with two other words."""
    texts = []
    for n in range(10):
        text = words(200 + n, 200)
        texts += [" ".join(text), " ".join([*text[:60], "other", *text[61:150], "another", *text[151:]])]
    return texts


def near_chain() -> list[str]:
    """Six texts, each similar to its neighbours; the ends are not similar."""
    text = words(400, 400)
    return [" ".join(text[26 * n : 26 * n + 220 - 4 * n]) for n in range(6)]


def similarity_of(one: str, other: str) -> float:
    """Return the true Jaccard similarity of two texts, by the shingles of a signature."""
    return jaccard(shingle_hashes(one, "en", SIGNED), shingle_hashes(other, "en", SIGNED))


TEXTS = [*templated(), *copies(), *near_chain()]
KINDS = ["templated"] * 30 + ["copy"] * 20 + ["chain"] * 6


@pytest.fixture(scope="module")
def deduplicated(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from settings of deduplication to a run over the texts in four files.

    Runs that differ in the comparison with survivors share a folder, so its last verdicts are those of the last call.
    """
    parts = [TEXTS[number::4] for number in range(4)]
    folders: dict[str, Path] = {}

    def run(**settings: Any) -> Path:
        name = repr(sorted((key, value) for key, value in settings.items() if key != "compare_survivor"))
        folder = folders[name] if name in folders else tmp_path_factory.mktemp("dedup")
        folders[name] = folder
        recipe = recipe_of(folder, 4, {"dedup": {"keep": ["longest"], **settings}})
        write_documents(folder, recipe, lambda split: [Text("https://a.org/", text) for text in parts[split]])
        run_steps(spark, prepare(recipe, "dedup"), Store(str(folder)), 2)
        return folder

    return run


def verdicts_of(folder: Path) -> dict[int, int]:
    """Return the place in TEXTS of each dropped document, with the place of the document that is kept for it."""
    rows = columns_of(folder, "dedup", ["doc_id", "survivor", "drop_rule"]).to_pylist()
    sizes = [len(TEXTS[number::4]) for number in range(4)]
    places = [4 * row + part for part, size in enumerate(sizes) for row in range(size)]
    place_of = {row["doc_id"]: place for row, place in zip(rows, places, strict=True)}
    return {place_of[row["doc_id"]]: place_of[row["survivor"]] for row in rows if row["drop_rule"] is not None}


@pytest.mark.spark
def test_texts_that_share_a_template_are_no_copies(deduplicated: Any) -> None:
    """marin: texts on different topics with the same conversational frame were one cluster of 743,779 documents. All
    were removed for one text of another source.

    https://github.com/marin-community/marin/issues/6851

    Thirty texts with a third in common all stay, while each planted copy is found.
    """
    dropped = verdicts_of(deduplicated())
    assert [place for place in dropped if KINDS[place] == "templated"] == []
    assert {frozenset(pair) for pair in dropped.items() if KINDS[pair[0]] == "copy"} == {
        frozenset((place, place + 1)) for place in range(30, 50, 2)
    }


@pytest.mark.spark
def test_a_copy_of_a_copy_is_compared_with_what_is_kept(deduplicated: Any) -> None:
    """marin: a cluster held documents that were linked by others only, and they were removed for a text that they did
    not resemble.

    https://github.com/marin-community/marin/pull/7591

    With `dedup.compare_survivor = "require"`, a removed document is similar to the one that stays, and not to a third.
    """
    texts = near_chain()
    pairs = [similarity_of(one, other) for one, other in pairwise(texts)]
    assert min(pairs) > LIMIT > similarity_of(texts[0], texts[-1]) + 0.1
    linked = verdicts_of(deduplicated(compare_survivor="off"))
    assert min(similarity_of(TEXTS[place], TEXTS[kept]) for place, kept in linked.items()) < LIMIT - 0.1
    direct = verdicts_of(deduplicated(compare_survivor="require"))
    assert 0 < sum(KINDS[place] == "chain" for place in direct) < sum(KINDS[place] == "chain" for place in linked)
    # an estimate from 112 values is within 0.1 of the truth
    assert min(similarity_of(TEXTS[place], TEXTS[kept]) for place, kept in direct.items()) > LIMIT - 0.1


@pytest.mark.spark
@pytest.mark.slow
def test_clusters_need_no_single_process_and_keep_the_same_documents(deduplicated: Any) -> None:
    """datatrove: clusters were made by one CPU in seven hours, after hashes had taken two on a thousand. A faster tool
    kept other documents in each run.

    https://github.com/huggingface/datatrove/issues/106

    With `dedup.finish_edges = 0` no task holds the graph. Clusters and survivors are the same at any partitioning.
    """
    many = deduplicated(finish_edges=0, partitions=5)
    for name in ("clusters", "dedup"):
        assert table_of(many, name).manifest.digest == table_of(deduplicated(), name).manifest.digest
    assert verdicts_of(many) == verdicts_of(deduplicated())


def test_a_shared_bucket_is_no_proof_by_default() -> None:
    """NeMo Curator: the check of candidate pairs was switched off by default, with an expected difference of 1 to 2 %.

    https://github.com/NVIDIA-NeMo/Curator/pull/498

    By default the signatures of every candidate pair are compared. A pair of another text is left apart.
    """
    one, near, other = copies()[0], copies()[1], templated()[0]
    payloads = [bytes([n] * 16) + signature(text, "en", SIGNED) for n, text in enumerate((one, near, other))]
    nodes, orders = [b"", b"n" * 20, b"o" * 20], [bytes([n]) + bytes(23) for n in range(3)]
    columns = [[b"l" * 20] * 3, nodes, payloads, [bytes(8)] * 3, orders]
    batch = pa.RecordBatch.from_arrays([pa.array(column, pa.binary()) for column in columns], schema=CARRIED)
    outcomes = dict(compare_pairs(iter([batch]), make_comparison(DedupConfig(), SIGNED)))
    assert outcomes["joined"].column("node").to_pylist() == [b"n" * 20]
    assert outcomes[FAILED].column("order").to_pylist() == [orders[2]]


@pytest.mark.spark
def test_a_source_that_loses_almost_everything_is_named(spark: Any, tmp_path: Path) -> None:
    """marin: fuzzy deduplication removed more than 95 % of 15 of 113 sources, and one of them whole. It was found by
    counting afterwards.

    https://github.com/marin-community/marin/issues/6854

    The audit names each source and domain that loses more than `audit.alarm_share`, with pairs to look at. A domain of
    60 near copies is named, and one of 60 texts of its own is not.
    """
    base = words(900, 200)
    copies_ = [" ".join([*base[:n], "changed", *base[n + 1 :]]) for n in range(60)]
    pages = [("copied.example.org", text) for text in copies_]
    pages += [("own.example.com", " ".join(words(1000 + n, 200))) for n in range(60)]
    recipe = recipe_of(tmp_path, 2, {"dedup": {"keep": ["longest"]}})
    texts = [[Text(f"https://{host}/{n}", text) for n, (host, text) in enumerate(pages)][part::2] for part in range(2)]
    write_documents(tmp_path, recipe, lambda split: texts[split])
    run_steps(spark, prepare(recipe, "audit"), Store(str(tmp_path)), 2)
    losses = table_of(tmp_path, "audit").manifest.content.figures["losses"]
    assert [(loss["name"], loss["documents"], loss["removed"]) for loss in losses] == [("example.org", 60, 59)]
