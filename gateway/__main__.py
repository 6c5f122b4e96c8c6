"""`python -m gateway`: the command line."""

from gateway.cli import main

if __name__ == "__main__":
    main()
