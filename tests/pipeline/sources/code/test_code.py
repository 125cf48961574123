"""Source code: repositories in archives and folders, rows of The Stack, languages, licences, and what is left out."""

import gzip
import io
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from pipeline.extract.extract import ExtractConfig, make_extract
from pipeline.sources.code.code import decode_code
from pipeline.sources.code.config import CodeConfig
from pipeline.sources.code.filters import content_problem, path_problem, visible_chars
from pipeline.sources.code.languages import LANGUAGES, language_of
from pipeline.sources.code.licences import PERMISSIVE, combine, is_allowed, recognize, tagged
from pipeline.sources.config import SourceConfig
from pipeline.sources.ranges import find_starts, ranges_of, with_starts
from pipeline.sources.source import SOURCE, refetch
from pipeline.sources.splits import find_splits, open_stream
from schemas.errors import ConfigError
from tests.support.archives import MIT, tar, zipped
from tests.support.paths import ROOT

CODE = "def add(one, two):\n    return one + two\n"
GPL = "GNU GENERAL PUBLIC LICENSE\n  Version 3, 29 June 2007\n"
REPOSITORY = {
    "tool-1.0/LICENSE": MIT,
    "tool-1.0/src/add.py": CODE,
    "tool-1.0/src/own.py": "# SPDX-License-Identifier: Apache-2.0\n" + CODE,
    "tool-1.0/lib/COPYING": GPL,
    "tool-1.0/lib/part/sub.py": CODE,
    "other/main.rs": "fn main() {}\n",
    "tool-1.0/logo.png": b"\x89PNG\0",
}
EXPECTED = [
    ("tool-1.0", "LICENSE", "MIT", None, "unknown_language"),
    ("tool-1.0", "src/add.py", "MIT", "Python", None),
    ("tool-1.0", "src/own.py", "Apache-2.0", "Python", None),
    ("tool-1.0", "lib/COPYING", "GPL-3.0", None, "unknown_language"),
    ("tool-1.0", "lib/part/sub.py", "GPL-3.0", "Python", "other_licence"),
    ("other", "main.rs", None, "Rust", "unknown_licence"),
    ("tool-1.0", "logo.png", None, None, "unknown_language"),
]


def rows_of(path: str, **settings: Any) -> list[tuple[dict[str, Any], Any]]:
    """The rows of the files at a path; each is read again by its offset and is the same."""
    config = SourceConfig.model_validate({"paths": [path], "format": "code"} | settings)
    rows = []
    for split in find_splits(config):
        stream = open_stream(split)
        found = list(SOURCE.open(split, stream, config))
        assert stream.finish()[1] == split.size
        for row, _ in found:
            assert row["record_type"] == "gap" or refetch(split, row, config).changes == ()
        rows += found
    return rows


