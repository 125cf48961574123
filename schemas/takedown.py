"""The records of a takedown: its certificate, the descent in the manifests of new versions, and effects on training.

The manifest of a version that a takedown made names its parent, the version before it. The certificate names both. Only
if the two records agree is the new version accepted as the old one without some documents. Tombstones keep the
positions of all tokens; compaction moves them.
"""

import hashlib
from shlex import quote
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from schemas.errors import ContractError, reading
from schemas.ids import canonical_json, digest_of
from schemas.manifest import REPLACED_NAME, Manifest, check_paths
from schemas.paths import is_below, is_version
from schemas.storage import Store
from schemas.tables import TABLES


class _TakedownBlock(BaseModel):
    """The base class of a takedown's records, which are immutable and reject unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TrainedCheckpoint(_TakedownBlock):
    """A checkpoint that existed when the documents were removed, possibly in a folder that a replay moved it to."""

    checkpoint: str
    """Folder of the checkpoint, relative to the run."""
    step: int
    """Number of optimizer steps."""
    dataset: str
    """Digest of the dataset that it was trained on."""
    saw: bool
    """True if it was trained on a removed document, or if that is unknown because its dataset had other positions."""
    saw_earlier: bool = False
    """True if it was trained on a document of an earlier takedown, because the user chose to resume from such a
    checkpoint. Always False for a checkpoint that a replay has moved."""
    saw_before: bool | None = False
    """True if the weights that its training began from had read a removed document; None = not known."""

    @property
    def may_have_seen(self) -> bool:
        """False if neither its training nor the weights that this began from have read a removed document."""
        return self.saw or self.saw_before is not False


class OtherRun(_TakedownBlock):
    """A run that uses this run's tables, such as a proxy run: one in a subfolder, or one that has left a receipt.

    The takedown does not change the checkpoints of that run.
    """

    run: str
    """Its folder, relative to the folder of this run."""
    tables: list[str]
    """Names of this run's tables that it uses."""
    steps: list[int] = []
    """Every optimizer step (the first is 1) of its plan whose batch held tokens of a removed document."""
    models: list[TrainedCheckpoint] = []
    """All its checkpoints at the time of the takedown."""


class Effects(_TakedownBlock):
    """The optimizer steps that used the removed documents, and the checkpoints, of this run and of other runs."""

    steps: list[int] = []
    """Every optimizer step (the first is 1) of the plan whose batch held tokens of a removed document."""
    models: list[TrainedCheckpoint] = []
    """All checkpoints at the time of the takedown."""
    last_clean: int | None = None
    """Step of the last checkpoint that was trained on no document of this takedown or an earlier one; None = there is
    none."""
    origins: list[str] = []
    """The weights that the run's model began from, then those that they began from, and so on."""
    origins_saw: list[bool | None] = []
    """For each of `origins`: True if it had read a removed document; None = not known, because its run cannot be read
    or has changed. Documents are looked up there by id, and by the URLs and domains of the request."""
    began_from: str = ""
    """Digest of the weights that the run's model began from; empty = random weights."""
    others: list[OtherRun] = []
    """The effects on other runs that use tables of this run."""

    @property
    def saw_before(self) -> bool | None:
        """True if weights that the run's model began from had read a removed document; None = not known."""
        if True in self.origins_saw:
            return True
        return None if None in self.origins_saw or len(self.origins_saw) < len(self.origins) else False


TAKEDOWNS = "takedowns"
TAKEDOWN_ID = r"^[0-9a-f]{12}$"
"""Pattern of the id of a takedown, which is in the names of its files."""
PENDING_NAME = f"{TAKEDOWNS}/pending.json"
CROISSANT = "croissant.json"
"""File of a run that `penstock summary --croissant` writes. It names files of tables, so a takedown deletes it."""
SUMMARIES = "summaries"
"""Folder of a run with papers about its data, by version. They name domains, so a takedown deletes them."""
FIGURE = "takedown"
"""The key in a manifest's `figures` under which the version's `Descent` is stored."""
ROOT = r"^[0-9a-f]{64}$"
"""Pattern of a Merkle root."""
REMOVED_ID = bytes(16)
"""The doc_id that replaces that of a removed document in shards and their indexes; no document has it."""
STAGE, RULE = "takedown", "removed"
"""Values of `drop_stage` and `drop_rule` in the blanked row of a removed document."""
CERTIFICATE_VERSION = 1

Mode = Literal["tombstones", "compact"]


