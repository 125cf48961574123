"""What each part of the modern recipe gives: pairs of small runs at equal training FLOPs on real text.

    python -m bench.recipe RUN --results FILE rates     the best of some learning rates, for each size and optimizer
    python -m bench.recipe RUN --results FILE parts     each part added to the llama recipe, and removed from modern
    python -m bench.recipe RUN --results FILE sizes     llama against modern at three sizes
    python -m bench.recipe RUN --results FILE report    the differences, also written to the guide of the recipe

RUN is a run folder with a dataset of tokens. Every training run is a line of FILE, and is not repeated, so a command
that was stopped continues. Both runs of a pair have the same seed, and so the same weights and order of samples to
begin with. Each trains for as many steps as its FLOPs allow. `--share 0/2` and `--share 1/2` are two halves of the
work, for two processes. Set OMP_NUM_THREADS=1.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from bench.figures import ROOT, measured_now
from schemas.storage import Store
from schemas.tokens import open_dataset
from train.config import recipe
from train.config.settings import Settings, load_settings
from train.data.batches import Batches
from train.optim.schedule import learning_rate
from train.parallel.ranks import Ranks, open_ranks
from train.plan.make_plan import make_plan
from train.plan.plan import Plan, open_order
from train.pretrain.step import Learner

SEQ_LEN, ROWS, HELDOUT_ROWS = 256, 2, 32
PAGE = ROOT / "docs/guides/modern_recipe.md"
BEGIN, END = "<!-- recipe table -->", "<!-- end of recipe table -->"
"""The page with the table of differences, and the lines around the table."""
Changes = dict[str, Any]
"""Settings by `section.key`."""


@dataclass(frozen=True)
class Size:
    """A size of the model, and the training FLOPs of its runs."""

    layers: int
    width: int
    heads: int
    flops: float


SIZES = {"small": Size(4, 64, 4, 7e11), "medium": Size(6, 96, 3, 3e12), "large": Size(8, 128, 4, 1e13)}

PARTS: Mapping[str, Changes] = {
    "relu2": {"plan.activation": "relu2"},
    "value_embeddings": {"plan.value_embeddings": 2},
    "residual_mixing": {"plan.residual_mixing": True},
    "windows": {"plan.window_pattern": "SSSL", "plan.window": SEQ_LEN // 4},
    "softcap": {"plan.logit_softcap": 15.0},
    "muon": {"optim.optimizer": "muon"},
    "polar_express": {"optim.optimizer": "muon", "optim.muon_coefficients": "polar_express"},
    "normuon": {"optim.optimizer": "normuon"},
    "length_curriculum": {"stages": [("seq_len", 64, ROWS * 4), ("seq_len", 128, ROWS * 2)]},
    "batch_ramp": {"stages": [("global_batch", SEQ_LEN, ROWS // 2)]},
}
"""Every part, as the settings that add it to the llama recipe; `stages` come before the stage of the run's settings,
each with a sixth of the tokens: (what grows, tokens of a sequence, sequences of a step)."""
DEFAULTS: Mapping[str, Changes] = {
    "no_qk_norm": {"plan.qk_norm": False},
    "no_z_loss": {"optim.z_loss": 0.0},
    "grouped_heads": {"plan.num_kv_heads": 2},
}
"""The defaults that both recipes have, each replaced by what was the default before."""
LLAMA, _MODERN = (
    {f"{section}.{name}": value for section, own in defaults.items() for name, value in own.items()}
    for defaults in (recipe.LLAMA, recipe.MODERN)
)
"""The settings of both recipes, as `plan.recipe` chooses them."""
SHIPPED: Changes = LLAMA | _MODERN | {"plan.window": SEQ_LEN // recipe.WINDOW_SHARE}
"""The modern recipe as `plan.recipe` has it."""
MODERN: Changes = SHIPPED | {"optim.optimizer": "muon", "optim.muon_coefficients": "polar_express"}
"""The candidate from which parts are removed, and whose optimizer NorMuon replaces."""
WITHOUT: Mapping[str, Changes] = {
    "relu2": {"plan.activation": "swiglu"},
    "value_embeddings": {"plan.value_embeddings": 0},
    "residual_mixing": {"plan.residual_mixing": False},
    "windows": {"plan.window_pattern": "", "plan.window": None},
    "softcap": {"plan.logit_softcap": None},
    "polar_express": {"optim.muon_coefficients": "jordan"},
}
"""The settings that remove a part from the modern recipe. Muon itself is removed with the rate of AdamW."""
RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
RATED = ("llama", "llama +muon", "modern")
"""The settings whose best rate is searched at the small size; all others have the rate of one of these. At the other
sizes the rates of llama and of modern are searched."""


@dataclass(frozen=True)
class Job:
    """A training run: a size, a named set of settings, a seed and a peak learning rate."""

    size: str
    name: str
    seed: int
    rate: float


def settings_of_job(job: Job) -> Changes:
    """Return the settings of a job by `section.key`."""
    base, _, part = job.name.partition(" ")
    if base == "shipped":
        return SHIPPED
    if base == "llama":
        return LLAMA | (PARTS | DEFAULTS)[part[1:]] if part else LLAMA
    if part == "-muon":
        return {key: value for key, value in MODERN.items() if not key.startswith("optim.optimizer")} | {
            "optim.optimizer": "adamw"
        }
    return MODERN | (WITHOUT[part[1:]] if part.startswith("-") else PARTS[part[1:]] if part else {})


def settings_for(job: Job, steps: int) -> Settings:
    """Return the settings of a job with a number of steps, or with as many tokens in stages."""
    size, changes = SIZES[job.size], settings_of_job(job)
    sections: dict[str, Any] = {
        "plan": {"num_layers": size.layers, "d_model": size.width, "num_heads": size.heads}
        | {"num_kv_heads": size.heads, "tie_embeddings": True, "max_epochs": 20.0},
        "train": {"seq_len": SEQ_LEN, "seed": job.seed, "eval_sequences": HELDOUT_ROWS},
        "optim": {"learning_rate": job.rate},
    }
    if sections["plan"].get("optimizer") == "adamw":
        changes.pop("optim.muon_coefficients", None)
    stages = changes.get("stages")
    for key, value in changes.items():
        if key != "stages" and value is not None:
            section, _, name = key.partition(".")
            sections[section][name] = value
    if sections["optim"].get("optimizer", "adamw") == "adamw":
        sections["optim"].pop("muon_coefficients", None)
    sections["train"] |= {"global_batch": ROWS, "steps": steps}
    if stages:
        tokens = steps * ROWS * SEQ_LEN // 6
        sections["train"].pop("steps")
        sections["train"]["stages"] = [
            *({"tokens": tokens, "seq_len": length, "global_batch": rows} for _, length, rows in stages),
            {"tokens": (6 - len(stages)) * tokens},
        ]
    return load_settings(sections, [], "bench.recipe")


def plan_of(run: Store, job: Job) -> Plan:
    """Return the plan whose training FLOPs are those of the job's size, to within a step."""
    dataset = open_dataset(run)
    flops = make_plan(run, dataset, settings_for(job, 100))
    steps = round(SIZES[job.size].flops / training_flops(flops) * flops_steps(flops))
    return make_plan(run, dataset, settings_for(job, steps))