def shown(rows: list[tuple[dict[str, Any], Any]]) -> list[tuple[Any, ...]]:
    found = []
    for row, drop in rows:
        meta = json.loads(row["meta"] or "{}")
        names = (meta.get("repository"), meta.get("path"), row["licence"], meta.get("language"))
        found.append((*names, drop.rule if drop else None))
    return found


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("repos.tar", tar(REPOSITORY)),
        ("repos.tar.gz", gzip.compress(tar(REPOSITORY))),
        ("repos.tgz", gzip.compress(tar(REPOSITORY))),
        ("repos.zip", zipped(REPOSITORY)),
    ],
)
def test_an_archive_of_repositories(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    rows = rows_of(f"{tmp_path}/{name}")
    assert shown(rows) == EXPECTED
    assert rows[1][0]["text"] == CODE
    assert rows[1][0]["url"] == "repos/tool-1.0/src/add.py"
    assert sum(row["length"] for row, _ in rows) == len(gzip.decompress(data) if name.endswith("gz") else data)


def test_a_folder_of_repositories_has_one_split_for_each(tmp_path: Path) -> None:
    for repository, licence in (("one", MIT), ("two", GPL)):
        (tmp_path / repository / "src").mkdir(parents=True)
        (tmp_path / repository / "LICENSE").write_text(licence)
        (tmp_path / repository / "src" / "a.py").write_text(CODE)
        (tmp_path / repository / "self").symlink_to(".")
    for pattern in (f"{tmp_path}/*", f"{tmp_path}/**"):
        config = SourceConfig(paths=(pattern,), format="code")
        assert [split.name for split in find_splits(config)] == ["one", "two"]
        kept = [(row["url"], row["licence"]) for row, drop in rows_of(pattern) if drop is None]
        assert kept == [("one/src/a.py", "MIT")]
    (single,) = find_splits(SourceConfig(paths=(f"{tmp_path}/one/src/a.py",), format="code"))
    assert single.name == "a.py"
    assert Counter(rule for *_, rule in shown(rows_of(f"{tmp_path}/*"))) == Counter(
        {"unknown_language": 2, "not_a_file": 2, "other_licence": 1, None: 1}
    )


@pytest.mark.parametrize("name", ["world.geo.json", "tables.parquet", "site.zip", "old.tar.gz"])
def test_a_folder_may_have_the_name_of_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "LICENSE").write_text(MIT)
    (tmp_path / name / "a.py").write_text(CODE * 40_000)
    (split,) = find_splits(SourceConfig(paths=(f"{tmp_path}/*",), format="code", part_bytes=1 << 20))
    assert (split.size > 1 << 20, split.num_ranges) == (True, 1)
    rows = rows_of(f"{tmp_path}/*", part_bytes=1 << 20, code={"max_file_bytes": 8 << 20})
    assert [row["licence"] for row, drop in rows if drop is None] == ["MIT"]


def test_a_pattern_that_would_make_a_split_of_every_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`\*\*` before the end of a pattern\. Name each level"):
        find_splits(SourceConfig(paths=(f"{tmp_path}/**/*.py",), format="code"))


def test_our_own_repository() -> None:
    rows = rows_of(str(ROOT / "schemas"), code={"licences": ["any"]})
    kept = [row["url"] for row, drop in rows if drop is None]
    assert "schemas/errors.py" in kept
    assert all(drop.rule != "few_alphabetic" for _, drop in rows if drop)


STACK = {
    "content": CODE,
    "max_stars_repo_path": "src/add.py",
    "max_stars_repo_name": "a/b",
    "max_stars_repo_head_hexsha": "0" * 40,
    "max_stars_repo_licenses": ["MIT"],
    "max_stars_count": 7,
    "lang": "Python",
    "avg_line_length": 20.0,
}


def stack_cases() -> list[tuple[Mapping[str, Any], str | None]]:
    return [
        (STACK, None),
        (STACK | {"max_stars_repo_licenses": ["MIT", "GPL-3.0"]}, "other_licence"),
        (STACK | {"max_stars_repo_licenses": []}, "unknown_licence"),
        (STACK | {"content": None}, "no_text_field"),
        (STACK | {"max_stars_repo_path": "vendor/yarn.lock"}, "lock_file"),
    ]


def test_rows_of_the_stack(tmp_path: Path) -> None:
    values = [value for value, _ in stack_cases()]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, values)).encode()))
    pq.write_table(pa.Table.from_pylist(values), tmp_path / "b.parquet")
    for name in ("a.jsonl.gz", "b.parquet"):
        rows = rows_of(f"{tmp_path}/{name}")
        assert [drop.rule if drop else None for _, drop in rows] == [rule for _, rule in stack_cases()]
        row = rows[0][0]
        assert (row["url"], row["licence"], row["text"]) == (
            f"https://github.com/a/b/blob/{'0' * 40}/src/add.py",
            "MIT",
            CODE,
        )
        assert json.loads(row["meta"]) == {
            "repository": "a/b", "path": "src/add.py", "commit": "0" * 40, "language": "Python", "stars": 7,
        }  # fmt: skip


# Languages


def test_fields_of_rows_may_be_paths(tmp_path: Path) -> None:
    row = {"body": {"code": CODE}, "path": "a.py", "info": {"licence": "MIT", "day": "2020-01-02"}}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    settings = {"text_field": "body.code", "licence_field": "info.licence", "date_field": "info.day"}
    ((found, drop),) = rows_of(f"{tmp_path}/a.jsonl", **settings)
    assert (drop, found["text"], found["licence"], str(found["date"])[:10]) == (None, CODE, "MIT", "2020-01-02")


