"""The table of a GPU day, from the lines that its calls wrote; a figure that only a GPU has is "-" on a CPU."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from schemas.text import text_table

Line = Mapping[str, Any]
Column = tuple[str, Callable[[Line], str]]


def number(value: float | None, form: str = ",.0f") -> str:
    """A figure as text; "-" where there is none."""
    return "-" if value is None else format(value, form)


def _of(name: str, form: str = ",.0f", unit: float = 1.0) -> Callable[[Line], str]:
    def text(line: Line) -> str:
        value = line.get(name)
        return number(None if value is None else value / unit, form)

    return text


def _ratio(name: str, other: str) -> Callable[[Line], str]:
    def text(line: Line) -> str:
        return number(line[name] / line[other], ".2f") if line.get(name) and line.get(other) else "-"

    return text


def _text(name: str) -> Callable[[Line], str]:
    return lambda line: str(line.get(name, "-"))


GIB = 2.0**30
CASES: tuple[Column, ...] = (
    ("model", _text("case")),
    ("variant", _text("variant")),
    ("rows", lambda line: f"{line['rows']} x {line['seq_len']}" if "rows" in line else "-"),
    ("tokens/s", _of("tokens_per_second")),
    ("target", _of("target")),
    ("MFU (bf16)", _of("mfu", ".1%")),
    ("peak GiB", _of("peak_bytes", ".2f", GIB)),
    ("planned", _of("planned_bytes", ".2f", GIB)),
    ("step s", _of("step_seconds", ".3f")),
    ("planned", _of("planned_seconds", ".3f")),
    ("ratio", _ratio("step_seconds", "planned_seconds")),
    ("loader", _of("loader_stall", ".2%")),
    ("graphs", _of("graphs")),
    ("again", _of("recompilations")),
)
CURVES: tuple[Column, ...] = (
    ("run", _text("run")),
    ("steps", _of("steps")),
    ("tokens/s", _of("tokens_per_second")),
    ("held out", _of("heldout_loss", ".4f")),
    ("from fp32", _of("from_fp32", ".1e")),
    ("held out from fp32", _of("heldout_from_fp32", ".1e")),
    ("loader", _of("loader_stall", ".2%")),
    ("graphs", _of("graphs")),
    ("again", _of("recompilations")),
)
PARTS: tuple[Column, ...] = (
    ("part", _text("part")),
    ("of", _text("of")),
    ("ms", _of("seconds", ".3f", 1e-3)),
    ("times", _of("times")),
    ("ms a step", _of("step_seconds", ".2f", 1e-3)),
    ("TFLOP/s", _of("flops_per_second", ".3f", 1e12)),
    ("GB/s", _of("bytes_per_second", ".1f", 1e9)),
    ("roofline ms", _of("least_seconds", ".2f", 1e-3)),
)
GAPS: tuple[Column, ...] = (
    ("place", _of("gap")),
    ("part", _text("part")),
    ("ms a step", _of("step_seconds", ".2f", 1e-3)),
    ("above roofline ms", _of("gap_seconds", ".2f", 1e-3)),
)
PEERS: tuple[Column, ...] = (
    ("model", _text("case")),
    ("mask", _text("mask")),
    ("contender", _text("peer")),
    ("tokens/s", _of("tokens_per_second")),
    ("of ours", _of("times_ours", ".2f")),
    ("MFU (bf16)", _of("mfu", ".1%")),
    ("peak GiB", _of("peak_bytes", ".2f", GIB)),
    ("losses apart", _of("losses_apart", ".1e")),
    ("warm s", _of("warm_seconds", ".0f")),
)
HIDDEN = {"call", "check", "error", "left_out", "seconds_into_call", "bytes"}


def rendered(lines: Sequence[Line]) -> str:
    """All sections that have lines."""
    return "\n".join(_sections(lines))


def _sections(lines: Sequence[Line]) -> Iterator[str]:
    done = [line for line in lines if "error" not in line and "left_out" not in line]
    for line in _distinct(each for each in done if "machine" in each):
        yield f"{line['machine']}, {line['cores']} cores, Python {line['python']}, torch {line['torch']}"
    sections: tuple[tuple[str, str, tuple[Column, ...]], ...] = (
        ("Runs beside fp32", "run", CURVES),
        ("Steps", "variant", CASES),
        ("Parts of a step", "of", PARTS),
        ("The same steps by peers", "peer", PEERS),
        ("Largest gaps to the roofline", "gap", GAPS),
    )
    for title, key, columns in sections:
        if rows := [line for line in done if key in line]:
            yield from ["", title, *aligned(columns, rows)]
    if checks := [line for line in done if "check" in line]:
        yield from ["", "Checks", *(f"  {line['check']}: {_pairs(line)}" for line in checks)]
    for name, title in (("left_out", "Left out"), ("error", "Failed")):
        if rows := [line for line in lines if name in line]:
            yield from ["", title, *(f"  {_name(line)}: {str(line[name])[:200]}" for line in rows)]


def _distinct(lines: Iterator[Line]) -> list[Line]:
    found = {(line["machine"], line["torch"], line["python"]): line for line in lines}
    return list(found.values())


def _name(line: Line) -> str:
    return " ".join(str(line[key]) for key in ("case", "variant", "run", "check") if key in line)


def _pairs(line: Line) -> str:
    shown = {key: value for key, value in line.items() if key not in HIDDEN}
    return ", ".join(f"{key} {_short(value)}" for key, value in shown.items())


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_short(each)}" for key, each in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def aligned(columns: Sequence[Column], rows: Sequence[Line]) -> list[str]:
    """Rows below their headings, in columns of equal width."""
    cells = [[heading for heading, _ in columns], *([text(row) for _, text in columns] for row in rows)]
    return text_table(cells, indent="  ")
