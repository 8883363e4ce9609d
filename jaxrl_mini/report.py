"""Writes runs and sweeps as one page to look at: ``python -m jaxrl_mini.report RECORD.json --output report.html``."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_mini.config import UserError
from jaxrl_mini.machine import commandline

if TYPE_CHECKING:
    from jaxrl_mini.machine.files import Output

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
        "--output", type=commandline.path, metavar="FILE", default="report.html", help="the page [report.html]"
    )
    parser.add_argument(
        "--figures", type=commandline.path, metavar="DIR", help="also write the curves there as PNG files"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that no report wrote")
    flags = parser.parse_args(arguments)
    try:
        from jaxrl_mini.machine import files
        from jaxrl_mini.pages import figures, page, sources
    except ModuleNotFoundError as error:
        raise UserError(f"a report needs {error.name}: pip install '.[report]' in the source folder") from error

    found = sources.read(flags.sources)
    drawn = {} if flags.figures is None else {f"{name}.png": name for name in figures.METRICS}
    folder = Path(flags.figures or ".")
    for path in (Path(flags.output), *(folder / name for name in drawn)):
        if not flags.overwrite and path.is_file() and MARK not in _beginning(path):
            raise UserError(f"output {path} exists and is no report: name another or use --overwrite")
    with files.Output(flags.output) as output:
        text = page.render(found)
        for name, metric in drawn.items():
            curves = [one for source in found for one in source.curves if metric in one.lines]
            if curves:
                with files.Output(folder / name) as picture:
                    _write(picture, figures.to_png(figures.side_by_side(curves, metric)))
        _write(output, text.encode("utf-8", "replace"))
    print(json.dumps({"output": flags.output, "bytes": Path(flags.output).stat().st_size}))


def _write(output: "Output", data: bytes) -> None:
    output.commit(lambda file: file.write(data))


def _beginning(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(2000)
    except OSError:
        return b""


if __name__ == "__main__":
    commandline.run_command(main)
