"""Settings for the whole suite: they must be in place before jax is imported."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis

hypothesis.settings.register_profile("suite", deadline=None, max_examples=25, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("suite")
