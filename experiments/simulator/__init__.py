"""A model of a cluster that runs SAO: what is simulated before it is built."""

from __future__ import annotations
