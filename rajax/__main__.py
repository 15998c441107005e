"""`python -m rajax`, the same as `rajax`."""

from rajax.cli import main

main()
