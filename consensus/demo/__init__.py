"""``python -m consensus demo``: train on real text, break one rank, and see what every rank does.

A small character transformer is sharded with FSDP2 over CPU processes of this machine. After some
healthy steps a fault strikes one rank. The demo shows what every rank saw and when, compares every
parameter and optimizer state byte for byte, and checks each promise of this library by name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from consensus.demo._settings import FAULT_NAMES, OPTIMIZERS, Settings

__all__ = ["add_arguments", "main"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to ``parser``."""
    parser.add_argument(
        "--ranks", type=_at_least(2), default=4, metavar="N", help="processes (default: 4)"
    )
    parser.add_argument(
        "--steps",
        type=_at_least(2),
        default=50,
        metavar="N",
        help="healthy steps before the fault (default: 50)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="UTF-8 text to train on (default: the help topics that come with Python)",
    )
    parser.add_argument(
        "--fault",
        choices=FAULT_NAMES,
        default="closure",
        help="what happens to rank 1 (default: closure); 'none' only trains",
    )
    parser.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        default="muon",
        help="muon and gefen-muon step the hidden matrices, the others all (default: muon)",
    )
    parser.add_argument(
        "--unguarded",
        action="store_true",
        help="switch all agreements off and see what the fault does then: a hang that a short "
        "timeout ends, a crash, or silent divergence. Exits with 0 if that harm was seen",
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the demo on standard output; return the exit code.

    Returns:
        0 if every promise held, 1 if not, 2 if it could not start.
    """
    # Not at the top: FSDP2 takes a second to import, and neither --help nor check needs it.
    from consensus.demo._run import run_demo
    from consensus.demo._text import load_corpus
    from consensus.demo._worker import load_optimizer

    settings = Settings(
        ranks=arguments.ranks,
        steps=arguments.steps,
        fault=arguments.fault,
        optimizer=arguments.optimizer,
        unguarded=arguments.unguarded,
    )
    try:
        load_optimizer(settings.optimizer)
        corpus = load_corpus(arguments.text)
    except ValueError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    return run_demo(settings, corpus, sys.stdout)


def _at_least(minimum: int) -> Callable[[str], int]:
    """Return an argument type: an integer with a lower limit."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"expected an integer >= {minimum}; got {text!r}")
        return value

    return parse
