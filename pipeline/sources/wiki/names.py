"""Names that wikis in common languages use: of disambiguation, redirects and files, and templates that contain text.

Names are in lower case. A dump names its own namespaces too, but not the other names that it accepts for them.
"""

import re
from collections.abc import Callable, Mapping

DISAMBIGUATION: Mapping[str, str] = {
    "ar": "توضيح|صفحة توضيح|صفحات توضيح",
    "az": "dəqiqləşdirmə|dəqiqləşdirmə səhifələri",
    "be": "неадназначнасць|шматзначнасць",
    "bg": "пояснение|пояснителна страница|пояснителни страници",
    "bn": "দ্ব্যর্থতা নিরসন|দ্ব্যর্থতা নিরসন পাতা",
    "bs": "čvor",
    "ca": "desambiguació|pàgines de desambiguació",
    "cs": "rozcestník|rozcestníky",
    "cy": "gwahaniaethu|tudalennau gwahaniaethu",
    "da": "flertydig|flertydige",
    "de": "begriffsklärung",
    "el": "αποσαφήνιση|σελίδες αποσαφήνισης",
    "en": (
        "disambiguation|disambig|disamb|dab|disambiguation page|disambiguation pages|"
        "all disambiguation pages|hndis|human name disambiguation|human name disambiguation pages|geodis|"
        "place name disambiguation|airport disambiguation|biology disambiguation|"
        "call sign disambiguation|chinese title disambiguation|church disambiguation|"
        "genus disambiguation|hospital disambiguation|letter disambiguation|"
        "letter-number combination disambiguation|letter-numbercombdisambig|mathematical disambiguation|"
        "mathdab|military unit disambiguation|mil-unit-dis|music disambiguation|numberdis|"
        "number disambiguation|opus disambiguation|phonetics disambiguation|port disambiguation|"
        "portal disambiguation|road disambiguation|roaddis|school disambiguation|schooldis|"
        "species latin name disambiguation|station disambiguation|synagogue disambiguation|"
        "taxonomic authority disambiguation|taxonomy disambiguation|template disambiguation|"
        "disambig-cleanup|disambiguation cleanup|numdab|tla disambiguation"
    ),
    "eo": "apartigilo|apartigiloj",
    "es": "desambiguación|desambig",
    "et": "täpsustuslehekülg|täpsustusleheküljed",
    "eu": "argipen|argipen orriak",
    "fa": "ابهام‌زدایی|ابهام زدایی|صفحه‌های ابهام‌زدایی",
    "fi": "täsmennyssivu|täsmennyssivut",
    "fr": "homonymie|paronymie|homonymie de personnes",
    "gl": "homónimos|homónimos en galego",
    "he": "פירושונים",
    "hi": "बहुविकल्पी|बहुविकल्पी शब्द|बहुविकल्पी पृष्ठ",
    "hr": "razdvojba",
    "hu": "egyért|egyert|egyértelműsítő lap|egyértelműsítő lapok",
    "hy": "բազմիմաստություն|երկիմաստություն",
    "id": "disambiguasi|halaman disambiguasi",
    "is": "aðgreining|aðgreiningarsíður",
    "it": "disambigua|disambiguazione|pagine di disambiguazione",
    "ja": "aimai|曖昧さ回避|人名の曖昧さ回避|地名の曖昧さ回避",
    "ka": "მრავალმნიშვნელოვანი",
    "kk": "айрық|алаңқай",
    "ko": "동음이의|동음이의어 문서",
    "la": "discretiva",
    "lt": "nuorodinis straipsnis|disambigpage|nuorodiniai straipsniai",
    "ltg": "nūzeimu škiršona|nūzeimu atdaleišona",
    "lv": "nozīmju atdalīšana|nozīmju atdalīšanas lapas",
    "mk": "појаснување|појаснителна",
    "ms": "nyahkekaburan|laman nyahkekaburan",
    "nl": "dp|doorverwijspagina",
    "nn": "fleirtyding",
    "no": "peker|pekere",
    "pl": "ujednoznacznienie|strony ujednoznaczniające",
    "pt": "desambiguação|desambig|desambiguações",
    "ro": "dezambiguizare|dezambig|pagini de dezambiguizare",
    "ru": "неоднозначность|многозначные термины|страницы значений|значения",
    "simple": "disambiguation",
    "sh": "višeznačna odrednica|razdvojba",
    "sk": "rozlišovacia stránka|rozlišovacie stránky",
    "sl": "razločitev|razločitvene strani",
    "sq": "kthjellim|kthjellime",
    "sr": "вишезначна одредница|višeznačna odrednica|вишезначне одреднице",
    "sv": "förgrening|gren|förgreningssidor|olika betydelser|flertydig",
    "ta": "பக்கவழி நெறிப்படுத்தல்|பக்கவழி நெறிப்படுத்தல்கள்",
    "te": "అయోమయ నివృత్తి|అయోమయ నివృత్తి పేజీలు",
    "th": "แก้กำกวม|การแก้ความกำกวม",
    "tr": "anlam ayrımı|anlam ayrımı sayfaları",
    "uk": "неоднозначність|багатозначні терміни|багатозначність|значення",
    "ur": "ضد ابہام|ضد ابہام صفحات",
    "uz": "maʼnolari",
    "vi": "định hướng|trang định hướng",
    "zh": "消歧义|消歧義|消歧义页|消歧義頁|全部消歧義頁面|全部消歧义页面|人名消歧义|人名消歧義|地名消歧义|地名消歧義",
}
"""By language, the names of templates and categories that mark a page as disambiguation, separated by `|`. In brackets
at the end of a title, they mark the page too."""
DISAMBIGUATION_NAMES = frozenset(name.casefold() for names in DISAMBIGUATION.values() for name in names.split("|"))

