"""Domains: catalog, loading, image spec, splits."""
