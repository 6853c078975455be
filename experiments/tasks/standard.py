"""Ready-made tasks built on the environments of `sao_jax.envs`, for `--config.env.factory`.

    --config.env.factory=experiments.tasks.standard:reasoning_gym --config.env.options="{'task': 'spell_backward'}"
    --config.env.factory=experiments.tasks.standard:gymnasium --config.env.options="{'env_id': 'FrozenLake-v1'}"
    --config.env.factory=experiments.tasks.standard:textworld --config.env.options="{'directory': 'games'}"
    --config.env.factory=experiments.tasks.standard:textarena --config.env.options="{'game': 'GuessTheNumber-v0'}"
    --config.env.factory=experiments.tasks.standard:coding

Options are the fields of the environment's config and the keywords below. Training and held-out tasks are disjoint. All
texts are for `MathTokenizer`, which knows printable ASCII. Each function states its demonstrations: right answers,
winning walkthroughs mixed with other commands, or random moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.tasks.demonstrations import Pieces, play
from experiments.tasks.options import checked
from sao_jax.envs.adapters.gymnasium import Gymnasium, GymnasiumConfig
from sao_jax.envs.adapters.reasoning_gym import ReasoningGym, ReasoningGymConfig
from sao_jax.envs.adapters.textarena import TextArenaConfig, textarena_factory
from sao_jax.envs.adapters.textworld import TextWorldConfig, textworld_factory
from sao_jax.envs.base import Environment, Step, Tag
from sao_jax.envs.coding.env import Coding, CodingConfig
from sao_jax.envs.coding.tasks import CodingTask, make_task, read_human_eval
from sao_jax.envs.sandbox import PythonTool, PythonToolConfig
from sao_jax.tokenizers import MathTokenizer
from sao_jax.types import Domain, Split


class _From(Environment):
  """An environment whose task i is task `first + i` of another environment."""

  def __init__(self, env: Environment, first: int):
    self._env = env
    self._first = first

  def reset(self, task_index: int) -> str:
    return self._env.reset(self._first + task_index)

  def step(self, action: str) -> Step:
    return self._env.step(action)

  def close(self) -> None:
    self._env.close()


def reasoning_gym(*, num_eval_tasks: int = 1_000, **options: Any) -> Domain:
  """Makes a reasoning-gym task; `size` is the number of training tasks.

  The demonstrations give the package's own answers.

  Args:
    num_eval_tasks: number of held-out tasks, whose seeds follow those of the training tasks.
    **options: fields of `ReasoningGymConfig`; `task` is required.
  """
  if "task" not in options:
    raise ValueError("options of reasoning_gym must hold 'task', the name of a task set; received none.")
  train = checked(ReasoningGymConfig, options)
  # A problem's seed is the seed of its set plus its number.
  held_out = dataclasses.replace(train, seed=train.seed + train.size, size=num_eval_tasks)
  demonstrator = ReasoningGym(train)

  def demonstrate(task_index: int, rng: np.random.Generator) -> Pieces:
    prompt = demonstrator.reset(task_index)
    return [(prompt, False), (f"<answer>{demonstrator.gold_answer}</answer>{train.template.end}", True)]

  return Domain(
    make_env=lambda split: ReasoningGym(train if split == "train" else held_out),
    tokenizer=MathTokenizer(),
    num_train_tasks=train.size,
    num_eval_tasks=num_eval_tasks,
    demonstrate=None if _first_answer(demonstrator) is None else demonstrate,
  )


def gymnasium(*, num_train_tasks: int = 10_000, num_eval_tasks: int = 1_000, **options: Any) -> Domain:
  """Makes a toy-text environment whose tasks are seeds. Demonstrations: random actions.

  Args:
    num_train_tasks: number of training tasks, whose seeds start at 0.
    num_eval_tasks: number of held-out tasks, whose seeds follow.
    **options: fields of `GymnasiumConfig`; `env_id` defaults to FrozenLake.
  """
  config = checked(GymnasiumConfig, {"env_id": "FrozenLake-v1", **options})
  demonstrator = Gymnasium(config)

  def demonstrate(task_index: int, rng: np.random.Generator) -> Pieces:
    return play(demonstrator, task_index, lambda: str(rng.choice(demonstrator.actions)) + Tag.END)

  return _seeded(lambda: Gymnasium(config), num_train_tasks, num_eval_tasks, demonstrate, demonstrator.close)


def textworld(*, num_eval_games: int = 20, other_commands: float = 0.3, **options: Any) -> Domain:
  """Makes text adventures, `num_games` of them for training. Demonstrations: the winning commands mixed with others.

  Args:
    num_eval_games: number of held-out games, whose seeds follow those of the training games.
    other_commands: share of a demonstration's commands that are drawn from all possible ones.
    **options: fields of `TextWorldConfig`; `directory` defaults to `textworld_games` in the working directory.
  """
  train = checked(TextWorldConfig, {"directory": "textworld_games", **options})
  held_out = dataclasses.replace(train, seed=train.seed + train.num_games, num_games=num_eval_games)
  make = {"train": textworld_factory(train), "eval": textworld_factory(held_out)}
  demonstrator: Any = make["train"]()

  def demonstrate(task_index: int, rng: np.random.Generator) -> Pieces:
    def choose() -> str:
      winning = demonstrator.walkthrough()
      follow = winning and rng.random() >= other_commands
      return (winning[0] if follow else str(rng.choice(demonstrator.commands()))) + Tag.END

    return play(demonstrator, task_index, choose)

  return Domain(
    make_env=lambda split: make[split](),
    tokenizer=MathTokenizer(),
    num_train_tasks=train.num_games,
    num_eval_tasks=num_eval_games,
    demonstrate=demonstrate,
    close=demonstrator.close,
  )


def textarena(*, num_train_tasks: int = 10_000, num_eval_tasks: int = 1_000, **options: Any) -> Domain:
  """Makes a single-player game whose tasks are seeds. No demonstrations, so the policy must be able to play already.

  Args:
    num_train_tasks: number of training tasks, whose seeds start at 0.
    num_eval_tasks: number of held-out tasks, whose seeds follow.
    **options: fields of `TextArenaConfig`; `game` defaults to GuessTheNumber.
  """
  make = textarena_factory(checked(TextArenaConfig, {"game": "GuessTheNumber-v0", **options}))
  return _seeded(make, num_train_tasks, num_eval_tasks, None, lambda: None)


def coding(
  *,
  num_problems: int = 164,
  eval_share: float = 0.2,
  seed: int = 0,
  tool: Mapping[str, Any] | None = None,
  **options: Any,
) -> Domain:
  """Makes HumanEval problems with injected bugs.

  A demonstration reads the file, replaces it with the correct one, and submits.

  Args:
    num_problems: number of problems from the front of HumanEval; those without a suitable bug are left out.
    eval_share: share of the problems that is held out, from the end.
    seed: seed of the bugs.
    tool: fields of `PythonToolConfig`.
    **options: fields of `CodingConfig`.
  """
  if not 0.0 < eval_share < 1.0:
    raise ValueError(f"eval_share must be in (0, 1); received {eval_share!r}.")
  config = checked(CodingConfig, options)
  python = PythonTool(checked(PythonToolConfig, tool or {}))
  made = (make_task(problem, python, seed=seed) for problem in read_human_eval()[:num_problems])
  tasks = [task for task in made if task is not None]
  held_out = max(1, round(eval_share * len(tasks)))
  split_tasks = {"train": tasks[:-held_out], "eval": tasks[-held_out:]}
  if not split_tasks["train"]:
    python.close()
    raise ValueError(f"num_problems must give two tasks or more; {num_problems} gave {len(tasks)}.")

  def make_env(split: Split) -> Coding:
    return Coding(config, python, split_tasks[split])

  demonstrator = make_env("train")

  def demonstrate(task_index: int, rng: np.random.Generator) -> Pieces:
    task = split_tasks["train"][task_index % len(split_tasks["train"])]
    actions = iter(["read solution.py", _replacement(task), "submit"])
    return play(demonstrator, task_index, lambda: next(actions) + Tag.END)

  return Domain(
    make_env=make_env,
    tokenizer=MathTokenizer(),
    num_train_tasks=len(split_tasks["train"]),
    num_eval_tasks=held_out,
    demonstrate=demonstrate,
    close=python.close,
  )


def _replacement(task: CodingTask) -> str:
  old, new = (files["solution.py"].rstrip("\n") for files in (task.files, task.solution))
  return f"edit solution.py\n<<<<\n{old}\n====\n{new}\n>>>>"


def _first_answer(env: ReasoningGym) -> str | None:
  """Returns the answer to the first task; None for tasks with many right answers, which have no demonstrations."""
  env.reset(0)
  return env.gold_answer


def _seeded(
  make: Callable[[], Environment],
  num_train_tasks: int,
  num_eval_tasks: int,
  demonstrate: Callable[[int, np.random.Generator], Pieces] | None,
  close: Callable[[], None],
) -> Domain:
  """Makes a domain over environments whose tasks are seeds."""
  return Domain(
    make_env=lambda split: make() if split == "train" else _From(make(), num_train_tasks),
    tokenizer=MathTokenizer(),
    num_train_tasks=num_train_tasks,
    num_eval_tasks=num_eval_tasks,
    demonstrate=demonstrate,
    close=close,
  )
