"""Checks records by running their settings again: ``python -m jaxrl_mini.reproduce RECORD.json ...``."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_mini.config import Config, UserError
from jaxrl_mini.machine import commandline, effort
from jaxrl_mini.objective.own import check_given, load_advantage

if TYPE_CHECKING:
    from jaxrl_mini.runs.audit import Finding

EXAMPLES = """\
examples:
  python -m jaxrl_mini.reproduce runs/table-grpo-seed-7.json
  python -m jaxrl_mini.reproduce --static results/*.json

First the record is checked against itself: its form, rates and intervals against counts, the history against the
settings. If that holds, and unless --static is said, its settings run again and every figure but the times is
compared: bit for bit where versions, processor, NumPy's dispatch and flags are the same; elsewhere, and where the
record does not state them, counts exactly and the rest within 5e-4 (times the figure where it is above 1). Should
rounding there make a policy draw another action, the two runs part, and that is reported too; a large learning rate or
many epochs make rounding grow.

Prints a JSON line per figure that differs, 20 of a record at most, then one per record. Exits with code 1 where a
record does not hold, 2 where a file is no record or its language model is not there.
"""
SHOWN = 20


def main(arguments: list[str]) -> int:
    """Parses, checks, prints."""
    parser = commandline.Parser("reproduce", description="Checks records.", epilog=EXAMPLES)
    parser.add_argument(
        "files", nargs="+", type=commandline.path, metavar="RECORD.json", help="a record, as train writes it"
    )
    parser.add_argument("--static", action="store_true", help="check the records against themselves, run nothing")
    commandline.add_advantage_flag(parser, "record")
    commandline.add_task_flag(parser, "record")
    commandline.add_device_flag(parser)
    flags = parser.parse_args(arguments)
    if flags.static and flags.advantage:
        raise UserError(f"--advantage {flags.advantage[0]} has no use with --static: leave it out")
    own = [load_advantage(one) for one in flags.advantage]
    commandline.use_device(flags.device)
    from jaxrl_mini.runs import audit, records

    loaded = []
    for path in flags.files:
        record = records.read(path)
        config, findings = audit.check_form(path, record)
        if not flags.static and config.model is not None and not Path(config.model).is_dir():
            raise UserError(f"record {path} needs the model {config.model!r}, which is no folder here: use --static")
        if not flags.static:
            records.check_task(f"record {path}", record, flags.task)
        loaded.append((path, record, config, findings))
    if not flags.static:
        check_given(own, [(f"record {path}", config.advantage) for path, _, config, _ in loaded], ", or use --static")
        commandline.say_how_long(sum(effort.alone(config) for *_, config, _ in loaded))
    all_ok = True
    for path, record, config, findings in loaded:
        findings = findings or audit.inconsistencies(record, config)
        compared: dict[str, Any] = {}
        if not findings and not flags.static:
            findings, compared = run_again(record, config)
        for one in findings[:SHOWN]:
            print(json.dumps({"file": path, **one._asdict(), "difference": one.difference}))
        ok = not findings
        print(json.dumps({"file": path, **compared, "findings": len(findings), "ok": ok}), flush=True)
        all_ok &= ok
    return 0 if all_ok else 1


def run_again(record: dict[str, Any], config: Config) -> tuple[list["Finding"], dict[str, Any]]:
    """Runs a record's settings and compares.

    Returns:
      The figures that differ; how many were compared, where the platforms differ, and the tolerance for that.
    """
    from jaxrl_mini.learning import loop
    from jaxrl_mini.runs import audit, records

    again = records.build(loop.run(config))
    elsewhere = audit.elsewhere(record, again["runtime"], config)
    tolerance = audit.TOLERANCE if elsewhere else 0.0
    compared = {"figures": len(audit.figures(again)), "tolerance": tolerance, "elsewhere": elsewhere}
    return audit.differences(record, again, tolerance), compared


if __name__ == "__main__":
    commandline.run_command(main)
