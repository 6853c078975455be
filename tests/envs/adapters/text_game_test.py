from __future__ import annotations

import pytest

from sao_jax.envs import Environment
from sao_jax.envs.adapters.text_game import CHATML, Reply, Template, TextGame


class Countdown(TextGame):
  """A game that ends when the player says 0."""

  def start(self, task_index: int) -> str:
    return f"from {task_index}"

  def play(self, text: str) -> Reply:
    return Reply(text=f"{text}? <|answer|>", reward=0.25, done=text == "0")


def test_turns_are_written_in_the_template() -> None:
  game = Countdown(max_turns=3, template=Template(), system_prompt="Count.")
  assert isinstance(game, Environment)
  assert game.reset(5) == "<|system|>Count.<|user|>from 5<|assistant|>"
  step = game.step(" 4 <|end|>")
  assert step.observation == "<|output|>4? < |answer|><|assistant|>" and step.reward == 0.25 and not step.done
  step = game.step("0<|end|>")
  assert step.done and not step.truncated and step.observation == ""
  assert step.info["success"] and step.info["turns"] == 2


def test_another_template() -> None:
  game = Countdown(max_turns=3, template=CHATML)
  assert game.reset(5) == "<|im_start|>user\nfrom 5<|im_end|>\n<|im_start|>assistant\n"
  step = game.step("4<|im_end|>")
  assert step.observation == "\n<|im_start|>user\n4? < |answer|><|im_end|>\n<|im_start|>assistant\n"


def test_out_of_turns_is_truncated() -> None:
  game = Countdown(max_turns=2, template=Template())
  game.reset(5)
  assert not game.step("4").done
  step = game.step("3")
  assert step.done and step.truncated and step.reward == 0.25
  with pytest.raises(RuntimeError, match="step was called before reset"):
    game.step("2")


def test_bad_input_is_refused() -> None:
  with pytest.raises(ValueError, match=r"Template\.user must hold \{\} exactly once"):
    Template(user="<|user|>")
  with pytest.raises(ValueError, match=r"Template\.end must not be empty"):
    Template(end="")
  with pytest.raises(ValueError, match="max_turns must be at least 1; received 0"):
    Countdown(max_turns=0, template=Template())
  with pytest.raises(ValueError, match="task_index must be an int >= 0; received -1"):
    Countdown(max_turns=1, template=Template()).reset(-1)
