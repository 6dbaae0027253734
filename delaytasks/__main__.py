"""`python -m delaytasks` is the command `delaytasks`."""

from delaytasks.cli.main import main

main()
