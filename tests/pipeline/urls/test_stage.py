"""The stage of URL rules: lists, words, the decisions on both sides of each limit, hostile URLs, and damaged lists."""

import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.engine.rules import evaluate_checks
from pipeline.engine.stage import Drop
from pipeline.text import native
from pipeline.urls.address import address_of, entry_of, key_of
from pipeline.urls.config import BUILT_IN, UrlsConfig
from pipeline.urls.lists import read_list
from pipeline.urls.rules import PythonMatcher, UrlWords, make_matcher, read_words
from pipeline.urls.stage import BUILT_IN_WORDS, LISTED, URLS, checks, make_early_urls, make_urls, model_files
from pipeline.urls.table import ALLOWED, compile_table, make_table, open_table
from schemas.errors import ConfigError, ContractError
from tests.support.native import needs_native, python_only


def measured(config: UrlsConfig, folder: Path, *urls: str | None) -> list[list[Any]]:
    models = model_files(config)
    urls_of = make_urls(config, models | compile_table(config, models, str(folder)))
    rows: list[dict[str, Any]] = [{"url": url} for url in urls]
    for row in rows:
        assert urls_of(row) is None
    return [[row[name] for name in URLS.adds] for row in rows]


def lists_of(config: UrlsConfig, folder: Path, *urls: str) -> list[Any]:
    return [row[0] for row in measured(config, folder, *urls)]


@pytest.fixture
def ut1(tmp_path: Path) -> Path:
    for name, domains, urls in (("adult", "bad.org\nxn--bcher-kva.example\n1.2.3.4\n", "ok.org/x/y\nok.org/v?id=1\n"),):
        (tmp_path / name).mkdir()
        (tmp_path / name / "domains").write_text(domains)
        (tmp_path / name / "urls").write_text(urls)
    (tmp_path / "games").write_text("# games\n\nplay.bad.org\nhttps://www.ok.org/games/\n")
    return tmp_path


def config_of(folder: Path, **others: Any) -> UrlsConfig:
    return UrlsConfig(block_lists={"adult": f"{folder}/adult", "games": f"{folder}/games"}, **others)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://bad.org/", ["adult"]),
        ("https://user:pw@WWW.Bad.ORG.:8443/a?b#c", ["adult"]),
        ("http://play.bad.org/", ["adult", "games"]),
        ("http://notbad.org/", []),
        ("http://bad.org.uk/", []),
        ("http://bad.org@ok.org/", []),
        ("http://ok.org/?u=bad.org", []),
        ("http://b\u00fccher.example/", ["adult"]),
        ("http://a.xn--bcher-kva.example/", ["adult"]),
        ("http://b%61d.org/", ["adult"]),
        ("http:\\\\bad.org\\a", ["adult"]),
        ("bad.org/a", ["adult"]),
        ("//bad.org", ["adult"]),
        ("ok.org:80/x/y", ["adult"]),
        ("ok.org", []),
        ("http://1.2.3.4:80/", ["adult"]),
        ("http://9.1.2.3.4/", []),
        ("http://[::1]:80/", []),
        ("http://ok.org/x/y", ["adult"]),
        ("http://www2.ok.org/x/y/z", ["adult"]),
        ("http://ok.org/x/y?z", ["adult"]),
        ("http://ok.org/X/%79#z", ["adult"]),
        ("http://ok.org/x/yz", []),
        ("http://ok.org/x", []),
        ("http://sub.ok.org/x/y", []),
        ("http://ok.org/v?id=1&b=2", ["adult"]),
        ("http://ok.org/v?id=12", []),
        ("http://ok.org/games", ["games"]),
        ("http://ok.org/%zz%", []),
    ],
)
def test_a_url_is_on_the_lists_of_its_domains_and_prefixes(ut1: Path, url: str, expected: list[str]) -> None:
    assert lists_of(config_of(ut1), ut1, url) == [expected]
    with python_only():
        assert lists_of(config_of(ut1), ut1, url) == [expected]


