"""Tasks for published checkpoints in their own chat template, for `--config.env.factory`.

    --config.env.factory=experiments.tasks.chat:reasoning_gym
    --config.env.options="{'checkpoint': 'path/of/checkpoint', 'task': 'chain_sum', 'tool': True}"

    --config.env.factory=experiments.tasks.chat:math
    --config.env.options="{'checkpoint': 'path/of/checkpoint', 'train': 'train.jsonl', 'held_out': 'test.jsonl', \
      'packages': ('numpy', 'sympy')}"

    --config.env.factory=experiments.tasks.chat:coding
    --config.env.options="{'checkpoint': 'path/of/checkpoint', 'max_turns': 30}"

`checkpoint` is a Hugging Face directory (`tokenizer.json`, chat template) or a GGUF file. `demonstrations` names a
JSONL file of conversations for the warm start (`experiments.tasks.chat_demonstrations`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from experiments.tasks import chat_demonstrations, problem_file, standard
from experiments.tasks import rewards as rewards_lib
from experiments.tasks.options import checked
from sao_jax.envs.adapters.chat_game import ChatGame
from sao_jax.envs.adapters.reasoning_gym import ReasoningGym, ReasoningGymConfig
from sao_jax.envs.chat import ChatEnv, Question, Score, python_tool
from sao_jax.envs.grading.math_grading import MathGrader
from sao_jax.envs.sandbox import PythonTool, PythonToolConfig
from sao_jax.tokenizers import Chat
from sao_jax.types import Domain, Split

Answer = Literal["text", "tags", "number"]
MATH_INSTRUCTION = "Put the final answer within \\boxed{}."

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def reasoning_gym(
  *,
  checkpoint: str,
  answer: Answer = "tags",
  system: str | None = None,
  tool: bool = False,
  packages: Sequence[str] = (),
  max_turns: int = 1,
  num_eval_tasks: int = 1_000,
  demonstrations: str | None = None,
  template: Mapping[str, Any] | None = None,
  rewards: rewards_lib.Rewards | None = None,
  tools: str | Sequence[str] | None = None,
  **options: Any,
) -> Domain:
  """Makes a reasoning-gym task; `size` is the number of training tasks.

  Args:
    checkpoint: the checkpoint whose tokenizer and template are used.
    answer: the part of the last action that is graded: its whole `text`, the text between `<answer>` `tags`, or its
      last `number`.
    system: text of the system turn; None for no such turn.
    tool: whether to offer Python; the template must support tool calls.
    packages: installed packages that the tool may import, such as numpy and sympy; the prompt names them.
    max_turns: maximum number of actions per episode; 1 leaves no room for a tool call.
    num_eval_tasks: number of held-out tasks, whose seeds follow those of the training tasks.
    demonstrations: JSONL file of conversations for the warm start; None or "" for none.
    template: arguments of the chat template, such as `{"enable_thinking": False}`.
    rewards: reward functions of your own, see `experiments.tasks.rewards`. A row has `question` and `task_index`.
    tools: functions of your own as tools, `module:function`, several separated by commas or in a list;
      see `envs.function_tools.FunctionTool`.
    **options: fields of `ReasoningGymConfig`; `task` is required.

  Raises:
    ValueError: a task, setting or other option does not exist.
    ImportError: a package is not installed.
  """
  if "task" not in options:
    raise ValueError("options of reasoning_gym must hold 'task', the name of a task set; received none.")
  if answer not in get_args(Answer):
    raise ValueError(f"answer must be one of {', '.join(get_args(Answer))}; received {answer!r}.")
  train = checked(ReasoningGymConfig, options)
  # A problem's seed is the seed of its set plus its number.
  held_out = dataclasses.replace(train, seed=train.seed + train.size, size=num_eval_tasks)
  ReasoningGym(held_out)  # reports a bad setting now instead of in every episode
  reward = rewards_lib.RewardSum(rewards)

  def questions(split: Split) -> Callable[[int], Question]:
    game = ReasoningGym(train if split == "train" else held_out)

    def question(task_index: int) -> Question:
      text = game.start(task_index)
      row = {"question": text, "task_index": task_index}

      def score(said: str) -> Score:
        return reward(said, row, lambda: _score(game, said, answer))

      return Question(messages=_messages(system, text), score=score)

    return question

  return _domain(
    checkpoint, questions, train.size, num_eval_tasks, tool=tool, packages=packages, max_turns=max_turns,
    demonstrations=demonstrations, template=template, success_threshold=train.success_threshold, tools=tools,
  )  # fmt: skip


def math(
  *,
  checkpoint: str,
  train: str,
  held_out: str | None = None,
  question_field: str = "problem",
  answer_field: str = "answer",
  instruction: str = MATH_INSTRUCTION,
  system: str | None = None,
  tool: bool = True,
  packages: Sequence[str] = (),
  max_turns: int = 50,
  on_unreadable: problem_file.OnUnreadable = "error",
  demonstrations: str | None = None,
  template: Mapping[str, Any] | None = None,
  rewards: rewards_lib.Rewards | None = None,
  success_threshold: float = 1.0,
  tools: str | Sequence[str] | None = None,
) -> Domain:
  """Makes mathematics tasks with or without Python. `MathGrader` gives reward 1 for the right answer and 0 otherwise.

  With `rewards` they are tasks of any kind: the file needs no answers unless `correct`, the grader, is among them.

  Args:
    checkpoint: the checkpoint whose tokenizer and template are used.
    train: JSONL or CSV file of training problems in UTF-8. A problem that occurs twice counts twice, with a warning.
    held_out: such a file of held-out problems. None holds out every tenth problem of `train`.
    question_field: name of the field with the problem.
    answer_field: name of the field with the answer, text or a number.
    instruction: text below the problem; empty for none.
    system: text of the system turn; None for no such turn.
    tool: whether to offer Python.
    packages: installed packages that the tool may import, such as numpy and sympy; the prompt names them.
    max_turns: maximum number of actions per episode.
    on_unreadable: "error" to reject a file with an answer that the grader cannot read, "drop" to leave out its problem.
    demonstrations: JSONL file of conversations for the warm start; None or "" for none.
    template: arguments of the chat template.
    rewards: reward functions of your own, see `experiments.tasks.rewards`; they receive the line of the file.
    success_threshold: reward from which an episode counts as a success.
    tools: functions of your own as tools, `module:function`, several separated by commas or in a list;
      see `envs.function_tools.FunctionTool`.

  Raises:
    ValueError: a file has no problems, a line lacks the fields or has an empty or non-finite answer, or an answer
      cannot be read.
    ImportError: a package is not installed.
  """
  reward = rewards_lib.RewardSum(rewards)
  grader = MathGrader()

  def read(path: str) -> list[dict[str, Any]]:
    if reward.needs_grade:
      return _gradable_rows(path, question_field, answer_field, grader, on_unreadable)
    return problem_file.read_rows(path, question_field)

  try:
    files = {path: read(path) for path in dict.fromkeys((train, held_out or train))}
    problems = problem_file.split(train, files[train]) if held_out is None else (files[train], files[held_out])
    # A missing package is reported now: files of plain numbers do not need the parser, but answers do.
    if reward.needs_grade and not grader.is_equal("1/2", "\\boxed{0.5}"):
      raise RuntimeError("the grader does not find 0.5 equal to 1/2.")
  except Exception:
    grader.close()
    raise
  of = {"train": problems[0], "eval": problems[1]}

  def questions(split: Split) -> Callable[[int], Question]:
    def question(task_index: int) -> Question:
      row = of[split][task_index % len(of[split])]
      messages = _messages(system, "\n".join(filter(None, (row[question_field], instruction))))

      def score(said: str) -> Score:
        return reward(said, row, lambda: float(grader.is_equal(row[answer_field], said)))

      return Question(messages=messages, score=score)

    return question

  return _domain(
    checkpoint, questions, *map(len, problems), tool=tool, packages=packages, max_turns=max_turns,
    demonstrations=demonstrations, template=template, close=grader.close, files=tuple(files),
    success_threshold=success_threshold, tools=tools,
  )  # fmt: skip


def coding(
  *,
  checkpoint: str,
  system: str | None = None,
  demonstrations: str | None = None,
  template: Mapping[str, Any] | None = None,
  **options: Any,
) -> Domain:
  """Makes HumanEval problems with injected bugs, to be fixed by commands; see `standard.coding`.

  Args:
    checkpoint: the checkpoint whose tokenizer and template are used.
    system: text of the system turn; None for no such turn.
    demonstrations: JSONL file of conversations for the warm start; None or "" for none.
    template: arguments of the chat template.
    **options: options of `standard.coding`.
  """
  chat = Chat.load(checkpoint, **(template or {}))
  commands = standard.coding(**options)
  return dataclasses.replace(
    commands,
    make_env=lambda split: ChatGame(chat, commands.make_env(split), system=system),
    tokenizer=chat.tokenizer,
    demonstrate=chat_demonstrations.load(chat, demonstrations) if demonstrations else None,
  )


def _gradable_rows(
  path: str, question_field: str, answer_field: str, grader: MathGrader, on_unreadable: problem_file.OnUnreadable
) -> list[dict[str, Any]]:
  """Returns the lines whose answer the grader can read, with the answer as text."""
  problems = problem_file.read(path, question_field, answer_field)
  good = set(problem_file.gradable(path, problems, grader, on_unreadable))
  rows = zip(problem_file.read_rows(path, question_field), problems, strict=True)
  return [{**row, answer_field: answer} for row, (text, answer) in rows if (text, answer) in good]


def _domain(
  checkpoint: str,
  questions: Callable[[Split], Callable[[int], Question]],
  num_train_tasks: int,
  num_eval_tasks: int,
  *,
  tool: bool,
  packages: Sequence[str],
  max_turns: int,
  demonstrations: str | None,
  template: Mapping[str, Any] | None,
  success_threshold: float = 1.0,
  close: Callable[[], None] = lambda: None,
  files: tuple[str, ...] = (),
  tools: str | Sequence[str] | None = None,
) -> Domain:
  if packages and not tool:
    raise ValueError(f"packages need the Python tool: tool must be True; received {tool!r} and {packages!r}.")
  functions = rewards_lib.function_tools(tools)
  if (tool or functions) and max_turns < 2:
    raise ValueError(f"max_turns must be at least 2 with tools, for a call and an answer; received {max_turns!r}.")
  chat = Chat.load(checkpoint, **(template or {}))
  shown = (*((python_tool(packages),) if tool else ()), *(function.description for function in functions))
  demonstrate = chat_demonstrations.load(chat, demonstrations, shown) if demonstrations else None
  # The config rejects anything but a sequence of names.
  python = PythonTool(PythonToolConfig(packages=packages)) if tool else None  # type: ignore[arg-type]

  def close_all() -> None:
    if python is not None:
      python.close()
    close()

  return Domain(
    make_env=lambda split: ChatEnv(
      chat,
      questions(split),
      python,
      max_turns=max_turns,
      success_threshold=success_threshold,
      packages=packages,
      functions=functions,
    ),
    tokenizer=chat.tokenizer,
    num_train_tasks=num_train_tasks,
    num_eval_tasks=num_eval_tasks,
    demonstrate=demonstrate,
    close=close_all,
    files=files,
    format_prompt=lambda text: chat.prompt([{"role": "user", "content": text}]),
  )


def _messages(system: str | None, text: str) -> list[dict[str, str]]:
  first = [] if system is None else [{"role": "system", "content": system}]
  return [*first, {"role": "user", "content": text}]


def _score(game: ReasoningGym, said: str, answer: Answer) -> float:
  if answer == "tags":
    start = said.rfind("<answer>", 0, max(0, said.rfind("</answer>")))
    said = "" if start < 0 else said[start + len("<answer>") : said.find("</answer>", start)]
  elif answer == "number":
    said = (_NUMBER.findall(said) or [""])[-1]
  return game.play(f"<answer>{said.strip()}</answer>").reward
