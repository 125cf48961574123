"""Reader of robots.txt and tdmrep.json: what they deny an agent, and which usage they reserve, for a path of a host.

Sources: RFC 9309, sections 2.2 and 2.5 (groups, the longest match, `*` and `$`, at least 500 KiB are read); IETF,
draft-ietf-aipref-attach (`Content-Usage`); Cloudflare, Content Signals Policy (`Content-Signal`); W3C Community Group,
TDM Reservation Protocol (2024), `/.well-known/tdmrep.json`. A rule is compared in time linear in the path.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from pipeline.rights.preferences import AGENT_TOKEN, ANY_AGENT, read_usage

MAX_BYTES = 500 << 10
"""Number of bytes of a robots.txt that are read. Source: RFC 9309, section 2.5."""
MAX_PATH_CHARS = 4_096
"""Number of characters of a path that are compared."""
MAX_LOCATIONS = 1_000
"""Maximum number of entries of a tdmrep.json that are kept. A reservation beyond them counts for the whole host."""
TDM = "tdm-reservation"
"""Name of a line of the reduced form that states a reservation of tdmrep.json; no robots.txt has such a line."""

_LINE_END = re.compile(rb"[\r\n]+")
_KINDS = {  # misspelled names count, as they do for the parser that Google publishes
    **dict.fromkeys(("user-agent", "useragent", "user agent"), "agent"),
    **dict.fromkeys(("disallow", "dissallow", "dissalow", "disalow", "diasllow", "disallaw"), "disallow"),
    **{"allow": "allow", "content-usage": "usage", "content-signal": "usage", TDM: TDM},
}
_SAFE = "".join(map(chr, range(33, 127))).replace("%", "")
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


class Rule(NamedTuple):
    """A line of a group: a pattern of paths, and what holds for them."""

    pattern: str
    kind: str
    """`allow`, `disallow`, `usage` or TDM."""
    value: str = ""
    """The preferences of `usage`, or the reservation of TDM."""


@dataclass(frozen=True)
class RobotsFile:
    """The groups of a robots.txt, and the rules of a tdmrep.json."""

    groups: dict[str, list[list[Rule]]] = field(default_factory=dict)
    """The groups that name an agent, by the agent in lower case. Agents that are named together share a list."""
    tdm: list[Rule] = field(default_factory=list)

    def rules_of(self, agent: str) -> list[Rule]:
        """Return the rules for an agent: those of its own groups, else those of the groups for all agents."""
        own = self.groups.get(agent.lower())
        groups = self.groups.get(ANY_AGENT, []) if own is None else own
        return groups[0] if len(groups) == 1 else [rule for group in groups for rule in group]

    def denies(self, agent: str, path: str) -> bool:
        """Return True if an agent may not fetch a path, which `path_of` returns."""
        return is_denied(self.rules_of(agent), path)

    def usage(self, agent: str, path: str) -> dict[str, str]:
        """Return the preferences for a path in the group of an agent, by label."""
        return usage_of(self.rules_of(agent), path)

    def reservation(self, path: str) -> int | None:
        """Return 1 or 0 of the longest location of the tdmrep.json that matches a path; None: there is none."""
        best = _longest(self.tdm, path)
        return max((int(rule.value) for rule in best), default=None)


def is_denied(rules: Iterable[Rule], path: str) -> bool:
    """Return True if the longest rule that matches a path disallows it. Of rules of one length, `allow` decides."""
    best = _longest((rule for rule in rules if rule.kind in ("allow", "disallow")), path)
    return bool(best) and all(rule.kind == "disallow" for rule in best)


def usage_of(rules: Iterable[Rule], path: str) -> dict[str, str]:
    """Return the preferences of the longest rules that match a path. Of several values, the one that denies counts."""
    found: dict[str, str] = {}
    for rule in _longest((rule for rule in rules if rule.kind == "usage"), path):
        for label, value in read_usage(rule.value).items():
            if not found.get(label, "").startswith("n"):
                found[label] = value
    return found


def _longest(rules: Iterable[Rule], path: str) -> list[Rule]:
    """Return the rules with the longest pattern among those that match a path."""
    best: list[Rule] = []
    for rule in rules:
        length = len(rule.pattern)
        longest = len(best[0].pattern) if best else 0
        if length < longest or not matches(rule.pattern, path):
            continue
        if length > longest:
            best = []
        best.append(rule)
    return best


def matches(pattern: str, path: str) -> bool:
    """Return True if a pattern matches the start of a path. `*` matches any characters, a last `$` the end."""
    if "*" not in pattern and not pattern.endswith("$"):
        return path.startswith(pattern)
    is_anchored = pattern.endswith("$")
    first, *rest = (pattern[:-1] if is_anchored else pattern).split("*")
    if not path.startswith(first):
        return False
    if not rest:
        return path == first
    place = len(first)
    for piece in rest[:-1] if is_anchored else rest:
        place = path.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return not is_anchored or (len(path) - len(rest[-1]) >= place and path.endswith(rest[-1]))


def path_of(url: str) -> str:
    """Return path and query of a URL as rules are compared with them, at most MAX_PATH_CHARS characters."""
    rest = url.partition("#")[0].partition("://")[2]
    places = [place for sign in "/?" if (place := rest.find(sign)) >= 0]
    path = rest[min(places) :] if places else ""
    path = path if path.startswith("/") else f"/{path}"
    return normalized(path[:MAX_PATH_CHARS].replace("*", "%2A").replace("$", "%24"))


def normalized(text: str) -> str:
    """Return a path or a pattern with its percent-encoding in one form. Source: RFC 9309, sections 2.2.2 and 2.2.3.

    In a query, `:` and `/` are the same as `%3A` and `%2F`.
    """
    if "%" not in text and text.isascii() and " " not in text:
        return text
    encoded = quote(text.encode("utf-8", "replace"), safe=f"{_SAFE}%")
    path, mark, query = _ESCAPE.sub(_one_form, encoded).partition("?")
    return path + mark + query.replace("%3A", ":").replace("%2F", "/")


def _pattern(text: str) -> str:
    """Return a pattern in one form: `*`, and `$` at its end, have a meaning there; any other `$` is a character."""
    text = text if text[0] in "/*" else f"/{text}"
    return normalized(text[:-1].replace("$", "%24") + text[-1])


def _one_form(match: re.Match[str]) -> str:
    byte = unquote_to_bytes(match[0])
    return byte.decode() if byte[0] in _UNRESERVED else match[0].upper()


def parse_robots(data: bytes) -> RobotsFile:
    """Return the groups of a robots.txt, or of its reduced form. Lines that are no rule are ignored."""
    found = RobotsFile()
    rules: list[Rule] = []
    is_named = False
    for kind, value in _lines(data):
        if kind == "agent":
            if not is_named:
                rules = []
            is_named = True
            token = AGENT_TOKEN.match(value)
            groups = found.groups.setdefault(token[0].lower(), []) if token is not None else None
            if groups is not None and not (groups and groups[-1] is rules):
                groups.append(rules)
            continue
        is_named = False
        if (rule := _rule(kind, value)) is not None:
            (found.tdm if kind == TDM else rules).append(rule)
    return found


def _lines(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield (kind, value) of each line that has a meaning."""
    for line in _LINE_END.split(data):
        name, colon, value = line.removeprefix(codecs.BOM_UTF8).partition(b"#")[0].partition(b":")
        kind = _KINDS.get(name.strip().lower().decode("ascii", "replace")) if colon and len(name) < 64 else None
        if kind is not None:
            yield kind, value.decode("utf-8", "replace").strip()  # other blanks too, such as no-break spaces


