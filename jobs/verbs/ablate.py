"""`penstock ablate`: the effect of a filter on the loss, from pairs of proxy runs with and without it.

A branch is a dataset that a changed recipe of the run makes, in a subfolder of the run. It uses those tables of the run
that the change does not affect, so only the other tables are computed. It always uses the tokenizer of the run, because
losses per token of two tokenizers could not be compared. The proxy runs of both datasets are measured on the same
held-out text. The differences of the losses, one for each seed, give a confidence interval.
"""

import argparse
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jobs.arguments import Command, add_run, add_trust, add_verbose, number, whole
from jobs.recipe import check_addresses, check_functions, recipe_sections, stored_recipe, stored_sections, warn_of_spark
from jobs.spark_session import SparkConfig, spark_session
from jobs.verbs.proxies import (
    Pair,
    ProxySize,
    check_heldout,
    check_planned,
    check_settings,
    default_size,
    describe_default_size,
    evaluate_pairs,
    plan_pairs,
    proxy_settings,
    train_pairs,
)
from pipeline.engine.step import Step
from pipeline.inspect.diff import KEPT, Difference, compare_runs, open_compared_run
from pipeline.inspect.without_rules import leave_out_rules
from pipeline.prepare import prepare, run_folders, sections_of_stage, settings_of
from pipeline.run import run_locked_steps
from pipeline.stages import steps_for
from pipeline.tokens.tokenizer import TRAIN_SETTINGS
from schemas.ablation import (
    ABLATIONS,
    RESULT_NAME,
    WITH,
    WITHOUT,
    Ablation,
    AblationSide,
    Comparison,
    DifferenceInterval,
    ProxySettings,
    VerdictChange,
)
from schemas.config import Recipe
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json, digest_of
from schemas.locks import lock_tables
from schemas.manifest import RUN_NAME, Manifest, open_table, read_run
from schemas.overrides import add_override_options, load_recipe
from schemas.paths import check_own_folders
from schemas.storage import Store
from schemas.text import format_duration, text_table
from schemas.tokens import Dataset, open_dataset
from schemas.versions import attach_run
from train.config.settings import SECTIONS
from train.data.heldout import heldout_documents, trained_copies, trained_documents
from train.data.order import tokens_by_source
from train.eval.paired import SHARE, Losses, compare_sides, describe_heldout_set, summarize_comparisons

GROUP = "training"
VERBS = {
    "ablate": "Measure what rules do to a model, by pairs of proxy runs. Proxy runs with and without the rules are "
    "trained, and their held-out losses are compared.",
}

NAME = re.compile(r"[\w.+=-]{1,80}")


@dataclass(frozen=True)
class Change:
    """The rules that an ablation removes, and the settings that it overrides."""

    words: tuple[str, ...]
    """Rules that are removed, as `section.rule`."""
    data: tuple[str, ...]
    """Overrides of data settings, for the branch only."""
    training: tuple[str, ...]
    """Overrides of training settings, for the proxy runs of both datasets."""

    @property
    def name(self) -> str:
        """The name of the branch folder, made of the removed rules and the overrides of data settings."""
        name = "+".join(sorted({*self.words, *self.data}))
        if NAME.fullmatch(name):
            return name
        return f"{'+'.join(self.words) or 'set'}"[:60] + f"-{digest_of([sorted(self.words), sorted(self.data)])[:8]}"


def change_of(words: Sequence[str], overrides: Sequence[str]) -> Change:
    """Return the rules and settings that `--without` and `--set` name.

    Raises ConfigError if none of them changes data, or if `--set` names a setting that an ablation cannot override.
    """
    sections = {text: text.partition("=")[0].strip().partition(".")[0] for text in overrides}
    if fixed := [text for text, section in sections.items() if section == "tokenizer"]:
        raise ConfigError(
            f"--set {fixed[0]}: expected one tokenizer for both datasets, got an override of a tokenizer setting. "
            "Remove this override."
        )
    named = {text.partition("=")[0].strip(): text for text in overrides}
    if "train.seed" in named:
        raise ConfigError(
            f"--set {named['train.seed']}: expected no override of the seed, which ablate chooses, got one. Remove "
            "this override, and set the number of seeds with --seeds."
        )
    if "guard.patience" in named:
        raise ConfigError(
            f"--set {named['guard.patience']}: expected proxy runs that all end after the same step, got early "
            "stopping. Remove this override."
        )
    data = tuple(text for text, section in sections.items() if section not in SECTIONS)
    if not words and not data:
        raise ConfigError("ablate: expected --without SECTION.RULE or --set of a data setting, got neither. Add one.")
    return Change(tuple(words), data, tuple(text for text in overrides if text not in data))


