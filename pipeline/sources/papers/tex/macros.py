r"""The tokens of TeX source, and the macros that a paper defines, which are expanded with a limit.

A macro is one of `\newcommand`, `\def`, `\let`, `\DeclareMathOperator` and their relatives. Macros with delimited
parameters and macros that use internal commands are not expanded.
"""

import re
from typing import NamedTuple

MAX_EXPANSIONS = 200_000
MAX_EXPANDED_CHARS = 16 << 20
"""Maximum number of expansions of a paper, and maximum length of what they yield together [code points]."""
MAX_GROUP_TOKENS = 1 << 20
MAX_OPTION_TOKENS = 400
"""Maximum number of tokens of an argument in braces, and of one in brackets."""
PIECE_CHARS = 4096
"""Length of the piece of a text of which single letters are taken as arguments [code points]."""
MAX_UNCLOSED = 50
"""Number of brackets without an end after which the maximum for one in brackets is a twentieth."""

TOKEN = re.compile(
    r"\\(?:[a-zA-Z@]+\*?|\r?\n|.|\Z)|[{}\[\]]|\$\$?|\n[ \t]*\n\s*|-{2,3}|``|''|[~&^_#]|[^\\{}\[\]$~&^_#\n`'-]+|.",
    re.DOTALL,
)
_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_PARAMETERS = re.compile(r"(?:#\d)*\Z")
_DEFINITIONS = frozenset(
    ("newcommand", "renewcommand", "providecommand", "DeclareRobustCommand", "newrobustcmd", "newcommandx")
)
_DEFS = frozenset(("def", "gdef", "edef", "xdef"))
_OPERATORS = frozenset(("DeclareMathOperator", "DeclareMathOperator*"))
_PREFIXES = frozenset(("long", "global", "outer", "protected"))
_CONDITION = re.compile(r"\\(if[a-zA-Z@]*|else|fi)(?![a-zA-Z@])")


class TooManyExpansionsError(Exception):
    """A paper's macros expand more often, or to more text, than a paper's do."""


class Macro(NamedTuple):
    """A macro: its number of arguments, the default of the first one if that is optional, and its body."""

    num_arguments: int
    default: tuple[str, ...] | None
    body: tuple[str, ...]
    is_usable: bool = True
    """False if it cannot be expanded; its name is then left out, as that of an unknown command is."""


class EnvironmentMacro(NamedTuple):
    """An environment that a paper defines, or a theorem environment with its label."""

    begin: Macro
    end: tuple[str, ...]
    label: str | None = None


