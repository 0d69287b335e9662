"""How the processes of Allotrope write their log: one line per event, on standard error."""

from __future__ import annotations

import logging
import os

LEVEL_VARIABLE = "ALLOTROPE_LOGGING_LEVEL"


def configure_logging(level: str = "WARNING") -> None:
    """Send the log of this process to standard error, from `level` on or from what ALLOTROPE_LOGGING_LEVEL names."""
    level = os.environ.get(LEVEL_VARIABLE, level).upper()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("allotrope")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level if level in logging.getLevelNamesMapping() else "INFO")


def log_more() -> None:
    """Log what happens as well, here and in processes started from here; ALLOTROPE_LOGGING_LEVEL is obeyed if set."""
    os.environ.setdefault(LEVEL_VARIABLE, "INFO")
    configure_logging()


def one_line(text: str) -> str:
    """`text` on one line: a list of reasons becomes a sentence of them."""
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    reasons = "; ".join(line.removeprefix("- ") for line in rest)
    return f"{first} {reasons}" if reasons else first
