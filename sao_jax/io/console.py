"""Progress on the terminal: a bar per stage with a live note, or plain lines if the output is not a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TextIO

import rich.console
import rich.progress


class Stage:
  """Progress of one stage; created by `Console.stage`."""

  def __init__(self, title: str, total: int, console: rich.console.Console, *, plain_every_s: float) -> None:
    self._title = title
    self._total = total
    self._done = 0
    self._note = ""
    self._console = console
    self._plain_every_s = plain_every_s
    self._started = time.monotonic()
    self._printed = float("-inf")
    self._shown: tuple[int, str] | None = None
    self._bar: rich.progress.Progress | None = None
    if console.is_terminal:
      self._bar = rich.progress.Progress(
        rich.progress.TextColumn("[bold]{task.description}"),
        rich.progress.BarColumn(bar_width=24),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[note]}", markup=False),
        console=console,
      )
      self._task = self._bar.add_task(title, total=total, note="")
      self._bar.start()

  def advance(self, amount: int = 1, *, note: str | None = None) -> None:
    """Moves the bar by `amount` and shows `note` (e.g. "reward 0.61  staleness 1.2") until the next note."""
    self._done += amount
    if note is not None:
      self._note = note
    if self._bar is not None:
      self._bar.update(self._task, completed=self._done, note=self._note)
    elif time.monotonic() - self._printed >= self._plain_every_s:
      self._print_plain()

  def finish(self) -> None:
    """Stops the bar and leaves its last state on the screen."""
    if self._bar is not None:
      self._bar.stop()
    elif self._shown != (self._done, self._note):
      self._print_plain()

  def _print_plain(self) -> None:
    self._printed = time.monotonic()
    self._shown = self._done, self._note
    line = f"{self._title}  {self._done}/{self._total}  {self._printed - self._started:.0f} s  {self._note}"
    self._console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)


class Console:
  """Terminal output of a run. Text printed inside a stage appears above its bar."""

  def __init__(self, *, file: TextIO | None = None, plain_every_s: float = 5.0, quiet: bool = False) -> None:
    """Creates a console.

    Args:
      file: the output, standard output by default.
      plain_every_s: seconds between plain lines of one stage.
      quiet: print nothing.
    """
    self.rich = rich.console.Console(file=file, quiet=quiet)
    self._plain_every_s = plain_every_s

  @contextlib.contextmanager
  def stage(self, title: str, total: int) -> Iterator[Stage]:
    """Shows a stage of `total` units of work while the block runs."""
    stage = Stage(title, total, self.rich, plain_every_s=self._plain_every_s)
    try:
      yield stage
    finally:
      stage.finish()

  @contextlib.contextmanager
  def compiling(self, what: str, *, first: bool = True) -> Iterator[None]:
    """Announces that the block compiles a program, and reports its time; does nothing unless `first`."""
    if first:
      self.print(f"compiling {what} ...")
    began = time.monotonic()
    yield
    if first:
      self.print(f"compiled {what} and ran it once in {time.monotonic() - began:.0f} s")

  def print(self, *objects: object) -> None:
    """Prints text verbatim (brackets are not markup) or rich renderables such as tables."""
    self.rich.print(*objects, markup=False, highlight=False, soft_wrap=True)
