"""The library's docstrings as reStructuredText.

They are plain text for readers of the source: `code` in single backticks, equations in Unicode, Google's sections,
tables by indentation. This escapes what only reStructuredText would read as markup (`lambda_`, `*`, `|`), turns
indented blocks into literal ones, and leaves backticks around names as references.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
_FIELD = re.compile(r"(?P<name>\*{0,2}[A-Za-z_][\w.]*(?:, \*{0,2}[A-Za-z_][\w.]*)*): (?P<text>.*)", re.DOTALL)
_RAISED = re.compile(r"(?<=[.;])\s(?=(?:\w+(?:Error|Interrupted|Failure)(?:, )?)+: )")
_SPAN = re.compile(r"(`{1,2})(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_NAME = re.compile(r"~?[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?")
_BULLET = re.compile(r"[-*] +|\d+\. +")
_COLUMNS = re.compile(r"\S.*\S {2,}\S")


def to_rst(text: str) -> str:
  """Converts a plain docstring to reStructuredText for napoleon.

  >>> to_rst("The sum of `x` and lambda_.")
  'The sum of `x` and lambda\\\\_.'
  """
  return "\n".join(_lines(text.splitlines())).rstrip("\n")


def _lines(lines: list[str]) -> Iterator[str]:
  """Converts blocks one after the other; each is followed by an empty line."""
  rest = [line.rstrip() for line in lines]
  while rest:
    if not rest[0]:
      rest = rest[1:]
      continue
    if _SECTION.fullmatch(rest[0]):
      count = 1 + _count(rest[1:], lambda line: not line or line.startswith(" "))
      yield rest[0]
      yield from _section(rest[0], rest[1:count])
    elif rest[0].startswith(">>>"):
      count = _count(rest, bool)
      yield from rest[:count]
    elif rest[0].startswith(" "):
      count = _count(rest, lambda line: not line or line.startswith(" "))
      yield from _literal(rest[:count])
    elif _BULLET.match(rest[0]):
      count = 1 + _count(rest[1:], lambda line: line.startswith(" ") or bool(_BULLET.match(line)))
      yield from (item for block in _items(rest[:count]) for item in _bullet(block))
    else:
      count = 1 + _count(rest[1:], _continues)
      block = rest[:count]
      aligned = len(block) > 1 and all(_COLUMNS.match(line) for line in block)
      yield from _literal(block) if aligned else _inline("\n".join(block)).split("\n")
    yield ""
    rest = rest[count:]


def _continues(line: str) -> bool:
  """Whether a line goes on with the paragraph before it."""
  return bool(line) and not line.startswith((" ", ">>>")) and not _BULLET.match(line) and not _SECTION.fullmatch(line)


def _count(lines: list[str], holds: Any) -> int:
  return next((i for i, line in enumerate(lines) if not holds(line)), len(lines))


def _literal(lines: list[str]) -> list[str]:
  return ["::", "", *textwrap.indent(textwrap.dedent("\n".join(lines)).strip("\n"), "  ").split("\n")]


def _items(lines: list[str]) -> list[list[str]]:
  """Groups lines into items: one that is not indented, and the indented ones after it."""
  items: list[list[str]] = []
  for line in lines:
    if line and line[0] != " ":
      items.append([line])
    elif items:
      items[-1].append(line)
  return items


def _bullet(lines: list[str]) -> list[str]:
  found = _BULLET.match(lines[0])
  mark = found[0] if found else ""
  text = _inline("\n".join([lines[0][len(mark) :], *(line.strip() for line in lines[1:])]))
  return (mark + textwrap.indent(text, " " * len(mark)).lstrip()).split("\n")


def _section(title: str, lines: list[str]) -> Iterator[str]:
  """The body of a section. Napoleon reads the names before colons, so only what follows them is converted."""
  body = textwrap.dedent("\n".join(lines)).strip("\n").split("\n")
  if title in ("Returns:", "Yields:"):
    yield from (f"  {line}" if line else "" for line in _lines(body))
    return
  for item in _fields(body, split=title == "Raises:"):
    field = _FIELD.fullmatch(item)
    first, *more = _lines((field["text"] if field else item).split("\n"))
    yield f"  {field['name']}: {first}" if field else f"  {first}"
    yield from (f"    {line}" if line else "" for line in more[:-1])


def _fields(lines: list[str], *, split: bool) -> Iterator[str]:
  """The items of a section. A line that names nothing continues the one before; `split`: a sentence may begin one."""
  items: list[list[str]] = []
  for item in _items(lines):
    if items and not _FIELD.match(item[0]):
      items[-1] += item
    else:
      items.append(item)
  for item in items:
    text = "\n".join([item[0], *textwrap.dedent("\n".join(item[1:])).split("\n")]).rstrip()
    yield from _RAISED.split(text) if split else [text]


def _inline(text: str) -> str:
  """Escapes markup outside backticks; inside, names stay references and all else is literal."""
  pieces, end = [], 0
  for span in _SPAN.finditer(text):
    pieces.append(_escape(text[end : span.start()]))
    code = " ".join(span[2].split())
    before, after = text[span.start() - 1 : span.start()], text[span.end() : span.end() + 1]
    opening = "\\ " if before and (before.isalnum() or before in "_+=×·") else ""
    closing = "\\ " if after and (after.isalnum() or after in "_+=×·(") else ""
    mark = "`" if span[1] == "`" and _NAME.fullmatch(code) else "``"
    if mark == "``" and (code.startswith("`") or code.endswith("\\")):
      code = f" {code} "
    pieces.append(f"{opening}{mark}{code}{mark}{closing}")
    end = span.end()
  return "".join([*pieces, _escape(text[end:])])


def _escape(text: str) -> str:
  text = re.sub(r"([\\*|`])", r"\\\1", text)
  return re.sub(r"_(?!\w)", r"\\_", text)
