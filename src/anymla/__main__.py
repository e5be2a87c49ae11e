"""``python -m anymla``."""

from anymla.cli.main import main

main()
