"""Writes runs and sweeps as one page to look at: ``python -m jaxrl_mini.report RECORD.json --output report.html``."""

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_mini.config import UserError, UserErrors
from jaxrl_mini.machine import commandline

if TYPE_CHECKING:
    from jaxrl_mini.machine.files import Output
    from jaxrl_mini.pages.figures import Curves

EXAMPLES = """\
examples:
  python -m jaxrl_mini.train --seed 7 --output run.json --trajectories run.npz
  python -m jaxrl_mini.report run.json run.npz
  python -m jaxrl_mini.report results/*.json --output six.html
  python -m jaxrl_mini.report sweeps/lr --output lr.html --figures plots

The page is one file that asks nothing of the network. With the recording of a run (`train --trajectories`) beside its
record, it also shows how the policy forms and what its episodes do.
"""

MARK = b"jaxrl_mini report"
"""What our own files have in their first bytes."""


def main(arguments: list[str]) -> None:
    """Parses, reads everything, writes."""
    parser = commandline.Parser("report", description="Writes a page.", epilog=EXAMPLES)
    parser.add_argument(
        "sources",
        nargs="+",
        type=commandline.path,
        metavar="SOURCE",
        help="records (.json), their recordings (.npz), and sweep folders",
    )
    parser.add_argument(
        "--output", type=commandline.output, metavar="FILE", default="report.html", help="the page [report.html]"
    )
    parser.add_argument(
        "--figures", type=commandline.output, metavar="DIR", help="also write the curves there as PNG files"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that no report wrote")
    commandline.add_task_flag(parser, "recording")
    flags = parser.parse_args(arguments)
    commandline.quieten("matplotlib")
    try:
        from jaxrl_mini.machine import files
        from jaxrl_mini.pages import figures, page, sources
    except ModuleNotFoundError as error:
        raise UserError(f"a report needs {error.name}: pip install '.[report]' in the source folder") from error

    found = sources.read(flags.sources, flags.task)
    folder = Path(flags.figures or ".")
    every = {name: [one for source in found for one in source.curves if name in one.lines] for name in figures.METRICS}
    drawn = {} if flags.figures is None else {name: curves for name, curves in every.items() if curves}
    odd = files.not_marked(MARK, "report")
    with ExitStack() as stack:
        output = stack.enter_context(files.Output(flags.output, odd, flags.overwrite))
        pictures = {
            metric: stack.enter_context(files.Output(folder / f"{metric}.png", odd, flags.overwrite))
            for metric in drawn
        }
        text = page.render(found, _flags(flags)).encode("utf-8", "replace")
        writes: dict[str, Callable[[], object]] = {"the page": lambda: output.commit(lambda file: file.write(text))}
        for metric, picture in pictures.items():
            writes[picture.path.name] = partial(_draw, picture, drawn[metric], metric)
        errors = files.write_all(writes)
    if "the page" not in errors:
        commandline.say(json.dumps({"output": flags.output, "bytes": len(text)}))
    if errors:
        raise UserErrors("not all is written", [*errors.values()])


def _flags(flags: argparse.Namespace) -> list[str]:
    """The words of the command line after its sources, but for `--overwrite`."""
    given = (("--output", flags.output), ("--figures", flags.figures), *(("--task", one) for one in flags.task))
    return [word for flag, name in given if name is not None for word in commandline.file_flag(flag, name)]


def _draw(picture: "Output", curves: list["Curves"], metric: str) -> None:
    from jaxrl_mini.pages import figures

    png = figures.to_png(figures.side_by_side(curves, metric))
    picture.commit(lambda file: file.write(png))


if __name__ == "__main__":
    commandline.run_command(main)
