"""The library's version: recorded in checkpoints, read by setup.py."""

from __future__ import annotations

__version__ = "0.2.0"
