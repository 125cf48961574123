"""The contract of a takedown: the certificate, the descent that a manifest records, and the effects on training.

A version that a takedown makes names its parent in its manifest, and the certificate names both. Only if the two agree
is the new version accepted as the old one without some documents. Tombstones keep the positions of all tokens;
compaction moves them.
"""

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ContractError
from schemas.ids import canonical_json, digest_of
from schemas.manifest import REPLACED_NAME, Manifest
from schemas.storage import Store


class _TakedownBlock(BaseModel):
    """A frozen part of a certificate or manifest; unknown keys are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TrainedCheckpoint(_TakedownBlock):
    """A checkpoint that existed when the documents were removed, including those that a replay has set aside."""

    checkpoint: str
    """Folder of the checkpoint, relative to the run."""
    step: int
    """Number of optimizer steps."""
    dataset: str
    """Digest of the dataset that it was trained on."""
    saw: bool
    """True if it was trained on a removed document, or if that is unknown because its dataset had other positions."""


class OtherRun(_TakedownBlock):
    """A run below the run's folder that uses its tables, such as a proxy run: its models keep what they learned."""

    run: str
    """Folder of that run, relative to the run."""
    tables: list[str]
    """The tables it uses that the takedown replaces."""
    steps: list[int] = []
    """Every optimizer step of its plan whose batch held tokens of a removed document, from 1."""
    models: list[TrainedCheckpoint] = []
    """All its checkpoints at the time of the takedown."""


class Effects(_TakedownBlock):
    """The effects of the removed documents on training: steps and checkpoints, of this run and of others."""

    steps: list[int] = []
    """Every optimizer step of the plan whose batch held tokens of a removed document, from 1."""
    models: list[TrainedCheckpoint] = []
    """All checkpoints at the time of the takedown."""
    last_clean: int | None = None
    """Step of the last existing checkpoint before the first such step; None = there is none."""
    others: list[OtherRun] = []
    """The effects on other runs that use the same tables."""


TAKEDOWNS = "takedowns"
PENDING_NAME = f"{TAKEDOWNS}/pending.json"
FIGURE = "takedown"
"""Key of a manifest's figures under which it records the takedown that made it."""
REMOVED_ID = bytes(16)
"""The doc_id that replaces a removed one in shards and their indexes; no document has it."""
STAGE, RULE = "takedown", "removed"
"""Stage and rule in the rows whose record was removed."""
CERTIFICATE_VERSION = 1

Mode = Literal["tombstones", "compact"]


class Descent(_TakedownBlock):
    """The origin of a version that a takedown made, as its manifest records it."""

    id: str
    """Id of the takedown."""
    parent: str
    """Digest of the version before it."""
    origin: str
    """Digest of the version that a run wrote, before any takedown."""
    positions: str
    """Digest of the oldest version with the same positions; empty = this version, whose positions were moved."""
    mode: Mode
    """`tombstones` if positions were kept, `compact` if they were moved."""
    read_before: dict[str, str] = {}
    """Digest, by table, of the version that was really read, where the inputs now name one without the documents."""


class FileChange(_TakedownBlock):
    """A file that was rewritten."""

    key: str
    """Key of the file in both manifests."""
    before: str
    """SHA-256 of the file before, with data of the documents."""
    after: str
    """SHA-256 of the file that replaces it."""
    spans: list[tuple[int, int]] = []
    """For a shard: first token and number of tokens of every removed document, in the file before."""


class TableChange(_TakedownBlock):
    """The versions of a table before and after a takedown."""

    before: str
    """Digest of the version before."""
    after: str
    """Digest of the version after."""
    version_before: str
    """Folder of the version before."""
    version_after: str
    """Folder of the version after."""
    rows: int
    """Number of rows that were removed or blanked."""
    rewritten: list[FileChange]
    """Files that were rewritten; all other files are unchanged."""
    shared: int
    """Number of files that both versions name."""


