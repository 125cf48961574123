"""The stage `rights`: the marks by which a page reserves rights, and what robots.txt files state about its address.

All marks are columns. Which of them drop a document is decided later, by `[rights]` on these columns.
"""

from collections.abc import Mapping
from functools import partial

import pyarrow as pa

from pipeline.engine.stage import Check, Cutoffs, PerDocument, Row, RowFunction
from pipeline.rights.config import RightsConfig
from pipeline.rights.marks import read_marks
from pipeline.rights.preferences import HEADER_FIELDS, usage_entries
from pipeline.rights.protocols import NEEDS, REASONS, TDM_FILE, reserved
from pipeline.rights.robots import RobotsFile, Rule, is_denied, path_of, usage_of
from pipeline.rights.table import RobotsTable
from schemas.tables import field as column
from schemas.urls import with_scheme

OF_PAGE = ("robots_meta", "tdm_reservation", "tdm_policy", "content_usage", "header_licence")
OF_HOST = ("robots_files", "robots_denied", "robots_usage")
PREFIX = "robots_"
PLAIN_TEXT = "text/plain"


def make_rights(config: RightsConfig, models: Mapping[str, str]) -> RowFunction:
    """Open the tables of robots.txt, and return the function that adds the columns to a row."""
    agents = frozenset(name.lower() for name in config.agents)
    tables = {name: RobotsTable(models[f"{PREFIX}{name}"]) for name in sorted(config.robots)}

    def rights(row: Row) -> None:
        row.update(dict.fromkeys((*OF_PAGE, *OF_HOST)))
        fields, page = row.get(HEADER_FIELDS), row.get("_payload")
        if fields is not None or page is not None:
            html = page if page is not None and row.get("mime") != PLAIN_TEXT else b""
            marks = read_marks(fields or (), html, agents)
            row.update((name, getattr(marks, name)) for name in OF_PAGE)
        if tables and row["url"]:
            _look_up(row, tables, config.agents)

    return rights


def _look_up(row: Row, tables: Mapping[str, RobotsTable], agents: tuple[str, ...]) -> None:
    """Add what the robots.txt of the row's host states, by the name of the table."""
    files, denied, usage = list[str](), list[str](), list[str]()
    url = with_scheme(row["url"])
    path = path_of(url)
    for name, table in tables.items():
        robots, has_robots = table.of_url(url)
        if has_robots:
            files.append(name)
        own, preferences = _verdicts(robots, agents, path) if robots.groups else ([], [])
        denied += (f"{name}/{agent}" for agent in own)
        usage += (f"{name}/{entry}" for entry in preferences)
        if (value := robots.reservation(path)) is not None:
            usage.append(f"{name}/{TDM_FILE}={value}")
    row.update(zip(OF_HOST, (files, denied, usage)))


def _verdicts(robots: RobotsFile, agents: tuple[str, ...], path: str) -> tuple[list[str], list[str]]:
    """Return the agents to which a path is denied, and the preferences for it in the groups of the agents."""
    known: dict[int, tuple[list[Rule], bool, dict[str, str]]] = {}
    denied: list[str] = []
    usage: dict[str, str] = {}
    for agent in agents:
        rules = robots.rules_of(agent)
        if id(rules) not in known:  # most agents share the group for all agents
            known[id(rules)] = rules, is_denied(rules, path), usage_of(rules, path)
        _, is_out, preferences = known[id(rules)]
        denied += [agent] if is_out else []
        usage |= {label: value for label, value in preferences.items() if not usage.get(label, "").startswith("n")}
    return denied, usage_entries(usage)


def model_files(config: RightsConfig) -> dict[str, str]:
    """Return the paths of the tables of robots.txt."""
    return {f"{PREFIX}{name}": path for name, path in config.robots.items()}


def checks(config: RightsConfig, models: Mapping[str, str], cutoffs: Cutoffs) -> tuple[Check, ...]:
    """Return a check for each protocol that the recipe respects."""
    return tuple(
        Check(name, "", "respect", {}, needs=("domain", *NEEDS[name]), drops=partial(reserved, name, config))
        for name in NEEDS
        if name in config.respect
    )


TEXTS = pa.list_(pa.field("element", pa.string()))
RIGHTS = PerDocument(
    name="rights",
    version=5,
    config=RightsConfig,
    reads=("_payload", HEADER_FIELDS, "mime", "url"),
    adds=(*OF_PAGE, *OF_HOST),
    reasons={},
    verdicts=REASONS,
    make=make_rights,
    models=model_files,
    checks=checks,
    ends=False,
    columns=(
        column("robots_meta", TEXTS, "robots directives of meta tags and X-Robots-Tag, such as noai or gptbot:noai"),
        column("tdm_reservation", pa.int8(), "TDM reservation of the page: 1 reserved, 0 not; null: not declared"),
        column("tdm_policy", pa.string(), "address of the policy of the TDM reservation; null: none"),
        column("content_usage", TEXTS, "preferences of Content-Usage and Content-Signal headers, such as train-ai=n"),
        column("header_licence", pa.string(), "licence that the HTTP header links, such as CC-BY-4.0; null: none"),
        column("robots_files", TEXTS, "names in rights.robots whose table has a robots.txt of the host; null: none"),
        column("robots_denied", TEXTS, "name/agent of each agent to which a robots.txt denies the page"),
        column("robots_usage", TEXTS, "name/preference of each preference in robots.txt or tdmrep.json for the page"),
    ),
)
"""The stage of rights."""
