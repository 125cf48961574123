"""Signatures: round trips on each curve, every change is found, hostile bundles, and the program of the format."""

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed")
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from jobs.cli import main
from schemas.errors import ConfigError, ContractError
from schemas.manifest import read_run, write_run
from schemas.storage import Store
from tests.support.tiny_dataset import make_tiny_dataset
from tests.train.eval.test_generate import RECIPE
from train.export.signature import sign_files, verify_signature
from train.pretrain.__main__ import main as pretrain

Printed = pytest.CaptureFixture[str]
SIGNATURE = "signatures/step-000004.sig"
FILES = {"a/b": "1" * 64, "c": "2" * 64}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Store:
    run = make_tiny_dataset(tmp_path_factory.mktemp("sign") / "run")
    train = RECIPE["train"] | {"steps": 4}
    write_run(run, read_run(run).model_copy(update={"recipe": RECIPE | {"train": train, "checkpoint": {"every": 2}}}))
    assert pretrain([run.uri]) == 0
    return run


def write_keys(folder: Path, key: Any, password: bytes | None = None) -> tuple[str, str]:
    """Write a key pair and return the paths of the private and the public key."""
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)
    form = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "key.pem").write_bytes(private)
    (folder / "key.pub").write_bytes(key.public_key().public_bytes(*form))
    return str(folder / "key.pem"), str(folder / "key.pub")


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, str]:
    return write_keys(tmp_path, ec.generate_private_key(ec.SECP256R1()))


@pytest.fixture
def signed(trained: Store, tmp_path: Path, keys: tuple[str, str]) -> Store:
    shutil.copytree(trained.root, tmp_path / "run")
    run = Store(str(tmp_path / "run"))
    assert main(["sign", run.uri, "--key", keys[0]]) == 0
    return run


def test_a_signature_names_the_checkpoint_and_the_manifest(
    signed: Store, keys: tuple[str, str], capsys: Printed
) -> None:
    assert main(["sign", signed.uri, "--verify", "--public-key", keys[1]]) == 0
    assert "all files are as they were signed" in capsys.readouterr().out
    found = verify_signature(signed, SIGNATURE, keys[1])
    assert found.problems == ()
    folder = "train/checkpoints/step-000004"
    names = {*(f"{folder}/{path.name}" for path in Path(signed.root, folder).iterdir())}
    assert {*found.files} == names | {"tokens/v-0000000071a9/manifest.json"}
    assert all(signed.sha256(name) == sha256 for name, sha256 in found.files.items())


def test_an_earlier_checkpoint_is_signed_by_its_step(signed: Store, keys: tuple[str, str]) -> None:
    assert main(["sign", signed.uri, "--key", keys[0], "--step", "2"]) == 0
    assert main(["sign", signed.uri, "--verify", "--public-key", keys[1], "--step", "2"]) == 0
    assert Path(signed.root, "signatures/step-000002.sig").exists()


def test_a_signature_of_another_checkpoint_or_dataset_is_none(
    signed: Store, keys: tuple[str, str], capsys: Printed
) -> None:
    """A renamed file of signatures is valid, and all files that it names are there."""
    folder = Path(signed.root, "signatures")
    verify = ["sign", signed.uri, "--verify", "--public-key", keys[1]]
    shutil.copy(folder / "step-000004.sig", folder / "step-000002.sig")
    assert main([*verify, "--step", "2"]) == 1
    assert "  train/checkpoints/step-000002/checkpoint.json: not signed" in capsys.readouterr().out
    tables = read_run(signed).tables | {"tokens": "v-ffffffffffff"}
    write_run(signed, read_run(signed).model_copy(update={"tables": tables}))
    assert main(verify) == 1
    assert "  tokens/v-ffffffffffff/manifest.json: not signed" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["tokens/v-0000000071a9/manifest.json", "train/checkpoints/step-000004/.metadata"])
@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_changed_file_is_found(
    signed: Store, keys: tuple[str, str], capsys: Printed, name: str, is_deleted: bool
) -> None:
    path = Path(signed.root, name)
    path.unlink() if is_deleted else path.write_bytes(path.read_bytes() + b" ")
    assert main(["sign", signed.uri, "--verify", "--public-key", keys[1]]) == 1
    assert f"  {name}: {'missing' if is_deleted else 'SHA-256 '}" in capsys.readouterr().out


def test_a_checkpoint_with_another_file_is_not_signed(signed: Store, keys: tuple[str, str], capsys: Printed) -> None:
    path = Path(signed.root, "train/checkpoints/step-000004/.metadata")
    path.write_bytes(path.read_bytes() + b" ")
    assert main(["sign", signed.uri, "--key", keys[0]]) == 2
    assert ".metadata: expected SHA-256 " in capsys.readouterr().err


def test_no_file_of_the_run_has_the_key(signed: Store, keys: tuple[str, str]) -> None:
    private = serialization.load_pem_private_key(Path(keys[0]).read_bytes(), None)
    secret = private.private_numbers().private_value  # type: ignore[union-attr]
    forms = [secret.to_bytes(32, "big"), str(secret).encode(), f"{secret:x}".encode(), b"PRIVATE KEY"]
    forms += [Path(keys[0]).read_bytes().splitlines()[1]]
    data = b"".join(path.read_bytes() for path in Path(signed.root).rglob("*") if path.is_file())
    assert not any(form in data for form in forms)


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_each_curve_signs(tmp_path: Path, curve: Any) -> None:
    private, public = write_keys(tmp_path, ec.generate_private_key(curve))
    (tmp_path / "x.sig").write_bytes(sign_files(FILES, "m", private))
    assert verify_signature(Store(str(tmp_path)), "x.sig", public).files == FILES


