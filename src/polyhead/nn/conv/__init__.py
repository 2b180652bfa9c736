"""Convolutions as attention, and back."""
