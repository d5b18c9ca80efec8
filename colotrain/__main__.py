"""`python -m colotrain`."""

from colotrain.cli.main import main

main()
