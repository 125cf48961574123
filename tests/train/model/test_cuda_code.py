"""The compiled loss as a GPU will run it: the Triton code for an H100 reads each logit twice and writes it once."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.support.paths import ROOT


@pytest.mark.skipif(torch.version.cuda is None or find_spec("triton") is None, reason="torch is built without CUDA")
def test_passes_over_the_logits_on_an_h100() -> None:
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.cuda_code"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {name: passes for line in done.stdout.splitlines() for name, passes in json.loads(line).items()}
    # [reads, writes] of the one kernel of each: 2 + 2 + 2 bytes a logit in 16 bits.
    assert list(found["sums_of"].values()) == [[1, 0]]
    assert list(found["slopes_into"].values()) == [[1, 1]]