def test_texts_that_are_no_web_url_have_no_values(ut1: Path) -> None:
    config = config_of(ut1, banned_words=BUILT_IN)
    for url in (None, "", "urn:isbn:1", "http://", "http://a b/", "https://[::x]/", "http://a:99999x/"):
        assert measured(config, ut1, url) == [[None] * 5], url
    assert measured(UrlsConfig(), ut1, "http://bad.org/") == [[None] * 5]


def test_words_of_a_url_are_counted_once_each(tmp_path: Path) -> None:
    for name, words in (("hard", "xxx\nПорно\n"), ("soft", "hot\nteen\nsex\n"), ("part", "freesex\ncasino\n")):
        (tmp_path / name).write_text(words, encoding="utf-8")
    config = UrlsConfig(
        banned_words=f"{tmp_path}/hard", soft_banned_words=f"{tmp_path}/soft", banned_subwords=f"{tmp_path}/part"
    )
    urls = {
        "http://xxx.org/xxx?XXX": [None, None, 1, 0, 0],
        "http://a.org/axxx/xxx1": [None, None, 0, 0, 0],
        "http://a.org/%D0%9F%D0%BE%D1%80%D0%BD%D0%BE": [None, None, 1, 0, 0],
        "http://a.org/\u043f\u043e\u0440\u043d\u043e_hot": [None, None, 1, 1, 0],
        "http://hot-teen.org/hot#sex": [None, None, 0, 2, 0],
        "http://a.org/free-s.ex/ca_sino": [None, None, 0, 0, 2],
        "http://a.org/frees": [None, None, 0, 0, 0],
    }
    assert measured(config, tmp_path, *urls) == list(urls.values())
    with python_only():
        assert measured(config, tmp_path, *urls) == list(urls.values())


def batch(**columns: Any) -> pa.RecordBatch:
    kinds = {field.name: field.type for field in URLS.columns} | {"language": pa.string()}
    count = len(next(iter(columns.values())))
    return pa.RecordBatch.from_pydict(
        {name: pa.array(columns.get(name, [None] * count), kind) for name, kind in kinds.items()}
    )


def test_each_category_and_limit_decides_unless_the_url_is_allowed(ut1: Path) -> None:
    config = config_of(ut1, drop_lists=["games"], banned_words=BUILT_IN, soft_banned_words="s", banned_subwords="p")
    rules = checks(config, {}, {})
    assert [(rule.reason, rule.label) for rule in rules] == [
        *(("url_list", "games"), ("url_banned_words", "")),
        *(("url_soft_words", ""), ("url_banned_subwords", "")),
    ]
    assert [rule.label for rule in checks(config_of(ut1), {}, {})] == ["adult", "games"]
    rows = batch(
        url_lists=[["games"], ["adult"], ["adult", "games"], None, [], [], [], [], []],
        url_allowed=[False, False, True, None, None, False, None, None, True],
        url_banned_words=[0, 0, 0, None, 1, 0, 0, 0, 1],
        url_soft_words=[0, 0, 0, None, 0, 1, 2, 0, 5],
        url_banned_subwords=[0, 0, 0, None, 0, 0, 0, 1, 1],
    )
    kept = len(rules)
    first = evaluate_checks(rules, rows).first.tolist()
    none = first[1]
    assert none not in range(kept)
    assert first == [0, none, none, none, 1, none, 2, 3, none]


def test_early_lists_drop_before_extraction_what_the_allow_list_lacks(ut1: Path) -> None:
    allow = ut1 / "allow"
    allow.write_text("good.bad.org\n")
    config = config_of(ut1, early_lists=("adult",), allow_list=str(allow))
    models = model_files(config)
    early_urls = make_early_urls(config, models | compile_table(config, models, str(ut1)))
    rows = [{"url": url} for url in ("http://bad.org/", "http://good.bad.org/", "http://ok.org/games", None)]
    assert [early_urls(row) for row in rows] == [Drop(LISTED), None, None, None]
    assert [row["url_lists"] for row in rows] == [["adult"], ["adult"], ["games"], None]
    assert "early_lists" not in config_of(ut1).content()
    assert config.content()["early_lists"] == ["adult"]


