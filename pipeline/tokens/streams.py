"""The streams of a dataset: which of them a document goes to, and whether the mix leaves it out.

What writes a dataset, compares two of them, or predicts one asks here: all of it follows from the document alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from pipeline.engine.parquet import ROWS_AT_ONCE, Part, read_measured
from pipeline.engine.stage import Drop, Relation, Row
from schemas.config import Section, location, suggest_name
from schemas.errors import ConfigError, ContractError
from schemas.ids import is_in_share, shuffle_key
from schemas.manifest import Manifest, TableVersion, part_key
from schemas.mix import Mix, read_mix
from schemas.signals import FAMILIES
from schemas.tables import lookup_entry
from schemas.tokens import HELDOUT, TRAIN

BUCKET_SEPARATOR = "+"
"""Stands between a source and a bucket of it; no source's own name has one."""
MIX_RULE = "mix"
"""The reason of a document that the mix leaves out, and where the figures say what it asked for."""
BY_PERPLEXITY = "perplexity"
"""Cuts a source by the thirds of perplexity that the verdicts name, not by a signal."""
PERPLEXITY_BUCKETS = ("head", "middle", "tail", "all")
"""What the verdicts name them; the last: where no model measured it."""
FAMILY_OF: Mapping[str, str] = {signal.name: family for family, signals in FAMILIES.items() for signal in signals}
"""The signals that may cut a source, and the family that each is measured with."""
CLASSIFIER, IMPORTANCE = "classifier", "importance"
SCORE_COLUMNS: Mapping[str, str] = {CLASSIFIER: "classifier_scores", IMPORTANCE: "importance"}
"""The column of `scores` whose entries may cut a source, by the section that names their models."""
BUCKET_CHOICES = (BY_PERPLEXITY, *FAMILY_OF, *(f"{section}.NAME" for section in SCORE_COLUMNS))
"""What may cut a source, in words."""
UNMEASURED = "none"
"""The bucket of a document that has no value."""
BUCKET_NAMES: Mapping[int, tuple[str, ...]] = {2: ("low", "high"), 3: ("low", "middle", "high")}
"""Names of so many buckets, by the value and not by what is good; of more they are b0, b1, ..."""
KEY_BOUND = 1 << 63
"""Keys of the shuffle lie below."""
MIN_SHORTFALL_FACTOR = 1.1
"""Least factor that a shortfall is told with."""


@dataclass(frozen=True)
class Measure:
    """A stored value of each document that cuts sources: a column of a table, or the entry of one name in it."""

    table: str
    column: str
    name: str = ""
    """Empty: the column itself."""


class TokensConfig(Section):
    """How the dataset is cut."""

    shard_tokens: int = Field(100_000_000, ge=1024)
    """Tokens in a shard, about; the number of shards is the tokens of a stream over this, rounded up."""
    chunk_tokens: int = Field(8192, ge=64)
    """Tokens in a chunk, the unit the trainer shuffles; sequence lengths divide it."""
    heldout_share: float = Field(0.01, ge=0, lt=1)
    """Share of duplicate clusters that is held out, chosen by hash, so that no cluster spans both splits."""
    seed: int = Field(0, ge=0)
    """Seed of the global shuffle."""
    buckets_by: str = ""
    """What cuts every source into buckets of quality, streams of their own such as `web+head`, so that training tells
    the loss of each: "perplexity" (head, middle and tail of the language, as the verdicts say; `all` where no model
    measured it), a signal that `[quality]` measures, such as "fineweb_terminal_lines", or what a model says:
    "classifier.NAME" (probability of the good class) or "importance.NAME" (nats per word) of a NAME in the `models` of
    that section; empty: sources stay whole."""
    bucket_cuts: tuple[float, ...] = ()
    """Values of that signal or score, ascending, at which a bucket ends and the next begins: one makes `low` and
    `high`, two `low`, `middle` and `high`, more `b0`, `b1`, ...; the value itself belongs to the upper bucket, and a
    document that has none to `none`."""
    mix: str = location("")
    """File of `penstock mix suggest`: which share of each source's training documents is kept, and how many tokens it
    asks for; empty: all are kept."""

    @model_validator(mode="after")
    def _means_something(self) -> "TokensConfig":
        by, cuts = self.buckets_by, self.bucket_cuts
        if by not in ("", BY_PERPLEXITY) and self.measure is None:
            raise ValueError(f"buckets_by: no such signal {by!r}{suggest_name(by, BUCKET_CHOICES)}")
        if cuts and self.measure is None:
            why = "the shares of [perplexity] cut" if by else "buckets_by names no signal"
            raise ValueError(f"bucket_cuts would be ignored: {why}")
        if self.measure is not None and not cuts:
            raise ValueError(
                f"buckets_by = {by!r} needs bucket_cuts, the values where a bucket ends and the next begins"
            )
        if not (np.diff(np.asarray(cuts, np.float32)) > 0).all():
            raise ValueError(f"bucket_cuts: expected ascending values, apart in single precision, got {list(cuts)}")
        if by.startswith(f"{CLASSIFIER}.") and not all(0 < cut <= 1 for cut in cuts):
            raise ValueError(f"bucket_cuts: expected probabilities above 0 and up to 1, got {list(cuts)}")
        return self

    @property
    def measure(self) -> Measure | None:
        """What is compared with `bucket_cuts`; None: nothing is."""
        section, _, name = self.buckets_by.partition(".")
        if name and section in SCORE_COLUMNS:
            return Measure("scores", SCORE_COLUMNS[section], name)
        return Measure("documents", self.buckets_by) if self.buckets_by in FAMILY_OF else None

    @property
    def bucket_names(self) -> tuple[str, ...]:
        """Every bucket a document may fall into, from the lowest values on; empty: sources stay whole."""
        if self.measure is None:
            return PERPLEXITY_BUCKETS if self.buckets_by else ()
        number = len(self.bucket_cuts) + 1
        return (*(BUCKET_NAMES.get(number) or (f"b{place}" for place in range(number))), UNMEASURED)


