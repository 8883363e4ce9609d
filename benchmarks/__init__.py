"""Slow studies and timings, each a module to run: `python -m benchmarks.NAME --help`."""
