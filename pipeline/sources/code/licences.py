"""The licence of a source file: its SPDX id by a tag in the file, or by the licence file of its repository.

A licence file is recognized by a few phrases of its text, so a copy with another layout, year or holder is recognized
too. A permissive licence with a condition that it does not have is not recognized. Of several licences in one file, the
first in the order of `_PHRASES` counts, where licences that name others come before these.
"""

import posixpath
import re

from pipeline.rights.expressions import is_met
from pipeline.sources.code.languages import may_be_code, suffix_of

PERMISSIVE = (
    *("MIT", "MIT-0", "X11", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSD-4-Clause", "0BSD", "ISC", "Unlicense"),
    *(
        "CC0-1.0",
        "Zlib",
        "BSL-1.0",
        "WTFPL",
        "NCSA",
        "PostgreSQL",
        "Python-2.0",
        "PSF-2.0",
        "Artistic-2.0",
        "CC-BY-4.0",
    ),
    *("CC-BY-3.0", "BlueOak-1.0.0", "Libpng", "curl", "UPL-1.0", "MS-PL"),
)
"""Licences that ask at most for attribution: no source code of works that use the file."""
KNOWN_LICENCES = (
    *PERMISSIVE,
    *("GPL-1.0", "GPL-2.0", "GPL-3.0", "LGPL-2.0", "LGPL-2.1", "LGPL-3.0", "AGPL-3.0", "MPL-1.1", "MPL-2.0", "EPL-1.0"),
    *("EPL-2.0", "CDDL-1.0", "CDDL-1.1", "EUPL-1.1", "EUPL-1.2", "CC-BY-SA-3.0", "CC-BY-SA-4.0", "CC-BY-NC-4.0"),
    *(
        "FSL-1.1-ALv2",
        "FSL-1.1-MIT",
        "CC-BY-NC-SA-4.0",
        "OSL-3.0",
        "SSPL-1.0",
        "BUSL-1.1",
        "Artistic-1.0",
        "OFL-1.1",
        "LPPL-1.3c",
        "CECILL-2.1",
    ),
)
"""Licences that settings may list, by SPDX id without `-only` and `-or-later`."""

MAX_LICENCE_BYTES = 128 << 10
"""Maximum size of a licence file [bytes]; the longest common one, GPL-3.0, has 35 kB."""
MAX_EXPRESSION_CHARS = 400
NO_ASSERTION = "NOASSERTION"
"""The licence of a file whose tags are longer than that; no setting allows it."""
_TAG = re.compile(
    r"SPDX-License-Identifier[\"']?[ \t]*[:=][ \t]*[\"']?([A-Z0-9(][\w.+() -]{0,400})"
    r"((?:[ \t]*[,;&][ \t]*[A-Z][\w.+-]{1,60}){0,10})",
    re.IGNORECASE,
)
_NAME = re.compile(r"[^\s,;&]+")
_TAG_END = re.compile(r"\s+(?:-->?|--).*$")
HEAD_CHARS = 5_000
"""Length of the start of a file in which its tag is searched [code points]."""
_FILE_NAME = re.compile(
    r"(?:(?:un)?licen[cs]e|copying)(?:[-_.](?:mit|apache|apache-?2(?:\.0)?|bsd|isc|gpl\w*|lgpl\w*|lesser|mpl|unlicense|cc0|zlib|boost|code))?"
    r"(?:\.(?:txt|md|rst|markdown))?|(?:mit|apache|bsd|gpl)[-_]licen[cs]e(?:\.(?:txt|md))?",
    re.IGNORECASE,
)
_OTHER_NAME = re.compile(r"(?:(?:un)?licen[cs]e|copying)[-_.][\w.+-]{1,60}", re.IGNORECASE)
_TEXT_SUFFIXES = frozenset(("txt", "md", "rst", "markdown", "html", "htm"))
_WORDS = re.compile(r"[^a-z0-9.]+")
_MAX_HEAD = 20_000

_MIT = "permission is hereby granted free of charge to any person obtaining a copy"
_BSD = "redistribution and use in source and binary forms with or without modification are permitted provided that"
_ISC = "permission to use copy modify and or distribute this software for any purpose with or without fee is hereby"
_PHRASES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    # (id, phrases that must all be there, phrases that must not be there); the first row that fits decides.
    ("FSL-1.1-MIT", ("functional source license version 1.1 mit future license",), ()),
    ("FSL-1.1-ALv2", ("functional source license version 1.1",), ()),
    ("MPL-2.0", ("mozilla public license version 2.0",), ()),
    ("MPL-2.0", ("mozilla public license v. 2.0",), ()),
    ("EPL-2.0", ("eclipse public license v 2.0",), ()),
    ("AGPL-3.0", ("gnu affero general public license version 3",), ()),
    ("LGPL-3.0", ("gnu lesser general public license version 3",), ("terms and conditions for copying",)),
    ("LGPL-2.1", ("gnu lesser general public license version 2.1",), ()),
    ("LGPL-2.0", ("gnu library general public license version 2",), ()),
    ("SSPL-1.0", ("server side public license version 1",), ()),
    ("GPL-3.0", ("gnu general public license version 3",), ()),
    ("GPL-2.0", ("gnu general public license version 2",), ()),
    ("GPL-1.0", ("gnu general public license version 1",), ()),
    ("MPL-1.1", ("mozilla public license version 1.1",), ()),
    ("EPL-1.0", ("eclipse public license v 1.0",), ()),
    ("CDDL-1.1", ("common development and distribution license cddl version 1.1",), ()),
    ("CDDL-1.0", ("common development and distribution license cddl version 1.0",), ()),
    ("EUPL-1.2", ("european union public licence v. 1.2",), ()),
    ("BUSL-1.1", ("business source license 1.1",), ()),
    ("Apache-2.0", ("apache license version 2.0",), ()),
    ("CC0-1.0", ("cc0 1.0 universal",), ()),
    ("CC-BY-NC-SA-4.0", ("attribution noncommercial sharealike 4.0 international",), ()),
    ("CC-BY-NC-4.0", ("attribution noncommercial 4.0 international",), ()),
    ("CC-BY-SA-4.0", ("attribution sharealike 4.0 international",), ()),
    ("CC-BY-4.0", ("attribution 4.0 international",), ()),
    ("BSL-1.0", ("boost software license version 1.0",), ()),
    ("Unlicense", ("this is free and unencumbered software released into the public domain",), ()),
    ("WTFPL", ("do what the fuck you want to public license",), ()),
    ("Artistic-2.0", ("the artistic license 2.0",), ()),
    ("OFL-1.1", ("sil open font license version 1.1",), ()),
    ("MS-PL", ("microsoft public license ms pl",), ()),
    ("UPL-1.0", ("the universal permissive license upl version 1.0",), ()),
    ("Python-2.0", ("python software foundation license version 2",), ()),
    ("BlueOak-1.0.0", ("blue oak model license",), ()),
    ("Zlib", ("altered source versions must be plainly marked as such",), ()),
    ("PostgreSQL", ("permission to use copy modify and distribute this software and its documentation for any purpose "
                    "without fee and without a written agreement is hereby granted",), ()),
    ("NCSA", (_MIT, "redistributions of source code must retain the above copyright notice"), ()),
    ("MIT-0", (_MIT,), ("the above copyright notice and this permission notice",)),
    ("MIT", (_MIT, "the above copyright notice and this permission notice"), ()),
    ("BSD-4-Clause", (_BSD, "all advertising materials mentioning features or use of this software"), ()),
    ("BSD-3-Clause", (_BSD, "endorse or promote products derived from this software"), ()),
    ("BSD-2-Clause", (_BSD, "redistributions in binary form must reproduce"), ()),
    ("ISC", (_ISC, "provided that the above copyright notice and this permission notice appear in all copies"), ()),
    ("0BSD", (_ISC,), ()),
)  # fmt: skip
_CONDITION = re.compile(
    r"commons clause|shall be used for good|(?<!commercial or )(?<!commercial and )\bnon ?commercial"
)
"""Conditions that are added to permissive licences, which then are none."""