def test_the_allow_list_has_domains_and_urls(ut1: Path) -> None:
    (ut1 / "allow").write_text("play.bad.org\nbad.org/help\n")
    config = config_of(ut1, allow_list=f"{ut1}/allow")
    urls = ("http://a.play.bad.org/", "http://bad.org/help/x", "http://bad.org/")
    assert [row[:2] for row in measured(config, ut1, *urls)] == [
        [["adult", "games"], True],
        [["adult"], True],
        [["adult"], False],
    ]


@pytest.mark.parametrize("name", ["one.tar.gz", "all.tar"])
def test_archives_have_a_folder_for_each_category(ut1: Path, name: str) -> None:
    with tarfile.open(ut1 / name, "w:gz" if name.endswith("gz") else "w") as archive:
        archive.add(ut1 / "adult", "blacklists/adult")
        if name == "all.tar":
            archive.add(ut1 / "adult" / "urls", "blacklists/other/urls")
    plain, _ = read_list(f"{ut1}/adult/domains", "adult", "w")
    both, longest = read_list(f"{ut1}/{name}", "adult", "w")
    assert both[: len(plain)] == plain or both[-len(plain) :] == plain
    assert (len(both), longest) == (8 * 5, len("ok.org/v?id=1"))
    if name == "all.tar":
        with pytest.raises(ConfigError, match=r"expected a folder news in .*, got adult, other"):
            read_list(f"{ut1}/{name}", "news", "w")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a.org\nb org\n\n/x\n", r"list:2: expected a domain or a URL .* got others in lines 2, 4\. Correct"),
        (b"a b\n" * 7, r"list:1: .* lines 1, 2, 3, 4, 5 and 2 more"),
        (b"a.org\n\xff.org\n", "list:2: "),
        (b"a" * 254 + b"\n", "list:1: "),
        (b"a.org/" + b"a" * 1995 + b"\n", "list:1: "),
        (b"# nothing\n", "got .*list without one"),
    ],
)
def test_damaged_lists_are_named_by_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "list").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_list(f"{tmp_path}/list", "adult", "urls.block_lists.adult")


def test_a_mark_of_the_encoding_is_no_part_of_a_list(tmp_path: Path) -> None:
    keys = []
    for mark in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "list").write_bytes(mark + b"http://a.org/b\nc.org\n")
        keys.append(read_list(f"{tmp_path}/list", "adult", "w"))
    (tmp_path / "list").write_bytes(b"\xef\xbb\xbf# a comment\nc.org\n")
    assert keys[0] == keys[1] != read_list(f"{tmp_path}/list", "adult", "w")


def test_the_longest_entries_are_accepted(tmp_path: Path) -> None:
    domain, url = ("a." * 126 + "a"), "a.org/" + "a" * 1994
    (tmp_path / "list").write_text(f"{domain}\n{url}\n")
    config = UrlsConfig(block_lists={"long": f"{tmp_path}/list"})
    assert lists_of(config, tmp_path, f"http://b.{domain}/", f"http://{url}/x", f"http://{url}x") == [
        *(["long"], ["long"], [])
    ]


@pytest.mark.parametrize(
    ("content", "is_part", "message"),
    [
        ("a\nb c\n", False, r"w:2: expected one word of letters and digits, got 'b c'"),
        ("abc\nab\n", True, r"w:2: expected at least 3 letters or digits, got 'ab'"),
        ("#\n", False, "expected at least one word"),
    ],
)
def test_damaged_words_are_named_by_line(tmp_path: Path, content: str, is_part: bool, message: str) -> None:
    (tmp_path / "w").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_words(f"{tmp_path}/w", "urls.banned_words", is_part)


