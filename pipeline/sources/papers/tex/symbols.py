r"""Tables of TeX commands: characters, accents, and commands whose arguments are no text.

Names are without the backslash, and without the star that some commands may have.
"""

ACCENTS = {
    "'": "\u0301", "`": "\u0300", "^": "\u0302", '"': "\u0308", "~": "\u0303", "=": "\u0304", ".": "\u0307",
    "u": "\u0306", "v": "\u030c", "H": "\u030b", "c": "\u0327", "d": "\u0323", "b": "\u0331", "r": "\u030a",
    "k": "\u0328", "t": "\u0361",
}  # fmt: skip
"""Combining character by the command of the accent."""

CHARACTERS = {
    "%": "%", "&": "&", "#": "#", "_": "_", "$": "$", "{": "{", "}": "}", " ": " ", "\n": " ", "\t": " ", ",": " ",
    ";": " ", ":": " ", "!": "", "/": "", "-": "", "@": "", "*": "", "+": "", ">": " ", "<": "", "|": "‖",
    "ss": "ß", "SS": "SS", "ae": "æ", "AE": "Æ", "oe": "œ", "OE": "Œ", "aa": "å", "AA": "Å", "o": "ø", "O": "Ø",
    "l": "ł", "L": "Ł", "i": "ı", "j": "ȷ", "dh": "ð", "DH": "Ð", "th": "þ", "TH": "Þ", "dj": "đ", "DJ": "Đ",
    "ng": "ŋ", "NG": "Ŋ", "S": "§", "P": "¶", "dag": "†", "ddag": "‡", "copyright": "©", "pounds": "£",
    "textsection": "§", "textparagraph": "¶", "textdagger": "†", "textdaggerdbl": "‡", "textcopyright": "©",
    "textregistered": "®", "texttrademark": "™", "textsterling": "£", "texteuro": "€", "euro": "€", "EUR": "€",
    "textyen": "¥", "textcent": "¢", "textdegree": "°", "degree": "°", "textpm": "±", "texttimes": "×",
    "textdiv": "÷", "textmu": "µ", "textmicro": "µ", "textohm": "Ω", "textbullet": "•", "textperiodcentered": "·",
    "textasciitilde": "~", "textasciicircum": "^", "textbackslash": "\\", "textbar": "|", "textless": "<",
    "textgreater": ">", "textunderscore": "_", "textdollar": "$", "textquotesingle": "'", "textasteriskcentered": "*",
    "textquoteleft": "‘", "textquoteright": "’", "textquotedblleft": "“", "textquotedblright": "”", "textquotedbl": '"',
    "guillemotleft": "«", "guillemotright": "»", "guillemetleft": "«", "guillemetright": "»", "quotedblbase": "„",
    "quotesinglbase": "‚", "glqq": "„", "grqq": "“", "flqq": "«", "frqq": "»", "og": "« ", "fg": " »", "lq": "‘",
    "rq": "’", "textendash": "–", "textemdash": "—", "textexclamdown": "¡", "textquestiondown": "¿", "ldots": "…",
    "dots": "…", "textellipsis": "…", "textbraceleft": "{", "textbraceright": "}", "lbrace": "{", "rbrace": "}",
    "TeX": "TeX", "LaTeX": "LaTeX", "LaTeXe": "LaTeX2e", "BibTeX": "BibTeX", "quad": " ", "qquad": " ", "enspace": " ",
    "space": " ", "nobreakspace": " ", "thinspace": " ", "slash": "/", "textvisiblespace": "␣", "backslash": "\\",
    "textordfeminine": "ª", "textordmasculine": "º", "textonehalf": "½", "textonequarter": "¼", "textnumero": "№",
    "ie": "i.e.", "eg": "e.g.", "tabularnewline": "\x1e", "newline": "\x1e", "hfill": " ", "xspace": "",
}  # fmt: skip
"""Text of the commands that stand for characters."""

