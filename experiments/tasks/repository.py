"""Repositories with problems in the format of SWE-bench, for `--config.env.factory`; see the page on environments.

    --config.env.factory=experiments.tasks.repository:make_domain
    --config.env.options="{'checkpoint': 'path/of/checkpoint', 'train': 'instances.jsonl', 'folders': 'repositories'}"
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.tasks import chat_demonstrations, problem_file
from experiments.tasks.options import checked
from sao_jax.envs.chat import ChatEnv, Question
from sao_jax.envs.coding.repository import Repository, RepositoryConfig, Workspace
from sao_jax.envs.coding.swe_bench import SweBenchInstance, read_swe_bench
from sao_jax.envs.coding.test_runs import ImageRuns, PythonRuns, Runs
from sao_jax.envs.function_tools import FunctionTool
from sao_jax.envs.sandbox import PythonTool, PythonToolConfig
from sao_jax.tokenizers import Chat
from sao_jax.types import Domain, Split

INSTRUCTION = "Solve the problem by changing the repository with the tools. Hidden tests decide. Answer when done."


def make_domain(
  *,
  checkpoint: str,
  train: str,
  held_out: str | None = None,
  folders: str | None = None,
  images: str | None = None,
  image: Mapping[str, str] | None = None,
  tool: Mapping[str, Any] | None = None,
  pytest_options: Sequence[str] = (),
  instruction: str = INSTRUCTION,
  system: str | None = None,
  demonstrations: str | None = None,
  template: Mapping[str, Any] | None = None,
  **options: Any,
) -> Domain:
  """Makes a domain of instances, whose reward is 1 if the tests of FAIL_TO_PASS and PASS_TO_PASS pass and 0 otherwise.

  Args:
    checkpoint: the checkpoint whose tokenizer and template are used; the template must support tool calls.
    train: file of instances (`read_swe_bench`).
    held_out: such a file of held-out instances. None holds out every tenth instance of `train`.
    folders: folder with the repository of each instance at its base commit, in a subfolder named by `instance_id`.
    images: instead of `folders`, folder with the unpacked root of each instance's container image, likewise.
    image: fields `folder` and `python` of `ImageRuns`.
    tool: fields of `PythonToolConfig`, such as `{"packages": ("pytest", "numpy")}`. With `images`, only the limits.
    pytest_options: further options of pytest.
    instruction: text below the problem; empty for none.
    system: text of the system turn; None for no such turn.
    demonstrations: JSONL file of conversations for the warm start; None for none.
    template: arguments of the chat template.
    **options: fields of `RepositoryConfig`.

  Raises:
    ValueError: an option does not exist, a file is invalid, or an instance cannot be graded; see `Repository`.
    ImportError: a package is not installed.
  """
  if (folders is None) == (images is None):
    raise ValueError(f"either folders or images must be given; received {folders!r} and {images!r}.")
  config, limits = checked(RepositoryConfig, options), _tool_limits(tool or {}, in_images=images is not None)

  def prepare(instance: SweBenchInstance) -> Repository:
    root = pathlib.Path(str(folders or images), instance.instance_id)
    runs: Runs = PythonRuns(config=limits)
    if images is not None:
      runs = checked(ImageRuns, {**(image or {}), "root": str(root), "config": limits})
      root = root / runs.folder.lstrip("/")
    return Repository(instance=instance, folder=root, runs=runs, options=tuple(pytest_options))

  instances = {path: read_swe_bench(path) for path in dict.fromkeys((train, held_out or train))}
  parts = problem_file.split(train, instances[train]) if held_out is None else (instances[train], instances[held_out])
  if not all(parts):
    raise ValueError(f"{train} and {held_out} must hold instances; received {len(parts[0])} and {len(parts[1])}.")
  of = {split: [prepare(instance) for instance in part] for split, part in zip(("train", "eval"), parts, strict=True)}
  chat = Chat.load(checkpoint, **(template or {}))
  first = [] if system is None else [{"role": "system", "content": system}]

  def make_env(split: Split) -> ChatEnv:
    workspace = Workspace(config)

    def question(task_index: int) -> Question:
      repository = of[split][task_index % len(of[split])]
      workspace.start(repository)
      text = "\n\n".join(filter(None, (repository.instance.problem_statement, instruction)))
      return Question(messages=[*first, {"role": "user", "content": text}], score=lambda said: workspace.grade())

    functions = [FunctionTool(function) for function in workspace.tools]
    return ChatEnv(chat, question, None, max_turns=config.max_turns, functions=functions)

  tools = [FunctionTool(function).description for function in Workspace(config).tools]
  return Domain(
    make_env=make_env,
    tokenizer=chat.tokenizer,
    num_train_tasks=len(of["train"]),
    num_eval_tasks=len(of["eval"]),
    demonstrate=None if demonstrations is None else chat_demonstrations.load(chat, demonstrations, tools),
    close=lambda: None,
    files=tuple(instances),
  )


def _tool_limits(tool: Mapping[str, Any], *, in_images: bool) -> PythonToolConfig:
  """Returns the tool's settings. Without images its packages are this interpreter's, and pytest must be among them."""
  defaults = {name: getattr(PythonRuns.config, name) for name in PythonToolConfig.__dataclass_fields__}
  limits: PythonToolConfig = checked(PythonToolConfig, {**defaults, **tool})
  if in_images:
    return limits
  if "pytest" not in limits.packages:
    raise ValueError(f"packages of the tool must hold 'pytest'; received {limits.packages!r}.")
  with PythonTool(limits) as probe:  # reports a missing package now, and warns once where bubblewrap does not work
    return dataclasses.replace(limits, backend=probe.backend)
