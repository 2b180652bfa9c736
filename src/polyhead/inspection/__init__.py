"""See the heads: record them, name what they do, show them."""

from polyhead.inspection.analysis import ablation
from polyhead.inspection.analysis.rollout import rollout
from polyhead.inspection.analysis.self_dominance import SelfDominance, self_dominance
from polyhead.inspection.analysis.subspaces import CapturedVariance, captured_variance, plot_subspaces, principal_angles
from polyhead.inspection.capture.capture import Capture, CapturedHeads, capture
from polyhead.inspection.capture.head_metrics import METRICS, HeadMetrics
from polyhead.inspection.report.html_page import Page
from polyhead.inspection.report.report import report
from polyhead.inspection.roles import corpus
from polyhead.inspection.roles.find_roles import find_induction_heads, find_roles
from polyhead.inspection.roles.role_table import ROLES
from polyhead.inspection.roles.text_evidence import add_text_evidence, find_roles_in_text
from polyhead.inspection.roles.text_model import TextModel

__all__ = [
    "METRICS",
    "ROLES",
    "Capture",
    "CapturedHeads",
    "CapturedVariance",
    "HeadMetrics",
    "Page",
    "SelfDominance",
    "TextModel",
    "ablation",
    "add_text_evidence",
    "capture",
    "captured_variance",
    "corpus",
    "find_induction_heads",
    "find_roles",
    "find_roles_in_text",
    "plot_subspaces",
    "principal_angles",
    "report",
    "rollout",
    "self_dominance",
]
