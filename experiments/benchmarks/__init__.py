"""Benchmarks: `python -m experiments.benchmarks.NAME` prints rows, then one JSON object on the last line."""

from __future__ import annotations
