"""The paper's comparisons: their arms, the runs of each arm, and tables and plots of the results."""

from __future__ import annotations
