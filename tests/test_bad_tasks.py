"""A task that cannot be one is refused in one line that names what is wrong, before anything else."""

import textwrap

import jaxtyping
import pytest

from jaxrl_mini import UserError, check_task
from jaxrl_mini.tasks.specification import load_task, register

GOOD = """
from jaxrl_mini import Task
import itertools, random, time

COUNTER = itertools.count()

class My(Task):
    actions = ("left", "right")
    max_steps = 2
    header = "Go right twice."
    splits = {"train": (None,)}

    def reset(self, instance):
        self.at = self.steps = 0
        return "here"

    def step(self, action):
        self.steps += 1
        self.at += action == "right"
        return "there"

    ended = property(lambda self: self.steps == 2)
    state = property(lambda self: (self.at, self.steps))
    view = property(lambda self: self.at)
    submission = property(lambda self: self.at)

    @staticmethod
    def verify(submission, instance):
        return float(submission == 2)
"""
ACTIONS, STEP, VERIFY = '("left", "right")', '        self.at += action == "right"', "return float(submission == 2)"
BAD = {
    # what a task says of itself
    "no actions": (ACTIONS, "()", "actions"),
    "one action": (ACTIONS, '("left",)', "actions"),
    "actions that are one text": (ACTIONS, '"lr"', "actions"),
    "an action twice": (ACTIONS, '("left", "right", "left")', "actions"),
    "an action that is no text": (ACTIONS, '("left", 3)', "actions"),
    "an action of two lines": (ACTIONS, '("left", "ri\\nght")', "actions"),
    "an action with spaces around": (ACTIONS, '("left", " right")', "actions"),
    "no steps": ("max_steps = 2", "max_steps = 0", "max_steps 0"),
    "half a step": ("max_steps = 2", "max_steps = 2.5", "max_steps 2.5"),
    "steps without number": ("    max_steps = 2\n", "", "max_steps None"),
    "too many steps": ("max_steps = 2", "max_steps = 10**9", "max_steps"),
    "an empty header": ('header = "Go right twice."', 'header = " "', "header"),
    "no header": ('    header = "Go right twice."\n', "", "header None"),
    "splits without train": ('{"train": (None,)}', '{"test": (None,)}', "splits"),
    "an empty split": ('{"train": (None,)}', '{"train": ()}', "split 'train'"),
    "a split that is a text": ('{"train": (None,)}', '{"train": "ab"}', "split 'train'"),
    "instances that cannot be told apart": ('{"train": (None,)}', '{"train": ([],)}', "hashable instances"),
    "splits that are a list": ('{"train": (None,)}', "[None]", "splits"),
    "an instance twice": ('{"train": (None,)}', '{"train": (None, None)}', "each instance of split 'train' once"),
    "no step": ("def step(", "def stop(", "has no step"),
    "no reset": ("def reset(", "def restart(", "has no reset"),
    "no verifier": ("def verify(", "def check(", "has no verify"),
    # what it does
    "a state that is a list": ("(self.at, self.steps))", "[self.at, self.steps])", "has state [0, 0]"),
    "a view that is a dict": ("view = property(lambda self: self.at)", "view = property(lambda self: {})",
                       "has view {}"),
    "a submission that is a set": ("submission = property(lambda self: self.at)",
                                   "submission = property(lambda self: {1})", "has submission {1}"),
    "a state that is not itself": ("(self.at, self.steps))", 'float("nan"))', "does not equal itself"),
    "no state": ("    state = property(lambda self: (self.at, self.steps))\n", "", "state raised AttributeError"),
    "an end that is a number": ("lambda self: self.steps == 2", "lambda self: self.steps // 2", "`ended` 0"),
    "ended before it began": ("lambda self: self.steps == 2", "lambda self: True", "has ended before the first action"),
    "an episode without end": ("lambda self: self.steps == 2", "lambda self: False", "goes on after 2 actions"),
    "an observation that is no text": ('return "there"', "return 3", "step 'left' returned 3"),
    "no first observation": ('return "here"', "return None", "reset None returned None"),
    "a step that fails": (STEP, STEP + "\n        1 / 0", "ZeroDivisionError: division by zero"),
    "a reset that fails": ("self.at = self.steps = 0", "self.at = self.steps = {}['x']", "KeyError"),
    "a verifier that fails": (VERIFY, "return submission.x", "verify of 0 raised AttributeError"),
    # randomness and memory of its own
    "a generator of its own": (STEP, "        self.at += random.random()",
                               "in state (0, 0), action 'left'"),
    "a clock": (STEP, "        self.at += time.perf_counter_ns()", "in state (0, 0), action 'left'"),
    "a counter outside of the task": (STEP, "        self.at += next(COUNTER)", "in state (0, 0), action 'left'"),
    "a memory that is not in the state": ("(self.at, self.steps))", "self.steps)", "state 1"),
    "a reset that is another every time": ("self.at = self.steps = 0", "self.at, self.steps = next(COUNTER), 0",
                                           "resets instance None in two ways"),
    # chance
    "no weights": (STEP, "        self.at += self.chance(())", "chance got ()"),
    "negative weights": (STEP, "        self.at += self.chance((1, -1))", "chance got (1, -1)"),
    "weights of nothing": (STEP, "        self.at += self.chance((0, 0))", "chance got (0, 0)"),
    "weights that are no numbers": (STEP, '        self.at += self.chance("ab")', "chance got 'ab'"),
    "a weight that is not finite": (STEP, '        self.at += self.chance((1, float("inf")))', "chance got"),
    "draws without end": (STEP, "        self.at += sum(self.chance((1, 1)) for _ in range(20))",
                          "draws more than 4096"),
    # what the verifier says
    "a verdict above 1": (VERIFY, "return 2.0", "returned 2.0"),
    "a verdict that is no number": (VERIFY, "return 'yes'", "returned 'yes'"),
    "a verdict that is not a number": (VERIFY, "return float('nan')", "returned nan"),
    "another verdict every time": (VERIFY, "return random.random()", "then"),
    # the file
    "a syntax error": ("class My(Task):", "class My(Task:", "SyntaxError"),
    "an import that fails": ("import itertools, random, time", "import itertools, random, time, nowhere_to_be_found",
                             "ModuleNotFoundError"),
    "a class that is no task": ("class My(Task):", "class My:", "has no task 'My'"),
    "another class": ("class My(Task):", "class Yours(Task):", "expected one of its classes (Yours)"),
    "a constructor that fails": ("    def reset(", "    def __init__(self):\n        {}[0]\n\n    def reset(",
                                 "KeyError"),
    "a file that exits": ("COUNTER =", "raise SystemExit(0)\nCOUNTER =", "SystemExit"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_a_user(monkeypatch):
    """Whose calls nobody holds against their annotations."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def write(path, text):
    path.write_text(text)
    return f"{path}:My"


def test_the_good_task_is_none_of_these(tmp_path):
    compiled = load_task(write(tmp_path / "good.py", GOOD))
    assert len(compiled.steps) == 3 and compiled.views == {0: 0, 2: 0, 3: 1}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_task_is_one_line_that_names_what_is_wrong(kind, tmp_path):
    old, new, said = BAD[kind]
    assert old in GOOD
    with pytest.raises(UserError) as error:
        load_task(write(tmp_path / "bad.py", GOOD.replace(old, new)))
    assert said in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600


def test_an_exception_is_shown_with_its_place_in_the_file(tmp_path):
    text = GOOD.replace(STEP, STEP + "\n        1 / 0")
    with pytest.raises(UserError, match=rf"bad.py, line {text[: text.index('1 / 0')].count(chr(10)) + 1}\)"):
        load_task(write(tmp_path / "bad.py", text))


def test_equal_states_with_other_futures_are_named_with_both_ways(tmp_path):
    """What happened before is not in the state, but decides what the next step does."""
    text = GOOD.replace("max_steps = 2", "max_steps = 3").replace("self.steps == 2", "self.steps == 3")
    remembers = (
        '        self.at = int(action == "right" and getattr(self, "last", "") == "right")\n        self.last = action'
    )
    text = text.replace(STEP, remembers)
    with pytest.raises(UserError, match=r"one thing after left and another after right: equal states"):
        load_task(write(tmp_path / "bad.py", text))


def test_more_states_than_the_limit_are_refused(tmp_path, monkeypatch):
    from jaxrl_mini.tasks import enumeration

    monkeypatch.setattr(enumeration, "MAX_STATES", 100)
    text = GOOD.replace("max_steps = 2", "max_steps = 99").replace("self.steps == 2", "self.steps == 99")
    with pytest.raises(UserError, match="more than 100 states"):
        load_task(write(tmp_path / "large.py", text))


@pytest.mark.parametrize(
    ("specification", "said"),
    [
        ("nothing", "unknown"),
        ("nowhere.py:My", "no file"),
        ("nowhere_to_be_found:My", "no module"),
        ("json:My", "has no task 'My'"),
        ("repair:lines=x", "lines=x is out of range: expected a whole number"),
        ("repair:hidden=maybe", "expected true or false"),
        ("repair:rows=3", "'rows=3' is no parameter of it: expected lines=..., steps=..., hidden=..."),
        ("repair:lines=3,lines=4", "no parameter"),
        ("repair:lines=99", "expected 1 to 8"),
        ("repair:steps=0", "max_steps 0"),
        ("bandit:success=0.5", "expected P1/P2"),
        ("bandit:success=0.5/2", "expected P1/P2"),
        ("deep-sea:size=0", "expected 1 to 64"),
        ("guess:numbers=1", "expected 2 to 64"),
        ("binary-search-repair:lines=3", "no parameter"),
        ("", "unknown"),
    ],
)
def test_a_specification_that_names_nothing_says_what_would_be_right(specification, said):
    with pytest.raises(UserError, match=r".") as error:
        load_task(specification)
    assert said in str(error.value)


def test_a_name_is_registered_once():
    register("mine", lambda size: None)  # type: ignore[arg-type, return-value]
    for name in ("mine", "repair", "a:b", ""):
        with pytest.raises(UserError):
            register(name, lambda: None)  # type: ignore[arg-type, return-value]


def test_the_command_refuses_with_code_2_and_one_line(command, tmp_path):
    path = write(tmp_path / "bad.py", GOOD.replace(VERIFY, "return 2.0"))
    done = command(check_task, path)
    assert (done.code, len(done.err), done.out) == (2, 1, []) and "verify" in done.err[0]


def test_what_is_odd_is_said_in_words(tmp_path):
    idle = GOOD.replace(ACTIONS, '("left", "right", "wait")')
    said = {
        "wait": idle,
        "accepts nothing": GOOD.replace(VERIFY, "return 0.0"),
        "nothing is ever submitted": GOOD.replace("submission = property(lambda self: self.at)", "submission = None"),
        "accepts everything": GOOD.replace(VERIFY, "return 1.0"),
        "first observation gives the instance away": GOOD.replace("(None,)", '("a", "b")').replace(
            '"here"', "instance"
        ),
        "accepts nothing for instance b": GOOD.replace("(None,)", '("a", "b")').replace(
            "submission == 2", "instance == 'a'"
        ),
    }
    assert check_task.odd(load_task(write(tmp_path / "good.py", GOOD))) == ["action 'left' never changes anything"]
    for number, (words, text) in enumerate(said.items()):
        odd = check_task.odd(load_task(write(tmp_path / f"odd{number}.py", textwrap.dedent(text))))
        assert any(words in one for one in odd), (words, odd)