def mix_file(config: TokensConfig) -> dict[str, str]:
    """The file of the mix, which enters the fingerprint by its digest."""
    return {MIX_RULE: config.mix} if config.mix else {}


TOKENS = Relation(
    name="tokens",
    version=1,
    config=TokensConfig,
    reasons={MIX_RULE: "a training document beyond the share of its source that `tokens.mix` keeps, chosen by hash"},
    models=mix_file,
)


@dataclass(frozen=True)
class Sorting:
    """How documents are sorted into streams."""

    config: TokensConfig
    keep: Mapping[str, float] = field(default_factory=dict)
    """Share of the training documents that stays, by source (`web+head` where sources are cut); others stay whole."""

    @property
    def may_drop(self) -> bool:
        """Whether any document may be left out."""
        return min(self.keep.values(), default=1.0) < 1

    def stream(self, source: str, bucket: str | None, cluster: bytes) -> str:
        """`<source>/train` or `<source>/heldout` of a document; `bucket` is None where sources stay whole."""
        held = is_in_share(shuffle_key(self.config.seed + 1, cluster), self.config.heldout_share)
        name = source if bucket is None else f"{source}{BUCKET_SEPARATOR}{bucket}"
        return f"{name}/{HELDOUT if held else TRAIN}"

    def drop(self, stream: str, doc_id: bytes) -> Drop | None:
        """Why a document of a stream is left out; None = it stays. What a smaller share keeps, a larger one keeps."""
        source, _, split = stream.rpartition("/")
        share = self.keep.get(source, 1.0)
        key = shuffle_key(self.config.seed + 2, doc_id)
        return Drop(MIX_RULE, key / KEY_BOUND, share) if split == TRAIN and not is_in_share(key, share) else None


def sorting_of(manifest: Manifest) -> Sorting:
    """How the documents of a committed dataset were sorted."""
    content = manifest.content
    config = TokensConfig.model_validate(content.config.get(TOKENS.name, {}))
    return Sorting(config, {name: asked["keep"] for name, asked in content.figures.get(MIX_RULE, {}).items()})


def mixed_sorting(dataset: Manifest, clean: str) -> Sorting | None:
    """How a dataset of these clean documents (by digest) was sorted, if a mix left some of them out."""
    reads = {entry.name: entry.sha256 for entry in dataset.content.inputs}
    sorting = sorting_of(dataset) if reads.get("clean") == clean else None
    return sorting if sorting and sorting.may_drop else None


def check_mix_sources(config: TokensConfig, sources: Sequence[str]) -> None:
    """Raise ConfigError if the mix names what cannot be a source of the dataset, given those of the recipe."""
    possible = [f"{source}{BUCKET_SEPARATOR}{name}" for source in sources for name in config.bucket_names] or [*sources]
    if config.mix and (unknown := sorted(read_mix(config.mix).sources.keys() - set(possible))):
        hints = ", ".join(f"{name!r}{suggest_name(name, possible)}" for name in unknown)
        raise ConfigError(
            f"tokens.mix {config.mix}: expected sources that this recipe makes, got {hints}. Correct the names, or "
            "set tokens.buckets_by as it was for the dataset of the mix."
        )


def check_mix(mix: Mix, where: str, found: Mapping[str, tuple[int, int]]) -> None:
    """Raise ConfigError if a mix does not fit the sources of a dataset.

    `found`: by source of training documents, how many stay and how many the mix leaves out.
    """
    asked = mix.of({*found}, f"tokens.mix {where}")
    for name, (stays, goes) in found.items():
        if not stays:
            raise ConfigError(
                f"tokens.mix {where}: expected a share of {name} that keeps some of it, got that keep = "
                f"{asked[name].keep:g} leaves none of its {goes} training documents. Raise it."
            )


def mix_figure(mix: Mix, tokens: Mapping[str, int]) -> dict[str, Any]:
    """What a mix asked for and what was found, by source, for the manifest; `tokens` are those of training."""
    asked = ("keep", "repeat", "wanted_tokens")
    return {
        name: {key: getattr(part, key) for key in asked} | {"found_tokens": tokens[name]}
        for name, part in mix.sources.items()
    }


