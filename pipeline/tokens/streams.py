"""Assignment of documents to the streams of a dataset, and the choice of the documents that a mix leaves out.

A stream holds the documents of one source and quality bucket that an epoch reads equally often (`dedup.rehydration`),
either for training or held out. A document's stream, and whether the mix keeps the document, depend only on the
document and the settings. Writing, comparing and predicting a dataset therefore share these functions. The quality
buckets are computed from stored tables, so another signal can define them without cleaning the texts again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from pipeline.dedup.config import DEDUP, DedupConfig
from pipeline.engine.parquet import ROWS_AT_ONCE, Part, read_measured
from pipeline.engine.stage import Drop, Relation, Row
from schemas.config import Recipe, Section, location, suggest_name
from schemas.entries import lookup_entry
from schemas.errors import ConfigError, ContractError
from schemas.ids import is_in_share, shuffle_key
from schemas.manifest import Manifest, TableVersion, part_key, read_manifest
from schemas.mix import Mix, read_mix
from schemas.older_tables import read_batches
from schemas.signals import FAMILIES
from schemas.storage import Store
from schemas.takedown import removed_spans
from schemas.tokens import BY_TEXT, HELDOUT, HELDOUT_BY, TRAIN, Dataset, name_of_copies, shard_key, split_copies

Value = TypeVar("Value")
BUCKET_SEPARATOR = "+"
"""Separator between a source and its quality bucket in a stream's name; no source name contains it."""
MIX_RULE = "mix"
"""Name of the rule that drops the documents that the mix leaves out, and key of the mix in the manifest's figures."""
BY_PERPLEXITY = "perplexity"
"""Value of `buckets_by` that divides every source by the column `perplexity_bucket` of `verdicts`, not by a signal."""
PERPLEXITY_BUCKETS = ("head", "middle", "tail", "all")
"""The perplexity buckets in `verdicts`; `all` holds the documents whose perplexity no model measured."""
FAMILY_OF: Mapping[str, str] = {signal.name: family for family, signals in FAMILIES.items() for signal in signals}
"""Signal → family, for every signal that `buckets_by` may name."""
CLASSIFIER, IMPORTANCE = "classifier", "importance"
SCORE_COLUMNS: Mapping[str, str] = {CLASSIFIER: "classifier_scores", IMPORTANCE: "importance"}
"""The column of `scores` that holds the models' scores, by the recipe section that names the models."""
BUCKET_CHOICES = (BY_PERPLEXITY, *FAMILY_OF, *(f"{section}.NAME" for section in SCORE_COLUMNS))
"""The valid values of `buckets_by`, for error messages."""
UNMEASURED = "none"
"""Name of the bucket of the documents whose signal or score is null or NaN."""
BUCKET_NAMES: Mapping[int, tuple[str, ...]] = {2: ("low", "high"), 3: ("low", "middle", "high")}
"""Names of two or three buckets, in ascending order of the value; more buckets are b0, b1, ..."""
KEY_BOUND = 1 << 63
"""Exclusive upper bound of shuffle keys."""
MIN_SHORTFALL_FACTOR = 1.1
"""Minimum factor of further crawl that the message about a shortfall names."""


@dataclass(frozen=True)
class Measure:
    """The value that assigns documents to quality buckets: a column of a table, or one score in a column of scores."""

    table: str
    column: str
    name: str = ""
    """Name of the model; empty = the column itself is the value."""


