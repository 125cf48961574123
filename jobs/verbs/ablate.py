"""`penstock ablate`: is a filter worth it? Another dataset without it, pairs of proxies, and an interval."""

import argparse
import time
from collections.abc import Mapping, Sequence

from jobs.recipe import stored_recipe
from jobs.verbs.branch import (
    Change,
    branch_folder,
    branch_recipe,
    change_of,
    check_clusters,
    make_branch,
    same_dataset,
    steps_of,
)
from jobs.verbs.conclusion import conclude, tell
from jobs.verbs.pairs import (
    Wanted,
    check_heldout,
    check_settings,
    default_params,
    default_size,
    evaluate_pairs,
    plan_pairs,
    settings_of_proxies,
    train_pairs,
)
from schemas.ablation import RESULT_NAME, WITH, WITHOUT, Ablation
from schemas.config import Recipe
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train.data.heldout import copies_trained_on, heldout_documents, trained_on

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
    parser.add_argument("--params", type=float, help=f"parameters of a proxy; default: {default_params()}")
    parser.add_argument("--tokens", type=int, help="tokens of a proxy; default: 20 a parameter, at most one pass")
    parser.add_argument("--on", action="append", default=[], help="a further run whose held-out text is asked about")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="held-out rows of a source; default 512")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run and what it costs")


def ablate_command(arguments: argparse.Namespace) -> int:
    """Train pairs of proxies with and without rules of a run, and say whether the rules are worth it."""
    run = Store(arguments.run)
    if not run.is_local:
        raise ConfigError(f"{arguments.run}: promised a run on this machine, where proxies are trained; copy it here")
    for name in ("seeds", "params", "tokens", "sequences"):
        value = getattr(arguments, name)
        if value is not None and not value >= 1:
            raise ConfigError(f"--{name}: promised at least 1, found {value:g}")
    change = change_of(arguments.without, arguments.overrides)
    wanted = Wanted(arguments.seeds, arguments.params, arguments.tokens, change.training)
    before, after = stored_recipe(run, change.training), branch_recipe(run, change)
    check_clusters(run)
    settings = settings_of_proxies(run, change.training)
    datasets = {"the run": open_dataset(run)} | asked_about(arguments.on)
    check_settings(settings, datasets["the run"])
    check_heldout(datasets, settings)
    check_tokenizers(datasets)
    if arguments.dry_run:
        print(foreseen(run, change, (before, after), wanted))
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
    say(f"dataset    {folder.uri}: {theirs:,} training tokens, {ours:,} with the rules; both by the run's tokenizer")
    seconds = {"dataset": time.monotonic() - started}
    others = {name: Store(name) for name in arguments.on}
    print(tell(compared({WITH: run, WITHOUT: folder} | others, change, wanted, seconds, arguments.sequences)))
    return 0


def compared(
    runs: Mapping[str, Store], change: Change, wanted: Wanted, seconds: dict[str, float], sequences: int
) -> Ablation:
    """Train the pairs, ask them about the held-out text of every run, and write the result."""
    sides = {side: runs[side] for side in (WITH, WITHOUT)}
    folder = sides[WITHOUT]
    pairs = plan_pairs(sides, folder.child("proxies"), wanted)
    copies = unfit_documents(runs, pairs[0].proxies[WITH].plan.stages[-1].seq_len, sequences)
    seconds["training"] = train_pairs(pairs, say)
    started = time.monotonic()
    losses = evaluate_pairs(pairs, list(runs.values()), folder, sequences, copies)
    seconds["evaluation"] = time.monotonic() - started
    result = conclude(change, sides, pairs, (list(runs), losses), seconds)
    folder.write_atomic(RESULT_NAME, canonical_json(result.model_dump(mode="json")))
    return result


def unfit_documents(runs: Mapping[str, Store], seq_len: int, sequences: int) -> set[bytes]:
    """The held-out documents of all runs of which a copy is trained on, by one side or the other.

    Raises ContractError, before anything is trained, if a run has no document that neither side has seen.
    """
    datasets = {name: open_dataset(run) for name, run in runs.items()}
    sides = [datasets[side] for side in (WITH, WITHOUT)]
    held = {
        name: {one.doc_id for one in heldout_documents(dataset, seq_len, sequences)}
        for name, dataset in datasets.items()
    }
    copies = copies_trained_on(list(runs.values()), sides, set[bytes]().union(*held.values()))
    for name, documents in held.items():
        others = [side for side in sides if side.digest != datasets[name].digest]
        if documents <= copies.union(*(trained_on(documents, side) for side in others)):
            raise ContractError(
                f"held-out text {name!r}: promised documents that neither side is trained on, found none among "
                f"{len(documents):,} whose copies are not either; hold out more (tokens.heldout_share)"
            )
    return copies


def asked_about(names: Sequence[str]) -> dict[str, Dataset]:
    """The datasets of the runs that `--on` names. Raises ConfigError if one is named like a side."""
    if taken := [name for name in names if name in (WITH, WITHOUT)]:
        raise ConfigError(f"--on {taken[0]}: promised a run, found the name of a side; write ./{taken[0]}")
    return {name: open_dataset(Store(name)) for name in names}


def say(line: str) -> None:
    """Print a line of progress at once."""
    print(line, flush=True)


def foreseen(run: Store, change: Change, recipes: tuple[Recipe, Recipe], wanted: Wanted) -> str:
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
                f"{name}: promised the tokenizer {first[1].tokenizer.sha256[:12]} of {first[0]}, found "
                f"{other.tokenizer.sha256[:12]} or other separators; give both runs one as a file (tokenizer.model)"
            )
