"""See the heads: record them, name what they do, show them."""

from polyhead.inspection.capture import Captured, Seen, capture
from polyhead.inspection.kept import METRICS, Kept
from polyhead.inspection.rollout import rollout

__all__ = ["METRICS", "Captured", "Kept", "Seen", "capture", "rollout"]
