"""The compiled loss on a GPU: the Triton code for an H100 reads each logit twice and writes it once."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.support.paths import ROOT
from train.model.loss import softmax_sums, write_gradient


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
    passes_by_function = {
        name: passes for line in done.stdout.splitlines() for name, passes in json.loads(line).items()
    }
    # [reads, writes] of the single kernel of each: 2 + 2 + 2 bytes per logit in 16 bits.
    assert list(passes_by_function[softmax_sums.__name__].values()) == [[1, 0]]
    assert list(passes_by_function[write_gradient.__name__].values()) == [[1, 1]]
