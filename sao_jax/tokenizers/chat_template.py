"""Chat templates of checkpoints (jinja2): messages as text, and the text between two actions."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from sao_jax.tokenizers import added_tokens, quoting
from sao_jax.tokenizers.template_renderer import RefusedError, TemplateRenderer
from sao_jax.utils import untrusted_files

Message: TypeAlias = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, with `tool_calls` and any other keys that the template reads."""

_ACTION = "f5b1c09d"
"""Placeholder for an action in the search for its surroundings. No template changes or contains it."""
_DEFAULT, _TOOL_USE = "default", "tool_use"
_PLAIN_ACTION: Mapping[str, Any] = {"role": "assistant", "content": _ACTION}
_USER: Mapping[str, Any] = {"role": "user", "content": "."}
_RESULT: Mapping[str, Any] = {"role": "tool", "name": "x", "tool_call_id": "call00000", "content": "."}
_TOOL: Mapping[str, Any] = {
  "type": "function",
  "function": {"name": "x", "description": "x", "parameters": {"type": "object", "properties": {}, "required": []}},
}


class ChatTemplate:
  """Renders messages in the format that the checkpoint was trained on.

  Messages of all roles but the assistant are untrusted text. Control tokens in them are marked (see `quoting`), and
  `HFTokenizer` encodes those as plain text. Sampled actions are never rendered, so they are never encoded again: a
  conversation continues with `between`, which returns only the new text.

  A template is an untrusted file. It is compiled and rendered in a process with limits of time, memory and output (see
  `template_renderer`). The constructor tries it on short conversations. `strftime_now` always gives 26 July 2024.

  Args:
    source: the template, or templates by name, as in transformers. "tool_use" is for renderings with tools. "default"
      is for all others, and for those with tools if there is no "tool_use". Other names are ignored.
    stop_tokens: tokens that end an action.
    control_tokens: tokens that contents must not forge, as in `HFTokenizer.control_tokens`.
    variables: further variables of the template: `bos_token`, `eos_token`, ...

  Raises:
    ValueError: jinja2 cannot read a template, a short conversation exceeds a limit, or no template has one of the two
      names.
  """

  def __init__(
    self,
    source: str | Mapping[str, str],
    *,
    stop_tokens: Sequence[str],
    control_tokens: Sequence[str],
    variables: Mapping[str, Any] | None = None,
  ):
    named = {_DEFAULT: source} if isinstance(source, str) else source
    self._named = {name: named[name] for name in (_DEFAULT, _TOOL_USE) if name in named}
    if not self._named:
      raise ValueError(f"named chat templates must include 'default' or 'tool_use'; received {sorted(named)!r:.200}.")
    self._stop_tokens = tuple(stop_tokens)
    self._control_tokens = tuple(control_tokens)
    self._variables = dict(variables or {})
    self._renderer = TemplateRenderer(self._named)
    self._try()
    self._turn_ends = self._find_turn_ends()

  @property
  def source(self) -> str:
    """The template for renderings with tools, which also teaches the form of tool calls."""
    return self._named[self._name(with_tools=True)]

  @classmethod
  def load(
    cls, directory: str | pathlib.Path, *, stop_tokens: Sequence[str], control_tokens: Sequence[str]
  ) -> ChatTemplate:
    """Reads the templates of a checkpoint directory from the same files as transformers.

    These are `chat_template.jinja` ("default") and `additional_chat_templates/NAME.jinja`. If none of them exists, it
    is the `chat_template` of `tokenizer_config.json`: one template, or a list of named ones.

    Raises:
      FileNotFoundError: the directory holds no template.
      ValueError: a file is invalid, or the class refuses its template.
    """
    directory = pathlib.Path(directory)
    path = directory / "tokenizer_config.json"
    settings = untrusted_files.read_object_if_there(path)
    found = _template_files(directory)
    where = directory if found else path
    source = found or settings.get("chat_template")
    if source is None:
      raise FileNotFoundError(f"{directory} holds no chat template: no chat_template.jinja, none in {path.name}.")
    variables = added_tokens.special_tokens(directory)
    try:
      return cls(_checked(source), stop_tokens=stop_tokens, control_tokens=control_tokens, variables=variables)
    except ValueError as error:
      raise ValueError(f"{where}: {error}") from error

  def render(
    self,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **options: Any,
  ) -> str:
    """Returns the conversation as text, up to the beginning of the next action.

    Args:
      messages: the conversation. A key with value None counts as missing, as in transformers.
      tools: functions that the model may call, as JSON schemas in the form of the OpenAI API.
      add_generation_prompt: False ends the text after the last message.
      **options: switches of the template, such as `enable_thinking`.

    Raises:
      ValueError: the template refuses the messages, or the rendering exceeds a limit.
    """
    values = {
      **self._variables,
      **options,
      "messages": [self._quoted(message) for message in messages],
      "tools": None if tools is None else list(tools),
      "documents": None,
      "add_generation_prompt": add_generation_prompt,
    }
    return self._renderer.render(self._name(with_tools=tools is not None), values)

  def between(
    self,
    messages: Sequence[Message],
    *,
    ended_with: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
  ) -> str:
    """Returns the text from the end of an action to the beginning of the next.

    Args:
      messages: messages of the environment between the actions: tool results (`{"role": "tool", "content": ...,
        "name": ..., "tool_call_id": ...}`) or user messages.
      ended_with: text of the first action. If it ends with any stop token, the template's token for the end of a turn
        is left out. A token that begins the next turn is left out only if the action ends with the same token.
      tools: as for `render`.
      **options: as for `render`.

    Raises:
      ValueError: the template refuses the messages, the rendering exceeds a limit, or the template changes an
        assistant's content.
    """
    options = {"tools": tools, **options}
    ended = next((token for token in self._stop_tokens if ended_with.endswith(token)), "")
    refusals = []
    for action in _actions(messages):
      try:
        return self._after(action, messages, ended=ended, options=options)
      except RefusedError as error:  # The template may accept another form of the action.
        refusals.append(error)
    raise refusals[-1]

  def _after(self, action: Message, messages: Sequence[Message], *, ended: str, options: Mapping[str, Any]) -> str:
    """Does the work of `between` for one form of the action. `ended` is the stop token at its end, or empty."""
    rest = self._rest(action, messages, options)
    is_call = "tool_calls" in action
    if not is_call and not ended:
      return rest
    # A token ends the turn if it is also there when nothing follows, or when something else follows.
    alone = self._rest_if_accepted(action, [], {**options, "add_generation_prompt": False})
    other = self._rest_if_accepted(action, [_RESULT if messages and messages[0]["role"] == "user" else _USER], options)
    for text in (alone, other):
      closing = _common_prefix(rest, text or "")
      found = [(closing.index(token), token) for token in self._turn_ends if token in closing]
      if found:
        place, token = min(found)
        return rest[place + len(token) :] if ended else rest[place:]
    # Only the token that begins the next turn ends this one.
    if is_call:
      if alone is None or not rest.startswith(alone):
        raise RefusedError("the chat template must end tool calls with a stop token, to separate turns.")
      rest = rest[len(alone) :]
    return rest.lstrip().removeprefix(ended) if ended and rest.lstrip().startswith(ended) else rest

  def _rest(self, action: Message, following: Sequence[Message], options: Mapping[str, Any]) -> str:
    """Returns the template's text after an action, or after the arguments of its last call."""
    text = self.render([_USER, action, *following], **options)
    before, found, rest = text.rpartition(_ACTION)
    if not found or ("tool_calls" not in action and _ACTION in before):
      raise RefusedError("the chat template must write an assistant's content exactly once, to separate turns.")
    return rest

  def _rest_if_accepted(self, action: Message, following: Sequence[Message], options: Mapping[str, Any]) -> str | None:
    try:
      return self._rest(action, following, options)
    except RefusedError:
      return None

  def _quoted(self, message: Message) -> dict[str, Any]:
    given = {key: value for key, value in message.items() if value is not None}
    if message["role"] == "assistant":
      return given
    said = {key: quoting.quote(value, self._control_tokens) for key, value in given.items()}
    return {**said, "role": message["role"]}

  def _name(self, *, with_tools: bool) -> str:
    name = _TOOL_USE if with_tools and _TOOL_USE in self._named else _DEFAULT
    if name not in self._named:
      raise ValueError("the chat template for conversations without tools, 'default', is missing; there is 'tool_use'.")
    return name

  def _try(self) -> None:
    """Renders short conversations to see that they stay within the limits. Refusals are no errors."""
    for tools in (None, [_TOOL]):
      if tools is None and _DEFAULT not in self._named:
        continue
      for action in (None, *_actions([_RESULT])):
        messages = [_USER] if action is None else [_USER, action, _RESULT]
        with contextlib.suppress(RefusedError):  # It may accept other messages.
          self.render(messages, tools=tools)

  def _find_turn_ends(self) -> tuple[str, ...]:
    """Returns the stop tokens, and the control token that ends the template's turns if it is not one of them."""
    options = {"tools": None if _DEFAULT in self._named else [_TOOL], "add_generation_prompt": False}
    rest = (self._rest_if_accepted(_PLAIN_ACTION, [], options) or "").lstrip()
    own = [] if any(token in rest for token in self._stop_tokens) else self._control_tokens
    return (*self._stop_tokens, *sorted((token for token in own if rest.startswith(token)), key=len)[-1:])


