"""Judges, which decide whether an answer is good and which style it has."""

from __future__ import annotations

import dataclasses
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol

from experiments.online.questions import STYLES


@dataclasses.dataclass(frozen=True)
class Verdict:
  """A judge's decision about an answer."""

  quality: bool
  style: str | None
  """One of `STYLES`, or None for no style or a mixture."""

  def reward(self, preferred: str) -> float:
    """Returns r = r_quality r_style, both in {0, 1}, as in the paper's online learning."""
    return float(self.quality and self.style == preferred)


class Judge(Protocol):
  """Judges an answer to a question; must be thread-safe."""

  def __call__(self, question: str, answer: str) -> Verdict: ...


JUDGE_PROMPT = """You judge answers. Question: {question}
Answer: {answer}

quality is 1 if the answer answers the question correctly, in one or two sentences without repetition, else 0.
style is "academic" (formal, scholarly), "cute", "chuunibyou" (grandiose dark-fantasy), "classical" (archaic, literary)
or "none" (plain, or a mixture).
Reply with one JSON object and nothing else: {{"quality": 0 or 1, "style": "..."}}"""


class JudgeError(RuntimeError):
  """The judge could not be reached, or its reply was not a verdict."""


class ChatJudge:
  """A judge behind an OpenAI-compatible chat endpoint: any model that follows `JUDGE_PROMPT`.

  Args:
    url: base URL of the server, such as `http://localhost:8000/v1`.
    model: name of the model at the server.
    api_key: sent as a bearer token; None to send no key.
    timeout_s: timeout of one request in seconds.
    max_attempts: number of requests before a `JudgeError`; the wait between them doubles, starting at `first_wait_s`.
    first_wait_s: first wait in seconds.
  """

  def __init__(
    self,
    url: str,
    model: str,
    *,
    api_key: str | None = None,
    timeout_s: float = 60.0,
    max_attempts: int = 5,
    first_wait_s: float = 0.5,
  ):
    if not url.startswith(("http://", "https://")):
      raise ValueError(f"url must begin with http:// or https://; received {url!r}.")
    if max_attempts < 1:
      raise ValueError(f"max_attempts must be >= 1; received {max_attempts}.")
    self._url = url.rstrip("/") + "/chat/completions"
    self._model = model
    self._headers = {"Content-Type": "application/json"}
    if api_key is not None:
      self._headers["Authorization"] = f"Bearer {api_key}"
    self._timeout_s = timeout_s
    self._max_attempts = max_attempts
    self._first_wait_s = first_wait_s

  def __call__(self, question: str, answer: str) -> Verdict:
    """Asks the model for a verdict.

    Raises:
      JudgeError: no attempt gave a verdict.
    """
    # An answer without braces cannot smuggle in a verdict that the judge would return by quoting the answer.
    content = JUDGE_PROMPT.format(question=question, answer=answer.translate({ord("{"): "(", ord("}"): ")"}))
    body = {"model": self._model, "temperature": 0.0, "messages": [{"role": "user", "content": content}]}
    failure = ""
    for attempt in range(self._max_attempts):
      if attempt:
        time.sleep(self._first_wait_s * 2.0 ** (attempt - 1))
      try:
        return read_verdict(self._ask(body))
      except urllib.error.HTTPError as error:
        failure = f"HTTP {error.code}"
        if error.code < 500 and error.code not in (408, 429):
          break  # the server would reject it again
      except (OSError, ValueError) as error:
        failure = str(error)
      except (http.client.HTTPException, RecursionError) as error:  # a truncated or garbled reply; JSON nested too deep
        failure = repr(error)
    raise JudgeError(f"{self._url}: no verdict in {attempt + 1} attempts; the last time: {failure}")

  def _ask(self, body: Mapping[str, Any]) -> str:
    request = urllib.request.Request(self._url, json.dumps(body).encode(), self._headers)
    with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
      found = json.loads(response.read())
    try:
      return str(found["choices"][0]["message"]["content"])
    except (KeyError, IndexError, TypeError) as error:
      raise ValueError(f"no choices[0].message.content in the reply: {str(found)[:200]}") from error


def read_verdict(reply: str) -> Verdict:
  """Reads the verdict from a judge's reply: the last JSON object. Text around it (reasoning, fences) is ignored.

  >>> read_verdict('Sure. {"quality": 1, "style": "cute"}')
  Verdict(quality=True, style='cute')

  Raises:
    ValueError: there is no object, or the last one is not a verdict.
  """
  found: dict[str, Any] = {}
  decoder, place = json.JSONDecoder(), reply.find("{")
  while place >= 0:
    try:
      found, end = decoder.raw_decode(reply, place)
    except ValueError:
      end = place + 1  # a brace that starts no object
    place = reply.find("{", end)
  if found.get("quality") in (0, 1) and found.get("style") in (*STYLES, "none"):
    return Verdict(bool(found["quality"]), None if found["style"] == "none" else found["style"])
  raise ValueError(f"a verdict must be a JSON object with quality 0 or 1 and a style; received {reply[:200]!r}.")


class CachedJudge:
  """Asks another judge about each question and answer only once."""

  def __init__(self, judge: Judge):
    self._judge = judge
    self._known: dict[tuple[str, str], Verdict] = {}
    self._lock = threading.Lock()

  def __call__(self, question: str, answer: str) -> Verdict:
    key = question, answer
    with self._lock:
      known = self._known.get(key)
    if known is None:
      known = self._judge(question, answer)
      with self._lock:
        self._known[key] = known
    return known
