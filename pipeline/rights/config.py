"""Settings of rights: which tables of robots.txt are looked up, and which marks drop a document."""

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from pipeline.rights.preferences import AGENT_TOKEN, AGENTS, DIRECTIVES, NO_TRAINING
from pipeline.sources.provenance import domain_of
from schemas.config import Section, decision, location

Protocol = Literal["robots_meta", "tdm", "content_usage", "content_signal", "robots_txt", "licence"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


class RightsConfig(Section):
    """The section `[rights]` of a recipe: the marks by which a page reserves rights, and which of them drop it.

    Marks are always measured. Without `respect` none of them drops a document; the report counts what each would.
    """

    robots: dict[str, str] = location({})
    """Tables of robots.txt that `penstock robots` wrote, by a name for their date, such as crawl and later. Each adds
    to the columns `robots_files`, `robots_denied` and `robots_usage`."""
    agents: tuple[str, ...] = Field(AGENTS, min_length=1)
    """Agents whose rules in robots.txt are looked up, and whose directives in meta tags count; `*`: the rules for all
    agents that a file does not name. The default is the crawlers that collect text for training."""
    respect: tuple[Protocol, ...] = decision(())
    """Protocols that drop a document: `robots_meta` (robots meta tags and X-Robots-Tag), `tdm` (TDM Reservation
    Protocol), `content_usage` (AIPREF), `content_signal` (content signals), `robots_txt` (denied to one of `agents`)
    and `licence` (not one of `licences`)."""
    directives: tuple[str, ...] = decision(NO_TRAINING, min_length=1)
    """Robots directives that reserve a page, such as noai, noimageai, noindex and noarchive. `none` counts as noindex
    and nofollow, and noarchive and nocache are one."""
    dates: tuple[str, ...] = decision(())
    """Names in `robots` whose tables count for `robots_txt`, `content_usage`, `content_signal` and `tdm`. Empty:
    all."""
    licences: tuple[str, ...] = decision(())
    """Licences that are allowed, such as CC0-1.0 and CC-BY-4.0; a name such as CC-BY counts for all of its versions. Of
    an expression, such as `MIT AND CC-BY-4.0`, one alternative must be allowed, and all licences that apply together.
    """
    unlicensed: Literal["keep", "drop"] = decision("keep")
    """What the protocol `licence` does with documents that declare no licence."""
    allow_domains: tuple[str, ...] = decision(())
    """Registrable domains whose documents no protocol drops, such as those with which there is a contract."""

    @field_validator("robots")
    @classmethod
    def _names(cls, value: dict[str, str]) -> dict[str, str]:
        if wrong := sorted(name for name in value if not NAME.fullmatch(name)):
            raise ValueError(f"expected names of letters, digits, _ and -, got {', '.join(wrong)}. Rename them.")
        return value

    @field_validator("agents")
    @classmethod
    def _tokens(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := sorted(name for name in value if not AGENT_TOKEN.fullmatch(name)):
            raise ValueError(
                f"expected names of agents as in robots.txt, such as CCBot, got {', '.join(map(repr, wrong))}. "
                "Remove versions, commas and blanks."
            )
        return value

    @field_validator("directives")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := sorted({*value} - DIRECTIVES):
            known = ", ".join(sorted(DIRECTIVES))
            raise ValueError(f"expected directives of the list {known}, got {', '.join(wrong)}. Correct the names.")
        return value

    @field_validator("allow_domains")
    @classmethod
    def _registrable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        known = {domain: domain_of(domain if "://" in domain else f"http://{domain}/") for domain in value}
        wrong = [f"{each!r}{f' (did you mean {own!r}?)' if own else ''}" for each, own in known.items() if own != each]
        if wrong:
            raise ValueError(
                f"expected registrable domains such as example.com, got {', '.join(wrong)}. Correct "
                "rights.allow_domains."
            )
        return value

    @model_validator(mode="after")
    def _used(self) -> "RightsConfig":
        problems = []
        if "robots_txt" in self.respect and not self.robots:
            problems.append(
                "respect: expected rights.robots with the protocol robots_txt, got none. Set rights.robots."
            )
        if "licence" in self.respect and not self.licences:
            problems.append(
                "respect: expected rights.licences with the protocol licence, got none. Set rights.licences."
            )
        if unknown := sorted({*self.dates} - {*self.robots}):
            problems.append(f"dates: expected names in rights.robots, got {', '.join(unknown)}. Correct rights.dates.")
        if self.unlicensed == "drop" and not self.licences:
            problems.append("unlicensed: expected rights.licences with it, got none. Set rights.licences.")
        if problems:
            raise ValueError("\n  ".join(problems))
        return self
