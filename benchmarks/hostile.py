"""The tests with damaged files and flags, with more cases: ``python -m benchmarks.hostile --examples 50000``."""

import argparse
import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1] / "tests"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=50_000, help="cases of each test [50000]")
    parser.add_argument("--first", type=int, default=2000, help="seed of the first; the suite has those below [2000]")
    parser.add_argument("--only", default="", help="names of tests, as `pytest -k` takes them")
    flags = parser.parse_args()
    os.environ["HOSTILE_EXAMPLES"] = str(flags.examples)
    os.environ["HOSTILE_FIRST"] = str(flags.first)
    return pytest.main([str(TESTS / "test_hostile.py"), "-k", flags.only, "--durations=0", "-n0"])


if __name__ == "__main__":
    sys.exit(main())
