"""Signatures of a checkpoint and the manifest of its dataset, in the format of OpenSSF Model Signing.

A Sigstore bundle holds a DSSE envelope with an in-toto statement: the SHA-256 of each file, by its path in the run
folder. Source: OpenSSF Model Signing specification 1.0; in-toto attestation framework 1; DSSE protocol 1. Its program
verifies the file: `model_signing verify key RUN --signature FILE --public_key FILE --ignore_unsigned_files`.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.checkpoints import METADATA_NAME
from schemas.errors import ConfigError, ContractError, reading
from schemas.ids import canonical_json
from schemas.manifest import MANIFEST_NAME, read_run
from schemas.paths import is_below
from schemas.storage import Store
from schemas.tokens import Dataset
from schemas.versions import DATASET
from train.checkpoint.folder import CheckpointMetadata
from train.dataset_history import digests_at_same_positions

SIGNATURES = "signatures"
"""Folder of a run with signatures, by step."""
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
CURVES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
"""The hash function of the signature, by the curve of the key."""
MAX_KEY_BYTES = 1 << 16


@dataclass(frozen=True)
class VerifiedSignature:
    """A valid signature, and how the files differ from what was signed."""

    files: Mapping[str, str]
    """SHA-256 of each signed file, by its path in the run folder."""
    problems: tuple[str, ...]
    """Each file that is missing, has other bytes or was not signed, in words."""


def signature_name(step: int) -> str:
    """Return the path of the signature of a checkpoint in the run folder."""
    return f"{SIGNATURES}/step-{step:06d}.sig"


def signed_files(run: Store, checkpoint: CheckpointMetadata, dataset: Dataset) -> dict[str, str]:
    """Return the SHA-256, by path, of the files of a checkpoint and of the manifest of its dataset.

    Raises ContractError if a file is not as the metadata of the checkpoint states, or if the dataset is another one.
    """
    if checkpoint.identity.dataset not in digests_at_same_positions(dataset):
        raise ContractError(
            f"{run.uri}: expected dataset {checkpoint.identity.dataset[:12]}, on which {checkpoint.name} was trained, "
            f"got {dataset.digest[:12]}. Sign a checkpoint of this dataset with --step."
        )
    folder = dataset.folder.uri.removeprefix(f"{run.uri}/")
    if not is_below(folder):
        raise ContractError(
            f"sign: expected the dataset in the run folder, got {dataset.folder.uri}. Sign the run that wrote it."
        )
    names = _state_files(checkpoint)
    found = {name: run.sha256(name) for name in names}
    if wrong := sorted(name for name, sha256 in names.items() if found[name] != sha256):
        raise ContractError(
            f"{run.uri}/{wrong[0]}: expected SHA-256 {names[wrong[0]]}, as in {METADATA_NAME}, got "
            f"{found[wrong[0]]}. Sign another checkpoint with --step."
        )
    return found | {name: run.sha256(name) for name in _described_by(checkpoint, folder)}


def _state_files(checkpoint: CheckpointMetadata) -> dict[str, str]:
    """Return the SHA-256 of the files of a checkpoint as its metadata states, by path in the run."""
    return {f"{checkpoint.name}/{name}": file.sha256 for name, file in checkpoint.files.items()}


def _described_by(checkpoint: CheckpointMetadata, folder: str) -> tuple[str, str]:
    """Return the paths of the metadata of a checkpoint and of the manifest of its dataset; `folder`: of the dataset."""
    return f"{checkpoint.name}/{METADATA_NAME}", f"{folder}/{MANIFEST_NAME}"


def sign_files(files: Mapping[str, str], name: str, key_path: str) -> bytes:
    """Return a bundle that signs files by their SHA-256 with a private key; `name`: of the model.

    Raises ConfigError if the key is not an elliptic-curve key in PEM without a password.
    """
    key = _load_key(key_path, "private")
    payload = canonical_json(_statement(files, name))
    signature = key.sign(_authenticated(payload), _algorithm(key))
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
    }
    material = {"publicKey": {"hint": _hint(key.public_key())}, "tlogEntries": []}
    return canonical_json({"mediaType": BUNDLE_TYPE, "verificationMaterial": material, "dsseEnvelope": envelope})


def verify_checkpoint(run: Store, checkpoint: CheckpointMetadata, key_path: str) -> VerifiedSignature:
    """Return what the signature of a checkpoint signed, as `verify_signature` does.

    A file of this checkpoint, or the manifest of the run's dataset, that was not signed is one of the problems: a file
    of signatures may be that of another checkpoint under a new name.
    """
    found = verify_signature(run, signature_name(checkpoint.step), key_path)
    version = read_run(run).tables.get(DATASET)
    expected = {*_state_files(checkpoint), *_described_by(checkpoint, f"{DATASET}/{version}")}
    unsigned = [f"{name}: not signed" for name in sorted(expected - found.files.keys())]
    return VerifiedSignature(found.files, (*found.problems, *unsigned))


def verify_signature(run: Store, name: str, key_path: str) -> VerifiedSignature:
    """Return what a signature file of a run signed, after its signature was verified with a public key.

    Raises ContractError if it is no such file, or if the signature is not of this key, and ConfigError for a wrong key.
    """
    key = _load_key(key_path, "public")
    where = f"{run.uri}/{name}"
    with reading(where, "a bundle that `penstock sign` wrote", "Sign the run again."):
        bundle = run.read_json(name)
        envelope = bundle["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        signature = base64.b64decode(envelope["signatures"][0]["sig"], validate=True)
        if (bundle["mediaType"], envelope["payloadType"]) != (BUNDLE_TYPE, PAYLOAD_TYPE):
            raise ValueError(f"media types {bundle['mediaType']!r:.60} and {envelope['payloadType']!r:.60}")
    if not _is_signed(key, signature, payload):
        raise ContractError(f"{where}: expected a signature of the key {key_path}, got another. Name the right key.")
    with reading(where, "a statement that `penstock sign` signed", "Sign the run again."):
        files = _files_of(json.loads(payload))
    return VerifiedSignature(files, tuple(_problems(run, files)))


def _statement(files: Mapping[str, str], name: str) -> dict[str, Any]:
    ordered = sorted(files)
    root = hashlib.sha256(b"".join(bytes.fromhex(files[own]) for own in ordered)).hexdigest()
    resources = [{"name": own, "algorithm": "sha256", "digest": files[own]} for own in ordered]
    serialization = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": []}
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {"serialization": serialization, "resources": resources},
    }


def _files_of(statement: Mapping[str, Any]) -> dict[str, str]:
    """Return the files of a statement. Raises ValueError if it is not as `_statement` makes it."""
    files = {own["name"]: own["digest"] for own in statement["predicate"]["resources"]}
    if statement != _statement(files, statement["subject"][0]["name"]):
        raise ValueError("a statement of another form, or with another root digest")
    if outside := [name for name in files if not is_below(name)]:
        raise ValueError(f"a file outside of the run folder, {outside[0]!r:.100}")
    return files


def _problems(run: Store, files: Mapping[str, str]) -> list[str]:
    found = []
    for name, sha256 in sorted(files.items()):
        if not run.exists(name):
            found.append(f"{name}: missing")
        elif (now := run.sha256(name)) != sha256:
            found.append(f"{name}: SHA-256 {now} and not {sha256}")
    return found


def _authenticated(payload: bytes) -> bytes:
    """Return the bytes that are signed: the payload with its type and length (DSSE's pre-authentication encoding)."""
    return f"DSSEv1 {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(payload)} ".encode() + payload


def _load_key(path: str, kind: str) -> Any:
    """Return the private or public key in a file. Raises ConfigError if it has none that is supported."""
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError as error:
        raise ConfigError(
            "sign: expected the package cryptography, got none. Install it with `pip install 'penstock[sign]'`."
        ) from error
    file = Path(path)
    expected = f"sign: expected a {kind} elliptic-curve key in PEM without a password in {path}, got"
    if not file.is_file() or file.stat().st_size > MAX_KEY_BYTES:
        raise ConfigError(f"{expected} no such file. Correct the path.")
    data = file.read_bytes()
    try:
        key: Any = (
            serialization.load_pem_private_key(data, None)
            if kind == "private"
            else serialization.load_pem_public_key(data)
        )
    except (ValueError, TypeError) as error:  # the text of the error may quote the key
        raise ConfigError(f"{expected} something else ({type(error).__name__}). Name another file.") from None
    if getattr(getattr(key, "curve", None), "name", "") not in CURVES:
        raise ConfigError(f"{expected} a key of another kind. Use a key on one of the curves {', '.join(CURVES)}.")
    return key


def _algorithm(key: Any) -> Any:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.ECDSA(getattr(hashes, CURVES[key.curve.name])())


def _hint(public_key: Any) -> str:
    """Return the SHA-256 of a public key in PEM, by which a verifier finds it."""
    from cryptography.hazmat.primitives import serialization

    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(public_key.public_bytes(*form)).hexdigest()


def _is_signed(key: Any, signature: bytes, payload: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, _authenticated(payload), _algorithm(key))
    except InvalidSignature:
        return False
    return True