@pytest.mark.parametrize(
    ("path", "text", "language"),
    [
        ("a.py", "", "Python"),
        ("Makefile", "", "Makefile"),
        ("src/a.H", "int f(void);", "C"),
        ("a.h", "namespace a { class B; }", "C++"),
        ("a.h", "#include <vector>", "C++"),
        ("a.h", "@interface A : NSObject", "Objective-C"),
        ("a.m", "#import <Foundation/Foundation.h>", "Objective-C"),
        ("a.m", "function y = f(x)\n% twice\ny = 2 * x;\nend", "MATLAB"),
        ("a.pl", "use strict;\nmy $x = 1;", "Perl"),
        ("a.pl", ":- module(a, []).\nparent(a, b).", "Prolog"),
        ("a.v", "module top(input clk);\nendmodule", "Verilog"),
        ("a.v", "Require Import Arith.\nLemma a : True.", "Coq"),
        ("a.v", "fn main() {\n}", "V"),
        ("a.ts", "<?xml version='1.0'?><TS>", "XML"),
        ("a.ts", "let x: number", "TypeScript"),
        ("run", "#!/usr/bin/env -S python3 -u\n", "Python"),
        ("run", "#! /bin/bash\n", "Shell"),
        ("run", "text", None),
        ("a.bin", "#!/bin/sh", None),
        ("a.pl", "", None),
        ("page.blade.php", "", "Blade"),
    ],
)
def test_languages(path: str, text: str, language: str | None) -> None:
    assert language_of(path, lambda size: text[:size]) == language
    assert language is None or language in LANGUAGES


@pytest.mark.parametrize(
    ("charset", "text"),
    [
        ("gbk", "# 读取配置文件并返回结果\ndef read(path):\n    return open(path).read()  # 打开文件\n"),
        ("shift_jis", "/* 設定ファイルを読み込む */\nint main(void) { return 0; }\n"),
        ("euc_kr", "# 설정 파일을 읽는다\nx = 1\n"),
        ("cp1251", "// Чтение файла настроек\nint main() { return 0; }\n"),
        ("koi8-r", "# -*- coding: koi8-r -*-\n# Да\nx = 1\n"),
        ("latin-1", "# Größe der Datei\nx = 1\n"),
        ("utf-16", "# Größe der Datei\nx = 1\n"),
    ],
)
def test_charsets(charset: str, text: str) -> None:
    assert decode_code(text.encode(charset)) == text


def test_a_wrong_byte_costs_one_character() -> None:
    assert decode_code("# Größe der Straße, für alle Übungen".encode() + b"\xff\n") == (
        "# Größe der Straße, für alle Übungen\ufffd\n"
    )


# Licences


@pytest.mark.parametrize(
    ("text", "licence"),
    [
        (MIT, "MIT"),
        (GPL, "GPL-3.0"),
        ("Apache License\n   Version 2.0, January 2004", "Apache-2.0"),
        ("GNU LESSER GENERAL PUBLIC LICENSE\nVersion 2.1, February 1999", "LGPL-2.1"),
        ('Mozilla Public License Version 2.0\n1.12. "Secondary License" means either the GNU General Public License, '
         "Version 2.0, or the GNU Affero General Public License, Version 3.0", "MPL-2.0"),
        ("Eclipse Public License - v 2.0\nSecondary Licenses: GNU General Public License, version 2", "EPL-2.0"),
        ("# Functional Source License, Version 1.1, ALv2 Future License\nApache License, Version 2.0", "FSL-1.1-ALv2"),
        ("# Functional Source License, Version 1.1, MIT Future License\n" + MIT, "FSL-1.1-MIT"),
        ("For non-commercial use only:\n" + MIT, None),
        ("Apache License\nVersion 2.0\nwith the Commons Clause", None),
        ("This is free and unencumbered software released into the public domain, for any purpose, commercial or "
         "non-commercial", "Unlicense"),
        ("This is free and unencumbered software released into the public domain.", "Unlicense"),
        ("CC0 1.0 Universal", "CC0-1.0"),
        ("Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee is "
         "hereby granted, provided that the above copyright notice and this permission notice appear in all "
         "copies.", "ISC"),
        ("Redistribution and use in source and binary forms, with or without modification, are permitted provided "
         "that\n2. Redistributions in binary form must reproduce the above", "BSD-2-Clause"),
        ("All rights reserved.", None),
        ("", None),
    ],
)  # fmt: skip
def test_licence_files(text: str, licence: str | None) -> None:
    assert recognize(text) == licence