def _common_prefix(a: str, b: str) -> str:
  length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
  return a[:length]


def _actions(messages: Sequence[Message]) -> Iterator[Message]:
  """Yields forms in which a template may accept the action before `messages`.

  Before tool results, the action has tool calls, with arguments as an object or as JSON text: some templates look for
  the call of each result. Other templates do not write calls, and for them the action is text.
  """
  results = [message for message in messages if message["role"] == "tool"]
  arguments: tuple[Any, ...] = ({"x": _ACTION}, f'{{"x": "{_ACTION}"}}')
  for value in arguments if results else ():
    calls = [
      {
        "id": result.get("tool_call_id", _RESULT["tool_call_id"]),
        "type": "function",
        "function": {"name": result.get("name", _RESULT["name"]), "arguments": value},
      }
      for result in results
    ]
    yield {"role": "assistant", "content": "", "tool_calls": calls}
  yield _PLAIN_ACTION


def _template_files(directory: pathlib.Path) -> dict[str, str]:
  """Reads the templates in files of their own, by name. Texts of unused names are empty."""
  paths = {path.name.removesuffix(".jinja"): path for path in directory.glob("additional_chat_templates/*.jinja")}
  own = directory / "chat_template.jinja"
  if own.exists():
    paths.setdefault(_DEFAULT, own)
  used = (_DEFAULT, _TOOL_USE)
  return {name: untrusted_files.read_text(path) if name in used else "" for name, path in paths.items()}


def _checked(found: Any) -> str | dict[str, str]:
  """Checks the `chat_template` of `tokenizer_config.json`; returns a template, or templates by name."""
  if isinstance(found, list):
    if not all(isinstance(x, dict) and isinstance(x.get("name"), str) and "template" in x for x in found):
      raise ValueError(f"the list chat_template must hold objects with a name and a template; received {found!r:.200}.")
    found = {entry["name"]: entry["template"] for entry in found}
  for text in found.values() if isinstance(found, dict) else [found]:
    if not isinstance(text, str):
      raise ValueError(f"chat_template must be text; received {type(text).__name__}.")
  return found
