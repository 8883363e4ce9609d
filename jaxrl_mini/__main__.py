"""The console command: ``jaxrl-mini train --seed 7`` is ``python -m jaxrl_mini.train --seed 7``."""

import importlib
import sys
from typing import NoReturn

import jaxrl_mini
from jaxrl_mini.machine import commandline

DESCRIPTION = "A laboratory for agent-RL training loops in JAX: every number is exact or comes with an interval."

COMMANDS = {
    "train": "trains a policy and writes the record of the run",
    "sweep": "trains every setting with every seed; `sweep summary DIR` says what came out",
    "replay": "feeds recorded episodes through the update and compares what they lead to",
    "reproduce": "checks records by running their settings again",
    "play": "plays a kept policy, or lets you play",
    "report": "writes runs and sweeps as one page to look at",
    "estimators": "judges gradient estimators exactly",
    "check_task": "says what a task is, exactly, and what is odd about it",
    "tiny_model": "makes a small random language model to train",
}
"""The modules that are commands, and what they do."""

EPILOG = (
    "commands:\n"
    + "".join(f"  {name:12}{text}\n" for name, text in COMMANDS.items())
    + ("\n`jaxrl-mini COMMAND --help` has each command's options and examples.\n")
)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command that the first argument names with the others, and exits as it does."""
    words = sys.argv[1:] if arguments is None else arguments
    with commandline.called_as("jaxrl-mini "):
        parser = commandline.Parser("", description=DESCRIPTION, epilog=EPILOG)
        parser.add_argument("--version", action="version", version=f"jaxrl-mini {jaxrl_mini.__version__}")
        parser.add_argument(
            "command", type=lambda text: text.replace("-", "_"), choices=COMMANDS, metavar="COMMAND",
            help="one of those below",
        )  # fmt: skip
        command = parser.parse_args(words[:1]).command
        module = importlib.import_module(f"jaxrl_mini.{command}")
        if arguments is None:
            del sys.argv[1]  # the others are the command's
            commandline.run_command(module.main)
        commandline.run_command(module.main, words[1:])


if __name__ == "__main__":
    main()
