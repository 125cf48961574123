r"""The TeX source of a paper from its files: the main file, with the files that it inputs and without comments.

The main file is the first, by the order of MAIN_SIGNS and then by its distance from the top folder and its name, that
no other such file inputs. Only files of the paper are read: names that lead out of it, and loops, are counted.
"""

import posixpath
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_INPUT_DEPTH = 16
"""Maximum depth of files that input files."""
MAX_INPUTS = 10_000
"""Maximum number of inputs of a paper."""
TEX_SUFFIXES = (".tex", ".ltx", ".latex", ".txt", "")
"""Suffixes of files that may be the main file, in the order in which they are tried for an input."""
STYLE_SUFFIXES = (".sty", ".cls", ".def", ".clo")
_CLASS = re.compile(r"\\document(?:class|style)(?![a-zA-Z])")
_DOCUMENT = re.compile(r"\\begin\s*\{document\}")
_PLAIN = re.compile(
    r"\\(?:bye|end|magnification|input\s*\{?(?:amstex|amsppt|harvmac|phyzzx|lanlmac|tcilatex|epsf)\}?)(?![a-zA-Z{])"
)
MAIN_SIGNS = ((_CLASS, _DOCUMENT), (_DOCUMENT,), (_CLASS,), (_PLAIN,))
"""What a main file has: LaTeX with a class and a body, a body, a class, or a command of plain TeX."""

_INPUT = re.compile(
    r"\\(?:(?:input|include|subfile|subfileinclude|verbatiminput)(?![a-zA-Z])\s*(?:\{([^{}\n]{1,200})\}|([^\s{}\\%$]{1,200}))"
    r"|(?:sub)?import(?![a-zA-Z])\s*\{([^{}\n]{0,200})\}\s*\{([^{}\n]{1,200})\})"
)
_STYLE = re.compile(
    r"\\(?:usepackage|RequirePackage|documentclass|documentstyle)\s*(?:\[[^\[\]]{0,2000}\]\s*)?\{([^{}]{1,500})\}"
)
_RAW = ("verbatim", "verbatim*", "Verbatim", "lstlisting", "minted", "alltt")
_SPECIAL = re.compile(r"\\begin\{(" + "|".join(map(re.escape, _RAW)) + r")\}|\\verb\*?([^a-zA-Z*\s])|\\.|%", re.DOTALL)
_COMMENT_END = re.compile(r"[^\n]*\n?[ \t]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")
_LINE_END = re.compile(r"\r\n?|\f")
_INPUT_ENCODING = re.compile(rb"\\(?:usepackage\s*\[\s*([\w-]+)\s*\]\s*\{inputenc\}|inputencoding\s*\{([\w-]+)\})")
_ENCODINGS = {
    "latin1": "cp1252", "ansinew": "cp1252", "cp1252": "cp1252", "latin2": "iso8859-2", "latin3": "iso8859-3",
    "latin4": "iso8859-4", "latin5": "iso8859-9", "latin9": "iso8859-15", "latin10": "iso8859-16", "cp1250": "cp1250",
    "cp1251": "cp1251", "cp1257": "cp1257", "cp437": "cp437", "cp850": "cp850", "cp852": "cp852", "cp866": "cp866",
    "koi8-r": "koi8-r", "koi8-ru": "koi8-u", "koi8-u": "koi8-u", "applemac": "mac-roman", "macce": "mac-latin2",
}  # fmt: skip


@dataclass
class TexProject:
    """The joined source of a paper."""

    text: str
    """The main file with its inputs in place, without comments and without what follows its end."""
    main: str
    """Name of the main file."""
    styles: list[str] = field(default_factory=list)
    """Sources of the style files of the paper that the text uses, without comments."""
    problems: Counter[str] = field(default_factory=Counter)
    """Number of inputs that were left out, by cause: `missing`, `outside`, `loop`, `too_deep`."""


