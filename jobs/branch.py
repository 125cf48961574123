"""Branches: other datasets made by changed recipes of a run, in folders below it; only what changes is computed.

A branch stands on the run's tables as far as their fingerprints agree, and on its tokenizer in any case: losses per
token of two tokenizers could not be compared.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.recipe import recipe_sections
from jobs.session import SparkConfig, open_session
from pipeline.build import TableJob
from pipeline.run import prepare, run_steps, settings_of
from pipeline.stages import STEPS
from pipeline.tokenizer import TO_TRAIN
from pipeline.whatif.without import leave_out
from schemas.ablation import ABLATIONS
from schemas.config import Recipe, load_recipe
from schemas.errors import ConfigError
from schemas.ids import digest_of
from schemas.manifest import RUN_NAME, Manifest, Table, open_table, read_run
from schemas.storage import Store
from schemas.tokens import Dataset
from schemas.versions import attach
from train.config.settings import SECTIONS
from train.data.unseen import trained_on

NAME = re.compile(r"[\w.+=-]{1,80}")


@dataclass(frozen=True)
class Change:
    """What is changed for a branch."""

    words: tuple[str, ...]
    """Rules left out."""
    data: tuple[str, ...]
    """Overrides of the recipe of the other dataset."""
    training: tuple[str, ...]
    """Overrides of how both datasets' proxies are trained."""

    @property
    def name(self) -> str:
        """The name of its folder, by what makes the dataset another one."""
        name = "+".join(sorted({*self.words, *self.data}))
        if NAME.fullmatch(name):
            return name
        return f"{'+'.join(self.words) or 'set'}"[:60] + f"-{digest_of([sorted(self.words), sorted(self.data)])[:8]}"


def change_of(words: Sequence[str], overrides: Sequence[str]) -> Change:
    """The change that a command names. Raises ConfigError if it is none, or changes what has to stay."""
    sections = {text: text.partition("=")[0].strip().partition(".")[0] for text in overrides}
    if fixed := [text for text, section in sections.items() if section == "tokenizer"]:
        raise ConfigError(f"--set {fixed[0]}: promised one tokenizer for both datasets, found a change of it; leave it")
    if fixed := [text for text in overrides if text.partition("=")[0].strip() == "train.seed"]:
        raise ConfigError(f"--set {fixed[0]}: promised seeds that vary from 1 on, found one; give --seeds")
    data = tuple(text for text, section in sections.items() if section not in SECTIONS)
    if not words and not data:
        raise ConfigError("ablate: promised --without SECTION.RULE or --set of a data setting, found neither")
    return Change(tuple(words), data, tuple(text for text in overrides if text not in data))


def branch_folder(run: Store, change: Change) -> Store:
    """Where the branch of a change lies."""
    return run.child(f"{ABLATIONS}/{change.name}")


def branch_recipe(run: Store, change: Change) -> Recipe:
    """The recipe of a run with a change, and with the run's tokenizer as it stands. Raises ConfigError."""
    where = f"{run.uri}/{RUN_NAME}"
    values = leave_out(read_run(run).recipe, change.words, lambda raw: load_recipe(raw, [], recipe_sections(), where))
    section = values.get("tokenizer", {})
    if section.get("model") is None:
        folder, manifest = open_table(run, "tokenizer")
        given = {key: value for key, value in section.items() if key not in TO_TRAIN}
        values["tokenizer"] = given | {"model": folder.path(manifest.run.paths["model"])}
    return load_recipe(values, change.data, recipe_sections(), where)


def steps_of(before: Recipe, after: Recipe) -> list[tuple[str, bool]]:
    """Every step that the second recipe wants, and whether it has to be made again for it."""
    made: set[str] = set()
    found = []
    for step in (step for step in STEPS if step.wanted(after)):
        again = not step.wanted(before) or not made.isdisjoint(step.reads) or _settings_differ(step, before, after)
        made |= set(step.writes) if again else set()
        found.append((step.name, again))
    return found


def _settings_differ(step: TableJob, before: Recipe, after: Recipe) -> bool:
    def settings(recipe: Recipe, name: str) -> tuple[object, object]:
        places = recipe[name].model_dump(mode="json", include=recipe[name].fields_of("location"))
        return settings_of(recipe[name], step), places

    return any(settings(before, stage.name) != settings(after, stage.name) for stage in step.stages)


def make_branch(run: Store, folder: Store, recipe: Recipe) -> None:
    """Bring a branch up to its dataset; steps that stand in it, or in the run, are not made again."""
    prepared = prepare(recipe, None)  # whatever is wrong is found before Spark starts
    if not folder.exists(RUN_NAME):
        attach(folder, run)
    config = recipe.section("spark", SparkConfig)
    spark = open_session(config, "penstock ablate")
    try:
        run_steps(spark, prepared, folder, config.partitions)
    finally:
        spark.stop()


def same_dataset(one: Manifest, other: Manifest) -> bool:
    """Whether two datasets are the same files, whatever settings led to them."""
    files = [[(entry.key, entry.sha256) for entry in manifest.content.files] for manifest in (one, other)]
    return files[0] == files[1]


def copies_trained_on(runs: Sequence[Store], datasets: Sequence[Dataset], held: Iterable[bytes]) -> set[bytes]:
    """Those of some held-out documents that have a copy, by the clusters of one run, which another one trains on.

    Both runs' clusters are looked through, two narrow columns at a time; where they are the same table and are cut by
    the same share and seed, no cluster can stand on both sides, and nothing is read.
    """
    tables = [Table(*open_table(run, "dedup")) for run in runs]
    clusters = [open_table(run, "clusters")[1].digest for run in runs]
    cuts = [{key: _tokens(dataset).get(key) for key in ("heldout_share", "seed")} for dataset in datasets]
    if clusters[0] == clusters[1] and cuts[0] == cuts[1]:
        return set()
    wanted, found = pa.array(sorted(set(held)), pa.binary(16)), set[bytes]()
    for table in tables:
        asked = _rows(table, "doc_id", wanted)
        members = _rows(table, "cluster", pa.array(sorted({*asked.values()}), pa.binary(16)))
        trained = set[bytes]().union(*(trained_on(members, dataset) for dataset in datasets))
        touched = {members[identifier] for identifier in trained}
        found |= {identifier for identifier, cluster in asked.items() if cluster in touched}
    return found


def _tokens(dataset: Dataset) -> Mapping[str, object]:
    settings: Mapping[str, object] = dataset.manifest.content.config.get("tokens", {})
    return settings


def _rows(table: Table, column: str, values: pa.Array) -> dict[bytes, bytes]:
    """Cluster by doc_id of the rows of `dedup` that have one of these values."""
    found: dict[bytes, bytes] = {}
    for path in table.manifest.paths_of():
        with table.folder.open_input(path) as stream:
            for batch in pq.ParquetFile(stream).iter_batches(columns=["doc_id", "cluster"]):
                ids, clusters = (batch.column(name).cast(pa.binary(16)) for name in ("doc_id", "cluster"))
                chosen = pc.is_in(ids if column == "doc_id" else clusters, value_set=values)
                found.update(zip(ids.filter(chosen).to_pylist(), clusters.filter(chosen).to_pylist(), strict=True))
    return found
