"""Plays a kept policy, or has a person play a task: ``python -m jaxrl_mini.play DIR``."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxrl_mini.config import ARTICLE, MAX_EVAL_EPISODES, MAX_SEED, Config, UserError
from jaxrl_mini.machine import commandline, effort

if TYPE_CHECKING:
    from jaxrl_mini.runs.player import Player
    from jaxrl_mini.tasks.task import Episode

EXAMPLES = """\
examples:
  python -m jaxrl_mini.train --save-policy runs/policy
  python -m jaxrl_mini.play runs/policy
  python -m jaxrl_mini.play runs/policy --episodes 1000
  python -m jaxrl_mini.play --task guess:numbers=4 --human

Prints an episode step by step: what the agent sees, the probability of each action, the action, and at the end the
private verifier's verdict. With --episodes, a JSON object with the fields of a record's `after`. The seed draws the
instance, of the split `train`, and what chance does. Without a policy, a person plays; a policy of a task of your own
plays where you name that: play DIR --task FILE.py:CLASS.
"""
BAR = 40
EPISODES = f"a whole number from 1 to {MAX_EVAL_EPISODES}"
SEEDS = f"a whole number from 0 to {MAX_SEED}"


def main(arguments: list[str]) -> None:
    """Parses, plays, prints."""
    parser = commandline.Parser("play", description="Plays a kept policy.", epilog=EXAMPLES)
    parser.add_argument(
        "folder",
        nargs="?",
        type=commandline.path,
        metavar="DIR",
        help="what train --save-policy wrote, or a Hugging Face checkpoint",
    )
    parser.add_argument("--task", metavar="TASK", help="without a policy, what a person plays; else the policy's")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--episodes",
        type=commandline.number(int, EPISODES),
        metavar="N",
        help="play N evaluation episodes and print their statistics",
    )
    how.add_argument("--human", action="store_true", help="choose the actions yourself, one a line")
    parser.add_argument(
        "--seed", type=commandline.number(int, SEEDS), default=7, metavar="INT", help="of the evaluation episodes [7]"
    )
    commandline.add_device_flag(parser)
    flags = parser.parse_args(arguments)
    Config(seed=flags.seed)  # refuses a seed out of range
    if flags.episodes is not None and not 1 <= flags.episodes <= MAX_EVAL_EPISODES:
        raise UserError(f"--episodes {flags.episodes} is out of range: expected {EPISODES}")
    if flags.folder is None:
        if flags.task is None or not flags.human:
            raise UserError("the folder of a policy is missing: give it, or --task TASK --human")
        from jaxrl_mini.tasks.specification import load_task

        load_task(flags.task)  # what is wrong with it is said before anybody plays
        play(flags.task, flags.seed, human=True)
        return
    commandline.use_device(flags.device)
    from jaxrl_mini.exact.beliefs import too_many
    from jaxrl_mini.learning.block import task_of
    from jaxrl_mini.runs import records
    from jaxrl_mini.runs.player import TablePlayer, load_player
    from jaxrl_mini.tasks.specification import load_task

    player = load_player(flags.folder, [flags.task] if flags.task else [])
    if flags.task not in (None, player.task):
        raise UserError(f"--task {flags.task} is not that of policy {flags.folder!r}: expected {player.task}")
    if flags.episodes is None:
        play(player.task, flags.seed, player, flags.human)
        return
    table = isinstance(player, TablePlayer)
    chosen = {} if table else {"backend": "hf", "model": flags.folder}
    config = Config(task=player.task, iterations=1, eval_episodes=flags.episodes, **chosen)
    if not table and (why := too_many(load_task(player.task))):
        commandline.note(f"{why}, so the exact figures are null")
    commandline.say_how_long(effort.alone(config) / 2)
    summary = records.summary(player.evaluate(flags.episodes, flags.seed), task_of(config))
    print(json.dumps(records.finite(summary)))


def play(task_name: str, seed: int, player: "Player | None" = None, human: bool = False) -> None:
    """Prints an episode; a policy's on the article's task is the seed's first evaluation episode.

    Args:
      task_name: the task.
      seed: of the instance, of what chance does, and of the policy's actions.
      player: whose probabilities are shown, and whose actions are taken where no person plays.
      human: the actions are those of a person.

    Raises:
      UserError: the input ended before the episode.
    """
    from jaxrl_mini.tasks.specification import make_task
    from jaxrl_mini.tasks.task import Episode

    task = make_task(task_name)
    random.seed(seed)
    episode = Episode(task, random.choice(list(task.splits["train"])))
    chosen: Iterator[int]
    if human or player is None:
        print(task.header)
        chosen = asked(task.actions)
    else:
        chosen = iter(player.episode(seed)) if task_name == ARTICLE else drawn(player, episode)
    width = max(map(len, task.actions))
    while not task.ended:
        print(episode.observations[-1])
        for name, probability in zip(task.actions, player.probabilities_in(episode) if player else (), strict=False):
            print(f"  {name:{width}}  {probability:6.4f}  {'#' * round(BAR * probability)}".rstrip())
        action = next(chosen)
        print(f"> {task.actions[action]}\n", flush=True)
        episode.step(action)
    if episode.observations[-1]:
        print(episode.observations[-1])
    if task.submission is None:
        print("out of steps, " * (len(episode.actions) == task.max_steps) + "nothing submitted: failure")
        return
    chance = float(task.verify(task.submission, episode.instance))
    accepted = random.random() < chance
    print(f"submitted: {task.submission}")
    if 0 < chance < 1:
        print(f"the private verifier accepts it with probability {chance:g}")
    print(f"the private verifier {'accepts' if accepted else 'rejects'} it: {'success' if accepted else 'failure'}")


def drawn(player: "Player", episode: "Episode") -> Iterator[int]:
    """Actions by a policy's probabilities."""
    while True:
        probabilities = player.probabilities_in(episode).tolist()
        yield random.choices(range(len(probabilities)), probabilities)[0]


def asked(actions: Sequence[str]) -> Iterator[int]:
    """Actions from standard input, by name or number, asking again where there is no such action."""
    choices = {text: i for i, name in enumerate(actions) for text in (str(i + 1), name)}
    question = ", ".join(f"{i + 1} {name}" for i, name in enumerate(actions)) + "? "
    while True:
        try:
            answer = input(question).strip()
        except (EOFError, UnicodeDecodeError) as error:
            raise UserError("the input ended before the episode: give an action's name or number per line") from error
        if answer in choices:
            yield choices[answer]
        else:
            print(f"no action is called {answer!r}")


if __name__ == "__main__":
    commandline.run_command(main)
