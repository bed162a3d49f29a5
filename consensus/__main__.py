"""``python -m consensus demo``, ``python -m consensus check``, ``... merge-traces``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from consensus import check, demo, log


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m consensus")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module, what in (
        ("demo", demo, "train on real text, break one rank, and see what every rank does"),
        ("check", check, "report how this job's ranks agree, and how long one vote takes"),
    ):
        command = commands.add_parser(
            name, help=what, description=(module.__doc__ or "").replace("``", "")
        )
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
        command.set_defaults(run=module.main)
    merge = commands.add_parser(
        "merge-traces", help="put the agreements that ranks dumped into one trace, on one clock"
    )
    merge.add_argument("output", help="the Chrome trace to write")
    merge.add_argument("traces", nargs="+", help="what consensus.log.dump wrote, one file a rank")
    merge.set_defaults(run=_merge_traces)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:  # whoever was started has ended by now
        return 130
    return code


def _merge_traces(arguments: argparse.Namespace) -> int:
    try:
        clocks = log.merge(arguments.traces, arguments.output)
    except (OSError, ValueError) as error:
        print(f"merge-traces: {error}", file=sys.stderr)
        return 1
    for name, clock in zip(arguments.traces, clocks, strict=True):
        moved, spread = clock.offset_ns / 1000, clock.spread_ns / 1000
        by = f"clock moved by {moved:.1f} us, give or take {spread:.1f}"
        print(f"{name}: {by}, by {clock.agreements} shared agreements")
    return 0


if __name__ == "__main__":
    sys.exit(main())
