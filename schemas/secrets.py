"""What looks like a secret: names of settings that hold keys, and texts such as addresses that contain a password.

A recipe is stored in the run folder, shown in reports and handed on, so no secret may be in it. The value of a setting
that looks like a secret is never part of a message.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
SECRET_NAME = re.compile(
    r"passw(or)?d|passphrase|secret|credential|token|(^|[._-])(private|access|account|api|encryption|shared|session)"
    r"[._-]?key|keystore|(^|[._-])sas([._-]|$)"
)
"""Pattern of a name, in lower case and with its words divided by `.`, `_` or `-`, whose value is a secret."""
HARMLESS_NAME = re.compile(
    r"([._-](file|path|dir|location|provider|providers|class|type|enabled|name|interval|timeout|algorithm|length|"
    r"renewal|ref))$|secret[._-]key[._-]ref|^spark\.kubernetes\.(driver|executor)\.secrets\."
)
"""Pattern of a name that says where a secret is, or how it is used, and not what it is."""
OF_TEXTS = re.compile(r"token(s|iz)")
"""Parts of names such as `tokens.seed` and `tokenizer.model`, which are about texts."""
SWITCH = re.compile(r"(?i)true|false")
SECRET_TEXTS: Mapping[str, re.Pattern[str]] = {
    "an address with a password": re.compile(r"(?i)\b[a-z][a-z0-9+.-]*://[^/\s?#@:]*:[^/\s@]+@"),
    # Servers of packages and of sources take a token in the place of the user's name.
    "an address with a user": re.compile(r"(?i)\bhttps?://[^/\s?#@]+@"),
    "an address with a signature or a token": re.compile(
        r"(?i)[?&;#](auth|jwt|pwd|pass|([\w.-]*[_.-])?sig|googleaccessid|"
        r"[\w.-]*(token|secret|credentials?|signature|passw(or)?d|passphrase|"
        r"(secret|access|account|api|private|shared|session|encryption|customer)[_.-]?key([_.-]?id)?))="
    ),
    "an account key": re.compile(r"(?i)\b(accountkey|sharedaccesskey|sharedaccesssignature)="),
    "an option with a password": re.compile(r"(?i)-D[\w.]*(password|passwd|secret|token|accesskey)[\w.]*="),
    "the id of an access key": re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a token": re.compile(r"\b(hf_[0-9A-Za-z]{30,}|gh[oprsu]_[0-9A-Za-z]{36,}|github_pat_\w{50,}|glpat-[\w-]{20,})"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY"),
}
"""Descriptions of texts that hold a secret, with their patterns."""
HIDDEN = "not shown, because it may hold a secret"
HOW_TO_PASS = (
    "Remove it, and give the secret to the processes themselves: by environment variables such as AWS_ACCESS_KEY_ID "
    "and AWS_SECRET_ACCESS_KEY, by the role of the machine, or by spark-defaults.conf and a Hadoop credential provider"
)
"""The fix in a message about a secret."""


def is_secret_name(name: str) -> bool:
    """Return True if a setting of this name, such as `spark.hadoop.fs.s3a.secret.key`, holds a secret."""
    words = WORD_STARTS.sub(".", name).lower()
    return SECRET_NAME.search(words) is not None and HARMLESS_NAME.search(words) is None


def secret_in(text: str) -> str | None:
    """Return the description of a secret that a text contains, such as `a private key`; None if there is none."""
    forms = {text, unquote(text)}  # a server decodes an address before it looks for its names
    return next((what for what, pattern in SECRET_TEXTS.items() if any(map(pattern.search, forms))), None)


def shown_value(value: object) -> str:
    """Return a value of a setting as a message quotes it, without a text that may hold a secret."""
    text = repr(value)
    return f"a text that is {HIDDEN}" if _may_hold_secret(text) else text


def without_secrets(message: str) -> str:
    """Return a message in which each word that may hold a secret is replaced."""
    words = (f"<{HIDDEN}>" if _may_hold_secret(word) else word for word in message.split(" "))
    return " ".join(words)


def _may_hold_secret(text: str) -> bool:
    names = OF_TEXTS.sub("", text).split("=")[:-1]
    return secret_in(text) is not None or any(map(is_secret_name, names))


def secret_of(name: str, value: str) -> str | None:
    """Return the description of the secret that a setting holds; None if it holds none."""
    if is_secret_name(name) and value and not SWITCH.fullmatch(value):
        return "a key or password"
    return secret_in(value)


def secrets_in(value: Any, where: str) -> Iterator[str]:
    """Yield a line of text for each secret in the texts and names of a JSON value; `where`: its name in the lines."""
    if isinstance(value, str):
        if (what := secret_in(value)) is not None:
            yield f"{where}: expected no secret in a recipe, got {what}. {HOW_TO_PASS}"
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from secrets_in(item, f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from secrets_in(item, where)


def shown_uri(uri: str) -> str:
    """Return a URI without its options, and without the user and password before its host.

    The container of a URI of Azure, which is written there, stays.
    """
    scheme, _, rest = uri.partition("?")[0].partition("://")
    authority, slash, path = rest.partition("/")
    user, _, host = authority.rpartition("@")
    container = user.partition(":")[0] if scheme.startswith("abfs") else ""
    return f"{scheme}://{f'{container}@' if container else ''}{host}{slash}{path}"
