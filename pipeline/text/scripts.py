"""The writing that words are in, by the Unicode names of their letters."""

import unicodedata
from collections import Counter
from collections.abc import Iterable

SCRIPTS = {
    "LATIN": "Latn", "CYRILLIC": "Cyrl", "GREEK": "Grek", "ARABIC": "Arab", "HEBREW": "Hebr", "DEVANAGARI": "Deva",
    "CJK": "Hani", "HIRAGANA": "Jpan", "KATAKANA": "Jpan", "HANGUL": "Kore", "THAI": "Thai", "LAO": "Laoo",
    "KHMER": "Khmr", "MYANMAR": "Mymr", "TIBETAN": "Tibt", "BENGALI": "Beng", "GUJARATI": "Gujr", "GURMUKHI": "Guru",
    "TAMIL": "Taml", "TELUGU": "Telu", "KANNADA": "Knda", "MALAYALAM": "Mlym", "SINHALA": "Sinh", "ARMENIAN": "Armn",
    "GEORGIAN": "Geor", "ETHIOPIC": "Ethi", "THAANA": "Thaa", "MONGOLIAN": "Mong", "ORIYA": "Orya",
}  # fmt: skip
"""First word of a letter's Unicode name → ISO 15924 code of the writing."""


def script_of(words: Iterable[str]) -> str:
    """The ISO 15924 code of the writing of most letters; kana alone tell Japanese, `Zyyy` stands for no letters."""
    names = [unicodedata.name(char, "").partition(" ")[0].partition("-")[0] for word in words for char in word]
    scripts = Counter(SCRIPTS[name] for name in names if name in SCRIPTS)
    return "Jpan" if "Jpan" in scripts else max(scripts, key=lambda code: (scripts[code], code), default="Zyyy")
