"""An independent DeepSeek-V4 in float64, dense and unpaged, to judge runs of the real one.

Written from the published mathematics; it shares no code with the operations and layers it judges.
"""

from anymla.testing.oracle.check import RunReport, check_run
from anymla.testing.oracle.dspark import DSparkOracle, OracleBlock
from anymla.testing.oracle.model import OracleModel, OracleResult
from anymla.testing.oracle.recording import RecordedModel, Recorder, Recording

__all__ = [
    "DSparkOracle",
    "OracleBlock",
    "OracleModel",
    "OracleResult",
    "RecordedModel",
    "Recorder",
    "Recording",
    "RunReport",
    "check_run",
]
