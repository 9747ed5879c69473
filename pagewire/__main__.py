"""`python -m pagewire`: the command line, where the `pagewire` script is not on the path."""

from pagewire.cli import main

main()
