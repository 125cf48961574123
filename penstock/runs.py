"""A run from Python: its tables as rows that can be filtered, its dataset, and the questions that can be asked of it.

Rows are read part by part, and only what a query selects stays in memory. Ids are 32 hexadecimal digits, as the command
line prints them, so that rows can be written as JSON.
"""

import argparse
import copyreg
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.inspect.show import (
    columns_of_run,
    expand_meta,
    judged_part,
    meta_columns,
    mix_of,
    parse_where,
    where_columns,
)
from schemas.config import suggest_name
from schemas.errors import ConfigError
from schemas.manifest import RUN_NAME, Counts, TableVersion, current_tables, read_run
from schemas.older_tables import read_columns
from schemas.overrides import Unset, toml_text
from schemas.storage import Store
from schemas.tables import TABLES, TEXT, with_hex_ids
from schemas.tokens import HELDOUT, TRAIN, Dataset, open_dataset
from schemas.versions import address_to_read
from schemas.versions import open_run_to_read as open_folder
from train.plan.plan import read_plan

if TYPE_CHECKING:
    import pandas

    from pipeline.inspect.whatif import Prediction
    from train.export.torch_dataset import SampleDataset
    from train.trace.answer import DocumentsAnswer, StepAnswer

TEXT_COLUMNS = ("text", "title")
"""Columns of the table `text` that a query of `documents` may select. They are raw: they may hold personal data."""


