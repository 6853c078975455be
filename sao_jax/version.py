"""The library's version, recorded in checkpoints and read by the build."""

from __future__ import annotations

__version__ = "0.3.0"
