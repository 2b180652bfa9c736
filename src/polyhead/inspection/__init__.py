"""See the heads: record them, name what they do, show them."""

from polyhead.inspection.capture import Captured, Seen, capture
from polyhead.inspection.kept import METRICS, Kept
from polyhead.inspection.report import Page, report
from polyhead.inspection.rollout import rollout
from polyhead.inspection.self_dominance import SelfDominance, self_dominance
from polyhead.inspection.subspaces import Variance, captured_variance, principal_angles, subspaces
from polyhead.inspection.words import Text

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
