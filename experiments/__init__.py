"""Commands that wire the library into runs: training, evaluation, benchmarks, plots."""

from __future__ import annotations
