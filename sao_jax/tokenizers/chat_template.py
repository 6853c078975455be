"""A checkpoint's own chat template (jinja2): messages to text, and what stands between two actions."""

from __future__ import annotations

import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from sao_jax import foreign
from sao_jax.extras import needed
from sao_jax.tokenizers import added_tokens, quoting

Message: TypeAlias = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, with `tool_calls` and what else the template reads."""

_ACTION = "f5b1c09d"
"""Stands for an action whose surroundings are looked for; no template changes or contains it."""


class ChatTemplate:
  """Renders messages the way the checkpoint was trained to read them.

  What others than the assistant say is foreign text: control tokens that it spells out are marked (see `quoting`), and
  `HFTokenizer` encodes them as plain text. Sampled actions never pass through here, so they are never re-encoded: a
  conversation goes on with `between`, which gives only the new text.

  Args:
    source: the template.
    stop_tokens: tokens that end an action.
    control_tokens: what contents must not forge; `HFTokenizer.control_tokens`.
    variables: what else the template may read: `bos_token`, `eos_token`, ...

  Raises:
    ValueError: jinja2 cannot read the template.
  """

  def __init__(
    self,
    source: str,
    *,
    stop_tokens: Sequence[str],
    control_tokens: Sequence[str],
    variables: Mapping[str, Any] | None = None,
  ):
    with needed("hf"):
      import jinja2

    self.source = source
    self._stop_tokens = tuple(stop_tokens)
    self._control_tokens = tuple(control_tokens)
    self._variables = dict(variables or {})
    try:
      self._template = _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
      raise ValueError(f"the chat template is not valid jinja2, line {error.lineno}: {error.message}") from error
    except RecursionError as error:
      raise ValueError("the chat template is too deeply nested.") from error

  @classmethod
  def load(
    cls, directory: str | pathlib.Path, *, stop_tokens: Sequence[str], control_tokens: Sequence[str]
  ) -> ChatTemplate:
    """Reads `chat_template.jinja`, or the `chat_template` of `tokenizer_config.json`, of a checkpoint directory.

    Of several named templates the one called `tool_use` is taken where there is one, else `default`.

    Raises:
      FileNotFoundError: the directory holds neither.
    """
    directory = pathlib.Path(directory)
    path = directory / "tokenizer_config.json"
    settings = foreign.read_object_if_there(path)
    own_file = directory / "chat_template.jinja"
    found = foreign.read_text(own_file) if own_file.exists() else settings.get("chat_template")
    if isinstance(found, list):
      named = {
        entry.get("name"): entry.get("template")
        for entry in found
        if isinstance(entry, dict) and isinstance(entry.get("name"), str)
      }
      found = named.get("tool_use", named.get("default"))
    if found is None:
      raise FileNotFoundError(f"{directory} holds no chat template: no chat_template.jinja, none in {path.name}.")
    where = own_file if own_file.exists() else path
    if not isinstance(found, str):
      raise ValueError(f"{where}: chat_template must be text; received {type(found).__name__}.")
    variables = added_tokens.special_tokens(directory)
    try:
      return cls(found, stop_tokens=stop_tokens, control_tokens=control_tokens, variables=variables)
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
    """The conversation as text, ending where the next action begins.

    Args:
      messages: the conversation.
      tools: functions on offer, as JSON schemas in the form of the OpenAI API.
      add_generation_prompt: False ends after the last message.
      **options: switches of the template, such as `enable_thinking`.

    Raises:
      ValueError: the template refuses the messages.
    """
    import jinja2

    quoted = [self._quoted(message) for message in messages]
    try:
      return self._template.render(
        messages=quoted,
        tools=None if tools is None else [dict(tool) for tool in tools],
        add_generation_prompt=add_generation_prompt,
        **self._variables,
        **options,
      )
    except jinja2.TemplateError as error:
      raise ValueError(f"the chat template refuses the messages: {error}") from error
    except Exception as error:  # its code is a program: it divides by zero, recurses without end, ...
      raise ValueError(f"the chat template fails: {error!r:.500}") from error

  def _quoted(self, message: Message) -> dict[str, Any]:
    if message["role"] == "assistant":
      return dict(message)
    said = {key: quoting.quote(value, self._control_tokens) for key, value in message.items()}
    return {**said, "role": message["role"]}

  def between(self, messages: Sequence[Message], *, ended_with: str, **options: Any) -> str:
    """The text from the end of an action to the beginning of the next, with `messages` in between.

    Args:
      messages: what the environment says: tool results (`{"role": "tool", "content": ...}`) or the user's words.
      ended_with: text of the action: where it ends with the very stop token that the template writes at this place,
        that token is not written again.
      **options: as for `render`.

    Raises:
      ValueError: the template refuses the messages, or does not write an assistant's content as it is.
    """
    action = {"role": "assistant", "content": _ACTION}
    text = self.render([{"role": "user", "content": "."}, action, *messages], **options)
    before, found, rest = text.rpartition(_ACTION)
    if not found or _ACTION in before:
      raise ValueError("the chat template must write an assistant's content exactly once, or turns cannot be told.")
    for token in self._stop_tokens:
      if rest.startswith(token) and ended_with.endswith(token):
        return rest[len(token) :]
    return rest


def _environment() -> Any:
  """What templates of checkpoints are written for: sandboxed, with the functions and filters that they call."""
  import jinja2.ext
  import jinja2.sandbox

  def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)

  def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

  def now(form: str) -> str:
    return datetime.datetime.now().strftime(form)

  class Generation(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}` around an assistant's words: here they are just its words."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares a plain set)

    def parse(self, parser: Any) -> Any:
      next(parser.stream)
      return parser.parse_statements(("name:endgeneration",), drop_needle=True)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
  )
  environment.filters["tojson"] = to_json
  environment.globals.update(raise_exception=refuse, strftime_now=now)
  return environment
