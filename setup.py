"""The native module `pipeline.text._native`; everything else is declared in `setup.cfg`, which has no place for it."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

SOURCES = sorted(Path("pipeline/text/cpp").glob("*.[ch]*"))
# `pipeline/text/native.py` compares it: a module of other sources, such as those before an update, is not used.
DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()

setup(
    ext_modules=[
        Extension(
            "pipeline.text._native",
            sources=["pipeline/text/cpp/module.cpp"],
            depends=[*map(str, SOURCES), "setup.py"],
            define_macros=[("SOURCES", f'"{DIGEST}"')],
            # No -march: a wheel is used on other machines than the one that built it.
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden"],
            language="c++",
            # Without a compiler the installation succeeds, and the functions in Python are used.
            optional=True,
        )
    ]
)