class TokensConfig(Section):
    """Settings of the dataset: sizes of shards and chunks, the held-out share, quality buckets and the mix."""

    shard_tokens: int = Field(100_000_000, ge=1024)
    """Approximate number of tokens in a shard. The number of shards of a stream is its tokens divided by
    `shard_tokens`, rounded up."""
    chunk_tokens: int = Field(8192, ge=64)
    """Number of tokens in a chunk, the unit that training shuffles. Every sequence length must divide it."""
    heldout_share: float = Field(0.01, ge=0, lt=1)
    """Share of the documents that are held out, chosen by a hash of their duplicate cluster. All copies of a document
    are therefore either in training or held out. With `dedup.scope`, copies may be in several clusters, and the hash is
    of the normalised text: equal texts are on one side, but near copies may be on both."""
    heldout_by: Literal["text"] | None = None
    """"text": documents are held out by a hash of the normalised text in any case, as with `dedup.scope`. Runs with the
    same `seed` and `heldout_share` then hold out the same texts, so that no member of a union trains on a text that
    another one holds out. None: by cluster unless `dedup.scope` is set."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of the global shuffle."""
    buckets_by: str = ""
    """The value that divides every source into quality buckets. Each bucket is a stream, such as `web+head`, so that
    training reports its loss separately. "perplexity" uses the buckets of `verdicts`: head, middle and tail of the
    language, and `all` if no model measured the document. Otherwise a signal that `[quality]` measures, such as
    "fineweb_terminal_lines", or the score of a model NAME in the `models` of its section: "classifier.NAME"
    (probability of the good class) or "importance.NAME" (nats per word). Empty = sources are not divided."""
    bucket_cuts: tuple[float, ...] = ()
    """Ascending values of the signal or score in `buckets_by` that separate the buckets: one value makes `low` and
    `high`, two make `low`, `middle` and `high`, more make `b0`, `b1`, .... A document whose value equals a cut belongs
    to the bucket above it, and a document without a value to `none`."""
    mix: str = location("")
    """File that `penstock mix suggest` wrote: the share of each source's training documents to keep, and the number of
    tokens that it recommends. Empty = all documents are kept."""

    def content(self) -> dict[str, Any]:
        """Return the fields that change what is written; `heldout_by`, which was added later, only if it is set."""
        return {name: value for name, value in super().content().items() if name != "heldout_by" or value is not None}

    @model_validator(mode="after")
    def _consistent(self) -> "TokensConfig":
        by, cuts = self.buckets_by, self.bucket_cuts
        if self.heldout_by is not None and not self.heldout_share:
            raise ValueError(
                "heldout_by would be ignored: heldout_share is 0. Remove tokens.heldout_by, or set "
                "tokens.heldout_share."
            )
        if by not in ("", BY_PERPLEXITY) and self.measure is None:
            raise ValueError(
                f"buckets_by: expected a signal or score, got {by!r}{suggest_name(by, BUCKET_CHOICES)}. "
                "Set tokens.buckets_by to a valid name."
            )
        if cuts and self.measure is None:
            reason = "the shares of [perplexity] define the buckets" if by else "buckets_by names no signal"
            raise ValueError(f"bucket_cuts would be ignored: {reason}. Remove tokens.bucket_cuts.")
        if self.measure is not None and not cuts:
            raise ValueError(
                f"buckets_by = {by!r} requires bucket_cuts, the values that separate the buckets. "
                "Set tokens.bucket_cuts."
            )
        if not (np.diff(np.asarray(cuts, np.float32)) > 0).all():
            raise ValueError(
                f"bucket_cuts: expected ascending values that differ in single precision, got {list(cuts)}. "
                "Sort tokens.bucket_cuts and remove duplicates."
            )
        if by.startswith(f"{CLASSIFIER}.") and not all(0 < cut <= 1 for cut in cuts):
            raise ValueError(
                f"bucket_cuts: expected probabilities above 0 and up to 1, got {list(cuts)}. "
                "Set tokens.bucket_cuts to values in (0, 1]."
            )
        return self

    @property
    def measure(self) -> Measure | None:
        """The signal or score that is compared with `bucket_cuts`; None = `buckets_by` is empty or "perplexity"."""
        section, _, name = self.buckets_by.partition(".")
        if name and section in SCORE_COLUMNS:
            return Measure("scores", SCORE_COLUMNS[section], name)
        return Measure("documents", self.buckets_by) if self.buckets_by in FAMILY_OF else None

    @property
    def bucket_names(self) -> tuple[str, ...]:
        """The names of all buckets, in ascending order of the value; empty = sources are not divided."""
        if self.measure is None:
            return PERPLEXITY_BUCKETS if self.buckets_by else ()
        number = len(self.bucket_cuts) + 1
        return (*(BUCKET_NAMES.get(number) or (f"b{index}" for index in range(number))), UNMEASURED)


def mix_file(config: TokensConfig) -> dict[str, str]:
    """Return {MIX_RULE: path of the mix file}; empty if there is no mix."""
    return {MIX_RULE: config.mix} if config.mix else {}


REHYDRATING = 2
"""First version of the step that gives the documents of each weight a stream of their own."""
INDEXED_BY_ID = 3
"""First version of the step that writes the index by id."""
TOKENS = Relation(
    name="tokens",
    version=INDEXED_BY_ID,
    config=TokensConfig,
    reasons={MIX_RULE: "a training document beyond the share of its source that `tokens.mix` keeps, chosen by hash"},
    models=mix_file,
)


