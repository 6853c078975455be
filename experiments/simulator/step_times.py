"""Step times of engine and learner that follow from a chip's stated rates. Computed, not measured.

An engine's step takes the time of its memory traffic plus that of its collectives (`compile_report`), as if they did
not overlap. A learner step takes the time of its FLOPs at a stated share of the chip's peak.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.support import aot
from sao_jax.models import ModelConfig

LEARNER_SHARE = 0.4
"""Share of the peak that the learner's and the prefill's matmuls reach (assumed)."""


class Chip(NamedTuple):
  """Rates of one chip."""

  memory_bytes_per_s: float
  interconnect_bytes_per_s: float
  """Rate of a collective, per chip: below the sum of all links, which a collective along one axis does not use."""
  peak_flops: float
  """bfloat16."""


CHIPS: Mapping[str, Chip] = {"v5p": Chip(2.765e12, 200e9, 459e12)}


class StepTimes(NamedTuple):
  """Seconds; see `step_times`."""

  token_s: float
  """A decode step of an engine: one token of every sequence."""
  turn_s: float
  """Prefill of what an environment returned."""
  transfer_s: float
  """Weights on their way to an engine."""
  train_chip_s: float
  """Learner time per token of context, on one chip. n chips take 1 / n of it."""


def read_report(path: str | os.PathLike[str], program: str = "decode") -> dict[str, Any]:
  """Reads a program's figures from the last line of a `compile_report`.

  Raises:
    ValueError: the file does not end with the report of that program.
  """
  lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
  report = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
  if not report.get(program):
    raise ValueError(f"{path} must end with the JSON object of a compile_report of {program!r}.")
  return {**report[program], "slots": report["slots"]}


def forward_flops(model: ModelConfig, *, context: float) -> float:
  """Returns the FLOPs of a token's forward pass: 2 per active parameter, and attention to half of the context."""
  params = aot.policy_shapes(model)
  share = model.num_experts_per_tok / model.num_experts if model.num_experts else 0.0
  active = aot.total_size(params) - aot.expert_size(params) * (1.0 - share)
  return 2.0 * active + 4.0 * (context / 2) * model.num_heads * model.head_dim * model.num_layers


def training_flops(model: ModelConfig, *, context: float, critic_updates: int = 2) -> float:
  """Returns the FLOPs of a learner step per token of context.

  An update is a forward pass, its recomputation and a backward pass of twice its FLOPs: 4 forward passes. There are
  `critic_updates` of the critic and one of the policy, and one forward pass for the values. What the critic's frozen
  attention saves is not counted.
  """
  return (4 * critic_updates + 4 + 1) * forward_flops(model, context=context)


def step_times(
  report: Mapping[str, Any],
  model: ModelConfig,
  chip: Chip,
  *,
  chips_per_engine: int,
  context: float,
  observation: float,
) -> StepTimes:
  """Computes step times of engine and learner from a compiled decode step and a chip's stated rates.

  Args:
    report: the decode step's figures, of an engine of `chips_per_engine` chips.
    model: the model of the report.
    chip: its rates.
    chips_per_engine: number of chips of one engine.
    context: tokens of a trajectory at its end.
    observation: tokens of an environment's response.
  """
  token_s = report["moved_bytes_per_device"] / chip.memory_bytes_per_s
  token_s += report["collective_bytes"] / chip.interconnect_bytes_per_s
  flops = LEARNER_SHARE * chip.peak_flops
  weights = aot.total_size(aot.policy_shapes(model)) * model.compute_dtype.itemsize
  return StepTimes(
    token_s=token_s,
    turn_s=observation * forward_flops(model, context=context) / (chips_per_engine * flops),
    transfer_s=weights / (chips_per_engine * chip.interconnect_bytes_per_s),
    train_chip_s=training_flops(model, context=context) / flops,
  )
