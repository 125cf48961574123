"""Secrets of programs: keys and tokens of services, private keys, web tokens, and values of settings with such names.

A token counts by the form that its service gives it, and by its checksum if it has one. The value of a setting counts
if its name says that it is secret and its characters are as random as those of a key; a placeholder, such as
`changeme`, does not count.
"""

import math
import re
import string
from collections import Counter
from zlib import crc32

MIN_ENTROPY, MIN_HEX_ENTROPY = 3.5, 2.8
"""Minimum entropy of the characters of a value [bits a character]. Words and names have less than 3.5; a random value
of 20 letters and digits has about 4."""

_WORDS = (
    r"(?:passwords?|passwd|pwd|secrets?|tokens?|api[_-]?keys?|apikeys?|access[_-]?keys?|auth[_-]?keys?|private[_-]?keys?"
    r"|client[_-]?secrets?|credentials?|account[_-]?keys?|encryption[_-]?keys?|signing[_-]?keys?)"
)
_ASSIGNED = rf"{_WORDS}(?:[_-][a-z0-9]{{1,15}}){{0,2}}+[\"'\]]{{0,2}}+[ \t]{{0,4}}+(?:=>|:=|=|:)[ \t]{{0,4}}+"
SECRETS = {
    "joined_tokens": (
        r"(?-i:\bya29\.[0-9A-Za-z_-]{30,512})",  # Google access tokens
        r"(?-i:\bGOCSPX-[0-9A-Za-z_-]{28}(?![0-9A-Za-z_-]))",  # Google client secrets
        r"(?-i:\bgh[pousr]_[A-Za-z0-9]{36,251}\b)",  # GitHub tokens
        r"(?-i:\bgithub_pat_[A-Za-z0-9_]{60,255}\b)",
        r"(?-i:\bglpat-[A-Za-z0-9_-]{20,64}(?![0-9A-Za-z_-]))",  # GitLab tokens
        r"(?-i:\bxox[abeoprs]-[0-9A-Za-z-]{20,255}(?![0-9A-Za-z-]))",  # Slack tokens
        r"(?-i:\b[rs]k_live_[0-9A-Za-z]{20,100}\b)",  # Stripe keys
        r"(?-i:\bhf_[A-Za-z]{34}\b)",  # Hugging Face tokens
        r"(?-i:\bnpm_[A-Za-z0-9]{36}\b)",
        r"(?-i:\bpypi-AgE[A-Za-z0-9_-]{50,512})",
        r"(?-i:\bSG\.[\w-]{16,32}\.[\w-]{30,64}(?![\w-]))",  # SendGrid keys
        r"(?-i:\bsk-(?:proj-|ant-[a-z0-9]{2,8}-)?[A-Za-z0-9_-]{32,200}(?![\w-]))",  # keys of model services
        r"(?-i:\bglsa_[A-Za-z0-9]{32}_[0-9a-f]{8}\b)",  # Grafana service accounts
        r"(?-i:\bdop_v1_[0-9a-f]{64}\b)",  # DigitalOcean
        r"(?-i:\bshp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}\b)",  # Shopify
        r"(?-i:\b[0-9]{8,10}:AA[A-Za-z0-9_-]{33}(?![\w-]))",  # Telegram bots
        r"(?-i:\bAGE-SECRET-KEY-1[QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L]{58}\b)",  # age
        r"(?-i:\bwhsec_[A-Za-z0-9+/]{32}(?![A-Za-z0-9+/]))",  # Stripe web hooks
        r"(?-i:\brubygems_[0-9a-f]{48}\b)",
        r"(?-i:\bxkeysib-[0-9a-f]{64}-[A-Za-z0-9]{16}\b)",  # Brevo
        r"(?-i:\bhvs\.[A-Za-z0-9_-]{24,200}(?![\w-]))",  # Vault
    ),
    "access_keys": (
        r"(?-i:\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}\b)",  # AWS access key ids
        r"(?-i:\bAIza[0-9A-Za-z_-]{35}(?![0-9A-Za-z_-]))",  # Google API keys
        r"(?-i:\bATATT3[A-Za-z0-9_=-]{60,250}(?![\w=-]))",  # Atlassian
    ),
    "web_tokens": (
        r"(?-i:\beyJ[A-Za-z0-9_-]{8,512}\.eyJ[A-Za-z0-9_-]{8,1024}\.[A-Za-z0-9_-]{16,700}(?![\w-]))",  # JSON web tokens
    ),
    "hooks": (r"(?-i:(?<=hooks\.slack\.com/services/)T[A-Z0-9]{6,12}/B[A-Z0-9]{6,12}/[A-Za-z0-9]{20,32}\b)",),
    "account_keys": (
        r"(?-i:(?<=AccountKey=)[A-Za-z0-9+/]{86}==)",  # Azure storage keys
    ),
    "settings": (
        rf"{_ASSIGNED}[\"'`]\K[^\s\"'`]{{12,200}}+(?=[\"'`])",
        rf"{_ASSIGNED}\K[^\s\"'`;,&]{{16,200}}+(?=[\s;,&]|$)",
    ),
}
"""Patterns of tokens, and of the values of settings whose names say that they are secret, by candidate family."""
PRIVATE_KEY = (
    r"(?-i:-----BEGIN [A-Z0-9 ]{0,24}PRIVATE KEY(?: BLOCK)?-----(?:[\s\S]{30,3800}?-----END [A-Z0-9 ]{0,24}PRIVATE KEY"
    r"(?: BLOCK)?-----|[A-Za-z0-9+/=\s\\]{64,3800}))"
)
_PLACEHOLDER = re.compile(
    r"example|sample|dummy|placeholder|changeme|change[_-]me|your[_-]?|(?:^|[_-])my[_-]|insert|replace|redacted|xxxx|\.\.\."
    r"|todo|<|>|\$\{|\{\{|\$\(|%\(|%s|\{\w*\}|process\.env|getenv|os\.environ|password|secret|0123456789|1234567890"
    r"|abcdefgh|^/|://|^\.{1,2}/",
    re.IGNORECASE,
)
_KNOWN = re.compile(
    r"AKIA|ASIA|AROA|AIDA|AIza|ya29\.|GOCSPX-|gh[pousr]_|github_pat_|glpat-|xox[abeoprs]-|[rs]k_live_|hf_|npm_|pypi-AgE|SG\.|sk-"
    r"|glsa_|dop_v1_|shp(?:at|ca|pa|ss)_|[0-9]{8,10}:AA|AGE-SECRET|whsec_|rubygems_|xkeysib-|hvs\.|ATATT3|eyJ|T[A-Z0-9]{6,12}/B"
)
_HEX = re.compile(r"[0-9a-fA-F]+")
_CODE = re.compile(
    r"[()\[\];,]|^\$|^&|^@[\w.]+$|^[a-z]+(?:[._-][a-z]+)+$|^[A-Z]+(?:_[A-Z]+)+$|^[a-z]*+(?:[A-Z][a-z]++)*+$"
)
"""Values of settings that are code: calls, variables, names of several words."""
_SAMPLES = re.compile(r"EXAMPLE|\.\.\.|XXXX|xxxx|0{12}|1234567890")


