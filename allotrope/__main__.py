"""`python -m allotrope`: the command line."""

from allotrope.cli import main

if __name__ == "__main__":
    main()
