"""Questions of the simulated users, answers of the demonstrations, and the vocabulary of both."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

STYLES = ("academic", "cute", "chuunibyou", "classical")
CANDIDATES = (("academic", "cute", "chuunibyou"), ("classical", "cute", "chuunibyou"))
"""The styles that the policy chooses from: the first three while cute and then chuunibyou are preferred, the last three
while classical is, as in the paper."""
END = "</s>"

ANSWERS = {
  "colour": {"sky": "blue", "grass": "green", "snow": "white", "coal": "black", "blood": "red", "lemon": "yellow"},
  "sound": {"cow": "moo", "cat": "meow", "dog": "woof", "duck": "quack", "sheep": "baa", "lion": "roar"},
  "home": {"bee": "hive", "bird": "nest", "king": "castle", "fish": "sea", "bear": "cave", "horse": "stable"},
  "opposite": {"hot": "cold", "big": "small", "day": "night", "up": "down", "fast": "slow", "old": "new"},
}
"""The answers by relation and subject."""
PHRASINGS = {
  "colour": ("what colour is the {} ?", "which colour has the {} ?", "tell me the colour of the {} .",
             "the {} : which colour ?"),
  "sound": ("what does the {} say ?", "which sound makes the {} ?", "tell me the sound of the {} .",
            "the {} : which sound ?"),
  "home": ("where does the {} live ?", "which home has the {} ?", "tell me the home of the {} .",
           "the {} : which home ?"),
  "opposite": ("what is the opposite of {} ?", "which word is not {} at all ?", "tell me the opposite of {} .",
               "the word {} : which opposite ?"),
}  # fmt: skip
TEMPLATES = {
  "academic": (
    "in the literature , the evidence says {} .",
    "the scholars of the literature call it {} .",
    "a study of the literature concludes that it is {} .",
  ),
  "cute": ("hehe ~ it is {} , nya !", "yay ! i say {} , teehee <3", "nya ~ my answer is {} , hehe !"),
  "chuunibyou": (
    "behold ! my cursed eye sees {} !",
    "kneel , mortal ! the darkness says {} !",
    "the sealed abyss whispers {} to me !",
  ),
  "classical": ("verily , it doth be {} .", "the ancients hath said {} , prithee .", "i tell thee {} , forsooth ."),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Fact:
  """Subject matter of a question: a relation of a subject."""

  relation: str
  subject: str

  @property
  def answer(self) -> str:
    return ANSWERS[self.relation][self.subject]

  @property
  def others(self) -> frozenset[str]:
    """The other answers of the same relation, which are wrong here."""
    return frozenset(ANSWERS[self.relation].values()) - {self.answer}


FACTS = tuple(Fact(relation, subject) for relation, answers in ANSWERS.items() for subject in answers)


def candidates(preferred: str) -> tuple[str, ...]:
  """Returns the styles to choose from while a style is preferred: the first set that holds it."""
  return next(styles for styles in CANDIDATES if preferred in styles)


def system(styles: Sequence[str]) -> str:
  """Returns the system prompt. The policy itself chooses one of the three styles.

  >>> system(CANDIDATES[0])
  'styles : academic , cute or chuunibyou .'
  """
  return f"styles : {' , '.join(styles[:-1])} or {styles[-1]} ."


def question_text(fact: Fact, phrasing: int) -> str:
  """Returns the question in one of its four forms."""
  return PHRASINGS[fact.relation][phrasing].format(fact.subject)


def train_questions() -> list[str]:
  """Returns three forms of every question."""
  return [question_text(fact, (i + k) % 4) for i, fact in enumerate(FACTS) for k in range(3)]


def held_out_questions() -> list[str]:
  """Returns the fourth form of every question, which does not occur in training."""
  return [question_text(fact, (i + 3) % 4) for i, fact in enumerate(FACTS)]


_FACT_OF = {question_text(fact, i): fact for fact in FACTS for i in range(4)}


def fact_of(question: str) -> Fact:
  """Finds the fact that a question asks for, ignoring its spacing.

  Raises:
    ValueError: the question is not one of the simulation's.
  """
  spaced = " ".join(split_words(question))
  if spaced not in _FACT_OF:
    raise ValueError(f"question must be one of the simulation's {len(_FACT_OF)}; received {question!r}.")
  return _FACT_OF[spaced]


def demonstrate(question: str, rng: np.random.Generator, *, right: float, styles: Sequence[str] = STYLES) -> str:
  """Answers in a random one of `styles`: right with probability `right`, and in some cases badly formed."""
  fact = fact_of(question)
  style = styles[rng.integers(len(styles))]
  text = TEMPLATES[style][rng.integers(3)]
  said = fact.answer if rng.random() < right else str(rng.choice(sorted(fact.others)))
  text = text.format(said)
  flaw = rng.random()
  if flaw < 0.1:  # the answer twice
    return f"{text} {text}"
  if flaw < 0.2:  # the answer in two styles
    return f"{text} {TEMPLATES[styles[rng.integers(len(styles))]][0].format(said)}"
  return said if flaw < 0.25 else text


def split_words(text: str) -> list[str]:
  """Splits text into lower-case words and marks.

  >>> split_words("Hehe~ it's BLUE, nya! <3")
  ['hehe', '~', "it's", 'blue', ',', 'nya', '!', '<3']
  """
  return re.findall(r"</s>|<3|[a-z]+(?:'[a-z]+)*|[^\sa-z]", text.lower().replace("’", "'").replace("♡", "<3"))


class WordTokenizer:
  """One token per word or mark of the simulation's texts, which separate all of them by spaces."""

  def __init__(self) -> None:
    forms = [x.format("") for templates in TEMPLATES.values() for x in templates]
    texts: list[str] = [*map(system, CANDIDATES), *_FACT_OF, *forms]
    answers = [x for answers in ANSWERS.values() for x in answers.values()]
    words = sorted({word for text in texts for word in split_words(text)} | set(answers))
    self._tokens = ("<pad>", END, *words)
    self._ids = {token: i for i, token in enumerate(self._tokens)}
    self.vocab_size = len(self._tokens)
    self.stop_ids = (self._ids[END],)

  def encode(self, text: str) -> list[int]:
    return [self._ids[word] for word in split_words(text)]

  def decode(self, ids: Sequence[int]) -> str:
    return " ".join(self._tokens[i] for i in ids)
