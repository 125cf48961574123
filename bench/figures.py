"""The measured figures of the documentation, each with the commit that it was measured at.

    python -m bench.figures             the figures that are older than a change of what they measure
    python -m bench.figures --write     write the last figures into the pages that print them

A benchmark stores its figures as a file in docs/benchmarks/. A page prints one of them between two comments, the first
with its name: `<!-- figure pipeline.chain_ms -->5.87<!-- -->`.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from os import cpu_count
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = Path("docs/benchmarks")
PRINTED = re.compile(r"<!-- figure ([\w.]+) -->(.*?)<!-- -->")
"""A figure in a page: its name and its value."""


@dataclass(frozen=True)
class MeasuredFigures:
    """What one benchmark measured in one run."""

    command: str
    commit: str
    """The commit that was measured; with `+` if files had changes that were not committed."""
    day: str
    machine: str
    measures: Sequence[str]
    """Files and folders of the project that the figures depend on."""
    figures: Mapping[str, float]

    def save(self, name: str, root: Path = ROOT) -> Path:
        """Write the figures as the file of this benchmark."""
        path = root / FOLDER / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path


def measured_now(
    command: str, measures: Sequence[str], figures: Mapping[str, float], root: Path = ROOT
) -> MeasuredFigures:
    """Return figures that this checkout has just given, rounded to four digits."""
    changed = _git(root, "status", "--porcelain", "--", *measures)
    commit = _git(root, "rev-parse", "--short=12", "HEAD").strip() + ("+" if changed.strip() else "")
    rounded = {name: float(f"{value:.4g}") for name, value in figures.items()}
    machine = f"{cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    return MeasuredFigures(command, commit, f"{datetime.now(UTC):%Y-%m-%d}", machine, list(measures), rounded)


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout


def load_figures(root: Path = ROOT) -> dict[str, MeasuredFigures]:
    """Return the figures of all benchmarks by name."""
    paths = sorted((root / FOLDER).glob("*.json"))
    return {path.stem: MeasuredFigures(**json.loads(path.read_text())) for path in paths}


def commits_since(measured: MeasuredFigures, root: Path = ROOT) -> int | None:
    """Return how many commits have changed what was measured since; None if the commit is not in this clone."""
    commit = measured.commit.removesuffix("+")
    try:
        return int(_git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *measured.measures))
    except subprocess.CalledProcessError:
        return None


def ages(root: Path = ROOT) -> list[str]:
    """Return a line for each benchmark whose figures are older than a change of what they measure."""
    lines = []
    for name, measured in load_figures(root).items():
        since = commits_since(measured, root)
        if since == 0 and not measured.commit.endswith("+"):
            continue
        if since is None:
            age = "a commit that this clone does not have"
        else:
            age = f"{since} commit(s) before the last change" if since else "files that were not committed"
        lines.append(f"{name}: measured at {measured.commit} ({measured.day}), {age}. Run {measured.command}.")
    return lines


def values(root: Path = ROOT) -> dict[str, str]:
    """Return all figures as pages print them, by `benchmark.figure`."""
    return {
        f"{name}.{figure}": f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        for name, measured in load_figures(root).items()
        for figure, value in measured.figures.items()
    }


def pages(root: Path = ROOT) -> list[Path]:
    """Return the pages that may print figures."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def outdated(root: Path = ROOT) -> list[str]:
    """Return a line for each figure of a page that is not the last one that was measured."""
    known, lines = values(root), []
    for page in pages(root):
        for name, value in PRINTED.findall(page.read_text()):
            if value != known.get(name):
                lines.append(f"{page.relative_to(root)}: {name} is {value}, expected {known.get(name)}")
    return lines


def write_pages(root: Path = ROOT) -> None:
    """Write the last figures into the pages. Raises KeyError for a figure that no benchmark has."""
    known = values(root)
    for page in pages(root):
        text = page.read_text()
        new = PRINTED.sub(lambda match: f"<!-- figure {match[1]} -->{known[match[1]]}<!-- -->", text)
        if new != text:
            page.write_text(new)


def main() -> None:
    """Print the ages of the figures, or write the figures into the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the last figures into the pages")
    if parser.parse_args().write:
        write_pages()
    lines = [*ages(), *outdated()]
    print("\n".join(lines) or "all figures are those of this code")
    sys.exit(bool(outdated()))


if __name__ == "__main__":
    main()
