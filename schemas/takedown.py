"""A takedown as both halves see it: what a dataset says of the one it came from, and the certificate of the removal.

A version made by a takedown names its parent in its manifest; the certificate names both. Only where the two agree is
the new version taken for the old one less some documents. Tombstones keep every position; compaction moves them.
"""

import hashlib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ContractError
from schemas.ids import canonical_json, digest_of
from schemas.manifest import REPLACED_NAME, Manifest
from schemas.storage import Store

# What training had seen of documents that are taken down: steps, checkpoints, and other runs on the same tables.


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TrainedCheckpoint(_Block):
    """A checkpoint that was there when the documents were removed, those that a replay has set aside included."""

    checkpoint: str
    """Its folder, relative to the run."""
    step: int
    """Number of updates."""
    dataset: str
    """Digest of the dataset it was trained on."""
    saw: bool
    """Whether one of its steps held a removed document, or nobody can tell: its dataset had other positions."""


class OtherRun(_Block):
    """A run below the run's folder that stands on tables of it, such as a proxy: it keeps what was removed."""

    run: str
    """Its folder, relative to the run."""
    tables: list[str]
    """The tables it stands on that a takedown replaces."""
    steps: list[int] = []
    """Every step of its plan whose batch held a part of a removed document, from 1."""
    models: list[TrainedCheckpoint] = []
    """Every checkpoint of it that stood."""


class Effects(_Block):
    """What training had seen of the documents."""

    steps: list[int] = []
    """Every step of the plan whose batch held a part of one, from 1."""
    models: list[TrainedCheckpoint] = []
    """Every checkpoint that was there."""
    last_clean: int | None = None
    """Step of the last standing checkpoint before the first such step; None = none stands."""
    others: list[OtherRun] = []
    """What runs on the same tables had seen of them."""


TAKEDOWNS = "takedowns"
PENDING_NAME = f"{TAKEDOWNS}/pending.json"
FIGURE = "takedown"
"""Where a manifest says which takedown made its table."""
REMOVED_ID = bytes(16)
"""The doc_id that shards and their index hold in place of a removed one; no document has it."""
STAGE, RULE = "takedown", "removed"
"""Stage and rule of the rows that stand where a record was removed."""
CERTIFICATE_VERSION = 1

Mode = Literal["tombstones", "compact"]


class Descent(_Block):
    """What the manifest of a version that a takedown has made says of it."""

    id: str
    """The takedown."""
    parent: str
    """Digest of the version before it."""
    origin: str
    """Digest of the version that a run wrote, before any takedown."""
    positions: str
    """Digest of the oldest version with the same positions; empty = this one, for its own were moved."""
    mode: Mode
    """Whether positions were kept."""
    read_before: dict[str, str] = {}
    """What its maker has really read, by table, where the inputs now name versions without the documents."""


class FileChange(_Block):
    """A file that was rewritten."""

    key: str
    """Its key in both manifests."""
    before: str
    """SHA-256 of the file that held something of the documents."""
    after: str
    """SHA-256 of the file in its place."""
    spans: list[tuple[int, int]] = []
    """Of a shard: first token and number of tokens of every removed document, as they stood before."""


class TableChange(_Block):
    """A table before and after."""

    before: str
    """Digest before."""
    after: str
    """Digest after."""
    version_before: str
    """Folder of the version before."""
    version_after: str
    """Folder of the version after."""
    rows: int
    """Rows that were removed or blanked."""
    rewritten: list[FileChange]
    """Files that were rewritten; all others are the same files as before."""
    shared: int
    """Number of files that both versions name."""


class Traces(_Block):
    """How the absence of one document can be verified without its text: digests of some of its spans."""

    document: str
    """Salted SHA-256 of its doc_id."""
    num_tokens: int
    """Its length in the shards [tokens], separators included; 0 = it was in none."""
    tokens: list[tuple[int, str]] = []
    """(mark, salted digest) of spans of its tokens."""
    text: list[tuple[int, str]] = []
    """(mark, salted digest) of spans of its text [bytes of UTF-8]."""