REDIRECT = re.compile(
    r"\s*+#\s?(?:redirect|redirection|weiterleitung|redirección|redireccion|rinvia|redirecionamento|doorverwijzing|"
    r"перенаправление|перенапр|перенаправлення|перанакіраванне|преусмери|виканка|przekieruj|patrz|tam|omdirigering|"
    r"omdiriger|ohjaus|uudelleenohjaus|átirányítás|přesměruj|presmeruj|redirecteaza|yönlendir(?:me)?|đổi|alih|lencong|"
    r"転送|リダイレクト|重定向|넘겨주기|تحويل|تغییر[_ ‌]مسیر|הפניה|अनुप्रेषित|suunamine|birzuzendu|redirecció|alidirektu|"
    r"tilvísun|athchuir|aýdaw|айдау|ანიშნული|გადამისამართება|վերահղում)\b\s*+:?\s*+\[\[",
    re.IGNORECASE,
)
"""The beginning of a page that only leads to another one, in a dump without the element `redirect`."""

_FILES = (
    "file|image|media|category|datei|bild|kategorie|fichier|catégorie|archivo|imagen|categoría|"
    "immagine|categoria|ficheiro|arquivo|imagem|bestand|afbeelding|categorie|файл|изображение|медиа|"
    "категория|зображення|категорія|plik|grafika|kategoria|fil|kategori|tiedosto|kuva|luokka|fájl|"
    "kép|kategória|soubor|súbor|fişier|imagine|dosya|resim|tập tin|hình|thể loại|berkas|gambar|fail|"
    "ファイル|画像|カテゴリ|文件|檔案|图像|圖像|分类|分類|파일|그림|분류|ملف|صورة|تصنيف|پرونده|تصویر|رده|קובץ|תמונה|קטגוריה|"
    "चित्र|श्रेणी|αρχείο|εικόνα|κατηγορία|картинка|слика|датотека|категорија|slika|datoteka|"
    "kategorija|vaizdas|attēls|pilt|kategooria|fitxer|imatge|fitxategi|irudi|skeudenn|delwedd|íomhá|"
    "mynd|dosiero|fasciculus|imago|ფაილი|სურათი|կատեգորիա|պատկեր|ไฟล์|ภาพ|หมวดหมู่|প্রাসঙ্গিক|চিত্র|"
    "বিষয়শ্রেণী|படிமம்|பகுப்பு|దస్త్రం|బొమ్మ|వర్గం|fails|kategoreja|"
)
FILE_NAMESPACES = frozenset(_FILES.split("|"))
"""Names of the namespaces of files and categories; links to them show no text."""


