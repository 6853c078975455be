"""Who says whether an answer is good, and in which style it is."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from experiments.online.questions import STYLES, fact_of, split_words


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What a judge finds."""

  quality: bool
  style: str | None
  """One of `STYLES`, or None: no style, or a mixture."""

  def reward(self, preferred: str) -> float:
    """r = r_quality r_style, both in {0, 1} (METHOD, online learning simulation)."""
    return float(self.quality and self.style == preferred)


class Judge(Protocol):
  """Reads a question and an answer; called from several threads."""

  def __call__(self, question: str, answer: str) -> Verdict: ...


_MARKERS = {
  "cute": """hehe teehee tehe nya nyan meowy yay uwu owo aww yippee hooray kawaii adorable cutie sweetie bestie cuddly
    cuddle snuggle snuggly fluffy teeny tiny teensy lovely yummy purr pwease wuv hugs sparkly kitty bunny
    kyaa mew hihi heehee awww oopsie cutest cute honey rainbow rainbows sparkle sparkles giggles giggle wubby puppy
    ~ <3""",
  "chuunibyou": """behold darkness dark cursed curse abyss abyssal mortal mortals forbidden sealed seal unseal kneel
    destiny fate prophecy prophesied hellfire shadow shadows eye demon dragon dimension power chosen fool fools tremble
    awaken awakened unleash ancient void oblivion chaos eternal whispers bow heed
    apocalypse infernal crimson hell minion minions demonic fated destined arcane summon summoned dread ominous
    incantation muahaha mwahaha fufu fufufu kukuku overlord realm doom""",
  "classical": """verily doth hath thou thee thy thine ye prithee ancients whence wherefore forsooth ere tis twas
    perchance hark henceforth hither thither sayeth saith quoth methinks nay yea unto shalt wilt art alas whilst
    oft dost hast betwixt anon lest wherein whereupon o'er aye yonder thus""",
}
MARKERS: Mapping[str, frozenset[str]] = {style: frozenset(words.split()) for style, words in _MARKERS.items()}
"""Words that tell a style."""
_NEGATIONS = frozenset({
  "not", "never", "no", "isn't", "ain't", "neither", "nor", "doesn't", "don't", "nay", "without",
})  # fmt: skip
_FUNCTION_WORDS = frozenset({
  "the", "a", "an", "is", "it", "of", "to", "and", "in", "my", "i", "be", "that", "this", "doth", "hath",
})  # fmt: skip
MIN_WORDS = 4
MAX_WORDS = 24


class RuleJudge:
  """An embedded judge that reads the text: deterministic, and at work in microseconds.

  Quality: the answer of the question is there as a word, affirmed (no negation up to three words before it), and no
  other answer of its kind is; `MIN_WORDS` to `MAX_WORDS` words; no word but function words more than twice, no two
  words in a row twice; and at least two words are neither the answer nor markers of a style (a list of markers is no
  sentence). Style: two or more different markers of one style, none of another, and its marks: an exclamation in
  `chuunibyou`, none in `classical`, and an exclamation, a tilde or a heart in `cute`.
  """

  def __call__(self, question: str, answer: str) -> Verdict:
    tokens = split_words(answer.removesuffix("</s>"))
    words = [token for token in tokens if token[0].isalpha()]
    return Verdict(self._is_good(question, words), self._style(tokens))

  def _is_good(self, question: str, words: Sequence[str]) -> bool:
    fact = fact_of(question)
    if not MIN_WORDS <= len(words) <= MAX_WORDS or fact.answer not in words or fact.others & set(words):
      return False
    counts = collections.Counter(words)
    pairs = collections.Counter(itertools.pairwise(words))
    if any(count > (4 if word in _FUNCTION_WORDS else 2) for word, count in counts.items()) or max(pairs.values()) > 1:
      return False
    markers = frozenset().union(*MARKERS.values())
    plain = {word for word in words if word not in markers and word != fact.answer}
    places = [i for i, word in enumerate(words) if word == fact.answer]
    denied = any(_NEGATIONS & set(words[max(0, i - 3) : i]) for i in places)
    return len(plain) >= 2 and not denied

  def _style(self, tokens: Sequence[str]) -> str | None:
    present = set(tokens)
    found = {style: present & markers for style, markers in MARKERS.items()}
    styles = [style for style, markers in found.items() if markers]
    if len(styles) != 1 or len(found[styles[0]]) < 2:
      return None
    loud = present & {"!", "~", "<3"}
    marked = {"cute": bool(loud), "chuunibyou": "!" in loud, "classical": not loud}
    return styles[0] if marked[styles[0]] else None


JUDGE_PROMPT = """You judge answers. Question: {question}
Answer: {answer}

quality is 1 if the answer answers the question correctly, in one or two sentences without repetition, else 0.
style is "cute", "chuunibyou" (grandiose dark-fantasy), "classical" (archaic, literary) or "none" (plain, or a mixture).
Reply with one JSON object and nothing else: {{"quality": 0 or 1, "style": "..."}}"""


class JudgeError(RuntimeError):
  """The judge could not be asked, or did not say what it was asked for."""


class ChatJudge:
  """A judge behind an OpenAI-compatible chat endpoint: any model that follows `JUDGE_PROMPT`.

  Args:
    url: of the server, such as `http://localhost:8000/v1`.
    model: the model's name there.
    api_key: sent as a bearer token; None: none is.
    timeout_s: seconds for one request.
    max_attempts: requests before an answer is given up; the wait between them doubles from `first_wait_s`.
    first_wait_s: seconds.
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
    """Asks.

    Raises:
      JudgeError: no attempt gave a verdict.
    """
    content = JUDGE_PROMPT.format(question=question, answer=answer)
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
          break  # it would be refused again
      except (OSError, ValueError) as error:
        failure = str(error)
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
  """The verdict in a judge's reply; what stands around the JSON object (reasoning, code fences) is passed over.

  >>> read_verdict('Sure. {"quality": 1, "style": "cute"}')
  Verdict(quality=True, style='cute')

  Raises:
    ValueError: there is none, or it holds other values.
  """
  for text in reversed(re.findall(r"\{[^{}]*\}", reply)):
    try:
      found = json.loads(text)
    except ValueError:
      continue  # braces in the reasoning around it
    if found.get("quality") in (0, 1) and found.get("style") in (*STYLES, "none"):
      return Verdict(bool(found["quality"]), None if found["style"] == "none" else found["style"])
  raise ValueError(f"a verdict must be a JSON object with quality 0 or 1 and a style; received {reply[:200]!r}.")


class Remembering:
  """Asks another judge once about every text."""

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
