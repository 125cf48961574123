"""FineWeb's quality signals: lines that end like sentences, short lines, repeated lines, newlines among words.

Source: Penedo et al. 2024, arXiv 2406.17557, section 3.6, as datatrove reads it.
"""

from pipeline.text.words import SENTENCE_ENDS

SHORT_LINE = 30  # [characters] a line of at most this length is short; part of the signal's definition


def fineweb(body: str, num_tokens: int) -> dict[str, float]:
    """The signals FINEWEB of a text after cuts that has this many tokens."""
    lines = [line for line in body.split("\n") if line and not line.isspace()]
    num_lines, newlines = max(len(lines), 1), body.count("\n")
    repeated = sum(map(len, lines)) - sum(map(len, set(lines)))
    return {
        "fineweb_terminal_lines": sum(line[-1] in SENTENCE_ENDS for line in lines) / num_lines,
        "fineweb_short_lines": sum(len(line) <= SHORT_LINE for line in lines) / num_lines,
        "fineweb_dup_line_chars": repeated / max(len(body) - newlines, 1),
        "fineweb_newline_ratio": newlines / max(num_tokens, 1),
    }
