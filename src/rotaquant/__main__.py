"""`python -m rotaquant`: the command line."""

from rotaquant.cli import main

if __name__ == "__main__":
    main()
