"""What is said of the machine: what decides the last bits, and what has no influence on them."""

import os
import subprocess
import sys

import numpy as np

from jaxrl_mini.config import Config
from jaxrl_mini.machine import hardware, runtime
from jaxrl_mini.runs import audit


def test_numpy_says_what_it_was_told_to_leave():
    used = hardware.numpy_dispatch().split()
    said = "from jaxrl_mini.machine import hardware; print(hardware.numpy_dispatch())"
    if not used:
        assert not np._core._multiarray_umath.__cpu_features__.get("X86_V3")
        return
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": used[-1]}
    done = subprocess.run([sys.executable, "-c", said], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.split() == used[:-1]


def test_another_kernel_is_the_same_platform_and_threads_matter_to_a_language_model():
    here = runtime.runtime() | {"platform": "Linux-6.18.44-fc-v782-x86_64-with-glibc2.36", "threads": 2}
    there = {"runtime": here | {"platform": "Linux-5.4.0-1-x86_64-with-glibc2.36", "threads": 4}}
    assert audit.elsewhere(there, here, Config()) == {}
    assert audit.elsewhere(there, here, Config(backend="hf", model="m")) == {"threads": [4, 2]}
    there["runtime"]["platform"] = "Linux-5.4.0-1-x86_64-with-glibc2.40"
    assert set(audit.elsewhere(there, here, Config())) == {"platform"}
