"""`python -m polyhead` is `polyhead`."""

from polyhead.cli.main import main

main()
