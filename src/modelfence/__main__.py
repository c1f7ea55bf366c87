"""``python -m modelfence`` is the command ``modelfence``."""

import os
import signal
from types import FrameType

_STOPPED = 130


def main() -> None:
    """Run the command; Ctrl-C ends it with one line however early it comes."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from modelfence.cli.main import main as run

        run()
    except KeyboardInterrupt:
        _stop()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise ``KeyboardInterrupt``, or end at once inside an import: libraries don't survive it there."""
    inner = frame
    while inner is not None:
        if inner.f_code.co_filename.startswith("<frozen importlib"):
            _stop()
        inner = inner.f_back
    signal.default_int_handler(number, frame)


def _stop() -> None:
    os.write(2, b"modelfence: stopped\n")
    os._exit(_STOPPED)


if __name__ == "__main__":
    main()
