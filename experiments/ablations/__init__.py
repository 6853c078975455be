"""The paper's comparisons: which arms there are, how they are run, and what is made of their results."""

from __future__ import annotations
