"""The native modules; everything else is declared in `setup.cfg`, which has no place for them."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

PACKAGES = ("pipeline.text", "pipeline.extract")
"""The packages with a native module `_native`, whose sources are in the folder `cpp`."""


def native(package: str) -> Extension:
    """Return the native module of a package."""
    folder = Path(*package.split("."), "cpp")
    sources = sorted(folder.glob("*.[ch]*"))
    # `pipeline/text/native.py` compares it: a module of other sources, such as those before an update, is not used.
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return Extension(
        f"{package}._native",
        sources=[f"{folder}/module.cpp"],
        depends=[*map(str, sources), "setup.py"],
        define_macros=[("SOURCES", f'"{digest}"')],
        # No -march: a wheel is used on other machines than the one that built it. No fused multiplications: processors
        # without them round otherwise.
        extra_compile_args=["-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden"],
        language="c++",
        # Without a compiler the installation succeeds, and the functions in Python are used.
        optional=True,
    )


setup(ext_modules=[native(package) for package in PACKAGES])
