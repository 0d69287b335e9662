"""How a plugin's entry point runs inside its host: it never raises, and whatever is wrong is one line."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable


def register_unless(
    host: str, switch: str, log: logging.Logger, refusals: Callable[[], list[str]], register: Callable[[], None]
) -> None:
    """Call `register` unless `switch` is set to 0 or `refusals` has a reason.

    `switch`: an environment variable. `log`: takes the line that says why the host runs its own models.
    """
    try:
        if is_switched_off(switch):
            return
        reasons = refusals()
        if reasons:
            raise RuntimeError("; ".join(reasons))
        register()
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        log.warning("allotrope: plugin off, %s runs its own models: %s. See `allotrope compat`.", host, text)


def is_switched_off(switch: str) -> bool:
    """Whether the user leaves the host as it is. Raises ValueError for a value of the variable that says neither."""
    wanted = os.environ.get(switch) or "1"
    if wanted not in ("0", "1"):
        raise ValueError(f"{switch}={wanted!r} is not understood; allowed: 0, 1")
    return wanted == "0"
