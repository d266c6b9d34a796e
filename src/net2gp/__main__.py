"""`python -m net2gp`: the command line."""

from net2gp.cli import main

if __name__ == "__main__":
    main()
