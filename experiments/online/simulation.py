"""The preference-shift simulation: the users' preferred style changes while the policy learns from their feedback."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.online import questions
from experiments.online.judges import CachedJudge, ChatJudge, Judge
from experiments.online.questions import STYLES
from experiments.online.rule_judge import RuleJudge
from experiments.tasks.options import checked
from sao_jax.io import workdir as workdir_lib
from sao_jax.io.console import Console
from sao_jax.training import config as config_lib
from sao_jax.training import evaluation, stages
from sao_jax.training.components import Components
from sao_jax.training.config import RunConfig
from sao_jax.training.metrics import RunLog, StepMetrics
from sao_jax.training.signals import StopSignals
from sao_jax.types import Domain, Environment, Split, Step, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulationConfig:
  """The `config.env.options` of a simulation."""

  order: tuple[str, ...] = ("cute", "chuunibyou", "classical")
  """The preferred style of each phase. It decides the styles that the system prompt names (`questions.candidates`)."""
  phase_steps: int = 100
  """Learner steps between changes of the preference."""
  eval_every: int = 20
  """Learner steps between evaluations on held-out questions."""
  right: float = 0.7
  """Share of the demonstrations with the right answer."""
  judge_url: str | None = None
  """URL of an OpenAI-compatible endpoint; None for the embedded judge."""
  judge_model: str = ""
  """Name of the judge's model at the endpoint."""
  judge_key_variable: str | None = None
  """Name of the environment variable with the judge's key. Never the key itself, since configs are saved."""

  def __post_init__(self) -> None:
    object.__setattr__(self, "order", tuple(self.order))
    if not self.order or set(self.order) - set(STYLES):
      raise ValueError(f"order must name one or more of {', '.join(STYLES)}; received {self.order!r}.")
    for name in ("phase_steps", "eval_every"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} must be >= 1; received {getattr(self, name)!r}.")
    if not 0.0 <= self.right <= 1.0:
      raise ValueError(f"right must be in [0, 1]; received {self.right!r}.")
    if self.judge_url is not None and not self.judge_model:
      raise ValueError("judge_model must be given with judge_url; received ''.")
    if self.judge_key_variable is not None and not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", self.judge_key_variable):
      raise ValueError(
        "judge_key_variable must name an environment variable; the received value is not a name. It is not shown here, "
        "since it may be the key itself."
      )

  @property
  def num_steps(self) -> int:
    return self.phase_steps * len(self.order)

  def preferred_at(self, step: int) -> str:
    """Returns the preferred style at learner step `step` (1, 2, ...). The last phase has no end."""
    return self.order[min(max(step - 1, 0) // self.phase_steps, len(self.order) - 1)]


class Users(Environment):
  """Users who ask a question, read the answer and reward it if they like it."""

  def __init__(self, simulation: Simulation, texts: Sequence[str]):
    self._simulation = simulation
    self._texts = texts
    self._question = ""

  def reset(self, task_index: int) -> str:
    self._question = self._texts[task_index % len(self._texts)]
    return f"{questions.system(questions.candidates(self._simulation.preferred))} {self._question}"

  def step(self, action: str) -> Step:
    verdict = self._simulation.judge(self._question, action)
    return Step(reward=verdict.reward(self._simulation.preferred), done=True)

  def close(self) -> None:
    """Does nothing: there are no resources."""


def _chat_judge(config: SimulationConfig) -> ChatJudge:
  assert config.judge_url is not None
  key = None
  if config.judge_key_variable is not None:
    key = os.environ.get(config.judge_key_variable)
    if not key:
      raise ValueError(f"judge_key_variable names {config.judge_key_variable}, which must be set; received nothing.")
  return ChatJudge(config.judge_url, config.judge_model, api_key=key)


class Simulation:
  """The users, their judge and the currently preferred style.

  Args:
    config: the simulation.
    judge: overrides the judge of the config.
  """

  def __init__(self, config: SimulationConfig, judge: Judge | None = None):
    if judge is None:
      judge = RuleJudge() if config.judge_url is None else _chat_judge(config)
    self.config = config
    self.judge = CachedJudge(judge)
    self.preferred = config.order[0]
    self._texts: Mapping[Split, Sequence[str]] = {
      "train": questions.train_questions(), "eval": questions.held_out_questions(),
    }  # fmt: skip
    self.domain = Domain(
      make_env=lambda split: Users(self, self._texts[split]),
      tokenizer=questions.WordTokenizer(),
      num_train_tasks=len(self._texts["train"]),
      num_eval_tasks=len(self._texts["eval"]),
      demonstrate=self._demonstrate,
    )

  def _demonstrate(self, task_index: int, rng: np.random.Generator) -> list[tuple[str, bool]]:
    question = self._texts["train"][task_index]
    styles = questions.CANDIDATES[rng.integers(len(questions.CANDIDATES))]
    answer = questions.demonstrate(question, rng, right=self.config.right, styles=styles)
    return [(f"{questions.system(styles)} {question}", False), (f"{answer} {questions.END}", True)]

  def accuracies(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns for each style the share of held-out answers that are good and in that style, preferred or not."""
    decode = self.domain.tokenizer.decode
    found = []
    for trajectory in trajectories:
      question = self._texts["eval"][(trajectory.task_index - self.domain.num_train_tasks) % self.domain.num_eval_tasks]
      found.append(self.judge(question, decode(trajectory.tokens[trajectory.action_mask].tolist())))
    return {style: float(np.mean([verdict.reward(style) for verdict in found])) for style in STYLES}


def make_domain(**options: Any) -> Domain:
  """Makes the simulation as a domain of `experiments.train`, where the first style stays preferred."""
  return Simulation(checked(SimulationConfig, options)).domain


def train(
  config: RunConfig, folder: pathlib.Path, *, judge: Judge | None = None, console: Console | None = None
) -> dict[str, Any]:
  """Runs the recipe with a changing preference, and writes `metrics.jsonl` and `summary.json`.

  Evaluation rows have an `eval_accuracy_STYLE` for every style. Their `eval_success_rate` is that of the preferred
  style. There are no checkpoints: a stopped run starts RL from the beginning, which takes a minute or two.

  Args:
    config: the run; `env.options` is a `SimulationConfig`, whose phases determine `num_steps`.
    folder: the run's folder.
    judge: overrides the judge of the options.
    console: where to report.

  Raises:
    Interrupted: a signal came.
    RuntimeError: another run uses the folder.
    ValueError: the schedule is asynchronous, so that the engine cannot evaluate in between, or `num_steps` does not
      match the phases.
  """
  simulation = Simulation(checked(SimulationConfig, config.env.options), judge)
  if config.schedule == "async":
    raise ValueError("schedule must be lagged or sync in the simulation; received 'async'.")
  if config.num_steps != simulation.config.num_steps:
    raise ValueError(f"num_steps must be {simulation.config.num_steps}, as the phases; received {config.num_steps}.")
  console = console or Console(quiet=True)
  folder.mkdir(parents=True, exist_ok=True)
  missing = config_lib.comparison(config)["may_be_missing"]
  with (
    workdir_lib.WorkdirLock(folder), Components(config, simulation.domain) as parts, StopSignals() as signals,
  ):  # fmt: skip
    workdir_lib.write_or_check_config(folder, config_lib.to_json(config), may_be_missing=missing)
    policy = stages.warm_start(parts, folder, console, signals)
    critic = stages.value_pretraining(parts, policy, folder, console, signals)
    began = time.monotonic()
    evaluations = _reinforce(parts, simulation, parts.init_state(policy, critic), folder, signals)
    seconds = {stage: facts["seconds"] for stage, facts in stages.stage_facts(parts, folder).items()}
    seconds["rl"] = time.monotonic() - began
    failed = parts.rollout_counters()["failed_episodes"]
  summary = {
    "success_before": evaluations[0], "success_after": evaluations[-1], "n": config.eval_episodes,
    "seconds_total": sum(seconds.values()), "seconds_by_stage": seconds, "num_steps": config.num_steps,
    "dropped_stale": 0, "failed_episodes": failed, "device": jax.devices()[0].device_kind,
  }  # fmt: skip
  workdir_lib.write_summary(folder, summary)
  return summary


def _reinforce(
  parts: Components, simulation: Simulation, state: Any, folder: pathlib.Path, signals: StopSignals
) -> list[float]:
  """Runs the loop of `sao_jax.training.loop` with a changing preference; returns the success of the evaluations.

  The loop is repeated here because the engine evaluates between its steps and the run needs no checkpoints.
  """
  config, settings = parts.config, simulation.config
  (schedule, weight_sync), metrics = parts.make_schedule(), StepMetrics(parts)
  (folder / "metrics.jsonl").unlink(missing_ok=True)  # left by a run that was stopped
  log = RunLog(folder, restored_step=0, placement=parts.placement)
  found = []

  def evaluate(step: int) -> None:
    # Answers are judged by the style that is preferred in the next step.
    simulation.preferred = settings.preferred_at(step + 1)
    weights = parts.for_engine(state.policy)
    result = evaluation.evaluate(parts.rollouts, parts.domain, weights, num_episodes=config.eval_episodes, version=step)
    accuracies = {f"eval_accuracy_{style}": x for style, x in simulation.accuracies(result.trajectories).items()}
    found.append(result.success_rate)
    log.evaluation(step, success_rate=result.success_rate, n=result.n, **accuracies)

  try:
    evaluate(0)
    weight_sync.publish(state.policy, 0)
    metrics.start()
    for step in range(1, config.num_steps + 1):
      signals.check()
      simulation.preferred = settings.preferred_at(step)
      trajectories = schedule.next_batch(step - 1)
      metrics.batch_received()
      state, report = parts.update(state, parts.pack(trajectories))
      weight_sync.publish(state.policy, step)
      log.step(step, metrics.row(step, trajectories, jax.device_get(report), schedule))
      if step % settings.eval_every == 0 or step == config.num_steps:
        evaluate(step)
  finally:
    log.close()
    schedule.close()
  return found
