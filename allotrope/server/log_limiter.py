"""A log that a flood of equal errors cannot fill: one line a second for each kind of error, with a count.

It must not know what the errors are about.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

_SECONDS = 1.0
_MAX_KINDS = 256
# The packages beneath the server, whose loggers have no handler of their own.
_FOREIGN = ("uvicorn", "asyncio")
_LIMITED = "allotrope_log_limited"

_KindKey = tuple[str, int, str, str]


def limit_repeated_errors() -> None:
    """Let each kind of error appear once a second in this process's log, and its packages' errors go there too."""
    for handler in logging.getLogger("allotrope").handlers:
        handler.addFilter(RepeatFilter(handler))
        for name in _FOREIGN:
            logger = logging.getLogger(name)
            logger.handlers = [handler]
            logger.propagate = False
            logger.setLevel(logging.WARNING)


@dataclass
class _Kind:
    last: float
    held: list[logging.LogRecord] = field(default_factory=list)
    count: int = 0


class RepeatFilter(logging.Filter):
    """Passes the first error of a kind in each second, holds the others back and tells of them as one line.

    A kind is the logger, the level, the first line of the message before its arguments are filled in, and the class of
    the exception. Records below ERROR pass freely, but for those of foreign packages from WARNING on.
    """

    def __init__(self, handler: logging.Handler, seconds: float = _SECONDS) -> None:
        super().__init__()
        self._handler = handler
        self._seconds = seconds
        self._kinds: OrderedDict[_KindKey, _Kind] = OrderedDict()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether `record` is written now."""
        foreign = record.name.partition(".")[0] in _FOREIGN
        if hasattr(record, _LIMITED) or record.levelno < (logging.WARNING if foreign else logging.ERROR):
            return True
        key = _key(record)
        now = time.monotonic()
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None or (not kind.count and now - kind.last >= self._seconds):
                self._kinds[key] = _Kind(now)
                self._forget_oldest()
                return True
            kind.held = [record]
            kind.count += 1
            if kind.count == 1:
                timer = threading.Timer(max(0.0, kind.last + self._seconds - now), self._tell, (kind,))
                timer.daemon = True
                timer.start()
        return False

    def _tell(self, kind: _Kind) -> None:
        with self._lock:
            (record,), count = kind.held, kind.count
            kind.last, kind.held, kind.count = time.monotonic(), [], 0
        # The traceback was written with the first one.
        text = f"{record.getMessage().partition(chr(10))[0]} ({count} more of this kind)"
        told = logging.LogRecord(record.name, record.levelno, record.pathname, record.lineno, text, None, None)
        setattr(told, _LIMITED, True)
        self._handler.handle(told)

    def _forget_oldest(self) -> None:
        while len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)


def _key(record: logging.LogRecord) -> _KindKey:
    raised = record.exc_info[0] if record.exc_info else None
    return (record.name, record.levelno, str(record.msg).partition("\n")[0], raised.__name__ if raised else "")