class Traces(_TakedownBlock):
    """Digests of some spans of one document, by which its absence can be verified without its text."""

    document: str
    """Salted SHA-256 of its doc_id."""
    num_tokens: int
    """Length of the document in the shards [tokens], separators included; 0 = it was in no shard."""
    tokens: list[tuple[int, str]] = []
    """(mark, salted digest) of spans of its tokens."""
    text: list[tuple[int, str]] = []
    """(mark, salted digest) of spans of its text [bytes of UTF-8]."""


class TrainedTokenizer(_TakedownBlock):
    """The tokenizer of the run, which was trained before the takedown."""

    sha256: str
    """SHA-256 of its model file."""
    read: str
    """Digest of the table `clean` that it was trained on; empty if its manifest names no such table."""


class Certificate(_TakedownBlock):
    """`takedowns/<id>.json`: the removed documents and the changed tables, for third parties that check the removal."""

    version: int = CERTIFICATE_VERSION
    """Version of this layout."""
    id: str
    """Id of the takedown: a digest of the versions before, the mode and the removed documents."""
    made: str
    """Time of the takedown, ISO 8601, UTC."""
    mode: Mode
    """tombstones: all positions were kept; compact: the positions of the documents were removed too."""
    salt: str
    """Salt of every digest of an id, a request or a span."""
    requests: list[str]
    """Salted SHA-256 of every request, such as a domain."""
    documents: list[Traces]
    """Every removed document."""
    copies_left: int
    """Number of near copies that were not part of the request and were kept."""
    standing: dict[str, str]
    """Digest of the current version of every table when the takedown started."""
    tables: dict[str, TableChange]
    """Every table that has a new version."""
    windows: dict[str, int]
    """Length of a span of `tokens` [tokens] and of `text` [bytes]."""
    effects: Effects
    """Optimizer steps that used the documents, and the checkpoints that existed."""
    tokenizer: TrainedTokenizer | None
    """The tokenizer, which is not trained again."""
    code_version: str
    """Version of this package."""
    pyarrow_version: str
    """Version of pyarrow, whose files are checked byte by byte."""
    seal: str = ""
    """Digest of all other fields. It is not a signature: a forged certificate has a valid seal too, but a different one
    than the takedown printed."""

    @property
    def content_digest(self) -> str:
        """The digest of all fields but the seal."""
        return digest_of(self.model_dump(mode="json", exclude={"seal"}))

    def sealed(self) -> "Certificate":
        """Return the certificate with its seal."""
        return self.model_copy(update={"seal": self.content_digest})

    def to_bytes(self) -> bytes:
        """Return the content of the certificate's file."""
        return canonical_json(self.model_dump(mode="json"))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the removed documents."""
        return sum(document.num_tokens for document in self.documents)


def salted_digest(salt: str, kind: str, value: bytes) -> str:
    """Return the digest (hex) by which a certificate names an id (`document`) or a request (`url`, `domain`, …)."""
    return hashlib.sha256(f"{salt} {kind} ".encode() + value).hexdigest()


def identify_takedown(versions: dict[str, str], mode: Mode, documents: list[str]) -> str:
    """Return the id of a takedown, from digests of versions by table, the mode, and salted digests of documents."""
    return digest_of([CERTIFICATE_VERSION, versions, mode, sorted(documents)])[:12]


def certificate_name(identifier: str) -> str:
    """Return the path of a takedown's certificate, relative to the run."""
    return f"{TAKEDOWNS}/{identifier}.json"


def parent_name(identifier: str, table: str) -> str:
    """Return the path of the manifest that a takedown replaced, relative to the run."""
    return f"{TAKEDOWNS}/{identifier}/{table}.json"


def parse_certificate(value: Any, where: str) -> Certificate:
    """Return the certificate in a JSON value. Raises ContractError if the value is not a certificate."""
    try:
        certificate = Certificate.model_validate(value)
    except ValidationError as error:
        raise ContractError(f"{where}: expected the certificate of a takedown, got {error}. Restore it.") from error
    if certificate.version != CERTIFICATE_VERSION:
        raise ContractError(
            f"{where}: expected version {CERTIFICATE_VERSION} of certificates, got {certificate.version}. Use the "
            "version of penstock that wrote it."
        )
    return certificate


