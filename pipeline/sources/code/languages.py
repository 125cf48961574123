"""The programming language of a file, by its name, its first line, and for ambiguous suffixes by its content."""

import posixpath
import re
from collections.abc import Callable

_SUFFIXES = """
Ada: ada adb ads | Agda: agda | ANTLR: g4 | AppleScript: applescript scpt | Assembly: asm s nasm a51
Astro: astro | AutoHotkey: ahk | Awk: awk gawk | Ballerina: bal | Batchfile: bat cmd | Bicep: bicep | Bison: y yy yacc
Blade: blade.php | C: c | C#: cs csx | C++: cc cpp cxx c++ hpp hxx hh h++ ipp tpp inl ixx cppm | CMake: cmake
COBOL: cob cbl cpy cobol | CoffeeScript: coffee | Clojure: clj cljs cljc edn | Common Lisp: lisp lsp cl asd
Crystal: cr | CSS: css | CUDA: cu cuh | Cython: pyx pxd pxi | D: di | Dart: dart | Dhall: dhall | Dockerfile: dockerfile
EJS: ejs | Elixir: ex exs | Elm: elm | Emacs Lisp: el | ERB: erb | Erlang: erl hrl | F#: fsx fsi | Fennel: fnl
Fish: fish | Fortran: f for f77 f90 f95 f03 f08 | GDScript: gd | GLSL: glsl vert frag geom comp tesc tese
Gherkin: feature | Gleam: gleam | Go: go | GraphQL: graphql gql | Groovy: groovy gradle gvy | HCL: tf hcl tfvars
HLSL: hlsl hlsli fx | HTML: html htm xhtml | Hack: hack hhi | Haml: haml | Handlebars: hbs handlebars | Haskell: hs lhs
Haxe: hx | Idris: idr | INI: ini cfg | Isabelle: thy | J: ijs | JSON: json json5 jsonc | JSX: jsx | Java: java
JavaScript: js mjs cjs | Jinja: j2 jinja jinja2 | Julia: jl | Jsonnet: jsonnet libsonnet | Kotlin: kt kts
LLVM: ll | Lean: lean | Less: less | Lex: lex | Liquid: liquid | Logtalk: lgt | Lua: lua | Makefile: mk mak
Markdown: md markdown mdx | Metal: metal | Modelica: mo | Mojo: mojo | MoonScript: moon
Nim: nim nims | Nix: nix | OCaml: ml mli mll mly | Objective-C++: mm | Odin: odin | OpenCL: opencl | OpenSCAD: scad
PHP: php phtml php5 | Pascal: pas dpr lpr pp | Perl: pm plx | PowerShell: ps1 psm1 psd1 | Processing: pde
Protocol Buffer: proto | Pug: pug jade | Puppet: epp | PureScript: purs | Python: py pyi pyw | Q#: qs | QML: qml
R: r rd | Racket: rkt scrbl | Raku: raku rakumod p6 | ReScript: res resi | reStructuredText: rst rest | Roff: roff man
Ruby: rb rake gemspec ru rbi | Rust: rs | SAS: sas | SCSS: scss | SMT: smt smt2 | SQL: sql psql pgsql ddl
Sass: sass | Scala: scala sc sbt | Scheme: scm ss sld | Shell: sh bash zsh ksh bats | Smalltalk: st | Smarty: tpl
Solidity: sol | SPARQL: sparql rq | Stan: stan | Starlark: bzl star bazel | Stata: do ado | Stylus: styl
Standard ML: sml fun | Svelte: svelte | Swift: swift | SystemVerilog: sv svh | TOML: toml | TSX: tsx | Tcl: tcl tk
TeX: tex sty dtx ltx | Thrift: thrift | Twig: twig | TypeScript: mts cts | VHDL: vhd vhdl | Vala: vala vapi
Vim Script: vim | Visual Basic: vb vbs bas frm | Vue: vue | Vyper: vy | WGSL: wgsl | WebAssembly: wat wast
XML: xml xsd wsdl xaml svg plist csproj vcxproj resx | XQuery: xq xquery xqy | XSLT: xsl xslt | YAML: yml yaml
YANG: yang | Zig: zig | ABAP: abap | ActionScript: as | Apex: trigger | Arduino: ino | BitBake: bb | Cadence: cdc
ColdFusion: cfm cfc | Dafny: dfy | Eiffel: e | Factor: factor | Io: io | Jasmin: jasmin | Move: move | NetLogo: nlogo
Nunjucks: njk | PostScript: ps eps | PLSQL: pls plb pks pkb plsql | RenderScript: rsh | Ring: ring | Squirrel: nut
"""
_NAMES = """
Makefile: makefile gnumakefile bsdmakefile kbuild | Dockerfile: dockerfile containerfile | CMake: cmakelists.txt
Ruby: rakefile gemfile guardfile vagrantfile podfile fastfile brewfile | Groovy: jenkinsfile | Just: justfile
Starlark: build workspace build.bazel workspace.bazel tiltfile | Meson: meson.build meson_options.txt
Shell: .bashrc .bash_profile .zshrc .profile configure.ac | Vim Script: .vimrc vimrc | Emacs Lisp: .emacs
Python: sconstruct sconscript wscript | Go: go.mod | Nginx: nginx.conf | Perl: makefile.pl cpanfile
"""
_INTERPRETERS = """
Python: python pypy | Shell: sh bash zsh ksh dash ash bats | Perl: perl | Ruby: ruby jruby | JavaScript: node nodejs
TypeScript: deno ts-node tsx bun | PHP: php | Lua: lua luajit | Tcl: tclsh wish expect | R: rscript | Awk: awk gawk mawk
Groovy: groovy | Scala: scala | Julia: julia | Fish: fish | Raku: raku perl6 | Racket: racket | Makefile: make
OCaml: ocaml | Haskell: runhaskell stack | Elixir: elixir | Erlang: escript | Clojure: clojure bb | Swift: swift
PowerShell: pwsh | Scheme: guile | Common Lisp: sbcl | Prolog: swipl | Crystal: crystal | Kotlin: kotlin
"""


