"""Record the attention of any PyTorch model."""

from polyhead.inspection.capture.capture import Capture, CapturedHeads, capture
from polyhead.inspection.capture.head_metrics import METRICS, HeadMetrics

__all__ = ["METRICS", "Capture", "CapturedHeads", "HeadMetrics", "capture"]
