"""The preference-shift simulation: judges, questions and the run of the paper's online learning."""

from __future__ import annotations