class Descent(_TakedownBlock):
    """A manifest's record of the takedown that made this version of a table, and of the version that it replaced."""

    id: str
    """Id of the takedown."""
    parent: str
    """Digest of the version before it."""
    origin: str
    """Digest of the version that a run wrote, before any takedown."""
    positions: str
    """Digest of the oldest version with the same token positions; empty = this version, since compaction moved them."""
    mode: Mode
    """`tombstones` if positions were kept, `compact` if they were moved."""
    read_before: dict[str, str] = {}
    """Digest, by table, of each input version that was originally read. The manifest's `inputs` now name its
    replacement, which is without the documents."""


class FileChange(_TakedownBlock):
    """A file that was rewritten."""

    key: str
    """Key of the file in both manifests."""
    before: str
    """SHA-256 of the old file, which holds data of removed documents."""
    after: str
    """SHA-256 of the file that replaces it."""
    spans: list[tuple[int, int]] = []
    """For a shard: (first token, number of tokens) of every removed document in the old file."""


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
    """Number of unchanged files, which both versions name."""


class Traces(_TakedownBlock):
    """Digests of some spans of one document, by which its absence can be verified without its text."""

    document: str
    """Salted SHA-256 of its doc_id."""
    num_tokens: int
    """Length of the document in the shards [tokens], separators included; 0 = it was in no shard."""
    tokens: list[tuple[int, str]] = []
    """(mark, salted digest) of spans of its tokens. A mark is a 32-bit hash by which candidates are found quickly."""
    text: list[tuple[int, str]] = []
    """(mark, salted digest) of spans of its text [bytes of UTF-8]."""


class TrainedTokenizer(_TakedownBlock):
    """The tokenizer of the run, which was trained before the takedown."""

    sha256: str
    """SHA-256 of its model file."""
    read: str
    """Digest of the table `clean` that it was trained on; empty if the manifest of `tokenizer` names no such table."""


class MembershipRoots(_TakedownBlock):
    """The Merkle roots of the dataset, against which proofs show that a document was in it and no longer is."""

    before: str = Field(pattern=ROOT)
    """Root of the version before [64 hex digits]."""
    after: str = Field(pattern=ROOT)
    """Root of the version after [64 hex digits]."""


class Certificate(_TakedownBlock):
    """`takedowns/<id>.json`: the removed documents and the changed tables, for third parties that check the removal."""

    version: int = CERTIFICATE_VERSION
    """Version of the file format."""
    id: str = Field(pattern=TAKEDOWN_ID)
    """Id of the takedown: a digest of the versions before, the mode and the removed documents."""
    made: str
    """Time of the takedown, ISO 8601, UTC."""
    mode: Mode
    """tombstones: all positions were kept; compact: the positions of the documents were removed too."""
    salt: str
    """Salt of every digest of an id, a request or a span."""
    requests: list[str]
    """Salted SHA-256 of every request, such as a domain."""
    forms: list[str] | None = None
    """Salted SHA-256 of the host of every requested domain, of the canonical form of every requested URL, and of every
    requested id; None = an earlier version began the takedown."""
    near: bool = False
    """True if near-duplicates of the requested documents were requested too."""
    documents: list[Traces]
    """Every removed document."""
    copies_left: int
    """Number of near-duplicates of the removed documents that were not requested and were kept."""
    versions: dict[str, str]
    """Digest of the current version of every table when the takedown started."""
    tables: dict[str, TableChange]
    """The change of every table that has a new version, by name."""
    windows: dict[str, int]
    """Length of a span of `tokens` [tokens] and of `text` [bytes]."""
    effects: Effects
    """Optimizer steps that used the documents, and the checkpoints that existed."""
    tokenizer: TrainedTokenizer | None
    """The tokenizer, which is not trained again."""
    derived: int = 0
    """Number of removed documents that were not requested, but made from a removed or requested one."""
    derived_left: int = 0
    """Number of documents that were made from a removed or requested one and were kept."""
    keeps_derived: bool = False
    """True if the takedown was asked to keep documents that were made from removed ones."""
    exports: list[str] = []
    """Ids of the exports of the run that hold removed documents, or a model that was trained on them, by their
    receipts."""
    membership: MembershipRoots | None = None
    """Roots of the dataset versions before and after; None = the takedown was not asked for proofs."""
    code_version: str
    """Version of this package."""
    pyarrow_version: str
    """Version of pyarrow, whose files are checked byte by byte."""
    seal: str = ""
    """Digest of all other fields. It is not a signature: a forged certificate can have a valid seal too, but it differs
    from the seal that the takedown printed."""

    @property
    def content_digest(self) -> str:
        """The digest of all fields except the seal.

        Fields that a file does not have are left out, so that a certificate stays valid when later versions add fields.
        """
        return digest_of(self.model_dump(mode="json", exclude={"seal"}, exclude_unset=True))

    def sealed(self) -> "Certificate":
        """Return a copy of the certificate with `seal` set to the digest of all other fields."""
        full = Certificate.model_validate(self.model_dump(mode="json"))
        return full.model_copy(update={"seal": full.content_digest})

    def to_bytes(self) -> bytes:
        """Return the content of the certificate's file."""
        return canonical_json(self.model_dump(mode="json", exclude_unset=True))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the removed documents."""
        return sum(document.num_tokens for document in self.documents)


def salted_digest(salt: str, kind: str, value: bytes) -> str:
    """Return the salted digest (hex) of a doc_id or of a request, for a certificate.

    `kind` is `document` for a doc_id, or the kind of the request, such as `url` or `domain`.
    """
    return hashlib.sha256(f"{salt} {kind} ".encode() + value).hexdigest()


def identify_takedown(versions: dict[str, str], mode: Mode, documents: list[str]) -> str:
    """Return the id of a takedown, computed from the tables' digests, the mode and the documents' salted digests."""
    return digest_of([CERTIFICATE_VERSION, versions, mode, sorted(documents)])[:12]


def certificate_name(identifier: str) -> str:
    """Return the path of a takedown's certificate, relative to the run."""
    return f"{TAKEDOWNS}/{identifier}.json"


