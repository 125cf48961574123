"""`penstock ablate`: is a filter worth it? Another dataset without it, pairs of proxies, and an interval."""

import argparse
import time
from collections.abc import Mapping

from jobs.branch import (
    Change,
    branch_folder,
    branch_recipe,
    change_of,
    copies_trained_on,
    make_branch,
    same_dataset,
    steps_of,
)
from jobs.conclusion import conclude, tell
from jobs.pairs import Wanted, check_heldout, default_params, default_size, evaluate_pairs, plan_pairs, train_pairs
from jobs.recipe import stored_recipe
from schemas.ablation import RESULT_NAME, WITH, WITHOUT, Ablation
from schemas.config import Recipe
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train.data.unseen import heldout_documents

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
    datasets = {"the run": open_dataset(run)} | {name: open_dataset(Store(name)) for name in arguments.on}
    check_heldout(datasets)
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
    check_tokenizers(sides)
    check_heldout({change.name: sides[WITHOUT]})
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
    seconds["training"] = train_pairs(pairs, say)
    started = time.monotonic()
    datasets = {name: open_dataset(run) for name, run in runs.items()}
    seq_len = pairs[0].proxies[WITH].plan.settings.train.seq_len
    held = {one.doc_id for dataset in datasets.values() for one in heldout_documents(dataset, seq_len, sequences)}
    copies = copies_trained_on(list(sides.values()), [datasets[side] for side in sides], held)
    losses = evaluate_pairs(pairs, list(runs.values()), folder, sequences, copies)
    seconds["evaluation"] = time.monotonic() - started
    result = conclude(change, sides, pairs, (list(runs), losses), seconds)
    folder.write_atomic(RESULT_NAME, canonical_json(result.model_dump(mode="json")))
    return result


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


def check_tokenizers(sides: Mapping[str, Dataset]) -> None:
    """Raises ContractError if the two datasets do not share a tokenizer."""
    ours, theirs = (sides[name].tokenizer for name in (WITH, WITHOUT))
    if ours != theirs:
        raise ContractError(
            f"{sides[WITHOUT].folder.uri}: promised the run's tokenizer {ours.sha256[:12]}, found {theirs.sha256[:12]} "
            "or other separators; give the run its tokenizer as a file (tokenizer.model)"
        )
