"""``python -m anymla``."""

import os
import sys

# Python has put the working directory first; see anymla.child_process.
if sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]

from anymla.cli.main import main

main()
