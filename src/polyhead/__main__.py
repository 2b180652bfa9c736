"""Run `polyhead` as `python -m polyhead`."""

from polyhead.cli.main import main

main()