_CHECKED = re.compile(r"(?:gh[pousr]|npm)_[A-Za-z0-9]{36}\Z")
_BASE62 = {char: index for index, char in enumerate("0123456789" + string.ascii_uppercase + string.ascii_lowercase)}


def has_crc32(token: str) -> bool:
    """Return True if the last 6 characters of a token of GitHub or npm are the CRC-32 of the 30 before, in base 62.

    Sources: GitHub, "Behind GitHub's new authentication token formats" (2021); npm, "New access token format" (2021).
    """
    body, end = token[-36:-6], 0
    for char in token[-6:]:
        end = end * 62 + _BASE62[char]
    return crc32(body.encode()) == end


def is_secret(value: str) -> bool:
    """Return True if a match of the patterns is a secret, and not a placeholder, a name or an expression."""
    if value.startswith("-----BEGIN"):
        body = re.sub(r"-----[^-]+-----|\s|\\n", "", value)
        return len(body) >= 64 and entropy(body[:512]) >= MIN_ENTROPY and "..." not in body
    if _CHECKED.match(value) and not has_crc32(value):
        return False
    if _KNOWN.match(value):
        is_random = any(char.isdigit() for char in value) or sum(map(str.isupper, value)) > 5
        return is_random and not _SAMPLES.search(value) and entropy(value) >= MIN_HEX_ENTROPY
    if _PLACEHOLDER.search(value) or _CODE.search(value):
        return False
    has_both = any(char.isdigit() for char in value) and any(char.isalpha() for char in value)
    return has_both and entropy(value) >= (MIN_HEX_ENTROPY if _HEX.fullmatch(value) else MIN_ENTROPY)


def entropy(value: str) -> float:
    """Return the entropy of the characters of a text, by their frequencies in it [bits a character]."""
    counts, size = Counter(value).values(), len(value)
    return -sum(count / size * math.log2(count / size) for count in counts)
