"""See the heads: record them, name what they do, show them."""

from polyhead.inspection.analysis import ablation
from polyhead.inspection.analysis.rollout import rollout
from polyhead.inspection.analysis.self_dominance import SelfDominance, self_dominance
from polyhead.inspection.analysis.subspaces import Variance, captured_variance, principal_angles, subspaces
from polyhead.inspection.capture.capture import Capture, CapturedHeads, capture
from polyhead.inspection.capture.head_metrics import METRICS, HeadMetrics
from polyhead.inspection.report.html_page import Page
from polyhead.inspection.report.report import report
from polyhead.inspection.roles import corpus
from polyhead.inspection.roles.find_roles import find, induction
from polyhead.inspection.roles.role_table import ROLES
from polyhead.inspection.roles.text_evidence import add_text_evidence, positional
from polyhead.inspection.roles.text_model import Subject

__all__ = [
    "METRICS",
    "ROLES",
    "Capture",
    "CapturedHeads",
    "HeadMetrics",
    "Page",
    "SelfDominance",
    "Subject",
    "Variance",
    "ablation",
    "add_text_evidence",
    "capture",
    "captured_variance",
    "corpus",
    "find",
    "induction",
    "positional",
    "principal_angles",
    "report",
    "rollout",
    "self_dominance",
    "subspaces",
]
