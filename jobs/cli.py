"""The `penstock` command: one thin shell for each thing a user does, with a real example in each help text."""

import argparse
import functools
import operator
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jobs.run_all import explained, run_recipe
from jobs.verbs.ablate import ablate_command, add_ablate_arguments
from jobs.verbs.diff import diff_command
from jobs.verbs.dvc import add_dvc_arguments, dvc_command
from jobs.verbs.ladder import add_ladder_arguments, ladder_command
from jobs.verbs.lineage import lineage_command
from jobs.verbs.mix import add_mix_arguments, mix_command
from jobs.verbs.scaling import add_fit_arguments, fit_scaling_command
from jobs.verbs.takedown import add_takedown_arguments, takedown_command
from jobs.verbs.trace import add_trace_arguments, trace_command
from jobs.verbs.train import (
    BUDGETS,
    FORMATS,
    add_evaluate_arguments,
    calibrate_command,
    evaluate_command,
    export_command,
    generate_command,
    plan_command,
    train_command,
)
from jobs.verbs.train_models import (
    derive_profiles_command,
    train_classifier_command,
    train_importance_command,
    train_lm_command,
)
from jobs.verbs.verify import add_verify_arguments, verify_command
from jobs.verbs.whatif import whatif_command
from pipeline.demo_crawl.build import build_demo_crawl
from pipeline.inspect.show import column_equals, find_documents, format_document, parse_where
from pipeline.models import ModelsConfig, fetch_model, list_models, verify_model
from pipeline.report.page import write_report
from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.versions import open_run

Arguments = argparse.Namespace
Verb = Callable[[str, Callable[[Arguments], int], str], argparse.ArgumentParser]
"""Adds a verb: its name, what it calls, and an example behind `penstock`."""


def run_command(arguments: Arguments) -> int:
    """Run every data stage, then size the training run."""
    run_recipe(arguments.recipe, arguments.out, arguments.overrides)
    return plan_command(argparse.Namespace(run=arguments.out, overrides=[], quiet=True, dry_run=False))


def stage_command(arguments: Arguments) -> int:
    """Run the data stages up to one step."""
    run_recipe(arguments.recipe, arguments.out, arguments.overrides, until=arguments.step)
    return 0


def report_command(arguments: Arguments) -> int:
    """Write the report of a run."""
    print(f"report: {write_report(Store(arguments.run), arguments.truth)}")
    return 0


def show_command(arguments: Arguments) -> int:
    """Print documents with their verdicts, signals and provenance."""
    conditions = [parse_where(text) for text in arguments.where]
    conditions += [column_equals("doc_id", arguments.doc)] if arguments.doc else []
    conditions += [column_equals("url", arguments.url)] if arguments.url else []
    if not conditions:
        raise ConfigError("show: expected --doc, --url or --where, got none of them")
    condition = functools.reduce(operator.and_, conditions)
    found = 0
    for row in find_documents(open_run(arguments.run), condition, arguments.limit):
        print(format_document(row, arguments.text) + "\n")
        found += 1
    print(f"{found} document(s)")
    return 0 if found else 1


def models_command(arguments: Arguments) -> int:
    """List, fetch or verify the models of the store."""
    config = ModelsConfig()
    if arguments.action == "list":
        for row in list_models(config):
            print(row)
        return 0
    if not arguments.name:
        raise ConfigError(f"models {arguments.action}: expected a name. `penstock models list` shows them.")
    print((fetch_model if arguments.action == "fetch" else verify_model)(arguments.name, config))
    return 0