def describe_shortfalls(figure: Mapping[str, Any], where: str) -> Iterator[str]:
    """A line for each source of which less was found than the mix asks for."""
    for name, part in figure.items():
        found, wanted = part["found_tokens"], part["wanted_tokens"]
        if wanted is not None and found < wanted:
            share, times = min(found / wanted, 0.99), max(wanted / found, MIN_SHORTFALL_FACTOR)
            amount = f"{wanted:.1e}".replace("e+", "e").replace("e0", "e")
            yield (
                f"{name}: {share:.2g} of the {amount} tokens that {PurePath(where).name} asks for; "
                f"{times:.1f} x as much crawl"
            )


# The bucket of quality that each document falls into, read from the stored tables, part by part beside the clean text.
#
# Nothing else is touched, so sources can be cut otherwise without a text cleaned again. With the buckets come the
# streams, and with them what a mix leaves out: whoever tells of a dataset asks here.

BUCKET_TABLES = ("documents", "scores", "verdicts", "repeats")
"""Tables that buckets are read from; `scores` and `repeats` only where a run has them."""
STREAM_TABLES = (*BUCKET_TABLES, "clean")
"""Tables that the streams of a dataset follow from."""


def buckets_of_part(part: Part, config: TokensConfig) -> Iterator[tuple[bytes, str]]:
    """(doc_id, bucket) of every measured document of a part, in order, where the config cuts sources.

    A document that passages were cut from counts by the signals of the rest; perplexity and scores are of the whole.
    Raises ContractError if the tables do not hold the same documents.
    """
    measure = config.measure
    if measure is None:
        for batch in read_measured(part, {"documents": [], "verdicts": ["perplexity_bucket"]}):
            yield from zip(*(batch.column(name).to_pylist() for name in ("doc_id", "perplexity_bucket")))
        return
    column, named = measure.column, np.array(config.bucket_names, object)
    again = measure.table == "documents" and "repeats" in part.paths
    columns = {"documents": [], measure.table: [column]} | ({"repeats": ["cuts", column]} if again else {})
    for batch in read_measured(part, columns):
        values = batch.column(column)
        if measure.name:
            values = lookup_entry(values, measure.name)
        if again:
            was_cut = pc.fill_null(pc.greater(pc.list_value_length(batch.column("cuts")), 0), False)
            values = pc.if_else(was_cut, batch.column(f"repeats.{column}"), values)
        numbers = bucket_numbers(values, config.bucket_cuts)
        yield from zip(batch.column("doc_id").to_pylist(), named[numbers].tolist())


def bucket_numbers(values: pa.Array, cuts: Sequence[float]) -> Any:
    """(documents,) the number of the bucket of each value, in single precision: a cut belongs to the bucket above it.

    A value that is null falls into the one behind the last.
    """
    found = pc.fill_null(pc.cast(values, pa.float32(), safe=False), np.nan).to_numpy(zero_copy_only=False)
    numbers = np.searchsorted(np.asarray(cuts, np.float32), found, side="right")
    return np.where(np.isnan(found), len(cuts) + 1, numbers)


def find_bucket(buckets: Iterator[tuple[bytes, str]], doc_id: bytes) -> str:
    """The bucket of a document, found by going on to it. Raises ContractError if it does not come."""
    for identifier, bucket in buckets:
        if identifier == doc_id:
            return bucket
    raise ContractError(
        f"{doc_id.hex()}: expected the documents of `clean` in the order of `documents`, got none of this id behind "
        "the one before. The tables are not of the same run: run the stages again."
    )


def streams_of_part(part: Part, sorting: Sorting) -> Callable[[Row], str]:
    """The stream of a document of a part by its doc_id, source and cluster, asked for in the order of the part."""
    buckets = buckets_of_part(part, sorting.config) if sorting.config.bucket_names else None

    def stream(row: Row) -> str:
        bucket = find_bucket(buckets, row["doc_id"]) if buckets is not None else None
        return sorting.stream(row["source"], bucket, row["cluster"])

    return stream


def mix_drops(tables: Mapping[str, TableVersion], number: int, sorting: Sorting) -> Iterator[tuple[bytes, Drop | None]]:
    """(doc_id, why the mix leaves it out) of every kept clean document of a part, in order; None = it stays.

    `tables` are those of READS that the run has.
    """
    key = part_key(number)
    folders = {name: table.folder for name, table in tables.items()}
    part = Part(number, folders, {name: table.manifest.run.paths[key] for name, table in tables.items()})
    stream_of = streams_of_part(part, sorting)
    with folders["clean"].open_input(part.paths["clean"]) as stream:
        wanted = ["doc_id", "source", "cluster", "drop_stage"]
        for batch in pq.ParquetFile(stream).iter_batches(batch_size=ROWS_AT_ONCE, columns=wanted):
            for row in batch.to_pylist():
                if row["drop_stage"] is None:
                    yield row["doc_id"], sorting.drop(stream_of(row), row["doc_id"])
