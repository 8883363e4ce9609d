"""Coverage-guided fuzzing of everything that reads a file: ``python -m benchmarks.fuzz recording --seconds 60``.

Needs atheris (``pip install atheris``), which the project itself does not. Starts from intact files and from what is
kept in `tests/corpus`; a case that ends in anything but a result or one line stops it, and is written to the working
folder as `crash-*`. What reached new code is kept in the folder `--corpus`.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

import atheris

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

with atheris.instrument_imports(include=["jaxrl_mini", "zipfile", "json", "numpy.lib"], enable_loader_override=False):
    import hostile

    from jaxrl_mini.config import Config, UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reader", choices=[*hostile.READERS, "config"])
    parser.add_argument("--seconds", type=int, default=60, help="how long [60]")
    parser.add_argument("--corpus", type=Path, help="where cases that reached new code are kept [a temporary folder]")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        corpus = flags.corpus or Path(work) / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        intact = b"" if flags.reader == "config" else hostile.READERS[flags.reader].place(Path(work)).read_bytes()
        (corpus / "intact").write_bytes(intact or json.dumps(Config().to_dict()).encode())
        kept = TESTS / "corpus" / flags.reader
        folders = [str(corpus), *([str(kept)] if kept.is_dir() else [])]
        limits = [f"-max_total_time={flags.seconds}", f"-max_len={2 * len(intact) + 4096}", "-timeout=20"]
        path = _file(flags.reader, Path(work))

        def test(data: bytes) -> None:
            try:
                if flags.reader == "config":
                    _config(data)
                else:
                    path.write_bytes(data)
                    hostile.READERS[flags.reader].read(path)
            except UserError as error:
                assert hostile.one_line(error), str(error)

        def mutate(data: bytes, max_size: int, seed: int) -> bytes:
            draw = random.Random(seed)
            if flags.reader == "config" or draw.randrange(2):
                return atheris.Mutate(data, max_size)
            try:
                return hostile.READERS[flags.reader].damage(draw, data)[:max_size]
            except Exception:  # no longer of that structure
                return atheris.Mutate(data, max_size)

        atheris.Setup([sys.argv[0], *folders, *limits], test, custom_mutator=mutate)
        atheris.Fuzz()


def _file(reader: str, work: Path) -> Path:
    if reader == "config":
        return work
    folder = work / "again"
    folder.mkdir()
    return hostile.READERS[reader].place(folder)


def _config(data: bytes) -> None:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(document, dict):
        Config.from_dict(document)


if __name__ == "__main__":
    main()
