"""Directives and preferences in the fields that declare them: robots directives, usage preferences, TDM reservations.

Every function reads a text that a stranger wrote, of any length, in linear time, and returns values of closed or
bounded lists. Sources: Google Search Central, robots meta tag and X-Robots-Tag; DeviantArt, noai and noimageai (2022);
W3C Community Group, TDM Reservation Protocol (2024); IETF, draft-ietf-aipref-attach and draft-ietf-aipref-vocab;
Cloudflare, Content Signals Policy (2025).
"""

import re
from collections.abc import Iterable, Mapping

MAX_VALUE_CHARS = 4_096
"""Number of characters of a field that are read."""
MAX_AGENTS = 32
"""Maximum number of directives for named agents that are stored of a page."""
MAX_LABELS = 16
"""Maximum number of usage preferences that are stored of a page or of a path in robots.txt."""
MAX_URL_CHARS = 2_000

AGENTS = (
    *("CCBot", "GPTBot", "Google-Extended", "ClaudeBot", "anthropic-ai", "PerplexityBot", "Bytespider"),
    *("Applebot-Extended", "meta-externalagent"),
)
"""Agents by which crawlers that collect text for training identify themselves, as their operators document them."""
ANY_AGENT = "*"
"""Agent of the groups of robots.txt for all agents that no other group names."""
AGENT_TOKEN = re.compile(r"\*|[A-Za-z0-9_.-]{1,100}")
"""An agent in a robots.txt; what follows it in a line, such as a version, is ignored."""
AGENT_NAMES = frozenset(name.lower() for name in AGENTS)

HEADER_FIELDS = "_rights_fields"
"""Field of a row: the header fields about rights of the response that the page is from."""
MAX_FIELDS = 64
"""Maximum number of header fields of a response that are read, and of its fields Link."""
Fields = tuple[tuple[str, str], ...]
"""Header fields of a response about rights, in their order: name in lower case, and value."""
_FIELD = re.compile(
    rb"\n(x-robots-tag|tdm-reservation|tdm-policy|content-usage|content-signal|link)[ \t]{0,8}:[ \t]{0,8}"
    rb"([^\n]{0,4096}(?:\n[ \t][^\n]{0,4096}){0,16})",
    re.IGNORECASE,
)

NO_TRAINING = ("noai", "noml")
"""Directives by which a page asks not to be used for training."""
DIRECTIVES = frozenset(
    (
        *NO_TRAINING,
        *("noimageai", "noindex", "nofollow", "none", "noarchive", "nocache", "nosnippet", "noimageindex"),
        *("notranslate", "nositelinkssearchbox", "nopagereadaloud", "noodp", "noydir", "unavailable_after"),
    )
)
"""Directives that are stored; those that permit something, such as `index`, are the default and are left out."""
SAME_AS = {"noindex": ("none",), "nofollow": ("none",), "noarchive": ("nocache",), "nocache": ("noarchive",)}
"""Directive → others that state it too. Sources: Google Search Central, robots meta tag; Bing Webmaster Help."""
_WITH_VALUE = frozenset(("max-snippet", "max-image-preview", "max-video-preview", "unavailable_after"))
"""Directives that are followed by a colon and a value; any other name before a colon is an agent."""
_WORD = re.compile(r"[a-z][a-z_-]{1,40}")
_AGENT = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_NAMED = re.compile(r"\s*([a-z0-9][a-z0-9_-]{0,39})\s{0,8}:")
_LABEL = re.compile(r"\s*([a-z][a-z0-9-]{0,30})\s{0,8}=\s{0,8}(yes|no|y|n)\s{0,8}(?:;|\Z)")
_SPELLED = {name.replace("_", ""): name for name in DIRECTIVES}

RESERVES = frozenset(("train-ai=n", "train-genai=n", "ai=n", "ai-train=no"))
"""Usage preferences that ask not to train on the content. `bots=n` does too, unless `train-ai=y` is beside it."""
SIGNALS = frozenset(("ai-train=no", "ai-train=yes", "ai-input=no", "ai-input=yes", "search=no", "search=yes"))
"""Preferences in the words of content signals; all others are those of AIPREF."""