def demo_crawl_command(arguments: Arguments) -> int:
    """Build the demo crawl."""
    truth = build_demo_crawl(Path(arguments.out), arguments.pages, arguments.seed)
    print(f"{truth.num_pages} pages in {arguments.out}, what is planted stands in truth.jsonl")
    return 0


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the run folder argument."""
    parser.add_argument("run", help="run folder: a local path or s3://, gs://, hdfs://")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the one override form."""
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a data run."""
    parser.add_argument("recipe", help="TOML file")
    parser.add_argument("--out", required=True, help="run folder: a local path or s3://, gs://, hdfs://")
    add_overrides(parser)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every verb."""
    parser = argparse.ArgumentParser(
        prog="penstock", description="From the crawled web to a pretrained language model."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, command: Callable[[Arguments], int], example: str) -> argparse.ArgumentParser:
        text = (command.__doc__ or "").strip()
        added = verbs.add_parser(name, help=text, description=text, epilog=f"example: penstock {example}")
        added.set_defaults(command=command)
        return added

    add_recipe(
        verb("run", run_command, "run jobs/recipes/web.toml --out run --set source.paths='[\"crawl/*.warc.gz\"]'")
    )
    stage = verb("stage", stage_command, "stage dedup jobs/recipes/web.toml --out run")
    stage.add_argument(
        "step", help="the last step to run: documents, verdicts, clusters, dedup, audit, clean, tokenizer or tokens"
    )
    add_recipe(stage)
    add_training(verb)
    add_experiments(verb)
    report = verb("report", report_command, "report run --truth crawl/truth.jsonl")
    add_run(report)
    report.add_argument("--truth", help="truth file of a demo crawl: adds found/planted for each kind")
    add_show(verb("show", show_command, "show run --where 'language = de and drop_rule = gopher_short_doc' --limit 3"))
    whatif = verb("whatif", whatif_command, "whatif run --set quality.min_words=30 --set toxicity.max_words=0")
    add_run(whatif)
    add_overrides(whatif)
    whatif.add_argument("--json", help="write the whole prediction to this file, every curve included")
    add_learning(verb)
    models = verb("models", models_command, "models fetch lid.176.ftz")
    models.add_argument("action", choices=("list", "fetch", "verify"))
    models.add_argument("name", nargs="?", help="name in the store")
    trace = verb("trace", trace_command, "trace run --step 12 --rank 0 --text")
    add_run(trace)
    add_trace_arguments(trace)
    verify = verb("verify", verify_command, "verify run --paranoid")
    add_run(verify)
    add_verify_arguments(verify)
    add_takedown_arguments(verb("takedown", takedown_command, "takedown run --domain example.com"))
    lineage = verb("lineage", lineage_command, "lineage run --out lineage.json --openlineage events.json")
    add_run(lineage)
    lineage.add_argument("--out", help="write the graph to this JSON file")
    lineage.add_argument("--openlineage", help="write OpenLineage events; a line each if it ends in .ndjson or .jsonl")
    lineage.add_argument("--verify", action="store_true", help="read every file again and compare its digest")
    diff = verb("diff", diff_command, "diff run@62330853215d run --list 3")
    diff.add_argument("a", help="run folder, or RUN@digest")
    diff.add_argument("b", help="run folder, or RUN@digest")
    diff.add_argument("--list", type=int, default=0, metavar="N", help="documents to name for each source and rule")
    diff.add_argument("--json", help="write the whole difference to this file")
    dvc = verb("dvc", dvc_command, "dvc jobs/recipes/demo.toml --out demo/run")
    add_recipe(dvc)
    add_dvc_arguments(dvc)
    demo = verb("demo-crawl", demo_crawl_command, "demo-crawl demo/crawl --pages 3000")
    demo.add_argument("out", help="folder for the WARC files and truth.jsonl")
    demo.add_argument("--pages", type=int, default=3000, help="base pages; what is planted comes on top")
    demo.add_argument("--seed", type=int, default=1)
    return parser


def add_learning(verb: Verb) -> None:
    """Add the verbs that make models and limits from text."""
    for name, command, out, example in (
        (
            "train-lm",
            train_lm_command,
            "file of the model, ….lm",
            "--out en.lm --set lm.run=wiki",
        ),
        (
            "train-classifier",
            train_classifier_command,
            "folder of the model",
            "--out models --set 'train_classifier.labelled=[\"pages.jsonl\"]'",
        ),
        (
            "train-importance",
            train_importance_command,
            "folder of the model",
            "--out models --set 'train_importance.target={run=\"wiki\"}' --set 'train_importance.raw={run=\"crawl\"}'",
        ),
        ("derive-profiles", derive_profiles_command, "TOML file", "--out languages.toml --set derive.run=wiki"),
    ):
        parser = verb(name, command, f"{name} {example}")
        parser.add_argument("recipe", nargs="?", help="TOML file with the settings; all of them can be given by --set")
        parser.add_argument("--out", required=True, help=out)
        add_overrides(parser)


