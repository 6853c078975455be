"""`Trainer`: a run as an object, to train, sample, evaluate and export from Python."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import pathlib
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from sao_jax.io import workdir as workdir_lib
from sao_jax.io.console import Console
from sao_jax.io.loggers import MetricsLogger
from sao_jax.parallel.distributed import is_main_process
from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.training import config as config_lib
from sao_jax.training import evaluation, export, loop, pretrained, stages
from sao_jax.training.components import Components
from sao_jax.training.config import RunConfig, Stage
from sao_jax.training.run_state import checkpoint_template
from sao_jax.training.signals import Interrupted, StopSignals
from sao_jax.types import Domain, Params


class Trainer:
  """One run in a workdir.

  The models, the rollout engine and the lock of the workdir are made at the first use and kept until `close`. A
  trainer of a workdir that holds a run goes on with it. Best used as a context manager.

      with Trainer(config, domain, "runs/mine") as trainer:
        trainer.train(100)
        print(trainer.generate(["What is 3 + 4?"]))
        trainer.save_hf("mine")

  Args:
    config: the run.
    domain: the task; closed with the trainer.
    workdir: the run's folder; None: a dated folder in `runs/`.
    loggers: further places for the metrics, such as `io.loggers.CallbackLogger`; see `loop.train`.
    console: where to report; None: standard output.
    make_domain: see `loop.train`.
  """

  def __init__(
    self,
    config: RunConfig,
    domain: Domain,
    workdir: str | os.PathLike[str] | None = None,
    *,
    loggers: Sequence[MetricsLogger] = (),
    console: Console | None = None,
    make_domain: Callable[[], Domain] | None = None,
  ):
    self.config = config
    self.domain = domain
    named = workdir or f"runs/{datetime.datetime.now():%Y-%m-%d_%H%M%S}"
    self.workdir = pathlib.Path(named).absolute()
    self._loggers = tuple(loggers)
    self._console = console or Console(quiet=not is_main_process())
    self._make_domain = make_domain
    self._parts: Components | None = None
    self._policy: Params | None = None
    self._stack = contextlib.ExitStack()
    self._close = weakref.finalize(self, self._stack.close)  # for those who do not close it

  def train(
    self, num_steps: int | None = None, *, run_stages: Sequence[Stage] = config_lib.STAGES
  ) -> dict[str, Any] | None:
    """Runs the recipe of `loop.train` from where the run is, up to a learner step.

    Args:
      num_steps: learner steps of the run in all, those of earlier calls and of a resumed run included; None: those of
        the config. A later call with a larger number continues.
      run_stages: which stages to run.

    Returns:
      The summary that is also written to `summary.json`. None if RL was not run to its end: it was not among
      `run_stages`, or a signal came.

    Raises:
      ValueError: the workdir holds another run, or `num_steps` is below the step that it has reached.
      RunStoppedError, TooManyFailuresError: the run cannot continue by itself; it is saved up to there.
    """
    steps = self.config.num_steps if num_steps is None else num_steps
    config = dataclasses.replace(self.config, num_steps=steps)
    with workdir_lib.writing(self.workdir), StopSignals() as signals:
      try:
        parts = self._open(signals)
        if is_main_process():
          loop.record_config(config, self.workdir, self._console)
        parts.config = config
        self._policy = None  # makes room: the learner's state holds its own
        state, summary = loop.recipe(parts, self.workdir, self._console, signals, run_stages, self._loggers)
        self._policy = None if state is None else state.policy
        return summary
      except Interrupted:
        self._console.print(loop.STOPPED)
        return None

  @property
  def params(self) -> Params:
    """The policy's parameters: after `train`, those of its last step; before, those of the workdir or of the config.
    Adapters (`config.lora`) are merged into them, in a copy."""
    return self._open().whole_policy(self._trained())

  def _trained(self) -> Params:
    """Returns the trained part of the policy: its parameters, or its adapters."""
    if self._policy is None:
      self._policy = self._restored_policy()
    return self._policy

  def generate(self, prompts: Sequence[str], *, seed: int = 0) -> list[str]:
    """Samples one completion of each prompt at the engine's temperature, up to its `max_action_tokens`.

    Args:
      prompts: texts of a user; `Domain.format_prompt` writes them in the policy's chat template.
      seed: of the sampling noise.

    Returns:
      The completions, without the token that ends them.

    Raises:
      TypeError: `prompts` is one text. ValueError: a prompt is too long for the engine.
    """
    if isinstance(prompts, str):
      raise TypeError(f"prompts must be a sequence of texts; received the text {prompts!r:.80}.")
    if not prompts:
      return []
    parts = self._open()
    parts.prompts[:] = [self.domain.format_prompt(prompt) for prompt in prompts]
    first = self.domain.num_train_tasks + self.domain.num_eval_tasks
    requests = [EpisodeRequest(task_index=first + i, episode_id=i, group_id=i) for i in range(len(prompts))]
    weights = parts.for_engine(self._trained())
    done = {x.episode_id: x for x in parts.rollouts.generate(lambda _: (weights, 0), requests, seed=seed)}
    if missing := [prompts[i] for i in range(len(prompts)) if i not in done]:
      raise ValueError(
        f"prompts must fit into engine.max_len = {self.config.engine.max_len} tokens; {len(missing)} could not be "
        f"continued, such as {missing[0]!r:.200}."
      )
    tokenizer, texts = self.domain.tokenizer, []
    for i in range(len(prompts)):
      ids = done[i].tokens[done[i].action_mask].tolist()
      texts.append(tokenizer.decode(ids[:-1] if ids[-1] in tokenizer.stop_ids else ids))
    return texts

  def evaluate(self, num_episodes: int | None = None) -> evaluation.Evaluation:
    """Measures the success on held-out tasks, with the same sampling noise at every call.

    Args:
      num_episodes: None takes `eval_episodes` of the config.

    Raises:
      ValueError: the number is below 1.
    """
    parts = self._open()
    weights = parts.for_engine(self._trained())
    count = self.config.eval_episodes if num_episodes is None else num_episodes
    return evaluation.evaluate(parts.rollouts, self.domain, weights, num_episodes=count)

  def save_hf(self, directory: str | os.PathLike[str], *, dtype: str | None = None) -> list[str]:
    """Exports the policy for transformers and vLLM; returns the names of the files. See `export.export`.

    The tokenizer comes from the checkpoint that the run started from; without one, weights and config are written only.
    Adapters are merged into the weights, and written in PEFT's format as well (`export.export_adapters`).
    """
    source, adapted = tokenizer_source(self.config), self.config.lora.enabled
    names = export.export(directory, self.config.policy, self.params, source=source, dtype=dtype)
    return names + (export.export_adapters(directory, self.config, self._trained()) if adapted else [])

  def close(self) -> None:
    """Stops the engine, closes the domain and unlocks the workdir."""
    self._parts = self._policy = None
    self._close()

  def __enter__(self) -> Trainer:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.close()

  def _open(self, signals: StopSignals | None = None) -> Components:
    """Returns the components, which the first call makes."""
    if self._parts is None:
      if not self._close.alive:
        raise RuntimeError("the trainer is closed.")
      opened = loop.opened(
        self.config, self.domain, self.workdir, self._console, signals or StopSignals(), self._make_domain
      )
      self._parts = self._stack.enter_context(opened)
    return self._parts

  def _restored_policy(self) -> Params:
    """The policy of the newest checkpoint, or of the warm start, or the one that the run starts from."""
    parts = self._open()
    shapes = checkpoint_template(parts)["learner"].policy
    if any((self.workdir / "checkpoints").glob("[0-9]*/")):
      return pretrained.restore_policy(self.workdir, shapes)[1]
    with stages.stage_checkpointer(parts, self.workdir, "warm_start", read_only=True) as checkpointer:
      restored = checkpointer.restore(shapes)
    return parts.init_policy() if restored is None else restored.state


def tokenizer_source(config: RunConfig) -> str | None:
  """Returns the published checkpoint whose tokenizer a run uses; None if its tokenizer has no files."""
  source = config.env.options.get("checkpoint") or config.policy_checkpoint
  return None if source is None else pretrained.tokenizer_source(source)
