"""The preference-shift simulation: judges, questions and the run (METHOD, online learning simulation)."""

from __future__ import annotations
