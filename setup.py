"""Builds the package. Its metadata is in `pyproject.toml`."""

from __future__ import annotations

import setuptools

setuptools.setup()