def _table(rows: str) -> dict[str, str]:
    pairs = (row.split(":", 1) for line in rows.strip().splitlines() for row in line.split(" | "))
    return {word: language.strip() for language, words in pairs for word in words.split()}


BY_SUFFIX, BY_NAME, BY_INTERPRETER = _table(_SUFFIXES), _table(_NAMES), _table(_INTERPRETERS)
_FIRST_LINE = re.compile(r"#!\s*(?:\S*/)?(?:env\s+(?:-\S+\s+|\w+=\S*\s+)*)?(?:\S*/)?([a-zA-Z][a-zA-Z_-]*)")
_HEAD_CHARS = 20_000
"""Length of the start of a file by which an ambiguous suffix is decided [code points]."""


def _any(*patterns: str) -> re.Pattern[str]:
    """Return a pattern that matches where any of these does.

    White space at the start of a line is matched in that line alone: every line has a start of its own, and runs of
    empty lines would take quadratic time.
    """
    return re.compile("|".join(patterns).replace(r"^\s*", r"^[^\S\n]*"), re.MULTILINE)


_OBJC = _any(r"^\s*@(?:interface|implementation|protocol|property|class|end|import)\b", r"^\s*#\s*import\s+[<\"]")
_CPP = _any(
    r"^\s*(?:class|namespace|template|using|public:|private:|protected:)(?![\w])[^;]*", r"\bstd::", r"\bvirtual\s+\w",
    r"^\s*#\s*include\s+<(?:string|vector|map|memory|iostream|algorithm|functional|cstd\w+|utility|unordered_\w+)>",
    r"\bconstexpr\b|\bnullptr\b|\bnoexcept\b|\btypename\b",
)  # fmt: skip
_MATLAB = _any(
    r"^\s*%", r"^\s*function\b[^{;]*$", r"^\s*(?:end|clc|close all|clear all|classdef\b.*)\s*;?\s*$", r"\.\.\.\s*$"
)
_MERCURY = _any(r"^:-\s*module\b")
_MATHEMATICA = _any(r"\(\*(?:(?!\(\*(?!\)))[\s\S]){0,400}?\*\)", r"\b\w+\[\w*_\w*\]\s*:?=")
_PROLOG = _any(r"^:-\s", r"^\s*[a-z]\w*\([^()\n]*\)\s*(?::-|\.\s*$)")
_PERL = _any(r"^\s*(?:use|package|sub|my|our)\s+[\w:$@%]", r"[$@%]\w+\s*=", r"^=(?:pod|head1|cut)\b")
_COQ = _any(r"^\s*(?:Theorem|Lemma|Proof|Require|Definition|Inductive|Fixpoint|Qed|From\s+\w+\s+Require)\b")
_VERILOG = _any(
    r"^\s*(?:module\s+\w+|endmodule|always\s*@|assign\s|`timescale|`define|`include|input\s|output\s|wire\s|reg\s)"
)
_VLANG = _any(r"^\s*(?:pub\s+)?fn\s+\w+", r"^\s*module\s+\w+\s*$", r"^\s*struct\s+\w+\s*\{")
_QT_TS = _any(r"^\s*<\?xml|^\s*<!DOCTYPE TS>|^\s*<TS\b")
_FSHARP = _any(r"^\s*(?:let|open|module|namespace|type|member|#light)\b")
_GLSL = _any(r"^\s*#version\s+\d", r"\bgl_\w+|^\s*(?:uniform|varying|attribute|precision)\s")
_D = _any(r"^\s*(?:module|import)\s+[\w.]+.*;", r"\bwriteln\(")
_APEX = _any(r"^\s*(?:public|private|global)\s+(?:with(?:out)?\s+sharing\s+|virtual\s+|abstract\s+)?class\b")
_VBA = _any(r"^(?:VERSION \d|Attribute VB_|Option Explicit)")
_TEX = _any(r"\\(?:ProvidesClass|NeedsTeXFormat|newcommand|def|RequirePackage|documentclass)\b")
_PHP = _any(r"<\?php")
_PASCAL = _any(r"^\s*(?:unit|procedure|function|interface|implementation|\{\$)\b")

