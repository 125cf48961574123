"""The closing summary of a run: documents in and kept, why the others were dropped, tokens by source, and what is next.

All numbers are sums over the manifests of the run's current tables; no row is read.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.engine.failures import failures_of
from pipeline.engine.progress import largest, reasons_text, without_earlier_drops
from pipeline.engine.step import add_figures
from pipeline.quality.stage import QUALITY
from pipeline.stages import STEPS, own_reasons
from pipeline.tokens.streams import live_tokens
from schemas.manifest import Manifest, TableVersion, current_tables
from schemas.storage import Store
from schemas.tables import LATER_VERDICTS
from schemas.text import format_bytes, format_duration, printable, text_table
from schemas.tokens import TRAIN, split_copies
from schemas.versions import DATASET

DROPPING_TABLES = ("documents", *LATER_VERDICTS, DATASET)
"""Tables whose rows may be dropped, in the order in which a run builds them."""
SHOWN_LOSSES = 3
"""Number of sources and domains that lost many documents that the summary names."""
WITHOUT_TEXT = ("source/", "extract/")
"""Stages whose dropped rows have no text that one could read."""


@dataclass(frozen=True)
class Summary:
    """The closing summary of a command."""

    lines: tuple[str, ...]
    """What exists now."""
    next: tuple[tuple[str, str], ...]
    """Commands with their purpose."""

    def text(self) -> str:
        """Return the summary as lines to print."""
        return "\n".join(self.lines)

    def next_text(self) -> str:
        """Return the commands as lines to print."""
        return "\n".join(["next:", *text_table(self.next, indent="  ")])


def closing_summary(
    run: Store, until: str | None, seconds: float, rest: str | None = None, more: Sequence[tuple[str, str]] = ()
) -> Summary:
    """Return the summary of a run folder after its steps up to `until` (None: all) were run in `seconds` [s].

    `rest`: the command line that runs all steps; None after a run of all steps. `more`: further (label, text) rows.
    """
    names = [step.name for step in STEPS]
    shown = names[: names.index(until) + 1] if until else names
    written = {table for step in STEPS if step.name in shown for table in step.writes}
    tables = {name: table for name, table in current_tables(run).items() if name in written}
    manifests = {name: table.manifest for name, table in tables.items()}
    rows = [("documents", _documents(manifests)), ("dropped", _dropped(manifests)), *_token_rows(tables)]
    rows.append(("copies", _false_positives(manifests)))
    rows.append(("tokenizer", _lowered_coverage(manifests)))
    size = sum(file.bytes for manifest in manifests.values() for file in manifest.content.files)
    rows.append(("written", f"{run.uri} ({len(tables)} tables, {format_bytes(size)})"))
    rows.append(("dataset", tables[DATASET].folder.uri if DATASET in tables else ""))
    title = f"{'run' if until is None else f'stage {until}'} complete in {format_duration(seconds)}"
    rows += [*more, *(("warning", text) for text in _warnings(manifests))]
    lines = (title, *text_table([row for row in rows if row[1]], indent="  "))
    return Summary(lines, tuple(_next_commands(run, manifests, rest)))


def drops_of_run(manifests: Mapping[str, Manifest]) -> dict[str, int]:
    """Return the number of rows that each `stage/rule` dropped in the whole run, the largest first."""
    total: dict[str, int] = {}
    for name in DROPPING_TABLES:
        if name in manifests:
            total = add_figures(total, without_earlier_drops(manifests[name].content.counts).dropped)
    return largest(total)


def _documents(manifests: Mapping[str, Manifest]) -> str:
    if "documents" not in manifests:
        return ""
    rows_in = manifests["documents"].content.counts.rows_in
    kept = [manifests[name].content.counts.rows_kept for name in DROPPING_TABLES if name in manifests][-1]
    share = f" ({100 * kept / rows_in:.1f} %)" if rows_in else ""
    return f"{rows_in:,} rows read, {kept:,} documents kept{share}"


def _dropped(manifests: Mapping[str, Manifest]) -> str:
    whole = manifests["documents"].content.counts.rows_in if "documents" in manifests else 0
    return reasons_text(drops_of_run(manifests), whole, own_reasons(manifests))


def _false_positives(manifests: Mapping[str, Manifest]) -> str:
    """Return the audited share of removed near copies that are no copies of the document kept in their place."""
    figures = manifests["audit"].content.figures if "audit" in manifests else {}
    removed = figures.get("precision", {}).get("removed")  # audits by older versions have no such sample
    if not removed or not removed["false_positives"]["pairs"]:
        return ""
    pairs, limit = removed["false_positives"]["pairs"], figures["min_jaccard"]
    shares = [_share_text(removed[name]) for name in ("false_positives", "false_positives_with_numbers")]
    text = f"of {pairs:,} removed near copies, {shares[0]} are less similar than {limit:g} to the document kept"
    return text if shares[0] == shares[1] else f"{text}; {shares[1]} if numbers count"


def losses_of_run(manifests: Mapping[str, Manifest]) -> Sequence[Mapping[str, Any]]:
    """Return the sources and domains that lost a large share of their documents as copies, as the audit lists them."""
    figures = manifests["audit"].content.figures if "audit" in manifests else {}
    losses: Sequence[Mapping[str, Any]] = figures.get("losses", ())
    return losses


def _share_text(figure: Mapping[str, Any]) -> str:
    """Return a share in per cent, with its 95 % confidence interval if it was measured on a sample."""
    value, low, high = (100 * figure[name] for name in ("value", "low", "high"))
    return f"{value:.1f} %" + (f" ({low:.1f} to {high:.1f} %)" if low < high else "")


def _warnings(manifests: Mapping[str, Manifest]) -> list[str]:
    """Return sentences about stages that raised errors on documents, and about sources and domains that lost many."""
    warnings = failures_of(manifest.run.notes for manifest in manifests.values()).warnings()
    losses = losses_of_run(manifests)
    for loss in losses[:SHOWN_LOSSES]:
        share = loss["removed"] / loss["documents"]
        warnings.append(
            f"{loss['kind']} {printable(loss['name'])}: {loss['removed']:,} of {loss['documents']:,} documents "
            f"({100 * share:.0f} %) are dropped as copies, such as {loss['pairs'][0]['removed'][:12]} of "
            f"{loss['pairs'][0]['kept'][:12]}"
        )
    if len(losses) > SHOWN_LOSSES:
        warnings.append(f"{len(losses) - SHOWN_LOSSES} other sources and domains lost as much; the report lists them")
    return warnings


def _token_rows(tables: Mapping[str, TableVersion]) -> list[tuple[str, str]]:
    """Return a row for each source with its tokens to train on and its held-out tokens, without removed ones."""
    if DATASET not in tables:
        return []
    folder, manifest = tables[DATASET].folder, tables[DATASET].manifest
    streams: Mapping[str, Sequence[int]] = manifest.content.figures.get("streams", {})
    left = live_tokens(folder.child("../.."), manifest)
    rows = []
    for source in sorted({stream.rpartition("/")[0] for stream in streams}):
        own = [stream for stream in streams if stream.rpartition("/")[0] == source]
        heldout = sum(left[stream] for stream in own if stream != f"{source}/{TRAIN}")
        num_shards = len(streams.get(f"{source}/{TRAIN}", ()))
        text = f"{source}: {left.get(f'{source}/{TRAIN}', 0):,} in {num_shards:,} shard{'s' if num_shards != 1 else ''}"
        removed = sum(sum(streams[stream]) - left[stream] for stream in own)
        text += f", {heldout:,} held out{f', {removed:,} removed' if removed else ''}"
        copies = split_copies(source)[1]
        rows.append(("tokens", f"{text}; an epoch reads them {copies} times" if copies > 1 else text))
    return rows


def _lowered_coverage(manifests: Mapping[str, Manifest]) -> str:
    """Return a warning if the vocabulary did not hold all characters of the sample; else an empty string."""
    figures = manifests["tokenizer"].content.figures if "tokenizer" in manifests else {}
    if "characters_as_bytes" not in figures:
        return ""
    return (
        f"{figures['characters_as_bytes']:,} rare characters are encoded as bytes, because tokenizer.vocab_size is "
        f"below {figures['ids_needed']:,}"
    )


def _next_commands(run: Store, manifests: Mapping[str, Manifest], rest: str | None) -> list[tuple[str, str]]:
    folder = shlex.quote(run.uri)
    commands = []
    dropped = drops_of_run(manifests)
    own = own_reasons(manifests)
    # Rules of quality are those that a user may want to change; other drops, such as languages, are mostly intended.
    rules = [name for name in dropped if name in own or name.startswith(f"{QUALITY.name}/")]
    readable = rules or [name for name in dropped if not name.startswith(WITHOUT_TEXT)] or [*dropped]
    if readable:
        rule = readable[0].partition("/")[2]
        command = f"penstock show {folder} --where {shlex.quote(f'drop_rule = {rule}')} --limit 5 --text"
        commands.append((command, "examples of dropped documents"))
    if losses := losses_of_run(manifests):
        command = f"penstock show {folder} --doc {losses[0]['pairs'][0]['removed'][:12]} --text"
        commands.append((command, f"a dropped copy of the {losses[0]['kind']} that lost most"))
    commands.append((f"penstock report {folder}", "the report as one HTML page"))
    commands.append((f"penstock train {folder}", "train the planned model") if rest is None else (rest, "all steps"))
    return commands