def is_held_out_by_text(recipe: Recipe) -> bool:
    """Return True if documents are held out by their texts and not by their clusters."""
    config = recipe.section(TOKENS.name, TokensConfig)
    has_scope = bool(recipe.section(DEDUP.name, DedupConfig).scope)
    return config.heldout_share > 0 and (has_scope or config.heldout_by == BY_TEXT)


@dataclass(frozen=True)
class Sorting:
    """The assignment of documents to streams, and the choice of the documents that the mix leaves out."""

    config: TokensConfig
    keep: Mapping[str, float] = field(default_factory=dict)
    """Share of the training documents to keep, by source, such as `web`, or by source and bucket, such as `web+head`.
    Others are kept whole."""
    rehydrates: bool = True
    """False for a dataset of a version that wrote documents of any weight to the same stream."""
    by_text: bool = False
    """True if documents are held out by their texts instead of their clusters, because copies are in several ones."""

    @property
    def may_drop(self) -> bool:
        """True if the mix keeps less than all training documents of a source."""
        return min(self.keep.values(), default=1.0) < 1

    def stream(self, source: str, bucket: str | None, group: bytes, weight: int | None = 1) -> str:
        """Return a document's stream, such as `web/train`, or `web+head/heldout` in a quality bucket.

        `bucket` is None if sources are not divided. `group`: the cluster or, with `by_text`, the digest of the text; a
        group is held out or trained on. `weight`: how often an epoch reads the document, such as 3 for the stream
        `web+x3/train`; None = once.
        """
        is_heldout = is_in_share(shuffle_key(self.config.seed + 1, group), self.config.heldout_share)
        name = source if bucket is None else f"{source}{BUCKET_SEPARATOR}{bucket}"
        copies = weight or 1 if self.rehydrates else 1
        return f"{name_of_copies(name, copies)}/{HELDOUT if is_heldout else TRAIN}"

    def drop(self, stream: str, doc_id: bytes) -> Drop | None:
        """Return the verdict on a document that the mix leaves out; None if the mix keeps the document."""
        source, _, split = stream.rpartition("/")
        share = self.keep.get(split_copies(source)[0], 1.0)
        # The key does not depend on the share: a document that is kept at one share is kept at every larger share.
        key = shuffle_key(self.config.seed + 2, doc_id)
        return Drop(MIX_RULE, key / KEY_BOUND, share) if split == TRAIN and not is_in_share(key, share) else None


def sorting_of(manifest: Manifest) -> Sorting:
    """Return the assignment of documents to streams that the manifest of a committed dataset describes."""
    content = manifest.content
    config = TokensConfig.model_validate(content.config.get(TOKENS.name, {}))
    keep = {name: figure["keep"] for name, figure in content.figures.get(MIX_RULE, {}).items()}
    rehydrates = content.stages.get(TOKENS.name, TOKENS.version) >= REHYDRATING
    return Sorting(config, keep, rehydrates, content.figures.get(HELDOUT_BY) == BY_TEXT)


def mixed_sorting(dataset: Manifest, clean: str) -> Sorting | None:
    """Return how documents were assigned to the streams of a dataset; `clean` is the digest of the current `clean`.

    None if the mix left no document out, or if the dataset was made from another version of `clean`.
    """
    digests = {entry.name: entry.sha256 for entry in dataset.content.inputs}
    sorting = sorting_of(dataset) if digests.get("clean") == clean else None
    return sorting if sorting and sorting.may_drop else None


def check_mix_sources(config: TokensConfig, sources: Sequence[str]) -> None:
    """Raise ConfigError if the mix names a source, or a quality bucket of a source, that the recipe does not have."""
    possible = [f"{source}{BUCKET_SEPARATOR}{name}" for source in sources for name in config.bucket_names] or sources
    if config.mix and (unknown := sorted(read_mix(config.mix).sources.keys() - set(possible))):
        hints = ", ".join(f"{name!r}{suggest_name(name, possible)}" for name in unknown)
        raise ConfigError(
            f"tokens.mix {config.mix}: expected sources of this recipe, or their quality buckets, got {hints}. "
            "Correct the names in that file, or set tokens.buckets_by and tokens.bucket_cuts to the quality buckets "
            "for which that file was made."
        )