@dataclass(frozen=True)
class Rows:
    """Rows of a table, read when they are asked for. `where`, `select` and `limit` return new rows."""

    schema: pa.Schema
    """Columns that conditions and `select` may name. The metadata of a field has its meaning and unit."""
    read: Callable[[tuple[str, ...]], Iterator[pa.Table]]
    """Function that yields the parts of the table with at least the named columns."""
    selected: tuple[str, ...]
    """Columns of the result."""
    condition: pc.Expression | None = None
    most: int | None = None
    """Maximum number of rows; None = all."""
    compared: frozenset[str] = frozenset()
    """Columns that the condition names."""

    def where(self, condition: str) -> "Rows":
        """Return the rows that also meet a condition, such as `language = 'de' and gopher_num_words < 60`.

        The conditions are those of `penstock show --where`. Raises ConfigError if the condition cannot be parsed.
        """
        parsed = parse_where(condition, self.schema)
        both = parsed if self.condition is None else self.condition & parsed
        return replace(self, condition=both, compared=self.compared | where_columns(condition, self.schema))

    def select(self, *names: str) -> "Rows":
        """Return the rows with these columns only. Raises ConfigError if there is no such column."""
        if wrong := [f"{name!r}{suggest_name(name, self.schema.names)}" for name in names if name not in self.names]:
            raise ConfigError(f"select: expected names of columns, got {', '.join(wrong)}. Correct the name.")
        return replace(self, selected=tuple(dict.fromkeys(names)))

    def limit(self, number: int) -> "Rows":
        """Return the first `number` rows, in the order of the table. Raises ConfigError if it is negative."""
        if number < 0:
            raise ConfigError(f"limit: expected a number of rows of at least 0, got {number}. Correct it.")
        return replace(self, most=number if self.most is None else min(number, self.most))

    @property
    def names(self) -> list[str]:
        """Names of the columns that conditions and `select` may name."""
        return list(self.schema.names)

    def batches(self) -> Iterator[pa.Table]:
        """Yield the rows part by part. A part without such rows yields nothing."""
        left = self.most
        for part in self.read((*self.selected, *sorted(self.compared.difference(self.selected)))):
            if left is not None and left <= 0:
                return
            rows = part if self.condition is None else part.filter(self.condition)
            rows = rows.slice(0, left).select(list(self.selected))
            if left is not None:
                left -= len(rows)
            if len(rows):
                yield with_hex_ids(rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each row as a dict."""
        for batch in self.batches():
            yield from batch.to_pylist()

    def count(self) -> int:
        """Return the number of rows."""
        return sum(len(batch) for batch in replace(self, selected=self.selected[:1]).batches())

    def to_arrow(self) -> pa.Table:
        """Return the rows as one Arrow table."""
        empty = with_hex_ids(pa.schema([self.schema.field(name) for name in self.selected]).empty_table())
        return pa.concat_tables([empty, *self.batches()], promote_options="permissive")

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the rows as a pandas DataFrame."""
        return self.to_arrow().to_pandas()


@dataclass(frozen=True)
class Tokens:
    """The token dataset of a run."""

    run: Store
    """Folder of the run."""
    dataset: Dataset

    @property
    def digest(self) -> str:
        """Digest of the dataset: checkpoints name the dataset that they were trained on by it."""
        return self.dataset.digest

    def num_tokens(self, split: str = TRAIN) -> dict[str, int]:
        """Return the number of tokens by source. `split`: "train" or "heldout"; raises ConfigError for another one."""
        if split not in (TRAIN, HELDOUT):
            raise ConfigError(f"num_tokens: expected the split {TRAIN!r} or {HELDOUT!r}, got {split!r}. Correct it.")
        return self.dataset.num_tokens(split)

    def torch_dataset(self, stage: int = 0) -> "SampleDataset":
        """Return the samples of the run's plan as a `torch.utils.data.Dataset`, in the order of training.

        `stage`: number of the training stage, from 0. Needs torch. Raises ContractError if the run has no plan, and
        ConfigError if the plan has no such stage.
        """
        plan = read_plan(self.run, self.dataset)  # a missing plan is reported here, and not by a worker of a DataLoader
        if stage not in range(len(plan.stages)):
            last = len(plan.stages) - 1
            raise ConfigError(f"torch_dataset: expected a stage from 0 to {last} of the plan, got {stage}. Correct it.")
        return open_samples(address_to_read(self.run), stage)


@dataclass(frozen=True)
class WhatIf:
    """The documents that a run would keep with other settings. `str()` gives the text that `penstock whatif` prints."""

    prediction: "Prediction"
    changed: Mapping[str, tuple[Any, Any]]
    """Setting → (value in the run, value tried)."""
    settings: Sequence[str] = ()
    """Lines about the changed settings: the limits in force before and after, and the limits that they replace."""

    @property
    def before(self) -> int:
        """Number of documents that the run keeps."""
        return sum(cell.documents for cell in self.prediction.cells if cell.before == "kept")

    @property
    def after(self) -> int:
        """Number of documents that it would keep."""
        return sum(cell.documents for cell in self.prediction.cells if cell.after == "kept")

    def to_json(self) -> dict[str, Any]:
        """Return the whole prediction as a JSON value, with the curve of every limit."""
        from pipeline.inspect.whatif import to_json

        return to_json(self.prediction, self.changed, self.settings)

    def __str__(self) -> str:
        from pipeline.inspect.whatif import format_prediction

        return format_prediction(self.prediction, self.changed, self.settings)


class Run:
    """A run folder: its tables, its dataset, its training run, and the questions that can be asked of them."""

    def __init__(self, store: Store):
        self.store = store

    def __repr__(self) -> str:
        return f"<penstock run {self.uri}: {', '.join(self.tables) or 'no tables yet'}>"

    @property
    def uri(self) -> str:
        """Path or URI of the run folder."""
        return self.store.uri

    @property
    def recipe(self) -> dict[str, Any]:
        """The values that the recipe of the run sets, by section."""
        return read_run(self.store).recipe

    @property
    def tables(self) -> dict[str, TableVersion]:
        """The current tables by name, each with its folder and its manifest (digest, files, counts, settings)."""
        return current_tables(self.store)

    def counts(self, table: str) -> Counts:
        """Return the row counts of the step that wrote a table: rows in, rows kept, and dropped rows by reason."""
        return self._version(table).manifest.content.counts

    @property
    def documents(self) -> Rows:
        """Every record, kept or dropped, with its final verdict, its signals and its provenance.

        The columns `text` and `title` are there too if they are selected. They are raw: they may hold personal data.
        """
        tables = self.tables
        if "documents" not in tables:
            self._version("documents")
        searchable = columns_of_run(self.store)
        text = [TEXT.field(name) for name in TEXT_COLUMNS if "text" in tables]
        schema = pa.schema([*searchable, *(field for field in text if field.name not in searchable.names)])
        return Rows(schema, self._judged, tuple(searchable.names))

    def table(self, name: str) -> Rows:
        """Return the rows of one stored table, such as `clean`. Raises ConfigError if the run has no such table."""
        version = self._version(name)
        paths = [path for path in version.manifest.paths_of() if path.endswith(".parquet")]
        if not paths:
            raise ConfigError(f"{self.uri}: expected a table of rows, got {name!r}. Name another table.")
        with version.folder.open_input(paths[0]) as stream:
            schema = pq.read_schema(stream)

        def read(_: tuple[str, ...]) -> Iterator[pa.Table]:
            for path in paths:
                with version.folder.open_input(path) as stream:
                    yield pq.read_table(stream)

        return Rows(schema, read, tuple(schema.names))

    @property
    def tokens(self) -> Tokens:
        """The token dataset. Raises ContractError if the run has none yet."""
        return Tokens(self.store, open_dataset(self.store))

    def whatif(self, settings: Mapping[str, Any]) -> WhatIf:
        """Return which documents the run would keep with other settings, such as {"quality.min_words": 30}.

        A value of None removes a setting, so that its default applies. Reads stored measurements only and changes
        nothing. Starts a Spark session, unless there is one. Raises ConfigError if a setting changes what is measured,
        because that cannot be predicted.
        """
        from jobs.verbs.inspect import predict_run

        return WhatIf(*predict_run(self.store, overrides(settings)))

    def trace(
        self,
        *,
        step: int | None = None,
        url: str | None = None,
        doc: str | None = None,
        domain: str | None = None,
        contains: str | None = None,
        text: bool = False,
    ) -> "StepAnswer | DocumentsAnswer":
        """Return the documents of a training step, or the steps and checkpoints that saw documents.

        Give one of `step`, from 1; `url`; `doc`, the id of a document; `domain`, a host; or `contains`, a string that
        the text contains. `text`: add the text that the model read. Raises ConfigError for other combinations, and
        ContractError if the run has no plan.
        """
        from train.trace.answer import AnswerOptions, RowSelection, TraceAnswers

        named = {"step": step, "url": url, "doc": doc, "domain": domain, "contains": contains}
        given = {name: value for name, value in named.items() if value is not None}
        if len(given) != 1:
            raise ConfigError(
                f"trace: expected one of {', '.join(named)}, got {', '.join(given) or 'none of them'}. Give one."
            )
        answers = TraceAnswers(self.store, AnswerOptions(text=text))
        if step is not None:
            return answers.step(step, RowSelection())
        if url is not None:
            return answers.url(url)
        if doc is not None:
            return answers.document(doc)
        return answers.domain(domain, None) if domain is not None else answers.containing(contains or "", None)

    def export(
        self,
        out: "str | os.PathLike[str]",
        format: str = "parquet",
        signals: Sequence[str] = (),
        where: str | None = None,
        shard_size: str | None = None,
    ) -> None:
        """Write the clean text to a new folder, as `penstock export` does.

        `format`: "parquet", "jsonl" or "huggingface-dataset". `signals`: measurements to add as fields; `["all"]` adds
        every one. `where`: only documents that meet this condition. `shard_size`: text of a shard, such as "256MB".
        Starts a Spark session, unless there is one. Raises ConfigError if the folder is not empty, or
        if there is no such format.
        """
        from jobs.verbs.export import OPTIONS, export_command

        options = dict.fromkeys(OPTIONS) | {"where": where, "shard_size": shard_size}
        options |= {"signals": ",".join(signals) or None, "verbose": False, "trust_run": False}
        export_command(
            argparse.Namespace(run=address_to_read(self.store), out=os.fspath(out), format=format, **options)
        )

    def report(self) -> str:
        """Write the report of the run as one HTML page, and return its path or URI."""
        from pipeline.report.page import write_report

        return write_report(self.store, None)

    def _version(self, name: str) -> TableVersion:
        tables = self.tables
        if name not in tables:
            close = (
                suggest_name(name, TABLES) if name not in TABLES else f" (this run has: {', '.join(tables) or 'none'})"
            )
            raise ConfigError(f"{self.uri}: expected a table of the run, got {name!r}{close}. Run `penstock run`.")
        return tables[name]

    @cached_property
    def _searchable(self) -> frozenset[str]:
        return frozenset(columns_of_run(self.store).names)

    def _judged(self, selected: tuple[str, ...]) -> Iterator[pa.Table]:
        """Yield the parts of `documents` with final verdicts; with the raw text if it is selected."""
        tables = self.tables
        sorting = mix_of(self.store, tables)
        wanted = [name for name in selected if name in TEXT_COLUMNS and name not in self._searchable]
        texts = tables["text"].manifest.paths_of() if wanted else []
        meta = meta_columns(tables["documents"])
        for number in range(len(tables["documents"].manifest.content.files)):
            part = expand_meta(judged_part(tables, number, sorting), meta)
            if wanted:  # both tables have the same rows in the same order
                with tables["text"].folder.open_input(texts[number]) as stream:
                    text = read_columns(pq.ParquetFile(stream), "text", wanted)
                for name in wanted:
                    part = part.append_column(name, text.column(name))
            yield part


def open_run(address: "str | os.PathLike[str]") -> Run:
    """Open a run folder: a local path, s3://, gs://, abfs:// or hdfs://, or `RUN@<digest>` for an earlier version.

    Raises ConfigError if the folder is not a run.
    """
    address = os.fspath(address)
    store = open_folder(address)
    if not store.exists(RUN_NAME):
        raise ConfigError(
            f"{address}: expected a run folder, got a folder without {RUN_NAME}. Make one with `penstock run RECIPE "
            "--out FOLDER`."
        )
    return Run(store)


def open_samples(run: str, stage: int = 0) -> "SampleDataset":
    """Return the samples of a stage of a run's plan. A pickle of them names this function.

    A new process that loads the pickle, such as a worker of a DataLoader, therefore imports penstock first, and so
    finds its packages whatever files the folder of the script has.
    """
    from train.export.torch_dataset import SampleDataset

    copyreg.pickle(SampleDataset, _reduce_samples)
    return SampleDataset(run, stage)


def _reduce_samples(samples: "SampleDataset") -> tuple[Callable[[str, int], "SampleDataset"], tuple[str, int]]:
    return open_samples, (samples.run, samples.stage)


def run_recipe(
    recipe: "str | os.PathLike[str]",
    out: "str | os.PathLike[str]",
    settings: Mapping[str, Any] | None = None,
    until: str | None = None,
    reuse: "str | os.PathLike[str] | None" = None,
    rebuild: Sequence[str] = (),
) -> Run:
    """Run the data steps of a recipe on Spark, plan the training run, and return the run.

    `recipe`: path of a TOML file, or the name of a shipped recipe, such as "web". `out`: the run folder; complete steps
    are skipped. `settings`: values that override the recipe, such as {"source.paths": ["crawl/*.warc.gz"]}; a value of
    None removes a setting. `until`: the last step to run; None = all, and the plan. `reuse`: another run, whose tables
    are used where settings and inputs are the same. `rebuild`: large steps that are built again although only the
    version of penstock has changed. Raises ConfigError, before Spark starts, if a setting is wrong, an input is
    missing, or the run would replace the dataset of a trained model.
    """
    from jobs.verbs.run import run_command, stage_command

    arguments = argparse.Namespace(
        recipe=os.fspath(recipe),
        out=os.fspath(out),
        overrides=overrides(settings or {}),
        reuse=None if reuse is None else os.fspath(reuse),
        rebuild=rebuild,
        verbose=False,
        dry_run=False,
        like=[],
        core_hour_usd=None,
        gb_month_usd=None,
        step=until,
    )
    (run_command if until is None else stage_command)(arguments)
    return open_run(out)


def demo_crawl(out: str, pages: int = 300, seed: int = 1) -> int:
    """Write a small crawl to try a recipe on, and return its number of pages.

    The pages are made of the documentation of the installed Python packages. `truth.jsonl` beside the WARC files lists
    the planted duplicates and defects.
    """
    from pipeline.demo_crawl.build import build_demo_crawl

    return build_demo_crawl(Path(out), pages, seed).num_pages


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as values of `--set`, or of `--unset` for a value of None.

    Raises ConfigError for a value that TOML cannot hold.
    """
    return [Unset(name) if value is None else f"{name}={to_toml(name, value)}" for name, value in settings.items()]


def to_toml(name: str, value: Any) -> str:
    """Return a value as TOML in one line. Raises ConfigError for a value that TOML cannot hold."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        pairs = (f"{toml_text(str(key))} = {to_toml(name, item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(to_toml(name, item) for item in value)}]"
    if isinstance(value, str | os.PathLike):
        return toml_text(str(os.fspath(value)))
    if isinstance(value, int | float):
        return json.dumps(value)  # numbers of NumPy too
    raise ConfigError(
        f"{name}: expected a number, text, list or dictionary, got {value!r}. Leave a setting out to keep its value."
    )
