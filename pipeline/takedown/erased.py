"""The check of the records of erasures beside a certificate: the weights that they name are not in the run."""

from collections.abc import Iterator

from pipeline.takedown.check_result import CheckResult
from schemas.erasure import Erasure, erasures_of
from schemas.errors import ContractError
from schemas.storage import Store
from schemas.takedown import Certificate

TRAIN = "train"


def check_erased(run: Store, certificate: Certificate, checked: CheckResult) -> None:
    """Add a note or a problem to `checked` for each record of an erasure. Files of training are found by digest."""
    try:
        records = [*erasures_of(run, certificate.id)]
    except ContractError as error:
        checked.problems.append(str(error))
        return
    left = dict(_digests(run, records)) if records else {}
    for name, erasure in records:
        if erasure.seal != erasure.content_digest or erasure.certificate != certificate.seal:
            checked.problems.append(
                f"{name}: expected the record of an erasure with its seal, for certificate {certificate.seal[:12]}, "
                "got another one. Restore it from a backup, or remove it."
            )
            continue
        erased = {file.sha256: file.path for own in erasure.checkpoints for file in own.files}
        if found := [path for path, sha256 in left.items() if sha256 in erased]:
            checked.problems.append(
                f"{name}: expected no weights that were erased, got {len(found)} file(s) of them, such as {found[0]}. "
                "Run `penstock takedown --erase-replaced` again."
            )
        size = sum(file.size for own in erasure.checkpoints for file in own.files)
        checked.notes.append(
            f"{name}: {len(erasure.checkpoints):,} checkpoint(s) of {size:,} bytes that had read, or may have read, "
            f"the documents were erased at {erasure.at}: {', '.join(own.checkpoint for own in erasure.checkpoints)}"
        )


def _digests(run: Store, records: list[tuple[str, Erasure]]) -> Iterator[tuple[str, str]]:
    """Yield path and SHA-256 of the files of training that have the size of an erased one."""
    sizes = {file.size for _, erasure in records for own in erasure.checkpoints for file in own.files}
    for name in sorted(run.child(TRAIN).walk()):
        if run.size(f"{TRAIN}/{name}") in sizes:
            yield f"{TRAIN}/{name}", run.sha256(f"{TRAIN}/{name}")