def decode_tex(data: bytes, encoding: str | None = None) -> str:
    """Return the characters of a TeX file, without control characters, with line feeds as its only line ends.

    Bytes that are not UTF-8 are decoded by `encoding`, or by the encoding that the file declares, or as Windows-1252.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode(encoding or declared_encoding(data) or "cp1252", "replace")
    return _CONTROL.sub("", _LINE_END.sub("\n", text))


def declared_encoding(data: bytes) -> str | None:
    """Return the encoding that a TeX file declares for its characters, if it is a known one and not UTF-8."""
    match = _INPUT_ENCODING.search(data)
    return _ENCODINGS.get((match[1] or match[2]).decode("ascii", "replace").lower()) if match else None


MAX_VERB_CHARS = 10_000
r"""Maximum length of the text of `\verb`, which ends on its line."""


def strip_comments(text: str) -> str:
    r"""Return TeX source without comments; `%` in verbatim text and after a backslash is none."""
    parts, at, unclosed = [], 0, set[str]()
    while match := _SPECIAL.search(text, at):
        parts.append(text[at : match.start()])
        at = match.end()
        if match.group() == "%":
            end = _COMMENT_END.match(text, at)
            at = end.end() if end else at
            # An empty line after a comment is the end of a paragraph.
            at = at - 1 if text[at : at + 1] == "\n" and text[at - 1 : at] in ("\n", " ", "\t") else at
            continue
        closing = f"\\end{{{match[1]}}}" if match[1] else (match[2] or "")
        if closing and closing not in unclosed:
            end_of_search = at + MAX_VERB_CHARS if match[2] else len(text)
            line_end = text.find("\n", at, end_of_search) if match[2] else -1
            found = text.find(closing, at, line_end if line_end >= 0 else end_of_search)
            if found >= 0:
                at = found + len(closing)
            elif match[1]:
                unclosed.add(closing)
        parts.append(text[match.start() : at])
    parts.append(text[at:])
    return "".join(parts)


def find_main(files: Mapping[str, str]) -> str | None:
    """Return the name of the main file among decoded TeX files without comments; None if no file is one.

    A file that is the only one needs no sign of a main file, except that it has a command of TeX.
    """
    names = sorted(files, key=lambda name: (name.count("/"), name))
    inputs = {_key(found) for name in names for match in _INPUT.finditer(files[name]) for found in _targets(match)}
    for sign in MAIN_SIGNS:
        candidates = [name for name in names if all(pattern.search(files[name]) for pattern in sign)]
        roots = [
            name for name in candidates if _key(name) not in inputs and _key(posixpath.basename(name)) not in inputs
        ]
        if candidates:
            return (roots or candidates)[0]
    return names[0] if len(names) == 1 and re.search(r"\\[a-zA-Z]{3}", files[names[0]]) else None


def join_project(files: Mapping[str, str], main: str, max_chars: int) -> TexProject | None:
    """Return the source of the paper; None if it is longer than `max_chars`, or inputs more files than MAX_INPUTS.

    `files` have no comments.
    """
    project = TexProject("", main)
    by_name = {name.lower(): name for name in sorted(files, reverse=True)}
    parts: list[str] = []
    size = num_inputs = 0
    folder = posixpath.dirname(main)
    # Texts with the position from which to continue, and the names of the files that are open.
    stack: list[tuple[str, int, tuple[str, ...]]] = [(_body(files[main]), 0, (main,))]
    while stack:
        text, at, opened = stack.pop()
        match = _INPUT.search(text, at)
        piece = text[at : match.start() if match else len(text)]
        parts.append(piece)
        size += len(piece)
        if size > max_chars:
            return None
        if match is None:
            continue
        num_inputs += 1
        if num_inputs > MAX_INPUTS:
            return None
        stack.append((text, match.end(), opened))
        name, problem = _resolve(match, folder, by_name, opened)
        if name is not None:
            stack.append((_body(files[name]), 0, (*opened, name)))
        elif problem:
            project.problems[problem] += 1
    project.text = "".join(parts)
    project.styles = [files[name] for name in _styles(project.text, folder, by_name)]
    return project


def _body(text: str) -> str:
    """Return the text up to the end of the document, or up to where TeX stops to read the file."""
    end = re.search(r"\\end\s*\{document\}|\\endinput(?![a-zA-Z])", text)
    return text[: end.start()] if end else text


def _targets(match: re.Match[str]) -> list[str]:
    if match[4]:
        return [posixpath.join(match[3].strip(), match[4].strip())]
    return [(match[1] or match[2]).strip().strip('"')]


def _key(name: str) -> str:
    name = posixpath.normpath(name).lower()
    return name.removesuffix(".tex").removesuffix(".ltx")


def _resolve(
    match: re.Match[str], folder: str, by_name: Mapping[str, str], opened: tuple[str, ...]
) -> tuple[str | None, str | None]:
    """Return the file that an input names, or the cause for which it is left out; neither for a package of TeX."""
    (target,) = _targets(match)
    path = posixpath.normpath(posixpath.join(folder, target))
    if path.startswith(("../", "/")) or path == "..":
        return None, "outside"
    places = [
        path,
        posixpath.normpath(posixpath.join(posixpath.dirname(opened[-1]), target)),
        posixpath.normpath(target),
    ]
    for place in places:
        for suffix in ("", *TEX_SUFFIXES[:-1], ".bbl"):
            name = by_name.get((place + suffix).lower())
            if name is None:
                continue
            if name in opened:
                return None, "loop"
            return (name, None) if len(opened) < MAX_INPUT_DEPTH else (None, "too_deep")
    return None, "missing"


def _styles(text: str, folder: str, by_name: Mapping[str, str]) -> list[str]:
    names = [
        name.strip()
        for match in _STYLE.finditer(text)
        for name in match[1].split(",")
        if len(match[1].split(",")) < 100
    ]
    places = [posixpath.normpath(posixpath.join(folder, name)).lower() for name in dict.fromkeys(names)]
    found = [by_name[place + suffix] for place in places for suffix in STYLE_SUFFIXES[:2] if place + suffix in by_name]
    return [*dict.fromkeys(reversed(found))][::-1]  # once, as a file has many names; the last definition counts
