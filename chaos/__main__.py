"""The commands `chaos`, `failpoints`, `simulate` and `clocks` of `./dev`.

All of them record a history, check it by the same rules, and print the same report.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser

from chaos import clocks, episodes, run
from chaos.simulation import script
from tests.services import MissingServiceError

#: The exit status if a required server is missing.
MISSING = 3
COMMANDS = {"chaos": run, "failpoints": episodes, "simulate": script, "clocks": clocks}


def main() -> int:
    parser = ArgumentParser(prog="chaos", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, module in COMMANDS.items():
        own = commands.add_parser(name, description=module.__doc__)
        module.add_options(own)
        own.set_defaults(main=module.main)
    options = parser.parse_args()
    try:
        status: int = options.main(options)
    except MissingServiceError as error:
        sys.stdout.write(f"not available on this machine: {error}\n")
        return MISSING
    return status


if __name__ == "__main__":
    sys.exit(main())
