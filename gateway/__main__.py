"""`python -m gateway`: the command line."""

import signal

# Who interrupts while this is imported is not to see where.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from gateway.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
