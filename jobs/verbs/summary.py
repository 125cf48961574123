"""`penstock summary`: papers about the training content of a run, computed from what its checkpoint has read."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from jobs.arguments import RUN_HELP, Command
from pipeline.disclosure.ab2013 import ab2013_documentation
from pipeline.disclosure.answers import FactsFile, read_answers, template
from pipeline.disclosure.bom import bill_of_materials
from pipeline.disclosure.croissant import croissant
from pipeline.disclosure.dataset_card import card_of_run
from pipeline.disclosure.eu import NAME as EU
from pipeline.disclosure.eu import eu_summary
from pipeline.disclosure.fact import DisclosedFacts
from pipeline.disclosure.facts import LISTS, collect, consumption_list, sources_of
from pipeline.disclosure.model_card import model_card
from pipeline.disclosure.paper import Paper
from pipeline.disclosure.publish import WRITERS, SummaryFile, changes_since, write_metadata, write_paper
from pipeline.disclosure.score import score, score_rows, score_text
from pipeline.disclosure.spdx import spdx_document
from schemas.consumption import Consumption
from schemas.errors import ConfigError
from schemas.logs import LOGGER
from schemas.storage import Store
from schemas.text import printable, text_table
from schemas.tokens import open_dataset
from schemas.versions import open_run_to_read
from train.trace.consumed import consumption_of

GROUP = "join"
VERBS = {
    "summary": "Write the public summary of training content of a run. It states what the checkpoint has read, by the "
    "template of the EU or the list of California's AB 2013; a facts file adds what only a person knows.",
}
PAPERS: Mapping[str, Callable[[DisclosedFacts, FactsFile], Paper]] = {"eu": eu_summary, "ab2013": ab2013_documentation}
"""The papers, by option."""
METADATA: Mapping[str, Callable[[DisclosedFacts, FactsFile], SummaryFile]] = {
    "dataset_card": card_of_run,
    "model_card": model_card,
    "croissant": croissant,
    "bom": bill_of_materials,
    "spdx": spdx_document,
}
"""Files in the form of other tools, by option."""
INCOMPLETE = 1
"""Exit code if answers are missing."""

Arguments = argparse.Namespace


def summary_command(arguments: Arguments) -> int:
    """Write papers about a run, print a list or the template; return 1 if answers are missing without `--draft`."""
    chosen = check_summary(arguments)
    if arguments.run is None:
        print(template(()), end="")
        return 0
    run = open_run_to_read(arguments.run)
    dataset = open_dataset(run)
    if arguments.template:
        print(template(sources_of(dataset)), end="")
        return 0
    consumed = consumption_of(run, dataset)
    if arguments.list is not None:
        _print_list(consumed, arguments.list)
        return 0
    answers = read_answers(arguments.facts, sources_of(dataset))
    facts = collect(run, dataset, consumed, answers, arguments.sme)
    papers = [PAPERS[name](facts, answers) for name in chosen if name in PAPERS]
    out = None if arguments.out is None else Store(arguments.out)
    missing: dict[str, str] = {}
    for paper in papers:
        more = {"changes": None if arguments.against is None else changes_since(paper, arguments.against)}
        for path in write_paper(run, out, paper, arguments.format or [*WRITERS], more):
            print(f"{paper.name}: {path}", flush=True)
        print(f"{paper.name}: version {paper.version}")
        _print_changes(more)
        if paper.name == EU:
            scored = score(paper)
            print(score_text(scored))
            if arguments.score:
                print("\n".join(text_table(score_rows(scored))))
        missing |= {key: field for field, key in paper.missing}
    for file in (METADATA[name](facts, answers) for name in chosen if name in METADATA):
        print(f"{file.name}: {write_metadata(run, out, file)}")
        missing |= {key: missing.get(key, file.name) for key in file.missing}
    return _report_missing(missing, arguments)


def _print_list(consumed: Consumption, name: str) -> None:
    """Print a list row by row: the list of domains may be long."""
    widest = max(len(printable(source)) for source in ("source", *consumed.sources))
    digits = 0
    for source, value, tokens in consumption_list(consumed, name):
        if not digits:  # the first row has the most tokens
            digits = max(len("tokens"), len(f"{tokens}"))
            print(f"{'tokens':{digits}}  {'source':{widest}}  {name}")
        print(f"{tokens:<{digits}}  {printable(source):{widest}}  {printable(value)}".rstrip())


def _print_changes(more: Mapping[str, Any]) -> None:
    for change in more["changes"] or ():
        print(f"  {printable(change['name'])}: {printable(change['before'])!r} -> {printable(change['after'])!r}")
    if more["changes"] == []:
        print("  no change since the earlier version")


def _report_missing(missing: Mapping[str, str], arguments: Arguments) -> int:
    """Report the answers that are missing by name, and return the exit code."""
    if not missing:
        return 0
    place = arguments.facts or "a file, and name it with --facts"
    rows = [(field, printable(key)) for key, field in missing.items()]
    LOGGER.warning(
        f"summary: expected {len(missing)} more answers of a person, got nothing for these. Add them to {place}; "
        "`penstock summary RUN --template` prints the questions:"
    )
    for line in text_table(rows, indent="  "):
        LOGGER.warning(line)
    return 0 if arguments.draft else INCOMPLETE


def check_summary(arguments: Arguments) -> list[str]:
    """Return the chosen papers. Raises ConfigError if none is chosen, or an option would be ignored."""
    chosen = [name for name in (*PAPERS, *METADATA) if getattr(arguments, name)]
    others = [name for name in ("template", "list") if getattr(arguments, name)]
    if len(others) + bool(chosen) != 1:
        got = ", ".join(map(_flag, [*others, *chosen])) or "none"
        raise ConfigError(
            f"summary: expected papers ({', '.join(map(_flag, (*PAPERS, *METADATA)))}), --list or --template, got "
            f"{got}. Give one of these."
        )
    unused = [name for name in ("facts", "format", "out", "against") if getattr(arguments, name) and not chosen]
    unused += [name for name in ("sme", "draft", "score") if getattr(arguments, name) and not chosen]
    if unused:
        raise ConfigError(f"summary --{unused[0]}: expected a paper with it, got none. Add --eu.")
    if arguments.run is None and not arguments.template:
        raise ConfigError("summary: expected a run folder, got none. Name the run.")
    if arguments.against is not None and len(chosen) > 1:
        raise ConfigError("summary --against: expected one paper with it, got several. Leave out the other papers.")
    if arguments.score and EU not in chosen:
        raise ConfigError("summary --score: expected --eu with it, got another paper. Add --eu.")
    of_papers = [name for name in ("format", "against") if getattr(arguments, name)]
    if of_papers and not {*PAPERS} & {*chosen}:
        raise ConfigError(f"summary --{of_papers[0]}: expected a paper with it, got only other files. Add --eu.")
    return chosen


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_summary_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `summary`."""
    parser.add_argument("run", nargs="?", help=f"{RUN_HELP}; or RUN@digest with --out")
    parser.add_argument("--eu", action="store_true", help="the template of the AI Office of the EU")
    parser.add_argument("--ab2013", action="store_true", help="the twelve disclosures of California's AB 2013")
    parser.add_argument("--dataset-card", action="store_true", help="README.md of the clean text for the Hub")
    parser.add_argument("--model-card", action="store_true", help="README.md of the model for the Hub")
    parser.add_argument("--croissant", action="store_true", help="Croissant 1.1 metadata of the clean text")
    parser.add_argument("--bom", action="store_true", help="bill of materials of the model, CycloneDX 1.6")
    parser.add_argument("--spdx", action="store_true", help="the same as SPDX 3.0.1, with the profiles AI and Dataset")
    parser.add_argument("--facts", metavar="FILE", help="TOML file with what only a person knows")
    parser.add_argument(
        "--template", action="store_true", help="print an empty facts file with all questions, and those of each source"
    )
    parser.add_argument(
        "--sme", action="store_true", help="list the domains of a small or medium provider: 5 %%, at most 1000"
    )
    parser.add_argument("--score", action="store_true", help="--eu: print the points of each public metric")
    parser.add_argument("--draft", action="store_true", help="exit with 0 even if answers are missing")
    parser.add_argument(
        "--format", action="append", choices=[*WRITERS], help="format to write; may be repeated; default: all"
    )
    parser.add_argument("--out", metavar="FOLDER", help="folder to write; default: summaries/VERSION in the run folder")
    parser.add_argument("--against", metavar="FILE", help="JSON file of an earlier version, to list what changed")
    parser.add_argument("--list", choices=LISTS, help="print all rows of a list that papers shorten or sum up")


COMMANDS = {
    "summary": Command((add_summary_arguments,), summary_command, "summary run --eu --facts facts.toml"),
}
