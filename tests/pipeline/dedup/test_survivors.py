"""Near copies that are compared with the document that is kept, by hand and in a run: chains of pairwise copies."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.dedup.config import DedupConfig
from pipeline.dedup.decide import DedupFacts, SurvivorComparison, cluster_tallies, decide, rest_tallies, round_key
from pipeline.dedup.survivors import similarity_step
from pipeline.inspect.whatif import predict
from pipeline.minhash.stage import SignatureConfig, as_matrix, signature, similarity, value_type
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.storage import Store
from tests.support.dedup_oracle import survivors_by_rounds
from tests.support.dedup_tables import Text, columns_of, recipe_of, table_of, write_documents

SIGNED = SignatureConfig()
CLUSTER = b"k" * 16


def signed(*values: int) -> bytes:
    """A signature of four equal parts, each with one value."""
    return np.repeat(np.array(values, value_type(SIGNED)), SIGNED.permutations // 4).tobytes()


# Similarities: A-B, B-C and D-E are 0.75; A-C, A-D, A-E and C-D at most 0.5.
CHAIN = {
    "A": signed(1, 2, 3, 4),
    "B": signed(1, 2, 3, 5),
    "C": signed(1, 2, 6, 5),
    "D": signed(1, 7, 8, 9),
    "E": signed(10, 7, 8, 9),
}


def facts(names: str, digests: str = "", values: Mapping[str, bytes] = CHAIN, first: int = 0) -> DedupFacts:
    """Documents of one cluster in this keep order; documents of the same letter in `digests` have equal texts.

    `first` is the place of the first document in the keep order of all parts.
    """
    ids = [name.encode() * 16 for name in names]
    ends = [letter.encode() * 16 for letter in digests] or [b""] * len(ids)
    return DedupFacts(
        ids=ids,
        dropped=[False] * len(ids),
        clusters=[CLUSTER] * len(ids),
        similarities=[0.75] * len(ids),
        orders=[bytes([place]) + doc + bytes(4) + end for place, (doc, end) in enumerate(zip(ids, ends), first)],
        digest=16 if digests else 0,
        urls=[None] * len(ids),
        url_orders=[b""] * len(ids),
        chars=[1] * len(ids),
        signatures=[values[name] for name in names],
    )


def decided(found: DedupFacts, **settings: Any) -> dict[str, tuple[str, float | None, int]]:
    """(survivor, similarity to it, weight) of each document, as a run of one part chooses them."""
    config = DedupConfig(**settings)
    known: dict[bytes, tuple[int, bytes]] = {}
    kept: dict[bytes, bytes] = {}
    rounds = 0
    while rounds < (config.rounds if config.compare_survivor == "require" else 1):
        tally: dict[bytes, tuple[int, bytes]] = {}
        if rounds == 0:
            cluster_tallies(found, known, tally, alone=False)
        else:
            rest_tallies(found, known, SurvivorComparison(config, SIGNED, kept, rounds), tally)
        if all(count == 1 for count, _ in tally.values()):
            break
        key, (count, best) = round_key(rounds, CLUSTER), tally[CLUSTER]
        known[key] = count, best
        kept[key] = found.signatures[found.orders.index(best[1:])]
        rounds += 1
    decisions = list(decide(found, known, SurvivorComparison(config, SIGNED, kept, rounds)))
    return {
        each.row["doc_id"][:1].decode(): (each.row["survivor"][:1].decode(), each.value, each.total)
        for each in decisions
    }


def test_a_chain_keeps_what_is_no_copy_of_the_survivor() -> None:
    measured = decided(facts("ABC"), compare_survivor="measure")
    assert measured == {"A": ("A", None, 3), "B": ("A", 0.75, 3), "C": ("A", 0.5, 3)}
    required = decided(facts("ABC"), compare_survivor="require")
    assert required == {"A": ("A", None, 3), "B": ("A", 0.75, 3), "C": ("C", None, 1)}
    # in another keep order, both ends are copies of the document that is kept
    assert {survivor for survivor, *_ in decided(facts("BAC"), compare_survivor="require").values()} == {"B"}


def test_the_rest_of_a_cluster_is_compared_with_the_first_of_the_rest() -> None:
    found = decided(facts("ADBEC"), compare_survivor="require")
    survivors = {name: survivor for name, (survivor, *_) in found.items()}
    assert survivors == {"A": "A", "B": "A", "D": "D", "E": "D", "C": "C"}
    assert found["E"] == ("D", 0.75, 3)  # of D, E and C
    once = decided(facts("ADBEC"), compare_survivor="require", rounds=1)
    assert {name for name, (survivor, *_) in once.items() if survivor == name} == set("ADEC")


def test_equal_texts_are_copies_whatever_their_signatures() -> None:
    found = decided(facts("AC", "xx"), compare_survivor="require")
    assert found == {"A": ("A", None, 2), "C": ("A", 1.0, 2)}


@given(
    signatures=st.lists(st.tuples(*[st.integers(1, 3)] * 4), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=3),
    rounds=st.integers(1, 4),
)
def test_survivors_are_those_of_an_oracle_at_any_distribution_over_parts(
    signatures: list[tuple[int, ...]], cuts: list[int], rounds: int
) -> None:
    names = [chr(ord("A") + place) for place in range(len(signatures))]
    values = dict(zip(names, (signed(*each) for each in signatures)))
    bounds = sorted({0, len(names), *(cut for cut in cuts if cut < len(names))})
    parts = [facts("".join(names[low:high]), values=values, first=low) for low, high in pairwise(bounds)]
    config = DedupConfig(rounds=rounds, min_similarity=0.7)
    known: dict[bytes, tuple[int, bytes]] = {}
    kept: dict[bytes, bytes] = {}
    ran = 0
    while ran < rounds:
        total: dict[bytes, tuple[int, bytes]] = {}
        for part in parts:
            tally: dict[bytes, tuple[int, bytes]] = {}
            if ran == 0:
                cluster_tallies(part, known, tally, alone=False)
            else:
                rest_tallies(part, known, SurvivorComparison(config, SIGNED, kept, ran), tally)
            for key, (count, best) in tally.items():
                total[key] = total.get(key, (0, best))[0] + count, min(total.get(key, (0, best))[1], best)
        if all(count == 1 for count, _ in total.values()):
            break
        key, (count, best) = round_key(ran, CLUSTER), total[CLUSTER]
        known[key] = count, best
        kept[key] = next(part.signatures[part.orders.index(best[1:])] for part in parts if best[1:] in part.orders)
        ran += 1
    comparison = SurvivorComparison(config, SIGNED, kept, ran)
    decisions = [each for part in parts for each in decide(part, known, comparison)]
    found = {each.row["doc_id"]: each.row["survivor"] for each in decisions}
    of = {name.encode() * 16: value for name, value in values.items()}

    def is_copy(one: bytes, other: bytes) -> bool:
        return comparison.similarity(of[one], of[other]) >= np.float32(0.7)

    assert found == survivors_by_rounds(list(of), is_copy, rounds)
    for each in decisions:
        survivor = each.row["survivor"]
        assert (each.reason is None) == (survivor == each.row["doc_id"])
        if each.reason is not None:  # a removal has its measured similarity to a document that stays
            assert found[survivor] == survivor
            assert each.value == comparison.similarity(of[each.row["doc_id"]], of[survivor]) >= np.float32(0.7)


def test_steps_of_similarity() -> None:
    steps = [similarity_step(value) for value in (None, 0.0, 0.699, 0.7, 0.75, 1.0)]
    assert steps == ["not compared", "0.00", "0.65", "0.70", "0.75", "1.00"]


def test_settings() -> None:
    assert DedupConfig().compare_survivor == DedupConfig().decisions()["compare_survivor"] == "require"
    assert "compare_survivor" not in DedupConfig(compare_survivor="off").decisions()
    assert "compare_survivor" not in DedupConfig().content()
    with pytest.raises(ValidationError, match="near: expected true with compare_survivor"):
        DedupConfig(compare_survivor="measure", near=False)
    assert not DedupConfig(near=False).compares_survivors  # equal texts need no comparison


def chain() -> list[str]:
    """Texts A, B and C in which A-B and B-C are copies and A-C are not, A the longest; and a text of its own."""
    draw = np.random.default_rng(2)
    words = ["".join(draw.choice(list("abcdefghij"), 7)) for _ in range(400)]
    first, middle, last = words[:200], words[26:216], words[52:230]
    return [" ".join(text) for text in (first, middle, last, words[250:])]


@pytest.mark.spark
def test_a_run_keeps_the_end_of_a_chain(spark: Any, tmp_path: Path) -> None:
    texts = chain()
    matrix = as_matrix([signature(text, "en", SIGNED) for text in texts], value_type(SIGNED))
    ends = [float(similarity(matrix[[a]], matrix[[b]])[0]) for a, b in ((0, 1), (1, 2), (0, 2))]
    assert min(ends[:2]) > 0.7 > ends[2]
    dropped = {}
    rows = [[Text(f"https://a.org/{text[:9]}", text) for text in half] for half in (texts[:2], texts[2:])]
    for choice in ("off", "measure", "require"):
        recipe = recipe_of(tmp_path, 2, {"dedup": {"compare_survivor": choice, "keep": ["longest"]}})
        write_documents(tmp_path, recipe, lambda split: rows[split])
        run_steps(spark, prepare(recipe, "dedup"), Store(str(tmp_path)), None)
        table = columns_of(tmp_path, "dedup", ["drop_rule", "drop_value"]).to_pylist()
        dropped[choice] = {place: row["drop_value"] for place, row in enumerate(table) if row["drop_rule"]}
        figures = table_of(tmp_path, "dedup").manifest.content.figures
        assert ("survivor_similarity" in figures) == (choice != "off")
        for other in ("off", "measure", "require"):  # predicted from the tables of each choice
            tried = recipe_of(tmp_path, 2, {"dedup": {"compare_survivor": other, "keep": ["longest"]}})
            cells = predict(spark, Store(str(tmp_path)), tried, {}).cells
            near = sum(cell.documents for cell in cells if cell.after == "dedup/near_duplicate")
            assert near == (1 if other == "require" else 2)
    assert list(dropped["off"]) == list(dropped["measure"]) == [1, 2]
    assert dropped["measure"] == pytest.approx({1: ends[0], 2: ends[2]})
    assert dropped["require"] == pytest.approx({1: ends[0]})
