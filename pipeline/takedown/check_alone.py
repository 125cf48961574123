"""The check of a takedown certificate against a copy of the run; it needs Python's standard library only.

python check_alone.py RUN CERTIFICATE [SEAL]: RUN is a local run folder, CERTIFICATE a file `takedowns/<id>.json`, SEAL
the seal that was published. The digests of certificate and manifests are computed from their canonical JSON, every file
of the new versions is hashed, counts are added up, and the proofs beside the certificate are checked against the roots
that the manifests state: each document of a shard was in the dataset before, and is in none after. The weights that
records of erasures beside it name are looked for in the folder `train`, by size and digest. It does not read Parquet or
Arrow files: `penstock takedown --check` also searches their rows, and rewritten files for other bytes.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def digest_of(value: Any) -> str:
    """Return the SHA-256 (hex) of a JSON value's canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def unhex(text: Any, size: int) -> bytes:
    """Return the bytes of lower-case hex digits. Raises ValueError if the text is not `size` bytes in this form."""
    if not isinstance(text, str) or not re.fullmatch(f"[0-9a-f]{{{2 * size}}}", text):
        raise ValueError("wrong hex digits")
    return bytes.fromhex(text)


def shown(text: str) -> str:
    """Return a text on one line with visible escapes for control characters, which a certificate may have."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def check_seal(certificate: dict[str, Any], published: str | None) -> Iterator[str]:
    """Yield what is wrong with the seal and the id of a certificate."""
    seal = digest_of({name: value for name, value in certificate.items() if name != "seal"})
    for name, stated in (("in the file", certificate["seal"]), ("that was published", published)):
        if stated not in (seal, None):
            yield f"certificate: the seal {name} is {stated}, that of its content {seal}"
    documents = sorted(own["document"] for own in certificate["documents"])
    if certificate["id"] != digest_of([1, certificate["versions"], certificate["mode"], documents])[:12]:
        yield "certificate: the id is not that of its content"


def check_versions(run: Path, certificate: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the list of the changed tables, and which of the others are not as they were."""
    changed, versions = certificate["tables"], certificate["versions"]
    for name, change in changed.items():
        if change["before"] != versions.get(name):
            yield f"{name}: the version before is not the one at the start of the takedown"
    if "tokens" not in changed and any(own["num_tokens"] for own in certificate["documents"]):
        yield "tokens: no version without the documents, though they had tokens"
    for name in versions.keys() - changed.keys():
        manifests = [*(run / name).glob("*/manifest.json")]
        contents = (json.loads(path.read_text(encoding="utf-8"))["content"] for path in manifests)
        if manifests and versions[name] not in map(digest_of, contents):
            yield f"{name}: no version {versions[name]}, which the takedown left as it was"


