r"""The text of a paper's TeX source: paragraphs, headings and lists as text, formulas as LaTeX.

One pass over the tokens expands the paper's macros and writes the text. Groups and environments are kept on stacks, so
that nesting has no limit. Formulas become `$…$` and `$$…$$`, as in the text of web pages; environments such as `align`
stay as they are.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.sources.papers.tex.macros import TokenStream, definitions, is_paragraph
from pipeline.sources.papers.tex.project import TexProject
from pipeline.sources.papers.tex.symbols import (
    ACCENTS,
    CHARACTERS,
    CITATIONS,
    DIMENSIONS,
    DINGBATS,
    FLOATS,
    FRACTIONS,
    HEADINGS,
    IGNORED,
    LAST_KEPT,
    MATH_ENVIRONMENTS,
    PREFIXES,
    RAW_ENVIRONMENTS,
    REFERENCES,
    SKIPPED_ENVIRONMENTS,
    TABLES,
    THEOREMS,
)
from schemas.normalization import normalize

LINE, PARAGRAPH, CUT = "\x1e", "\x1d", "\x1c"
"""Marks in the text while it is written: a line end, a paragraph end, and the place of a citation that was left out."""
MAX_GROUPS = 64
"""Maximum number of open groups around an item of a list."""
_LENGTH = re.compile(
    r"\s*+=?\s*+[-+]?(?:[\d.]++|(?=\\))\s*+(?:true)?\s*+(?:pt|em|ex|cm|mm|in|pc|bp|sp|mu|dd|cc|fil{1,3})?"
    r"(?:\s*+(?:plus|minus)\s*+[-+]?[\d.]++\s*+(?:pt|em|ex|cm|mm|in|fil{1,3})?)*"
)
_BRACKETS = re.compile(rf" ?[(\[](?:see|e\.g\.,?|cf\.|and|[\s,;]|{CUT})*+[)\]]")
"""Brackets around places of citations, if one is in them."""
_CUT_LIST = re.compile(rf"{CUT} ?(?:[,;–-] ?)?(?={CUT})")
_CUT_SPACE = re.compile(rf" ?{CUT} ?(?=[.,;:!?)\]]|{PARAGRAPH}|\Z)")
_SPACES = re.compile(r"[ \t\n\xa0]+")
_AROUND_LINE = re.compile(rf" ?{LINE}[ {LINE}]*+")
_AROUND_PARAGRAPH = re.compile(rf" ?{LINE}? ?{PARAGRAPH}[ {PARAGRAPH}{LINE}]*+")
_NUMBER = re.compile(r"\{\s*+[-+\u2212]?+\d{1,6}+(?:[.,]\d{1,6}+)?+\s*+\}")
_NUMBER_TAGS = frozenset(("nonumber", "notag", "displaylimits"))
_ENDS_WITH_LETTER = re.compile(r"\\[a-zA-Z@]+\Z")


@dataclass
class TexOptions:
    """What the text of a paper has beside its paragraphs."""

    citations: bool = False
    """True to write the keys of citations and references in brackets."""
    floats: str = "captions"
    """What is written of figures and tables: `captions`, `all` or `none`."""
    markdown: bool = False
    """True to mark headings by `#`."""


@dataclass
class TexText:
    """The text of a paper and what it says about itself."""

    text: str
    title: str | None = None
    authors: list[str] = field(default_factory=list)
    abstract: str | None = None


@dataclass
class _Frame:
    """An open group or environment: the text to write at its end, and where its text goes."""

    name: str
    closing: str = ""
    target: str | None = None
    """The field to which the text of the frame belongs; None: the text around it."""
    item: int = 0
    end: tuple[str, ...] = ()


def render_tex(project: TexProject, options: TexOptions) -> TexText:
    """Return the text of a paper. Raises TooManyExpansionsError if its macros expand beyond the limits."""
    return _Renderer(project, options).run()


class _Renderer:
    def __init__(self, project: TexProject, options: TexOptions):
        self.stream = TokenStream(project.text)
        self.options = options
        self.out: list[str] = []
        self.outs: list[list[str]] = []
        self.frames: list[_Frame] = []
        self.open_names: Counter[str] = Counter()
        self.fields: dict[str, list[str]] = {"title": [], "author": [], "abstract": []}
        for style in project.styles:
            macros, environments = definitions(style)
            self.stream.macros |= macros
            self.stream.environments |= environments
        self.commands = self._commands()

    def run(self) -> TexText:
        """Read all tokens and return the text."""
        while (token := self.stream.next()) is not None:
            self._token(token)
        while self.frames:
            self._close()
        abstract = tidy("".join(self.fields["abstract"][:1]))
        text = tidy("".join(self.out))
        title = " ".join(tidy("".join(self.fields["title"][:1])).split())
        authors = [" ".join(tidy(name).split()) for name in self.fields["author"]]
        return TexText(f"{abstract}\n\n{text}".strip(), title or None, [*filter(None, authors)], abstract or None)

    # Tokens

    def _token(self, token: str) -> None:
        first = token[0]
        if first == "\\":
            self._command(token)
        elif token == "{":
            self._open(_Frame("{"))
        elif token == "}":
            if self.frames and self.frames[-1].name == "{":
                self._close()
        elif first == "$":
            self._formula(token)
        elif is_paragraph(token):
            self.out.append(PARAGRAPH)
        elif token == "&":
            self.out.append(" | ")
        elif first in "^_#":
            self.out.append(token if first != "#" else "")
        else:
            self.out.append(_TEXT.get(token, token))

    def _command(self, token: str) -> None:
        name, stream = token[1:], self.stream
        plain = name.rstrip("*")
        if stream.expand(name) or (name != plain and stream.expand(plain)) or stream.define(name):
            return
        if name in CHARACTERS:
            self.out.append(CHARACTERS[name])
            if name.isalpha():
                self._eat_space()
        elif name in ACCENTS:
            self._accent(ACCENTS[name])
        elif handler := self.commands.get(plain):
            handler(plain)
        elif plain in LAST_KEPT:
            self._keep_last(LAST_KEPT[plain])
        elif plain in IGNORED:
            stream.option()
            for _ in range(IGNORED[plain]):
                stream.option()
                stream.argument()
        elif plain in DIMENSIONS:
            self._skip_length()
        elif plain in HEADINGS:
            stream.option()
            level = HEADINGS[plain]
            self._wrap(PARAGRAPH + ("#" * level + " ") * self.options.markdown, PARAGRAPH if level < 5 else " ")
        elif plain in CITATIONS or plain in REFERENCES:
            self._reference(plain)
        elif name.startswith("if") and name not in ("iff", "ifthenelse"):
            self._condition(name[2:])
        elif name.isalpha() or "*" in name:
            self._unknown(plain)

    def _unknown(self, name: str) -> None:
        """Leave out a command that is not known, with an option; arguments in braces stay as text."""
        token = self.stream.next()
        if token is not None:
            self.stream.push(token)
        if token == "[":
            self.stream.option()
        elif token is not None and token[0] in " \n" and not is_paragraph(token):
            self._eat_space()

    def _eat_space(self) -> None:
        token = self.stream.next()
        if token is None:
            return
        if token[0] in " \n\t" and not is_paragraph(token):
            token = token.lstrip(" \n\t")
        if token:
            self.stream.push(token)

    def _commands(self) -> dict[str, Callable[[str], None]]:
        return {
            "begin": lambda name: self._begin(self.stream.environment_name()),
            "end": lambda name: self._end(self.stream.environment_name()),
            "par": lambda name: self.out.append(PARAGRAPH),
            "\\": lambda name: self._line_end(),
            "(": lambda name: self._formula("\\("),
            "[": lambda name: self._formula("\\["),
            "ensuremath": lambda name: self.stream.push("$", *self.stream.argument(), "$"),
            "item": lambda name: self._item(),
            "footnote": lambda name: self._wrap(" (", ")"),
            "footnotetext": lambda name: self._wrap(" (", ")"),
            "title": lambda name: self._field("title"),
            "author": lambda name: self._field("author"),
            "abstract": lambda name: self._field("abstract"),
            "caption": lambda name: self._caption(),
            "captionof": lambda name: self._keep_last(2, "caption"),
            "tablecaption": lambda name: self._caption(),
            "verb": lambda name: self._verb(),
            "lstinline": lambda name: self._verb(),
            "url": lambda name: self.out.append("".join(self.stream.argument())),
            "texorpdfstring": lambda name: self._keep_first(2),
            "enquote": lambda name: self._wrap("“", "”"),
            "else": lambda name: self.stream.skip_branch(),
            "fi": lambda name: None,
            "csname": lambda name: None,
            "endcsname": lambda name: None,
            "char": lambda name: self._skip_length(),
            "SI": lambda name: self._quantity(2),
            "qty": lambda name: self._quantity(2),
            "num": lambda name: self._quantity(1),
            "si": lambda name: self._quantity(1),
            "unit": lambda name: self._quantity(1),
            "ang": lambda name: self._wrap("", "°"),
            "SIrange": lambda name: self._range(3),
            "qtyrange": lambda name: self._range(3),
            "numrange": lambda name: self._range(2),
            **dict.fromkeys(FRACTIONS, lambda name: self._fraction()),
            "textsuperscript": lambda name: self._raised("^"),
            "textsubscript": lambda name: self._raised("_"),
            "ding": lambda name: self.out.append(DINGBATS.get("".join(self.stream.argument()).strip(), "")),
        }

    # Groups and environments

    def _open(self, frame: _Frame) -> None:
        self.frames.append(frame)
        self.open_names[frame.name] += 1
        if frame.target is not None:
            self.outs.append(self.out)
            self.out = []

    def _close(self) -> None:
        frame = self.frames.pop()
        self.open_names[frame.name] -= 1
        self.out.append(frame.closing)
        if frame.target is not None:
            text, self.out = "".join(self.out), self.outs.pop()
            if frame.target:
                self.fields.setdefault(frame.target, []).append(text)
        if frame.end:
            self.stream.repeat(*frame.end)

    def _wrap(self, opening: str, closing: str, target: str | None = None) -> None:
        """Write `opening`, the next argument, and `closing`."""
        token = self.stream.skip_spaces()
        if token == "{":
            self.out.append(opening)
            self._open(_Frame("{", closing, target))
        elif token is not None:
            self.stream.push(token)
            if token[0] == "\\" or token[0].isalnum():
                self.stream.push("{", *self.stream.argument(), "}")
                self._wrap(opening, closing, target)

    def _field(self, name: str) -> None:
        self.stream.option()
        self._wrap("", "", name)

    def _caption(self) -> None:
        self.stream.option()
        self._wrap("", PARAGRAPH, "caption")

    def _keep_last(self, count: int, target: str | None = None) -> None:
        for number in range(count):
            while self.stream.option() is not None:
                pass
            if number < count - 1:
                self.stream.argument()
        self._wrap("", PARAGRAPH if target else "", target)

    def _keep_first(self, count: int) -> None:
        kept = self.stream.argument()
        for _ in range(count - 1):
            self.stream.argument()
        self.stream.repeat(*kept)

    def _begin(self, name: str) -> None:
        plain, stream = name.rstrip("*"), self.stream
        environment = stream.begin_environment(name)
        if environment is not None and environment.label is None:
            self._open(_Frame(name, end=environment.end))
        elif plain in MATH_ENVIRONMENTS:
            self._display(name)
        elif name in RAW_ENVIRONMENTS:
            stream.option()
            if name == "minted":
                stream.argument()
            code = stream.raw_until(f"\\end{{{name}}}").strip("\n")
            self.out += [PARAGRAPH, code.replace("\n", LINE).replace(" ", "\x1f"), PARAGRAPH]
        elif plain in SKIPPED_ENVIRONMENTS:
            stream.raw_until(f"\\end{{{name}}}")
        elif plain in FLOATS and self.options.floats != "all":
            self._open(_Frame(name, target=""))
            self.fields["caption"] = []
        elif plain in TABLES:
            self._open_table(name, plain)
        elif plain in ("itemize", "enumerate", "description", "compactitem", "compactenum", "list", "inparaenum"):
            stream.option()
            self.out.append(PARAGRAPH)
            self._open(_Frame(name, PARAGRAPH))
        elif plain in ("abstract", "onecolabstract", "abstracts"):
            self._open(_Frame(name, target="abstract"))
        elif plain == "document":
            self.out.clear()
        else:
            self._open_other(name, environment.label if environment else THEOREMS.get(plain))

    def _open_other(self, name: str, label: str | None) -> None:
        """Open an environment whose text is kept; a theorem has its label and its note in front."""
        note = self.stream.option()
        self.out.append(PARAGRAPH)
        if label is not None:
            self.stream.repeat(label, *((" (", *note, ")") if note else ()), ". ")
        elif name in ("minipage", "multicols", "multicols*", "adjustwidth", "adjustbox", "spacing", "textblock"):
            self.stream.argument()
        self._open(_Frame(name, PARAGRAPH))

    def _open_table(self, name: str, plain: str) -> None:
        for _ in range(2 if plain in ("tabularx", "tabulary") else 1):
            self.stream.option()
            if plain != "ruledtabular":
                self.stream.argument()
        is_kept = self.options.floats == "all"
        self.out.append(PARAGRAPH if is_kept else "")
        self._open(_Frame(name, PARAGRAPH if is_kept else "", None if is_kept else ""))

    def _end(self, name: str) -> None:
        """Close the environment of this name, and groups in it that were left open."""
        if not self.open_names[name]:
            return
        while self.open_names[name] and self.frames[-1].name != name:
            self._close()
        self._close()
        if name.rstrip("*") in FLOATS and self.options.floats == "captions":
            self.out += [
                PARAGRAPH,
                *(part for caption in self.fields.pop("caption", ()) for part in (caption, PARAGRAPH)),
            ]

    def _item(self) -> None:
        frame = next((frame for frame in self.frames[: -MAX_GROUPS - 1 : -1] if frame.name != "{"), None)
        label = self.stream.option()
        self.out.append(LINE)
        if frame is not None and frame.name.rstrip("*") in ("enumerate", "compactenum", "inparaenum"):
            frame.item += 1
            if label is None:
                self.out.append(f"{frame.item}. ")
        elif label is None:
            self.out.append("- ")
        if label is not None:
            self.stream.push(*label, " ")

    # Formulas

    def _formula(self, opening: str) -> None:
        closing = {"\\(": "\\)", "\\[": "\\]"}.get(opening, opening)
        is_display = opening in ("$$", "\\[")
        content, is_closed = self._math(lambda token: token == closing, stops_at_paragraph=True)
        if not content.strip():
            return
        mark = "$$" if is_display else "$"
        formula = f"{mark}{_spaces_of(content.strip())}{mark if is_closed else ''}"
        self.out += [PARAGRAPH, formula, PARAGRAPH] if is_display else [formula]

    def _display(self, name: str) -> None:
        self.stream.option()
        content, _ = self._math(lambda token: token == f"\\end{{{name}}}", stops_at_paragraph=False, name=name)
        body = content.strip()
        if not body:
            return
        if name.rstrip("*") in ("equation", "displaymath", "math", "dmath"):
            shown = f"$$ {body} $$"
        else:
            shown = f"\\begin{{{name}}}\n{body}\n\\end{{{name}}}"
        self.out += [PARAGRAPH, _spaces_of(shown), PARAGRAPH]

    def _math(
        self, is_end: Callable[[str], bool], stops_at_paragraph: bool, name: str | None = None
    ) -> tuple[str, bool]:
        """Return the LaTeX up to the end of a formula, with macros expanded, and whether it has an end."""
        parts: list[str] = []
        depth, stream = 0, self.stream
        last = ""
        while (token := stream.next()) is not None:
            if token[0] == "\\":
                command = token[1:]
                if depth <= 0 and name is None and is_end(token):
                    return "".join(parts), True
                if command == "end" and name is not None:
                    ended = stream.environment_name()
                    if ended == name:
                        return "".join(parts), True
                    token = f"\\end{{{ended}}}"
                elif stream.expand(command) or (command.endswith("*") and stream.expand(command[:-1])):
                    continue
                elif command in ("label", "tag", "tag*") or command in _NUMBER_TAGS:
                    if command not in _NUMBER_TAGS:
                        stream.argument()
                    continue
                elif command in ("ensuremath", "protect", "xspace"):
                    continue
            elif depth <= 0 and is_end(token):
                return "".join(parts), True
            elif is_paragraph(token):
                if stops_at_paragraph:
                    stream.push(token)
                    return "".join(parts), False
                token = "\n"
            depth += (token == "{") - (token == "}")
            if depth < 0 and stops_at_paragraph:  # The group around the formula ends: the formula is damaged.
                stream.push(token)
                return "".join(parts), False
            # A macro's body may begin with a letter after a command.
            parts.append(" " + token if token[0].isalpha() and _ENDS_WITH_LETTER.match(last) else token)
            last = token
        return "".join(parts), False

    # Characters

    def _accent(self, mark: str) -> None:
        tokens = self.stream.argument()
        text = "".join(CHARACTERS.get(token[1:], "") if token[0] == "\\" else token for token in tokens)
        text = text.replace("ı", "i").replace("ȷ", "j") if mark != "\u0323" else text
        self.out.append(normalize("NFC", text[:1] + mark + text[1:]) if text.strip() else text)

    def _line_end(self) -> None:
        token = self.stream.next()
        if token is not None and not token.startswith("*"):
            self.stream.push(token)
        elif token is not None and len(token) > 1:
            self.stream.push(token[1:])
        self.stream.option()
        self.out.append(LINE)

    def _verb(self) -> None:
        self.stream.option()
        token = self.stream.next()
        if token is None:
            return
        self.stream.push(*([token[1:]] if token[1:] else []))
        closing = "}" if token[0] == "{" else token[0]
        parts: list[str] = []
        while (token := self.stream.next()) is not None and not is_paragraph(token):
            before, found, after = token.partition(closing)
            parts.append(before)
            if found:
                self.stream.push(*([after] if after else []))
                break
        self.out.append("".join(parts).replace(" ", "\x1f"))

    def _quantity(self, count: int) -> None:
        self.stream.option()
        parts = [self.stream.argument() for _ in range(count)]
        self.out.append(" ".join(filter(None, ("".join(parts[0]) if count > 1 else "", _units(parts[-1])))))

    def _range(self, count: int) -> None:
        self.stream.option()
        first, last, *unit = (_units(self.stream.argument()) for _ in range(count))
        self.out.append(" ".join(filter(None, (f"{first}–{last}", *unit))))

    def _fraction(self) -> None:
        self.stream.option()
        self.out.append(" " if self._ends_with_digit() else "")
        self._wrap("", "/")

    def _raised(self, mark: str) -> None:
        """Write a raised or lowered text, with a mark between it and a number if it is one too."""
        tokens = [token for token in (self.stream.skip_spaces(),) if token is not None]
        while tokens and tokens[0] == "{" and len(tokens) < 4 and tokens[-1] != "}":
            if (token := self.stream.next()) is None:
                break
            tokens.append(token)
        self.stream.push(*tokens)
        if _NUMBER.fullmatch("".join(tokens)) is not None and self._ends_with_digit():
            self.out.append(mark)
        self._wrap("", "")

    def _ends_with_digit(self) -> bool:
        last = next(filter(None, reversed(self.out[-4:])), "")
        return last[-1:].isdecimal()

    def _skip_length(self) -> None:
        token = self.stream.next()
        if token is None:
            return
        match = _LENGTH.match(token)
        rest = token[match.end() :] if match else token
        if rest:
            self.stream.push(rest)

    def _reference(self, name: str) -> None:
        while self.stream.option() is not None:
            pass
        keys = "".join(self.stream.argument()).strip()
        if self.options.citations and keys:
            self.out.append(f"[{' '.join(keys.split())}]")
        else:
            self.out.append(CUT)

    def _condition(self, name: str) -> None:
        """Keep one branch of a condition: that of a known switch, else the second one."""
        if name in ("x", "cat"):
            self.stream.skip_spaces(), self.stream.skip_spaces()
        if not self.stream.switches.get(name, False):
            self.stream.skip_branch()


def _units(tokens: list[str]) -> str:
    """Return the words of a unit, such as `kilometre per second`, or a unit or number that is written as text."""
    text, joins = "", True
    for token in tokens:
        is_name = token[0] == "\\"
        text += token.removeprefix("\\") if joins or not is_name else f" {token[1:]}"
        joins = not is_name or token[1:] in PREFIXES
    return text


_TEXT = {"~": " ", "---": "—", "--": "–", "``": "“", "''": "”", "`": "‘", "'": "’", "\n": "\n"}


def _spaces_of(formula: str) -> str:
    """Return a formula whose lines the paragraphs keep."""
    lines = [" ".join(line.split()) for line in formula.split("\n")]
    return LINE.join(line for line in lines if line)


def tidy(text: str) -> str:
    """Return the text without marks: one space between words, one line for a paragraph, one empty line between two."""
    text = _SPACES.sub(" ", text)
    if CUT in text:
        text = _BRACKETS.sub(lambda match: CUT if CUT in match.group() else match.group(), text)
        text = _SPACES.sub(" ", _CUT_SPACE.sub("", _CUT_LIST.sub("", text)).replace(CUT, " "))
    text = _AROUND_PARAGRAPH.sub(PARAGRAPH, _AROUND_LINE.sub(LINE, text)).strip(f" {LINE}{PARAGRAPH}")
    return text.replace(PARAGRAPH, "\n\n").replace(LINE, "\n").replace("\x1f", " ")
