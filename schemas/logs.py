"""What a process prints on its standard streams: printable text, and its errors."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TextIO

from schemas.text import PrintableStream, printable_block


@contextmanager
def printable_output() -> Iterator[None]:
    """Make standard output and standard error printable in a block, and the traceback of an error that leaves it."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_printable_stream(stream) for stream in streams)
    sys.excepthook = _print_exception
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def _printable_stream(stream: TextIO) -> Any:
    return stream if isinstance(stream, PrintableStream) else PrintableStream(stream)


def _print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an error that ends the process, with control characters as escapes."""
    print(printable_block("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def print_error(error: BaseException | str) -> None:
    """Print an explained error to standard error. Only its first line begins at the margin, whatever it quotes."""
    first, *rest = printable_block(str(error)).split("\n")
    lines = [f"penstock: {first}", *(line if line[:1] in ("", " ") else f"  {line}" for line in rest)]
    print("\n".join(lines), file=sys.stderr, flush=True)
