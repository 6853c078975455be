"""Unified diffs, applied to texts in memory. No program runs on files that a model wrote, and no path is followed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_GIT_FILE = re.compile(r"diff --git a/(?P<old>.+) b/(?P<new>.+)")


@dataclasses.dataclass(kw_only=True)
class _File:
  """Changes of one file."""

  old: str | None
  new: str | None
  hunks: list[tuple[int, list[str]]] = dataclasses.field(default_factory=list)
  """Line of the old file, counted from 0, and the lines of the hunk with their marks."""


def apply_patch(read: Callable[[str], str | None], patch: str) -> Mapping[str, str | None]:
  """Returns the new texts of the files that a patch changes; None for a file that it removes.

  Args:
    read: function `path -> text`; None if there is no such file.
    patch: output of `git diff` or `diff -u`. Hunks must fit exactly, at the lines that they name.

  Raises:
    ValueError: the patch is malformed, holds a binary file, or does not fit.
  """
  texts: dict[str, str | None] = {}
  for file in _parse(patch):
    text = "" if file.old is None else texts.get(file.old, read(file.old))
    if text is None:
      raise ValueError(f"the patch changes {file.old!r}, which does not exist.")
    if file.old is not None and file.old != file.new:
      texts[file.old] = None
    if file.new is not None:
      texts[file.new] = _changed(file, text)
  return texts


def _parse(patch: str) -> list[_File]:
  files: list[_File] = []
  lines = patch.split("\n")
  at = 0
  while at < len(lines):
    line = lines[at]
    at += 1
    if line.startswith(("GIT binary patch", "Binary files ")):
      raise ValueError("the patch changes a binary file; only text is supported.")
    if match := _GIT_FILE.fullmatch(line):
      files.append(_File(old=match["old"], new=match["new"]))
    elif line.startswith("new file mode") and files:
      files[-1].old = None
    elif line.startswith("deleted file mode") and files:
      files[-1].new = None
    elif line.startswith("--- ") and at < len(lines) and lines[at].startswith("+++ "):
      old, new = _path(line), _path(lines[at])
      at += 1
      if files and not files[-1].hunks and files[-1].old in (old, None) and files[-1].new in (new, None):
        files[-1].old, files[-1].new = old, new
      else:
        files.append(_File(old=old, new=new))
    elif match := _HUNK.match(line):
      if not files:
        raise ValueError(f"the patch has a hunk before the name of a file: {line!r}.")
      at = _read_hunk(files[-1], match, lines, at)
  return files


def _path(line: str) -> str | None:
  name = line[4:].split("\t")[0].rstrip("\r")
  return None if name == "/dev/null" else name.removeprefix("a/" if line.startswith("---") else "b/")


def _read_hunk(file: _File, match: re.Match[str], lines: list[str], at: int) -> int:
  start, num_old, num_new = (int(match[1]), *(1 if match[i] is None else int(match[i]) for i in (2, 3)))
  body: list[str] = []
  while num_old > 0 or num_new > 0 or (at < len(lines) and lines[at].startswith("\\")):
    if at >= len(lines):
      raise ValueError(f"the patch ends within a hunk of {file.new or file.old!r}.")
    line = lines[at] or " "  # Editors and mails drop the space of an empty line.
    at += 1
    if line[0] not in " +-\\":
      raise ValueError(f"the patch has a line without a mark in a hunk of {file.new or file.old!r}: {line[:80]!r}.")
    num_old -= line[0] in " -"
    num_new -= line[0] in " +"
    body.append(line)
  file.hunks.append((start - 1 if match[2] != "0" else start, body))
  return at


def _changed(file: _File, text: str) -> str:
  old = text.split("\n")  # The last line has no line break: it is empty if the text ends with one.
  new: list[str] = []
  done = 0
  for start, body in file.hunks:
    if start < done or start > len(old):
      raise ValueError(f"the patch of {file.new!r} does not fit: it has no line {start + 1}.")
    new += old[done:start]
    done = start
    without_break = ""
    for number, line in enumerate(body):
      if line[0] in " -":
        if done >= len(old) or old[done] != line[1:]:
          found = old[done] if done < len(old) else "the end"
          raise ValueError(f"the patch of {file.new!r} does not fit at line {done + 1}: {line[1:]!r} is {found!r}.")
        done += 1
      if line[0] in " +":
        new.append(line[1:])
      if line[0] == "\\":
        without_break += body[number - 1][0]
    if "-" in without_break and "+" not in without_break:
      new.append("")  # The new text ends with a line break, and the old one did not.
    elif "+" in without_break and "-" not in without_break and done < len(old):
      done += 1  # The other way round.
  return "\n".join(new + old[done:])
