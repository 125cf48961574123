"""Secrets: forms of tokens, values of settings by name and randomness, private keys, and what looks like them."""

import random
import string
from pathlib import Path
from zlib import crc32

import pytest

from pipeline.pii.secrets import entropy, is_secret
from pipeline.pii.stage import PiiConfig, Redactor


def made(prefix: str, length: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    """A token of this form that no service gave out; in parts here, so that no scanner takes this file for a leak."""
    return prefix + "".join(random.Random(f"{prefix}{length}").choices(alphabet, k=length))


def checked(prefix: str) -> str:
    """A token of this form with the CRC-32 of its 30 characters in base 62."""
    body, end = made(prefix, 30), ""
    number = crc32(body.removeprefix(prefix).encode())
    while len(end) < 6:
        number, digit = divmod(number, 62)
        end = (string.digits + string.ascii_uppercase + string.ascii_lowercase)[digit] + end
    return body + end


HEX = "0123456789abcdef"
BECH32 = "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L"
FORMS = [
    ("do" + "p_v1_", 64, HEX), ("shp" + "at_", 32, HEX),
    ("AGE-" + "SECRET-KEY-1", 58, BECH32), ("whs" + "ec_", 32, string.ascii_letters + "5"), ("ruby" + "gems_", 48, HEX),
    ("hv" + "s.", 24, string.ascii_letters + "7"), ("ATA" + "TT3", 186, string.ascii_letters + "-_"),
]  # fmt: skip
"""Prefix, number of characters and alphabet of tokens that have no checksum."""
UPPER, BASE64 = string.ascii_uppercase + string.digits, string.ascii_letters + string.digits + "+/"
PEM = "\n".join(made(f"{line}", 62, BASE64) for line in range(10))
FOUND = [
    (f"id = {made('AK' + 'IA', 16, UPPER)}.", "id = <SECRET>."),
    (f"aws_secret_access_key = '{made('', 40, BASE64)}'", "aws_secret_access_key = '<SECRET>'"),
    (f"key: {made('AI' + 'za', 35)}", "key: <SECRET>"),
    (f"git clone https://{checked('gh' + 'p_')}@github.com/a/b", "git clone https://<SECRET>@github.com/a/b"),
    (made("github" + "_pat_", 82), "<SECRET>"),
    # the example of a public description of the format: CRC-32 of its 30 characters is mLq17 in base 62
    ("gh" + "p_zQWBuTSOoRi4A9spHcVY5ncnsDkxkJ" + "0mLq17", "<SECRET>"),
    (f"//registry.npmjs.org/:_authToken={checked('np' + 'm_')}", "//registry.npmjs.org/:_authToken=<SECRET>"),
    (f"bot {made('123456789' + ':AA', 33)} runs", "bot <SECRET> runs"),
    (f"key {made('gls' + 'a_', 32)}_{made('', 8, HEX)} end", "key <SECRET> end"),
    *((f"key {made(prefix, length, alphabet)} end", "key <SECRET> end") for prefix, length, alphabet in FORMS),
    (f'Slack({made("xo" + "xb-", 40)!r})', "Slack('<SECRET>')"),
    (f"https://hooks.slack.com/services/T0{made('', 8, UPPER)}/B0{made('', 7, UPPER)}/{made('', 24)}",
     "https://hooks.slack.com/services/<SECRET>"),
    (f"Bearer ey{made('J', 30)}.ey{made('J', 60)}.{made('s', 42)}", "Bearer <SECRET>"),
    (f"DB_PASSWORD={made('', 20)}\nDB_HOST=db", "DB_PASSWORD=<SECRET>\nDB_HOST=db"),
    (f'{{"client_secret": "{made("", 32, "0123456789abcdef")}"}}', '{"client_secret": "<SECRET>"}'),
    (f"-----BEGIN RSA PRIVATE KEY-----\n{PEM}\n-----END RSA PRIVATE KEY-----\nend", "<SECRET>\nend"),
    (f"AccountKey={made('', 86, BASE64)}==;Endpoint", "AccountKey=<SECRET>;Endpoint"),
]  # fmt: skip
LEFT = [
    # tokens of GitHub and npm with a wrong checksum
    "gh" + "p_zQWBuTSOoRi4A9spHcVY5ncnsDkxkJ" + "0mLq18",
    "np" + "m_zQWBuTSOoRi4A9spHcVY5ncnsDkxkJ" + "0mLq18",
    made("do" + "p_v1_", 63, HEX),
    made("1234567:" + "AA", 33),
    'password = "correct horse battery"',
    'password = "changeme12345"',
    'api_key = "YOUR_API_KEY_0001"',
    'token: "${GITHUB_TOKEN_2}"',
    "secret_key = os.environ['SECRET_KEY_1']",
    "token = tokenizer.next_token(text, offset=12)",
    'access_key = "AK' + 'IAIOSFODNN7EXAMPLE"',
    "-----BEGIN PUBLIC KEY-----\n" + PEM + "\n-----END PUBLIC KEY-----",
    "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
    "sha256 = '" + made("", 64, "0123456789abcdef") + "'",
    "commit " + made("", 40, "0123456789abcdef"),
    'secret_name = "projects/12/secrets/db-password-3"',
    'password_field = "user.profile.password_hash2"',
    "The secret: a well-kept-garden-of-2019 is worth it.",
    'token_url = "https://example.org/oauth2/token/v1/get"',
]


@pytest.fixture(scope="module")
def redactor() -> Redactor:
    return Redactor(("secret",))


@pytest.mark.parametrize(("text", "expected"), FOUND)
def test_secrets_are_replaced(redactor: Redactor, text: str, expected: str) -> None:
    assert redactor.redact(text) == (expected, {"secret": 1})


@pytest.mark.parametrize("text", LEFT)
def test_lookalikes_are_left(redactor: Redactor, text: str) -> None:
    assert redactor.redact(text) == (text, {})


def test_the_default_types_do_not_have_secrets() -> None:
    assert "secret" not in PiiConfig().types
    assert PiiConfig.model_validate({"types": ["email", "secret"]}).types == ("email", "secret")


def test_our_own_source_has_none(redactor: Redactor) -> None:
    """Precision on real code: more than a hundred files without a secret."""
    files = sorted(Path(__file__).parents[3].glob("pipeline/**/*.py"))
    assert len(files) > 100
    assert [path for path in files if redactor.find(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "text", ["token=" * 5_000, "-----BEGIN PRIVATE KEY-----" * 900, "eyJ" * 8_000, "password='" * 4_000, "sk-" * 9_000]
)
def test_pathological_text_has_no_values(redactor: Redactor, text: str) -> None:
    assert redactor.redact(text) == (text, {})


def test_entropy() -> None:
    assert entropy("aabb") == 1.0
    assert entropy("0123456789abcdef") == 4.0
    assert not is_secret("a" * 39 + "1")
