"""The token dataset: the schemas of shards and indexes, the tokenizer contract, and the function that opens it.

A shard is an uncompressed Arrow IPC file (memory-mapped by readers) of record batches of documents. Its column `tokens`
is a list<uint16|uint32> whose flat buffers, batch after batch, are the token stream. Each shard has a document index in
a second file.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from schemas.errors import ContractError
from schemas.manifest import Manifest, check_not_replaced, member_input, open_table, read_manifest
from schemas.storage import CheckedPath, Store
from schemas.tables import PROVENANCE, field

RESERVED = ("pad", "bos", "eos", "mask", "tombstone", *(f"sentinel_{i}" for i in range(100)))
BATCH_DOCUMENTS = 1024
TRAIN, HELDOUT = "train", "heldout"
HELDOUT_BY, BY_TEXT = "heldout_by", "text"
"""The figure of a dataset whose documents are held out by their texts, also of a member of a union, and its value;
other datasets have none."""
MEMBERS = "members"
"""The figure in the manifest of a union that lists its members."""
MEMBERSHIP = "membership"
"""The figure in a dataset's manifest with its Merkle root [64 hex digits]. A union has none, but those of its members.
Versions without an index by id have it only after a takedown with proofs."""
MEMBERSHIP_PARTS = "membership_parts"
"""The figure in a dataset's manifest with the part of the Merkle tree in each file of the index by id, in order.

It is the hash at the top of the part [64 hex digits], or the id and the values of the only document in it.
"""
SPACE, ESCAPE = "\u2581", "\ufdd0"
"""The character that SentencePiece writes for a space, and a Unicode noncharacter that begins an escape sequence."""


COPIES = "+x"
"""Separator between a source and the number of times that its documents are read in an epoch, in a stream's name."""


def name_of_copies(source: str, copies: int) -> str:
    """Return the source of the documents that are read `copies` times in an epoch: `web`, or `web+x3` for 3."""
    return source if copies == 1 else f"{source}{COPIES}{copies}"


def split_copies(source: str) -> tuple[str, int]:
    """Return a source without the number of copies, and that number: ("web", 3) for `web+x3`, else the name and 1."""
    name, mark, number = source.rpartition(COPIES)
    return (name, int(number)) if mark and number.isdecimal() else (source, 1)


def escape(text: str) -> str:
    """Return the text with `▁`, which SentencePiece would decode as a space, replaced by an escape sequence."""
    if SPACE in text or ESCAPE in text:
        return text.replace(ESCAPE, f"{ESCAPE}0").replace(SPACE, f"{ESCAPE}1")
    return text


def unescape(text: str) -> str:
    """Return the original of a text that `escape` returned."""
    if ESCAPE in text:
        return text.replace(f"{ESCAPE}1", SPACE).replace(f"{ESCAPE}0", ESCAPE)
    return text


MARK = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"""Added tokens that mark parts of a prompt, such as `<|fim_prefix|>` and `<tool_call>`: some models do not list them as
special, but a page that quotes them does not give orders. Added words and runs of spaces are vocabulary."""


def remove_dropout(model: Any) -> bool:
    """Remove the dropout of BPE from a `tokenizers.Tokenizer`; return True if it had any.

    With the dropout that a model was trained with (Provilkov et al. 2020), a text has other ids at each call.
    """
    if has_dropout := bool(getattr(model.model, "dropout", None)):
        model.model.dropout = None
    return has_dropout


def encode_exactly(model: Any) -> None:
    """Make a `tokenizers.Tokenizer` encode special tokens and marks that a text contains as text, without chance."""
    remove_dropout(model)
    added = model.get_added_tokens_decoder().values()
    model.add_special_tokens([token.content for token in added if not token.special and MARK.fullmatch(token.content)])
    model.encode_special_tokens = True  # "</s>" in a text is text