def add_show(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `show`."""
    add_run(parser)
    parser.add_argument("--doc", help="document id, 32 hex digits")
    parser.add_argument("--url", help="URL as it was crawled")
    parser.add_argument("--where", action="append", default=[], help="condition on the columns of documents")
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--text", action="store_true", help="print the clean text too")


def add_training(verb: Verb) -> None:
    """Add the verbs of the training half."""
    plan = verb("plan", plan_command, "plan run --set plan.tokens_per_parameter=20")
    add_run(plan)
    add_overrides(plan)
    how = plan.add_mutually_exclusive_group()
    how.add_argument("--quiet", action="store_true", help="write the plan, print only where it is")
    how.add_argument("--dry-run", action="store_true", help="print the plan, write nothing")
    plan.add_argument("--dataset", metavar="RUN", help="make RUN's dataset that of this new run folder")
    plan.add_argument("--mix", metavar="FILE", help="shares of the sources, from `penstock mix suggest`")
    for flag, (setting, kind, told) in BUDGETS.items():
        plan.add_argument(f"--{flag}", type=kind, help=f"{told} ({setting})")
    train = verb("train", train_command, "train run --ranks 2 --set train.precision=bf16")
    add_run(train)
    add_overrides(train)
    train.add_argument("--ranks", type=int, default=1, help="processes to start on this machine")
    train.add_argument("--restarts", type=int, default=0, help="how often the ranks start again after one has died")
    train.add_argument(
        "--replay-from",
        metavar="STEP|clean",
        help="train again from this checkpoint on the dataset without documents that were taken down",
    )
    train.add_argument(
        "--dry-run", action="store_true", help="start nothing; print layout, memory of a rank and steps for so many"
    )
    train.add_argument(
        "--quarantine",
        dest="overrides",
        action="append_const",
        const="guard.quarantine=true",
        help="behind a spike go on without the documents that stand out; train/quarantine.jsonl lists them",
    )
    generate = verb("generate", generate_command, "generate run --prompt 'The function returns' --tokens 60")
    add_run(generate)
    generate.add_argument("--prompt", default="")
    generate.add_argument("--tokens", type=int, default=100)
    generate.add_argument("--temperature", type=float, default=0.8)
    generate.add_argument("--seed", type=int, default=0)
    export = verb("export", export_command, "export run --format huggingface --out llama")
    add_run(export)
    export.add_argument("--format", choices=FORMATS, required=True, help="of a checkpoint; megatron: of the dataset")
    export.add_argument("--out", required=True, help="folder to write: a new one for huggingface")
    for parser in (generate, export):
        parser.add_argument("--step", type=int, help="step of the checkpoint; default: the last")


def add_experiments(verb: Verb) -> None:
    """Add the verbs that measure, and small runs from which something is learnt."""
    calibrate = verb("calibrate", calibrate_command, "calibrate machine.json --ranks 2")
    calibrate.add_argument("profile", help="file to write what was measured to; `plan --gpu FILE` takes it")
    calibrate.add_argument("--ranks", type=int, help="processes that measure together; default: what the machine takes")
    calibrate.add_argument("--threads", type=int, help="threads of each")
    fit = verb("fit-scaling", fit_scaling_command, "fit-scaling runs.csv --out law.json")
    add_fit_arguments(fit)
    add_mix_arguments(verb("mix", mix_command, "mix suggest run --reference reference --out mix.toml"))
    ladder = verb("ladder", ladder_command, "ladder run --sizes 4")
    add_run(ladder)
    add_overrides(ladder)
    add_ladder_arguments(ladder)
    ablate = verb("ablate", ablate_command, "ablate run --without quality.fineweb --seeds 3")
    add_run(ablate)
    add_ablate_arguments(ablate)
    evaluate = verb("evaluate", evaluate_command, "evaluate run --on other")
    add_run(evaluate)
    add_evaluate_arguments(evaluate)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0 done, 1 nothing found, 2 an explained error, 130 interrupted."""
    arguments = build_parser().parse_args(argv)
    return explained(lambda: arguments.command(arguments))


if __name__ == "__main__":
    sys.exit(main())