def is_licence_file(path: str) -> bool:
    """Return True if a file of this name may hold the licence of the folder that it is in."""
    name, suffix = posixpath.basename(path), suffix_of(path)
    # A name in capitals without a suffix is no script.
    is_text = suffix in _TEXT_SUFFIXES or not may_be_code(path) or (not suffix and name[:1].isupper())
    return has_usual_name(path) or (is_text and _OTHER_NAME.fullmatch(name) is not None)


def has_usual_name(path: str) -> bool:
    """Return True if a file has a name by which licences are known; files of other names count if there is none."""
    return _FILE_NAME.fullmatch(posixpath.basename(path)) is not None


def recognize(text: str) -> str | None:
    """Return the SPDX id of the licence that a licence file holds, or None."""
    if tag := tagged(text):
        return tag
    words = _WORDS.sub(" ", text[:_MAX_HEAD].lower().replace("(c)", " "))
    for name, needed, excluded in _PHRASES:
        if all(phrase in words for phrase in needed) and not any(phrase in words for phrase in excluded):
            return None if name in PERMISSIVE and _CONDITION.search(words) else name
    return None


def tagged(text: str) -> str | None:
    """Return the SPDX expression that a file gives for its licence in its first characters, or None.

    All of several tags apply, and all known licences that commas or the like separate in one.
    """
    matches = [*_TAG.finditer(text, 0, HEAD_CHARS)]
    found = [_TAG_END.sub("", match[1]) for match in matches]
    others = (plain_id(name.rstrip(".")) for match in matches for name in _NAME.findall(match[2]))
    found += (name for name in others if name in KNOWN_LICENCES)
    tags = [*dict.fromkeys(tag for each in found if (tag := " ".join(each.split()).rstrip(" .-")))]
    expression = " AND ".join(f"({tag})" if " " in tag and len(tags) > 1 else tag for tag in tags)
    return (expression if len(expression) <= MAX_EXPRESSION_CHARS else NO_ASSERTION) or None


