"""Plays a kept policy, or has a person play a task: ``python -m jaxrl_mini.play DIR``."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxrl_mini.config import MAX_EVAL_EPISODES, MAX_SEED, Config, UserError
from jaxrl_mini.machine import commandline, effort

if TYPE_CHECKING:
    from jaxrl_mini.runs.player import Player

EXAMPLES = """\
examples:
  python -m jaxrl_mini.train --save-policy runs/policy
  python -m jaxrl_mini.play runs/policy
  python -m jaxrl_mini.play runs/policy --episodes 1000
  python -m jaxrl_mini.play --task guess:numbers=4 --human

Prints an episode step by step: what the agent sees, the probability of each action, the action, and at the end the
private verifier's verdict. With --episodes, a JSON object with the fields of a record's `after`. With --task, a person
plays an instance of the split `train`; it and what chance does are drawn by the seed.
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
    parser.add_argument("--task", metavar="TASK", help="with --human: play it without a policy")
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
    if (flags.folder is None) == (flags.task is None):
        raise UserError("give the folder of a policy, or --task TASK --human: expected one of the two")
    if flags.task is not None:
        if not flags.human:
            raise UserError(f"--task {flags.task} is played by a person: add --human, or give the folder of a policy")
        play_by_hand(flags.task, flags.seed)
        return
    commandline.use_device(flags.device)
    from jaxrl_mini.runs import records
    from jaxrl_mini.runs.player import TablePlayer, load_player
    from jaxrl_mini.tasks.repair import ACTIONS

    player = load_player(flags.folder)
    if flags.episodes is None:
        play(player, asked(ACTIONS) if flags.human else iter(player.episode(flags.seed)))
    else:
        table = isinstance(player, TablePlayer)
        chosen = {} if table else {"backend": "hf", "model": flags.folder}
        commandline.say_how_long(effort.alone(Config(iterations=1, eval_episodes=flags.episodes, **chosen)) / 2)
        print(json.dumps(records.finite(records.summary(player.evaluate(flags.episodes, flags.seed)))))


def play(player: "Player", actions: Iterator[int]) -> None:
    """Prints an episode of these actions; it is graded as the first evaluation episode is."""
    from jaxrl_mini.episodes.verifier import evaluation_verdicts
    from jaxrl_mini.tasks.repair import ACTIONS, BinarySearchRepair

    task, taken = BinarySearchRepair(), list[int]()
    observation = task.reset()
    while not task.ended:
        print(observation)
        for name, probability in zip(ACTIONS, player.probabilities(taken).tolist(), strict=True):
            print(f"  {name:8}  {probability:6.4f}  {'#' * round(BAR * probability)}".rstrip())
        taken.append(next(actions))
        observation = task.step(ACTIONS[taken[-1]])
        print(f"> {ACTIONS[taken[-1]]}\n", flush=True)
    if task.submitted:
        accepted = evaluation_verdicts(1)[0, task.artifact.variant]
        print(f"submitted: {'; '.join(task.artifact.lines)}")
        print(f"the private verifier {'accepts' if accepted else 'rejects'} it: {'success' if accepted else 'failure'}")
    else:
        print(observation)
        print("out of steps, nothing submitted: failure")


def play_by_hand(specification: str, seed: int) -> None:
    """Has a person play a task.

    Raises:
      UserError: there is no such task, it cannot be one, or the input ended before the episode.
    """
    from jaxrl_mini.tasks.specification import load_task, make_task

    load_task(specification)  # what is wrong with it is said before anybody plays
    task = make_task(specification)
    random.seed(seed)
    instance = random.choice(list(task.splits["train"]))
    observation, actions = task.reset(instance), asked(task.actions)
    print(task.header)
    while not task.ended:
        print(observation)
        observation = task.step(task.actions[next(actions)])
    print(observation)
    if task.submission is None:
        print("nothing submitted: failure")
        return
    chance = float(task.verify(task.submission, instance))
    accepted = random.random() < chance
    print(f"submitted: {task.submission}, which the private verifier accepts with probability {chance:g}")
    print(f"it {'accepts' if accepted else 'rejects'} it: {'success' if accepted else 'failure'}")


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