NAME = "name"
"""Key of the whole first part of a template among its arguments."""
POWER, BREAK = "\ufdd7", "\ufdd4"
"""Noncharacters that mark, until the text is complete: a power of ten, and a line break."""


def _shown(number: str) -> Callable[[Mapping[str, str]], str]:
    return lambda arguments: arguments.get(number, "")


def _fixed(text: str) -> Callable[[Mapping[str, str]], str]:
    return lambda arguments: text


def _quote(arguments: Mapping[str, str]) -> str:
    return f"\n\n{arguments.get('text') or arguments.get('quote') or arguments.get('1', '')}\n\n"


def _joined(*numbers: str, between: str = " ") -> Callable[[Mapping[str, str]], str]:
    return lambda arguments: between.join(filter(None, (arguments.get(number, "") for number in numbers)))


def _last(arguments: Mapping[str, str]) -> str:
    numbers = [name for name in arguments if re.fullmatch("[0-9]{1,9}", name)]
    return arguments[max(numbers, key=int)] if numbers else ""


def _link(arguments: Mapping[str, str]) -> str:
    return arguments.get("lt") or arguments.get("1", "")


_RANGES = {"-": "\u2013", "\u2013": "\u2013", "to": " to ", "and": " and ", "or": " or ", "by": " by ", "x": " \u00d7 "}
_RANGES |= {"\u00d7": " \u00d7 ", "to(-)": " to ", "and(-)": " and ", "+/-": " \u00b1 ", "\u00b1": " \u00b1 "}
"""What is between the numbers of a measure, as written and as shown."""
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)


def _values(arguments: Mapping[str, str]) -> list[str]:
    """Return the arguments without a name, in their order."""
    return [arguments[key] for key in sorted((key for key in arguments if key.isdecimal()), key=int)]


def _all(between: str) -> Callable[[Mapping[str, str]], str]:
    return lambda arguments: between.join(filter(None, _values(arguments)))


def _before(text: str, otherwise: str = "") -> Callable[[Mapping[str, str]], str]:
    return lambda arguments: f"{text}{arguments['1']}" if arguments.get("1", "").strip() else otherwise


def _tag(name: str) -> Callable[[Mapping[str, str]], str]:
    return lambda arguments: f"<{name}>{arguments['1'].strip()}</{name}>" if "1" in arguments else ""


def _measure(arguments: Mapping[str, str]) -> str:
    """Return a measure as it is given: `5 km`, `5 to 10 km` or `5 ft 10 in`."""
    values = [value.strip() for value in _values(arguments)]
    text, rest = "".join(values[:1]), values[1:]
    while len(rest) >= 2 and rest[0] in _RANGES:
        text, rest = text + _RANGES[rest[0]] + rest[1], rest[2:]
    shown = rest[:3] if len(rest) >= 3 and re.fullmatch(r"[\d.,/]+", rest[1]) else rest[:1]
    return " ".join([text, *shown])


def _number(arguments: Mapping[str, str]) -> str:
    """Return a number with its uncertainty, its power of ten and its unit."""
    values = [value.strip() for value in _values(arguments)[:3]]
    text = "".join(values[:1])
    if len(values) == 3:
        text += f" +{values[1].lstrip('+')} \u2212{values[2].lstrip('-')}"
    elif len(values) == 2:
        text += values[1] if values[1].startswith("(") else f" \u00b1 {values[1]}"
    power, unit = arguments.get("e", ""), arguments.get("u") or arguments.get("ul") or ""
    return text + (f"\u00d710<sup>{power}</sup>" if power else "") + (f" {unit}" if unit else "")


def _fraction(arguments: Mapping[str, str]) -> str:
    values = [value.strip() for value in _values(arguments)[:3]]
    if len(values) == 3:
        return f"{values[0]} {values[1]}/{values[2]}"
    return "/".join(["1", *values] if len(values) == 1 else values)


def _power(arguments: Mapping[str, str]) -> str:
    return f"{POWER}<sup>{arguments['1'].strip()}</sup>" if arguments.get("1", "").strip() else ""


def _circa(arguments: Mapping[str, str]) -> str:
    return " \u2013 ".join(f"c. {value.strip()}" for value in _values(arguments)[:2]) or "c. "