IGNORED = {
    "label": 1, "index": 1, "vspace": 1, "hspace": 1, "includegraphics": 1, "epsfig": 1, "psfig": 1, "plotone": 1,
    "plottwo": 2, "epsfbox": 1, "bibliographystyle": 1, "bibliography": 1, "addbibresource": 1, "printbibliography":
    0, "documentclass": 1, "documentstyle": 1, "usepackage": 1, "RequirePackage": 1, "PassOptionsToPackage": 2,
    "ProvidesPackage": 1, "pagestyle": 1, "thispagestyle": 1, "pagenumbering": 1, "setlength": 2, "addtolength": 2,
    "setcounter": 2, "addtocounter": 2, "newcounter": 1, "stepcounter": 1, "refstepcounter": 1, "newlength": 1,
    "settowidth": 2, "numberwithin": 2, "hypersetup": 1, "graphicspath": 1, "geometry": 1, "theoremstyle": 1,
    "affiliation": 1, "affil": 1, "address": 1, "institute": 1, "institution": 1, "email": 1, "ead": 1,
    "altaffiltext": 2, "altaffilmark": 1, "altaffiliation": 1, "thanks": 1, "date": 1, "pacs": 1, "preprint": 1,
    "received": 1, "accepted": 1, "revised": 1, "published": 1, "journal": 1, "volume": 1, "offprints": 1,
    "correspondingauthor": 1, "corref": 1, "fnref": 1, "cortext": 2, "fntext": 2, "orcid": 1, "orcidlink": 1,
    "authorrunning": 1, "titlerunning": 1, "shorttitle": 1, "shortauthors": 1, "runninghead": 2, "lhead": 1,
    "chead": 1, "rhead": 1, "lfoot": 1, "cfoot": 1, "rfoot": 1, "markboth": 2, "markright": 1, "subjclass": 1,
    "subjclassname": 0, "keywords": 1, "keyword": 1, "ccsdesc": 1, "acmConference": 4, "acmYear": 1, "acmDOI": 1,
    "acmISBN": 1, "setcopyright": 1, "copyrightyear": 1, "footnotemark": 0, "footnotesize": 0, "color": 1,
    "pagecolor": 1, "definecolor": 3, "colorlet": 2, "fontsize": 2, "fontfamily": 1, "fontseries": 1, "fontshape":
    1, "selectfont": 0, "hyphenation": 1, "DeclareGraphicsExtensions": 1, "DeclareGraphicsRule": 4,
    "DeclareSymbolFont": 5, "DeclareMathSymbol": 4, "DeclareMathAlphabet": 5, "SetSymbolFont": 6,
    "DeclareFontShape": 6, "tikzset": 1, "usetikzlibrary": 1, "pgfplotsset": 1, "lstset": 1, "lstdefinestyle": 2,
    "captionsetup": 1, "enlargethispage": 1, "addcontentsline": 3, "contentsline": 3, "cline": 1, "cmidrule": 1,
    "specialrule": 3, "rule": 2, "phantom": 1, "hphantom": 1, "vphantom": 1, "bibitem": 1, "nocite": 1, "newif": 1,
    "newsavebox": 1, "newdimen": 1, "newcolumntype": 2, "setlist": 1, "newlist": 3, "crefname": 3, "Crefname": 3,
    "allowdisplaybreaks": 0, "typeout": 1, "special": 1, "includepdf": 1, "bibinfo": 1, "makeatletter": 0,
    "makeatother": 0, "pdfbookmark": 2, "hypertarget": 1, "reversemarginpar": 0, "marginpar": 1, "todo": 1,
    "glsaddall": 0, "newacronym": 3, "newglossaryentry": 2, "DOI": 1, "doi": 1, "arraybackslash": 0,
    "authornote": 1, "authorcontributions": 1, "hyperref": 0, "linewidth": 0, "textwidth": 0, "columnwidth": 0,
    "textheight": 0,
}  # fmt: skip
"""Number of arguments that are left out, by command."""

LAST_KEPT = {
    "href": 2, "textcolor": 2, "colorbox": 2, "multicolumn": 3, "multirow": 3, "parbox": 2, "raisebox": 2,
    "resizebox": 3, "scalebox": 2, "rotatebox": 2, "makebox": 1, "framebox": 1, "hyperlink": 2, "ifthenelse": 3,
    "foreignlanguage": 2, "adjustbox": 2, "fcolorbox": 3, "acronym": 2, "tooltip": 2,
}  # fmt: skip
"""Number of arguments of the commands whose last argument is text."""

DIMENSIONS = frozenset(
    (
        *(
            "vskip",
            "hskip",
            "kern",
            "mkern",
            "mskip",
            "raise",
            "lower",
            "moveleft",
            "moveright",
            "parindent",
            "parskip",
        ),
        *("baselineskip", "textwidth", "textheight", "hsize", "vsize", "topmargin", "oddsidemargin", "evensidemargin"),
        *("headheight", "headsep", "footskip", "columnsep", "hoffset", "voffset", "abovedisplayskip", "leftskip"),
        *("belowdisplayskip", "tabcolsep", "itemsep", "parsep", "topsep", "lineskip", "rightskip", "hangindent"),
        *(
            "tolerance",
            "hbadness",
            "vbadness",
            "penalty",
            "pageno",
            "hfuzz",
            "widowpenalty",
            "clubpenalty",
            "magnification",
        ),
        *("interdisplaylinepenalty", "arraycolsep", "arrayrulewidth", "fboxsep", "mathsurround", "medmuskip"),
    )
)
"""Commands that a number or a length may follow."""