def check_mix(mix: Mix, where: str, counts: Mapping[str, tuple[int, int]]) -> None:
    """Raise ConfigError if the mix and the dataset have different sources, or if the mix keeps no document of a source.

    `counts` has, by stream, the numbers of kept and of left out documents. `where` is the path of the mix file.
    """
    trained = {stream: numbers for stream, numbers in counts.items() if stream.endswith(f"/{TRAIN}")}
    sources = mix.of({stream.removesuffix(f"/{TRAIN}") for stream in trained}, f"tokens.mix {where}")
    for name in sources:
        own = [numbers for stream, numbers in trained.items() if _source_of(stream)[0] == name]
        if not sum(num_kept for num_kept, _ in own):
            raise ConfigError(
                f"tokens.mix {where}: expected a share that keeps documents of {name}, got keep = "
                f"{sources[name].keep:g}, which leaves out all {sum(left_out for _, left_out in own)} training "
                f"documents. Increase keep of {name} in that file."
            )


def _source_of(stream: str) -> tuple[str, int]:
    """Return the source of a stream such as `web+x3/train`, and how often an epoch reads its documents: ("web", 3)."""
    return split_copies(stream.rpartition("/")[0])


def epoch_of_sources(tokens: Mapping[str, int]) -> dict[str, int]:
    """Return the number of tokens that an epoch reads of each source, from the number of tokens of each stream."""
    epoch: dict[str, int] = {}
    for stream, number in tokens.items():
        if stream.endswith(f"/{TRAIN}"):
            name, copies = _source_of(stream)
            epoch[name] = epoch.get(name, 0) + copies * number
    return epoch


