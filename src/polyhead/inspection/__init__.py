"""See the heads: record them, name what they do, show them."""

from polyhead.inspection.analysis.rollout import rollout
from polyhead.inspection.analysis.self_dominance import SelfDominance, self_dominance
from polyhead.inspection.analysis.subspaces import Variance, captured_variance, principal_angles, subspaces
from polyhead.inspection.capture.capture import Captured, Seen, capture
from polyhead.inspection.capture.head_metrics import METRICS, Kept
from polyhead.inspection.report.report import Page, report
from polyhead.inspection.roles.text import Text

__all__ = [
    "METRICS",
    "Captured",
    "Kept",
    "Page",
    "Seen",
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