def test_another_key_or_payload_is_refused(tmp_path: Path, keys: tuple[str, str]) -> None:
    run = Store(str(tmp_path))
    bundle = json.loads(sign_files(FILES, "m", keys[0]))
    other = tmp_path / "other"
    other.mkdir()
    _, public = write_keys(other, ec.generate_private_key(ec.SECP256R1()))
    (tmp_path / "x.sig").write_text(json.dumps(bundle))
    with pytest.raises(ContractError, match=r"x.sig: expected a signature of the key .*, got another"):
        verify_signature(run, "x.sig", public)
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"]).replace(b"1" * 64, b"3" * 64)
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(payload).decode()
    (tmp_path / "x.sig").write_text(json.dumps(bundle))
    with pytest.raises(ContractError, match=r"expected a signature of the key"):
        verify_signature(run, "x.sig", keys[1])


@pytest.mark.parametrize(
    "data", ["", "[]", "{}", '{"dsseEnvelope": 3}', '{"dsseEnvelope": {"payload": "!", "signatures": []}}', "[" * 10**5]
)
def test_a_hostile_bundle_gives_one_sentence(tmp_path: Path, keys: tuple[str, str], data: str) -> None:
    (tmp_path / "x.sig").write_text(data)
    with pytest.raises(ContractError, match=r"x.sig: expected "):
        verify_signature(Store(str(tmp_path)), "x.sig", keys[1])


def test_a_signed_path_outside_of_the_run_is_refused(tmp_path: Path, keys: tuple[str, str]) -> None:
    (tmp_path / "x.sig").write_bytes(sign_files({"../secret": "1" * 64}, "m", keys[0]))
    with pytest.raises(ContractError, match=r"a file outside of the run folder, '../secret'"):
        verify_signature(Store(str(tmp_path)), "x.sig", keys[1])


def test_other_keys_are_refused_without_their_bytes(tmp_path: Path) -> None:
    private, _ = write_keys(tmp_path, ed25519.Ed25519PrivateKey.generate())
    with pytest.raises(ConfigError, match=r"got a key of another kind. Use a key on one of the curves secp256r1"):
        sign_files(FILES, "m", private)
    private, _ = write_keys(tmp_path, ec.generate_private_key(ec.SECP256R1()), b"secret")
    with pytest.raises(ConfigError, match=r"without a password in .*key.pem, got something else \(TypeError\)"):
        sign_files(FILES, "m", private)
    (tmp_path / "key.pem").write_text("-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n")
    with pytest.raises(ConfigError, match=r"got something else") as caught:
        sign_files(FILES, "m", private)
    assert "c2VjcmV0" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"got no such file"):
        sign_files(FILES, "m", str(tmp_path / "none"))


@pytest.mark.parametrize(
    "words", [[], ["--verify"], ["--key", "k", "--public-key", "p"], ["--verify", "--key", "k", "--public-key", "p"]]
)
def test_options_that_do_not_fit_are_refused(trained: Store, capsys: Printed, words: list[str]) -> None:
    assert main(["sign", trained.uri, *words]) == 2
    assert "sign: expected --" in capsys.readouterr().err


def test_a_run_without_checkpoint_or_signature(tmp_path: Path, trained: Store, capsys: Printed, keys: Any) -> None:
    run = make_tiny_dataset(tmp_path / "empty")
    assert main(["sign", run.uri, "--key", keys[0]]) == 2
    assert "expected a checkpoint, got steps none" in capsys.readouterr().err
    assert main(["sign", trained.uri, "--verify", "--public-key", keys[1]]) == 2
    assert "expected the signature signatures/step-000004.sig, got none" in capsys.readouterr().err


def test_the_program_of_the_format_verifies_and_finds_changes(signed: Store, keys: tuple[str, str]) -> None:
    program = shutil.which("model_signing")
    if program is None:
        pytest.skip("model_signing, the program of the package model-signing, is not on the PATH")
    command = [program, "verify", "key", signed.root, "--signature", f"{signed.root}/{SIGNATURE}"]
    command += ["--public_key", keys[1], "--ignore_unsigned_files"]
    assert subprocess.run(command, check=False).returncode == 0
    path = Path(signed.root, "tokens/v-0000000071a9/manifest.json")
    path.write_bytes(path.read_bytes() + b" ")
    assert subprocess.run(command, check=False).returncode != 0


def test_a_bundle_of_the_program_has_our_form(tmp_path: Path, keys: tuple[str, str]) -> None:
    program = shutil.which("model_signing")
    if program is None:
        pytest.skip("model_signing, the program of the package model-signing, is not on the PATH")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(b"w")
    command = [program, "sign", "key", str(folder), "--signature", f"{tmp_path}/x.sig", "--private_key", keys[0]]
    subprocess.run(command, check=True)
    theirs = json.loads((tmp_path / "x.sig").read_text())
    ours = json.loads(sign_files({"weights": Store(str(folder)).sha256("weights")}, "model", keys[0]))
    assert theirs.keys() == ours.keys()
    assert theirs["dsseEnvelope"].keys() == ours["dsseEnvelope"].keys()
    assert theirs["verificationMaterial"]["publicKey"] == ours["verificationMaterial"]["publicKey"]
    statements = [json.loads(base64.b64decode(own["dsseEnvelope"]["payload"])) for own in (theirs, ours)]
    for statement in statements:
        statement["predicate"].pop("serialization")
    assert statements[0] == statements[1]
