"""Proofs of presence and absence: every document is provable as it is, and no changed proof is accepted."""

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.membership.check_proof import check_proof
from pipeline.membership.tree import EMPTY, MAX_DEPTH, Leaf, Proof, build_tree, merge_places

IDS = st.one_of(
    st.binary(min_size=16, max_size=16),
    st.integers(0, 7).map(lambda number: number.to_bytes(16, "big")),  # long common paths
    st.integers(0, 7).map(lambda number: bytes([number << 5]) + bytes(15)),
)


def leaf_of(own: bytes) -> Leaf:
    return Leaf(own, (hashlib.sha256(b"value" + own).digest(),))


def tree_of(ids: Sequence[bytes], documents: Sequence[bytes], bits: int = 0) -> tuple[str, dict[bytes, Proof]]:
    leaves = [leaf_of(own) for own in sorted({*ids})]

    def bucket(prefix: int) -> list[Leaf]:
        return [leaf for leaf in leaves if int.from_bytes(leaf.doc_id[:2], "big") >> 16 - bits == prefix]

    root, proofs = build_tree(bucket, bits, documents)
    return root.hex(), {proof.doc_id: proof for proof in proofs}


def sha(*values: bytes) -> bytes:
    return hashlib.sha256(b"".join(values)).digest()


def test_roots_of_small_trees_computed_by_hand() -> None:
    low, middle, high = (bytes([first]) + bytes(15) for first in (0b00000000, 0b01000000, 0b10000000))
    of = {own: sha(b"\0", own, sha(b"value", own)) for own in (low, middle, high)}
    assert tree_of([], [])[0] == "00" * 32
    assert tree_of([low], [])[0] == of[low].hex()
    assert tree_of([high, low], [])[0] == sha(b"\1", of[low], of[high]).hex()
    pair = sha(b"\1", of[low], of[middle])
    assert tree_of([low, middle], [])[0] == sha(b"\1", pair, EMPTY).hex()
    root, proofs = tree_of([low, middle, high], [middle, high, b"\xff" * 16, b"\x60" + bytes(15)])
    assert root == sha(b"\1", pair, of[high]).hex()
    assert proofs[middle].to_json() == {
        "doc_id": middle.hex(), "leaf": [middle.hex(), sha(b"value", middle).hex()],
        "path": [of[high].hex(), of[low].hex()]
    }  # fmt: skip
    assert proofs[b"\xff" * 16].to_json() == {
        "doc_id": "ff" * 16, "leaf": [high.hex(), sha(b"value", high).hex()], "path": [pair.hex()]
    }  # fmt: skip
    assert proofs[high].is_present
    assert not proofs[b"\xff" * 16].is_present
    assert proofs[b"\x60" + bytes(15)].leaf == leaf_of(middle)


def test_an_absent_document_in_an_empty_place() -> None:
    low, middle, absent = bytes(16), b"\x40" + bytes(15), b"\x80" + bytes(15)
    root, proofs = tree_of([low, middle], [absent])
    assert proofs[absent].leaf is None
    assert len(proofs[absent].path) == 1
    assert check_proof(proofs[absent].to_json(), root, absent.hex()) is False


def test_ids_that_differ_in_the_last_bit_have_the_longest_path() -> None:
    first, second = bytes(16), bytes(15) + b"\1"
    root, proofs = tree_of([first, second], [first])
    assert len(proofs[first].path) == MAX_DEPTH == 128
    assert check_proof(proofs[first].to_json(), root, first.hex()) is True
    longer = proofs[first].to_json()
    longer["path"] = [*proofs[first].to_json()["path"], "00" * 32]
    with pytest.raises(ValueError, match="a path or a leaf that no tree has"):
        check_proof(longer, root, first.hex())


@given(st.lists(IDS, max_size=40), st.lists(IDS, max_size=10))
def test_each_document_is_proven_as_it_is(ids: list[bytes], others: list[bytes]) -> None:
    root, proofs = tree_of(ids, [*ids, *others])
    assert proofs.keys() == {*ids, *others}
    for own, proof in proofs.items():
        assert proof.is_present == (own in ids)
        assert check_proof(proof.to_json(), root, own.hex()) is (own in ids)


