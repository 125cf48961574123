"""The check of a proof that a document is, or is not, in a dataset version; it needs Python's standard library only.

python check_proof.py FILE ROOT ID: FILE has proofs, a JSON object in each line; ROOT is the root of the version [64 hex
digits], from a source that you trust; ID is the document [32 hex digits]. A node of the tree is SHA-256(00, id, values)
for a leaf, SHA-256(01, left, right) for two children, and 32 zero bytes for an empty part. The bits of an id are its
path from the root: 0 is left, 1 is right.
"""

import hashlib
import json
import re
import sys


def unhex(text: object, size: int) -> bytes:
    """Return the bytes of lower-case hex digits. Raises ValueError if the text is not `size` bytes."""
    if not isinstance(text, str) or not re.fullmatch(f"[0-9a-f]{{{2 * size}}}", text):
        raise ValueError("wrong hex digits")
    return bytes.fromhex(text)


def check_proof(proof: dict[str, object], root: str, document: str) -> bool:
    """Return True if the document is proven to be in the version, False if proven not to be. Else raises ValueError."""
    target, leaf, path = unhex(document, 16), proof.get("leaf"), proof.get("path")
    if proof.keys() != {"doc_id", "leaf", "path"} or proof["doc_id"] != document or not isinstance(path, list):
        raise ValueError("another document or another format")
    if len(path) > 128 or not (leaf is None or (isinstance(leaf, list) and len(leaf) > 1)):
        raise ValueError("a path or a leaf that no tree has")
    node, bits = bytes(32), "".join(f"{byte:08b}" for byte in target)
    owner = unhex(leaf[0], 16) if leaf else b""
    if leaf:
        node = hashlib.sha256(b"\0" + owner + b"".join(unhex(value, 32) for value in leaf[1:])).digest()
        if not "".join(f"{byte:08b}" for byte in owner).startswith(bits[: len(path)]):
            raise ValueError("a leaf of another path")
    for depth in reversed(range(len(path))):
        pair = (node, unhex(path[depth], 32)) if bits[depth] == "0" else (unhex(path[depth], 32), node)
        node = hashlib.sha256(b"\1" + b"".join(pair)).digest()
    if node != unhex(root, 32):
        raise ValueError("another root")
    return owner == target


if __name__ == "__main__":
    try:
        with open(sys.argv[1], encoding="utf-8") as lines:
            proofs = [own for own in map(json.loads, lines) if own["doc_id"] == sys.argv[3]]
        states = {check_proof(own, *sys.argv[2:4]) for own in proofs} or sys.exit("no proof of this document")
        print(sys.argv[3], "present" if True in states else "absent")
    except (OSError, ValueError, TypeError, KeyError) as error:
        sys.exit(f"not proven: {error}")