def parent_name(identifier: str, table: str) -> str:
    """Return the path, relative to the run, of the manifest that a table had before a takedown."""
    return f"{TAKEDOWNS}/{identifier}/{table}.json"


def proofs_name(identifier: str, when: str) -> str:
    """Return the path, relative to the run, of a takedown's proofs against a root; `when`: `before` or `after`."""
    return f"{TAKEDOWNS}/{identifier}/proofs-{when}.jsonl"


def planted_name(identifier: str, step: int) -> str:
    """Return the path, relative to the run, of the test of a checkpoint for identifiers of a takedown's documents."""
    return f"{TAKEDOWNS}/{identifier}/planted-{step:08d}.json"


def parse_certificate(value: Any, where: str) -> Certificate:
    """Return the certificate in a JSON value. Raises ContractError if the value is not a certificate."""
    try:
        certificate = Certificate.model_validate(value)
    except ValidationError as error:
        fields = dict.fromkeys(str(problem["loc"][0]) for problem in error.errors() if problem["loc"])
        what = f"missing or wrong fields ({', '.join(fields)})" if fields else "another JSON value"
        raise ContractError(
            f"{where}: expected the certificate of a takedown, got {what}. Name a file such as "
            f"{TAKEDOWNS}/<id>.json of the run, or restore it from a backup."
        ) from error
    if certificate.version != CERTIFICATE_VERSION:
        raise ContractError(
            f"{where}: expected format version {CERTIFICATE_VERSION} of a certificate, got {certificate.version}. Use "
            "the version of penstock that wrote it."
        )
    for table, change in certificate.tables.items():
        for path in (change.version_before, change.version_after):
            if table not in TABLES or not is_below(path) or "/" in path:
                raise ContractError(
                    f"{where}: expected version folders of tables, got {path!r:.200} for {table!r:.80}. Restore it "
                    "from a backup."
                )
    return certificate


def read_certificate(run: Store, identifier: str) -> Certificate:
    """Return the certificate of a takedown of this run. Raises ContractError if it is missing or invalid."""
    name = certificate_name(identifier)
    if not run.exists(name):
        raise ContractError(
            f"{run.uri}: expected the certificate of takedown {identifier}, got no file {name}. Copy it from the run "
            "or a backup."
        )
    return parse_certificate(run.read_json(name), f"{run.uri}/{name}")


def read_parent(run: Store, identifier: str, table: str) -> Manifest:
    """Return the manifest of a version that a takedown replaced.

    Raises ContractError if the manifest's digest is not the one in the takedown's certificate.
    """
    name, change = parent_name(identifier, table), read_certificate(run, identifier).tables[table]
    raw = run.read_json(name)
    with reading(f"{run.uri}/{name}", "a manifest"):
        parent = Manifest.model_validate(raw)
    check_paths(parent, f"{run.uri}/{name}")
    if parent.digest != change.before:
        raise ContractError(
            f"{run.uri}/{name}: expected the manifest with digest {change.before}, got {parent.digest}. Restore the "
            "file from a backup."
        )
    return parent