@pytest.mark.parametrize("line", ["// {}\n", "/* {} */", "<!-- {} -->", "# {}\r\n", '"""{}"""', "-- {}."])
def test_tags_in_files(line: str) -> None:
    assert tagged(line.format("SPDX-License-Identifier: MIT OR Apache-2.0")) == "MIT OR Apache-2.0"


def test_all_tags_of_a_file_apply() -> None:
    tag = "// SPDX-License-Identifier: {}\n"
    assert tagged(tag.format("MIT") * 2 + tag.format("GPL-2.0 OR ISC")) == "MIT AND (GPL-2.0 OR ISC)"
    assert tagged(tag.format("MIT AND " * 99 + "GPL-2.0")) == "NOASSERTION"
    assert not is_allowed("NOASSERTION", frozenset(PERMISSIVE))


@pytest.mark.parametrize(
    ("files", "licence"),
    [
        ({"part/LICENSE": GPL + " " * 200_000}, None),
        ({"part/LICENCE-GPL-3.0": GPL}, "GPL-3.0"),
        ({"part/license.html": "<h1>" + GPL}, "GPL-3.0"),
        ({"part/LICENSE-COMMERCIAL.txt": "All rights reserved"}, None),
        ({"part/LICENSE-COMMERCIAL": "All rights reserved"}, None),
        ({"part/license-check": "All rights reserved"}, "MIT"),
        ({"part/LICENSE": MIT, "part/LICENSE-THIRD-PARTY.txt": "Parts of it are by others"}, "MIT"),
        ({"part/license.py": "All rights reserved"}, "MIT"),
    ],
)
def test_no_licence_of_a_folder_above_a_licence_that_is_not_recognized(
    tmp_path: Path, files: dict[str, str], licence: str | None
) -> None:
    for name, data in (("a.tar", tar({"LICENSE": MIT} | files | {"part/a.py": CODE})),
                       ("a.zip", zipped({"LICENSE": MIT} | files | {"part/a.py": CODE}))):  # fmt: skip
        (tmp_path / name).write_bytes(data)
        *_, (row, drop) = rows_of(f"{tmp_path}/{name}")
        assert (row["licence"], drop is None) == (licence, licence == "MIT")


def test_a_link_to_a_licence_is_that_of_the_folder_above(tmp_path: Path) -> None:
    (tmp_path / "one" / "part").mkdir(parents=True)
    (tmp_path / "one" / "LICENSE").write_text(MIT)
    (tmp_path / "one" / "part" / "LICENSE").symlink_to("../LICENSE")
    (tmp_path / "one" / "part" / "a.py").write_text(CODE)
    assert shown(rows_of(f"{tmp_path}/one"))[-1][2:] == ("MIT", "Python", None)


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("mit", True),
        ("GPL-3.0-or-later", False),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", False),
        ("(MIT OR GPL-2.0) AND ISC", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-2.0 AND MIT OR GPL-2.0", False),
        ("MIT)", False),
        ("(" * 99 + "MIT", False),
        ("", False),
    ],
)
def test_expressions(expression: str, allowed: bool) -> None:
    assert is_allowed(expression, frozenset(PERMISSIVE)) is allowed


def test_several_licence_files_of_a_folder() -> None:
    assert combine({"LICENSE-MIT": "MIT", "LICENSE-APACHE": "Apache-2.0"}) == "Apache-2.0 OR MIT"
    assert combine({"COPYING": "GPL-3.0", "COPYING.LESSER": "LGPL-3.0"}) == "LGPL-3.0"
    assert combine({"LICENSE": "MIT", "COPYING": "GPL-3.0"}) == "GPL-3.0 AND MIT"
    assert combine({"LICENSE": None, "COPYING": "MIT"}) is None


# Filters: both sides of each limit