class TokenStream:
    """The tokens of a text, in front of which tokens can be put; it knows the macros that were defined so far."""

    def __init__(self, text: str):
        self._text = text
        self._at = 0
        self._pushed: list[str] = []
        self.macros: dict[str, Macro] = {}
        self.environments: dict[str, EnvironmentMacro] = {}
        self.switches: dict[str, bool] = {"true": True, "false": False, "pdf": True, "PDFTeX": True, "pdfoutput": True}
        self._num_expansions = 0
        self._expanded_chars = 0
        self._num_unclosed = 0
        self.last_set = ""
        """Name of the macro that was defined last; a later definition may have removed it."""

    def next(self) -> str | None:
        """Return the next token, or None at the end."""
        if self._pushed:
            return self._pushed.pop()
        match = TOKEN.match(self._text, self._at)
        if match is None or self._at >= len(self._text):
            return None
        self._at = match.end()
        return match.group()

    def push(self, *tokens: str) -> None:
        """Put tokens in front of the next one."""
        self._pushed.extend(reversed(tokens))

    def repeat(self, *tokens: str) -> None:
        """Put tokens that may be read any number of times in front of the next one, and count them.

        Raises TooManyExpansionsError beyond the limits.
        """
        self._expanded_chars += sum(map(len, tokens))
        if self._expanded_chars > MAX_EXPANDED_CHARS:
            raise TooManyExpansionsError
        self.push(*tokens)

    def skip_spaces(self) -> str | None:
        """Return the next token after white space within the paragraph; None at the end."""
        while (token := self.next()) is not None:
            if token.isspace() and not is_paragraph(token):
                continue
            stripped = token.lstrip(" \t\n") if token[:1] in " \t\n" and not is_paragraph(token) else token
            return stripped
        return None

    def argument(self) -> list[str]:
        """Return the tokens of the next argument, without its braces."""
        token = self.skip_spaces()
        if token is None:
            return []
        if token == "{":
            return self._group()
        if token == "}" or is_paragraph(token):
            self.push(token)
            return []
        if token[0] != "\\" and len(token) > 1:
            # A long text is divided once, so that macros which take it letter by letter do not copy it each time.
            self.push(token[1:PIECE_CHARS], *([token[PIECE_CHARS:]] if len(token) > PIECE_CHARS else []))
            return [token[0]]
        return [token]

    def option(self) -> list[str] | None:
        """Return the tokens of an argument in brackets if one follows, without its brackets, else None."""
        token = self.skip_spaces()
        if token != "[":
            if token is not None:
                self.push(token)
            return None
        tokens: list[str] = []
        depth = 0
        limit = MAX_OPTION_TOKENS if self._num_unclosed < MAX_UNCLOSED else MAX_OPTION_TOKENS // 20
        while (token := self.next()) is not None and len(tokens) < limit:
            depth += (token == "{") - (token == "}")
            if (token == "]" and depth <= 0) or depth < 0:
                if depth < 0:
                    self.push(token)
                return tokens
            if is_paragraph(token):
                break
            tokens.append(token)
        self._num_unclosed += 1
        self.push("[", *tokens, *([token] if token is not None else []))
        return None

    def raw_until(self, closing: str) -> str:
        """Return the characters up to `closing`, and move after it; without it, those up to the end of the text."""
        if self._pushed:
            tokens: list[str] = []
            while (token := self.next()) is not None:
                tokens.append(token)
                if token == "}" and (text := "".join(tokens[-closing.count("{") * 8 - 8 :])).endswith(closing):
                    return "".join(tokens).removesuffix(closing) if text else ""
            return "".join(tokens)
        end = self._text.find(closing, self._at)
        start, end = self._at, end if end >= 0 else len(self._text)
        self._at = min(end + len(closing), len(self._text))
        return self._text[start:end]

    def environment_name(self) -> str:
        """Return the name of the environment that begins or ends here."""
        return "".join(self.argument()).strip()

    def _group(self) -> list[str]:
        tokens: list[str] = []
        depth = 1
        while (token := self.next()) is not None:
            depth += (token == "{") - (token == "}")
            if not depth:
                break
            tokens.append(token)
            if len(tokens) > MAX_GROUP_TOKENS:
                raise TooManyExpansionsError
        return tokens

    def expand(self, name: str) -> bool:
        """Put the body of a macro, with its arguments, in front of the next token; return False if it is no macro.

        Raises TooManyExpansionsError beyond the limits.
        """
        macro = self.macros.get(name)
        if macro is None:
            return False
        if macro.is_usable:
            self._put(macro)
        return True

    def begin_environment(self, name: str) -> EnvironmentMacro | None:
        """Put the start of an environment that the paper defines in front of the next token; return its macro."""
        environment = self.environments.get(name)
        if environment is not None and environment.label is None:
            self._put(environment.begin)
        return environment

    def _put(self, macro: Macro) -> None:
        arguments: list[list[str]] = []
        if macro.default is not None and macro.num_arguments:
            option = self.option()
            arguments.append([*macro.default] if option is None else option)
        while len(arguments) < macro.num_arguments:
            arguments.append(self.argument())
        self._num_expansions += 1
        if self._num_expansions > MAX_EXPANSIONS:
            raise TooManyExpansionsError
        most = MAX_EXPANDED_CHARS - self._expanded_chars
        self.repeat(*(_substitute(macro.body, arguments, most) if arguments else macro.body))

    def define(self, name: str) -> bool:
        """Read a definition after its command; return False if the command `name` defines nothing."""
        plain = name.rstrip("*")
        if plain in _DEFINITIONS:
            self._new_command(replaces=plain != "providecommand")
        elif name in _DEFS:
            self._def()
        elif name == "let":
            self._let()
        elif name in _OPERATORS:
            target, body = _control_name(self.argument()), self.argument()
            command = "\\operatorname*" if name.endswith("*") else "\\operatorname"
            self._set(target, Macro(0, None, (command, "{", *body, "}")))
        elif plain in ("newenvironment", "renewenvironment"):
            self._new_environment()
        elif plain in ("newtheorem", "declaretheorem", "spnewtheorem"):
            self._new_theorem(plain)
        elif name == "newif":
            target = _control_name([self.skip_spaces() or ""]).removeprefix("if")
            if target:
                self.switches[target] = False
        elif name.endswith(("true", "false")) and name.removesuffix("true").removesuffix("false") in self.switches:
            self.switches[name.removesuffix("true").removesuffix("false")] = name.endswith("true")
        else:
            return name in _PREFIXES
        return True

    def _new_command(self, replaces: bool) -> None:
        target = _control_name(self.argument())
        count = "".join(self.option() or ()).strip()
        default = self.option()
        body = self.argument()
        if replaces or target not in self.macros:
            number = int(count) if count in DIGITS else 0
            self._set(target, Macro(number, None if default is None else tuple(default), tuple(body)))

    def _def(self) -> None:
        target = _control_name([self.skip_spaces() or ""])
        parameters: list[str] = []
        while (token := self.next()) is not None and token != "{" and len(parameters) < 40:
            parameters.append(token)
        if token is None or token != "{":
            return
        body, pattern = self._group(), "".join(parameters).strip()
        is_usable = _PARAMETERS.match(pattern) is not None
        self._set(target, Macro(pattern.count("#"), None, tuple(body), is_usable))

    def _let(self) -> None:
        target, source = _control_name([self.skip_spaces() or ""]), self.skip_spaces() or ""
        if source.startswith("="):
            self.push(*([source[1:]] if source[1:] else []))
            source = self.skip_spaces() or ""
        macro = self.macros.get(_control_name([source])) or Macro(0, None, (source,))
        self._set(target, macro)

    def _set(self, name: str, macro: Macro) -> None:
        if not name:
            return
        # Bodies with internal commands, or that use the macro itself, do more than to abbreviate.
        internal = any("@" in token and token[0] == "\\" for token in macro.body)
        self.last_set = name
        self.macros[name] = macro._replace(is_usable=macro.is_usable and not internal and f"\\{name}" not in macro.body)
        if internal or f"\\{name}" in macro.body:
            del self.macros[name]

    def _new_environment(self) -> None:
        name = self.environment_name()
        count = "".join(self.option() or ()).strip()
        default = self.option()
        begin, end = self.argument(), self.argument()
        number = int(count) if count in DIGITS else 0
        if not any("@" in token and token[0] == "\\" for token in (*begin, *end)):
            macro = Macro(number, None if default is None else tuple(default), tuple(begin))
            self.environments[name] = EnvironmentMacro(macro, tuple(end))

    def _new_theorem(self, command: str) -> None:
        if command == "declaretheorem":
            options, name = "".join(self.option() or ()), self.environment_name()
            match = re.search(r"\bname\s*=\s*\{?([^,{}]+)", options)
            label = match[1].strip() if match else name.capitalize()
        else:
            name = self.environment_name()
            self.option()
            label = "".join(self.argument()).strip()
            self.option()
            if command == "spnewtheorem":
                self.argument(), self.argument()
        self.environments[name] = EnvironmentMacro(Macro(0, None, ()), (), label or name)

    def skip_branch(self) -> None:
        r"""Skip the rest of a branch of a condition, up to its `\else` or `\fi`, conditions inside included."""
        depth = 0
        while (token := self.next()) is not None:
            if token[0] != "\\" or not (match := _CONDITION.match(token)):
                continue
            if match[1] == "fi" and not depth:
                self.push(token)
                return
            if match[1] == "else" and not depth:
                return
            depth += match[1].startswith("if") and token != "\\iff"
            depth -= match[1] == "fi"