class TokenizerContract(BaseModel):
    """The meaning of the token ids; the trainer rejects a dataset whose contract differs from the checkpoint's."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Literal["sentencepiece", "huggingface"]
    """Library that reads the model file."""
    sha256: str
    """SHA-256 of the model file."""
    vocab_size: int
    """Number of ids, reserved ones included."""
    reserved: dict[str, int]
    """Id of every reserved token, by name in RESERVED."""
    before: list[str]
    """Reserved tokens written before each document, such as ["bos"]."""
    after: list[str]
    """Reserved tokens written after each document, such as ["eos"]."""

    @property
    def dtype(self) -> Literal["uint16", "uint32"]:
        """The integer type of the token ids in shards."""
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"


def shard_schema(dtype: str) -> pa.Schema:
    """Return the schema of a shard whose token ids are `uint16` or `uint32`."""
    return pa.schema(
        [
            pa.field("doc_id", pa.binary(16), nullable=False),
            pa.field(
                "tokens",
                pa.list_(pa.field("item", {"uint16": pa.uint16(), "uint32": pa.uint32()}[dtype], nullable=False)),
                nullable=False,
            ),
        ]
    )


SHARD_DOCS = pa.schema(
    [
        *PROVENANCE,
        field("language", pa.string(), "most probable language"),
        field("cluster", pa.binary(16), "duplicate cluster"),
        field("token_offset", pa.int64(), "first token of the document in the shard's stream", "tokens"),
        field("num_tokens", pa.int64(), "tokens of the document, separators included", "tokens"),
        field("num_bytes", pa.int64(), "length of its text", "bytes of UTF-8"),
    ]
)
"""The document index of a shard, sorted by token offset for binary search. Personal data in URLs is replaced."""

BY_URL = pa.schema(
    [
        field("surt", pa.string(), "sort-friendly form of the URL: host reversed, then path"),
        field("url", pa.string(), "URL, redacted"),
        field("domain", pa.string(), "registrable domain; decides the bucket"),
        field("doc_id", pa.binary(16), "the document"),
        field("stream", pa.string(), "`<source>/train` or `<source>/heldout`"),
        field("shard", pa.int32(), "number of the shard in its stream"),
    ]
)
"""The index by URL: files that each hold the documents of some registrable domains, sorted by SURT."""

BY_ID = pa.schema(
    [
        field("doc_id", pa.binary(16), "the document"),
        field("value", pa.binary(32), "SHA-256 of the name of its stream, a zero byte, and its tokens as in the shard"),
    ]
)
"""The index by id, from which `penstock prove` makes proofs. A file has the ids with the same first bits, sorted."""


@dataclass(frozen=True)
class Shard:
    """One shard of a stream: the paths, sizes and digests of its two files."""

    stream: str
    number: int
    path: CheckedPath
    docs_path: CheckedPath
    num_tokens: int
    num_documents: int
    sha256: str
    docs_sha256: str
    blocks: str = ""
    """The blocks of the token file, as in schemas/blocks.py; empty in a dataset of an earlier version of penstock."""


@dataclass(frozen=True)
class Member:
    """The part of a dataset that one run wrote. A dataset of one run has a single member."""

    folder: Store
    """Folder of the version of `tokens`, in the run that wrote it."""
    digest: str
    settings: dict[str, Any]
    """The section `[tokens]` with which it was written, as far as its manifest has it."""
    shards: dict[str, range]
    """Numbers of its shards in each stream of the dataset."""
    by_url: range
    """Its files in the dataset's `by_url`."""

    @property
    def seed(self) -> int:
        """Seed of the hash by which the documents of each of its streams are sorted."""
        return int(self.settings.get("seed", 0))

    @property
    def run(self) -> Store:
        """The run folder."""
        return self.folder.child("../..")


@dataclass(frozen=True)
class Dataset:
    """A committed token dataset; `streams` maps `<source>/<split>` to its shards in order.

    Each quality bucket of a source is a source of its own here, such as `web+low` and `web+high`. So are the documents
    that `dedup.rehydration` repeats: those of `web+x3` are stored once, and an epoch of `web` reads them three times.
    In a union of datasets a stream has the shards of each member after another; within a member they are sorted.
    """

    folder: Store
    manifest: Manifest
    tokenizer: TokenizerContract
    tokenizer_folder: Store
    tokenizer_path: CheckedPath
    chunk_tokens: int
    streams: Mapping[str, Sequence[Shard]]
    by_url: list[CheckedPath]
    members: tuple[Member, ...]

    @property
    def digest(self) -> str:
        """The identity of the dataset: SHA-256 (hex) of its manifest's content."""
        return self.manifest.digest

    @property
    def copies(self) -> dict[str, int]:
        """How often an epoch reads the documents of each source that `dedup.rehydration` repeats; others are absent."""
        return {source: number for source in self.num_tokens() if (number := split_copies(source)[1]) > 1}

    def by_sha256(self) -> "Dataset":
        """Return the dataset with shards whose SHA-256 is compared when they are opened, for a reader of whole shards.

        The manifest's digest does not cover the checksums of record batches. Training compares the SHA-256 of every
        file before it reads them.
        """
        return replace(
            self, streams={name: [replace(shard, blocks="") for shard in own] for name, own in self.streams.items()}
        )

    def num_tokens(self, split: str = TRAIN) -> dict[str, int]:
        """Return the number of stored tokens of each source in one split, `train` or `heldout`."""
        suffix = f"/{split}"
        return {
            name.removesuffix(suffix): sum(shard.num_tokens for shard in shards)
            for name, shards in self.streams.items()
            if name.endswith(suffix)
        }