@given(st.lists(IDS, max_size=30), st.lists(IDS, max_size=5), st.integers(0, 6), st.randoms())
def test_the_root_and_the_proofs_do_not_depend_on_buckets_or_order(ids, others, bits, random) -> None:
    expected = tree_of(ids, [*ids, *others])
    mixed = [*ids, *others]
    random.shuffle(mixed)
    assert tree_of([*reversed(ids)], mixed, bits) == expected


@given(st.sets(IDS, min_size=1, max_size=20))
def test_different_sets_have_different_roots(ids: set[bytes]) -> None:
    roots = {tree_of([*ids - {own}], [])[0] for own in ids} | {tree_of([*ids], [])[0]}
    assert len(roots) == len(ids) + 1


def changes(proof: dict) -> list[dict]:
    """Every proof with one change: a digit of each value, a value or a hash less, more or swapped, and a field less."""
    path, leaf, made = proof["path"], proof["leaf"], []

    def digits(text: str) -> list[str]:
        changed = [f"{text[:at]}{int(text[at], 16) ^ 1:x}{text[at + 1 :]}" for at in range(0, len(text), 7)]
        return [*changed, text[:-2], text + "00", f" {text}", text[:-1] + "g", "", *({text.upper()} - {text})]

    for at, own in enumerate(path):
        made += [proof | {"path": [*path[:at], other, *path[at + 1 :]]} for other in (*digits(own), None, 7, [own])]
        made.append(proof | {"path": path[:at] + path[at + 1 :]})
        made.append(proof | {"path": [*path[:at], "00" * 32, *path[at:]]})
        if path != (swapped := [*path[:at], *reversed(path[at : at + 2]), *path[at + 2 :]]):
            made.append(proof | {"path": swapped})
    for at, own in enumerate(leaf or ()):
        made += [proof | {"leaf": [*leaf[:at], other, *leaf[at + 1 :]]} for other in (*digits(own), None, 7)]
        made.append(proof | {"leaf": leaf[:at] + leaf[at + 1 :]})
        made.append(proof | {"leaf": [*leaf, own]})
    made += [proof | {"path": value} for value in ([*path, "00" * 32], None, "", {}, 0)]
    made += [proof | {"leaf": value} for value in ([], "", 0, {}, False, [proof["doc_id"]], *([None] if leaf else []))]
    made += [proof | {"leaf": [proof["doc_id"], "11" * 32]}, proof | {"doc_id": "12" * 16}, proof | {"more": 1}]
    return made + [{name: proof[name] for name in proof if name != left} for left in proof]


@settings(max_examples=15, deadline=None)
@given(st.sets(IDS, max_size=6), IDS)
def test_no_changed_proof_is_accepted(ids: set[bytes], other: bytes) -> None:
    root, proofs = tree_of([*ids], [*ids, other])
    for own, proof in proofs.items():
        for changed in changes(proof.to_json()):
            with pytest.raises(ValueError, match=r"wrong hex|another|a path or a leaf"):
                check_proof(changed, root, own.hex())
        for wrong in ("11" * 32, root[:-2], root.upper() + "A", ""):
            with pytest.raises(ValueError, match=r"wrong hex|another|a path or a leaf"):
                check_proof(proof.to_json(), wrong, own.hex())


@given(st.sets(IDS, min_size=2, max_size=12))
def test_the_proof_of_one_document_is_none_of_another(ids: set[bytes]) -> None:
    root, proofs = tree_of([*ids], [*ids])
    first, *others = sorted(ids)
    for own in others:
        with pytest.raises(ValueError, match="another document"):
            check_proof(proofs[first].to_json(), root, own.hex())
        with pytest.raises(
            ValueError, match=r"wrong hex|another|a path or a leaf"
        ):  # the end of its own path is not the leaf of the other
            check_proof(proofs[first].to_json() | {"doc_id": own.hex()}, root, own.hex())


def test_places_of_a_document_are_one_leaf() -> None:
    places = [(b"a", b"1"), (b"a", b"2"), (b"b", b"1"), (b"c", b"0"), (b"c", b"3")]
    assert [*merge_places(places)] == [Leaf(b"a", (b"1", b"2")), Leaf(b"b", (b"1",)), Leaf(b"c", (b"0", b"3"))]
    assert [*merge_places([])] == []