def descent_of(manifest: Manifest) -> Descent | None:
    """Return the record of the takedown that made a version of a table; None if no takedown made it.

    Raises ContractError if the record is invalid.
    """
    record = manifest.content.figures.get(FIGURE)
    try:
        return None if record is None else Descent.model_validate(record)
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
        raise ContractError(
            f"{manifest.content.table}: expected a valid record of a takedown in its manifest, got wrong values of "
            f"{fields}. Restore the manifest from a backup."
        ) from error


def origin_digest(manifest: Manifest) -> str:
    """Return the digest of the version that the run wrote, before any takedown replaced it."""
    descent = descent_of(manifest)
    return descent.origin if descent else manifest.digest


def takedown_ancestry(run: Store, manifest: Manifest) -> list[Certificate]:
    """Return the certificates of the takedowns that led to a version of a table, newest first.

    Raises ContractError if a manifest and its certificate disagree.
    """
    certificates: list[Certificate] = []
    while (descent := descent_of(manifest)) is not None:
        certificate = read_certificate(run, descent.id)
        change = certificate.tables.get(manifest.content.table)
        expected = (descent.parent, manifest.digest, descent.mode)
        certified = (change.before, change.after, certificate.mode) if change else None
        if certified != expected:
            raise ContractError(
                f"{run.uri}/{certificate_name(descent.id)}: expected (before, after, mode) = {expected}, as in the "
                f"manifest of {manifest.content.table}, got {certified}. Restore the certificate from a backup."
            )
        certificates.append(certificate)
        manifest = read_parent(run, descent.id, manifest.content.table)
    return certificates


def removed_spans(run: Store, dataset: Manifest) -> dict[str, list[tuple[int, int]]]:
    """Return (first token, number of tokens) of each removed document whose place in a shard has tombstones, by shard.

    Raises ContractError if a manifest and its certificate disagree.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    for certificate in takedown_ancestry(run, dataset):
        # Shards that were compacted are already counted without them.
        for change in certificate.tables[dataset.content.table].rewritten if certificate.mode == "tombstones" else ():
            spans.setdefault(change.key, []).extend(change.spans)
    return spans


def replaced_digests(run: Store, manifest: Manifest) -> set[str]:
    """Return the digests of the versions of a table that takedowns have replaced by this version."""
    return {certificate.tables[manifest.content.table].before for certificate in takedown_ancestry(run, manifest)}


def positions_digest(manifest: Manifest) -> str:
    """Return the digest of the oldest version of a dataset that has the same token positions as this version."""
    descent = descent_of(manifest)
    return (descent.positions if descent else "") or manifest.digest


def resolve_version(run: Store, table: str, version: str) -> str:
    """Return the version of a table that replaces `version` after all takedowns, or `version` if there is none.

    Raises ContractError if a takedown is unfinished, or if a record of a replaced version does not name another
    version of the table in this run.
    """
    check_no_pending_takedown(run)
    seen = [version]
    while run.exists(moved := f"{table}/{seen[-1]}/{REPLACED_NAME}"):
        replaced = run.read_json(moved)
        with reading(f"{run.uri}/{moved}", "the version that replaces this one"):
            version = str(replaced["to"])
        if "/" in version or not is_version(version, table) or version in seen:
            raise ContractError(
                f"{run.uri}/{moved}: expected the name of another version of {table}, got {version!r}. Restore the "
                "file from a backup."
            )
        seen.append(version)
    return seen[-1]


def check_no_pending_takedown(run: Store) -> None:
    """Raise ContractError if a takedown of the run was interrupted."""
    if run.exists(PENDING_NAME):
        raise ContractError(
            f"{run.uri}/{PENDING_NAME}: expected no unfinished takedown, got one that was interrupted. Finish it "
            f"with `penstock takedown {quote(run.uri)}`."
        )


def has_takedowns(run: Store) -> bool:
    """Return True if documents were taken down from the run."""
    return run.exists(TAKEDOWNS)


def check_no_takedowns(run: Store, table: str) -> None:
    """Raise ContractError if documents were taken down from the run."""
    if has_takedowns(run):
        raise ContractError(
            f"{table}: expected unchanged settings after the takedowns in {run.uri}/{TAKEDOWNS}, got changed settings. "
            "Restore the settings of the recipe, because a rebuild would read the removed documents again."
        )
