"""The form of a card of the Hugging Face Hub: `README.md` with metadata in YAML, then Markdown.

Source: Hugging Face Hub documentation, "Model cards" and "Dataset cards". Each value of the metadata is written in
YAML's flow style on one line, in which quoted texts cannot end early and are never read as another type.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.text import printable_line

UNKNOWN, OTHER = "unknown", "other"
LICENCES = frozenset(
    (
        *("afl-3.0", "agpl-3.0", "apache-2.0", "artistic-2.0", "bsd", "bsd-2-clause", "bsd-3-clause", "bsl-1.0"),
        *("c-uda", "bsd-3-clause-clear", "bigcode-openrail-m", "bigscience-bloom-rail-1.0", "bigscience-openrail-m"),
        *("cc", "cc-by-2.0", "cc-by-2.5", "cc-by-3.0", "cc-by-4.0", "cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0"),
        *("cc0-1.0", "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0"),
        *("cc-by-nd-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cdla-permissive-1.0", "cdla-permissive-2.0"),
        *("cdla-sharing-1.0", "ecl-2.0", "creativeml-openrail-m", "epl-1.0", "epl-2.0", "etalab-2.0", "eupl-1.1"),
        *("eupl-1.2", "gfdl", "gpl", "gpl-2.0", "gpl-3.0", "isc", "lgpl", "lgpl-2.1", "lgpl-3.0", "llama2"),
        *("llama3", "llama3.1", "llama3.2", "llama3.3", "mit", "mpl-2.0", "ms-pl", "ncsa", "odbl", "odc-by"),
        *("ofl-1.1", "openrail", "openrail++", "osl-3.0", "pddl", "postgresql", "unlicense", "wtfpl", "zlib"),
        *(UNKNOWN, OTHER),
    )
)
"""Identifiers of licences that the Hub knows."""
SIZES: tuple[tuple[int, str], ...] = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
    (10**9, "100M<n<1B"),
    (10**10, "1B<n<10B"),
    (10**11, "10B<n<100B"),
    (10**12, "100B<n<1T"),
)
LARGEST = "n>1T"
SHOWN_LANGUAGES = 100
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
"""The form of the name of a repository of the Hub, `owner/name`."""
DATASET_ADDRESS = re.compile(rf"https://huggingface\.co/datasets/({REPOSITORY.pattern})/?")
NOT_IN_YAML = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that a YAML file must not have, quoted or not."""


@dataclass(frozen=True)
class CardSection:
    """A section of a card."""

    title: str
    text: str
    """Markdown."""


@dataclass(frozen=True)
class HubCard:
    """A card, and the names of the answers of a person that it would state and that are not given."""

    name: str
    """Name of the card, such as `dataset-card`."""
    head: Mapping[str, Any]
    """The metadata."""
    title: str
    """Markdown."""
    intro: str
    """Markdown."""
    sections: tuple[CardSection, ...]
    missing: tuple[str, ...] = ()
    file_name: str = "README.md"
    has_paths: bool = False

    @property
    def version(self) -> str:
        """The digest of all that it states."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Return the file."""
        head = "\n".join(["---", *(f"{name}: {yaml_value(value)}" for name, value in self.head.items()), "---"])
        blocks = [head, f"# {self.title}", self.intro]
        blocks += [f"## {section.title}\n\n{section.text}" for section in self.sections]
        return ("\n\n".join(blocks) + "\n").encode("utf-8", "replace")


def yaml_value(value: Any) -> str:
    """Return a JSON value as YAML on one line; control characters of texts become visible escapes."""
    text = json.dumps(_on_one_line(value), ensure_ascii=False)
    return NOT_IN_YAML.sub(lambda match: f"\\U{ord(match[0]):08x}", text)


def _on_one_line(value: Any) -> Any:
    if isinstance(value, str):
        return printable_line(value)
    if isinstance(value, Mapping):
        return {printable_line(str(name)): _on_one_line(item) for name, item in value.items()}
    return [_on_one_line(item) for item in value] if isinstance(value, list | tuple) else value


def licence_entries(licence: str) -> dict[str, str]:
    """Return the metadata about a licence: its identifier on the Hub, or `other` with its name or address."""
    identifier = licence.strip().lower()
    if not identifier or identifier in LICENCES:
        return {"license": identifier or UNKNOWN}
    is_address = identifier.startswith(("https://", "http://"))
    return {"license": OTHER, "license_link" if is_address else "license_name": licence}


def language_codes(codes: Iterable[str]) -> list[str]:
    """Return the codes among these that the Hub accepts, at most SHOWN_LANGUAGES."""
    return [code for code in codes if code.isascii() and code.isalpha() and len(code) in (2, 3)][:SHOWN_LANGUAGES]


def size_category(number: int) -> str:
    """Return the Hub's category of a number of documents, such as `1K<n<10K`."""
    return next((name for limit, name in SIZES if number < limit), LARGEST)


def repository_of(text: str) -> str:
    """Return the name of the dataset repository in an address of the Hub; empty for another text."""
    match = DATASET_ADDRESS.fullmatch(text)
    return match[1] if match else ""