def branch_folder(run: Store, change: Change) -> Store:
    """Return the subfolder of a run for the ablation `change`."""
    return run.child(f"{ABLATIONS}/{change.name}")


def branch_recipe(run: Store, change: Change, trust: bool = True) -> Recipe:
    """Return the recipe of a run with a change applied, and with the tokenizer of the run.

    `trust`: see `stored_sections`. Raises ConfigError if a rule or setting of the change is wrong.
    """
    where = f"{run.uri}/{RUN_NAME}"
    values = leave_out_rules(
        stored_sections(run, trust), change.words, lambda raw: load_recipe(raw, [], recipe_sections(), where)
    )
    section = values.get("tokenizer", {})
    if section.get("model") is None:
        folder, manifest = open_table(run, "tokenizer")
        kept = {key: value for key, value in section.items() if key not in TRAIN_SETTINGS}
        values["tokenizer"] = kept | {"model": folder.path(manifest.paths["model"])}
    return load_recipe(values, change.data, recipe_sections(), where)


def steps_of(before: Recipe, after: Recipe) -> list[tuple[str, bool]]:
    """Return (name, again) for each step of the recipe `after`.

    `again` is False if the step can reuse the tables of a run with the recipe `before`.
    """
    made: set[str] = set()
    steps = []
    earlier = {step.name: step for step in steps_for(before)}
    for step in (step for step in steps_for(after) if step.is_used(after)):
        again = not step.is_used(before) or not made.isdisjoint(step.reads)
        again = again or _settings_differ((earlier[step.name], before), (step, after))
        made |= set(step.writes) if again else set()
        steps.append((step.name, again))
    return steps


def _settings_differ(before: tuple[Step, Recipe], after: tuple[Step, Recipe]) -> bool:
    def settings(step: Step, recipe: Recipe) -> list[tuple[object, ...]]:
        sections = {
            key: section for stage in step.stages for key, section in sections_of_stage(recipe, stage.name).items()
        }
        places = [each.model_dump(mode="json", include=each.fields_of("location")) for each in sections.values()]
        own = [settings_of(section, step) for section in sections.values()]
        return list(zip(sections, own, places, strict=True))

    return settings(*before) != settings(*after)


def make_branch(run: Store, folder: Store, recipe: Recipe, verbose: bool = False) -> None:
    """Compute the dataset of a recipe in `folder`, and reuse the tables of `run` that do not change.

    `verbose`: print the messages of Spark.
    """
    check_own_folders(run, ABLATIONS)
    prepared = prepare(recipe, None)  # every wrong setting is reported before Spark starts
    if not folder.exists(RUN_NAME):
        attach_run(folder, run)
    config = recipe.section("spark", SparkConfig)
    session = spark_session(config, "penstock ablate", verbose, prepared.jvm_bytes)
    with lock_tables(folder, "penstock ablate"), session as spark:
        run_locked_steps(spark, prepared, folder, config.partitions)


def same_dataset(first: Manifest, second: Manifest) -> bool:
    """Return True if two datasets consist of the same files."""
    files = [[(entry.key, entry.sha256) for entry in manifest.content.files] for manifest in (first, second)]
    return files[0] == files[1]


def check_clusters(run: Store) -> None:
    """Raise ConfigError if a run lacks the table `clusters` or `dedup`, by which copies of documents are found."""
    tables = read_run(run).tables
    if lacking := [name for name in ("clusters", "dedup") if name not in tables]:
        owners = [owner.uri for owner in run_folders(run) if owner.uri != run.uri]
        fix = f"Ablate {owners[0]}, whose dataset this run uses" if owners else "Run its recipe with `penstock run`"
        raise ConfigError(f"{run.uri}: expected tables clusters and dedup, got no {' and no '.join(lacking)}. {fix}.")


# The result of an ablation, from the losses of the proxy runs, and its text.

SHOWN = 12
"""Maximum number of changes of verdicts that are printed."""


