"""The binary mask: masked forward, selection, fold, packing, digest, preflight."""
