"""Commands built on the library: training, evaluation, comparisons, benchmarks, plots."""

from __future__ import annotations
