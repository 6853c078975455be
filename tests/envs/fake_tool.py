"""A tool for tests that runs code in this process."""

from __future__ import annotations

import ast
import contextlib
import io
from collections.abc import Iterator
from typing import Any


class FakeSession:
  """Runs trusted code and returns its output, the repr of a trailing expression, or the last line of an error."""

  def __init__(self) -> None:
    self.namespace: dict[str, Any] = {}
    self.open = True

  def run(self, code: str) -> str:
    assert self.open
    printed = io.StringIO()
    try:
      tree = ast.parse(code)
      last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
      with contextlib.redirect_stdout(printed):
        exec(compile(tree, "code", "exec", dont_inherit=True), self.namespace)
        if last is not None:
          value = eval(compile(ast.Expression(last.value), "code", "eval", dont_inherit=True), self.namespace)  # noqa: S307
          if value is not None:
            print(repr(value))
    except Exception as error:  # noqa: BLE001
      return f"Traceback (most recent call last):\n  ...\n{type(error).__name__}: {error}"
    return printed.getvalue()


class FakeTool:
  """A tool that counts its sessions and calls."""

  def __init__(self) -> None:
    self.sessions: list[FakeSession] = []

  @contextlib.contextmanager
  def session(self) -> Iterator[FakeSession]:
    session = FakeSession()
    self.sessions.append(session)
    try:
      yield session
    finally:
      session.open = False
