"""A discrete-event model of a cluster that runs SAO, to predict its speed before it is built."""

from __future__ import annotations