@pytest.mark.parametrize(
    ("text", "language", "settings", "rule"),
    [
        ("x = one\n" * 3, "Python", {"max_lines": 4}, None),
        ("x = one\n" * 4, "Python", {"max_lines": 4}, "too_many_lines"),
        ("a bc" * 250 + "\nb" * 30, "Python", {}, None),
        ("a bc" * 250 + "d" + "\nb" * 30, "Python", {}, "long_line"),
        ("a " * 1001, "Markdown", {}, None),
        ("abcd\nabcdef", "Python", {"max_mean_line_chars": 5}, None),
        ("abcde\nabcdef", "Python", {"max_mean_line_chars": 5}, "long_lines"),
        ("ab" + "(" * 6, "Python", {"min_alphabetic": 0}, None),
        ("ab" + "(" * 7, "Python", {"min_alphabetic": 0}, "few_alphanumeric"),
        ("ab" + "1" * 6, "Python", {}, None),
        ("ab" + "1" * 7, "Python", {}, "few_alphabetic"),
        ("ab" + "1 " * 35, "Assembly", {}, None),
        ("a: " + "b" * 47, "YAML", {}, None),
        ("a: " + "b" * 46, "YAML", {}, "data_size"),
        ("a: " + "zz " * 1666, "YAML", {}, "data_size"),
        ("<p>" + "word " * 25, "HTML", {}, None),
        ("<p>" + "word " * 24 + "wor", "HTML", {}, "little_visible_text"),
        ("# This file is generated by hand\n", "Python", {}, "generated"),
        ("# This file is generated by hand\n", "Python", {"generated": True}, None),
        ("x = one\n" * 5 + "# automatically generated", "Python", {}, None),
        ("x = [" + "0xff, " * 8 + "]\n" + "name = other_name\n" * 3, "Python", {}, None),  # 48 of 108 characters
        ("x = [" + "0xff, " * 8 + "]\n" + "name = other_name\n" * 2, "Python", {}, "encoded_data"),
        ("x = [" + "0xff, " * 8 + "]\n" + r"name = other_\xff" + "\nname = other_name" * 2, "Python", {}, None),
        ('x = "' + r"\u00e9" * 8 + '"\n' + "name = other_name\n" * 2, "Python", {}, "encoded_data"),
        ("x = one\n" * 200 + "ab" * 513, "Python", {"max_line_chars": 2_000}, "encoded_data"),
        ("x = one\n" * 200 + "ab" * 512, "Python", {"max_line_chars": 2_000}, None),
    ],
)
def test_contents(text: str, language: str, settings: dict[str, Any], rule: str | None) -> None:
    drop = content_problem(text, language, CodeConfig.model_validate(settings))
    assert (drop.rule if drop else None) == rule


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("src/a.py", None),
        ("a/package-lock.json", "lock_file"),
        ("web/node_modules/a/b.js", "vendored"),
        ("third_party/a.c", "vendored"),
        ("js/jquery-3.6.0.min.js", "vendored"),
        ("js/app.min.js", "generated"),
        ("api/a_pb2.py", "generated"),
        ("vendors.py", None),
    ],
)
def test_paths(path: str, rule: str | None) -> None:
    drop = path_problem(path, CodeConfig())
    assert (drop.rule if drop else None) == rule
    assert path_problem("node_modules/a.js", CodeConfig(vendored=True)) is None


def test_code_keeps_its_empty_lines_through_the_extract_stage(tmp_path: Path) -> None:
    code = "import re\n\n\ndef one():\n    return 1\n \n\n\ndef two():\n    return 2"
    (tmp_path / "a.tar").write_bytes(tar({"repo/LICENSE": MIT, "repo/a.py": code + "\n"}))
    stack = {"content": code, "path": "a.py", "license": "MIT"}
    (tmp_path / "b.jsonl").write_text(json.dumps(stack))
    extract = make_extract(ExtractConfig(), {})
    texts = []
    for name in ("a.tar", "b.jsonl"):
        for row, drop in rows_of(f"{tmp_path}/{name}"):
            if drop is None:
                assert extract(row) is None
                texts.append(row["text"])
    assert texts == [code.replace("\n \n", "\n\n")] * 2


