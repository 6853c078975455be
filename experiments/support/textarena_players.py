"""Players for `sweep_textarena`: the best known play of each single-player game of TextArena, and its possible moves.

The best players see the state of the game with its answers, so that they earn what perfect play earns.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Final

Moves = Iterator[str]

_DIRECTIONS = ("[up]", "[down]", "[left]", "[right]")
_STEPS: Final[Mapping[str, tuple[int, int]]] = {
  "[up]": (-1, 0), "[down]": (1, 0), "[left]": (0, -1), "[right]": (0, 1),
}  # fmt: skip
_SEARCH_LIMIT = 100_000


@dataclasses.dataclass(frozen=True)
class Game:
  """The ways to play a game: the best known, at random, and the worst."""

  best: Callable[[Any], Moves]
  moves: Callable[[Any], list[str]]
  """Returns moves to choose from at random, not all of them legal."""
  worst: Callable[[Any], Moves] | None = None
  """Play that an earlier version of the game rewarded too highly."""


def search(
  start: Hashable,
  neighbours: Callable[[Any], list[tuple[str, Any]]],
  distance: Callable[[Any], float],
  *,
  weight: float = 1.0,
) -> list[str]:
  """Returns moves to a state at distance 0, or to the nearest state found, by weighted A*."""
  came: dict[Hashable, tuple[Hashable, str] | None] = {start: None}
  cost: dict[Hashable, int] = {start: 0}
  counter = itertools.count()
  queue: list[tuple[float, int, Any]] = [(0.0, next(counter), start)]
  nearest = start
  while queue and len(came) < _SEARCH_LIMIT:
    state = heapq.heappop(queue)[2]
    if distance(state) < distance(nearest):
      nearest = state
    if distance(state) == 0:
      break
    for move, other in neighbours(state):
      if other not in cost or cost[state] + 1 < cost[other]:
        cost[other] = cost[state] + 1
        came[other] = (state, move)
        heapq.heappush(queue, (cost[other] + weight * distance(other), next(counter), other))
  moves: list[str] = []
  step = came[nearest]
  while step is not None:
    moves.append(step[1])
    step = came[step[0]]
  return moves[::-1]


def _game_2048(env: Any) -> Moves:
  """Looks one move ahead for empty cells and for the largest tile in a corner."""
  while True:
    scores = {}
    for index, move in enumerate(_DIRECTIONS):
      board = [row[:] for row in env.state.game_state["board"]]
      moved, gained = env._apply_move(index)
      after = env.state.game_state["board"]
      if moved:
        empty = sum(row.count(0) for row in after)
        corner = after[-1][0] == max(map(max, after))
        depth = sum(tile * row for row, tiles in enumerate(after) for tile in tiles)
        scores[move] = 8 * empty + gained + 64 * corner + depth / 8
      env.state.game_state["board"] = board
    yield max(scores, key=scores.__getitem__)


def _bandit(env: Any) -> Moves:
  means = env.state.game_state["ground_truth"]
  while True:
    yield f"[{max(means, key=means.__getitem__)}]"


def _bandit_worst(env: Any) -> Moves:
  means = env.state.game_state["ground_truth"]
  while True:
    yield f"[{min(means, key=means.__getitem__)}]"


def _blackjack(env: Any) -> Moves:
  while True:
    yield "[Hit]" if env._hand_score(env.state.game_state["player_hand"]) < 17 else "[Stand]"


def _countdown(env: Any) -> Moves:
  def solve(numbers: list[int]) -> list[str] | None:
    for (i, a), (j, b) in itertools.permutations(enumerate(numbers), 2):
      rest = [x for k, x in enumerate(numbers) if k not in (i, j)]
      results = {"+": a + b, "*": a * b, "-": a - b} | ({"/": a // b} if b and a % b == 0 else {})
      for operator, result in results.items():
        if result <= 0 or (operator in "+*" and i > j):
          continue
        if result == env.target:
          return [f"[{i} {j} {operator}]"]
        following = solve([*rest, result])
        if following is not None:
          return [f"[{i} {j} {operator}]", *following]
    return None

  yield from solve(env.numbers) or ()


def _crosswords(env: Any) -> Moves:
  """Enters all letters in one move, since one letter per move may exceed the number of turns."""
  rows = enumerate(env.state.game_state["solution"])
  yield " ".join(f"[{row} {col} {x}]" for row, cells in rows for col, x in enumerate(cells) if x != ".")


def _cryptarithm(env: Any) -> Moves:
  letters = sorted(env.letters)
  for digits in itertools.permutations(range(10), len(letters)):
    value = dict(zip(letters, digits, strict=True))
    if value.get("M", 1) == 1 and value.get("S", 9) == 9 and _adds_up(env, value):
      yield from (f"[{letter} {digit}]" for letter, digit in value.items())
      return


def _adds_up(env: Any, value: Mapping[str, int]) -> bool:
  def number(word: str) -> int:
    return int("".join(str(value[letter]) for letter in word))

  return sum(map(number, env.addends)) == number(env.result)


def _cryptarithm_worst(env: Any) -> Moves:
  """Assigns all letters but one wrongly, and stops."""
  yield from (f"[{letter} {9 - digit}]" for digit, letter in enumerate(sorted(env.letters)[:-1]))


def _fifteen_puzzle(env: Any) -> Moves:
  def neighbours(tiles: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    row, col = divmod(tiles.index(0), 4)
    found = []
    for move, (down, right) in _STEPS.items():  # the tile moves, so the gap goes the other way
      r, c = row - down, col - right
      if 0 <= r < 4 and 0 <= c < 4:
        board = list(tiles)
        board[4 * row + col], board[4 * r + c] = board[4 * r + c], 0
        found.append((move, tuple(board)))
    return found

  def distance(tiles: tuple[int, ...]) -> float:
    places = ((i, tile - 1) for i, tile in enumerate(tiles) if tile)
    return sum(abs(i // 4 - goal // 4) + abs(i % 4 - goal % 4) for i, goal in places)

  start = tuple(tile or 0 for row in env.board for tile in row)
  yield from search(start, neighbours, distance, weight=5.0)


def _frozen_lake(env: Any) -> Moves:
  state = env.state.game_state
  goal = state["goal_pos"]

  def neighbours(place: tuple[int, int]) -> list[tuple[str, tuple[int, int]]]:
    places = [(move, (place[0] + down, place[1] + right)) for move, (down, right) in _STEPS.items()]
    size = range(env.size)
    return [(m, (r, c)) for m, (r, c) in places if r in size and c in size and state["grid"][r][c] != "H"]

  yield from search(state["player_pos"], neighbours, lambda p: abs(p[0] - goal[0]) + abs(p[1] - goal[1]))


def _guess_the_number(env: Any) -> Moves:
  yield f"[{env.state.game_state['game_number']}]"


def _lights_out(env: Any) -> Moves:
  """Tries every way to press the first row. The lights of each row determine the presses in the row below."""
  size = env.size
  for first in itertools.product((False, True), repeat=size):
    grid = [row[:] for row in env.state.game_state["grid"]]
    pressed = []
    for row in range(size):
      for col in range(size):
        if first[col] if row == 0 else grid[row - 1][col]:
          pressed.append(f"[{row} {col}]")
          env._toggle_lights(grid, row, col)
    if env._is_solved(grid):
      yield from pressed
      return


def _marks(env: Any, wrong: bool) -> str:
  other = {"X": "O", "O": "X"}
  return " ".join(
    f"[{row} {col} {other[mark] if wrong else mark}]"
    for grid in env.game_board_solution.values()
    for row, marks in grid.items()
    for col, mark in marks.items()
  )


def _mastermind(env: Any) -> Moves:
  yield f"[{' '.join(map(str, env.state.game_state['secret_code']))}]"


def _minesweeper(env: Any) -> Moves:
  yield f"[{env.rows // 2} {env.cols // 2}]"
  for row, col in itertools.product(range(env.rows), range(env.cols)):
    if env.grid[row][col] != -1 and not env.revealed[row][col]:
      yield f"[{row} {col}]"


def _minesweeper_worst(env: Any) -> Moves:
  yield "[0 0]"
  yield from (f"[{row} {col}]" for row in range(env.rows) for col in range(env.cols) if env.grid[row][col] == -1)


def _peg_moves(env: Any, board: tuple[bool, ...]) -> list[tuple[str, tuple[bool, ...]]]:
  found = []
  for start, over, end in env.ALLOWED_MOVES:
    if board[start] and board[over] and not board[end]:
      after = list(board)
      after[start], after[over], after[end] = False, False, True
      found.append((f"[{start} {end}]", tuple(after)))
  return found


def _peg_jump(env: Any) -> Moves:
  board = tuple(env.state.game_state["board"])
  yield from search(board, lambda b: _peg_moves(env, b), lambda b: b.count(True) - 1.0, weight=10.0)


def _rush_hour(env: Any) -> Moves:
  cars = list(env.state.game_state["vehicles"].values())
  size = env.BOARD_SIZE

  def cells(i: int, offset: int) -> list[tuple[int, int]]:
    car = cars[i]
    return [(car.row, offset + k) if car.horizontal else (offset + k, car.col) for k in range(car.length)]

  def neighbours(offsets: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    taken = {cell for i, offset in enumerate(offsets) for cell in cells(i, offset)}
    found = []
    for i, car in enumerate(cars):
      for sign, step in (("+", 1), ("-", -1)):
        new = set(cells(i, offsets[i] + step)) - set(cells(i, offsets[i]))
        if not new & taken and all(0 <= x < size for cell in new for x in cell):
          found.append((f"[{car.vid}{sign}]", (*offsets[:i], offsets[i] + step, *offsets[i + 1 :])))
    return found

  red = next(i for i, car in enumerate(cars) if car.vid == "X")
  start = tuple(car.col if car.horizontal else car.row for car in cars)
  yield from search(start, neighbours, lambda offsets: size - cars[red].length - offsets[red])


def _secretary(env: Any) -> Moves:
  draws = env.state.game_state["draws"]
  yield from ["[continue]"] * draws.index(max(draws))
  yield "[accept]"


def _secretary_worst(env: Any) -> Moves:
  draws = env.state.game_state["draws"]
  yield from ["[continue]"] * draws.index(min(draws))
  yield "[accept]"


def _set(env: Any) -> Moves:
  while True:
    board = env.state.game_state["board"]
    different = (
      cards
      for cards in itertools.combinations(range(len(board)), 3)
      if all(len({board[card][i] for card in cards}) != 2 for i in range(4))
    )
    yield str([card + 1 for card in next(different, (0, 1, 2))])


def _slitherlink(env: Any) -> Moves:
  """Tries all rectangles, since the game draws no other loops."""
  for top, left in itertools.product(range(env.R), range(env.C)):
    for bottom, right in itertools.product(range(top + 1, env.R + 1), range(left + 1, env.C + 1)):
      edges = [f"[h {row} {col}]" for row in (top, bottom) for col in range(left, right)]
      edges += [f"[v {row} {col}]" for col in (left, right) for row in range(top, bottom)]
      counts = collections.Counter[tuple[int, int]]()
      for kind, row, col in (edge[1:-1].split() for edge in edges):
        counts.update([(int(row), int(col)), (int(row) - (kind == "h"), int(col) - (kind == "v"))])
      cells = itertools.product(range(env.R), range(env.C))
      if all(env.clues[r][c] in (None, counts[r, c]) for r, c in cells):
        yield from edges
        return


def _sokoban(env: Any) -> Moves:
  size = env.room_fixed.shape
  floor = {(r, c) for r in range(size[0]) for c in range(size[1]) if env.room_fixed[r, c] != 0}
  goals = {place for place in floor if env.room_fixed[place] == 2}
  boxes = frozenset(place for place in floor if env.room_state[place] in (3, 4))

  def neighbours(state: Any) -> list[tuple[str, Any]]:
    (row, col), boxes = state
    found = []
    for move, (down, right) in _STEPS.items():
      new, behind = (row + down, col + right), (row + 2 * down, col + 2 * right)
      if new in boxes and behind in floor - boxes:
        found.append((move, (new, boxes - {new} | {behind})))
      elif new in floor - boxes:
        found.append((move, (new, boxes)))
    return found

  start = (tuple(int(x) for x in env.player_position), boxes)
  yield from search(start, neighbours, lambda state: len(state[1] - goals), weight=2.0)


def _sudoku(env: Any) -> Moves:
  for row, col in itertools.product(range(9), range(9)):
    if env.game_board[row][col] == 0:
      yield f"[{row + 1} {col + 1} {env.full_grid[row][col]}]"


def _three_card_monte(env: Any) -> Moves:
  yield f"[{env.ball_pos}]"


def _tower_of_hanoi(env: Any) -> Moves:
  def move(disks: int, source: str, target: str, spare: str) -> Moves:
    if disks:
      yield from move(disks - 1, source, spare, target)
      yield f"[{source} {target}]"
      yield from move(disks - 1, spare, target, source)

  yield from move(env.num_disks, "A", "C", "B")


def _always(move: str) -> Callable[[Any], Moves]:
  return lambda env: itertools.repeat(move)


def _cells(rows: int, cols: int, form: str = "[{} {}]") -> list[str]:
  return [form.format(row, col) for row in range(rows) for col in range(cols)]


def _directions(env: Any) -> list[str]:
  del env
  return list(_DIRECTIONS)


GAMES: Final[Mapping[str, Game]] = {
  "Game2048Env": Game(_game_2048, _directions),
  "BanditEnv": Game(_bandit, lambda env: [f"[{button}]" for button in env.buttons], _bandit_worst),
  "BlackjackEnv": Game(_blackjack, lambda env: ["[Hit]", "[Stand]"], _always("[Hit]")),
  "CountdownEnv": Game(
    _countdown,
    lambda env: [f"[{i} {j} {o}]" for i, j in itertools.permutations(range(len(env.numbers)), 2) for o in "+-*/"],
  ),
  "CrosswordsEnv": Game(
    _crosswords,
    lambda env: [
      f"{cell[:-1]} {letter}]" for cell in _cells(*[len(env.state.game_state["board"])] * 2) for letter in "EA"
    ],
  ),
  "CryptarithmEnv": Game(
    _cryptarithm, lambda env: [f"[{x} {d}]" for x in sorted(env.letters) for d in range(10)], _cryptarithm_worst
  ),
  "FifteenPuzzleEnv": Game(_fifteen_puzzle, _directions),
  "FrozenLakeEnv": Game(_frozen_lake, _directions, _always("[up]")),
  "GuessTheNumberEnv": Game(
    _guess_the_number, lambda env: [f"[{number}]" for number in range(env.min_number, env.max_number + 1)]
  ),
  "LightsOutEnv": Game(_lights_out, lambda env: _cells(env.size, env.size)),
  "LogicPuzzleEnv": Game(
    lambda env: iter([_marks(env, wrong=False)]),
    lambda env: (_marks(env, wrong=False) + " " + _marks(env, wrong=True)).replace("] [", "]\n[").split("\n"),
    lambda env: itertools.repeat(_marks(env, wrong=True)),
  ),
  "MastermindEnv": Game(
    _mastermind,
    lambda env: [f"[{' '.join(map(str, code))}]" for code in itertools.permutations(range(1, 7), env.code_length)],
  ),
  "MinesweeperEnv": Game(_minesweeper, lambda env: _cells(env.rows, env.cols), _minesweeper_worst),
  "PegJumpEnv": Game(
    _peg_jump, lambda env: [move for move, _ in _peg_moves(env, tuple(env.state.game_state["board"]))] or ["[1 1]"]
  ),
  "RushHourEnv": Game(
    _rush_hour, lambda env: [f"[{car}{sign}]" for car in env.state.game_state["vehicles"] for sign in "+-"]
  ),
  "SecretaryEnv": Game(_secretary, lambda env: ["[accept]", "[continue]"], _secretary_worst),
  "SetEnv": Game(
    _set,
    lambda env: [
      f"[{a}, {b}, {c}]" for a, b, c in itertools.combinations(range(1, len(env.state.game_state["board"]) + 1), 3)
    ],
    _always("[1, 1, 1]"),
  ),
  "SlitherlinkEnv": Game(
    _slitherlink, lambda env: _cells(env.R + 1, env.C, "[h {} {}]") + _cells(env.R, env.C + 1, "[v {} {}]")
  ),
  "SokobanEnv": Game(_sokoban, _directions),
  "SudokuEnv": Game(_sudoku, lambda env: [f"{cell[:-1]} {x}]" for cell in _cells(10, 10) for x in range(1, 10)]),
  "ThreeCardMonteEnv": Game(
    _three_card_monte,
    lambda env: [f"[{cup}]" for cup in range(env.num_cups)],
    lambda env: iter([f"[{(env.ball_pos + 1) % env.num_cups}]"]),
  ),
  "TowerOfHanoiEnv": Game(_tower_of_hanoi, lambda env: [f"[{a} {b}]" for a, b in itertools.permutations("ABC", 2)]),
}
"""Players by the name of the game's class."""