class TrainedTokenizer(_Block):
    """The tokenizer of the run, which was trained before."""

    sha256: str
    """SHA-256 of its model file."""
    read: str
    """Digest of the table `clean` that it was trained on; empty if its manifest names none."""


class Certificate(_Block):
    """`takedowns/<id>.json`: what was removed from where, so that a third party can check it."""

    version: int = CERTIFICATE_VERSION
    """Version of this layout."""
    id: str
    """The takedown: a digest of what was removed from which version, and how."""
    made: str
    """When, ISO 8601, UTC."""
    mode: Mode
    """tombstones: every position was kept; compact: the documents' positions are gone too."""
    salt: str
    """Goes into every digest of an id, a request or a span."""
    requests: list[str]
    """Salted SHA-256 of what was asked for, such as one domain."""
    documents: list[Traces]
    """Every removed document."""
    copies_left: int
    """Near copies of them that were not asked for and still stand."""
    standing: dict[str, str]
    """Digest of every table that stood when it began."""
    tables: dict[str, TableChange]
    """Every table that has a new version."""
    windows: dict[str, int]
    """Length of a span of `tokens` [tokens] and of `text` [bytes]."""
    effects: Effects
    """Steps that saw the documents, and models trained before."""
    tokenizer: TrainedTokenizer | None
    """The tokenizer that was trained before; it is not trained again."""
    code_version: str
    """Version of this package."""
    pyarrow_version: str
    """Version of pyarrow, whose files are checked byte by byte."""
    seal: str = ""
    """Digest of all the rest. It is no signature: who forges a certificate makes another one, which is not the one that
    the takedown has told."""

    @property
    def content_digest(self) -> str:
        """The digest of everything but the seal."""
        return digest_of(self.model_dump(mode="json", exclude={"seal"}))

    def sealed(self) -> "Certificate":
        """The certificate with its seal."""
        return self.model_copy(update={"seal": self.content_digest})

    def to_bytes(self) -> bytes:
        """The file's content."""
        return canonical_json(self.model_dump(mode="json"))

    @property
    def num_tokens(self) -> int:
        """Tokens of the removed documents."""
        return sum(document.num_tokens for document in self.documents)


def salted_digest(salt: str, kind: str, value: bytes) -> str:
    """The digest (hex) under which a certificate names an id (`document`) or a request (`url`, `domain`, …)."""
    return hashlib.sha256(f"{salt} {kind} ".encode() + value).hexdigest()


def identify_takedown(versions: dict[str, str], mode: Mode, documents: list[str]) -> str:
    """The id of a takedown: of which versions (digest by table), how, and which documents, by their salted digests."""
    return digest_of([CERTIFICATE_VERSION, versions, mode, sorted(documents)])[:12]


def certificate_name(identifier: str) -> str:
    """Where the certificate of a takedown lies, relative to the run."""
    return f"{TAKEDOWNS}/{identifier}.json"


def parent_name(identifier: str, table: str) -> str:
    """Where the manifest that a takedown replaced is kept, relative to the run."""
    return f"{TAKEDOWNS}/{identifier}/{table}.json"


def parse_certificate(value: Any, where: str) -> Certificate:
    """The certificate in a JSON value. Raises ContractError if it is none."""
    try:
        found = Certificate.model_validate(value)
    except ValidationError as error:
        raise ContractError(f"{where}: expected the certificate of a takedown, got {error}. Restore it.") from error
    if found.version != CERTIFICATE_VERSION:
        raise ContractError(
            f"{where}: expected version {CERTIFICATE_VERSION} of certificates, got {found.version}. Read it with the "
            "version of this package that wrote it."
        )
    return found