def read_certificate(run: Store, identifier: str) -> Certificate:
    """Return the certificate of a takedown of this run. Raises ContractError if it is missing or invalid."""
    name = certificate_name(identifier)
    if not run.exists(name):
        raise ContractError(f"{run.uri}: expected the certificate of takedown {identifier}, got no {name}. Restore it.")
    return parse_certificate(run.read_json(name), f"{run.uri}/{name}")


def read_parent(run: Store, identifier: str, table: str) -> Manifest:
    """Return the manifest that a takedown replaced. Raises ContractError if its certificate names another manifest."""
    name, change = parent_name(identifier, table), read_certificate(run, identifier).tables[table]
    parent = Manifest.model_validate(run.read_json(name))
    if parent.digest != change.before:
        raise ContractError(
            f"{run.uri}/{name}: expected the manifest with digest {change.before}, got {parent.digest}. Restore it."
        )
    return parent


def descent_of(manifest: Manifest) -> Descent | None:
    """Return the descent of a version; None = no takedown made it. Raises ContractError if its record is invalid."""
    record = manifest.content.figures.get(FIGURE)
    try:
        return None if record is None else Descent.model_validate(record)
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
        raise ContractError(
            f"{manifest.content.table}: expected the descent from a takedown, got wrong values of {fields}. Restore "
            "the manifest."
        ) from error


def origin_digest(manifest: Manifest) -> str:
    """Return the digest of the version that a run wrote, before any takedown."""
    descent = descent_of(manifest)
    return descent.origin if descent else manifest.digest


def takedown_ancestry(run: Store, manifest: Manifest) -> list[Certificate]:
    """Return the certificates of the takedowns that led to a version of a table, newest first.

    Raises ContractError, naming both values, if a manifest and its certificate disagree.
    """
    certificates: list[Certificate] = []
    while (descent := descent_of(manifest)) is not None:
        certificate = read_certificate(run, descent.id)
        change = certificate.tables.get(manifest.content.table)
        expected = (descent.parent, manifest.digest, descent.mode)
        certified = (change.before, change.after, certificate.mode) if change else None
        if certified != expected:
            raise ContractError(
                f"{run.uri}/{certificate_name(descent.id)}: expected before, after and mode {expected} from the "
                f"manifest of {manifest.content.table}, got {certified}. Restore the certificate."
            )
        certificates.append(certificate)
        manifest = read_parent(run, descent.id, manifest.content.table)
    return certificates


def positions_digest(manifest: Manifest) -> str:
    """Return the digest of the oldest version whose tokens have the same positions; tombstones move none."""
    descent = descent_of(manifest)
    return (descent.positions if descent else "") or manifest.digest


def resolve_version(run: Store, table: str, version: str) -> str:
    """Return the version that replaces `version` after all takedowns; `version` itself if it was not replaced.

    Raises ContractError if a takedown is unfinished.
    """
    check_no_pending_takedown(run)
    while run.exists(moved := f"{table}/{version}/{REPLACED_NAME}"):
        version = run.read_json(moved)["to"]
    return version


def check_no_pending_takedown(run: Store) -> None:
    """Raise ContractError if a takedown of the run was interrupted."""
    if run.exists(PENDING_NAME):
        raise ContractError(
            f"{run.uri}/{PENDING_NAME}: expected no takedown under way, got one that was interrupted. Finish it "
            "with `penstock takedown` on this run."
        )


def check_no_takedowns(run: Store, table: str) -> None:
    """Raise ContractError if documents were taken down from the run, since a rebuild would read them again."""
    if run.exists(TAKEDOWNS):
        raise ContractError(
            f"{table}: expected a run without the documents that were taken down ({run.uri}/{TAKEDOWNS}), got changed "
            "settings that would read them from the inputs again. Restore the settings of the recipe."
        )
