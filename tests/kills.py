"""A run that is killed again and again, at random moments, and resumed until it is done."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from jaxrl_mini.learning import checkpoint


def newest(folder: Path) -> int:
    """Iterations in the newest checkpoint, all of which can be read."""
    numbers = [0]
    for place in folder.glob("iteration-*"):
        numbers.append(int(place.name.partition("-")[2]))
        checkpoint.read(place)
    return max(numbers)


def killed_and_resumed(folder: Path, kills: int, seed: int, *arguments: object) -> int:
    """Runs `train` with its checkpoints in `folder`, kills it so often, and lets it end; returns the real kills.

    Each kill comes within a third of a second of a new checkpoint, or before the first one.

    Raises:
      AssertionError: a checkpoint was lost or is damaged, or the command failed.
    """
    chance, done = random.Random(seed), 0
    command = [sys.executable, "-m", "jaxrl_mini.train", *map(str, arguments), "--checkpoint", str(folder), "--resume"]
    for number in range(kills + 1):
        before = newest(folder)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if number < kills:
            while process.poll() is None and _highest(folder) == before:
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.3))
            done += process.poll() is None
            process.send_signal(signal.SIGKILL)
        _, said = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), said
        assert newest(folder) >= before
    assert process.returncode == 0
    return done


def _highest(folder: Path) -> int:
    return max([0, *(int(place.name.partition("-")[2]) for place in folder.glob("iteration-*"))])