def check_table(run: Path, name: str, certificate: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the version of a table that the takedown made, and with its files."""
    change = certificate["tables"][name]
    folder = run / name / change["version_after"]
    if not (folder / "manifest.json").is_file():
        yield f"{name}: no version {change['version_after']}; if a later takedown replaced it, check that certificate"
        return
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    content, paths = manifest["content"], manifest["run"]["paths"]
    if digest_of(content) != change["after"]:
        yield f"{name}: the digest of the manifest is {digest_of(content)}, not {change['after']}"
    descent = content["figures"].get("takedown", {})
    expected_descent = [certificate["id"], change["before"], certificate["mode"]]
    if [descent.get(key) for key in ("id", "parent", "mode")] != expected_descent:
        yield f"{name}: the manifest names another takedown"
    counts = content["counts"]
    if counts["rows_in"] != counts["rows_kept"] + sum(counts["dropped"].values()):
        yield f"{name}: the counts of rows do not add up"
    expected: dict[str, str] = {own["key"]: own["after"] for own in change["rewritten"]}
    before = run / "takedowns" / certificate["id"] / f"{name}.json"
    if before.is_file():
        parent = json.loads(before.read_text(encoding="utf-8"))["content"]
        if digest_of(parent) != change["before"]:
            yield f"{name}: the manifest before has the digest {digest_of(parent)}, not {change['before']}"
        expected = {own["key"]: own["sha256"] for own in parent["files"]} | expected
    for entry in content["files"]:
        place = os.path.normpath(f"{change['version_after']}/{paths[entry['key']]}")
        if os.path.isabs(place) or place.startswith(".."):
            raise ValueError(f"a file outside of the table {name}")
        file = run / name / place
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            yield f"{name}/{entry['key']}: no file of {entry['bytes']} bytes"
            continue
        with file.open("rb") as stream:
            actual = hashlib.file_digest(stream, "sha256").hexdigest()
        if {actual, expected.get(entry["key"], actual)} != {entry["sha256"]}:
            yield f"{name}/{entry['key']}: another SHA-256 than the manifest or the certificate states"


def root_of(proof: dict[str, Any]) -> bytes:
    """Return the root that a proof leads to. The form of proofs is that of `penstock prove --checker`."""
    bits, leaf, path = f"{int.from_bytes(unhex(proof['doc_id'], 16)):0128b}", proof["leaf"], proof["path"]
    is_leaf = leaf is None or (isinstance(leaf, list) and len(leaf) > 1)
    if not isinstance(path, list) or len(path) > len(bits) or not is_leaf:
        raise ValueError("a path or a leaf that no tree has")
    node = bytes(32)
    if leaf:
        owner = unhex(leaf[0], 16)
        if not f"{int.from_bytes(owner):0128b}".startswith(bits[: len(path)]):
            raise ValueError("a leaf of another path")
        node = hashlib.sha256(b"\0" + owner + b"".join(unhex(value, 32) for value in leaf[1:])).digest()
    for depth in reversed(range(len(path))):
        beside = unhex(path[depth], 32)
        node = hashlib.sha256(b"\1" + (node + beside if bits[depth] == "0" else beside + node)).digest()
    return node


def stated_root(run: Path, certificate: dict[str, Any], when: str) -> str | None:
    """Return the root in the manifest of the dataset before or after; None if there is none in this copy of the run."""
    after = run / "tokens" / certificate["tables"]["tokens"]["version_after"] / "manifest.json"
    path = after if when == "after" else run / "takedowns" / certificate["id"] / "tokens.json"
    if not path.is_file():
        return None
    root: str | None = json.loads(path.read_text(encoding="utf-8"))["content"]["figures"].get("membership")
    return root


def check_proofs(run: Path, certificate: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the proofs that the removed documents were in the dataset, and are not any more."""
    known = {own["document"] for own in certificate["documents"]}
    stored = {own["document"] for own in certificate["documents"] if own["num_tokens"]}
    if certificate["membership"].keys() != {"before", "after"}:
        raise ValueError("a certificate with proofs has the roots before and after")
    for when, root in certificate["membership"].items():
        stated = stated_root(run, certificate, when)
        if stated != root and (stated or when == "after"):  # datasets without an index by id have no root before
            yield f"proofs {when}: the root is not that in the manifest of the dataset"
        path = run / "takedowns" / certificate["id"] / f"proofs-{when}.jsonl"
        proofs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        named = {
            hashlib.sha256(f"{certificate['salt']} document ".encode() + unhex(own["doc_id"], 16)).hexdigest(): own
            for own in proofs
        }
        if not stored <= named.keys() <= known:
            yield f"proofs {when}: they are for other documents than the certificate names"
        for digest, own in named.items():
            present = bool(own["leaf"]) and own["leaf"][0] == own["doc_id"]
            if root_of(own).hex() != root or present != (when == "before" and digest in stored):
                yield f"proofs {when}: no proof that {own['doc_id']} is {'present' if when == 'before' else 'absent'}"


def check_erased(run: Path, certificate: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the records of erased weights, and which of the weights are still in the run."""
    erased: set[str] = set()
    sizes: set[int] = set()
    for path in sorted((run / "takedowns" / certificate["id"]).glob("erased-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        seal = digest_of({name: value for name, value in record.items() if name != "seal"})
        if [record["seal"], record["certificate"]] != [seal, certificate["seal"]]:
            yield f"{path.name}: the seal is not that of its content, or it names another certificate"
        files = [file for own in record["checkpoints"] for file in own["files"]]
        erased |= {file["sha256"] for file in files}
        sizes |= {file["size"] for file in files}
    for file in sorted((run / "train").rglob("*")) if erased else ():
        if file.is_file() and file.stat().st_size in sizes:
            with file.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() in erased:
                    yield f"{file.relative_to(run)}: weights that were erased"


def main(run: Path, name: str, published: str | None = None) -> int:
    """Print what is wrong, or what was checked, and return the exit code."""
    certificate = json.loads(Path(name).read_text(encoding="utf-8"))
    wrong = list(check_seal(certificate, published))
    versions = [change["version_after"] for change in certificate["tables"].values()]
    for own in (certificate["id"], *versions, *certificate["tables"], *certificate["versions"]):
        if os.path.basename(own) != own or own in ("", ".", ".."):
            raise ValueError("a table, version or takedown with the name of another folder")
    wrong += check_versions(run, certificate)
    for table in certificate["tables"]:
        wrong += check_table(run, table, certificate)
    if has_proofs := certificate.get("membership") is not None:
        wrong += check_proofs(run, certificate)
    wrong += check_erased(run, certificate)
    print("\n".join(map(shown, wrong)) or f"takedown {certificate['id']}: everything that was checked agrees")
    print(f"seal {shown(str(certificate['seal']))}; {'with proofs' if has_proofs else 'no proofs were asked for'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), *sys.argv[2:4]))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        sys.exit(f"not checked: {error!r}")
