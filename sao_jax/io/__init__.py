"""What is written to a workdir and read back: checkpoints, metrics, trajectory samples, configuration, progress."""

from __future__ import annotations
