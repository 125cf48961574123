"""`penstock sign`: a signature of a checkpoint and the manifest of its dataset, and its verification."""

import argparse

from jobs.arguments import RUN_HELP, Command, whole
from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from schemas.text import printable
from schemas.tokens import open_dataset
from schemas.versions import open_run, open_run_to_read
from train.checkpoint.folder import CheckpointMetadata, list_checkpoints
from train.export.signature import sign_files, signature_name, signed_files, verify_checkpoint

GROUP = "join"
VERBS = {
    "sign": "Sign a checkpoint and its dataset, or verify a signature. The format is that of OpenSSF Model Signing. "
    "The key is never stored.",
}
DIFFERENT = 1
"""Exit code if a signed file is missing or has other bytes, or a file of the checkpoint is not signed."""


def add_sign_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sign`."""
    parser.add_argument("run", help=RUN_HELP)
    parser.add_argument("--key", metavar="FILE", help="private key: elliptic curve, PEM, without a password")
    parser.add_argument("--step", type=whole, help="step of the checkpoint; default: the last")
    parser.add_argument("--verify", action="store_true", help="verify the signature, and compare every signed file")
    parser.add_argument("--public-key", metavar="FILE", help="--verify: the public key, PEM")


def sign_command(arguments: argparse.Namespace) -> int:
    """Sign, or verify; return DIFFERENT if the files are not those that were signed."""
    wanted, unused = ("public_key", "key") if arguments.verify else ("key", "public_key")
    if getattr(arguments, wanted) is None or getattr(arguments, unused) is not None:
        form = "--verify with --public-key" if arguments.verify else "--key, or --verify with --public-key"
        raise ConfigError(f"sign: expected {form} and no other key, got other options. Give exactly these.")
    run = (open_run_to_read if arguments.verify else open_run)(arguments.run)
    checkpoint = _checkpoint(run, arguments.step)
    name = signature_name(checkpoint.step)
    if arguments.verify:
        return _verify(run, checkpoint, arguments.public_key)
    dataset = open_dataset(run)
    files = signed_files(run, checkpoint, dataset)
    run.write_atomic(name, sign_files(files, f"{dataset.digest[:12]}-step-{checkpoint.step}", arguments.key))
    print(f"{run.uri}/{name}: signs {len(files):,} files of {checkpoint.name} and dataset {dataset.digest[:12]}")
    return 0


def _checkpoint(run: Store, step: int | None) -> CheckpointMetadata:
    checkpoints = list_checkpoints(run)
    chosen = next((own for own in reversed(checkpoints) if step in (None, own.step)), None)
    if chosen is None:
        steps = ", ".join(str(own.step) for own in checkpoints) or "none"
        raise ContractError(
            f"{run.uri}: expected a checkpoint{'' if step is None else f' of step {step}'}, got steps {steps}. Train "
            "the run, or correct --step."
        )
    return chosen


def _verify(run: Store, checkpoint: CheckpointMetadata, public_key: str) -> int:
    name = signature_name(checkpoint.step)
    if not run.exists(name):
        raise ContractError(f"{run.uri}: expected the signature {name}, got none. Sign it with `penstock sign --key`.")
    found = verify_checkpoint(run, checkpoint, public_key)
    print(f"{run.uri}/{name}: the signature is valid and names {len(found.files):,} files")
    for problem in found.problems:
        print(f"  {printable(problem)}")
    print("all files are as they were signed" if not found.problems else f"{len(found.problems):,} files differ")
    return DIFFERENT if found.problems else 0


COMMANDS = {
    "sign": Command((add_sign_arguments,), sign_command, "sign run --key key.pem"),
}
