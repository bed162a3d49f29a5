"""``python -m consensus demo`` and ``python -m consensus check``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from consensus import check, demo


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
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:  # whoever was started has ended by now
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
