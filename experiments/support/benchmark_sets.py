"""Benchmarks by name: the fields of their published files, and the number of runs in the paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments.tasks import chat, problem_file
from sao_jax.envs.adapters.reasoning_gym import check_task
from sao_jax.types import Domain


@dataclasses.dataclass(frozen=True)
class Benchmark:
  """A published set of problems with short answers."""

  fields: tuple[tuple[str, str], ...]
  """Field names of problem and answer in the published files, one pair per publisher."""
  num_runs: int
  """Number of runs that the paper averages over."""


BENCHMARKS: Mapping[str, Benchmark] = {
  "AIME2025": Benchmark((("problem", "answer"), ("question", "answer")), 16),
  "HMMT": Benchmark((("problem", "answer"),), 16),
  "BeyondAIME": Benchmark((("problem", "answer"),), 4),
  "IMOAnswerBench": Benchmark((("Problem", "Short Answer"),), 16),
}
OWN_FIELDS = (("problem", "answer"), ("question", "answer"))
"""Field names of problem and answer in a file of one's own."""
REASONING_GYM = "reasoning_gym:"
"""Prefix for the names of reasoning-gym tasks."""


def default_runs(name: str | None) -> int:
  """Returns the number of runs of a benchmark in the paper, and 1 for reasoning-gym tasks and one's own problems.

  Raises:
    ValueError: unknown name.
  """
  if name is None:
    return 1
  if name.startswith(REASONING_GYM):
    check_task(name.removeprefix(REASONING_GYM))
    return 1
  if name not in BENCHMARKS:
    raise ValueError(f"benchmark must be one of {', '.join(BENCHMARKS)} or {REASONING_GYM}TASK; received {name!r}.")
  return BENCHMARKS[name].num_runs


def make_domain(
  *,
  benchmark: str | None,
  checkpoint: str,
  data: str | None,
  max_turns: int,
  tool: bool,
  num_tasks: int = 100,
  settings: Mapping[str, Any] | None = None,
  on_unreadable: problem_file.OnUnreadable = "error",
) -> Domain:
  """Makes a domain with the benchmark's problems as held-out tasks, in the checkpoint's chat template.

  Args:
    benchmark: a key of `BENCHMARKS`, or `reasoning_gym:TASK`; None for a file of one's own.
    checkpoint: the checkpoint whose tokenizer and template are used.
    data: JSONL or CSV file of a published benchmark; None for reasoning-gym, which makes its problems.
    max_turns: maximum number of actions per episode.
    tool: whether to offer Python.
    num_tasks: number of problems of a reasoning-gym task.
    settings: settings of a reasoning-gym task.
    on_unreadable: how to treat an answer in the file that cannot be graded; see `chat.math`.

  Raises:
    ValueError: the name is unknown, `data` is missing or superfluous, or the file lacks the published fields or holds
      an answer that cannot be graded.
  """
  default_runs(benchmark)
  if benchmark is not None and benchmark.startswith(REASONING_GYM):
    if data is not None:
      raise ValueError(f"data must be left out with {benchmark}, which makes its problems; received {data!r}.")
    return chat.reasoning_gym(
      checkpoint=checkpoint, answer="number" if not tool else "tags", tool=tool, max_turns=max_turns,
      num_eval_tasks=num_tasks, task=benchmark.removeprefix(REASONING_GYM), settings=dict(settings or {}),
    )  # fmt: skip
  if data is None:
    raise ValueError(f"data must name the JSONL or CSV file of {benchmark}; received None.")
  question, answer = published_fields(benchmark, data)
  return chat.math(
    checkpoint=checkpoint, train=data, held_out=data, question_field=question, answer_field=answer, tool=tool,
    max_turns=max_turns, on_unreadable=on_unreadable,
  )  # fmt: skip


def published_fields(benchmark: str | None, data: str) -> tuple[str, str]:
  """Returns the pair of the benchmark's fields that the file's first line has; None stands for a file of one's own.

  Raises:
    ValueError: the line has none of the pairs.
  """
  _, row = next(problem_file.rows(data), (1, {}))
  pairs = OWN_FIELDS if benchmark is None else BENCHMARKS[benchmark].fields
  for pair in pairs:
    if isinstance(row, dict) and set(pair) <= set(row):
      return pair
  wanted = " or ".join(f"{question!r} and {answer!r}" for question, answer in pairs)
  has = sorted(row) if isinstance(row, dict) else type(row).__name__
  raise ValueError(f"{data}: lines of {benchmark or 'your problems'} must have {wanted}; the first has {has}.")