def combine(licences: dict[str, str | None]) -> str | None:
    """Return the licence of a folder with these licence files (SPDX id by name); None if one is not recognized.

    Files such as `LICENSE-MIT` and `LICENSE-APACHE` are alternatives. The lesser GPL comes with a copy of the GPL.
    Files of other names, such as `LICENSE-THIRD-PARTY.txt`, count only if there are no others.
    """
    licences = {name: licences[name] for name in licences if has_usual_name(name)} or licences
    found = dict.fromkeys(licences[name] for name in sorted(licences))
    if len(found) > 1 and any(name and name.startswith("LGPL") for name in found):
        found = {name: None for name in found if name is None or not name.startswith("GPL")}
    if None in found:
        return None
    are_alternatives = all(re.search(r"[-_.](?!txt|md|rst)", posixpath.basename(name)) for name in licences)
    return (" OR " if are_alternatives else " AND ").join(name for name in found if name)


def is_allowed(expression: str, allowed: frozenset[str]) -> bool:
    """Return True if a licence is allowed: one of its alternatives (`OR`), and all that apply together (`AND`)."""
    return is_met(expression, lambda name: plain_id(name) in allowed)


def plain_id(name: str) -> str:
    """Return an SPDX id in the spelling of KNOWN_LICENCES, without `-only`, `-or-later` and `+`."""
    name = re.sub(r"(?:-only|-or-later|\+)$", "", name, flags=re.IGNORECASE)
    return _SPELLED.get(name.lower(), name)


_SPELLED = {name.lower(): name for name in KNOWN_LICENCES}
