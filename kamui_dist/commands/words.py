"""Words of a command line that may stand before, between and after options: argparse takes those of one place only, and calls the
others unknown. (Its parse_intermixed_args is not for parsers with commands.)"""

from __future__ import annotations

import argparse
from typing import Any


def take_anywhere(parser: argparse.ArgumentParser, many: str, one: str | None = None) -> None:
    """many: the argument with nargs "*" or "+" that gets the words left over. one: an optional one before it, which comes first."""
    parse = parser.parse_known_args

    def anywhere(args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = parse(args, namespace)
        words = [word for word in unknown if not word.startswith("-")]
        if one is not None and getattr(found, one) is None and words:
            setattr(found, one, words.pop(0))
        setattr(found, many, [*getattr(found, many), *words])
        return found, [word for word in unknown if word.startswith("-")]

    parser.parse_known_args = anywhere  # type: ignore[method-assign]