def rights_fields(head: bytes) -> Fields:
    """Return the fields about rights in the header of an HTTP response, from its status line on."""
    found: list[tuple[str, str]] = []
    left = {True: MAX_FIELDS, False: MAX_FIELDS}  # pages have many links, which must not hide a reservation
    for match in _FIELD.finditer(head):
        name = match[1].decode("ascii").lower()
        is_link = name == "link"
        if left[is_link]:
            left[is_link] -= 1
            # A field may be folded. Source: RFC 9112, section 5.2.
            lines = map(str.strip, match[2].decode("utf-8", "replace").split("\n"))
            found.append((name, " ".join(filter(None, lines))))
    return tuple(found)


def read_directives(content: str) -> set[str]:
    """Return the known directives in the content of a robots meta tag, however they are separated or spelled.

    `NoAI`, `no-ai` and `no_ai` are `noai`.
    """
    words = _WORD.findall(content[:MAX_VALUE_CHARS].lower())
    squeezed = (word.replace("-", "").replace("_", "") for word in words)
    return {_SPELLED[word] for word in squeezed if word in _SPELLED}


def read_robots_tag(value: str) -> set[str]:
    """Return the known directives of a field X-Robots-Tag: `noai`, or `gptbot:noai` after the name of an agent.

    A name counts for all directives after it, up to the next name.
    """
    directives: set[str] = set()
    agent = ""
    for piece in value[:MAX_VALUE_CHARS].lower().split(","):
        if (named := _NAMED.match(piece)) and named[1] not in _WITH_VALUE:
            agent, piece = f"{named[1]}:", piece[named.end() :]
        elif named:
            piece = named[1]
        directives.update(agent + directive for directive in read_directives(piece))
    return directives


def is_agent(name: str, agents: frozenset[str] = AGENT_NAMES) -> bool:
    """Return True if the name of a meta tag is that of an agent: one of `agents`, or a name with `bot` in it."""
    return name in agents or ("bot" in name and _AGENT.fullmatch(name) is not None)


def limit_directives(directives: Iterable[str], agents: frozenset[str] = AGENT_NAMES) -> list[str]:
    """Return directives sorted, those for all agents first, with at most MAX_AGENTS for named agents.

    Of more, those for `agents` are kept.
    """
    general = sorted(name for name in directives if ":" not in name)
    named = sorted(
        (name for name in directives if ":" in name), key=lambda name: (name.partition(":")[0] not in agents, name)
    )
    return [*general, *sorted(named[:MAX_AGENTS])]


def read_usage(value: str) -> dict[str, str]:
    """Return the preferences in a field Content-Usage or Content-Signal, by label: `{"train-ai": "n"}`.

    The last value of a label counts. Pieces that are no preference are ignored.
    """
    found: dict[str, str] = {}
    for piece in value[:MAX_VALUE_CHARS].lower().split(","):
        if match := _LABEL.match(piece):
            found[match[1]] = match[2]
    return found


def usage_entries(preferences: Mapping[str, str]) -> list[str]:
    """Return preferences as sorted texts such as `train-ai=n`: at most MAX_LABELS, with all that reserve training."""
    entries = sorted(f"{label}={value}" for label, value in preferences.items())
    kept = sorted(entries, key=lambda entry: (entry not in RESERVES, entry))[:MAX_LABELS]
    return sorted(kept)


def read_reservation(value: str) -> int | None:
    """Return 1 or 0 of a TDM reservation, the larger one of several with commas between them; None without any."""
    values = {text.strip() for text in value[:MAX_VALUE_CHARS].split(",")}
    return max((int(text) for text in ("0", "1") if text in values), default=None)


def read_policy(value: str) -> str | None:
    """Return the address of a TDM policy; None if the value is no web address."""
    text = value[: MAX_URL_CHARS + 1].strip()
    is_usable = len(text) <= MAX_URL_CHARS and text.isprintable() and " " not in text
    return text if is_usable and text.lower().startswith(("https://", "http://")) else None