DIGITS = tuple("123456789")


def _substitute(body: tuple[str, ...], arguments: list[list[str]], most: int) -> list[str]:
    """Return the body with the arguments in place. Raises TooManyExpansionsError if they have more than `most` chars.

    The arguments are counted before they are copied: a long one may be used a million times.
    """
    tokens: list[str] = []
    sizes = [sum(map(len, argument)) for argument in arguments]
    pieces = iter(body)
    for token in pieces:
        if token != "#":
            tokens.append(token)
            continue
        following = next(pieces, "")
        if following[:1] in DIGITS[: len(arguments)]:
            number = int(following[0]) - 1
            most -= sizes[number]
            if most < 0:
                raise TooManyExpansionsError
            tokens += arguments[number]
            tokens += [following[1:]] if following[1:] else []
        else:
            tokens += ["#", following] if following and following != "#" else ["#"]
    return tokens


def _control_name(tokens: list[str]) -> str:
    """Return the name of the command that an argument consists of; empty if it is none."""
    text = "".join(tokens).strip()
    return text[1:].rstrip("*") if text.startswith("\\") and TOKEN.fullmatch(text) else ""


def is_paragraph(token: str) -> bool:
    """Return True if the token is the end of a paragraph."""
    return token[0] == "\n" and _PARAGRAPH.fullmatch(token) is not None


def definitions(text: str) -> tuple[dict[str, Macro], dict[str, EnvironmentMacro]]:
    """Return the macros and the environments of a style file.

    A macro that is defined again in a way that cannot be expanded has its definition before.
    """
    stream, macros = TokenStream(text), dict[str, Macro]()
    while (token := stream.next()) is not None:
        is_defined = token[0] == "\\" and len(token) > 1 and stream.define(token[1:])
        if is_defined and (macro := stream.macros.get(stream.last_set)) is not None:
            macros[stream.last_set] = macro
    return macros, stream.environments