def flops_steps(plan: Plan) -> float:
    """Return the number of steps of ROWS sequences that have as many tokens as the plan."""
    return plan.num_tokens / (ROWS * SEQ_LEN)


def training_flops(plan: Plan) -> float:
    """Return the FLOPs of forward and backward passes of all stages, as the plan's figures count them."""
    return next(figure.value for figure in plan.figures if figure.name == "flops")


def train(run: Store, job: Job, ranks: Ranks) -> dict[str, Any]:
    """Train a job; return its held-out loss and what it took."""
    plan, dataset, begin = plan_of(run, job), open_dataset(run), time.process_time()
    batches = Batches(dataset, plan.settings.train, open_order(run, dataset, plan))
    learner = Learner(plan, ranks, len(batches.order.sources))
    learner.init_state()
    for step in range(1, plan.steps + 1):
        rows = batches.batch(step - 1)
        measured = learner.compute(step, rows, len(rows), rows.num_targets)
        learner.update(learning_rate(step, plan.course, plan.settings.optim), measured)
    tally = learner.measure(batches.heldout())
    loss = float(tally.losses_S.sum() / tally.counts_S.sum())
    figures = {"params": plan.num_params, "steps": plan.steps, "tokens": plan.num_tokens}
    return (
        asdict(job)
        | figures
        | {
            "flops": training_flops(plan),
            "loss": loss,
            "cpu_seconds": round(time.process_time() - begin, 1),
        }
    )


def jobs_of(what: str, results: Sequence[Mapping[str, Any]], seeds: int) -> Iterator[Job]:
    """Yield the training runs of a command, all of a seed before those of the next."""
    if what == "rates":
        yield from (Job("small", name, 0, rate) for rate in RATES for name in RATED)
        yield from (
            Job(size, name, 0, rate) for size in list(SIZES)[1:] for rate in RATES for name in ("llama", "modern")
        )
        return
    if what == "sizes":
        yield from (
            Job(size, name, seed, best_rate(results, size, rate_name(name)))
            for size in SIZES
            for seed in range(seeds)
            for name in ("llama", "modern", "modern +normuon", "shipped")
        )
        return
    rates = {name: best_rate(results, "small", name) for name in RATED}
    parts = [*(f"llama +{name}" for name in PARTS), *(f"llama +{name}" for name in DEFAULTS)]
    removed = [f"modern -{name}" for name in (*WITHOUT, "muon")] + ["modern +normuon"]
    for seed in range(seeds):
        for name in ("llama", "modern", *parts, *removed):
            yield Job("small", name, seed, rates[rate_name(name)])


