"""Ownership verification: a mark on images that an owner's model fails on, and the test of a claim."""