CITATIONS = frozenset(
    (
        *("cite", "citep", "citet", "citealp", "citealt", "citeauthor", "citeyear", "citeyearpar", "citenum", "Cite"),
        *("Citep", "Citet", "Citealt", "Citealp", "onlinecite", "parencite", "Parencite", "textcite", "Textcite"),
        *("footcite", "autocite", "Autocite", "fullcite", "supercite", "citefullauthor", "citealias", "citetalias"),
        *("citepalias", "shortcite", "shortciteA", "citeA", "citeN", "cites", "parencites", "textcites"),
    )
)
REFERENCES = frozenset(
    (
        *("ref", "eqref", "pageref", "autoref", "cref", "Cref", "nameref", "vref", "Vref", "prettyref", "fref", "Fref"),
        *(
            "subref",
            "figref",
            "tabref",
            "secref",
            "labelcref",
            "cpageref",
            "crefrange",
            "Crefrange",
            "thmref",
            "eqnref",
        ),
    )
)
HEADINGS = {
    "part": 1, "chapter": 1, "section": 2, "subsection": 3, "subsubsection": 4, "paragraph": 5, "subparagraph": 6,
    "heading": 2, "subheading": 3, "beginsection": 2,
}  # fmt: skip
"""Level of a heading by its command; the title of a document is of level 1."""
MATH_ENVIRONMENTS = frozenset(
    (
        *(
            "equation",
            "align",
            "gather",
            "multline",
            "eqnarray",
            "displaymath",
            "math",
            "flalign",
            "alignat",
            "xalignat",
        ),
        *("xxalignat", "dmath", "dgroup", "darray", "subequations", "empheq", "IEEEeqnarray", "eqnarray"),
    )
)
RAW_ENVIRONMENTS = frozenset(("verbatim", "verbatim*", "Verbatim", "lstlisting", "minted", "alltt"))
SKIPPED_ENVIRONMENTS = frozenset(
    (
        *("thebibliography", "references", "comment", "tikzpicture", "pspicture", "picture", "filecontents", "overpic"),
        *("keywords", "keyword", "CCSXML", "IEEEkeywords", "asydef", "asy", "psfrags", "pycode", "axis", "feynman"),
        *("fmffile", "fmfgraph", "diagram", "tikzcd", "xy", "pgfpicture", "forest", "bytefield", "frontmatter*"),
    )
)
FLOATS = frozenset(
    (
        *("figure", "table", "wrapfigure", "wraptable", "sidewaysfigure", "sidewaystable", "deluxetable", "longtable"),
        *(
            "SCfigure",
            "marginfigure",
            "floatingfigure",
            "turnpage",
            "scheme",
            "algorithm",
            "plate",
            "subfigure",
            "teaserfigure",
        ),
        *("rotatetable", "splitdeluxetable", "planotable", "supertabular", "longrotatetable", "margintable"),
    )
)
TABLES = frozenset(("tabular", "tabularx", "tabulary", "tabu", "array", "longtabu", "tblr", "ruledtabular"))
THEOREMS = {
    "theorem": "Theorem", "thm": "Theorem", "lemma": "Lemma", "lem": "Lemma", "corollary": "Corollary",
    "cor": "Corollary", "proposition": "Proposition", "prop": "Proposition", "definition": "Definition",
    "defn": "Definition", "remark": "Remark", "rem": "Remark", "example": "Example", "conjecture": "Conjecture",
    "claim": "Claim", "proof": "Proof", "observation": "Observation", "assumption": "Assumption", "problem": "Problem",
}  # fmt: skip
"""Label of the theorem environments that papers use without declaring them."""
FRACTIONS = ("frac", "tfrac", "dfrac", "nicefrac", "sfrac", "textfrac", "xfrac")
"""Commands of two arguments, one over the other, which text writes with a slash."""
PREFIXES = frozenset(
    (
        *("yocto", "zepto", "atto", "femto", "pico", "nano", "micro", "milli", "centi", "deci"),
        *("deca", "deka", "hecto", "kilo", "mega", "giga", "tera", "peta", "exa", "zetta", "yotta"),
    )
)
"""Commands of the package siunitx that the name of a unit follows."""
DINGBATS = {"51": "✓", "52": "✔", "53": "✕", "54": "✖", "55": "✗", "56": "✘"}
"""Signs of yes and no in tables, by their numbers in Zapf Dingbats; others are ornaments."""
