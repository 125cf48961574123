"""Expressions of licences as SPDX writes them, such as `MIT OR (Apache-2.0 WITH LLVM-exception AND ISC)`."""

import re
from collections.abc import Callable

MAX_DEPTH = 20
"""Maximum nesting of parentheses."""
_TOKEN = re.compile(r"[()]|[^\s()]+")


def is_met(expression: str, accepts: Callable[[str], bool]) -> bool:
    """Return True if licences that `accepts` are one of the alternatives (`OR`), and all that apply together (`AND`).

    A text that is no expression is not met. An exception (`WITH`) adds permissions.
    """
    tokens = _TOKEN.findall(expression)[::-1]
    result = _either(tokens, accepts, 0)
    return result and not tokens


def _either(tokens: list[str], accepts: Callable[[str], bool], depth: int) -> bool:
    result = _both(tokens, accepts, depth)
    while tokens and tokens[-1].upper() == "OR":
        tokens.pop()
        result = _both(tokens, accepts, depth) or result
    return result


def _both(tokens: list[str], accepts: Callable[[str], bool], depth: int) -> bool:
    result = _single(tokens, accepts, depth)
    while tokens and tokens[-1].upper() in ("AND", "WITH"):
        is_exception = tokens.pop().upper() == "WITH"
        if is_exception:
            if tokens:
                tokens.pop()
        else:
            result = _single(tokens, accepts, depth) and result
    return result


def _single(tokens: list[str], accepts: Callable[[str], bool], depth: int) -> bool:
    if not tokens or depth > MAX_DEPTH:
        return False
    token = tokens.pop()
    if token == "(":
        result = _either(tokens, accepts, depth + 1)
        return bool(tokens) and tokens.pop() == ")" and result
    return accepts(token)