def make_result(
    change: Change,
    runs: Mapping[str, Store],
    pairs: Sequence[Pair],
    measured: tuple[Sequence[str], Losses],
    seconds: Mapping[str, float],
) -> Ablation:
    """Return the result of an ablation from the losses of its proxy runs.

    `runs`: the two runs, by `with` and `without`. `measured`: the names of the held-out texts, and the losses by
    (`with` or `without`, seed). `seconds`: durations [s] by name.
    """
    a, b = (open_compared_run(runs[side]) for side in (WITH, WITHOUT))
    difference = compare_runs(a, b, 0)
    on, losses = measured
    comparisons = compare_sides(on, [pair.seed for pair in pairs], losses)
    return Ablation(
        name=change.name,
        left_out=change.words,
        settings=difference.settings,
        with_rules=_side(open_dataset(runs[WITH]), difference.kept[0]),
        without=_side(open_dataset(runs[WITHOUT]), difference.kept[1]),
        documents=tuple(_moved(difference)),
        tokens=difference.tokens,
        proxies=_proxies(pairs),
        share=SHARE,
        comparisons=tuple(comparisons),
        measurements=tuple(measurement for measurements in losses.values() for measurement in measurements),
        answer=summarize_comparisons(comparisons),
        seconds={name: round(value, 1) for name, value in seconds.items()},
    )


def _side(dataset: Dataset, documents: int) -> AblationSide:
    return AblationSide(dataset=dataset.digest, documents=documents, tokens=sum(dataset.num_tokens().values()))


def _moved(difference: Difference) -> Iterator[VerdictChange]:
    ordered = sorted(difference.documents.items(), key=lambda item: (-item[1], item[0]))
    for (source, old, new), count in ordered:
        yield VerdictChange(source=source, with_rules=old, without=new, documents=count)


def _proxies(pairs: Sequence[Pair]) -> ProxySettings:
    plans = {side: proxy.plan for side, proxy in pairs[0].proxies.items()}
    plan = plans[WITH]
    passes = {}
    for side, proxy in pairs[0].proxies.items():
        drawn = sum(tokens_by_source(plans[side].stages).values())
        passes[side] = round(drawn / sum(open_dataset(proxy.run).num_tokens().values()), 4)
    return ProxySettings(
        params=plan.num_params,
        tokens=plan.num_tokens,
        steps=plan.steps,
        seq_len=plan.seq_len,
        global_batch=plan.global_batch,
        learning_rate=plan.learning_rate,
        seeds=tuple(pair.seed for pair in pairs),
        epochs=passes,
    )


def describe_ablation(result: Ablation) -> str:
    """Return the result of an ablation as text to print."""
    proxies, ours, theirs = result.proxies, result.with_rules, result.without
    lines = [
        "",
        f"without {', '.join(result.left_out) or 'the change of --set'}: {theirs.documents:,} documents, "
        f"{theirs.tokens:,} training tokens",
        f"with    {' ' * len(', '.join(result.left_out) or 'the change of --set')}: {ours.documents:,} documents, "
        f"{ours.tokens:,} training tokens",
        *_verdict_changes(result.documents),
        "",
        f"{len(proxies.seeds)} pairs of proxy runs: {proxies.params:,} parameters, {proxies.tokens:,} tokens each "
        f"({proxies.steps:,} steps of {proxies.global_batch} x {proxies.seq_len}; "
        + ", ".join(f"{passes:.2f} epochs {side}" for side, passes in proxies.epochs.items())
        + ")",
        *_left_out(result),
        "",
        *_table(result.comparisons, result.share),
        "",
        result.answer,
        "(" + ", ".join(f"{name} {format_duration(value)}" for name, value in result.seconds.items()) + ")",
    ]
    return "\n".join(lines)


def _verdict_changes(moved: Sequence[VerdictChange]) -> Iterator[str]:
    """Yield a line for each of the first SHOWN changes of verdict, and one line for the rest."""
    for change in moved[:SHOWN]:
        verdicts = f"{_verdict(change.with_rules)} → {_verdict(change.without)}"
        yield f"  {change.documents:>7,}  {change.source}  {verdicts}"
    if rest := moved[SHOWN:]:
        yield f"  {sum(change.documents for change in rest):>7,}  in {len(rest)} more changes"


def _verdict(rule: str) -> str:
    return rule if rule == KEPT else f"dropped by {rule}"


def _left_out(result: Ablation) -> Iterator[str]:
    """Yield a line for each held-out set from which documents were left out."""
    names = dict.fromkeys(comparison.on for comparison in result.comparisons)
    for name, first in zip(names, result.measurements, strict=False):  # of the first proxy run, on every set
        if first.left_out:
            yield (
                f"{describe_heldout_set(name)}: {first.left_out:,} of {first.documents:,} documents left out, as a "
                "proxy run was trained on them or on a copy"
            )


