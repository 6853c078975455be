"""Files of a workdir (checkpoints, metrics, trajectory samples, configuration) and progress on the terminal."""

from __future__ import annotations