AMBIGUOUS: dict[str, tuple[tuple[re.Pattern[str], str], ...]] = {
    "h": ((_OBJC, "Objective-C"), (_CPP, "C++"), (_any(r""), "C")),
    "m": ((_MERCURY, "Mercury"), (_OBJC, "Objective-C"), (_MATHEMATICA, "Mathematica"), (_MATLAB, "MATLAB"),
          (_any(r"^\s*#\s*include"), "Objective-C")),
    "pl": ((_PERL, "Perl"), (_PROLOG, "Prolog")),
    "pro": ((_PROLOG, "Prolog"), (_any(r"^\s*(?:QT|TARGET|SOURCES|CONFIG|TEMPLATE)\s*[+]?="), "QMake")),
    "t": ((_PERL, "Perl"),),
    "v": ((_COQ, "Coq"), (_VERILOG, "Verilog"), (_VLANG, "V")),
    "ts": ((_QT_TS, "XML"), (_any(r""), "TypeScript")),
    "fs": ((_GLSL, "GLSL"), (_FSHARP, "F#")),
    "vs": ((_GLSL, "GLSL"),),
    "d": ((_D, "D"),),
    "cls": ((_VBA, "Visual Basic"), (_TEX, "TeX"), (_APEX, "Apex")),
    "inc": ((_PHP, "PHP"), (_PASCAL, "Pascal"), (_any(r"^\s*#\s*(?:include|define|if)"), "C++")),
    "l": ((_any(r"^%%|^%\{"), "Lex"), (_any(r"^\s*\((?:defun|setq|load)\b"), "Common Lisp"),
          (_any(r"^\.[A-Z]{2}\b"), "Roff")),
    "1": ((_any(r"^\.(?:TH|SH|Dd)\b"), "Roff"),),
    "in": ((_any(r"^\s*AC_INIT|^\s*AM_INIT"), "M4"),),
    "m4": ((_any(r"^\s*(?:AC_|dnl|define\(|m4_)"), "M4"),),
}  # fmt: skip
"""Rules of the suffixes that several languages share: the first pattern in the start of the file decides."""
LANGUAGES = frozenset(
    (
        *BY_SUFFIX.values(),
        *BY_NAME.values(),
        *BY_INTERPRETER.values(),
        *(name for rules in AMBIGUOUS.values() for _, name in rules),
    )
)
"""Every language that is recognized."""

DATA_LANGUAGES = frozenset(("JSON", "YAML"))
LONG_LINES = frozenset(("HTML", "JSON", "Markdown", "Roff", "SMT", "TeX", "XML", "reStructuredText", "YAML", "SVG"))
"""Languages whose lines may be long. Source: StarCoder2, section 2.1; reStructuredText and YAML are similar."""
NUMERIC_LANGUAGES = frozenset(("Assembly", "WebAssembly"))
XML_LANGUAGES = frozenset(("XML", "XSLT", "HTML", "Vue", "Svelte", "QML"))


def suffix_of(path: str) -> str:
    """Return the suffix of a file's name in lower case, without the dot; empty if it has none."""
    name = posixpath.basename(path).lower()
    return name.rpartition(".")[2] if "." in name.lstrip(".") else ""


def may_be_code(path: str) -> bool:
    """Return True if a file of this name can have a language: by a known name or suffix, or without a suffix."""
    name, suffix = posixpath.basename(path).lower(), suffix_of(path)
    return name in BY_NAME or not suffix or suffix in BY_SUFFIX or suffix in AMBIGUOUS


def language_of(path: str, read_head: Callable[[int], str]) -> str | None:
    """Return the language of a file, or None. `read_head` returns the first characters of its text."""
    name, suffix = posixpath.basename(path).lower(), suffix_of(path)
    if name in BY_NAME:
        return BY_NAME[name]
    double = ".".join(name.split(".")[-2:])
    if double in BY_SUFFIX:
        return BY_SUFFIX[double]
    if suffix in AMBIGUOUS:
        head = read_head(_HEAD_CHARS)
        return next((language for pattern, language in AMBIGUOUS[suffix] if pattern.search(head)), None)
    if suffix in BY_SUFFIX:
        return BY_SUFFIX[suffix]
    if suffix:
        return None
    match = _FIRST_LINE.match(read_head(200))
    return BY_INTERPRETER.get(match[1].lower().rstrip("-_")) if match else None
