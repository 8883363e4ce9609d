"""How a process ends that ran a command."""

import subprocess
import sys

import pytest

PROCESS = """
import atexit, sys, threading, time
from jaxrl_mini.machine import commandline
from jaxrl_mini.config import UserError

def late():
    time.sleep(0.3)
    print("written late", flush=True)

def command(arguments):
    atexit.register(print, "registered")
    threading.Thread(target=late).start()
    sys.stdout.write("said ")
    {ending}

commandline.run_command(command)
"""


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        ("return None", 0, ""),
        ("return 3", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(4)", 4, ""),
        ("raise UserError('no such thing')", 2, "error: no such thing"),
        ("raise KeyboardInterrupt", 130, "interrupted: nothing was written"),
        ("raise ValueError('a defect')", 1, "ValueError: a defect"),
    ],
)
def test_a_process_ends_at_once_but_after_all_that_is_to_be_done(ending, code, last):
    done = subprocess.run([sys.executable, "-c", PROCESS.format(ending=ending)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "said written late\nregistered\n")
    assert done.stderr.rstrip().split("\n")[-1] == last