def _rule(kind: str, value: str) -> Rule | None:
    if kind in ("allow", "disallow"):
        if not value:  # an empty pattern matches nothing
            return None
        return Rule(_pattern(value), kind)
    first, _, rest = " ".join(value.split(None, 1)).partition(" ")
    if kind == TDM:
        return Rule(_pattern(rest.strip()), kind, first) if first in ("0", "1") and rest.strip() else None
    if first.startswith(("/", "*")):
        return Rule(_pattern(first), kind, rest.strip())
    return Rule("/", kind, value)


def reduce_robots(data: bytes) -> bytes:
    """Return the lines of a robots.txt that have a meaning, in one spelling; reading them gives the same groups.

    Lines that do not end in the first MAX_BYTES are left out.
    """
    data = _as_utf8(data)
    if len(data) > MAX_BYTES:
        data = _LINE_END.split(data[:MAX_BYTES][::-1], maxsplit=1)[-1][::-1]
    agents_of: dict[int, tuple[list[str], list[Rule]]] = {}
    for agent, groups in parse_robots(data).groups.items():
        for rules in groups:
            agents_of.setdefault(id(rules), ([], rules))[0].append(agent)
    lines: list[str] = []
    for agents, rules in agents_of.values():
        lines += (f"user-agent:{agent}" for agent in agents)
        lines += map(_line_of, rules) if rules else ["disallow:"]  # ends the group of agents without a rule
    return "\n".join(lines).encode()


def _as_utf8(data: bytes) -> bytes:
    """Return a file that a byte-order mark declares to be UTF-16, as editors of Windows write it, in UTF-8."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data[: 2 * MAX_BYTES].decode("utf-16", "replace").encode("utf-8", "replace")
    return data


def _line_of(rule: Rule) -> str:
    return (
        f"{rule.kind}:{rule.pattern}" if rule.kind != "usage" else f"content-usage:{rule.pattern} {rule.value.strip()}"
    )


def reduce_tdmrep(data: bytes) -> bytes:
    """Return the entries of a tdmrep.json as lines that `parse_robots` reads; empty if it is not valid."""
    try:
        entries = json.loads(data.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError):
        return b""
    lines: list[str] = []
    for entry in entries if isinstance(entries, list) else ():
        location, value = (entry.get("location"), entry.get(TDM)) if isinstance(entry, dict) else (None, None)
        is_usable = isinstance(location, str) and location.startswith(("/", "*")) and location.isprintable()
        if is_usable and not isinstance(value, bool) and str(value) in ("0", "1"):
            if len(lines) < MAX_LOCATIONS:
                lines.append(f"{TDM}:{value} {normalized(str(location)[:MAX_PATH_CHARS])}")
            elif str(value) == "1":
                lines.append(f"{TDM}:1 /")
                break
    return "\n".join(lines).encode()
