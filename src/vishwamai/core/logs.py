"""The log of the commands: one setup for all of them, as lines of text or as JSON objects, on standard error.

Lines of progress and errors of a command are records of the logger `vishwamai.command`. In text they are their message
alone; records of other loggers, such as the server's, begin with time and level.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
COMMAND = logging.getLogger("vishwamai.command")
"""The logger of what a command says."""

_LOGGERS = ("vishwamai", "uvicorn", "py.warnings")


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to `sys.stderr` as it is when a record comes: progress bars and tests replace it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


class TextLines(logging.Formatter):
    """A line of text for each record."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return getattr(record, "line", record.getMessage()) if record.name == COMMAND.name else super().format(record)


class JsonLines(logging.Formatter):
    """A JSON object for each record: `time`, `level`, `logger`, and `message` or the fields of `extra["record"]`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        details = getattr(record, "record", None)
        line |= {"message": record.getMessage()} if details is None else details
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str = "info", form: str = "text") -> None:
    """Sends the log of this package and of its server to standard error.

    Args:
      level: the least level that is written, one of `LEVELS`.
      form: one of `FORMATS`; Python's warnings are records of the log with "json".
    """
    handler = _StandardError()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
    logging.captureWarnings(form == "json")


@contextlib.contextmanager
def configured() -> Iterator[None]:
    """A block with the log of a command; the settings of its caller hold again behind it."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    configure()
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, (handlers, level, propagate) in zip(loggers, before):
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)


def say(message: str, line: str | None = None, level: int = logging.INFO) -> None:
    """A record of the command.

    Args:
      message: its text.
      line: the line in the form "text"; the message by default.
      level: a level of `logging`.
    """
    if not logging.getLogger("vishwamai").handlers:  # a part of a command, called from elsewhere
        with configured():
            say(message, line, level)
        return
    COMMAND.log(level, "%s", message, extra={} if line is None else {"line": line})


def report(command: str, message: str, level: int = logging.WARNING) -> None:
    """A record with the outcome of a command: an error, or what an interrupt leaves."""
    say(message, f"vishwamai {command}: {message}", level)


def shows_bars() -> bool:
    """Whether bars and lines that change may be drawn: not between JSON objects, nor where lines of progress are off.

    >>> with configured():
    ...     configure("warning")
    ...     shows_bars()
    False
    """
    handlers = logging.getLogger("vishwamai").handlers
    as_json = any(isinstance(handler.formatter, JsonLines) for handler in handlers)
    return not as_json and (not handlers or COMMAND.isEnabledFor(logging.INFO))
