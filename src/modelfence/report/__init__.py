"""Figures and the self-contained HTML page."""
