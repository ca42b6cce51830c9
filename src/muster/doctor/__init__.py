"""The doctor: tries an env out in processes of its own and says how to run many of it, or what is in the way."""

from muster.doctor.diagnosing import diagnose
from muster.doctor.diagnosis import Diagnosis, Finding, Measurements, Recommendation, Soak, SoakedQuantity, TriedLine

__all__ = ["Diagnosis", "Finding", "Measurements", "Recommendation", "Soak", "SoakedQuantity", "TriedLine", "diagnose"]
