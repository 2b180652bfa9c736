"""Heads, items and nodes over the ranks of torch.distributed."""

from polyhead.distributed.agreement import check_agreement, fingerprint

__all__ = ["check_agreement", "fingerprint"]