def rate_name(name: str) -> str:
    """Return the name of the runs whose best learning rate a set of settings has."""
    if name.endswith("-muon"):
        return "llama"
    if name.startswith(("modern", "shipped")):
        return "modern"
    return "llama +muon" if name.endswith(("muon", "polar_express")) else "llama"


def best_rate(results: Sequence[Mapping[str, Any]], size: str, name: str) -> float:
    """Return the rate with the lowest loss among the runs of the command `rates` at a size."""
    losses = {
        line["rate"]: line["loss"] for line in results if (line["size"], line["name"], line["seed"]) == (size, name, 0)
    }
    if len(losses) < len(RATES):
        raise SystemExit(f"{size} {name}: expected runs at {len(RATES)} rates, got {len(losses)}. Run `rates` first.")
    return min(losses, key=losses.__getitem__)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Return the training runs of a file of results; none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def compare(results: Sequence[Mapping[str, Any]], size: str, base: str, name: str) -> dict[str, float] | None:
    """Return the mean difference of held-out losses in percent, its 95 % interval and p, of the pairs with a seed.

    None if there are fewer than two pairs. A negative difference: `name` has the lower loss.
    """

    def losses(of: str) -> dict[int, float]:
        rate = best_rate(results, size, rate_name(of))
        own = [line for line in results if line["size"] == size and line["name"] == of and line["rate"] == rate]
        return {line["seed"]: line["loss"] for line in own}

    before, after = losses(base), losses(name)
    shared = sorted(before.keys() & after.keys())
    if len(shared) < 2:
        return None
    percent = [100 * (after[seed] / before[seed] - 1) for seed in shared]
    mean, error = statistics.mean(percent), statistics.stdev(percent) / math.sqrt(len(percent))
    half = float(stats.t.ppf(0.975, len(percent) - 1)) * error
    p = float(stats.ttest_rel([after[s] for s in shared], [before[s] for s in shared]).pvalue)
    return {"mean": mean, "low": mean - half, "high": mean + half, "p": p, "pairs": len(shared)}


def report(results: Sequence[Mapping[str, Any]]) -> None:
    """Print the comparisons, and write them to PAGE and as docs/benchmarks/recipe.json."""
    figures: dict[str, float] = {
        f"rate.{size}.{name}": best_rate(results, size, name)
        for size, names in (("small", RATED), ("medium", RATED[::2]), ("large", RATED[::2]))
        for name in names
    }
    pairs = [("small", "llama", f"llama +{part}") for part in (*PARTS, *DEFAULTS)]
    pairs += [("small", "modern", f"modern -{part}") for part in (*WITHOUT, "muon")]
    pairs += [(size, "modern", "modern +normuon") for size in SIZES]
    pairs += [(size, "llama", name) for name in ("modern", "shipped") for size in SIZES]
    pairs += [(size, "modern +normuon", "shipped") for size in SIZES]
    table = ["| size | compared | loss [%] | 95 % interval | p | pairs |", "|---|---|---|---|---|---|"]
    for size, base, name in pairs:
        if (row := compare(results, size, base, name)) is not None:
            interval = f"{row['low']:+.2f} to {row['high']:+.2f}"
            cells = (
                size,
                f"{name} / {base}",
                f"{row['mean']:+.2f}",
                interval,
                f"{row['p']:.2g}",
                f"{row['pairs']:.0f}",
            )
            table.append(f"| {' | '.join(cells)} |")
            figures |= {f"{size}.{name}.{key}".replace(" ", "_"): value for key, value in row.items()}
    print("\n".join(table))
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n\n" + "\n".join(table) + "\n\n" + END + rest.partition(END)[2])
    measured_now("python -m bench.recipe RUN --results FILE report", ["train", "bench/recipe.py"], figures).save(
        "recipe"
    )


def main() -> None:
    """Run the jobs of a command that have no result yet, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("what", choices=["rates", "parts", "sizes", "report"])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", default="0/1", help="the part of the jobs of this process, and the number of parts")
    a = parser.parse_args()
    if a.what == "report":
        report(read_results(a.results))
        return
    part, parts = map(int, a.share.split("/"))
    torch.set_num_threads(1)
    with open_ranks() as ranks:
        for number, job in enumerate(jobs_of(a.what, read_results(a.results), a.seeds)):
            done = {Job(line["size"], line["name"], line["seed"], line["rate"]) for line in read_results(a.results)}
            if job in done or number % parts != part:
                continue
            line = train(Store(a.run), job, ranks)
            with a.results.open("a") as out:
                out.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
