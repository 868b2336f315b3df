"""`python -m scrlearn` is `scr`."""

from scrlearn.cli import main

if __name__ == "__main__":
    main()