def shard_key(stream: str, number: int) -> str:
    """Return the manifest key of a shard's token file, such as `web/train/00003.tokens`."""
    return f"{stream}/{number:05d}.tokens"


def docs_key(stream: str, number: int) -> str:
    """Return the manifest key of a shard's document index, such as `web/train/00003.docs`."""
    return f"{stream}/{number:05d}.docs"


def by_id_key(number: int) -> str:
    """Return the manifest key of a file of the index by id, such as `by_id/00003`."""
    return f"by_id/{number:05d}"


def read_shards(folder: Store, manifest: Manifest) -> tuple[TokenizerContract, dict[str, list[Shard]]]:
    """Return the tokenizer contract and the shards of each stream from the manifest of a token dataset.

    The table `tokenizer` is not read. Raises ContractError if a value is missing or wrong.
    """
    figures: dict[str, Any] = manifest.content.figures
    entries = {entry.key: entry for entry in manifest.content.files}
    try:
        int(figures["chunk_tokens"])
        contract = TokenizerContract.model_validate(figures["tokenizer"])
        return contract, {
            name: [
                Shard(
                    stream=name,
                    number=number,
                    path=manifest.paths[shard_key(name, number)],
                    docs_path=manifest.paths[docs_key(name, number)],
                    num_tokens=tokens,
                    num_documents=entries[docs_key(name, number)].rows,
                    sha256=entries[shard_key(name, number)].sha256,
                    docs_sha256=entries[docs_key(name, number)].sha256,
                    blocks=manifest.run.blocks.get(shard_key(name, number), ""),
                )
                for number, tokens in enumerate(counts)
            ]
            for name, counts in figures["streams"].items()
        }
    except (KeyError, ValidationError) as error:
        raise ContractError(
            f"{folder.uri}: expected a token dataset, got a manifest with a missing or wrong value: {error}. Restore "
            "the manifest from a backup."
        ) from error


def open_dataset(run: Store, even_replaced: bool = False) -> Dataset:
    """Open the current token dataset of a run folder.

    `even_replaced`: as in `open_table`. Raises ContractError if the dataset is missing or inconsistent, or if a
    takedown has replaced it or a member of a union.
    """
    folder, manifest = open_table(run, "tokens", even_replaced)
    tokenizer_folder, tokenizer_manifest = open_table(run, "tokenizer", even_replaced)
    contract, streams = read_shards(folder, manifest)
    figures: dict[str, Any] = manifest.content.figures
    expected, actual = figures["tokenizer"], tokenizer_manifest.content.figures.get("contract") or {}
    names = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
    if names:
        wrong = "; ".join(
            f"{name}: {expected.get(name)} in `tokens`, {actual.get(name)} in `tokenizer`" for name in names
        )
        raise ContractError(
            f"{folder.uri}: expected the tokenizer contract of the table `tokenizer`, got different values: {wrong}. "
            "Restore the manifests of both tables from a backup."
        )
    members = tuple(_members(folder, manifest, streams))
    for member in () if even_replaced else members:
        check_not_replaced(member.folder)
    return Dataset(
        folder=folder,
        manifest=manifest,
        tokenizer=contract,
        tokenizer_folder=tokenizer_folder,
        tokenizer_path=tokenizer_manifest.paths["model"],
        chunk_tokens=int(figures["chunk_tokens"]),
        streams=streams,
        by_url=manifest.paths_of("by_url/"),
        members=members,
    )


def _members(folder: Store, manifest: Manifest, streams: dict[str, list[Shard]]) -> Iterator[Member]:
    """Yield the members of a dataset. Raises ContractError if one of a union no longer exists, or has changed."""
    content = manifest.content
    if MEMBERS not in content.figures:
        shards = {name: range(len(numbers)) for name, numbers in streams.items()}
        by_url = range(len(manifest.paths_of("by_url/")))
        yield Member(folder, manifest.digest, content.config.get("tokens", {}), shards, by_url)
        return
    first, first_file = dict.fromkeys(streams, 0), 0
    for entry in content.figures[MEMBERS]:
        place = folder.child(f"../{manifest.run.lineage[member_input(entry['digest'])]}")
        if (digest := read_manifest(place).digest) != entry["digest"]:
            raise ContractError(
                f"{place.uri}: expected dataset {entry['digest'][:12]}, a member of {folder.uri}, got {digest[:12]}. "
                "Restore its manifest from a backup."
            )
        shards = {name: range(first[name], first[name] + number) for name, number in entry["shards"].items()}
        yield Member(place, digest, entry["settings"], shards, range(first_file, first_file + entry["by_url"]))
        first |= {name: numbers.stop for name, numbers in shards.items()}
        first_file += entry["by_url"]