def mix_figure(mix: Mix, tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return what the manifest stores about each source of the mix: kept share, repetitions, wanted and found tokens.

    `tokens`: number of tokens in the dataset, by stream.
    """
    keys, found = ("keep", "repeat", "wanted_tokens"), epoch_of_sources(tokens)
    return {
        name: {key: getattr(source, key) for key in keys} | {"found_tokens": found[name]}
        for name, source in mix.sources.items()
    }


def describe_shortfalls(figure: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield a warning for each source that has fewer training tokens than the mix recommends.

    `figure` is the result of `mix_figure`, and `where` the path of the mix file.
    """
    for name, source in figure.items():
        available, required = source["found_tokens"], source["wanted_tokens"]
        if required is not None and available < required:
            share, times = min(available / required, 0.99), max(required / available, MIN_SHORTFALL_FACTOR)
            amount = f"{required:.1e}".replace("e+", "e").replace("e0", "e")
            yield (
                f"{name}: {share:.2g} of the {amount} tokens that {PurePath(where).name} asks for; "
                f"{times:.1f} x as much crawl"
            )


# The quality bucket and the stream of each document of a part, computed from the stored tables.

BUCKET_TABLES = ("documents", "templates", "scores", "verdicts", "repeats")
"""Tables from which quality buckets are computed. A run may lack `templates`, `scores` and `repeats`."""
STREAM_TABLES = (*BUCKET_TABLES, "clean")
"""Tables that determine the streams of a dataset."""


def buckets_of_part(part: Part, config: TokensConfig) -> Iterator[tuple[bytes, str]]:
    """Yield (doc_id, bucket) of every document with text in one part, in the order of `documents`.

    If the step `repeats` cut spans of a document, its quality signal is measured on the remaining text. Perplexity and
    scores are always those of the whole text. Raises ContractError if the tables do not contain the same documents.
    """
    measure = config.measure
    if measure is None:
        for batch in read_measured(part, {"documents": [], "verdicts": ["perplexity_bucket"]}):
            yield from zip(*(batch.column(name).to_pylist() for name in ("doc_id", "perplexity_bucket")))
        return
    column, names = measure.column, np.array(config.bucket_names, object)
    remeasured = measure.table == "documents" and "repeats" in part.paths
    columns = {"documents": [], measure.table: [column]} | ({"repeats": ["cuts", column]} if remeasured else {})
    for batch in read_measured(part, columns):
        values = batch.column(column)
        if measure.name:
            values = lookup_entry(values, measure.name)
        if remeasured:
            was_cut = pc.fill_null(pc.greater(pc.list_value_length(batch.column("cuts")), 0), False)
            values = pc.if_else(was_cut, batch.column(f"repeats.{column}"), values)
        numbers = bucket_numbers(values, config.bucket_cuts)
        yield from zip(batch.column("doc_id").to_pylist(), names[numbers].tolist())


def bucket_numbers(values: pa.Array, cuts: Sequence[float]) -> Any:
    """Return the bucket number, from 0, of each document's value; comparisons are in single precision.

    A value equal to a cut belongs to the bucket above it. A null or NaN belongs to the additional bucket
    `len(cuts) + 1`.
    """
    floats = pc.fill_null(pc.cast(values, pa.float32(), safe=False), np.nan).to_numpy(zero_copy_only=False)
    numbers = np.searchsorted(np.asarray(cuts, np.float32), floats, side="right")
    return np.where(np.isnan(floats), len(cuts) + 1, numbers)


def texts_of_part(part: Part) -> Iterator[tuple[bytes, bytes]]:
    """Yield (doc_id, digest of the normalised text) of every document with text in one part, in order."""
    for batch in read_measured(part, {"documents": ["text_digest"]}):
        yield from zip(*(batch.column(name).to_pylist() for name in ("doc_id", "text_digest")))


def find_bucket(buckets: Iterator[tuple[bytes, Value]], doc_id: bytes) -> Value:
    """Advance the iterator of (doc_id, bucket) to a document and return its bucket, or another value of a document.

    Raises ContractError if the rest of the iterator does not contain the document.
    """
    for identifier, value in buckets:
        if identifier == doc_id:
            return value
    raise ContractError(
        f"table `clean`: expected the documents of the table `documents` in the same order, got document "
        f"{doc_id.hex()}, which is missing there or comes earlier. Run `penstock run` with a new --out."
    )


def streams_of_part(part: Part, sorting: Sorting) -> Callable[[Row], str]:
    """Return a function that maps a row with `doc_id`, `source`, `cluster` and `weight` to the name of its stream.

    The function must be called with the rows of the part in their stored order.
    """
    buckets = buckets_of_part(part, sorting.config) if sorting.config.bucket_names else None
    texts = texts_of_part(part) if sorting.by_text else None

    def stream(row: Row) -> str:
        bucket = find_bucket(buckets, row["doc_id"]) if buckets is not None else None
        group = find_bucket(texts, row["doc_id"]) if texts is not None else row["cluster"]
        return sorting.stream(row["source"], bucket, group, row["weight"])

    return stream


def mix_drops(tables: Mapping[str, TableVersion], number: int, sorting: Sorting) -> Iterator[tuple[bytes, Drop | None]]:
    """Yield (doc_id, drop) of every kept document of one part of `clean`, in order; None = the mix keeps the document.

    `number` is the part number. `tables` has the tables of STREAM_TABLES that exist in the run.
    """
    key = part_key(number)
    folders = {name: table.folder for name, table in tables.items()}
    part = Part(number, folders, {name: table.manifest.paths[key] for name, table in tables.items()})
    stream_of = streams_of_part(part, sorting)
    with folders["clean"].open_input(part.paths["clean"]) as stream:
        columns = ["doc_id", "source", "cluster", "weight", "drop_stage"]
        for batch in read_batches(pq.ParquetFile(stream), "clean", columns, ROWS_AT_ONCE):
            for row in batch.to_pylist():
                if row["drop_stage"] is None:
                    yield row["doc_id"], sorting.drop(stream_of(row), row["doc_id"])


def tokens_left(dataset: Dataset) -> dict[str, int]:
    """Return the number of tokens of each stream of a dataset, or of a union, without those that takedowns removed."""
    total = dict.fromkeys(dataset.streams, 0)
    for member in dataset.members:
        for stream, number in live_tokens(member.run, read_manifest(member.folder)).items():
            total[stream] += number
    return total


def live_tokens(run: Store, dataset: Manifest) -> dict[str, int]:
    """Return the number of tokens of each stream of a dataset, without the tokens that takedowns have removed.

    `run`: the run folder that has the dataset. Raises ContractError if a manifest and its certificate disagree.
    """
    streams: dict[str, list[int]] = dataset.content.figures.get("streams", {})
    removed = removed_spans(run, dataset)
    return {
        name: sum(shards)
        - sum(length for number in range(len(shards)) for _, length in removed.get(shard_key(name, number), ()))
        for name, shards in streams.items()
    }
