"""Configures the log of Allotrope's processes: one line per event, on standard error."""

from __future__ import annotations

import logging
import os

from allotrope.errors import ConfigError

LEVEL_VARIABLE = "ALLOTROPE_LOGGING_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def configure_logging(level: str = "WARNING") -> None:
    """Write this process's log to standard error, from `level` on. ALLOTROPE_LOGGING_LEVEL overrides `level`.

    Raises `ConfigError` for a level that there is not.
    """
    level = os.environ.get(LEVEL_VARIABLE, level).upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"{LEVEL_VARIABLE}={level!r} is not known; allowed: {', '.join(_LEVELS)}.")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("allotrope")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level)


def log_info() -> None:
    """Log from INFO on, in this process and its children. ALLOTROPE_LOGGING_LEVEL overrides the level."""
    os.environ.setdefault(LEVEL_VARIABLE, "INFO")
    configure_logging()


def asked_for(name: str) -> logging.Logger:
    """The logger `name` below `allotrope`, for lines that an option asks for: it logs from INFO on at any level."""
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    return logger


def one_line(text: str) -> str:
    """`text` on one line. A list of reasons is joined by semicolons."""
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    reasons = "; ".join(line.removeprefix("- ") for line in rest)
    return f"{first} {reasons}" if reasons else first