def _table(comparisons: Sequence[Comparison], share: float) -> list[str]:
    """Return the lines of a table that has one comparison of losses per line."""
    rows = [("held out", "source", "with", "without", f"difference [{share:.0%}], nats/token", "bits/byte", "")]
    for row in comparisons:
        means = [sum(pair[side] for pair in row.losses) / len(row.losses) for side in (0, 1)]
        bits = "–" if row.bits is None else format_interval(row.bits)
        answer = row.answer.partition(":")[0].partition(" (")[0]
        rows.append(
            (row.on, row.source or "all", f"{means[0]:.4f}", f"{means[1]:.4f}", format_interval(row.nats), bits, answer)
        )
    return text_table(rows)


def format_interval(interval: DifferenceInterval) -> str:
    """Return the mean and the ends of an interval as text, or the mean alone if there is no interval."""
    if interval.low is None or interval.high is None:
        return f"{interval.mean:+.4f}"
    return f"{interval.mean:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


SEQUENCES = 512
"""Default number of held-out rows that are measured of each source."""


def add_ablate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ablate` except the run."""
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="SECTION.RULE",
        help="rule or source.NAME to leave out; may be repeated",
    )
    add_override_options(
        parser, "override a data setting of the branch, or a training setting of the proxy runs of both datasets"
    )
    parser.add_argument("--seeds", type=whole, default=3, help="number of pairs of proxy runs; default 3")
    parser.add_argument("--params", type=number, help=f"parameters of a proxy run; default: {describe_default_size()}")
    parser.add_argument(
        "--tokens", type=whole, help="tokens of a proxy run; default: 20 per parameter, at most one pass"
    )
    parser.add_argument(
        "--on", action="append", default=[], help="another run whose held-out text is measured too; may be repeated"
    )
    parser.add_argument("--sequences", type=whole, default=SEQUENCES, help="held-out rows of each source; default 512")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the steps, the proxy runs and their cost, and run nothing"
    )
    add_verbose(parser)


def ablate_command(arguments: argparse.Namespace) -> int:
    """Train pairs of proxy runs with and without rules of a run, and compare their held-out losses."""
    run = Store(arguments.run)
    if not run.is_local:
        raise ConfigError(
            f"{arguments.run}: expected a run on a local disk, where proxy runs are trained, got an object store. "
            "Copy the run to a disk of this machine."
        )
    for name in ("seeds", "params", "tokens", "sequences"):
        value = getattr(arguments, name)
        if value is not None and not value >= 1:
            raise ConfigError(f"--{name}: expected at least 1, got {value:g}. Give a larger number.")
    change = change_of(arguments.without, arguments.overrides)
    size = ProxySize(arguments.seeds, arguments.params, arguments.tokens, change.training)
    before = stored_recipe(run, change.training, trust=arguments.trust_run)
    check_functions(run, before, "ablate", arguments.trust_run)
    check_addresses(run, before, arguments.overrides, arguments.trust_run)
    warn_of_spark(run, arguments.trust_run)
    after = branch_recipe(run, change, arguments.trust_run)
    check_clusters(run)
    settings = proxy_settings(run, change.training)
    datasets = {"the run": open_dataset(run)} | open_heldout_datasets(arguments.on)
    check_settings(settings, datasets["the run"])
    check_heldout(datasets, settings)
    check_tokenizers(datasets)
    check_planned(run, size)
    if arguments.dry_run:
        print(describe_dry_run(run, change, (before, after), size))
        return 0
    folder = branch_folder(run, change)
    started = time.monotonic()
    make_branch(run, folder, after, arguments.verbose)
    sides = {WITH: open_dataset(run), WITHOUT: open_dataset(folder)}
    if same_dataset(sides[WITH].manifest, sides[WITHOUT].manifest):
        print(f"{change.name}: both datasets have the same files; nothing is trained")
        return 0
    check_tokenizers({"the run": sides[WITH], folder.uri: sides[WITHOUT]})
    check_heldout({change.name: sides[WITHOUT]}, settings)
    ours, theirs = (sum(sides[side].num_tokens().values()) for side in (WITH, WITHOUT))
    print_progress(
        f"dataset    {folder.uri}: {theirs:,} training tokens, {ours:,} with the rules; both use the run's tokenizer"
    )
    seconds = {"dataset": time.monotonic() - started}
    others = {name: Store(name) for name in arguments.on}
    print(
        describe_ablation(
            train_and_compare({WITH: run, WITHOUT: folder} | others, change, size, seconds, arguments.sequences)
        )
    )
    return 0


def train_and_compare(
    runs: Mapping[str, Store], change: Change, size: ProxySize, seconds: dict[str, float], sequences: int
) -> Ablation:
    """Train the pairs of proxy runs, measure their held-out losses, and write and return the result of the ablation.

    `runs` has the keys `with` and `without`, then the names of `--on`. The durations [s] of training and evaluation are
    added to `seconds`.
    """
    sides = {side: runs[side] for side in (WITH, WITHOUT)}
    folder = sides[WITHOUT]
    pairs = plan_pairs(sides, folder.child("proxies"), size)
    copies = copied_documents(runs, pairs[0].proxies[WITH].plan.stages[-1].seq_len, sequences)
    seconds["training"] = train_pairs(pairs, print_progress)
    started = time.monotonic()
    losses = evaluate_pairs(pairs, list(runs.values()), folder, sequences, copies)
    seconds["evaluation"] = time.monotonic() - started
    result = make_result(change, sides, pairs, (list(runs), losses), seconds)
    folder.write_atomic(RESULT_NAME, canonical_json(result.model_dump(mode="json")))
    return result


def copied_documents(runs: Mapping[str, Store], seq_len: int, sequences: int) -> set[bytes]:
    """Return the ids of held-out documents that have a copy in the training text of the run `with` or `without`.

    Raises ContractError if every held-out document of a run, or a copy of it, is in such a training text.
    """
    datasets = {name: open_dataset(run) for name, run in runs.items()}
    sides = [datasets[side] for side in (WITH, WITHOUT)]
    held = {
        name: {document.doc_id for document in heldout_documents(dataset, seq_len, sequences)}
        for name, dataset in datasets.items()
    }
    copies = trained_copies(list(runs.values()), sides, set[bytes]().union(*held.values()))
    for name, documents in held.items():
        others = [side for side in sides if side.digest != datasets[name].digest]
        if documents <= copies.union(*(trained_documents(documents, side) for side in others)):
            raise ContractError(
                f"held-out text of {name!r}: expected at least one document that is in neither training text, not even "
                f"as a copy, got 0 of {len(documents):,}. Raise tokens.heldout_share in the recipe that made this "
                "held-out text, then run that recipe again."
            )
    return copies


def open_heldout_datasets(names: Sequence[str]) -> dict[str, Dataset]:
    """Return the datasets of the runs `names`. Raises ConfigError if a name is `with` or `without`."""
    if taken := [name for name in names if name in (WITH, WITHOUT)]:
        raise ConfigError(
            f"--on {taken[0]}: expected the path of a run, got a name that ablate gives to a dataset of its own. For a "
            f"folder of this name, set --on ./{taken[0]}."
        )
    return {name: open_dataset(Store(name)) for name in names}


def print_progress(line: str) -> None:
    """Print a progress line and flush the output."""
    print(line, flush=True)


def describe_dry_run(run: Store, change: Change, recipes: tuple[Recipe, Recipe], size: ProxySize) -> str:
    """Return the text that `--dry-run` prints: the steps, and the estimated size and cost of the proxy runs."""
    steps = steps_of(*recipes)
    reused, rebuilt = (", ".join(name for name, again in steps if again is state) for state in (False, True))
    params, tokens = default_size(size, sum(open_dataset(run).num_tokens().values()))
    lines = [
        f"ablation   {change.name}, in {branch_folder(run, change).uri}",
        f"reused     {reused or 'nothing'}",
        f"computed   {rebuilt or 'nothing: the dataset would not change'}",
        f"proxy runs {2 * size.seeds}, each about {params:,.0f} parameters and at most {tokens:,.0f} tokens",
        f"cost       about {2 * size.seeds * 6 * params * tokens:.3g} FLOPs (6ND each), and {2 * size.seeds} "
        "evaluations",
    ]
    return "\n".join(lines)


def check_tokenizers(datasets: Mapping[str, Dataset]) -> None:
    """Raise ContractError unless every dataset has the tokenizer contract of the first dataset."""
    first, *others = datasets.items()
    for name, other in others:
        if other.tokenizer != first[1].tokenizer:
            raise ContractError(
                f"{name}: expected the tokenizer contract of {first[0]} (model {first[1].tokenizer.sha256[:12]}), got "
                f"another contract (model {other.tokenizer.sha256[:12]}). Set tokenizer.model to the same file in "
                "both recipes."
            )


COMMANDS = {
    "ablate": Command(
        (add_run, add_ablate_arguments, add_trust),
        ablate_command,
        "ablate run --without quality.fineweb --seeds 3",
    ),
}
