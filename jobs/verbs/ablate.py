"""`penstock ablate`: is a filter worth it? Another dataset without it, pairs of proxies, and an interval."""

import argparse
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jobs.recipe import recipe_sections, stored_recipe
from jobs.spark_session import SparkConfig, open_session
from jobs.verbs.proxies import (
    Pair,
    ProxySize,
    check_heldout,
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
from pipeline.run import prepare, run_folders, run_steps, settings_of
from pipeline.stages import STEPS
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
from schemas.config import Recipe, load_recipe
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json, digest_of
from schemas.manifest import RUN_NAME, Manifest, open_table, read_run
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from schemas.versions import attach_run
from train.config.settings import SECTIONS
from train.data.heldout import heldout_documents, trained_copies, trained_documents
from train.data.order import tokens_by_source
from train.eval.paired import SHARE, Losses, compare_sides, describe_heldout_set, summarize_comparisons

# Branches: other datasets made by changed recipes of a run, in folders below it; only what changes is computed.
#
# A branch stands on the run's tables as far as their fingerprints agree, and on its tokenizer in any case: losses per
# token of two tokenizers could not be compared.

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
        raise ConfigError(f"--set {fixed[0]}: expected one tokenizer for both datasets, got a change of it. Leave it.")
    named = {text.partition("=")[0].strip(): text for text in overrides}
    if "train.seed" in named:
        raise ConfigError(f"--set {named['train.seed']}: expected seeds that vary from 1 on, got one. Give --seeds.")
    if "guard.patience" in named:
        raise ConfigError(
            f"--set {named['guard.patience']}: expected proxies that all end behind the same step, got one that may "
            "end before. Leave it out."
        )
    data = tuple(text for text, section in sections.items() if section not in SECTIONS)
    if not words and not data:
        raise ConfigError("ablate: expected --without SECTION.RULE or --set of a data setting, got neither")
    return Change(tuple(words), data, tuple(text for text in overrides if text not in data))


def branch_folder(run: Store, change: Change) -> Store:
    """Where the branch of a change lies."""
    return run.child(f"{ABLATIONS}/{change.name}")


def branch_recipe(run: Store, change: Change) -> Recipe:
    """The recipe of a run with a change, and with the run's tokenizer as it stands. Raises ConfigError."""
    where = f"{run.uri}/{RUN_NAME}"
    values = leave_out_rules(
        read_run(run).recipe, change.words, lambda raw: load_recipe(raw, [], recipe_sections(), where)
    )
    section = values.get("tokenizer", {})
    if section.get("model") is None:
        folder, manifest = open_table(run, "tokenizer")
        given = {key: value for key, value in section.items() if key not in TRAIN_SETTINGS}
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


def _settings_differ(step: Step, before: Recipe, after: Recipe) -> bool:
    def settings(recipe: Recipe, name: str) -> tuple[object, object]:
        places = recipe[name].model_dump(mode="json", include=recipe[name].fields_of("location"))
        return settings_of(recipe[name], step), places

    return any(settings(before, stage.name) != settings(after, stage.name) for stage in step.stages)


def make_branch(run: Store, folder: Store, recipe: Recipe) -> None:
    """Bring a branch up to its dataset; steps that stand in it, or in the run, are not made again."""
    prepared = prepare(recipe, None)  # whatever is wrong is found before Spark starts
    if not folder.exists(RUN_NAME):
        attach_run(folder, run)
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


def check_clusters(run: Store) -> None:
    """Raises ConfigError if a run has no clusters of its own, by which copies of held-out documents are found."""
    standing = read_run(run).tables
    if lacking := [name for name in ("clusters", "dedup") if name not in standing]:
        homes = [home.uri for home in run_folders(run) if home.uri != run.uri]
        there = f"it stands on the dataset of {homes[0]}: ablate that one" if homes else "run its recipe"
        raise ConfigError(f"{run.uri}: expected a run with its tables, got no {' and no '.join(lacking)}. {there}.")


# What an ablation found: its result from what the proxies lost, and the result as text.

SHOWN = 12
"""Changes of fate that are listed."""


def make_result(
    change: Change,
    runs: Mapping[str, Store],
    pairs: Sequence[Pair],
    measured: tuple[Sequence[str], Losses],
    seconds: Mapping[str, float],
) -> Ablation:
    """The result of an ablation from what its proxies lost."""
    a, b = (open_compared_run(runs[side]) for side in (WITH, WITHOUT))
    found = compare_runs(a, b, 0)
    on, losses = measured
    comparisons = compare_sides(on, [pair.seed for pair in pairs], losses)
    return Ablation(
        name=change.name,
        left_out=change.words,
        settings=found.settings,
        with_rules=_side(open_dataset(runs[WITH]), found.kept[0]),
        without=_side(open_dataset(runs[WITHOUT]), found.kept[1]),
        documents=tuple(_moved(found)),
        tokens=found.tokens,
        proxies=_proxies(pairs),
        share=SHARE,
        comparisons=tuple(comparisons),
        measurements=tuple(one for several in losses.values() for one in several),
        answer=summarize_comparisons(comparisons),
        seconds={name: round(value, 1) for name, value in seconds.items()},
    )


def _side(dataset: Dataset, documents: int) -> AblationSide:
    return AblationSide(dataset=dataset.digest, documents=documents, tokens=sum(dataset.num_tokens().values()))


def _moved(found: Difference) -> Iterator[VerdictChange]:
    ordered = sorted(found.documents.items(), key=lambda item: (-item[1], item[0]))
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
    """The result as text."""
    proxies, ours, theirs = result.proxies, result.with_rules, result.without
    lines = [
        "",
        f"without {', '.join(result.left_out) or 'what --set changes'}: {theirs.documents:,} documents, "
        f"{theirs.tokens:,} training tokens",
        f"with    {' ' * len(', '.join(result.left_out) or 'what --set changes')}: {ours.documents:,} documents, "
        f"{ours.tokens:,} training tokens",
        *_fates(result.documents),
        "",
        f"{len(proxies.seeds)} pairs of proxies: {proxies.params:,} parameters, {proxies.tokens:,} tokens each "
        f"({proxies.steps:,} steps of {proxies.global_batch} x {proxies.seq_len}; "
        + ", ".join(f"{passes:.2f} epochs {side}" for side, passes in proxies.epochs.items())
        + ")",
        *_left_out(result),
        "",
        *_table(result.comparisons, result.share),
        "",
        result.answer,
        "(" + ", ".join(f"{name} {value:.0f} s" for name, value in result.seconds.items()) + ")",
    ]
    return "\n".join(lines)


def _fates(moved: Sequence[VerdictChange]) -> Iterator[str]:
    """What became of documents, most frequent first."""
    for one in moved[:SHOWN]:
        yield f"  {one.documents:>7,}  {one.source}  {_fate(one.with_rules)} → {_fate(one.without)}"
    if rest := moved[SHOWN:]:
        yield f"  {sum(one.documents for one in rest):>7,}  in {len(rest)} more changes"


def _fate(fate: str) -> str:
    return fate if fate == KEPT else f"dropped by {fate}"


def _left_out(result: Ablation) -> Iterator[str]:
    """How many held-out documents do not count."""
    names = dict.fromkeys(one.on for one in result.comparisons)
    for name, one in zip(names, result.measurements, strict=False):  # those of the first proxy, on every set
        if one.left_out:
            yield (
                f"{describe_heldout_set(name)}: {one.left_out:,} of {one.documents:,} documents left out, because a proxy was "
                "trained on them or on a copy"
            )


def _table(comparisons: Sequence[Comparison], share: float) -> list[str]:
    """The comparisons, a line each."""
    rows = [("held out", "source", "with", "without", f"difference [{share:.0%}], nats/token", "bits/byte", "")]
    for one in comparisons:
        means = [sum(pair[side] for pair in one.losses) / len(one.losses) for side in (0, 1)]
        bits = "–" if one.bits is None else format_interval(one.bits)
        answer = one.answer.partition(":")[0].partition(" (")[0]
        rows.append(
            (one.on, one.source or "all", f"{means[0]:.4f}", f"{means[1]:.4f}", format_interval(one.nats), bits, answer)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def format_interval(found: DifferenceInterval) -> str:
    """An interval as text."""
    if found.low is None or found.high is None:
        return f"{found.mean:+.4f}"
    return f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"


SEQUENCES = 512
"""Held-out rows of a source that are asked about where nothing else is said."""


def add_ablate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ablate`, behind the run."""
    parser.add_argument("--without", action="append", default=[], metavar="SECTION.RULE", help="rule to leave out")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        dest="overrides",
        help="of a data section: for the other dataset; of a training section: for the proxies of both",
    )
    parser.add_argument("--seeds", type=int, default=3, help="pairs of proxies; default 3")
    parser.add_argument("--params", type=float, help=f"parameters of a proxy; default: {describe_default_size()}")
    parser.add_argument("--tokens", type=int, help="tokens of a proxy; default: 20 a parameter, at most one pass")
    parser.add_argument("--on", action="append", default=[], help="a further run whose held-out text is asked about")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="held-out rows of a source; default 512")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run and what it costs")


def ablate_command(arguments: argparse.Namespace) -> int:
    """Train pairs of proxies with and without rules of a run, and say whether the rules are worth it."""
    run = Store(arguments.run)
    if not run.is_local:
        raise ConfigError(f"{arguments.run}: expected a run on this machine, where proxies are trained. Copy it here.")
    for name in ("seeds", "params", "tokens", "sequences"):
        value = getattr(arguments, name)
        if value is not None and not value >= 1:
            raise ConfigError(f"--{name}: expected at least 1, got {value:g}")
    change = change_of(arguments.without, arguments.overrides)
    wanted = ProxySize(arguments.seeds, arguments.params, arguments.tokens, change.training)
    before, after = stored_recipe(run, change.training), branch_recipe(run, change)
    check_clusters(run)
    settings = proxy_settings(run, change.training)
    datasets = {"the run": open_dataset(run)} | open_heldout_datasets(arguments.on)
    check_settings(settings, datasets["the run"])
    check_heldout(datasets, settings)
    check_tokenizers(datasets)
    if arguments.dry_run:
        print(describe_dry_run(run, change, (before, after), wanted))
        return 0
    folder = branch_folder(run, change)
    started = time.monotonic()
    make_branch(run, folder, after)
    sides = {WITH: open_dataset(run), WITHOUT: open_dataset(folder)}
    if same_dataset(sides[WITH].manifest, sides[WITHOUT].manifest):
        print(f"{change.name}: the dataset stays as it is, file by file; nothing is trained")
        return 0
    check_tokenizers({"the run": sides[WITH], folder.uri: sides[WITHOUT]})
    check_heldout({change.name: sides[WITHOUT]}, settings)
    ours, theirs = (sum(sides[side].num_tokens().values()) for side in (WITH, WITHOUT))
    print_progress(
        f"dataset    {folder.uri}: {theirs:,} training tokens, {ours:,} with the rules; both by the run's tokenizer"
    )
    seconds = {"dataset": time.monotonic() - started}
    others = {name: Store(name) for name in arguments.on}
    print(
        describe_ablation(
            train_and_compare({WITH: run, WITHOUT: folder} | others, change, wanted, seconds, arguments.sequences)
        )
    )
    return 0


def train_and_compare(
    runs: Mapping[str, Store], change: Change, wanted: ProxySize, seconds: dict[str, float], sequences: int
) -> Ablation:
    """Train the pairs, ask them about the held-out text of every run, and write the result."""
    sides = {side: runs[side] for side in (WITH, WITHOUT)}
    folder = sides[WITHOUT]
    pairs = plan_pairs(sides, folder.child("proxies"), wanted)
    copies = copied_documents(runs, pairs[0].proxies[WITH].plan.stages[-1].seq_len, sequences)
    seconds["training"] = train_pairs(pairs, print_progress)
    started = time.monotonic()
    losses = evaluate_pairs(pairs, list(runs.values()), folder, sequences, copies)
    seconds["evaluation"] = time.monotonic() - started
    result = make_result(change, sides, pairs, (list(runs), losses), seconds)
    folder.write_atomic(RESULT_NAME, canonical_json(result.model_dump(mode="json")))
    return result


def copied_documents(runs: Mapping[str, Store], seq_len: int, sequences: int) -> set[bytes]:
    """The held-out documents of all runs of which a copy is trained on, by one side or the other.

    Raises ContractError, before anything is trained, if a run has no document that neither side has seen.
    """
    datasets = {name: open_dataset(run) for name, run in runs.items()}
    sides = [datasets[side] for side in (WITH, WITHOUT)]
    held = {
        name: {one.doc_id for one in heldout_documents(dataset, seq_len, sequences)}
        for name, dataset in datasets.items()
    }
    copies = trained_copies(list(runs.values()), sides, set[bytes]().union(*held.values()))
    for name, documents in held.items():
        others = [side for side in sides if side.digest != datasets[name].digest]
        if documents <= copies.union(*(trained_documents(documents, side) for side in others)):
            raise ContractError(
                f"held-out text {name!r}: expected documents that neither side is trained on, got none among "
                f"{len(documents):,} whose copies are not either. Hold out more (tokens.heldout_share)."
            )
    return copies


def open_heldout_datasets(names: Sequence[str]) -> dict[str, Dataset]:
    """The datasets of the runs that `--on` names. Raises ConfigError if one is named like a side."""
    if taken := [name for name in names if name in (WITH, WITHOUT)]:
        raise ConfigError(f"--on {taken[0]}: expected a run, got the name of a side. Write ./{taken[0]}.")
    return {name: open_dataset(Store(name)) for name in names}


def print_progress(line: str) -> None:
    """Print a line of progress at once."""
    print(line, flush=True)


def describe_dry_run(run: Store, change: Change, recipes: tuple[Recipe, Recipe], wanted: ProxySize) -> str:
    """What an ablation would do, and its cost as far as it can be told before the other dataset stands."""
    steps = steps_of(*recipes)
    stands, made = (", ".join(name for name, again in steps if again is one) for one in (False, True))
    params, tokens = default_size(wanted, sum(open_dataset(run).num_tokens().values()))
    lines = [
        f"ablation   {change.name}, in {branch_folder(run, change).uri}",
        f"stands     {stands or 'nothing'}",
        f"again      {made or 'nothing: the dataset would stay as it is'}",
        f"proxies    {2 * wanted.seeds}, each about {params:,.0f} parameters and at most {tokens:,.0f} tokens",
        f"cost       about {2 * wanted.seeds * 6 * params * tokens:.3g} FLOPs (6ND each), and {2 * wanted.seeds} "
        "evaluations",
    ]
    return "\n".join(lines)


def check_tokenizers(datasets: Mapping[str, Dataset]) -> None:
    """Raises ContractError if datasets do not share the tokenizer of the first."""
    first, *others = datasets.items()
    for name, other in others:
        if other.tokenizer != first[1].tokenizer:
            raise ContractError(
                f"{name}: expected the tokenizer {first[1].tokenizer.sha256[:12]} of {first[0]}, got "
                f"{other.tokenizer.sha256[:12]} or other separators. Give both runs one as a file (tokenizer.model)."
            )
