"""See the heads: record them, name what they do, show them."""

from polyhead.inspection.analysis.rollout import rollout
from polyhead.inspection.analysis.self_dominance import SelfDominance, self_dominance
from polyhead.inspection.analysis.subspaces import Variance, captured_variance, principal_angles, subspaces
from polyhead.inspection.capture.capture import CapturedHeads, Capture, capture
from polyhead.inspection.capture.head_metrics import METRICS, HeadMetrics
from polyhead.inspection.report.report import Page, report
from polyhead.inspection.roles.text import Text

__all__ = [
    "METRICS",
    "CapturedHeads",
    "HeadMetrics",
    "Page",
    "Capture",
    "SelfDominance",
    "Text",
    "Variance",
    "capture",
    "captured_variance",
    "principal_angles",
    "report",
    "rollout",
    "self_dominance",
    "subspaces",
]
