"""The documents that a run was kept from behind its spikes, for its lineage: each growth of `train/quarantine.jsonl`.

A growth is known by the digest of the file up to there, as the file only grows.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pipeline.lineage.graph import Growing, Node
from schemas.storage import Store

QUARANTINE_NAME = "train/quarantine.jsonl"
IN_STEP = re.compile(r"\bspike in step (\d+)\b")
FOLLOWED = "quarantined documents"
"""Reason of samples that are skipped for documents which stood in the list already."""


@dataclass(frozen=True)
class Growth:
    """The documents that one spike added to the list."""

    step: int
    """Step of the spike."""
    doc_ids: tuple[str, ...]
    """Documents, hex."""
    total: int
    """Documents of the list by then."""
    digest: str
    """SHA-256 (hex) of the list by then."""
    at: str

    @property
    def key(self) -> str:
        """Its place in the lineage."""
        return f"{QUARANTINE_NAME}@{self.digest[:12]}"


def growths(run: Store) -> list[Growth]:
    """Every growth of the list, in order; half a line is passed over."""
    lines = []
    text, end = run.read_bytes(QUARANTINE_NAME) if run.exists(QUARANTINE_NAME) else b"", 0
    for line in text.splitlines(keepends=True):
        end += len(line)
        try:
            lines.append((json.loads(line), end))
        except ValueError:
            continue
    found, seen = list[Growth](), set[str]()
    for (_, step), group in groupby(lines, key=lambda line: (line[0]["rewind"], line[0]["step"])):
        own = list(group)
        doc_ids = tuple(line["doc_id"] for line, _ in own)
        seen |= set(doc_ids)
        digest = hashlib.sha256(text[: own[-1][1]]).hexdigest()
        found.append(Growth(int(step), doc_ids, len(seen), digest, own[-1][0]["at"]))
    return found


class Quarantines:
    """The growths of a run's list, each added to the lineage behind the rewind that it belongs to."""

    def __init__(self, run: Store, growing: Growing):
        self._growing, self._growths = growing, growths(run)
        self._added: set[str] = set()
        self._skipped: set[str] = set()

    def behind(self, rewind: str, step: int, doc_ids: Sequence[str]) -> None:
        """Add what a rewind from `step`, at this key, says that it quarantined."""
        if not doc_ids:
            return
        found = next((one for one in self._growths if (one.step, one.doc_ids) == (step, tuple(doc_ids))), None)
        if found is None:
            known = {doc_id for one in self._growths for doc_id in one.doc_ids}
            lacking = sum(doc_id not in known for doc_id in doc_ids)
            self._growing.broken(
                rewind,
                f"{rewind}: promised {len(doc_ids)} quarantined document(s) of step {step} in {QUARANTINE_NAME}, "
                f"found {len(doc_ids) - lacking}; restore it",
            )
        elif found.key not in self._added:
            self._add(found, rewind)

    def skipped_for(self, reasons: Sequence[str], source: str) -> list[str]:
        """The keys of what samples are skipped for, by the reasons that their list gives, each once; what no rewind
        tells of, since its process was killed or the list was handed on, is added behind `source`."""
        steps = {int(step) for reason in reasons for step in IN_STEP.findall(reason)}
        follows = FOLLOWED in reasons
        found = [one for one in self._growths if one.key not in self._skipped and (follows or one.step in steps)]
        for one in found:
            if one.key not in self._added:
                self._add(one, source)
        self._skipped |= {one.key for one in found}
        return [one.key for one in found]

    def rest(self, source: str) -> None:
        """Add what no checkpoint stands behind yet."""
        for one in self._growths:
            if one.key not in self._added:
                self._add(one, source)

    def _add(self, one: Growth, source: str) -> None:
        new = {"new": len(one.doc_ids)} if one.total > len(one.doc_ids) else {}
        notes = (f"blamed for the spike in step {one.step:,}",)
        counts = {"documents": one.total, **new}
        self._growing.add(Node(one.key, "quarantine", "quarantine", one.digest, counts, one.at, notes=notes), source)
        self._added.add(one.key)
