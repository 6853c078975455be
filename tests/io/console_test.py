"""Progress: plain lines without a terminal, a bar with one."""

from __future__ import annotations

import io
import types

import pytest
import rich.table

from sao_jax.io import console


@pytest.fixture
def no_time_passes(monkeypatch):
  """However long a busy machine takes."""
  monkeypatch.setattr(console, "time", types.SimpleNamespace(monotonic=lambda: 1000.0))


def test_plain_lines_without_a_terminal(no_time_passes):
  out = io.StringIO()
  voice = console.Console(file=out, plain_every_s=3600.0)
  with voice.stage("warm start", 3) as stage:
    stage.advance(note="loss 1.5 [s]")
    stage.advance()
    stage.advance(note="loss 0.5 [s]")
  assert out.getvalue().splitlines() == ["warm start  1/3  0 s  loss 1.5 [s]", "warm start  3/3  0 s  loss 0.5 [s]"]


def test_every_line_when_the_interval_is_zero(no_time_passes):
  out = io.StringIO()
  with console.Console(file=out, plain_every_s=0.0).stage("s", 2) as stage:
    stage.advance()
    stage.advance(0, note="2 failed")
  assert out.getvalue().splitlines() == ["s  1/2  0 s", "s  1/2  0 s  2 failed"]  # the end has nothing new


def test_a_bar_with_a_terminal(monkeypatch):
  monkeypatch.setenv("FORCE_COLOR", "1")
  out = io.StringIO()
  voice = console.Console(file=out)
  assert voice.rich.is_terminal
  with voice.stage("sao", 10) as stage:
    stage.advance(4, note="reward 0.61")
  assert "4/10" in out.getvalue() and "reward 0.61" in out.getvalue()


def test_the_stage_ends_when_its_block_raises():
  out = io.StringIO()
  with pytest.raises(KeyError), console.Console(file=out).stage("s", 2):
    raise KeyError("x")
  assert "0/2" in out.getvalue()


def test_brackets_are_not_markup_and_tables_are_drawn():
  out = io.StringIO()
  voice = console.Console(file=out)
  voice.print("[bold]a[/bold]")
  table = rich.table.Table("stage", "s")
  table.add_row("sao", "12")
  voice.print(table)
  assert out.getvalue().startswith("[bold]a[/bold]\n") and "sao" in out.getvalue()


def test_a_first_step_is_told_of_before_and_after(no_time_passes):
  out = io.StringIO()
  voice = console.Console(file=out)
  with voice.compiling("the step"):
    assert out.getvalue() == "compiling the step ...\n"
  assert out.getvalue().splitlines()[1:] == ["compiled the step and ran it once in 0 s"]
  with voice.compiling("the step", first=False):
    pass
  with pytest.raises(KeyError), voice.compiling("another"):
    raise KeyError("x")
  assert out.getvalue().splitlines()[2:] == ["compiling another ..."]