def _as_of(arguments: Mapping[str, str]) -> str:
    """Return `As of July 2020`."""
    year, month, day = (*(value.strip() for value in _values(arguments)[:3]), "", "", "")[:3]
    name = _MONTHS[int(month) - 1] if re.fullmatch("0?[1-9]|1[0-2]", month) else month
    start = "since" if arguments.get("since") else "as of"
    start = start if arguments.get("lc") else start.capitalize()
    return arguments.get("alt") or " ".join(filter(None, (start, day, name, year)))


def _function(arguments: Mapping[str, str]) -> str:
    return arguments[NAME].partition(":")[2].strip()


def _table(function: Callable[[Mapping[str, str]], str], names: str) -> dict[str, Callable[[Mapping[str, str]], str]]:
    return dict.fromkeys(names.split("|"), function)


KEPT_TEMPLATES: Mapping[str, Callable[[Mapping[str, str]], str]] = {
    **_table(_shown("2"), "lang|langx|langi|lang2|langue|язык|color|colour|sort"),
    **_table(
        _shown("1"),
        "nowrap|nobr|nobreak|nobold|noitalic|small|smaller|big|larger|sc|smallcaps|abbr|tooltip|mvar|math|mono|code|"
        "kbd|tt|sic|not a typo|flag|flagcountry|num|nombre|nts|angle bracket|angbr|em|strong|bold|italic|er|iast|"
        "plainlist|chem2|flagathlete|keypress|key press|nihongo|s|год|year|y|ruby|as written|jas|ens|las|grs|"
        "frs|its|ess|rus|zhs|ars|hes|pls|trs|nls|pts|sws|das|nos|cs|hus|fis|kos",
    ),
    **_table(_last, "transl|transliteration|rtl-lang|script"),
    **_table(_link, "ill|interlanguage link|link-interwiki|illm|lien|не переведено|не переведено 5"),
    **_table(_measure, "convert|cvt"),
    **_table(_number, "val"),
    **_table(_joined("1", "2"), "unité|unite|unidad|unità|val2|sortname|ship"),
    **_table(_tag("sup"), "sup|exp"),
    **_table(_tag("sub"), "sub|ind"),
    **_table(_power, "e"),
    **_table(_circa, "circa|c.|ca."),
    **_table(_as_of, "as of"),
    **_table(_function, "formatnum"),
    **_table(_all(""), "chem|gaps"),
    **_table(_all(" "), "linktext"),
    **_table(_all("-"), "dts"),
    **_table(_all(BREAK), "unbulleted list|ubl"),
    "10^": lambda arguments: f"10<sup>{arguments.get('1', '')}</sup>",
    **{name: _before(f"{name.upper()} ") for name in ("uss", "hms", "rms", "hmas", "hmcs", "sms", "ss", "mv")},
    **{sign: _before(sign.upper()) for sign in ("us$", "\u00a3", "\u20ac", "\u00a5", "\u00b1")},
    **{name: _before("", text) for name, text in (("yes", "Yes"), ("no", "No"), ("won", "Won"), ("nom", "Nominated"))},
    **_table(_joined("1", "2", "3"), "date|date-|fecha"),
    **_table(_fraction, "frac|fraction|sfrac"),
    **_table(
        _quote,
        "quote|blockquote|cquote|quotation|citation bloc|cita|zitat|начало цитаты|цитата|bquote|quote box2|poemquote",
    ),
    **_table(_fixed("|"), "!"),
    **_table(_fixed("="), "="),
    **_table(_fixed("'"), "'|`"),
    **_table(_fixed("\u2013"), "ndash|\u2013|en dash"),
    **_table(_fixed(" \u2013 "), "spaced ndash|snd|spnd|spndash|sndash"),
    **_table(_fixed("\u2014"), "mdash|\u2014|em dash|emdash"),
    **_table(_fixed(" "), "nbsp|space|spaces|thinsp|clear space"),
    **_table(_fixed(" · "), "·|dot|middot|•|bullet"),
    **_table(_fixed("\u03c0"), "pi"),
    **_table(_fixed("'s"), "'s"),
}
"""By name, what a template shows of its arguments. Other templates are left out."""