def read_certificate(run: Store, identifier: str) -> Certificate:
    """The certificate of a takedown of this run. Raises ContractError if there is none or it does not hold together."""
    name = certificate_name(identifier)
    if not run.exists(name):
        raise ContractError(f"{run.uri}: expected the certificate of takedown {identifier}, got no {name}. Restore it.")
    return parse_certificate(run.read_json(name), f"{run.uri}/{name}")


def read_parent(run: Store, identifier: str, table: str) -> Manifest:
    """The manifest that a takedown replaced. Raises ContractError if it is not the one its certificate names."""
    name, change = parent_name(identifier, table), read_certificate(run, identifier).tables[table]
    found = Manifest.model_validate(run.read_json(name))
    if found.digest != change.before:
        raise ContractError(
            f"{run.uri}/{name}: expected the manifest with digest {change.before}, got {found.digest}. Restore it."
        )
    return found


def descent_of(manifest: Manifest) -> Descent | None:
    """Which takedown made a version; None = none did. Raises ContractError if its manifest says it wrongly."""
    found = manifest.content.figures.get(FIGURE)
    try:
        return None if found is None else Descent.model_validate(found)
    except ValidationError as error:
        where = ", ".join(".".join(map(str, one["loc"])) for one in error.errors())
        raise ContractError(
            f"{manifest.content.table}: expected what a takedown says of itself, got it wrong in {where}. Restore "
            "the manifest."
        ) from error


def origin_digest(manifest: Manifest) -> str:
    """The digest of the version that a run wrote, whatever was taken down since."""
    descent = descent_of(manifest)
    return descent.origin if descent else manifest.digest


def takedown_ancestry(run: Store, manifest: Manifest) -> list[Certificate]:
    """The takedowns that lead to a version of a table, newest first.

    Raises ContractError, naming both sides, where a manifest and the certificate it names do not agree.
    """
    found: list[Certificate] = []
    while (descent := descent_of(manifest)) is not None:
        certificate = read_certificate(run, descent.id)
        change = certificate.tables.get(manifest.content.table)
        said = (change.before, change.after, certificate.mode) if change else None
        if said != (descent.parent, manifest.digest, descent.mode):
            raise ContractError(
                f"{run.uri}/{certificate_name(descent.id)}: expected by the manifest of {manifest.content.table}: "
                f"{(descent.parent, manifest.digest, descent.mode)} (before, after, mode), got {said}. "
                "Restore the certificate."
            )
        found.append(certificate)
        manifest = read_parent(run, descent.id, manifest.content.table)
    return found


def positions_digest(manifest: Manifest) -> str:
    """The digest of the oldest version whose tokens lie at the same positions: tombstones move none."""
    descent = descent_of(manifest)
    return (descent.positions if descent else "") or manifest.digest


def resolve_version(run: Store, table: str, version: str) -> str:
    """The version that stands in place of one that takedowns have replaced; itself if none has.

    Raises ContractError while a takedown is half done.
    """
    check_no_pending_takedown(run)
    while run.exists(moved := f"{table}/{version}/{REPLACED_NAME}"):
        version = run.read_json(moved)["to"]
    return version


def check_no_pending_takedown(run: Store) -> None:
    """Raises ContractError if a takedown of a run was broken off."""
    if run.exists(PENDING_NAME):
        raise ContractError(
            f"{run.uri}/{PENDING_NAME}: expected no takedown under way, got one that was broken off. Finish it with "
            "`penstock takedown` on this run."
        )


def check_no_takedowns(run: Store, table: str) -> None:
    """Raises ContractError if documents were taken down from a run that is about to read its inputs again."""
    if run.exists(TAKEDOWNS):
        raise ContractError(
            f"{table}: expected a run without the documents that were taken down ({run.uri}/{TAKEDOWNS}), got other "
            "settings that would read them from the inputs again. Restore the settings, or take the documents out of "
            "the inputs and use a new run folder."
        )
