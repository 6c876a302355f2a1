"""`python -m pullback` is the command `pullback`."""

from .frontends.cli import main

main(prog_name="pullback")