def test_the_built_in_words_are_a_short_sorted_list() -> None:
    words = read_words(str(BUILT_IN_WORDS), "w", is_part=False)
    lines = [line for line in BUILT_IN_WORDS.read_text().splitlines() if not line.startswith("#")]
    assert lines == [word.decode() for word in words]
    assert len(words) <= 100
    assert {b"sex", b"escort", b"pornography"}.isdisjoint(words)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"drop_lists": ["adlt"], "block_lists": {"adult": "x"}},
            "expected categories of urls.block_lists, got 'adlt'",
        ),
        ({"max_soft_words": 2}, "expected urls.soft_banned_words to be set"),
        ({"banned_subwords": BUILT_IN}, "expected a path"),
        ({"block_lists": {"a:b": "x"}}, "expected names of letters"),
        ({"block_lists": {f"c{n}": "x" for n in range(64)}}, "expected at most 63 categories, got 64"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        UrlsConfig(**settings)


def test_the_table_depends_on_the_entries_alone(ut1: Path) -> None:
    config = config_of(ut1)
    models = model_files(config)
    first = Path(compile_table(config, models, str(ut1))["table"])
    content = first.read_bytes()
    (ut1 / "adult" / "domains").write_text("1.2.3.4\nbad.org\nBAD.org.\nxn--bcher-kva.example\n")
    second = Path(compile_table(config, models, str(ut1))["table"])
    assert second != first
    assert second.read_bytes() == content
    (ut1 / "damaged").write_bytes(content[:100])
    with pytest.raises(ContractError, match="expected a table of lists"):
        open_table(f"{ut1}/damaged")


@pytest.mark.parametrize("part", ["a.", "/", "a/", "?&", "%", "%41", "\u00fc", "@", "xxx-", "www.", "\\", "["])
@pytest.mark.parametrize("start", ["http://", "http://bad.org/"])
def test_urls_of_1_mb_take_linear_time(ut1: Path, start: str, part: str) -> None:
    config = config_of(ut1, banned_words=BUILT_IN)
    url = start + part * (1_000_000 // len(part))
    found = measured(config, ut1, url)  # quadratic time takes minutes
    with python_only():
        assert measured(config, ut1, url) == found
    if start != "http://" and part in ("/", "?&", "\\"):
        assert found == [[["adult"], None, 0, None, None]]


ADDRESSES = st.lists(
    st.sampled_from(("a", "b.", "www.", "www2.", ".", "/", "?", "&", "-", "1", "xx", "sex", "\u00fc", "[", "%41", "ab"))
    | st.text(max_size=2),
    max_size=25,
).map("".join)
ENTRIES = ("a", "b.a", "a/b", "1", "a.a/xx", "aa", "b.b/a?xx", "a/sex", "xx", "b.1")


@needs_native
@given(ADDRESSES, ADDRESSES)
def test_native_and_python_agree(host: str, path: str) -> None:
    keys = [(1 << number, key_of(entry.encode()).to_bytes(8, "little")) for number, entry in enumerate(ENTRIES)]
    words = UrlWords((b"xx", b"sex"), (b"a", b"sex", b"b"), (b"aba", b"xx", b"sexa", b"ab"))
    for lists in (keys, []):
        table = make_table(lists, max(map(len, ENTRIES)))
        own = host.encode("utf-8", "surrogatepass"), path.encode("utf-8", "surrogatepass")
        addresses = [own, address_of(f"http://{host}/{path}"), address_of(path)]
        for address in filter(None, addresses):
            expected = PythonMatcher(table, words).match(*address)
            assert make_matcher(table, words).match(*address) == expected


@needs_native
def test_the_native_rules_refuse_arrays_of_no_table() -> None:
    table = make_table([(ALLOWED, bytes(range(16)))], 0)
    with pytest.raises(ValueError, match="arrays of one table"):
        native.loaded().UrlRules((table.keys, table.masks[:1].copy(), table.starts, table.shift, 0), [], [], [])


def test_keys_follow_their_source() -> None:
    # RFC 7693 with a digest of 8 bytes: the value is that of `hashlib`.
    assert entry_of("https://www.A.org:80/X/?q=%41#f") == b"a.org/x/?q=a"
    assert entry_of("www.a.org") == b"www.a.org"
    assert entry_of("/a") is None
    assert entry_of("ftp://a.org/x") == b"a.org/x"
    assert entry_of("a.org:8080/x") == b"a.org/x"
    for line in ("mailto:a@evil.com", "http:/evil.com", "gopher://evil.com", "http://"):
        assert entry_of(line) is None
    assert address_of("FTP://Evil.com/X") == address_of("http://evil.com/X") == (b"evil.com", b"/x")
