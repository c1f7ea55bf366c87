"""``python -m modelfence`` is the command ``modelfence``."""

import os
import signal
from types import FrameType

_STOPPED = 130


def main() -> None:
    """Run the command; Ctrl-C and SIGTERM end it with one line however early they come."""
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is default:
            signal.signal(number, _interrupt)
    try:
        from modelfence.cli.main import main as run

        run()
    except KeyboardInterrupt:
        _stop()


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Raise ``KeyboardInterrupt``, or end at once inside an import: libraries don't survive it there."""
    inner = frame
    while inner is not None:
        if inner.f_code.co_filename.startswith("<frozen importlib"):
            _stop()
        inner = inner.f_back
    raise KeyboardInterrupt


def _stop() -> None:
    os.write(2, b"modelfence: stopped\n")
    os._exit(_STOPPED)


if __name__ == "__main__":
    main()
