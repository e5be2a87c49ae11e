import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("sglang") is not None:
    sys.path.append(str(Path(__file__).parents[3] / "benchmarks/sglang"))
    import absent_libraries

    absent_libraries.install()
