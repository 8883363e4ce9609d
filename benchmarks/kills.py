"""SIGKILL at random moments, resumed until done: ``python -m benchmarks.kills --kills 50``."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from kills import killed_and_resumed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="how many [50]")
    parser.add_argument("--seed", type=int, default=0, help="of the moments [0]")
    flags = parser.parse_args()
    iterations = 8 * flags.kills
    with tempfile.TemporaryDirectory() as name:
        folder, records = Path(name), []
        arguments = ("--iterations", iterations, "--output")
        kills = killed_and_resumed(
            folder / "kept", flags.kills, flags.seed, *arguments, folder / "0.json", "--checkpoint-every", 1
        )
        plain = [sys.executable, "-m", "jaxrl_mini.train", *map(str, arguments), str(folder / "1.json")]
        subprocess.run(plain, check=True, stdout=subprocess.DEVNULL)
        for number in range(2):
            record = json.loads((folder / f"{number}.json").read_text())
            records.append({part: value for part, value in record.items() if part != "timing"})
    print(json.dumps({"kills": kills, "iterations": iterations, "equal": records[0] == records[1]}))
    return 0 if records[0] == records[1] else 1


if __name__ == "__main__":
    sys.exit(main())