def test_the_version_of_the_reader_concerns_this_format_only() -> None:
    assert SourceConfig(paths=("a",), format="code").content()["reader"] == 4
    assert "reader" not in SourceConfig(paths=("a",), format="jsonl").content()


def test_visible_text_is_found_in_one_pass() -> None:
    assert visible_chars("<p>a b</p><script>x</script><!-- y --><style>z</style>c&amp;") == 4
    assert visible_chars("<script>" * 100_000) == 0
    assert visible_chars("<" * 200_000) == 200_000


def test_settings_are_checked() -> None:
    with pytest.raises(ValidationError, match=r"got 'MTI' \(did you mean 'MIT'\?\)"):
        CodeConfig.model_validate({"licences": ["MTI"]})
    with pytest.raises(ValidationError, match=r"got 'python' \(did you mean 'Python'\?\)"):
        CodeConfig.model_validate({"languages": ["python"]})
    with pytest.raises(ValidationError, match=r"expected two lengths in order"):
        CodeConfig.model_validate({"data_chars": [9, 1]})
    with pytest.raises(ValidationError, match=r"ignores these settings"):
        SourceConfig.model_validate({"paths": ["a"], "format": "jsonl", "code": {}})


def test_damaged_archives_keep_what_can_be_read(tmp_path: Path) -> None:
    data = gzip.compress(tar(REPOSITORY))
    (tmp_path / "cut.tar.gz").write_bytes(data[: len(data) // 2])
    config = SourceConfig(paths=(f"{tmp_path}/cut.tar.gz",), format="code")
    (split,) = find_splits(config)
    rules = [drop.rule if drop else None for _, drop in SOURCE.open(split, open_stream(split), config)]
    assert "truncated_record" in rules
    empty = list(SOURCE.open(split, io.BytesIO(b""), config))
    assert [drop.rule for _, drop in empty] == ["empty_file"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("# spdx-license-identifier: GPL-3.0-only", "GPL-3.0-only"),
        ("# SPDX-License-Identifier : GPL-3.0-only", "GPL-3.0-only"),
        ('SPDX-License-Identifier = "GPL-3.0-only"', "GPL-3.0-only"),
        ('{"SPDX-License-Identifier": "GPL-3.0-only"}', "GPL-3.0-only"),
        ("# SPDX-License-Identifier: MIT, GPL-3.0-only", "MIT AND GPL-3.0"),
        ("# SPDX-License-Identifier: MIT & GPL-2.0 & ISC.", "MIT AND GPL-2.0 AND ISC"),
        ("/* SPDX-License-Identifier: MIT; GPL-3.0 */", "MIT AND GPL-3.0"),
        ("# SPDX-License-Identifier: MIT, see LICENSE", "MIT"),
        ("# SPDX-License-Identifier: MIT; Copyright 2024", "MIT"),
        ('f("SPDX-License-Identifier: " + name)', None),
    ],
)
def test_tags_in_other_writings_count(line: str, expected: str | None) -> None:
    assert tagged(line) == expected


def test_a_member_without_a_name_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar({"a.py": CODE, "": CODE}))
    found = rows_of(f"{tmp_path}/a.tar", code={"licences": ["any"]})
    assert [(row["record_type"], drop and drop.rule) for row, drop in found] == [("code", None), ("gap", "unsafe_path")]


def test_an_archive_with_the_name_of_a_file_of_lines_has_one_range(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(tar({f"r/{number}.py": CODE for number in range(60)}))
    (tmp_path / "b.jsonl").write_text(json.dumps({"content": CODE, "path": "b.py"}) + "\n" * 90_000)
    settings = {"paths": [f"{tmp_path}/*"], "format": "code", "code": {"licences": ["any"]}}
    config = SourceConfig.model_validate(settings)
    for split in find_splits(config):
        whole = [*SOURCE.open(split, open_stream(split), config)]
        divided = replace(split, num_ranges=5)
        starts = find_starts(divided, open_stream(split), config, lambda found, stream: iter(found), False)
        ranges = with_starts(ranges_of(divided), starts)
        assert [row for each in ranges for row in SOURCE.open(each, open_stream(split), config)] == whole
