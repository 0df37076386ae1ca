"""What this machine offers for a path: which transfer types work, and for each that does not, why and what helps.

>>> from torchdirect.doctor import diagnose
>>> report = diagnose("/data/checkpoints")                                  # doctest: +SKIP
>>> report.direct, report.problems                                          # doctest: +SKIP
"""

from torchdirect.doctor.diagnose import diagnose
from torchdirect.doctor.report import Finding, Level, Quality, Report, TransferVerdict

__all__ = ["Finding", "Level", "Quality", "Report", "TransferVerdict", "diagnose"]
